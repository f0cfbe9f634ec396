%% @doc The metadata store: which root is a stream's current one. In a broker it is RabbitMQ's own Khepri store, elsewhere one
%% that the application starts beside osiris' data directory.
%%
%% `[rabbitmq, rabbitmq_stream_s3, StreamId]' is a stream's container. In a broker it lives as long as the stream's queue.
%% Below it are `anchor', without which no manifest can be created, and `manifest' with `{Uid, Epoch}' of the current root. A
%% stream that has been persisted has `discarded', too, for the garbage collection: `{AtMs, Epoch}', when its tier was discarded
%% (`undefined': it never was), and the epoch of the last writer.
%% The revision is the payload version of `manifest'.
%%
%% All calls block and take a limit in milliseconds; make them in a process that may wait.
-module(rabbitmq_stream_s3_metadata).

-include_lib("khepri/include/khepri.hrl").

-export([start/0, stop/0, store_id/0, in_broker/0]).
-export([anchor/3, get/1, get/2, put/3, put/4, delete/2, streams/1]).
-export([claim_discards/3, discard/4, tier/2, leads/0]).
-export_type([entry/0, revision/0, tier/0]).

-define(OWN_STORE, rabbitmq_stream_s3_metadata).
-define(ROOT, [rabbitmq, rabbitmq_stream_s3]).
-define(DEFAULT_TIMEOUT, 30000).
-define(HOST_KEY, {?MODULE, host}).

-type stream_id() :: binary().
-type entry() :: {Uid :: 0..16#FFFFFFFF, Epoch :: non_neg_integer()}.
-type revision() :: non_neg_integer().
-type tier() :: #{root := {entry(), revision()} | none, discarded := rabbitmq_stream_s3_nif:discard_note() | none}.

%% --- the store -------------------------------------------------------------------------------------------------------

%% @doc Makes a store available: checks RabbitMQ's, or starts the own one and waits until it has elected itself.
-spec start() -> ok | {error, Text :: binary()}.
start() ->
    case lists:keymember(rabbit, 1, application:which_applications(infinity)) of
        true ->
            ok = persistent_term:put(?HOST_KEY, broker),
            check_broker();
        false ->
            ok = persistent_term:put(?HOST_KEY, none),
            start_own()
    end.

%% @doc Stops the own store, if it is the one in use.
-spec stop() -> ok.
stop() ->
    case in_broker() orelse not lists:member(?OWN_STORE, khepri:get_store_ids()) of
        true ->
            ok;
        false ->
            _ = khepri:stop(?OWN_STORE),
            ok
    end.

%% @doc Name of the Khepri store in use. Nodes outside a broker share one after
%% `khepri_cluster:join(rabbitmq_stream_s3_metadata:store_id(), OtherNode)'.
-spec store_id() -> atom().
store_id() ->
    case in_broker() of
        true -> rabbit_khepri:get_store_id();
        false -> ?OWN_STORE
    end.

%% @doc Whether this runs as a plugin. Found out once: a broker that stops takes its applications out of the list before ours has ended.
-spec in_broker() -> boolean().
in_broker() ->
    persistent_term:get(?HOST_KEY, none) =:= broker.

check_broker() ->
    %% Without the feature flag queues live in Mnesia: a container could not follow its queue, and would never be deleted.
    case rabbit_khepri:is_enabled() of
        true ->
            ok;
        false ->
            {error, <<
                "RabbitMQ keeps its metadata in Mnesia, but tiered storage needs Khepri: "
                "enable the feature flag khepri_db (rabbitmqctl enable_feature_flag khepri_db, "
                "with --experimental before RabbitMQ 4.1), then the plugin"
            >>}
    end.

start_own() ->
    case application:get_env(osiris, data_dir) of
        {ok, OsirisDir} ->
            Dir = own_dir(OsirisDir),
            case khepri:start(Dir, ?OWN_STORE) of
                {ok, ?OWN_STORE} ->
                    sync_tables(Dir);
                {error, Reason} ->
                    {error, text("the metadata store in ~ts could not be started: ~0tP", [Dir, Reason, 20])}
            end;
        undefined ->
            {error, <<"outside a broker, set data_dir of the application osiris: the metadata store lies beside that directory">>}
    end.

%% Ra keeps in tables of dets which of its directories belongs to which store, and dets writes seconds later. A VM that is killed
%% within these seconds would find no directory again and begin with an empty store, whatever had been acknowledged.
sync_tables(Dir) ->
    Tables = [Table || Table <- dets:all(), lists:prefix(Dir ++ "/", filename:absname(dets:info(Table, filename)))],
    lists:foreach(fun(Table) -> ok = dets:sync(Table) end, Tables).

%% Beside, not below: whatever lies below osiris' directory is a stream's log.
own_dir(OsirisDir) ->
    filename:absname(unicode:characters_to_list([OsirisDir, ".metadata"])).

%% --- a stream --------------------------------------------------------------------------------------------------------

%% @doc Sees to it that the stream has a container and an anchor. To be called before the stream's first object is written.
%% `Reference' is osiris' name for the stream; in a broker it is the queue, which must exist, else `not_found'. Two writes at most.
-spec anchor(stream_id(), Reference :: term(), timeout()) -> ok | {error, not_found | term()}.
anchor(StreamId, Reference, Timeout) ->
    Until = until(Timeout),
    case create(container(StreamId), #{}, keep_while(Reference), Until) of
        ok -> create(existing(StreamId) ++ [anchor], true, #{}, Until);
        {error, _} = Error -> Error
    end.

create(Path, Data, Options, Until) ->
    case call(fun(Timeout) -> khepri_adv:create(store_id(), Path, Data, options(Options, Timeout)) end, Until) of
        {ok, _} -> ok;
        {error, {khepri, mismatching_node, #{node_is_target := true}}} -> ok;
        {error, {khepri, node_not_found, _}} -> {error, not_found};
        {error, {khepri, keep_while_conditions_not_met, _}} -> {error, not_found};
        {error, Other} -> {error, Other}
    end.

keep_while(Reference) ->
    case in_broker() of
        true -> #{keep_while => #{rabbit_db_queue:khepri_queue_path(Reference) => #if_node_exists{exists = true}}};
        false -> #{}
    end.

%% @doc {@link get/2} with a limit of 30 seconds.
-spec get(stream_id()) -> {ok, entry(), revision()} | {error, not_found | term()}.
get(StreamId) ->
    get(StreamId, ?DEFAULT_TIMEOUT).

%% @doc The stream's current root and its revision, as a majority of the metadata store's members has it.
-spec get(stream_id(), timeout()) -> {ok, entry(), revision()} | {error, not_found | term()}.
get(StreamId, Timeout) ->
    ok = rabbitmq_stream_s3_counters:add(metadata, gets),
    Path = manifest(StreamId),
    Read = fun(Left) -> khepri_adv:get(store_id(), Path, #{favor => consistency, timeout => Left}) end,
    case call(Read, until(Timeout)) of
        {ok, Answer} ->
            #{data := {_Uid, _Epoch} = Entry, payload_version := Revision} = props(Answer, Path),
            {ok, Entry, Revision};
        {error, {khepri, node_not_found, _}} ->
            {error, not_found};
        {error, Other} ->
            {error, Other}
    end.

%% @doc {@link put/4} with a limit of 30 seconds.
-spec put(stream_id(), entry(), revision()) ->
    {ok, Old :: entry() | undefined, revision()} | {error, {conflict, entry()} | not_found | term()}.
put(StreamId, Entry, Expected) ->
    put(StreamId, Entry, Expected, ?DEFAULT_TIMEOUT).

%% @doc Names another root as current, if the revision is still the expected one and no writer of a later epoch has been
%% there. Expected revision 0 creates the node, under an anchor only.
%%
%% `Old' is the entry that was replaced; `undefined' if there was none, or if an earlier call with the same entry had
%% succeeded without our hearing of it. After `{error, timeout}' the write may still take effect: calling again with
%% the same entry finds out.
-spec put(stream_id(), entry(), revision(), timeout()) ->
    {ok, Old :: entry() | undefined, revision()} | {error, {conflict, entry()} | not_found | term()}.
put(StreamId, Entry, Expected, Timeout) ->
    ok = rabbitmq_stream_s3_counters:add(metadata, puts),
    {Condition, Options} = precondition(StreamId, Entry, Expected),
    Path = existing(StreamId) ++ [#if_all{conditions = [manifest | Condition]}],
    Write = fun(Left) -> khepri_adv:put(store_id(), Path, Entry, options(Options, Left)) end,
    Result = put_result(call(Write, until(Timeout)), StreamId, Entry),
    ok = rabbitmq_stream_s3_counters:add(metadata, counter(Result)),
    Result.

%% The anchor is a keep_while of the manifest: so the store itself checks it in the same command that creates the node.
precondition(StreamId, _Entry, 0) ->
    Anchored = #{keep_while => #{container(StreamId) ++ [anchor] => #if_node_exists{exists = true}}},
    {[#if_node_exists{exists = false}], Anchored};
precondition(_StreamId, {_Uid, Epoch}, Expected) ->
    NotFenced = #if_data_matches{pattern = {'_', '$1'}, conditions = [{'=<', '$1', Epoch}]},
    {[#if_payload_version{version = Expected}, NotFenced], #{}}.

put_result({ok, Answer}, StreamId, _Entry) ->
    #{payload_version := Revision} = Props = props(Answer, manifest(StreamId)),
    {ok, maps:get(data, Props, undefined), Revision};
put_result({error, {khepri, mismatching_node, #{node_is_target := true, node_props := Props}}}, _StreamId, Entry) ->
    case Props of
        #{data := Entry, payload_version := Revision} -> {ok, undefined, Revision};
        #{data := Stored} -> {error, {conflict, Stored}}
    end;
put_result({error, {khepri, node_not_found, _}}, _StreamId, _Entry) ->
    {error, not_found};
put_result({error, {khepri, keep_while_conditions_not_met, _}}, _StreamId, _Entry) ->
    {error, not_found};
put_result({error, Other}, _StreamId, _Entry) ->
    {error, Other}.

counter({ok, _, _}) -> put_successes;
counter({error, {conflict, _}}) -> put_conflicts;
counter({error, not_found}) -> put_not_founds;
counter({error, _}) -> put_errors.

%% @doc Deletes a stream's container with all that is in it. In a broker the deletion of the queue does this.
-spec delete(stream_id(), timeout()) -> ok | {error, term()}.
delete(StreamId, Timeout) ->
    Path = container(StreamId),
    case call(fun(Left) -> khepri_adv:delete(store_id(), Path, options(#{}, Left)) end, until(Timeout)) of
        {ok, _} -> ok;
        {error, {khepri, node_not_found, _}} -> ok;
        {error, Other} -> {error, Other}
    end.

%% @doc Ids of all streams that have a container, as a majority of the members has it.
-spec streams(timeout()) -> {ok, [stream_id()]} | {error, term()}.
streams(Timeout) ->
    Pattern = ?ROOT ++ [#if_path_matches{regex = any}],
    Read = fun(Left) -> khepri_adv:get_many(store_id(), Pattern, #{favor => consistency, timeout => Left}) end,
    case call(Read, until(Timeout)) of
        {ok, Nodes} -> {ok, lists:sort([Id || [_, _, Id] <- maps:keys(Nodes), is_binary(Id)])};
        {error, {khepri, node_not_found, _}} -> {ok, []};
        {error, Other} -> {error, Other}
    end.

%% @doc Takes the note of discarded tiers over for the writer of an epoch: from then on no earlier writer can note anything. To be called before
%% that writer uploads anything that goes on from a manifest. Two calls, one if it has been done before.
-spec claim_discards(stream_id(), Epoch, timeout()) -> ok | {error, {fenced, Epoch} | not_found | term()} when Epoch :: non_neg_integer().
claim_discards(StreamId, Epoch, Timeout) ->
    claim_until(StreamId, Epoch, until(Timeout)).

claim_until(StreamId, Epoch, Until) ->
    Path = discarded(StreamId),
    Read = fun(Left) -> khepri_adv:get(store_id(), Path, #{favor => consistency, timeout => Left}) end,
    case call(Read, Until) of
        {ok, Answer} -> claim(maps:get(data, props(Answer, Path)), StreamId, Epoch, Until);
        {error, {khepri, node_not_found, _}} -> claim(undefined, StreamId, Epoch, Until);
        {error, Other} -> {error, Other}
    end.

claim(Note, StreamId, Epoch, Until) ->
    case rabbitmq_stream_s3_nif:claim_discard(Note, Epoch, erlang:system_time(millisecond)) of
        own ->
            ok;
        {take_over, Mine} ->
            case put_note(StreamId, Mine, is_still(Note), Until) of
                %% Somebody was faster.
                {error, conflict} -> claim_until(StreamId, Epoch, Until);
                Answer -> Answer
            end;
        {fenced, Later} ->
            {error, {fenced, Later}}
    end.

is_still(undefined) -> #if_node_exists{exists = false};
is_still(Note) -> #if_data_matches{pattern = Note}.

%% @doc Notes when the writer of an epoch has discarded the stream's tier, in milliseconds since the Unix epoch: objects stored before that belong
%% to it, unless the manifest lists them. To be called before the manifest that takes its place is put. A conflict: a later writer has the note.
-spec discard(stream_id(), AtMs :: integer(), Epoch :: non_neg_integer(), timeout()) -> ok | {error, conflict | not_found | term()}.
discard(StreamId, AtMs, Epoch, Timeout) ->
    NotFenced = #if_data_matches{pattern = {'_', '$1'}, conditions = [{'=<', '$1', Epoch}]},
    put_note(StreamId, {AtMs, Epoch}, #if_any{conditions = [#if_node_exists{exists = false}, NotFenced]}, until(Timeout)).

put_note(StreamId, Note, Condition, Until) ->
    Path = existing(StreamId) ++ [#if_all{conditions = [discarded, Condition]}],
    case call(fun(Left) -> khepri_adv:put(store_id(), Path, Note, options(#{}, Left)) end, Until) of
        {ok, _} -> ok;
        {error, {khepri, mismatching_node, #{node_is_target := true}}} -> {error, conflict};
        {error, {khepri, node_not_found, _}} -> {error, not_found};
        {error, Other} -> {error, Other}
    end.

%% @doc What a majority of the members knows of a stream; `not_found' is as sure: there is no such stream. Two reads at most.
-spec tier(stream_id(), timeout()) -> {ok, tier()} | {error, not_found | term()}.
tier(StreamId, Timeout) ->
    Until = until(Timeout),
    Path = container(StreamId),
    Children = Path ++ [#if_path_matches{regex = any}],
    Read = fun(Left) -> khepri_adv:get_many(store_id(), Children, #{favor => consistency, timeout => Left}) end,
    case call(Read, Until) of
        {ok, Nodes} when map_size(Nodes) > 0 -> {ok, tier_of(Path, Nodes)};
        {ok, _None} -> exists(Path, Until);
        {error, {khepri, node_not_found, _}} -> exists(Path, Until);
        {error, Other} -> {error, Other}
    end.

tier_of(Path, Nodes) ->
    Root =
        case maps:get(Path ++ [manifest], Nodes, none) of
            #{data := {_Uid, _Epoch} = Entry, payload_version := Revision} -> {Entry, Revision};
            none -> none
        end,
    Discarded =
        case maps:get(Path ++ [discarded], Nodes, none) of
            #{data := {_AtMs, _Of} = Note} -> Note;
            none -> none
        end,
    #{root => Root, discarded => Discarded}.

%% A container without anything in it is one whose anchor is just being written.
exists(Path, Until) ->
    case call(fun(Left) -> khepri_adv:get(store_id(), Path, #{favor => consistency, timeout => Left}) end, Until) of
        {ok, _} -> {ok, #{root => none, discarded => none}};
        {error, {khepri, node_not_found, _}} -> {error, not_found};
        {error, Other} -> {error, Other}
    end.

%% @doc Whether this node leads the metadata store, as far as it knows: for work that one node should do, but may be done by two.
-spec leads() -> boolean().
leads() ->
    case ra_leaderboard:lookup_leader(store_id()) of
        {_StoreId, Node} -> Node =:= node();
        undefined -> false
    end.

%% --- paths and calls -------------------------------------------------------------------------------------------------

container(StreamId) ->
    ?ROOT ++ [StreamId].

manifest(StreamId) ->
    container(StreamId) ++ [manifest].

discarded(StreamId) ->
    container(StreamId) ++ [discarded].

%% Without the condition Khepri would create a missing container on the way, one that no deletion of a queue takes along.
existing(StreamId) ->
    ?ROOT ++ [#if_all{conditions = [StreamId, #if_node_exists{exists = true}]}].

options(Options, Timeout) ->
    %% By the local member: the next read on this node then sees the write.
    Options#{reply_from => local, timeout => Timeout}.

%% Khepri 0.17 and later answer with the path in front, as for reads of many nodes.
props(Answer, Path) ->
    maps:get(Path, Answer, Answer).

until(infinity) ->
    infinity;
until(Timeout) ->
    erlang:monotonic_time(millisecond) + Timeout.

%% Khepri keeps its own limit in most cases only: without a majority a consistent read may hang for good. So each call runs
%% in a process that can be killed.
call(Fun, Until) ->
    Left = left(Until),
    case rabbitmq_stream_s3_task:call(fun() -> Fun(Left) end, Left) of
        {ok, {ok, _} = Ok} -> Ok;
        {ok, {error, _} = Error} -> Error;
        {error, Reason} -> {error, Reason}
    end.

left(infinity) ->
    infinity;
left(Until) ->
    max(0, Until - erlang:monotonic_time(millisecond)).

text(Format, Args) ->
    unicode:characters_to_binary(io_lib:format(Format, Args)).
