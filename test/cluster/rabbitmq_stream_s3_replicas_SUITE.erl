%% What the nodes of a stream's replicas know of its tier, when messages arrive and when they do not.
-module(rabbitmq_stream_s3_replicas_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-include("rabbitmq_stream_s3.hrl").

-import(stream_s3_wait, [eventually/1]).

-export([all/0, suite/0, init_per_suite/1, end_per_suite/1, init_per_testcase/2, end_per_testcase/2]).
-export([
    a_replica_knows_what_the_writers_node_has_persisted/1,
    a_replica_that_missed_edits_reads_the_manifest_anew/1,
    a_replica_that_missed_the_last_edits_finds_out_by_looking/1,
    what_a_replica_cannot_follow_leaves_its_range_unresolved_until_it_is_read_anew/1,
    the_metadata_stores_silence_leaves_a_range_unresolved/1,
    replicas_follow_the_next_leader/1,
    each_member_trims_its_own_log_and_keeps_what_is_not_tiered/1,
    a_member_that_leaves_knows_nothing_any_more/1
]).

-define(SERVER, rabbitmq_stream_s3_replicas).
-define(ENV, #{
    store => fs,
    fragment_target_size => 5000,
    persist_interval_ms => 20,
    rebalance_threshold => 4,
    persist_timeout_ms => 2000,
    task_retry_delay_max_ms => 100
}).

suite() -> [{timetrap, {seconds, 90}}].

all() ->
    [
        a_replica_knows_what_the_writers_node_has_persisted,
        a_replica_that_missed_edits_reads_the_manifest_anew,
        a_replica_that_missed_the_last_edits_finds_out_by_looking,
        what_a_replica_cannot_follow_leaves_its_range_unresolved_until_it_is_read_anew,
        the_metadata_stores_silence_leaves_a_range_unresolved,
        replicas_follow_the_next_leader,
        each_member_trims_its_own_log_and_keeps_what_is_not_tiered,
        a_member_that_leaves_knows_nothing_any_more
    ].

init_per_suite(Config) ->
    Dir = ?config(priv_dir, Config),
    Store = #{store => fs, fs_dir => unicode:characters_to_binary(filename:join(Dir, "bucket"))},
    ok = filelib:ensure_path(maps:get(fs_dir, Store)),
    [{nodes, stream_s3_members:start(Dir, maps:merge(?ENV, Store))} | Config].

end_per_suite(Config) ->
    [ok = stream_s3_members:kill_node(Node) || Node <- ?config(nodes, Config)],
    ok.

