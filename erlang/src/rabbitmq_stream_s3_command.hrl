%% What a command of RabbitMQ's own tools consists of; ?COMMAND says which one. The tool finds it by the name of its module, by the behaviour, and by the
%% list of modules of an enabled plugin, and runs it in a VM of its own, without a broker.

-behaviour('Elixir.RabbitMQ.CLI.CommandBehaviour').

-export([scopes/0, usage/0, usage_additional/0, description/0, help_section/0, switches/0, aliases/0, formatter/0]).
-export([banner/2, validate/2, merge_defaults/2, run/2, output/2]).

scopes() -> rabbitmq_stream_s3_cli:scopes(?COMMAND).
usage() -> rabbitmq_stream_s3_cli:usage(?COMMAND).
usage_additional() -> rabbitmq_stream_s3_cli:usage_additional(?COMMAND).
description() -> rabbitmq_stream_s3_cli:description(?COMMAND).
help_section() -> {plugin, stream_s3}.
switches() -> rabbitmq_stream_s3_cli:switches(?COMMAND).
aliases() -> [].
formatter() -> 'Elixir.RabbitMQ.CLI.Formatters.String'.
banner(Args, Options) -> rabbitmq_stream_s3_cli:banner(?COMMAND, Args, Options).
validate(Args, Options) -> rabbitmq_stream_s3_cli:validate(?COMMAND, Args, Options).
merge_defaults(Args, Options) -> rabbitmq_stream_s3_cli:merge_defaults(?COMMAND, Args, Options).
run(Args, Options) -> rabbitmq_stream_s3_cli:run(?COMMAND, Args, Options).
output(Result, Options) -> rabbitmq_stream_s3_cli:output(?COMMAND, Result, Options).
