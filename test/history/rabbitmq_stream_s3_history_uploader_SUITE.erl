%% The history uploader with a host whose committed state is a value, on the server s3local, with faults on the wire.
-module(rabbitmq_stream_s3_history_uploader_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-import(stream_s3_wait, [eventually/1]).
-import(stream_s3_history_case, [server/1, run/1, content/2, now_ms/0, start/2, stop_all/0, seal/3, all_uploaded/1, hang/2, nothing_left/1]).
-import(stream_s3_history_case, [fault/2, counted/1, gauge/1, keys/1, put_segment/3, put_raw/3, runs/0, run_process/1, pauses/2, watch_memory/0, peak/1]).

-compile(nowarn_export_all).
-compile(export_all).

-define(UPLOADER, rabbitmq_stream_s3_history_uploader).
-define(STORE, rabbitmq_stream_s3_store).
-define(HOST, stream_s3_history_host).
-define(STATE, stream_s3_history_state).
-define(TIMEOUT, 30000).
-define(MIB, 1048576).
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
        concurrency_2_with_20_runs_whose_objects_are_there_already,
        the_own_body_is_let_go_of_before_what_is_there_is_fetched,
        a_backoff_gives_permit_and_body_back_and_delays_nobody_else,
        content_kept_through_mode_off_pruning_is_all_already_present,
        permanent_failures_are_retried_only_by_the_rescan_including_10_rapid_seals,
        a_corrupt_run_does_not_stop_the_rescan,
        a_closed_runs_segment_uploads_decodes_and_is_uploaded_in_committed_state,
        a_late_write_of_a_purged_run_goes_with_a_later_sweep,
        a_sweep_comes_each_interval,
        a_scan_comes_each_interval,
        a_read_failure_never_writes,
        a_segment_without_a_byte_and_one_of_nested_lists,
        a_purge_waits_before_it_deletes,
        a_run_without_segment_state_is_purged_at_once,
        options_out_of_range_are_refused_with_a_sentence,
        a_host_that_never_purges_needs_four_functions,
        a_store_without_conditional_writes_is_refused_with_a_sentence,
        a_store_that_does_not_answer_at_the_start_is_waited_for,
        a_segment_of_64_mib_can_be_compared_and_read_back,
        two_owners_at_once_acknowledge_each_segment_once,
        a_rescan_of_100000_segments_of_1000_runs_takes_less_than_a_second,
        memory_of_a_scan_is_bounded_by_the_page,
        the_metrics_have_the_names_of_the_document,
        the_metrics_are_in_the_exposition,
        an_age_is_never_negative,
        settings_out_of_range_are_refused_by_name,
        misuse_of_the_library_raises_badarg_with_a_text
    ].

init_per_suite(Config) -> stream_s3_history_case:init_suite(Config).

end_per_suite(Config) -> stream_s3_history_case:end_suite(Config).

init_per_testcase(_Case, Config) -> stream_s3_history_case:init_case(Config).

