%% @doc All that the application needs around it, on this node and for a while: osiris, an object store, the application. The
%% demo, the shell and the suites run in it.
-module(stream_s3_world).

-include("rabbitmq_stream_s3.hrl").

-export([start/1, stop/1, stop_metadata_store/0, describe/1, bucket/1, store/1, s3local/1]).
-export([start_application/1, try_application/1, stop_application/0, set/1]).
-export([settle/3, pointer/1, tiered_bytes/1, kill_reader/1]).
-export_type([world/0]).

-define(APP, rabbitmq_stream_s3).
-define(BUCKET, "bucket").
%% Time between two looks while something is awaited that also needs a push now and then.
-define(SETTLE_STEP_MS, 200).

-type options() :: #{
    store := fs | s3,
    %% For logs, the metadata store, and objects unless they have a place of their own.
    dir := file:filename(),
    %% Objects come to lie in `objects/bucket'.
    objects => file:filename(),
    %% Environment of the application, in addition to what names the store.
    env => #{atom() => term()}
}.
-opaque world() :: #{
    store := #{atom() => term()}, s3local := none | stream_s3_s3local:server(), description := string()
}.

%% @doc Starts all of it. The directories are made; they may hold what an earlier world left.
-spec start(options()) -> world().
start(#{store := Kind, dir := Dir} = Options) ->
    Objects = maps:get(objects, Options, filename:join(Dir, "objects")),
    ok = filelib:ensure_path(Objects),
    ok = stop_metadata_store(),
    ok = stream_s3_osiris:start(filename:join(Dir, "osiris")),
    {Server, Store, Description} = store(Kind, Objects),
    Env = maps:merge(Store, maps:get(env, Options, #{})),
    ok = start_application(Env),
    #{store => Store, s3local => Server, description => Description}.

store(fs, Objects) ->
    Dir = filename:join(Objects, ?BUCKET),
    ok = filelib:ensure_path(Dir),
    {none, #{store => fs, fs_dir => unicode:characters_to_binary(Dir)}, "fs (" ++ Dir ++ ")"};
store(s3, Objects) ->
    Server = stream_s3_s3local:start(#{dir => Objects}),
    ok = stream_s3_s3local:create_bucket(Server, ?BUCKET),
    #{endpoint := Endpoint} = Settings = stream_s3_s3local:settings(Server),
    Store = Settings#{store => s3, bucket => <<?BUCKET>>},
    {Server, Store, "s3 (s3local at " ++ binary_to_list(Endpoint) ++ ")"}.

%% @doc Ends what `start/1' started. The directories stay.
-spec stop(world()) -> ok.
stop(#{s3local := Server}) ->
    ok = stop_application(),
    ok = stop_metadata_store(),
    ok = stream_s3_osiris:stop(),
    case Server of
        none -> ok;
        _ -> stream_s3_s3local:stop(Server)
    end.

%% @doc Stops whatever metadata store runs in this VM: Khepri keeps the directory that it was started with first until Ra is
%% stopped too.
-spec stop_metadata_store() -> ok.
stop_metadata_store() ->
    _ = [application:stop(Application) || Application <- [khepri, ra]],
    ok.

%% @doc Where the objects go, for people.
-spec describe(world()) -> string().
describe(#{description := Description}) -> Description.

%% @doc The bucket, to read from.
-spec bucket(world()) -> stream_s3_bucket:bucket().
bucket(#{store := Store}) -> stream_s3_bucket:open(Store).

%% @doc The settings that name the store.
-spec store(world()) -> #{atom() => term()}.
store(#{store := Store}) -> Store.

%% @doc The server of a world with the store `s3'.
-spec s3local(world()) -> stream_s3_s3local:server().
s3local(#{s3local := Server}) -> Server.

%% @doc Starts the application with exactly this environment. Raises `{world, Text}' with what the application says.
-spec start_application(#{atom() => term()}) -> ok.
start_application(Env) ->
    case try_application(Env) of
        ok -> ok;
        {error, Reason} -> error({world, lists:flatten(io_lib:format("the application does not start: ~0tp", [Reason]))})
    end.

%% @doc The same, answering what the application says.
-spec try_application(#{atom() => term()}) -> ok | {error, term()}.
try_application(Env) ->
    _ = application:load(?APP),
    _ = [application:unset_env(?APP, Key) || {Key, _} <- application:get_all_env(?APP)],
    ok = set(Env),
    case application:ensure_all_started(?APP) of
        {ok, _} -> ok;
        {error, _} = Error -> Error
    end.

-spec stop_application() -> ok.
stop_application() ->
    case application:stop(?APP) of
        ok -> ok;
        {error, {not_started, ?APP}} -> ok
    end.

%% @doc Changes settings; those that are read when a stream is found hold for streams found from now on.
-spec set(#{atom() => term()}) -> ok.
set(Env) ->
    maps:foreach(fun(Key, Value) -> ok = application:set_env(?APP, Key, Value) end, Env).

%% @doc Waits until everything below this offset is in the bucket and listed, and cuts what would wait for more data. Raises
%% `{world, Text}' when that takes longer than so many milliseconds.
-spec settle(binary(), non_neg_integer(), pos_integer()) -> ok.
settle(StreamId, Offset, TimeoutMs) ->
    settle(StreamId, Offset, TimeoutMs, erlang:monotonic_time(millisecond) + TimeoutMs).

settle(StreamId, Offset, TimeoutMs, Deadline) ->
    %% Again after each step: a cut takes what is drained by then, and the last chunks may come behind it. Nothing to cut, or
    %% a reader that is just being restarted, is no reason to end.
    _ = rabbitmq_stream_s3_replica_reader:force_cut(StreamId),
    case rabbitmq_stream_s3_replica_reader:await_offset(StreamId, Offset, ?SETTLE_STEP_MS) of
        ok ->
            ok;
        {error, Reason} ->
            case erlang:monotonic_time(millisecond) < Deadline of
                true ->
                    settle(StreamId, Offset, TimeoutMs, Deadline);
                false ->
                    Text = io_lib:format("~ts is not tiered up to offset ~b within ~b ms (~0tp): ~0tp", [
                        StreamId, Offset, TimeoutMs, Reason, rabbitmq_stream_s3:status(StreamId)
                    ]),
                    error({world, lists:flatten(Text)})
            end
    end.

%% @doc What the metadata store has of a stream: uid and epoch of its root, and the revision, which is the number of persists.
-spec pointer(binary()) -> {{Uid :: non_neg_integer(), Epoch :: non_neg_integer()}, Revision :: pos_integer()}.
pointer(StreamId) ->
    {ok, Pointer, Revision} = rabbitmq_stream_s3_metadata:get(StreamId),
    {Pointer, Revision}.

%% @doc Data bytes of a stream that are persisted, as far as this node knows. Asks no process.
-spec tiered_bytes(binary()) -> non_neg_integer().
tiered_bytes(StreamId) ->
    case rabbitmq_stream_s3_manifest_cache:get(StreamId) of
        {resolved, #manifest{total_size = Bytes}, _Revision} -> Bytes;
        pending -> 0;
        unknown -> 0
    end.

%% @doc Kills the reader of a stream and waits until it is gone.
-spec kill_reader(binary()) -> ok.
kill_reader(StreamId) ->
    Pid = rabbitmq_stream_s3_registry:whereis(StreamId),
    Monitor = erlang:monitor(process, Pid),
    exit(Pid, kill),
    receive
        {'DOWN', Monitor, process, Pid, _Reason} -> ok
    end.
