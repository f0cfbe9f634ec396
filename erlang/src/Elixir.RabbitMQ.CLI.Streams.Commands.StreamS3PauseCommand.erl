%% @doc `stream_s3_pause': nothing more is cut until it is resumed.
-module('Elixir.RabbitMQ.CLI.Streams.Commands.StreamS3PauseCommand').
-define(COMMAND, pause).
-include("rabbitmq_stream_s3_command.hrl").