end_per_testcase(_Case, Config) -> stream_s3_history_case:end_case(Config).

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
    Acknowledges = hang(Host, acknowledge),
    _ = start(Host, #{}),
    ok = Acknowledges(),
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
    Logs = stream_s3_logs:start(),
    ok = seal(Host, Run, [1, 2]),
    _ = start(Host, #{}),
    ok = all_uploaded(Host),
    [{error, _} = stream_s3_logs:await(Logs, [?STORE:history_key(Run, Seq), " is not what this segment must be, and is replaced"], ?TIMEOUT) || Seq <- [1, 2]],
    ok = stream_s3_logs:stop(Logs),
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
    Waits = fun() -> pauses(Run, 30000) end,
    ok = eventually(Waits),
    %% What the catalog has is gone already, before the prefix is looked at.
    ?assertEqual([], keys(Run)),
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
    ok = eventually(fun() -> erlang:memory(binary) - Before < 16 * ?MIB end),
    Left = lists:sum([Memory || Pid <- runs(), {memory, Memory} <- [process_info(Pid, memory)]]),
    ct:pal("what is kept of 20 stored segments of 64 MiB: ~b KiB", [Left div 1024]),
    ?assert(Left < 20 * 65536),
    _ = [Pid ! go_on || Pid <- Blocked],
    ok = all_uploaded(Host),
    ok.

%% All bodies are one binary, so that memory only grows by what the library takes.
concurrency_2_with_20_runs_whose_objects_are_there_already(Config) ->
    Host = ?config(host, Config),
    Body = binary:copy(<<"0123456789abcdef">>, 4 * ?MIB),
    Size = byte_size(Body),
    Runs = [<<"there-", (integer_to_binary(N))/binary>> || N <- lists:seq(101, 120)],
    [{stored, _, _} = put_segment(Run, 1, Body) || Run <- Runs],
    _ = [?HOST:commit_all(Host, [{open, Run}, {seal, Run, 1, {made_up, Size}, now_ms()}]) || Run <- Runs],
    ok = ?HOST:hook(Host, fun
        (read_segment, _) -> {answer, {ok, Body}};
        (_, _) -> go_on
    end),
    #{resident := Before} = peak(watch_memory()),
    Watch = watch_memory(),
    _ = start(Host, #{concurrency => 2}),
    ok = all_uploaded(Host),
    #{resident := Peak} = peak(Watch),
    ct:pal("concurrency 2, 20 objects of 64 MiB that are there: the VM has grown by at most ~b MiB", [(Peak - Before) div ?MIB]),
    ?assertMatch(#{already_present := 20}, counted(Config)),
    ?assert(Peak - Before =< 2 * Size + 32 * ?MIB).

the_own_body_is_let_go_of_before_what_is_there_is_fetched(Config) ->
    Host = ?config(host, Config),
    Size = 16 * ?MIB,
    Run = run(?FUNCTION_NAME),
    Made = fun() -> binary:copy(crypto:hash(sha256, Run), Size div 32) end,
    {stored, _, _} = put_segment(Run, 1, Made()),
    true = erlang:garbage_collect(),
    ok = ?HOST:commit_all(Host, [{open, Run}, {seal, Run, 1, {made_up, Size}, now_ms()}]),
    ok = ?HOST:hook(Host, fun
        (read_segment, _) -> {answer, {ok, Made()}};
        (_, _) -> go_on
    end),
    ok = stream_s3_world:set(#{transfer_deadline_ms => 1000}),
    ok = fault(Config, #{op => get, key => "*/history/*", do => stall, count => 1}),
    ok = eventually(fun() -> rabbitmq_stream_s3_nif:history_body_bytes() =:= 0 end),
    Before = erlang:memory(binary),
    Uploader = start(Host, #{}),
    ok = eventually(fun() -> maps:get(runs, ?UPLOADER:status(Uploader)) =:= #{examining => 1} end),
    ?assertEqual(0, rabbitmq_stream_s3_nif:history_body_bytes()),
    ok = eventually(fun() -> erlang:memory(binary) - Before < ?MIB end),
    %% And that was while it was fetched.
    ?assertMatch(#{runs := #{examining := 1}, permits := 1}, ?UPLOADER:status(Uploader)),
    %% Given up, and made again with the body read once more.
    ok = all_uploaded(Host),
    ?assertEqual(#{already_present => 1, retryable_error => 1}, counted(Config)).

a_backoff_gives_permit_and_body_back_and_delays_nobody_else(Config) ->
    Host = ?config(host, Config),
    [Fails, Goes] = [<<(run(?FUNCTION_NAME))/binary, Letter>> || Letter <- "ab"],
    ok = stream_s3_world:set(#{task_retry_delay_ms => 3600000, task_retry_delay_max_ms => 3600000}),
    ok = seal(Host, Fails, [1]),
    ok = fault(Config, #{op => put, key => "*" ++ binary_to_list(Fails) ++ "/*", do => status, status => 503, count => 2}),
    Reads = counters:new(1, []),
    ok = ?HOST:hook(Host, fun(Function, Args) ->
        _ = Function =:= read_segment andalso hd(Args) =:= Fails andalso counters:add(Reads, 1, 1),
        go_on
    end),
    %% The first time it is tried again at once.
    Uploader = start(Host, #{concurrency => 1}),
    ok = eventually(fun() -> counters:get(Reads, 1) =:= 2 andalso maps:get(runs, ?UPLOADER:status(Uploader)) =:= #{pausing => 1} end),
    ?assertMatch(#{permits := 0, waiting := 0}, ?UPLOADER:status(Uploader)),
    ?assertEqual(0, rabbitmq_stream_s3_nif:history_body_bytes()),
    %% The only permit there is is another run's.
    ok = seal(Host, Goes, lists:seq(1, 20)),
    ok = ?UPLOADER:sealed(Uploader, Goes, #{size => 1, sealed_ms => now_ms()}),
    ok = ?HOST:await(Host, fun(State) -> ?STATE:acknowledged(State) =:= [{Goes, Seq} || Seq <- lists:seq(1, 20)] end),
    ?assert(pauses(Fails, 1000000)),
    ?assertEqual(#{retryable_error => 2, uploaded => 20}, counted(Config)),
    ?assertEqual(2, counters:get(Reads, 1)),
    %% Its body is read again.
    ok = stop_all(),
    ok = stream_s3_world:set(#{task_retry_delay_ms => 5, task_retry_delay_max_ms => 50}),
    ok = fault(Config, #{op => put, key => "*" ++ binary_to_list(Fails) ++ "/*", do => status, status => 503, count => 3}),
    _ = start(Host, #{concurrency => 1}),
    ok = all_uploaded(Host),
    ?assertEqual(2 + 4, counters:get(Reads, 1)).

content_kept_through_mode_off_pruning_is_all_already_present(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = seal(Host, Run, lists:seq(1, 5)),
    Acknowledges = hang(Host, acknowledge),
    _ = start(Host, #{}),
    ok = Acknowledges(),
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
            %% The scan of the start must not come past what is sealed from here on.
            ok = stream_s3_history_case:scanned(Uploader),
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

a_sweep_comes_each_interval(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    {stored, _, _} = put_segment(Run, 1, <<"of a run that is gone">>),
    ok = stream_s3_world:set(#{gc_interval_ms => 50}),
    _ = start(Host, #{}),
    ok = eventually(fun() -> keys(Run) =:= [] end).

a_scan_comes_each_interval(Config) ->
    Host = ?config(host, Config),
    Uploader = start(Host, #{rescan_interval_ms => 50}),
    ok = eventually(fun() -> maps:get(scans, ?UPLOADER:status(Uploader)) > 1 end),
    %% Nobody tells of it.
    ok = seal(Host, run(?FUNCTION_NAME), [1, 2]),
    ok = all_uploaded(Host).

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

a_segment_without_a_byte_and_one_of_nested_lists(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = seal(Host, Run, [1, 2, 3]),
    Nested = lists:foldl(fun(N, Inner) -> [Inner | <<N>>] end, [], lists:seq(1, 500000)),
    ok = ?HOST:hook(Host, fun
        (read_segment, [_, Seq]) -> {answer, {ok, element(Seq, {<<>>, [], Nested})}};
        (_, _) -> go_on
    end),
    _ = start(Host, #{}),
    ok = all_uploaded(Host),
    ?assertEqual({ok, <<>>}, ?UPLOADER:read(Run, 1)),
    ?assertEqual({ok, <<>>}, ?UPLOADER:read(Run, 2)),
    ?assertEqual({ok, << <<N>> || N <- lists:seq(1, 500000) >>}, ?UPLOADER:read(Run, 3)),
    %% They are found again, too.
    ok = stop_all(),
    Again = ?HOST:start(),
    ok = seal(Again, Run, [1, 2, 3]),
    ok = ?HOST:hook(Again, fun(F, [_, Seq | _]) when F =:= read_segment -> {answer, {ok, element(Seq, {<<>>, [], Nested})}}; (_, _) -> go_on end),
    _ = start(Again, #{}),
    ok = all_uploaded(Again),
    ?assertEqual(#{uploaded => 3, already_present => 3}, counted(Config)),
    ok = stop_all(),
    ?HOST:stop(Again).

a_purge_waits_before_it_deletes(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = seal(Host, Run, [1]),
    Uploader = start(Host, #{purge_wait_ms => 3600000}),
    ok = all_uploaded(Host),
    ok = ?HOST:commit(Host, {purge, Run}),
    ok = ?UPLOADER:purge(Uploader, Run),
    ok = eventually(fun() -> pauses(Run, 0) end),
    ?assert(pauses(Run, 3500000)),
    ?assertEqual([?STORE:history_key(Run, 1)], keys(Run)),
    ?assertEqual([Run], ?STATE:purging(?HOST:state(Host))).

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
    ?assertEqual({error, {bad_option, <<"source is missing">>}}, ?UPLOADER:start_link(#{argument => Host})),
    [?assertMatch({error, {bad_option, <<"source must be a module", _/binary>>}}, Try(#{source => M})) || M <- [lists, no_such_module, "text"]].

%% Of which this module is one.
a_host_that_never_purges_needs_four_functions(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = seal(Host, Run, [1, 2]),
    {ok, Uploader} = ?UPLOADER:start_link(#{source => ?MODULE, argument => Host}),
    ok = all_uploaded(Host),
    ?assertEqual(proceed, ?UPLOADER:postpone_retention(Uploader, Run)),
    ok = ?HOST:commit(Host, {purge, Run}),
    ?assertError(badarg, ?UPLOADER:purge(Uploader, Run)),
    ?assertMatch([_, _], keys(Run)),
    ok = ?UPLOADER:stop(Uploader).

pending(Query) -> ?HOST:pending(Query).
read_segment(Host, Run, Seq) -> ?HOST:read_segment(Host, Run, Seq).
acknowledge(Host, Acknowledgment) -> ?HOST:acknowledge(Host, Acknowledgment).
run_state(Host, Run) -> ?HOST:run_state(Host, Run).

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
    Pids = runs(),
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

the_metrics_are_in_the_exposition(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    {ok, _} = application:ensure_all_started(prometheus),
    ok = prometheus_registry:register_collector(?MODULE, rabbitmq_stream_s3_prometheus),
    {stored, _, _} = put_segment(Run, 1, <<"other">>),
    Before = exposition(),
    ok = seal(Host, Run, [1, 2, 3]),
    _ = start(Host, #{}),
    ok = all_uploaded(Host),
    ok = fault(Config, #{op => put, key => "*/history/*", do => status, status => 403, code => 'AccessDenied'}),
    ok = ?HOST:commit_all(Host, [{seal, Run, Seq, content(Run, Seq), now_ms() - 60000} || Seq <- [4, 5]]),
    [{Uploader, _}] = ets:tab2list(?UPLOADER),
    ok = ?UPLOADER:rescan(Uploader),
    ok = eventually(fun() -> maps:get(runs, ?UPLOADER:status(Uploader)) =:= #{blocked => 1} end),
    After = exposition(),
    Grown = fun(Row) -> maps:get(Row, After) - maps:get(Row, Before, 0.0) end,
    ?assertEqual(2.0, Grown(<<"history_uploads_total{outcome=\"uploaded\"}">>)),
    ?assertEqual(1.0, Grown(<<"history_uploads_total{outcome=\"replaced\"}">>)),
    ?assertEqual(1.0, Grown(<<"history_uploads_total{outcome=\"permanent_error\"}">>)),
    [?assertEqual(0.0, Grown(<<"history_uploads_total{outcome=\"", O/binary, "\"}">>)) || O <- [<<"already_present">>, <<"retryable_error">>, <<"gone">>]],
    ?assertEqual(1.0, Grown(<<"history_upload_checksum_mismatches_total">>)),
    ?assertEqual(0.0, Grown(<<"history_upload_rescan_errors_total">>)),
    Objects = [32 + byte_size(Run) + byte_size(content(Run, Seq)) || Seq <- [1, 2, 3]],
    ?assertEqual(float(lists:sum(Objects)), Grown(<<"history_upload_bytes_total">>)),
    ?assertMatch(#{<<"history_upload_backlog_segments">> := 2.0}, After),
    ?assertEqual(float(lists:sum([byte_size(content(Run, Seq)) || Seq <- [4, 5]])), maps:get(<<"history_upload_backlog_bytes">>, After)),
    ?assert(maps:get(<<"history_upload_oldest_sealed_age_seconds">>, After) >= 60.0),
    Requests = fun(Op, Outcome) -> Grown(<<"requests{operation=\"", Op/binary, "\",outcome=\"", Outcome/binary, "\",object_kind=\"history\"}">>) end,
    %% One finds another object, which has another length, so it is not read to its end; the last one is refused.
    ?assertEqual({3.0, 1.0, 1.0}, {Requests(<<"put">>, <<"ok">>), Requests(<<"put">>, <<"conflict">>), Requests(<<"put">>, <<"invalid">>)}),
    ?assertEqual(1.0, Requests(<<"get">>, <<"cancelled">>)),
    ok = prometheus_registry:deregister_collector(?MODULE, rabbitmq_stream_s3_prometheus).

%% Rows and their values.
exposition() ->
    Text = iolist_to_binary(prometheus_text_format:format(?MODULE)),
    {match, Rows} = re:run(Text, "^rabbitmq_stream_s3_([^ #]+) ([^ \n]+)$", [multiline, global, {capture, all_but_first, binary}]),
    #{Row => to_float(Value) || [Row, Value] <- Rows}.

to_float(Text) ->
    case string:to_float(Text) of
        {error, no_float} -> float(binary_to_integer(Text));
        {Float, _} -> Float
    end.

%% A host's clock may be ahead, or say nonsense.
an_age_is_never_negative(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = fault(Config, #{op => put, key => "*/history/*", do => status, status => 503}),
    Uploader = start(Host, #{}),
    %% The scan of the start must not count what is sealed from here on, or it counts twice, until the next one.
    ok = stream_s3_history_case:scanned(Uploader),
    lists:foreach(
        fun({N, SealedMs}) ->
            ok = ?HOST:commit_all(Host, [{open, Run}, {seal, Run, N, content(Run, N), SealedMs}]),
            ok = ?UPLOADER:sealed(Uploader, Run, #{size => 1, sealed_ms => SealedMs}),
            ok = eventually(fun() -> gauge(history_upload_backlog_segments) =:= N end),
            Age = gauge(history_upload_oldest_sealed_age_seconds),
            ?assert(is_float(Age) andalso Age >= 0.0)
        end,
        lists:enumerate([now_ms() + 86400000, (1 bsl 63) - 1, now_ms(), 0, -1, -(1 bsl 63)])
    ),
    ok = stream_s3_store_faults:clear(server(Config)),
    ok = all_uploaded(Host),
    ok = eventually(fun() -> gauge(history_upload_oldest_sealed_age_seconds) == 0 end).

settings_out_of_range_are_refused_by_name(_Config) ->
    Set = fun(Key, Value) -> rabbitmq_stream_s3_config:validate(#{store => fs, fs_dir => <<"d">>, Key => Value}) end,
    [?assertEqual(ok, Set(history_upload_concurrency, N)) || N <- [1, 16, 1024]],
    lists:foreach(
        fun(N) ->
            Text = iolist_to_binary(io_lib:format("history_upload_concurrency must be an integer from 1 to 1024, not ~p", [N])),
            ?assertEqual({error, Text}, Set(history_upload_concurrency, N))
        end,
        [0, 1025, -1, many]
    ),
    ?assertMatch({error, <<"history_rescan_interval_ms must be an integer from 1 ", _/binary>>}, Set(history_rescan_interval_ms, 0)),
    ?assertMatch({error, <<"history_purge_wait_ms must be an integer from 0 ", _/binary>>}, Set(history_purge_wait_ms, -1)).

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
