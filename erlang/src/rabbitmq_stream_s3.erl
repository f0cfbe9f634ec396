%% @doc The interface for people and other applications. Stream ids are osiris' names of streams, binaries.
-module(rabbitmq_stream_s3).

-export([start/0, get_range/1, await_offset/2, force_cut/1, reconcile/0, set_transfer_rate/2]).
-export([status/0, status/1, print_status/0]).
-export_type([status/0]).

%% How long a reader may take to answer before it is shown as busy.
-define(STATUS_TIMEOUT_MS, 2000).

-type stream_id() :: binary().
-type offset() :: non_neg_integer().
%% See {@link rabbitmq_stream_s3_replica_reader:status/2} for the keys.
-type status() :: #{stream := stream_id(), state := atom(), atom() => term()}.

%% @doc Starts the application with all that it needs.
-spec start() -> ok | {error, term()}.
start() ->
    case application:ensure_all_started(rabbitmq_stream_s3) of
        {ok, _} -> ok;
        {error, _} = Error -> Error
    end.

%% @doc The half-open range of offsets that is in the remote tier, as persisted; `unresolved' while that is not known here. A table lookup.
-spec get_range(stream_id()) -> {First :: offset(), Next :: offset()} | empty | {error, unresolved}.
get_range(StreamId) ->
    try
        rabbitmq_stream_s3_manifest_cache:range(StreamId)
    catch
        error:badarg -> {error, unresolved}
    end.

%% @doc Waits until everything below an offset is in the remote tier: {@link rabbitmq_stream_s3_replica_reader:await_offset/2}.
-spec await_offset(stream_id(), offset()) -> ok | {error, timeout | reader_down}.
await_offset(StreamId, Offset) ->
    rabbitmq_stream_s3_replica_reader:await_offset(StreamId, Offset).

%% @doc Ends the fragment that is being assembled now: {@link rabbitmq_stream_s3_replica_reader:force_cut/1}.
-spec force_cut(stream_id()) -> ok | {error, empty}.
force_cut(StreamId) ->
    rabbitmq_stream_s3_replica_reader:force_cut(StreamId).

%% @doc Looks for streams that are not tiered yet: {@link rabbitmq_stream_s3_reconciler:reconcile/0}.
-spec reconcile() -> ok | {error, term()}.
reconcile() ->
    rabbitmq_stream_s3_reconciler:reconcile().

%% @doc Changes `max_transfer_bytes_per_sec' and `max_transfer_burst_bytes' (`undefined': a fifth of the rate) while the
%% application runs, until it is started anew. Uploads that have been admitted go on.
-spec set_transfer_rate(unlimited | pos_integer(), Burst :: pos_integer() | undefined) -> ok | {error, Text :: binary()}.
set_transfer_rate(Rate, Burst) ->
    Rated = [{max_transfer_bytes_per_sec, Rate}] ++ [{max_transfer_burst_bytes, Burst} || Burst =/= undefined],
    Env = application:get_all_env(rabbitmq_stream_s3),
    Others = [Setting || {Key, _} = Setting <- Env, Key =/= max_transfer_bytes_per_sec, Key =/= max_transfer_burst_bytes],
    case rabbitmq_stream_s3_config:validate(Rated ++ Others) of
        ok ->
            ok = application:unset_env(rabbitmq_stream_s3, max_transfer_burst_bytes),
            [ok = application:set_env(rabbitmq_stream_s3, Key, Value) || {Key, Value} <- Rated],
            rabbitmq_stream_s3_governor:set_rate(Rate, Burst);
        {error, _} = Error ->
            Error
    end.

%% @doc The node as a whole: its store, its governor, its metadata store, and each stream that is tiered from here. Asks each reader.
-spec status() -> #{store := map(), governor := map(), metadata := map(), settings := map(), streams := [status()]}.
status() ->
    Readers = rabbitmq_stream_s3_registry:list(),
    #{
        store => rabbitmq_stream_s3_store:status(),
        governor => rabbitmq_stream_s3_governor:info(),
        metadata => (rabbitmq_stream_s3_counters:get(metadata))#{store_id => rabbitmq_stream_s3_metadata:store_id()},
        settings => rabbitmq_stream_s3_config:redact(maps:from_list(application:get_all_env(rabbitmq_stream_s3))),
        streams => [reader_status(StreamId, Pid) || {StreamId, Pid} <- Readers]
    }.

%% @doc One stream. `state' is `not_tiered' for one that has no reader on this node. Asks the reader.
-spec status(stream_id()) -> status().
status(StreamId) ->
    case rabbitmq_stream_s3_registry:whereis(StreamId) of
        undefined -> #{stream => StreamId, state => not_tiered};
        Pid -> reader_status(StreamId, Pid)
    end.

reader_status(StreamId, Pid) ->
    case rabbitmq_stream_s3_replica_reader:status(Pid, ?STATUS_TIMEOUT_MS) of
        {ok, Status} -> Status;
        {error, timeout} -> #{stream => StreamId, state => busy};
        {error, reader_down} -> #{stream => StreamId, state => not_tiered}
    end.

%% @doc Prints {@link status/0} as a table, and below it whatever stands in the way of an upload.
-spec print_status() -> ok.
print_status() ->
    #{store := Store, streams := Streams} = status(),
    print_store(Store),
    Header = ["stream", "state", "epoch", "local", "tiered", "behind", "in flight", "last persist"],
    Rows = [Header | [row(Status) || Status <- Streams]],
    Widths = [lists:max([string:length(Cell) || Cell <- Column]) || Column <- columns(Rows)],
    [io:format("~ts~n", [line(Row, Widths)]) || Row <- Rows],
    [print_problem(Id, P) || #{stream := Id, problems := Problems} <- Streams, P <- Problems],
    ok.

print_store(#{state := failing, cause := Cause}) -> io:format("store: failing: ~ts~n", [Cause]);
print_store(#{state := State}) -> io:format("store: ~ts~n", [State]).

row(#{stream := Id, state := State} = Status) ->
    [
        Id,
        atom_to_list(State),
        cell(epoch, Status),
        range(maps:get(local, Status, none)),
        range(maps:get(remote, Status, none)),
        cell(behind, Status),
        cell(transfers_in_flight, Status),
        since(maps:get(last_persist_timestamp_ms, Status, none))
    ].

cell(Key, Status) ->
    case Status of
        #{Key := N} when is_integer(N) -> integer_to_list(N);
        #{} -> "-"
    end.

range({First, Next}) -> io_lib:format("~b..~b", [First, Next]);
range(empty) -> "empty";
range(_) -> "-".

since(Ms) when is_integer(Ms) -> io_lib:format("~b s ago", [max(0, erlang:system_time(millisecond) - Ms) div 1000]);
since(_) -> "-".

columns([[] | _]) -> [];
columns(Rows) -> [[hd(Row) || Row <- Rows] | columns([tl(Row) || Row <- Rows])].

line(Row, Widths) ->
    string:trim(lists:join("  ", [string:pad(Cell, Width) || {Cell, Width} <- lists:zip(Row, Widths)]), trailing).

print_problem(Id, #{doing := Doing, cause := Cause, since := Since}) ->
    io:format("~ts: ~ts fails since ~ts: ~ts~n", [Id, Doing, calendar:system_time_to_rfc3339(Since, [{unit, millisecond}]), Cause]).
