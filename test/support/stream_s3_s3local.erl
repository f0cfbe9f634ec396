%% @doc The server `s3local' as a process of the operating system, from the path in the environment variable STREAM_S3_S3LOCAL.
%% It ends with this VM, however that ends: the server watches its standard input.
-module(stream_s3_s3local).

-export([start/1, stop/1, settings/1, create_bucket/2]).
-export_type([server/0, options/0]).

%% It listens within milliseconds; a machine under load may take longer.
-define(START_TIMEOUT, 20000).
-define(STOP_TIMEOUT, 10000).

-type options() :: #{
    %% Where it keeps buckets, each a directory, and in them objects, each a file.
    dir := file:filename(),
    %% A free one unless given.
    port => inet:port_number(),
    access_key_id => binary(),
    secret_key => binary()
}.
-opaque server() :: #{keeper := pid(), dir := file:filename(), settings := #{atom() => binary()}}.

%% @doc Starts it and waits until it listens. Raises `{world, Text}' if it does not.
-spec start(options()) -> server().
start(#{dir := Dir} = Options) ->
    Id = maps:get(access_key_id, Options, <<"s3local">>),
    Secret = maps:get(secret_key, Options, <<"s3local-secret">>),
    Keeper = stream_s3_keeper:start(fun() -> open(Dir, maps:get(port, Options, 0), Id, Secret) end),
    {_Port, _OsPid, Endpoint} = stream_s3_keeper:value(Keeper),
    Settings = #{endpoint => Endpoint, access_key_id => Id, secret_key => Secret},
    #{keeper => Keeper, dir => Dir, settings => Settings}.

open(Dir, TcpPort, Id, Secret) ->
    Port = open_port({spawn_executable, command()}, [
        {args, ["--dir", Dir, "--port", integer_to_list(TcpPort), "--exit-on-stdin-eof"]},
        {env, [{"S3LOCAL_ACCESS_KEY", binary_to_list(Id)}, {"S3LOCAL_SECRET_KEY", binary_to_list(Secret)}]},
        {line, 1000},
        binary,
        exit_status,
        stderr_to_stdout
    ]),
    case listening(Port, []) of
        {ok, Endpoint} ->
            {os_pid, OsPid} = erlang:port_info(Port, os_pid),
            {Port, OsPid, Endpoint};
        {error, Output} ->
            error({world, lists:flatten(io_lib:format("s3local does not start: ~ts", [Output]))})
    end.

command() ->
    case os:getenv("STREAM_S3_S3LOCAL") of
        false -> error({world, "STREAM_S3_S3LOCAL does not name the server s3local"});
        Path -> Path
    end.

listening(Port, Output) ->
    receive
        {Port, {data, {eol, <<"s3local: listening on ", Endpoint/binary>>}}} -> {ok, Endpoint};
        {Port, {data, {_, Line}}} -> listening(Port, [Output, Line, " "]);
        {Port, {exit_status, Status}} -> {error, [Output, "(exit status ", integer_to_list(Status), ")"]}
    after ?START_TIMEOUT ->
        true = port_close(Port),
        {error, [Output, "(it does not listen)"]}
    end.

%% @doc Ends it and waits until it has ended. Its directory stays.
-spec stop(server()) -> ok.
stop(#{keeper := Keeper}) ->
    stream_s3_keeper:stop(Keeper, fun close/1).

%% Not by closing the port, which would not tell when the server has ended.
close({Port, OsPid, _Endpoint}) ->
    case erlang:port_info(Port) of
        undefined ->
            ok;
        _ ->
            _ = os:cmd("kill " ++ integer_to_list(OsPid)),
            ended(Port)
    end.

ended(Port) ->
    receive
        {Port, {exit_status, _Status}} -> ok;
        {Port, {data, _}} -> ended(Port)
    after ?STOP_TIMEOUT ->
        true = port_close(Port),
        error({world, "s3local does not end"})
    end.

%% @doc The settings with which the application finds it; `store' and `bucket' are to be added.
-spec settings(server()) -> #{atom() => binary()}.
settings(#{settings := Settings}) -> Settings.

%% @doc Makes a bucket, which must not be there.
-spec create_bucket(server(), string()) -> ok.
create_bucket(#{dir := Dir}, Name) ->
    ok = file:make_dir(filename:join(Dir, Name)).
