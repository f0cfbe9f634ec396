%% @doc Rebuilds what the metadata store had of a stream from the bucket, after it was lost. Never by itself: somebody has to ask.
%%
%% Which root is taken is the core's decision. A stream that has an entry is left alone, also when its reader has made that entry a moment
%% ago. A reader that has begun anew and has persisted nothing is told, and resolves what was adopted like any other manifest,
%% comparison with the local log included.
-module(rabbitmq_stream_s3_adopt).

-include_lib("kernel/include/logger.hrl").

-export([adopt/2]).
-export_type([options/0, adopted/0, refusal/0]).

-define(PAGE, 1000).
-define(LOG_META, #{domain => [rabbitmq, stream_s3]}).

-type stream_id() :: binary().
-type options() :: #{
    %% Only says what would be done.
    dry_run => boolean(),
    %% This root and no other.
    root => {Epoch :: non_neg_integer(), Uid :: 0..16#FFFFFFFF}
}.
%% {@link rabbitmq_stream_s3_nif:adoptable()} with the key of the root, and the revision of the entry unless it was a dry run.
-type adopted() :: #{stream := stream_id(), key := binary(), revision => pos_integer(), atom() => term()}.
%% What is in the way, and a sentence for people.
-type refusal() :: {exists | no_root | unsound | fenced | no_member | store | metadata, Text :: binary()}.

%% @doc Finds the newest root of which all that it lists is there, and makes it the stream's. To be called on a node with a member of the
%% stream, unless the stream is anchored. Lists all objects of the stream, and reads each root and each group: does not read fragments.
%% Waits for the store and for the metadata store.
-spec adopt(stream_id(), options()) -> {ok, adopted()} | {error, refusal()}.
adopt(StreamId, Options) ->
    Known = #{stream => StreamId, named => maps:get(root, Options, undefined)},
    Look = [fun absent/1, fun member/1, fun list/1, fun search/1, fun not_fenced/1],
    Act =
        case maps:get(dry_run, Options, false) of
            true -> [];
            false -> [fun anchor/1, fun put/1, fun tell/1]
        end,
    case steps(Known, Look ++ Act) of
        {ok, #{adoptable := Adoptable, key := Key} = All} ->
            {ok, maps:merge(Adoptable#{stream => StreamId, key => Key}, maps:with([revision], All))};
        {error, _} = Error ->
            Error
    end.

steps(Known, []) ->
    {ok, Known};
steps(Known, [Step | Steps]) ->
    case Step(Known) of
        {ok, Found} -> steps(maps:merge(Known, Found), Steps);
        {error, _} = Error -> Error
    end.

absent(#{stream := StreamId}) ->
    case rabbitmq_stream_s3_metadata:tier(StreamId, timeout()) of
        {ok, #{root := none}} -> {ok, #{anchored => true}};
        {error, not_found} -> {ok, #{anchored => false}};
        {ok, #{root := {Entry, Revision}}} -> {error, exists(Entry, Revision)};
        {error, Reason} -> {error, metadata(Reason)}
    end.

%% A member knows the name by which osiris and, in a broker, the queue goes.
member(#{stream := StreamId, anchored := Anchored}) ->
    Writers = [{writer, Pid} || {Id, Pid} <- rabbitmq_stream_s3_log:writers(), Id =:= StreamId],
    Replicas = [{replica, Pid} || {Id, Pid} <- rabbitmq_stream_s3_log:replicas(), Id =:= StreamId],
    case Writers ++ Replicas of
        [{writer, Writer} | _] -> writer(Writer);
        [{replica, Replica} | _] -> {ok, #{reference => reference(Replica), epoch => unknown}};
        [] when Anchored -> {ok, #{reference => none, epoch => unknown}};
        [] -> {error, {no_member, <<"the stream has no member on this node: ask on one that has">>}}
    end.

writer(Writer) ->
    case rabbitmq_stream_s3_log:context(Writer, timeout()) of
        {ok, #{reference := Reference} = Context} ->
            case rabbitmq_stream_s3_log:epoch(Context) of
                {ok, Epoch} -> {ok, #{reference => Reference, epoch => Epoch}};
                {error, Reason} -> {error, {no_member, rabbitmq_stream_s3_problems:text(Reason)}}
            end;
        {error, Reason} ->
            {error, {no_member, rabbitmq_stream_s3_problems:text(Reason)}}
    end.

reference(Replica) ->
    #{reference := Reference} = osiris_util:get_reader_context(Replica),
    Reference.

list(#{stream := StreamId}) ->
    list(rabbitmq_stream_s3_store:key_prefix(StreamId), undefined, []).

list(Prefix, From, Pages) ->
    case rabbitmq_stream_s3_store:list(Prefix, From, ?PAGE, timeout()) of
        {ok, #{objects := Objects, next := undefined}} -> {ok, #{objects => lists:append([Objects | Pages])}};
        {ok, #{objects := Objects, next := Next}} -> list(Prefix, Next, [Objects | Pages]);
        {error, Error} -> {error, store(Error)}
    end.

search(#{stream := StreamId, objects := Objects, named := Named}) ->
    Prefix = rabbitmq_stream_s3_config:get(prefix),
    read(rabbitmq_stream_s3_nif:adoption_begin(Prefix, StreamId, Objects, Named), StreamId).

read(Search, StreamId) ->
    case rabbitmq_stream_s3_nif:adoption_next(Search) of
        {read, Key} ->
            case rabbitmq_stream_s3_store:get(Key, whole, timeout()) of
                {ok, #{body := Body}} -> read(rabbitmq_stream_s3_nif:adoption_found(Body, Search), StreamId);
                {error, {not_found, _}} -> read(rabbitmq_stream_s3_nif:adoption_found(not_found, Search), StreamId);
                %% Not to be known is not to be damaged.
                {error, Error} -> {error, store(Error)}
            end;
        {take, #{root := {Uid, Epoch}} = Adoptable} ->
            {ok, #{adoptable => Adoptable, key => rabbitmq_stream_s3_store:root_key(StreamId, Epoch, Uid)}};
        {refuse, []} ->
            {error, {no_root, <<"the bucket has no such root of the stream">>}};
        {refuse, Rejected} ->
            {error, {unsound, iolist_to_binary(lists:join("; ", [rejected(StreamId, One) || One <- Rejected]))}}
    end.

rejected(StreamId, {{Uid, Epoch}, Why}) ->
    [rabbitmq_stream_s3_store:root_key(StreamId, Epoch, Uid), ": ", Why].

%% A writer of an earlier epoch would be fenced for good by an entry of a later one.
not_fenced(#{epoch := Epoch, adoptable := #{root := {_Uid, Of}}}) when is_integer(Epoch), Epoch < Of ->
    {error, {fenced, text("the root is of epoch ~b, but the stream's writer is of epoch ~b and could never replace it", [Of, Epoch])}};
not_fenced(#{}) ->
    {ok, #{}}.

anchor(#{reference := none}) ->
    {ok, #{}};
anchor(#{stream := StreamId, reference := Reference}) ->
    case rabbitmq_stream_s3_metadata:anchor(StreamId, Reference, timeout()) of
        ok -> {ok, #{}};
        {error, not_found} -> {error, {metadata, rabbitmq_stream_s3_problems:text(no_queue)}};
        {error, Reason} -> {error, metadata(Reason)}
    end.

put(#{stream := StreamId, adoptable := #{root := Entry, range := {First, Next}, why := Why}, key := Key}) ->
    case rabbitmq_stream_s3_metadata:put(StreamId, Entry, 0, timeout()) of
        {ok, _Old, Revision} ->
            ?LOG_NOTICE(
                "stream ~ts: ~ts is adopted, with offsets ~b to ~b: ~ts", [StreamId, Key, First, Next - 1, Why], ?LOG_META
            ),
            {ok, #{revision => Revision}};
        {error, {conflict, Other}} ->
            {error, exists(Other, unknown)};
        {error, not_found} ->
            {error, {metadata, <<"the metadata store does not know the stream (any more)">>}};
        {error, Reason} ->
            {error, metadata(Reason)}
    end.

%% The reader, wherever it is, and who keeps the manifest for replicas.
tell(#{stream := StreamId, adoptable := #{root := {_Uid, Epoch}}}) ->
    Nodes = [node() | nodes()],
    ok = rabbitmq_stream_s3_reconciler:adopted(Nodes, StreamId),
    ok = rabbitmq_stream_s3_replicas:broadcast(Nodes, StreamId, Epoch, reset),
    {ok, #{}}.

exists({Uid, Epoch}, Revision) ->
    {exists, text("the stream has an entry already: root ~b.~8.16.0b at revision ~tp; nothing was lost, or a reader has begun anew", [Epoch, Uid, Revision])}.

store(Error) -> {store, rabbitmq_stream_s3_problems:text({store, Error})}.
metadata(Reason) -> {metadata, rabbitmq_stream_s3_problems:text({metadata, Reason})}.

%% Of one request.
timeout() ->
    rabbitmq_stream_s3_config:get(retention_timeout_ms).

text(Format, Args) ->
    unicode:characters_to_binary(io_lib:format(Format, Args)).
