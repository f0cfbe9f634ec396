%% A stream that holds much is attached beside one that is written to: the uploads of the node are limited to a rate, so that catching up
%% takes a while, and is watched.
-module(rabbitmq_stream_s3_backfill_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-export([all/0, suite/0, init_per_suite/1, end_per_suite/1, init_per_testcase/2, end_per_testcase/2]).
-export([
    a_stream_that_has_much_to_catch_up_with_does_not_starve_a_live_one/1,
    how_far_a_stream_has_come_is_told_with_its_rate/1
]).

-define(TIMEOUT, 60000).
-define(FRAGMENT, 20000).
-define(IN_FLIGHT, 4).
-define(RATE, 200000).
%% Ten seconds of uploads.
-define(BACKLOG, 100).
-define(ENV, #{
    fragment_target_size => ?FRAGMENT,
    max_in_flight_fragments => ?IN_FLIGHT,
    max_transfer_bytes_per_sec => ?RATE,
    max_transfer_burst_bytes => ?FRAGMENT,
    persist_interval_ms => 50,
    tiered => none
}).

suite() -> [{timetrap, {seconds, 120}}].

all() ->
    [
        a_stream_that_has_much_to_catch_up_with_does_not_starve_a_live_one,
        how_far_a_stream_has_come_is_told_with_its_rate
    ].

init_per_suite(Config) ->
    Dir = filename:join(?config(priv_dir, Config), "world"),
    Keeper = stream_s3_keeper:start(fun() -> stream_s3_world:start(#{store => fs, dir => Dir, env => ?ENV}) end),
    [{keeper, Keeper}, {world, stream_s3_keeper:value(Keeper)} | Config].

end_per_suite(Config) ->
    stream_s3_keeper:stop(?config(keeper, Config), fun stream_s3_world:stop/1).

init_per_testcase(Case, Config) ->
    ok = stream_s3_world:set(#{tiered => none}),
    Streams = maps:from_list([{Name, start_stream(Case, Name)} || Name <- [full, live]]),
    [{streams, Streams} | Config].

end_per_testcase(_Case, Config) ->
    [ok = osiris:delete_cluster(Conf) || #{conf := Conf} <- maps:values(?config(streams, Config))],
    ok.

start_stream(Case, Name) ->
    Id = iolist_to_binary(io_lib:format("~s_~s", [Case, Name])),
    Conf = stream_s3_osiris:config(Id, #{max_segment_size_bytes => 500000}),
    #{id => Id, conf => Conf, writer => stream_s3_osiris:start_stream(Conf)}.

%% --- cases -----------------------------------------------------------------------------------------------------------

a_stream_that_has_much_to_catch_up_with_does_not_starve_a_live_one(Config) ->
    #{full := #{id := Full, writer := Backlog}, live := #{id := Live, writer := Writer}} = ?config(streams, Config),
    ok = write(Backlog, ?BACKLOG),
    ok = tier(),
    ok = rabbitmq_stream_s3:await_offset(Live, 0),
    %% First come, first served: what is cut here waits for the other's fragments that are in flight by then, and for no more.
    Took = measure(Full, Live, Writer, []),
    Bound = (?IN_FLIGHT + 1) * ?FRAGMENT * 1000 div ?RATE,
    ct:pal("commit to durable, ms: ~w; the bound on the wait for admission is ~b ms", [Took, Bound]),
    ?assert(length(Took) >= 5),
    ?assert(lists:nth(length(Took) div 2 + 1, lists:sort(Took)) < 4 * Bound),
    ok = rabbitmq_stream_s3:flush(Full, ?TIMEOUT).

%% For as long as the other one is not through, so many times.
measure(Full, Live, Writer, Took) ->
    ok = write(Writer, 1),
    Committed = erlang:monotonic_time(millisecond),
    ok = rabbitmq_stream_s3:flush(Live, ?TIMEOUT),
    Ms = erlang:monotonic_time(millisecond) - Committed,
    case rabbitmq_stream_s3:status(Full) of
        #{behind := Behind} when Behind > 0, length(Took) < 10 -> measure(Full, Live, Writer, [Ms | Took]);
        _ -> Took
    end.

how_far_a_stream_has_come_is_told_with_its_rate(Config) ->
    #{full := #{id := Full, writer := Backlog}} = ?config(streams, Config),
    ok = write(Backlog, ?BACKLOG div 2),
    ok = tier(),
    Seen = [
        begin
            ok = rabbitmq_stream_s3:await_offset(Full, Offset),
            #{progress := Progress} = rabbitmq_stream_s3:status(Full),
            Progress
        end
     || Offset <- [10, 25, 40]
    ],
    [?assertMatch(#{percent := Percent, ms_left := _} when Percent < 100, Progress) || Progress <- Seen],
    Percents = [Percent || #{percent := Percent} <- Seen],
    ?assertEqual(lists:sort(Percents), Percents),
    ?assert(hd(Percents) >= 20),
    Left = [{Bytes, Offsets} || #{bytes_left := Bytes, offsets_left := Offsets} <- Seen],
    ?assertEqual(lists:reverse(lists:sort(Left)), Left),
    %% What is let through in bursts becomes durable in steps.
    #{bytes_per_second := Rate} = lists:last(Seen),
    ?assert(Rate > 0 andalso Rate < 2 * ?RATE, Rate),
    ?assertMatch({match, _}, re:run(printed(), [Full, " +running .* \\d+ % +\\d+ k?B/s"])),
    ok = rabbitmq_stream_s3:flush(Full, ?TIMEOUT),
    #{progress := Done} = rabbitmq_stream_s3:status(Full),
    ?assertMatch(#{percent := 100, bytes_left := 0, offsets_left := 0, ms_left := 0}, Done).

%% --- helpers ---------------------------------------------------------------------------------------------------------

%% So many chunks, each as large as a fragment is to be.
write(Writer, Count) ->
    [ok = stream_s3_osiris:write_chunk(Writer, [binary:copy(<<N>>, ?FRAGMENT)]) || N <- lists:seq(1, Count)],
    ok.

tier() ->
    ok = stream_s3_world:set(#{tiered => all}),
    rabbitmq_stream_s3:reconcile().

printed() ->
    ok = ct:capture_start(),
    ok = rabbitmq_stream_s3:print_status(),
    ok = ct:capture_stop(),
    lists:flatten(ct:capture_get()).
