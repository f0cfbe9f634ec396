%% @doc `stream_s3_gc': looks for garbage in the bucket.
-module('Elixir.RabbitMQ.CLI.Streams.Commands.StreamS3GcCommand').
-define(COMMAND, gc).
-include("rabbitmq_stream_s3_command.hrl").
