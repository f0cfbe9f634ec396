%% @doc What a reader finds out before it reads, and how it makes a root current: the blocking work of its tasks. Each
%% function takes the moment (monotonic milliseconds) at which the caller loses interest.
-module(rabbitmq_stream_s3_replica_reader_resolve).

-include("rabbitmq_stream_s3.hrl").

-export([resolve/3, persisted/3, persist/5]).
-export_type([resolved/0]).

-define(CHUNK_HEADER_SIZE, 48).
-define(OBJECT_HEADER_SIZE, 8).
%% How long one attempt to write to the metadata store may take: an election is over by then.
-define(METADATA_ATTEMPT_MS, 10000).

-type stream_id() :: binary().
-type moment() :: integer().
-type entry() :: rabbitmq_stream_s3_metadata:entry().
-type resolved() :: #{
    context := rabbitmq_stream_s3_log:context(),
    epoch := non_neg_integer(),
    %% With the revision of the metadata store.
    manifest := #manifest{},
    %% Which root object it came from.
    root := entry() | none,
    %% Of the local log, taken after the manifest.
    range := rabbitmq_stream_s3_nif:local_log(),
    %% Whether the newest tiered chunk is the local log's.
    timeline := same | different | unverifiable,
    atom() => term()
}.

%% @doc Anchors the stream, then reads its persisted manifest and compares it with the local log. `{fenced, Epoch}': a writer
%% of a later epoch has been there. At most three writes and two reads of the metadata store, and a handful of requests.
-spec resolve(stream_id(), Writer :: pid(), moment()) -> {ok, resolved()} | {error, {fenced, non_neg_integer()} | term()}.
resolve(StreamId, Writer, Until) ->
    steps(#{stream => StreamId, writer => Writer, until => Until}, [
        fun context/1, fun pins/1, fun anchor/1, fun manifest/1, fun discards/1, fun timeline/1, fun range/1
    ]).

%% Each step adds what it finds out to what is known, or ends it with an error.
steps(Known, []) ->
    {ok, Known};
steps(Known, [Step | Steps]) ->
    case Step(Known) of
        {ok, Found} -> steps(maps:merge(Known, Found), Steps);
        {error, _} = Error -> Error
    end.

context(#{writer := Writer, until := Until}) ->
    case rabbitmq_stream_s3_log:context(Writer, left(Until)) of
        {ok, Context} ->
            case rabbitmq_stream_s3_log:epoch(Context) of
                {ok, Epoch} -> {ok, #{context => Context, epoch => Epoch}};
                {error, _} = Error -> Error
            end;
        {error, _} = Error ->
            Error
    end.

%% As soon as there is a log: while the store or the metadata store does not answer, retention goes on.
pins(#{stream := StreamId, writer := Writer, context := Context, until := Until}) ->
    case rabbitmq_stream_s3_pins:enter(StreamId, Context, Writer, left(Until)) of
        ok -> {ok, #{}};
        {error, Reason} -> {error, {pins, Reason}}
    end.

%% Before anything else: afterwards objects may be written.
anchor(#{stream := StreamId, context := #{reference := Reference}, until := Until}) ->
    case rabbitmq_stream_s3_metadata:anchor(StreamId, Reference, left(Until)) of
        ok -> {ok, #{}};
        {error, not_found} -> {error, no_queue};
        {error, Reason} -> {error, {metadata, Reason}}
    end.

range(#{context := Context, until := Until}) ->
    case rabbitmq_stream_s3_log:range(Context) of
        {ok, Range} -> prolonged(rabbitmq_stream_s3_pins:joining(Context, Range, left(Until)));
        {error, _} = Error -> Error
    end.

prolonged({ok, Range}) -> {ok, #{range => Range}};
prolonged({error, Reason}) -> {error, {pins, Reason}}.

manifest(#{stream := StreamId, epoch := Epoch, until := Until}) ->
    Answer = rabbitmq_stream_s3_metadata:get(StreamId, left(Until)),
    {CachedRevision, Cached} = cached(StreamId),
    case rabbitmq_stream_s3_nif:resolve_manifest(known(Answer), CachedRevision, Epoch) of
        empty -> {ok, #{root => none, manifest => #manifest{}}};
        use_cache -> {ok, #{root => element(2, Answer), manifest => Cached}};
        {fetch, Uid, OfEpoch, Revision} -> fetch(StreamId, {Uid, OfEpoch}, Revision, Until);
        {superseded, Later} -> {error, {fenced, Later}};
        retry -> {error, {metadata, element(2, Answer)}}
    end.

%% While nothing is persisted there is nothing to be discarded, and whoever persists first ends what this writer is about to do.
discards(#{root := none}) ->
    {ok, #{}};
discards(#{stream := StreamId, epoch := Epoch, until := Until}) ->
    case rabbitmq_stream_s3_metadata:claim_discards(StreamId, Epoch, left(Until)) of
        ok -> {ok, #{}};
        {error, {fenced, _Later}} = Fenced -> Fenced;
        {error, Reason} -> {error, {metadata, Reason}}
    end.

%% @doc The persisted manifest of a stream with its revision, and the epoch of the writer that persisted it, for those who only
%% read; `unchanged' if its revision is the one they have. One read of the metadata store and one request.
-spec persisted(stream_id(), Have :: non_neg_integer() | undefined, timeout()) ->
    {ok, #manifest{}, Epoch :: non_neg_integer()} | unchanged | {error, term()}.
persisted(StreamId, Have, Timeout) ->
    Until = erlang:monotonic_time(millisecond) + Timeout,
    Answer = rabbitmq_stream_s3_metadata:get(StreamId, Timeout),
    case rabbitmq_stream_s3_nif:resolve_manifest(known(Answer), Have, epoch_of(Answer)) of
        use_cache ->
            unchanged;
        {fetch, Uid, Epoch, Revision} ->
            case fetch(StreamId, {Uid, Epoch}, Revision, Until) of
                {ok, #{manifest := Manifest}} -> {ok, Manifest, Epoch};
                {error, _} = Error -> Error
            end;
        %% Nothing is persisted yet, or the stream is deleted; or it is not known.
        NotThere when NotThere =:= empty; NotThere =:= retry ->
            {error, {metadata, element(2, Answer)}}
    end.

%% Who only reads is fenced by nobody.
epoch_of({ok, {_Uid, Epoch}, _Revision}) -> Epoch;
epoch_of({error, _}) -> 0.

known({ok, {Uid, Epoch}, Revision}) -> {present, Uid, Epoch, Revision};
known({error, not_found}) -> absent;
known({error, _}) -> failed.

cached(StreamId) ->
    case rabbitmq_stream_s3_manifest_cache:get(StreamId) of
        {resolved, Manifest, Revision} -> {Revision, Manifest};
        pending -> {undefined, none};
        unknown -> {undefined, none}
    end.

fetch(StreamId, {Uid, Epoch} = Root, Revision, Until) ->
    Answer = rabbitmq_stream_s3_store:get_root(StreamId, Epoch, Uid, left(Until)),
    case rabbitmq_stream_s3_nif:resolve_root(fetched(Answer), Revision) of
        {ok, Manifest} -> {ok, #{root => Root, manifest => Manifest}};
        retry -> {error, {store, element(2, Answer)}}
    end.

fetched({ok, #manifest{}} = Ok) -> Ok;
fetched({error, {not_found, _}}) -> not_found;
fetched({error, _}) -> failed.

%% --- timeline --------------------------------------------------------------------------------------------------------

%% Offsets alone do not tell: a log that was lost and written anew has the same ones.
timeline(#{manifest := #manifest{entries = <<>>, next_offset = 0}}) ->
    {ok, #{timeline => unverifiable}};
timeline(#{manifest := #manifest{entries = <<>>}} = Known) ->
    timeline(Known#{tiered => undefined}, [fun continuation/1]);
timeline(Known) ->
    Chunk = [fun newest_fragment/1, fun last_position/1, fun tiered_chunk/1, fun local_chunk/1],
    case steps(Known, Chunk) of
        {ok, Found} -> timeline(Found, [fun newest_chunk/1, fun range/1, fun beginning/1, fun continuation/1]);
        {error, _} = Error -> Error
    end.

%% What one look cannot tell, the next one may.
timeline(#{timeline := Told} = Known, Looks) when Told =/= unverifiable; Looks =:= [] ->
    {ok, maps:with([timeline], Known)};
timeline(Known, [Look | Looks]) ->
    case steps(Known, [Look]) of
        {ok, Found} -> timeline(Found, Looks);
        {error, _} = Error -> Error
    end.

newest_chunk(#{tiered := Tiered, local := Local}) ->
    {ok, #{timeline => rabbitmq_stream_s3_nif:check_timeline(Tiered, Local)}}.

beginning(#{manifest := #manifest{next_offset = End}, range := #{first := First}}) ->
    {ok, #{timeline => rabbitmq_stream_s3_nif:check_beginning(End, First)}}.

%% A tier that ends inside a chunk of the log could never be gone on with.
continuation(#{context := Context, tiered := Tiered, manifest := #manifest{next_offset = End}, until := Until}) ->
    case identity(Context, End, Until) of
        {ok, Next} -> {ok, #{timeline => rabbitmq_stream_s3_nif:check_continuation(Tiered, Next)}};
        {error, _} = Error -> Error
    end.

newest_fragment(#{stream := StreamId, manifest := #manifest{entries = Entries}, until := Until}) ->
    newest_fragment(StreamId, Entries, Until).

newest_fragment(StreamId, Entries, Until) ->
    case binary:part(Entries, byte_size(Entries), -?ENTRY_B) of
        ?ENTRY(Offset, _, _, ?MANIFEST_KIND_FRAGMENT, _, Uid) ->
            {ok, #{key => rabbitmq_stream_s3_store:fragment_key(StreamId, Offset, Uid)}};
        ?ENTRY(Offset, _, _, Kind, _, Uid) ->
            case rabbitmq_stream_s3_store:get_group(StreamId, Kind, Offset, Uid, left(Until)) of
                {ok, Inner} -> newest_fragment(StreamId, Inner, Until);
                {error, Error} -> {error, {store, Error}}
            end
    end.

%% Its last index record ends the object.
last_position(#{key := Key, until := Until}) ->
    case rabbitmq_stream_s3_store:get(Key, {last, ?INDEX_RECORD_B}, left(Until)) of
        {ok, #{body := <<ChunkId:64, _Timestamp:64/signed, Position:32>>}} ->
            {ok, #{chunk_id => ChunkId, position => ?OBJECT_HEADER_SIZE + Position}};
        {ok, #{body := _}} ->
            {error, {damaged_object, Key}};
        {error, Error} ->
            {error, {store, Error}}
    end.

tiered_chunk(#{key := Key, chunk_id := ChunkId, position := Start, until := Until}) ->
    case rabbitmq_stream_s3_store:get(Key, {Start, Start + ?CHUNK_HEADER_SIZE}, left(Until)) of
        %% Magic and version, type, entries, records, timestamp, epoch, chunk id, checksum; sizes follow.
        {ok, #{body := <<5:4, 0:4, _:8, _:16, _:32, _:64, Epoch:64, ChunkId:64, Crc:32, _/binary>>}} ->
            {ok, #{tiered => #{chunk_id => ChunkId, epoch => Epoch, crc => Crc}}};
        {ok, #{body := _}} ->
            {error, {damaged_object, Key}};
        {error, Error} ->
            {error, {store, Error}}
    end.

local_chunk(#{context := Context, chunk_id := ChunkId, until := Until}) ->
    case identity(Context, ChunkId, Until) of
        {ok, Local} -> {ok, #{local => Local}};
        {error, _} = Error -> Error
    end.

%% Of what the log has trimmed something may be pinned.
identity(Context, ChunkId, Until) ->
    case rabbitmq_stream_s3_log:identity(Context, ChunkId) of
        {ok, trimmed} -> pinned_identity(rabbitmq_stream_s3_log:range(Context), Context, ChunkId, Until);
        Answer -> Answer
    end.

pinned_identity({ok, #{first := First}}, Context, ChunkId, Until) when is_integer(First), ChunkId < First ->
    case rabbitmq_stream_s3_pins:identity(Context, ChunkId, left(Until)) of
        {ok, Pinned} -> {ok, Pinned};
        {error, Reason} -> {error, {pins, Reason}}
    end;
%% The log does not reach that far yet.
pinned_identity({ok, _Range}, _Context, _ChunkId, _Until) ->
    {ok, trimmed};
pinned_identity({error, _} = Error, _Context, _ChunkId, _Until) ->
    Error.

%% --- persist ---------------------------------------------------------------------------------------------------------

%% @doc Stores the manifest's root and makes it the current one, if the revision is still the expected one. A root that
%% lost is deleted; one of which it is not known whether it won is left alone. Any other error comes with its cause. If the
%% manifest discards the one before it, since that moment, this is noted first.
-spec persist(stream_id(), Epoch :: non_neg_integer(), #manifest{}, {Expected, DiscardedMs :: integer() | none}, moment()) ->
    {ok, entry(), Revision :: pos_integer()} | {error, conflict | not_found | {store | metadata, term()}}
when
    Expected :: non_neg_integer().
persist(StreamId, Epoch, Manifest, {Expected, none}, Until) ->
    store_root(StreamId, Epoch, Manifest, Expected, Until);
persist(StreamId, Epoch, Manifest, {Expected, DiscardedMs}, Until) ->
    case rabbitmq_stream_s3_metadata:discard(StreamId, DiscardedMs, Epoch, min(left(Until), ?METADATA_ATTEMPT_MS)) of
        ok -> store_root(StreamId, Epoch, Manifest, Expected, Until);
        {error, Lost} when Lost =:= not_found; Lost =:= conflict -> {error, Lost};
        {error, Reason} -> {error, {metadata, Reason}}
    end.

store_root(StreamId, Epoch, Manifest, Expected, Until) ->
    case rabbitmq_stream_s3_store:put_root(StreamId, Epoch, Manifest, left(Until)) of
        {ok, Uid} ->
            ok = rabbitmq_stream_s3_counters:add({stream, StreamId}, roots_created),
            make_current(StreamId, {Uid, Epoch}, Expected, Until);
        {error, Error} ->
            {error, {store, Error}}
    end.

make_current(StreamId, {Uid, Epoch} = Entry, Expected, Until) ->
    Left = left(Until),
    case rabbitmq_stream_s3_metadata:put(StreamId, Entry, Expected, min(Left, ?METADATA_ATTEMPT_MS)) of
        {ok, _Old, Revision} when Revision > Expected ->
            {ok, Entry, Revision};
        {ok, _Old, Revision} ->
            %% The store does not count a write of what it holds already: this uid was drawn twice in a row.
            {error, {metadata, {unchanged, Revision}}};
        {error, {conflict, _Stored}} ->
            %% Revisions only grow, so no attempt of ours can win any more.
            ok = rabbitmq_stream_s3_reaper:delete(StreamId, [{root, rabbitmq_stream_s3_store:root_key(StreamId, Epoch, Uid)}]),
            {error, conflict};
        {error, not_found} ->
            {error, not_found};
        {error, timeout} when Left > ?METADATA_ATTEMPT_MS ->
            %% It may have won. With the same entry the next attempt recognises itself.
            make_current(StreamId, Entry, Expected, Until);
        {error, Reason} ->
            {error, {metadata, Reason}}
    end.

left(Until) ->
    max(0, Until - erlang:monotonic_time(millisecond)).
