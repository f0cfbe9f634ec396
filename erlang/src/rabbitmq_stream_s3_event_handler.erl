%% @doc Runs inside RabbitMQ's event manager, so it does nothing but pass on: {@link rabbitmq_stream_s3_events}.
-module(rabbitmq_stream_s3_event_handler).
-behaviour(gen_event).

-include_lib("rabbit_common/include/rabbit.hrl").

-export([init/1, handle_event/2, handle_call/2]).

%% @private
init([]) ->
    {ok, []}.

%% @private
handle_event(#event{type = queue_deleted, props = Props}, State) ->
    ok = rabbitmq_stream_s3_events:queue_deleted(proplists:get_value(name, Props)),
    {ok, State};
handle_event(#event{type = Type}, State) when
    Type =:= queue_created; Type =:= queue_policy_updated; Type =:= queue_policy_cleared
->
    ok = rabbitmq_stream_s3_events:queue_changed(),
    {ok, State};
handle_event(_Other, State) ->
    {ok, State}.

%% @private
handle_call(_Request, State) ->
    {ok, ok, State}.
