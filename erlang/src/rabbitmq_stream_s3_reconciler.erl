%% @doc Sees to it that each stream whose writer runs on this node has a reader, unless it is not to be tiered. Released osiris tells nobody when a writer
%% starts, so this process looks: at start, every `reconciliation_interval_ms', soon after a writer has ended, and when asked.
-module(rabbitmq_stream_s3_reconciler).
-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").

-export([start_link/0, reconcile/0, ignore/1, adopted/2]).
-export([init/1, handle_continue/2, handle_call/3, handle_cast/2, handle_info/2]).

%% How soon after the end of a writer to look for the next one: an election takes about that long.
-define(SOON_MS, 500).
%% osiris' supervisor answers late while it starts a writer that has much to recover.
-define(LOOK_TIMEOUT_MS, 30000).
-define(LOG_META, #{domain => [rabbitmq, stream_s3]}).

-record(state, {
    timer :: reference() | undefined,
    %% Monitors of the supervisors of streams; of readers that an earlier reconciler started, of the readers themselves.
    readers = #{} :: #{reference() => {StreamId :: binary(), Writer :: pid(), supervisor | reader}},
    %% Writers of streams that are not to be tiered any more.
    ignored = #{} :: #{pid() => true},
    %% Streams that cannot be tiered, and that the log has told of.
    refused = #{} :: #{StreamId :: binary() => true}
}).

%% @doc Starts the reconciler, which looks at once.
-spec start_link() -> {ok, pid()} | ignore | {error, term()}.
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

%% @doc Looks now. When it returns, each stream whose writer had been there has a reader, which may still be resolving.
%% `not_running': the application does not run; any other error has been logged, and the look that follows may be luckier.
-spec reconcile() -> ok | {error, not_running | term()}.
reconcile() ->
    try
        gen_server:call(?MODULE, reconcile, infinity)
    catch
        exit:{noproc, _} -> {error, not_running}
    end.

%% @doc Leaves this writer alone from now on: its stream has been deleted, and it will end.
-spec ignore(Writer :: pid()) -> ok.
ignore(Writer) ->
    gen_server:cast(?MODULE, {ignore, Writer}).

%% @doc A stream's entry in the metadata store has been rebuilt: its reader, on whichever of these nodes it is, resolves it.
-spec adopted([node()], StreamId :: binary()) -> ok.
adopted(Nodes, StreamId) ->
    lists:foreach(fun(Node) -> gen_server:cast({?MODULE, Node}, {adopted, StreamId}) end, Nodes).

