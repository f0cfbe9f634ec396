%% @doc `stream_s3_flush': tiers all that is committed now, and waits for it.
-module('Elixir.RabbitMQ.CLI.Streams.Commands.StreamS3FlushCommand').
-define(COMMAND, flush).
-include("rabbitmq_stream_s3_command.hrl").
