%% @doc Finds and deletes objects that nothing will ever refer to: orphans of uploads that failed and of processes that died,
%% discarded tiers whose time is over, and all that deleted streams have left behind.
%%
%% A deletion is noticed by the stream's reader, and by a look at the metadata store each `reconciliation_interval_ms'; what both
%% miss is found by the walk over all objects each `gc_interval_ms'. The look and the walk are made by one node, the one that
%% leads the metadata store. Two nodes at once, as around an election, do each other no harm: each proves for itself what it deletes.
%%
%% Work is done by one process at a time, which may be killed at any moment.
-module(rabbitmq_stream_s3_gc).
-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").

-export([start_link/0, run/1, stream_deleted/1, status/0]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2, terminate/2]).

%% The first walk comes soon after the start: a node that is restarted each day would never come to it otherwise.
-define(FIRST_WALK_MS, 600000).
%% When there is nothing better to go by.
-define(AGAIN_MS, 1000).
-define(LOG_META, #{domain => [rabbitmq, stream_s3]}).

-type stream_id() :: binary().
-type job() :: look | walk | {stream, stream_id()} | {manual, delete | dry_run, gen_server:from()}.

-record(state, {
    %% Not begun yet, oldest first.
    waiting = [] :: [job()],
    running = none :: none | {Pid :: pid(), Monitor :: reference(), job()},
    %% Streams that the metadata store had at the last look.
    known = none :: none | [stream_id()],
    %% What the last walk came to.
    last = none :: none | map()
}).

%% @doc Starts the garbage collection.
-spec start_link() -> {ok, pid()} | ignore | {error, term()}.
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

%% @doc Walks over all objects now, whatever `gc_enabled' says: `dry_run' deletes nothing. Waits until the walk has ended.
-spec run(delete | dry_run) ->
    {ok, rabbitmq_stream_s3_gc_pass:report()} | {error, term(), rabbitmq_stream_s3_gc_pass:report()} | {error, term()}.
run(Mode) when Mode =:= delete; Mode =:= dry_run ->
    gen_server:call(?MODULE, {run, Mode}, infinity).

%% @doc A stream was deleted: its objects go, as soon as they are old enough and the metadata store confirms it.
-spec stream_deleted(stream_id()) -> ok.
stream_deleted(StreamId) ->
    gen_server:cast(?MODULE, {stream_deleted, StreamId}).

%% @doc What is done and what waits; the report of the last walk, with the moment of its end (milliseconds since the Unix epoch).
-spec status() -> #{running := job() | none, waiting := [job()], last := map() | none}.
status() ->
    gen_server:call(?MODULE, status).

