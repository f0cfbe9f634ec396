%% @doc Records that can be made again from a stream's number and a record's number, so that what was written need not be
%% kept anywhere to be compared with what is read.
%%
%% A record is its own name (stream u8, number u64) and a slice of a pseudo-random block. Two records of equal size differ in
%% their names at least, so a swapped or doubled record never passes for the right one.
-module(stream_s3_records).

-export([new/1, record/3, size/3, count/3]).
-export_type([source/0]).

-define(MIN_SIZE, 10).
-define(MAX_SIZE, 1048576).
-define(NAME_SIZE, 9).
-define(BLOCK_SIZE, (?MAX_SIZE + 65536)).
-define(HASH_RANGE, (1 bsl 32)).

-type source() :: #{seed := integer(), block := binary()}.
-type stream_number() :: 0..255.
-type record_number() :: non_neg_integer().

%% @doc What `record/3' makes records from. Equal seeds give equal records, on every machine. Costs a megabyte of memory and
%% a few milliseconds.
-spec new(integer()) -> source().
new(Seed) ->
    {Block, _} = rand:bytes_s(?BLOCK_SIZE, rand:seed_s(exsss, Seed)),
    #{seed => Seed, block => Block}.

%% @doc The record with this number, the first of a stream being 0. Its size is `size/3'.
-spec record(source(), stream_number(), record_number()) -> binary().
record(#{seed := Seed, block := Block} = Source, Stream, Number) ->
    Length = size(Source, Stream, Number) - ?NAME_SIZE,
    Start = erlang:phash2({slice, Seed, Stream, Number}, ?BLOCK_SIZE - Length + 1),
    <<Stream:8, Number:64, (binary:part(Block, Start, Length))/binary>>.

%% @doc Bytes of a record: 10 for the first of a stream, 1 MiB for the second, in between for all others. Many are small and
%% few are large: the sizes spread over the powers of ten, and the small ones are favoured.
-spec size(source(), stream_number(), record_number()) -> ?MIN_SIZE..?MAX_SIZE.
size(_Source, _Stream, 0) ->
    ?MIN_SIZE;
size(_Source, _Stream, 1) ->
    ?MAX_SIZE;
size(#{seed := Seed}, Stream, Number) ->
    U = erlang:phash2({size, Seed, Stream, Number}, ?HASH_RANGE) / ?HASH_RANGE,
    floor(?MIN_SIZE * math:pow(?MAX_SIZE / ?MIN_SIZE, U * U * U)).

%% @doc How many records of a stream hold at least `Bytes' bytes together, and how many bytes they are. Takes a fraction of a
%% microsecond a record.
-spec count(source(), stream_number(), non_neg_integer()) -> {non_neg_integer(), non_neg_integer()}.
count(Source, Stream, Bytes) ->
    count(Source, Stream, Bytes, 0, 0).

count(_Source, _Stream, Bytes, Number, Sum) when Sum >= Bytes ->
    {Number, Sum};
count(Source, Stream, Bytes, Number, Sum) ->
    count(Source, Stream, Bytes, Number + 1, Sum + size(Source, Stream, Number)).
