%% @doc Which streams an operator has paused on this node. The marks outlive every process but the application itself.
-module(rabbitmq_stream_s3_pause).

-export([init/0, pause/1, resume/1, since/1, node_since/0]).
-export_type([what/0]).

-define(TABLE, ?MODULE).

%% All streams of the node, or one. Each mark is taken away as it was set: a stream that is paused by both stays paused until
%% both are gone.
-type what() :: node | {stream, StreamId :: binary()}.

%% @doc Makes the place for the marks, which belongs to the calling process. For the top supervisor: no other process lives as
%% long as the application.
-spec init() -> ok.
init() ->
    ?TABLE = ets:new(?TABLE, [named_table, public, {read_concurrency, true}]),
    ok.

%% @doc Sets a mark. One that is set stays as it is. `not_running': the application does not run.
-spec pause(what()) -> ok | {error, not_running}.
pause(What) ->
    with_table(fun() -> ets:insert_new(?TABLE, {What, erlang:system_time(millisecond)}) end).

%% @doc Takes a mark away, if it is set.
-spec resume(what()) -> ok | {error, not_running}.
resume(What) ->
    with_table(fun() -> ets:delete(?TABLE, What) end).

with_table(Fun) ->
    try Fun() of
        _ -> ok
    catch
        error:badarg -> {error, not_running}
    end.

%% @doc Whether a stream is paused: by its own mark or the node's, and since when (milliseconds since the Unix epoch). Two
%% table lookups.
-spec since(StreamId :: binary()) -> none | {stream | node, Since :: integer()}.
since(StreamId) ->
    case {lookup({stream, StreamId}), lookup(node)} of
        {none, none} -> none;
        {none, Since} -> {node, Since};
        {Since, _} -> {stream, Since}
    end.

%% @doc Whether the node is paused, and since when.
-spec node_since() -> none | integer().
node_since() ->
    lookup(node).

lookup(What) ->
    try
        ets:lookup_element(?TABLE, What, 2)
    catch
        error:badarg -> none
    end.
