%% @doc Uploads the sealed segments of a host's runs, in order, and has the host acknowledge them.
%%
%% For any server that seals immutable segments of a run's history in a state that it commits, and wants them in the object store so that it can
%% prune. What the host has to offer is {@link rabbitmq_stream_s3_history_source}. It starts an uploader where it leads, and stops it when it does
%% so no longer; two that run at the same time for a while do no harm. Where several hosts use one bucket and prefix, each has to say with what the ids of
%% its runs begin, and no other's: what a host does not know of the others' runs would count as gone, and their objects would be swept.
%%
%% Here: which runs have something to do, who holds a permit, when the index is scanned. A run that has something to do has a process of its own
%% ({@link rabbitmq_stream_s3_history_run}), and what it does is decided by a machine in the core.
%%
%% Uploads are started by {@link sealed/3}, by the scan at the start, and by one each `history_rescan_interval_ms'. Memory: at most
%% `history_upload_concurrency' bodies, and for each run with pending segments a process with at most 16 of them. Of runs of which nothing but
%% {@link sealed/3} is known, at most 1000 are looked at at a time; further ones wait for a scan, which then comes after
%% `task_retry_delay_max_ms'.
-module(rabbitmq_stream_s3_history_uploader).
-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").

-export([start_link/1, stop/1, sealed/3, rescan/1, purge/2, postpone_retention/2, sweep/1, read/2, status/1, metrics/0]).
-export([init/1, handle_continue/2, handle_call/3, handle_cast/2, handle_info/2, terminate/2]).
-export_type([options/0, server/0]).

-define(LOG_META, #{domain => [rabbitmq, stream_s3]}).
%% A store that answers at all does so within this time; what it supports may also be found out later.
-define(PROBE_AT_START_MS, 5000).
-define(STOP_MS, 5000).
%% Timers take no longer ones.
-define(MAX_MS, 16#FFFFFFFF).
%% A host that tells of runs faster than it can be asked about them must not fill the memory, nor be asked about all of them at once.
-define(HINTED, 1000).

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
    page_size => 1..100000,
    %% What the ids of all runs of this host begin with, and of no other host below the same prefix of the bucket; nothing where left out.
    run_prefix => binary()
}.

-record(run, {
    pid :: pid(),
    %% Messages that the process was sent.
    told = 0 :: non_neg_integer(),
    %% The scan that has seen it last, or during which it came up.
    seen :: non_neg_integer(),
    %% The scan that has found rows of it last.
    listed = 0 :: non_neg_integer(),
    %% Nothing but a hint is known of it.
    hinted = false :: boolean(),
    purging = false :: boolean()
}).
-record(scanner, {
    pid :: pid(),
    monitor :: reference(),
    %% Gives it up when a page does not come.
    limit :: reference(),
    again = false :: boolean()
}).
-record(state, {
    source :: rabbitmq_stream_s3_history_source:source(),
    options :: map(),
    table :: ets:table(),
    %% Of the application.
    application :: reference(),
    runs = #{} :: #{run() => #run{}},
    pids = #{} :: #{pid() => run()},
    %% Runs whose purge has to be begun anew, since their process has died.
    purges = [] :: [run()],
    holders = #{} :: #{pid() => []},
    waiting = queue:new() :: queue:queue({pid(), pos_integer()}),
    %% Whether the store is known to support conditional writes; until then nothing is uploaded.
    proven :: boolean(),
    prover = none :: none | {pid(), reference()},
    %% Runs that are known by hints alone.
    hinted = 0 :: 0..?HINTED,
    %% Another one was hinted at, so the next scan comes soon.
    soon = false :: boolean(),
    %% The number of the scan that runs or ran last, its process, and the timer of the next one.
    scan = 0 :: non_neg_integer(),
    scanner = none :: none | #scanner{},
    timer = none :: none | reference(),
    sweeper = none :: none | {pid(), reference(), [gen_server:from()]}
}).

%% --- interface -------------------------------------------------------------------------------------------------------

%% @doc Starts one, linked to the caller: for the host's own supervisor. Refused with a sentence where an option is out of range, where the application does
%% not run, and where the store does not honour conditional writes: two owners that upload at the same time would overwrite each other's objects. A store
%% that does not answer is no reason to refuse: nothing is uploaded until it has answered, and the uploader ends then if it must.
%%
%% It ends with the application, with the reason `{shutdown, application_stopped}', and so does all that it has begun; nothing is lost, since whatever is
%% pending is in the host's index. Whoever starts it has to do so again once the application is back: not by a supervisor that gives up after a few
%% attempts, but as a `temporary' child, and with a while between the attempts (the host on Ra in the tests does it).
-spec start_link(options()) -> {ok, pid()} | ignore | {error, {bad_option | not_running | unsupported, Text :: binary()} | term()}.
start_link(#{name := Name} = Options) ->
    gen_server:start_link(Name, ?MODULE, Options, []);
start_link(Options) ->
    gen_server:start_link(?MODULE, Options, []).

%% @doc Stops it; when this returns, nothing that it has begun goes on, but what the store has taken in already may still take effect.
-spec stop(server()) -> ok.
stop(Server) ->
    gen_server:stop(Server).

%% @doc A segment was sealed, and is in the host's index now. A hint: what is uploaded is what the index says, and a hint that is lost costs time
%% until the next scan only. Never waits. Raises `badarg' where there is no such run id, size or time.
-spec sealed(server(), run(), #{size := non_neg_integer(), sealed_ms := integer(), _ => _}) -> ok.
sealed(Server, Run, Segment) ->
    ok = check_run(Run, [Server, Run, Segment]),
    case rabbitmq_stream_s3_history_source:is_sealed(Segment) of
        true ->
            #{size := Size, sealed_ms := SealedMs} = Segment,
            gen_server:cast(Server, {sealed, Run, Size, SealedMs});
        false ->
            Text = <<"segment: expected size, a non-negative integer below 2^64, and sealed_ms, an integer of at most 64 bits">>,
            rabbitmq_stream_s3_nif:misuse(Text, [Server, Run, Segment])
    end.

%% @doc Scans the index now, or once more if a scan is under way.
-spec rescan(server()) -> ok.
rescan(Server) ->
    gen_server:cast(Server, rescan).

%% @doc Stops the uploads of a run, waits, deletes all of its objects, and calls the host's `purged/2'. The host has committed that the run is
%% purging, so that no other owner begins new uploads; on a start or takeover it has to ask again for each such run. Asking twice does no harm. Raises
%% `badarg' where there is no such run id, and where the host lacks `catalog/2' or `purged/2'.
-spec purge(server(), run()) -> ok.
purge(Server, Run) ->
    ok = check_run(Run, [Server, Run]),
    {Module, _} = gen_server:call(Server, source, infinity),
    case rabbitmq_stream_s3_history_source:implements(Module, purge) of
        true -> gen_server:call(Server, {purge, Run}, infinity);
        false -> rabbitmq_stream_s3_nif:misuse(<<"source: needs catalog/2 and purged/2 to purge a run">>, [Server, Run])
    end.

%% @doc Whether retention may take a closed run now, or has to wait for so many milliseconds since it still has a sealed segment. Waits for the host's `run_state/2',
%% in the calling process. Raises where no uploader runs, which says nothing: retention has to wait then; and `badarg' where there is no such run id.
-spec postpone_retention(server(), run()) -> {postpone, Ms :: pos_integer()} | proceed.
postpone_retention(Server, Run) ->
    ok = check_run(Run, [Server, Run]),
    Source = gen_server:call(Server, source, infinity),
    Sealed =
        case rabbitmq_stream_s3_history_source:call(Source, run_state, [Run]) of
            {Phase, #{sealed := 0}} when Phase =:= open; Phase =:= closed -> 0;
            {purging, _} -> 0;
            gone -> 0;
            %% There are some, or that is not known: a failure, or an answer that is none.
            _ -> undefined
        end,
    rabbitmq_stream_s3_nif:history_postpone(Sealed).

%% @doc Looks now for objects of runs that are gone, as it does each `gc_interval_ms'. Waits for the end.
-spec sweep(server()) -> {ok, rabbitmq_stream_s3_history_scan:report()} | {error, term(), rabbitmq_stream_s3_history_scan:report()} | {error, term()}.
sweep(Server) ->
    gen_server:call(Server, sweep, infinity).

%% @doc The payload of an uploaded segment, verified. Needs no uploader, but the application. One request. Raises `badarg' where there is no such run id or
%% number.
-spec read(run(), rabbitmq_stream_s3_history_source:seq()) -> {ok, binary()} | {error, rabbitmq_stream_s3_store:error()}.
read(Run, Seq) ->
    try
        rabbitmq_stream_s3_store:history_get(Run, Seq, rabbitmq_stream_s3_config:get(transfer_deadline_ms))
    catch
        error:{badarg, Text} -> rabbitmq_stream_s3_nif:misuse(Text, [Run, Seq])
    end.

check_run(Run, Args) ->
    try rabbitmq_stream_s3_nif:history_key(<<"any">>, {Run, 0}) of
        _ -> ok
    catch
        error:{badarg, Text} -> rabbitmq_stream_s3_nif:misuse(Text, Args)
    end.

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
-spec metrics() -> #{counters := [rabbitmq_stream_s3_history_backlog:metric()], gauges := [rabbitmq_stream_s3_history_backlog:metric()]}.
metrics() ->
    rabbitmq_stream_s3_history_backlog:metrics().

%% --- start and stop --------------------------------------------------------------------------------------------------

%% @private
init(Options0) ->
    process_flag(trap_exit, true),
    case {rabbitmq_stream_s3_history_options:complete(Options0), rabbitmq_stream_s3_history_backlog:owner()} of
        {{error, Text}, _} ->
            {error, {bad_option, Text}};
        {_, undefined} ->
            {error, {not_running, <<"the application rabbitmq_stream_s3 does not run on this node">>}};
        {{ok, #{source := Module, run_prefix := RunPrefix} = Options}, Top} ->
            Monitor = erlang:monitor(process, Top),
            case rabbitmq_stream_s3_history_backlog:other_host(Module, RunPrefix) of
                {ok, Other} -> {error, {bad_option, shared_with(Other)}};
                none -> init(Options, Monitor, prove(?PROBE_AT_START_MS))
            end
    end.

init(_Options, _Monitor, unsupported) ->
    {error, {unsupported, unsupported()}};
init(Options, Monitor, Proven) ->
    {ok, new(Options, Monitor, Proven =:= ok), {continue, started}}.

shared_with(Other) ->
    iolist_to_binary(["run_prefix must keep the runs of this host apart from those of ", atom_to_binary(Other), ", which runs on this node, too"]).

new(#{source := Module, argument := Argument, run_prefix := RunPrefix} = Options, Monitor, Proven) ->
    Table = rabbitmq_stream_s3_history_backlog:new(Module, RunPrefix),
    _ = Proven orelse due(prove, rabbitmq_stream_s3_config:get(upload_retry_delay_ms)),
    ok = due(sweep, rabbitmq_stream_s3_config:get(gc_interval_ms)),
    #state{source = {Module, Argument}, options = Options, table = Table, application = Monitor, proven = Proven}.

%% @private
handle_continue(started, State) ->
    {noreply, scan(State)}.

%% @private
terminate(_Reason, #state{runs = Runs, scanner = Scanner, sweeper = Sweeper, prover = Prover}) ->
    Others = [Pid || #scanner{pid = Pid} <- [Scanner]] ++ [element(1, Process) || Process <- [Sweeper, Prover], is_tuple(Process)],
    _ = [exit(Pid, kill) || Pid <- Others],
    _ = [exit(Pid, shutdown) || #run{pid = Pid} <- maps:values(Runs)],
    ok = wait_for([Pid || #run{pid = Pid} <- maps:values(Runs)] ++ Others, erlang:start_timer(?STOP_MS, self(), stop)),
    rabbitmq_stream_s3_history_backlog:drop().

wait_for([], _Limit) ->
    ok;
wait_for([Pid | Pids], Limit) ->
    Monitor = erlang:monitor(process, Pid),
    receive
        {'DOWN', Monitor, process, Pid, _} ->
            wait_for(Pids, Limit);
        {timeout, Limit, stop} ->
            %% Nobody is waited for any longer.
            _ = [exit(Other, kill) || Other <- [Pid | Pids]],
            receive
                {'DOWN', Monitor, process, Pid, _} -> wait_for(Pids, Limit)
            end
    end.

due(Job, Ms) ->
    _ = erlang:send_after(Ms, self(), Job),
    ok.

prove(TimeoutMs) ->
    try rabbitmq_stream_s3_store:probe(TimeoutMs) of
        {ok, #{conditional_writes := true}} -> ok;
        {ok, #{conditional_writes := false}} -> unsupported;
        {error, _} -> unknown
    catch
        %% The application has just ended, and its store is closed.
        error:badarg -> unknown
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
    {reply, status_of(State), State};
handle_call(_Unknown, _From, State) ->
    {reply, {error, badarg}, State}.

%% @private
handle_cast({sealed, Run, Size, SealedMs}, State) ->
    {noreply, hint(Run, {sealed, Size, SealedMs}, State)};
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
    end;
handle_cast(_Unknown, State) ->
    {noreply, State}.

%% @private
handle_info({found, Pid, Found}, #state{scanner = #scanner{pid = Pid, limit = Limit} = Scanner} = State0) ->
    _ = erlang:cancel_timer(Limit),
    State = lists:foldl(fun found/2, State0, Found),
    Pid ! {go_on, self()},
    {noreply, State#state{scanner = Scanner#scanner{limit = page_limit()}}};
handle_info({ended, Pid, Result}, #state{scanner = #scanner{pid = Pid}} = State) ->
    {noreply, scan_ended(Result, State)};
handle_info({timeout, Limit, Ms}, #state{scanner = #scanner{limit = Limit, pid = Pid}} = State) ->
    true = exit(Pid, kill),
    {noreply, scan_ended({error, {retryable, {no_answer, pending, Ms}}}, State)};
handle_info({'DOWN', Monitor, process, _Pid, Reason}, #state{scanner = #scanner{monitor = Monitor}} = State) ->
    {noreply, scan_ended({error, {retryable, {crashed, Reason}}}, State)};
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
handle_info(prove, #state{prover = none} = State) ->
    Server = self(),
    Prove = fun() -> Server ! {proven, self(), prove(rabbitmq_stream_s3_config:get(persist_timeout_ms))} end,
    {noreply, State#state{prover = spawn_opt(Prove, [link, monitor])}};
handle_info({proven, Pid, Result}, #state{prover = {Pid, Monitor}} = State) ->
    true = erlang:demonitor(Monitor, [flush]),
    proven(Result, State#state{prover = none});
handle_info({'DOWN', Monitor, process, _Pid, _Reason}, #state{prover = {_, Monitor}} = State) ->
    proven(unknown, State#state{prover = none});
handle_info({'DOWN', Monitor, process, _Pid, _Reason}, #state{application = Monitor} = State) ->
    ?LOG_NOTICE("history is uploaded no longer, since the application has ended", [], ?LOG_META),
    {stop, {shutdown, application_stopped}, State};
handle_info({'EXIT', Pid, Reason}, #state{pids = Pids} = State) ->
    case Pids of
        #{Pid := Run} -> {noreply, died(Pid, Run, Reason, State)};
        #{} -> {noreply, State}
    end;
%% Answers that nobody waits for any longer.
handle_info(_Stale, State) ->
    {noreply, State}.

proven(ok, State) ->
    {noreply, grant(State#state{proven = true})};
proven(unknown, State) ->
    ok = due(prove, rabbitmq_stream_s3_config:get(upload_retry_delay_ms)),
    {noreply, State};
proven(unsupported, State) ->
    ?LOG_ERROR("~ts", [unsupported()], ?LOG_META),
    {stop, {shutdown, {unsupported, unsupported()}}, State}.

%% --- runs ------------------------------------------------------------------------------------------------------------

tell(Run, Event, #state{runs = Runs} = State) when is_map_key(Run, Runs) ->
    #{Run := #run{pid = Pid, told = Told} = R} = Runs,
    ok = rabbitmq_stream_s3_history_run:tell(Pid, Event),
    State#state{runs = Runs#{Run := R#run{told = Told + 1}}};
tell(Run, Event, State) ->
    tell(Run, Event, start(Run, false, State)).

%% Of a run of which nothing is known, the index has to be asked.
hint(Run, Event, #state{runs = Runs} = State) when is_map_key(Run, Runs) ->
    tell(Run, Event, State);
hint(Run, Event, #state{hinted = Hinted} = State) when Hinted < ?HINTED ->
    tell(Run, Event, start(Run, true, State));
hint(_Run, _Event, State) ->
    scan_soon(State).

start(Run, IsHinted, #state{runs = Runs, pids = Pids, source = Source, table = Table, options = Options, scan = Scan} = State) ->
    {ok, Pid} = rabbitmq_stream_s3_history_run:start_link(#{
        server => self(), run => Run, source => Source, table => Table, machine => machine(Options)
    }),
    count_hinted(IsHinted, 1, State#state{runs = Runs#{Run => #run{pid = Pid, seen = Scan, hinted = IsHinted}}, pids = Pids#{Pid => Run}}).

count_hinted(true, N, #state{hinted = Hinted} = State) -> State#state{hinted = Hinted + N};
count_hinted(false, _N, State) -> State.

machine(#{purge_wait_ms := PurgeWait}) ->
    Delays = [task_retry_delay_ms, task_retry_delay_max_ms, upload_retry_delay_ms, upload_retry_delay_max_ms],
    maps:from_list([{history_purge_wait_ms, PurgeWait} | [{Key, rabbitmq_stream_s3_config:get(Key)} || Key <- Delays]]).

begin_purge(Run, State0) ->
    #state{runs = #{Run := R} = Runs} = State = tell(Run, purge, State0),
    State#state{runs = Runs#{Run := R#run{purging = true}}}.

forget(Pid, Run, #state{runs = Runs, pids = Pids, table = Table} = State0) ->
    true = ets:delete(Table, Run),
    #{Run := #run{hinted = IsHinted}} = Runs,
    State = count_hinted(IsHinted, -1, State0#state{runs = maps:remove(Run, Runs), pids = maps:remove(Pid, Pids)}),
    grant(without_permit(Pid, State)).

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

scan(#state{scanner = #scanner{} = Scanner} = State) ->
    State#state{scanner = Scanner#scanner{again = true}};
scan(#state{source = Source, options = #{page_size := PageSize}, scan = Scan, purges = Purges} = State0) ->
    State = without_timer(State0),
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
    Scanner = #scanner{pid = Pid, monitor = Monitor, limit = page_limit()},
    lists:foldl(fun begin_purge/2, State#state{scan = Scan + 1, scanner = Scanner, soon = false, purges = []}, Purges).

page_limit() ->
    Ms = rabbitmq_stream_s3_config:get(transfer_deadline_ms),
    erlang:start_timer(Ms, self(), Ms).

%% Also while a scan is under way, which may be past the place.
scan_soon(#state{soon = true} = State) ->
    State;
scan_soon(#state{scanner = #scanner{}} = State) ->
    State#state{soon = true};
scan_soon(State) ->
    next_scan(?MAX_MS, without_timer(State#state{soon = true})).

found({stray, N, Row}, State) ->
    ok = rabbitmq_stream_s3_counters:add(history, rescan_errors, N),
    ?LOG_ERROR("the index of pending history segments has rows of no run, which are passed over: ~b, such as ~0tP", [N, Row, 30], ?LOG_META),
    State;
found({unreadable, Run, Reason}, State) ->
    ok = rabbitmq_stream_s3_counters:add(history, rescan_errors),
    ?LOG_ERROR("history of run ~ts: the scan cannot read it and goes on without: ~ts", [Run, rabbitmq_stream_s3_history_source:text(Reason)], ?LOG_META),
    seen(Run, State);
%% What lies between its rows is another run's: taken for all that there is of it, the second part would be uploaded before the rest of the first.
found({Run, _Listing}, #state{runs = Runs, scan = Scan} = State) when element(#run.listed, map_get(Run, Runs)) =:= Scan ->
    found({unreadable, Run, listed_twice}, State);
found({Run, Listing}, State) ->
    listed(Run, seen(Run, tell(Run, {rescanned, Listing}, State))).

seen(Run, #state{runs = Runs, scan = Scan} = State) ->
    case Runs of
        #{Run := R} -> State#state{runs = Runs#{Run := R#run{seen = Scan}}};
        #{} -> State
    end.

listed(Run, #state{runs = Runs, scan = Scan} = State) ->
    #{Run := #run{hinted = IsHinted} = R} = Runs,
    count_hinted(IsHinted, -1, State#state{runs = Runs#{Run := R#run{listed = Scan, hinted = false}}}).

scan_ended(Result, #state{scanner = #scanner{monitor = Monitor, limit = Limit, again = Again}} = State0) ->
    true = erlang:demonitor(Monitor, [flush]),
    _ = erlang:cancel_timer(Limit),
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
scanned({error, {Kind, Reason}}, #state{options = #{rescan_interval_ms := Interval}} = State) ->
    ok = rabbitmq_stream_s3_counters:add(history, rescan_errors),
    Text = rabbitmq_stream_s3_history_source:text(Reason),
    ?LOG_ERROR("the index of pending history segments cannot be read and is tried again: ~ts", [Text], ?LOG_META),
    case Kind of
        retryable -> next_scan(min(Interval, rabbitmq_stream_s3_config:get(task_retry_delay_max_ms)), State);
        permanent -> next_scan(Interval, State)
    end.

next_scan(Interval, #state{soon = Soon} = State) ->
    Ms =
        case Soon of
            true -> min(Interval, rabbitmq_stream_s3_config:get(task_retry_delay_max_ms));
            false -> Interval
        end,
    State#state{timer = erlang:send_after(Ms, self(), rescan)}.

without_timer(#state{timer = Timer} = State) ->
    _ = is_reference(Timer) andalso erlang:cancel_timer(Timer),
    State#state{timer = none}.

%% --- orphans ---------------------------------------------------------------------------------------------------------

start_sweep(Callers, #state{source = Source, options = #{run_prefix := RunPrefix}} = State) ->
    Server = self(),
    Sweep = fun() -> Server ! {ended, self(), rabbitmq_stream_s3_history_scan:orphans(Source, RunPrefix)} end,
    {Pid, Monitor} = spawn_opt(Sweep, [link, monitor]),
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
    {Segments, Bytes, Oldest} = rabbitmq_stream_s3_history_backlog:sum(Table),
    #{
        proven => Proven,
        permits => map_size(Holders),
        waiting => queue:len(Waiting),
        runs => rabbitmq_stream_s3_history_backlog:phases(Table),
        backlog => #{segments => Segments, bytes => Bytes, oldest_ms => Oldest},
        scans => Scan,
        scanning => Scanner =/= none
    }.
