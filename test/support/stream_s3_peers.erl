%% @doc Real nodes of their own, on this machine, for tests that need several members of one stream. The node of the test
%% must be distributed, with `localhost' as its host, since osiris' replicas connect to the host part of a node's name.
-module(stream_s3_peers).

-export([start/1, stop/1, call/4]).
-export_type([peer/0]).

-opaque peer() :: {pid(), node()}.

%% @doc Starts nodes named after the given words and this node; they see the code that this node sees. Answers one pair of
%% handle and node name for each.
-spec start([string()]) -> [{peer(), node()}].
start(Names) ->
    [start_one(Name) || Name <- Names].

start_one(Name) ->
    Paths = [Path || Path <- code:get_path(), Path =/= "."],
    {ok, Pid, Node} = peer:start_link(#{
        name => lists:concat([Name, "_", erlang:phash2(node()), "_", erlang:unique_integer([positive])]),
        host => "localhost",
        connection => standard_io,
        args => [
            "-setcookie",
            atom_to_list(erlang:get_cookie()),
            "-kernel",
            "prevent_overlapping_partitions",
            "false",
            "-pa"
            | Paths
        ]
    }),
    ok = erpc:call(Node, logger, set_primary_config, [level, none]),
    {{Pid, Node}, Node}.

%% @doc Stops a node, at once and without any farewell of what runs on it.
-spec stop(peer()) -> ok.
stop({Pid, _Node}) ->
    peer:stop(Pid).

%% @doc Calls a function there; whatever it raises is raised here.
-spec call(node(), module(), atom(), [term()]) -> term().
call(Node, Module, Function, Args) ->
    erpc:call(Node, Module, Function, Args, 60000).
