%% What an operator does and sees: pause, resume, flush, how far behind a stream is, and why.
-module(rabbitmq_stream_s3_operator_SUITE).

-include("rabbitmq_stream_s3.hrl").
-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-import(stream_s3_wait, [eventually/1]).

-export([all/0, suite/0, init_per_suite/1, end_per_suite/1, init_per_testcase/2, end_per_testcase/2]).
-export([
    a_paused_stream_is_tiered_no_further_until_it_is_resumed/1,
    a_pause_outlives_the_reader/1,
    a_paused_node_pauses_every_stream_also_a_later_one/1,
    what_was_cut_before_a_pause_is_still_persisted/1,
    a_flush_waits_for_neither_size_nor_age_nor_interval/1,
    a_flush_covers_many_fragments_and_what_is_committed_when_it_is_called/1,
    a_flush_that_cannot_succeed_says_timeout_and_succeeds_later/1,
    a_flush_of_nothing_succeeds_and_of_nobody_fails/1,
    a_flush_of_the_node_answers_for_each_stream/1,
    a_flush_finds_streams_declared_a_moment_ago/1,
    a_flush_waits_until_it_is_known_where_the_tier_ends/1,
    a_flush_of_a_node_without_the_application_says_so/1,
    a_flush_of_the_node_ends_when_the_operator_said/1,
    the_lag_is_what_is_not_persisted_in_bytes_and_seconds/1,
    a_stall_is_told_with_its_cause/1
]).

%% Nothing is cut or persisted unless somebody asks for it.
-define(ENV, #{
    fragment_target_size => 67108864,
    fragment_max_age_ms => infinity,
    persist_interval_ms => 3600000,
    persist_threshold => 1000,
    max_in_flight_fragments => 8,
    upload_retry_delay_ms => 10,
    upload_retry_delay_max_ms => 100,
    task_retry_delay_max_ms => 100
}).

suite() -> [{timetrap, {seconds, 60}}].

all() ->
    [
        a_paused_stream_is_tiered_no_further_until_it_is_resumed,
        a_pause_outlives_the_reader,
        a_paused_node_pauses_every_stream_also_a_later_one,
        what_was_cut_before_a_pause_is_still_persisted,
        a_flush_waits_for_neither_size_nor_age_nor_interval,
        a_flush_covers_many_fragments_and_what_is_committed_when_it_is_called,
        a_flush_that_cannot_succeed_says_timeout_and_succeeds_later,
        a_flush_of_nothing_succeeds_and_of_nobody_fails,
        a_flush_of_the_node_answers_for_each_stream,
        a_flush_finds_streams_declared_a_moment_ago,
        a_flush_waits_until_it_is_known_where_the_tier_ends,
        a_flush_of_a_node_without_the_application_says_so,
        a_flush_of_the_node_ends_when_the_operator_said,
        the_lag_is_what_is_not_persisted_in_bytes_and_seconds,
        a_stall_is_told_with_its_cause
    ].

