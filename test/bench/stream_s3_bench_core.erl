%% @doc What the core costs through the library, beside what it stands next to: osiris' read_header, and the same work in plain
%% Erlang. `make bench-core' runs it on one scheduler that does not spin, and writes `target/bench/core.json'.
%%
%% Variants take turns, so that a busy moment of the machine meets all of them; what is shown is the median turn, and how far a tenth of
%% the turns was away from it at either end. Turns are counted in processor time, of the whole VM where files are read: on a machine that
%% does nothing else that is what a clock on the wall shows, and on one that does it still means something.
-module(stream_s3_bench_core).

-export([main/0]).

-include("rabbitmq_stream_s3.hrl").

-define(CORE, rabbitmq_stream_s3_replica_reader_core).
-define(ASSEMBLY, rabbitmq_stream_s3_fragment_assembly).
-define(MANIFEST, rabbitmq_stream_s3_manifest).
-define(PLAIN, stream_s3_bench_plain).

-define(CHUNKS, 20000).
-define(TURNS, 31).
-define(BATCHES, [64, 128, 256]).
%% A root of a stream with the default rebalance threshold never has more entries: 1,023 of each kind.
-define(LARGEST_ROOT, 4092).
-define(THRESHOLD, 1024).
-define(SAMPLES, 20000).

%% @doc Measures, prints, and writes the file. Takes about a minute.
-spec main() -> ok.
main() ->
    ok = quietly(),
    1 = erlang:system_info(schedulers),
    ok = stream_s3_bench_cputime:load(),
    Figures = maps:merge_with(fun(_, A, _) -> A end, assembly(), maps:merge(cycles(), maps:merge(lookups(), latencies()))),
    write("target/bench/core.json", Figures),
    ok.

quietly() ->
    logger:set_primary_config(level, error).

%% --- assembly beside read_header -------------------------------------------------------------------------------------

assembly() ->
    {ok, Dir} = stream_s3_temp:new("bench"),
    ok = stream_s3_osiris:start(Dir),
    Writer = stream_s3_osiris:start_stream(stream_s3_osiris:config(<<"bench">>)),
    [ok = stream_s3_osiris:write(Writer, [<<N:64, 0:400>>]) || N <- lists:seq(1, ?CHUNKS)],
    Context = osiris_util:get_reader_context(Writer),
    Chunks = chunks_of(Context),
    Count = length(Chunks),
    Batches = [{Size, in_batches(Size, Chunks)} || Size <- ?BATCHES],
    New = fun() -> ?ASSEMBLY:new(1 bsl 40, 0) end,
    Variants =
        [
            {vm, read_header, fun() -> read_headers(Context) end},
            {vm, log_read_128, fun() -> log_reads(Context, 128, none) end},
            {vm, log_read_and_assemble_128, fun() -> log_reads(Context, 128, New()) end},
            {scheduler, one_by_one, fun() -> lists:foldl(fun ?ASSEMBLY:add_chunk/2, New(), Chunks) end}
        ] ++
            [{scheduler, {batches, Size}, fun() -> add_batches(Batch, New()) end} || {Size, Batch} <- Batches] ++
            [{scheduler, plain_erlang, fun() -> lists:foldl(fun ?PLAIN:add_chunk/2, ?PLAIN:new_assembly(1 bsl 40, 0), Chunks) end}],
    Measured = take_turns([{Who, Name, Count, Fun} || {Who, Name, Fun} <- Variants]),
    ok = stream_s3_osiris:stop(),
    ok = stream_s3_temp:remove(Dir),
    Read = median(read_header, Measured),
    title(io_lib:format("assembly of ~b small chunks of an osiris log, a chunk", [Count]), "of read_header"),
    row("osiris_log:read_header/1", read_header, Measured, 1.0),
    row("our reader on it, committed chunks, 128 at a time", log_read_128, Measured, median(log_read_128, Measured) / Read),
    row("the same, and add_chunks/2", log_read_and_assemble_128, Measured, median(log_read_and_assemble_128, Measured) / Read),
    row("add_chunk/2, one by one", one_by_one, Measured, median(one_by_one, Measured) / Read),
    [
        row(io_lib:format("add_chunks/2, ~b at a time", [Size]), {batches, Size}, Measured, median({batches, Size}, Measured) / Read)
     || Size <- ?BATCHES
    ],
    row("plain Erlang, one by one", plain_erlang, Measured, median(plain_erlang, Measured) / Read),
    maps:merge(
        #{
            read_header_us_per_chunk => Read,
            log_read_us_per_chunk => median(log_read_128, Measured),
            log_read_and_assembly_us_per_chunk => median(log_read_and_assemble_128, Measured),
            assembly_us_per_chunk_single => median(one_by_one, Measured),
            assembly_us_per_chunk_batched => median({batches, 128}, Measured),
            assembly_us_per_chunk_plain_erlang => median(plain_erlang, Measured)
        },
        maps:from_list([
            {list_to_atom(lists:concat(["assembly_us_per_chunk_batches_of_", Size])), median({batches, Size}, Measured)}
         || Size <- ?BATCHES
        ])
    ).

