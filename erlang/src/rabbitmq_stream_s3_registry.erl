%% @doc Which process reads a stream, by the stream's id. Also a registry in the sense of OTP's `{via, Module, Name}'.
%%
%% Owns the tables of counters and gauges, so that a stream's numbers live as long as the application.
-module(rabbitmq_stream_s3_registry).
-behaviour(gen_server).

-export([start_link/0, whereis/1, list/0]).
-export([register_name/2, unregister_name/1, whereis_name/1, send/2]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2]).

-define(TABLE, ?MODULE).

-type stream_id() :: binary().

%% @doc Starts the registry.
-spec start_link() -> {ok, pid()} | ignore | {error, term()}.
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

%% @doc The reader of a stream on this node. A table lookup.
-spec whereis(stream_id()) -> pid() | undefined.
whereis(StreamId) ->
    try
        ets:lookup_element(?TABLE, StreamId, 2)
    catch
        error:badarg -> undefined
    end.

%% @doc All readers on this node, by stream id.
-spec list() -> [{stream_id(), pid()}].
list() ->
    try
        lists:sort([{Id, Pid} || {Id, Pid, _} <- ets:tab2list(?TABLE)])
    catch
        error:badarg -> []
    end.

%% @doc For OTP: `yes' if nobody alive has the name.
-spec register_name(stream_id(), pid()) -> yes | no.
register_name(StreamId, Pid) ->
    gen_server:call(?MODULE, {register, StreamId, Pid}, infinity).

%% @doc For OTP.
-spec unregister_name(stream_id()) -> ok.
unregister_name(StreamId) ->
    gen_server:call(?MODULE, {unregister, StreamId}, infinity).

%% @doc For OTP: {@link whereis/1}, but nobody who has died. A supervisor that restarts a reader asks before our 'DOWN' of the
%% last one may have come; were it told `already_started', it would use up the stream's restarts in a moment.
-spec whereis_name(stream_id()) -> pid() | undefined.
whereis_name(StreamId) ->
    case ?MODULE:whereis(StreamId) of
        undefined ->
            undefined;
        Pid ->
            case is_process_alive(Pid) of
                true -> Pid;
                false -> undefined
            end
    end.

%% @doc For OTP.
-spec send(stream_id(), term()) -> pid().
send(StreamId, Message) ->
    case ?MODULE:whereis(StreamId) of
        undefined ->
            exit({badarg, {StreamId, Message}});
        Pid ->
            Pid ! Message,
            Pid
    end.

%% @private
init([]) ->
    ok = rabbitmq_stream_s3_counters:init(),
    ok = rabbitmq_stream_s3_gauges:init(),
    ?TABLE = ets:new(?TABLE, [named_table, protected, {read_concurrency, true}]),
    {ok, #{}}.

%% @private
%% The state maps monitors to stream ids.
handle_call({register, StreamId, Pid}, _From, Monitors0) ->
    Monitors = drop_dead(StreamId, Monitors0),
    Ref = monitor(process, Pid),
    case ets:insert_new(?TABLE, {StreamId, Pid, Ref}) of
        true ->
            {reply, yes, Monitors#{Ref => StreamId}};
        false ->
            true = demonitor(Ref, [flush]),
            {reply, no, Monitors}
    end;
handle_call({unregister, StreamId}, _From, Monitors) ->
    {reply, ok, drop(StreamId, Monitors)}.

%% @private
handle_cast(_Message, State) ->
    {noreply, State}.

%% @private
handle_info({'DOWN', Ref, process, _Pid, _Reason}, Monitors) ->
    case Monitors of
        #{Ref := StreamId} -> {noreply, drop(StreamId, Monitors)};
        #{} -> {noreply, Monitors}
    end;
handle_info(_Message, State) ->
    {noreply, State}.

%% A supervisor restarts a reader before our 'DOWN' of the last one may have come.
drop_dead(StreamId, Monitors) ->
    case ets:lookup(?TABLE, StreamId) of
        [{_, Pid, _}] when node(Pid) =:= node() ->
            case is_process_alive(Pid) of
                true -> Monitors;
                false -> drop(StreamId, Monitors)
            end;
        _ ->
            Monitors
    end.

drop(StreamId, Monitors) ->
    case ets:take(?TABLE, StreamId) of
        [{_, _, Ref}] ->
            true = demonitor(Ref, [flush]),
            maps:remove(Ref, Monitors);
        [] ->
            Monitors
    end.
