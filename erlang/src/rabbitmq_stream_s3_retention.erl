%% @doc What may go, because it is old or because it is somewhere else: the oldest fragments of a remote tier, and segments of a
%% local log that the tier has. The blocking work of a reader's tasks.
-module(rabbitmq_stream_s3_retention).

-include("rabbitmq_stream_s3.hrl").

-export([remote/4, objects/2, local/4, local_replica/3, settle/0]).
-export_type([limit/0, decision/0]).

%% Deletes nothing by itself, yet makes osiris call the function that it is given.
-define(NO_LIMIT, [{max_bytes, 1 bsl 62}]).
%% Of osiris' counters of a log.
-define(FIRST_OFFSET, 2).
-define(FIRST_TIMESTAMP, 3).
-define(SEGMENTS, 5).
-define(SETTLE_TIMEOUT_MS, 10000).

-type stream_id() :: binary().
-type offset() :: non_neg_integer().
-type limit() :: rabbitmq_stream_s3_manifest:spec().
%% An edit with what becomes garbage once it is persisted, and why not more is decided.
-type decision() :: {unchanged | {#edit{}, [rabbitmq_stream_s3_manifest:object_ref()]}, complete | {incomplete, Reason :: term()}}.

%% --- the remote tier -------------------------------------------------------------------------------------------------

%% @doc What these limits drop of a persisted manifest, until the given moment (monotonic milliseconds). One request for each group
%% that is consumed in part or as a whole.
-spec remote(stream_id(), #manifest{}, [limit()], Until :: integer()) -> decision().
remote(StreamId, Manifest, Limits, Until) ->
    Now = erlang:system_time(millisecond),
    decide(rabbitmq_stream_s3_manifest:evaluate_remote_retention(Manifest, Limits, Now), StreamId, Until).

decide({fetch, #group_ref{offset = Offset, kind = Kind, uid = Uid}, Cont}, StreamId, Until) ->
    case rabbitmq_stream_s3_store:get_group(StreamId, Kind, Offset, Uid, left(Until)) of
        {ok, Entries} ->
            decide(rabbitmq_stream_s3_manifest:resume({ok, Entries}, Cont), StreamId, Until);
        {error, Error} ->
            {rabbitmq_stream_s3_manifest:resume({error, Error}, Cont), {incomplete, {store, Error}}}
    end;
decide(unchanged, _StreamId, _Until) ->
    {unchanged, complete};
decide({#edit{}, _Garbage} = Drop, _StreamId, _Until) ->
    {Drop, complete}.

%% @doc The objects that a decision has made garbage, as the reaper takes them.
-spec objects(stream_id(), [rabbitmq_stream_s3_manifest:object_ref()]) -> [rabbitmq_stream_s3_reaper:object()].
objects(StreamId, Garbage) ->
    [object(StreamId, Ref) || Ref <- Garbage].

object(StreamId, #fragment_ref{offset = Offset, uid = Uid}) ->
    {fragments_deleted, rabbitmq_stream_s3_store:fragment_key(StreamId, Offset, Uid)};
object(StreamId, #group_ref{offset = Offset, kind = Kind, uid = Uid}) ->
    {groups_deleted, rabbitmq_stream_s3_store:group_key(StreamId, Kind, Offset, Uid)}.

%% --- the local log ---------------------------------------------------------------------------------------------------

%% @doc Deletes the segments of a writer's log that the persisted manifest, which ends at `PersistedNext', covers as a whole and that no
%% replica has still to read. Never the last one, which is being written. Answers how many; one call of the writer.
%%
%% The work is done where osiris does its own, so the two never meet in one directory.
-spec local(rabbitmq_stream_s3_log:context(), Writer :: pid(), PersistedNext :: offset(), Until :: integer()) ->
    {ok, Deleted :: non_neg_integer()} | {error, term()}.
local(#{reference := Reference} = Context, Writer, PersistedNext, Until) ->
    case rabbitmq_stream_s3_log:replica_positions(Writer) of
        {ok, Replicas} -> trim_log(Context, {osiris_writer, Reference}, fun() -> PersistedNext end, Replicas, Until);
        {error, _} = Error -> Error
    end.

%% @doc The same of the log of a replica, which nobody copies. Nothing goes that the replica does not know to be committed, and nothing
%% by a manifest that another writer has persisted than the one that the log follows when it comes to it: that may be of records which
%% were lost since.
-spec local_replica(Replica :: pid(), {PersistedNext :: offset(), PersistedIn :: non_neg_integer()}, Until :: integer()) ->
    {ok, Deleted :: non_neg_integer()} | {error, term()}.
local_replica(Replica, Persisted, Until) ->
    case rabbitmq_stream_s3_log:replica_context(Replica, left(Until)) of
        {ok, #{reference := Reference} = Context} ->
            trim_log(Context, {osiris_replica, Reference}, fun() -> replica_floor(Context, Persisted) end, [], Until);
        {error, _} = Error ->
            Error
    end.

replica_floor(Context, {PersistedNext, PersistedIn}) ->
    Committed = max(0, rabbitmq_stream_s3_log:committed_chunk_id(Context)),
    case rabbitmq_stream_s3_log:replica_epoch(Context) of
        {ok, Epoch} -> rabbitmq_stream_s3_nif:replica_floor(PersistedNext, PersistedIn, Epoch, Committed);
        {error, unknown_epoch} -> 0
    end.

trim_log(#{name := Name, dir := Dir, shared := Shared}, CounterId, Floor, Behind, Until) ->
    Owner = self(),
    Tag = make_ref(),
    Trim = fun(_Evaluated) ->
        Owner ! {Tag, trim(Dir, Shared, CounterId, Floor, Behind)},
        ok
    end,
    %% A key of our own, which no stream can have as its name: under that one it would take the place of osiris' own.
    ok = osiris_retention:eval(<<"rabbitmq_stream_s3 ", Name/binary>>, Dir, ?NO_LIMIT, Trim),
    receive
        {Tag, Result} -> Result
    after left(Until) -> {error, timeout}
    end.

%% Runs in osiris' process. Whatever is raised there takes all streams of the node down.
trim(Dir, Shared, CounterId, Floor, Replicas) ->
    try
        Segments = rabbitmq_stream_s3_log:index_files(Dir),
        Firsts = [First || {First, _File} <- Segments],
        Count = rabbitmq_stream_s3_nif:deletable_segments(Firsts, Floor(), Replicas),
        Result = delete_segments(lists:sublist(Segments, Count), 0),
        _ = Count > 0 andalso publish(osiris_log:evaluate_retention(Dir, []), Shared, osiris_counters:fetch(CounterId)),
        Result
    catch
        Class:Reason -> {error, {Class, Reason}}
    end.

%% The index first, as osiris does it: a segment without an index is removed at the next start, an index without a segment
%% is an error.
delete_segments([], Deleted) ->
    {ok, Deleted};
delete_segments([{_First, Index} | Segments], Deleted) ->
    Segment = [filename:rootname(unicode:characters_to_list(Index)), ".segment"],
    case delete_files([Index, lists:flatten(Segment)]) of
        ok -> delete_segments(Segments, Deleted + 1);
        {error, _} = Error -> Error
    end.

delete_files([]) ->
    ok;
delete_files([File | Files]) ->
    case file:delete(File, [raw]) of
        ok -> delete_files(Files);
        {error, enoent} -> delete_files(Files);
        {error, Posix} -> {error, {delete_failed, File, Posix}}
    end.

%% Without it readers that stand in what is gone would wait for ever.
publish({{First, _Last}, FirstTimestamp, Segments}, Shared, Counter) when is_integer(First), is_integer(FirstTimestamp) ->
    ok = osiris_log_shared:set_first_chunk_id(Shared, First),
    case Counter of
        undefined ->
            ok;
        _ ->
            ok = counters:put(Counter, ?FIRST_OFFSET, First),
            ok = counters:put(Counter, ?FIRST_TIMESTAMP, FirstTimestamp),
            ok = counters:put(Counter, ?SEGMENTS, Segments)
    end;
publish(_Empty, _Shared, _Counter) ->
    ok.

%% @doc Waits until osiris runs no function of this module any more. To be called when those who ask for local retention
%% have ended and before the code may go: osiris does not outlive a function whose code is gone.
-spec settle() -> ok.
settle() ->
    %% Within a batch it answers before it works. So the answer to the second call, which comes into a later batch, says that the
    %% first one's is done.
    try
        ok = gen_server:call(osiris_retention, settle, ?SETTLE_TIMEOUT_MS),
        ok = gen_server:call(osiris_retention, settle, ?SETTLE_TIMEOUT_MS)
    catch
        %% It does not run, or is busy with other streams for long. Ours has ended with its process anyway.
        exit:_ -> ok
    end.

left(Until) ->
    max(0, Until - erlang:monotonic_time(millisecond)).
