%% Three nodes whose metadata stores are one, three members of a stream on them, and something that goes wrong while the stream
%% is written to. Afterwards the bucket must be the log: all that was confirmed and acknowledged, and nothing else.
%%
%% With the environment variable STREAM_S3_DEEP the repeated cases repeat more.
-module(rabbitmq_stream_s3_cluster_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-include("rabbitmq_stream_s3.hrl").

-import(stream_s3_wait, [eventually/1]).

-export([all/0, suite/0, init_per_suite/1, end_per_suite/1, init_per_testcase/2, end_per_testcase/2]).
-export([
    a_stream_whose_leader_moves_is_tiered_without_loss/1,
    a_writers_node_that_is_killed_takes_nothing_with_it/1,
    a_replica_that_is_cut_off_and_back_knows_what_is_tiered/1,
    a_writer_that_is_cut_off_tiers_nothing_more_and_loses/1,
    a_deposed_writer_that_goes_on_loses_against_the_new_one/1,
    a_stream_deleted_during_an_upload_is_left_alone/1,
    an_application_that_is_stopped_and_started_under_load_goes_on/1
]).

-define(TIMEOUT, 30000).
-define(ENV, #{
    store => fs,
    fragment_target_size => 10000,
    persist_interval_ms => 50,
    rebalance_threshold => 16,
    task_retry_delay_max_ms => 100,
    upload_retry_delay_ms => 10,
    upload_retry_delay_max_ms => 100
}).

suite() -> [{timetrap, {seconds, case os:getenv("STREAM_S3_DEEP") of false -> 120; _ -> 1200 end}}].

all() ->
    [
        a_stream_whose_leader_moves_is_tiered_without_loss,
        a_deposed_writer_that_goes_on_loses_against_the_new_one,
        a_stream_deleted_during_an_upload_is_left_alone,
        an_application_that_is_stopped_and_started_under_load_goes_on,
        a_replica_that_is_cut_off_and_back_knows_what_is_tiered,
        a_writer_that_is_cut_off_tiers_nothing_more_and_loses,
        a_writers_node_that_is_killed_takes_nothing_with_it
    ].

times(Few, Many) ->
    case os:getenv("STREAM_S3_DEEP") of
        false -> Few;
        _ -> Many
    end.

init_per_suite(Config) ->
    Dir = ?config(priv_dir, Config),
    Store = #{store => fs, fs_dir => unicode:characters_to_binary(filename:join(Dir, "bucket"))},
    ok = filelib:ensure_path(maps:get(fs_dir, Store)),
    Nodes = stream_s3_members:start(Dir, maps:merge(?ENV, Store)),
    [{nodes, Nodes}, {store, Store}, {bucket, stream_s3_bucket:open(Store)} | Config].

end_per_suite(Config) ->
    [ok = stream_s3_members:kill_node(Node) || Node <- ?config(nodes, Config)],
    ok.

