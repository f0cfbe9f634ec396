%% @doc One run of a host while something of it is to be uploaded or purged: carries out what the machine in the core decides.
%%
%% Never waits: calls of the host and walks over the bucket run in a process of their own, one at a time, and requests to the store answer with messages.
%% The body of a segment is held by the process that has read it, and then by the request alone; this process never sees it.
-module(rabbitmq_stream_s3_history_run).
-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").

-export([start_link/1, tell/2, permit/2, leave/1]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2, terminate/2]).
-export_type([options/0]).

-define(MIB_64, 67108864).

-type options() :: #{
    server := pid(),
    run := rabbitmq_stream_s3_history_source:run(),
    source := rabbitmq_stream_s3_history_source:source(),
    %% Where it writes its backlog: `{Run, Segments, Bytes, OldestMs | undefined, Phase}'.
    table := ets:table(),
    %% Delays, and the wait of a purge.
    machine := map()
}.
-record(state, {
    server :: pid(),
    run :: binary(),
    source :: rabbitmq_stream_s3_history_source:source(),
    table :: ets:table(),
    machine :: rabbitmq_stream_s3_nif:history_machine(),
    %% The process that works for an attempt.
    worker = none :: none | {pid(), reference(), Attempt :: pos_integer()},
    %% The request to the store, with the timer that gives it up.
    request = none :: none | {reference(), Event :: atom(), Attempt :: pos_integer(), Timer :: reference()},
    wake = none :: none | reference(),
    %% Of the body that was read.
    body_bytes = 0 :: non_neg_integer(),
    %% Messages of the server that were taken in.
    heard = 0 :: non_neg_integer(),
    cause = none :: none | binary()
}).

%% @doc Starts it, with nothing known of the run.
-spec start_link(options()) -> {ok, pid()} | ignore | {error, term()}.
start_link(Options) ->
    gen_server:start_link(?MODULE, Options, []).

%% @doc Tells it what happened: an event of the machine that answers nothing.
-spec tell(pid(), {sealed, non_neg_integer(), integer()} | {rescanned, rabbitmq_stream_s3_history_scan:listing()} | purge) -> ok.
tell(Pid, Event) ->
    gen_server:cast(Pid, {event, Event}).

%% @doc Gives it the permit that it asked for.
-spec permit(pid(), Attempt :: pos_integer()) -> ok.
permit(Pid, Attempt) ->
    gen_server:cast(Pid, {permit, Attempt}).

%% @doc Lets it end, after it has said that it is idle.
-spec leave(pid()) -> ok.
leave(Pid) ->
    gen_server:cast(Pid, leave).

%% @private
init(#{server := Server, run := Run, source := Source, table := Table, machine := Options}) ->
    process_flag(trap_exit, true),
    Machine = rabbitmq_stream_s3_nif:history_new(Options),
    {ok, #state{server = Server, run = Run, source = Source, table = Table, machine = Machine}}.

%% @private
handle_call(Request, _From, State) ->
    {stop, {unexpected_call, Request}, State}.

%% @private
handle_cast({event, Event}, #state{heard = Heard} = State) ->
    {noreply, event(Event, State#state{heard = Heard + 1})};
handle_cast({permit, Attempt}, State) ->
    {noreply, event({permit, Attempt}, State)};
handle_cast(leave, State) ->
    {stop, normal, State}.

%% @private
handle_info({answer, Pid, Attempt, Answer}, #state{worker = {Pid, _, Attempt}} = State) ->
    {noreply, answered(Attempt, Answer, State)};
handle_info({'DOWN', Monitor, process, _Pid, Reason}, #state{worker = {_, Monitor, Attempt}} = State0) ->
    State = State0#state{worker = none},
    case Reason of
        normal -> {noreply, State};
        _ -> {noreply, failed(Attempt, {retryable, {crashed, Reason}}, State)}
    end;
handle_info({store_result, Ref, Result}, #state{request = {Ref, Event, Attempt, Timer}} = State0) ->
    _ = erlang:cancel_timer(Timer),
    State = State0#state{request = none},
    case Result of
        {ok, Value} -> {noreply, event({Event, Attempt, Value}, State)};
        {error, Error} -> {noreply, failed(Attempt, {store, Error}, State)}
    end;
handle_info({expired, Ref}, #state{request = {Ref, _Event, Attempt, _}} = State) ->
    ok = rabbitmq_stream_s3_nif:store_cancel([Ref]),
    Error = {transient, #{op => put, reason => timeout, message => <<"the store did not answer in time">>}},
    {noreply, failed(Attempt, {store, Error}, State#state{request = none})};
handle_info(wake, State) ->
    {noreply, event(tick, State#state{wake = none})};
handle_info({'EXIT', Server, Reason}, #state{server = Server} = State) ->
    {stop, Reason, State};
handle_info(_Stale, State) ->
    {noreply, State}.

%% @private
%% Nothing that this process has begun goes on without it.
terminate(_Reason, State) ->
    _ = abort(State),
    ok.

%% --- the machine -----------------------------------------------------------------------------------------------------

event(Event, #state{machine = Machine0} = State0) ->
    {Machine, Effects} = rabbitmq_stream_s3_nif:history_handle(Machine0, now_ms(), Event),
    State = lists:foldl(fun perform/2, State0#state{machine = Machine}, Effects),
    tell_server(State).

tell_server(#state{machine = Machine, table = Table, run = Run, server = Server, heard = Heard} = State) ->
    #{segments := Segments, bytes := Bytes, oldest_ms := Oldest, phase := Phase, is_idle := Idle} =
        rabbitmq_stream_s3_nif:history_status(Machine),
    true = ets:insert(Table, {Run, Segments, Bytes, Oldest, Phase}),
    _ = Idle andalso gen_server:cast(Server, {idle, self(), Heard}),
    State.

failed(Attempt, Failure, State0) ->
    {Class, Reason} = class(Failure),
    State = complain(Class, Reason, State0),
    event({failed, Attempt, Class, rand:uniform()}, State).

class({store, {_Kind, #{reason := Reason}} = Error}) -> {rabbitmq_stream_s3_nif:error_class(Reason), {store, Error}};
class({retryable, Reason}) -> {transient, Reason};
class({permanent, Reason}) -> {permanent, Reason}.

%% What passes is told when it begins and when its cause changes; what does not, each time: there is one time a scan.
complain(permanent, Reason, #state{run = Run} = State) ->
    ?LOG_ERROR("history of run ~ts: ~ts; this run waits for the next scan", [Run, text(Reason)], meta(Run)),
    State#state{cause = none};
complain(_Passing, Reason, #state{run = Run, cause = Cause} = State) ->
    case text(Reason) of
        Cause ->
            State;
        Text ->
            ?LOG_WARNING("history of run ~ts: an upload fails and is tried again: ~ts", [Run, Text], meta(Run)),
            State#state{cause = Text}
    end.

text(Reason) ->
    rabbitmq_stream_s3_problems:text(Reason).

meta(Run) ->
    #{domain => [rabbitmq, stream_s3], run => Run}.

%% Of a clock that never goes back, from 0 at the start of this VM.
now_ms() ->
    erlang:convert_time_unit(erlang:monotonic_time() - erlang:system_info(start_time), native, millisecond).

%% --- effects ---------------------------------------------------------------------------------------------------------

%% No catch-all: an effect that nobody performs must crash this process, not stall the run.
perform({list, Attempt}, #state{source = Source, run = Run} = State) ->
    work(Attempt, fun() -> rabbitmq_stream_s3_history_scan:run(Source, Run) end, State);
perform({ask_permit, Attempt}, #state{server = Server} = State) ->
    ok = gen_server:cast(Server, {ask_permit, self(), Attempt}),
    State;
perform(give_permit_back, #state{server = Server} = State) ->
    ok = gen_server:cast(Server, {give_permit_back, self()}),
    State;
perform({read, Attempt, Seq}, #state{run = Run, source = Source} = State) ->
    Owner = self(),
    spawn_worker(Attempt, fun() -> read(Owner, Source, Run, Seq, Attempt) end, State);
perform({put, Attempt, _Seq, Replaces}, #state{worker = {Reader, _, _}, body_bytes = Bytes} = State) ->
    Ref = make_ref(),
    Reader ! {put, Ref, Replaces},
    request(Ref, put, Attempt, Bytes, State);
perform({examine, Attempt, Seq, Crc, PayloadLen}, #state{run = Run} = State) ->
    Ref = make_ref(),
    ok = rabbitmq_stream_s3_nif:history_examine(rabbitmq_stream_s3_store:handle(), self(), Ref, {Run, Seq}, Crc, PayloadLen),
    request(Ref, examined, Attempt, PayloadLen, State);
perform({report_mismatch, Seq}, #state{run = Run} = State) ->
    ok = rabbitmq_stream_s3_counters:add(history, checksum_mismatches),
    Key = rabbitmq_stream_s3_store:history_key(Run, Seq),
    ?LOG_ERROR("history of run ~ts: ~ts is not what this segment must be, and is replaced", [Run, Key], meta(Run)),
    State;
perform({acknowledge, Attempt, Seq, Crc, Size, Stored}, #state{run = Run, source = Source} = State) ->
    Key = rabbitmq_stream_s3_store:history_key(Run, Seq),
    Acknowledgment = #{run => Run, seq => Seq, key => Key, checksum => Crc, size => Size, stored => Stored},
    work(Attempt, fun() -> rabbitmq_stream_s3_history_source:call(Source, acknowledge, [Acknowledgment]) end, succeeds(State));
perform({wake_at, Ms}, #state{wake = Old} = State) ->
    _ = Old =/= none andalso erlang:cancel_timer(Old),
    State#state{wake = erlang:send_after(max(0, Ms - now_ms()), self(), wake)};
perform({count, Outcome, Bytes}, State) ->
    ok = rabbitmq_stream_s3_counters:add(history, Outcome),
    ok = rabbitmq_stream_s3_counters:add(history, bytes, Bytes),
    State;
perform(abort, State) ->
    abort(State);
perform({catalog, Attempt}, #state{run = Run, source = Source} = State) ->
    work(Attempt, fun() -> rabbitmq_stream_s3_history_scan:had_segments(Source, Run) end, State);
perform({delete, Attempt}, #state{run = Run, source = Source} = State) ->
    work(Attempt, fun() -> rabbitmq_stream_s3_history_scan:purge_by_key(Source, Run) end, State);
perform({sweep, Attempt}, #state{run = Run} = State) ->
    work(Attempt, fun() -> stored(rabbitmq_stream_s3_history_scan:purge_by_prefix(Run)) end, State);
perform({tell_host, Attempt}, #state{run = Run, source = Source} = State) ->
    work(Attempt, fun() -> rabbitmq_stream_s3_history_source:call(Source, purged, [Run]) end, State).

stored(ok) -> ok;
stored({error, Error}) -> {error, {store, Error}}.

succeeds(#state{cause = none} = State) ->
    State;
succeeds(#state{run = Run} = State) ->
    ?LOG_NOTICE("history of run ~ts: uploads succeed again", [Run], meta(Run)),
    State#state{cause = none}.

%% As for the transfer of a fragment of that size.
request(Ref, Event, Attempt, Bytes, #state{request = none} = State) ->
    Deadline = round(rabbitmq_stream_s3_config:get(transfer_deadline_ms) * max(1, Bytes / ?MIB_64)),
    State#state{request = {Ref, Event, Attempt, erlang:send_after(Deadline, self(), {expired, Ref})}}.

work(Attempt, Fun, State) ->
    Owner = self(),
    spawn_worker(Attempt, fun() -> Owner ! {answer, self(), Attempt, Fun()} end, State).

%% The worker before has answered already, and ends by itself.
spawn_worker(Attempt, Fun, #state{worker = Old} = State) ->
    _ = is_tuple(Old) andalso erlang:demonitor(element(2, Old), [flush]),
    {Pid, Monitor} = spawn_opt(Fun, [link, monitor]),
    State#state{worker = {Pid, Monitor, Attempt}}.

answered(Attempt, {body, Bytes}, State) -> event({read, Attempt, ready}, State#state{body_bytes = Bytes});
answered(Attempt, not_sealed, State) -> event({read, Attempt, not_sealed}, State);
answered(Attempt, gone, State) -> event({gone, Attempt}, State);
answered(Attempt, {error, {store, Error}}, State) -> failed(Attempt, {store, Error}, State);
answered(Attempt, {error, {Kind, Reason}}, State) when Kind =:= retryable; Kind =:= permanent -> failed(Attempt, {Kind, Reason}, State);
answered(Attempt, Answer, #state{machine = Machine} = State) ->
    #{phase := Phase} = rabbitmq_stream_s3_nif:history_status(Machine),
    case {Phase, Answer} of
        {listing, {ok, Listing}} -> event({listed, Attempt, Listing}, State);
        {acknowledging, ok} -> event({acknowledged, Attempt}, State);
        {purging, {had_segments, HadSegments}} -> event({catalog, Attempt, HadSegments}, State);
        {purging, ok} -> event({done, Attempt}, State);
        _ -> failed(Attempt, {permanent, {bad_answer, Phase, Answer}}, State)
    end.

%% Waits for the worker's end, so that it cannot hand over its body behind our back.
abort(#state{worker = Worker, request = Request} = State) ->
    case Worker of
        none ->
            ok;
        {Pid, Monitor, _} ->
            exit(Pid, kill),
            receive
                {'DOWN', Monitor, process, Pid, _} -> ok
            end
    end,
    case Request of
        none ->
            ok;
        {Ref, _, _, Timer} ->
            _ = erlang:cancel_timer(Timer),
            ok = rabbitmq_stream_s3_nif:store_cancel([Ref])
    end,
    State#state{worker = none, request = none}.

%% --- in the process that reads ---------------------------------------------------------------------------------------

%% Holds the body until it is told to put it, hands it over, and ends: then the request alone holds it.
read(Owner, Source, Run, Seq, Attempt) ->
    case rabbitmq_stream_s3_history_source:call(Source, read_segment, [Run, Seq]) of
        {ok, Data} ->
            case body(Data) of
                {ok, Body} ->
                    Owner ! {answer, self(), Attempt, {body, byte_size(Body)}},
                    receive
                        {put, Ref, Replaces} ->
                            ok = put(Owner, Ref, {Run, Seq}, Body, Replaces),
                            %% What this process has kept of it goes now, and not at some time.
                            true = erlang:garbage_collect(),
                            ok
                    end;
                error ->
                    Owner ! {answer, self(), Attempt, {error, {permanent, {bad_answer, read_segment, not_iodata}}}}
            end;
        Other ->
            Owner ! {answer, self(), Attempt, Other}
    end.

put(Owner, Ref, Segment, Body, Replaces) ->
    try
        ok = rabbitmq_stream_s3_nif:history_put(rabbitmq_stream_s3_store:handle(), Owner, Ref, Segment, Body, Replaces)
    catch
        error:{badarg, Text} ->
            %% It cannot be written down.
            Owner ! {store_result, Ref, {error, {invalid, #{op => put, reason => other, message => Text}}}},
            ok
    end.

body(Data) when is_binary(Data) ->
    {ok, Data};
body(Data) ->
    try
        {ok, iolist_to_binary(Data)}
    catch
        error:badarg -> error
    end.
