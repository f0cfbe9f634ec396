%% @doc The demo: real osiris streams, written, tiered while they are written, and read back from the bucket alone.
%%
%% Every record that comes back is compared with what was written: in order, none missing, none twice. One reader process is
%% killed on the way, because that must not matter. `make demo' runs it; settings are environment variables:
%%
%% STORE    where objects go: s3 (a server on this machine, over HTTP; the default) or fs (a directory)
%% STREAMS  how many streams, 3
%% MB       how much is written into all of them, in MiB, 256
%% KEEP     a directory, not there yet or empty: leaves the objects in KEEP/bucket and, for each stream, the records that
%%          were written in KEEP/records/STREAM (each as its length, u32 big-endian, and its bytes)
-module(stream_s3_demo).

-export([main/0]).

-define(MIB, 1048576).
-define(SEED, 20260501).
-define(SEGMENT_BYTES, (32 * ?MIB)).
-define(FRAGMENT_BYTES, (8 * ?MIB)).
%% How far a producer runs ahead of what is committed: enough for chunks of several records.
-define(WINDOW_BYTES, (4 * ?MIB)).
%% So small that the demo's manifests have groups too.
-define(REBALANCE_THRESHOLD, 4).
%% Nothing in the demo takes that long unless it hangs.
-define(STALL_MS, 60000).
-define(TICK_MS, 100).

-record(stream, {
    number :: 0..255,
    id :: binary(),
    writer :: pid(),
    %% How many records are written, and how many bytes they have.
    records :: non_neg_integer(),
    bytes :: non_neg_integer()
}).

-record(totals, {
    chunks = 0 :: non_neg_integer(),
    fragments = 0 :: non_neg_integer(),
    persists = 0 :: non_neg_integer(),
    stored = 0 :: non_neg_integer()
}).

%% @doc Runs the demo and answers the exit status: 0 after the line `demo: ok', 1 after a sentence that says what went wrong.
-spec main() -> 0 | 1.
main() ->
    %% What the parts log while they work is not for the one who watches the demo; what matters ends it.
    ok = logger:set_primary_config(level, critical),
    try
        run(settings()),
        io:put_chars("demo: ok\n"),
        0
    catch
        throw:{sentence, Sentence} ->
            io:format(standard_error, "demo: ~ts~n", [Sentence]),
            1;
        Class:Reason:Stack ->
            io:format(standard_error, "demo: failed: ~ts~n", [stream_s3_demo_reason:text(Class, Reason, Stack)]),
            1
    end.

-spec fail(io:format(), [term()]) -> no_return().
fail(Format, Args) -> throw({sentence, io_lib:format(Format, Args)}).

%% --- settings --------------------------------------------------------------------------------------------------------

settings() ->
    #{
        store => store(os:getenv("STORE", "s3")),
        streams => number("STREAMS", 3, 1, 64),
        mb => number("MB", 256, 1, 65536),
        keep => keep(os:getenv("KEEP", ""))
    }.

store("s3") -> s3;
store("fs") -> fs;
store(Other) -> fail("STORE is s3 or fs, not '~ts'", [Other]).

number(Name, Default, Min, Max) ->
    Text = os:getenv(Name, integer_to_list(Default)),
    case string:to_integer(Text) of
        {N, []} when N >= Min, N =< Max -> N;
        _ -> fail("~ts is a whole number from ~b to ~b, not '~ts'", [Name, Min, Max, Text])
    end.

keep("") ->
    none;
keep(Dir) ->
    Absolute = filename:absname(Dir),
    case file:list_dir(Absolute) of
        {ok, []} -> Absolute;
        {error, enoent} -> Absolute;
        {ok, _} -> fail("KEEP names a directory that is not there yet or empty, and '~ts' has files in it", [Dir]);
        {error, enotdir} -> fail("KEEP names a directory, and '~ts' is a file or lies below one", [Dir]);
        {error, Posix} -> fail("KEEP names a directory, and '~ts' cannot be read: ~ts", [Dir, file:format_error(Posix)])
    end.

%% --- the run ---------------------------------------------------------------------------------------------------------

run(#{keep := Keep} = Settings) ->
    Temp = temporary_directory(),
    try
        Kept = kept_directories(Keep, Temp),
        World = start_world(Settings, Temp, Kept),
        try
            run(Settings, World, Kept)
        after
            stream_s3_world:stop(World)
        end
    after
        stream_s3_temp:remove(Temp)
    end,
    [io:format("kept: ~ts (bucket/ and records/)~n", [Keep]) || Keep =/= none],
    ok.

temporary_directory() ->
    case stream_s3_temp:new("demo") of
        {ok, Dir} -> Dir;
        {error, Dir, Posix} -> fail("cannot make the directory ~ts: ~ts", [Dir, file:format_error(Posix)])
    end.

kept_directories(none, Temp) ->
    #{objects => filename:join(Temp, "objects"), records => none};
kept_directories(Keep, _Temp) ->
    Records = filename:join(Keep, "records"),
    case filelib:ensure_path(Records) of
        ok -> #{objects => Keep, records => Records};
        {error, Posix} -> fail("KEEP: cannot make the directory ~ts: ~ts", [Records, file:format_error(Posix)])
    end.

start_world(#{store := Store}, Temp, #{objects := Objects}) ->
    stream_s3_world:start(#{
        store => Store,
        dir => Temp,
        objects => Objects,
        env => #{
            fragment_target_size => ?FRAGMENT_BYTES,
            rebalance_threshold => ?REBALANCE_THRESHOLD,
            persist_threshold => 2,
            persist_interval_ms => 200
        }
    }).