read_headers(Context) ->
    {ok, Log} = osiris_log:init_data_reader({0, empty}, Context#{readers_counter_fun => fun(_) -> ok end}),
    ok = osiris_log:close(read_to_end(Log)).

read_to_end(Log) ->
    case osiris_log:read_header(Log) of
        {ok, #{chunk_id := _}, Log1} -> read_to_end(Log1);
        {end_of_stream, Log1} -> Log1
    end.

%% What the reader of a stream does in its turns.
log_reads(Context, Max, Assembly) ->
    {ok, Reader} = rabbitmq_stream_s3_log:open(Context, 0),
    log_turns(Reader, Max, Assembly).

log_turns(Reader0, Max, Assembly) ->
    case rabbitmq_stream_s3_log:read(Reader0, Max) of
        {[], wait, Reader} -> log_turns(answered(Reader), Max, Assembly);
        {[], end_of_log, Reader} -> ok = rabbitmq_stream_s3_log:close(Reader);
        {_Chunks, more, Reader} when Assembly =:= none -> log_turns(Reader, Max, none);
        {Chunks, more, Reader} -> log_turns(Reader, Max, element(1, ?ASSEMBLY:add_chunks(Chunks, Assembly)))
    end.

answered(Reader) ->
    receive
        {pins_result, _, _} = Message ->
            {ok, Next} = rabbitmq_stream_s3_log:answered(Message, Reader),
            Next
    end.

chunks_of(Context) ->
    {ok, Reader} = rabbitmq_stream_s3_log:open(Context, 0),
    chunks_of(Reader, []).

chunks_of(Reader0, Acc) ->
    case rabbitmq_stream_s3_log:read(Reader0, 1000) of
        {[], wait, Reader} -> chunks_of(answered(Reader), Acc);
        {Chunks, more, Reader} -> chunks_of(Reader, [Chunks | Acc]);
        {[], end_of_log, Reader} ->
            ok = rabbitmq_stream_s3_log:close(Reader),
            lists:append(lists:reverse(Acc))
    end.

add_batches(Batches, Assembly) ->
    lists:foldl(
        fun(Batch, S) ->
            {S1, []} = ?ASSEMBLY:add_chunks(Batch, S),
            S1
        end,
        Assembly,
        Batches
    ).

in_batches(Size, List) when length(List) =< Size -> [List];
in_batches(Size, List) ->
    {Batch, Rest} = lists:split(Size, List),
    [Batch | in_batches(Size, Rest)].

%% --- cut, complete, persist ------------------------------------------------------------------------------------------

cycles() ->
    Sizes = [10, 1000, 100000],
    Measured = take_turns(scheduler, lists:append([cycle_variants(Size) || Size <- Sizes])),
    title("cut, complete and persist, a fragment", "of plain Erlang"),
    Line = fun(Size, Text, Name, Beside) ->
        row(io_lib:format("~b entries: ~ts", [Size, Text]), {Name, Size}, Measured, median({Name, Size}, Measured) / median({Beside, Size}, Measured))
    end,
    [
        begin
            Line(Size, "whole cycle", cycle, plain_cycle),
            Line(Size, "cut and complete alone", no_persist, plain_no_persist),
            Line(Size, "whole cycle, plain Erlang", plain_cycle, plain_cycle),
            Line(Size, "cut and complete alone, plain Erlang", plain_no_persist, plain_no_persist),
            Line(Size, "whole cycle from one state, plain Erlang", plain_forked, plain_cycle),
            Line(Size, "one copy of the entries", copy, plain_cycle)
        end
     || Size <- Sizes
    ],
    maps:from_list([
        {key(Before, Size, After), median({Name, Size}, Measured)}
     || Size <- Sizes,
        {Before, After, Name} <- [
            {"cycle_us_", "", cycle},
            {"cycle_us_", "_erlang", plain_cycle},
            {"cycle_us_", "_erlang_from_one_state", plain_forked},
            {"cut_and_complete_us_", "", no_persist},
            {"cut_and_complete_us_", "_erlang", plain_no_persist},
            {"entries_copy_us_", "", copy}
        ]
    ]).

key(Before, Number, After) -> list_to_atom(lists:concat([Before, Number, After])).

%% Ours begins every cycle with the same state, of exactly so many entries. Erlang appends to a binary in place as long as nobody appends
%% to an older one, so the rival gets a chain of cycles too, which suits it best.
cycle_variants(Size) ->
    Manifest = tier(Size),
    Each = options(1),
    Never = options(1 bsl 60),
    {CoreEach, []} = ?CORE:init(Manifest, Each),
    {CoreNever, []} = ?CORE:init(Manifest, Never),
    PlainEach = ?PLAIN:init(Manifest, Each),
    PlainNever = ?PLAIN:init(Manifest, Never),
    Entries = Manifest#manifest.entries,
    Rounds = 500,
    Few = max(10, Rounds * 1000 div (1000 + 10 * Size)),
    [
        {{cycle, Size}, Few, fun() -> [core_cycle(Size, CoreEach) || _ <- lists:seq(1, Few)] end},
        {{no_persist, Size}, Rounds, fun() -> [core_cut_and_complete(Size, CoreNever) || _ <- lists:seq(1, Rounds)] end},
        {{plain_cycle, Size}, Rounds, fun() -> chain(fun plain_cycle/2, Size, Rounds, PlainEach) end},
        {{plain_no_persist, Size}, Rounds, fun() -> chain(fun plain_cut_and_complete/2, Size, Rounds, PlainNever) end},
        {{plain_forked, Size}, Few, fun() -> [plain_cycle(Size, PlainEach) || _ <- lists:seq(1, Few)] end},
        {{copy, Size}, Few, fun() -> [binary:copy(Entries) || _ <- lists:seq(1, Few)] end}
    ].

chain(Step, First, Rounds, State) ->
    lists:foldl(Step, State, lists:seq(First, First + Rounds - 1)).

core_cycle(N, S) ->
    {S1, Ref, [{submit_transfer, _, _, _, _} | _]} = ?CORE:fragment_cut(meta(N), S),
    {S2, [{start_persist, #manifest{}, _, _, Revision, [_]}]} = ?CORE:transfer_complete(Ref, N band 16#FFFFFFFF, S1),
    {S3, [{update_range, _, _} | _]} = ?CORE:persist_complete(Revision + 1, S2),
    S3.

core_cut_and_complete(N, S) ->
    {S1, Ref, _} = ?CORE:fragment_cut(meta(N), S),
    {S2, [{start_persist_timer, _}]} = ?CORE:transfer_complete(Ref, N band 16#FFFFFFFF, S1),
    S2.

plain_cycle(N, S) ->
    {S1, Ref, [{submit_transfer, _, _, _, _} | _]} = ?PLAIN:fragment_cut(meta(N), S),
    {S2, [{start_persist, #manifest{}, _, _, Revision, [_]}]} = ?PLAIN:transfer_complete(Ref, N band 16#FFFFFFFF, S1),
    {S3, [{update_range, _, _} | _]} = ?PLAIN:persist_complete(Revision + 1, S2),
    S3.

plain_cut_and_complete(N, S) ->
    {S1, Ref, _} = ?PLAIN:fragment_cut(meta(N), S),
    {S2, [{start_persist_timer, _}]} = ?PLAIN:transfer_complete(Ref, N band 16#FFFFFFFF, S1),
    S2.

%% --- lookups ---------------------------------------------------------------------------------------------------------

lookups() ->
    Sizes = [10, 1000, ?LARGEST_ROOT],
    Variants = lists:append([
        begin
            M = tier(Size),
            Offsets = [I * Size * 10 div 100 || I <- lists:seq(0, 99)],
            [
                {{offset, Size}, 100, fun() -> [{ok, _} = ?MANIFEST:lookup_offset(M, O) || O <- Offsets] end},
                {{timestamp, Size}, 100, fun() -> [{ok, _} = ?MANIFEST:lookup_timestamp(M, 1000 + O) || O <- Offsets] end},
                {{plain, Size}, 100, fun() -> [{ok, _} = ?PLAIN:lookup_offset(M, O) || O <- Offsets] end}
            ]
        end
     || Size <- Sizes
    ]),
    Measured = take_turns(scheduler, Variants),
    title("lookups in a root, each", "of plain Erlang"),
    [
        begin
            Plain = median({plain, Size}, Measured),
            row(io_lib:format("~b entries: lookup_offset/2", [Size]), {offset, Size}, Measured, median({offset, Size}, Measured) / Plain),
            row(io_lib:format("~b entries: lookup_timestamp/2", [Size]), {timestamp, Size}, Measured, median({timestamp, Size}, Measured) / Plain),
            row(io_lib:format("~b entries: offset, plain Erlang", [Size]), {plain, Size}, Measured, 1.0)
        end
     || Size <- Sizes
    ],
    maps:from_list(lists:append([
        [
            {key("lookup_offset_us_", Size, ""), median({offset, Size}, Measured)},
            {key("lookup_offset_us_", Size, "_erlang"), median({plain, Size}, Measured)},
            {key("lookup_timestamp_us_", Size, ""), median({timestamp, Size}, Measured)}
        ]
     || Size <- Sizes
    ])).

%% --- latency of each call --------------------------------------------------------------------------------------------

latencies() ->
    Measured = [{Name, samples(Fun)} || {Name, Fun} <- calls()],
    {_, NothingCpu} = samples(fun() -> ok end),
    io:format("~n~-46ts ~9ts ~9ts ~9ts ~11ts ~9ts ~9ts~n", [
        "calls at the sizes of threshold 1024, us", "median", "p99.9", "max", "cpu median", "p99.9", "max"
    ]),
    [
        io:format("~-46ts ~9.1f ~9.1f ~9.1f ~11.1f ~9.1f ~9.1f~n", [
            Name, at(0.5, Wall), at(0.999, Wall), at(1.0, Wall), at(0.5, Cpu), at(0.999, Cpu), at(1.0, Cpu)
        ])
     || {Name, {Wall, Cpu}} <- Measured ++ [{"nothing: what measuring costs", samples(fun() -> ok end)}]
    ],
    %% Other processes are not held up by what runs on schedulers of its own.
    Normal = [Call || {Name, _} = Call <- Measured, not lists:suffix(", dirty", Name)],
    {WorstWall, WorstWallCall} = lists:max([{at(0.999, Wall), Name} || {Name, {Wall, _}} <- Normal]),
    {WorstCpu, WorstCpuCall} = lists:max([{at(1.0, Cpu), Name} || {Name, {_, Cpu}} <- Normal]),
    {WorstCpu999, _} = lists:max([{at(0.999, Cpu), Name} || {Name, {_, Cpu}} <- Normal]),
    #{
        nif_p999_us => WorstWall,
        nif_p999_call => WorstWallCall,
        nif_max_cpu_us => WorstCpu,
        nif_max_cpu_call => WorstCpuCall,
        nif_p999_cpu_us => WorstCpu999,
        nif_nothing_max_cpu_us => at(1.0, NothingCpu),
        nif_calls => maps:from_list([
            {Name, #{
                wall_p50_us => at(0.5, Wall),
                wall_p999_us => at(0.999, Wall),
                wall_max_us => at(1.0, Wall),
                cpu_p50_us => at(0.5, Cpu),
                cpu_p999_us => at(0.999, Cpu),
                cpu_max_us => at(1.0, Cpu)
            }}
         || {Name, {Wall, Cpu}} <- Measured
        ])
    }.

%% Those that are dirty run elsewhere: their processor time is not seen, and nobody is held up by them.
calls() ->
    Root = tier(?LARGEST_ROOT),
    {S, []} = ?CORE:init(Root, options(1)),
    {Cut, Ref, _} = ?CORE:fragment_cut(meta(?LARGEST_ROOT), S),
    {Persisting, [{start_persist, _, _, _, _, [Append]}]} = ?CORE:transfer_complete(Ref, 1, Cut),
    Due = (options(1 bsl 60))#{rebalance_threshold => ?THRESHOLD},
    {Below, []} = ?CORE:init(tier(?THRESHOLD - 1), Due),
    {BelowCut, RefBelow, _} = ?CORE:fragment_cut(meta(?THRESHOLD - 1), Below),
    {Moving, [{upload_group, _, 1, Entries, _, _} | _]} = ?CORE:transfer_complete(RefBelow, 1, BelowCut),
    {Drop, _} = ?MANIFEST:evaluate_remote_retention(Root, [{max_bytes, 1000 * 1000}], 0),
    Busy = lists:foldl(fun(N, B) -> element(1, ?CORE:fragment_cut(meta(N), B)) end, S, lists:seq(?LARGEST_ROOT, ?LARGEST_ROOT + 99)),
    Chunks = [chunk(N) || N <- lists:seq(0, 127)],
    A = ?ASSEMBLY:new(1 bsl 40),
    {Full, []} = ?ASSEMBLY:add_chunks([chunk(N) || N <- lists:seq(0, 99999)], A),
    RootBytes = ?MANIFEST:encode_root(Root),
    GroupBytes = ?MANIFEST:encode_group(1, Entries),
    Grouped = #manifest{next_offset = 10 * ?THRESHOLD, first_timestamp = 1000, total_size = 1000 * ?THRESHOLD, entries = ?ENTRY(0, 1000, 1 bsl 40, 1, 0, 7)},
    {fetch, _, Cont} = ?MANIFEST:lookup_offset(Grouped, 500),
    {fetch, _, Cont2} = ?MANIFEST:evaluate_remote_retention(Grouped, [{max_bytes, 5000}], 0),
    [
        {"add_chunk/2", fun() -> ?ASSEMBLY:add_chunk(chunk(100000), Full) end},
        {"add_chunks/2 of 128", fun() -> ?ASSEMBLY:add_chunks(Chunks, A) end},
        {"assembly metadata/1", fun() -> ?ASSEMBLY:metadata(Full) end},
        {"init/2, dirty", fun() -> ?CORE:init(Root, options(1)) end},
        {"manifest/1", fun() -> ?CORE:manifest(S) end},
        {"format_state/1, 100 transfers", fun() -> ?CORE:format_state(Busy) end},
        {"fragment_cut/2", fun() -> ?CORE:fragment_cut(meta(?LARGEST_ROOT), S) end},
        {"transfer_complete/3 that starts a persist", fun() -> ?CORE:transfer_complete(Ref, 1, Cut) end},
        {"transfer_complete/3 that starts a group", fun() -> ?CORE:transfer_complete(RefBelow, 1, BelowCut) end},
        {"group_upload_complete/2", fun() -> ?CORE:group_upload_complete(1, Moving) end},
        {"persist_complete/2", fun() -> ?CORE:persist_complete(2, Persisting) end},
        {"persist_failed/2 that starts it again", fun() -> ?CORE:persist_failed(timeout, Persisting) end},
        {"retention_complete/2 of 3,092 entries", fun() -> ?CORE:retention_complete(Drop, S) end},
        {"apply_edit/2", fun() -> ?MANIFEST:apply_edit(Append, Root) end},
        {"is_well_formed/1", fun() -> ?MANIFEST:is_well_formed(Root) end},
        {"encode_root/1", fun() -> ?MANIFEST:encode_root(Root) end},
        {"decode_root/1", fun() -> ?MANIFEST:decode_root(RootBytes) end},
        {"encode_group/2", fun() -> ?MANIFEST:encode_group(1, Entries) end},
        {"decode_group/1", fun() -> ?MANIFEST:decode_group(GroupBytes) end},
        {"lookup_offset/2", fun() -> ?MANIFEST:lookup_offset(Root, 20000) end},
        {"lookup_timestamp/2", fun() -> ?MANIFEST:lookup_timestamp(Root, 1000 + 10 * ?LARGEST_ROOT - 10) end},
        {"resume/2 of a lookup", fun() -> ?MANIFEST:resume({ok, Entries}, Cont) end},
        {"evaluate_remote_retention/3 of 3,092, dirty", fun() -> ?MANIFEST:evaluate_remote_retention(Root, [{max_bytes, 1000000}], 0) end},
        {"resume/2 of a retention", fun() -> ?MANIFEST:resume({ok, Entries}, Cont2) end}
    ].

%% Wall and processor time of each of many calls, sorted. What a call leaves behind is collected before the next one, so that none pays for
%% the garbage of a thousand others: no process makes that many states without doing anything else.
samples(Fun) ->
    in_a_process(fun() ->
        _ = [Fun() || _ <- lists:seq(1, 100)],
        %% Not on the heap, where each collection would have to move them.
        Walls = atomics:new(?SAMPLES, []),
        Cpus = atomics:new(?SAMPLES, []),
        ok = sample(Fun, Walls, Cpus, ?SAMPLES),
        {sorted_us(Walls), sorted_us(Cpus)}
    end).

sorted_us(Nanos) ->
    lists:sort([atomics:get(Nanos, I) / 1000 || I <- lists:seq(1, ?SAMPLES)]).

sample(_Fun, _Walls, _Cpus, 0) ->
    ok;
sample(Fun, Walls, Cpus, I) ->
    true = erlang:garbage_collect(),
    %% The VM destroys what handles stood for when the process makes way, which must not be in the middle of the call.
    true = erlang:yield(),
    T0 = erlang:monotonic_time(),
    C0 = stream_s3_bench_cputime:now(),
    _ = Fun(),
    C1 = stream_s3_bench_cputime:now(),
    T1 = erlang:monotonic_time(),
    ok = atomics:put(Walls, I, erlang:convert_time_unit(T1 - T0, native, nanosecond)),
    ok = atomics:put(Cpus, I, C1 - C0),
    sample(Fun, Walls, Cpus, I - 1).

%% --- measuring -------------------------------------------------------------------------------------------------------

take_turns(Who, Variants) ->
    take_turns([{Who, Name, Units, Fun} || {Name, Units, Fun} <- Variants]).

%% `{Whose time, Name, Units, Fun}': microseconds a unit, of each turn, sorted.
take_turns(Variants) ->
    _ = [in_a_process(Fun) || {_, _, _, Fun} <- Variants],
    Turns = [maps:from_list([{Name, turn(Who, Units, Fun)} || {Who, Name, Units, Fun} <- Variants]) || _ <- lists:seq(1, ?TURNS)],
    #{Name => lists:sort([maps:get(Name, Turn) || Turn <- Turns]) || {_, Name, _, _} <- Variants}.

turn(Who, Units, Fun) ->
    in_a_process(fun() ->
        T0 = cpu_time(Who),
        T1 = cpu_time(Who),
        _ = Fun(),
        T2 = cpu_time(Who),
        %% Less what looking at the clock costs.
        (T2 - T1 - (T1 - T0)) / 1000 / Units
    end).

%% Nanoseconds. Files are read by other threads, so the kernel's books of all of them count there.
cpu_time(scheduler) ->
    stream_s3_bench_cputime:now();
cpu_time(vm) ->
    lists:sum([
        begin
            {ok, Text} = file:read_file(File, [raw]),
            [Nanos | _] = binary:split(Text, <<" ">>),
            binary_to_integer(Nanos)
        end
     || File <- filelib:wildcard("/proc/self/task/*/schedstat")
    ]).

%% A process of its own has no garbage of others.
in_a_process(Fun) ->
    {Pid, Mon} = spawn_opt(fun() -> exit({answer, Fun()}) end, [monitor, {min_heap_size, 100000}]),
    receive
        {'DOWN', Mon, process, Pid, {answer, Answer}} -> Answer;
        {'DOWN', Mon, process, Pid, Reason} -> error(Reason)
    end.

median(Name, Measured) -> at(0.5, maps:get(Name, Measured)).

%% Of sorted values.
at(Part, Values) ->
    lists:nth(min(length(Values), 1 + trunc(Part * length(Values))), Values).

title(Text, Ratio) ->
    io:format("~n~-58ts ~9ts ~19ts ~16ts~n", [Text, "us", "10%..90%", Ratio]).

row(Text, Name, Measured, Ratio) ->
    Values = maps:get(Name, Measured),
    Spread = io_lib:format("~.3f..~.3f", [at(0.1, Values), at(0.9, Values)]),
    io:format("~-58ts ~9.3f ~19ts ~16.2f~n", [Text, at(0.5, Values), Spread, Ratio]).

write(File, Figures) ->
    ok = filelib:ensure_dir(File),
    ok = file:write_file(File, [json(Figures), $\n]),
    io:format("~n~ts~n", [File]).

json(Map) when is_map(Map) ->
    ["{", lists:join(",\n ", [["\"", to_text(K), "\": ", json(V)] || {K, V} <- lists:sort(maps:to_list(Map))]), "}"];
json(Number) when is_float(Number) -> io_lib:format("~.4f", [Number]);
json(Text) -> ["\"", Text, "\""].

to_text(Key) when is_atom(Key) -> atom_to_list(Key);
to_text(Key) -> Key.

%% --- terms -----------------------------------------------------------------------------------------------------------

options(PersistThreshold) ->
    #{
        stream => <<"__bench_1700000000000000000">>,
        dir => <<"/var/lib/rabbitmq/mnesia/rabbit/stream/__bench_1700000000000000000">>,
        epoch => 1,
        reference => {resource, <<"/">>, queue, <<"bench">>},
        persist_threshold => PersistThreshold,
        persist_interval_ms => 2000,
        rebalance_threshold => 1 bsl 30
    }.

meta(N) ->
    #{
        first_offset => 10 * N,
        next_offset => 10 * N + 10,
        first_timestamp => 1000 + 10 * N,
        last_timestamp => 1009 + 10 * N,
        size => 1000,
        num_chunks => 10,
        spans => [{0, 8, 1008}]
    }.

tier(Count) ->
    #manifest{
        first_timestamp = 1000,
        first_last_timestamp = 1009,
        next_offset = 10 * Count,
        total_size = 1000 * Count,
        revision = 1,
        entries = iolist_to_binary([?ENTRY(10 * N, 1000 + 10 * N, 1009 + 10 * N, 0, 1000, N) || N <- lists:seq(0, Count - 1)])
    }.

chunk(N) ->
    #{
        chunk_id => N,
        timestamp => 1700000000000 + N,
        num_records => 1,
        data_size => 100,
        position => 8 + N * 148,
        next_position => 8 + N * 148 + 148,
        segment_offset => 0,
        crc => 16#DEADBEEF
    }.
