%% @doc Hears from RabbitMQ of queues that come, go, or get another policy, so that nobody has to wait for the next look. What is
%% missed is found by the look: nothing depends on these events.
%%
%% A queue that is deleted is known here by the name of its queue only, so this process remembers which stream is behind it.
-module(rabbitmq_stream_s3_events).
-behaviour(gen_server).

-export([start_link/0, stream_of/2, queue_changed/0, queue_deleted/1]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2, terminate/2]).

-define(HANDLER, rabbitmq_stream_s3_event_handler).

-type state() :: #{Queue :: term() => StreamId :: binary()}.

%% @doc Starts to listen to the events of this node.
-spec start_link() -> {ok, pid()} | ignore | {error, term()}.
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

%% @doc Remembers a queue's stream. Nobody does outside a broker.
-spec stream_of(Queue :: term(), StreamId :: binary()) -> ok.
stream_of(Queue, StreamId) ->
    gen_server:cast(?MODULE, {stream_of, Queue, StreamId}).

%% @doc A queue has been declared, or has another policy: each node looks which streams to tier. Events come on one node only.
-spec queue_changed() -> ok.
queue_changed() ->
    Nodes = [node() | nodes()],
    _ = gen_server:abcast(Nodes, rabbitmq_stream_s3_reconciler, look_soon),
    rabbitmq_stream_s3_replicas:look_soon(Nodes).

%% @doc A queue has been deleted: the node that knows its stream has what is left of it collected.
-spec queue_deleted(Queue :: term()) -> ok.
queue_deleted(Queue) ->
    _ = gen_server:abcast([node() | nodes()], ?MODULE, {queue_deleted, Queue}),
    ok.

%% @private
-spec init([]) -> {ok, state()}.
init([]) ->
    %% So that the handler is gone before the code is.
    process_flag(trap_exit, true),
    ok = gen_event:add_sup_handler(rabbit_event, ?HANDLER, []),
    {ok, #{}}.

%% @private
handle_call(_Request, _From, State) ->
    {reply, {error, unknown}, State}.

%% @private
handle_cast({stream_of, Queue, StreamId}, State) ->
    {noreply, State#{Queue => StreamId}};
handle_cast({queue_deleted, Queue}, State) ->
    case maps:take(Queue, State) of
        {StreamId, Rest} ->
            ok = rabbitmq_stream_s3_gc:stream_deleted(StreamId),
            {noreply, Rest};
        error ->
            {noreply, State}
    end.

%% @private
handle_info({gen_event_EXIT, ?HANDLER, Reason}, State) ->
    {stop, {handler_ended, Reason}, State};
handle_info(_Stale, State) ->
    {noreply, State}.

%% @private
terminate(_Reason, _State) ->
    _ = gen_event:delete_handler(rabbit_event, ?HANDLER, []),
    ok.
