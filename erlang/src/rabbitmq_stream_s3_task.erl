%% @doc Runs a call that may never return in a process of its own.
-module(rabbitmq_stream_s3_task).

-export([call/2]).

%% @doc The value of `Fun()', or `timeout' after so many milliseconds; what `Fun' raises comes back as an error. Whatever
%% `Fun' does then is undone by nobody: its process is killed, but a request it sent may still take effect. The process
%% is linked to the caller, so that it ends with it.
-spec call(fun(() -> Value), timeout()) -> {ok, Value} | {error, timeout | {error | exit | throw, term()}}.
call(Fun, Timeout) ->
    Tag = make_ref(),
    %% An alias, so that an answer that comes too late is dropped instead of staying in the mailbox.
    ReplyTo = alias([reply]),
    %% The process ends normally whatever happens, so the link is felt in one direction only.
    Pid = spawn_link(fun() -> ReplyTo ! {Tag, guarded(Fun)} end),
    receive
        {Tag, Result} ->
            forget(Pid),
            Result
    after Timeout ->
        _ = unalias(ReplyTo),
        unlink(Pid),
        exit(Pid, kill),
        receive
            {Tag, Result} -> Result
        after 0 ->
            {error, timeout}
        end
    end.

guarded(Fun) ->
    try
        {ok, Fun()}
    catch
        Class:Reason -> {error, {Class, Reason}}
    end.

%% A caller that traps exits shall not find a message of ours.
forget(Pid) ->
    unlink(Pid),
    receive
        {'EXIT', Pid, _} -> ok
    after 0 -> ok
    end.
