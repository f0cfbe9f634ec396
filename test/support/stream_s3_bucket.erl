%% @doc Reads a tiered stream back out of the bucket, the way a reader that knows only the formats would: the metadata store
%% names the root, the root and its groups list the fragments, and each fragment is fetched in ranges of bounded size. Keys,
%% fragment objects and chunks are taken apart here, not by the library that wrote them.
%%
%% Whatever does not fit raises `{bucket, Key, Reason}'.
-module(stream_s3_bucket).

-include("rabbitmq_stream_s3.hrl").

-export([open/1, fragments/3, fold_chunks/4, chunk_bytes/2, keys/2, get/3, root_key/3]).
-export_type([bucket/0, fragment/0]).

-define(RANGE, 1048576).
-define(LIST_PAGE, 1000).
-define(PREFIX, <<"rabbitmq">>).
-define(FRAGMENT_HEADER, <<"OSIF", 1:32>>).
-define(FRAGMENT_HEADER_SIZE, 8).
%% Far above what any request of these tests takes; a store that does not answer fails the test with a reason.
-define(TIMEOUT, 30000).

-opaque bucket() :: #{store := term(), prefix := binary()}.
-type fragment() :: #{
    key := binary(),
    first_offset := non_neg_integer(),
    first_timestamp := integer(),
    last_timestamp := integer(),
    size := non_neg_integer()
}.

%% @doc The bucket that this configuration of the application names (keys as in its environment, strings as binaries).
-spec open(#{atom() => term()}) -> bucket().
open(Config0) ->
    #{prefix := Prefix} = Config = maps:merge(#{prefix => ?PREFIX}, Config0),
    case rabbitmq_stream_s3_nif:store_open(Config) of
        {ok, Store} -> #{store => Store, prefix => Prefix};
        {error, Reason} -> error({bucket, open, Reason})
    end.

%% @doc The root that `{Uid, Epoch}' of the metadata store names, and the fragments that it lists, groups resolved, oldest
%% first. One request for the root and one for each group.
-spec fragments(bucket(), binary(), {non_neg_integer(), non_neg_integer()}) -> {#manifest{}, [fragment()]}.
fragments(Bucket, StreamId, {Uid, Epoch}) ->
    Key = root_key(Bucket, StreamId, {Uid, Epoch}),
    {ok, Manifest} = rabbitmq_stream_s3_manifest:decode_root(get(Bucket, Key, whole)),
    {Manifest, entries(Bucket, StreamId, Manifest#manifest.entries)}.

entries(_Bucket, _StreamId, <<>>) ->
    [];
entries(Bucket, StreamId, ?ENTRY(Offset, FirstTs, LastTs, ?MANIFEST_KIND_FRAGMENT, Size, Uid, Rest)) ->
    Fragment = #{
        key => key(Bucket, StreamId, ["data/", offset(Offset), ".", uid(Uid), ".fragment"]),
        first_offset => Offset,
        first_timestamp => FirstTs,
        last_timestamp => LastTs,
        size => Size
    },
    [Fragment | entries(Bucket, StreamId, Rest)];
entries(Bucket, StreamId, ?ENTRY(Offset, _FirstTs, _LastTs, Kind, 0, Uid, Rest)) ->
    Key = key(Bucket, StreamId, ["metadata/", offset(Offset), ".", uid(Uid), group_suffix(Kind)]),
    case rabbitmq_stream_s3_manifest:decode_group(get(Bucket, Key, whole)) of
        {ok, {Kind, Entries}} -> entries(Bucket, StreamId, Entries) ++ entries(Bucket, StreamId, Rest);
        Other -> error({bucket, Key, {group_of_kind, Kind, Other}})
    end.

group_suffix(?MANIFEST_KIND_GROUP) -> ".group";
group_suffix(?MANIFEST_KIND_KILO_GROUP) -> ".kgroup";
group_suffix(?MANIFEST_KIND_MEGA_GROUP) -> ".mgroup".

%% @doc Calls `Fun(Chunk, Acc)' for every chunk of a fragment, in order. Checks the object's header, each chunk's checksum,
%% the size that the manifest gives, the index against the chunks, and that nothing follows the index. One request a
%% megabyte; holds one chunk and one range.
-spec fold_chunks(fun((stream_s3_chunks:chunk(), Acc) -> Acc), Acc, bucket(), fragment()) -> Acc.
fold_chunks(Fun, Acc0, Bucket, #{key := Key, size := Size}) ->
    End = ?FRAGMENT_HEADER_SIZE + Size,
    case range(Bucket, Key, 0, min(End, ?RANGE)) of
        <<Header:?FRAGMENT_HEADER_SIZE/binary, Bytes/binary>> when Header =:= ?FRAGMENT_HEADER ->
            {Acc, Index} = fold(Fun, Acc0, Bucket, Key, min(End, ?RANGE), End, Bytes, 0, []),
            check_index(Bucket, Key, End, iolist_to_binary(lists:reverse(Index))),
            Acc;
        Other ->
            error({bucket, Key, {header, binary:part(Other, 0, min(8, byte_size(Other)))}})
    end.

fold(_Fun, Acc, _Bucket, _Key, End, End, <<>>, _Position, Index) ->
    {Acc, Index};
fold(Fun, Acc, Bucket, Key, At, End, Bytes, Position, Index) ->
    case stream_s3_chunks:next(Bytes) of
        {#{chunk_id := ChunkId, timestamp := Timestamp, size := Size} = Chunk, Rest} ->
            Record = <<ChunkId:64, Timestamp:64/signed, Position:32>>,
            fold(Fun, Fun(Chunk, Acc), Bucket, Key, At, End, Rest, Position + Size, [Record | Index]);
        more when At < End ->
            Next = min(End, At + ?RANGE),
            More = range(Bucket, Key, At, Next),
            fold(Fun, Acc, Bucket, Key, Next, End, <<Bytes/binary, More/binary>>, Position, Index);
        more ->
            error({bucket, Key, {last_chunk_cut_off_at, Position}})
    end.

%% One byte more is asked for than there should be.
check_index(Bucket, Key, End, Expected) ->
    case get(Bucket, Key, {End, End + byte_size(Expected) + 1}) of
        Expected -> ok;
        Index -> error({bucket, Key, {index, Index, expected, Expected}})
    end.

%% @doc All chunk bytes of a fragment. Checks what `fold_chunks/4' checks; holds the whole fragment.
-spec chunk_bytes(bucket(), fragment()) -> binary().
chunk_bytes(Bucket, #{key := Key, size := Size} = Fragment) ->
    ok = fold_chunks(fun(_Chunk, ok) -> ok end, ok, Bucket, Fragment),
    range(Bucket, Key, ?FRAGMENT_HEADER_SIZE, ?FRAGMENT_HEADER_SIZE + Size).

%% @doc The keys of all objects of a stream, ascending.
-spec keys(bucket(), binary()) -> [binary()].
keys(#{store := Store} = Bucket, StreamId) ->
    Prefix = key(Bucket, StreamId, []),
    keys(Store, Prefix, undefined, []).

keys(Store, Prefix, From, Acc) ->
    #{objects := Objects, next := Next} = call(Prefix, fun(Ref) ->
        rabbitmq_stream_s3_nif:store_list(Store, self(), Ref, Prefix, From, ?LIST_PAGE)
    end),
    Keys = Acc ++ [Key || {Key, _Size, _ModifiedMs} <- Objects],
    case Next of
        undefined -> Keys;
        _ -> keys(Store, Prefix, Next, Keys)
    end.

range(Bucket, Key, Start, End) ->
    case get(Bucket, Key, {Start, End}) of
        Bytes when byte_size(Bytes) =:= End - Start -> Bytes;
        Bytes -> error({bucket, Key, {short, Start, End, byte_size(Bytes)}})
    end.

%% @doc An object or a part of one: `whole', `{Start, End}' with `End' exclusive, or `{last, N}'. One request.
-spec get(bucket(), binary(), whole | {non_neg_integer(), non_neg_integer()} | {last, pos_integer()}) -> binary().
get(#{store := Store}, Key, Part) ->
    #{body := Body} = call(Key, fun(Ref) -> rabbitmq_stream_s3_nif:store_get(Store, self(), Ref, Key, Part) end),
    Body.

call(Key, Start) ->
    Ref = make_ref(),
    ok = Start(Ref),
    receive
        {store_result, Ref, {ok, Value}} -> Value;
        {store_result, Ref, {error, Reason}} -> error({bucket, Key, Reason})
    after ?TIMEOUT ->
        error({bucket, Key, no_answer})
    end.

%% @doc Key of a root object.
-spec root_key(bucket(), binary(), {non_neg_integer(), non_neg_integer()}) -> binary().
root_key(Bucket, StreamId, {Uid, Epoch}) ->
    key(Bucket, StreamId, ["metadata/root.", integer_to_binary(Epoch), ".", uid(Uid), ".manifest"]).

key(#{prefix := Prefix}, StreamId, Rest) -> iolist_to_binary([Prefix, "/stream/", StreamId, "/", Rest]).
offset(Offset) -> io_lib:format("~20..0b", [Offset]).
uid(Uid) -> io_lib:format("~8.16.0b", [Uid]).
