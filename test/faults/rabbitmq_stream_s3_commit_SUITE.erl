%% What is not committed must not be tiered. Three real members of a stream on three nodes, whose metadata stores are one: so while
%% a stream's replicas are down nothing but the commit check keeps its chunks out of the bucket.
-module(rabbitmq_stream_s3_commit_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-include("rabbitmq_stream_s3.hrl").

-export([all/0, suite/0, init_per_suite/1, end_per_suite/1, init_per_testcase/2, end_per_testcase/2]).
-export([
    tiering_stops_at_the_committed_offset_while_replicas_are_down_and_resumes_with_them/1,
    chunks_that_an_election_cuts_off_never_reach_the_bucket/1
]).

-define(TIMEOUT, 20000).
-define(RECORD_SIZE, 1000).
-define(ENV, #{store => fs, fragment_target_size => 4 * ?RECORD_SIZE, persist_interval_ms => 100}).

suite() -> [{timetrap, {seconds, 60}}].

all() ->
    [
        tiering_stops_at_the_committed_offset_while_replicas_are_down_and_resumes_with_them,
        chunks_that_an_election_cuts_off_never_reach_the_bucket
    ].

init_per_suite(Config) ->
    Dir = ?config(priv_dir, Config),
    Store = #{store => fs, fs_dir => unicode:characters_to_binary(filename:join(Dir, "bucket"))},
    ok = filelib:ensure_path(maps:get(fs_dir, Store)),
    %% Here as well: the bucket is read by this node.
    Keeper = stream_s3_keeper:start(fun() -> stream_s3_peers:start(["a", "b", "c"]) end),
    Nodes = [Node || {_Peer, Node} <- stream_s3_keeper:value(Keeper)],
    [ok = start_node(Node, filename:join(Dir, Node), maps:merge(?ENV, Store)) || Node <- Nodes],
    [ok = join(Node, hd(Nodes)) || Node <- tl(Nodes)],
    [{keeper, Keeper}, {nodes, Nodes}, {store, Store}, {bucket, stream_s3_bucket:open(Store)} | Config].

start_node(Node, Dir, Env) ->
    ok = stream_s3_peers:call(Node, stream_s3_osiris, start, [filename:join(Dir, "osiris")]),
    ok = stream_s3_peers:call(Node, stream_s3_world, start_application, [Env]).

join(Node, First) ->
    StoreId = stream_s3_peers:call(Node, rabbitmq_stream_s3_metadata, store_id, []),
    stream_s3_peers:call(Node, khepri_cluster, join, [StoreId, First]).

end_per_suite(Config) ->
    stream_s3_keeper:stop(?config(keeper, Config), fun(Peers) -> [ok = stream_s3_peers:stop(Peer) || {Peer, _Node} <- Peers] end).

init_per_testcase(Case, Config) ->
    [{stream, atom_to_binary(Case)} | Config].

end_per_testcase(_Case, Config) ->
    Config.

%% --- cases -----------------------------------------------------------------------------------------------------------

tiering_stops_at_the_committed_offset_while_replicas_are_down_and_resumes_with_them(Config) ->
    [A, B, C] = ?config(nodes, Config),
    {Stream, Conf, Writer} = start_stream(Config),
    ok = write(A, Writer, "committed", 50),
    ok = settle(A, Stream, 50),

    [ok = osiris:stop_member(Node, Conf) || Node <- [B, C]],
    Committed = committed_chunk_id(A, Writer),
    ok = write_uncommitted(Writer, "uncommitted", 25),
    ?assertEqual(75, next_offset(A, Writer)),
    ?assertEqual(Committed, committed_chunk_id(A, Writer)),
    ok = tempt(A, Stream),
    ok = assert_not_above(Config, Stream, 50),

    {ok, _} = stream_s3_osiris:start_replica(B, Conf#{leader_pid => Writer}),
    ok = settle(A, Stream, 75),
    assert_bucket_is_log_of(Config, A, Writer, 75),
    ok = osiris:delete_cluster(Conf#{leader_pid => Writer}).

chunks_that_an_election_cuts_off_never_reach_the_bucket(Config) ->
    [A, B, C] = ?config(nodes, Config),
    {Stream, Conf, Old} = start_stream(Config),
    ok = write(A, Old, "committed", 50),
    ok = settle(A, Stream, 50),
    [ok = osiris:stop_member(Node, Conf) || Node <- [B, C]],
    ok = write_uncommitted(Old, "phantom", 25),
    ok = tempt(A, Stream),

    %% The others elect a writer of their own, while the old one and its reader still run, cut off.
    Conf2 = Conf#{epoch => 2, leader_node => B, replica_nodes => [A, C]},
    {ok, New} = osiris:start_writer(Conf2),
    {ok, _} = stream_s3_osiris:start_replica(C, Conf2#{leader_pid => New}),
    ok = reconcile(B),
    ok = write(B, New, "elected", 40),
    ok = tempt(A, Stream),
    ok = settle(B, Stream, 90),
    ok = assert_not_above(Config, Stream, 90),
    assert_bucket_is_log_of(Config, B, New, 90),

    %% The old writer's node comes back as a replica and drops what it had alone.
    ok = osiris:stop_member(A, Conf),
    {ok, Back} = stream_s3_osiris:start_replica(A, Conf2#{leader_pid => New}),
    ok = write(B, New, "together", 10),
    ok = settle(B, Stream, 100),
    assert_bucket_is_log_of(Config, B, New, 100),
    Records = bucket_records(Config, Stream),
    ?assertEqual(lists:duplicate(50, "committed") ++ lists:duplicate(40, "elected") ++ lists:duplicate(10, "together"), [
        string:trim(binary_to_list(Name)) || <<Name:12/binary, _/binary>> <- Records
    ]),
    ok = osiris:stop_member(A, Conf2),
    ?assertNot(stream_s3_peers:call(A, erlang, is_process_alive, [Back])),
    ok = osiris:delete_cluster(Conf2#{leader_pid => New}).

%% --- streams ---------------------------------------------------------------------------------------------------------

start_stream(Config) ->
    [A, B, C] = ?config(nodes, Config),
    Stream = ?config(stream, Config),
    Conf = stream_s3_osiris:config(Stream, #{leader_node => A, replica_nodes => [B, C]}),
    Writer = stream_s3_peers:call(A, stream_s3_osiris, start_stream, [Conf]),
    ok = reconcile(A),
    {Stream, Conf, Writer}.

reconcile(Node) -> stream_s3_peers:call(Node, rabbitmq_stream_s3_reconciler, reconcile, []).

%% One by one, so that there are many chunks.
write(Node, Writer, Name, Count) ->
    [ok = stream_s3_peers:call(Node, stream_s3_osiris, write, [Writer, Batch]) || Batch <- batches(Name, Count)],
    ok.

batches(Name, Count) -> [[record(Name, I), record(Name, I + 1), record(Name, I + 2)] || I <- lists:seq(1, Count - 2, 3)] ++
    [[record(Name, I)] || I <- lists:seq(Count - Count rem 3 + 1, Count)].

%% Nobody confirms these; a question that the writer answers behind them says that they are in its log.
write_uncommitted(Writer, Name, Count) ->
    [ok = osiris:write(Writer, record(Name, I)) || I <- lists:seq(1, Count)],
    _ = osiris:fetch_writer_seq(Writer, <<"nobody">>),
    ok.

record(Name, I) ->
    Start = <<(list_to_binary(string:pad(Name, 12)))/binary, I:32>>,
    <<Start/binary, (binary:copy(<<I>>, ?RECORD_SIZE - byte_size(Start)))/binary>>.

%% Gives the reader of this node every occasion to tier what it must not: it looks again and cuts, and so does a fresh one,
%% which has no listener yet that would wait for a commit.
tempt(Node, Stream) ->
    _ = force_cut(Node, Stream),
    ok = stream_s3_peers:call(Node, stream_s3_world, kill_reader, [Stream]),
    ok = reconcile(Node),
    _ = force_cut(Node, Stream),
    ok.

force_cut(Node, Stream) -> stream_s3_peers:call(Node, rabbitmq_stream_s3_replica_reader, force_cut, [Stream]).

settle(Node, Stream, Offset) -> stream_s3_peers:call(Node, stream_s3_world, settle, [Stream, Offset, ?TIMEOUT]).
committed_chunk_id(Node, Writer) -> stream_s3_peers:call(Node, stream_s3_osiris, committed_chunk_id, [Writer]).
next_offset(Node, Writer) -> stream_s3_peers:call(Node, stream_s3_osiris, next_offset, [Writer]).

%% --- the bucket ------------------------------------------------------------------------------------------------------

%% Looks at every object of the stream, listed by a root or not.
assert_not_above(Config, Stream, Offset) ->
    Bucket = ?config(bucket, Config),
    Keys = [Key || Key <- stream_s3_bucket:keys(Bucket, Stream), filename:extension(Key) =:= <<".fragment">>],
    ?assertNotEqual([], Keys),
    Records = [
        Record
     || Key <- Keys, Chunk <- unlisted_chunks(Bucket, Key), Record <- stream_s3_chunks:records(Chunk)
    ],
    Names = [Name || <<Name:7/binary, _/binary>> <- Records],
    ?assertEqual([], [Name || Name <- Names, Name =:= <<"phantom">> orelse Name =:= <<"uncommi">>]),
    Ends = [Id + Num || Key <- Keys, #{chunk_id := Id, num_records := Num} <- unlisted_chunks(Bucket, Key)],
    ?assert(lists:max(Ends) =< Offset),
    ok.

%% Chunks of an object that no root need list: up to the index, which begins where a chunk's magic number is missing.
unlisted_chunks(Bucket, Key) ->
    <<"OSIF", 1:32, Bytes/binary>> = stream_s3_bucket:get(Bucket, Key, whole),
    until_index(Bytes).

until_index(<<5:4, 0:4, _/binary>> = Bytes) ->
    {Chunk, Rest} = stream_s3_chunks:next(Bytes),
    [Chunk | until_index(Rest)];
until_index(_Index) ->
    [].

assert_bucket_is_log_of(Config, Node, Writer, End) ->
    Stream = ?config(stream, Config),
    ?assertEqual(End, next_offset(Node, Writer)),
    Dir = stream_s3_peers:call(Node, stream_s3_osiris, dir, [Writer]),
    #{bytes := Local} = stream_s3_chunks:of_log(Dir),
    {Manifest, Remote} = bucket_bytes(Config, Stream),
    ?assertEqual({0, End}, {Manifest#manifest.first_offset, Manifest#manifest.next_offset}),
    ?assertEqual({byte_size(Local), erlang:md5(Local)}, {byte_size(Remote), erlang:md5(Remote)}).

bucket_records(Config, Stream) ->
    {_Manifest, Bytes} = bucket_bytes(Config, Stream),
    lists:append([stream_s3_chunks:records(Chunk) || Chunk <- stream_s3_chunks:all(Bytes)]).

bucket_bytes(Config, Stream) ->
    Bucket = ?config(bucket, Config),
    {Pointer, _Revision} = stream_s3_peers:call(hd(?config(nodes, Config)), stream_s3_world, pointer, [Stream]),
    ok = stream_s3_cli:verify(?config(store, Config), Stream, Pointer),
    {Manifest, Fragments} = stream_s3_bucket:fragments(Bucket, Stream, Pointer),
    {Manifest, iolist_to_binary([stream_s3_bucket:chunk_bytes(Bucket, Fragment) || Fragment <- Fragments])}.
