%% @doc Everything that concerns osiris: which streams have a writer here, where a log begins and ends, reading headers of
%% committed chunks, and being told of new ones.
%%
%% A reader is a value, except that its file belongs to the process that opened it. Nothing here calls into a writer, so
%% nothing here can block one.
-module(rabbitmq_stream_s3_log).

-export([replica_context/2]).
-export([writers/0, replicas/0, context/2, epoch/1, replica_epoch/1, range/1]).
-export([open/2, close/1, read/2, answered/2, behind_gap/2, next_offset/1, identity/2]).
-export([committed_chunk_id/1, rest/2]).
-export([index_files/1, replica_positions/1]).
-export([listen/2, listened/1]).
-export_type([context/0, range/0, reader/0, chunk/0]).

-define(SEGMENT_HEADER_SIZE, 8).
%% Above every offset there can be.
-define(BEYOND, 1 bsl 62).

-type stream_id() :: binary().
-type offset() :: non_neg_integer().
%% What osiris gives to those that read a log.
-type context() :: #{
    dir := file:filename_all(),
    name := stream_id(),
    reference := term(),
    shared := atomics:atomics_ref(),
    atom() => term()
}.
%% `first' is undefined while the log has no chunk; `next' is one more than the last offset written, committed or not.
-type range() :: #{first := offset() | undefined, next := offset()}.
%% As the fragment assembly takes it. Positions are those in the segment file that `segment_offset' names; the chunk is
%% the bytes from `position' up to, not including, `next_position'.
-type chunk() :: #{
    chunk_id := offset(),
    timestamp := integer(),
    num_records := non_neg_integer(),
    data_size := non_neg_integer(),
    position := non_neg_integer(),
    next_position := non_neg_integer(),
    segment_offset := offset(),
    crc := non_neg_integer()
}.

%% Where osiris finds a chunk: it knows how to seek. Read until the first chunk is committed.
-record(sought, {
    log :: term(),
    %% First offset of the segment.
    segment :: offset(),
    %% The header, if it has been read, but its chunk is not committed yet.
    held = none :: map() | none
}).
%% The chunks that follow, or those of a pinned segment: read by the native library, which answers later.
-record(batches, {
    place :: rabbitmq_stream_s3_nif:pins_place(),
    %% The answer that is to come.
    asked = none :: none | reference(),
    %% What has come, and nobody was given.
    chunks = [] :: [chunk()]
}).
-record(reader, {
    context :: context(),
    source :: #sought{} | #batches{},
    %% Offset of the next chunk that nobody was given.
    next :: offset()
}).
-opaque reader() :: #reader{}.

%% @doc All streams whose writer runs on this node.
-spec writers() -> [{stream_id(), pid()}].
writers() ->
    members(osiris_writer).

%% @doc All streams of which a replica runs on this node.
-spec replicas() -> [{stream_id(), pid()}].
replicas() ->
    members(osiris_replica).

members(Role) ->
    case whereis(osiris_server_sup) of
        undefined -> [];
        Sup -> [{id(Name), Pid} || {Name, Pid, _, [Module]} <- supervisor:which_children(Sup), Module =:= Role, is_pid(Pid)]
    end.

%% osiris takes strings as names, too.
id(Name) when is_binary(Name) -> Name;
id(Name) when is_list(Name) -> unicode:characters_to_binary(Name).

