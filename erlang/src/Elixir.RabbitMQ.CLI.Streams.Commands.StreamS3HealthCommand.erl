%% @doc `stream_s3_health': succeeds unless tiering is stalled.
-module('Elixir.RabbitMQ.CLI.Streams.Commands.StreamS3HealthCommand').
-define(COMMAND, health).
-include("rabbitmq_stream_s3_command.hrl").
