%% @doc Segments that are held open until they are uploaded, so that retention of the local log may delete them before: the native
%% registry, for those who may wait and those who may not.
%%
%% A log is entered by the reader of its stream, before it knows where the tier ends, and stays entered when that reader is
%% started again; with the writer's end, or that of the application, everything is let go.
-module(rabbitmq_stream_s3_pins).

-export([enter/4, hold/3, joining/3, identity/3, persisted/2, look/1, leave/2, sweep/0, clear/0]).
-export([headers/3, info/0, stream_bytes/1]).

-define(CLEAR_WAIT_MS, 5000).

-type context() :: rabbitmq_stream_s3_log:context().
-type offset() :: non_neg_integer().

%% @doc Enters the log of a stream, and waits until its segments are pinned: {@link rabbitmq_stream_s3_nif:pins_enter/6}. The limit is in
%% milliseconds, here and below.
-spec enter(StreamId :: binary(), context(), Writer :: pid(), timeout()) -> ok | {error, term()}.
enter(StreamId, #{dir := Dir}, Writer, Timeout) ->
    Budget = rabbitmq_stream_s3_config:get(pinned_segment_bytes),
    wait(Timeout, fun(Ref) -> rabbitmq_stream_s3_nif:pins_enter(StreamId, Dir, Writer, Budget, self(), Ref) end).

%% @doc Keeps the segment that begins at an offset open until something of it is persisted, and waits until it is: {@link
%% rabbitmq_stream_s3_nif:pins_hold/4}. An error: it cannot be opened, most likely because it is deleted.
-spec hold(context(), Segment :: offset(), timeout()) -> ok | {error, term()}.
hold(#{dir := Dir}, Segment, Timeout) ->
    wait(Timeout, fun(Ref) -> rabbitmq_stream_s3_nif:pins_hold(Dir, Segment, self(), Ref) end).

%% @doc The range of a log with what prolongs it: `pinned_first' is where the pinned segments begin that reach up to the log without
%% a gap.
-spec joining(context(), rabbitmq_stream_s3_log:range(), timeout()) -> {ok, rabbitmq_stream_s3_nif:local_log()} | {error, term()}.
joining(_Context, #{first := undefined} = Range, _Timeout) ->
    {ok, Range};
joining(#{dir := Dir}, #{first := First} = Range, Timeout) ->
    case wait(Timeout, fun(Ref) -> rabbitmq_stream_s3_nif:pins_joining(Dir, First, self(), Ref) end) of
        {ok, Pinned} -> {ok, Range#{pinned_first => Pinned}};
        {error, _} = Error -> Error
    end.

%% @doc What identifies a chunk of a pinned segment: {@link rabbitmq_stream_s3_nif:pins_identity/4}.
-spec identity(context(), ChunkId :: offset(), timeout()) ->
    {ok, rabbitmq_stream_s3_nif:chunk_identity() | inside_another | trimmed} | {error, term()}.
identity(#{dir := Dir}, ChunkId, Timeout) ->
    wait(Timeout, fun(Ref) -> rabbitmq_stream_s3_nif:pins_identity(Dir, ChunkId, self(), Ref) end).

%% @doc Everything below an offset is persisted, or not wanted. Does not wait.
-spec persisted(context(), offset()) -> ok.
persisted(#{dir := Dir}, Offset) ->
    rabbitmq_stream_s3_nif:pins_persisted(Dir, Offset).

%% @doc Looks at the log's directory once more. Does not wait.
-spec look(context()) -> ok.
look(#{dir := Dir}) ->
    rabbitmq_stream_s3_nif:pins_look(Dir).

%% @doc Lets go of the log of a writer. Does not wait.
-spec leave(context(), Writer :: pid()) -> ok.
leave(#{dir := Dir}, Writer) ->
    rabbitmq_stream_s3_nif:pins_leave(Dir, Writer).

%% @doc Lets go of the logs whose writers have ended without anybody's having been there to see it. Does not wait.
-spec sweep() -> ok.
sweep() ->
    rabbitmq_stream_s3_nif:pins_sweep().

%% @doc Lets go of everything, and waits until the descriptors are closed.
-spec clear() -> ok | {error, term()}.
clear() ->
    wait(?CLEAR_WAIT_MS, fun(Ref) -> rabbitmq_stream_s3_nif:pins_clear(self(), Ref) end).

%% @doc Asks for chunks of a segment, pinned or not. `{pins_result, Ref, Answer}' comes with the reference that is returned: {@link
%% rabbitmq_stream_s3_nif:pins_headers/5}.
-spec headers(context(), rabbitmq_stream_s3_nif:pins_place(), Max :: pos_integer()) -> reference().
headers(#{dir := Dir}, Place, Max) ->
    Ref = make_ref(),
    ok = rabbitmq_stream_s3_nif:pins_headers(Dir, Place, Max, self(), Ref),
    Ref.

%% @doc What is pinned on this node: {@link rabbitmq_stream_s3_nif:pins_info/0}.
-spec info() -> rabbitmq_stream_s3_nif:pins_info().
info() ->
    rabbitmq_stream_s3_nif:pins_info().

%% @doc Bytes of deleted segments that are held open for a stream.
-spec stream_bytes(StreamId :: binary()) -> non_neg_integer().
stream_bytes(StreamId) ->
    #{streams := Streams} = info(),
    maps:get(StreamId, Streams, 0).

wait(Timeout, Ask) ->
    Ref = make_ref(),
    ok = Ask(Ref),
    receive
        {pins_result, Ref, Answer} -> Answer
    after Timeout -> {error, timeout}
    end.
