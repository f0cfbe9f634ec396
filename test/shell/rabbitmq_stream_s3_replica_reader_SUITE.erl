%% One stream's reader through its life: real osiris, real Khepri, a bucket that is a folder.
-module(rabbitmq_stream_s3_replica_reader_SUITE).

-include("rabbitmq_stream_s3.hrl").
-include("src/rabbitmq_stream_s3_replica_reader.hrl").
-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-import(stream_s3_wait, [eventually/2, kill/1]).

-compile(nowarn_export_all).
-compile(export_all).

-define(READER, rabbitmq_stream_s3_replica_reader).
-define(METADATA, rabbitmq_stream_s3_metadata).
-define(TIMEOUT, 20000).
%% Delays so short that a test need not wait for them, fragments so small that a few records fill one.
-define(ENV, #{
    fragment_target_size => 2000,
    persist_interval_ms => 50,
    upload_retry_delay_ms => 10,
    upload_retry_delay_max_ms => 100,
    task_retry_delay_max_ms => 100
}).

suite() -> [{timetrap, {seconds, 60}}].

all() ->
    [
        a_range_is_unresolved_then_empty_then_grows,
        each_record_is_tiered_however_it_meets_the_listener,
        commits_are_gathered_before_they_are_drained,
        a_majority_decides_what_is_drained,
        segments_that_are_not_pinned_are_drained_one_after_the_other,
        a_fragment_is_cut_at_its_age,
        a_forced_cut_of_nothing_is_empty,
        a_forced_cut_has_all_that_is_committed_when_it_is_asked_for,
        all_who_force_a_cut_are_answered,
        who_forces_a_cut_is_answered_when_the_reader_resolves_anew,
        who_forces_a_cut_is_answered_when_no_more_may_be_in_flight,
        awaiting_ends_with_the_offset_the_time_or_the_reader,
        no_more_fragments_are_in_flight_than_allowed,
        a_reader_that_is_killed_goes_on_where_the_manifest_ends,
        a_reader_is_restarted_though_its_name_is_not_free_yet,
        a_reader_that_fails_too_often_rests_and_others_go_on,
        a_conflict_makes_the_reader_resolve_anew_and_keeps_those_who_wait,
        a_reader_of_an_older_epoch_writes_nothing,
        a_persist_whose_outcome_is_unknown_is_done_again,
        a_deleted_stream_stops_its_reader_and_is_left_alone,
        a_reader_ends_with_its_writer_and_the_next_writer_gets_one,
        a_log_that_was_lost_and_is_as_long_again_is_another_timeline,
        a_tier_that_reaches_beyond_the_log_is_discarded,
        a_tier_that_ends_inside_a_chunk_of_the_log_is_discarded,
        a_log_that_lost_what_was_not_tiered_begins_a_new_tier_with_its_first_fragment,
        an_empty_log_under_a_tier_is_waited_for,
        only_the_current_root_stays,
        a_timer_that_came_too_early_is_set_again_for_an_edit_without_a_fragment,
        any_process_may_die,
        a_stopped_application_leaves_nothing_running,
        status_tells_where_a_stream_stands
    ].

