%% @doc `stream_s3_verify': compares what the manifest of a stream lists with what is in the bucket.
-module('Elixir.RabbitMQ.CLI.Streams.Commands.StreamS3VerifyCommand').
-define(COMMAND, verify).
-include("rabbitmq_stream_s3_command.hrl").
