%% @doc The uploads of one stream: which attempt belongs to which fragment, when an attempt is given up, and when the next
%% one starts.
%%
%% The core knows a fragment by its Ref. Towards the governor each attempt has a ref of its own, so that an answer tells
%% which attempt it is of. The limit of an attempt runs from its admission, because waiting for a turn is no stall.
%%
%% Where the store answers nothing or that it is out of order, one fragment is tried for all: a store that is away is asked once in a while,
%% not once for each fragment, and the writer keeps its processors. The others begin, or go on, with the first sign of life.
%%
%% A state belongs to one reader process: messages come to it, and {@link handle/2} says whether they are of this module.
-module(rabbitmq_stream_s3_replica_reader_transfers).

-export([new/1, submit/4, retry/4, give_up/2, any_before/2, handle/2, cancel_all/1, info/1]).
-export_type([state/0, outcome/0]).

%% A deadline of this size holds for fragments up to 64 MiB, and grows in proportion beyond.
-define(DEADLINE_UNIT, 67108864).

-type core_ref() :: term().
-type attempt() :: reference().
-type meta() :: rabbitmq_stream_s3_fragment_assembly:meta().

-record(fragment, {
    dir :: file:filename_all(),
    meta :: meta(),
    %% How many attempts have failed.
    failures = 0 :: non_neg_integer(),
    %% The last failure.
    cause = none :: none | term(),
    %% The newest attempt; none while the next one waits for its time.
    current = none :: none | attempt(),
    admitted = false :: boolean(),
    %% Whether it waits for what becomes of the one that is tried for all.
    held = false :: boolean(),
    %% Until the newest attempt is given up, or until the next one starts.
    timer = none :: none | reference()
}).
-record(state, {
    stream :: binary(),
    fragments = #{} :: #{core_ref() => #fragment{}},
    %% All attempts whose result may still be of use, the given-up ones among them.
    attempts = #{} :: #{attempt() => core_ref()},
    %% The fragment that is tried for all, while the store is away.
    probe = none :: none | core_ref()
}).
-opaque state() :: #state{}.
%% The last one: the message is not of this module.
-type outcome() ::
    none
    | {stored, core_ref(), Uid :: 0..16#FFFFFFFF, meta(), Failures :: non_neg_integer()}
    | {failed, core_ref(), Reason :: term(), meta(), Failures :: pos_integer()}
    | not_mine.

%% @doc No uploads.
-spec new(StreamId :: binary()) -> state().
new(StreamId) ->
    #state{stream = StreamId}.

%% @doc Submits the first attempt for a fragment, once the store is not away.
-spec submit(core_ref(), file:filename_all(), meta(), state()) -> state().
submit(CoreRef, Dir, Meta, #state{probe = none} = State) ->
    attempt(CoreRef, #fragment{dir = Dir, meta = Meta}, State);
submit(CoreRef, Dir, Meta, State) ->
    keep(CoreRef, #fragment{dir = Dir, meta = Meta, held = true}, State).

%% @doc Submits another attempt after a failed one, as soon as the failure allows: the delay grows with the number of failures. Of those
%% that fail because the store is away only one is tried.
-spec retry(core_ref(), file:filename_all(), meta(), state()) -> state().
retry(CoreRef, Dir, Meta, #state{fragments = Fragments, probe = Probe} = State) ->
    #{CoreRef := #fragment{failures = Failures, cause = Reason} = Fragment0} = Fragments,
    Fragment = Fragment0#fragment{dir = Dir, meta = Meta},
    case Probe =:= none orelse Probe =:= CoreRef orelse rabbitmq_stream_s3_nif:outlook(Reason, Failures) =:= there of
        true -> retry(CoreRef, Fragment, State);
        false -> keep(CoreRef, Fragment#fragment{held = true}, State)
    end.

retry(CoreRef, #fragment{failures = Failures, cause = Reason} = Fragment, State) ->
    case rabbitmq_stream_s3_replica_reader_tasks:retry_delay(Reason, Failures) of
        0 ->
            attempt(CoreRef, Fragment, State);
        Delay ->
            Timer = erlang:start_timer(Delay, self(), {next_attempt, CoreRef}),
            keep(CoreRef, Fragment#fragment{timer = Timer}, State)
    end.

attempt(CoreRef, #fragment{dir = Dir, meta = Meta} = Fragment, #state{stream = StreamId, attempts = Attempts} = State) ->
    Attempt = make_ref(),
    Work = {fragment, rabbitmq_stream_s3_store:handle(), StreamId, Dir, Meta},
    ok = rabbitmq_stream_s3_governor:submit(Work, maps:get(size, Meta), self(), Attempt),
    keep(
        CoreRef,
        Fragment#fragment{current = Attempt, admitted = false, held = false, timer = none},
        State#state{attempts = Attempts#{Attempt => CoreRef}}
    ).

%% @doc Gives the upload of one fragment up: no attempt can succeed any more.
-spec give_up(core_ref(), state()) -> state().
give_up(CoreRef, #state{fragments = Fragments} = State) ->
    #{CoreRef := Fragment} = Fragments,
    probe_ended(CoreRef, drop(CoreRef, Fragment, State)).

%% @doc Whether a fragment in front of an offset is on its way.
-spec any_before(Offset :: non_neg_integer(), state()) -> boolean().
any_before(Offset, #state{fragments = Fragments}) ->
    lists:any(fun(#fragment{meta = #{first_offset := First}}) -> First < Offset end, maps:values(Fragments)).

%% @doc Takes a message of the governor or of one of the timers here.
-spec handle(term(), state()) -> {outcome(), state()}.
handle({transfer_admitted, Attempt}, #state{attempts = Attempts} = State) ->
    case Attempts of
        #{Attempt := CoreRef} -> {none, admitted(Attempt, CoreRef, State)};
        #{} -> {none, State}
    end;
handle({transfer_result, Attempt, Result}, #state{attempts = Attempts} = State0) ->
    case maps:take(Attempt, Attempts) of
        {CoreRef, Rest} -> result(Result, Attempt, CoreRef, State0#state{attempts = Rest});
        error -> {none, State0}
    end;
handle({timeout, Timer, {deadline, CoreRef}}, State) ->
    case State#state.fragments of
        #{CoreRef := #fragment{timer = Timer, current = Attempt} = Fragment} ->
            %% It stays in `attempts': if it did succeed, that counts.
            ok = cancel([Attempt]),
            failed(timeout, CoreRef, Fragment, State);
        #{} ->
            {none, State}
    end;
handle({timeout, Timer, {next_attempt, CoreRef}}, State) ->
    case State#state.fragments of
        #{CoreRef := #fragment{timer = Timer} = Fragment} -> {none, attempt(CoreRef, Fragment, State)};
        #{} -> {none, State}
    end;
handle(_Message, State) ->
    {not_mine, State}.

admitted(Attempt, CoreRef, #state{fragments = Fragments} = State) ->
    case Fragments of
        #{CoreRef := #fragment{current = Attempt, admitted = false, meta = #{size := Size}} = Fragment} ->
            Limit = rabbitmq_stream_s3_config:get(transfer_deadline_ms),
            Ms = max(Limit, ceil(Limit * Size / ?DEADLINE_UNIT)),
            Timer = erlang:start_timer(min(Ms, 16#FFFFFFFF), self(), {deadline, CoreRef}),
            keep(CoreRef, Fragment#fragment{admitted = true, timer = Timer}, State);
        #{} ->
            State
    end.

result({ok, Uid}, _Attempt, CoreRef, State0) ->
    #{CoreRef := #fragment{meta = Meta, failures = Failures} = Fragment} = State0#state.fragments,
    {{stored, CoreRef, Uid, Meta, Failures}, release(drop(CoreRef, Fragment, State0))};
result({error, Reason}, Attempt, CoreRef, State) ->
    case State#state.fragments of
        #{CoreRef := #fragment{current = Attempt} = Fragment} -> failed(Reason, CoreRef, Fragment, State);
        %% Of an attempt that was given up only success counts.
        #{} -> {none, State}
    end.

failed(Reason, CoreRef, #fragment{failures = Failures, meta = Meta} = Fragment, State) ->
    ok = stop_timer(Fragment),
    Failed = Fragment#fragment{failures = Failures + 1, cause = Reason, current = none, admitted = false, timer = none},
    {{failed, CoreRef, Reason, Meta, Failures + 1}, looked_out(Reason, Failures + 1, CoreRef, keep(CoreRef, Failed, State))}.

looked_out(Reason, Failures, CoreRef, #state{probe = Probe} = State) ->
    case rabbitmq_stream_s3_nif:outlook(Reason, Failures) of
        away when Probe =:= none -> State#state{probe = CoreRef};
        there -> probe_ended(CoreRef, State);
        _ -> State
    end.

probe_ended(CoreRef, #state{probe = CoreRef} = State) -> release(State);
probe_ended(_Other, State) -> State.

%% In the order in which they were cut: that is the one in which they can be applied.
release(#state{fragments = Fragments} = State) ->
    Held = [{First, Ref, Fragment} || {Ref, #fragment{held = true, meta = #{first_offset := First}} = Fragment} <- maps:to_list(Fragments)],
    lists:foldl(fun({_, Ref, Fragment}, Acc) -> attempt(Ref, Fragment, Acc) end, State#state{probe = none}, lists:sort(Held)).

%% All other attempts are superfluous.
drop(CoreRef, Fragment, #state{fragments = Fragments, attempts = Attempts} = State) ->
    ok = stop_timer(Fragment),
    {Others, Rest} = lists:partition(fun({_, Ref}) -> Ref =:= CoreRef end, maps:to_list(Attempts)),
    ok = cancel([Attempt || {Attempt, _} <- Others]),
    State#state{fragments = maps:remove(CoreRef, Fragments), attempts = maps:from_list(Rest)}.

%% @doc Gives all uploads up. Messages that are still to come will not be of any use to {@link handle/2}.
-spec cancel_all(state()) -> state().
cancel_all(#state{stream = StreamId, fragments = Fragments, attempts = Attempts}) ->
    lists:foreach(fun stop_timer/1, maps:values(Fragments)),
    ok = cancel(maps:keys(Attempts)),
    new(StreamId).

cancel([]) ->
    ok;
cancel(Attempts) ->
    try
        rabbitmq_stream_s3_governor:cancel(Attempts)
    catch
        %% No governor: what it had has ended with it, and so will this process.
        error:badarg -> ok
    end.

%% @doc How many fragments are on their way, their bytes, and where the oldest one that fails stands, with its last failure.
-spec info(state()) ->
    #{in_flight := non_neg_integer(), bytes := non_neg_integer(), stalled := none | {Offset :: non_neg_integer(), Reason :: term()}}.
info(#state{fragments = Fragments}) ->
    All = maps:values(Fragments),
    Stalled = lists:sort([{First, Cause} || #fragment{meta = #{first_offset := First}, cause = Cause} <- All, Cause =/= none]),
    #{
        in_flight => length(All),
        bytes => lists:sum([Size || #fragment{meta = #{size := Size}} <- All]),
        stalled => case Stalled of [] -> none; [Oldest | _] -> Oldest end
    }.

keep(CoreRef, Fragment, #state{fragments = Fragments} = State) ->
    State#state{fragments = Fragments#{CoreRef => Fragment}}.

stop_timer(#fragment{timer = none}) ->
    ok;
stop_timer(#fragment{timer = Timer}) ->
    _ = erlang:cancel_timer(Timer),
    ok.