init_per_suite(Config) ->
    Dir = filename:join(?config(priv_dir, Config), "world"),
    Keeper = stream_s3_keeper:start(fun() -> stream_s3_world:start(#{store => fs, dir => Dir, env => ?ENV}) end),
    World = stream_s3_keeper:value(Keeper),
    [{keeper, Keeper}, {world, World}, {bucket, stream_s3_world:bucket(World)} | Config].

end_per_suite(Config) ->
    stream_s3_keeper:stop(?config(keeper, Config), fun stream_s3_world:stop/1).

init_per_testcase(Case, Config) ->
    Stream = atom_to_binary(Case),
    Conf = stream_s3_osiris:config(Stream, #{max_segment_size_bytes => 10000}),
    [{stream, Stream}, {conf, Conf}, {logs, stream_s3_logs:start()} | Config].

end_per_testcase(_Case, Config) ->
    ok = stream_s3_logs:stop(?config(logs, Config)),
    ok = osiris:delete_cluster(?config(conf, Config)),
    stream_s3_world:set(maps:merge(?ENV, #{
        max_in_flight_fragments => 8, fragment_max_age_ms => 600000, persist_timeout_ms => 60000, pinned_segment_bytes => 1 bsl 31
    })).

%% --- draining --------------------------------------------------------------------------------------------------------

a_range_is_unresolved_then_empty_then_grows(Config) ->
    Stream = ?config(stream, Config),
    ?assertEqual({error, unresolved}, rabbitmq_stream_s3:get_range(Stream)),
    Writer = start_stream(Config),
    ok = ?READER:await_offset(Stream, 0),
    ?assertEqual(empty, rabbitmq_stream_s3:get_range(Stream)),
    write(Writer, 0, 10),
    assert_tiered(Config, Writer),
    write(Writer, 10, 30),
    assert_tiered(Config, Writer).

each_record_is_tiered_however_it_meets_the_listener(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    ok = ?READER:await_offset(Stream, 0),
    %% One at a time, each as soon as the last one is tiered: the commit comes before, during and after the registration.
    [
        begin
            write(Writer, N, 1),
            ok = ?READER:force_cut(Stream),
            ok = ?READER:await_offset(Stream, stream_s3_osiris:next_offset(Writer), ?TIMEOUT)
        end
     || N <- lists:seq(0, 29)
    ],
    assert_tiered(Config, Writer).

%% Each time the reader drains costs the writer two messages. However fast chunks are committed, it does so twenty times a second at most.
commits_are_gathered_before_they_are_drained(Config) ->
    Stream = ?config(stream, Config),
    %% One fragment: the drain never has to wait for others.
    ok = stream_s3_world:set(#{fragment_target_size => 67108864}),
    Writer = start_stream(Config),
    ok = ?READER:await_offset(Stream, 0),
    Reader = rabbitmq_stream_s3_registry:whereis(Stream),
    1 = erlang:trace(Reader, true, ['receive']),
    Began = erlang:monotonic_time(millisecond),
    write(Writer, 0, 500),
    assert_tiered(Config, Writer),
    Delivered = erlang:trace_delivered(Reader),
    receive
        {trace_delivered, Reader, Delivered} -> ok
    end,
    Took = erlang:monotonic_time(millisecond) - Began,
    1 = erlang:trace(Reader, false, ['receive']),
    Announced = announcements(Reader, 0),
    ct:pal("500 chunks in ~b ms: the writer announced ~b times", [Took, Announced]),
    ?assert(Announced > 0),
    ?assert(Announced =< Took div 50 + 2).

announcements(Reader, N) ->
    receive
        {trace, Reader, 'receive', {'$gen_cast', Message}} -> announcements(Reader, counted(Message, N));
        {trace, Reader, 'receive', Message} -> announcements(Reader, counted(Message, N))
    after 0 -> N
    end.

counted(Message, N) ->
    case rabbitmq_stream_s3_log:listened(Message) of
        true -> N + 1;
        false -> N
    end.

a_majority_decides_what_is_drained(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    write(Writer, 0, 10),
    assert_tiered(Config, Writer),
    ok = rabbitmq_stream_s3:pause(Stream),
    write(Writer, 10, 90),
    #{shared := Shared} = osiris_util:get_reader_context(Writer),
    Committed = osiris_log_shared:committed_chunk_id(Shared),
    %% As if the replicas were behind: chunk 15 is the last one that a majority has, in the middle of what is read at once.
    ok = osiris_log_shared:set_committed_chunk_id(Shared, 15),
    ok = rabbitmq_stream_s3:resume(Stream),
    ok = stream_s3_world:settle(Stream, 16, ?TIMEOUT),
    ?assertEqual({error, empty}, ?READER:force_cut(Stream)),
    ?assertEqual({0, 16}, rabbitmq_stream_s3:get_range(Stream)),
    ok = osiris_log_shared:set_committed_chunk_id(Shared, Committed),
    write(Writer, 100, 1),
    assert_tiered(Config, Writer).

segments_that_are_not_pinned_are_drained_one_after_the_other(Config) ->
    ok = stream_s3_world:set(#{pinned_segment_bytes => 0}),
    Writer = start_stream(Config),
    ok = ?READER:await_offset(?config(stream, Config), 0),
    #{segments := Elsewhere} = rabbitmq_stream_s3_pins:info(),
    write(Writer, 0, 200),
    assert_tiered(Config, Writer),
    #{segments := Segments} = stream_s3_chunks:of_log(stream_s3_osiris:dir(Writer)),
    ?assert(length(Segments) > 5),
    ?assertMatch(#{segments := Elsewhere}, rabbitmq_stream_s3_pins:info()).

a_fragment_is_cut_at_its_age(Config) ->
    ok = stream_s3_world:set(#{fragment_max_age_ms => 50}),
    Writer = start_stream(Config),
    write(Writer, 0, 1),
    ?assertEqual(ok, ?READER:await_offset(?config(stream, Config), 1, ?TIMEOUT)),
    write(Writer, 1, 1),
    ?assertEqual(ok, ?READER:await_offset(?config(stream, Config), 2, ?TIMEOUT)).

a_forced_cut_of_nothing_is_empty(Config) ->
    Stream = ?config(stream, Config),
    ?assertEqual({error, empty}, ?READER:force_cut(Stream)),
    Writer = start_stream(Config),
    ok = ?READER:await_offset(Stream, 0),
    ?assertEqual({error, empty}, ?READER:force_cut(Stream)),
    write(Writer, 0, 1),
    ?assertEqual(ok, ?READER:force_cut(Stream)),
    ?assertEqual({error, empty}, ?READER:force_cut(Stream)),
    ?assertEqual(ok, ?READER:await_offset(rabbitmq_stream_s3_registry:whereis(Stream), 1)).

%% However many headers have to be read before.
a_forced_cut_has_all_that_is_committed_when_it_is_asked_for(Config) ->
    Stream = ?config(stream, Config),
    ok = stream_s3_world:set(#{fragment_target_size => 1 bsl 26}),
    Writer = start_stream(Config),
    ok = ?READER:await_offset(Stream, 0),
    Reader = rabbitmq_stream_s3_registry:whereis(Stream),
    ok = sys:suspend(Reader),
    write(Writer, 0, 1000),
    Asked = force_cut(Stream),
    ok = sys:resume(Reader),
    ?assertEqual(ok, answer(Asked)),
    ?assertEqual(ok, ?READER:await_offset(Stream, 1000, ?TIMEOUT)),
    {Pointer, _} = stream_s3_world:pointer(Stream),
    {_, Fragments} = stream_s3_bucket:fragments(?config(bucket, Config), Stream, Pointer),
    ?assertMatch([_], Fragments).

all_who_force_a_cut_are_answered(Config) ->
    {_Reader, Answers} = forced(Config, fun(_) -> ok end),
    ?assertEqual([ok, ok], Answers),
    ?assertEqual(ok, ?READER:await_offset(?config(stream, Config), 1, ?TIMEOUT)).

who_forces_a_cut_is_answered_when_the_reader_resolves_anew(Config) ->
    {Reader, Answers} = forced(Config, fun ?READER:resolve_anew/1),
    ?assertEqual([{error, empty}, {error, empty}], Answers),
    ?assertMatch(#reader{forced = []}, sys:get_state(Reader)),
    ?assertEqual(Reader, rabbitmq_stream_s3_registry:whereis(?config(stream, Config))),
    ok = stream_s3_world:settle(?config(stream, Config), 1, ?TIMEOUT).

%% Two ask, and something else happens before the reader comes to read a header.
forced(Config, Then) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    ok = ?READER:await_offset(Stream, 0),
    Reader = rabbitmq_stream_s3_registry:whereis(Stream),
    eventually({true, false}, fun() ->
        #reader{listening = Listening, draining = Draining} = sys:get_state(Reader),
        {Listening, Draining}
    end),
    ok = sys:suspend(Reader),
    write(Writer, 0, 1),
    Asked = [force_cut(Stream), force_cut(Stream)],
    ok = Then(Reader),
    ok = sys:resume(Reader),
    {Reader, [answer(One) || One <- Asked]}.

who_forces_a_cut_is_answered_when_no_more_may_be_in_flight(Config) ->
    Stream = ?config(stream, Config),
    ok = stream_s3_world:set(#{max_in_flight_fragments => 1}),
    Writer = start_stream(Config),
    ok = ?READER:await_offset(Stream, 0),
    with_store_out_of_order(Config, fun() ->
        write(Writer, 0, 100),
        _ = stream_s3_logs:await(?config(logs, Config), ["^stream ", Stream, ": uploading fails"], ?TIMEOUT),
        ?assertEqual({error, empty}, ask_for_cut(rabbitmq_stream_s3_registry:whereis(Stream)))
    end),
    assert_tiered(Config, Writer).

%% Answers when the reader has the request.
force_cut(Stream) ->
    Reader = rabbitmq_stream_s3_registry:whereis(Stream),
    {message_queue_len, Before} = process_info(Reader, message_queue_len),
    Asked = spawn_monitor(fun() -> exit({answer, ask_for_cut(Reader)}) end),
    eventually(true, fun() -> process_info(Reader, message_queue_len) > {message_queue_len, Before} end),
    Asked.

%% The reader has all the time in the world, so an answer that does not come is none.
ask_for_cut(Reader) ->
    gen_server:call(Reader, {force_cut, erlang:monotonic_time(millisecond) + 3600000}, ?TIMEOUT).

awaiting_ends_with_the_offset_the_time_or_the_reader(Config) ->
    Stream = ?config(stream, Config),
    ?assertEqual({error, reader_down}, ?READER:await_offset(Stream, 0)),
    Writer = start_stream(Config),
    ?assertEqual({error, timeout}, ?READER:await_offset(Stream, 1, 10)),
    ?assertEqual({error, timeout}, ?READER:await_offset(Stream, 1, 0)),
    Waiting = [spawn_waiter(Stream, Offset) || Offset <- [1, 2, 1]],
    write(Writer, 0, 2),
    ok = stream_s3_world:settle(Stream, 2, ?TIMEOUT),
    ?assertEqual([ok, ok, ok], [answer(Waiter) || Waiter <- Waiting]),
    Last = spawn_waiter(Stream, 3),
    ok = stream_s3_world:kill_reader(Stream),
    ?assertEqual({error, reader_down}, answer(Last)).

no_more_fragments_are_in_flight_than_allowed(Config) ->
    Stream = ?config(stream, Config),
    ok = stream_s3_world:set(#{max_in_flight_fragments => 3}),
    Writer = start_stream(Config),
    ok = ?READER:await_offset(Stream, 0),
    with_store_out_of_order(Config, fun() ->
        write(Writer, 0, 100),
        %% The uploads fail, so the first ones stay, and nothing is cut behind them.
        _ = stream_s3_logs:await(?config(logs, Config), ["^stream ", Stream, ": uploading fails"], ?TIMEOUT),
        %% The first one fails, too, if perhaps not first.
        eventually(0, fun() ->
            #{transfers_in_flight := N, upload_stalled_offset := Oldest} = rabbitmq_stream_s3:status(Stream),
            ?assert(N =< 3),
            Oldest
        end)
    end),
    assert_tiered(Config, Writer),
    ?assertMatch(#{transfers_in_flight := 0, upload_stalled_offset := none, problems := []}, rabbitmq_stream_s3:status(Stream)).

%% --- restarts --------------------------------------------------------------------------------------------------------

a_reader_that_is_killed_goes_on_where_the_manifest_ends(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    [
        begin
            write(Writer, N * 20, 20),
            _ = N rem 2 =:= 0 andalso stream_s3_world:settle(Stream, stream_s3_osiris:next_offset(Writer), ?TIMEOUT),
            ok = await_reader(Stream),
            ok = stream_s3_world:kill_reader(Stream)
        end
     || N <- lists:seq(0, 3)
    ],
    assert_tiered(Config, Writer).

a_reader_is_restarted_though_its_name_is_not_free_yet(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    write(Writer, 0, 10),
    {links, Links} = process_info(rabbitmq_stream_s3_registry:whereis(Stream), links),
    [Supervisor] = [Pid || Pid <- Links, is_pid(Pid), is_supervisor(Pid)],
    ok = sys:suspend(rabbitmq_stream_s3_registry),
    ok = stream_s3_world:kill_reader(Stream),
    %% The supervisor has seen that the reader is dead, and the registry has not: the next one waits for the name.
    eventually(true, fun() -> {current_function, {gen, do_call, 4}} =:= reader_that_starts(Supervisor) end),
    ok = sys:resume(rabbitmq_stream_s3_registry),
    ?assertMatch([{reader, Reader, worker, _}] when is_pid(Reader), supervisor:which_children(Supervisor)),
    assert_tiered(Config, Writer).

%% What a reader does that waits for its name: its supervisor is linked to it, and to the supervisor of all.
reader_that_starts(Supervisor) ->
    {links, Links} = process_info(Supervisor, links),
    case lists:delete(whereis(rabbitmq_stream_s3_reader_sup), Links) of
        [Reader] -> process_info(Reader, current_function);
        _ -> undefined
    end.

a_reader_that_fails_too_often_rests_and_others_go_on(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    OtherConf = stream_s3_osiris:config(<<Stream/binary, "_other">>),
    Other = stream_s3_osiris:start_stream(OtherConf),
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    OtherReader = rabbitmq_stream_s3_registry:whereis(<<Stream/binary, "_other">>),
    ok = kill_until_it_rests(Stream),
    ?assertMatch(#{state := not_tiered}, rabbitmq_stream_s3:status(Stream)),
    ?assertEqual(OtherReader, rabbitmq_stream_s3_registry:whereis(<<Stream/binary, "_other">>)),
    write(Other, 0, 10),
    ok = stream_s3_world:settle(<<Stream/binary, "_other">>, 10, ?TIMEOUT),
    ok = osiris:delete_cluster(OtherConf),
    write(Writer, 0, 10),
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    assert_tiered(Config, Writer).

kill_until_it_rests(Stream) ->
    Reader = rabbitmq_stream_s3_registry:whereis(Stream),
    {links, Links} = process_info(Reader, links),
    [Supervisor] = [Pid || Pid <- Links, is_pid(Pid), is_supervisor(Pid)],
    Monitor = monitor(process, Supervisor),
    kill_until_it_rests(Stream, Monitor).

kill_until_it_rests(Stream, Monitor) ->
    Reader = rabbitmq_stream_s3_registry:whereis(Stream),
    _ = is_pid(Reader) andalso exit(Reader, kill),
    receive
        {'DOWN', Monitor, process, _, shutdown} -> ok
    after 10 -> kill_until_it_rests(Stream, Monitor)
    end.

is_supervisor(Pid) ->
    proc_lib:translate_initial_call(Pid) =:= {supervisor, rabbitmq_stream_s3_reader_sup, 1}.

%% What retention has dropped is persisted even when no fragment comes after it.
a_timer_that_came_too_early_is_set_again_for_an_edit_without_a_fragment(Config) ->
    Entries = <<
        (?ENTRY(0, 1, 2, ?MANIFEST_KIND_FRAGMENT, 100, 7))/binary, (?ENTRY(10, 3, 4, ?MANIFEST_KIND_FRAGMENT, 100, 8))/binary
    >>,
    Manifest = #manifest{
        first_offset = 0, first_timestamp = 1, first_last_timestamp = 2, next_offset = 20, total_size = 200, revision = 3, entries = Entries
    },
    Options = #{stream => ?config(stream, Config), dir => "/", epoch => 1, reference => r, persist_interval_ms => 60000},
    {Core0, []} = rabbitmq_stream_s3_replica_reader_core:init(Manifest, Options),
    {Edit, [_]} = rabbitmq_stream_s3_manifest:evaluate_remote_retention(Manifest, [{max_bytes, 100}], 5),
    {Core, [{start_persist_timer, _}]} = rabbitmq_stream_s3_replica_reader_core:retention_complete(Edit, Core0),
    ?assertMatch(#{edits_waiting := 1, since_persist := 0}, rabbitmq_stream_s3_replica_reader_core:format_state(Core)),
    Reader = rabbitmq_stream_s3_replica_reader_effects:tick(idle_reader(Config, Core)),
    ?assert(is_reference(Reader#reader.persist_timer)),
    %% With nothing waiting there is nothing to time.
    ?assertEqual(none, (rabbitmq_stream_s3_replica_reader_effects:tick(idle_reader(Config, Core0)))#reader.persist_timer).

idle_reader(Config, Core) ->
    Stream = ?config(stream, Config),
    #reader{
        stream = Stream,
        writer = self(),
        phase = running,
        core = Core,
        problems = rabbitmq_stream_s3_problems:new(Stream),
        tasks = rabbitmq_stream_s3_replica_reader_tasks:new(),
        transfers = rabbitmq_stream_s3_replica_reader_transfers:new(Stream)
    }.

any_process_may_die(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    Names = [
        rabbitmq_stream_s3_registry,
        rabbitmq_stream_s3_manifest_cache,
        rabbitmq_stream_s3_governor,
        rabbitmq_stream_s3_reader_sup,
        rabbitmq_stream_s3_reconciler,
        rabbitmq_stream_s3_store,
        rabbitmq_stream_s3_reaper,
        rabbitmq_stream_s3_gc
    ],
    [
        begin
            write(Writer, N * 20, 20),
            ok = kill(whereis(Name)),
            ok = await_reader(Stream),
            ok = stream_s3_world:settle(Stream, stream_s3_osiris:next_offset(Writer), ?TIMEOUT)
        end
     || {N, Name} <- lists:enumerate(0, Names)
    ],
    assert_tiered(Config, Writer).

a_stopped_application_leaves_nothing_running(Config) ->
    Writer = start_stream(Config),
    write(Writer, 0, 50),
    ok = stream_s3_world:stop_application(),
    Ours = [
        Pid
     || Pid <- processes(),
        {dictionary, Dictionary} <- [process_info(Pid, dictionary)],
        Ancestor <- proplists:get_value('$ancestors', Dictionary, []),
        Ancestor =:= rabbitmq_stream_s3_sup
    ],
    ?assertEqual([], Ours),
    ok = stream_s3_world:start_application(maps:merge(?ENV, stream_s3_world:store(?config(world, Config)))),
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    assert_tiered(Config, Writer).

%% --- rivals ----------------------------------------------------------------------------------------------------------

a_conflict_makes_the_reader_resolve_anew_and_keeps_those_who_wait(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    write(Writer, 0, 10),
    assert_tiered(Config, Writer),
    Waiter = spawn_waiter(Stream, 30),
    ok = rewrite_root(Config, 1),
    write(Writer, 10, 20),
    assert_tiered(Config, Writer),
    ?assertEqual(ok, answer(Waiter)),
    #{persist_conflicts := Conflicts, manifests_resolved := Resolved} = rabbitmq_stream_s3_counters:get({stream, Stream}),
    ?assertEqual({1, 2}, {Conflicts, Resolved}).

a_reader_of_an_older_epoch_writes_nothing(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    write(Writer, 0, 10),
    assert_tiered(Config, Writer),
    ok = rewrite_root(Config, 2),
    {Pointer, Revision} = stream_s3_world:pointer(Stream),
    write(Writer, 10, 20),
    Sentence = ["^stream ", Stream, ": resolving fails and is tried again: a writer of the later epoch 2 has been there"],
    {warning, _} = stream_s3_logs:await(?config(logs, Config), Sentence, ?TIMEOUT),
    ?assertMatch(#{state := resolving, problems := [#{doing := resolving}]}, rabbitmq_stream_s3:status(Stream)),
    ?assertEqual({Pointer, Revision}, stream_s3_world:pointer(Stream)).

a_persist_whose_outcome_is_unknown_is_done_again(Config) ->
    Stream = ?config(stream, Config),
    ok = stream_s3_world:set(#{persist_timeout_ms => 300}),
    Writer = start_stream(Config),
    write(Writer, 0, 10),
    assert_tiered(Config, Writer),
    Khepri = whereis(?METADATA:store_id()),
    ok = sys:suspend(Khepri),
    write(Writer, 10, 10),
    Sentence = ["^stream ", Stream, ": persisting fails and is tried again: "],
    {warning, _} = stream_s3_logs:await(?config(logs, Config), Sentence, ?TIMEOUT),
    ?assertEqual({0, 10}, rabbitmq_stream_s3:get_range(Stream)),
    ok = sys:resume(Khepri),
    %% Whether the first attempts took effect is not known; if so, the next one meets them as a conflict.
    assert_tiered(Config, Writer),
    ?assertMatch(#{persists_failed := N} when N > 0, counters(Config)).

%% The same manifest under another uid, as a rival writes it that tiered nothing new.
rewrite_root(Config, Epoch) ->
    Stream = ?config(stream, Config),
    {{Uid, OldEpoch}, Revision} = stream_s3_world:pointer(Stream),
    {ok, Manifest} = rabbitmq_stream_s3_store:get_root(Stream, OldEpoch, Uid, ?TIMEOUT),
    {ok, NewUid} = rabbitmq_stream_s3_store:put_root(Stream, Epoch, Manifest, ?TIMEOUT),
    {ok, _, _} = ?METADATA:put(Stream, {NewUid, Epoch}, Revision),
    ok.

a_deleted_stream_stops_its_reader_and_is_left_alone(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    write(Writer, 0, 10),
    assert_tiered(Config, Writer),
    Monitor = monitor(process, rabbitmq_stream_s3_registry:whereis(Stream)),
    ok = ?METADATA:delete(Stream, ?TIMEOUT),
    write(Writer, 10, 20),
    receive
        {'DOWN', Monitor, process, _, Reason} -> ?assertEqual({shutdown, stream_deleted}, Reason)
    end,
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    ?assertMatch(#{state := not_tiered}, rabbitmq_stream_s3:status(Stream)),
    ?assertEqual({error, not_found}, ?METADATA:get(Stream)),
    ?assertEqual({error, unresolved}, rabbitmq_stream_s3:get_range(Stream)).

a_reader_ends_with_its_writer_and_the_next_writer_gets_one(Config) ->
    Stream = ?config(stream, Config),
    First = start_stream(Config),
    write(First, 0, 25),
    Monitor = monitor(process, rabbitmq_stream_s3_registry:whereis(Stream)),
    ok = osiris:stop_member(node(), ?config(conf, Config)),
    receive
        {'DOWN', Monitor, process, _, Reason} -> ?assertEqual(normal, Reason)
    end,
    ?assertEqual({error, unresolved}, rabbitmq_stream_s3:get_range(Stream)),
    Second = next_writer(Config, 2),
    write(Second, 25, 25),
    assert_tiered(Config, Second),
    ?assertMatch({{_, 2}, _}, stream_s3_world:pointer(Stream)).

%% --- other timelines -------------------------------------------------------------------------------------------------

a_log_that_was_lost_and_is_as_long_again_is_another_timeline(Config) ->
    Stream = ?config(stream, Config),
    First = start_stream(Config),
    write(First, 0, 10),
    assert_tiered(Config, First),
    Before = stream_s3_bucket:keys(?config(bucket, Config), Stream),
    ok = lose_log(Config, First),
    Second = start_writer(Config, 2),
    write(Second, 1000, 10),
    write(Second, 2000, 10),
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    assert_tiered(Config, Second),
    ?assertMatch(#{remote_tier_ahead_recoveries := 1, local_log_ahead_recoveries := 0}, counters(Config)),
    %% What was discarded stays in the bucket for a while, its root included.
    ?assertEqual([], Before -- stream_s3_bucket:keys(?config(bucket, Config), Stream)),
    {warning, _} = stream_s3_logs:await(
        ?config(logs, Config), ["^stream ", Stream, ": the remote tier of the \\d+ offsets from 0 is discarded"], ?TIMEOUT
    ).

a_tier_that_reaches_beyond_the_log_is_discarded(Config) ->
    Stream = ?config(stream, Config),
    First = start_stream(Config),
    write(First, 0, 30),
    assert_tiered(Config, First),
    {_, Revision} = stream_s3_world:pointer(Stream),
    ok = lose_log(Config, First),
    Second = start_writer(Config, 2),
    write(Second, 1000, 1),
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    %% The empty manifest is persisted before anything is tiered, and then published.
    ok = ?READER:await_offset(Stream, 0, ?TIMEOUT),
    ?assertEqual(empty, rabbitmq_stream_s3:get_range(Stream)),
    ?assertMatch({{_, 2}, Next} when Next =:= Revision + 1, stream_s3_world:pointer(Stream)),
    assert_tiered(Config, Second),
    ?assertMatch(#{remote_tier_ahead_recoveries := 1}, counters(Config)).

%% An empty tier has no chunk to compare, yet no log that has a chunk across its end can go on from there.
a_tier_that_ends_inside_a_chunk_of_the_log_is_discarded(Config) ->
    Stream = ?config(stream, Config),
    First = start_stream(Config),
    write(First, 0, 5),
    assert_tiered(Config, First),
    ok = lose_log(Config, First),
    {_, Revision} = stream_s3_world:pointer(Stream),
    {ok, Uid} = rabbitmq_stream_s3_store:put_root(Stream, 1, #manifest{first_offset = 5, next_offset = 5}, ?TIMEOUT),
    {ok, _, _} = rabbitmq_stream_s3_metadata:put(Stream, {Uid, 1}, Revision),
    Second = start_writer(Config, 2),
    ok = stream_s3_osiris:write_chunk(Second, [<<N>> || N <- lists:seq(1, 20)]),
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    assert_tiered(Config, Second),
    ?assertMatch(#{remote_tier_ahead_recoveries := 1}, counters(Config)).

a_log_that_lost_what_was_not_tiered_begins_a_new_tier_with_its_first_fragment(Config) ->
    Stream = ?config(stream, Config),
    First = start_stream(Config),
    write(First, 0, 10),
    assert_tiered(Config, First),
    Dir = stream_s3_osiris:dir(First),
    ok = stream_s3_world:stop_application(),
    write(First, 10, 200),
    ok = osiris:stop_member(node(), ?config(conf, Config)),
    ok = delete_oldest_segments(Dir, 2),
    %% So large that the new tier's first fragment waits for a forced cut.
    Store = stream_s3_world:store(?config(world, Config)),
    ok = stream_s3_world:start_application(maps:merge(maps:merge(?ENV, Store), #{fragment_target_size => 1 bsl 30})),
    Second = next_writer(Config, 2),
    {ok, Context} = rabbitmq_stream_s3_log:context(Second, ?TIMEOUT),
    {ok, #{first := Start}} = rabbitmq_stream_s3_log:range(Context),
    ?assert(Start > 10),
    Sentence = ["^stream ", Stream, ": the remote tier of the 10 offsets from 0 is discarded, .* anew at offset ", integer_to_list(Start)],
    {warning, _} = stream_s3_logs:await(?config(logs, Config), Sentence, ?TIMEOUT),
    %% Nothing of the new tier is persisted yet: the old one is what readers get, and nobody is told of more.
    ?assertEqual({error, timeout}, ?READER:await_offset(Stream, 11, 50)),
    ?assertEqual({0, 10}, rabbitmq_stream_s3:get_range(Stream)),
    assert_tiered(Config, Second),
    ?assertMatch({Start, _}, rabbitmq_stream_s3:get_range(Stream)),
    ?assertMatch(#{local_log_ahead_recoveries := 1}, counters(Config)).

an_empty_log_under_a_tier_is_waited_for(Config) ->
    Stream = ?config(stream, Config),
    First = start_stream(Config),
    write(First, 0, 10),
    assert_tiered(Config, First),
    {Pointer, Revision} = stream_s3_world:pointer(Stream),
    ok = lose_log(Config, First),
    _Second = next_writer(Config, 2),
    {warning, _} = stream_s3_logs:await(?config(logs, Config), ["^stream ", Stream, ": resolving fails .* the local log is empty"], ?TIMEOUT),
    ?assertEqual({0, 10}, rabbitmq_stream_s3:get_range(Stream)),
    ?assertEqual({Pointer, Revision}, stream_s3_world:pointer(Stream)),
    ?assertMatch(#{remote_tier_ahead_recoveries := 0}, counters(Config)).

%% --- upkeep ----------------------------------------------------------------------------------------------------------

only_the_current_root_stays(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    [
        begin
            write(Writer, N * 10, 10),
            ok = stream_s3_world:settle(Stream, stream_s3_osiris:next_offset(Writer), ?TIMEOUT)
        end
     || N <- lists:seq(0, 3)
    ],
    {Pointer, Revision} = stream_s3_world:pointer(Stream),
    ?assert(Revision >= 4),
    Current = stream_s3_bucket:root_key(?config(bucket, Config), Stream, Pointer),
    %% Old ones are deleted behind the back of the reader.
    eventually([Current], fun() ->
        [Key || Key <- stream_s3_bucket:keys(?config(bucket, Config), Stream), filename:extension(Key) =:= <<".manifest">>]
    end).

status_tells_where_a_stream_stands(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    write(Writer, 0, 10),
    assert_tiered(Config, Writer),
    write(Writer, 10, 1),
    %% So that it has been drained: a forced cut drains first.
    Status = rabbitmq_stream_s3:status(Stream),
    Now = erlang:system_time(millisecond),
    ?assertMatch(
        #{
            stream := Stream,
            state := running,
            role := writer,
            writer := Writer,
            epoch := 1,
            local := {0, 11},
            remote := {0, 10},
            behind := 1,
            manifest_next_offset := 10,
            persisted_next_offset := 10,
            transfers_in_flight := 0,
            problems := [],
            last_persist_timestamp_ms := Ms,
            counters := #{persists_completed := _}
        } when Ms =< Now andalso Ms > Now - 60000,
        Status
    ),
    #{streams := Streams, store := Store, settings := Settings, metadata := Metadata, deletions := Deletions} = rabbitmq_stream_s3:status(),
    ?assertMatch(#{cause := none, objects_deleted := _}, Deletions),
    ?assertEqual([Stream], [S || #{stream := S} <- Streams, S =:= Stream]),
    ?assertMatch(#{state := accessible}, Store),
    ?assertMatch(#{store := fs}, Settings),
    ?assertMatch(#{store_id := rabbitmq_stream_s3_metadata}, Metadata),
    ok = ct:capture_start(),
    ok = rabbitmq_stream_s3:print_status(),
    ok = ct:capture_stop(),
    Printed = lists:flatten(ct:capture_get()),
    ?assertMatch({match, _}, re:run(Printed, [Stream, " +running +1 +0\\.\\.11 +0\\.\\.10 +1 +0 +\\d+ s ago"])),
    ?assertEqual(#{stream => <<"nobody">>, state => not_tiered}, rabbitmq_stream_s3:status(<<"nobody">>)).

%% --- helpers ---------------------------------------------------------------------------------------------------------

start_stream(Config) ->
    Writer = stream_s3_osiris:start_stream(?config(conf, Config)),
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    Writer.

start_writer(Config, Epoch) ->
    {ok, Writer} = osiris:start_writer((?config(conf, Config))#{epoch => Epoch}),
    Writer.

next_writer(Config, Epoch) ->
    Writer = start_writer(Config, Epoch),
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    Writer.

%% So many chunks of one record of 500 bytes.
write(Writer, First, Count) ->
    [ok = stream_s3_osiris:write_chunk(Writer, [<<N:32, 0:(496 * 8)>>]) || N <- lists:seq(First, First + Count - 1)],
    ok.

%% Of the local log from its first offset: all of it is in the bucket, and nothing else is listed.
assert_tiered(Config, Writer) ->
    Stream = ?config(stream, Config),
    End = stream_s3_osiris:next_offset(Writer),
    ok = stream_s3_world:settle(Stream, End, ?TIMEOUT),
    {Pointer, Revision} = stream_s3_world:pointer(Stream),
    {#manifest{first_offset = First} = Manifest, Fragments} = stream_s3_bucket:fragments(?config(bucket, Config), Stream, Pointer),
    ?assertEqual({First, End}, rabbitmq_stream_s3:get_range(Stream)),
    ?assertEqual({resolved, Manifest#manifest{revision = Revision}, Revision}, rabbitmq_stream_s3_manifest_cache:get(Stream)),
    #{bytes := Local, segments := [First | _]} = stream_s3_chunks:of_log(stream_s3_osiris:dir(Writer)),
    Remote = iolist_to_binary([stream_s3_bucket:chunk_bytes(?config(bucket, Config), Fragment) || Fragment <- Fragments]),
    ?assertEqual(byte_size(Local), byte_size(Remote)),
    ?assertEqual(erlang:md5(Local), erlang:md5(Remote)).

counters(Config) ->
    rabbitmq_stream_s3_counters:get({stream, ?config(stream, Config)}).

%% A file in the bucket's place: every request fails until it is gone.
with_store_out_of_order(Config, Fun) ->
    #{fs_dir := Dir} = stream_s3_world:store(?config(world, Config)),
    Away = <<Dir/binary, ".away">>,
    ok = file:rename(Dir, Away),
    ok = file:write_file(Dir, <<>>),
    try
        Fun()
    after
        ok = file:delete(Dir),
        ok = file:rename(Away, Dir)
    end.

lose_log(Config, Writer) ->
    Dir = stream_s3_osiris:dir(Writer),
    Monitor = monitor(process, rabbitmq_stream_s3_registry:whereis(?config(stream, Config))),
    ok = osiris:stop_member(node(), ?config(conf, Config)),
    receive
        {'DOWN', Monitor, process, _, _} -> ok
    end,
    file:del_dir_r(Dir).

delete_oldest_segments(Dir, N) ->
    Indexes = lists:sublist(osiris_log:sorted_index_files(Dir), N),
    [ok = file:delete(F) || I <- Indexes, F <- [I, filename:join(filename:dirname(I), [filename:basename(I, ".index"), ".segment"])]],
    ok.

spawn_waiter(Stream, Offset) ->
    spawn_monitor(fun() -> exit({answer, ?READER:await_offset(Stream, Offset, ?TIMEOUT)}) end).

answer({Pid, Monitor}) ->
    receive
        {'DOWN', Monitor, process, Pid, {answer, Answer}} -> Answer
    end.

%% A supervisor restarts it; nobody tells when.
await_reader(Stream) ->
    eventually(true, fun() -> is_pid(rabbitmq_stream_s3_registry:whereis(Stream)) end).