init_per_testcase(Case, Config) ->
    [A, B, C] = ?config(nodes, Config),
    Stream = atom_to_binary(Case),
    Conf = stream_s3_osiris:config(Stream, #{leader_node => A, replica_nodes => [B, C], max_segment_size_bytes => 100000}),
    [{stream, Stream}, {conf, Conf} | Config].

end_per_testcase(_Case, Config) ->
    [ok = osiris:stop_member(Node, ?config(conf, Config)) || Node <- ?config(nodes, Config), lists:member(Node, nodes())],
    ok.

%% --- cases -----------------------------------------------------------------------------------------------------------

a_stream_whose_leader_moves_is_tiered_without_loss(Config) ->
    Member0 = start_stream(Config),
    Load = start_load(Member0, Config),
    Member = lists:foldl(
        fun(_, Member) ->
            ok = await_some_more(Member, Config),
            Next = move(Member, ?config(nodes, Config), Config),
            ok = lead(Load, Next),
            Next
        end,
        Member0,
        lists:seq(1, times(3, 20))
    ),
    ok = await_some_more(Member, Config),
    assert_all_there(Load, Member, Config).

a_writers_node_that_is_killed_takes_nothing_with_it(Config) ->
    #{node := Node} = Member0 = start_stream(Config),
    Load = start_load(Member0, Config),
    ok = await_some_more(Member0, Config),
    ok = stream_s3_members:kill_node(Node),
    Member = move(Member0, ?config(nodes, Config) -- [Node], Config),
    ok = lead(Load, Member),
    ok = await_some_more(Member, Config),
    assert_all_there(Load, Member, Config),
    %% It comes back as a member of both the metadata store and the stream, without a reader.
    [Name, _] = string:split(atom_to_list(Node), "@"),
    Env = maps:merge(?ENV, ?config(store, Config)),
    Node = stream_s3_members:start_node(Name, ?config(priv_dir, Config), Env),
    #{writer := Writer, conf := Conf} = Member,
    {ok, _} = stream_s3_osiris:start_replica(Node, Conf#{leader_pid => Writer}),
    ok = call(Node, rabbitmq_stream_s3, reconcile, []),
    ?assertMatch(#{state := not_tiered}, call(Node, rabbitmq_stream_s3, status, [?config(stream, Config)])),
    ok = eventually(fun() -> tail(Node, Config) =:= tail(maps:get(node, Member), Config) end),
    Member2 = move(Member, [Node], Config),
    More = start_load(Member2, Config),
    ok = await_some_more(Member2, Config),
    _ = stream_s3_load:stop(More),
    {End, _} = settled_bucket(Member2, Config),
    ?assertEqual({0, End}, call(Node, rabbitmq_stream_s3, get_range, [?config(stream, Config)])).

a_replica_that_is_cut_off_and_back_knows_what_is_tiered(Config) ->
    Stream = ?config(stream, Config),
    [A, B, C] = ?config(nodes, Config),
    #{writer := Writer, conf := Conf} = Member = start_stream(Config),
    [ok = call(Node, rabbitmq_stream_s3_replicas, look, []) || Node <- [B, C]],
    Load = start_load(Member, Config),
    ok = await_some_more(Member, Config),
    ok = eventually(fun() -> is_tuple(resolved(call(C, rabbitmq_stream_s3, get_range, [Stream]))) end),
    ok = cut_off(C, [A, B]),
    [
        begin
            ok = await_some_more(Member, Config),
            %% Either it says that it cannot tell, or what had been persisted once.
            {0, Tiered} = call(A, rabbitmq_stream_s3, get_range, [Stream]),
            case resolved(call(C, rabbitmq_stream_s3, get_range, [Stream])) of
                none -> ok;
                {0, Known} -> ?assert(Known =< Tiered)
            end
        end
     || _ <- lists:seq(1, times(3, 20))
    ],
    ok = back(C, [A, B]),
    %% What a coordinator does.
    _ = osiris:stop_member(C, Conf),
    {ok, _} = stream_s3_osiris:start_replica(C, Conf#{leader_pid => Writer}),
    ok = eventually(fun() ->
        ok = call(C, rabbitmq_stream_s3_replicas, look, []),
        {0, Tiered} = call(A, rabbitmq_stream_s3, get_range, [Stream]),
        case resolved(call(C, rabbitmq_stream_s3, get_range, [Stream])) of
            {0, Known} -> Known >= Tiered;
            none -> false
        end
    end),
    ok = await_some_more(Member, Config),
    assert_all_there(Load, Member, Config).

a_writer_that_is_cut_off_tiers_nothing_more_and_loses(Config) ->
    Stream = ?config(stream, Config),
    [A, B, C] = ?config(nodes, Config),
    #{writer := OldWriter, conf := Conf} = Member = start_stream(Config),
    ok = write(Member, 0, 20),
    ok = call(A, stream_s3_world, settle, [Stream, 20, ?TIMEOUT]),
    ok = eventually(fun() -> lists:all(fun(Node) -> tail(Node, Config) =:= tail(A, Config) end, [B, C]) end),
    ok = cut_off(A, [B, C]),
    %% These will never be committed.
    [ok = call(A, osiris, write, [OldWriter, undefined, N, stream_s3_load:record(N)]) || N <- lists:seq(1000, 1039)],
    _ = call(A, rabbitmq_stream_s3, force_cut, [Stream]),
    [ok = osiris:stop_member(Node, Conf) || Node <- [B, C]],
    Conf2 = Conf#{epoch => 2, leader_node => B, replica_nodes => [C]},
    {ok, NewWriter} = osiris:start_writer(Conf2),
    {ok, _} = stream_s3_osiris:start_replica(C, Conf2#{leader_pid => NewWriter}),
    ok = call(B, rabbitmq_stream_s3, reconcile, []),
    Elected = #{node => B, writer => NewWriter, conf => Conf2},
    ok = write(Elected, 20, 40),
    ok = call(B, stream_s3_world, settle, [Stream, 60, ?TIMEOUT]),
    {{_, 2}, _} = Pointer = call(B, stream_s3_world, pointer, [Stream]),
    %% Two writers, and what this one thinks is tiered is what was when it was cut off.
    ?assert(call(A, erlang, is_process_alive, [OldWriter])),
    ?assertEqual({0, 20}, call(A, rabbitmq_stream_s3, get_range, [Stream])),
    ok = back(A, [B, C]),
    ?assertEqual(Pointer, call(B, stream_s3_world, pointer, [Stream])),
    ok = osiris:stop_member(A, Conf),
    {ok, _} = stream_s3_osiris:start_replica(A, Conf2#{leader_pid => NewWriter}),
    ok = write(Elected, 60, 20),
    {80, Bytes} = settled_bucket(Elected, Config),
    ?assertEqual([stream_s3_load:record(N) || N <- lists:seq(0, 79)], records(Bytes)).

resolved({error, unresolved}) -> none;
resolved(empty) -> none;
resolved({First, Next}) -> {First, Next}.

%% Between this node and the others there is no connection, and none can be made: each has another cookie for the other. From here all
%% can be reached. What osiris sends from a leader to a replica goes over a connection of its own, but no replica lives on without
%% its leader's node.
cut_off(Node, Others) ->
    [
        begin
            true = call(Node, erlang, set_cookie, [Other, cut_off]),
            true = call(Other, erlang, set_cookie, [Node, from_the_other]),
            _ = call(Node, erlang, disconnect_node, [Other]),
            ok = eventually(fun() ->
                call(Node, net_adm, ping, [Other]) =:= pang andalso call(Other, net_adm, ping, [Node]) =:= pang
            end)
        end
     || Other <- Others
    ],
    ok.

back(Node, Others) ->
    [
        begin
            true = call(Node, erlang, set_cookie, [Other, erlang:get_cookie()]),
            true = call(Other, erlang, set_cookie, [Node, erlang:get_cookie()]),
            ok = eventually(fun() -> call(Node, net_adm, ping, [Other]) =:= pong end)
        end
     || Other <- Others
    ],
    ok.

a_deposed_writer_that_goes_on_loses_against_the_new_one(Config) ->
    Stream = ?config(stream, Config),
    #{node := Old, writer := OldWriter, conf := Conf} = Member = start_stream(Config),
    ok = write(Member, 0, 20),
    ok = call(Old, stream_s3_world, settle, [Stream, 20, ?TIMEOUT]),
    %% Committed, and not tiered yet when the next writer is elected: so both readers have something to persist.
    OldReader = call(Old, rabbitmq_stream_s3_registry, whereis, [Stream]),
    ok = sys:suspend(OldReader),
    ok = write(Member, 20, 40),
    Others = ?config(nodes, Config) -- [Old],
    [ok = osiris:stop_member(Node, Conf) || Node <- Others],
    %% One of the two may not have what the other two had committed.
    [{_, Third}, {_, New}] = lists:sort([{tail(Node, Config), Node} || Node <- Others]),
    Conf2 = Conf#{epoch => 2, leader_node => New, replica_nodes => [Old, Third]},
    {ok, NewWriter} = osiris:start_writer(Conf2),
    {ok, _} = stream_s3_osiris:start_replica(Third, Conf2#{leader_pid => NewWriter}),
    ok = call(New, rabbitmq_stream_s3, reconcile, []),
    Elected = #{node => New, writer => NewWriter, conf => Conf2},
    ok = write(Elected, 60, 20),
    ok = call(New, stream_s3_world, settle, [Stream, 80, ?TIMEOUT]),
    {Root, Revision} = call(New, stream_s3_world, pointer, [Stream]),
    %% The old one still holds the revision that it persisted, writes fragments and a root, and is refused.
    ok = sys:resume(OldReader),
    _ = call(Old, rabbitmq_stream_s3, force_cut, [Stream]),
    ok = eventually(fun() -> fenced(call(Old, rabbitmq_stream_s3, status, [Stream])) end),
    ?assert(call(Old, erlang, is_process_alive, [OldWriter])),
    ?assertEqual({Root, Revision}, call(New, stream_s3_world, pointer, [Stream])),
    ok = write(Elected, 80, 20),
    {100, Bytes} = settled_bucket(Elected, Config),
    ?assertEqual([stream_s3_load:record(N) || N <- lists:seq(0, 99)], records(Bytes)),
    ok = osiris:stop_member(Old, Conf).

%% By the status: it says so in words.
fenced(#{problems := Problems}) ->
    lists:any(fun(#{cause := Cause}) -> string:find(Cause, <<"later epoch 2 ">>) =/= nomatch end, Problems).

a_stream_deleted_during_an_upload_is_left_alone(Config) ->
    Stream = ?config(stream, Config),
    #{node := Node} = Member = start_stream(Config),
    ok = write(Member, 0, 20),
    ok = call(Node, stream_s3_world, settle, [Stream, 20, ?TIMEOUT]),
    %% From now on uploads wait to be admitted.
    ok = call(Node, rabbitmq_stream_s3, set_transfer_rate, [1, 1]),
    ok = write(Member, 20, 20),
    _ = call(Node, rabbitmq_stream_s3, force_cut, [Stream]),
    #{transfers_in_flight := InFlight} = call(Node, rabbitmq_stream_s3, status, [Stream]),
    ?assert(InFlight > 0),
    Reader = call(Node, rabbitmq_stream_s3_registry, whereis, [Stream]),
    Monitor = monitor(process, Reader),
    ok = call(Node, rabbitmq_stream_s3_metadata, delete, [Stream, ?TIMEOUT]),
    ok = call(Node, rabbitmq_stream_s3, set_transfer_rate, [unlimited, undefined]),
    receive
        {'DOWN', Monitor, process, Reader, Reason} -> ?assertEqual({shutdown, stream_deleted}, Reason)
    after ?TIMEOUT -> error(reader_is_still_there)
    end,
    [ok = call(N, rabbitmq_stream_s3, reconcile, []) || N <- ?config(nodes, Config)],
    [?assertMatch(#{state := not_tiered}, call(N, rabbitmq_stream_s3, status, [Stream])) || N <- ?config(nodes, Config)],
    {ok, Streams} = call(Node, rabbitmq_stream_s3_metadata, streams, [?TIMEOUT]),
    ?assertNot(lists:member(Stream, Streams)),
    ?assertEqual({error, unresolved}, call(Node, rabbitmq_stream_s3, get_range, [Stream])),
    %% And writes go on as if it had never been tiered.
    ok = write(Member, 40, 20).

an_application_that_is_stopped_and_started_under_load_goes_on(Config) ->
    #{node := Node} = Member = start_stream(Config),
    Load = start_load(Member, Config),
    [
        begin
            ok = await_some_more(Member, Config),
            ok = call(Node, application, stop, [rabbitmq_stream_s3]),
            ok = call(Node, rabbitmq_stream_s3, start, []),
            ok = call(Node, rabbitmq_stream_s3, reconcile, [])
        end
     || _ <- lists:seq(1, times(5, 50))
    ],
    ok = await_some_more(Member, Config),
    assert_all_there(Load, Member, Config).

%% --- members ---------------------------------------------------------------------------------------------------------

start_stream(Config) ->
    #{leader_node := Node} = Conf = ?config(conf, Config),
    Writer = call(Node, stream_s3_osiris, start_stream, [Conf]),
    ok = call(Node, rabbitmq_stream_s3, reconcile, []),
    #{node => Node, writer => Writer, conf => Conf}.

%% As a coordinator does it: all members stop, and of a majority the one with the longest log leads in the next epoch. It is one of
%% the given nodes, and not the leader so far.
move(#{node := Leader, conf := #{epoch := Epoch} = Conf}, Candidates, Config) ->
    Alive = [Node || Node <- ?config(nodes, Config), lists:member(Node, nodes())],
    [ok = osiris:stop_member(Node, Conf) || Node <- Alive],
    Logs = lists:sort([{tail(Node, Config), Node} || Node <- Alive, Node =/= Leader, Alive -- [Node] =/= []]),
    {Longest, _} = lists:last(Logs),
    [New | _] = [Node || {Tail, Node} <- Logs, Tail =:= Longest, lists:member(Node, Candidates)],
    Conf2 = Conf#{epoch := Epoch + 1, leader_node := New, replica_nodes := ?config(nodes, Config) -- [New]},
    {ok, Writer} = osiris:start_writer(Conf2),
    [{ok, _} = stream_s3_osiris:start_replica(Node, Conf2#{leader_pid => Writer}) || Node <- Alive, Node =/= New],
    ok = call(New, rabbitmq_stream_s3, reconcile, []),
    #{node => New, writer => Writer, conf => Conf2}.

tail(Node, Config) ->
    {ok, Dir} = call(Node, application, get_env, [osiris, data_dir]),
    {Range, Epochs} = call(Node, osiris_log, overview, [filename:join(Dir, ?config(stream, Config))]),
    {case Epochs of [] -> -1; _ -> element(1, lists:last(Epochs)) end, case Range of empty -> -1; {_First, Last} -> Last end}.

call(Node, Module, Function, Args) ->
    stream_s3_members:call(Node, Module, Function, Args).

%% --- load ------------------------------------------------------------------------------------------------------------

start_load(#{writer := Writer, node := Node}, Config) ->
    stream_s3_load:start(?config(stream, Config), Writer, Node).

lead(Load, #{writer := Writer, node := Node}) ->
    stream_s3_load:lead(Load, Writer, Node).

write(#{node := Node, writer := Writer}, From, Count) ->
    call(Node, stream_s3_osiris, write, [Writer, [stream_s3_load:record(N) || N <- lists:seq(From, From + Count - 1)]]).

%% Until what is committed after now is tiered, too.
await_some_more(#{node := Node, writer := Writer}, Config) ->
    Offset = call(Node, stream_s3_osiris, next_offset, [Writer]) + 50,
    ?assertEqual(ok, call(Node, rabbitmq_stream_s3_replica_reader, await_offset, [?config(stream, Config), Offset, ?TIMEOUT])),
    ok.

%% --- what must hold --------------------------------------------------------------------------------------------------

assert_all_there(Load, Member, Config) ->
    #{confirmed := Confirmed, acknowledged := Acknowledged} = stream_s3_load:stop(Load),
    {End, Bytes} = settled_bucket(Member, Config),
    ?assert(Acknowledged > 0),
    ?assert(Acknowledged =< End),
    Records = records(Bytes),
    Numbers = [Number || <<Number:64, _/binary>> <- Records],
    %% Each at most once and in the order of writing; the bytes are those written; and of the confirmed ones none is missing.
    ?assertEqual(lists:usort(Numbers), Numbers),
    ?assertEqual([], [N || {N, Record} <- lists:zip(Numbers, Records), Record =/= stream_s3_load:record(N)]),
    ?assertEqual([], Confirmed -- Numbers).

records(Bytes) ->
    lists:append([stream_s3_chunks:records(Chunk) || Chunk <- stream_s3_chunks:all(Bytes)]).

%% The bucket when all is tiered: byte for byte the log of the leader, all of which is committed by then.
settled_bucket(#{node := Node, writer := Writer}, Config) ->
    Stream = ?config(stream, Config),
    End = call(Node, stream_s3_osiris, next_offset, [Writer]),
    ok = call(Node, stream_s3_world, settle, [Stream, End, ?TIMEOUT]),
    {Pointer, _Revision} = call(Node, stream_s3_world, pointer, [Stream]),
    ok = stream_s3_cli:verify(?config(store, Config), Stream, Pointer),
    {Manifest, Fragments} = stream_s3_bucket:fragments(?config(bucket, Config), Stream, Pointer),
    ?assertEqual({0, End}, {Manifest#manifest.first_offset, Manifest#manifest.next_offset}),
    Remote = iolist_to_binary([stream_s3_bucket:chunk_bytes(?config(bucket, Config), Fragment) || Fragment <- Fragments]),
    #{bytes := Local} = stream_s3_chunks:of_log(call(Node, stream_s3_osiris, dir, [Writer])),
    ?assertEqual({byte_size(Local), erlang:md5(Local)}, {byte_size(Remote), erlang:md5(Remote)}),
    {End, Remote}.
