%% The library as a guest of the VM: it is purged, loaded again, halted, timed and made to panic while its threads work. Whatever could take a VM down is
%% tried in one of its own.
-module(rabbitmq_stream_s3_hygiene_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").
-include("rabbitmq_stream_s3.hrl").

-compile(nowarn_export_all).
-compile(export_all).

-define(GOVERNOR, rabbitmq_stream_s3_governor).
-define(NIF, rabbitmq_stream_s3_nif).
-define(STREAM, <<"stream_1">>).
-define(UPLOADS, 16).
%% More than the library has threads, and the VM schedulers: one that panics and is lost would be missed.
-define(TIMES, 100).
%% Long enough for a busy machine; nothing waits that long when all is well.
-define(WAIT, 60_000).
%% The governor promises two seconds, and may need more on a machine that has much else to do.
-define(PROMPT_MS, 10_000).

all() ->
    [
        a_module_that_is_deleted_and_purged_leaves_uploads_running,
        a_module_that_is_loaded_twice_stays_what_it_was,
        a_halt_during_uploads_ends_with_success,
        a_stop_during_uploads_ends_with_success,
        a_halt_ends_promptly_when_the_store_is_dead,
        a_stop_ends_promptly_when_the_store_is_dead,
        a_governor_stops_in_bounded_time_when_the_store_is_dead,
        misuse_with_an_improper_list_is_no_panic,
        a_panic_in_a_call_raises_and_the_library_goes_on,
        a_panic_in_a_task_is_its_answer_and_the_library_goes_on,
        a_library_that_is_shipped_has_no_functions_that_panic,
        no_call_holds_a_scheduler_while_uploads_run
    ].

init_per_suite(Config) ->
    {ok, Dir} = stream_s3_temp:new("hygiene"),
    Server = stream_s3_s3local:start(#{dir => Dir}),
    ok = stream_s3_s3local:create_bucket(Server, "bucket"),
    {Logs, Meta} = log(filename:join(Dir, "log"), binary:copy(<<"0123456789">>, 200_000)),
    [{server, Server}, {dir, Dir}, {logs, Logs}, {meta, Meta} | Config].

end_per_suite(Config) ->
    ok = stream_s3_s3local:stop(?config(server, Config)),
    stream_s3_temp:remove(?config(dir, Config)).

init_per_testcase(Case, Config) ->
    process_flag(trap_exit, true),
    case os:getenv("STREAM_S3_SANITIZED") of
        false -> Config;
        _ when Case =:= no_call_holds_a_scheduler_while_uploads_run -> {skip, "calls take longer under AddressSanitizer"};
        _ when
            Case =:= a_panic_in_a_call_raises_and_the_library_goes_on;
            Case =:= a_panic_in_a_task_is_its_answer_and_the_library_goes_on
        ->
            {skip, "the library that panics is not the one under AddressSanitizer"};
        _ -> Config
    end.

end_per_testcase(_Case, Config) ->
    stream_s3_store_faults:clear(?config(server, Config)).

%% --- loading ---------------------------------------------------------------------------------------------------------

a_module_that_is_deleted_and_purged_leaves_uploads_running(Config) ->
    slow(Config),
    in_a_vm_of_its_own(purge_under_uploads, [work(Config)]).

purge_under_uploads(Work) ->
    process_flag(trap_exit, true),
    Refs = submit(Work),
    %% The module goes, as when an application's modules are deleted: now, and once more after its handles have gone.
    true = code:delete(?NIF),
    true = code:soft_purge(?NIF),
    [{ok, _} = result(Ref) || Ref <- Refs],
    [erlang:garbage_collect(Pid) || Pid <- processes()],
    %% The threads are still there, and serve whoever comes next. Handles from before are strangers to the module that is loaded now.
    {module, ?NIF} = code:load_file(?NIF),
    ?assertError(badarg, ?GOVERNOR:info()),
    Monitor = monitor(process, ?GOVERNOR),
    exit(whereis(?GOVERNOR), kill),
    receive
        {'DOWN', Monitor, process, _, killed} -> ok
    after ?WAIT -> error(governor_lives)
    end,
    persistent_term:erase({?GOVERNOR, handle}),
    [erlang:garbage_collect(Pid) || Pid <- processes()],
    [{ok, _} = result(Ref) || Ref <- submit(Work)],
    ok = gen_server:stop(?GOVERNOR).

a_module_that_is_loaded_twice_stays_what_it_was(Config) ->
    slow(Config),
    in_a_vm_of_its_own(load_under_uploads, [work(Config)]).

load_under_uploads(Work) ->
    Refs = submit(Work),
    [{error, on_load_failure} = code:load_file(?NIF) || _ <- [1, 2, 3]],
    _ = code:soft_purge(?NIF),
    _ = code:purge(?NIF),
    [{ok, _} = result(Ref) || Ref <- Refs],
    [{ok, _} = result(Ref) || Ref <- submit(Work)].

%% --- the end of the VM -----------------------------------------------------------------------------------------------

a_halt_during_uploads_ends_with_success(Config) ->
    slow(Config),
    ends_well(Config, work(Config), "erlang:halt()").

a_stop_during_uploads_ends_with_success(Config) ->
    slow(Config),
    ends_well(Config, work(Config), "init:stop()").

a_halt_ends_promptly_when_the_store_is_dead(Config) ->
    {Listener, Work} = dead(Config),
    ends_well(Config, Work, "erlang:halt()"),
    gen_tcp:close(Listener).

a_stop_ends_promptly_when_the_store_is_dead(Config) ->
    {Listener, Work} = dead(Config),
    ends_well(Config, Work, "init:stop()"),
    gen_tcp:close(Listener).

%% Runs a VM until its uploads are under way, and lets it end itself then.
ends_well(Config, Work, End) ->
    Dump = filename:join(?config(dir, Config), "crash.dump"),
    Eval = io_lib:format("~s:submit(~0tp), io:put_chars(\"under way\\n\"), ~s.", [?MODULE, Work, End]),
    Port = open_port({spawn_executable, os:find_executable("erl")}, [
        {args, ["-noinput", "-pa" | paths()] ++ ["-eval", lists:flatten(Eval)]},
        {env, [{"ERL_CRASH_DUMP", Dump}]},
        {line, 1000},
        binary,
        exit_status,
        stderr_to_stdout
    ]),
    ?assertEqual([], until_line(Port, <<"under way">>, [])),
    Begun = erlang:monotonic_time(millisecond),
    ?assertEqual({0, []}, exit_status(Port, [])),
    Took = erlang:monotonic_time(millisecond) - Begun,
    ct:pal("~s: ~b ms", [End, Took]),
    ?assert(Took < ?PROMPT_MS),
    ?assertNot(filelib:is_file(Dump)).

until_line(Port, Line, Others) ->
    receive
        {Port, {data, {eol, Line}}} -> lists:reverse(Others);
        {Port, {data, {_, Other}}} -> until_line(Port, Line, [Other | Others]);
        {Port, {exit_status, Status}} -> error({ended, Status, lists:reverse(Others)})
    after ?WAIT -> error({silent, lists:reverse(Others)})
    end.

exit_status(Port, Output) ->
    receive
        {Port, {data, {_, Line}}} -> exit_status(Port, [Line | Output]);
        {Port, {exit_status, Status}} -> {Status, lists:reverse(Output)}
    after ?WAIT -> error({does_not_end, lists:reverse(Output)})
    end.

a_governor_stops_in_bounded_time_when_the_store_is_dead(Config) ->
    {Listener, Work} = dead(Config),
    Refs = submit(Work),
    Begun = erlang:monotonic_time(millisecond),
    ok = gen_server:stop(?GOVERNOR, normal, ?WAIT),
    Took = erlang:monotonic_time(millisecond) - Begun,
    ct:pal("~b ms", [Took]),
    ?assert(Took < ?PROMPT_MS),
    [?assertEqual({error, cancelled}, result(Ref)) || Ref <- Refs],
    gen_tcp:close(Listener).

%% --- calls -----------------------------------------------------------------------------------------------------------

misuse_with_an_improper_list_is_no_panic(Config) ->
    {ok, Store} = ?NIF:store_open(element(1, work(Config))),
    ?assertError({badarg, _}, ?NIF:store_delete(Store, self(), make_ref(), [<<"key">> | tail])),
    ?assertError({badarg, _}, ?NIF:store_delete(Store, self(), make_ref(), [<<255>>])),
    ?assertError({badarg, _}, ?NIF:store_cancel([a | b])).

no_call_holds_a_scheduler_while_uploads_run(Config) ->
    slow(Config),
    #{slowest := Slowest, held := Held} = in_a_vm_of_its_own(time_calls, [work(Config)]),
    ct:pal("microseconds, best, median, 99.9th percentile: ~tp~nheld: ~tp", [Slowest, Held]),
    %% Of the wall clock the best says what the call needs, and the rest what else the machine does; a hundred milliseconds on a scheduler are too
    %% long for anything but a call that never should have been there.
    ?assertEqual(#{}, maps:filter(fun(_, {Best, _, _}) -> Best > 1000 end, Slowest)),
    ?assertEqual([], Held).

%% The heaviest calls, while uploads run, under the eyes of the VM.
time_calls({Settings, _, _} = Work) ->
    {ok, Store} = ?NIF:store_open(Settings),
    M = manifest(4096),
    Root = ?NIF:manifest_encode_root(M),
    Options = #{
        stream => ?STREAM, dir => <<"/d">>, epoch => 1, reference => r, persist_threshold => 5, persist_interval_ms => 2000,
        rebalance_threshold => 4096
    },
    Keys = [integer_to_binary(N) || N <- lists:seq(1, 1000)],
    Calls = #{
        encode_root => fun() -> ?NIF:manifest_encode_root(M) end,
        decode_root => fun() -> ?NIF:manifest_decode_root(Root) end,
        core_init => fun() -> ?NIF:core_init(M, Options, 0) end,
        put_root => fun() -> ?NIF:put_root(Store, self(), ref, ?STREAM, 1, M) end,
        put_group => fun() -> ?NIF:put_group(Store, self(), ref, ?STREAM, 1, M#manifest.entries) end,
        store_delete => fun() -> ?NIF:store_delete(Store, self(), ref, Keys) end,
        store_metrics => fun() -> ?NIF:store_metrics() end
    },
    Refs = submit(Work),
    Self = self(),
    _ = erlang:system_monitor(Self, [{long_schedule, 100}]),
    Times = #{Name => percentiles([time(Call) || _ <- lists:seq(1, 300)]) || Name := Call <- Calls},
    ok = ?NIF:store_cancel([ref]),
    _ = erlang:system_monitor(undefined),
    ok = gen_server:stop(?GOVERNOR),
    _ = [result(Ref) || Ref <- Refs],
    #{slowest => Times, held => held(Self)}.

time(Call) ->
    element(1, timer:tc(Call)).

percentiles(Times) ->
    Sorted = lists:sort(Times),
    {hd(Sorted), lists:nth(length(Sorted) div 2, Sorted), lists:nth(ceil(length(Sorted) * 0.999), Sorted)}.

%% What was reported of this process: others belong to the VM.
held(Self) ->
    receive
        {monitor, Self, long_schedule, Info} -> [Info | held(Self)];
        {monitor, _, long_schedule, _} -> held(Self);
        {store_result, ref, _} -> held(Self)
    after 0 -> []
    end.

%% --- panics ----------------------------------------------------------------------------------------------------------

a_panic_in_a_call_raises_and_the_library_goes_on(Config) ->
    slow(Config),
    in_a_vm_with(panicking_library(Config), panic_in_calls, [work(Config)]).

panic_in_calls(Work) ->
    Refs = submit(Work),
    [?assertError(nif_panicked, ?NIF:panic_in_call()) || _ <- lists:seq(1, ?TIMES)],
    goes_on(Refs, Work).

a_panic_in_a_task_is_its_answer_and_the_library_goes_on(Config) ->
    slow(Config),
    in_a_vm_with(panicking_library(Config), panic_in_tasks, [work(Config)]).

panic_in_tasks({Settings, _, _} = Work) ->
    Refs = submit(Work),
    {ok, Store} = ?NIF:store_open(Settings),
    Panics = lists:seq(1, ?TIMES),
    [ok = ?NIF:panic_in_task(Store, self(), {panic, N}) || N <- Panics],
    [
        ?assertMatch(
            {error, {invalid, #{op := get, reason := {panic, <<"a task panics">>}, message := <<"get panicked", _/binary>>}}},
            answer({panic, N})
        )
     || N <- Panics
    ],
    %% The same store serves other requests.
    ok = ?NIF:store_put(Store, self(), put, <<"after">>, <<"a panic">>, #{}),
    ?assertMatch({ok, #{etag := _}}, answer(put)),
    ok = ?NIF:store_get(Store, self(), get, <<"after">>, whole),
    ?assertMatch({ok, #{body := <<"a panic">>}}, answer(get)),
    goes_on(Refs, Work),
    %% Nobody has been answered twice.
    receive
        {store_result, _, _} = Second -> error(Second)
    after 0 -> ok
    end.

%% Uploads that were under way end well, and so do those that come now; calls answer.
goes_on(Refs, Work) ->
    [?assertMatch({ok, _}, result(Ref)) || Ref <- Refs],
    [?assertMatch({ok, _}, result(Ref)) || Ref <- submit(Work)],
    M = manifest(10),
    ?assertEqual({ok, M}, ?NIF:manifest_decode_root(?NIF:manifest_encode_root(M))),
    ok = gen_server:stop(?GOVERNOR).

answer(Ref) ->
    receive
        {store_result, Ref, Result} -> Result
    after ?WAIT -> error({no_answer, Ref})
    end.

a_library_that_is_shipped_has_no_functions_that_panic(_Config) ->
    Names = [<<"panic_in_call">>, <<"panic_in_task">>],
    {ok, Shipped} = file:read_file(filename:join([filename:dirname(app_ebin()), "priv", "rabbitmq_stream_s3_nif.so"])),
    ?assertEqual(nomatch, binary:match(Shipped, Names)),
    ?assertEqual([], [F || {F, _} <- ?NIF:module_info(exports), lists:member(atom_to_binary(F), Names)]),
    %% Names of functions are there in plain text, or this would show nothing.
    ?assertNotEqual(nomatch, binary:match(Shipped, <<"abi_version">>)).

%% The application with a library that has functions that panic, which takes a module that knows them. The way to its modules.
panicking_library(Config) ->
    Top = os:getenv("STREAM_S3_TOP"),
    Library = filename:join([Top, "_build", "panics", "rabbitmq_stream_s3_nif.so"]),
    ?assert(filelib:is_regular(Library), "run make -C c_src panics where cargo is"),
    App = filename:join([?config(dir, Config), "panics", "rabbitmq_stream_s3"]),
    [Ebin, Priv] = [filename:join(App, Dir) || Dir <- ["ebin", "priv"]],
    [ok = filelib:ensure_path(Dir) || Dir <- [Ebin, Priv]],
    _ = file:make_symlink(Library, filename:join(Priv, "rabbitmq_stream_s3_nif.so")),
    [{ok, _} = file:copy(File, filename:join(Ebin, filename:basename(File))) || File <- filelib:wildcard(filename:join(app_ebin(), "*"))],
    Source = filename:join([Top, "erlang", "src", "rabbitmq_stream_s3_nif.erl"]),
    {ok, ?NIF} = compile:file(Source, [{d, 'PANICS'}, {i, filename:join([Top, "erlang", "include"])}, {outdir, Ebin}, report]),
    Ebin.

%% --- helpers ---------------------------------------------------------------------------------------------------------

paths() ->
    [app_ebin(), test_ebin()].

app_ebin() ->
    filename:absname(filename:dirname(code:which(?NIF))).

test_ebin() ->
    filename:absname(filename:dirname(code:which(?MODULE))).

in_a_vm_of_its_own(Function, Args) ->
    in_a_vm_with(app_ebin(), Function, Args).

%% `Ebin' has the modules of the application.
in_a_vm_with(Ebin, Function, Args) ->
    {ok, Peer, _Node} = peer:start_link(#{connection => standard_io, args => ["-pa", Ebin, test_ebin()]}),
    Result = peer:call(Peer, ?MODULE, Function, Args, ?WAIT),
    peer:stop(Peer),
    Result.

%% Uploads take a second or more from now on.
slow(Config) ->
    ok = stream_s3_store_faults:add(?config(server, Config), [#{op => put, do => slow, bytes_per_sec => 2_000_000}]).

%% A place that accepts connections and never answers.
dead(Config) ->
    {ok, Listener} = gen_tcp:listen(0, [binary, {active, false}, {ip, {127, 0, 0, 1}}]),
    {ok, Port} = inet:port(Listener),
    {Settings, Logs, Meta} = work(Config),
    {Listener, {Settings#{endpoint => iolist_to_binary(io_lib:format("http://127.0.0.1:~b", [Port]))}, Logs, Meta}}.

%% What a VM of its own has to know.
work(Config) ->
    Settings = stream_s3_s3local:settings(?config(server, Config)),
    {
        Settings#{store => s3, bucket => <<"bucket">>, path_style => true, prefix => <<"p">>},
        ?config(logs, Config),
        ?config(meta, Config)
    }.

%% Uploads that are under way.
submit({Settings, Logs, Meta}) ->
    {ok, Store} = ?NIF:store_open(Settings),
    case whereis(?GOVERNOR) of
        undefined -> {ok, _} = ?GOVERNOR:start_link(#{rate => unlimited, concurrency => ?UPLOADS});
        _ -> ok
    end,
    Refs = [make_ref() || _ <- lists:seq(1, ?UPLOADS)],
    [ok = ?GOVERNOR:submit({fragment, Store, ?STREAM, Logs, Meta}, maps:get(size, Meta), self(), Ref) || Ref <- Refs],
    [
        receive
            {transfer_admitted, Ref} -> ok
        after ?WAIT -> error(not_admitted)
        end
     || Ref <- Refs
    ],
    Refs.

result(Ref) ->
    receive
        {transfer_result, Ref, Result} -> Result
    after ?WAIT -> error(no_result)
    end.

%% A segment file with one chunk, and the fragment that it is.
log(Dir, Data) ->
    ok = filelib:ensure_path(Dir),
    Chunk =
        <<5:4, 0:4, 0, 1:16, 3:32, 1000:64, 1:64, 0:64, (erlang:crc32(Data)):32, (byte_size(Data)):32, 0:32, 0, 0:24, Data/binary>>,
    ok = file:write_file(filename:join(Dir, "00000000000000000000.segment"), [<<"OSIL", 1:32>>, Chunk]),
    Size = byte_size(Chunk),
    Meta = #{
        first_offset => 0,
        first_timestamp => 1000,
        last_timestamp => 1000,
        next_offset => 3,
        size => Size,
        num_chunks => 1,
        spans => [{0, 8, 8 + Size}]
    },
    {Dir, Meta}.

manifest(Count) ->
    Entries = <<<<(N * 10):64, N:64, N:64, 0, 100:40, N:32>> || N <- lists:seq(0, Count - 1)>>,
    #manifest{first_timestamp = 0, first_last_timestamp = 0, next_offset = Count * 10, total_size = Count * 100, entries = Entries}.
