%% @doc Uploads the sealed segments of a host's runs, in order, and has the host acknowledge them.
%%
%% For any server that seals immutable segments of a run's history in a state that it commits, and wants them in the object store so that it can
%% prune. What the host has to offer is {@link rabbitmq_stream_s3_history_source}. It starts an uploader where it leads, and stops it when it does
%% so no longer; two that run at the same time for a while do no harm. Several may run on a node, for several hosts; their runs must
%% have different ids.
%%
%% Here: which runs have something to do, who holds a permit, when the index is scanned. A run that has something to do has a process of its own
%% ({@link rabbitmq_stream_s3_history_run}), and what it does is decided by a machine in the core.
%%
%% Uploads are started by {@link sealed/3}, by the scan at the start, and by one each `history_rescan_interval_ms'. Memory: at most
%% `history_upload_concurrency' bodies, and for each run with pending segments a process with at most 16 of them.
-module(rabbitmq_stream_s3_history_uploader).
-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").

-export([start_link/1, stop/1, sealed/3, rescan/1, purge/2, postpone_retention/2, sweep/1, read/2, status/1, metrics/0]).
-export([init_table/0]).
-export([init/1, handle_continue/2, handle_call/3, handle_cast/2, handle_info/2, terminate/2]).
-export_type([options/0, server/0, metric/0]).

