%% @doc Real osiris streams for the demo, the shell and the suites. All functions run on the node of the stream's writer,
%% unless they say otherwise.
-module(stream_s3_osiris).

-export([start/1, stop/0]).
-export([config/1, config/2, start_stream/1, start_replica/2, writer/1, dir/1, next_offset/1, committed_chunk_id/1, last_chunk_id/1]).
-export([write/2, write_chunk/2, write_all/4]).

%% Far above what any write of these tests takes.
-define(TIMEOUT, 30000).

%% @doc Starts osiris with its logs below a directory. The port range is for its replicas and may be shared by nodes of one
%% machine: each takes a free port of it.
-spec start(file:filename()) -> ok.
start(DataDir) ->
    _ = application:load(osiris),
    ok = application:set_env(osiris, data_dir, DataDir),
    ok = application:set_env(osiris, port_range, {6600, 6900}),
    {ok, _} = application:ensure_all_started(osiris),
    ok.

%% @doc Stops osiris, its writers first.
-spec stop() -> ok.
stop() ->
    case application:stop(osiris) of
        ok -> ok;
        {error, {not_started, osiris}} -> ok
    end.

%% @doc Configuration of a stream with one member, on this node.
-spec config(binary()) -> map().
config(Name) ->
    config(Name, #{}).

-spec config(binary(), map()) -> map().
config(Name, Overrides) ->
    Defaults = #{
        name => Name,
        reference => {test_stream, Name},
        epoch => 1,
        leader_node => node(),
        replica_nodes => [],
        retention => [],
        max_segment_size_bytes => 32 bsl 20
    },
    maps:merge(Defaults, Overrides).

%% @doc Starts a new stream and returns its writer.
-spec start_stream(map()) -> pid().
start_stream(Config) ->
    {ok, #{leader_pid := Writer}} = osiris:start_cluster(Config),
    Writer.

%% @doc The process of a stream on this node, its writer or a replica.
-spec writer(binary()) -> pid() | undefined.
writer(Name) ->
    case [Pid || {N, Pid, _, _} <- supervisor:which_children(osiris_server_sup), N =:= Name, is_pid(Pid)] of
        [Pid] -> Pid;
        [] -> undefined
    end.

%% @doc Starts a replica on a node, as often as the writer's retention deletes a segment that it was about to begin with.
-spec start_replica(node(), map()) -> {ok, pid()} | {error, term()}.
start_replica(Node, Conf) ->
    try
        osiris:start_replica(Node, Conf)
    catch
        exit:{{bad_return_value, missing_file}, _Call} -> start_replica(Node, Conf)
    end.

%% @doc The directory of a stream's segment files on this node. Of a string or a binary, as osiris has it.
-spec dir(pid()) -> file:filename_all().
dir(Pid) ->
    #{dir := Dir} = osiris_util:get_reader_context(Pid),
    Dir.

%% @doc One more than the last offset written, committed or not; tracking chunks count.
-spec next_offset(pid()) -> non_neg_integer().
next_offset(Pid) ->
    #{dir := Dir} = osiris_util:get_reader_context(Pid),
    try osiris_log:overview(Dir) of
        {{_First, Last}, _Epochs} -> Last + 1;
        {empty, _Epochs} -> 0
    catch
        %% Retention deleted a segment between its being listed and read.
        throw:missing_file -> next_offset(Pid)
    end.

%% @doc Id of the last chunk that a majority of the members has; -1 before the first.
-spec committed_chunk_id(pid()) -> integer().
committed_chunk_id(Pid) ->
    #{shared := Shared} = osiris_util:get_reader_context(Pid),
    osiris_log_shared:committed_chunk_id(Shared).

%% @doc Id of the last chunk written, committed or not; -1 before the first.
-spec last_chunk_id(pid()) -> integer().
last_chunk_id(Pid) ->
    #{shared := Shared} = osiris_util:get_reader_context(Pid),
    osiris_log_shared:last_chunk_id(Shared).

%% @doc Writes records and waits until all are committed. How they are spread over chunks is up to osiris.
-spec write(pid(), [osiris:data()]) -> ok.
write(Writer, Records) ->
    Tag = make_ref(),
    Corrs = [send(Writer, {Tag, N}, Record) || {N, Record} <- lists:enumerate(Records)],
    wait_for(Corrs).

%% @doc Writes records into one chunk and waits until it is committed: the writer is held while they are sent to it.
-spec write_chunk(pid(), [osiris:data()]) -> ok.
write_chunk(Writer, Records) ->
    Tag = make_ref(),
    ok = sys:suspend(Writer),
    Corrs = [send(Writer, {Tag, N}, Record) || {N, Record} <- lists:enumerate(Records)],
    ok = sys:resume(Writer),
    wait_for(Corrs).

send(Writer, Corr, Record) ->
    ok = osiris:write(Writer, undefined, Corr, Record),
    Corr.

wait_for([]) ->
    ok;
wait_for(Corrs) ->
    receive
        {osiris_written, _Reference, undefined, Written} -> wait_for(Corrs -- Written)
    after ?TIMEOUT ->
        error({not_committed, length(Corrs)})
    end.

%% @doc Writes `Count' records, `Record(N)' for N from 0, never more than `Window' bytes ahead of what is committed, so that
%% chunks get several records and memory stays bounded. `Done(N, Bytes)' hears of each commit: the number of records and the
%% sum of their bytes so far. A record larger than the window goes alone.
-spec write_all(pid(), {fun((non_neg_integer()) -> binary()), non_neg_integer()}, pos_integer(), fun((_, _) -> term())) -> ok.
write_all(Writer, {Record, Count}, Window, Done) ->
    write_all(Writer, Record, Count, Window, Done, 0, #{}, 0, 0).

%% `Flight' maps the number of each record that is not committed yet to its size; `Bytes' is the sum of these sizes.
write_all(_Writer, _Record, Count, _Window, _Done, Count, Flight, _Bytes, _Total) when Flight =:= #{} ->
    ok;
write_all(Writer, Record, Count, Window, Done, N, Flight, Bytes, Total) when N < Count, Bytes < Window ->
    Data = Record(N),
    ok = osiris:write(Writer, undefined, N, Data),
    Size = byte_size(Data),
    write_all(Writer, Record, Count, Window, Done, N + 1, Flight#{N => Size}, Bytes + Size, Total);
write_all(Writer, Record, Count, Window, Done, N, Flight, Bytes, Total) ->
    receive
        {osiris_written, _Reference, undefined, Corrs} ->
            Sum = lists:sum([maps:get(Corr, Flight) || Corr <- Corrs]),
            Left = maps:without(Corrs, Flight),
            _ = Done(N - map_size(Left), Total + Sum),
            write_all(Writer, Record, Count, Window, Done, N, Left, Bytes - Sum, Total + Sum)
    after ?TIMEOUT ->
        error({not_committed, map_size(Flight)})
    end.
