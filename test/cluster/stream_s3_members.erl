%% @doc Three nodes with osiris and the application, whose metadata stores are one. They end with this node; what they write stays.
-module(stream_s3_members).

-export([start/2, start_node/3, kill_node/1, call/4]).

-define(TIMEOUT, 30000).

%% @doc Starts them below a directory with this environment of the application.
-spec start(file:filename(), map()) -> [node()].
start(Dir, Env) ->
    Names = [lists:concat(["m", N, "_", erlang:unique_integer([positive])]) || N <- [1, 2, 3]],
    [First | Others] = Nodes = [start_node(Name, Dir, Env) || Name <- Names],
    [ok = join(Node, First) || Node <- Others],
    Nodes.

%% @doc Starts one, on what an earlier node of that name left.
-spec start_node(string(), file:filename(), map()) -> node().
start_node(Name, Dir, Env) ->
    %% Not linked: the processes of Common Test end with each function.
    Paths = [Path || Path <- code:get_path(), Path =/= "."],
    {ok, _Peer, Node} = peer:start(#{
        name => Name,
        host => "localhost",
        connection => standard_io,
        args => ["-setcookie", atom_to_list(erlang:get_cookie()), "-kernel", "prevent_overlapping_partitions", "false", "-pa" | Paths]
    }),
    ok = call(Node, logger, set_primary_config, [level, none]),
    ok = call(Node, stream_s3_osiris, start, [filename:join([Dir, Name, "osiris"])]),
    ok = call(Node, stream_s3_world, start_application, [Env]),
    Node.

join(Node, First) ->
    call(Node, khepri_cluster, join, [call(Node, rabbitmq_stream_s3_metadata, store_id, []), First]).

%% @doc Kills one with kill -9 and waits until it is gone.
-spec kill_node(node()) -> ok.
kill_node(Node) ->
    true = erlang:monitor_node(Node, true),
    [] = os:cmd("kill -9 " ++ call(Node, os, getpid, [])),
    receive
        {nodedown, Node} -> ok
    after ?TIMEOUT -> error({not_dead, Node})
    end.

%% @doc Calls a function there; whatever it raises is raised here.
-spec call(node(), module(), atom(), [term()]) -> term().
call(Node, Module, Function, Args) ->
    erpc:call(Node, Module, Function, Args, 2 * ?TIMEOUT).
