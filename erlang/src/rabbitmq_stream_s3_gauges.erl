%% @doc What the readers of this node, and the store, say of themselves for whoever collects metrics: rows of a table, so that nobody who
%% looks waits for a process that is busy.
%%
%% A row is derived from the state of its process each time that state has changed; nothing here is counted up and down.
-module(rabbitmq_stream_s3_gauges).

-export([init/0, put/2, put_store/1, forget/1, streams/0, bucket_accessible/0, labels/1]).
-export_type([row/0]).

-define(TABLE, ?MODULE).

-type stream_id() :: binary().
%% Bytes, milliseconds since the Unix epoch (0: never), and an offset (-1: none). `stalled_since_timestamp_ms' is since when the oldest
%% of what fails has been failing, or since when the stream has been paused.
-type row() :: #{
    vhost := binary(),
    queue := binary(),
    transfers_in_flight := non_neg_integer(),
    upload_stalled_offset := integer(),
    bytes_in_assembly := non_neg_integer(),
    bytes_in_transfer := non_neg_integer(),
    bytes_in_persist := non_neg_integer(),
    last_persist_timestamp_ms := non_neg_integer(),
    stalled_since_timestamp_ms := non_neg_integer()
}.

%% @doc Makes the table, which belongs to the calling process.
-spec init() -> ok.
init() ->
    ?TABLE = ets:new(?TABLE, [named_table, public, {read_concurrency, true}]),
    ok.

%% @doc What the stream's reader is like now. Writes nothing where nothing has changed.
-spec put(stream_id(), row()) -> ok.
put(StreamId, Row) ->
    insert({stream, StreamId}, Row).

%% @doc Whether the bucket could be used when it was looked at last.
-spec put_store(boolean()) -> ok.
put_store(Accessible) ->
    insert(store, Accessible).

insert(Key, Value) ->
    try lookup(Key) of
        {ok, Value} ->
            ok;
        _ ->
            true = ets:insert(?TABLE, {Key, Value}),
            ok
    catch
        %% No table: a test of one module alone, or the owner has just ended and takes everybody here along.
        error:badarg -> ok
    end.

lookup(Key) ->
    case ets:lookup(?TABLE, Key) of
        [{_, Value}] -> {ok, Value};
        [] -> none
    end.

%% @doc The reader has ended.
-spec forget(stream_id()) -> ok.
forget(StreamId) ->
    try ets:delete(?TABLE, {stream, StreamId}) of
        true -> ok
    catch
        error:badarg -> ok
    end.

%% @doc The rows of all streams. Empty while the application does not run.
-spec streams() -> [{stream_id(), row()}].
streams() ->
    try
        [{StreamId, Row} || [StreamId, Row] <- ets:match(?TABLE, {{stream, '$1'}, '$2'})]
    catch
        error:badarg -> []
    end.

%% @doc 1 if the bucket could be used when it was looked at last; 0 if not, or not yet.
-spec bucket_accessible() -> 0 | 1.
bucket_accessible() ->
    try lookup(store) of
        {ok, true} -> 1;
        {ok, false} -> 0;
        none -> 0
    catch
        error:badarg -> 0
    end.

%% @doc Virtual host and queue of a stream, from osiris' reference of it; empty for one that is no queue's.
-spec labels(Reference :: term()) -> {VHost :: binary(), Queue :: binary()}.
labels({resource, VHost, queue, Queue}) when is_binary(VHost), is_binary(Queue) -> {VHost, Queue};
labels(_Reference) -> {<<>>, <<>>}.
