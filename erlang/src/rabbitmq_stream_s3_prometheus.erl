%% @doc What rabbitmq_prometheus shows of this application: on `/metrics' sums over all streams of the node, on `/metrics/per-object' a
%% row for each stream, with the labels `stream', `vhost' and `queue'. Where RabbitMQ is told to answer `/metrics' for each object
%% (`prometheus.return_per_object_metrics'), so does this.
%%
%% Everything is read from tables and counters: a scrape asks no process and waits for nobody. A part that cannot be read, as while
%% the application stops, is left out, because an exception would cut RabbitMQ's own metrics off behind it.
%%
%% The process here sees to the registration. It depends on nobody: the registry may come later, go, and come back.
-module(rabbitmq_stream_s3_prometheus).
-behaviour(gen_server).
-behaviour(prometheus_collector).

-export([start_link/0, metrics/0]).
-export([collect_mf/2, deregister_cleanup/1]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2, terminate/2]).

-define(REGISTRIES, [default, 'per-object']).
%% Of prometheus' own application, there while it runs.
-define(REGISTRY_TABLE, prometheus_registry_table).
-define(LOOK_MS, 5000).
-define(PREFIX, "rabbitmq_stream_s3_").

-type kind() :: counter | gauge | histogram.
%% What becomes of a number of each stream where streams are summed up.
-type summary() :: sum | max | min_above_none | count_above_0.

%% --- registration ----------------------------------------------------------------------------------------------------

%% @doc Starts the process that registers the collector wherever there is a registry.
-spec start_link() -> {ok, pid()} | ignore | {error, term()}.
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

%% @private
init([]) ->
    %% So that it is deregistered before its code goes.
    process_flag(trap_exit, true),
    {ok, look()}.

%% @private
handle_call(Request, _From, State) ->
    {stop, {unknown_call, Request}, State}.

%% @private
handle_cast(_Message, State) ->
    {noreply, State}.

%% @private
handle_info({timeout, Timer, look}, Timer) ->
    {noreply, look()};
handle_info(_Other, Timer) ->
    {noreply, Timer}.

%% @private
terminate(_Reason, _Timer) ->
    with_registry(fun(Registry) -> prometheus_registry:deregister_collector(Registry, ?MODULE) end).

look() ->
    ok = with_registry(fun register/1),
    erlang:start_timer(?LOOK_MS, self(), look).

register(Registry) ->
    case prometheus_registry:collector_registeredp(Registry, ?MODULE) of
        true -> ok;
        false -> prometheus_registry:register_collector(Registry, ?MODULE)
    end.

with_registry(Fun) ->
    case ets:whereis(?REGISTRY_TABLE) of
        undefined ->
            ok;
        _ ->
            try
                lists:foreach(Fun, ?REGISTRIES)
            catch
                %% It has gone in this moment, with all that was registered there.
                error:badarg -> ok
            end
    end.

%% --- collection ------------------------------------------------------------------------------------------------------

%% @private
deregister_cleanup(_Registry) ->
    ok.

%% @private
-spec collect_mf(prometheus_registry:registry(), prometheus_collector:collect_mf_callback()) -> ok.
collect_mf(Registry, Callback) ->
    Streams =
        case is_per_object(Registry) of
            true -> fun per_object/0;
            false -> fun aggregated/0
        end,
    Parts = [Streams, fun governor/0, fun metadata/0, fun objects/0, fun store/0, fun history/0],
    lists:foreach(fun(Part) -> lists:foreach(Callback, families(Part)) end, Parts).

is_per_object('per-object') -> true;
is_per_object(_) -> application:get_env(rabbitmq_prometheus, return_per_object_metrics, false) =:= true.

%% What cannot be read now is missing in this scrape. There is nobody to tell: scrapes come every few seconds.
families(Part) ->
    try
        [family(Family) || Family <- Part()]
    catch
        _:_ -> []
    end.

family({Name, Kind, Help, Rows}) ->
    prometheus_model_helpers:create_mf(<<?PREFIX, (atom_to_binary(Name))/binary>>, Help, Kind, Rows).

%% @doc The names of all metrics without their prefix, with their kinds and what they mean.
-spec metrics() -> [{atom(), kind(), Help :: binary()}].
metrics() ->
    [{Name, counter, Help} || {Name, Help} <- counters()] ++
        [{Name, gauge, Help} || {Name, _Summary, Help} <- gauges()] ++
        [{Name, Kind, Help} || {Name, Kind, Help} <- governor_metrics() ++ store_metrics() ++ history_metrics()] ++
        [{Name, counter, Help} || {Name, Help} <- metadata_metrics() ++ objects_metrics()] ++
        [{streams, gauge, streams_help()}].

%% --- streams ---------------------------------------------------------------------------------------------------------

