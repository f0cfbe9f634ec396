%% @doc What the native library answers, one function each; nothing is decided here. `native/nif/src/lib.rs' names the
%% scheduler and the bound of each.
%%
%% Calls of the pure part answer at once and raise `{badarg, Text}' on misuse, with a text that names the field; the
%% modules in front of this one turn that into `badarg' with error information. Calls of the runtime part hand work to
%% threads of the library; their answers come as messages. Any term serves as `Ref'.
%%
%% This module must stay out of `modules' in the application resource: RabbitMQ deletes the modules of a plugin that is
%% disabled, and a library with threads cannot be loaded a second time. A new library therefore takes a restart of the node.
-module(rabbitmq_stream_s3_nif).

-include("rabbitmq_stream_s3.hrl").
-include("rabbitmq_stream_s3_nif.hrl").

-export([misuse/2, format_error/2]).
-export([abi_version/0]).
-export([assembly_new/2, assembly_add_chunk/2, assembly_add_chunks/2, assembly_is_cut/1, assembly_metadata/1]).
-export([assembly_index_records/1, assembly_info/1]).
-export([core_init/3, core_init_reset/5]).
-export([core_manifest/1, core_persisted_manifest/1, core_rebalance_in_flight/1, core_format_state/1]).
-export([core_fragment_cut/3, core_transfer_complete/3, core_transfer_failed/3]).
-export([core_group_upload_complete/2, core_group_upload_failed/2, core_persist_complete/3, core_persist_failed/2]).
-export([core_tick/2, core_await_offset/3, core_retention_started/1, core_retention_complete/2, core_retention_failed/2]).
-export([manifest_new_edit/1, manifest_apply_edit/2, manifest_is_well_formed/1]).
-export([manifest_encode_root/1, manifest_decode_root/1, manifest_encode_group/2, manifest_decode_group/1]).
-export([manifest_lookup_offset/2, manifest_lookup_timestamp/2, manifest_evaluate_remote_retention/3, manifest_resume/2]).
-export([chunk_is_committed/2, compare_log/2, start_on_other_timeline/2, check_timeline/2, check_beginning/2, check_continuation/2, error_class/1, outlook/2]).
-export([resolve_manifest/3, resolve_root/2, claim_discard/3]).
-export([retry_delay/4, valid_stream_id/1, object_key/3]).
-export([may_delete/2, deletable_segments/3, replica_floor/4, gc_verdict/3, key_prefix/2, parse_key/2]).
-export([accept_edits/5]).
-export([adoption_begin/4, adoption_next/1, adoption_found/2]).
-export([store_open/1, store_probe/3, store_put/6, store_get/5, store_delete/4, store_list/6, store_cancel/1, store_metrics/0]).
-export([put_root/6, get_root/6, put_group/6, get_group/7]).
-export([history_new/1, history_handle/3, history_status/1]).
-export([history_put/6, history_examine/6, history_get/4, history_body_bytes/0]).
-export([history_key/2, history_prefix/2, valid_run_id/1, history_postpone/1, history_may_sweep/3]).
-export([governor_start/1, governor_submit/5, governor_finished/2, governor_cancel/2, governor_set_rate/3]).
-export([governor_set_concurrency/2, governor_stop/3, governor_info/1]).
-export([pins_enter/6, pins_hold/4, pins_persisted/2, pins_look/1, pins_leave/2, pins_sweep/0, pins_clear/2]).
-export([pins_joining/4, pins_identity/4, pins_headers/5, pins_info/0]).

-export_type([assembly/0, core/0, store/0, governor/0, chunk/0, meta/0, effect/0, reason/0, op/0, error_kind/0]).
-export_type([local_log/0, start/0, chunk_identity/0]).
-export_type([discard_note/0, gc_stream/0, gc_verdict/0, parsed_key/0]).
-export_type([adoption/0, adoptable/0]).
-export_type([pins_info/0, pins_place/0]).
-export_type([history_machine/0, history_event/0, history_effect/0, history_listing/0, history_put/0, history_object/0]).
-export_type([ref/0, uid/0, offset/0, stream_id/0, cont/0, lookup/0, part/0]).

-ifdef(PANICS).
-export([panic_in_call/0, panic_in_task/3]).
-endif.
-on_load(on_load/0).

%% Handles. Each is a value or a shared object behind a reference; garbage collection releases it.
-opaque assembly() :: reference().
-opaque core() :: reference().
-opaque adoption() :: reference().
-opaque store() :: reference().
-opaque governor() :: reference().
-opaque history_machine() :: reference().
-type cont() :: term().

%% What a caller uses to recognise an answer.
-type ref() :: term().
-type uid() :: 0..16#FFFFFFFF.
-type offset() :: non_neg_integer().
-type stream_id() :: binary().
-type chunk() :: #{
    chunk_id := offset(),
    timestamp := integer(),
    num_records := non_neg_integer(),
    data_size := non_neg_integer(),
    position := non_neg_integer(),
    next_position := non_neg_integer(),
    segment_offset := offset(),
    crc := non_neg_integer(),
    _ => _
}.
-type meta() :: #{
    first_offset := offset(),
    first_timestamp := integer(),
    last_timestamp := integer(),
    next_offset := offset(),
    size := non_neg_integer(),
    num_chunks => non_neg_integer(),
    spans => [{SegmentOffset :: offset(), StartPos :: non_neg_integer(), EndPos :: non_neg_integer()}],
    _ => _
}.
%% The log covers `[first, next)'; `first' is undefined while it is empty. Deleted segments that are still open begin at
%% `pinned_first', and reach up to `first' without a gap.
-type local_log() :: #{first := offset() | undefined, next := offset(), pinned_first => offset() | undefined}.
-type start() ::
    {fresh, offset()}
    | {resume, offset()}
    | {remote_ahead, Discarded :: {First :: offset(), Next :: offset()}, At :: offset()}
    | {local_ahead, Discarded :: {First :: offset(), Next :: offset()}, At :: offset()}
    | wait_for_log.
