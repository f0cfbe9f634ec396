%% @doc Reads osiris chunks out of bytes. Written anew for the tests and the demo, so that what the library wrote is judged by
%% code that shares nothing with it.
-module(stream_s3_chunks).

-export([next/1, records/1, all/1, of_log/1]).
-export_type([chunk/0]).

-define(HEADER_SIZE, 48).
-define(SEGMENT_HEADER, <<"OSIL", 1:32>>).

-type chunk() :: #{
    type := user | tracking_delta | tracking_snapshot,
    num_entries := non_neg_integer(),
    num_records := non_neg_integer(),
    timestamp := integer(),
    epoch := non_neg_integer(),
    chunk_id := non_neg_integer(),
    crc := non_neg_integer(),
    %% Bytes of the whole chunk, from the first of its header to the last of its trailer.
    size := pos_integer(),
    filter := binary(),
    data := binary(),
    trailer := binary()
}.

%% @doc The chunk at the start of the bytes and what follows it, or `more' where the bytes end inside the chunk. Raises
%% `{corrupt_chunk, ...}' on a wrong magic or checksum.
-spec next(binary()) -> {chunk(), binary()} | more.
next(
    <<5:4, 0:4, Type:8, NumEntries:16, NumRecords:32, Timestamp:64/signed, Epoch:64, ChunkId:64, Crc:32, DataSize:32,
        TrailerSize:32, FilterSize:8, _Reserved:24, Filter:FilterSize/binary, Data:DataSize/binary,
        Trailer:TrailerSize/binary, Rest/binary>>
) ->
    erlang:crc32(Data) =:= Crc orelse error({corrupt_chunk, ChunkId, {crc, Crc, erlang:crc32(Data)}}),
    Chunk = #{
        type => type(Type),
        num_entries => NumEntries,
        num_records => NumRecords,
        timestamp => Timestamp,
        epoch => Epoch,
        chunk_id => ChunkId,
        crc => Crc,
        size => ?HEADER_SIZE + FilterSize + DataSize + TrailerSize,
        filter => Filter,
        data => Data,
        trailer => Trailer
    },
    {Chunk, Rest};
next(<<5:4, 0:4, _/binary>>) ->
    more;
next(<<>>) ->
    more;
next(<<Start:8/binary, _/binary>>) ->
    error({corrupt_chunk, {magic, Start}});
next(Short) ->
    error({corrupt_chunk, {magic, Short}}).

type(0) -> user;
type(1) -> tracking_delta;
type(2) -> tracking_snapshot.

%% @doc The records of a chunk in the order they were written; none of a tracking chunk. Batches of records are taken apart, plain
%% ones and those compressed with gzip; other compressions raise.
-spec records(chunk()) -> [binary()].
records(#{type := user, num_records := Num, data := Data}) ->
    Records = entries(Data),
    Num = length(Records),
    Records;
records(#{type := tracking_delta}) ->
    [];
records(#{type := tracking_snapshot}) ->
    [].

entries(<<0:1, Size:31, Record:Size/binary, Rest/binary>>) ->
    [Record | entries(Rest)];
entries(<<1:1, Compression:3, _:4, Count:16, Plain:32, Size:32, Batch:Size/binary, Rest/binary>>) ->
    Inner = unpack(Compression, Batch),
    {Plain, Records} = {byte_size(Inner), entries(Inner)},
    Count = length(Records),
    Records ++ entries(Rest);
entries(<<>>) ->
    [].

unpack(0, Batch) -> Batch;
unpack(1, Batch) -> zlib:gunzip(Batch).

%% @doc All chunks of bytes that hold whole chunks and nothing else.
-spec all(binary()) -> [chunk()].
all(<<>>) ->
    [];
all(Bytes) ->
    case next(Bytes) of
        {Chunk, Rest} -> [Chunk | all(Rest)];
        more -> error({corrupt_chunk, {cut_off, byte_size(Bytes)}})
    end.

%% @doc The chunk bytes of an osiris log as they lie in its segment files, oldest first, without the segments' own headers:
%% what the fragments of a fully tiered stream hold together. `SegmentOffsets' are the segments' first offsets. Reads the
%% whole log into memory.
-spec of_log(file:name_all()) -> #{bytes := binary(), segments := [non_neg_integer()]}.
of_log(Dir) ->
    {ok, Names} = file:list_dir(Dir),
    Segments = lists:sort([Name || Name <- Names, filename:extension(Name) =:= ".segment"]),
    Bytes = [segment_bytes(filename:join(Dir, Name)) || Name <- Segments],
    #{
        bytes => iolist_to_binary(Bytes),
        segments => [list_to_integer(filename:basename(Name, ".segment")) || Name <- Segments]
    }.

segment_bytes(File) ->
    {ok, Bytes} = file:read_file(File),
    <<Header:8/binary, Chunks/binary>> = Bytes,
    Header = ?SEGMENT_HEADER,
    Chunks.