init_per_testcase(Case, Config) ->
    [A, B, C] = ?config(nodes, Config),
    Stream = atom_to_binary(Case),
    Conf = stream_s3_osiris:config(Stream, #{leader_node => A, replica_nodes => [B, C], max_segment_size_bytes => 20000}),
    Writer = call(A, stream_s3_osiris, start_stream, [Conf]),
    ok = call(A, rabbitmq_stream_s3, reconcile, []),
    [ok = call(Node, ?SERVER, look, []) || Node <- [B, C]],
    [{stream, Stream}, {conf, Conf}, {writer, Writer} | Config].

end_per_testcase(_Case, Config) ->
    [ok = osiris:stop_member(Node, ?config(conf, Config)) || Node <- ?config(nodes, Config)],
    set(#{local_retention => policy}, Config).

%% --- cases -----------------------------------------------------------------------------------------------------------

a_replica_knows_what_the_writers_node_has_persisted(Config) ->
    [A, B, C] = ?config(nodes, Config),
    %% Nothing is persisted yet, and so nothing is known.
    ?assertEqual({error, unresolved}, range(B, Config)),
    [
        begin
            ok = write_and_flush(20, Config),
            [ok = knows(Node, A, Config) || Node <- [B, C]]
        end
     || _ <- lists:seq(1, 5)
    ],
    ?assertMatch({0, 100}, range(C, Config)),
    %% One that continues the edits needs no other request.
    Syncs = gets(B),
    ok = write_and_flush(20, Config),
    ok = knows(B, A, Config),
    ?assertEqual(Syncs, gets(B)).

a_replica_that_missed_edits_reads_the_manifest_anew(Config) ->
    [A, B, _] = ?config(nodes, Config),
    ok = write_and_flush(20, Config),
    ok = knows(B, A, Config),
    [
        begin
            ok = deaf(B, fun() -> write_and_flush(10, Config) end),
            ok = write_and_flush(10, Config),
            ok = knows(B, A, Config)
        end
     || _ <- lists:seq(1, 3)
    ].

a_replica_that_missed_the_last_edits_finds_out_by_looking(Config) ->
    [A, B, _] = ?config(nodes, Config),
    ok = write_and_flush(20, Config),
    ok = knows(B, A, Config),
    ok = deaf(B, fun() -> write_and_flush(10, Config) end),
    %% Old, but what had been persisted.
    ?assertEqual({0, 20}, range(B, Config)),
    ok = call(B, ?SERVER, look, []),
    ok = knows(B, A, Config),
    ?assertEqual({0, 30}, range(B, Config)).

what_a_replica_cannot_follow_leaves_its_range_unresolved_until_it_is_read_anew(Config) ->
    [A, B, _] = ?config(nodes, Config),
    Stream = ?config(stream, Config),
    Other = <<Stream/binary, "_other">>,
    OtherConf = (?config(conf, Config))#{name := Other, reference := {test_stream, Other}},
    OtherWriter = call(A, stream_s3_osiris, start_stream, [OtherConf]),
    Others = [{stream, Other}, {writer, OtherWriter} | Config],
    ok = call(A, rabbitmq_stream_s3, reconcile, []),
    ok = call(B, ?SERVER, look, []),
    [ok = write_and_flush(20, C) || C <- [Config, Others]],
    [ok = knows(B, A, C) || C <- [Config, Others]],
    {resolved, #manifest{} = Manifest, Revision} = cached(B, Config),
    Edit = rabbitmq_stream_s3_manifest:new_edit(Manifest),
    Bad = [
        reset,
        %% Of another epoch, behind a gap, and one that cuts where there is nothing.
        {2, {Revision, Revision + 1, [Edit]}},
        {1, {Revision + 1, Revision + 2, [Edit]}},
        {1, {Revision, Revision + 1, [Edit#edit{pos = 34000, len = 34}]}}
    ],
    %% What it has already is no reason for anything.
    ok = tell(B, Stream, {1, {Revision - 1, Revision, [Edit]}}),
    ?assertEqual({resolved, Manifest, Revision}, cached(B, Config)),
    Was = cached(B, Others),
    [
        begin
            silent(B, fun() ->
                ok = tell(B, Stream, News),
                ?assertEqual({error, unresolved}, range(B, Config)),
                ?assertEqual(Was, cached(B, Others))
            end),
            ok = knows(B, A, Config)
        end
     || News <- Bad
    ],
    ok = osiris:delete_cluster(OtherConf#{leader_pid => OtherWriter}).

the_metadata_stores_silence_leaves_a_range_unresolved(Config) ->
    [A, B, _] = ?config(nodes, Config),
    silent(B, fun() ->
        ok = write_and_flush(20, Config),
        ?assertEqual({error, unresolved}, range(B, Config))
    end),
    ok = knows(B, A, Config).

replicas_follow_the_next_leader(Config) ->
    [A, B, C] = ?config(nodes, Config),
    Conf = ?config(conf, Config),
    ok = write_and_flush(20, Config),
    [ok = knows(Node, A, Config) || Node <- [B, C]],
    %% Both have all, so either may lead.
    ok = eventually(fun() -> lists:all(fun(Node) -> last(Node, Config) =:= last(A, Config) end, [B, C]) end),
    [ok = osiris:stop_member(Node, Conf) || Node <- [A, B, C]],
    Conf2 = Conf#{epoch => 2, leader_node => B, replica_nodes => [A, C]},
    {ok, Writer} = osiris:start_writer(Conf2),
    [{ok, _} = stream_s3_osiris:start_replica(Node, Conf2#{leader_pid => Writer}) || Node <- [A, C]],
    ok = call(B, rabbitmq_stream_s3, reconcile, []),
    [ok = call(Node, ?SERVER, look, []) || Node <- [A, C]],
    Next = [{writer, Writer} | Config],
    ok = write_and_flush(20, Next),
    [ok = knows(Node, B, Next) || Node <- [A, C]],
    ?assertEqual({0, 40}, range(A, Next)).

each_member_trims_its_own_log_and_keeps_what_is_not_tiered(Config) ->
    [A, B, C] = Nodes = ?config(nodes, Config),
    [ok = write_and_flush(40, Config) || _ <- lists:seq(1, 4)],
    [ok = knows(Node, A, Config) || Node <- [B, C]],
    %% By default osiris alone decides, also after a look.
    ok = call(B, ?SERVER, look, []),
    ?assertMatch([0, _, _ | _], segments(B, Config)),
    ok = set(#{local_retention => uploaded}, Config),
    ok = write_and_flush(40, Config),
    %% Of each member there is left what the tier has not as a whole: the segment that is being written.
    [ok = eventually(fun() -> length(segments(Node, Config)) =:= 1 end) || Node <- Nodes],
    %% A replica goes by what it knows: of what is not tiered nothing goes, on either node, however often it looks.
    ok = call(A, rabbitmq_stream_s3, pause, [?config(stream, Config)]),
    [ok = call(A, stream_s3_osiris, write, [?config(writer, Config), [<<N:4000>> || N <- lists:seq(1, 20)]]) || _ <- lists:seq(1, 8)],
    {0, Tiered} = range(A, Config),
    ok = eventually(fun() -> lists:all(fun(Node) -> last(Node, Config) =:= last(A, Config) end, [B, C]) end),
    [ok = call(Node, ?SERVER, look, []) || Node <- [B, C], _ <- lists:seq(1, 5)],
    [ok = call(Node, rabbitmq_stream_s3_retention, settle, []) || Node <- [B, C]],
    [
        begin
            [Oldest | _] = Segments = segments(Node, Config),
            ?assert(Oldest =< Tiered),
            ?assert(length(Segments) > 2)
        end
     || Node <- [B, C]
    ],
    ok = call(A, rabbitmq_stream_s3, resume, [?config(stream, Config)]),
    ok = write_and_flush(40, Config),
    [ok = eventually(fun() -> length(segments(Node, Config)) =:= 1 end) || Node <- Nodes],
    %% And a member that has trimmed can lead.
    ok = eventually(fun() -> lists:all(fun(Node) -> last(Node, Config) =:= last(A, Config) end, [B, C]) end),
    Conf = ?config(conf, Config),
    [ok = osiris:stop_member(Node, Conf) || Node <- Nodes],
    Conf2 = Conf#{epoch => 2, leader_node => B, replica_nodes => [A, C]},
    {ok, Writer} = osiris:start_writer(Conf2),
    [{ok, _} = stream_s3_osiris:start_replica(Node, Conf2#{leader_pid => Writer}) || Node <- [A, C]],
    ok = call(B, rabbitmq_stream_s3, reconcile, []),
    Next = [{writer, Writer} | Config],
    ok = write_and_flush(40, Next),
    ?assertEqual({0, call(B, stream_s3_osiris, next_offset, [Writer])}, range(B, Next)).

a_member_that_leaves_knows_nothing_any_more(Config) ->
    [A, B, C] = ?config(nodes, Config),
    ok = write_and_flush(20, Config),
    [ok = knows(Node, A, Config) || Node <- [B, C]],
    ok = osiris:stop_member(C, ?config(conf, Config)),
    ok = eventually(fun() -> range(C, Config) =:= {error, unresolved} end),
    ok = write_and_flush(20, Config),
    ok = knows(B, A, Config),
    ?assertEqual(unknown, cached(C, Config)).

%% --- helpers ---------------------------------------------------------------------------------------------------------

write_and_flush(Count, Config) ->
    Writer = ?config(writer, Config),
    Records = [<<N:4000>> || N <- lists:seq(1, Count)],
    ok = call(node(Writer), stream_s3_osiris, write, [Writer, Records]),
    call(node(Writer), rabbitmq_stream_s3_replica_reader, await_offset, [?config(stream, Config), 0]),
    call(node(Writer), rabbitmq_stream_s3, flush, [?config(stream, Config)]).

%% The very same manifest, at the same revision.
knows(Node, Leader, Config) ->
    eventually(fun() ->
        case {cached(Node, Config), cached(Leader, Config)} of
            {{resolved, _, _} = Same, Same} -> true;
            _ -> false
        end
    end).

cached(Node, Config) -> call(Node, rabbitmq_stream_s3_manifest_cache, get, [?config(stream, Config)]).
range(Node, Config) -> call(Node, rabbitmq_stream_s3, get_range, [?config(stream, Config)]).
gets(Node) -> maps:get(gets, call(Node, rabbitmq_stream_s3_counters, get, [metadata])).

last(Node, Config) ->
    call(Node, stream_s3_osiris, last_chunk_id, [call(Node, stream_s3_osiris, writer, [?config(stream, Config)])]).

%% First offsets of the segments that this node has.
segments(Node, Config) ->
    {ok, Dir} = call(Node, application, get_env, [osiris, data_dir]),
    [First || {First, _} <- call(Node, rabbitmq_stream_s3_log, index_files, [filename:join(Dir, ?config(stream, Config))])].

set(Env, Config) ->
    [ok = call(Node, stream_s3_world, set, [Env]) || Node <- ?config(nodes, Config)],
    ok.

%% Messages to a name that nobody has are lost.
deaf(Node, Fun) ->
    Server = call(Node, erlang, whereis, [?SERVER]),
    true = call(Node, erlang, unregister, [?SERVER]),
    try
        Fun()
    after
        true = call(Node, erlang, register, [?SERVER, Server])
    end.

%% The metadata store's member on this node takes messages and deals with none.
silent(Node, Fun) ->
    Store = {call(Node, rabbitmq_stream_s3_metadata, store_id, []), Node},
    ok = sys:suspend(Store),
    try
        Fun()
    after
        ok = sys:resume(Store)
    end.

%% When it returns the message has been dealt with.
tell(Node, Stream, reset) ->
    tell(Node, Stream, {1, reset});
tell(Node, Stream, {Epoch, News}) ->
    ok = ?SERVER:broadcast([Node], Stream, Epoch, News),
    _ = sys:get_state({?SERVER, Node}),
    ok.

call(Node, Module, Function, Args) ->
    stream_s3_members:call(Node, Module, Function, Args).
