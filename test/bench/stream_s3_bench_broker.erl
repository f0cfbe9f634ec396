%% @doc What tiering costs a broker: one real node, a producer at a fixed rate, with and without the plugin in turns.
%%
%% A round is three runs: without, with, without. So what the plugin adds stands beside what two runs without it differ by. Each run
%% has a stream of its own, which is deleted afterwards, so that a run with the plugin uploads what is written in it and nothing else.
%% A latency counts from the moment at which its message was due, whether or not it could be sent then. Producer and object store run on
%% the same machine: their CPU is not counted, but they take it from the broker.
%%
%% `make bench-broker' prints a table and writes target/bench/broker.json and broker.svg. BENCH_ROUNDS (4), BENCH_SECONDS (20, a run),
%% BENCH_RATE (messages a second, 1000) and BENCH_SIZE (bytes, 10240).
-module(stream_s3_bench_broker).

-include_lib("amqp_client/include/amqp_client.hrl").

-export([main/0]).

-define(TICK_MS, 5).
-define(CONFIRM_TIMEOUT_MS, 60000).
-define(WARM_UP_S, 5).

%% @doc Runs it.
-spec main() -> ok.
main() ->
    _ = os:cmd("epmd -daemon"),
    {ok, _} = net_kernel:start(list_to_atom("bench_" ++ os:getpid() ++ "@localhost"), #{name_domain => shortnames}),
    ok = logger:set_primary_config(level, error),
    {ok, Dir} = stream_s3_temp:new("bench"),
    Tier = stream_s3_tier:start(filename:join(Dir, "store")),
    Broker = stream_s3_broker:new(#{
        dir => filename:join(Dir, "broker"), conf => stream_s3_tier:conf(Tier, #{reconciliation_interval_ms => 1000}), plugins => [rabbitmq_stream]
    }),
    ok = stream_s3_broker:start(Broker),
    try
        %% What is loaded and allocated once is not for the first run alone.
        _ = run(with, Broker, ?WARM_UP_S),
        Rounds = [round(N, Broker) || N <- lists:seq(1, number("BENCH_ROUNDS", 4))],
        report(Rounds)
    after
        ok = stream_s3_broker:stop(Broker),
        ok = stream_s3_tier:stop(Tier),
        ok = stream_s3_temp:remove(Dir)
    end.

round(N, Broker) ->
    Seconds = number("BENCH_SECONDS", 20),
    Runs = #{Name => run(How, Broker, Seconds) || {Name, How} <- [{without_1, without}, {with, with}, {without_2, without}]},
    io:format(standard_error, "round ~b: p99 of confirms without ~.2f ms, with ~.2f ms, without ~.2f ms~n", [
        N | [maps:get(p99_ms, maps:get(Name, Runs)) || Name <- [without_1, with, without_2]]
    ]),
    Runs.

number(Name, Default) ->
    case os:getenv(Name) of
        false -> Default;
        "" -> Default;
        Text -> list_to_integer(Text)
    end.

%% --- one run ---------------------------------------------------------------------------------------------------------

run(How, Broker, Seconds) ->
    ok = stream_s3_broker:set_enabled([rabbitmq_stream | [rabbitmq_stream_s3 || How =:= with]], Broker),
    Queue = iolist_to_binary(io_lib:format("run_~b", [erlang:unique_integer([positive])])),
    {ok, _} = application:ensure_all_started(amqp_client),
    {ok, Connection} = amqp_connection:start(#amqp_params_network{host = "127.0.0.1", port = stream_s3_broker:port(amqp, Broker)}),
    {ok, Channel} = amqp_connection:open_channel(Connection),
    #'queue.declare_ok'{} = amqp_channel:call(Channel, #'queue.declare'{
        queue = Queue, durable = true, arguments = [{<<"x-queue-type">>, longstr, <<"stream">>}]
    }),
    _ = How =:= with andalso stream_s3_broker:call(Broker, rabbitmq_stream_s3, reconcile, []),
    #'confirm.select_ok'{} = amqp_channel:call(Channel, #'confirm.select'{}),
    ok = amqp_channel:register_confirm_handler(Channel, self()),
    Cpu = cpu_ms(Broker),
    Start = erlang:monotonic_time(microsecond),
    {Latencies, MaxRss} = produce(Channel, Queue, Broker, Start, Seconds),
    Took = (erlang:monotonic_time(microsecond) - Start) / 1.0e6,
    Tiered = tiered(How, Broker, Queue),
    CpuUsed = (cpu_ms(Broker) - Cpu) / 1000,
    #'queue.delete_ok'{} = amqp_channel:call(Channel, #'queue.delete'{queue = Queue}),
    ok = amqp_connection:close(Connection),
    Sorted = list_to_tuple(lists:sort(Latencies)),
    Count = tuple_size(Sorted),
    #{
        messages_per_s => Count / Took,
        p50_ms => percentile(50, Sorted),
        p99_ms => percentile(99, Sorted),
        p999_ms => percentile(99.9, Sorted),
        cpu_s => CpuUsed,
        cpu_s_per_gib => CpuUsed / (Count * number("BENCH_SIZE", 10240) / (1 bsl 30)),
        rss_mib => MaxRss / 1024,
        tiered_last_records => Tiered
    }.

%% The CPU time is that of all that was written: what is not in the tier yet is uploaded first. Answers how much that was, which must be
%% little beside the whole.
tiered(without, _Broker, _Queue) ->
    0;
tiered(with, Broker, Queue) ->
    StreamId = stream_s3_tier:stream_id(Broker, Queue),
    Before = stream_s3_broker:call(Broker, rabbitmq_stream_s3, get_range, [StreamId]),
    ok = stream_s3_tier:flush(Broker, StreamId),
    {0, Next} = stream_s3_broker:call(Broker, rabbitmq_stream_s3, get_range, [StreamId]),
    case Before of
        empty -> Next;
        {0, Tiered} -> Next - Tiered
    end.

produce(Channel, Queue, Broker, Start, Seconds) ->
    Rate = number("BENCH_RATE", 1000),
    Body = rand:bytes(number("BENCH_SIZE", 10240)),
    produce(#{
        channel => Channel, publish => #'basic.publish'{routing_key = Queue}, message => #amqp_msg{payload = Body}, broker => Broker,
        start => Start, rate => Rate, total => Rate * Seconds, sent => 0, confirmed => 0, latencies => [], rss => 0
    }).

produce(#{sent := Sent, confirmed := Sent, total := Sent, latencies := Latencies, rss := Rss}) ->
    {Latencies, Rss};
produce(#{channel := Channel, sent := Sent, total := Total, start := Start, rate := Rate} = State0) ->
    Now = erlang:monotonic_time(microsecond),
    Due = min(Total, (Now - Start) * Rate div 1000000 + 1),
    #{publish := Publish, message := Message} = State0,
    lists:foreach(fun(_) -> ok = amqp_channel:cast(Channel, Publish, Message) end, lists:seq(Sent + 1, Due)),
    State = sample(Due div Rate > Sent div Rate, State0#{sent := max(Sent, Due)}),
    Wait = case Due of Total -> ?CONFIRM_TIMEOUT_MS; _ -> ?TICK_MS end,
    receive
        #'basic.ack'{delivery_tag = Tag, multiple = Multiple} -> produce(confirmed(Tag, Multiple, State));
        #'basic.nack'{} -> error(refused)
    after Wait ->
        Due < Total orelse error(not_confirmed),
        produce(State)
    end.

%% Memory once a second.
sample(false, State) -> State;
sample(true, #{broker := Broker, rss := Rss} = State) -> State#{rss := max(Rss, rss_kib(Broker))}.

%% Confirms of one queue come in order, so the rest of those before a `multiple' one are new with it.
confirmed(Tag, true, #{confirmed := Confirmed} = State) ->
    lists:foldl(fun confirm/2, State, lists:seq(Confirmed + 1, Tag));
confirmed(Tag, false, State) ->
    confirm(Tag, State).

confirm(Tag, #{start := Start, rate := Rate, confirmed := Confirmed, latencies := Latencies} = State) ->
    DueAt = Start + (Tag - 1) * 1000000 div Rate,
    State#{confirmed := Confirmed + 1, latencies := [erlang:monotonic_time(microsecond) - DueAt | Latencies]}.

percentile(P, Sorted) ->
    element(max(1, ceil(tuple_size(Sorted) * P / 100)), Sorted) / 1000.

cpu_ms(Broker) ->
    {ok, Pid} = stream_s3_broker:pid(Broker),
    {ok, Stat} = file:read_file("/proc/" ++ Pid ++ "/stat"),
    %% The name, in parentheses, may hold spaces; user and system time are the 12th and 13th field behind it, in hundredths.
    [_, Rest] = binary:split(Stat, <<") ">>),
    Fields = binary:split(Rest, <<" ">>, [global]),
    10 * (binary_to_integer(lists:nth(12, Fields)) + binary_to_integer(lists:nth(13, Fields))).

rss_kib(Broker) ->
    {ok, Pid} = stream_s3_broker:pid(Broker),
    {ok, Status} = file:read_file("/proc/" ++ Pid ++ "/status"),
    {match, [Kib]} = re:run(Status, "VmRSS:\\s+([0-9]+)", [{capture, all_but_first, binary}]),
    binary_to_integer(Kib).

%% --- report ----------------------------------------------------------------------------------------------------------

report(Rounds) ->
    Names = [without_1, with, without_2],
    Keys = [messages_per_s, p50_ms, p99_ms, p999_ms, cpu_s, cpu_s_per_gib, rss_mib, tiered_last_records],
    Spread = #{Name => #{Key => spread([maps:get(Key, maps:get(Name, Round)) || Round <- Rounds]) || Key <- Keys} || Name <- Names},
    Changes = #{
        p99_change_percent => spread([change(p99_ms, Round) || Round <- Rounds]),
        p99_difference_of_two_without_percent => spread([noise(p99_ms, Round) || Round <- Rounds]),
        cpu_change_percent => spread([change(cpu_s, Round) || Round <- Rounds]),
        cpu_difference_of_two_without_percent => spread([noise(cpu_s, Round) || Round <- Rounds])
    },
    io:format("~n~-20s ~-26s ~-26s ~-26s~n", ["", "without", "with", "without again"]),
    [io:format("~-20s ~-26s ~-26s ~-26s~n", [Key | [shown(Key, maps:get(Name, Spread)) || Name <- Names]]) || Key <- Keys],
    [io:format("~-40s ~s~n", [Key, shown(Key, Changes)]) || Key <- lists:sort(maps:keys(Changes))],
    Settings = #{rounds => length(Rounds), seconds => number("BENCH_SECONDS", 20), rate => number("BENCH_RATE", 1000), size => number("BENCH_SIZE", 10240)},
    Out = os:getenv("STREAM_S3_BENCH_OUT", "target/bench"),
    ok = file:write_file(filename:join(Out, "broker.json"), [json(maps:merge(Settings, maps:merge(Spread, Changes))), $\n]),
    ok = file:write_file(filename:join(Out, "broker.svg"), svg(Spread)),
    io:format("~n~ts, ~ts~n", [filename:join(Out, "broker.json"), filename:join(Out, "broker.svg")]).

%% With against the mean of the two runs around it.
change(Key, #{with := #{} = With, without_1 := A, without_2 := B}) ->
    Base = (maps:get(Key, A) + maps:get(Key, B)) / 2,
    100 * (maps:get(Key, With) - Base) / Base.

noise(Key, #{without_1 := A, without_2 := B}) ->
    100 * abs(maps:get(Key, A) - maps:get(Key, B)) / ((maps:get(Key, A) + maps:get(Key, B)) / 2).

spread(Values) ->
    Sorted = lists:sort(Values),
    N = length(Sorted),
    Median = (lists:nth((N + 1) div 2, Sorted) + lists:nth(N div 2 + 1, Sorted)) / 2,
    #{median => Median, min => hd(Sorted), max => lists:last(Sorted)}.

shown(Key, Map) ->
    #{Key := #{median := Median, min := Min, max := Max}} = Map,
    io_lib:format("~.2f (~.2f..~.2f)", [float(N) || N <- [Median, Min, Max]]).

json(Map) when is_map(Map) ->
    ["{", lists:join(", ", [["\"", atom_to_list(K), "\": ", json(V)] || {K, V} <- lists:sort(maps:to_list(Map))]), "}"];
json(Number) when is_float(Number) -> io_lib:format("~.4f", [Number]);
json(Number) when is_integer(Number) -> integer_to_list(Number).

%% Bars: percentiles of the latency, with the range of the rounds as a line.
svg(Spread) ->
    Rows = [{Key, Name, maps:get(Key, maps:get(Name, Spread))} || Key <- [p50_ms, p99_ms, p999_ms, cpu_s_per_gib], Name <- [without_1, with, without_2]],
    Bars = [bar(I, Row, top(element(1, Row), Rows)) || {I, Row} <- lists:enumerate(0, Rows)],
    io_lib:format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"800\" height=\"~b\" font-family=\"sans-serif\" font-size=\"13\">"
        "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>"
        "<text x=\"300\" y=\"20\">latency of confirms in ms, CPU seconds of the broker a GiB (median; line: range)</text>~ts</svg>~n",
        [40 + 26 * length(Rows), Bars]
    ).

top(Key, Rows) ->
    lists:max([Max || {K, _, #{max := Max}} <- Rows, K =:= Key]).

bar(I, {Key, Name, #{median := Median, min := Min, max := Max}}, Top) ->
    Y = 30 + 26 * I,
    [Middle, Low, High] = [400 * V / max(Top, 1.0e-9) || V <- [Median, Min, Max]],
    Color = case Name of with -> "#d62728"; _ -> "#7f7f7f" end,
    [
        io_lib:format("<text x=\"290\" y=\"~b\" text-anchor=\"end\">~ts: ~ts</text>", [Y + 14, Key, Name]),
        io_lib:format("<rect x=\"300\" y=\"~b\" width=\"~.1f\" height=\"18\" fill=\"~ts\"/>", [Y, Middle, Color]),
        io_lib:format("<line x1=\"~.1f\" x2=\"~.1f\" y1=\"~b\" y2=\"~b\" stroke=\"black\"/>", [300 + Low, 300 + High, Y + 9, Y + 9]),
        io_lib:format("<text x=\"~.1f\" y=\"~b\">~.2f</text>", [306 + High, Y + 14, float(Median)])
    ].