%% @private
init([]) ->
    %% So that a job ends with this process.
    process_flag(trap_exit, true),
    self() ! {due, look},
    ok = due_in(min(?FIRST_WALK_MS, rabbitmq_stream_s3_config:get(gc_interval_ms)), walk),
    {ok, #state{}}.

%% @private
handle_call({run, Mode}, From, State) ->
    {noreply, enqueue({manual, Mode, From}, State)};
handle_call(status, _From, #state{running = Running, waiting = Waiting, last = Last} = State) ->
    Job =
        case Running of
            none -> none;
            {_, _, Of} -> Of
        end,
    {reply, #{running => Job, waiting => Waiting, last => Last}, State}.

%% @private
handle_cast({stream_deleted, StreamId}, State) ->
    {noreply, enqueue({stream, StreamId}, State)}.

%% @private
handle_info({due, look}, State) ->
    ok = due_in(rabbitmq_stream_s3_config:get(reconciliation_interval_ms), look),
    {noreply, enqueue(look, State)};
handle_info({due, walk}, State) ->
    ok = due_in(rabbitmq_stream_s3_config:get(gc_interval_ms), walk),
    {noreply, enqueue(walk, State)};
handle_info({due, {stream, _StreamId} = Job}, State) ->
    {noreply, enqueue(Job, State)};
handle_info({result, Pid, Result}, #state{running = {Pid, Monitor, Job}} = State) ->
    true = demonitor(Monitor, [flush]),
    {noreply, next(ended(Job, Result, State#state{running = none}))};
handle_info({'DOWN', Monitor, process, _Pid, Reason}, #state{running = {_, Monitor, Job}} = State) ->
    {noreply, next(ended(Job, {error, {crashed, Reason}}, State#state{running = none}))};
handle_info({'EXIT', _Pid, _Reason}, State) ->
    %% Of a job, whose end is heard of in another way, or of the supervisor, which also says shutdown.
    {noreply, State};
handle_info(_Stale, State) ->
    {noreply, State}.

%% @private
terminate(_Reason, #state{running = none}) ->
    ok;
terminate(_Reason, #state{running = {Pid, _, _}}) ->
    exit(Pid, kill),
    ok.

due_in(Ms, Job) ->
    _ = erlang:send_after(Ms, self(), {due, Job}),
    ok.

enqueue(Job, #state{waiting = Waiting} = State) ->
    case lists:member(Job, Waiting) of
        true -> State;
        false -> next(State#state{waiting = Waiting ++ [Job]})
    end.

next(#state{running = none, waiting = [Job | Waiting]} = State) ->
    Server = self(),
    {Pid, Monitor} = spawn_opt(fun() -> Server ! {result, self(), work(Job)} end, [link, monitor]),
    State#state{running = {Pid, Monitor, Job}, waiting = Waiting};
next(State) ->
    State.

%% --- in a process of its own -----------------------------------------------------------------------------------------

work(look) ->
    {rabbitmq_stream_s3_metadata:leads(), rabbitmq_stream_s3_metadata:streams(rabbitmq_stream_s3_config:get(retention_timeout_ms))};
work(walk) ->
    %% While an operator has paused the node, a stream that the metadata store does not have may be about to be adopted.
    case rabbitmq_stream_s3_pause:node_since() =:= none andalso rabbitmq_stream_s3_metadata:leads() of
        true -> rabbitmq_stream_s3_gc_pass:run(#{streams => all, optional => optional(), always => delete});
        false -> not_leader
    end;
work({stream, StreamId}) ->
    rabbitmq_stream_s3_gc_pass:run(#{streams => StreamId, optional => count, always => delete});
work({manual, dry_run, _From}) ->
    rabbitmq_stream_s3_gc_pass:run(#{streams => all, optional => count, always => count});
work({manual, delete, _From}) ->
    rabbitmq_stream_s3_gc_pass:run(#{streams => all, optional => delete, always => delete}).

optional() ->
    case rabbitmq_stream_s3_config:get(gc_enabled) of
        true ->
            case rabbitmq_stream_s3_config:get(gc_mode) of
                delete -> delete;
                dry_run -> count
            end;
        false ->
            count
    end.

%% --- what came of it -------------------------------------------------------------------------------------------------

ended(look, {Leads, {ok, Streams}}, #state{known = Known} = State) ->
    Gone =
        case Known of
            _ when not Leads -> [];
            none -> [];
            _ -> Known -- Streams
        end,
    lists:foldl(fun(StreamId, S) -> enqueue({stream, StreamId}, S) end, State#state{known = Streams}, Gone);
ended(look, _Failed, State) ->
    %% What is not known now is known at the next look.
    State;
ended(walk, not_leader, State) ->
    State;
ended(walk, Result, State) ->
    ok = tell("all streams", Result),
    %% That they wait for their time is remembered nowhere else than in the bucket: a node that was restarted finds them again here.
    _ = [due_in(again_in(young), {stream, StreamId}) || StreamId <- too_young(Result)],
    remember(Result, State);
ended({manual, _Mode, From}, Result, State) ->
    gen_server:reply(From, Result),
    remember(Result, State);
ended({stream, StreamId} = Job, Result, State) ->
    ok = tell(["the deleted stream ", StreamId], Result),
    _ = is_to_be_continued(Result) andalso due_in(again_in(Result), Job),
    State.

remember({error, Reason}, State) ->
    State#state{last = #{ended_ms => erlang:system_time(millisecond), error => rabbitmq_stream_s3_problems:text(Reason)}};
remember({error, Reason, Report}, State) ->
    State#state{last = Report#{ended_ms => erlang:system_time(millisecond), error => rabbitmq_stream_s3_problems:text(Reason)}};
remember({ok, Report}, State) ->
    State#state{last = Report#{ended_ms => erlang:system_time(millisecond)}}.

%% Objects that are too young, that could not be judged, or that could not be deleted. Of a stream that turned out to be there,
%% nothing is left to do.
is_to_be_continued({ok, #{kept := Kept, failed := Failed}}) ->
    Failed > 0 orelse lists:any(fun(Reason) -> is_map_key(Reason, Kept) end, [young, unknown, changing]);
is_to_be_continued({error, _Reason, _Report}) ->
    true;
is_to_be_continued({error, _Crashed}) ->
    true.

too_young({ok, #{too_young := Streams}}) -> Streams;
too_young({error, _Reason, #{too_young := Streams}}) -> Streams;
too_young({error, _Crashed}) -> [].

again_in({ok, #{kept := #{young := _}}}) ->
    again_in(young);
again_in(young) ->
    max(?AGAIN_MS, rabbitmq_stream_s3_config:get(gc_min_age_ms));
again_in(_Failed) ->
    max(?AGAIN_MS, rabbitmq_stream_s3_config:get(upload_retry_delay_max_ms)).

tell(_Of, {ok, #{garbage := Garbage, failed := 0}}) when Garbage =:= #{} ->
    ok;
tell(Of, {ok, #{garbage := Garbage, reclaimed := #{objects := Objects, bytes := Bytes}, failed := Failed}}) ->
    Found = lists:sum([N || #{objects := N} <- maps:values(Garbage)]),
    ?LOG_NOTICE("garbage of ~ts: ~b objects found, ~b with ~b bytes deleted, ~b could not be deleted", [Of, Found, Objects, Bytes, Failed], ?LOG_META);
tell(Of, {error, Reason, _Report}) ->
    tell(Of, {error, Reason});
tell(Of, {error, Reason}) ->
    ?LOG_WARNING("garbage of ~ts could not be looked for: ~ts", [Of, rabbitmq_stream_s3_problems:text(Reason)], ?LOG_META).
