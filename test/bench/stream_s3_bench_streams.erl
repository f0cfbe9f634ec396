%% @doc What many streams on one node cost: `make bench-streams'. First the streams without the application, then with it; first all idle,
%% then some busy. Prints a table, and writes target/bench/streams.json. The objects go to a directory.
-module(stream_s3_bench_streams).

-export([main/0]).

%% Streams that are made at the same time.
-define(MAKERS, 8).
-define(START_TIMEOUT_MS, 600000).
-define(TIMEOUT, 60000).
%% A busy stream gets a record of this size so often, and is cut at this age.
-define(RECORD, 1000).
-define(EVERY_MS, 100).
-define(MAX_AGE_MS, 1000).

%% @doc BENCH_IDLE=2000, BENCH_BUSY=100 of these, BENCH_SECONDS=20 of each measurement.
-spec main() -> ok.
main() ->
    ok = logger:set_primary_config(level, error),
    Idle = number("BENCH_IDLE", 2000),
    Busy = number("BENCH_BUSY", 100),
    Seconds = number("BENCH_SECONDS", 20),
    {ok, Dir} = stream_s3_temp:new("bench"),
    try
        Figures = run(Dir, Idle, Busy, Seconds),
        tell(Figures),
        write(Figures)
    after
        stream_s3_temp:remove(Dir)
    end.

run(Dir, Idle, Busy, Seconds) ->
    ok = stream_s3_osiris:start(filename:join(Dir, "osiris")),
    {Made, Streams} = timed(fun() -> make(Idle) end),
    tell("~b streams made in ~.1f s", [Idle, Made]),
    CpuWithout = cpu_of(Seconds),
    Before = memory(),
    {Started, ok} = timed(fun() -> start(Dir, Streams) end),
    tell("application started and all streams resolved in ~.1f s", [Started]),
    {Persisted, ok} = timed(fun() -> flush() end),
    tell("all flushed in ~.1f s", [Persisted]),
    After = memory(),
    CpuWith = cpu_of(Seconds),
    Writers = lists:sublist(Streams, Busy),
    {CpuBusyWithout, CpuBusy, Took} = busy(Writers, Seconds),
    ok = stream_s3_world:stop_application(),
    ok = stream_s3_osiris:stop(),
    [
        {idle_streams, Idle},
        {start_seconds, Started},
        {first_persist_of_all_seconds, Persisted},
        {erlang_kib_a_stream, (maps:get(erlang, After) - maps:get(erlang, Before)) / 1024 / Idle},
        {resident_kib_a_stream, (maps:get(resident, After) - maps:get(resident, Before)) / 1024 / Idle},
        {idle_cpu_percent_without, CpuWithout},
        {idle_cpu_percent, CpuWith},
        {busy_streams, Busy},
        {busy_cpu_percent_paused, CpuBusyWithout},
        {busy_cpu_percent, CpuBusy},
        {busy_max_age_ms, ?MAX_AGE_MS},
        {busy_persist_interval_ms, rabbitmq_stream_s3_config:get(persist_interval_ms)},
        {busy_samples, length(Took)},
        {commit_to_durable_p50_ms, percentile(50, Took)},
        {commit_to_durable_p99_ms, percentile(99, Took)}
    ].

%% --- streams ---------------------------------------------------------------------------------------------------------

make(Count) ->
    Ids = [iolist_to_binary(io_lib:format("stream_~5..0b", [N])) || N <- lists:seq(1, Count)],
    lists:append(parallel(fun make_one/1, Ids)).

make_one(Id) ->
    Writer = stream_s3_osiris:start_stream(stream_s3_osiris:config(Id)),
    ok = stream_s3_osiris:write(Writer, [<<0:(8 * ?RECORD)>>]),
    {Id, Writer}.

%% By some processes, each of which takes a part.
parallel(Fun, All) ->
    Parts = [[One || {N, One} <- lists:enumerate(All), N rem ?MAKERS =:= Part] || Part <- lists:seq(0, ?MAKERS - 1)],
    Running = [spawn_monitor(fun() -> exit({made, [Fun(One) || One <- Part]}) end) || Part <- Parts],
    [
        receive
            {'DOWN', Monitor, process, Pid, {made, Made}} -> Made;
            {'DOWN', Monitor, process, Pid, Reason} -> error(Reason)
        end
     || {Pid, Monitor} <- Running
    ].

start(Dir, Streams) ->
    Objects = filename:join(Dir, "objects"),
    ok = filelib:ensure_path(Objects),
    ok = stream_s3_world:start_application(#{
        store => fs, fs_dir => unicode:characters_to_binary(Objects), fragment_max_age_ms => infinity
    }),
    ok = rabbitmq_stream_s3:reconcile(),
    await_all([Id || {Id, _} <- Streams], erlang:monotonic_time(millisecond) + ?START_TIMEOUT_MS).

%% Each has found out what it had before: nothing.
await_all([], _Deadline) ->
    ok;
await_all([Id | Ids], Deadline) ->
    Left = max(0, Deadline - erlang:monotonic_time(millisecond)),
    case rabbitmq_stream_s3_replica_reader:await_offset(Id, 0, Left) of
        ok -> await_all(Ids, Deadline);
        {error, Reason} -> error({not_resolved, Id, Reason})
    end.

flush() ->
    [] = [{Id, Answer} || {Id, Answer} <- rabbitmq_stream_s3:flush(), Answer =/= ok],
    ok.

%% --- busy ones -------------------------------------------------------------------------------------------------------

%% CPU while they are written to with uploads paused, then with uploads; and milliseconds from commit to durable manifest.
busy(Streams, Seconds) ->
    ok = stream_s3_world:set(#{fragment_max_age_ms => ?MAX_AGE_MS}),
    Self = self(),
    Writing = [spawn_link(fun() -> write(Writer, 0) end) || {_, Writer} <- Streams],
    ok = rabbitmq_stream_s3:pause(),
    Paused = cpu_of(Seconds),
    ok = rabbitmq_stream_s3:resume(),
    Waiting = [spawn_link(fun() -> await(Id, Writer, Self, deadline(Seconds), []) end) || {Id, Writer} <- Streams],
    Cpu = cpu_of(Seconds),
    Took = lists:append([
        receive
            {Pid, Ms} -> Ms
        after ?TIMEOUT -> error({no_answer, Pid})
        end
     || Pid <- Waiting
    ]),
    [begin unlink(Pid), exit(Pid, kill) end || Pid <- Writing],
    {Paused, Cpu, Took}.

deadline(Seconds) ->
    erlang:monotonic_time(millisecond) + Seconds * 1000.

%% What is confirmed is of no interest here.
write(Writer, N) ->
    ok = osiris:write(Writer, undefined, N, <<N:32, 0:(8 * (?RECORD - 4))>>),
    receive
        {osiris_written, _, undefined, _} -> ok
    after ?TIMEOUT -> error(not_confirmed)
    end,
    receive
    after ?EVERY_MS -> write(Writer, N + 1)
    end.

await(Id, Writer, Parent, Deadline, Took) ->
    Began = erlang:monotonic_time(millisecond),
    case Began < Deadline of
        true ->
            Offset = stream_s3_osiris:committed_chunk_id(Writer) + 1,
            ok = rabbitmq_stream_s3_replica_reader:await_offset(Id, Offset, ?TIMEOUT),
            await(Id, Writer, Parent, Deadline, [erlang:monotonic_time(millisecond) - Began | Took]);
        false ->
            Parent ! {self(), Took}
    end.

%% --- numbers ---------------------------------------------------------------------------------------------------------

timed(Fun) ->
    Began = erlang:monotonic_time(microsecond),
    Value = Fun(),
    {(erlang:monotonic_time(microsecond) - Began) / 1000000, Value}.

%% Of this process of the operating system during so many seconds, in percent of one core.
cpu_of(Seconds) ->
    Ticks = ticks(),
    Began = erlang:monotonic_time(microsecond),
    receive
    after Seconds * 1000 -> ok
    end,
    (ticks() - Ticks) * 1000000 / (erlang:monotonic_time(microsecond) - Began).

%% Hundredths of a second, user and system.
ticks() ->
    {ok, Stat} = file:read_file("/proc/self/stat"),
    [_, Fields] = string:split(Stat, ") ", trailing),
    lists:sum([binary_to_integer(Field) || Field <- lists:sublist(string:lexemes(Fields, " "), 12, 2)]).

memory() ->
    [garbage_collect(Pid) || Pid <- processes()],
    {ok, Status} = file:read_file("/proc/self/status"),
    {match, [Kib]} = re:run(Status, "VmRSS:\\s+(\\d+) kB", [{capture, all_but_first, binary}]),
    #{erlang => erlang:memory(total), resident => binary_to_integer(Kib) * 1024}.

percentile(_P, []) -> 0;
percentile(P, Values) -> lists:nth(max(1, ceil(length(Values) * P / 100)), lists:sort(Values)).

number(Name, Default) ->
    list_to_integer(os:getenv(Name, integer_to_list(Default))).

tell(Format, Args) ->
    io:format(standard_error, Format ++ "~n", Args).

tell(Figures) ->
    [io:format("~-36s ~ts~n", [Key, text(Value)]) || {Key, Value} <- Figures].

text(Value) when is_integer(Value) -> integer_to_list(Value);
text(Value) -> float_to_list(Value, [{decimals, 2}]).

write(Figures) ->
    File = filename:join([os:getenv("CARGO_TARGET_DIR", "target"), "bench", "streams.json"]),
    ok = filelib:ensure_dir(File),
    Members = lists:join(",\n", [["  \"", atom_to_list(Key), "\": ", text(Value)] || {Key, Value} <- Figures]),
    ok = file:write_file(File, ["{\n", Members, "\n}\n"]),
    io:format("~n~ts~n", [File]).
