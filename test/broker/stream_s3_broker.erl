%% @doc Real brokers, each with its own directories, cookie and free ports, run from the RabbitMQ that is at hand. They end with this
%% VM, however that ends. A broker is a value: it says where its files and ports are, also while it does not run.
-module(stream_s3_broker).

-compile({no_auto_import, [node/1]}).

-export([new/1, start/1, start_all/1, stop/1, kill/1, is_running/1]).
-export([call/4, call/5, cli/3, try_cli/3, metrics/2, log/1, pid/1]).
-export([node/1, port/2, dir/1, set_conf/2, set_plugins/2, set_plugin_dir/2, plugin_dir/0, set_enabled/2]).
-export_type([broker/0, options/0]).

-define(START_TIMEOUT_MS, 180000).
-define(STOP_TIMEOUT_MS, 90000).
-define(CALL_TIMEOUT_MS, 60000).
-define(CLI_TIMEOUT_MS, 120000).
-define(LOOK_MS, 100).
%% Kills the VM when its standard input ends, if the process of that id is still the broker.
-define(WATCH,
    "trap '' INT HUP TERM; cat >/dev/null; pid=$(cat \"$1\" 2>/dev/null) && "
    "tr '\\0' ' ' <\"/proc/$pid/cmdline\" | grep -q -F -- \"$2\" && kill -9 \"$pid\""
).

-type options() :: #{
    %% Of files; made where it is missing.
    dir := file:filename(),
    %% First part of the node's name. Brokers of one cluster differ in it.
    name => string(),
    %% Second part of it. A name that this VM and the broker can resolve.
    host => string(),
    %% Enabled at start.
    plugins => [atom()],
    %% Lines of rabbitmq.conf besides ports and directories.
    conf => iodata(),
    %% Directories searched for plugins besides RabbitMQ's own; that of `make dist' unless said otherwise.
    plugin_dir => file:filename() | none,
    %% What the brokers of a cluster have in common.
    cookie => string(),
    %% More variables of its environment.
    env => [{string(), string()}]
}.
-opaque broker() :: #{
    node := node(),
    dir := file:filename(),
    cookie := string(),
    ports := #{atom() => inet:port_number()},
    plugins := [atom()],
    conf := iodata(),
    plugin_dir := file:filename() | none,
    env := [{string(), string()}]
}.

%% @doc A broker that does not run yet: chooses its name and free ports, writes nothing.
-spec new(options()) -> broker().
new(#{dir := Dir} = Options) ->
    Name = lists:concat([maps:get(name, Options, "broker"), "_", os:getpid(), "_", erlang:unique_integer([positive])]),
    #{
        node => list_to_atom(Name ++ "@" ++ maps:get(host, Options, "localhost")),
        dir => Dir,
        cookie => maps:get(cookie, Options, "stream_s3_" ++ os:getpid()),
        ports => free_ports([amqp, stream, stream_tls, prometheus, distribution]),
        plugins => maps:get(plugins, Options, [rabbitmq_stream, rabbitmq_stream_s3]),
        conf => maps:get(conf, Options, ""),
        plugin_dir => maps:get(plugin_dir, Options, plugin_dir()),
        env => maps:get(env, Options, [])
    }.

%% All are held at once, so that no two are the same.
free_ports(Names) ->
    Sockets = [element(2, {ok, _} = gen_tcp:listen(0, [{ip, {127, 0, 0, 1}}])) || _ <- Names],
    Ports = [element(2, {ok, _} = inet:port(Socket)) || Socket <- Sockets],
    lists:foreach(fun gen_tcp:close/1, Sockets),
    maps:from_list(lists:zip(Names, Ports)).

