%% @doc `stream_s3_resume': goes on with what was paused.
-module('Elixir.RabbitMQ.CLI.Streams.Commands.StreamS3ResumeCommand').
-define(COMMAND, resume).
-include("rabbitmq_stream_s3_command.hrl").
