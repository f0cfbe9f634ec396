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
%% Chunks of a pinned segment that are asked for at once.
-define(PINNED_BATCH, 128).
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

%% The files that osiris has, read by osiris.
-record(files, {
    log :: term(),
    %% First offset of the segment that was read from last.
    segment :: offset(),
    %% A header that has been read, but whose chunk is not committed yet.
    held = none :: map() | none
}).
%% Segments that osiris has deleted, and that are held open: read by the native library, which answers later.
-record(pinned, {
    place :: rabbitmq_stream_s3_nif:pins_place(),
    %% The answer that is to come.
    asked = none :: none | reference(),
    %% What has come, and nobody was given.
    chunks = [] :: [chunk()]
}).
-record(reader, {
    context :: context(),
    source :: #files{} | #pinned{},
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
    case open_files(Context, Offset) of
        {ok, Files} ->
            {ok, #reader{context = Context, source = Files, next = Offset}};
        {error, {offset_out_of_range, {First, _Last}}} when Offset < First ->
            {ok, behind(Context, Offset)};
        {error, Deleted} when Deleted =:= segment_deleted; Deleted =:= missing_file ->
            {ok, behind(Context, Offset)};
        {error, _} = Error ->
            Error
    end.

behind(Context, Offset) ->
    #reader{context = Context, source = #pinned{place = Offset}, next = Offset}.

open_files(#{dir := Dir} = Context, Offset) ->
    case try_open(Offset, Context) of
        {ok, Log} ->
            case segment_of(Dir, Offset) of
                {ok, Segment} ->
                    {ok, #files{log = Log, segment = Segment}};
                {error, _} = Error ->
                    ok = osiris_log:close(Log),
                    Error
            end;
        {error, _} = Error ->
            Error
    end.

%% @doc Goes on at a chunk that osiris has not, after a chunk that is not the next one: from what is pinned.
-spec behind_gap(offset(), reader()) -> reader().
behind_gap(Offset, #reader{context = Context} = Reader) ->
    ok = close(Reader),
    behind(Context, Offset).

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

%% @doc Closes the file of a reader.
-spec close(reader()) -> ok.
close(#reader{source = #files{log = Log}}) ->
    osiris_log:close(Log);
close(#reader{source = #pinned{}}) ->
    ok.

%% @doc Id of the chunk that will be read next.
-spec next_offset(reader()) -> offset().
next_offset(#reader{next = Next}) ->
    Next.

%% @doc The next committed chunks, at most so many. `more': there may be further ones. `end_of_log': none is committed
%% beyond these. `wait': a message will come, for {@link answered/2}. One or two reads of a file for each chunk, of 48 bytes or of what
%% osiris reads ahead.
%%
%% Chunk ids are not checked: osiris continues behind a gap when retention has deleted the next segment. {@link behind_gap/2} then
%% looks for it among the pinned ones; `{gap, Offset}': it is not there either.
-spec read(reader(), pos_integer()) -> {[chunk()], more | end_of_log | wait, reader()} | {error, {gap, offset()} | term()}.
read(#reader{source = #files{}} = Reader, Max) ->
    read(Reader, Max, []);
read(#reader{source = #pinned{}} = Reader, _Max) ->
    read_pinned(Reader).

read(Reader, 0, Acc) ->
    {lists:reverse(Acc), more, Reader};
read(#reader{source = #files{held = none} = Files} = Reader, N, Acc) ->
    case read_header(Files) of
        {ok, Header, Log} -> take(Header, Reader#reader{source = Files#files{log = Log}}, N, Acc);
        {end_of_stream, Log} -> {lists:reverse(Acc), end_of_log, Reader#reader{source = Files#files{log = Log}}};
        {error, _} = Error when Acc =:= [] -> Error;
        %% What was read before is good; the error comes again with the next call.
        {error, _} -> {lists:reverse(Acc), more, Reader}
    end;
read(#reader{source = #files{held = Header}} = Reader, N, Acc) ->
    take(Header, Reader, N, Acc).

%% osiris lets a data reader see chunks that a majority does not have yet. A new leader may throw those away, so none is
%% handed out; osiris cannot step back either, hence the held header.
take(#{chunk_id := ChunkId} = Header, #reader{source = Files} = Reader0, N, Acc) ->
    case is_committed(Header, Reader0) of
        true ->
            {Chunk, Reader} = chunk(Header, Reader0),
            read(Reader, N - 1, [Chunk | Acc]);
        false ->
            {lists:reverse(Acc), end_of_log, Reader0#reader{source = Files#files{held = Header}, next = ChunkId}}
    end.

is_committed(#{chunk_id := ChunkId}, #reader{context = Context}) ->
    rabbitmq_stream_s3_nif:chunk_is_committed(ChunkId, committed_chunk_id(Context)).

chunk(#{chunk_id := ChunkId, position := Position, num_records := NumRecords} = Header, #reader{source = Files} = Reader) ->
    #files{segment = Segment0} = Files,
    %% A segment is named after its first chunk, which follows the file's header.
    Segment =
        case Position of
            ?SEGMENT_HEADER_SIZE -> ChunkId;
            _ -> Segment0
        end,
    Kept = maps:with([chunk_id, timestamp, num_records, data_size, position, next_position, crc], Header),
    Source = Files#files{segment = Segment, held = none},
    {Kept#{segment_offset => Segment}, Reader#reader{source = Source, next = ChunkId + NumRecords}}.

read_pinned(#reader{source = #pinned{chunks = [], asked = none} = Pinned, context = Context} = Reader) ->
    Ref = rabbitmq_stream_s3_pins:headers(Context, Pinned#pinned.place, ?PINNED_BATCH),
    {[], wait, Reader#reader{source = Pinned#pinned{asked = Ref}}};
read_pinned(#reader{source = #pinned{chunks = []}} = Reader) ->
    {[], wait, Reader};
read_pinned(#reader{source = #pinned{chunks = Chunks} = Pinned, next = Next} = Reader) ->
    %% Committed or not: retention does not care.
    case lists:splitwith(fun(Chunk) -> is_committed(Chunk, Reader) end, Chunks) of
        {[], _} ->
            {[], end_of_log, Reader};
        {Committed, Rest} ->
            After = lists:foldl(fun(#{chunk_id := Id, num_records := N}, _) -> Id + N end, Next, Committed),
            {Committed, more, Reader#reader{source = Pinned#pinned{chunks = Rest}, next = After}}
    end.

%% @doc Takes the message that a reader waits for: then it can be read on. `not_mine': it waits for another one, or for none.
-spec answered(term(), reader()) -> {ok, reader()} | {error, {gap, offset()} | term()} | not_mine.
answered({pins_result, Ref, Answer}, #reader{source = #pinned{asked = Ref} = Pinned} = Reader) ->
    pinned_chunks(Answer, Pinned#pinned{asked = none}, Reader);
answered(_Message, _Reader) ->
    not_mine.

pinned_chunks({ok, [_ | _] = Chunks, Place}, Pinned, Reader) ->
    {ok, Reader#reader{source = Pinned#pinned{place = Place, chunks = Chunks}}};
pinned_chunks({ok, [], _Place}, _Pinned, #reader{next = Next} = Reader) ->
    next_segment(Next, Reader);
pinned_chunks(not_pinned, _Pinned, #reader{next = Next}) ->
    {error, {gap, Next}};
pinned_chunks({error, Text}, _Pinned, _Reader) ->
    {error, {unreadable_header, Text}}.

%% Osiris' own files, as soon as they join on.
next_segment(Next, #reader{context = Context} = Reader) ->
    case open_files(Context, Next) of
        {ok, Files} -> {ok, Reader#reader{source = Files}};
        {error, _} -> {ok, Reader#reader{source = #pinned{place = Next}}}
    end.

read_header(#files{log = Log}) ->
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