-define(TABLE, ?MODULE).
-define(LOG_META, #{domain => [rabbitmq, stream_s3]}).
%% A store that answers at all does so within this time; what it supports may also be found out later.
-define(PROBE_AT_START_MS, 5000).
-define(STOP_MS, 5000).
%% Timers take no longer ones.
-define(MAX_MS, 16#FFFFFFFF).

-type run() :: rabbitmq_stream_s3_history_source:run().
-type server() :: gen_server:server_ref().
-type options() :: #{
    %% The module that implements `rabbitmq_stream_s3_history_source', and the first argument of its functions.
    source := module(),
    argument := term(),
    name => {local, atom()},
    %% Bodies that are held at a time; `history_upload_concurrency' where left out.
    concurrency => 1..1024,
    %% `history_rescan_interval_ms' where left out.
    rescan_interval_ms => pos_integer(),
    %% `history_purge_wait_ms' where left out.
    purge_wait_ms => non_neg_integer(),
    %% Entries of the index that are read at a time; 1000 where left out.
    page_size => 1..100000
}.
%% Without the prefix that all metrics of the plugin have.
-type metric() :: {Name :: atom(), Labels :: #{atom() => atom()}, Value :: non_neg_integer() | float()}.

-record(run, {
    pid :: pid(),
    %% Messages that the process was sent.
    told = 0 :: non_neg_integer(),
    %% The scan that has seen it last, or during which it came up.
    seen :: non_neg_integer(),
    purging = false :: boolean()
}).
-record(state, {
    source :: rabbitmq_stream_s3_history_source:source(),
    options :: map(),
    table :: ets:table(),
    runs = #{} :: #{run() => #run{}},
    pids = #{} :: #{pid() => run()},
    %% Runs whose purge has to be begun anew, since their process has died.
    purges = [] :: [run()],
    holders = #{} :: #{pid() => []},
    waiting = queue:new() :: queue:queue({pid(), pos_integer()}),
    %% Whether the store is known to support conditional writes; until then nothing is uploaded.
    proven :: boolean(),
    %% The number of the scan that runs or ran last, its process, and the timer of the next one.
    scan = 0 :: non_neg_integer(),
    scanner = none :: none | {pid(), reference(), Again :: boolean()},
    timer = none :: none | reference(),
    sweeper = none :: none | {pid(), reference(), [gen_server:from()]}
}).

%% --- interface -------------------------------------------------------------------------------------------------------

%% @doc Starts one, linked to the caller: for the host's own supervisor. The application must run. Refused with a sentence where an option is out of range, and
%% where the store does not honour conditional writes: two owners that upload at the same time would overwrite each other's objects. A store that does not
%% answer is no reason to refuse: nothing is uploaded until it has answered, and the uploader ends then if it must.
-spec start_link(options()) -> {ok, pid()} | ignore | {error, {bad_option | unsupported, Text :: binary()} | term()}.
start_link(#{name := Name} = Options) ->
    gen_server:start_link(Name, ?MODULE, Options, []);
start_link(Options) ->
    gen_server:start_link(?MODULE, Options, []).

%% @doc Stops it; when this returns, nothing that it has begun goes on, but what the store has taken in already may still take effect.
-spec stop(server()) -> ok.
stop(Server) ->
    gen_server:stop(Server).

%% @doc A segment was sealed, and is in the host's index now. A hint: what is uploaded is what the index says, and a hint that is lost costs time
%% until the next scan only. Never waits.
-spec sealed(server(), run(), #{size := non_neg_integer(), sealed_ms := integer(), _ => _}) -> ok.
sealed(Server, Run, #{size := Size, sealed_ms := SealedMs}) when is_binary(Run), is_integer(Size), Size >= 0, is_integer(SealedMs) ->
    gen_server:cast(Server, {sealed, Run, Size, SealedMs}).

%% @doc Scans the index now, or once more if a scan is under way.
-spec rescan(server()) -> ok.
rescan(Server) ->
    gen_server:cast(Server, rescan).

%% @doc Stops the uploads of a run, waits, deletes all of its objects, and calls the host's `purged/2'. The host has committed that the run is
%% purging, so that no other owner begins new uploads; on a start or takeover it has to ask again for each such run. Asking twice does no harm.
-spec purge(server(), run()) -> ok.
purge(Server, Run) when is_binary(Run) ->
    gen_server:call(Server, {purge, Run}, infinity).

%% @doc Whether retention may take a closed run now, or has to wait for so many milliseconds since it still has a sealed segment. Waits for the host's `run_state/2',
%% in the calling process. Raises where no uploader runs, which says nothing: retention has to wait then.
-spec postpone_retention(server(), run()) -> {postpone, Ms :: pos_integer()} | proceed.
postpone_retention(Server, Run) ->
    Source = gen_server:call(Server, source, infinity),
    Sealed =
        case rabbitmq_stream_s3_history_source:call(Source, run_state, [Run]) of
            {Phase, #{sealed := N}} when Phase =:= open; Phase =:= closed -> N;
            {purging, _} -> 0;
            gone -> 0;
            {error, _} -> undefined
        end,
    rabbitmq_stream_s3_nif:history_postpone(Sealed).

%% @doc Looks now for objects of runs that are gone, as it does each `gc_interval_ms'. Waits for the end.
-spec sweep(server()) -> {ok, rabbitmq_stream_s3_history_scan:report()} | {error, term(), rabbitmq_stream_s3_history_scan:report()} | {error, term()}.
sweep(Server) ->
    gen_server:call(Server, sweep, infinity).

%% @doc The payload of an uploaded segment, verified. Needs no uploader. One request.
-spec read(run(), rabbitmq_stream_s3_history_source:seq()) -> {ok, binary()} | {error, rabbitmq_stream_s3_store:error()}.
read(Run, Seq) ->
    rabbitmq_stream_s3_store:history_get(Run, Seq, rabbitmq_stream_s3_config:get(transfer_deadline_ms)).

%% @doc For people. `permits': bodies that are held; `runs': those with something to do, by what they do.
-spec status(server()) ->
    #{
        proven := boolean(),
        permits := non_neg_integer(),
        waiting := non_neg_integer(),
        runs := #{atom() => pos_integer()},
        backlog := #{segments := non_neg_integer(), bytes := non_neg_integer(), oldest_ms := integer() | undefined},
        scans := non_neg_integer(),
        scanning := boolean()
    }.
status(Server) ->
    gen_server:call(Server, status, infinity).

%% @doc The numbers of all uploaders of this node. Counters live as long as the application; gauges are summed from what the runs' machines know now: of what a run has
%% pending beyond its next 16 segments, that is what the last scan has counted. Asks no process; linear in the runs with something to do.
-spec metrics() -> #{counters := [metric()], gauges := [metric()]}.
metrics() ->
    Counts = rabbitmq_stream_s3_counters:get(history),
    Outcomes = [uploaded, already_present, replaced, retryable_error, permanent_error, gone],
    {Segments, Bytes, Oldest} = lists:foldl(fun backlog/2, {0, 0, undefined}, tables()),
    Age =
        case Oldest of
            undefined -> 0.0;
            _ -> max(0, erlang:system_time(millisecond) - Oldest) / 1000
        end,
    #{
        counters =>
            [{history_uploads_total, #{outcome => O}, map_get(O, Counts)} || O <- Outcomes] ++
                [
                    {history_upload_bytes_total, #{}, map_get(bytes, Counts)},
                    {history_upload_checksum_mismatches_total, #{}, map_get(checksum_mismatches, Counts)},
                    {history_upload_rescan_errors_total, #{}, map_get(rescan_errors, Counts)}
                ],
        gauges => [
            {history_upload_backlog_segments, #{}, Segments},
            {history_upload_backlog_bytes, #{}, Bytes},
            {history_upload_oldest_sealed_age_seconds, #{}, Age}
        ]
    }.

%% @doc Makes the place where uploaders are found, which belongs to the calling process: the top supervisor.
-spec init_table() -> ok.
init_table() ->
    ?TABLE = ets:new(?TABLE, [named_table, public]),
    ok.

tables() ->
    try
        [Table || {_Pid, Table} <- ets:tab2list(?TABLE)]
    catch
        error:badarg -> []
    end.

backlog(Table, Sum) ->
    try
        ets:foldl(fun({_Run, N, B, O, _Phase}, {Segments, Bytes, Oldest}) -> {Segments + N, Bytes + B, min(Oldest, O)} end, Sum, Table)
    catch
        %% Its uploader has just ended.
        error:badarg -> Sum
    end.

%% --- start and stop --------------------------------------------------------------------------------------------------

%% @private
init(Options0) ->
    process_flag(trap_exit, true),
    case options(Options0) of
        {ok, Options} ->
            case prove(?PROBE_AT_START_MS) of
                unsupported -> {error, {unsupported, unsupported()}};
                Proven -> {ok, new(Options, Proven =:= ok), {continue, started}}
            end;
        {error, Text} ->
            {error, {bad_option, Text}}
    end.

new(#{source := Module, argument := Argument} = Options, Proven) ->
    Table = ets:new(rabbitmq_stream_s3_history_runs, [public, {write_concurrency, true}]),
    true = ets:insert(?TABLE, {self(), Table}),
    _ = Proven orelse due(prove, rabbitmq_stream_s3_config:get(upload_retry_delay_ms)),
    ok = due(sweep, rabbitmq_stream_s3_config:get(gc_interval_ms)),
    #state{source = {Module, Argument}, options = Options, table = Table, proven = Proven}.

%% @private
handle_continue(started, State) ->
    {noreply, scan(State)}.

%% @private
terminate(_Reason, #state{runs = Runs, scanner = Scanner, sweeper = Sweeper}) ->
    Others = [element(1, Process) || Process <- [Scanner, Sweeper], is_tuple(Process)],
    _ = [exit(Pid, kill) || Pid <- Others],
    _ = [exit(Pid, shutdown) || #run{pid = Pid} <- maps:values(Runs)],
    ok = wait_for([Pid || #run{pid = Pid} <- maps:values(Runs)] ++ Others),
    true = ets:delete(?TABLE, self()),
    ok.

wait_for([]) ->
    ok;
wait_for([Pid | Pids]) ->
    Monitor = erlang:monitor(process, Pid),
    receive
        {'DOWN', Monitor, process, Pid, _} -> ok
    after ?STOP_MS ->
        exit(Pid, kill),
        receive
            {'DOWN', Monitor, process, Pid, _} -> ok
        end
    end,
    wait_for(Pids).

options(Given) ->
    Config = fun rabbitmq_stream_s3_config:get/1,
    Defaults = #{
        concurrency => Config(history_upload_concurrency),
        rescan_interval_ms => Config(history_rescan_interval_ms),
        purge_wait_ms => Config(history_purge_wait_ms),
        page_size => 1000
    },
    Options = maps:merge(Defaults, Given),
    Ranges = [{concurrency, 1, 1024}, {rescan_interval_ms, 1, ?MAX_MS}, {purge_wait_ms, 0, ?MAX_MS}, {page_size, 1, 100000}],
    Known = [source, argument, name | [Key || {Key, _, _} <- Ranges]],
    Bad =
        [text("~ts must be an integer from ~b to ~b, not ~0tP", [K, Min, Max, V, 20]) || {K, Min, Max} <- Ranges, V <- [map_get(K, Options)], not in_range(V, Min, Max)] ++
            [text("~ts is missing", [K]) || K <- [source, argument], not is_map_key(K, Options)] ++
            [text("there is no option ~0tP", [K, 20]) || K <- maps:keys(Options) -- Known],
    case Bad of
        [] -> {ok, Options};
        [Text | _] -> {error, Text}
    end.

in_range(Value, Min, Max) ->
    is_integer(Value) andalso Value >= Min andalso Value =< Max.

text(Format, Args) ->
    unicode:characters_to_binary(io_lib:format(Format, Args)).

due(Job, Ms) ->
    _ = erlang:send_after(Ms, self(), Job),
    ok.

prove(TimeoutMs) ->
    case rabbitmq_stream_s3_store:probe(TimeoutMs) of
        {ok, #{conditional_writes := true}} -> ok;
        {ok, #{conditional_writes := false}} -> unsupported;
        {error, _} -> unknown
    end.

unsupported() ->
    <<
        "the object store does not honour conditional writes (If-None-Match and If-Match on PUT), without which two owners of a run would overwrite "
        "each other's history segments: history is not uploaded to this store"
    >>.

%% --- messages --------------------------------------------------------------------------------------------------------

%% @private
handle_call({purge, Run}, _From, State) ->
    {reply, ok, begin_purge(Run, State)};
handle_call(source, _From, #state{source = Source} = State) ->
    {reply, Source, State};
handle_call(sweep, From, #state{sweeper = {Pid, Monitor, Callers}} = State) ->
    {noreply, State#state{sweeper = {Pid, Monitor, [From | Callers]}}};
handle_call(sweep, From, State) ->
    {noreply, start_sweep([From], State)};
handle_call(status, _From, State) ->
    {reply, status_of(State), State}.

%% @private
handle_cast({sealed, Run, Size, SealedMs}, State) ->
    {noreply, tell(Run, {sealed, Size, SealedMs}, State)};
handle_cast(rescan, State) ->
    {noreply, scan(State)};
handle_cast({ask_permit, Pid, Attempt}, #state{pids = Pids, waiting = Waiting} = State) when is_map_key(Pid, Pids) ->
    {noreply, grant(State#state{waiting = queue:in({Pid, Attempt}, Waiting)})};
handle_cast({ask_permit, _Dead, _Attempt}, State) ->
    {noreply, State};
handle_cast({give_permit_back, Pid}, State) ->
    {noreply, grant(without_permit(Pid, State))};
handle_cast({idle, Pid, Heard}, #state{pids = Pids, runs = Runs} = State) ->
    case Pids of
        #{Pid := Run} ->
            case Runs of
                %% Nothing is on its way to it.
                #{Run := #run{told = Heard}} ->
                    true = unlink(Pid),
                    ok = rabbitmq_stream_s3_history_run:leave(Pid),
                    {noreply, forget(Pid, Run, State)};
                #{} ->
                    {noreply, State}
            end;
        #{} ->
            {noreply, State}
    end.

%% @private
handle_info({found, Pid, Found}, #state{scanner = {Pid, _, _}} = State0) ->
    State = lists:foldl(fun found/2, State0, Found),
    Pid ! {go_on, self()},
    {noreply, State};
handle_info({ended, Pid, Result}, #state{scanner = {Pid, Monitor, Again}} = State) ->
    true = erlang:demonitor(Monitor, [flush]),
    {noreply, scan_ended(Result, Again, State)};
handle_info({'DOWN', Monitor, process, _Pid, Reason}, #state{scanner = {_, Monitor, Again}} = State) ->
    {noreply, scan_ended({error, {retryable, {crashed, Reason}}}, Again, State)};
handle_info({ended, Pid, Result}, #state{sweeper = {Pid, Monitor, Callers}} = State) ->
    true = erlang:demonitor(Monitor, [flush]),
    {noreply, swept(Result, Callers, State#state{sweeper = none})};
handle_info({'DOWN', Monitor, process, _Pid, Reason}, #state{sweeper = {_, Monitor, Callers}} = State) ->
    {noreply, swept({error, {crashed, Reason}}, Callers, State#state{sweeper = none})};
handle_info(rescan, State) ->
    {noreply, scan(State#state{timer = none})};
handle_info(sweep, #state{sweeper = none} = State) ->
    ok = due(sweep, rabbitmq_stream_s3_config:get(gc_interval_ms)),
    {noreply, start_sweep([], State)};
handle_info(sweep, State) ->
    ok = due(sweep, rabbitmq_stream_s3_config:get(gc_interval_ms)),
    {noreply, State};
handle_info(prove, #state{proven = false} = State) ->
    Server = self(),
    _ = spawn_link(fun() -> Server ! {proven, prove(rabbitmq_stream_s3_config:get(persist_timeout_ms))} end),
    {noreply, State};
handle_info({proven, ok}, State) ->
    {noreply, grant(State#state{proven = true})};
handle_info({proven, unknown}, State) ->
    ok = due(prove, rabbitmq_stream_s3_config:get(upload_retry_delay_ms)),
    {noreply, State};
handle_info({proven, unsupported}, State) ->
    ?LOG_ERROR("~ts", [unsupported()], ?LOG_META),
    {stop, {shutdown, {unsupported, unsupported()}}, State};
handle_info({'EXIT', Pid, Reason}, #state{pids = Pids} = State) ->
    case Pids of
        #{Pid := Run} -> {noreply, died(Pid, Run, Reason, State)};
        #{} -> {noreply, State}
    end.

%% --- runs ------------------------------------------------------------------------------------------------------------

tell(Run, Event, #state{runs = Runs} = State) when is_map_key(Run, Runs) ->
    #{Run := #run{pid = Pid, told = Told} = R} = Runs,
    ok = rabbitmq_stream_s3_history_run:tell(Pid, Event),
    State#state{runs = Runs#{Run := R#run{told = Told + 1}}};
tell(Run, Event, #state{runs = Runs, pids = Pids, source = Source, table = Table, options = Options, scan = Scan} = State) ->
    {ok, Pid} = rabbitmq_stream_s3_history_run:start_link(#{
        server => self(), run => Run, source => Source, table => Table, machine => machine(Options)
    }),
    tell(Run, Event, State#state{runs = Runs#{Run => #run{pid = Pid, seen = Scan}}, pids = Pids#{Pid => Run}}).

machine(#{purge_wait_ms := PurgeWait}) ->
    Delays = [task_retry_delay_ms, task_retry_delay_max_ms, upload_retry_delay_ms, upload_retry_delay_max_ms],
    maps:from_list([{history_purge_wait_ms, PurgeWait} | [{Key, rabbitmq_stream_s3_config:get(Key)} || Key <- Delays]]).

begin_purge(Run, State0) ->
    #state{runs = #{Run := R} = Runs} = State = tell(Run, purge, State0),
    State#state{runs = Runs#{Run := R#run{purging = true}}}.

forget(Pid, Run, #state{runs = Runs, pids = Pids, table = Table} = State) ->
    true = ets:delete(Table, Run),
    grant(without_permit(Pid, State#state{runs = maps:remove(Run, Runs), pids = maps:remove(Pid, Pids)})).

%% A bug. What it did is done again after the next scan.
died(Pid, Run, Reason, #state{runs = Runs, purges = Purges} = State) ->
    ?LOG_ERROR("history of run ~ts: its process has died, the next scan takes it up again: ~0tP", [Run, Reason, 30], ?LOG_META),
    #{Run := #run{purging = Purging}} = Runs,
    Again =
        case Purging of
            true -> [Run | Purges];
            false -> Purges
        end,
    forget(Pid, Run, State#state{purges = Again}).

%% --- permits ---------------------------------------------------------------------------------------------------------

grant(#state{proven = true, holders = Holders, waiting = Waiting, options = #{concurrency := Concurrency}} = State) when
    map_size(Holders) < Concurrency
->
    case queue:out(Waiting) of
        {{value, {Pid, Attempt}}, Rest} ->
            ok = rabbitmq_stream_s3_history_run:permit(Pid, Attempt),
            grant(State#state{holders = Holders#{Pid => []}, waiting = Rest});
        {empty, _} ->
            State
    end;
grant(State) ->
    State.

without_permit(Pid, #state{holders = Holders} = State) when is_map_key(Pid, Holders) ->
    State#state{holders = maps:remove(Pid, Holders)};
without_permit(Pid, #state{waiting = Waiting} = State) ->
    State#state{waiting = queue:filter(fun({Other, _}) -> Other =/= Pid end, Waiting)}.

%% --- scans -----------------------------------------------------------------------------------------------------------

scan(#state{scanner = {Pid, Monitor, _}} = State) ->
    State#state{scanner = {Pid, Monitor, true}};
scan(#state{source = Source, options = #{page_size := PageSize}, scan = Scan, timer = Timer, purges = Purges} = State) ->
    _ = Timer =/= none andalso erlang:cancel_timer(Timer),
    Server = self(),
    Tell = fun(Found) ->
        Server ! {found, self(), Found},
        %% A page at a time, also in the server's mailbox.
        receive
            {go_on, Server} -> ok
        end
    end,
    {Pid, Monitor} = spawn_opt(
        fun() -> Server ! {ended, self(), rabbitmq_stream_s3_history_scan:scan(Source, PageSize, Tell)} end, [link, monitor]
    ),
    Begun = State#state{scan = Scan + 1, scanner = {Pid, Monitor, false}, timer = none, purges = []},
    lists:foldl(fun begin_purge/2, Begun, Purges).

found({unreadable, Run, Reason}, State) ->
    ok = rabbitmq_stream_s3_counters:add(history, rescan_errors),
    ?LOG_ERROR("history of run ~ts: the scan cannot read it and goes on without: ~ts", [Run, rabbitmq_stream_s3_problems:text(Reason)], ?LOG_META),
    seen(Run, State);
found({Run, Listing}, State0) ->
    case rabbitmq_stream_s3_nif:valid_run_id(Run) of
        true -> seen(Run, tell(Run, {rescanned, Listing}, State0));
        false -> found({unreadable, Run, not_a_run_id}, State0)
    end.

seen(Run, #state{runs = Runs, scan = Scan} = State) ->
    case Runs of
        #{Run := R} -> State#state{runs = Runs#{Run := R#run{seen = Scan}}};
        #{} -> State
    end.

scan_ended(Result, Again, State0) ->
    State = scanned(Result, State0#state{scanner = none}),
    case Again of
        true -> scan(State);
        false -> State
    end.

scanned(ok, #state{runs = Runs, scan = Scan, options = #{rescan_interval_ms := Interval}} = State) ->
    %% Nothing of these is in the index any more.
    Unseen = [Run || {Run, #run{seen = Seen}} <- maps:to_list(Runs), Seen < Scan],
    Nothing = {rescanned, {[], {0, 0, undefined}}},
    next_scan(Interval, lists:foldl(fun(Run, S) -> tell(Run, Nothing, S) end, State, Unseen));
scanned({error, {_Kind, Reason}}, #state{options = #{rescan_interval_ms := Interval}} = State) ->
    ok = rabbitmq_stream_s3_counters:add(history, rescan_errors),
    ?LOG_ERROR("the index of pending history segments cannot be read and is tried again: ~ts", [rabbitmq_stream_s3_problems:text(Reason)], ?LOG_META),
    next_scan(min(Interval, rabbitmq_stream_s3_config:get(task_retry_delay_max_ms)), State).

next_scan(Ms, State) ->
    State#state{timer = erlang:send_after(Ms, self(), rescan)}.

%% --- orphans ---------------------------------------------------------------------------------------------------------

start_sweep(Callers, #state{source = Source} = State) ->
    Server = self(),
    {Pid, Monitor} = spawn_opt(fun() -> Server ! {ended, self(), rabbitmq_stream_s3_history_scan:orphans(Source)} end, [link, monitor]),
    State#state{sweeper = {Pid, Monitor, Callers}}.

swept(Result, Callers, State) ->
    ok = tell_of_sweep(Result),
    _ = [gen_server:reply(Caller, Result) || Caller <- Callers],
    State.

tell_of_sweep({ok, #{deleted := 0, failed := 0}}) ->
    ok;
tell_of_sweep({ok, #{deleted := Deleted, failed := Failed}}) ->
    ?LOG_NOTICE("history objects of purged runs: ~b deleted, ~b could not be deleted", [Deleted, Failed], ?LOG_META);
tell_of_sweep(Error) ->
    ?LOG_WARNING("history objects of purged runs could not be looked for: ~ts", [rabbitmq_stream_s3_problems:text(element(2, Error))], ?LOG_META).

%% --- status ----------------------------------------------------------------------------------------------------------

status_of(#state{table = Table, proven = Proven, holders = Holders, waiting = Waiting, scan = Scan, scanner = Scanner}) ->
    {Segments, Bytes, Oldest} = backlog(Table, {0, 0, undefined}),
    Phases = ets:foldl(fun({_, _, _, _, Phase}, Sum) -> maps:update_with(Phase, fun(N) -> N + 1 end, 1, Sum) end, #{}, Table),
    #{
        proven => Proven,
        permits => map_size(Holders),
        waiting => queue:len(Waiting),
        runs => Phases,
        backlog => #{segments => Segments, bytes => Bytes, oldest_ms => Oldest},
        scans => Scan,
        scanning => Scanner =/= none
    }.
