%% @doc A host of the history uploader whose committed state is in a process of this VM. It outlives the process that starts it. What it answers to
%% the uploader can be interfered with by a hook.
-module(stream_s3_history_host).
-behaviour(gen_server).
-behaviour(rabbitmq_stream_s3_history_source).

-export([start/0, start/1, stop/1, commit/2, commit_all/2, state/1, await/2, await/3, hook/2]).
-export([pending/1, read_segment/3, acknowledge/2, run_state/2, catalog/2, purged/2]).
-export([init/1, handle_call/3, handle_cast/2]).
-export_type([hook/0]).

-define(TIMEOUT, 60000).

%% Called in the process of the uploader that asks, with the name of the function and its arguments but the first.
-type hook() :: fun((atom(), [term()]) -> go_on | {answer, term()}).

%% @doc Starts one with an empty state.
-spec start() -> pid().
start() -> start(stream_s3_history_state:new()).

%% @doc Starts one with what another has left.
-spec start(stream_s3_history_state:state()) -> pid().
start(State) ->
    {ok, Host} = gen_server:start(?MODULE, State, []),
    Host.

-spec stop(pid()) -> ok.
stop(Host) -> gen_server:stop(Host).

%% @doc Commits a command, and answers what it came to.
-spec commit(pid(), stream_s3_history_state:command()) -> term().
commit(Host, Command) -> gen_server:call(Host, {commit, [Command]}, ?TIMEOUT).

-spec commit_all(pid(), [stream_s3_history_state:command()]) -> term().
commit_all(Host, Commands) -> gen_server:call(Host, {commit, Commands}, ?TIMEOUT).

-spec state(pid()) -> stream_s3_history_state:state().
state(Host) -> gen_server:call(Host, state, ?TIMEOUT).

%% @doc Waits until the state is so.
-spec await(pid(), fun((stream_s3_history_state:state()) -> boolean())) -> ok.
await(Host, Is) -> await(Host, Is, ?TIMEOUT).

%% @doc The same, with another limit in milliseconds.
-spec await(pid(), fun((stream_s3_history_state:state()) -> boolean()), timeout()) -> ok.
await(Host, Is, TimeoutMs) -> gen_server:call(Host, {await, Is}, TimeoutMs).

%% @doc Interferes from now on.
-spec hook(pid(), hook()) -> ok.
hook(Host, Hook) -> gen_server:call(Host, {hook, Hook}, ?TIMEOUT).

%% --- for the uploader ------------------------------------------------------------------------------------------------

%% @private
pending(#{source := Host, from := From, limit := Limit}) ->
    ask(Host, pending, [From, Limit], fun(State) -> {ok, stream_s3_history_state:pending(From, Limit, State)} end).

%% @private
read_segment(Host, Run, Seq) -> ask(Host, read_segment, [Run, Seq], fun(State) -> stream_s3_history_state:read(Run, Seq, State) end).

%% @private
run_state(Host, Run) -> ask(Host, run_state, [Run], fun(State) -> stream_s3_history_state:run_state(Run, State) end).

%% @private
catalog(Host, Run) -> ask(Host, catalog, [Run], fun(State) -> stream_s3_history_state:catalog(Run, State) end).

%% @private
acknowledge(Host, Acknowledgment) ->
    hooked(Host, acknowledge, [Acknowledgment], fun() -> commit(Host, {acknowledge, Acknowledgment}) end).

%% @private
purged(Host, Run) -> hooked(Host, purged, [Run], fun() -> commit(Host, {purged, Run}) end).

%% In the host's process, so that no copy of the state is made.
ask(Host, Function, Args, Query) -> hooked(Host, Function, Args, fun() -> gen_server:call(Host, {query, Query}, ?TIMEOUT) end).

hooked(Host, Function, Args, Call) ->
    Hook = gen_server:call(Host, hook, ?TIMEOUT),
    case Hook(Function, Args) of
        go_on -> Call();
        {answer, Answer} -> Answer
    end.

%% --- the process -----------------------------------------------------------------------------------------------------

%% @private
init(State) -> {ok, #{state => State, hook => fun(_, _) -> go_on end, waiting => []}}.

%% @private
handle_call({commit, Commands}, _From, #{state := State0, waiting := Waiting} = Host) ->
    {State, Answer} = lists:foldl(fun(Command, {S, _}) -> stream_s3_history_state:apply(Command, S) end, {State0, ok}, Commands),
    {Now, Later} = lists:partition(fun({_, Is}) -> Is(State) end, Waiting),
    _ = [gen_server:reply(Caller, ok) || {Caller, _} <- Now],
    {reply, Answer, Host#{state := State, waiting := Later}};
handle_call(state, _From, #{state := State} = Host) -> {reply, State, Host};
handle_call({query, Query}, _From, #{state := State} = Host) -> {reply, Query(State), Host};
handle_call({await, Is}, From, #{state := State, waiting := Waiting} = Host) ->
    case Is(State) of
        true -> {reply, ok, Host};
        false -> {noreply, Host#{waiting := [{From, Is} | Waiting]}}
    end;
handle_call({hook, Hook}, _From, Host) -> {reply, ok, Host#{hook := Hook}};
handle_call(hook, _From, #{hook := Hook} = Host) -> {reply, Hook, Host}.

%% @private
handle_cast(_Unexpected, Host) -> {noreply, Host}.
