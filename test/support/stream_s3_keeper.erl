%% @doc A process that makes something and stays, so that what is bound to the process that made it (a port, a link) outlives
%% Common Test's own processes, which end with each function.
-module(stream_s3_keeper).

-export([start/1, value/1, stop/2]).

%% @doc Runs the function in a new process, which stays. Raises what the function raises.
-spec start(fun(() -> term())) -> pid().
start(Make) ->
    Caller = self(),
    {Pid, Monitor} = spawn_monitor(fun() ->
        Value = Make(),
        Caller ! {self(), made},
        keep(Value)
    end),
    receive
        {Pid, made} ->
            erlang:demonitor(Monitor, [flush]),
            Pid;
        {'DOWN', Monitor, process, Pid, Reason} ->
            error(Reason)
    end.

keep(Value) ->
    receive
        {value, From} ->
            From ! {self(), Value},
            keep(Value);
        {stop, From, Unmake} ->
            From ! {self(), Unmake(Value)};
        _Other ->
            keep(Value)
    end.

%% @doc What the function returned.
-spec value(pid()) -> term().
value(Keeper) ->
    ask(Keeper, {value, self()}).

%% @doc Runs the function with the value in that process and ends it; answers what the function returns.
-spec stop(pid(), fun((term()) -> Answer)) -> Answer.
stop(Keeper, Unmake) ->
    ask(Keeper, {stop, self(), Unmake}).

ask(Keeper, Message) ->
    Monitor = erlang:monitor(process, Keeper),
    Keeper ! Message,
    receive
        {Keeper, Answer} ->
            erlang:demonitor(Monitor, [flush]),
            Answer;
        {'DOWN', Monitor, process, Keeper, Reason} ->
            error(Reason)
    end.
