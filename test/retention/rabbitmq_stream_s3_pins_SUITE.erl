%% Retention of the local log that is faster than the uploads: real osiris, whose own retention deletes the segments, real Khepri.
-module(rabbitmq_stream_s3_pins_SUITE).

-include("rabbitmq_stream_s3.hrl").
-include_lib("common_test/include/ct.hrl").
-include_lib("kernel/include/file.hrl").
-include_lib("stdlib/include/assert.hrl").

-import(stream_s3_wait, [eventually/2]).

-compile(nowarn_export_all).
-compile(export_all).

-define(READER, rabbitmq_stream_s3_replica_reader).
-define(TIMEOUT, 60000).
%% A segment has some twenty-four chunks of one record, a fragment five. In ten minutes those that are not uploaded become more than are pinned
%% of one stream, so then they are larger.
-define(SEGMENT, 12000).
-define(FRAGMENT, 2000).
-define(TIMES_LARGER, 50).
-define(ENV, #{
    fragment_target_size => ?FRAGMENT,
    persist_interval_ms => 20,
    upload_retry_delay_ms => 10,
    upload_retry_delay_max_ms => 100,
    task_retry_delay_max_ms => 100,
    pinned_segment_bytes => 1 bsl 30,
    max_in_flight_fragments => 8
}).
%% Chunks that fill less than a segment.
-define(STEP, 10).
%% How long the races last, and what they write a second: far more than may be uploaded.
-define(RACE_MS, 12000).
-define(DEEP_RACE_MS, 600000).
%% Segments that are deleted in a race, at least.
-define(RACED, 100).
%% New beginnings that it takes, at least, where nothing is pinned.
-define(BEGUN, 3).
-define(RECORD, 500).
-define(WRITTEN_A_SECOND, 600000).
-define(UPLOADED_A_SECOND, 200000).

suite() -> [{timetrap, {minutes, 5}}].

all() ->
    [
        what_retention_deletes_is_tiered_from_what_is_held_open,
        a_reader_that_is_killed_goes_on_in_a_deleted_segment,
        a_reader_that_cannot_resolve_holds_segments_open_all_the_same,
        segments_that_are_deleted_at_once_are_tiered_though_the_newest_goes_first,
        nothing_that_is_not_committed_is_taken_from_a_deleted_segment,
        beyond_the_budget_the_tier_begins_anew_with_what_is_left,
        without_pins_the_tier_begins_anew_with_the_log,
        what_is_held_open_ends_with_the_stream,
        what_is_held_open_ends_with_the_application,
        without_pins_a_tier_grows_though_uploads_wait_longer_than_segments_live,
        with_pins_no_record_is_missing_however_fast_retention_is,
        without_pins_every_new_beginning_gets_something_tiered
    ].

