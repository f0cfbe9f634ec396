%% @doc Starts and stops the application. What cannot work is refused here, with a sentence; what may work later (a store that
%% does not answer, a stream whose writer recovers) is left to those who try again.
-module(rabbitmq_stream_s3_app).
-behaviour(application).

-include_lib("kernel/include/logger.hrl").

-export([start/2, stop/1]).

%% @private
start(_Type, _Args) ->
    Steps = [
        fun rabbitmq_stream_s3_config:validate/0,
        fun rabbitmq_stream_s3_config:hide_secrets/0,
        fun rabbitmq_stream_s3_library:load/0,
        fun rabbitmq_stream_s3_store:open/0,
        fun rabbitmq_stream_s3_metadata:start/0
    ],
    case run(Steps) of
        ok ->
            rabbitmq_stream_s3_sup:start_link();
        {error, Text} ->
            ok = rabbitmq_stream_s3_store:close(),
            ?LOG_ERROR("tiered storage for streams does not start: ~ts", [Text], #{domain => [rabbitmq, stream_s3]}),
            {error, Text}
    end.

%% @private
stop(_State) ->
    ok = rabbitmq_stream_s3_retention:settle(),
    ok = clear_pins(),
    ok = rabbitmq_stream_s3_store:close(),
    rabbitmq_stream_s3_metadata:stop().

clear_pins() ->
    case rabbitmq_stream_s3_pins:clear() of
        ok -> ok;
        {error, Reason} -> ?LOG_ERROR("segments may still be held open: ~0tp", [Reason], #{domain => [rabbitmq, stream_s3]})
    end.

run([]) ->
    ok;
run([Step | Steps]) ->
    case Step() of
        ok -> run(Steps);
        {error, _} = Error -> Error
    end.
