%% The history uploader in a server on Ra: three nodes, each a process of the operating system, whose leader is killed with kill -9.
-module(rabbitmq_stream_s3_history_ra_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-import(stream_s3_wait, [eventually/1]).

-compile(nowarn_export_all).
-compile(export_all).

-define(RA, stream_s3_history_ra).
-define(STATE, stream_s3_history_state).
-define(MEMBERS, stream_s3_members).
-define(UPLOADER, rabbitmq_stream_s3_history_uploader).
-define(TIMEOUT, 60000).
-define(ROUNDS, 5).
-define(DEEP_ROUNDS, 50).
-define(RUNS, [<<"run.1">>, <<"run.10">>, <<"run_2">>]).

suite() -> [{timetrap, {minutes, 30}}].

all() ->
    [
        each_segment_is_acknowledged_once_whenever_the_leader_is_killed,
        a_leader_uploads_again_when_its_application_is_back,
        a_standby_restores_a_snapshot_takes_over_and_uploads_every_segment
    ].

init_per_testcase(Case, Config) ->
    Dir = filename:join(?config(priv_dir, Config), atom_to_list(Case)),
    Objects = filename:join(Dir, "objects"),
    ok = filelib:ensure_path(Objects),
    Server = stream_s3_s3local:start(#{dir => Objects}),
    ok = stream_s3_s3local:create_bucket(Server, "bucket"),
    Env = (stream_s3_s3local:settings(Server))#{
        store => s3, bucket => <<"bucket">>, history_purge_wait_ms => 500, history_rescan_interval_ms => 2000, gc_min_age_ms => 0
    },
    Names = [lists:concat(["h", N, "_", erlang:unique_integer([positive])]) || N <- [1, 2, 3]],
    Nodes = [?MEMBERS:start_node(Name, Dir, Env) || Name <- Names],
    Members = maps:from_list(lists:zip(Nodes, Names)),
    [ok = ?MEMBERS:call(Node, ?RA, start_node, [ra_dir(Dir, Name)]) || {Node, Name} <- maps:to_list(Members)],
    ok = ?MEMBERS:call(hd(Nodes), ?RA, form, [Nodes]),
    [{dir, Dir}, {env, Env}, {server, Server}, {members, Members} | Config].

end_per_testcase(_Case, Config) ->
    _ = [ok = ?MEMBERS:kill_node(Node) || Node <- maps:keys(?config(members, Config)), net_adm:ping(Node) =:= pong],
    ok = stream_s3_s3local:stop(?config(server, Config)).

ra_dir(Dir, Name) -> filename:join([Dir, Name, "ra"]).

%% --- cases -----------------------------------------------------------------------------------------------------------

each_segment_is_acknowledged_once_whenever_the_leader_is_killed(Config) ->
    Nodes = nodes_of(Config),
    Rounds =
        case os:getenv("STREAM_S3_DEEP") of
            false -> ?ROUNDS;
            _ -> ?DEEP_ROUNDS
        end,
    [ok = command(Nodes, {open, Run}) || Run <- ?RUNS],
    Sealed = lists:append([round(N, Config) || N <- lists:seq(1, Rounds)]),
    Acknowledged = query(Nodes, fun ?STATE:acknowledged/1),
    ?assertEqual(length(Sealed), length(Acknowledged)),
    ?assertEqual(lists:sort(Sealed), lists:sort(Acknowledged)),
    ?assertEqual([], query(Nodes, fun ?STATE:violations/1)),
    %% The host has nothing of it any more; the bucket has.
    lists:foreach(
        fun({Run, Seq}) ->
            #{content := pruned} = query(Nodes, fun(State) -> ?STATE:segment(Run, Seq, State) end),
            ?assertEqual({ok, content(Run, Seq)}, ?MEMBERS:call(hd(Nodes), ?UPLOADER, read, [Run, Seq]))
        end,
        Sealed
    ),
    ct:pal("~b leaders killed, ~b segments", [Rounds, length(Sealed)]).

%% Seals while the uploader works, kills the leader in the middle, and lets it come back.
round(N, Config) ->
    Nodes = nodes_of(Config),
    Sealed = [{Run, 10 * N + I} || I <- lists:seq(0, 9), Run <- ?RUNS],
    {Before, After} = lists:split(rand:uniform(length(Sealed)), Sealed),
    [ok = seal(Nodes, Run, Seq) || {Run, Seq} <- Before],
    Leader = ?MEMBERS:call(hd(Nodes), ?RA, leader, [Nodes]),
    ok = ?MEMBERS:kill_node(Leader),
    Alive = Nodes -- [Leader],
    [ok = seal(Alive, Run, Seq) || {Run, Seq} <- After],
    ok = come_back(Leader, Config),
    ok = all_uploaded(Nodes),
    [ok = command(Nodes, {prune, Run}) || Run <- ?RUNS],
    Sealed.

a_leader_uploads_again_when_its_application_is_back(Config) ->
    Nodes = nodes_of(Config),
    [Run, Purged | _] = ?RUNS,
    [ok = command(Nodes, {open, R}) || R <- [Run, Purged]],
    [ok = seal(Nodes, R, 1) || R <- [Run, Purged]],
    ok = all_uploaded(Nodes),
    Leader = ?MEMBERS:call(hd(Nodes), ?RA, leader, [Nodes]),
    ok = ?MEMBERS:call(Leader, application, stop, [rabbitmq_stream_s3]),
    %% The member goes on without.
    [ok = seal(Nodes, Run, Seq) || Seq <- [2, 3]],
    ok = command(Nodes, {purge, Purged}),
    case ?MEMBERS:call(Leader, ?RA, leader, [Nodes]) of
        Leader -> ?assertEqual([{Run, 1}, {Purged, 1}], lists:sort(query(Nodes, fun ?STATE:acknowledged/1)));
        %% On a slow machine the lead may have moved, and another has an uploader.
        _ -> ok
    end,
    {ok, _} = ?MEMBERS:call(Leader, application, ensure_all_started, [rabbitmq_stream_s3]),
    ok = all_uploaded(Nodes),
    ok = eventually(fun() -> query(Nodes, fun ?STATE:runs/1) =:= [Run] end),
    ?assertEqual([], query(Nodes, fun ?STATE:violations/1)).

a_standby_restores_a_snapshot_takes_over_and_uploads_every_segment(Config) ->
    Nodes = nodes_of(Config),
    Server = ?config(server, Config),
    Run = hd(?RUNS),
    ok = command(Nodes, {open, Run}),
    Leader = ?MEMBERS:call(hd(Nodes), ?RA, leader, [Nodes]),
    [Standby, Other] = Nodes -- [Leader],
    ok = ?MEMBERS:kill_node(Standby),
    ok = stream_s3_store_faults:add(Server, [#{op => put, key => "*/history/*", do => status, status => 503}]),
    %% Work goes on while nothing can be uploaded, and what was committed goes into snapshots.
    Seqs = lists:seq(1, 50),
    [ok = seal([Leader, Other], Run, Seq) || Seq <- Seqs],
    ?assertEqual([], query([Leader, Other], fun ?STATE:acknowledged/1)),
    ok = eventually(fun() -> stream_s3_store_faults:count(Server, put) > 3 end),
    %% The standby missed all of it.
    ok = come_back(Standby, Config),
    ok = eventually(fun() ->
        _ = ?MEMBERS:call(Leader, ?RA, hand_over, [Leader, Standby]),
        ?MEMBERS:call(Leader, ?RA, leader, [Nodes]) =:= Standby
    end),
    ok = ?MEMBERS:kill_node(Leader),
    ok = stream_s3_store_faults:clear(Server),
    ok = all_uploaded([Standby, Other]),
    ?assertEqual([{Run, Seq} || Seq <- Seqs], query([Standby, Other], fun ?STATE:acknowledged/1)),
    [?assertEqual({ok, content(Run, Seq)}, ?MEMBERS:call(Standby, ?UPLOADER, read, [Run, Seq])) || Seq <- Seqs],
    %% And it is the new owner who purges.
    ok = command([Standby, Other], {purge, Run}),
    ok = eventually(fun() -> query([Standby, Other], fun ?STATE:runs/1) =:= [] end),
    Prefix = ?MEMBERS:call(Standby, rabbitmq_stream_s3_store, history_prefix, [all]),
    ?assertMatch({ok, #{objects := []}}, ?MEMBERS:call(Standby, rabbitmq_stream_s3_store, list, [Prefix, undefined, 10, ?TIMEOUT])).

%% --- support ---------------------------------------------------------------------------------------------------------

nodes_of(Config) -> lists:sort(maps:keys(?config(members, Config))).

come_back(Node, Config) ->
    #{Node := Name} = ?config(members, Config),
    Dir = ?config(dir, Config),
    Node = ?MEMBERS:start_node(Name, Dir, ?config(env, Config)),
    ?MEMBERS:call(Node, ?RA, restart, [ra_dir(Dir, Name)]).

content(Run, Seq) -> iolist_to_binary([[Run, " row ", integer_to_list(N), $\n] || N <- lists:seq(1, 10 + Seq)]).

seal(Nodes, Run, Seq) -> command(Nodes, {seal, Run, Seq, content(Run, Seq), erlang:system_time(millisecond)}).

%% This node is no member, but it may ask them.
command(Nodes, Command) -> ?RA:command(Nodes, Command).

query(Nodes, Query) -> ?RA:query(Nodes, Query).

all_uploaded(Nodes) ->
    eventually(fun() -> query(Nodes, fun(State) -> ?STATE:pending(start, 1, State) end) =:= #{entries => [], next => done} end).