init_per_suite(Config) ->
    Dir = filename:join(?config(priv_dir, Config), "world"),
    Keeper = stream_s3_keeper:start(fun() -> stream_s3_world:start(#{store => fs, dir => Dir, env => ?ENV}) end),
    [{keeper, Keeper}, {world, stream_s3_keeper:value(Keeper)} | Config].

end_per_suite(Config) ->
    stream_s3_keeper:stop(?config(keeper, Config), fun stream_s3_world:stop/1).

init_per_testcase(Case, Config) ->
    Stream = atom_to_binary(Case),
    [{stream, Stream}, {conf, stream_s3_osiris:config(Stream, #{max_segment_size_bytes => 10000})} | Config].

end_per_testcase(_Case, Config) ->
    ok = rabbitmq_stream_s3:resume(),
    ok = rabbitmq_stream_s3:resume(?config(stream, Config)),
    ok = osiris:delete_cluster(?config(conf, Config)),
    stream_s3_world:set(?ENV).

%% --- pause and resume ------------------------------------------------------------------------------------------------

a_paused_stream_is_tiered_no_further_until_it_is_resumed(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    ok = write(Writer, 10),
    ok = rabbitmq_stream_s3:flush(Stream),
    ok = rabbitmq_stream_s3:pause(Stream),
    ok = rabbitmq_stream_s3:pause(Stream),
    ok = write(Writer, 10),
    assert_paused(Stream, {0, 10}, stream),
    ok = rabbitmq_stream_s3:resume(Stream),
    ?assertMatch(#{paused := none, stalled := none}, rabbitmq_stream_s3:status(Stream)),
    ?assertEqual(ok, rabbitmq_stream_s3:flush(Stream)),
    ?assertEqual({0, 20}, rabbitmq_stream_s3:get_range(Stream)).

a_pause_outlives_the_reader(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    ok = write(Writer, 10),
    ok = rabbitmq_stream_s3:flush(Stream),
    ok = rabbitmq_stream_s3:pause(Stream),
    ok = stream_s3_world:kill_reader(Stream),
    ok = write(Writer, 10),
    ok = running(Stream),
    assert_paused(Stream, {0, 10}, stream),
    %% Also a next writer.
    ok = osiris:stop_member(node(), ?config(conf, Config)),
    {ok, _} = osiris:start_writer((?config(conf, Config))#{epoch => 2}),
    ok = running(Stream),
    assert_paused(Stream, {0, 10}, stream),
    ok = rabbitmq_stream_s3:resume(Stream),
    ?assertEqual(ok, rabbitmq_stream_s3:flush(Stream)),
    ?assertEqual({0, 20}, rabbitmq_stream_s3:get_range(Stream)).

a_paused_node_pauses_every_stream_also_a_later_one(Config) ->
    Stream = ?config(stream, Config),
    Other = <<Stream/binary, "_later">>,
    OtherConf = stream_s3_osiris:config(Other),
    Writer = start_stream(Config),
    ok = rabbitmq_stream_s3:pause(),
    ?assertMatch(#{paused := Since} when is_integer(Since), rabbitmq_stream_s3:status()),
    OtherWriter = stream_s3_osiris:start_stream(OtherConf),
    ok = running(Other),
    [ok = write(W, 10) || W <- [Writer, OtherWriter]],
    [assert_paused(S, empty, node) || S <- [Stream, Other]],
    %% A stream's own mark is not the node's.
    ok = rabbitmq_stream_s3:pause(Other),
    ok = rabbitmq_stream_s3:resume(),
    ?assertMatch(#{paused := none}, rabbitmq_stream_s3:status()),
    assert_paused(Other, empty, stream),
    ?assertEqual(ok, rabbitmq_stream_s3:flush(Stream)),
    ok = rabbitmq_stream_s3:resume(Other),
    ?assertEqual(ok, rabbitmq_stream_s3:flush(Other)),
    ok = osiris:delete_cluster(OtherConf).

what_was_cut_before_a_pause_is_still_persisted(Config) ->
    Stream = ?config(stream, Config),
    ok = stream_s3_world:set(#{persist_interval_ms => 50}),
    Writer = start_stream(Config),
    ok = write(Writer, 10),
    ok = with_store_out_of_order(Config, fun() ->
        ok = rabbitmq_stream_s3:force_cut(Stream),
        ok = rabbitmq_stream_s3:pause(Stream),
        write(Writer, 10)
    end),
    ?assertEqual(ok, rabbitmq_stream_s3:await_offset(Stream, 10)),
    assert_paused(Stream, {0, 10}, stream).

assert_paused(Stream, Range, By) ->
    ?assertEqual({error, empty}, rabbitmq_stream_s3:force_cut(Stream)),
    ?assertEqual({error, paused}, rabbitmq_stream_s3:flush(Stream)),
    ?assertMatch(
        #{paused := {By, Since}, stalled := #{cause := <<"an operator has paused ", _/binary>>, since := Since}, transfers_in_flight := 0},
        rabbitmq_stream_s3:status(Stream)
    ),
    ?assertEqual(Range, rabbitmq_stream_s3:get_range(Stream)),
    Printed = printed(),
    ?assertMatch({match, _}, re:run(Printed, [Stream, " +paused "])),
    ?assertMatch({match, _}, re:run(Printed, [Stream, ": an operator has paused the ", atom_to_list(By), ", at 20"])).

%% --- flush -----------------------------------------------------------------------------------------------------------

a_flush_waits_for_neither_size_nor_age_nor_interval(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    [
        begin
            ok = write(Writer, 7),
            ?assertEqual(ok, rabbitmq_stream_s3:flush(Stream)),
            ?assertEqual({0, stream_s3_osiris:next_offset(Writer)}, rabbitmq_stream_s3:get_range(Stream))
        end
     || _ <- lists:seq(1, 5)
    ],
    %% And is over: what comes later waits for the next one.
    ok = write(Writer, 7),
    ?assertMatch(#{behind := 7, transfers_in_flight := 0}, rabbitmq_stream_s3:status(Stream)).

a_flush_covers_many_fragments_and_what_is_committed_when_it_is_called(Config) ->
    Stream = ?config(stream, Config),
    ok = stream_s3_world:set(#{fragment_target_size => 2000, max_in_flight_fragments => 2}),
    Writer = start_stream(Config),
    ok = rabbitmq_stream_s3:pause(Stream),
    [ok = write(Writer, 1) || _ <- lists:seq(1, 200)],
    ok = rabbitmq_stream_s3:resume(Stream),
    End = stream_s3_osiris:next_offset(Writer),
    ?assertEqual(ok, rabbitmq_stream_s3:flush(Stream)),
    {0, Next} = rabbitmq_stream_s3:get_range(Stream),
    ?assert(Next >= End).

a_flush_that_cannot_succeed_says_timeout_and_succeeds_later(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    ok = write(Writer, 10),
    ok = with_store_out_of_order(Config, fun() ->
        ?assertEqual({error, timeout}, rabbitmq_stream_s3:flush(Stream, 300)),
        ok
    end),
    ?assertEqual(ok, rabbitmq_stream_s3:await_offset(Stream, 10)).

a_flush_of_nothing_succeeds_and_of_nobody_fails(Config) ->
    Stream = ?config(stream, Config),
    ?assertEqual({error, reader_down}, rabbitmq_stream_s3:flush(Stream)),
    Writer = start_stream(Config),
    ?assertEqual(ok, rabbitmq_stream_s3:flush(Stream)),
    ok = write(Writer, 1),
    ?assertEqual(ok, rabbitmq_stream_s3:flush(Stream)),
    ?assertEqual(ok, rabbitmq_stream_s3:flush(Stream)).

a_flush_of_the_node_answers_for_each_stream(Config) ->
    Stream = ?config(stream, Config),
    Other = <<Stream/binary, "_other">>,
    OtherConf = stream_s3_osiris:config(Other),
    Writer = start_stream(Config),
    OtherWriter = stream_s3_osiris:start_stream(OtherConf),
    ok = running(Other),
    [ok = write(W, 10) || W <- [Writer, OtherWriter]],
    ok = rabbitmq_stream_s3:pause(Other),
    ?assertEqual([{Stream, ok}, {Other, {error, paused}}], rabbitmq_stream_s3:flush()),
    ok = rabbitmq_stream_s3:resume(Other),
    ?assertEqual([{Stream, ok}, {Other, ok}], rabbitmq_stream_s3:flush()),
    ok = osiris:delete_cluster(OtherConf).

a_flush_finds_streams_declared_a_moment_ago(Config) ->
    Stream = ?config(stream, Config),
    Other = <<Stream/binary, "_other">>,
    OtherConf = stream_s3_osiris:config(Other),
    ok = write(stream_s3_osiris:start_stream(?config(conf, Config)), 10),
    ?assertEqual([{Stream, ok}], rabbitmq_stream_s3:flush()),
    ok = write(stream_s3_osiris:start_stream(OtherConf), 20),
    ?assertEqual(ok, rabbitmq_stream_s3:flush(Other)),
    ?assertEqual([{0, 10}, {0, 20}], [rabbitmq_stream_s3:get_range(S) || S <- [Stream, Other]]),
    ok = osiris:delete_cluster(OtherConf).

a_flush_waits_until_it_is_known_where_the_tier_ends(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    ok = write(Writer, 10),
    ok = rabbitmq_stream_s3:flush(Stream),
    ok = write(Writer, 10),
    ok = with_store_out_of_order(Config, fun() ->
        Reader = rabbitmq_stream_s3_registry:whereis(Stream),
        true = exit(Reader, kill),
        eventually(fun() -> not lists:member(rabbitmq_stream_s3_registry:whereis(Stream), [Reader, undefined]) end),
        ?assertEqual({error, timeout}, rabbitmq_stream_s3:flush(Stream, 300)),
        ?assertEqual([{Stream, {error, timeout}}], rabbitmq_stream_s3:flush(node, 300)),
        ?assertMatch(#{state := resolving}, rabbitmq_stream_s3:status(Stream)),
        ok = rabbitmq_stream_s3:pause(Stream),
        ?assertEqual({error, paused}, rabbitmq_stream_s3:flush(Stream)),
        rabbitmq_stream_s3:resume(Stream)
    end),
    %% Nobody asks again: what was asked for goes on.
    ?assertEqual(ok, rabbitmq_stream_s3:await_offset(Stream, 20)).

a_flush_of_a_node_without_the_application_says_so(Config) ->
    ok = write(start_stream(Config), 1),
    ok = application:stop(rabbitmq_stream_s3),
    ?assertEqual({error, not_running}, rabbitmq_stream_s3:flush()),
    ?assertEqual({error, reader_down}, rabbitmq_stream_s3:flush(?config(stream, Config))),
    ?assertMatch(
        {error, failed, <<"the plugin does not run on this node">>}, rabbitmq_stream_s3_operator:local(flush, [node, infinity])
    ),
    ok = application:start(rabbitmq_stream_s3).

a_flush_of_the_node_ends_when_the_operator_said(Config) ->
    Stream = ?config(stream, Config),
    ok = write(start_stream(Config), 1),
    ok = with_store_out_of_order(Config, fun() ->
        Late = <<"not done in time; it goes on, and the status says what stands in the way">>,
        %% The limit of a flush without one is that of a test case here.
        ?assertEqual({ok, #{streams => [#{stream => Stream, result => Late}]}}, rabbitmq_stream_s3_operator:local(flush, [node, 300])),
        ok
    end).

%% --- status ----------------------------------------------------------------------------------------------------------

the_lag_is_what_is_not_persisted_in_bytes_and_seconds(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    ?assertMatch(#{behind := 0, lag_bytes := 0, lag_ms := 0}, rabbitmq_stream_s3:status(Stream)),
    ok = write(Writer, 10),
    ok = rabbitmq_stream_s3:flush(Stream),
    ?assertMatch(#{behind := 0, lag_bytes := 0, lag_ms := 0}, rabbitmq_stream_s3:status(Stream)),
    #{bytes := Before} = stream_s3_chunks:of_log(stream_s3_osiris:dir(Writer)),
    Start = erlang:system_time(millisecond),
    %% Over several segments.
    [ok = write(Writer, 10) || _ <- lists:seq(1, 10)],
    #{bytes := Bytes, segments := Segments} = stream_s3_chunks:of_log(stream_s3_osiris:dir(Writer)),
    ?assert(length(Segments) > 3),
    #{lag_bytes := Lag, lag_ms := Ms} = rabbitmq_stream_s3:status(Stream),
    ?assertEqual(byte_size(Bytes) - byte_size(Before), Lag),
    ?assert(Ms =< erlang:system_time(millisecond) - Start),
    ?assertMatch({match, _}, re:run(printed(), [Stream, " .* kB, \\d+ s( |\\n)"])),
    ok = rabbitmq_stream_s3:flush(Stream),
    ?assertMatch(#{behind := 0, lag_bytes := 0, lag_ms := 0}, rabbitmq_stream_s3:status(Stream)).

a_stall_is_told_with_its_cause(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    ok = write(Writer, 10),
    ?assertMatch(#{stalled := none}, rabbitmq_stream_s3:status(Stream)),
    ok = with_store_out_of_order(Config, fun() ->
        ok = rabbitmq_stream_s3:force_cut(Stream),
        eventually(fun() -> maps:get(stalled, rabbitmq_stream_s3:status(Stream)) =/= none end)
    end),
    ?assertEqual(ok, rabbitmq_stream_s3:flush(Stream)),
    ?assertMatch(#{stalled := none}, rabbitmq_stream_s3:status(Stream)).

%% --- helpers ---------------------------------------------------------------------------------------------------------

start_stream(Config) ->
    Writer = stream_s3_osiris:start_stream(?config(conf, Config)),
    ok = running(?config(stream, Config)),
    Writer.

running(Stream) ->
    ok = rabbitmq_stream_s3:reconcile(),
    eventually(fun() ->
        case rabbitmq_stream_s3:status(Stream) of
            #{state := running} -> true;
            #{} -> rabbitmq_stream_s3:reconcile() =/= ok
        end
    end).

write(Writer, Count) ->
    stream_s3_osiris:write_chunk(Writer, [<<N:8000>> || N <- lists:seq(1, Count)]).

%% A file in the bucket's place: every request fails until it is gone.
with_store_out_of_order(Config, Fun) ->
    #{fs_dir := Dir} = stream_s3_world:store(?config(world, Config)),
    Away = <<Dir/binary, ".away">>,
    ok = file:rename(Dir, Away),
    ok = file:write_file(Dir, <<>>),
    try
        Fun()
    after
        ok = file:delete(Dir),
        ok = file:rename(Away, Dir)
    end.

printed() ->
    ok = ct:capture_start(),
    ok = rabbitmq_stream_s3:print_status(),
    ok = ct:capture_stop(),
    lists:flatten(ct:capture_get()).
