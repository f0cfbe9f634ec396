%% @doc `stream_s3_force_cut': ends the fragment that is being assembled.
-module('Elixir.RabbitMQ.CLI.Streams.Commands.StreamS3ForceCutCommand').
-define(COMMAND, force_cut).
-include("rabbitmq_stream_s3_command.hrl").
