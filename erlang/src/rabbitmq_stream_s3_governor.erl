%% @doc Paces the uploads of this node: how many run at once, and how many bytes a second they are charged.
%%
%% The native governor decides, and runs native transfers by itself; this process owns it, and runs the funs that are
%% submitted. Submitting and cancelling native transfers does not pass through this process. A submission is charged its size
%% once, when it is admitted; submissions are admitted in the order in which they come; one that is larger than the burst is
%% admitted when the bucket is full, and leaves a debt.
%%
%% Everything submitted is answered exactly once with `{transfer_result, Ref, Result}', unless `ReplyTo' is dead: then
%% the work is dropped. Cancelled work is answered with `{error, cancelled}', or with its result if it had ended before.
-module(rabbitmq_stream_s3_governor).

-behaviour(gen_server).

-export([start_link/1, submit/4, cancel/1, set_rate/2, set_concurrency/1, info/0]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2, terminate/2]).
-export_type([rate/0, options/0, transfer/0]).

-define(HANDLE, {?MODULE, handle}).
%% The native governor answers a stop within two seconds.
-define(STOP_WAIT_MS, 5000).

%% Bytes a second.
-type rate() :: unlimited | pos_integer().
%% burst: bytes that may be admitted at once; a fifth of the rate unless given. concurrency: work that runs at once; as
%% configured (upload_concurrency) unless given.
-type options() :: #{rate := rate(), burst => pos_integer() | undefined, concurrency => pos_integer()}.
%% The fragment that Meta describes, of the segment files in Dir.
-type transfer() ::
    {fragment, rabbitmq_stream_s3_nif:store(), rabbitmq_stream_s3_nif:stream_id(), Dir :: binary() | string(),
        rabbitmq_stream_s3_nif:meta()}.
-type task() :: fun(() -> term()).

-record(job, {
    ref :: term(),
    reply_to :: pid(),
    task :: task(),
    %% undefined while it waits.
    pid :: pid() | undefined
}).

-record(state, {
    governor :: rabbitmq_stream_s3_nif:governor(),
    %% By the name that the native governor knows them by. A job leaves when it is answered.
    jobs = #{} :: #{reference() => #job{}},
    %% Processes that run, or have been killed and are about to end. Each holds a permit until it has ended.
    running = #{} :: #{pid() => reference()}
}).

%% @doc Starts the governor of this node.
-spec start_link(options()) -> gen_server:start_ret().
start_link(Options) ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, Options, []).

%% @doc Queues work of `Size' bytes. `ReplyTo' gets `{transfer_admitted, Ref}' when a native transfer starts, and
%% `{transfer_result, Ref, Result}' once when the work is over: `{ok, Uid}' or `{error, Reason}', and of a fun whatever
%% it returns. Never blocks. Raises `badarg' while there is no governor.
-spec submit(task() | transfer(), Size :: non_neg_integer(), ReplyTo :: pid(), Ref :: term()) -> ok.
submit(Task, Size, ReplyTo, Ref) when is_function(Task, 0), is_integer(Size), Size >= 0, is_pid(ReplyTo) ->
    _ = handle(),
    gen_server:cast(?MODULE, {submit, Task, Size, ReplyTo, Ref});
submit({fragment, _Store, _StreamId, _Dir, _Meta} = Transfer, Size, ReplyTo, Ref) ->
    try
        rabbitmq_stream_s3_nif:governor_submit(handle(), Transfer, Size, ReplyTo, Ref)
    catch
        error:{badarg, Text} -> rabbitmq_stream_s3_nif:misuse(Text, [Transfer, Size, ReplyTo, Ref])
    end.

%% @doc Drops what waits and aborts what runs. Unknown refs are ignored. Never blocks.
-spec cancel([Ref :: term()]) -> ok.
cancel(Refs) when is_list(Refs) ->
    ok = rabbitmq_stream_s3_nif:governor_cancel(handle(), Refs),
    gen_server:cast(?MODULE, {cancel, Refs}).

%% @doc Changes the rate from now on. What has been charged stays charged.
-spec set_rate(rate(), Burst :: pos_integer() | undefined) -> ok.
set_rate(Rate, Burst) ->
    try
        rabbitmq_stream_s3_nif:governor_set_rate(handle(), Rate, burst(Rate, Burst))
    catch
        error:{badarg, Text} -> rabbitmq_stream_s3_nif:misuse(Text, [Rate, Burst])
    end.

%% @doc Changes how much runs at once. What runs already goes on.
-spec set_concurrency(pos_integer()) -> ok.
set_concurrency(Concurrency) ->
    try
        rabbitmq_stream_s3_nif:governor_set_concurrency(handle(), Concurrency)
    catch
        error:{badarg, Text} -> rabbitmq_stream_s3_nif:misuse(Text, [Concurrency])
    end.

%% @doc The governor's numbers, under their metric names without the prefix of the plugin.
-spec info() -> #{atom() => non_neg_integer()}.
info() ->
    rabbitmq_stream_s3_nif:governor_info(handle()).

handle() ->
    persistent_term:get(?HANDLE).

burst(unlimited, undefined) -> 1;
burst(Rate, undefined) when is_integer(Rate) -> max(1, Rate div 5);
burst(_Rate, Burst) -> Burst.

