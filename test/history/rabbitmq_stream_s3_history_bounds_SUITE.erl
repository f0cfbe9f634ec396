%% What a history of a hundred thousand segments may cost: no call of the library over a millisecond, no catalog outside the process that deletes by it.
-module(rabbitmq_stream_s3_history_bounds_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-import(stream_s3_wait, [eventually/1]).

-compile(nowarn_export_all).
-compile(export_all).

-define(UPLOADER, rabbitmq_stream_s3_history_uploader).
-define(STORE, rabbitmq_stream_s3_store).
-define(NIF, rabbitmq_stream_s3_nif).
-define(HOST, stream_s3_history_host).
-define(STATE, stream_s3_history_state).
-define(RUN, <<"long">>).
-define(SEGMENTS, 100000).
-define(TIMEOUT, 60000).
-define(PURGE_WAIT_MS, 100).

suite() -> [{timetrap, {minutes, 10}}].

all() ->
    [
        a_purge_of_a_run_with_100000_segments_makes_no_call_over_a_millisecond,
        a_catalog_that_is_empty_by_the_deletion_leaves_all_to_the_sweep,
        a_run_that_is_gone_by_the_deletion_is_left_alone,
        a_catalog_that_fails_by_the_deletion_is_asked_for_again,
        a_catalog_of_something_else_is_refused_for_good,
        a_listing_of_more_than_sixteen_segments_is_refused_before_it_is_read,
        no_event_takes_longer_than_a_millisecond
    ].

init_per_suite(Config) ->
    Dir = filename:join(?config(priv_dir, Config), "world"),
    Env = #{task_retry_delay_ms => 5, task_retry_delay_max_ms => 50, history_rescan_interval_ms => 600000, history_purge_wait_ms => ?PURGE_WAIT_MS},
    [{world, stream_s3_world:start(#{store => s3, dir => Dir, env => Env})} | Config].

end_per_suite(Config) ->
    stream_s3_world:stop(?config(world, Config)).

end_per_testcase(_Case, _Config) ->
    _ = [?UPLOADER:stop(Pid) || {Pid, _} <- ets:tab2list(?UPLOADER), is_process_alive(Pid)],
    ok = rabbitmq_stream_s3_history_scan:purge_by_prefix(?RUN).

%% --- a long catalog --------------------------------------------------------------------------------------------------

a_purge_of_a_run_with_100000_segments_makes_no_call_over_a_millisecond(_Config) ->
    Host = ?HOST:start(purging(?SEGMENTS)),
    Each =
        case os:getenv("STREAM_S3_DEEP") of
            false -> 50;
            _ -> 1
        end,
    Stored = lists:seq(1, ?SEGMENTS, Each) ++ [?SEGMENTS],
    ok = put_all(Stored),
    %% Something that no catalog has.
    ok = put_all([?SEGMENTS + 1]),
    Uploader = start(Host),
    {Process, Worker} = asked_for_its_catalog(Host, Uploader),
    Tracer = trace(Process),
    {Us, ok} = timer:tc(fun() ->
        ok = ?HOST:hook(Host, fun(_, _) -> go_on end),
        Worker ! go_on,
        ?HOST:await(Host, fun(State) -> ?STATE:runs(State) =:= [] end, 300000)
    end),
    #{calls := Calls, message := Message} = traced(Tracer, Process),
    ?assertEqual([], keys()),
    %% The keys of one request to S3.
    #{{store_delete, 4} := {Deletions, _, [_, _, _, Keys]}} = Calls,
    ?assert(Deletions >= ?SEGMENTS div 1000),
    ?assert(length(Keys) =< 1000),
    ?assertMatch(#{{history_key, 2} := {N, _, _}} when N >= ?SEGMENTS, Calls),
    %% Each kind of call once more, as it was with the largest arguments.
    Took = #{Function => best_of(20, fun() -> apply(?NIF, Function, Args) end) || {Function, _} := {_, _, Args} <- Calls},
    ct:pal(
        "purge of ~b segments, ~b of them stored: ~b ms; largest message to the run's process: ~b words~ncalls and the size of the largest: ~tp~nmicroseconds of these: ~tp",
        [?SEGMENTS, length(Stored), Us div 1000, Message, #{F => {N, Words} || F := {N, Words, _} <- Calls}, Took]
    ),
    ok = no_longer_than_a_millisecond(Took),
    ?assert(Message < 1000),
    ?HOST:stop(Host).

a_catalog_that_is_empty_by_the_deletion_leaves_all_to_the_sweep(_Config) ->
    Host = with_answers([none]),
    ok = ?HOST:await(Host, fun(State) -> ?STATE:runs(State) =:= [] end),
    ?assertEqual([], keys()),
    ?HOST:stop(Host).

a_run_that_is_gone_by_the_deletion_is_left_alone(_Config) ->
    Host = with_answers([gone]),
    [{Uploader, _}] = ets:tab2list(?UPLOADER),
    ok = eventually(fun() -> map_get(runs, ?UPLOADER:status(Uploader)) =:= #{} end),
    %% Whoever has purged it has told the host, and swept.
    ?assertEqual([?RUN], ?STATE:runs(?HOST:state(Host))),
    ?assertEqual(3, length(keys())),
    ?HOST:stop(Host).

a_catalog_that_fails_by_the_deletion_is_asked_for_again(_Config) ->
    Host = with_answers([{error, {retryable, no_leader}}, crash, {error, {retryable, no_leader}}]),
    ok = ?HOST:await(Host, fun(State) -> ?STATE:runs(State) =:= [] end),
    ?assertEqual([], keys()),
    ?HOST:stop(Host).

a_catalog_of_something_else_is_refused_for_good(_Config) ->
    lists:foreach(
        fun(Answer) ->
            Host = with_answers([Answer]),
            [{Uploader, _}] = ets:tab2list(?UPLOADER),
            Pauses = fun() ->
                [Ms || T <- tuple_to_list(sys:get_state(run_process(Uploader))), is_reference(T), Ms <- [timer_ms(T)], is_integer(Ms), Ms > 30000] =/= []
            end,
            ok = eventually(Pauses),
            ?assertEqual([?RUN], ?STATE:runs(?HOST:state(Host))),
            ok = ?UPLOADER:stop(Uploader),
            ?HOST:stop(Host)
        end,
        [{ok, [1, two]}, {ok, [1 | 2]}, {ok, [-1]}, {ok, [1 bsl 64]}, {ok, nonsense}, nonsense, {error, {permanent, corrupt}}]
    ).

%% --- the machine -----------------------------------------------------------------------------------------------------

a_listing_of_more_than_sixteen_segments_is_refused_before_it_is_read(_Config) ->
    Machine = machine(),
    Segments = [{Seq, 10, 5} || Seq <- lists:seq(1, ?SEGMENTS)],
    Listing = fun(First) -> {First, {0, 0, undefined}} end,
    ?assertMatch({_, [{ask_permit, 1}]}, ?NIF:history_handle(Machine, 0, {rescanned, Listing(lists:sublist(Segments, 16))})),
    Text = <<"listing.first: more than 16">>,
    Refused = [
        {rescanned, Listing(lists:sublist(Segments, 17))},
        {rescanned, Listing(Segments)},
        {listed, 1, Listing(Segments)},
        %% Nobody looks at what is behind the sixteenth.
        {rescanned, Listing(lists:sublist(Segments, 16) ++ [nonsense | tail])}
    ],
    [?assertError({badarg, Text}, ?NIF:history_handle(Machine, 0, Event)) || Event <- Refused],
    ?assertError({badarg, <<"listing.first", _/binary>>}, ?NIF:history_handle(Machine, 0, {rescanned, Listing([{1, 10, 5} | tail])})),
    ?assertError({badarg, <<"catalog", _/binary>>}, ?NIF:history_handle(Machine, 0, {catalog, 1, lists:seq(1, ?SEGMENTS)})),
    Refusal = fun(Event) ->
        fun() ->
            try
                ?NIF:history_handle(Machine, 0, Event)
            catch
                error:{badarg, _} -> refused
            end
        end
    end,
    ok = no_longer_than_a_millisecond(#{
        listing => best_of(20, Refusal({rescanned, Listing(Segments)})),
        catalog => best_of(20, Refusal({catalog, 1, lists:seq(1, ?SEGMENTS)}))
    }).

%% In every phase, with as many segments as there can be.
no_event_takes_longer_than_a_millisecond(_Config) ->
    Listing = {[{Seq, 10, 5} || Seq <- lists:seq(1, 16)], {1 bsl 60, 1 bsl 60, 5}},
    %% As long as the header that it comes in may be.
    Etag = binary:copy(<<"e">>, 8192),
    Path = [
        {rescanned, Listing},
        {permit, 1},
        {read, 2, ready},
        {put, 3, {exists, 7, 50}},
        {examined, 4, {other, Etag}},
        {read, 5, ready},
        {put, 6, {stored, 7, 99}},
        {sealed, 10, 5},
        {rescanned, Listing},
        {acknowledged, 7},
        purge,
        {catalog, 9, true},
        tick,
        {done, 11},
        {done, 12},
        {done, 13}
    ],
    {Last, Took} = lists:foldl(
        fun(Event, {Machine0, Acc}) ->
            %% Each event is late enough for what is waited for.
            Handle = fun() -> ?NIF:history_handle(Machine0, 1000000 * length(Acc), Event) end,
            {Machine, _} = Handle(),
            {Machine, [{Event, best_of(20, Handle)}, {status, best_of(20, fun() -> ?NIF:history_status(Machine) end)} | Acc]}
        end,
        {machine(), []},
        Path
    ),
    ?assertMatch(#{phase := purged}, ?NIF:history_status(Last)),
    ok = no_longer_than_a_millisecond(maps:from_list(Took)).

machine() ->
    ?NIF:history_new(#{
        history_purge_wait_ms => 1, task_retry_delay_ms => 1, task_retry_delay_max_ms => 1, upload_retry_delay_ms => 1, upload_retry_delay_max_ms => 1
    }).

%% --- support ---------------------------------------------------------------------------------------------------------

no_longer_than_a_millisecond(Took) ->
    case os:getenv("STREAM_S3_SANITIZED") of
        false -> ?assertEqual(#{}, maps:filter(fun(_, Us) -> Us > 1000 end, Took));
        _ -> ok
    end.

%% Of the wall clock the best says what a call needs, and the rest what else the machine does.
best_of(Tries, Call) ->
    lists:min([element(1, timer:tc(Call)) || _ <- lists:seq(1, Tries)]).

%% A run that is purging and had so many segments.
purging(Segments) ->
    {Open, ok} = ?STATE:apply({open, ?RUN}, ?STATE:new()),
    Sealed = lists:foldl(fun(Seq, S) -> element(1, ?STATE:apply({seal, ?RUN, Seq, {made_up, 10}, 0}, S)) end, Open, lists:seq(1, Segments)),
    element(1, ?STATE:apply({purge, ?RUN}, Sealed)).

start(Host) ->
    Test = self(),
    _ = spawn(fun() ->
        process_flag(trap_exit, true),
        {ok, Uploader} = ?UPLOADER:start_link(#{source => ?HOST, argument => Host}),
        Test ! {started, Uploader},
        receive
            {'EXIT', _, _} -> ok
        end
    end),
    receive
        {started, Uploader} -> Uploader
    after ?TIMEOUT -> error(not_started)
    end.

%% A host of a purging run with three segments, whose catalog is right the first time and answers these afterwards; its uploader has begun the purge.
with_answers(Answers) ->
    Host = ?HOST:start(purging(3)),
    ok = put_all([1, 2, 3]),
    Asked = counters:new(1, []),
    ok = ?HOST:hook(Host, fun
        (catalog, _) ->
            ok = counters:add(Asked, 1, 1),
            case counters:get(Asked, 1) of
                N when N > 1, N - 1 =< length(Answers) ->
                    case lists:nth(N - 1, Answers) of
                        crash -> exit(crash);
                        Answer -> {answer, Answer}
                    end;
                _ ->
                    go_on
            end;
        (_, _) ->
            go_on
    end),
    ok = ?UPLOADER:purge(start(Host), ?RUN),
    Host.

%% Begins the purge, and holds the process of the run's work in its first question.
asked_for_its_catalog(Host, Uploader) ->
    Test = self(),
    ok = ?HOST:hook(Host, fun
        (catalog, _) ->
            Test ! {asked, self()},
            receive
                go_on -> go_on
            end;
        (_, _) ->
            go_on
    end),
    ok = ?UPLOADER:purge(Uploader, ?RUN),
    receive
        {asked, Worker} -> {run_process(Uploader), Worker}
    after ?TIMEOUT -> error(not_asked)
    end.

run_process(Uploader) ->
    {links, Links} = process_info(Uploader, links),
    [Process] = [Pid || Pid <- Links, is_pid(Pid), proc_lib:initial_call(Pid) =:= {rabbitmq_stream_s3_history_run, init, ['Argument__1']}],
    Process.

timer_ms(Reference) ->
    try
        erlang:read_timer(Reference)
    catch
        error:badarg -> none
    end.

%% Follows a process and all that it starts: each kind of library call with its largest arguments, and the largest message that the process gets.
trace(Process) ->
    Tracer = spawn_link(fun() -> trace_loop(Process, #{}, 0) end),
    _ = erlang:trace_pattern({?NIF, '_', '_'}, true, [local]),
    1 = erlang:trace(Process, true, [call, 'receive', set_on_spawn, {tracer, Tracer}]),
    Tracer.

trace_loop(Process, Calls, Message) ->
    receive
        {trace, _Pid, call, {?NIF, Function, Args}} ->
            Key = {Function, length(Args)},
            Words = erts_debug:flat_size(Args),
            Known =
                case Calls of
                    #{Key := {N, Most, _}} when Most >= Words -> setelement(1, map_get(Key, Calls), N + 1);
                    #{Key := {N, _, _}} -> {N + 1, Words, Args};
                    #{} -> {1, Words, Args}
                end,
            trace_loop(Process, Calls#{Key => Known}, Message);
        {trace, Process, 'receive', Received} ->
            trace_loop(Process, Calls, max(Message, erts_debug:flat_size(Received)));
        {trace, _Pid, 'receive', _Received} ->
            trace_loop(Process, Calls, Message);
        {stop, From} ->
            From ! {self(), #{calls => Calls, message => Message}}
    end.

traced(Tracer, Process) ->
    Delivered = erlang:trace_delivered(all),
    receive
        {trace_delivered, all, Delivered} -> ok
    end,
    ok = untrace(Process),
    _ = erlang:trace_pattern({?NIF, '_', '_'}, false, [local]),
    Tracer ! {stop, self()},
    receive
        {Tracer, Traced} -> Traced
    after ?TIMEOUT -> error(no_trace)
    end.

%% It may end at any moment, and so does its trace then.
untrace(Process) ->
    try
        _ = erlang:trace(Process, false, [all]),
        ok
    catch
        error:badarg -> ok
    end.

%% A hundred at a time.
put_all(Seqs) ->
    {Now, Later} = lists:split(min(100, length(Seqs)), Seqs),
    Refs = [
        begin
            Ref = make_ref(),
            ok = ?NIF:store_put(?STORE:handle(), self(), Ref, ?STORE:history_key(?RUN, Seq), <<"x">>, #{}),
            Ref
        end
     || Seq <- Now
    ],
    lists:foreach(
        fun(Ref) ->
            receive
                {store_result, Ref, {ok, _}} -> ok
            after ?TIMEOUT -> error(not_stored)
            end
        end,
        Refs
    ),
    case Later of
        [] -> ok;
        _ -> put_all(Later)
    end.

keys() ->
    {ok, #{objects := Objects}} = ?STORE:list(?STORE:history_prefix(?RUN), undefined, 1000, ?TIMEOUT),
    [Key || {Key, _, _} <- Objects].
