%% @doc Deletes objects that nothing refers to any more, in the background: in batches, one request at a time, and again later
%% what could not be deleted.
%%
%% Whoever hands an object over vouches that no persisted manifest lists it. Nothing waits for a deletion, and nothing depends on
%% it: what this process forgets when it dies is garbage that the garbage collection finds.
-module(rabbitmq_stream_s3_reaper).
-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").

-export([start_link/0, delete/2, status/0]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2]).
-export_type([object/0]).

%% What one request may ask for.
-define(BATCH, 1000).
%% Keys that are remembered. A store that refuses deletions for days must not fill the memory.
-define(MAX_WAITING, 100000).
-define(REQUEST_TIMEOUT_MS, 60000).
-define(LOG_META, #{domain => [rabbitmq, stream_s3]}).

-type stream_id() :: binary().
%% The stream's counter that its deletion adds to, or `root', and its key.
-type object() :: {fragments_deleted | groups_deleted | root, Key :: binary()}.
-type waiting() :: {stream_id(), object()}.

-record(state, {
    %% To be deleted, oldest first.
    waiting = queue:new() :: queue:queue(waiting()),
    %% Could not be deleted the last time.
    failed = [] :: [waiting()],
    %% How often in a row a request has left something behind, and what was said of it.
    failures = 0 :: non_neg_integer(),
    cause = none :: none | binary(),
    %% Until what has failed is tried again.
    retry = none :: none | reference(),
    %% Whether that includes everything else: no request gets through.
    blocked = false :: boolean(),
    %% The request under way, what it asks for by key, and the timer that gives it up.
    request = none :: none | {reference(), #{binary() => waiting()}, reference()}
}).

%% @doc Starts the reaper.
-spec start_link() -> {ok, pid()} | ignore | {error, term()}.
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

%% @doc Deletes objects of a stream, some time. Returns at once.
-spec delete(stream_id(), [object()]) -> ok.
delete(_StreamId, []) ->
    ok;
delete(StreamId, Objects) ->
    gen_server:cast(?MODULE, {delete, StreamId, Objects}).

%% @doc How many objects wait for their deletion, how often it has failed in a row, and why.
-spec status() -> #{waiting := non_neg_integer(), failures := non_neg_integer(), cause := binary() | none}.
status() ->
    gen_server:call(?MODULE, status).

%% @private
init([]) ->
    {ok, #state{}}.

%% @private
handle_call(status, _From, #state{failures = Failures, cause = Cause} = State) ->
    {reply, #{waiting => pending(State), failures => Failures, cause => Cause}, State}.

pending(#state{waiting = Waiting, failed = Failed, request = Request}) ->
    UnderWay =
        case Request of
            none -> 0;
            {_, Asked, _} -> map_size(Asked)
        end,
    queue:len(Waiting) + length(Failed) + UnderWay.

%% @private
handle_cast({delete, StreamId, Objects}, #state{waiting = Waiting} = State) ->
    {Taken, Dropped} = lists:split(min(length(Objects), max(0, ?MAX_WAITING - pending(State))), Objects),
    _ = Dropped =/= [] andalso ?LOG_WARNING("~b objects stay although nothing refers to them: too many wait for deletion", [length(Dropped)], ?LOG_META),
    {noreply, request(State#state{waiting = lists:foldl(fun(Object, Q) -> queue:in({StreamId, Object}, Q) end, Waiting, Taken)})}.

%% @private
handle_info({store_result, Ref, Result}, #state{request = {Ref, Asked, Timer}} = State) ->
    _ = erlang:cancel_timer(Timer),
    {noreply, request(answered(Result, Asked, State#state{request = none}))};
handle_info({timeout, Timer, request}, #state{request = {Ref, Asked, Timer}} = State) ->
    ok = rabbitmq_stream_s3_nif:store_cancel([Ref]),
    Error = {transient, #{op => delete, reason => timeout, message => <<"the store did not answer in time">>}},
    {noreply, request(answered({error, Error}, Asked, State#state{request = none}))};
handle_info({timeout, Timer, retry}, #state{retry = Timer, failed = Failed, waiting = Waiting} = State) ->
    Again = queue:join(Waiting, queue:from_list(Failed)),
    {noreply, request(State#state{retry = none, blocked = false, failed = [], waiting = Again})};
handle_info(_Stale, State) ->
    {noreply, State}.

request(#state{request = none, blocked = false, waiting = Waiting0} = State) ->
    case take(?BATCH, Waiting0, #{}) of
        {Asked, _} when map_size(Asked) =:= 0 ->
            State;
        {Asked, Waiting} ->
            Ref = make_ref(),
            ok = rabbitmq_stream_s3_nif:store_delete(rabbitmq_stream_s3_store:handle(), self(), Ref, maps:keys(Asked)),
            Timer = erlang:start_timer(?REQUEST_TIMEOUT_MS, self(), request),
            State#state{waiting = Waiting, request = {Ref, Asked, Timer}}
    end;
request(State) ->
    State.

take(0, Waiting, Asked) ->
    {Asked, Waiting};
take(N, Waiting, Asked) ->
    case queue:out(Waiting) of
        {{value, {_StreamId, {_What, Key}} = One}, Rest} -> take(N - 1, Rest, Asked#{Key => One});
        {empty, _} -> {Asked, Waiting}
    end.

answered({ok, Undeleted}, Asked, State) ->
    Left = maps:with([Key || {Key, _Error} <- Undeleted], Asked),
    ok = count_deleted(maps:values(maps:without(maps:keys(Left), Asked))),
    case Undeleted of
        [] -> succeeded(State);
        [{_Key, {_Kind, _} = Error} | _] -> failed(Error, Left, State)
    end;
answered({error, Error}, Asked, State) ->
    failed(Error, Asked, State#state{blocked = true}).

count_deleted(Deleted) ->
    ok = rabbitmq_stream_s3_counters:add(objects, objects_deleted, length(Deleted)),
    lists:foreach(fun count_one/1, Deleted).

count_one({_StreamId, {root, _Key}}) ->
    ok;
count_one({StreamId, {Counter, _Key}}) ->
    %% The numbers of a stream that has left this node have left with it.
    case rabbitmq_stream_s3_registry:whereis(StreamId) of
        undefined -> rabbitmq_stream_s3_counters:add(streams, Counter);
        _ -> rabbitmq_stream_s3_counters:add({stream, StreamId}, Counter)
    end.

succeeded(#state{failed = [], failures = N} = State) ->
    _ = N > 0 andalso ?LOG_NOTICE("objects can be deleted again", [], ?LOG_META),
    State#state{failures = 0, cause = none};
succeeded(State) ->
    State.

failed(Error, Left, #state{failed = Failed, failures = Failures, cause = Old} = State) ->
    ok = rabbitmq_stream_s3_counters:add(objects, objects_delete_failed, map_size(Left)),
    Cause = rabbitmq_stream_s3_problems:text({store, Error}),
    _ = Cause =/= Old andalso
        ?LOG_WARNING("~b objects that nothing refers to could not be deleted, the first is ~ts: ~ts", [
            map_size(Left), hd(maps:keys(Left)), Cause
        ], ?LOG_META),
    retry_later(Error, State#state{failed = maps:values(Left) ++ Failed, failures = Failures + 1, cause = Cause}).

retry_later(Error, #state{retry = none, failures = Failures} = State) ->
    %% Never at once: a key that cannot be deleted would be asked for without a pause.
    Delay = max(
        rabbitmq_stream_s3_config:get(upload_retry_delay_ms),
        rabbitmq_stream_s3_replica_reader_tasks:retry_delay({store, Error}, Failures)
    ),
    State#state{retry = erlang:start_timer(Delay, self(), retry)};
retry_later(_Error, State) ->
    State.