run(#{streams := StreamCount, mb := Mb}, World, #{records := RecordsDir}) ->
    io:format("~b streams, ~b MiB of records from 10 bytes to 1 MiB, fragments of ~b MiB, store ~ts~n", [
        StreamCount, Mb, ?FRAGMENT_BYTES div ?MIB, stream_s3_world:describe(World)
    ]),
    Source = stream_s3_records:new(?SEED),
    Streams = [start_stream(N, Source, Mb * ?MIB div StreamCount) || N <- lists:seq(0, StreamCount - 1)],
    {TierUs, ok} = timer:tc(fun() -> write_and_tier(Streams, Source, RecordsDir) end),
    {ReadUs, Totals} = timer:tc(fun() -> read_back(Streams, Source, World) end),
    table(Streams, Totals, TierUs, ReadUs).

start_stream(Number, Source, Bytes0) ->
    Id = <<"demo-", (integer_to_binary(Number + 1))/binary>>,
    {Records, Bytes} = stream_s3_records:count(Source, Number, Bytes0),
    Writer = stream_s3_osiris:start_stream(
        stream_s3_osiris:config(Id, #{max_segment_size_bytes => ?SEGMENT_BYTES})
    ),
    #stream{number = Number, id = Id, writer = Writer, records = Records, bytes = Bytes}.

%% --- writing and tiering ---------------------------------------------------------------------------------------------

%% A process a stream writes it and then waits until all of it is tiered. This one shows how far they are, and kills the
%% reader of the first stream when half of that is written.
write_and_tier([#stream{id = Victim, bytes = VictimBytes} | _] = Streams, Source, RecordsDir) ->
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    Main = self(),
    Work = fun(#stream{id = Id} = Stream) ->
        ok = write(Stream, Source, RecordsDir, fun(Bytes) -> Main ! {progress, Id, Bytes} end),
        ok = settle(Stream)
    end,
    Sum = lists:sum([Bytes || #stream{bytes = Bytes} <- Streams]),
    Remark = fun(Done) -> io_lib:format("~b of ~b MiB written, ~b MiB tiered", [mib(Done), mib(Sum), mib(tiered(Streams))]) end,
    KillAt = fun
        (#{Victim := Bytes}, false) when Bytes * 2 >= VictimBytes -> kill_reader(Victim);
        (_, Killed) -> Killed
    end,
    follow("write", Sum, Streams, Work, Remark, KillAt, false).

write(#stream{number = Number, id = Id, writer = Writer, records = Count}, Source, RecordsDir, Report) ->
    Log = open_records(RecordsDir, Id),
    Record = fun(N) ->
        Bytes = stream_s3_records:record(Source, Number, N),
        ok = log_record(Log, Bytes),
        Bytes
    end,
    ok = stream_s3_osiris:write_all(Writer, {Record, Count}, ?WINDOW_BYTES, fun(_Records, Bytes) -> Report(Bytes) end),
    close_records(Log).

open_records(none, _Id) ->
    none;
open_records(Dir, Id) ->
    {ok, Log} = file:open(filename:join(Dir, Id), [write, raw, binary, {delayed_write, ?MIB, 2000}]),
    Log.

log_record(none, _Bytes) -> ok;
log_record(Log, Bytes) -> file:write(Log, [<<(byte_size(Bytes)):32>>, Bytes]).

close_records(none) -> ok;
close_records(Log) -> file:close(Log).

settle(#stream{id = Id, writer = Writer}) ->
    stream_s3_world:settle(Id, stream_s3_osiris:next_offset(Writer), ?STALL_MS).

tiered(Streams) -> lists:sum([stream_s3_world:tiered_bytes(Id) || #stream{id = Id} <- Streams]).

kill_reader(Id) ->
    ok = stream_s3_world:kill_reader(Id),
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    true.

%% --- reading back ----------------------------------------------------------------------------------------------------

read_back(Streams, Source, World) ->
    Bucket = stream_s3_world:bucket(World),
    Main = self(),
    Work = fun(#stream{id = Id} = Stream) ->
        Totals = read(Stream, Source, Bucket, fun(Bytes) -> Main ! {progress, Id, Bytes} end),
        Main ! {totals, Totals}
    end,
    Sum = lists:sum([Bytes || #stream{bytes = Bytes} <- Streams]),
    Remark = fun(Done) -> io_lib:format("~b of ~b MiB read back and compared", [mib(Done), mib(Sum)]) end,
    ok = follow("read back", Sum, Streams, Work, Remark, fun(_, Extra) -> Extra end, none),
    lists:foldl(fun(_, Totals) -> add(received_totals(), Totals) end, #totals{}, Streams).

received_totals() ->
    receive
        {totals, Totals} -> Totals
    end.

read(#stream{id = Id, writer = Writer} = Stream, Source, Bucket, Report) ->
    {Pointer, Revision} = stream_s3_world:pointer(Id),
    {Manifest, Fragments} = stream_s3_bucket:fragments(Bucket, Id, Pointer),
    End = stream_s3_osiris:next_offset(Writer),
    stream_s3_demo_check:manifest(Id, Manifest, End),
    Check = lists:foldl(
        fun(Fragment, Check0) -> read_fragment(Bucket, Fragment, Check0, Report) end,
        stream_s3_demo_check:new(Id, fun(N) -> stream_s3_records:record(Source, Stream#stream.number, N) end),
        Fragments
    ),
    #{chunks := Chunks} = stream_s3_demo_check:finish(Check, Stream#stream.records, End),
    #totals{
        chunks = Chunks,
        fragments = length(Fragments),
        persists = Revision,
        stored = lists:sum([Size || #{size := Size} <- Fragments])
    }.

read_fragment(Bucket, #{first_offset := First} = Fragment, Check0, Report) ->
    Check1 = stream_s3_demo_check:fragment(First, Check0),
    Check = stream_s3_bucket:fold_chunks(fun stream_s3_demo_check:chunk/2, Check1, Bucket, Fragment),
    Report(maps:get(bytes, stream_s3_demo_check:progress(Check))),
    Check.

add(#totals{chunks = C1, fragments = F1, persists = P1, stored = S1}, #totals{chunks = C2, fragments = F2, persists = P2, stored = S2}) ->
    #totals{chunks = C1 + C2, fragments = F1 + F2, persists = P1 + P2, stored = S1 + S2}.

%% --- processes and progress ------------------------------------------------------------------------------------------

%% Runs `Work(Stream)' in a process a stream and shows the sum of what they report. `Each(Done, Extra)' sees the bytes done of
%% each stream after every report. Raises what the first of them that fails raised.
follow(Title, Sum, Streams, Work, Remark, Each, Extra) ->
    Running = maps:from_list([
        {element(2, spawn_monitor(fun() -> Work(Stream) end)), Id}
     || #stream{id = Id} = Stream <- Streams
    ]),
    Progress = stream_s3_demo_progress:new(Title, Sum),
    follow(#{running => Running, remark => Remark, each => Each}, #{}, Extra, Progress).

follow(#{running := Running, remark := Remark}, Done, _Extra, Progress) when Running =:= #{} ->
    stream_s3_demo_progress:finish(Remark(total(Done)), Progress);
follow(#{running := Running, remark := Remark, each := Each} = Job, Done0, Extra, Progress0) ->
    receive
        {progress, Id, Bytes} ->
            Done = Done0#{Id => Bytes},
            Progress = stream_s3_demo_progress:update(total(Done), fun() -> Remark(total(Done)) end, Progress0),
            follow(Job, Done, Each(Done, Extra), Progress);
        {'DOWN', Ref, process, _Pid, normal} when is_map_key(Ref, Running) ->
            follow(Job#{running := maps:remove(Ref, Running)}, Done0, Extra, Progress0);
        {'DOWN', Ref, process, _Pid, Reason} when is_map_key(Ref, Running) ->
            [erlang:demonitor(Other, [flush]) || Other <- maps:keys(Running)],
            stream_s3_demo_progress:break(Progress0),
            exit({maps:get(Ref, Running), Reason})
    after ?TICK_MS ->
        Progress = stream_s3_demo_progress:update(total(Done0), fun() -> Remark(total(Done0)) end, Progress0),
        follow(Job, Done0, Extra, Progress)
    end.

total(Done) -> lists:sum(maps:values(Done)).

%% --- table -----------------------------------------------------------------------------------------------------------

table(Streams, #totals{chunks = Chunks, fragments = Fragments, persists = Persists, stored = Stored}, TierUs, ReadUs) ->
    Records = lists:sum([N || #stream{records = N} <- Streams]),
    Rows = [
        {"streams", integer_to_list(length(Streams))},
        {"records", integer_to_list(Records)},
        {"chunks", integer_to_list(Chunks)},
        {"fragments", integer_to_list(Fragments)},
        {"bytes in fragments", integer_to_list(Stored)},
        {"persists", integer_to_list(Persists)},
        {"seconds to write and tier", seconds(TierUs)},
        {"MiB/s written and tiered", rate(Stored, TierUs)},
        {"seconds to read back and compare", seconds(ReadUs)},
        {"MiB/s read back and compared", rate(Stored, ReadUs)}
    ],
    [io:format("  ~ts ~14ts~n", [string:pad(Name, 34, trailing, $.), Value]) || {Name, Value} <- Rows],
    ok.

mib(Bytes) -> Bytes div ?MIB.
seconds(Us) -> io_lib:format("~.1f", [Us / 1000000]).
rate(Bytes, Us) -> io_lib:format("~.1f", [Bytes / ?MIB / (Us / 1000000)]).
