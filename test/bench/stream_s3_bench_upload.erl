%% @doc The uploaders in Erlang that `make bench-upload' measures: this plugin's, and one in plain Erlang. Each run is a VM of its own.
%%
%% What to do comes in environment variables, from test/bench/bench_upload.py; one line of JSON goes out.
-module(stream_s3_bench_upload).

-export([make_files/0, native/0, erlang/0]).

%% Data bytes of a chunk, about what osiris makes of a busy stream.
-define(CHUNK_DATA, 131072).
-define(READ, 4194304).

%% @doc Writes BENCH_COUNT segment files of one fragment of BENCH_MIB each into BENCH_DIR, and their descriptions beside them.
-spec make_files() -> ok.
make_files() ->
    Dir = env("BENCH_DIR"),
    Chunks = number("BENCH_MIB") * 1048576 div ?CHUNK_DATA,
    Data = rand:bytes(?CHUNK_DATA),
    Metas = [segment(Dir, N * Chunks, Chunks, Data) || N <- lists:seq(0, number("BENCH_COUNT") - 1)],
    file:write_file(filename:join(Dir, "metas"), term_to_binary(Metas)).

segment(Dir, First, Chunks, Data) ->
    Crc = erlang:crc32(Data),
    {ok, File} = file:open(segment_file(Dir, First), [write, raw, binary, {delayed_write, ?READ, 1000}]),
    ok = file:write(File, <<"OSIL", 1:32>>),
    [
        ok = file:write(
            File, [<<5:4, 0:4, 0, 1:16, 1:32, 1:64, 1:64, Id:64, Crc:32, (byte_size(Data)):32, 0:32, 0, 0:24>>, Data]
        )
     || Id <- lists:seq(First, First + Chunks - 1)
    ],
    ok = file:close(File),
    Size = Chunks * (48 + byte_size(Data)),
    #{
        first_offset => First,
        next_offset => First + Chunks,
        first_timestamp => 1,
        last_timestamp => 1,
        size => Size,
        num_chunks => Chunks,
        spans => [{First, 8, 8 + Size}]
    }.

segment_file(Dir, First) ->
    filename:join(Dir, io_lib:format("~20..0b.segment", [First])).

%% @doc Through the library, as the plugin does it. BENCH_PROBE=yes finds out first that the store compares checksums.
-spec native() -> ok.
native() ->
    {ok, Store} = rabbitmq_stream_s3_nif:store_open(#{
        store => s3,
        bucket => <<"bucket">>,
        endpoint => env("BENCH_URL"),
        ca_file => env("BENCH_CA"),
        access_key_id => <<"id">>,
        secret_key => <<"secret">>
    }),
    ok = probe(Store, env("BENCH_PROBE")),
    {ok, _} = rabbitmq_stream_s3_governor:start_link(#{rate => unlimited, concurrency => number("BENCH_CONCURRENCY")}),
    Dir = env("BENCH_DIR"),
    measured(fun(Metas) ->
        Refs = [
            begin
                Ref = make_ref(),
                Transfer = {fragment, Store, <<"bench">>, Dir, Meta},
                ok = rabbitmq_stream_s3_governor:submit(Transfer, maps:get(size, Meta), self(), Ref),
                Ref
            end
         || Meta <- Metas
        ],
        [
            receive
                {transfer_result, Ref, {ok, _Uid}} -> ok;
                {transfer_result, Ref, {error, Reason}} -> error(Reason)
            end
         || Ref <- Refs
        ]
    end).

probe(Store, "yes") ->
    ok = rabbitmq_stream_s3_nif:store_probe(Store, self(), probe),
    receive
        {store_result, probe, {ok, #{verifies_checksums := true}}} -> ok;
        {store_result, probe, Other} -> error({probe, Other})
    end;
probe(_Store, "no") ->
    ok.

%% @doc Reads of 4 MiB, erlang:crc32 over each, and gun, RabbitMQ's HTTP client: a process and a connection for each upload at a time.
-spec erlang() -> ok.
erlang() ->
    {ok, _} = application:ensure_all_started(gun),
    Dir = env("BENCH_DIR"),
    measured(fun(Metas) ->
        Concurrency = number("BENCH_CONCURRENCY"),
        Parts = [[Meta || {N, Meta} <- lists:enumerate(Metas), N rem Concurrency =:= Part] || Part <- lists:seq(0, Concurrency - 1)],
        Pids = [
            spawn_monitor(fun() ->
                Gun = connect(),
                [put_fragment(Gun, Dir, Meta) || Meta <- Part],
                ok = gun:close(Gun)
            end)
         || Part <- Parts
        ],
        [
            receive
                {'DOWN', Monitor, process, Pid, normal} -> ok;
                {'DOWN', Monitor, process, Pid, Reason} -> error(Reason)
            end
         || {Pid, Monitor} <- Pids
        ]
    end).

connect() ->
    #{scheme := Scheme, port := Port} = uri_string:parse(env("BENCH_URL")),
    Tls = #{transport => tls, tls_opts => [{verify, verify_peer}, {cacertfile, env("BENCH_CA")}]},
    Options =
        case Scheme of
            "https" -> Tls;
            "http" -> #{}
        end,
    {ok, Gun} = gun:open("localhost", Port, Options#{protocols => [http], retry => 0, tcp_opts => [{nodelay, true}, inet]}),
    {ok, http} = gun:await_up(Gun),
    Gun.

put_fragment(Gun, Dir, #{first_offset := First, size := Size, num_chunks := Chunks, spans := [{Segment, Start, End}]}) ->
    Index = binary:copy(<<0:160>>, Chunks),
    Length = 8 + Size + byte_size(Index),
    Path = io_lib:format("/bucket/erlang/~20..0b", [First]),
    Stream = gun:put(Gun, Path, [{<<"content-length">>, integer_to_binary(Length)}]),
    ok = gun:data(Gun, Stream, nofin, <<"OSIF", 1:32>>),
    {ok, File} = file:open(segment_file(Dir, Segment), [read, raw, binary]),
    _Crc = send(Gun, Stream, File, Start, End, erlang:crc32(<<"OSIF", 1:32>>)),
    ok = file:close(File),
    ok = gun:data(Gun, Stream, fin, Index),
    case gun:await(Gun, Stream, infinity) of
        {response, fin, 200, _} -> ok;
        {response, nofin, 200, _} -> {ok, _} = gun:await_body(Gun, Stream, infinity)
    end.

send(_Gun, _Stream, _File, End, End, Crc) ->
    Crc;
send(Gun, Stream, File, At, End, Crc) ->
    {ok, Bytes} = file:pread(File, At, min(?READ, End - At)),
    ok = gun:data(Gun, Stream, nofin, Bytes),
    %% gun queues without a limit; a call waits until it has sent what it had, as a careful uploader would.
    _ = sys:get_state(Gun, infinity),
    send(Gun, Stream, File, At + byte_size(Bytes), End, erlang:crc32(Crc, Bytes)).

%% Runs the uploads, and prints what they took: bytes, seconds, seconds of all cores, and how far resident memory went beyond
%% that of the idle VM, in MiB.
measured(Run) ->
    {ok, Encoded} = file:read_file(filename:join(env("BENCH_DIR"), "metas")),
    Metas = lists:append(lists:duplicate(number("BENCH_TIMES"), binary_to_term(Encoded))),
    Before = resident_kib("VmRSS:"),
    ok = file:write_file("/proc/self/clear_refs", "5"),
    {Cpu, Start} = {cpu_ticks(), erlang:monotonic_time()},
    Run(Metas),
    Wall = (erlang:monotonic_time() - Start) / erlang:convert_time_unit(1, second, native),
    Used = (cpu_ticks() - Cpu) / 100,
    Extra = (resident_kib("VmHWM:") - Before) / 1024,
    Bytes = lists:sum([maps:get(size, Meta) || Meta <- Metas]),
    io:format("{\"bytes\": ~b, \"wall\": ~.4f, \"cpu\": ~.4f, \"rss_mib\": ~.1f}~n", [Bytes, Wall, Used, Extra]).

cpu_ticks() ->
    {ok, Stat} = file:read_file("/proc/self/stat"),
    [_, Fields] = string:split(Stat, ") ", trailing),
    lists:sum([binary_to_integer(Field) || Field <- lists:sublist(string:lexemes(Fields, " "), 12, 2)]).

resident_kib(Key) ->
    {ok, Status} = file:read_file("/proc/self/status"),
    [Line] = [Line || Line <- string:lexemes(Status, "\n"), string:prefix(Line, Key) =/= nomatch],
    [_, Number, _] = string:lexemes(Line, " \t"),
    binary_to_integer(Number).

env(Name) ->
    case os:getenv(Name) of
        false -> error({unset, Name});
        Value -> Value
    end.

number(Name) ->
    list_to_integer(env(Name)).
