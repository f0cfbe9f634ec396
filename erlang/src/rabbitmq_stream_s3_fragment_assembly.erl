%% @doc The fragment that is being assembled from chunk headers.
%%
%% A state is a value: every call returns a new one, and older ones stay usable. A chunk costs about a microsecond.
-module(rabbitmq_stream_s3_fragment_assembly).

-export([new/1, new/2, add_chunk/2, add_chunks/2, is_cut/1, metadata/1, index_records/1, info/1]).
-export_type([state/0, chunk/0, meta/0]).

-type state() :: rabbitmq_stream_s3_nif:assembly().
%% As osiris' header map has it. `data_size' counts towards the target; the fragment takes the bytes
%% `[position, next_position)' of the segment file that starts at `segment_offset'.
-type chunk() :: rabbitmq_stream_s3_nif:chunk().
%% Offsets: next_offset is exclusive. size: bytes of all spans. spans: bytes `[StartPos, EndPos)' of segment files.
-type meta() :: rabbitmq_stream_s3_nif:meta().

%% @doc An empty assembly that takes any chunk, and is cut at `TargetSize' bytes of data.
-spec new(TargetSize :: non_neg_integer()) -> state().
new(TargetSize) ->
    start(TargetSize, undefined, [TargetSize]).

%% @doc An empty assembly that takes chunks without a gap, the first one at `ExpectedOffset'.
-spec new(TargetSize :: non_neg_integer(), ExpectedOffset :: rabbitmq_stream_s3_nif:offset()) -> state().
new(TargetSize, ExpectedOffset) when is_integer(ExpectedOffset) ->
    start(TargetSize, ExpectedOffset, [TargetSize, ExpectedOffset]).

start(TargetSize, Expected, Args) ->
    try
        rabbitmq_stream_s3_nif:assembly_new(TargetSize, Expected)
    catch
        error:{badarg, Text} -> rabbitmq_stream_s3_nif:misuse(Text, Args)
    end.

%% @doc Adds one chunk, also to an assembly that is cut already. Raises `{gap, Expected, Got}' where chunks must follow
%% each other, and `badarg' where no fragment can hold one chunk more: at 262,144 chunks, and where its data would pass 2^32 bytes.
-spec add_chunk(chunk(), state()) -> state().
add_chunk(Chunk, State) ->
    try
        rabbitmq_stream_s3_nif:assembly_add_chunk(Chunk, State)
    catch
        error:{badarg, Text} -> rabbitmq_stream_s3_nif:misuse(Text, [Chunk, State])
    end.

%% @doc Adds chunks up to and including the one that cuts; `Rest' begins after it. Raises as {@link add_chunk/2}.
-spec add_chunks([chunk()], state()) -> {state(), Rest :: [chunk()]}.
add_chunks(Chunks, State) ->
    %% The library takes a bounded number a call, so that no call holds a scheduler for long.
    try rabbitmq_stream_s3_nif:assembly_add_chunks(Chunks, State) of
        {Next, []} ->
            {Next, []};
        {Next, Rest} ->
            case is_cut(Next) of
                true -> {Next, Rest};
                false -> add_chunks(Rest, Next)
            end
    catch
        error:{badarg, Text} -> rabbitmq_stream_s3_nif:misuse(Text, [Chunks, State])
    end.

%% @doc Whether the fragment has to end here.
-spec is_cut(state()) -> boolean().
is_cut(State) ->
    rabbitmq_stream_s3_nif:assembly_is_cut(State).

%% @doc What has been assembled. Raises `badarg' while there is no chunk.
-spec metadata(state()) -> meta().
metadata(State) ->
    try
        rabbitmq_stream_s3_nif:assembly_metadata(State)
    catch
        error:{badarg, Text} -> rabbitmq_stream_s3_nif:misuse(Text, [State])
    end.

%% @doc The index records of the chunks assembled so far, 20 bytes each. Costs a copy of them.
-spec index_records(state()) -> binary().
index_records(State) ->
    rabbitmq_stream_s3_nif:assembly_index_records(State).

%% @doc A view for people: target, expected offset, sums so far. Sums are 0 and offsets undefined while there is no chunk.
-spec info(state()) -> map().
info(State) ->
    rabbitmq_stream_s3_nif:assembly_info(State).