%% @private
init([]) ->
    {ok, #state{}, {continue, look}}.

%% @private
handle_continue(look, State) ->
    {_, Next} = look(State),
    {noreply, Next}.

%% @private
handle_call(reconcile, _From, State) ->
    {Result, Next} = look(State),
    {reply, Result, Next}.

%% @private
handle_cast(look_soon, State) ->
    {noreply, look_in(?SOON_MS, State)};
handle_cast({ignore, Writer}, #state{ignored = Ignored} = State) ->
    {noreply, State#state{ignored = Ignored#{Writer => true}}};
handle_cast({adopted, StreamId}, State) ->
    case rabbitmq_stream_s3_registry:whereis(StreamId) of
        undefined -> ok;
        Reader -> rabbitmq_stream_s3_replica_reader:resolve_anew(Reader)
    end,
    {noreply, State}.

%% @private
handle_info({timeout, Timer, look}, #state{timer = Timer} = State) ->
    {_, Next} = look(State),
    {noreply, Next};
handle_info({'DOWN', Monitor, process, _Pid, Reason}, #state{readers = Readers} = State0) ->
    case maps:take(Monitor, Readers) of
        {{_StreamId, Writer, What}, Rest} ->
            State = State0#state{readers = Rest},
            case What =:= supervisor andalso Reason =:= shutdown andalso is_process_alive(Writer) of
                %% Its reader has failed too often, or the stream is deleted: no hurry.
                true -> {noreply, State};
                false -> {noreply, look_in(?SOON_MS, State)}
            end;
        error ->
            {noreply, State0}
    end;
handle_info(_Stale, State) ->
    {noreply, State}.

look(State0) ->
    State1 = look_in(rabbitmq_stream_s3_config:get(reconciliation_interval_ms), State0),
    %% A reader that was killed together with its writer has let go of nothing.
    ok = rabbitmq_stream_s3_pins:sweep(),
    Look = fun() -> {rabbitmq_stream_s3_log:writers(), rabbitmq_stream_s3_queue:tiered()} end,
    case rabbitmq_stream_s3_task:call(Look, ?LOOK_TIMEOUT_MS) of
        {ok, {Writers, Overrides}} ->
            {ok, attach(Writers, Overrides, forget_dead(Writers, State1))};
        {error, Reason} ->
            ?LOG_WARNING("which streams are to be tiered could not be found out: ~0tP", [Reason, 20], ?LOG_META),
            {{error, Reason}, State1}
    end.

look_in(Delay, #state{timer = Timer} = State) ->
    _ = Timer =/= undefined andalso erlang:cancel_timer(Timer),
    State#state{timer = erlang:start_timer(Delay, self(), look)}.

forget_dead(Writers, #state{ignored = Ignored, refused = Refused} = State) ->
    {Ids, Pids} = lists:unzip(Writers),
    State#state{ignored = maps:with(Pids, Ignored), refused = maps:with(Ids, Refused)}.

attach(Writers, Overrides, State0) ->
    Default = rabbitmq_stream_s3_config:get(tiered),
    {Tiered, Others} = lists:partition(fun({StreamId, _}) -> maps:get(StreamId, Overrides, Default) =:= all end, Writers),
    lists:foreach(fun detach/1, Others),
    lists:foldl(fun attach_one/2, State0, Tiered).

detach({StreamId, _Writer}) ->
    case rabbitmq_stream_s3_registry:whereis(StreamId) of
        undefined -> ok;
        Reader -> rabbitmq_stream_s3_replica_reader:not_tiered(Reader)
    end.

attach_one({StreamId, Writer}, #state{ignored = Ignored, refused = Refused} = State) ->
    IsValid = rabbitmq_stream_s3_nif:valid_stream_id(StreamId),
    case rabbitmq_stream_s3_registry:whereis(StreamId) of
        undefined when not is_map_key(Writer, Ignored), IsValid ->
            start_reader(StreamId, Writer, State);
        undefined when not is_map_key(StreamId, Refused), not IsValid ->
            ?LOG_WARNING("stream ~0tp is not tiered: its name cannot be part of an object key", [StreamId], ?LOG_META),
            State#state{refused = Refused#{StreamId => true}};
        undefined ->
            State;
        Reader ->
            watch(StreamId, Reader, Writer, State)
    end.

%% A reader may be about to end, with its writer or with a supervisor that was killed.
watch(StreamId, Reader, Writer, #state{readers = Readers} = State) ->
    case lists:keymember(StreamId, 1, maps:values(Readers)) of
        true -> State;
        false -> State#state{readers = Readers#{monitor(process, Reader) => {StreamId, Writer, reader}}}
    end.

start_reader(StreamId, Writer, #state{readers = Readers} = State) ->
    case rabbitmq_stream_s3_reader_sup:start_reader(StreamId, Writer) of
        {ok, Supervisor} ->
            State#state{readers = Readers#{monitor(process, Supervisor) => {StreamId, Writer, supervisor}}};
        {error, {shutdown, {failed_to_start_child, _, {already_started, _}}}} ->
            %% Its supervisor restarted it in this moment.
            State;
        {error, Reason} ->
            ?LOG_ERROR("the reader of stream ~ts could not be started: ~0tP", [StreamId, Reason, 20], ?LOG_META),
            State
    end.
