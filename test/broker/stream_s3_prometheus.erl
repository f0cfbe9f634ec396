%% @doc A server of Prometheus that scrapes a broker and evaluates queries. It ends with this VM, however that ends.
-module(stream_s3_prometheus).

-export([start/3, stop/1, query/2, rules/1]).
-export_type([server/0]).

%% The program reads nothing; the end of the shell's input is what ends it.
-define(RUN, "log=$1; shift; \"$@\" >\"$log\" 2>&1 </dev/null & pid=$!; cat >/dev/null; kill -9 $pid; wait $pid").
-define(READY_MS, 60000).
-define(TIMEOUT_MS, 30000).

-opaque server() :: #{keeper := pid(), port := inet:port_number()}.

%% @doc Starts one whose files are in this directory, with a file of rules. It scrapes `/metrics' of the broker as job `broker' and
%% `/metrics/per-object' as job `streams', each second, and has done so a few times when this returns.
-spec start(file:filename(), stream_s3_broker:broker(), file:filename()) -> server().
start(Dir, Broker, Rules) ->
    {ok, _} = application:ensure_all_started(inets),
    ok = filelib:ensure_path(Dir),
    File = filename:join(Dir, "prometheus.yml"),
    ok = file:write_file(File, configuration(stream_s3_broker:port(prometheus, Broker), Rules)),
    Port = free_port(),
    Args = [
        program(), "--config.file=" ++ File, "--storage.tsdb.path=" ++ filename:join(Dir, "data"),
        "--web.listen-address=127.0.0.1:" ++ integer_to_list(Port)
    ],
    Log = filename:join(Dir, "log"),
    Keeper = stream_s3_keeper:start(fun() ->
        open_port({spawn_executable, "/bin/sh"}, [{args, ["-c", ?RUN, "sh", Log | Args]}, exit_status])
    end),
    Server = #{keeper => Keeper, port => Port},
    try
        ok = stream_s3_tier:await(scraped, ?READY_MS, fun() ->
            length(query(Server, <<"count_over_time(rabbitmq_stream_s3_streams[5m]) >= 3">>)) =:= 2
        end)
    catch
        error:Reason ->
            ok = stop(Server),
            error({prometheus, Reason, file:read_file(Log)})
    end,
    Server.

configuration(Port, Rules) ->
    [
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n",
        io_lib:format("rule_files: [~tp]~n", [Rules]),
        "scrape_configs:\n"
        | [
            io_lib:format("  - {job_name: ~ts, metrics_path: ~ts, static_configs: [{targets: ['127.0.0.1:~b']}]}~n", [Job, Path, Port])
         || {Job, Path} <- [{"broker", "/metrics"}, {"streams", "/metrics/per-object"}]
        ]
    ].

program() ->
    case os:getenv("STREAM_S3_PROMETHEUS") of
        false -> error({world, "STREAM_S3_PROMETHEUS does not name the program"});
        File -> File
    end.

free_port() ->
    {ok, Socket} = gen_tcp:listen(0, [{ip, {127, 0, 0, 1}}]),
    {ok, Port} = inet:port(Socket),
    ok = gen_tcp:close(Socket),
    Port.

-spec stop(server()) -> ok.
stop(#{keeper := Keeper}) ->
    true = stream_s3_keeper:stop(Keeper, fun(Port) -> erlang:port_info(Port) =:= undefined orelse port_close(Port) end),
    ok.

%% @doc What an instant query selects now; raises what Prometheus says to one that is none.
-spec query(server(), binary()) -> [map()].
query(Server, Expression) ->
    #{<<"resultType">> := <<"vector">>, <<"result">> := Result} = ask(Server, ["query?query=", uri_string:quote(Expression)]),
    Result.

%% @doc Each rule as it was evaluated last, with its `health' and its `query'.
-spec rules(server()) -> [map()].
rules(Server) ->
    #{<<"groups">> := Groups} = ask(Server, "rules"),
    lists:append([Rules || #{<<"rules">> := Rules} <- Groups]).

ask(#{port := Port}, Path) ->
    Url = lists:flatten(io_lib:format("http://127.0.0.1:~b/api/v1/~ts", [Port, Path])),
    case httpc:request(get, {Url, []}, [{timeout, ?TIMEOUT_MS}], [{body_format, binary}]) of
        {ok, {{_, 200, _}, _, Body}} ->
            #{<<"status">> := <<"success">>, <<"data">> := Data} = json:decode(Body),
            Data;
        {ok, {{_, Status, _}, _, Body}} ->
            error({prometheus, Status, Body});
        {error, Reason} ->
            error({prometheus, Reason})
    end.
