%% @doc Judges what comes back from the bucket against what was written: offsets follow one another without a gap, records come
%% in the order they were written, each one once, each one equal.
%%
%% A finding raises `{demo, StreamId, Text}' with a sentence in `Text'.
-module(stream_s3_demo_check).

-include("rabbitmq_stream_s3.hrl").

-export([new/2, manifest/3, fragment/2, chunk/2, progress/1, finish/3]).
-export_type([check/0]).

-record(check, {
    id :: binary(),
    record :: fun((non_neg_integer()) -> binary()),
    next_offset = 0 :: non_neg_integer(),
    records = 0 :: non_neg_integer(),
    bytes = 0 :: non_neg_integer(),
    chunks = 0 :: non_neg_integer()
}).
-opaque check() :: #check{}.

%% @doc Nothing seen yet. `Record(N)' is the record that was written as number N, from 0.
-spec new(binary(), fun((non_neg_integer()) -> binary())) -> check().
new(Id, Record) -> #check{id = Id, record = Record}.

%% @doc The manifest must cover everything from 0 up to the end of the log.
-spec manifest(binary(), #manifest{}, non_neg_integer()) -> ok.
manifest(_Id, #manifest{first_offset = 0, next_offset = End}, End) ->
    ok;
manifest(Id, #manifest{first_offset = First, next_offset = Next}, End) ->
    fail(Id, "the manifest covers offsets ~b to ~b, and the log 0 to ~b", [First, Next, End]).

%% @doc A fragment that begins at this offset comes next.
-spec fragment(non_neg_integer(), check()) -> check().
fragment(Offset, #check{next_offset = Offset} = Check) -> Check;
fragment(Offset, #check{id = Id, next_offset = Next}) -> fail(Id, "a fragment begins at offset ~b in place of ~b", [Offset, Next]).

%% @doc This chunk comes next.
-spec chunk(stream_s3_chunks:chunk(), check()) -> check().
chunk(#{chunk_id := Offset, num_records := Num} = Chunk, #check{next_offset = Offset, chunks = Chunks} = Check0) ->
    Check = lists:foldl(fun record/2, Check0, stream_s3_chunks:records(Chunk)),
    Check#check{next_offset = Offset + Num, chunks = Chunks + 1};
chunk(#{chunk_id := Offset}, #check{id = Id, next_offset = Next}) ->
    fail(Id, "a chunk begins at offset ~b in place of ~b", [Offset, Next]).

record(Bytes, #check{id = Id, record = Record, records = N, bytes = Sum} = Check) ->
    case Record(N) of
        Bytes -> Check#check{records = N + 1, bytes = Sum + byte_size(Bytes)};
        <<Name:9/binary, _/binary>> -> wrong(Id, N, Name, Bytes)
    end.

wrong(Id, N, Name, <<Name:9/binary, _/binary>>) ->
    fail(Id, "record ~b has other bytes than were written", [N]);
wrong(Id, N, <<Stream:8, _/binary>>, <<Stream:8, Got:64, _/binary>>) when Got < N ->
    fail(Id, "record ~b came again in place of record ~b", [Got, N]);
wrong(Id, N, <<Stream:8, _/binary>>, <<Stream:8, Got:64, _/binary>>) ->
    fail(Id, "record ~b came in place of record ~b", [Got, N]);
wrong(Id, N, _Name, _Bytes) ->
    fail(Id, "something that is no record of this stream came in place of record ~b", [N]).

%% @doc What was seen so far.
-spec progress(check()) -> #{records := non_neg_integer(), bytes := non_neg_integer(), chunks := non_neg_integer()}.
progress(#check{records = Records, bytes = Bytes, chunks = Chunks}) ->
    #{records => Records, bytes => Bytes, chunks => Chunks}.

%% @doc Nothing comes any more, though so many records were written and the log ends at this offset.
-spec finish(check(), non_neg_integer(), non_neg_integer()) ->
    #{records := non_neg_integer(), bytes := non_neg_integer(), chunks := non_neg_integer()}.
finish(#check{records = Records, next_offset = End} = Check, Records, End) ->
    progress(Check);
finish(#check{id = Id, records = Got, next_offset = Next}, Records, End) ->
    fail(Id, "~b of ~b records came back, up to offset ~b of ~b", [Got, Records, Next, End]).

-spec fail(binary(), io:format(), [term()]) -> no_return().
fail(Id, Format, Args) -> error({demo, Id, lists:flatten(io_lib:format(Format, Args))}).
