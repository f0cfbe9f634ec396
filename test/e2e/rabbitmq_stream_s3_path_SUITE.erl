%% The whole way of a record, with nothing left out: a real osiris writer, the application, a bucket. What comes to lie in
%% the bucket is compared byte for byte with the segment files, and verified by the command `stream-s3' besides.
-module(rabbitmq_stream_s3_path_SUITE).

-include("rabbitmq_stream_s3.hrl").
-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-export([all/0, groups/0, suite/0, init_per_group/2, end_per_group/2, init_per_testcase/2, end_per_testcase/2]).
-export([
    a_fragment_spans_two_segment_files/1,
    a_chunk_larger_than_the_target_becomes_one_fragment/1,
    tracking_chunks_are_tiered_like_all_others/1,
    filters_are_tiered_with_their_chunks/1,
    an_empty_stream_leaves_nothing_in_the_bucket/1,
    a_stream_with_one_record_becomes_one_fragment/1,
    many_fragments_are_folded_into_groups/1,
    streams_with_one_id_as_prefix_of_the_other_stay_apart/1
]).

-define(TIMEOUT, 20000).

suite() -> [{timetrap, {seconds, 60}}].

all() -> [{group, fs}, {group, s3}].

groups() ->
    Cases = [
        a_fragment_spans_two_segment_files,
        a_chunk_larger_than_the_target_becomes_one_fragment,
        tracking_chunks_are_tiered_like_all_others,
        filters_are_tiered_with_their_chunks,
        an_empty_stream_leaves_nothing_in_the_bucket,
        a_stream_with_one_record_becomes_one_fragment,
        many_fragments_are_folded_into_groups,
        streams_with_one_id_as_prefix_of_the_other_stay_apart
    ],
    [{fs, [], Cases}, {s3, [], Cases}].

%% The world lives as long as the process that runs this function, and Common Test ends that at once: so it gets one of its own.
init_per_group(Store, Config) ->
    Dir = filename:join(?config(priv_dir, Config), atom_to_list(Store)),
    Options = #{store => Store, dir => Dir, env => #{persist_interval_ms => 50}},
    Keeper = stream_s3_keeper:start(fun() -> stream_s3_world:start(Options) end),
    World = stream_s3_keeper:value(Keeper),
    [{keeper, Keeper}, {world, World}, {bucket, stream_s3_world:bucket(World)} | Config].

end_per_group(_Store, Config) ->
    stream_s3_keeper:stop(?config(keeper, Config), fun stream_s3_world:stop/1).

init_per_testcase(Case, Config) ->
    [{stream, atom_to_binary(Case)} | Config].

end_per_testcase(_Case, Config) ->
    stream_s3_world:set(#{fragment_target_size => 67108864, rebalance_threshold => 1024}),
    Config.

%% --- cases -----------------------------------------------------------------------------------------------------------

a_fragment_spans_two_segment_files(Config) ->
    Writer = start_stream(Config, #{max_segment_size_bytes => 50000}, #{fragment_target_size => 120000}),
    [ok = stream_s3_osiris:write_chunk(Writer, [record(N, 1000) || N <- lists:seq(I, I + 4)]) || I <- lists:seq(0, 395, 5)],
    #{fragments := Fragments, segments := Segments} = assert_tiered(Config, Writer),
    Firsts = [First || #{first_offset := First} <- Fragments],
    ?assert(length(Segments) > 4),
    %% Some segment begins inside a fragment, not at its first offset.
    ?assertNotEqual([], Segments -- Firsts),
    ?assert(length(Firsts) < length(Segments)).

a_chunk_larger_than_the_target_becomes_one_fragment(Config) ->
    Writer = start_stream(Config, #{}, #{fragment_target_size => 65536}),
    [ok = stream_s3_osiris:write_chunk(Writer, [record(N, 100000) || N <- lists:seq(1, 30)]) || _ <- [1, 2]],
    #{fragments := Fragments} = assert_tiered(Config, Writer),
    ?assertMatch([#{first_offset := 0}, #{first_offset := 30}], Fragments).

tracking_chunks_are_tiered_like_all_others(Config) ->
    Writer = start_stream(Config, #{max_segment_size_bytes => 20000}, #{fragment_target_size => 30000}),
    [track(Writer, I) || I <- lists:seq(1, 60)],
    #{chunks := Chunks} = assert_tiered(Config, Writer),
    ?assertEqual([tracking_delta, tracking_snapshot, user], lists:usort([Type || #{type := Type} <- Chunks])),
    %% A record and an offset that are written together share a chunk: the offset becomes its trailer.
    ?assert(lists:any(fun(#{type := Type, trailer := Trailer}) -> Type =:= user andalso Trailer =/= <<>> end, Chunks)).

filters_are_tiered_with_their_chunks(Config) ->
    Writer = start_stream(Config, #{filter_size => 64}, #{fragment_target_size => 5000}),
    [
        ok = stream_s3_osiris:write_chunk(Writer, [{<<"eu-", (integer_to_binary(N))/binary>>, record(N, 200)}, record(N, 100)])
     || N <- lists:seq(1, 40)
    ],
    ok = stream_s3_osiris:write_chunk(Writer, [record(0, 50)]),
    #{chunks := Chunks} = assert_tiered(Config, Writer),
    ?assertEqual([0, 64], lists:usort([byte_size(Filter) || #{filter := Filter} <- Chunks])).

an_empty_stream_leaves_nothing_in_the_bucket(Config) ->
    _Writer = start_stream(Config, #{}, #{}),
    Stream = ?config(stream, Config),
    ?assertEqual({error, empty}, rabbitmq_stream_s3_replica_reader:force_cut(Stream)),
    ?assertEqual(ok, rabbitmq_stream_s3_replica_reader:await_offset(Stream, 0, ?TIMEOUT)),
    ?assertEqual(empty, rabbitmq_stream_s3:get_range(Stream)),
    ?assertEqual([], stream_s3_bucket:keys(?config(bucket, Config), Stream)),
    %% No stream of that name for the command either.
    {2, _} = stream_s3_cli:run(stream_s3_world:store(?config(world, Config)), ["verify", Stream, "--quiet"]).

a_stream_with_one_record_becomes_one_fragment(Config) ->
    Writer = start_stream(Config, #{}, #{}),
    ok = stream_s3_osiris:write(Writer, [<<"one">>]),
    #{fragments := Fragments, chunks := [Chunk]} = assert_tiered(Config, Writer),
    ?assertMatch([#{first_offset := 0}], Fragments),
    ?assertEqual([<<"one">>], stream_s3_chunks:records(Chunk)),
    ?assertEqual({0, 1}, rabbitmq_stream_s3:get_range(?config(stream, Config))).

many_fragments_are_folded_into_groups(Config) ->
    Writer = start_stream(Config, #{}, #{fragment_target_size => 1000, rebalance_threshold => 2}),
    [ok = stream_s3_osiris:write_chunk(Writer, [record(N, 1000)]) || N <- lists:seq(0, 40)],
    #{fragments := Fragments} = assert_tiered(Config, Writer),
    ?assertEqual(lists:seq(0, 40), [First || #{first_offset := First} <- Fragments]),
    Keys = stream_s3_bucket:keys(?config(bucket, Config), ?config(stream, Config)),
    Extensions = lists:usort([filename:extension(Key) || Key <- Keys]),
    ?assertEqual([<<".fragment">>, <<".group">>, <<".kgroup">>, <<".manifest">>, <<".mgroup">>], Extensions).

streams_with_one_id_as_prefix_of_the_other_stay_apart(Config) ->
    Short = start_stream(Config, #{}, #{}),
    ok = stream_s3_osiris:write(Short, [<<"short">>]),
    Longer = [{stream, <<(?config(stream, Config))/binary, "_2">>} | Config],
    Long = start_stream(Longer, #{}, #{}),
    ok = stream_s3_osiris:write(Long, [<<"long">>]),
    #{chunks := [ShortChunk]} = assert_tiered(Config, Short),
    #{chunks := [LongChunk]} = assert_tiered(Longer, Long),
    ?assertEqual([<<"short">>], stream_s3_chunks:records(ShortChunk)),
    ?assertEqual([<<"long">>], stream_s3_chunks:records(LongChunk)).

%% --- helpers ---------------------------------------------------------------------------------------------------------

start_stream(Config, Overrides, Env) ->
    ok = stream_s3_world:set(Env),
    Writer = stream_s3_osiris:start_stream(stream_s3_osiris:config(?config(stream, Config), Overrides)),
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    Writer.

record(N, Size) -> <<N:32, (binary:copy(<<(N rem 256)>>, Size - 4))/binary>>.

%% A record, an offset with a record, and an offset alone. Reading the offset back makes sure that its chunk is written.
track(Writer, I) ->
    ok = stream_s3_osiris:write(Writer, [record(I, 500)]),
    ok = sys:suspend(Writer),
    ok = osiris:write_tracking(Writer, <<"consumer-a">>, I),
    ok = osiris:write(Writer, undefined, I, record(I, 500)),
    ok = sys:resume(Writer),
    receive
        {osiris_written, _, undefined, [I]} -> ok
    end,
    ok = osiris:write_tracking(Writer, <<"consumer-b">>, I),
    {offset, I} = osiris:read_tracking(Writer, offset, <<"consumer-b">>).

%% All of the log is in the bucket and nothing else: the fragments' bytes are the segment files' bytes.
assert_tiered(Config, Writer) ->
    Bucket = ?config(bucket, Config),
    Stream = ?config(stream, Config),
    End = stream_s3_osiris:next_offset(Writer),
    ok = stream_s3_world:settle(Stream, End, ?TIMEOUT),
    %% The epoch is the writer's, also of a reader that was there before the writer had started in full.
    {{_Uid, 1} = Pointer, _Revision} = stream_s3_world:pointer(Stream),
    {Manifest, Fragments} = stream_s3_bucket:fragments(Bucket, Stream, Pointer),
    ?assertEqual({0, End}, {Manifest#manifest.first_offset, Manifest#manifest.next_offset}),
    ?assertEqual({0, End}, rabbitmq_stream_s3:get_range(Stream)),
    Remote = iolist_to_binary([stream_s3_bucket:chunk_bytes(Bucket, Fragment) || Fragment <- Fragments]),
    ?assertEqual(byte_size(Remote), Manifest#manifest.total_size),
    #{bytes := Local, segments := Segments} = stream_s3_chunks:of_log(stream_s3_osiris:dir(Writer)),
    ?assertEqual(byte_size(Local), byte_size(Remote)),
    ?assertEqual(erlang:md5(Local), erlang:md5(Remote)),
    ok = stream_s3_cli:verify(stream_s3_world:store(?config(world, Config)), Stream, Pointer),
    #{fragments => Fragments, segments => Segments, chunks => stream_s3_chunks:all(Remote)}.
