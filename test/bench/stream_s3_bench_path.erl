%% @doc One run of `make bench-path': a writer that writes as fast as it can, or at a rate, with the application beside it or without. Each
%% run is a VM of its own.
%%
%% What to do comes in environment variables, from test/bench/bench_path.py; one line of JSON goes out.
-module(stream_s3_bench_path).

-export([run/0]).

-define(STREAM, <<"bench">>).
%% Records of a size at which osiris, not the sender, is what takes the time; never more than that ahead of what is confirmed.
-define(RECORD, 16384).
-define(WINDOW, 512).
%% Of so many records one is timed.
-define(TIMED, 8).
%% How often somebody begins to wait for what is committed at that moment, and looks at the status.
-define(SAMPLE_MS, 20).
-define(STATUS_MS, 100).
-define(TIMEOUT, 300000).

%% @doc BENCH_STORE=none or the URL of a store; BENCH_BYTES to write; BENCH_RATE in bytes a second, 0: as fast as it goes; BENCH_SETTLE=yes
%% waits until all is tiered. BENCH_TURNS, if set, is in how many turns it is written: each begins with what comes from BENCH_PORT, a port
%% on this machine, and is told of there when it ends.
-spec run() -> ok.
run() ->
    ok = logger:set_primary_config(level, none),
    Dir = os:getenv("BENCH_DIR"),
    ok = stream_s3_osiris:start(filename:join(Dir, "osiris")),
    Tiered = start(os:getenv("BENCH_STORE")),
    Writer = stream_s3_osiris:start_stream(stream_s3_osiris:config(?STREAM, #{max_segment_size_bytes => 500000000})),
    ok = attach(Tiered),
    Bytes = number("BENCH_BYTES"),
    Samplers = samplers(Tiered, Writer),
    {Cpu0, Began} = {cpu(), now_us()},
    Turns = in_turns(os:getenv("BENCH_TURNS"), Writer, Bytes div ?RECORD, number("BENCH_RATE")),
    Written = now_us(),
    Watched = stop(Samplers),
    ok = settle(Tiered, Writer, os:getenv("BENCH_SETTLE")),
    Ended = now_us(),
    Cpu = cpu() - Cpu0,
    Latencies = lists:append(Turns),
    Result = maps:merge(Watched, #{
        bytes => Bytes,
        write_seconds => (Written - Began) / 1000000,
        total_seconds => (Ended - Began) / 1000000,
        cpu => Cpu,
        rss_mib => rss_kib() / 1024,
        write_p50_ms => percentile(50, Latencies) / 1000,
        write_p99_ms => percentile(99, Latencies) / 1000,
        turns_p99_ms => [percentile(99, Turn) / 1000 || Turn <- Turns]
    }),
    ok = stop_application(Tiered),
    io:format("{~ts}~n", [lists:join(", ", [[$", atom_to_list(Key), $", ": ", json(Value)] || {Key, Value} <- maps:to_list(Result)])]),
    ok.

json(Values) when is_list(Values) -> [$[, lists:join(", ", [json(Value) || Value <- Values]), $]];
json(Value) when is_integer(Value) -> integer_to_list(Value);
json(Value) -> float_to_list(float(Value), [{decimals, 4}]).

number(Name) -> list_to_integer(os:getenv(Name)).

%% --- the application -------------------------------------------------------------------------------------------------

start("none") ->
    false;
start(Url) ->
    ok = stream_s3_world:start_application(#{
        store => s3,
        bucket => <<"bucket">>,
        endpoint => unicode:characters_to_binary(Url),
        access_key_id => <<"id">>,
        secret_key => <<"secret">>
    }),
    true.

attach(false) -> ok;
attach(true) -> rabbitmq_stream_s3:reconcile().

settle(true, Writer, "yes") -> stream_s3_world:settle(?STREAM, stream_s3_osiris:next_offset(Writer), ?TIMEOUT);
settle(_Tiered, _Writer, _) -> ok.

stop_application(false) -> ok;
stop_application(true) -> stream_s3_world:stop_application().

%% --- the load --------------------------------------------------------------------------------------------------------

in_turns(false, Writer, Count, Rate) ->
    [write(Writer, Count, Rate)];
in_turns(Turns, Writer, Count, Rate) ->
    N = list_to_integer(Turns),
    {ok, Socket} = gen_tcp:connect({127, 0, 0, 1}, number("BENCH_PORT"), [binary, {active, false}, {nodelay, true}]),
    [in_turn(Socket, Writer, Count div N, Rate) || _ <- lists:seq(1, N)].

in_turn(Socket, Writer, Count, Rate) ->
    {ok, <<"go">>} = gen_tcp:recv(Socket, 2),
    Latencies = write(Writer, Count, Rate),
    ok = gen_tcp:send(Socket, <<"done">>),
    Latencies.

%% Microseconds from a write to its confirmation, of some of them.
write(Writer, Count, Rate) ->
    write(Writer, rand:bytes(?RECORD), Count, Rate, now_us(), 0, 0, []).

write(_Writer, _Data, Count, _Rate, _Began, Count, Count, Latencies) ->
    Latencies;
write(Writer, Data, Count, Rate, Began, Sent, Confirmed, Latencies) when Sent < Count, Sent - Confirmed < ?WINDOW ->
    case wait_ms(Rate, Began, Sent) of
        0 ->
            ok = osiris:write(Writer, undefined, {Sent, now_us()}, Data),
            write(Writer, Data, Count, Rate, Began, Sent + 1, Confirmed, Latencies);
        Ms ->
            receive
                {osiris_written, _, undefined, Corrs} ->
                    write(Writer, Data, Count, Rate, Began, Sent, Confirmed + length(Corrs), timed(Corrs, Latencies))
            after Ms -> write(Writer, Data, Count, Rate, Began, Sent, Confirmed, Latencies)
            end
    end;
write(Writer, Data, Count, Rate, Began, Sent, Confirmed, Latencies) ->
    receive
        {osiris_written, _, undefined, Corrs} ->
            write(Writer, Data, Count, Rate, Began, Sent, Confirmed + length(Corrs), timed(Corrs, Latencies))
    after ?TIMEOUT -> error(not_confirmed)
    end.

wait_ms(0, _Began, _Sent) ->
    0;
wait_ms(Rate, Began, Sent) ->
    max(0, Sent * ?RECORD * 1000 div Rate - (now_us() - Began) div 1000).

timed(Corrs, Latencies) ->
    Now = now_us(),
    lists:foldl(
        fun
            ({N, At}, Acc) when N rem ?TIMED =:= 0 -> [Now - At | Acc];
            (_, Acc) -> Acc
        end,
        Latencies,
        Corrs
    ).

%% --- what is watched -------------------------------------------------------------------------------------------------

samplers(false, _Writer) ->
    none;
samplers(true, Writer) ->
    Max = rabbitmq_stream_s3_config:get(max_in_flight_fragments),
    Nothing = #{statuses => 0, waiting => 0, waiting_below_max => 0, lag_mib_max => 0.0, in_flight_max => 0},
    {SampleMs, StatusMs} = how_often(os:getenv("BENCH_SETTLE")),
    {spawn_link(fun() -> sample(SampleMs, Writer, []) end), spawn_link(fun() -> look(StatusMs, Max, Nothing) end)}.

%% Where nothing becomes durable, what is measured is the writer: as little as can be goes on beside it.
how_often("yes") -> {?SAMPLE_MS, ?STATUS_MS};
how_often("no") -> {infinity, 1000}.

%% Each wait is for what is committed when it begins, in a process of its own, so that they overlap. Who still waits when the writer is
%% through is not counted: it would wait for the age of the last fragment.
sample(EveryMs, Writer, Took) ->
    receive
        {took, Ms} -> sample(EveryMs, Writer, [Ms | Took]);
        {stop, From} -> From ! {self(), [Ms || Ms <- Took, Ms =/= failed]}
    after EveryMs ->
        Sampler = self(),
        Offset = stream_s3_osiris:committed_chunk_id(Writer) + 1,
        Began = now_us(),
        _ = spawn_link(fun() ->
            Sampler !
                case rabbitmq_stream_s3_replica_reader:await_offset(?STREAM, Offset, ?TIMEOUT) of
                    ok -> {took, (now_us() - Began) / 1000};
                    {error, _} -> {took, failed}
                end
        end),
        sample(EveryMs, Writer, Took)
    end.

look(EveryMs, Max, Seen) ->
    receive
        {stop, From} -> From ! {self(), Seen}
    after EveryMs -> look(EveryMs, Max, looked(rabbitmq_stream_s3:status(?STREAM), Max, Seen))
    end.

looked(#{waits_for_transfers := Waits, cut_in_flight := InFlight, lag_bytes := Lag}, Max, Seen) ->
    #{statuses := N, waiting := W, waiting_below_max := Below, lag_mib_max := LagMax, in_flight_max := Most} = Seen,
    Seen#{
        statuses := N + 1,
        waiting := W + if Waits -> 1; true -> 0 end,
        waiting_below_max := Below + if Waits, InFlight < Max -> 1; true -> 0 end,
        in_flight_max := max(Most, InFlight),
        lag_mib_max := max(LagMax, Lag / 1048576)
    };
looked(_Resolving, _Max, Seen) ->
    Seen.

stop(none) ->
    #{};
stop({Sampler, Looker}) ->
    Took = ask(Sampler),
    maps:merge(ask(Looker), #{
        durable_samples => length(Took), durable_p50_ms => percentile(50, Took), durable_p99_ms => percentile(99, Took)
    }).

ask(Pid) ->
    Pid ! {stop, self()},
    receive
        {Pid, Answer} -> Answer
    after ?TIMEOUT -> error(no_answer)
    end.

%% --- numbers ---------------------------------------------------------------------------------------------------------

percentile(_P, []) ->
    0.0;
percentile(P, Values) ->
    Sorted = lists:sort(Values),
    float(lists:nth(max(1, ceil(length(Sorted) * P / 100)), Sorted)).

now_us() ->
    erlang:monotonic_time(microsecond).

%% Of this process of the operating system, in seconds: user and system time, in hundredths.
cpu() ->
    {ok, Stat} = file:read_file("/proc/self/stat"),
    [_, Rest] = string:split(Stat, ") ", trailing),
    Fields = string:lexemes(Rest, " "),
    (binary_to_integer(lists:nth(12, Fields)) + binary_to_integer(lists:nth(13, Fields))) / 100.

rss_kib() ->
    {ok, Status} = file:read_file("/proc/self/status"),
    {match, [Kib]} = re:run(Status, "VmHWM:\\s+(\\d+) kB", [{capture, all_but_first, binary}]),
    binary_to_integer(Kib).