%% @doc Where `make dist' has put the plugin.
-spec plugin_dir() -> file:filename().
plugin_dir() ->
    case os:getenv("STREAM_S3_DIST") of
        false -> error({world, "STREAM_S3_DIST does not name the directory of the plugin"});
        Dir -> Dir
    end.

-spec node(broker()) -> node().
node(#{node := Node}) -> Node.

%% @doc A port of 127.0.0.1: amqp, stream, prometheus or distribution; stream_tls is free, for who configures it.
-spec port(atom(), broker()) -> inet:port_number().
port(Name, #{ports := Ports}) -> maps:get(Name, Ports).

%% @doc The directory of this broker's files.
-spec dir(broker()) -> file:filename().
dir(#{dir := Dir}) -> Dir.

%% @doc The same broker with other lines in its configuration, from its next start on.
-spec set_conf(iodata(), broker()) -> broker().
set_conf(Conf, Broker) -> Broker#{conf := Conf}.

%% @doc The same broker with other plugins, from its next start on.
-spec set_plugins([atom()], broker()) -> broker().
set_plugins(Plugins, Broker) -> Broker#{plugins := Plugins}.

%% @doc The same broker with its plugins from another directory, from its next start on.
-spec set_plugin_dir(file:filename() | none, broker()) -> broker().
set_plugin_dir(Dir, Broker) -> Broker#{plugin_dir := Dir}.

%% --- start and stop --------------------------------------------------------------------------------------------------

%% @doc Starts it and waits until it serves. Raises `{broker, Node, Reason, LogFile}' if it does not.
-spec start(broker()) -> ok.
start(Broker) ->
    ok = launch(Broker),
    await_start(Broker).

%% @doc Starts several at once: those of a cluster wait for each other.
-spec start_all([broker()]) -> ok.
start_all(Brokers) ->
    lists:foreach(fun launch/1, Brokers),
    lists:foreach(fun await_start/1, Brokers).

