%% @doc The interface for people and other applications. Stream ids are osiris' names of streams, binaries.
-module(rabbitmq_stream_s3).

-export([start/0, get_range/1, await_offset/2, force_cut/1, reconcile/0, set_transfer_rate/2, reload_store/0, gc/1, adopt/1, adopt/2]).
-export([status/0, status/1, print_status/0]).
-export([pause/0, pause/1, resume/0, resume/1, flush/0, flush/1, flush/2]).
-export_type([status/0]).

%% How long a reader may take to answer before it is shown as busy.
-define(STATUS_TIMEOUT_MS, 2000).
-define(FLUSH_TIMEOUT_MS, 60000).

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

%% @doc The half-open range of offsets that is in the remote tier, as persisted; `unresolved' while that is not known here. On a node
%% with a replica of the stream it may be a moment old. A table lookup.
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

%% @doc Pauses all streams of this node, also those that are found later, until {@link resume/0} or the end of the application:
%% nothing more is cut. What has been cut is still uploaded and persisted. Retention goes on; the garbage collection does not walk.
-spec pause() -> ok | {error, not_running}.
pause() ->
    mark(fun rabbitmq_stream_s3_pause:pause/1, node, rabbitmq_stream_s3_registry:list()).

%% @doc Pauses one stream on this node, whether its writer is here now or comes later: {@link pause/0}.
-spec pause(stream_id()) -> ok | {error, not_running}.
pause(StreamId) when is_binary(StreamId) ->
    mark(fun rabbitmq_stream_s3_pause:pause/1, {stream, StreamId}, reader(StreamId)).

%% @doc Goes on with all streams but those that are paused by name.
-spec resume() -> ok | {error, not_running}.
resume() ->
    mark(fun rabbitmq_stream_s3_pause:resume/1, node, rabbitmq_stream_s3_registry:list()).

%% @doc Goes on with one stream, unless the node is paused.
-spec resume(stream_id()) -> ok | {error, not_running}.
resume(StreamId) when is_binary(StreamId) ->
    mark(fun rabbitmq_stream_s3_pause:resume/1, {stream, StreamId}, reader(StreamId)).

mark(Mark, What, Readers) ->
    case Mark(What) of
        ok ->
            %% Who does not answer looks at the mark before it cuts anything.
            lists:foreach(fun({_, Pid}) -> rabbitmq_stream_s3_replica_reader:pause_changed(Pid) end, Readers);
        {error, not_running} = Error ->
            Error
    end.

reader(StreamId) ->
    case rabbitmq_stream_s3_registry:whereis(StreamId) of
        undefined -> [];
        Pid -> [{StreamId, Pid}]
    end.

%% @doc {@link flush/2} of the node with a limit of one minute.
-spec flush() -> [{stream_id(), ok | {error, timeout | reader_down | paused}}] | {error, term()}.
flush() ->
    flush(node, ?FLUSH_TIMEOUT_MS).

%% @doc {@link flush/2} with a limit of one minute.
-spec flush(stream_id()) -> ok | {error, timeout | reader_down | paused}.
flush(StreamId) when is_binary(StreamId) ->
    flush(StreamId, ?FLUSH_TIMEOUT_MS).

%% @doc Cuts, uploads and persists all that is committed now: {@link rabbitmq_stream_s3_replica_reader:flush/2}. The limit is in
%% milliseconds, and begins when the stream's reader has been found. Of `node': each stream that is tiered from this node, all at once, those
%% included that were declared a moment ago; an error that is not a stream's is one of {@link reconcile/0}, and nothing is flushed then.
-spec flush
    (stream_id(), timeout()) -> ok | {error, timeout | reader_down | paused};
    (node, timeout()) -> [{stream_id(), ok | {error, timeout | reader_down | paused}}] | {error, term()}.
flush(node, Timeout) ->
    case reconcile() of
        ok -> rabbitmq_stream_s3_replica_reader:flush_all(rabbitmq_stream_s3_registry:list(), Timeout);
        {error, _} = Error -> Error
    end;
flush(StreamId, Timeout) when is_binary(StreamId) ->
    %% A stream that was declared a moment ago has none. Where there is none then either, for whatever reason, the answer is that.
    _ = rabbitmq_stream_s3_registry:whereis(StreamId) =:= undefined andalso reconcile(),
    rabbitmq_stream_s3_replica_reader:flush(StreamId, Timeout).

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

%% @doc Puts changed settings of the store into use: credentials, endpoint, region, certificates, proxy, and what goes with objects.
%% See {@link rabbitmq_stream_s3_store:reload/0}; the error names the setting.
-spec reload_store() -> ok | {error, Text :: binary()}.
reload_store() ->
    rabbitmq_stream_s3_store:reload().

%% @doc Looks for garbage in the bucket now, and deletes it, or only counts it: {@link rabbitmq_stream_s3_gc:run/1}.
-spec gc(delete | dry_run) ->
    {ok, rabbitmq_stream_s3_gc_pass:report()} | {error, term(), rabbitmq_stream_s3_gc_pass:report()} | {error, term()}.
