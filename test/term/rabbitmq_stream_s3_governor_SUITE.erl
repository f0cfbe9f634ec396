%% The governor as its callers see it: funs and native transfers, cancelled, starved, orphaned and stopped.
-module(rabbitmq_stream_s3_governor_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-compile(nowarn_export_all).
-compile(export_all).

-define(GOVERNOR, rabbitmq_stream_s3_governor).
-define(NIF, rabbitmq_stream_s3_nif).
-define(STREAM, <<"stream_1">>).
%% Long enough for a busy machine; nothing waits that long when all is well.
-define(WAIT, 10_000).

all() ->
    [
        a_fun_runs_and_its_value_is_the_result,
        a_fun_that_crashes_is_a_panic_with_its_reason,
        a_fun_that_is_killed_is_a_panic,
        no_more_funs_run_than_there_are_permits,
        a_fun_that_waits_is_cancelled_and_never_runs,
        a_fun_that_runs_is_killed_by_cancel,
        a_fun_is_cancelled_although_its_submission_is_still_on_the_way,
        cancelling_what_is_not_there_changes_nothing,
        a_fun_of_a_dead_requester_never_runs,
        a_fun_that_runs_for_a_dead_requester_is_killed,
        the_rate_holds_back_what_the_burst_does_not_cover,
        a_new_rate_lets_those_go_who_wait,
        more_concurrency_lets_those_go_who_wait,
        a_native_transfer_is_admitted_and_stored,
        a_native_transfer_that_fails_tells_the_reason,
        any_term_names_a_transfer,
        misuse_is_badarg,
        a_stop_answers_everything,
        a_governor_that_is_killed_leaves_nothing_running,
        options_that_cannot_be_used_are_refused_by_name,
        store_requests_answer_by_message,
        a_cancelled_store_request_says_nothing
    ].

init_per_testcase(_Case, Config) ->
    process_flag(trap_exit, true),
    Config.

end_per_testcase(_Case, _Config) ->
    case whereis(?GOVERNOR) of
        undefined -> ok;
        Pid -> gen_server:stop(Pid)
    end.

%% --- helpers ---------------------------------------------------------------------------------------------------------

start(Options) ->
    {ok, Pid} = ?GOVERNOR:start_link(maps:merge(#{rate => unlimited, concurrency => 1}, Options)),
    Pid.

result(Ref) ->
    receive
        {transfer_result, Ref, Result} -> Result
    after ?WAIT -> error({no_result, Ref, process_info(self(), messages)})
    end.

%% A fun that tells when it runs, and runs until it is told to end.
held(Name) ->
    Test = self(),
    fun() ->
        Test ! {runs, Name, self()},
        receive
            {go, Value} -> Value
        end
    end.

runs(Name) ->
    receive
        {runs, Name, Pid} -> Pid
    after ?WAIT -> error({does_not_run, Name})
    end.

down(Pid) ->
    Monitor = monitor(process, Pid),
    receive
        {'DOWN', Monitor, process, Pid, Reason} -> Reason
    after ?WAIT -> error({lives, Pid})
    end.

nothing_else() ->
    receive
        {'EXIT', _, _} -> nothing_else();
        Message -> error({unexpected, Message})
    after 0 -> ok
    end.

%% A process that can submit and then die.
requester() ->
    spawn(fun Loop() ->
        receive
            {run, Fun} ->
                Fun(),
                Loop();
            stop ->
                ok
        end
    end).

submit_as(Requester, Fun, Ref) ->
    ok = ?GOVERNOR:submit(Fun, 1, Requester, Ref).

store(Config, Name) ->
    Dir = filename:join(?config(priv_dir, Config), Name),
    {ok, Store} = ?NIF:store_open(#{store => fs, fs_dir => unicode:characters_to_binary(Dir), prefix => <<"p">>}),
    {Store, Dir}.

%% A segment file with one chunk, and the fragment that it is.
log(Config, Name, Data) ->
    Dir = filename:join(?config(priv_dir, Config), Name),
    ok = filelib:ensure_path(Dir),
    Chunk =
        <<5:4, 0:4, 0, 1:16, 3:32, 1000:64, 1:64, 0:64, (erlang:crc32(Data)):32, (byte_size(Data)):32, 0:32, 0, 0:24,
            Data/binary>>,
    ok = file:write_file(filename:join(Dir, "00000000000000000000.segment"), [<<"OSIL", 1:32>>, Chunk]),
    Size = byte_size(Chunk),
    Meta = #{
        first_offset => 0,
        next_offset => 3,
        first_timestamp => 1000,
        last_timestamp => 1000,
        size => Size,
        num_chunks => 1,
        spans => [{0, 8, 8 + Size}]
    },
    {Dir, Meta, <<"OSIF", 1:32, Chunk/binary, 0:64, 1000:64, 0:32>>}.

%% --- funs ------------------------------------------------------------------------------------------------------------

a_fun_runs_and_its_value_is_the_result(_Config) ->
    start(#{}),
    [
        begin
            Ref = make_ref(),
            ok = ?GOVERNOR:submit(fun() -> Value end, 1, self(), Ref),
            ?assertEqual(Value, result(Ref))
        end
     || Value <- [{ok, 7}, {error, timeout}, {error, {http, 503}}, anything]
    ],
    nothing_else().

a_fun_that_crashes_is_a_panic_with_its_reason(_Config) ->
    start(#{}),
    Crashes = [fun() -> error(my_reason) end, fun() -> throw(my_reason) end, fun() -> exit(my_reason) end],
    [
        begin
            Ref = make_ref(),
            ok = ?GOVERNOR:submit(Crash, 1, self(), Ref),
            {error, {panic, Text}} = result(Ref),
            ?assertMatch({_, _}, binary:match(Text, <<"my_reason">>))
        end
     || Crash <- Crashes
    ],
    nothing_else().

a_fun_that_is_killed_is_a_panic(_Config) ->
    start(#{}),
    ok = ?GOVERNOR:submit(held(a), 1, self(), a),
    exit(runs(a), kill),
    ?assertEqual({error, {panic, <<"killed">>}}, result(a)),
    ok = ?GOVERNOR:submit(fun() -> {ok, 1} end, 1, self(), b),
    ?assertEqual({ok, 1}, result(b), "the permit came back"),
    nothing_else().

no_more_funs_run_than_there_are_permits(_Config) ->
    start(#{concurrency => 2}),
    [ok = ?GOVERNOR:submit(held(Name), 1, self(), Name) || Name <- [a, b, c]],
    {A, _} = {runs(a), runs(b)},
    ok = numbers(#{
        governor_submissions_received => 3,
        governor_tasks_in_flight => 2,
        governor_pending_submissions => 1,
        upload_permits_in_use => 2
    }),
    nothing_else(),
    A ! {go, {ok, 1}},
    ?assertEqual({ok, 1}, result(a)),
    runs(c).

%% The third submission is still on its way when the first two run, and nobody tells when it has arrived.
numbers(Expected) ->
    numbers(Expected, erlang:monotonic_time(millisecond) + 5000).

numbers(Expected, Deadline) ->
    Found = maps:with(maps:keys(Expected), ?GOVERNOR:info()),
    case Found =:= Expected orelse erlang:monotonic_time(millisecond) > Deadline of
        true ->
            ?assertEqual(Expected, Found);
        false ->
            erlang:yield(),
            numbers(Expected, Deadline)
    end.

a_fun_that_waits_is_cancelled_and_never_runs(_Config) ->
    start(#{}),
    ok = ?GOVERNOR:submit(held(a), 1, self(), a),
    A = runs(a),
    ok = ?GOVERNOR:submit(held(b), 1, self(), b),
    ok = ?GOVERNOR:cancel([b]),
    ?assertEqual({error, cancelled}, result(b)),
    A ! {go, done},
    ?assertEqual(done, result(a)),
    ok = ?GOVERNOR:submit(fun() -> last end, 1, self(), c),
    ?assertEqual(last, result(c)),
    nothing_else().

a_fun_that_runs_is_killed_by_cancel(_Config) ->
    start(#{}),
    ok = ?GOVERNOR:submit(held(a), 1, self(), a),
    A = runs(a),
    ok = ?GOVERNOR:cancel([a]),
    ?assertEqual({error, cancelled}, result(a)),
    down(A),
    ok = ?GOVERNOR:submit(fun() -> next end, 1, self(), b),
    ?assertEqual(next, result(b), "the permit came back"),
    nothing_else().

a_fun_is_cancelled_although_its_submission_is_still_on_the_way(_Config) ->
    start(#{}),
    Refs = [make_ref() || _ <- lists:seq(1, 100)],
    [
        begin
            ok = ?GOVERNOR:submit(fun() -> timer:sleep(infinity) end, 1, self(), Ref),
            ok = ?GOVERNOR:cancel([Ref])
        end
     || Ref <- Refs
    ],
    [?assertEqual({error, cancelled}, result(Ref)) || Ref <- Refs],
    ok = ?GOVERNOR:submit(fun() -> next end, 1, self(), b),
    ?assertEqual(next, result(b), "no permit was lost"),
    nothing_else().

cancelling_what_is_not_there_changes_nothing(_Config) ->
    start(#{}),
    ok = ?GOVERNOR:cancel([a, make_ref(), {b, c}]),
    ok = ?GOVERNOR:submit(fun() -> ran end, 1, self(), a),
    ?assertEqual(ran, result(a)),
    nothing_else().

a_fun_of_a_dead_requester_never_runs(_Config) ->
    start(#{}),
    Requester = requester(),
    ok = ?GOVERNOR:submit(held(a), 1, self(), a),
    A = runs(a),
    submit_as(Requester, held(b), b),
    Requester ! stop,
    down(Requester),
    ok = ?GOVERNOR:submit(held(c), 1, self(), c),
    A ! {go, done},
    ?assertEqual(done, result(a)),
    runs(c),
    nothing_else(),
    ?assertMatch(#{governor_dropped_dead_replyto := 1}, ?GOVERNOR:info()).

a_fun_that_runs_for_a_dead_requester_is_killed(_Config) ->
    start(#{}),
    Requester = requester(),
    submit_as(Requester, held(a), a),
    A = runs(a),
    ok = ?GOVERNOR:submit(held(b), 1, self(), b),
    Requester ! stop,
    ?assertEqual(killed, down(A)),
    runs(b).

%% --- rate ------------------------------------------------------------------------------------------------------------

the_rate_holds_back_what_the_burst_does_not_cover(_Config) ->
    start(#{rate => 10_000, burst => 1_000, concurrency => 10}),
    Start = erlang:monotonic_time(millisecond),
    [ok = ?GOVERNOR:submit(fun() -> erlang:monotonic_time(millisecond) - Start end, Size, self(), N) || {N, Size} <- [{1, 1000}, {2, 1000}, {3, 2000}]],
    [One, Two, Three] = [result(N) || N <- [1, 2, 3]],
    %% The third one is larger than the burst: it goes when the bucket is full.
    ?assert(One < Two andalso Two >= 100 andalso Three >= 200, {One, Two, Three}),
    ?assertMatch(#{governor_oversized_admissions := 1}, ?GOVERNOR:info()).

a_new_rate_lets_those_go_who_wait(_Config) ->
    start(#{rate => 1, burst => 1}),
    ok = ?GOVERNOR:submit(fun() -> one end, 1, self(), 1),
    ?assertEqual(one, result(1)),
    ok = ?GOVERNOR:submit(fun() -> two end, 1_000_000, self(), 2),
    ok = ?GOVERNOR:set_rate(unlimited, undefined),
    ?assertEqual(two, result(2)).

more_concurrency_lets_those_go_who_wait(_Config) ->
    start(#{}),
    [ok = ?GOVERNOR:submit(held(Name), 1, self(), Name) || Name <- [a, b]],
    runs(a),
    ok = ?GOVERNOR:set_concurrency(2),
    runs(b).

%% --- native transfers ------------------------------------------------------------------------------------------------

a_native_transfer_is_admitted_and_stored(Config) ->
    start(#{}),
    {Store, Bucket} = store(Config, "bucket"),
    {Dir, Meta, Object} = log(Config, "log", binary:copy(<<"0123456789">>, 200_000)),
    %% Directories come as strings and as binaries.
    [
        begin
            ok = ?GOVERNOR:submit({fragment, Store, ?STREAM, D, Meta}, maps:get(size, Meta), self(), a),
            receive
                {transfer_admitted, a} -> ok
            after ?WAIT -> error(not_admitted)
            end,
            {ok, Uid} = result(a),
            Key = ?NIF:object_key(<<"p">>, ?STREAM, {fragment, 0, Uid}),
            ?assertEqual({ok, Object}, file:read_file(filename:join(Bucket, Key)))
        end
     || D <- [Dir, unicode:characters_to_binary(Dir)]
    ],
    ?assertMatch(#{bytes_sent := Sent} when Sent =:= 2 * byte_size(Object), ?GOVERNOR:info()),
    nothing_else().

a_native_transfer_that_fails_tells_the_reason(Config) ->
    start(#{}),
    {Store, _} = store(Config, "bucket2"),
    {Dir, Meta, _} = log(Config, "log2", <<"data">>),
    File = filename:join(Dir, "00000000000000000000.segment"),
    Submit = fun() ->
        ok = ?GOVERNOR:submit({fragment, Store, ?STREAM, Dir, Meta}, 1, self(), a),
        receive
            {transfer_admitted, a} -> result(a)
        after ?WAIT -> error(not_admitted)
        end
    end,
    {ok, Bytes} = file:read_file(File),
    ok = file:write_file(File, [binary:part(Bytes, 0, byte_size(Bytes) - 1), <<"X">>]),
    ?assertEqual({error, {corrupt_chunk, 0}}, Submit()),
    ok = file:delete(File),
    ?assertEqual({error, {open_failed, unicode:characters_to_binary(File), enoent}}, Submit()),
    nothing_else().

any_term_names_a_transfer(Config) ->
    start(#{}),
    {Store, _} = store(Config, "bucket3"),
    {Dir, Meta, _} = log(Config, "log3", <<"data">>),
    Refs = [make_ref(), 1, {a, self()}, #{k => [v]}, fun() -> ok end, <<"bin">>, 1.5, Store],
    [ok = ?GOVERNOR:submit({fragment, Store, ?STREAM, Dir, Meta}, 1, self(), Ref) || Ref <- Refs],
    [?assertMatch({ok, _}, result(Ref)) || Ref <- Refs].

misuse_is_badarg(Config) ->
    ?assertError(badarg, ?GOVERNOR:info()),
    start(#{}),
    {Store, _} = store(Config, "bucket4"),
    {Dir, Meta, _} = log(Config, "log4", <<"data">>),
    Submit = fun(Transfer) -> ?GOVERNOR:submit(Transfer, 1, self(), a) end,
    [
        ?assertError(badarg, Submit(Bad))
     || Bad <- [
            {fragment, make_ref(), ?STREAM, Dir, Meta},
            {fragment, Store, <<"../other">>, Dir, Meta},
            {fragment, Store, ?STREAM, an_atom, Meta},
            {fragment, Store, ?STREAM, Dir, maps:remove(spans, Meta)},
            {fragment, Store, ?STREAM, Dir, Meta#{size := 1}},
            {fragment, Store, ?STREAM, Dir, Meta#{spans := [{0, 8, 8}]}}
        ]
    ],
    ?assertError(badarg, ?GOVERNOR:set_rate(0, 1)),
    ?assertError(badarg, ?GOVERNOR:set_concurrency(0)),
    nothing_else().

%% --- ends ------------------------------------------------------------------------------------------------------------

a_stop_answers_everything(_Config) ->
    Pid = start(#{}),
    [ok = ?GOVERNOR:submit(held(Name), 1, self(), Name) || Name <- [a, b]],
    A = runs(a),
    ok = gen_server:stop(Pid),
    ?assertEqual([{error, cancelled}, {error, cancelled}], [result(Name) || Name <- [a, b]]),
    down(A),
    ?assertError(badarg, ?GOVERNOR:submit(fun() -> ok end, 1, self(), c)),
    nothing_else().

a_governor_that_is_killed_leaves_nothing_running(_Config) ->
    Pid = start(#{}),
    ok = ?GOVERNOR:submit(held(a), 1, self(), a),
    A = runs(a),
    exit(Pid, kill),
    ?assertEqual(killed, down(A)),
    start(#{}),
    ok = ?GOVERNOR:submit(fun() -> again end, 1, self(), b),
    ?assertEqual(again, result(b)).

options_that_cannot_be_used_are_refused_by_name(_Config) ->
    [
        ?assertMatch({error, {bad_option, Key, _}}, ?GOVERNOR:start_link(maps:merge(#{rate => unlimited, concurrency => 1}, #{Key => Value})))
     || {Key, Value} <- [{rate, 0}, {rate, fast}, {burst, 0}, {concurrency, 0}, {concurrency, many}]
    ].

%% --- store requests --------------------------------------------------------------------------------------------------

store_requests_answer_by_message(Config) ->
    {Store, _} = store(Config, "bucket5"),
    Ask = fun(Request) ->
        Ref = {ref, make_ref()},
        ok = Request(Ref),
        receive
            {store_result, Ref, Result} -> Result
        after ?WAIT -> error(no_answer)
        end
    end,
    ?assertMatch({ok, #{conditional_writes := true}}, Ask(fun(Ref) -> ?NIF:store_probe(Store, self(), Ref) end)),
    Put = fun(Body, Opts) -> Ask(fun(Ref) -> ?NIF:store_put(Store, self(), Ref, <<"p/key">>, Body, Opts) end) end,
    {ok, #{etag := Etag}} = Put([<<"0123">>, "456", [$7, <<"89">>]], #{if_none_match => true}),
    ?assertMatch({error, {conflict, #{op := put, reason := _, message := <<_/binary>>}}}, Put(<<>>, #{if_none_match => true})),
    ?assertMatch({error, {conflict, #{op := put}}}, Put(<<>>, #{if_match => <<"\"another\"">>})),
    {ok, #{etag := _}} = Put(<<"0123456789">>, #{if_match => Etag}),
    Get = fun(Key, Part) -> Ask(fun(Ref) -> ?NIF:store_get(Store, self(), Ref, Key, Part) end) end,
    ?assertMatch({ok, #{size := 10, body := <<"0123456789">>}}, Get(<<"p/key">>, whole)),
    ?assertMatch({ok, #{size := 10, body := <<"23">>}}, Get(<<"p/key">>, {2, 4})),
    ?assertMatch({ok, #{size := 10, body := <<"789">>}}, Get(<<"p/key">>, {last, 3})),
    ?assertMatch({error, {not_found, #{op := get}}}, Get(<<"p/none">>, whole)),
    List = fun(From, Max) -> Ask(fun(Ref) -> ?NIF:store_list(Store, self(), Ref, <<"p/">>, From, Max) end) end,
    ?assertMatch({ok, #{objects := [{<<"p/key">>, 10, _}], next := undefined}}, List(undefined, 10)),
    Manifest = {manifest, 10, 1, 2, 20, 100, 9, <<10:64, 1:64, 2:64, 0, 100:40, 7:32>>},
    {ok, Uid} = Ask(fun(Ref) -> ?NIF:put_root(Store, self(), Ref, ?STREAM, 3, Manifest) end),
    ?assertEqual(
        {ok, setelement(7, Manifest, 0)}, Ask(fun(Ref) -> ?NIF:get_root(Store, self(), Ref, ?STREAM, 3, Uid) end)
    ),
    ?assertMatch({error, {not_found, _}}, Ask(fun(Ref) -> ?NIF:get_root(Store, self(), Ref, ?STREAM, 4, Uid) end)),
    Entries = element(8, Manifest),
    {ok, GroupUid} = Ask(fun(Ref) -> ?NIF:put_group(Store, self(), Ref, ?STREAM, 1, Entries) end),
    ?assertEqual({ok, Entries}, Ask(fun(Ref) -> ?NIF:get_group(Store, self(), Ref, ?STREAM, 1, 10, GroupUid) end)),
    {ok, #{objects := Objects}} = List(undefined, 10),
    Keys = [Key || {Key, _, _} <- Objects],
    ?assertEqual(3, length(Keys)),
    ?assertEqual({ok, []}, Ask(fun(Ref) -> ?NIF:store_delete(Store, self(), Ref, [<<"p/none">> | Keys]) end)),
    ?assertMatch({ok, #{objects := []}}, List(undefined, 10)),
    ?assertMatch({error, {secret_key, _}}, ?NIF:store_open(#{store => s3, bucket => <<"b">>, access_key_id => <<"a">>})),
    ?assertMatch({error, {fs_dir, _}}, ?NIF:store_open(#{store => fs, fs_dir => <<"not/absolute">>})),
    ?assertMatch({error, {no_such_key, _}}, ?NIF:store_open(#{store => fs, fs_dir => <<"/x">>, no_such_key => 1})).

%% A server that never answers: the requests end by being cancelled.
a_cancelled_store_request_says_nothing(_Config) ->
    {ok, Listener} = gen_tcp:listen(0, [binary, {active, false}, {ip, {127, 0, 0, 1}}]),
    {ok, Port} = inet:port(Listener),
    Endpoint = iolist_to_binary(io_lib:format("http://127.0.0.1:~b", [Port])),
    {ok, Store} = ?NIF:store_open(#{
        store => s3,
        bucket => <<"b">>,
        endpoint => Endpoint,
        path_style => true,
        access_key_id => <<"a">>,
        secret_key => <<"s">>
    }),
    ok = ?NIF:store_get(Store, self(), one, <<"key">>, whole),
    {ok, Socket} = gen_tcp:accept(Listener, ?WAIT),
    {ok, <<"GET ", _/binary>>} = gen_tcp:recv(Socket, 0, ?WAIT),
    ok = ?NIF:store_cancel([one, two]),
    %% The connection closes with the request.
    ?assertEqual({error, closed}, gen_tcp:recv(Socket, 0, ?WAIT)),
    nothing_else().
