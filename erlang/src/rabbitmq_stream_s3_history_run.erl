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
%% What a worker does: asks this function of the host, or works on the bucket.
-type job() :: pending | read_segment | acknowledge | catalog | purged | bucket.
%% The process that works for an attempt.
-record(worker, {
    pid :: pid(),
    monitor :: reference(),
    attempt :: pos_integer(),
    job :: job(),
    %% Gives it up where others wait for its answer; it has answered where there is none.
    limit = none :: none | reference()
}).
-record(state, {
    server :: pid(),
    run :: binary(),
    source :: rabbitmq_stream_s3_history_source:source(),
    table :: ets:table(),
    machine :: rabbitmq_stream_s3_nif:history_machine(),
    worker = none :: none | #worker{},
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
handle_info({answer, Pid, Answer}, #state{worker = #worker{pid = Pid, attempt = Attempt, job = Job} = Worker} = State) ->
    {noreply, answered(Job, Attempt, Answer, State#state{worker = unlimited(Worker)})};
handle_info({body, Pid, Bytes}, #state{worker = #worker{pid = Pid, attempt = Attempt} = Worker} = State) ->
    {noreply, event({read, Attempt, ready}, State#state{worker = unlimited(Worker), body_bytes = Bytes})};
handle_info({timeout, Limit, Ms}, #state{worker = #worker{limit = Limit, attempt = Attempt, job = Job}} = State) ->
    {noreply, failed(Attempt, {retryable, {no_answer, Job, Ms}}, stop_worker(State))};
handle_info({'DOWN', Monitor, process, _Pid, Reason}, #state{worker = #worker{monitor = Monitor, attempt = Attempt} = Worker} = State0) ->
    _ = unlimited(Worker),
    State = State0#state{worker = none},
    case Reason of
        normal -> {noreply, State};
        %% What it may have begun is not waited for.
        _ -> {noreply, failed(Attempt, {retryable, {crashed, Reason}}, stop_request(State))}
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
    ok = show(Table, {Run, Segments, Bytes, Oldest, Phase}),
    _ = Idle andalso gen_server:cast(Server, {idle, self(), Heard}),
    State.

show(Table, Row) ->
    try
        true = ets:insert(Table, Row),
        ok
    catch
        %% The server has just been killed, and so will this process be.
        error:badarg -> ok
    end.

failed(Attempt, Failure, State0) ->
    {Class, Reason} = class(Failure),
    State = complain(Class, Reason, State0),
    event({failed, Attempt, Class, rand:uniform()}, State).

class({store, {_Kind, #{reason := Reason}} = Error}) -> {rabbitmq_stream_s3_nif:error_class(Reason), {store, Error}};
class({retryable, Reason}) -> {transient, {host, Reason}};
class({permanent, Reason}) -> {permanent, {host, Reason}}.

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

text({store, _} = Reason) -> rabbitmq_stream_s3_problems:text(Reason);
text({host, Reason}) -> rabbitmq_stream_s3_history_source:text(Reason).

meta(Run) ->
    #{domain => [rabbitmq, stream_s3], run => Run}.

%% Of a clock that never goes back, from 0 at the start of this VM.
now_ms() ->
    erlang:convert_time_unit(erlang:monotonic_time() - erlang:system_info(start_time), native, millisecond).

%% --- effects ---------------------------------------------------------------------------------------------------------

%% No catch-all: an effect that nobody performs must crash this process, not stall the run.
perform({list, Attempt}, #state{source = Source, run = Run} = State) ->
    work(Attempt, pending, fun() -> rabbitmq_stream_s3_history_scan:run(Source, Run) end, State);
perform({ask_permit, Attempt}, #state{server = Server} = State) ->
    ok = gen_server:cast(Server, {ask_permit, self(), Attempt}),
    State;
perform(give_permit_back, #state{server = Server} = State) ->
    ok = gen_server:cast(Server, {give_permit_back, self()}),
    State;
perform({read, Attempt, Seq}, #state{run = Run, source = Source} = State) ->
    Owner = self(),
    spawn_worker(Attempt, read_segment, fun() -> read(Owner, Source, Run, Seq) end, State);
perform({put, Attempt, _Seq, Replaces}, #state{worker = #worker{pid = Reader} = Worker, body_bytes = Bytes} = State) ->
    Ref = make_ref(),
    Reader ! {put, Ref, Replaces},
    request(Ref, put, Attempt, Bytes, State#state{worker = Worker#worker{attempt = Attempt}});
perform({examine, Attempt, Seq, Crc, PayloadLen}, #state{run = Run} = State) ->
    Ref = make_ref(),
    ok = send(self(), Ref, get, fun(Store) -> rabbitmq_stream_s3_nif:history_examine(Store, self(), Ref, {Run, Seq}, Crc, PayloadLen) end),
    request(Ref, examined, Attempt, PayloadLen, State);
perform({report_mismatch, Seq}, #state{run = Run} = State) ->
    ok = rabbitmq_stream_s3_counters:add(history, checksum_mismatches),
    Key = rabbitmq_stream_s3_store:history_key(Run, Seq),
    ?LOG_ERROR("history of run ~ts: ~ts is not what this segment must be, and is replaced", [Run, Key], meta(Run)),
    State;
perform({acknowledge, Attempt, Seq, Crc, Size, Stored}, #state{run = Run, source = Source} = State) ->
    Key = rabbitmq_stream_s3_store:history_key(Run, Seq),
    Acknowledgment = #{run => Run, seq => Seq, key => Key, checksum => Crc, size => Size, stored => Stored},
    work(Attempt, acknowledge, fun() -> rabbitmq_stream_s3_history_source:call(Source, acknowledge, [Acknowledgment]) end, succeeds(State));
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
    work(Attempt, catalog, fun() -> rabbitmq_stream_s3_history_scan:had_segments(Source, Run) end, State);
perform({delete, Attempt}, #state{run = Run, source = Source} = State) ->
    work(Attempt, bucket, fun() -> rabbitmq_stream_s3_history_scan:purge_by_key(Source, Run) end, State);
perform({sweep, Attempt}, #state{run = Run} = State) ->
    work(Attempt, bucket, fun() -> stored(rabbitmq_stream_s3_history_scan:purge_by_prefix(Run)) end, State);
perform({tell_host, Attempt}, #state{run = Run, source = Source} = State) ->
    work(Attempt, purged, fun() -> rabbitmq_stream_s3_history_source:call(Source, purged, [Run]) end, State).

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

work(Attempt, Job, Fun, State) ->
    Owner = self(),
    spawn_worker(Attempt, Job, fun() -> Owner ! {answer, self(), Fun()} end, State).

%% The worker before has answered already, and ends by itself.
spawn_worker(Attempt, Job, Fun, #state{worker = Old} = State) ->
    _ = is_record(Old, worker) andalso erlang:demonitor(Old#worker.monitor, [flush]),
    {Pid, Monitor} = spawn_opt(Fun, [link, monitor]),
    State#state{worker = #worker{pid = Pid, monitor = Monitor, attempt = Attempt, job = Job, limit = limit(Job)}}.

%% What commits may take as long as it needs, and so may what belongs to a purge. A permit waits for what reads.
limit(Job) when Job =:= pending; Job =:= read_segment ->
    Ms = rabbitmq_stream_s3_config:get(transfer_deadline_ms),
    erlang:start_timer(Ms, self(), Ms);
limit(Job) when Job =:= acknowledge; Job =:= catalog; Job =:= purged; Job =:= bucket ->
    none.

unlimited(#worker{limit = none} = Worker) ->
    Worker;
unlimited(#worker{limit = Limit} = Worker) ->
    _ = erlang:cancel_timer(Limit),
    Worker#worker{limit = none}.

answered(bucket, Attempt, ok, State) -> event({done, Attempt}, State);
answered(bucket, Attempt, {error, {store, Error}}, State) -> failed(Attempt, {store, Error}, State);
answered(pending, Attempt, {ok, Listing}, State) -> event({listed, Attempt, Listing}, State);
answered(read_segment, Attempt, not_sealed, State) -> event({read, Attempt, not_sealed}, State);
answered(acknowledge, Attempt, ok, State) -> event({acknowledged, Attempt}, State);
answered(catalog, Attempt, {had_segments, HadSegments}, State) -> event({catalog, Attempt, HadSegments}, State);
answered(purged, Attempt, ok, State) -> event({done, Attempt}, State);
answered(_, Attempt, gone, State) -> event({gone, Attempt}, State);
answered(_, Attempt, {error, {Kind, Reason}}, State) when Kind =:= retryable; Kind =:= permanent -> failed(Attempt, {Kind, Reason}, State);
answered(Job, Attempt, Answer, State) -> failed(Attempt, {permanent, {bad_answer, Job, Answer}}, State).

abort(State) ->
    stop_request(stop_worker(State)).

%% Waits for the worker's end, so that it cannot hand over its body behind our back.
stop_worker(#state{worker = none} = State) ->
    State;
stop_worker(#state{worker = #worker{pid = Pid, monitor = Monitor} = Worker} = State) ->
    _ = unlimited(Worker),
    exit(Pid, kill),
    receive
        {'DOWN', Monitor, process, Pid, _} -> State#state{worker = none}
    end.

stop_request(#state{request = none} = State) ->
    State;
stop_request(#state{request = {Ref, _, _, Timer}} = State) ->
    _ = erlang:cancel_timer(Timer),
    ok = rabbitmq_stream_s3_nif:store_cancel([Ref]),
    State#state{request = none}.

%% In whichever process holds what is sent.
send(Owner, Ref, Op, Send) ->
    Failed = fun(Kind, Reason, Text) ->
        Owner ! {store_result, Ref, {error, {Kind, #{op => Op, reason => Reason, message => Text}}}},
        ok
    end,
    try
        ok = Send(rabbitmq_stream_s3_store:handle())
    catch
        %% It cannot be written down.
        error:{badarg, Text} -> Failed(invalid, other, Text);
        error:badarg -> Failed(closed, connection, <<"the store is closed: the application is being stopped">>)
    end.

%% --- in the process that reads ---------------------------------------------------------------------------------------

%% Holds the body until it is told to put it, hands it over, and ends: then the request alone holds it.
read(Owner, Source, Run, Seq) ->
    case rabbitmq_stream_s3_history_source:call(Source, read_segment, [Run, Seq]) of
        {ok, Data} ->
            case body(Data) of
                {ok, Body} ->
                    %% Where it was put together, the parts go before it is sent.
                    true = erlang:garbage_collect(),
                    Owner ! {body, self(), byte_size(Body)},
                    receive
                        {put, Ref, Replaces} ->
                            Put = fun(Store) -> rabbitmq_stream_s3_nif:history_put(Store, Owner, Ref, {Run, Seq}, Body, Replaces) end,
                            ok = send(Owner, Ref, put, Put),
                            %% What this process has kept of it goes now, and not at some time.
                            true = erlang:garbage_collect(),
                            ok
                    end;
                error ->
                    Owner ! {answer, self(), {ok, not_iodata}}
            end;
        Other ->
            Owner ! {answer, self(), Other}
    end.

body(Data) when is_binary(Data) ->
    {ok, Data};
body(Data) ->
    try
        {ok, iolist_to_binary(Data)}
    catch
        error:badarg -> error
    end.
