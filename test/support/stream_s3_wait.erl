%% @doc Waiting for what nobody announces, such as a number in a status. Where there is a message or a call to wait for, that is better.
-module(stream_s3_wait).

-export([eventually/1, eventually/2, kill/1]).

%% A deadline for what never comes, not a measure of how long something takes.
-define(TIMEOUT_MS, 60000).
-define(LOOK_MS, 20).

%% @doc Waits until the function answers true.
-spec eventually(fun(() -> boolean())) -> ok.
eventually(IsSo) ->
    eventually(true, IsSo).

%% @doc Waits until the function answers this. Raises `{never, Expected, Last}' after a minute, with what it answered last.
-spec eventually(term(), fun(() -> term())) -> ok.
eventually(Expected, Fun) ->
    eventually(Expected, Fun, erlang:monotonic_time(millisecond) + ?TIMEOUT_MS).

eventually(Expected, Fun, Deadline) ->
    case Fun() of
        Expected ->
            ok;
        Other ->
            erlang:monotonic_time(millisecond) < Deadline orelse error({never, Expected, Other}),
            receive
            after ?LOOK_MS -> eventually(Expected, Fun, Deadline)
            end
    end.

%% @doc Kills a process and waits until it is gone.
-spec kill(pid()) -> ok.
kill(Pid) ->
    Monitor = monitor(process, Pid),
    exit(Pid, kill),
    receive
        {'DOWN', Monitor, process, Pid, _} -> ok
    end.
