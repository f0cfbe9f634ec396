%% @doc From the local log to fragments: reads headers of committed chunks and tells where a fragment ends.
%%
%% Works in turns of bounded length, so that the process that drains stays responsive. Bodies are not read here. A state
%% belongs to the process that opened it, because the log's file does.
-module(rabbitmq_stream_s3_replica_reader_drain).

-export([open/2, turn/1, answered/2, cut/1, close/1, next_offset/1, since/1, info/1]).
-export_type([state/0]).

%% Headers of one turn, read by one job of the native library: a fraction of a millisecond when they are in the page cache.
-define(BATCH, 128).

-type offset() :: non_neg_integer().
-type meta() :: rabbitmq_stream_s3_fragment_assembly:meta().

-record(state, {
    reader :: rabbitmq_stream_s3_log:reader(),
    %% osiris' name of the stream; what is said of it may change from fragment to fragment.
    reference :: term(),
    %% None while it would be empty.
    assembly = none :: none | rabbitmq_stream_s3_fragment_assembly:state(),
    %% First offset of the assembly.
    start :: offset(),
    %% One more than the last offset of the assembly; equal to `start' while it is empty.
    next :: offset(),
    %% Chunks read behind a cut, oldest first.
    rest = [] :: [rabbitmq_stream_s3_log:chunk()],
    %% When the assembly got its first chunk, monotonic milliseconds.
    since = none :: none | integer()
}).
-opaque state() :: #state{}.

%% @doc Starts at a chunk, or at the end of the log.
-spec open(rabbitmq_stream_s3_log:context(), offset()) -> {ok, state()} | {error, term()}.
open(#{reference := Reference} = Context, Offset) ->
    case rabbitmq_stream_s3_log:open(Context, Offset) of
        {ok, Reader} ->
            {ok, #state{reader = Reader, reference = Reference, start = Offset, next = Offset}};
        {error, _} = Error ->
            Error
    end.

restart(Offset, State) ->
    State#state{assembly = none, start = Offset, next = Offset, since = none}.

%% A fragment has the size that is right when it gets its first chunk.
assembly(#state{assembly = none, reference = Reference, start = Start}) ->
    rabbitmq_stream_s3_fragment_assembly:new(rabbitmq_stream_s3_queue:setting(fragment_target_size, Reference), Start);
assembly(#state{assembly = Assembly}) ->
    Assembly.

%% @doc One turn. `{cut, Meta, _}': a fragment has reached its size, and there may be more. `{more, _}': call again.
%% `{end_of_log, _}': nothing committed is left. `{wait, _}': a message will come, for {@link answered/2}. `gap': the log does not have the
%% chunk that must come next, and neither do the pinned segments.
-spec turn(state()) ->
    {cut, meta(), state()}
    | {more, state()}
    | {end_of_log, state()}
    | {wait, state()}
    | {error, {gap, offset()} | term(), state()}.
turn(#state{rest = [], reader = Reader0} = State) ->
    case rabbitmq_stream_s3_log:read(Reader0, ?BATCH) of
        {Chunks, More, Reader} -> add(Chunks, More, State#state{reader = Reader});
        {error, Reason} -> {error, Reason, State}
    end;
turn(#state{rest = Rest} = State) ->
    add(Rest, more, State#state{rest = []}).

%% @doc Takes a message, perhaps the one that the drain waits for: then there is something to do. `not_mine': it is not.
-spec answered(term(), state()) -> {more, state()} | {error, {gap, offset()} | term(), state()} | not_mine.
answered(Message, #state{reader = Reader0} = State) ->
    case rabbitmq_stream_s3_log:answered(Message, Reader0) of
        {ok, Reader} -> {more, State#state{reader = Reader}};
        {error, Reason} -> {error, Reason, State};
        not_mine -> not_mine
    end.

add([], More, State) ->
    {More, State};
add(Chunks, More, #state{since = Since, reader = Reader} = State0) ->
    try rabbitmq_stream_s3_fragment_assembly:add_chunks(Chunks, assembly(State0)) of
        {Assembly, Rest} ->
            State = State0#state{assembly = Assembly, rest = Rest, since = started(Since)},
            case rabbitmq_stream_s3_fragment_assembly:is_cut(Assembly) of
                true -> seal(State);
                false -> {More, State#state{next = end_of(lists:last(Chunks))}}
            end
    catch
        error:{gap, Expected, Got} ->
            %% osiris has jumped over segments that are deleted. What it read before is good, and what is missing may be pinned.
            Before = lists:takewhile(fun(#{chunk_id := Id}) -> Id =/= Got end, Chunks),
            add(Before, more, State0#state{reader = rabbitmq_stream_s3_log:behind_gap(Expected, Reader)})
    end.

started(none) -> erlang:monotonic_time(millisecond);
started(Since) -> Since.

end_of(#{chunk_id := ChunkId, num_records := NumRecords}) ->
    ChunkId + NumRecords.

%% @doc Ends the fragment here, if it has a chunk.
-spec cut(state()) -> {cut, meta(), state()} | empty.
cut(#state{since = none}) ->
    empty;
cut(State) ->
    seal(State).

seal(#state{assembly = Assembly} = State) ->
    #{next_offset := Next} = Meta = rabbitmq_stream_s3_fragment_assembly:metadata(Assembly),
    {cut, Meta, restart(Next, State)}.

%% @doc Closes the log's file.
-spec close(state()) -> ok.
close(#state{reader = Reader}) ->
    rabbitmq_stream_s3_log:close(Reader).

%% @doc Offset of the first chunk that has not been read, committed or not.
-spec next_offset(state()) -> offset().
next_offset(#state{reader = Reader}) ->
    rabbitmq_stream_s3_log:next_offset(Reader).

%% @doc When the fragment that is being assembled got its first chunk, in monotonic milliseconds.
-spec since(state()) -> none | integer().
since(#state{since = Since}) ->
    Since.

%% @doc The fragment that is being assembled: its half-open range, its bytes, and since when it has chunks (monotonic milliseconds).
-spec info(state()) -> #{range := {offset(), offset()}, bytes := non_neg_integer(), since := none | integer()}.
info(#state{start = Start, next = Next, since = none}) ->
    #{range => {Start, Next}, bytes => 0, since => none};
info(#state{start = Start, next = Next, since = Since, assembly = Assembly}) ->
    #{size := Size} = rabbitmq_stream_s3_fragment_assembly:metadata(Assembly),
    #{range => {Start, Next}, bytes => Size, since => Since}.
