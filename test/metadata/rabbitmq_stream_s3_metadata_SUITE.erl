%% The metadata store outside a broker: a real Khepri store of one member.
-module(rabbitmq_stream_s3_metadata_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-compile(nowarn_export_all).
-compile(export_all).

-define(METADATA, rabbitmq_stream_s3_metadata).
-define(TIMEOUT, 5000).
%% Of a call that cannot succeed: as short as a test may be, and far longer than a call that can.
-define(SHORT, 500).

suite() -> [{timetrap, {seconds, 60}}].

all() ->
    [
        a_manifest_is_created_only_under_an_anchor,
        anchoring_again_changes_nothing,
        a_stream_without_a_manifest_is_not_found,
        the_first_put_creates_revision_1_and_replaces_nothing,
        a_second_creation_is_a_conflict_with_what_is_stored,
        a_put_with_the_expected_revision_replaces_the_entry,
        a_put_with_another_revision_is_a_conflict_with_what_is_stored,
        a_put_of_an_older_epoch_is_a_conflict,
        a_put_of_a_newer_epoch_takes_over,
        a_put_that_had_won_already_is_a_success,
        of_many_writers_with_one_revision_exactly_one_wins,
        a_put_after_the_deletion_of_a_stream_does_not_bring_it_back,
        streams_are_listed_until_they_are_deleted,
        a_tier_is_absent_never_persisted_or_there,
        when_a_tier_was_discarded_is_known_as_long_as_its_stream,
        no_writer_notes_a_discard_once_a_later_one_has_begun,
        of_two_that_claim_the_note_at_once_the_later_writer_has_it,
        one_node_alone_leads,
        everything_survives_a_restart_of_the_store,
        the_first_writes_of_a_new_store_survive_kill_9,
        calls_without_an_answer_end_in_time,
        a_put_whose_answer_was_lost_recognises_itself,
        operations_are_counted
    ].

init_per_suite(Config) ->
    %% Of a suite that ran in this VM before.
    ok = stream_s3_world:stop_metadata_store(),
    _ = application:load(osiris),
    ok = application:set_env(osiris, data_dir, filename:join(?config(priv_dir, Config), "osiris")),
    Keeper = stream_s3_keeper:start(fun() ->
        ok = rabbitmq_stream_s3_counters:init(),
        ok = ?METADATA:start()
    end),
    [{keeper, Keeper} | Config].

end_per_suite(Config) ->
    stream_s3_keeper:stop(?config(keeper, Config), fun(ok) -> ?METADATA:stop() end),
    application:unload(osiris).

init_per_testcase(Case, Config) ->
    [{stream, atom_to_binary(Case)} | Config].

end_per_testcase(_Case, Config) ->
    Config.

%% --- cases -----------------------------------------------------------------------------------------------------------

a_manifest_is_created_only_under_an_anchor(Config) ->
    Stream = ?config(stream, Config),
    ?assertEqual({error, not_found}, write(Stream, {1, 1}, 0)),
    %% A container alone, as it is between the two writes of an anchor, does not suffice.
    {ok, _} = khepri_adv:create(?METADATA:store_id(), [rabbitmq, rabbitmq_stream_s3, Stream], #{}),
    ?assertEqual({error, not_found}, write(Stream, {1, 1}, 0)),
    ok = anchor(Stream),
    ?assertEqual({ok, undefined, 1}, write(Stream, {1, 1}, 0)).

anchoring_again_changes_nothing(Config) ->
    Stream = ?config(stream, Config),
    ok = anchor(Stream),
    {ok, undefined, 1} = write(Stream, {7, 1}, 0),
    ok = anchor(Stream),
    ?assertEqual({ok, {7, 1}, 1}, read(Stream)).

a_stream_without_a_manifest_is_not_found(Config) ->
    Stream = ?config(stream, Config),
    ?assertEqual({error, not_found}, read(Stream)),
    ok = anchor(Stream),
    ?assertEqual({error, not_found}, read(Stream)).

the_first_put_creates_revision_1_and_replaces_nothing(Config) ->
    Stream = anchored(Config),
    ?assertEqual({ok, undefined, 1}, write(Stream, {16#FFFFFFFF, 3}, 0)),
    ?assertEqual({ok, {16#FFFFFFFF, 3}, 1}, read(Stream)).

a_second_creation_is_a_conflict_with_what_is_stored(Config) ->
    Stream = anchored(Config),
    {ok, undefined, 1} = write(Stream, {1, 1}, 0),
    ?assertEqual({error, {conflict, {1, 1}}}, write(Stream, {2, 1}, 0)),
    ?assertEqual({ok, {1, 1}, 1}, read(Stream)).

a_put_with_the_expected_revision_replaces_the_entry(Config) ->
    Stream = anchored(Config),
    {ok, undefined, 1} = write(Stream, {1, 1}, 0),
    ?assertEqual({ok, {1, 1}, 2}, write(Stream, {2, 1}, 1)),
    ?assertEqual({ok, {2, 1}, 3}, write(Stream, {3, 1}, 2)),
    ?assertEqual({ok, {3, 1}, 3}, read(Stream)).

a_put_with_another_revision_is_a_conflict_with_what_is_stored(Config) ->
    Stream = anchored(Config),
    {ok, undefined, 1} = write(Stream, {1, 1}, 0),
    {ok, {1, 1}, 2} = write(Stream, {2, 1}, 1),
    ?assertEqual({error, {conflict, {2, 1}}}, write(Stream, {3, 1}, 1)),
    ?assertEqual({error, {conflict, {2, 1}}}, write(Stream, {3, 1}, 3)),
    ?assertEqual({ok, {2, 1}, 2}, read(Stream)).

a_put_of_an_older_epoch_is_a_conflict(Config) ->
    Stream = anchored(Config),
    {ok, undefined, 1} = write(Stream, {1, 5}, 0),
    ?assertEqual({error, {conflict, {1, 5}}}, write(Stream, {2, 4}, 1)),
    ?assertEqual({ok, {1, 5}, 1}, read(Stream)).

a_put_of_a_newer_epoch_takes_over(Config) ->
    Stream = anchored(Config),
    {ok, undefined, 1} = write(Stream, {1, 5}, 0),
    ?assertEqual({ok, {1, 5}, 2}, write(Stream, {2, 6}, 1)),
    %% The old writer has the revision of its last persist, and the old epoch.
    ?assertEqual({error, {conflict, {2, 6}}}, write(Stream, {3, 5}, 1)),
    ?assertEqual({error, {conflict, {2, 6}}}, write(Stream, {3, 5}, 2)).

a_put_that_had_won_already_is_a_success(Config) ->
    Stream = anchored(Config),
    {ok, undefined, 1} = write(Stream, {1, 1}, 0),
    ?assertEqual({ok, undefined, 1}, write(Stream, {1, 1}, 0)),
    {ok, {1, 1}, 2} = write(Stream, {2, 1}, 1),
    ?assertEqual({ok, undefined, 2}, write(Stream, {2, 1}, 1)),
    %% The same uid in another epoch is somebody else's.
    ?assertEqual({error, {conflict, {2, 1}}}, write(Stream, {2, 2}, 1)).

of_many_writers_with_one_revision_exactly_one_wins(Config) ->
    Stream = anchored(Config),
    {ok, undefined, 1} = write(Stream, {0, 1}, 0),
    Uids = lists:seq(1, 20),
    Pids = [spawn_monitor(fun() -> exit({answer, write(Stream, {Uid, 1}, 1)}) end) || Uid <- Uids],
    Answers = [
        receive
            {'DOWN', Ref, process, Pid, {answer, Answer}} -> Answer
        end
     || {Pid, Ref} <- Pids
    ],
    {Wins, Losses} = lists:partition(fun(Answer) -> element(1, Answer) =:= ok end, Answers),
    ?assertEqual([{ok, {0, 1}, 2}], Wins),
    {ok, Winner, 2} = read(Stream),
    ?assertEqual([{error, {conflict, Winner}}], lists:usort(Losses)).

a_put_after_the_deletion_of_a_stream_does_not_bring_it_back(Config) ->
    Stream = anchored(Config),
    {ok, undefined, 1} = write(Stream, {1, 1}, 0),
    ok = ?METADATA:delete(Stream, ?TIMEOUT),
    ?assertEqual({error, not_found}, write(Stream, {2, 1}, 1)),
    ?assertEqual({error, not_found}, write(Stream, {2, 1}, 0)),
    ?assertEqual({error, not_found}, read(Stream)),
    {ok, Streams} = ?METADATA:streams(?TIMEOUT),
    ?assertNot(lists:member(Stream, Streams)),
    ?assertEqual(ok, ?METADATA:delete(Stream, ?TIMEOUT)).

streams_are_listed_until_they_are_deleted(Config) ->
    Stream = anchored(Config),
    Other = <<Stream/binary, "_2">>,
    ok = anchor(Other),
    {ok, Both} = ?METADATA:streams(?TIMEOUT),
    ?assertEqual([Stream, Other], [S || S <- Both, S =:= Stream orelse S =:= Other]),
    ok = ?METADATA:delete(Stream, ?TIMEOUT),
    {ok, One} = ?METADATA:streams(?TIMEOUT),
    ?assertEqual([Other], [S || S <- One, S =:= Stream orelse S =:= Other]).

a_tier_is_absent_never_persisted_or_there(Config) ->
    Stream = atom_to_binary(?FUNCTION_NAME),
    ?assertEqual({error, not_found}, ?METADATA:tier(Stream, ?TIMEOUT)),
    %% A container alone, as between the two writes of an anchor.
    ok = khepri:put(?METADATA:store_id(), [rabbitmq, rabbitmq_stream_s3, Stream], true),
    ?assertEqual({ok, #{root => none, discarded => none}}, ?METADATA:tier(Stream, ?TIMEOUT)),
    Stream = anchored(Config),
    ?assertEqual({ok, #{root => none, discarded => none}}, ?METADATA:tier(Stream, ?TIMEOUT)),
    {ok, undefined, 1} = write(Stream, {7, 3}, 0),
    ?assertEqual({ok, #{root => {{7, 3}, 1}, discarded => none}}, ?METADATA:tier(Stream, ?TIMEOUT)),
    ok = ?METADATA:delete(Stream, ?TIMEOUT),
    ?assertEqual({error, not_found}, ?METADATA:tier(Stream, ?TIMEOUT)).

when_a_tier_was_discarded_is_known_as_long_as_its_stream(Config) ->
    Stream = atom_to_binary(?FUNCTION_NAME),
    ?assertEqual({error, not_found}, ?METADATA:discard(Stream, 1000, 3, ?TIMEOUT)),
    ?assertEqual({error, not_found}, ?METADATA:claim_discards(Stream, 3, ?TIMEOUT)),
    ?assertEqual({error, not_found}, ?METADATA:tier(Stream, ?TIMEOUT)),
    Stream = anchored(Config),
    {ok, undefined, 1} = write(Stream, {7, 3}, 0),
    [ok = ?METADATA:discard(Stream, Ms, 3, ?TIMEOUT) || Ms <- [1000, 2000]],
    ?assertEqual({ok, #{root => {{7, 3}, 1}, discarded => {2000, 3}}}, ?METADATA:tier(Stream, ?TIMEOUT)),
    %% It is no part of what the revision counts.
    {ok, {7, 3}, 2} = write(Stream, {8, 3}, 1),
    ok = ?METADATA:delete(Stream, ?TIMEOUT),
    ?assertEqual({error, not_found}, ?METADATA:tier(Stream, ?TIMEOUT)).

no_writer_notes_a_discard_once_a_later_one_has_begun(Config) ->
    Stream = anchored(Config),
    {ok, undefined, 1} = write(Stream, {7, 3}, 0),
    Noted = fun() ->
        {ok, #{discarded := Note}} = ?METADATA:tier(Stream, ?TIMEOUT),
        Note
    end,
    ok = ?METADATA:claim_discards(Stream, 3, ?TIMEOUT),
    ?assertEqual({undefined, 3}, Noted()),
    ok = ?METADATA:discard(Stream, 1000, 3, ?TIMEOUT),
    ok = ?METADATA:claim_discards(Stream, 3, ?TIMEOUT),
    ?assertEqual({1000, 3}, Noted()),
    %% What was discarded stays so, and before the later one has persisted anything nobody else has a say.
    ok = ?METADATA:claim_discards(Stream, 4, ?TIMEOUT),
    ?assertEqual({1000, 4}, Noted()),
    ?assertEqual({error, conflict}, ?METADATA:discard(Stream, 2000, 3, ?TIMEOUT)),
    ?assertEqual({error, {fenced, 4}}, ?METADATA:claim_discards(Stream, 3, ?TIMEOUT)),
    ?assertEqual({1000, 4}, Noted()),
    ok = ?METADATA:discard(Stream, 3000, 4, ?TIMEOUT),
    ?assertEqual({3000, 4}, Noted()).

of_two_that_claim_the_note_at_once_the_later_writer_has_it(Config) ->
    Stream = anchored(Config),
    Claim = fun(Epoch) -> spawn_monitor(fun() -> exit(?METADATA:claim_discards(Stream, Epoch, ?TIMEOUT)) end) end,
    Claims = [{Epoch, Claim(Epoch)} || Epoch <- [3, 1, 5, 2, 4]],
    Answers = [
        receive
            {'DOWN', Monitor, process, Pid, Answer} -> {Epoch, Answer}
        end
     || {Epoch, {Pid, Monitor}} <- Claims
    ],
    ?assertEqual(ok, proplists:get_value(5, Answers)),
    [?assert(Answer =:= ok orelse element(1, element(2, Answer)) =:= fenced, {Epoch, Answer}) || {Epoch, Answer} <- Answers],
    ?assertMatch({ok, #{discarded := {undefined, 5}}}, ?METADATA:tier(Stream, ?TIMEOUT)).

one_node_alone_leads(_Config) ->
    ?assert(?METADATA:leads()).

everything_survives_a_restart_of_the_store(Config) ->
    Stream = anchored(Config),
    {ok, undefined, 1} = write(Stream, {1, 1}, 0),
    {ok, {1, 1}, 2} = write(Stream, {2, 1}, 1),
    ok = ?METADATA:stop(),
    ?assertMatch({error, _}, ?METADATA:get(Stream, ?SHORT)),
    ok = ?METADATA:start(),
    ?assertEqual({ok, {2, 1}, 2}, read(Stream)),
    ?assertEqual({ok, {2, 1}, 3}, write(Stream, {3, 1}, 2)).

the_first_writes_of_a_new_store_survive_kill_9(Config) ->
    Stream = ?config(stream, Config),
    Dir = filename:join(?config(priv_dir, Config), "killed"),
    First = start_vm(Dir),
    ok = peer:call(First, ?METADATA, anchor, [Stream, {test_stream, Stream}, ?TIMEOUT]),
    {ok, undefined, 1} = peer:call(First, ?METADATA, put, [Stream, {1, 1}, 0, ?TIMEOUT]),
    ok = kill_vm(First),
    Second = start_vm(Dir),
    ?assertEqual({ok, {1, 1}, 1}, peer:call(Second, ?METADATA, get, [Stream, ?TIMEOUT])),
    ok = kill_vm(Second).

start_vm(Dir) ->
    {ok, Peer, nonode@nohost} = peer:start(#{connection => standard_io, args => ["-pa" | code:get_path()]}),
    ok = peer:call(Peer, logger, set_primary_config, [level, none]),
    ok = peer:call(Peer, application, load, [osiris]),
    ok = peer:call(Peer, application, set_env, [osiris, data_dir, Dir]),
    ok = peer:call(Peer, rabbitmq_stream_s3_counters, init, []),
    ok = peer:call(Peer, ?METADATA, start, [], 30000),
    Peer.

kill_vm(Peer) ->
    Monitor = monitor(process, Peer),
    [] = os:cmd("kill -9 " ++ peer:call(Peer, os, getpid, [])),
    receive
        {'DOWN', Monitor, process, Peer, _} -> ok
    end.

calls_without_an_answer_end_in_time(Config) ->
    Stream = anchored(Config),
    while_unresponsive(fun() ->
        Calls = [
            fun() -> ?METADATA:get(Stream, ?SHORT) end,
            fun() -> ?METADATA:put(Stream, {1, 1}, 0, ?SHORT) end,
            fun() -> ?METADATA:anchor(Stream, none, ?SHORT) end,
            fun() -> ?METADATA:streams(?SHORT) end,
            fun() -> ?METADATA:tier(Stream, ?SHORT) end,
            fun() -> ?METADATA:discard(Stream, 1, 1, ?SHORT) end,
            fun() -> ?METADATA:claim_discards(Stream, 1, ?SHORT) end
        ],
        [
            begin
                {Us, Answer} = timer:tc(Call),
                ?assertEqual({error, timeout}, Answer),
                ?assert(Us < 10 * ?SHORT * 1000)
            end
         || Call <- Calls
        ]
    end),
    %% Answers that come now are for nobody.
    {ok, _, _} = write(Stream, {1, 1}, 0),
    ?assertEqual({messages, []}, process_info(self(), messages)).

a_put_whose_answer_was_lost_recognises_itself(Config) ->
    Stream = anchored(Config),
    {ok, undefined, 1} = write(Stream, {1, 1}, 0),
    while_unresponsive(fun() -> {error, timeout} = ?METADATA:put(Stream, {2, 1}, 1, ?SHORT) end),
    %% It may have taken effect or not. Either way the same call ends with it as the current one.
    ?assertMatch({ok, _, 2}, write(Stream, {2, 1}, 1)),
    ?assertEqual({ok, {2, 1}, 2}, read(Stream)).

operations_are_counted(Config) ->
    Before = rabbitmq_stream_s3_counters:get(metadata),
    Stream = ?config(stream, Config),
    {error, not_found} = write(Stream, {1, 1}, 0),
    ok = anchor(Stream),
    {ok, undefined, 1} = write(Stream, {1, 1}, 0),
    {error, {conflict, _}} = write(Stream, {2, 1}, 0),
    {ok, _, _} = read(Stream),
    After = rabbitmq_stream_s3_counters:get(metadata),
    Difference = maps:map(fun(Name, N) -> N - maps:get(Name, Before) end, After),
    ?assertEqual(
        #{gets => 1, puts => 3, put_successes => 1, put_conflicts => 1, put_not_founds => 1, put_errors => 0},
        Difference
    ).

%% --- helpers ---------------------------------------------------------------------------------------------------------

anchored(Config) ->
    Stream = ?config(stream, Config),
    ok = anchor(Stream),
    Stream.

anchor(Stream) -> ?METADATA:anchor(Stream, {test_stream, Stream}, ?TIMEOUT).
read(Stream) -> ?METADATA:get(Stream, ?TIMEOUT).
write(Stream, Entry, Expected) -> ?METADATA:put(Stream, Entry, Expected, ?TIMEOUT).

%% The store's process takes messages, but deals with none of them, like one on a node that is stopped.
while_unresponsive(Fun) ->
    Server = whereis(?METADATA:store_id()),
    ok = sys:suspend(Server),
    try
        Fun()
    after
        ok = sys:resume(Server)
    end.
