%% @doc Publishing to a stream by RabbitMQ's stream protocol, with a client that others wrote: test/broker/stream_client.py.
-module(stream_s3_client).

-export([publish/5]).

-define(TIMEOUT_MS, 180000).

%% @doc Publishes these messages and returns when each is confirmed. `Dir' is for a file with the messages.
-spec publish(stream_s3_broker:broker(), file:filename(), binary(), [binary()], plain | batch | gzip | filter) -> ok.
publish(Broker, Dir, Stream, Messages, How) ->
    File = filename:join(Dir, "records_" ++ binary_to_list(Stream)),
    ok = file:write_file(File, [[<<(byte_size(Message)):32>>, Message] || Message <- Messages]),
    Args = [script(), integer_to_list(stream_s3_broker:port(stream, Broker)), Stream, File, atom_to_list(How)],
    Port = open_port({spawn_executable, os:find_executable("python3")}, [
        {args, Args}, {env, [{"PYTHONPATH", library()}, {"PYTHONDONTWRITEBYTECODE", "1"}]}, binary, exit_status, stderr_to_stdout
    ]),
    Expected = iolist_to_binary(io_lib:format("~b confirmed\n", [length(Messages)])),
    case collect(Port, []) of
        {0, Expected} -> ok;
        Other -> error({stream_client, How, Other})
    end.

collect(Port, Acc) ->
    receive
        {Port, {data, Data}} -> collect(Port, [Acc, Data]);
        {Port, {exit_status, Status}} -> {Status, iolist_to_binary(Acc)}
    after ?TIMEOUT_MS ->
        true = port_close(Port),
        error({stream_client, no_end, iolist_to_binary(Acc)})
    end.

library() ->
    case os:getenv("STREAM_S3_RSTREAM") of
        false -> error({world, "STREAM_S3_RSTREAM does not name the directory of rstream"});
        Dir -> Dir
    end.

%% Common Test works in a directory of its own.
script() ->
    case os:getenv("STREAM_S3_TOP") of
        false -> error({world, "STREAM_S3_TOP does not name the checkout"});
        Top -> filename:join([Top, "test", "broker", "stream_client.py"])
    end.
