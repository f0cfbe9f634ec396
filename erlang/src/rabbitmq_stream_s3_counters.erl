%% @doc Numbers that only grow, for each stream, for the metadata store, for the deletion of objects, and for the
%% history. Gauges are not here: they are computed from
%% state when somebody asks.
%%
%% A stream's numbers live as long as its writer is on this node, so that a restart of the reader is not a reset of the
%% numbers. What a stream counts is counted for all `streams', too: that sum goes on when a stream is gone. Adding costs four table
%% lookups at most and takes no lock.
-module(rabbitmq_stream_s3_counters).

-export([init/0, add/2, add/3, get/1, forget/1, names/1]).
-export_type([scope/0]).

-define(TABLE, ?MODULE).

-type scope() :: {stream, StreamId :: binary()} | streams | metadata | objects | history.

%% @doc Creates the table. The caller owns it: when it ends, the numbers are gone.
-spec init() -> ok.
init() ->
    ?TABLE = ets:new(?TABLE, [named_table, public, {read_concurrency, true}]),
    true = ets:insert(?TABLE, {metadata, new(metadata)}),
    ok.

%% @doc Adds one.
-spec add(scope(), Name :: atom()) -> ok.
add(Scope, Name) ->
    add(Scope, Name, 1).

%% @doc Adds to a number. Raises `badarg' for a name that the scope does not have. Without a table, as in a test of one
%% module alone, nothing is counted.
-spec add(scope(), Name :: atom(), non_neg_integer()) -> ok.
add(Scope, Name, N) ->
    Index = index(Name, names(Scope), 1),
    ok = add_to(Scope, Index, N),
    case Scope of
        {stream, _} -> add_to(streams, Index, N);
        _ -> ok
    end.

add_to(Scope, Index, N) ->
    case ref(Scope) of
        {ok, Ref} -> counters:add(Ref, Index, N);
        none -> ok
    end.

%% @doc All numbers of a scope; zeros where nothing has happened.
-spec get(scope()) -> #{atom() => non_neg_integer()}.
get(Scope) ->
    Names = names(Scope),
    case lookup(Scope) of
        {ok, Ref} -> #{Name => counters:get(Ref, I) || {I, Name} <- lists:enumerate(Names)};
        none -> #{Name => 0 || Name <- Names}
    end.

%% @doc Drops the numbers of a stream that is gone.
-spec forget(StreamId :: binary()) -> ok.
forget(StreamId) ->
    case ets:whereis(?TABLE) of
        undefined -> ok;
        _ -> ets:delete(?TABLE, {stream, StreamId})
    end,
    ok.

%% @doc Names of the metrics of a scope, without the prefix that all metrics have. Those of the history go by other names: see
%% {@link rabbitmq_stream_s3_history_uploader:metrics/0}.
-spec names(scope()) -> [atom()].
names(metadata) ->
    [gets, puts, put_successes, put_conflicts, put_not_founds, put_errors];
names(objects) ->
    [objects_deleted, objects_delete_failed, gc_objects_reclaimed, gc_bytes_reclaimed];
names(history) ->
    [uploaded, already_present, replaced, retryable_error, permanent_error, gone, bytes, checksum_mismatches, rescan_errors];
names({stream, _StreamId}) ->
    names(streams);
names(streams) ->
    [
        transfers_completed,
        transfers_failed,
        transfer_retries,
        nontransient_transfer_retries,
        bytes_transferred,
        bytes_drained_total,
        bytes_persisted_total,
        persists_completed,
        persists_failed,
        persist_conflicts,
        groups_created,
        kilo_groups_created,
        mega_groups_created,
        roots_created,
        manifests_resolved,
        manifest_resolution_failures,
        fragments_deleted,
        groups_deleted,
        remote_tier_retention_failures,
        local_log_ahead_recoveries,
        remote_tier_ahead_recoveries,
        corrupt_chunks
    ].

index(Name, [Name | _], I) -> I;
index(Name, [_ | Names], I) -> index(Name, Names, I + 1);
index(Name, [], _I) -> error(badarg, [Name]).

ref(Scope) ->
    case lookup(Scope) of
        {ok, Ref} ->
            {ok, Ref};
        none ->
            case ets:whereis(?TABLE) of
                undefined ->
                    none;
                _ ->
                    %% Of two that come here at once, one wins, and both count on the winner's.
                    _ = ets:insert_new(?TABLE, {Scope, new(Scope)}),
                    lookup(Scope)
            end
    end.

lookup(Scope) ->
    try ets:lookup(?TABLE, Scope) of
        [{_, Ref}] -> {ok, Ref};
        [] -> none
    catch
        error:badarg -> none
    end.

new(Scope) ->
    counters:new(length(names(Scope)), [write_concurrency]).
