%% The demo is the first thing that anybody runs: it must work on every flavour, and it must not say ok to anything wrong.
-module(rabbitmq_stream_s3_demo_SUITE).

-include_lib("stdlib/include/assert.hrl").

-export([all/0, suite/0]).
-export([
    a_small_demo_ends_well_with_either_store/1,
    what_is_kept_are_the_records_and_the_objects/1,
    settings_that_cannot_be_meant_end_with_status_1/1,
    records_come_back_in_order_and_equal/1,
    a_missing_record_is_told/1,
    a_record_that_comes_twice_is_told/1,
    a_changed_byte_is_told/1,
    a_record_of_another_stream_is_told/1,
    a_gap_of_offsets_is_told/1,
    records_that_stop_too_early_are_told/1
]).

suite() -> [{timetrap, {seconds, 60}}].

all() ->
    [
        a_small_demo_ends_well_with_either_store,
        what_is_kept_are_the_records_and_the_objects,
        settings_that_cannot_be_meant_end_with_status_1,
        records_come_back_in_order_and_equal,
        a_missing_record_is_told,
        a_record_that_comes_twice_is_told,
        a_changed_byte_is_told,
        a_record_of_another_stream_is_told,
        a_gap_of_offsets_is_told,
        records_that_stop_too_early_are_told
    ].

%% --- the whole demo --------------------------------------------------------------------------------------------------

a_small_demo_ends_well_with_either_store(_Config) ->
    [?assertEqual({Store, 0}, {Store, demo([{"STORE", Store}, {"MB", "12"}, {"STREAMS", "2"}])}) || Store <- ["fs", "s3"]].

what_is_kept_are_the_records_and_the_objects(Config) ->
    Keep = filename:join(proplists:get_value(priv_dir, Config), "keep"),
    [
        begin
            Dir = filename:join(Keep, Store),
            ?assertEqual(0, demo([{"STORE", Store}, {"MB", "3"}, {"STREAMS", "1"}, {"KEEP", Dir}])),
            {ok, Records} = file:read_file(filename:join([Dir, "records", "demo-1"])),
            ?assert(byte_size(Records) >= 3 bsl 20),
            ?assertMatch(<<10:32, _:10/binary, 1048576:32, _/binary>>, Records),
            Objects = filename:join([Dir, "bucket", "rabbitmq", "stream", "demo-1"]),
            ?assertNotEqual([], filelib:wildcard("data/*.fragment", Objects)),
            ?assertNotEqual([], filelib:wildcard("metadata/root.1.*.manifest", Objects))
        end
     || Store <- ["fs", "s3"]
    ].

settings_that_cannot_be_meant_end_with_status_1(_Config) ->
    [
        ?assertEqual({Setting, 1}, {Setting, demo([Setting])})
     || Setting <- [
            {"STORE", "disk"},
            {"MB", "many"},
            {"MB", "0"},
            {"STREAMS", "-1"},
            {"STREAMS", "3x"},
            {"KEEP", "/proc/version"},
            {"KEEP", "/proc"}
        ]
    ].

%% On a node of its own: the demo starts and stops applications, and sets the log level.
demo(Settings) ->
    [{Peer, Node}] = stream_s3_peers:start(["demo"]),
    try
        [true = stream_s3_peers:call(Node, os, putenv, [Name, Value]) || {Name, Value} <- Settings],
        stream_s3_peers:call(Node, stream_s3_demo, main, [])
    after
        stream_s3_peers:stop(Peer)
    end.

%% --- its judgement ---------------------------------------------------------------------------------------------------

records_come_back_in_order_and_equal(_Config) ->
    Check = chunk(3, [record(3), record(4)], chunk(0, [record(0), record(1), record(2)], new())),
    ?assertEqual(#{records => 5, bytes => 5 * 19, chunks => 2}, stream_s3_demo_check:finish(Check, 5, 5)).

a_missing_record_is_told(_Config) ->
    ?assertError({demo, <<"s">>, "record 2 came in place of record 1"}, chunk(0, [record(0), record(2)], new())).

a_record_that_comes_twice_is_told(_Config) ->
    ?assertError({demo, <<"s">>, "record 0 came again in place of record 1"}, chunk(0, [record(0), record(0)], new())).

a_changed_byte_is_told(_Config) ->
    Changed = <<(record(0))/binary, "!">>,
    ?assertError({demo, <<"s">>, "record 0 has other bytes than were written"}, chunk(0, [Changed], new())).

a_record_of_another_stream_is_told(_Config) ->
    <<_, Rest/binary>> = record(0),
    Text = "something that is no record of this stream came in place of record 0",
    ?assertError({demo, <<"s">>, Text}, chunk(0, [<<9, Rest/binary>>], new())).

a_gap_of_offsets_is_told(_Config) ->
    Check = chunk(0, [record(0)], new()),
    ?assertError({demo, <<"s">>, "a chunk begins at offset 2 in place of 1"}, chunk(2, [record(1)], Check)),
    ?assertError({demo, <<"s">>, "a fragment begins at offset 3 in place of 1"}, stream_s3_demo_check:fragment(3, Check)).

records_that_stop_too_early_are_told(_Config) ->
    Check = chunk(0, [record(0)], new()),
    ?assertError({demo, <<"s">>, "1 of 2 records came back, up to offset 1 of 2"}, stream_s3_demo_check:finish(Check, 2, 2)).

new() -> stream_s3_demo_check:new(<<"s">>, fun record/1).

record(N) -> <<7:8, N:64, "0123456789">>.

chunk(Offset, Records, Check) ->
    Data = iolist_to_binary([<<0:1, (byte_size(Record)):31, Record/binary>> || Record <- Records]),
    Header =
        <<5:4, 0:4, 0:8, (length(Records)):16, (length(Records)):32, 0:64, 1:64, Offset:64, (erlang:crc32(Data)):32,
            (byte_size(Data)):32, 0:32, 0:8, 0:24>>,
    {Chunk, <<>>} = stream_s3_chunks:next(<<Header/binary, Data/binary>>),
    stream_s3_demo_check:chunk(Chunk, Check).