launch(#{node := Node, dir := Dir, cookie := Cookie} = Broker) ->
    true = erlang:set_cookie(Node, list_to_atom(Cookie)),
    ok = filelib:ensure_path(filename:join(Dir, "log")),
    ok = filelib:ensure_path(filename:join(Dir, "data")),
    ok = write_cookie(filename:join(Dir, ".erlang.cookie"), Cookie),
    ok = file:write_file(file(Broker, conf), conf(Broker)),
    ok = write_plugins(Broker),
    Server = filename:join([home(), "sbin", "rabbitmq-server"]),
    Keeper = stream_s3_keeper:start(fun() ->
        Port = open_port({spawn_executable, "/bin/sh"}, [
            {args, ["-c", "exec \"$1\" >>\"$2\" 2>&1 </dev/null", "sh", Server, file(Broker, output)]},
            {env, env(Broker)}, {cd, Dir}, exit_status
        ]),
        Watch = open_port({spawn_executable, "/bin/sh"}, [
            {args, ["-c", ?WATCH, "sh", file(Broker, pid), atom_to_list(Node)]}
        ]),
        {Port, Watch}
    end),
    ok = persistent_term:put({?MODULE, Node}, Keeper).

%% Of RabbitMQ's own kind, so that what was enabled by the command is still so after a restart.
write_plugins(#{plugins := Plugins} = Broker) ->
    case filelib:is_regular(file(Broker, plugins)) of
        true -> ok;
        false -> file:write_file(file(Broker, plugins), io_lib:format("~p.~n", [Plugins]))
    end.

write_cookie(File, Cookie) ->
    case file:read_file(File) of
        {ok, _} ->
            ok;
        {error, enoent} ->
            ok = file:write_file(File, Cookie),
            file:change_mode(File, 8#400)
    end.

await_start(#{node := Node} = Broker) ->
    Until = erlang:monotonic_time(millisecond) + ?START_TIMEOUT_MS,
    case connected(Broker, Until) of
        ok ->
            case call(Broker, rabbit, await_startup, [Node, false, ?START_TIMEOUT_MS], ?START_TIMEOUT_MS) of
                ok -> ok;
                Other -> failed(Broker, Other)
            end;
        {error, Reason} ->
            failed(Broker, Reason)
    end.

connected(#{node := Node} = Broker, Until) ->
    case connect(Node) of
        true ->
            ok;
        false ->
            case {is_launched(Broker), erlang:monotonic_time(millisecond) < Until} of
                {true, true} ->
                    timer:sleep(?LOOK_MS),
                    connected(Broker, Until);
                {false, _} ->
                    {error, ended};
                {true, false} ->
                    {error, timeout}
            end
    end.

%% Hidden, so that this VM is no member of the brokers' cluster.
connect(Node) ->
    net_kernel:hidden_connect_node(Node) =:= true.

failed(#{node := Node} = Broker, Reason) ->
    _ = kill(Broker),
    error({broker, Node, Reason, file(Broker, output), tail(file(Broker, output))}).

tail(File) ->
    case file:read_file(File) of
        {ok, Text} -> binary:part(Text, byte_size(Text), -min(3000, byte_size(Text)));
        {error, Reason} -> Reason
    end.

is_launched(#{node := Node}) ->
    case persistent_term:get({?MODULE, Node}, none) of
        none ->
            false;
        Keeper ->
            {Port, _Watch} = stream_s3_keeper:value(Keeper),
            erlang:port_info(Port) =/= undefined
    end.

%% @doc Whether it serves.
-spec is_running(broker()) -> boolean().
is_running(#{node := Node} = Broker) ->
    connect(Node) andalso call(Broker, rabbit, is_running, []).

%% @doc Stops it in good order and waits for its end.
-spec stop(broker()) -> ok.
stop(Broker) ->
    case is_launched(Broker) of
        true ->
            try call(Broker, rabbit, stop_and_halt, []) of
                _ -> ended(Broker)
            catch
                %% It may be gone before it answers.
                error:{erpc, noconnection} -> ended(Broker)
            end;
        false ->
            ok
    end.

%% @doc Ends it with kill -9 and waits until it is gone.
-spec kill(broker()) -> ok.
kill(Broker) ->
    case {is_launched(Broker), pid(Broker)} of
        {true, {ok, Pid}} ->
            _ = os:cmd("kill -9 " ++ Pid),
            ended(Broker);
        {true, {error, enoent}} ->
            ended(Broker);
        {false, _} ->
            ok
    end.

%% @doc The id of the VM's process in the operating system.
-spec pid(broker()) -> {ok, string()} | {error, enoent}.
pid(Broker) ->
    case file:read_file(file(Broker, pid)) of
        {ok, Pid} -> {ok, string:trim(binary_to_list(Pid))};
        {error, enoent} -> {error, enoent}
    end.

ended(#{node := Node} = Broker) ->
    Keeper = persistent_term:get({?MODULE, Node}),
    Ended = stream_s3_keeper:stop(Keeper, fun({Port, Watch}) ->
        Result = wait_for_end(Port, erlang:port_info(Port)),
        true = port_close(Watch),
        Result
    end),
    _ = persistent_term:erase({?MODULE, Node}),
    case Ended of
        ok -> ok;
        timeout -> error({broker, Node, does_not_end, file(Broker, output)})
    end.

wait_for_end(_Port, undefined) ->
    ok;
wait_for_end(Port, _Info) ->
    receive
        {Port, {exit_status, _}} -> ok
    after ?STOP_TIMEOUT_MS -> timeout
    end.

%% --- talking to it ---------------------------------------------------------------------------------------------------

%% @doc Calls a function on it.
-spec call(broker(), module(), atom(), [term()]) -> term().
call(Broker, Module, Function, Args) ->
    call(Broker, Module, Function, Args, ?CALL_TIMEOUT_MS).

%% @doc Calls a function on it, for at most so many milliseconds.
-spec call(broker(), module(), atom(), [term()], timeout()) -> term().
call(#{node := Node}, Module, Function, Args, Timeout) ->
    _ = connect(Node),
    erpc:call(Node, Module, Function, Args, Timeout).

%% @doc Runs one of RabbitMQ's commands (rabbitmqctl, rabbitmq-plugins, rabbitmq-streams, rabbitmq-diagnostics, ...) on it, and raises
%% `{cli, Command, Status, Output}' unless it succeeds. Starts a VM: takes about two seconds.
-spec cli(broker(), string(), [string() | binary()]) -> Output :: binary().
cli(Broker, Tool, Args) ->
    case try_cli(Broker, Tool, Args) of
        {0, Output} -> Output;
        {Status, Output} -> error({cli, [Tool | Args], Status, Output})
    end.

%% @doc The same, whatever the status.
-spec try_cli(broker(), string(), [string() | binary()]) -> {Status :: non_neg_integer(), Output :: binary()}.
try_cli(#{node := Node} = Broker, Tool, Args) ->
    Port = open_port({spawn_executable, filename:join([home(), "sbin", Tool])}, [
        {args, ["-n", atom_to_list(Node) | Args]}, {env, env(Broker)}, binary, exit_status, stderr_to_stdout
    ]),
    collect(Port, []).

collect(Port, Acc) ->
    receive
        {Port, {data, Data}} -> collect(Port, [Acc, Data]);
        {Port, {exit_status, Status}} -> {Status, iolist_to_binary(Acc)}
    after ?CLI_TIMEOUT_MS ->
        true = port_close(Port),
        error({cli, no_end, iolist_to_binary(Acc)})
    end.

%% @doc Enables and disables plugins of a running broker, so that these are enabled explicitly: what `rabbitmq-plugins' does, without
%% starting a VM for it.
-spec set_enabled([atom()], broker()) -> ok.
set_enabled(Plugins, Broker) ->
    ok = file:write_file(file(Broker, plugins), io_lib:format("~p.~n", [Plugins])),
    {ok, _Started, _Stopped} = call(Broker, rabbit_plugins, ensure, [file(Broker, plugins)], ?START_TIMEOUT_MS),
    ok.

%% @doc What rabbitmq_prometheus answers to a path, `/metrics' or `/metrics/per-object'. Needs that plugin.
-spec metrics(broker(), string()) -> binary().
metrics(Broker, Path) ->
    {ok, _} = application:ensure_all_started(inets),
    Url = lists:concat(["http://127.0.0.1:", port(prometheus, Broker), Path]),
    {ok, {{_, 200, _}, _, Body}} = httpc:request(get, {Url, []}, [{timeout, ?CALL_TIMEOUT_MS}], [{body_format, binary}]),
    Body.

%% @doc All that it has logged so far.
-spec log(broker()) -> binary().
log(Broker) ->
    Files = filelib:wildcard(filename:join([dir(Broker), "log", "*"])),
    iolist_to_binary([element(2, {ok, _} = file:read_file(File)) || File <- lists:sort(Files)]).

%% --- files and environment -------------------------------------------------------------------------------------------

file(Broker, conf) -> filename:join(dir(Broker), "rabbitmq.conf");
file(Broker, plugins) -> filename:join(dir(Broker), "enabled_plugins");
file(Broker, pid) -> filename:join(dir(Broker), "pid");
file(Broker, output) -> filename:join([dir(Broker), "log", "output.log"]).

%% The settings of plugins that are not enabled are checked, too.
conf(#{ports := #{amqp := Amqp, stream := Stream, prometheus := Prometheus}, conf := Conf}) ->
    [
        io_lib:format("listeners.tcp.1 = 127.0.0.1:~b~n", [Amqp]),
        io_lib:format("stream.listeners.tcp.1 = 127.0.0.1:~b~nstream.advertised_host = 127.0.0.1~n", [Stream]),
        io_lib:format("prometheus.tcp.ip = 127.0.0.1~nprometheus.tcp.port = ~b~n", [Prometheus]),
        "disk_free_limit.absolute = 50MB\n",
        Conf
    ].

env(#{node := Node, dir := Dir, ports := #{distribution := Port}, plugin_dir := PluginDir, env := Env} = Broker) ->
    Plugins = lists:join(":", [filename:join(home(), "plugins") | [PluginDir || PluginDir =/= none]]),
    [
        {"HOME", Dir},
        {"RABBITMQ_NODENAME", atom_to_list(Node)},
        {"RABBITMQ_DIST_PORT", integer_to_list(Port)},
        {"RABBITMQ_CONF_ENV_FILE", "/dev/null"},
        {"RABBITMQ_CONFIG_FILE", file(Broker, conf)},
        {"RABBITMQ_ADVANCED_CONFIG_FILE", filename:join(Dir, "advanced.config")},
        {"RABBITMQ_ENABLED_PLUGINS_FILE", file(Broker, plugins)},
        {"RABBITMQ_PLUGINS_DIR", lists:flatten(Plugins)},
        {"RABBITMQ_PLUGINS_EXPAND_DIR", filename:join(Dir, "plugins-expand")},
        {"RABBITMQ_MNESIA_BASE", filename:join(Dir, "data")},
        {"RABBITMQ_LOG_BASE", filename:join(Dir, "log")},
        {"RABBITMQ_PID_FILE", file(Broker, pid)},
        %% The libraries of this VM are not for the broker.
        {"ERL_LIBS", false}
        | Env
    ].

home() ->
    case os:getenv("RABBITMQ_HOME") of
        false -> error({world, "RABBITMQ_HOME does not name RabbitMQ's directory"});
        Home -> Home
    end.
