%% @doc What this node knows of the tiers of streams that it has a replica of: manifests as the writers' nodes persist them.
%%
%% A reader sends the edits of each persist to all nodes that its own is connected to; who has a replica of the stream takes them. What is
%% sent may be lost, and nobody waits for an answer: whether edits continue what is known here is the core's decision, and if
%% they do not, the whole manifest is read anew from the metadata store and the object store. Until that is done the
%% stream's range is unresolved here. A manifest that a message too few leaves old is found by looking each `reconciliation_interval_ms'.
-module(rabbitmq_stream_s3_replicas).
-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").
-include("rabbitmq_stream_s3.hrl").

-export([start_link/0, broadcast/4, look/0, look_soon/1, status/0]).
-export([init/1, handle_continue/2, handle_call/3, handle_cast/2, handle_info/2]).
-export_type([edits/0]).

%% How soon to look again for a replica that has ended: the next leader starts it anew within about that time.
-define(SOON_MS, 500).
-define(LOOK_TIMEOUT_MS, 30000).
-define(LOG_META, #{domain => [rabbitmq, stream_s3]}).

-type stream_id() :: binary().
%% Revision in front of the edits and after them, and the edits of one persist, oldest first.
-type edits() :: {Previous :: non_neg_integer(), Revision :: pos_integer(), [#edit{}]}.

-record(replica, {
    pid :: pid(),
    monitor :: reference(),
    %% The epoch of the writer that persisted the manifest which is in the cache; pending: none is.
    known = pending :: pending | {epoch, non_neg_integer()},
    %% The tag of the process that reads the manifest anew, or the timer until the next attempt.
    sync = none :: none | {running | waiting, reference()},
    failures = 0 :: non_neg_integer(),
    %% Edits that have come meanwhile, newest first, with their epochs.
    later = [] :: [{non_neg_integer(), edits() | reset}],
    %% The tag of the process that trims the local log, and whether there has been news since it began.
    trim = none :: none | {reference(), Again :: boolean()},
    problems :: rabbitmq_stream_s3_problems:state()
}).
-record(state, {
    replicas = #{} :: #{stream_id() => #replica{}},
    timer = none :: none | reference()
}).

%% --- interface -------------------------------------------------------------------------------------------------------

%% @doc Starts the server of this node.
-spec start_link() -> {ok, pid()} | ignore | {error, term()}.
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

%% @doc Tells the given nodes what the writer of an epoch has persisted. `reset': another tier in the place of the one so far. Never waits: to a node that does not listen nothing is sent.
-spec broadcast([node()], stream_id(), Epoch :: non_neg_integer(), edits() | reset) -> ok.
broadcast(Nodes, StreamId, Epoch, Edits) ->
    Message = {'$gen_cast', {persisted, StreamId, Epoch, Edits}},
    lists:foreach(fun(Node) -> erlang:send({?MODULE, Node}, Message, [noconnect, nosuspend]) end, Nodes).

%% @doc Looks for replicas now, and whether what is known of each is still current. Does not wait for the latter.
-spec look() -> ok | {error, term()}.
look() ->
    gen_server:call(?MODULE, look, infinity).

%% @doc Has these nodes look for their replicas soon. Waits for nobody. No cast: a node with an older version passes over what is none.
-spec look_soon([node()]) -> ok.
look_soon(Nodes) ->
    lists:foreach(fun(Node) -> erlang:send({?MODULE, Node}, look_soon, [noconnect, nosuspend]) end, Nodes).

%% @doc How many streams whose writer is elsewhere have a manifest here, and how many wait for one. Table lookups.
-spec status() -> #{resolved := non_neg_integer(), pending := non_neg_integer()}.
status() ->
    Streams = [Id || Id <- rabbitmq_stream_s3_manifest_cache:streams(), rabbitmq_stream_s3_registry:whereis(Id) =:= undefined],
    {Pending, Resolved} = lists:partition(
        fun(Id) -> rabbitmq_stream_s3_manifest_cache:range(Id) =:= {error, unresolved} end, Streams
    ),
    #{resolved => length(Resolved), pending => length(Pending)}.

%% --- server ----------------------------------------------------------------------------------------------------------

%% @private
init([]) ->
    %% What an earlier server left: nobody keeps it up to date any more.
    [ok = forget(StreamId) || StreamId <- rabbitmq_stream_s3_manifest_cache:streams()],
    {ok, #state{}, {continue, look}}.

%% @private
handle_continue(look, State) ->
    {_, Next} = look(State),
    {noreply, Next}.

%% @private
handle_call(look, _From, State) ->
    {Result, Next} = look(State),
    {reply, Result, Next}.

%% @private
handle_cast({persisted, StreamId, Epoch, Edits}, #state{replicas = Replicas} = State) ->
    case Replicas of
        #{StreamId := Replica} -> {noreply, keep(StreamId, follow(StreamId, Epoch, Edits, Replica), State)};
        %% Of no concern here, or of a replica that has just been added, which the next look finds.
        #{} -> {noreply, State}
    end.

%% @private
handle_info({timeout, Timer, look}, #state{timer = Timer} = State) ->
    {_, Next} = look(State),
    {noreply, Next};
handle_info(look_soon, State) ->
    {noreply, look_in(?SOON_MS, State)};
handle_info({timeout, Timer, {sync, StreamId}}, #state{replicas = Replicas} = State) ->
    case Replicas of
        #{StreamId := #replica{sync = {waiting, Timer}} = Replica} ->
            {noreply, keep(StreamId, sync(StreamId, Replica#replica{sync = none}), State)};
        #{} ->
            {noreply, State}
    end;
handle_info({synced, StreamId, Tag, Result}, #state{replicas = Replicas} = State) ->
    case Replicas of
        #{StreamId := #replica{sync = {running, Tag}} = Replica} ->
            {noreply, keep(StreamId, synced(Result, StreamId, Replica#replica{sync = none}), State)};
        #{} ->
            {noreply, State}
    end;
handle_info({trimmed, StreamId, Tag, Result}, #state{replicas = Replicas} = State) ->
    case Replicas of
        #{StreamId := #replica{trim = {Tag, Again}} = Replica} ->
            Trimmed = trimmed(Result, Replica#replica{trim = none}),
            {noreply, keep(StreamId, case Again of true -> trim(StreamId, Trimmed); false -> Trimmed end, State)};
        #{} ->
            {noreply, State}
    end;
handle_info({'DOWN', Monitor, process, _Pid, _Reason}, #state{replicas = Replicas} = State) ->
    case [StreamId || {StreamId, #replica{monitor = M}} <- maps:to_list(Replicas), M =:= Monitor] of
        [StreamId] -> {noreply, look_in(?SOON_MS, left(StreamId, State))};
        [] -> {noreply, State}
    end;
handle_info(_Stale, State) ->
    {noreply, State}.

keep(StreamId, Replica, #state{replicas = Replicas} = State) ->
    State#state{replicas = Replicas#{StreamId => Replica}}.

%% --- which streams ---------------------------------------------------------------------------------------------------

look(State0) ->
    State = look_in(rabbitmq_stream_s3_config:get(reconciliation_interval_ms), State0),
    Look = fun() -> wanted(rabbitmq_stream_s3_log:replicas(), rabbitmq_stream_s3_queue:tiered()) end,
    case rabbitmq_stream_s3_task:call(Look, ?LOOK_TIMEOUT_MS) of
        {ok, Found} -> {ok, lists:foldl(fun found/2, no_longer(Found, State), Found)};
        {error, Reason} -> {{error, Reason}, State}
    end.

%% A stream that is not tiered any more is nobody's to keep up to date. One whose replica has just ended is let go a moment early.
no_longer(Found, #state{replicas = Replicas} = State) ->
    lists:foldl(fun let_go/2, State, maps:keys(maps:without([StreamId || {StreamId, _} <- Found], Replicas))).

let_go(StreamId, #state{replicas = Replicas} = State) ->
    #{StreamId := #replica{monitor = Monitor}} = Replicas,
    true = demonitor(Monitor, [flush]),
    left(StreamId, State).

look_in(Delay, #state{timer = Timer} = State) ->
    _ = Timer =/= none andalso erlang:cancel_timer(Timer),
    State#state{timer = erlang:start_timer(Delay, self(), look)}.

wanted(Found, Overrides) ->
    Default = rabbitmq_stream_s3_config:get(tiered),
    [
        One
     || {StreamId, _} = One <- Found,
        maps:get(StreamId, Overrides, Default) =:= all,
        rabbitmq_stream_s3_nif:valid_stream_id(StreamId)
    ].

found({StreamId, Pid}, #state{replicas = Replicas} = State) ->
    Replica =
        case Replicas of
            #{StreamId := Known} ->
                Known;
            #{} ->
                ok = forget(StreamId),
                ok = rabbitmq_stream_s3_manifest_cache:pending(StreamId),
                #replica{pid = Pid, monitor = monitor(process, Pid), problems = rabbitmq_stream_s3_problems:new(StreamId)}
        end,
    keep(StreamId, trim(StreamId, sync(StreamId, Replica)), State).

left(StreamId, #state{replicas = Replicas} = State) ->
    {#replica{sync = Sync}, Rest} = maps:take(StreamId, Replicas),
    ok = cancel(Sync),
    ok = forget(StreamId),
    State#state{replicas = Rest}.

cancel(none) ->
    ok;
cancel({running, _Tag}) ->
    ok;
cancel({waiting, Timer}) ->
    _ = erlang:cancel_timer(Timer),
    ok.

%% A stream whose writer is here is its reader's concern.
forget(StreamId) ->
    case rabbitmq_stream_s3_registry:whereis(StreamId) of
        undefined -> rabbitmq_stream_s3_manifest_cache:forget(StreamId);
        _Reader -> ok
    end.

%% --- following -------------------------------------------------------------------------------------------------------

follow(StreamId, Epoch, Edits, #replica{known = pending, later = Later} = Replica) ->
    sync(StreamId, Replica#replica{later = [{Epoch, Edits} | Later]});
follow(StreamId, _Epoch, reset, Replica) ->
    unresolved(StreamId, Replica);
follow(StreamId, Epoch, {Previous, Revision, Edits}, #replica{known = {epoch, Have}} = Replica) ->
    case rabbitmq_stream_s3_manifest_cache:get(StreamId) of
        {resolved, Manifest, _} ->
            case rabbitmq_stream_s3_nif:accept_edits(Manifest, Have, Epoch, {Previous, Revision}, Edits) of
                {accept, Next} ->
                    ok = rabbitmq_stream_s3_manifest_cache:put(StreamId, Next),
                    trim(StreamId, Replica);
                stale ->
                    Replica;
                {resync, Why} ->
                    ?LOG_INFO("stream ~ts: the manifest is read anew, because of ~ts", [StreamId, Why], ?LOG_META),
                    unresolved(StreamId, Replica)
            end;
        _GoneWithTheCache ->
            unresolved(StreamId, Replica)
    end.

%% Old as it may be, it was persisted; but nobody can tell any more how old it is.
unresolved(StreamId, #replica{sync = Sync} = Replica) ->
    ok = forget(StreamId),
    ok = rabbitmq_stream_s3_manifest_cache:pending(StreamId),
    %% One that is under way may find that nothing has changed since what is not known any more.
    ok = cancel(Sync),
    sync(StreamId, Replica#replica{known = pending, sync = none, later = []}).

%% In a process of its own, whose answer carries the tag that is remembered: one that nobody waits for any more is dropped.
sync(StreamId, #replica{sync = none} = Replica) ->
    Timeout = rabbitmq_stream_s3_config:get(persist_timeout_ms),
    Have = have(StreamId, Replica),
    Server = self(),
    Tag = make_ref(),
    Read = fun() -> rabbitmq_stream_s3_replica_reader_resolve:persisted(StreamId, Have, Timeout) end,
    _ = spawn_link(fun() -> Server ! {synced, StreamId, Tag, rabbitmq_stream_s3_task:call(Read, Timeout)} end),
    Replica#replica{sync = {running, Tag}};
sync(_StreamId, Replica) ->
    Replica.

have(_StreamId, #replica{known = pending}) ->
    undefined;
have(StreamId, #replica{known = {epoch, _}}) ->
    case rabbitmq_stream_s3_manifest_cache:get(StreamId) of
        {resolved, _, Revision} -> Revision;
        _ -> undefined
    end.

synced({ok, {ok, Manifest, Epoch}}, StreamId, Replica) ->
    case rabbitmq_stream_s3_registry:whereis(StreamId) of
        undefined -> newer(Manifest, Epoch, StreamId, Replica);
        _Reader -> again(reader_here, StreamId, Replica)
    end;
synced({ok, unchanged}, _StreamId, Replica) ->
    Replica#replica{failures = 0};
synced({ok, {error, {metadata, not_found}}}, _StreamId, #replica{later = []} = Replica) ->
    %% Nothing to ask for until there is news.
    Replica#replica{failures = 0};
synced({ok, {error, Reason}}, StreamId, Replica) ->
    again(Reason, StreamId, Replica);
synced({error, Reason}, StreamId, Replica) ->
    again({metadata, Reason}, StreamId, Replica).

%% Edits may have been taken since it was read.
newer(#manifest{revision = Revision} = Manifest, Epoch, StreamId, #replica{later = Later} = Replica) ->
    case have(StreamId, Replica) of
        Have when is_integer(Have), Have >= Revision ->
            Replica#replica{failures = 0};
        _ ->
            ok = rabbitmq_stream_s3_manifest_cache:put(StreamId, Manifest),
            Known = Replica#replica{known = {epoch, Epoch}, failures = 0, later = []},
            lists:foldl(fun({E, Edits}, R) -> follow(StreamId, E, Edits, R) end, trim(StreamId, Known), lists:reverse(Later))
    end.

again(Reason, StreamId, #replica{failures = Failures} = Replica) ->
    Delay = max(?SOON_MS, rabbitmq_stream_s3_replica_reader_tasks:retry_delay(Reason, Failures + 1)),
    Timer = erlang:start_timer(Delay, self(), {sync, StreamId}),
    Replica#replica{sync = {waiting, Timer}, failures = Failures + 1}.

%% --- the local log ---------------------------------------------------------------------------------------------------

%% Each member of a stream trims its own log. In a process of its own: osiris may be busy with other streams.
trim(StreamId, #replica{known = {epoch, Epoch}, trim = none, pid = Pid} = Replica) ->
    case {rabbitmq_stream_s3_config:get(local_retention), rabbitmq_stream_s3_manifest_cache:get(StreamId)} of
        {uploaded, {resolved, #manifest{next_offset = Next, entries = <<_, _/binary>>}, _Revision}} ->
            Server = self(),
            Tag = make_ref(),
            Timeout = rabbitmq_stream_s3_config:get(retention_timeout_ms),
            _ = spawn_link(fun() -> Server ! {trimmed, StreamId, Tag, trim_log(Pid, {Next, Epoch}, Timeout)} end),
            Replica#replica{trim = {Tag, false}};
        {_PolicyOrNothingToGoBy, _} ->
            Replica
    end;
trim(_StreamId, #replica{known = {epoch, _}, trim = {Tag, _}} = Replica) ->
    Replica#replica{trim = {Tag, true}};
trim(_StreamId, #replica{known = pending} = Replica) ->
    Replica.

trim_log(Pid, Persisted, Timeout) ->
    Until = erlang:monotonic_time(millisecond) + Timeout,
    try
        rabbitmq_stream_s3_retention:local_replica(Pid, Persisted, Until)
    catch
        Class:Reason -> {error, {crashed, {Class, Reason}}}
    end.

trimmed({ok, _Deleted}, #replica{problems = Problems} = Replica) ->
    Replica#replica{problems = rabbitmq_stream_s3_problems:ended(trimming, Problems)};
%% It has ended, which the monitor tells as well.
trimmed({error, no_process}, Replica) ->
    Replica;
trimmed({error, Reason}, #replica{problems = Problems} = Replica) ->
    Replica#replica{problems = rabbitmq_stream_s3_problems:failed(trimming, Reason, Problems)}.