init_per_suite(Config) ->
    Dir = filename:join(?config(priv_dir, Config), "world"),
    Keeper = stream_s3_keeper:start(fun() -> stream_s3_world:start(#{store => fs, dir => Dir, env => ?ENV}) end),
    World = stream_s3_keeper:value(Keeper),
    [{keeper, Keeper}, {world, World}, {bucket, stream_s3_world:bucket(World)} | Config].

end_per_suite(Config) ->
    stream_s3_keeper:stop(?config(keeper, Config), fun stream_s3_world:stop/1).

init_per_testcase(Case, Config) ->
    Stream = atom_to_binary(Case),
    ct:timetrap(deep(?DEEP_RACE_MS * 2, 300000)),
    Log = #{max_segment_size_bytes => segment(Case), retention => [{max_bytes, kept(Case) * segment(Case)}]},
    [{stream, Stream}, {conf, stream_s3_osiris:config(Stream, Log)} | Config].

%% How many segments osiris keeps. Without pins an upload has to begin before its segment is deleted: at the pace of a race a segment
%% lasts 20 ms. With pins it has to be there long enough to be seen: on a machine that does much else a thread may wait for half a second.
kept(without_pins_every_new_beginning_gets_something_tiered) -> 20;
kept(with_pins_no_record_is_missing_however_fast_retention_is) -> 60;
kept(_Case) -> 2.

segment(with_pins_no_record_is_missing_however_fast_retention_is) -> deep(?TIMES_LARGER, 1) * ?SEGMENT;
segment(_Case) -> ?SEGMENT.

end_per_testcase(_Case, Config) ->
    ok = osiris:delete_cluster(?config(conf, Config)),
    ok = rabbitmq_stream_s3:set_transfer_rate(unlimited, undefined),
    ok = stream_s3_world:set(?ENV).

%% --- one step at a time ----------------------------------------------------------------------------------------------

what_retention_deletes_is_tiered_from_what_is_held_open(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    write(Writer, 0, 30),
    ok = settle(Config, Writer),
    ok = rabbitmq_stream_s3:pause(Stream),
    write(Writer, 30, 200),
    Deleted = await_deleted(Config, 5),
    #{counters := #{pinned_segment_bytes := Bytes}} = rabbitmq_stream_s3:status(Stream),
    ?assert(Bytes > 4 * ?SEGMENT, Bytes),
    ?assertMatch(#{unlinked_bytes := Bytes, unwatched := 0, problem := none}, rabbitmq_stream_s3_pins:info()),
    ?assertEqual(Bytes, held_open(Deleted)),
    ok = rabbitmq_stream_s3:resume(Stream),
    ok = assert_complete(Config, Writer, 230),
    %% Persisted, so no longer needed.
    eventually(0, fun() -> rabbitmq_stream_s3_pins:stream_bytes(Stream) end),
    eventually(0, fun() -> held_open(Deleted) end).

a_reader_that_is_killed_goes_on_in_a_deleted_segment(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    write(Writer, 0, 10),
    ok = settle(Config, Writer),
    ok = rabbitmq_stream_s3:pause(Stream),
    write(Writer, 10, 200),
    _ = await_deleted(Config, 5),
    ok = stream_s3_world:kill_reader(Stream),
    ok = rabbitmq_stream_s3:resume(Stream),
    ok = assert_complete(Config, Writer, 210).

%% A root that cannot be read keeps a new reader from finding out where to begin.
a_reader_that_cannot_resolve_holds_segments_open_all_the_same(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    write(Writer, 0, 10),
    ok = settle(Config, Writer),
    #{fs_dir := Dir} = Store = stream_s3_world:store(?config(world, Config)),
    ok = stream_s3_world:stop_application(),
    ok = file:rename(Dir, <<Dir/binary, ".away">>),
    ok = file:write_file(Dir, <<>>),
    ok = stream_s3_world:start_application(maps:merge(?ENV, Store)),
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    eventually(true, fun() -> maps:is_key(Stream, maps:get(streams, rabbitmq_stream_s3_pins:info())) end),
    eventually(true, fun() -> maps:get(segments, rabbitmq_stream_s3_pins:info()) > 0 end),
    write(Writer, 10, 200),
    _ = await_deleted(Config, 5),
    ok = file:delete(Dir),
    ok = file:rename(<<Dir/binary, ".away">>, Dir),
    ok = assert_complete(Config, Writer, 210).

%% In between the log has a gap, which the library sees in one look or another.
segments_that_are_deleted_at_once_are_tiered_though_the_newest_goes_first(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    write(Writer, 0, 10),
    ok = settle(Config, Writer),
    ok = rabbitmq_stream_s3:pause(Stream),
    ok = sys:suspend(osiris_retention),
    write(Writer, 10, 600),
    ?assertEqual([], deleted_segments(Stream)),
    ok = sys:resume(osiris_retention),
    _ = await_deleted(Config, 20),
    %% Where it goes on it finds out from what is held open.
    ok = stream_s3_world:kill_reader(Stream),
    ok = rabbitmq_stream_s3:resume(Stream),
    ok = assert_complete(Config, Writer, 610).

nothing_that_is_not_committed_is_taken_from_a_deleted_segment(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    write(Writer, 0, 10),
    ok = settle(Config, Writer),
    ok = rabbitmq_stream_s3:pause(Stream),
    write(Writer, 10, 200),
    _ = await_deleted(Config, 5),
    #{shared := Shared} = osiris_util:get_reader_context(Writer),
    Committed = osiris_log_shared:committed_chunk_id(Shared),
    %% As if the replicas were behind: chunk 12 is the last one that a majority has.
    ok = osiris_log_shared:set_committed_chunk_id(Shared, 12),
    ok = rabbitmq_stream_s3:resume(Stream),
    ok = stream_s3_world:settle(Stream, 13, ?TIMEOUT),
    ?assertEqual({error, empty}, rabbitmq_stream_s3:force_cut(Stream)),
    ?assertEqual({0, 13}, rabbitmq_stream_s3:get_range(Stream)),
    ok = osiris_log_shared:set_committed_chunk_id(Shared, Committed),
    write(Writer, 210, 1),
    ok = assert_complete(Config, Writer, 211).

beyond_the_budget_the_tier_begins_anew_with_what_is_left(Config) ->
    Stream = ?config(stream, Config),
    %% Segments are a little larger than they should be.
    ok = stream_s3_world:set(#{pinned_segment_bytes => 3 * ?SEGMENT + ?SEGMENT div 2}),
    Writer = start_stream(Config),
    write(Writer, 0, 10),
    ok = settle(Config, Writer),
    ok = rabbitmq_stream_s3:pause(Stream),
    write(Writer, 10, 300),
    ok = await_trimmed(Writer),
    eventually(true, fun() ->
        Bytes = rabbitmq_stream_s3_pins:stream_bytes(Stream),
        Bytes > ?SEGMENT andalso Bytes =< 3 * ?SEGMENT + ?SEGMENT div 2
    end),
    LogFirst = log_first(Writer),
    ok = rabbitmq_stream_s3:resume(Stream),
    ok = settle(Config, Writer),
    {First, _} = rabbitmq_stream_s3:get_range(Stream),
    ?assert(First > 10 andalso First < LogFirst, {First, LogFirst}),
    ?assertMatch(#{local_log_ahead_recoveries := 1}, counters(Config)),
    ok = assert_end(Config, 310).

without_pins_the_tier_begins_anew_with_the_log(Config) ->
    Stream = ?config(stream, Config),
    ok = stream_s3_world:set(#{pinned_segment_bytes => 0}),
    Writer = start_stream(Config),
    write(Writer, 0, 10),
    ok = settle(Config, Writer),
    ok = rabbitmq_stream_s3:pause(Stream),
    write(Writer, 10, 200),
    ok = await_trimmed(Writer),
    ?assertMatch(#{segments := 0, unlinked_bytes := 0}, rabbitmq_stream_s3_pins:info()),
    LogFirst = log_first(Writer),
    ok = rabbitmq_stream_s3:resume(Stream),
    ok = settle(Config, Writer),
    ?assertMatch({LogFirst, _}, rabbitmq_stream_s3:get_range(Stream)),
    ?assertMatch(#{local_log_ahead_recoveries := 1}, counters(Config)),
    ok = assert_end(Config, 210).

%% A segment lives for some 40 ms, and an upload waits for more than a second until it is admitted.
without_pins_a_tier_grows_though_uploads_wait_longer_than_segments_live(Config) ->
    ok = stream_s3_world:set(#{pinned_segment_bytes => 0}),
    Writer = start_stream(Config),
    write(Writer, 0, 10),
    ok = settle(Config, Writer),
    #{persists_completed := Persists} = counters(Config),
    ok = rabbitmq_stream_s3:set_transfer_rate(2000, undefined),
    Now = erlang:monotonic_time(millisecond),
    Records = write_until(fun() -> maps:get(persists_completed, counters(Config)) >= Persists + 3 end, Writer, 10, Now, Now + ?TIMEOUT),
    #{local_log_ahead_recoveries := Resets, persists_completed := After} = counters(Config),
    ct:pal("~b records, ~b new beginnings, ~b persists", [Records, Resets, After]),
    ?assert(Resets > 0, Resets),
    ?assert(After >= Resets, {After, Resets}),
    ok = rabbitmq_stream_s3:set_transfer_rate(unlimited, undefined),
    ok = settle(Config, Writer),
    ok = assert_end(Config, Records).

%% At the pace of a race.
write_until(IsDone, Writer, N, Start, Deadline) ->
    ok = write_at_once(Writer, N, 10),
    Now = erlang:monotonic_time(millisecond),
    timer:sleep(max(0, Start + N * ?RECORD * 1000 div ?WRITTEN_A_SECOND - Now)),
    case IsDone() of
        true ->
            N + 10;
        false ->
            ?assert(Now < Deadline, nothing_is_persisted),
            write_until(IsDone, Writer, N + 10, Start, Deadline)
    end.

what_is_held_open_ends_with_the_stream(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    ok = ?READER:await_offset(Stream, 0),
    ok = rabbitmq_stream_s3:pause(Stream),
    write(Writer, 0, 200),
    _ = await_deleted(Config, 5),
    ?assert(rabbitmq_stream_s3_pins:stream_bytes(Stream) > 0),
    ok = osiris:delete_cluster(?config(conf, Config)),
    eventually(false, fun() -> maps:is_key(Stream, maps:get(streams, rabbitmq_stream_s3_pins:info())) end),
    eventually([], fun() -> open_segments(Stream) end).

what_is_held_open_ends_with_the_application(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    ok = ?READER:await_offset(Stream, 0),
    ok = rabbitmq_stream_s3:pause(Stream),
    write(Writer, 0, 200),
    Deleted = await_deleted(Config, 5),
    ?assert(held_open(Deleted) > 0),
    ok = stream_s3_world:stop_application(),
    ?assertEqual(0, held_open(Deleted)),
    ok = stream_s3_world:start_application(maps:merge(?ENV, stream_s3_world:store(?config(world, Config)))).

%% --- races -----------------------------------------------------------------------------------------------------------

with_pins_no_record_is_missing_however_fast_retention_is(Config) ->
    ok = stream_s3_world:set(#{fragment_target_size => deep(?TIMES_LARGER, 1) * ?FRAGMENT}),
    Writer = start_stream(Config),
    #{records := Records, segments := Segments} = race(Config, Writer, fun() -> true end),
    ct:pal("~b records, ~b segments deleted, ~b bytes held open at the end", [
        Records, Segments, rabbitmq_stream_s3_pins:stream_bytes(?config(stream, Config))
    ]),
    ?assert(Segments > ?RACED, Segments),
    ok = rabbitmq_stream_s3:set_transfer_rate(unlimited, undefined),
    ok = assert_complete(Config, Writer, Records).

without_pins_every_new_beginning_gets_something_tiered(Config) ->
    ok = stream_s3_world:set(#{pinned_segment_bytes => 0}),
    Writer = start_stream(Config),
    HasBegunAnew = fun() -> maps:get(local_log_ahead_recoveries, counters(Config)) > ?BEGUN end,
    #{records := Records, segments := Segments, empty := Empty, samples := Samples} = race(Config, Writer, HasBegunAnew),
    #{local_log_ahead_recoveries := Resets, persists_completed := Persists} = counters(Config),
    ct:pal("~b records, ~b segments deleted, ~b new beginnings, ~b persists, ~b of ~b samples empty", [
        Records, Segments, Resets, Persists, Empty, Samples
    ]),
    ?assert(Segments > ?RACED, Segments),
    ?assert(Resets > ?BEGUN, Resets),
    ?assert(Persists >= Resets, {Persists, Resets}),
    ?assert(Empty * 10 =< Samples, {Empty, Samples}),
    ok = rabbitmq_stream_s3:set_transfer_rate(unlimited, undefined),
    ok = settle(Config, Writer),
    ok = assert_end(Config, Records).

%% Writes for a while, faster than is uploaded.
race(Config, Writer, IsEnough) ->
    ok = ?READER:await_offset(?config(stream, Config), 0),
    ok = rabbitmq_stream_s3:set_transfer_rate(?UPLOADED_A_SECOND, undefined),
    Now = erlang:monotonic_time(millisecond),
    Until = Now + deep(?DEEP_RACE_MS, ?RACE_MS),
    race(Config, Writer, IsEnough, Now, Until, #{records => 0, empty => 0, samples => 0}).

race(Config, Writer, IsEnough, Start, Until, #{records := N} = Sums0) ->
    ok = write_at_once(Writer, N, 10),
    Sums = sample(Config, Sums0#{records := N + 10}),
    %% The writer's pace, which is no waiting for anything.
    Due = Start + (N + 10) * ?RECORD * 1000 div ?WRITTEN_A_SECOND,
    Now = erlang:monotonic_time(millisecond),
    timer:sleep(max(0, Due - Now)),
    %% A machine that does much else takes longer until enough has been deleted.
    case Now >= Until andalso segments_deleted(Config, Writer) > ?RACED andalso IsEnough() of
        false -> race(Config, Writer, IsEnough, Start, Until, Sums);
        true -> Sums#{segments => segments_deleted(Config, Writer)}
    end.

segments_deleted(Config, Writer) ->
    #{max_segment_size_bytes := Segment} = ?config(conf, Config),
    log_first(Writer) div (Segment div ?RECORD).

%% From the first persist on.
sample(Config, #{empty := Empty, samples := Samples} = Sums) ->
    case {rabbitmq_stream_s3:get_range(?config(stream, Config)), Samples} of
        {{_, _}, _} -> Sums#{samples := Samples + 1};
        {_, 0} -> Sums;
        {_, _} -> Sums#{empty := Empty + 1, samples := Samples + 1}
    end.

%% --- helpers ---------------------------------------------------------------------------------------------------------

deep(Deep, Short) ->
    case os:getenv("STREAM_S3_DEEP") of
        false -> Short;
        _ -> Deep
    end.

start_stream(Config) ->
    Writer = stream_s3_osiris:start_stream(?config(conf, Config)),
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    Writer.

%% So many chunks, and every segment that they come to lie in is pinned: on a machine that does much else, osiris may create and delete one
%% before anybody is awake.
write(Writer, First, Count) when Count > ?STEP ->
    ok = write(Writer, First, ?STEP),
    write(Writer, First + ?STEP, Count - ?STEP);
write(Writer, First, Count) ->
    ok = write_at_once(Writer, First, Count),
    case rabbitmq_stream_s3_config:get(pinned_segment_bytes) of
        0 -> ok;
        _ -> eventually(true, fun() -> is_pinned(Writer) end)
    end.

%% Whether the newest segment is.
is_pinned(Writer) ->
    {ok, #{dir := Dir} = Context} = rabbitmq_stream_s3_log:context(Writer, ?TIMEOUT),
    {First, _} = lists:last(rabbitmq_stream_s3_log:index_files(Dir)),
    rabbitmq_stream_s3_pins:identity(Context, First, ?TIMEOUT) =/= {ok, trimmed}.

%% So many chunks of one record of 500 bytes.
write_at_once(Writer, First, Count) ->
    [ok = stream_s3_osiris:write_chunk(Writer, [<<N:32, 0:(440 * 8)>>]) || N <- lists:seq(First, First + Count - 1)],
    ok.

settle(Config, Writer) ->
    stream_s3_world:settle(?config(stream, Config), stream_s3_osiris:next_offset(Writer), ?TIMEOUT).

%% Waits until at least so many deleted segments are held open, and the gauge says so; answers the descriptors.
await_deleted(Config, AtLeast) ->
    Stream = ?config(stream, Config),
    eventually(true, fun() -> length(deleted_segments(Stream)) >= AtLeast end),
    eventually(true, fun() -> rabbitmq_stream_s3_pins:stream_bytes(Stream) =:= held_open(deleted_segments(Stream)) end),
    deleted_segments(Stream).

%% osiris' retention runs behind the writer.
await_trimmed(Writer) ->
    eventually(true, fun() -> length(osiris_log:sorted_index_files(stream_s3_osiris:dir(Writer))) =< 3 end).

log_first(Writer) ->
    {ok, Context} = rabbitmq_stream_s3_log:context(Writer, ?TIMEOUT),
    case rabbitmq_stream_s3_log:range(Context) of
        {ok, #{first := First}} -> First;
        %% Deleted while it was looked at.
        {error, missing_file} -> log_first(Writer)
    end.

%% Of the library, not of osiris or of the reader: each descriptor once, by inode.
deleted_segments(Stream) ->
    [Link || {Link, Target} <- open_segments(Stream), lists:suffix(" (deleted)", Target)].

open_segments(Stream) ->
    Fds = filelib:wildcard("/proc/self/fd/*"),
    [
        {Fd, Target}
     || Fd <- Fds, {ok, Target} <- [file:read_link(Fd)], string:find(Target, ["/", Stream, "/"]) =/= nomatch, string:find(Target, ".segment") =/= nomatch
    ].

%% Bytes of the deleted files behind these descriptors, as far as they are still open; of each file once.
held_open(Links) ->
    Files = [{Inode, Size} || Link <- Links, {ok, {Inode, Size, 0}} <- [inode(Link)]],
    lists:sum([Size || {_, Size} <- lists:usort(Files)]).

inode(Link) ->
    case file:read_file_info(Link, [raw]) of
        {ok, #file_info{inode = Inode, size = Size, links = Links}} -> {ok, {Inode, Size, Links}};
        {error, _} = Error -> Error
    end.

%% Everything that was written is in the bucket, from the first record on, and the tier was never begun anew.
assert_complete(Config, Writer, Count) ->
    ok = settle(Config, Writer),
    ?assertMatch(#{local_log_ahead_recoveries := 0, remote_tier_ahead_recoveries := 0}, counters(Config)),
    ?assertEqual(lists:seq(0, Count - 1), tiered_records(Config)),
    verify(Config).

%% What is in the bucket is the end of what was written, without a hole.
assert_end(Config, Count) ->
    [First | _] = Records = tiered_records(Config),
    ?assertEqual(lists:seq(First, Count - 1), Records),
    verify(Config).

verify(Config) ->
    {Pointer, _} = stream_s3_world:pointer(?config(stream, Config)),
    stream_s3_cli:verify(stream_s3_world:store(?config(world, Config)), ?config(stream, Config), Pointer).

tiered_records(Config) ->
    {Bucket, Stream} = {?config(bucket, Config), ?config(stream, Config)},
    {Pointer, _} = stream_s3_world:pointer(Stream),
    {_, Fragments} = stream_s3_bucket:fragments(Bucket, Stream, Pointer),
    Add = fun(Chunk, Acc) -> [[N || <<N:32, _/binary>> <- stream_s3_chunks:records(Chunk)] | Acc] end,
    lists:append([lists:append(lists:reverse(stream_s3_bucket:fold_chunks(Add, [], Bucket, F))) || F <- Fragments]).

counters(Config) ->
    rabbitmq_stream_s3_counters:get({stream, ?config(stream, Config)}).
