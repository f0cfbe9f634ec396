%% The history uploader with a host whose committed state is a value, on the server s3local, with faults on the wire.
-module(rabbitmq_stream_s3_history_uploader_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-import(stream_s3_wait, [eventually/1]).

-compile(nowarn_export_all).
-compile(export_all).

-define(UPLOADER, rabbitmq_stream_s3_history_uploader).
-define(STORE, rabbitmq_stream_s3_store).
-define(HOST, stream_s3_history_host).
-define(STATE, stream_s3_history_state).
-define(TIMEOUT, 30000).
-define(MIB, 1048576).
-define(ENV, #{
    task_retry_delay_ms => 5,
    task_retry_delay_max_ms => 50,
    upload_retry_delay_ms => 5,
    upload_retry_delay_max_ms => 50,
    %% Scans come when a case asks for one.
    history_rescan_interval_ms => 600000,
    history_purge_wait_ms => 200,
    gc_min_age_ms => 0
}).

suite() -> [{timetrap, {seconds, 120}}].

all() ->
    [
        seq_ordered_upload_and_acknowledgment,
        owner_restart_between_upload_and_acknowledgment,
        unknown_write_outcome,
        a_replaced_decodable_object,
        a_replaced_undecodable_object,
        outage_backlog_gauges_growing_then_draining,
        retention_postponement_and_purge_of_the_history_prefix_of_a_run,
        purging_runs,
        a_permanent_rejection_during_a_purge_is_retried,
        snapshot_restore_before_acknowledgment,
        a_stopping_owner_abandons_its_pending_write_before_the_new_owner_purges,
        concurrency_2_with_20_runs_whose_acknowledgments_are_blocked,
        content_kept_through_mode_off_pruning_is_all_already_present,
        permanent_failures_are_retried_only_by_the_rescan_including_10_rapid_seals,
        a_corrupt_run_does_not_stop_the_rescan,
        a_closed_runs_segment_uploads_decodes_and_is_uploaded_in_committed_state,
        a_late_write_of_a_purged_run_goes_with_a_later_sweep,
        a_read_failure_never_writes,
        a_run_without_segment_state_is_purged_at_once,
        options_out_of_range_are_refused_with_a_sentence,
        a_store_without_conditional_writes_is_refused_with_a_sentence,
        a_store_that_does_not_answer_at_the_start_is_waited_for,
        a_segment_of_64_mib_can_be_compared_and_read_back,
        two_owners_at_once_acknowledge_each_segment_once,
        a_rescan_of_100000_segments_of_1000_runs_takes_less_than_a_second,
        memory_of_a_scan_is_bounded_by_the_page,
        the_metrics_have_the_names_of_the_document,
        misuse_of_the_library_raises_badarg_with_a_text
    ].

