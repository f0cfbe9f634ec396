%% @doc What an uploader is started with: checked, and completed from the configuration.
-module(rabbitmq_stream_s3_history_options).

-export([complete/1]).

%% Timers take no longer ones.
-define(MAX_MS, 16#FFFFFFFF).

%% @doc All options, or a sentence about one that cannot be used.
-spec complete(rabbitmq_stream_s3_history_uploader:options()) -> {ok, map()} | {error, Text :: binary()}.
complete(Given) when is_map(Given) ->
    Config = fun rabbitmq_stream_s3_config:get/1,
    Defaults = #{
        concurrency => Config(history_upload_concurrency),
        rescan_interval_ms => Config(history_rescan_interval_ms),
        purge_wait_ms => Config(history_purge_wait_ms),
        page_size => 1000,
        run_prefix => <<>>
    },
    Options = maps:merge(Defaults, Given),
    Ranges = [{concurrency, 1, 1024}, {rescan_interval_ms, 1, ?MAX_MS}, {purge_wait_ms, 0, ?MAX_MS}, {page_size, 1, 100000}],
    Known = [source, argument, name, run_prefix | [Key || {Key, _, _} <- Ranges]],
    Bad =
        [text("~ts must be an integer from ~b to ~b, not ~0tP", [K, Min, Max, V, 20]) || {K, Min, Max} <- Ranges, V <- [map_get(K, Options)], not in_range(V, Min, Max)] ++
            [text("~ts is missing", [K]) || K <- [source, argument], not is_map_key(K, Options)] ++
            [text("source must be a module with the functions of rabbitmq_stream_s3_history_source, not ~0tP", [M, 20]) || #{source := M} <- [Options], not is_source(M)] ++
            [text("run_prefix must be what run ids can begin with, not ~0tP", [P, 20]) || #{run_prefix := P} <- [Options], not is_run_prefix(P)] ++
            [text("there is no option ~0tP", [K, 20]) || K <- maps:keys(Options) -- Known],
    case Bad of
        [] -> {ok, Options};
        [Text | _] -> {error, Text}
    end;
complete(Given) ->
    {error, text("the options must be a map, not ~0tP", [Given, 20])}.

is_run_prefix(Prefix) when is_binary(Prefix) -> rabbitmq_stream_s3_nif:valid_run_id(<<Prefix/binary, "0">>);
is_run_prefix(_Other) -> false.

is_source(Module) when is_atom(Module) ->
    rabbitmq_stream_s3_history_source:implements(Module, always);
is_source(_Other) ->
    false.

in_range(Value, Min, Max) ->
    is_integer(Value) andalso Value >= Min andalso Value =< Max.

text(Format, Args) ->
    unicode:characters_to_binary(io_lib:format(Format, Args)).
