%% @doc `stream_s3_status': what is tiered, what is under way, and what fails.
-module('Elixir.RabbitMQ.CLI.Streams.Commands.StreamS3StatusCommand').
-define(COMMAND, status).
-include("rabbitmq_stream_s3_command.hrl").