%% @private
init(Options) ->
    process_flag(trap_exit, true),
    Rate = maps:get(rate, Options, unlimited),
    Concurrency =
        case Options of
            #{concurrency := N} -> N;
            #{} -> rabbitmq_stream_s3_config:get(upload_concurrency)
        end,
    Native = #{
        rate => Rate,
        burst => burst(Rate, maps:get(burst, Options, undefined)),
        concurrency => Concurrency,
        owner => self()
    },
    case rabbitmq_stream_s3_nif:governor_start(Native) of
        {ok, Governor} ->
            persistent_term:put(?HANDLE, Governor),
            {ok, #state{governor = Governor}};
        {error, {Key, Text}} ->
            {stop, {bad_option, Key, Text}}
    end.

%% @private
handle_call(Request, _From, State) ->
    {stop, {unknown_call, Request}, State}.

%% @private
handle_cast({submit, Task, Size, ReplyTo, Ref}, #state{governor = Governor, jobs = Jobs} = State) ->
    Name = make_ref(),
    ok = rabbitmq_stream_s3_nif:governor_submit(Governor, external, Size, ReplyTo, Name),
    {noreply, State#state{jobs = Jobs#{Name => #job{ref = Ref, reply_to = ReplyTo, task = Task}}}};
handle_cast({cancel, Refs}, #state{jobs = Jobs} = State) ->
    Wanted = maps:from_keys(Refs, true),
    Names = [Name || Name := #job{ref = Ref} <- Jobs, is_map_key(Ref, Wanted)],
    {noreply, lists:foldl(fun(Name, S) -> finish(Name, {error, cancelled}, abort(Name, S)) end, State, Names)}.

%% @private
handle_info({governor_run, Name}, #state{governor = Governor, jobs = Jobs, running = Running} = State) ->
    case Jobs of
        #{Name := #job{task = Task} = Job} ->
            Pid = run(Name, Task),
            {noreply, State#state{jobs = Jobs#{Name := Job#job{pid = Pid}}, running = Running#{Pid => Name}}};
        #{} ->
            %% Cancelled in the moment in which it was admitted.
            ok = rabbitmq_stream_s3_nif:governor_finished(Governor, Name),
            {noreply, State}
    end;
handle_info({governor_dropped, Name, cancelled}, State) ->
    {noreply, finish(Name, {error, cancelled}, State)};
handle_info({governor_dropped, Name, dead}, #state{jobs = Jobs} = State) ->
    #state{} = Aborted = abort(Name, State),
    {noreply, Aborted#state{jobs = maps:remove(Name, Jobs)}};
handle_info({task_result, Name, Result}, State) ->
    {noreply, finish(Name, Result, State)};
handle_info({'EXIT', Pid, Reason}, #state{governor = Governor, running = Running} = State) ->
    case maps:take(Pid, Running) of
        {Name, Rest} ->
            ok = rabbitmq_stream_s3_nif:governor_finished(Governor, Name),
            %% Answered already, unless somebody else killed it.
            Died = {error, {panic, text("~0tp", [Reason])}},
            {noreply, finish(Name, Died, State#state{running = Rest})};
        error ->
            %% Linked by somebody else, who has ended: no business of this process.
            {noreply, State}
    end.

%% @private
terminate(_Reason, #state{governor = Governor, jobs = Jobs} = State) ->
    persistent_term:erase(?HANDLE),
    _ = lists:foldl(fun(Name, S) -> finish(Name, {error, cancelled}, abort(Name, S)) end, State, maps:keys(Jobs)),
    Ref = make_ref(),
    ok = rabbitmq_stream_s3_nif:governor_stop(Governor, self(), Ref),
    receive
        {governor_stopped, Ref} -> ok
    after ?STOP_WAIT_MS ->
        logger:error("The native governor did not stop within ~b ms; its transfers end by themselves", [?STOP_WAIT_MS])
    end.

%% Linked, so that nothing goes on running without the process that accounts for it.
run(Name, Task) ->
    Governor = self(),
    spawn_link(fun() ->
        Result =
            try
                Task()
            catch
                Class:Reason:Stacktrace ->
                    {error, {panic, text("~tp:~0tp~n~tp", [Class, Reason, Stacktrace])}}
            end,
        Governor ! {task_result, Name, Result}
    end).

%% Ends the job's process, if it runs. Its permit comes back with its exit signal.
abort(Name, #state{governor = Governor, jobs = Jobs} = State) ->
    case Jobs of
        #{Name := #job{pid = undefined}} -> ok = rabbitmq_stream_s3_nif:governor_cancel(Governor, [Name]);
        #{Name := #job{pid = Pid}} -> exit(Pid, kill);
        #{} -> ok
    end,
    State.

%% Answers the job, unless that has been done.
finish(Name, Result, #state{jobs = Jobs} = State) ->
    case maps:take(Name, Jobs) of
        {#job{ref = Ref, reply_to = ReplyTo}, Rest} ->
            ReplyTo ! {transfer_result, Ref, Result},
            State#state{jobs = Rest};
        error ->
            State
    end.

text(Format, Args) ->
    unicode:characters_to_binary(io_lib:format(Format, Args)).