init_per_suite(Config) ->
    Dir = filename:join(?config(priv_dir, Config), "world"),
    [{world, stream_s3_world:start(#{store => s3, dir => Dir, env => ?ENV})} | Config].

end_per_suite(Config) ->
    stream_s3_world:stop(?config(world, Config)).

init_per_testcase(_Case, Config) ->
    ok = stream_s3_store_faults:clear(server(Config)),
    ok = stream_s3_world:set(?ENV),
    Host = ?HOST:start(),
    [{host, Host}, {before, counters()} | Config].

end_per_testcase(_Case, Config) ->
    ok = stream_s3_store_faults:clear(server(Config)),
    _ = [?UPLOADER:stop(Pid) || {Pid, _} <- ets:tab2list(?UPLOADER), is_process_alive(Pid)],
    %% The next case finds an empty bucket.
    ok = rabbitmq_stream_s3_history_scan:purge_by_prefix(<<"r1">>),
    ?HOST:stop(?config(host, Config)).

server(Config) -> stream_s3_world:s3local(?config(world, Config)).

%% --- cases -----------------------------------------------------------------------------------------------------------

seq_ordered_upload_and_acknowledgment(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = seal(Host, Run, lists:seq(1, 30)),
    Uploader = start(Host, #{}),
    ok = all_uploaded(Host),
    %% More come while it runs.
    ok = seal(Host, Run, lists:seq(31, 40)),
    [ok = ?UPLOADER:sealed(Uploader, Run, #{size => 100, sealed_ms => now_ms()}) || _ <- lists:seq(31, 40)],
    ok = all_uploaded(Host),
    ?assertEqual([{Run, Seq} || Seq <- lists:seq(1, 40)], ?STATE:acknowledged(?HOST:state(Host))),
    ?assertEqual([], ?STATE:violations(?HOST:state(Host))),
    ?assertEqual(#{uploaded => 40}, counted(Config)),
    [?assertEqual({ok, content(Run, Seq)}, ?UPLOADER:read(Run, Seq)) || Seq <- lists:seq(1, 40)],
    ok = nothing_left(Uploader).

owner_restart_between_upload_and_acknowledgment(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = seal(Host, Run, [1, 2]),
    blocked = block(Host, acknowledge, fun() -> start(Host, #{}) end),
    ok = stop_all(),
    ?assertEqual([], ?STATE:acknowledged(?HOST:state(Host))),
    ?assertMatch({ok, _}, ?UPLOADER:read(Run, 1)),
    ok = ?HOST:hook(Host, fun(_, _) -> go_on end),
    _ = start(Host, #{}),
    ok = all_uploaded(Host),
    ?assertEqual([{Run, 1}, {Run, 2}], ?STATE:acknowledged(?HOST:state(Host))),
    ?assertMatch(#{uploaded := 2, already_present := 1}, counted(Config)),
    %% What was found is acknowledged with the size that it has.
    #{acknowledgment := #{size := Size, stored := already_present, key := Key}} = ?STATE:segment(Run, 1, ?HOST:state(Host)),
    ?assertMatch({ok, #{objects := [{Key, Size, _}]}}, ?STORE:list(Key, undefined, 1, ?TIMEOUT)).

unknown_write_outcome(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = seal(Host, Run, [1, 2, 3]),
    [ok = fault(Config, #{op => put, key => "*" ++ integer_to_list(Seq) ++ ".segment", count => 1, do => lost_reply}) || Seq <- [1, 2]],
    _ = start(Host, #{}),
    ok = all_uploaded(Host),
    ?assertMatch(#{already_present := 2, uploaded := 1, retryable_error := 2}, counted(Config)),
    [?assertEqual({ok, content(Run, Seq)}, ?UPLOADER:read(Run, Seq)) || Seq <- [1, 2, 3]],
    ?assertEqual([], ?STATE:violations(?HOST:state(Host))).

a_replaced_decodable_object(Config) ->
    Run = run(?FUNCTION_NAME),
    %% A whole segment, but of another content, as after a restore of a store that was ahead.
    {stored, _, _} = put_segment(Run, 1, <<"something else of another length">>),
    {stored, _, _} = put_segment(Run, 2, binary:copy(<<"x">>, byte_size(content(Run, 2)))),
    replaced(Run, Config).

a_replaced_undecodable_object(Config) ->
    Run = run(?FUNCTION_NAME),
    ok = put_raw(Run, 1, <<"not a segment">>),
    %% Of the right length, and damaged in its last byte.
    {stored, _, Size} = put_segment(Run, 2, content(Run, 2)),
    {ok, #{body := Whole}} = ?STORE:get(?STORE:history_key(Run, 2), whole, ?TIMEOUT),
    Head = binary:part(Whole, 0, Size - 1),
    ok = put_raw(Run, 2, <<Head/binary, (binary:last(Whole) bxor 1)>>),
    ?assertMatch({error, {corrupt, _}}, ?UPLOADER:read(Run, 2)),
    replaced(Run, Config).

replaced(Run, Config) ->
    Host = ?config(host, Config),
    ok = seal(Host, Run, [1, 2]),
    _ = start(Host, #{}),
    ok = all_uploaded(Host),
    ?assertMatch(#{replaced := 2, checksum_mismatches := 2}, counted(Config)),
    [?assertEqual({ok, content(Run, Seq)}, ?UPLOADER:read(Run, Seq)) || Seq <- [1, 2]],
    ?assertMatch(#{acknowledgment := #{stored := replaced}}, ?STATE:segment(Run, 1, ?HOST:state(Host))).

outage_backlog_gauges_growing_then_draining(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = fault(Config, #{op => put, key => "*/history/*", do => status, status => 503}),
    Uploader = start(Host, #{}),
    Hour = 3600000,
    Sizes = fun(N) -> lists:sum([byte_size(content(Run, Seq)) || Seq <- lists:seq(1, N)]) end,
    lists:foreach(
        fun(Seq) ->
            ok = ?HOST:commit(Host, {open, Run}),
            ok = ?HOST:commit(Host, {seal, Run, Seq, content(Run, Seq), now_ms() - Hour}),
            ok = ?UPLOADER:sealed(Uploader, Run, #{size => byte_size(content(Run, Seq)), sealed_ms => now_ms() - Hour}),
            ok = eventually(fun() -> {gauge(history_upload_backlog_segments), gauge(history_upload_backlog_bytes)} =:= {Seq, Sizes(Seq)} end)
        end,
        lists:seq(1, 20)
    ),
    Age = gauge(history_upload_oldest_sealed_age_seconds),
    ?assert(Age >= 3600 andalso Age < 3700),
    ?assertMatch(#{retryable_error := N} when N > 0, counted(Config)),
    ok = stream_s3_store_faults:clear(server(Config)),
    ok = all_uploaded(Host),
    ok = eventually(fun() -> gauge(history_upload_backlog_segments) =:= 0 end),
    ?assertEqual({0, 0.0}, {gauge(history_upload_backlog_bytes), gauge(history_upload_oldest_sealed_age_seconds)}),
    ?assertMatch(#{uploaded := 20}, counted(Config)).

retention_postponement_and_purge_of_the_history_prefix_of_a_run(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    %% One id is the beginning of the other.
    Other = <<Run/binary, "2">>,
    ok = seal(Host, Run, [1, 2]),
    ok = seal(Host, Other, [1]),
    ok = ?HOST:commit(Host, {close, Run}),
    ok = fault(Config, #{op => put, key => "*/history/*", do => status, status => 503}),
    Uploader = start(Host, #{}),
    ?assertEqual({postpone, 3600000}, ?UPLOADER:postpone_retention(Uploader, Run)),
    ok = ?HOST:hook(Host, fun(_, _) -> {answer, {error, {retryable, no_leader}}} end),
    ?assertEqual({postpone, 3600000}, ?UPLOADER:postpone_retention(Uploader, Run)),
    ok = ?HOST:hook(Host, fun(_, _) -> go_on end),
    ok = stream_s3_store_faults:clear(server(Config)),
    ok = all_uploaded(Host),
    ?assertEqual(proceed, ?UPLOADER:postpone_retention(Uploader, Run)),
    %% Something that no catalog has.
    ok = put_raw(Run, 77, <<"debris">>),
    ok = ?HOST:commit(Host, {purge, Run}),
    ?assertEqual(proceed, ?UPLOADER:postpone_retention(Uploader, Run)),
    ok = ?UPLOADER:purge(Uploader, Run),
    ok = ?HOST:await(Host, fun(State) -> ?STATE:runs(State) =:= [Other] end),
    ?assertEqual([], keys(Run)),
    ?assertEqual([?STORE:history_key(Other, 1)], keys(Other)),
    ok = ?HOST:commit(Host, {purge, Other}),
    ok = ?UPLOADER:purge(Uploader, Other),
    ok = ?HOST:await(Host, fun(State) -> ?STATE:runs(State) =:= [] end),
    ok = nothing_left(Uploader).

purging_runs(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    Late = <<Run/binary, "-late">>,
    ok = seal(Host, Run, [1, 2]),
    ok = seal(Host, Late, [1]),
    %% One is found to be purging when its acknowledgment is refused; the other is purged in the middle of a write.
    ok = ?HOST:hook(Host, fun
        (acknowledge, [#{run := R}]) when R =:= Run -> {answer, gone};
        (_, _) -> go_on
    end),
    ok = fault(Config, #{op => put, key => "*-late/*", do => stall}),
    Uploader = start(Host, #{}),
    ok = eventually(fun() -> maps:get(gone, counted(Config), 0) =:= 1 end),
    ok = eventually(fun() -> maps:get(storing, maps:get(runs, ?UPLOADER:status(Uploader)), 0) =:= 1 end),
    ?assertEqual(1, gauge(history_upload_backlog_segments)),
    ok = ?HOST:commit_all(Host, [{purge, Run}, {purge, Late}]),
    ok = ?UPLOADER:purge(Uploader, Late),
    ok = ?UPLOADER:purge(Uploader, Late),
    ok = ?UPLOADER:purge(Uploader, Run),
    %% What is sealed of a purging run is nobody's business any more.
    ok = ?UPLOADER:sealed(Uploader, Run, #{size => 1, sealed_ms => 0}),
    ok = ?HOST:await(Host, fun(State) -> ?STATE:runs(State) =:= [] end),
    ?assertEqual([], keys(Run) ++ keys(Late)),
    ?assertEqual([], ?STATE:acknowledged(?HOST:state(Host))),
    ok = nothing_left(Uploader).

a_permanent_rejection_during_a_purge_is_retried(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = seal(Host, Run, [1]),
    Uploader = start(Host, #{}),
    ok = all_uploaded(Host),
    ok = fault(Config, #{op => list, key => "*/history/*", do => status, status => 403, code => 'AccessDenied', count => 1}),
    ok = ?HOST:commit(Host, {purge, Run}),
    ok = ?UPLOADER:purge(Uploader, Run),
    Waits = fun() -> is_integer(pause_ms(Run)) andalso pause_ms(Run) > 30000 end,
    ok = eventually(Waits),
    %% Not before its time.
    run_process(Run) ! wake,
    ok = eventually(Waits),
    ?assertEqual([Run], ?STATE:runs(?HOST:state(Host))),
    case os:getenv("STREAM_S3_DEEP") of
        false ->
            ok;
        _ ->
            ok = ?HOST:await(Host, fun(State) -> ?STATE:runs(State) =:= [] end, 90000),
            ?assertEqual([], keys(Run))
    end.

snapshot_restore_before_acknowledgment(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = seal(Host, Run, [1, 2, 3]),
    Snapshot = ?HOST:state(Host),
    _ = start(Host, #{}),
    ok = all_uploaded(Host),
    ok = stop_all(),
    %% Another member has not seen the acknowledgments, and begins where the snapshot was taken.
    Restored = ?HOST:start(Snapshot),
    _ = start(Restored, #{}),
    ok = all_uploaded(Restored),
    ?assertEqual([{Run, 1}, {Run, 2}, {Run, 3}], ?STATE:acknowledged(?HOST:state(Restored))),
    ?assertMatch(#{uploaded := 3, already_present := 3}, counted(Config)),
    Acknowledgments = fun(H) -> [maps:without([stored], map_get(acknowledgment, ?STATE:segment(Run, S, ?HOST:state(H)))) || S <- [1, 2, 3]] end,
    ?assertEqual(Acknowledgments(Host), Acknowledgments(Restored)),
    ok = stop_all(),
    ?HOST:stop(Restored).

a_stopping_owner_abandons_its_pending_write_before_the_new_owner_purges(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = seal(Host, Run, [1]),
    ok = fault(Config, #{op => put, key => "*/history/*", do => stall}),
    Stalled = stream_s3_store_faults:count(server(Config), put),
    Old = start(Host, #{}),
    ok = eventually(fun() -> stream_s3_store_faults:count(server(Config), put) > Stalled end),
    ?assertMatch(#{permits := 1}, ?UPLOADER:status(Old)),
    ok = ?UPLOADER:stop(Old),
    ok = eventually(fun() -> rabbitmq_stream_s3_nif:history_body_bytes() =:= 0 end),
    ok = stream_s3_store_faults:clear(server(Config)),
    New = start(Host, #{}),
    ok = ?HOST:commit(Host, {purge, Run}),
    ok = ?UPLOADER:purge(New, Run),
    ok = ?HOST:await(Host, fun(State) -> ?STATE:runs(State) =:= [] end),
    ?assertEqual([], keys(Run)).

concurrency_2_with_20_runs_whose_acknowledgments_are_blocked(Config) ->
    Host = ?config(host, Config),
    Body = 64 * ?MIB,
    Runs = [<<"blocked-", (integer_to_binary(N))/binary>> || N <- lists:seq(101, 120)],
    _ = [?HOST:commit_all(Host, [{open, Run}, {seal, Run, 1, {made_up, Body}, now_ms()}]) || Run <- Runs],
    Test = self(),
    %% Bodies are made by the host's callback, and not by the host, so that its memory is none of these numbers.
    ok = ?HOST:hook(Host, fun
        (read_segment, [Run, 1]) ->
            {answer, {ok, binary:copy(crypto:hash(sha256, Run), Body div 32)}};
        (acknowledge, [#{run := Run}]) ->
            Test ! {acknowledges, Run, self()},
            receive
                go_on -> go_on
            end;
        (_, _) ->
            go_on
    end),
    _ = [erlang:garbage_collect(Pid) || Pid <- processes()],
    Before = erlang:memory(binary),
    Watch = watch_memory(),
    Uploader = start(Host, #{concurrency => 2}),
    Blocked = [
        receive
            {acknowledges, Run, Pid} -> Pid
        after ?TIMEOUT -> error({no_acknowledgment, Run})
        end
     || Run <- Runs
    ],
    #{binary := Peak, lent := Lent} = peak(Watch),
    ct:pal("concurrency 2, 20 runs of 64 MiB: at most ~b MiB of binaries, ~b MiB lent to requests", [(Peak - Before) div ?MIB, Lent div ?MIB]),
    ?assert(Lent =< 2 * Body),
    %% Some for everything else in this VM.
    ?assert(Peak - Before =< 2 * Body + 16 * ?MIB),
    %% While acknowledgments wait, no permit is held, and no body.
    ?assertMatch(#{permits := 0, waiting := 0, runs := #{acknowledging := 20}}, ?UPLOADER:status(Uploader)),
    ?assertEqual(0, rabbitmq_stream_s3_nif:history_body_bytes()),
    _ = [Pid ! go_on || Pid <- Blocked],
    ok = all_uploaded(Host),
    [ok = rabbitmq_stream_s3_history_scan:purge_by_prefix(Run) || Run <- Runs],
    ok.

content_kept_through_mode_off_pruning_is_all_already_present(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = seal(Host, Run, lists:seq(1, 5)),
    blocked = block(Host, acknowledge, fun() -> start(Host, #{}) end),
    ok = stop_all(),
    %% What was uploaded but not acknowledged is still there after the host has turned offloading off and prunes what it may.
    [{stored, _, _} = put_segment(Run, Seq, content(Run, Seq)) || Seq <- [2, 3, 4, 5]],
    ok = ?HOST:commit(Host, {prune, Run}),
    ok = ?HOST:hook(Host, fun(_, _) -> go_on end),
    _ = start(Host, #{}),
    ok = all_uploaded(Host),
    ?assertMatch(#{already_present := 5, uploaded := 1}, counted(Config)),
    ok = ?HOST:commit(Host, {prune, Run}),
    [?assertEqual({ok, content(Run, Seq)}, ?UPLOADER:read(Run, Seq)) || Seq <- lists:seq(1, 5)].

permanent_failures_are_retried_only_by_the_rescan_including_10_rapid_seals(Config) ->
    Host = ?config(host, Config),
    Failures = [
        %% Corrupt input, a store that rejects, a rejected acknowledgment.
        {read, fun() -> ok = ?HOST:hook(Host, fun(F, _) -> case F of read_segment -> {answer, {error, {permanent, corrupt}}}; _ -> go_on end end) end},
        {put, fun() -> ok = fault(Config, #{op => put, key => "*/history/*", do => status, status => 403, code => 'AccessDenied'}) end},
        {acknowledge, fun() -> ok = ?HOST:hook(Host, fun(F, _) -> case F of acknowledge -> {answer, {error, {permanent, rejected}}}; _ -> go_on end end) end}
    ],
    lists:foreach(
        fun({Name, Break}) ->
            Run = <<(run(?FUNCTION_NAME))/binary, "-", (atom_to_binary(Name))/binary>>,
            Before = maps:get(permanent_error, counted(Config), 0),
            ok = Break(),
            Uploader = start(Host, #{}),
            ok = seal(Host, Run, [1]),
            ok = ?UPLOADER:sealed(Uploader, Run, #{size => 1, sealed_ms => now_ms()}),
            Blocked = fun() -> maps:get(blocked, maps:get(runs, ?UPLOADER:status(Uploader)), 0) =:= 1 end,
            ok = eventually(Blocked),
            lists:foreach(
                fun(Seq) ->
                    ok = seal(Host, Run, [Seq]),
                    ok = ?UPLOADER:sealed(Uploader, Run, #{size => 1, sealed_ms => now_ms()})
                end,
                lists:seq(2, 11)
            ),
            ok = eventually(fun() -> gauge(history_upload_backlog_segments) =:= 11 end),
            true = Blocked(),
            ?assertEqual(Before + 1, maps:get(permanent_error, counted(Config))),
            %% The scan tries once more.
            ok = ?UPLOADER:rescan(Uploader),
            ok = eventually(fun() -> maps:get(permanent_error, counted(Config)) =:= Before + 2 end),
            ok = stream_s3_store_faults:clear(server(Config)),
            ok = ?HOST:hook(Host, fun(_, _) -> go_on end),
            ok = eventually(Blocked),
            ok = ?UPLOADER:rescan(Uploader),
            ok = all_uploaded(Host),
            ok = nothing_left(Uploader),
            ok = stop_all()
        end,
        Failures
    ),
    ?assertEqual([], ?STATE:violations(?HOST:state(Host))).

a_corrupt_run_does_not_stop_the_rescan(Config) ->
    Host = ?config(host, Config),
    [First, Corrupt, Last] = [<<(run(?FUNCTION_NAME))/binary, Letter>> || Letter <- "abc"],
    [ok = seal(Host, Run, [1, 2, 3]) || Run <- [First, Corrupt, Last]],
    ok = ?HOST:hook(Host, fun
        (pending, [From, Limit]) ->
            #{entries := Entries} = Page = ?STATE:pending(From, Limit, ?HOST:state(Host)),
            Rows = [
                case Entry of
                    #{run := Corrupt, seq := 1} -> {unreadable, Corrupt, bad_header};
                    _ -> Entry
                end
             || Entry <- Entries, map_get(run, Entry) =/= Corrupt orelse map_get(seq, Entry) =:= 1
            ],
            {answer, {ok, Page#{entries := Rows}}};
        (_, _) ->
            go_on
    end),
    %% Pages end anywhere.
    Uploader = start(Host, #{page_size => 2}),
    ok = ?HOST:await(Host, fun(State) -> length(?STATE:acknowledged(State)) =:= 6 end),
    ?assertEqual([First, Last], lists:usort([Run || {Run, _} <- ?STATE:acknowledged(?HOST:state(Host))])),
    ok = eventually(fun() -> not maps:get(scanning, ?UPLOADER:status(Uploader)) end),
    ?assertMatch(#{rescan_errors := 1, uploaded := 6}, counted(Config)),
    ok = ?HOST:hook(Host, fun(_, _) -> go_on end),
    ok = ?UPLOADER:rescan(Uploader),
    ok = all_uploaded(Host).

a_closed_runs_segment_uploads_decodes_and_is_uploaded_in_committed_state(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = seal(Host, Run, [1]),
    ok = ?HOST:commit(Host, {close, Run}),
    _ = start(Host, #{}),
    ok = all_uploaded(Host),
    #{state := uploaded, acknowledgment := #{key := Key, checksum := Crc, size := Size}} = ?STATE:segment(Run, 1, ?HOST:state(Host)),
    Content = content(Run, 1),
    Bytes = byte_size(Content),
    RunBytes = byte_size(Run),
    {ok, #{body := Object}} = ?STORE:get(Key, whole, ?TIMEOUT),
    %% By the bytes of the format, and not by the library that wrote them.
    ?assertEqual(<<"OSIH", 1:32, RunBytes:32, Run/binary, 1:64, Bytes:64, (erlang:crc32(Content)):32, Content/binary>>, Object),
    ?assertEqual({erlang:crc32(Content), byte_size(Object)}, {Crc, Size}),
    ?assertEqual(<<"rabbitmq/history/", Run/binary, "/00000000000000000001.segment">>, Key).

a_late_write_of_a_purged_run_goes_with_a_later_sweep(Config) ->
    Host = ?config(host, Config),
    [Purged, Alive] = [<<(run(?FUNCTION_NAME))/binary, Letter>> || Letter <- "ab"],
    ok = seal(Host, Purged, [1]),
    ok = seal(Host, Alive, [1]),
    Uploader = start(Host, #{}),
    ok = all_uploaded(Host),
    ok = ?HOST:commit(Host, {purge, Purged}),
    ok = ?UPLOADER:purge(Uploader, Purged),
    ok = ?HOST:await(Host, fun(State) -> ?STATE:runs(State) =:= [Alive] end),
    %% The store had taken this in long before.
    {stored, _, _} = put_segment(Purged, 1, content(Purged, 1)),
    ok = put_raw(<<"not..ours/deeper">>, 1, <<"stays">>),
    %% Without a sure answer, and while it is young, it stays.
    ok = ?HOST:hook(Host, fun(F, _) -> case F of run_state -> {answer, {error, {retryable, no_leader}}}; _ -> go_on end end),
    ?assertMatch({ok, #{deleted := 0}}, ?UPLOADER:sweep(Uploader)),
    ok = ?HOST:hook(Host, fun(_, _) -> go_on end),
    ok = stream_s3_world:set(#{gc_min_age_ms => 3600000}),
    ?assertMatch({ok, #{deleted := 0}}, ?UPLOADER:sweep(Uploader)),
    ok = stream_s3_world:set(#{gc_min_age_ms => 0}),
    {ok, #{failed := 0}} = ?UPLOADER:sweep(Uploader),
    ?assertEqual([], keys(Purged)),
    ?assertEqual(1, length(keys(Alive))),
    ?assertMatch({ok, #{objects := [_]}}, ?STORE:list(<<"rabbitmq/history/not..ours/">>, undefined, 10, ?TIMEOUT)).

a_read_failure_never_writes(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = seal(Host, Run, [1]),
    Test = self(),
    ok = ?HOST:hook(Host, fun
        (read_segment, _) ->
            Test ! {reads, self()},
            receive
                How -> How()
            end;
        (_, _) ->
            go_on
    end),
    _ = start(Host, #{}),
    Answers = [
        fun() -> error(broken) end,
        fun() -> exit(kill) end,
        fun() -> {answer, {error, {retryable, not_yet}}} end,
        fun() -> {answer, {ok, [256]}} end
    ],
    lists:foreach(
        fun(Answer) ->
            receive
                {reads, Pid} -> Pid ! Answer
            after ?TIMEOUT -> error(no_read)
            end
        end,
        Answers
    ),
    ok = eventually(fun() -> maps:get(permanent_error, counted(Config), 0) =:= 1 end),
    ?assertMatch(#{retryable_error := 3}, counted(Config)),
    ?assertEqual([], keys(Run)).

a_run_without_segment_state_is_purged_at_once(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = ?HOST:commit_all(Host, [{open, Run}, {purge, Run}]),
    Uploader = start(Host, #{purge_wait_ms => 3600000}),
    ok = ?UPLOADER:purge(Uploader, Run),
    ok = ?HOST:await(Host, fun(State) -> ?STATE:runs(State) =:= [] end).

options_out_of_range_are_refused_with_a_sentence(Config) ->
    Host = ?config(host, Config),
    process_flag(trap_exit, true),
    Try = fun(Options) -> ?UPLOADER:start_link(maps:merge(#{source => ?HOST, argument => Host}, Options)) end,
    ?assertEqual({error, {bad_option, <<"concurrency must be an integer from 1 to 1024, not 0">>}}, Try(#{concurrency => 0})),
    ?assertMatch({error, {bad_option, <<"concurrency ", _/binary>>}}, Try(#{concurrency => 1025})),
    ?assertMatch({error, {bad_option, <<"page_size ", _/binary>>}}, Try(#{page_size => many})),
    ?assertEqual({error, {bad_option, <<"there is no option pagesize">>}}, Try(#{pagesize => 1})),
    ?assertEqual({error, {bad_option, <<"source is missing">>}}, ?UPLOADER:start_link(#{argument => Host})).

a_store_without_conditional_writes_is_refused_with_a_sentence(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = seal(Host, Run, [1]),
    process_flag(trap_exit, true),
    %% Whatever a rule for conditions does, they are not looked at.
    ok = fault(Config, #{op => condition, do => lost_reply}),
    Options = #{source => ?HOST, argument => Host},
    {error, {unsupported, Sentence}} = ?UPLOADER:start_link(Options),
    ?assertMatch(<<"the object store does not honour conditional writes", _/binary>>, Sentence),
    %% The same where it only turns out later.
    ok = stream_s3_store_faults:clear(server(Config)),
    ok = stream_s3_store_faults:add(server(Config), [#{op => put, do => status, status => 503, count => 3}, #{op => condition, do => lost_reply}]),
    {ok, Uploader} = ?UPLOADER:start_link(Options),
    receive
        {'EXIT', Uploader, Reason} -> ?assertEqual({shutdown, {unsupported, Sentence}}, Reason)
    after ?TIMEOUT -> error(still_running)
    end,
    ?assertEqual([], keys(Run)).

a_store_that_does_not_answer_at_the_start_is_waited_for(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = seal(Host, Run, [1]),
    ok = fault(Config, #{op => put, do => status, status => 503}),
    Uploader = start(Host, #{}),
    ok = eventually(fun() -> maps:get(waiting, ?UPLOADER:status(Uploader)) =:= 1 end),
    ?assertMatch(#{proven := false, permits := 0}, ?UPLOADER:status(Uploader)),
    ok = stream_s3_store_faults:clear(server(Config)),
    ok = all_uploaded(Host),
    ?assertMatch(#{proven := true}, ?UPLOADER:status(Uploader)).

a_segment_of_64_mib_can_be_compared_and_read_back(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    Body = 64 * ?MIB,
    ok = ?HOST:commit_all(Host, [{open, Run}, {seal, Run, 1, {made_up, Body}, now_ms()}]),
    ok = fault(Config, #{op => put, key => "*/history/*", count => 1, do => lost_reply}),
    _ = start(Host, #{}),
    ok = all_uploaded(Host),
    ?assertMatch(#{already_present := 1}, counted(Config)),
    {ok, Read} = ?UPLOADER:read(Run, 1),
    ?assertEqual(Body, byte_size(Read)).

two_owners_at_once_acknowledge_each_segment_once(Config) ->
    Host = ?config(host, Config),
    Runs = [<<(run(?FUNCTION_NAME))/binary, Letter>> || Letter <- "abcdefgh"],
    [ok = seal(Host, Run, lists:seq(1, 10)) || Run <- Runs],
    ok = fault(Config, #{op => put, key => "*/history/*", count => 20, do => lost_reply}),
    Uploaders = [start(Host, #{}), start(Host, #{})],
    ok = all_uploaded(Host),
    Acknowledged = ?STATE:acknowledged(?HOST:state(Host)),
    ?assertEqual([{Run, Seq} || Run <- Runs, Seq <- lists:seq(1, 10)], lists:sort(Acknowledged)),
    ?assertEqual([], ?STATE:violations(?HOST:state(Host))),
    [ok = nothing_left(Uploader) || Uploader <- Uploaders],
    [ok = rabbitmq_stream_s3_history_scan:purge_by_prefix(Run) || Run <- Runs],
    ok.

a_rescan_of_100000_segments_of_1000_runs_takes_less_than_a_second(Config) ->
    Host = many(Config),
    %% Nothing is uploaded: this is about the scan.
    ok = fault(Config, #{op => put, do => status, status => 503}),
    Uploader = start(Host, #{}),
    ok = eventually(fun() -> gauge(history_upload_backlog_segments) =:= 100000 end),
    ok = eventually(fun() -> not maps:get(scanning, ?UPLOADER:status(Uploader)) end),
    Times = [
        begin
            #{scans := Scans} = ?UPLOADER:status(Uploader),
            {Us, ok} = timer:tc(fun() ->
                ok = ?UPLOADER:rescan(Uploader),
                eventually(fun() ->
                    #{scans := Now, scanning := Scanning} = ?UPLOADER:status(Uploader),
                    Now > Scans andalso not Scanning
                end)
            end),
            Us div 1000
        end
     || _ <- [1, 2, 3]
    ],
    ct:pal("rescan of 100,000 segments of 1,000 runs: ~w ms", [Times]),
    ?assertEqual(100000, gauge(history_upload_backlog_segments)),
    ?assert(lists:min(Times) < 1000),
    %% What the runs' processes take.
    Pids = [Pid || Pid <- processes(), {dictionary, D} <- [process_info(Pid, dictionary)], proplists:get_value('$initial_call', D) =:= {rabbitmq_stream_s3_history_run, init, 1}],
    ?assertEqual(1000, length(Pids)),
    Memory = lists:sum([M || Pid <- Pids, {memory, M} <- [process_info(Pid, memory)]]),
    ct:pal("1,000 processes of runs: ~b KiB", [Memory div 1024]),
    ?assert(Memory < 64 * ?MIB).

memory_of_a_scan_is_bounded_by_the_page(Config) ->
    Host = many(Config),
    Scan = fun(PageSize) ->
        Test = self(),
        {Pid, Monitor} = spawn_monitor(fun() ->
            Tell = fun(Found) ->
                _ = erlang:garbage_collect(),
                {memory, Memory} = process_info(self(), memory),
                Test ! {memory, Memory, length(Found)},
                ok
            end,
            exit(rabbitmq_stream_s3_history_scan:scan({?HOST, Host}, PageSize, Tell))
        end),
        receive
            {'DOWN', Monitor, process, Pid, Result} -> ?assertEqual(ok, Result)
        end,
        most(0, 0)
    end,
    {Small, 1000} = Scan(100),
    {Large, 1000} = Scan(100000),
    ct:pal("memory of a scan: ~b KiB with pages of 100, ~b KiB with one of 100,000", [Small div 1024, Large div 1024]),
    ?assert(Small < 200 * 1024).

most(Memory, Runs) ->
    receive
        {memory, More, Found} -> most(max(Memory, More), Runs + Found)
    after 0 -> {Memory, Runs}
    end.

the_metrics_have_the_names_of_the_document(_Config) ->
    #{counters := Counters, gauges := Gauges} = ?UPLOADER:metrics(),
    Outcomes = [uploaded, already_present, replaced, retryable_error, permanent_error, gone],
    ?assertEqual(
        [{history_uploads_total, #{outcome => O}} || O <- Outcomes] ++
            [{N, #{}} || N <- [history_upload_bytes_total, history_upload_checksum_mismatches_total, history_upload_rescan_errors_total]],
        [{Name, Labels} || {Name, Labels, N} <- Counters, is_integer(N)]
    ),
    ?assertEqual(
        [history_upload_backlog_segments, history_upload_backlog_bytes, history_upload_oldest_sealed_age_seconds],
        [Name || {Name, #{}, N} <- Gauges, is_number(N)]
    ).

misuse_of_the_library_raises_badarg_with_a_text(_Config) ->
    Options = #{
        history_purge_wait_ms => 1, task_retry_delay_ms => 1, task_retry_delay_max_ms => 1, upload_retry_delay_ms => 1, upload_retry_delay_max_ms => 1
    },
    Nif = rabbitmq_stream_s3_nif,
    Machine = Nif:history_new(Options),
    Listing = {[{1, 10, 5}], {2, 20, undefined}},
    ?assertMatch({_, [{ask_permit, 1}]}, Nif:history_handle(Machine, 0, {rescanned, Listing})),
    %% A state is a value: the old one has not changed.
    ?assertMatch(#{phase := idle, segments := 0, is_idle := true}, Nif:history_status(Machine)),
    Bad = [
        nonsense,
        {nonsense, 1},
        {permit, -1},
        {permit, 1, 2},
        {read, 1, maybe_so},
        {put, 1, {stored, 16#1FFFFFFFF, 1}},
        {put, 1, stored},
        {examined, 1, {other, 5}},
        {listed, 1, [Listing]},
        {rescanned, {[{1, 2} | 3], {0, 0, undefined}}},
        {catalog, 1, [a]},
        {failed, 1, sometimes, 0.5},
        {failed, 1, transient, 2}
    ],
    [?assertError({badarg, <<_/binary>>}, Nif:history_handle(Machine, 0, Event)) || Event <- Bad],
    ?assertError({badarg, <<"history_purge_wait_ms", _/binary>>}, Nif:history_new(maps:remove(history_purge_wait_ms, Options))),
    ?assertError({badarg, <<"run id", _/binary>>}, Nif:history_key(<<"p">>, {<<"..">>, 1})),
    ?assertError({badarg, <<"payload", _/binary>>}, Nif:history_put(?STORE:handle(), self(), ref, {<<"r">>, 1}, ["list"], undefined)),
    ?assertEqual({true, false, false}, {Nif:valid_run_id(<<"a.b">>), Nif:valid_run_id(<<"a/b">>), Nif:valid_run_id(a)}).

%% --- support ---------------------------------------------------------------------------------------------------------

run(Name) -> <<"r-", (atom_to_binary(Name))/binary>>.

content(Run, Seq) -> iolist_to_binary([[Run, " row ", integer_to_list(N), $\n] || N <- lists:seq(1, 10 + Seq)]).

now_ms() -> erlang:system_time(millisecond).

start(Host, Options) ->
    %% Not linked to the process of the case.
    Test = self(),
    _ = spawn(fun() ->
        process_flag(trap_exit, true),
        Test ! {started, ?UPLOADER:start_link(maps:merge(#{source => ?HOST, argument => Host}, Options))},
        receive
            {'EXIT', _, _} -> ok
        end
    end),
    receive
        {started, {ok, Uploader}} -> Uploader;
        {started, Refused} -> error(Refused)
    after ?TIMEOUT -> error(not_started)
    end.

stop_all() ->
    _ = [?UPLOADER:stop(Pid) || {Pid, _} <- ets:tab2list(?UPLOADER)],
    ok.

seal(Host, Run, Seqs) ->
    ok = ?HOST:commit_all(Host, [{open, Run} | [{seal, Run, Seq, content(Run, Seq), now_ms()} || Seq <- Seqs]]).

all_uploaded(Host) ->
    ?HOST:await(Host, fun(State) -> maps:get(entries, ?STATE:pending(start, 1, State)) =:= [] end).

%% Runs the function, and waits until a call of the host has been made and stays.
block(Host, Function, Fun) ->
    Test = self(),
    Ref = make_ref(),
    ok = ?HOST:hook(Host, fun
        (F, _) when F =:= Function ->
            Test ! Ref,
            receive
                never -> go_on
            end;
        (_, _) ->
            go_on
    end),
    _ = Fun(),
    receive
        Ref -> blocked
    after ?TIMEOUT -> error({not_called, Function})
    end.

%% No run has anything to do.
nothing_left(Uploader) ->
    eventually(fun() -> maps:get(runs, ?UPLOADER:status(Uploader)) =:= #{} end).

fault(Config, Rule) -> stream_s3_store_faults:add(server(Config), [Rule]).

counters() -> rabbitmq_stream_s3_counters:get(history).

%% What has been counted in this case; bytes left out.
counted(Config) ->
    Before = ?config(before, Config),
    maps:filter(fun(_, N) -> N > 0 end, maps:without([bytes], maps:map(fun(Name, N) -> N - map_get(Name, Before) end, counters()))).

gauge(Name) ->
    #{gauges := Gauges} = ?UPLOADER:metrics(),
    {Name, _, Value} = lists:keyfind(Name, 1, Gauges),
    Value.

keys(Run) ->
    {ok, #{objects := Objects, next := undefined}} = ?STORE:list(?STORE:history_prefix(Run), undefined, 1000, ?TIMEOUT),
    [Key || {Key, _, _} <- Objects].

put_segment(Run, Seq, Content) ->
    Ref = make_ref(),
    ok = rabbitmq_stream_s3_nif:history_put(?STORE:handle(), self(), Ref, {Run, Seq}, Content, undefined),
    receive
        {store_result, Ref, {ok, Put}} -> Put;
        {store_result, Ref, Error} -> error(Error)
    after ?TIMEOUT -> error(no_answer)
    end.

put_raw(Run, Seq, Bytes) ->
    Ref = make_ref(),
    Key = iolist_to_binary(io_lib:format("rabbitmq/history/~ts/~20..0b.segment", [Run, Seq])),
    ok = rabbitmq_stream_s3_nif:store_put(?STORE:handle(), self(), Ref, Key, Bytes, #{}),
    receive
        {store_result, Ref, {ok, _}} -> ok
    after ?TIMEOUT -> error(no_answer)
    end.

run_process(Run) ->
    [Pid] = [Pid || Pid <- processes(), is_run(Pid), element(3, sys:get_state(Pid)) =:= Run],
    Pid.

is_run(Pid) ->
    case process_info(Pid, dictionary) of
        {dictionary, D} -> proplists:get_value('$initial_call', D) =:= {rabbitmq_stream_s3_history_run, init, 1};
        undefined -> false
    end.

%% How long the machine of a run still pauses, if it does so.
pause_ms(Run) ->
    case [Ms || T <- tuple_to_list(sys:get_state(run_process(Run))), is_reference(T), Ms <- [read_timer(T)], is_integer(Ms)] of
        [Ms] -> Ms;
        [] -> none
    end.

read_timer(Reference) ->
    try
        erlang:read_timer(Reference)
    catch
        error:badarg -> none
    end.

many(_Config) ->
    State = lists:foldl(
        fun(R, S0) ->
            Run = iolist_to_binary(io_lib:format("many-~4..0b", [R])),
            {S1, ok} = ?STATE:apply({open, Run}, S0),
            lists:foldl(fun(Seq, S) -> element(1, ?STATE:apply({seal, Run, Seq, {made_up, 100}, 0}, S)) end, S1, lists:seq(1, 100))
        end,
        ?STATE:new(),
        lists:seq(1, 1000)
    ),
    ?HOST:start(State).

%% The largest numbers from now on, looked at each few milliseconds. Binaries count where they last: a scheduler frees what others have let go of
%% a little later.
watch_memory() -> spawn_link(fun() -> watch_memory([], #{binary => 0, lent => 0}) end).

watch_memory(Last, #{binary := Binary, lent := Lent}) ->
    Lasting = lists:sublist([erlang:memory(binary) | Last], 10),
    Most = #{binary => max(Binary, lists:min(Lasting)), lent => max(Lent, rabbitmq_stream_s3_nif:history_body_bytes())},
    receive
        {peak, From} -> From ! {self(), Most}
    after 2 -> watch_memory(Lasting, Most)
    end.

peak(Watch) ->
    Watch ! {peak, self()},
    receive
        {Watch, Most} -> Most
    end.