-type chunk_identity() :: #{chunk_id := offset(), epoch := non_neg_integer(), crc := non_neg_integer(), _ => _}.
-type parsed_key() ::
    {fragment, stream_id(), offset(), uid()}
    | {root, stream_id(), Epoch :: non_neg_integer(), uid()}
    | {group, stream_id(), Kind :: 1..3, offset(), uid()}
    | {history, RunId :: binary(), Seq :: non_neg_integer()}
    | unknown.
%% Since when a tier is discarded (milliseconds since the Unix epoch; `undefined': none was), and the epoch of the writer that says so.
-type discard_note() :: {AtMs :: integer() | undefined, Epoch :: non_neg_integer()}.
%% What is known of a stream, and how one of its objects stands to it: the last read must be younger than the listing that
%% showed the object. Ages are in milliseconds, by one clock; `undefined' where that is not known, or where it never was.
-type gc_stream() ::
    unknown
    | deleted
    | never_persisted
    | {live, #{
        epoch := non_neg_integer(),
        root_uid := uid(),
        root_age_ms := non_neg_integer() | undefined,
        next_offset := offset(),
        listed := boolean() | undefined,
        discarded := {AgeMs :: non_neg_integer(), Epoch :: non_neg_integer()} | undefined
    }}.
-type gc_verdict() ::
    {keep, not_ours | unknown | young | in_use | ahead | grace}
    | {delete, orphan | discarded_tier | stream_deleted, optional | always}.
