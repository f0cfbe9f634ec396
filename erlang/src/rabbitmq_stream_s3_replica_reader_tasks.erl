%% @doc Work of one reader that may block: each piece in a process of its own, with a limit, whose result comes as a message.
%%
%% The processes are linked to the reader, which must trap exits: they end with it, and it hears of their end. A state
%% belongs to one reader process.
-module(rabbitmq_stream_s3_replica_reader_tasks).

-export([new/0, start/4, is_running/2, handle/2, cancel_all/1, retry_delay/2]).
-export_type([state/0, kind/0]).

%% A task is killed that much after the moment at which it should have given up by itself.
-define(GRACE_MS, 1000).

%% At most one of each kind runs at a time.
-type kind() :: resolve | persist | group | retention | local_retention.
-record(task, {
    ref :: reference(),
    pid :: pid(),
    timer :: reference()
}).
-opaque state() :: #{kind() => #task{}}.

%% @doc No tasks.
-spec new() -> state().
new() ->
    #{}.

%% @doc Runs `Fun' with the moment (monotonic milliseconds) at which it shall give up. Its value will come out of {@link
%% handle/2}; if it raises, `{error, {crashed, Reason}}' will, and if it does not keep its time, `{error, timeout}'.
-spec start(kind(), fun((Until :: integer()) -> term()), Timeout :: non_neg_integer(), state()) -> state().
start(Kind, Fun, Timeout, Tasks) when not is_map_key(Kind, Tasks) ->
    Owner = self(),
    Ref = make_ref(),
    Until = erlang:monotonic_time(millisecond) + Timeout,
    Pid = spawn_link(fun() -> Owner ! {task_result, Ref, Fun(Until)} end),
    Timer = erlang:start_timer(Until + ?GRACE_MS, self(), {task, Ref}, [{abs, true}]),
    Tasks#{Kind => #task{ref = Ref, pid = Pid, timer = Timer}}.

%% @doc Whether one of this kind runs.
-spec is_running(kind(), state()) -> boolean().
is_running(Kind, Tasks) ->
    is_map_key(Kind, Tasks).

%% @doc Takes a message of a task, of its link, or of its timer.
-spec handle(term(), state()) -> {{kind(), Result :: term()} | none | not_mine, state()}.
handle({task_result, Ref, Result}, Tasks) ->
    finish(#task.ref, Ref, Result, Tasks);
handle({timeout, _, {task, Ref}}, Tasks) ->
    finish(#task.ref, Ref, {error, timeout}, Tasks);
handle({'EXIT', _Pid, normal}, Tasks) ->
    %% After its result, or of one that was given up.
    {none, Tasks};
handle({'EXIT', Pid, Reason}, Tasks) ->
    case finish(#task.pid, Pid, {error, {crashed, Reason}}, Tasks) of
        {none, _} -> {not_mine, Tasks};
        Finished -> Finished
    end;
handle(_Message, Tasks) ->
    {not_mine, Tasks}.

finish(Position, Value, Result, Tasks) ->
    case [{Kind, Task} || {Kind, Task} <- maps:to_list(Tasks), element(Position, Task) =:= Value] of
        [{Kind, Task}] ->
            ok = stop(Task),
            {{Kind, Result}, maps:remove(Kind, Tasks)};
        [] ->
            {none, Tasks}
    end.

%% @doc Ends all tasks. Results that are on their way are dropped by {@link handle/2}.
-spec cancel_all(state()) -> state().
cancel_all(Tasks) ->
    lists:foreach(fun stop/1, maps:values(Tasks)),
    new().

stop(#task{pid = Pid, timer = Timer}) ->
    _ = erlang:cancel_timer(Timer),
    unlink(Pid),
    exit(Pid, kill),
    receive
        {'EXIT', Pid, _} -> ok
    after 0 -> ok
    end.

%% @doc Milliseconds until the next attempt of something that has failed so many times in a row, the last time for this
%% reason: one of the contract, or what the tasks of a reader answer. Anything else waits as long as what an operator
%% has to mend.
-spec retry_delay(Reason :: term(), Failures :: pos_integer()) -> non_neg_integer().
retry_delay(Reason, Failures) ->
    Keys = [upload_retry_delay_ms, upload_retry_delay_max_ms, task_retry_delay_ms, task_retry_delay_max_ms],
    Delays = #{Key => rabbitmq_stream_s3_config:get(Key) || Key <- Keys},
    Class = rabbitmq_stream_s3_nif:error_class(transfer_reason(Reason)),
    rabbitmq_stream_s3_nif:retry_delay(Class, Failures, Delays, rand:uniform()).

%% The core knows the reasons of transfers. What passes by itself is as good as a timeout.
transfer_reason({store, {_Kind, #{reason := Reason}}}) -> Reason;
transfer_reason({metadata, _}) -> timeout;
transfer_reason(no_queue) -> timeout;
transfer_reason(unknown_epoch) -> timeout;
transfer_reason(empty_log) -> timeout;
transfer_reason(conflict) -> timeout;
transfer_reason({gap, _, _}) -> timeout;
transfer_reason({pins, timeout}) -> timeout;
transfer_reason({offset_out_of_range, _}) -> timeout;
transfer_reason(segment_deleted) -> timeout;
transfer_reason(Reason) -> Reason.