%% @doc The context of a local writer, once it has recovered its log. A writer that is still at it answers late, hence the
%% limit in milliseconds; `unknown_epoch': it has not answered.
-spec context(pid(), timeout()) -> {ok, context()} | {error, term()}.
context(Writer, Timeout) ->
    %% osiris keeps the row of a writer that was killed.
    case is_process_alive(Writer) of
        true -> answered(rabbitmq_stream_s3_task:call(fun() -> recovered(Writer) end, Timeout));
        false -> {error, no_process}
    end.

%% @doc The context of a local replica. One that is still starting answers late, hence the limit in milliseconds.
-spec replica_context(pid(), timeout()) -> {ok, context()} | {error, term()}.
replica_context(Replica, Timeout) ->
    %% As for a writer: the row may be of one that was killed.
    case is_process_alive(Replica) of
        true -> answered(rabbitmq_stream_s3_task:call(fun() -> osiris_util:get_reader_context(Replica) end, Timeout));
        false -> {error, no_process}
    end.

answered({ok, _} = Ok) -> Ok;
answered({error, timeout}) -> {error, unknown_epoch};
answered({error, {exit, _NoAnswer}}) -> {error, unknown_epoch};
answered({error, _} = Error) -> Error.

%% A starting writer shows its context before it has set its epoch and its committed offset, and may show those of the
%% writer before it. It takes calls only afterwards, so any call waits for the right ones.
recovered(Writer) ->
    _ = osiris_writer:query_replication_state(Writer),
    osiris_util:get_reader_context(Writer).

%% @doc The epoch in which the writer writes.
-spec epoch(context()) -> {ok, non_neg_integer()} | {error, unknown_epoch}.
epoch(#{reference := Reference}) ->
    epoch_of({osiris_writer, Reference}).

%% @doc The epoch of the writer that a replica follows.
-spec replica_epoch(context()) -> {ok, non_neg_integer()} | {error, unknown_epoch}.
replica_epoch(#{reference := Reference}) ->
    epoch_of({osiris_replica, Reference}).

epoch_of(CounterId) ->
    try osiris_counters:overview(CounterId) of
        #{epoch := Epoch} -> {ok, Epoch};
        _ -> {error, unknown_epoch}
    catch
        error:_ -> {error, unknown_epoch}
    end.

%% @doc Where the local log begins and ends. Reads the header of the first segment and the end of the last one.
-spec range(context()) -> {ok, range()} | {error, term()}.
range(Context) ->
    %% osiris names the range when it refuses an offset, from two files; osiris_log:overview/1 reads every index besides.
    case try_open(?BEYOND, Context) of
        {error, {offset_out_of_range, empty}} -> {ok, #{first => undefined, next => 0}};
        {error, {offset_out_of_range, {First, Last}}} -> {ok, #{first => First, next => Last + 1}};
        {error, _} = Error -> Error
    end.

%% @doc Id of the last chunk that a majority of the members has; -1 before the first. Reads an atomic.
-spec committed_chunk_id(context()) -> integer().
committed_chunk_id(#{shared := Shared}) ->
    osiris_log_shared:committed_chunk_id(Shared).

%% @doc How much of the log lies behind an offset, which must be the id of a chunk or the end of the log: the bytes of these
%% chunks, committed or not, and the timestamp of the first one. Reads a header, and lists the directory.
-spec rest(context(), offset()) -> {ok, #{bytes := non_neg_integer(), timestamp := integer()} | none} | {error, term()}.
rest(#{dir := Dir} = Context, Offset) ->
    case try_open(Offset, Context) of
        {ok, Log} ->
            try osiris_log:read_header(Log) of
                {ok, #{position := Position, timestamp := Timestamp}, _} ->
                    {ok, #{bytes => bytes_behind(Dir, Offset, Position), timestamp => Timestamp}};
                {end_of_stream, _} ->
                    {ok, none};
                {error, _} = Error ->
                    Error
            catch
                error:Reason -> {error, {unreadable_header, Reason}}
            after
                osiris_log:close(Log)
            end;
        {error, _} = Error ->
            Error
    end.

bytes_behind(Dir, Offset, Position) ->
    {Before, After} = lists:splitwith(fun(File) -> first_offset(File) =< Offset end, osiris_log:sorted_index_files(Dir)),
    Files = lists:nthtail(max(0, length(Before) - 1), Before) ++ After,
    %% One that retention deletes in this moment counts as nothing.
    Sizes = [filelib:file_size(segment_file(File)) || File <- Files],
    max(0, lists:sum(Sizes) - ?SEGMENT_HEADER_SIZE * length(After) - Position).

segment_file(IndexFile) ->
    unicode:characters_to_binary([filename:rootname(IndexFile), ".segment"]).

%% @doc Opens the log at a chunk, or at its end: the offset must be the id of a chunk, or one more than the last offset. Of a chunk that
%% osiris does not have any more the pinned segments are asked, which turns out with the first read. To be closed by {@link close/1}.
-spec open(context(), offset()) -> {ok, reader()} | {error, {offset_out_of_range, term()} | term()}.
open(Context, Offset) ->
    case source(Context, Offset) of
        {ok, Source} -> {ok, #reader{context = Context, source = Source, next = Offset}};
        {error, _} = Error -> Error
    end.

source(Context, Offset) ->
    case seek(Context, Offset) of
        {ok, _Sought} = Ok -> Ok;
        {error, {offset_out_of_range, {First, _Last}}} when Offset < First -> {ok, #batches{place = Offset}};
        {error, Deleted} when Deleted =:= segment_deleted; Deleted =:= missing_file -> {ok, #batches{place = Offset}};
        {error, _} = Error -> Error
    end.

seek(#{dir := Dir} = Context, Offset) ->
    case try_open(Offset, Context) of
        {ok, Log} ->
            case segment_of(Dir, Offset) of
                {ok, Segment} ->
                    {ok, #sought{log = Log, segment = Segment}};
                {error, _} = Error ->
                    ok = osiris_log:close(Log),
                    Error
            end;
        {error, _} = Error ->
            Error
    end.

%% @doc Goes on at a chunk that osiris has not, after a chunk that is not the next one: from what is pinned.
-spec behind_gap(offset(), reader()) -> reader().
behind_gap(Offset, Reader) ->
    ok = close(Reader),
    Reader#reader{source = #batches{place = Offset}, next = Offset}.

try_open(Offset, Context) ->
    %% Otherwise the stream's metric of its readers would count us.
    Quiet = Context#{readers_counter_fun => fun(_) -> ok end},
    try
        osiris_log:init_data_reader({Offset, empty}, Quiet)
    catch
        %% An offset inside a chunk, or a file that retention deleted in the meantime.
        throw:Reason -> {error, Reason};
        error:Reason -> {error, Reason};
        %% A segment whose end makes no sense.
        exit:Reason -> {error, Reason}
    end.

%% Of the release that RabbitMQ 4.0 has, osiris does not tell which file it opened.
segment_of(Dir, Offset) ->
    Firsts = [first_offset(File) || File <- osiris_log:sorted_index_files(Dir)],
    case lists:takewhile(fun(First) -> First =< Offset end, Firsts) of
        [] -> {error, segment_deleted};
        Before -> {ok, lists:last(Before)}
    end.

first_offset(IndexFile) ->
    binary_to_integer(unicode:characters_to_binary(filename:basename(IndexFile, ".index"))).

%% @doc Closes the file of a reader, if it has one open.
-spec close(reader()) -> ok.
close(#reader{source = #sought{log = Log}}) ->
    osiris_log:close(Log);
close(#reader{source = #batches{}}) ->
    ok.

%% @doc Id of the chunk that will be read next.
-spec next_offset(reader()) -> offset().
next_offset(#reader{next = Next}) ->
    Next.

%% @doc The next committed chunks, at most so many (1,000). `more': there may be further ones. `end_of_log': none is committed
%% beyond these. `wait': a message will come, for {@link answered/2}. Whoever has opened the log is given its first chunk by osiris, from one or
%% two reads of a file; the others come in batches from the native library, which reads 48 bytes of each on threads of its own.
%%
%% Chunk ids are not checked: osiris continues behind a gap when retention has deleted the next segment. {@link behind_gap/2} then
%% looks for it among the pinned ones; `{gap, Offset}': it is not there either.
-spec read(reader(), 1..1000) -> {[chunk()], more | end_of_log | wait, reader()} | {error, {gap, offset()} | term()}.
read(#reader{source = #sought{held = none} = Sought} = Reader, _Max) ->
    case read_header(Sought) of
        {ok, Header, Log} -> first(Header, Sought#sought{log = Log}, Reader);
        {end_of_stream, Log} -> {[], end_of_log, Reader#reader{source = Sought#sought{log = Log}}};
        {error, _} = Error -> Error
    end;
read(#reader{source = #sought{held = Header} = Sought} = Reader, _Max) ->
    first(Header, Sought, Reader);
read(#reader{source = #batches{chunks = [], asked = none} = Batches, context = Context, next = Next} = Reader, Max) ->
    case is_committed(Next, Reader) of
        true ->
            Ref = rabbitmq_stream_s3_pins:headers(Context, Batches#batches.place, Max),
            {[], wait, Reader#reader{source = Batches#batches{asked = Ref}}};
        false ->
            {[], end_of_log, Reader}
    end;
read(#reader{source = #batches{chunks = []}} = Reader, _Max) ->
    {[], wait, Reader};
read(#reader{source = #batches{chunks = Chunks} = Batches, next = Next} = Reader, _Max) ->
    case lists:splitwith(fun(#{chunk_id := Id}) -> is_committed(Id, Reader) end, Chunks) of
        {[], _} ->
            {[], end_of_log, Reader};
        {Committed, Rest} ->
            After = lists:foldl(fun(#{chunk_id := Id, num_records := N}, _) -> Id + N end, Next, Committed),
            {Committed, more, Reader#reader{source = Batches#batches{chunks = Rest}, next = After}}
    end.

%% Both osiris and the native library read chunks that a majority does not have yet. A new leader may throw those away, so none is
%% handed out; osiris cannot step back either, hence the held header.
first(#{chunk_id := ChunkId, position := Position, next_position := End, num_records := NumRecords} = Header, Sought, Reader) ->
    #sought{log = Log, segment = Segment0} = Sought,
    case is_committed(ChunkId, Reader) of
        true ->
            ok = osiris_log:close(Log),
            %% A segment is named after its first chunk, which follows the file's header. osiris may have gone on to the next one.
            Segment =
                case Position of
                    ?SEGMENT_HEADER_SIZE -> ChunkId;
                    _ -> Segment0
                end,
            Next = ChunkId + NumRecords,
            Chunk = maps:with([chunk_id, timestamp, num_records, data_size, position, next_position, crc], Header),
            {[Chunk#{segment_offset => Segment}], more, Reader#reader{source = #batches{place = {Segment, End, Next}}, next = Next}};
        false ->
            {[], end_of_log, Reader#reader{source = Sought#sought{held = Header}, next = ChunkId}}
    end.

is_committed(ChunkId, #reader{context = Context}) ->
    rabbitmq_stream_s3_nif:chunk_is_committed(ChunkId, committed_chunk_id(Context)).

%% @doc Takes the message that a reader waits for: then it can be read on. `not_mine': it waits for another one, or for none.
-spec answered(term(), reader()) -> {ok, reader()} | {error, {gap, offset()} | term()} | not_mine.
answered({pins_result, Ref, Answer}, #reader{source = #batches{asked = Ref} = Batches} = Reader) ->
    batch(Answer, Batches#batches{asked = none}, Reader);
answered(_Message, _Reader) ->
    not_mine.

batch({ok, [_ | _] = Chunks, Place}, Batches, Reader) ->
    {ok, Reader#reader{source = Batches#batches{place = Place, chunks = Chunks}}};
%% It was committed when it was asked for, so it is in another segment.
batch({ok, [], _Place}, _Batches, #reader{context = Context, next = Next} = Reader) ->
    case source(Context, Next) of
        {ok, Source} -> {ok, Reader#reader{source = Source}};
        {error, _} = Error -> Error
    end;
batch(not_pinned, _Batches, #reader{next = Next}) ->
    {error, {gap, Next}};
batch({error, Text}, _Batches, _Reader) ->
    {error, {unreadable_header, Text}}.

read_header(#sought{log = Log}) ->
    try
        osiris_log:read_header(Log)
    catch
        %% Bytes that are no chunk header, or not of the chunk that should be there.
        error:Reason -> {error, {unreadable_header, Reason}}
    end.

%% @doc What identifies a chunk of the local log, committed or not. `inside_another': the log has that offset inside another
%% chunk. `trimmed': it does not reach back that far, or not yet that far ahead. `segment_deleted': retention is deleting its segment, and
%% once that has ended it is trimmed.
-spec identity(context(), ChunkId :: offset()) ->
    {ok, rabbitmq_stream_s3_nif:chunk_identity() | inside_another | trimmed} | {error, segment_deleted | term()}.
identity(#{shared := Shared} = Context, ChunkId) ->
    IsWritten = ChunkId =< osiris_log_shared:last_chunk_id(Shared),
    case try_open(ChunkId, Context) of
        {ok, Log} ->
            try
                identity_of(osiris_log:read_header(Log), ChunkId, IsWritten)
            catch
                error:Reason -> {error, {unreadable_header, Reason}}
            after
                osiris_log:close(Log)
            end;
        {error, {offset_out_of_range, _}} ->
            {ok, trimmed};
        %% How osiris refuses an offset inside a chunk: with the chunk, its epoch, and its position.
        {error, {badmatch, {Other, _, _}}} when is_integer(Other), Other < ChunkId ->
            {ok, inside_another};
        {error, _} = Error ->
            Error
    end.

%% Of the segments that go at once osiris deletes the newest first. Where the first of those was it meanwhile opens the one in front of it, at its
%% end, and reads nothing there; or, once it has deleted them all, what comes behind them.
identity_of({ok, #{chunk_id := ChunkId} = Header, _Log}, ChunkId, _IsWritten) ->
    {ok, maps:with([chunk_id, epoch, crc], Header)};
identity_of({ok, _Another, _Log}, _ChunkId, _IsWritten) ->
    {error, segment_deleted};
identity_of({end_of_stream, _Log}, _ChunkId, true) ->
    {error, segment_deleted};
identity_of({end_of_stream, _Log}, _ChunkId, false) ->
    {ok, trimmed};
identity_of({error, _} = Error, _ChunkId, _IsWritten) ->
    Error.

%% @doc The index files of a log's segments, each with the offset at which its segment begins; oldest first. Lists the directory.
-spec index_files(file:filename_all()) -> [{offset(), file:filename_all()}].
index_files(Dir) ->
    [{first_offset(File), File} || File <- osiris_log:sorted_index_files(Dir)].

%% @doc The last chunk that each replica of a writer has acknowledged, as an offset; 0 before the first. A replica that is
%% down counts as where it was last. Waits for the writer.
-spec replica_positions(pid()) -> {ok, [offset()]} | {error, term()}.
replica_positions(Writer) ->
    try osiris_writer:query_replication_state(Writer) of
        Positions -> {ok, [max(0, ChunkId) || {ChunkId, _Timestamp} <- maps:values(maps:remove(node(), Positions))]}
    catch
        exit:_ -> {error, no_process}
    end.

%% @doc Asks the writer for one message as soon as the chunk that starts at this offset is committed: at once, if it is.
%% Recognised by {@link listened/1}. Ends with the writer.
-spec listen(pid(), offset()) -> ok.
listen(Writer, NextOffset) ->
    %% With the stream's own formatter: one of ours would run in the writer.
    osiris:register_offset_listener(Writer, NextOffset, undefined).

%% @doc Whether a message is the one asked for. Pass casts without their wrapping. In a broker it comes as RabbitMQ's queue event.
-spec listened(term()) -> boolean().
listened({osiris_offset, _Reference, _CommittedChunkId}) -> true;
listened({queue_event, _Queue, {osiris_offset, _Reference, _CommittedChunkId}}) -> true;
listened(_) -> false.