%% A root that may be taken, why it, and the newer ones that cannot be.
-type adoptable() :: #{
    root := {uid(), Epoch :: non_neg_integer()},
    range := {First :: offset(), Next :: offset()},
    bytes := non_neg_integer(),
    fragments := non_neg_integer(),
    groups := non_neg_integer(),
    why := binary(),
    passed_over := [{{uid(), Epoch :: non_neg_integer()}, Why :: binary()}]
}.
-type effect() ::
    {submit_transfer, ref(), Stream :: term(), Dir :: term(), meta()}
    | {resubmit_transfer, ref(), Stream :: term(), Dir :: term(), meta()}
    | {resubmit_transfer_delayed, ref(), Stream :: term(), Dir :: term(), meta(), Reason :: term()}
    | {start_persist, #manifest{}, Epoch :: non_neg_integer(), Reference :: term(), ExpectedRevision :: non_neg_integer(), [#edit{}]}
    | {start_persist_timer, Ms :: non_neg_integer()}
    | cancel_persist_timer
    | {upload_group, Stream :: term(), Kind :: 1..3, Entries :: binary(), Pos :: non_neg_integer(), Len :: non_neg_integer()}
    | {update_range, FirstOffset :: offset(), NextOffset :: offset()}
    | {broadcast, Stream :: term(), [#edit{}]}
    | {evaluate_retention, Stream :: term(), Dir :: term()}
    | {reply_waiters, [{From :: term(), ok}]}
    | reinitialize
    | stop.
-type reason() ::
    {http, 100..999}
    | timeout
    | connection
    | throttled
    | checksum_mismatch
    | {corrupt_chunk, offset()}
    | {open_failed, File :: binary(), Posix :: atom()}
    | {panic, Text :: binary()}
    | cancelled
    | clock_skew
    | expired_token
    | write_conflict
    | other.
-type op() :: open | put | get | delete | list | probe.
-type error_kind() :: transient | conflict | not_found | corrupt | closed | invalid.
-type lookup() :: {ok, #fragment_ref{}} | {fetch, #group_ref{}, cont()} | not_found.
%% Pinned segments of this node. `unlinked_bytes' are the sizes of those that have been deleted, which is disk that they still take;
%% `streams' has the same of each stream whose log has been entered. `unwatched' is how many logs the system does not watch, `problem' what
%% went wrong last, unless it has gone well since.
-type pins_info() :: #{
    segments := non_neg_integer(),
    unlinked_bytes := non_neg_integer(),
    streams := #{stream_id() => Bytes :: non_neg_integer()},
    unwatched := non_neg_integer(),
    problem := none | binary()
}.
%% Where to read: at a chunk of a pinned segment, or at a position of any one, where the chunk with this offset begins.
-type pins_place() :: offset() | {Segment :: offset(), Position :: non_neg_integer(), offset()}.
%% End is exclusive.
-type part() :: whole | {Start :: non_neg_integer(), End :: non_neg_integer()} | {last, pos_integer()}.

%% @private Raises `badarg' for a call that the library refused with `{badarg, Text}'; shells print the text.
-spec misuse(binary(), [term()]) -> no_return().
misuse(Text, Args) ->
    erlang:error(badarg, Args, [{error_info, #{module => ?MODULE, cause => #{general => Text}}}]).

%% @private
-spec format_error(term(), list()) -> map().
format_error(_Reason, [{_M, _F, _As, Info} | _]) ->
    case proplists:get_value(error_info, Info, #{}) of
        #{cause := #{general := Text}} -> #{general => Text};
        _ -> #{}
    end.

on_load() ->
    case erlang:load_nif(filename:join(priv_dir(), ?MODULE_STRING), ?ABI_VERSION) of
        ok -> ok;
        %% Who loads this module is only told that it failed: rabbitmq_stream_s3_library finds the cause here.
        {error, Cause} ->
            ok = persistent_term:put({?MODULE, not_loaded}, Cause),
            {error, Cause}
    end.

%% code:priv_dir/1 knows applications by the name of their folder. Started by hand from ebin, there may be none.
priv_dir() ->
    case code:priv_dir(rabbitmq_stream_s3) of
        {error, bad_name} -> beside_ebin();
        Dir -> Dir
    end.

beside_ebin() ->
    Ebin = filename:dirname(filename:absname(code:which(?MODULE))),
    filename:join(filename:dirname(Ebin), "priv").

%% Erlang's own habit for a stub: replaced when the library is loaded, which on_load sees to.
-define(NOT_LOADED, erlang:nif_error({not_loaded, ?MODULE})).

%% @doc Version of the interface between this module and the library.
-spec abi_version() -> pos_integer().
abi_version() -> ?NOT_LOADED.

%%% Fragment assembly

-spec assembly_new(TargetSize :: non_neg_integer(), Expected :: offset() | undefined) -> assembly().
assembly_new(_TargetSize, _Expected) -> ?NOT_LOADED.

%% Raises `{gap, Expected, Got}'.
-spec assembly_add_chunk(chunk(), assembly()) -> assembly().
assembly_add_chunk(_Chunk, _Assembly) -> ?NOT_LOADED.

%% Takes at most 128 chunks a call; a rest without a cut means: call again.
-spec assembly_add_chunks([chunk()], assembly()) -> {assembly(), Rest :: [chunk()]}.
assembly_add_chunks(_Chunks, _Assembly) -> ?NOT_LOADED.

-spec assembly_is_cut(assembly()) -> boolean().
assembly_is_cut(_Assembly) -> ?NOT_LOADED.

%% Raises badarg while there is no chunk.
-spec assembly_metadata(assembly()) -> meta().
assembly_metadata(_Assembly) -> ?NOT_LOADED.

-spec assembly_index_records(assembly()) -> binary().
assembly_index_records(_Assembly) -> ?NOT_LOADED.

-spec assembly_info(assembly()) -> map().
assembly_info(_Assembly) -> ?NOT_LOADED.

%%% Replica-reader core

-spec core_init(#manifest{}, Opts :: map(), NowMs :: integer()) -> {core(), [effect()]}.
core_init(_Manifest, _Opts, _NowMs) -> ?NOT_LOADED.

%% Starts on an empty manifest at `At' that is to replace this one. Effects: start_persist with `at_once', none otherwise.
-spec core_init_reset(#manifest{}, At :: offset(), When :: at_once | with_first_fragment, Opts :: map(), NowMs :: integer()) ->
    {core(), [effect()]}.
core_init_reset(_Manifest, _At, _When, _Opts, _NowMs) -> ?NOT_LOADED.

-spec core_manifest(core()) -> #manifest{}.
core_manifest(_Core) -> ?NOT_LOADED.

-spec core_persisted_manifest(core()) -> #manifest{}.
core_persisted_manifest(_Core) -> ?NOT_LOADED.

-spec core_rebalance_in_flight(core()) -> boolean().
core_rebalance_in_flight(_Core) -> ?NOT_LOADED.

-spec core_format_state(core()) -> map().
core_format_state(_Core) -> ?NOT_LOADED.

%% `Id' is the Ref of the effects; unique on the node.
-spec core_fragment_cut(meta(), Id :: non_neg_integer(), core()) -> {core(), [effect()]}.
core_fragment_cut(_Meta, _Id, _Core) -> ?NOT_LOADED.

-spec core_transfer_complete(Ref :: term(), uid(), core()) -> {core(), [effect()]}.
core_transfer_complete(_Ref, _Uid, _Core) -> ?NOT_LOADED.

-spec core_transfer_failed(Ref :: term(), Reason :: term(), core()) -> {core(), [effect()]}.
core_transfer_failed(_Ref, _Reason, _Core) -> ?NOT_LOADED.

-spec core_group_upload_complete(uid(), core()) -> {core(), [effect()]}.
core_group_upload_complete(_Uid, _Core) -> ?NOT_LOADED.

-spec core_group_upload_failed(Reason :: term(), core()) -> {core(), [effect()]}.
core_group_upload_failed(_Reason, _Core) -> ?NOT_LOADED.

-spec core_persist_complete(Revision :: non_neg_integer(), NowMs :: integer(), core()) -> {core(), [effect()]}.
core_persist_complete(_Revision, _NowMs, _Core) -> ?NOT_LOADED.

-spec core_persist_failed(conflict | not_found | term(), core()) -> {core(), [effect()]}.
core_persist_failed(_Reason, _Core) -> ?NOT_LOADED.

-spec core_tick(NowMs :: integer(), core()) -> {core(), [effect()]}.
core_tick(_NowMs, _Core) -> ?NOT_LOADED.

-spec core_await_offset(offset(), From :: term(), core()) -> {core(), [effect()]}.
core_await_offset(_Offset, _From, _Core) -> ?NOT_LOADED.

-spec core_retention_started(core()) -> core().
core_retention_started(_Core) -> ?NOT_LOADED.

-spec core_retention_complete(#edit{}, core()) -> {core(), [effect()]}.
core_retention_complete(_Edit, _Core) -> ?NOT_LOADED.

-spec core_retention_failed(Reason :: term(), core()) -> {core(), [effect()]}.
core_retention_failed(_Reason, _Core) -> ?NOT_LOADED.

%%% Manifest

-spec manifest_new_edit(#manifest{}) -> #edit{}.
manifest_new_edit(_Manifest) -> ?NOT_LOADED.

-spec manifest_apply_edit(#edit{}, #manifest{}) -> #manifest{}.
manifest_apply_edit(_Edit, _Manifest) -> ?NOT_LOADED.

-spec manifest_is_well_formed(#manifest{} | term()) -> boolean().
manifest_is_well_formed(_Manifest) -> ?NOT_LOADED.

-spec manifest_encode_root(#manifest{}) -> binary().
manifest_encode_root(_Manifest) -> ?NOT_LOADED.

-spec manifest_decode_root(binary()) -> {ok, #manifest{}} | {error, term()}.
manifest_decode_root(_Bin) -> ?NOT_LOADED.

-spec manifest_encode_group(Kind :: 1..3, Entries :: binary()) -> binary().
manifest_encode_group(_Kind, _Entries) -> ?NOT_LOADED.

-spec manifest_decode_group(binary()) -> {ok, {Kind :: 1..3, Entries :: binary()}} | {error, term()}.
manifest_decode_group(_Bin) -> ?NOT_LOADED.

-spec manifest_lookup_offset(#manifest{}, offset()) -> lookup().
manifest_lookup_offset(_Manifest, _Offset) -> ?NOT_LOADED.

-spec manifest_lookup_timestamp(#manifest{}, TimestampMs :: integer()) -> lookup().
manifest_lookup_timestamp(_Manifest, _TimestampMs) -> ?NOT_LOADED.

-spec manifest_evaluate_remote_retention(#manifest{}, [{max_bytes | max_age, non_neg_integer()}], NowMs :: integer()) ->
    unchanged | {#edit{}, [#fragment_ref{} | #group_ref{}]} | {fetch, #group_ref{}, cont()}.
manifest_evaluate_remote_retention(_Manifest, _Specs, _NowMs) -> ?NOT_LOADED.

-spec manifest_resume({ok, Entries :: binary()} | {error, term()}, cont()) -> term().
manifest_resume(_Fetched, _Cont) -> ?NOT_LOADED.

%%% Decisions and names

%% @doc Whether a chunk may be drained. `Committed' is the id of the last committed chunk, -1 while there is none.
-spec chunk_is_committed(ChunkId :: offset(), Committed :: integer()) -> boolean().
chunk_is_committed(_ChunkId, _Committed) -> ?NOT_LOADED.

%% @doc Where to start on a local log.
-spec compare_log(#manifest{}, local_log()) -> start().
compare_log(_Manifest, _Log) -> ?NOT_LOADED.

%% @doc The same, once {@link check_timeline/2} has answered `different'.
-spec start_on_other_timeline(#manifest{}, local_log()) -> start().
start_on_other_timeline(_Manifest, _Log) -> ?NOT_LOADED.

%% @doc Whether the newest tiered chunk is also in the local log. `inside_another': a local chunk covers that offset, but
%% does not begin there; `trimmed': the local log begins later.
-spec check_timeline(Remote :: chunk_identity(), Local :: chunk_identity() | inside_another | trimmed) ->
    same | different | unverifiable.
check_timeline(_Remote, _Local) -> ?NOT_LOADED.

%% @doc For what {@link check_timeline/2} cannot tell, because the newest tiered chunk is trimmed: whether a log that begins at
%% `First' may have had it. `End' is the manifest's next offset.
-spec check_beginning(End :: non_neg_integer(), First :: non_neg_integer() | undefined) -> different | unverifiable.
check_beginning(_End, _First) -> ?NOT_LOADED.

%% @doc The same, also for a tier without a chunk (`undefined'): whether the log may go on at the tier's end. `Next' is what it
%% has there.
-spec check_continuation(Newest :: chunk_identity() | undefined, Next :: chunk_identity() | inside_another | trimmed) ->
    different | unverifiable.
check_continuation(_Newest, _Next) -> ?NOT_LOADED.

%% @doc Where the manifest of a stream comes from: the metadata store's answer, the revision of the cached manifest, the
%% caller's epoch. `{superseded, Epoch}': a later writer has persisted, so this one must not write.
-spec resolve_manifest(Metadata, Cached :: non_neg_integer() | undefined, OwnEpoch :: non_neg_integer()) ->
    empty
    | use_cache
    | {fetch, uid(), Epoch :: non_neg_integer(), Revision :: non_neg_integer()}
    | {superseded, Epoch :: non_neg_integer()}
    | retry
when
    Metadata :: absent | {present, uid(), Epoch :: non_neg_integer(), Revision :: non_neg_integer()} | failed.
resolve_manifest(_Metadata, _Cached, _OwnEpoch) -> ?NOT_LOADED.

%% @doc What the writer of an epoch, which has uploaded nothing before `NowMs', has to do about the note of discarded tiers: nothing, replace it if
%% it is still the same, or stop writing, as a later writer has it.
-spec claim_discard(discard_note() | undefined, Epoch, NowMs :: integer()) -> own | {take_over, discard_note()} | {fenced, Epoch} when
    Epoch :: non_neg_integer().
claim_discard(_Note, _Epoch, _NowMs) -> ?NOT_LOADED.

%% @doc What an attempt to read the root at this revision means. The manifest comes with its revision.
-spec resolve_root({ok, #manifest{}} | not_found | failed, Revision :: non_neg_integer()) -> {ok, #manifest{}} | retry.
resolve_root(_Fetched, _Revision) -> ?NOT_LOADED.

%% @doc What kind of failure a reason is. Reasons that are not of the contract are permanent.
-spec error_class(Reason :: term()) -> transient | throttled | permanent.
error_class(_Reason) -> ?NOT_LOADED.

%% @doc What so many failures of one fragment say of the store, the last one for this reason. `away': the fragment is tried for all of its
%% stream, unless another one is; `doubtful': while one is, it waits; `there': it is tried by itself.
-spec outlook(Reason :: term(), Failures :: pos_integer()) -> there | doubtful | away.
outlook(_Reason, _Failures) -> ?NOT_LOADED.

%% @doc Milliseconds to wait after so many failures, the last one of this class. `Delays' are four settings under their
%% configured names; `Random' in [0, 1) picks within the jitter.
-spec retry_delay(Class, Failures :: pos_integer(), Delays, Random :: float()) -> Ms :: non_neg_integer() when
    Class :: transient | throttled | permanent,
    Delays :: #{
        task_retry_delay_ms := non_neg_integer(),
        task_retry_delay_max_ms := non_neg_integer(),
        upload_retry_delay_ms := non_neg_integer(),
        upload_retry_delay_max_ms := non_neg_integer()
    }.
retry_delay(_Class, _Failures, _Delays, _Random) -> ?NOT_LOADED.

-spec valid_stream_id(binary()) -> boolean().
valid_stream_id(_StreamId) -> ?NOT_LOADED.

-spec object_key(Prefix :: binary(), stream_id(), Object) -> binary() when
    Object ::
        {fragment, offset(), uid()}
        | {root, Epoch :: non_neg_integer(), uid()}
        | {group, Kind :: 1..3, offset(), uid()}.
object_key(_Prefix, _StreamId, _Object) -> ?NOT_LOADED.

%% @doc Whether a node whose manifest was persisted by the writer of `HaveEpoch' takes the edits with which the writer of `Epoch' went from
%% one revision to another. `stale': it has them already. `resync': it cannot follow, and needs the whole manifest.
-spec accept_edits(
    Have :: #manifest{}, HaveEpoch :: non_neg_integer(), Epoch :: non_neg_integer(),
    {Previous :: non_neg_integer(), Revision :: non_neg_integer()}, [#edit{}]
) -> {accept, #manifest{}} | stale | {resync, Text :: binary()}.
accept_edits(_Have, _HaveEpoch, _Epoch, _Revisions, _Edits) -> ?NOT_LOADED.

%% @doc Begins the search for the root that the lost pointer of a stream is rebuilt from, with all its objects as listed. Only the named
%% root is considered, if there is one.
-spec adoption_begin(
    Prefix :: binary(), stream_id(), [{Key :: binary(), Size :: non_neg_integer(), ModifiedMs :: integer() | undefined}],
    {Epoch :: non_neg_integer(), uid()} | undefined
) -> adoption().
adoption_begin(_Prefix, _StreamId, _Objects, _Named) -> ?NOT_LOADED.

%% @doc What to do next: read an object and tell {@link adoption_found/2}, take a root, or none, because of these.
-spec adoption_next(adoption()) -> {read, Key :: binary()} | {take, adoptable()} | {refuse, [{{uid(), Epoch}, Why :: binary()}]} when
    Epoch :: non_neg_integer().
adoption_next(_Adoption) -> ?NOT_LOADED.

%% @doc What the object that was to be read holds.
-spec adoption_found(Body :: binary() | not_found, adoption()) -> adoption().
adoption_found(_Body, _Adoption) -> ?NOT_LOADED.

%% @doc Whether objects that retention dropped, all of them below the first offset of its edit, may be deleted now that a
%% manifest with this first offset is persisted.
-spec may_delete(DroppedBelow :: offset(), PersistedFirst :: offset()) -> boolean().
may_delete(_DroppedBelow, _PersistedFirst) -> ?NOT_LOADED.

%% @doc How many of the oldest segments of a local log are in the tier as a whole, and behind every replica. The first offsets
%% are those of all segments, ascending.
-spec deletable_segments(FirstOffsets :: [offset()], PersistedNext :: offset(), Replicas :: [offset()]) -> non_neg_integer().
deletable_segments(_FirstOffsets, _PersistedNext, _Replicas) -> ?NOT_LOADED.

%% @doc Below which offset a replica may trim its log: 0 unless the manifest was persisted in the epoch that the log is in.
-spec replica_floor(PersistedNext :: offset(), PersistedIn, LogEpoch, Committed :: offset()) -> offset() when
    PersistedIn :: non_neg_integer(),
    LogEpoch :: non_neg_integer().
replica_floor(_PersistedNext, _PersistedIn, _LogEpoch, _Committed) -> ?NOT_LOADED.

%% @doc Whether an object is garbage: {@link rabbitmq_stream_s3_gc}. `optional': only where somebody wants orphans to go.
-spec gc_verdict(Object, gc_stream(), Limits) -> gc_verdict() when
    Object :: #{prefix := binary(), key := binary(), age_ms := non_neg_integer() | undefined},
    Limits :: #{gc_min_age_ms := non_neg_integer(), discarded_tier_grace_ms := non_neg_integer()}.
gc_verdict(_Object, _Stream, _Limits) -> ?NOT_LOADED.

%% @doc What the keys of a stream, or of all streams, begin with; ends in a slash.
-spec key_prefix(Prefix :: binary(), stream_id() | all) -> binary().
key_prefix(_Prefix, _Streams) -> ?NOT_LOADED.

%% @doc What a key below the prefix names.
-spec parse_key(Prefix :: binary(), Key :: binary()) -> parsed_key().
parse_key(_Prefix, _Key) -> ?NOT_LOADED.

%%% Store. Each call but store_open and store_cancel answers ok at once, and sends
%%% {store_result, Ref, {ok, Value} | {error, {Kind, #{op, reason, message}}}} to Pid later, once, unless cancelled.

%% @doc Opens the store that a configuration describes; sends no request.
-spec store_open(#{atom() => term()}) -> {ok, store()} | {error, {Key :: atom(), Text :: binary()}}.
store_open(_Config) -> ?NOT_LOADED.

%% Value: `#{conditional_writes := boolean(), verifies_checksums := boolean()}'.
-spec store_probe(store(), pid(), ref()) -> ok.
store_probe(_Store, _Pid, _Ref) -> ?NOT_LOADED.

%% Value: `#{etag := binary() | undefined}'.
-spec store_put(store(), pid(), ref(), Key :: binary(), Body :: iodata(), #{if_none_match => true, if_match => binary()}) -> ok.
store_put(_Store, _Pid, _Ref, _Key, _Body, _Opts) -> ?NOT_LOADED.

%% Value: `#{size := non_neg_integer(), etag := binary() | undefined, body := binary()}'; size is that of the whole object.
-spec store_get(store(), pid(), ref(), Key :: binary(), part()) -> ok.
store_get(_Store, _Pid, _Ref, _Key, _Part) -> ?NOT_LOADED.

%% Value: `[{Key, {Kind, #{}}}]' of the keys that could not be deleted.
-spec store_delete(store(), pid(), ref(), [Key :: binary()]) -> ok.
store_delete(_Store, _Pid, _Ref, _Keys) -> ?NOT_LOADED.

%% Value: `#{objects := [{Key, Size, ModifiedMs | undefined}], next := From | undefined}'.
-spec store_list(store(), pid(), ref(), Prefix :: binary(), From :: binary() | undefined, Max :: 1..1000) -> ok.
store_list(_Store, _Pid, _Ref, _Prefix, _From, _Max) -> ?NOT_LOADED.

%% @doc Aborts requests. None of them sends anything afterwards, though an answer may be in the mailbox already.
-spec store_cancel([ref()]) -> ok.
store_cancel(_Refs) -> ?NOT_LOADED.

%% @doc What has been asked of all stores since the library was loaded, as numbers that only grow. Costs a few microseconds.
%%
%% Counted once a request, when it has ended, transfers included. Outcomes are the kinds of errors, and `throttled' (otherwise
%% `transient') and `cancelled' (by its requester: deadlines come to that). A batch delete that was answered is `ok', whatever became of
%% each key. A probe is several requests, some of which a good store refuses. What a row counts is what the key names; `unknown' stands
%% for listings, batches of several kinds, and foreign keys. Rows that would be 0 are not there.
%%
%% Durations are in seconds, from sending to the answer, of a GET to the last byte read; one row for each operation, buckets cumulative
%% with the bounds 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 180 and infinity. Bytes are those of objects,
%% failed attempts included.
-spec store_metrics() ->
    #{
        requests := [{op() | multi_delete, Outcome, ObjectKind, pos_integer()}],
        durations := [{op() | multi_delete, [{UpperSeconds :: float() | infinity, non_neg_integer()}], SumSeconds :: float(), non_neg_integer()}],
        bytes_sent := non_neg_integer(),
        bytes_received := non_neg_integer()
    }
when
    Outcome :: ok | transient | throttled | conflict | not_found | corrupt | invalid | closed | cancelled,
    ObjectKind :: fragment | root | group | kilo_group | mega_group | history | unknown.
store_metrics() -> ?NOT_LOADED.

%% Value: the uid in the key, a new one each call.
-spec put_root(store(), pid(), ref(), stream_id(), Epoch :: non_neg_integer(), #manifest{}) -> ok.
put_root(_Store, _Pid, _Ref, _StreamId, _Epoch, _Manifest) -> ?NOT_LOADED.

%% Value: the manifest, with revision 0.
-spec get_root(store(), pid(), ref(), stream_id(), Epoch :: non_neg_integer(), uid()) -> ok.
get_root(_Store, _Pid, _Ref, _StreamId, _Epoch, _Uid) -> ?NOT_LOADED.

%% Value: the uid in the key, a new one each call.
-spec put_group(store(), pid(), ref(), stream_id(), Kind :: 1..3, Entries :: binary()) -> ok.
put_group(_Store, _Pid, _Ref, _StreamId, _Kind, _Entries) -> ?NOT_LOADED.

%% Value: the entries.
-spec get_group(store(), pid(), ref(), stream_id(), Kind :: 1..3, offset(), uid()) -> ok.
get_group(_Store, _Pid, _Ref, _StreamId, _Kind, _Offset, _Uid) -> ?NOT_LOADED.

%%% History

%% The first segments of a run, 16 at most (number, payload bytes, when sealed), and the number, bytes and oldest time of the others.
-type history_listing() :: {
    [{Seq :: non_neg_integer(), Size :: non_neg_integer(), SealedMs :: integer()}],
    {Segments :: non_neg_integer(), Bytes :: non_neg_integer(), OldestMs :: integer() | undefined}
}.
-type history_put() :: {stored, Crc :: non_neg_integer(), Size :: non_neg_integer()} | {exists, Crc :: non_neg_integer(), PayloadLen :: non_neg_integer()} | changed.
-type history_object() :: {same, Size :: non_neg_integer()} | {other, Etag :: binary()} | vanished.
%% `A' is the attempt that an event answers.
-type history_event() ::
    {sealed, Size :: non_neg_integer(), SealedMs :: integer()}
    | {rescanned, history_listing()}
    | tick
    | purge
    | {listed, A :: pos_integer(), history_listing()}
    | {permit, A :: pos_integer()}
    | {read, A :: pos_integer(), ready | not_sealed}
    | {put, A :: pos_integer(), history_put()}
    | {examined, A :: pos_integer(), history_object()}
    | {acknowledged, A :: pos_integer()}
    | {catalog, A :: pos_integer(), HadSegments :: boolean()}
    | {done, A :: pos_integer()}
    | {gone, A :: pos_integer()}
    | {failed, A :: pos_integer(), transient | throttled | permanent, Random :: float()}.
-type history_effect() ::
    {list, A :: pos_integer()}
    | {ask_permit, A :: pos_integer()}
    | give_permit_back
    | {read, A :: pos_integer(), Seq :: non_neg_integer()}
    | {put, A :: pos_integer(), Seq :: non_neg_integer(), Replaces :: binary() | undefined}
    | {examine, A :: pos_integer(), Seq :: non_neg_integer(), Crc :: non_neg_integer(), PayloadLen :: non_neg_integer()}
    | {report_mismatch, Seq :: non_neg_integer()}
    | {acknowledge, A :: pos_integer(), Seq :: non_neg_integer(), Crc :: non_neg_integer(), Size :: non_neg_integer(),
        uploaded | already_present | replaced}
    | {wake_at, Ms :: non_neg_integer()}
    | {count, uploaded | already_present | replaced | retryable_error | permanent_error | gone, Bytes :: non_neg_integer()}
    | abort
    | {catalog, A :: pos_integer()}
    | {delete, A :: pos_integer()}
    | {sweep, A :: pos_integer()}
    | {tell_host, A :: pos_integer()}.

%% @doc A machine for a run of which nothing is known. A state is a value. The options are `history_purge_wait_ms' and the four retry delays, under the
%% names of the configuration.
-spec history_new(#{atom() => non_neg_integer()}) -> history_machine().
history_new(_Options) -> ?NOT_LOADED.

%% @doc An event, at a time of a clock that never goes back. Constant time: a listing of more than 16 segments is refused.
-spec history_handle(history_machine(), NowMs :: non_neg_integer(), history_event()) -> {history_machine(), [history_effect()]}.
history_handle(_Machine, _NowMs, _Event) -> ?NOT_LOADED.

-spec history_status(history_machine()) ->
    #{
        phase := atom(),
        seq := non_neg_integer() | undefined,
        segments := non_neg_integer(),
        bytes := non_neg_integer(),
        oldest_ms := integer() | undefined,
        failures := non_neg_integer(),
        is_idle := boolean()
    }.
history_status(_Machine) -> ?NOT_LOADED.

%% @doc Stores a segment: only if there is none, or in place of the object with this entity tag. The payload is not copied; the request refers to it until it has
%% ended. Answers as a store request, with `{ok, history_put()}'.
-spec history_put(store(), pid(), ref(), {Run :: binary(), Seq :: non_neg_integer()}, Payload :: binary(), Replaces :: binary() | undefined) -> ok.
history_put(_Store, _Pid, _Ref, _Segment, _Payload, _Replaces) -> ?NOT_LOADED.

%% @doc What lies under the key of a segment, compared with a payload. Answers as a store request, with `{ok, history_object()}'.
-spec history_examine(
    store(), pid(), ref(), {Run :: binary(), Seq :: non_neg_integer()}, Crc :: non_neg_integer(), PayloadLen :: non_neg_integer()
) -> ok.
history_examine(_Store, _Pid, _Ref, _Segment, _Crc, _PayloadLen) -> ?NOT_LOADED.

%% @doc The payload of a segment. Answers as a store request, with `{ok, Payload}'.
-spec history_get(store(), pid(), ref(), {Run :: binary(), Seq :: non_neg_integer()}) -> ok.
history_get(_Store, _Pid, _Ref, _Segment) -> ?NOT_LOADED.

%% @doc Bytes of payloads that requests refer to now.
-spec history_body_bytes() -> non_neg_integer().
history_body_bytes() -> ?NOT_LOADED.

-spec history_key(Prefix :: binary(), {Run :: binary(), Seq :: non_neg_integer()}) -> binary().
history_key(_Prefix, _Segment) -> ?NOT_LOADED.

%% @doc What the keys of a run, or of all runs, begin with; ends in a slash.
-spec history_prefix(Prefix :: binary(), Run :: binary() | all) -> binary().
history_prefix(_Prefix, _Runs) -> ?NOT_LOADED.

-spec valid_run_id(term()) -> boolean().
valid_run_id(_Run) -> ?NOT_LOADED.

%% @doc Whether retention of a run with so many sealed segments has to wait, and how long; `undefined' where that is not known.
-spec history_postpone(Sealed :: non_neg_integer() | undefined) -> {postpone, Ms :: pos_integer()} | proceed.
history_postpone(_Sealed) -> ?NOT_LOADED.

%% @doc Whether an object may be deleted whose run is gone or not.
-spec history_may_sweep(IsGone :: boolean(), AgeMs :: non_neg_integer() | undefined, MinAgeMs :: non_neg_integer()) -> boolean().
history_may_sweep(_IsGone, _AgeMs, _MinAgeMs) -> ?NOT_LOADED.

%%% Governor

%% @doc Starts a governor. It lives until garbage collection takes the handle; all work is aborted once `owner' has died.
-spec governor_start(#{rate := unlimited | pos_integer(), burst := pos_integer(), concurrency := pos_integer(), owner := pid()}) ->
    {ok, governor()} | {error, {Key :: atom(), Text :: binary()}}.
governor_start(_Options) -> ?NOT_LOADED.

%% @doc Queues work. ReplyTo gets, of a transfer, `{transfer_admitted, Ref}' and then `{transfer_result, Ref, Result}' once.
%% Of external work the owner gets `{governor_run, Ref}', or else `{governor_dropped, Ref, cancelled | dead}'; `dead' may
%% also come while it runs.
-spec governor_submit(governor(), Work, Size :: non_neg_integer(), ReplyTo :: pid(), ref()) -> ok when
    Work :: external | {fragment, store(), stream_id(), Dir :: binary() | string(), meta()}.
governor_submit(_Governor, _Work, _Size, _ReplyTo, _Ref) -> ?NOT_LOADED.

%% @doc External work has ended: gives its permit back.
-spec governor_finished(governor(), ref()) -> ok.
governor_finished(_Governor, _Ref) -> ?NOT_LOADED.

-spec governor_cancel(governor(), [ref()]) -> ok.
governor_cancel(_Governor, _Refs) -> ?NOT_LOADED.

-spec governor_set_rate(governor(), unlimited | pos_integer(), Burst :: pos_integer()) -> ok.
governor_set_rate(_Governor, _Rate, _Burst) -> ?NOT_LOADED.

-spec governor_set_concurrency(governor(), pos_integer()) -> ok.
governor_set_concurrency(_Governor, _Concurrency) -> ?NOT_LOADED.

%% @doc Aborts everything; `{governor_stopped, Ref}' comes to Pid within about two seconds, even when the store is dead.
-spec governor_stop(governor(), pid(), ref()) -> ok.
governor_stop(_Governor, _Pid, _Ref) -> ?NOT_LOADED.

%% @doc The numbers under their metric names, without the prefix of the plugin, and `upload_permits_effective': how much may run at a time,
%% which is less than the concurrency while the store asks to slow down.
-spec governor_info(governor()) -> #{atom() => non_neg_integer()}.
governor_info(_Governor) -> ?NOT_LOADED.

%%% Pinned segments. Whatever may block runs on threads of the library. With a Pid and a Ref, `{pins_result, Ref, Answer}' comes
%% later, once.

%% @doc Enters the log of a stream: its segments are held open from now on, until they are persisted, also those that appear later. What was pinned for
%% another writer is let go. `Budget' holds for the node: bytes that deleted segments may take; 0 pins nothing. Answer: `ok | {error, Text}'.
-spec pins_enter(stream_id(), Dir :: file:filename_all(), Writer :: pid(), Budget :: non_neg_integer(), pid(), ref()) -> ok.
pins_enter(_StreamId, _Dir, _Writer, _Budget, _Pid, _Ref) -> ?NOT_LOADED.

%% @doc Everything below an offset is persisted: segments that end there or before are let go.
-spec pins_persisted(Dir :: file:filename_all(), offset()) -> ok.
pins_persisted(_Dir, _Offset) -> ?NOT_LOADED.

%% @doc Keeps the segment that begins at `Segment' open whatever the budget is, until something of it is persisted. `To' gets `{pins_result, Ref,
%% ok | {error, Text}}'.
-spec pins_hold(Dir :: file:filename_all(), Segment :: offset(), To :: pid(), Ref :: reference()) -> ok.
pins_hold(_Dir, _Segment, _To, _Ref) -> ?NOT_LOADED.

%% @doc Looks at a directory once more, in case the system does not watch it.
-spec pins_look(Dir :: file:filename_all()) -> ok.
pins_look(_Dir) -> ?NOT_LOADED.

%% @doc Lets go of a log, unless it has another writer by now.
-spec pins_leave(Dir :: file:filename_all(), Writer :: pid()) -> ok.
pins_leave(_Dir, _Writer) -> ?NOT_LOADED.

%% @doc Lets go of the logs whose writers have ended.
-spec pins_sweep() -> ok.
pins_sweep() -> ?NOT_LOADED.

%% @doc Lets go of everything. Answer: `ok | {error, Text}'.
-spec pins_clear(pid(), ref()) -> ok.
pins_clear(_Pid, _Ref) -> ?NOT_LOADED.

%% @doc From where on the pinned segments reach up to `First', where the local log begins, without a gap. Answer:
%% `{ok, offset() | undefined} | {error, Text}'.
-spec pins_joining(Dir :: file:filename_all(), First :: offset(), pid(), ref()) -> ok.
pins_joining(_Dir, _First, _Pid, _Ref) -> ?NOT_LOADED.

%% @doc What the pinned segments have where a chunk should be. Answer: `{ok, chunk_identity() | inside_another | trimmed} | {error, Text}';
%% `trimmed': none of them reaches that far.
-spec pins_identity(Dir :: file:filename_all(), ChunkId :: offset(), pid(), ref()) -> ok.
pins_identity(_Dir, _ChunkId, _Pid, _Ref) -> ?NOT_LOADED.

%% @doc Chunks of a segment, committed or not, at most `Max'. Answer: `{ok, [chunk()], pins_place()} | not_pinned | {error, Text}'; no chunk means
%% that the segment ends there, `not_pinned' that no pinned segment has that chunk, or that the segment at that position is deleted and not
%% pinned. Reads 48 bytes a chunk.
-spec pins_headers(Dir :: file:filename_all(), pins_place(), Max :: 1..1000, pid(), ref()) -> ok.
pins_headers(_Dir, _Place, _Max, _Pid, _Ref) -> ?NOT_LOADED.

%% @doc The numbers at this moment; for metrics, this one call is enough. Takes microseconds, and some nanoseconds a pin.
-spec pins_info() -> pins_info().
pins_info() -> ?NOT_LOADED.

-ifdef(PANICS).
%%% Of the library that a suite has built for itself (the feature `panics'): load_nif wants a function here for each there.

-spec panic_in_call() -> no_return().
panic_in_call() -> ?NOT_LOADED.

-spec panic_in_task(store(), pid(), ref()) -> ok.
panic_in_task(_Store, _Pid, _Ref) -> ?NOT_LOADED.
-endif.