aggregated() ->
    Totals = rabbitmq_stream_s3_counters:get(streams),
    Rows = rows(),
    [{Name, counter, Help, [{[], map_get(Name, Totals)}]} || {Name, Help} <- counters()] ++
        [{Name, gauge, Help, [{[], summary(Summary, [map_get(Name, Row) || {_, Row} <- Rows])}]} || {Name, Summary, Help} <- gauges()] ++
        [{streams, gauge, streams_help(), [{[], length(Rows)}]}].

per_object() ->
    Streams = [{labels(StreamId, Row), Row, rabbitmq_stream_s3_counters:get({stream, StreamId})} || {StreamId, Row} <- rows()],
    [{Name, counter, Help, [{Labels, map_get(Name, Counters)} || {Labels, _, Counters} <- Streams]} || {Name, Help} <- counters()] ++
        [{Name, gauge, Help, [{Labels, map_get(Name, Row)} || {Labels, Row, _} <- Streams]} || {Name, _, Help} <- gauges()] ++
        [{streams, gauge, streams_help(), [{[], length(Streams)}]}].

labels(StreamId, #{vhost := VHost, queue := Queue}) ->
    [{stream, StreamId}, {vhost, VHost}, {queue, Queue}].

rows() ->
    #{streams := Pinned} = rabbitmq_stream_s3_pins:info(),
    [
        {StreamId, maps:merge(Row#{pinned_segment_bytes => maps:get(StreamId, Pinned, 0)}, manifest(StreamId))}
     || {StreamId, Row} <- rabbitmq_stream_s3_gauges:streams()
    ].

manifest(StreamId) ->
    case rabbitmq_stream_s3_manifest_cache:summary(StreamId) of
        {{First, Next}, Bytes} -> #{manifest_first_offset => First, manifest_next_offset => Next, remote_bytes => Bytes};
        _ -> #{manifest_first_offset => 0, manifest_next_offset => 0, remote_bytes => 0}
    end.

-spec summary(summary(), [integer()]) -> integer().
summary(sum, Values) -> lists:sum(Values);
summary(max, Values) -> lists:max([0 | Values]);
summary(min_above_none, Values) -> lists:min([infinity_or(V) || V <- Values] ++ [-1 || lists:all(fun(V) -> V < 0 end, Values)]);
summary(count_above_0, Values) -> length([V || V <- Values, V > 0]).

%% An atom is above every number.
infinity_or(-1) -> infinity;
infinity_or(Value) -> Value.

streams_help() -> <<"Streams that are tiered from this node">>.

counters() ->
    [
        {transfers_completed, <<"Fragments uploaded">>},
        {transfers_failed, <<"Attempts to upload a fragment that failed, each of which is repeated">>},
        {transfer_retries, <<"Attempts to upload a fragment again after an error that passes">>},
        {nontransient_transfer_retries, <<"Attempts to upload a fragment again after an error that needs an operator">>},
        {bytes_transferred, <<"Data bytes of fragments uploaded">>},
        {bytes_drained_total, <<"Data bytes of chunks that were put into fragments">>},
        {bytes_persisted_total, <<"Data bytes of fragments that a persisted manifest lists">>},
        {persists_completed, <<"Roots that became current">>},
        {persists_failed, <<"Attempts to make a root current that failed, but for conflicts">>},
        {persist_conflicts, <<"Attempts to make a root current that found another one there">>},
        {groups_created, <<"Groups of fragments stored">>},
        {kilo_groups_created, <<"Groups of groups stored">>},
        {mega_groups_created, <<"Groups of kilo-groups stored">>},
        {roots_created, <<"Root objects stored">>},
        {manifests_resolved, <<"Times that a reader found out what is persisted">>},
        {manifest_resolution_failures, <<"Times that a reader could not find out what is persisted">>},
        {fragments_deleted, <<"Fragments deleted that retention had dropped">>},
        {groups_deleted, <<"Groups deleted that retention had dropped">>},
        {local_log_ahead_recoveries, <<"Times that tiering began anew because the local log had lost what was not tiered">>},
        {remote_tier_ahead_recoveries, <<"Times that tiering began anew because the tier was of another timeline">>},
        {remote_tier_retention_failures, <<"Evaluations of the tier's retention that failed">>},
        {corrupt_chunks, <<"Uploads refused because a chunk does not fit its checksum">>}
    ].

gauges() ->
    [
        {transfers_in_flight, sum, <<"Fragments that wait for their upload or are being uploaded">>},
        {upload_stalled_offset, min_above_none, <<"First offset of the oldest fragment whose upload has failed and is tried again; -1: none; over several streams the lowest">>},
        {bytes_in_assembly, sum, <<"Data bytes of the fragment that is being assembled">>},
        {bytes_in_transfer, sum, <<"Data bytes of fragments that wait for their upload or are being uploaded">>},
        {bytes_in_persist, sum, <<"Data bytes that the persist under way will publish">>},
        {pinned_segment_bytes, sum, <<"Bytes of deleted segments that are held until they are uploaded">>},
        {last_persist_timestamp_ms, max, <<"When a root became current last, milliseconds since the Unix epoch; 0: not since the reader began; over several streams the latest">>},
        {stalled_since_timestamp_ms, count_above_0, <<"Since when tiering of the stream has failed or been paused, milliseconds since the Unix epoch; 0: all is well; over several streams how many are stalled">>},
        {manifest_first_offset, sum, <<"First offset in the remote tier, as persisted; 0 for an empty one">>},
        {manifest_next_offset, sum, <<"Offset behind the last one in the remote tier, as persisted; 0 for an empty one">>},
        {remote_bytes, sum, <<"Data bytes in the remote tier, as persisted">>}
    ].

%% --- the node --------------------------------------------------------------------------------------------------------

governor() ->
    Info = rabbitmq_stream_s3_governor:info(),
    [{Name, Kind, Help, [{[], map_get(Name, Info)}]} || {Name, Kind, Help} <- governor_metrics()].

governor_metrics() ->
    [
        {governor_submissions_received, counter, <<"Uploads handed to the governor">>},
        {governor_tasks_in_flight, gauge, <<"Uploads that the governor has admitted and that have not ended">>},
        {governor_pending_submissions, gauge, <<"Uploads that wait for their turn">>},
        {governor_oversized_admissions, counter, <<"Uploads admitted although they are larger than the burst">>},
        {governor_dropped_dead_replyto, counter, <<"Uploads dropped because nobody waits for them any more">>},
        {upload_permits_in_use, gauge, <<"Permits held by uploads that run">>},
        {upload_buffer_bytes, gauge, <<"Memory held by uploads that run">>}
    ].

metadata() ->
    simple(metadata, metadata_metrics()).

metadata_metrics() ->
    [
        {gets, <<"Reads of the metadata store">>},
        {puts, <<"Writes to the metadata store">>},
        {put_successes, <<"Writes to the metadata store that succeeded">>},
        {put_conflicts, <<"Writes to the metadata store that found another value than they expected">>},
        {put_not_founds, <<"Writes to the metadata store whose stream was gone">>},
        {put_errors, <<"Writes to the metadata store that failed otherwise">>}
    ].

objects() ->
    simple(objects, objects_metrics()).

objects_metrics() ->
    [
        {objects_deleted, <<"Objects deleted that nothing referred to">>},
        {objects_delete_failed, <<"Deletions of objects that failed, each of which is repeated">>},
        {gc_objects_reclaimed, <<"Objects that the garbage collection has deleted">>},
        {gc_bytes_reclaimed, <<"Bytes of objects that the garbage collection has deleted">>}
    ].

simple(Scope, Metrics) ->
    Counts = rabbitmq_stream_s3_counters:get(Scope),
    [{Name, counter, Help, [{[], map_get(Name, Counts)}]} || {Name, Help} <- Metrics].

store() ->
    Now = rabbitmq_stream_s3_store:metrics(),
    [{Name, Kind, Help, store_rows(Name, Now)} || {Name, Kind, Help} <- store_metrics()].

store_rows(requests, #{requests := Requests}) ->
    [{[{operation, Op}, {outcome, Outcome}, {object_kind, Kind}], N} || {Op, Outcome, Kind, N} <- Requests];
store_rows(request_duration_seconds, #{durations := Durations}) ->
    [{[{operation, Op}], Buckets, N, Sum} || {Op, Buckets, Sum, N} <- Durations];
store_rows(Name, Now) ->
    [{[], map_get(Name, Now)}].

store_metrics() ->
    [
        {requests, counter, <<"Requests to the store, by what was asked, what came of it, and what the key names">>},
        {request_duration_seconds, histogram, <<"How long requests to the store took, in seconds">>},
        {bytes_sent, counter, <<"Bytes of objects sent to the store, failed attempts included">>},
        {bytes_received, counter, <<"Bytes of objects received from the store, failed attempts included">>},
        {bucket_accessible, gauge, <<"1 if the bucket could be used when it was looked at last">>}
    ].

history() ->
    #{counters := Counters, gauges := Gauges} = rabbitmq_stream_s3_history_uploader:metrics(),
    Now = Counters ++ Gauges,
    [{Name, Kind, Help, [{maps:to_list(Labels), N} || {Of, Labels, N} <- Now, Of =:= Name]} || {Name, Kind, Help} <- history_metrics()].

history_metrics() ->
    [
        {history_uploads_total, counter, <<"Outcomes of uploads of history segments">>},
        {history_upload_bytes_total, counter, <<"Bytes of history segments uploaded">>},
        {history_upload_checksum_mismatches_total, counter, <<"History objects found in the store with another content than their segment">>},
        {history_upload_rescan_errors_total, counter, <<"Runs that a scan of the history could not read">>},
        {history_upload_backlog_segments, gauge, <<"Sealed history segments that wait for their upload">>},
        {history_upload_backlog_bytes, gauge, <<"Bytes of sealed history segments that wait for their upload">>},
        {history_upload_oldest_sealed_age_seconds, gauge, <<"How long the oldest of them has been sealed">>}
    ].
