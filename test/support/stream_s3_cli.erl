%% @doc The command `stream-s3', a second reader of the bucket that shares no process with the application. Its path is in
%% the environment variable STREAM_S3_CLI.
-module(stream_s3_cli).

-export([verify/3, run/2]).

%% Far above what a verification of a test's bucket takes.
-define(TIMEOUT, 60000).

%% @doc Verifies a stream from the root that the metadata store names. `Store' is the application's settings, strings as
%% binaries. Raises `{not_clean, Status, Output}' unless the command finds nothing wrong.
-spec verify(#{atom() => term()}, binary(), {Uid :: non_neg_integer(), Epoch :: non_neg_integer()}) -> ok.
verify(Store, StreamId, {Uid, Epoch}) ->
    Root = io_lib:format("~b.~8.16.0b", [Epoch, Uid]),
    case run(Store, ["verify", StreamId, "--quiet", "--root", lists:flatten(Root)]) of
        {0, _Output} -> ok;
        {Status, Output} -> error({not_clean, Status, Output})
    end.

%% @doc Runs the command on a store; answers its exit status and what it wrote.
-spec run(#{atom() => term()}, [string() | binary()]) -> {Status :: non_neg_integer(), Output :: binary()}.
run(Store, Args) ->
    {Options, Env} = store(Store),
    Port = open_port({spawn_executable, command()}, [
        {args, Args ++ Options}, {env, Env}, binary, exit_status, stderr_to_stdout, use_stdio, hide
    ]),
    collect(Port, []).

command() ->
    case os:getenv("STREAM_S3_CLI") of
        false -> error("STREAM_S3_CLI does not name the command stream-s3");
        Path -> Path
    end.

store(#{store := fs, fs_dir := Dir}) ->
    {["--fs", Dir], []};
store(#{store := s3, bucket := Bucket, endpoint := Endpoint, access_key_id := Id, secret_key := Secret} = Store) ->
    Region = maps:get(region, Store, <<"us-east-1">>),
    %% Arguments can be seen by everybody on the machine, the environment cannot.
    Env = [{"AWS_ACCESS_KEY_ID", binary_to_list(Id)}, {"AWS_SECRET_ACCESS_KEY", binary_to_list(Secret)}],
    {["--bucket", Bucket, "--endpoint", Endpoint, "--region", Region], Env}.

collect(Port, Acc) ->
    receive
        {Port, {data, Data}} -> collect(Port, [Acc, Data]);
        {Port, {exit_status, Status}} -> {Status, iolist_to_binary(Acc)}
    after ?TIMEOUT ->
        true = port_close(Port),
        error({no_end_of_command, iolist_to_binary(Acc)})
    end.
