%% @doc A store for brokers, and what brokers have put into it.
-module(stream_s3_tier).

-export([start/1, stop/1, server/1, settings/1, secret/1, conf/2, stream_id/2, writer/2, state/2, records/3, chunks/3, flush/2, verify/3, keys/2, pointer/2, await/3]).
-export_type([tier/0]).

-define(BUCKET, "bucket").
-define(FLUSH_TIMEOUT_MS, 60000).
-define(LOOK_MS, 100).

-opaque tier() :: #{server := stream_s3_s3local:server(), settings := #{atom() => term()}}.

%% @doc A server with an empty bucket; its files are in this directory.
-spec start(file:filename()) -> tier().
start(Dir) ->
    ok = filelib:ensure_path(Dir),
    %% One that is found nowhere else, so that a test may look for it.
    Secret = binary:encode_hex(rand:bytes(20)),
    Server = stream_s3_s3local:start(#{dir => Dir, secret_key => Secret}),
    ok = stream_s3_s3local:create_bucket(Server, ?BUCKET),
    Settings = stream_s3_s3local:settings(Server),
    #{server => Server, settings => Settings#{store => s3, bucket => <<?BUCKET>>}}.

-spec stop(tier()) -> ok.
stop(#{server := Server}) ->
    stream_s3_s3local:stop(Server).

%% @doc The secret that the brokers are given.
-spec secret(tier()) -> binary().
secret(#{settings := #{secret_key := Secret}}) -> Secret.

%% @doc The server, for its faults.
-spec server(tier()) -> stream_s3_s3local:server().
server(#{server := Server}) -> Server.

%% @doc The store as the application's settings name it.
-spec settings(tier()) -> #{atom() => term()}.
settings(#{settings := Settings}) -> Settings.

%% @doc Lines of rabbitmq.conf that name the store, and others of the plugin.
-spec conf(tier(), #{atom() => term()}) -> iodata().
conf(#{settings := Settings}, More) ->
    [["stream_s3.", name(Key), " = ", value(Value), $\n] || {Key, Value} <- maps:to_list(maps:merge(Settings, More))].

name(gc_enabled) -> "gc.enabled";
name(Key) -> atom_to_list(Key).

value(Value) when is_integer(Value) -> integer_to_list(Value);
value(Value) when is_atom(Value) -> atom_to_list(Value);
value(Value) -> Value.

%% @doc The name that osiris has for the stream behind a queue of the default virtual host.
-spec stream_id(stream_s3_broker:broker(), binary()) -> binary().
stream_id(Broker, Queue) ->
    #{name := Name} = state(Broker, Queue),
    iolist_to_binary(Name).

%% @doc The node of its writer, as the queue's record has it.
-spec writer(stream_s3_broker:broker(), binary()) -> node().
writer(Broker, Queue) ->
    #{leader_node := Node} = state(Broker, Queue),
    Node.

%% @doc What the queue's record says of the stream.
-spec state(stream_s3_broker:broker(), binary()) -> map().
state(Broker, Queue) ->
    {ok, Q} = stream_s3_broker:call(Broker, rabbit_amqqueue, lookup, [{resource, <<"/">>, queue, Queue}]),
    stream_s3_broker:call(Broker, amqqueue, get_type_state, [Q]).

%% @doc Has all that is committed uploaded and persisted. The broker is the one with the stream's writer.
-spec flush(stream_s3_broker:broker(), binary()) -> ok.
flush(Broker, StreamId) ->
    ok = await("a reader of the stream", ?FLUSH_TIMEOUT_MS, fun() ->
        stream_s3_broker:call(Broker, rabbitmq_stream_s3, reconcile, []) =:= ok andalso
            stream_s3_broker:call(Broker, rabbitmq_stream_s3, flush, [StreamId, ?FLUSH_TIMEOUT_MS], infinity) =:= ok
    end).

%% @doc Waits until the function answers true. Raises `{never, What}' after so many milliseconds, with what it raised last.
-spec await(term(), non_neg_integer(), fun(() -> boolean())) -> ok.
await(What, TimeoutMs, Fun) ->
    await_until(What, erlang:monotonic_time(millisecond) + TimeoutMs, Fun).

await_until(What, Until, Fun) ->
    Outcome =
        try
            Fun()
        catch
            Class:Reason -> {Class, Reason}
        end,
    case {Outcome, erlang:monotonic_time(millisecond) < Until} of
        {true, _} ->
            ok;
        {_, true} ->
            timer:sleep(?LOOK_MS),
            await_until(What, Until, Fun);
        {_, false} ->
            error({never, What, Outcome})
    end.

%% @doc The records of the stream's current tier in order, with whatever around them the protocol puts there.
-spec records(tier(), stream_s3_broker:broker(), binary()) -> [binary()].
records(Tier, Broker, StreamId) ->
    lists:append(fold(fun(Chunk, Acc) -> [stream_s3_chunks:records(Chunk) | Acc] end, Tier, Broker, StreamId)).

%% @doc The chunks of the stream's current tier in order.
-spec chunks(tier(), stream_s3_broker:broker(), binary()) -> [stream_s3_chunks:chunk()].
chunks(Tier, Broker, StreamId) ->
    fold(fun(Chunk, Acc) -> [Chunk | Acc] end, Tier, Broker, StreamId).

fold(Add, #{settings := Settings}, Broker, StreamId) ->
    Bucket = stream_s3_bucket:open(Settings),
    {_Manifest, Fragments} = stream_s3_bucket:fragments(Bucket, StreamId, pointer(Broker, StreamId)),
    lists:reverse(lists:foldl(fun(Fragment, Acc) -> stream_s3_bucket:fold_chunks(Add, Acc, Bucket, Fragment) end, [], Fragments)).

%% @doc Has the command `stream-s3' verify the stream's current tier.
-spec verify(tier(), stream_s3_broker:broker(), binary()) -> ok.
verify(#{settings := Settings}, Broker, StreamId) ->
    stream_s3_cli:verify(Settings, StreamId, pointer(Broker, StreamId)).

%% @doc The root that the metadata store names.
-spec pointer(stream_s3_broker:broker(), binary()) -> {Uid :: non_neg_integer(), Epoch :: non_neg_integer()}.
pointer(Broker, StreamId) ->
    {ok, Entry, _Revision} = stream_s3_broker:call(Broker, rabbitmq_stream_s3_metadata, get, [StreamId]),
    Entry.

%% @doc The keys of all objects of a stream.
-spec keys(tier(), binary()) -> [binary()].
keys(#{settings := Settings}, StreamId) ->
    stream_s3_bucket:keys(stream_s3_bucket:open(Settings), StreamId).