gc(Mode) ->
    rabbitmq_stream_s3_gc:run(Mode).

%% @doc {@link adopt/2} of the newest sound root.
-spec adopt(stream_id()) -> {ok, rabbitmq_stream_s3_adopt:adopted()} | {error, rabbitmq_stream_s3_adopt:refusal()}.
adopt(StreamId) ->
    adopt(StreamId, #{}).

%% @doc Rebuilds the lost entry of a stream in the metadata store from the bucket: {@link rabbitmq_stream_s3_adopt:adopt/2}. With
%% `dry_run => true' it only says which root would be taken, and why.
-spec adopt(stream_id(), rabbitmq_stream_s3_adopt:options()) ->
    {ok, rabbitmq_stream_s3_adopt:adopted()} | {error, rabbitmq_stream_s3_adopt:refusal()}.
adopt(StreamId, Options) when is_binary(StreamId), is_map(Options) ->
    rabbitmq_stream_s3_adopt:adopt(StreamId, Options).

%% @doc The node as a whole: its store, its governor, its metadata store, the segments it holds open, what it deletes, and each stream that is tiered from
%% here. Asks each reader.
-spec status() ->
    #{
        paused := none | integer(),
        replicas := map(),
        store := map(),
        governor := map(),
        pins := rabbitmq_stream_s3_nif:pins_info(),
        metadata := map(),
        deletions := map(),
        garbage := map(),
        settings := map(),
        streams := [status()]
    }.
status() ->
    Readers = rabbitmq_stream_s3_registry:list(),
    #{
        paused => rabbitmq_stream_s3_pause:node_since(),
        replicas => rabbitmq_stream_s3_replicas:status(),
        store => rabbitmq_stream_s3_store:status(),
        governor => rabbitmq_stream_s3_governor:info(),
        pins => rabbitmq_stream_s3_pins:info(),
        metadata => (rabbitmq_stream_s3_counters:get(metadata))#{store_id => rabbitmq_stream_s3_metadata:store_id()},
        deletions => maps:merge(rabbitmq_stream_s3_counters:get(objects), rabbitmq_stream_s3_reaper:status()),
        garbage => rabbitmq_stream_s3_gc:status(),
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
    Header = ["stream", "state", "epoch", "local", "tiered", "behind", "in flight", "last persist", "lag", "done", "rate"],
    Rows = [Header | [row(Status) || Status <- Streams]],
    Widths = [lists:max([string:length(Cell) || Cell <- Column]) || Column <- columns(Rows)],
    [io:format("~ts~n", [line(Row, Widths)]) || Row <- Rows],
    [print_pause(Id, Stalled) || #{stream := Id, paused := {_, _}, stalled := Stalled} <- Streams],
    [print_problem(Id, P) || #{stream := Id, problems := Problems} <- Streams, P <- Problems],
    ok.

print_store(#{state := failing, cause := Cause}) -> io:format("store: failing: ~ts~n", [Cause]);
print_store(#{state := State}) -> io:format("store: ~ts~n", [State]).

row(#{stream := Id, state := State} = Status) ->
    [
        Id,
        state(State, maps:get(paused, Status, none)),
        cell(epoch, Status),
        range(maps:get(local, Status, none)),
        range(maps:get(remote, Status, none)),
        cell(behind, Status),
        cell(transfers_in_flight, Status),
        since(maps:get(last_persist_timestamp_ms, Status, none)),
        lag(Status),
        done(Status),
        rate(Status)
    ].

state(running, {_By, _Since}) -> "paused";
state(State, _) -> atom_to_list(State).

lag(#{lag_bytes := Bytes, lag_ms := Ms}) -> io_lib:format("~ts, ~b s", [bytes(Bytes), Ms div 1000]);
lag(#{}) -> "-".

%% Of the local log.
done(#{progress := #{percent := Percent}}) -> io_lib:format("~b %", [Percent]);
done(#{}) -> "-".

rate(#{progress := #{bytes_per_second := Rate}}) -> [bytes(Rate), "/s"];
rate(#{}) -> "-".

bytes(Bytes) when Bytes < 10000 -> io_lib:format("~b B", [Bytes]);
bytes(Bytes) when Bytes < 10000000 -> io_lib:format("~b kB", [Bytes div 1000]);
bytes(Bytes) -> io_lib:format("~b MB", [Bytes div 1000000]).

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

print_pause(Id, #{cause := Cause, since := Since}) ->
    io:format("~ts: ~ts, at ~ts~n", [Id, Cause, moment(Since)]).

print_problem(Id, #{doing := Doing, cause := Cause, since := Since}) ->
    io:format("~ts: ~ts fails since ~ts: ~ts~n", [Id, Doing, moment(Since), Cause]).

moment(Ms) -> calendar:system_time_to_rfc3339(Ms, [{unit, millisecond}]).
