%% The attempts to upload a fragment: which of them counts, when one is given up, and when the next one begins.
%%
%% Most cases play the governor themselves: the real one is there, but admits nothing, and its messages are sent by hand.
-module(rabbitmq_stream_s3_transfers_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-compile(nowarn_export_all).
-compile(export_all).

-define(TRANSFERS, rabbitmq_stream_s3_replica_reader_transfers).
-define(READER, rabbitmq_stream_s3_replica_reader).
-define(TIMEOUT, 20000).
suite() -> [{timetrap, {seconds, 60}}].

all() ->
    [{group, by_hand}, {group, s3}].

groups() ->
    [
        {by_hand, [], [
            waiting_for_admission_is_no_stall,
            an_admitted_attempt_is_given_up_at_its_deadline,
            the_deadline_grows_with_the_size,
            a_late_success_of_an_attempt_that_was_given_up_counts_and_ends_the_newer_one,
            a_late_failure_of_an_attempt_that_was_given_up_does_not_count,
            the_first_passing_failure_is_retried_at_once_and_the_next_ones_later,
            a_failure_that_needs_an_operator_is_retried_later,
            failures_are_counted_for_each_fragment,
            one_fragment_is_tried_for_all_while_the_store_is_away,
            what_shows_that_the_store_is_not_away_ends_the_wait,
            a_store_that_is_slow_or_busy_is_not_away,
            what_is_cancelled_is_heard_of_no_more,
            the_oldest_fragment_that_fails_is_the_one_that_stalls,
            other_messages_are_left_to_others
        ]},
        {s3, [], [
            a_stalled_upload_is_given_up_and_the_next_one_succeeds,
            an_upload_whose_reply_is_lost_is_listed_once,
            after_an_outage_everything_is_uploaded_although_one_fragment_was_tried,
            a_passing_error_is_not_worth_a_word_and_a_lasting_one_is_told_once,
            the_rate_is_changed_while_uploads_wait
        ]}
    ].

%% One byte a second, and the bucket in debt: nothing is admitted.
init_per_group(by_hand, Config) ->
    Started = start_world(fs, Config, #{max_transfer_bytes_per_sec => 1, max_transfer_burst_bytes => 1, task_retry_delay_ms => 1000}),
    ok = rabbitmq_stream_s3_governor:submit(fun() -> ok end, 1 bsl 40, ?config(keeper, Started), in_debt),
    Started;
init_per_group(s3, Config) ->
    start_world(s3, Config, #{
        transfer_deadline_ms => 300, persist_interval_ms => 50, upload_retry_delay_ms => 10, upload_retry_delay_max_ms => 100
    }).

start_world(Store, Config, Env) ->
    Dir = filename:join(?config(priv_dir, Config), Store),
    Keeper = stream_s3_keeper:start(fun() -> stream_s3_world:start(#{store => Store, dir => Dir, env => Env}) end),
    World = stream_s3_keeper:value(Keeper),
    [{keeper, Keeper}, {world, World}, {bucket, stream_s3_world:bucket(World)} | Config].

end_per_group(_Group, Config) ->
    stream_s3_keeper:stop(?config(keeper, Config), fun stream_s3_world:stop/1).

init_per_testcase(Case, Config) ->
    [{stream, atom_to_binary(Case)}, {logs, stream_s3_logs:start()} | Config].

end_per_testcase(_Case, Config) ->
    ok = stream_s3_logs:stop(?config(logs, Config)),
    stream_s3_world:set(#{transfer_deadline_ms => 300}).

%% --- by hand ---------------------------------------------------------------------------------------------------------

waiting_for_admission_is_no_stall(_Config) ->
    ok = stream_s3_world:set(#{transfer_deadline_ms => 1}),
    T = ?TRANSFERS:submit(ref, "nowhere", meta(0), ?TRANSFERS:new(<<"s">>)),
    ?assertMatch(#{in_flight := 1, bytes := 1000, stalled := none}, ?TRANSFERS:info(T)),
    %% Far longer than the deadline.
    receive
        Message -> error(Message)
    after 50 -> ok
    end.

an_admitted_attempt_is_given_up_at_its_deadline(_Config) ->
    {T0, [_]} = submitted(),
    {none, T1} = admit(T0),
    {{failed, ref, timeout, _, 1}, T2} = ?TRANSFERS:handle(next_message(), T1),
    ?assertMatch(#{in_flight := 1, stalled := {0, timeout}}, ?TRANSFERS:info(T2)).

the_deadline_grows_with_the_size(_Config) ->
    ok = stream_s3_world:set(#{transfer_deadline_ms => 1000}),
    [
        begin
            T0 = ?TRANSFERS:submit(ref, "nowhere", meta(0, Size), ?TRANSFERS:new(<<"s">>)),
            {none, T1} = admit(T0),
            ?assert(abs(erlang:read_timer(deadline(T1)) - Expected) < 900, Size),
            ?TRANSFERS:cancel_all(T1)
        end
     || {Size, Expected} <- [{1, 1000}, {64 bsl 20, 1000}, {256 bsl 20, 4000}, {1 bsl 30, 16000}]
    ].

a_late_success_of_an_attempt_that_was_given_up_counts_and_ends_the_newer_one(_Config) ->
    {T0, [Old]} = submitted(),
    {none, T1} = admit(T0),
    {{failed, ref, timeout, _, 1}, T2} = ?TRANSFERS:handle(next_message(), T1),
    T3 = ?TRANSFERS:retry(ref, "nowhere", meta(0), T2),
    [New] = attempts(T3) -- [Old],
    {{stored, ref, 7, #{size := 1000}, 1}, T4} = ?TRANSFERS:handle({transfer_result, Old, {ok, 7}}, T3),
    ?assertMatch(#{in_flight := 0, bytes := 0, stalled := none}, ?TRANSFERS:info(T4)),
    %% The governor, which had it in its queue, says so.
    ?assertEqual({transfer_result, New, {error, cancelled}}, next_message_but_of(Old)),
    ?assertEqual({none, T4}, ?TRANSFERS:handle({transfer_result, New, {error, cancelled}}, T4)),
    ?assertEqual({none, T4}, ?TRANSFERS:handle({transfer_result, New, {ok, 8}}, T4)).

a_late_failure_of_an_attempt_that_was_given_up_does_not_count(_Config) ->
    {T0, [Old]} = submitted(),
    {none, T1} = admit(T0),
    {{failed, ref, timeout, _, 1}, T2} = ?TRANSFERS:handle(next_message(), T1),
    T3 = ?TRANSFERS:retry(ref, "nowhere", meta(0), T2),
    [New] = attempts(T3) -- [Old],
    {none, T4} = ?TRANSFERS:handle({transfer_result, Old, {error, cancelled}}, T3),
    {{failed, ref, {http, 500}, _, 2}, _} = ?TRANSFERS:handle({transfer_result, New, {error, {http, 500}}}, T4).

the_first_passing_failure_is_retried_at_once_and_the_next_ones_later(_Config) ->
    {T0, [First]} = submitted(),
    {{failed, ref, connection, _, 1}, T1} = ?TRANSFERS:handle({transfer_result, First, {error, connection}}, T0),
    T2 = ?TRANSFERS:retry(ref, "nowhere", meta(0), T1),
    [Second] = attempts(T2),
    {{failed, ref, connection, _, 2}, T3} = ?TRANSFERS:handle({transfer_result, Second, {error, connection}}, T2),
    T4 = ?TRANSFERS:retry(ref, "nowhere", meta(0), T3),
    ?assertEqual([], attempts(T4)),
    ?assert(erlang:read_timer(deadline(T4)) =< 1000),
    {none, T5} = ?TRANSFERS:handle(next_message(), T4),
    ?assertMatch([_], attempts(T5)).

a_failure_that_needs_an_operator_is_retried_later(_Config) ->
    {T0, [First]} = submitted(),
    {{failed, ref, {http, 403}, _, 1}, T1} = ?TRANSFERS:handle({transfer_result, First, {error, {http, 403}}}, T0),
    T2 = ?TRANSFERS:retry(ref, "nowhere", meta(0), T1),
    ?assertEqual([], attempts(T2)),
    Left = erlang:read_timer(deadline(T2)),
    ?assert(Left > 400 andalso Left =< 1000, Left).

failures_are_counted_for_each_fragment(_Config) ->
    {T0, [First]} = submitted(),
    T1 = ?TRANSFERS:submit(other, "nowhere", meta(10), T0),
    [Other] = attempts(T1) -- [First],
    {{failed, ref, connection, _, 1}, T2} = ?TRANSFERS:handle({transfer_result, First, {error, connection}}, T1),
    {{failed, other, connection, _, 1}, T3} = ?TRANSFERS:handle({transfer_result, Other, {error, connection}}, T2),
    T4 = ?TRANSFERS:retry(ref, "nowhere", meta(0), T3),
    [Second] = attempts(T4),
    {{stored, ref, 1, _, 1}, T5} = ?TRANSFERS:handle({transfer_result, Second, {ok, 1}}, T4),
    ?assertMatch(#{in_flight := 1, stalled := {10, connection}}, ?TRANSFERS:info(T5)).

one_fragment_is_tried_for_all_while_the_store_is_away(_Config) ->
    T0 = lists:foldl(fun submit/2, ?TRANSFERS:new(<<"s">>), [10, 0, 20]),
    T1 = away(10, connection, T0),
    %% Those that are under way end by themselves.
    T2 = fail(20, {http, 503}, T1),
    ?assertEqual([0], under_way(T2)),
    T3 = submit(30, fail(0, connection, T2)),
    ?assertEqual([], under_way(T3)),
    ?assertMatch(#{in_flight := 4, stalled := {0, connection}}, ?TRANSFERS:info(T3)),
    ?assertEqual([10], [Ref || {Ref, Fragment} <- maps:to_list(element(3, T3)), timer(Fragment) =/= none]),
    T4 = next_attempt(10, T3),
    ?assertEqual([10], under_way(T4)),
    T5 = next_attempt(10, fail(10, {http, 500}, T4)),
    ?assertEqual([10], under_way(T5)),
    {{stored, 10, 7, _, 4}, T6} = ?TRANSFERS:handle({transfer_result, attempt_of(10, T5), {ok, 7}}, T5),
    ?assertEqual([0, 20, 30], under_way(T6)),
    %% And each of them is counted and tried by itself again.
    T7 = fail(0, connection, T6),
    ?assertEqual([20, 30], under_way(T7)),
    ?assertEqual([0, 20, 30], under_way(next_attempt(0, T7))).

what_shows_that_the_store_is_not_away_ends_the_wait(_Config) ->
    Away = submit(30, fail(20, connection, away(10, connection, lists:foldl(fun submit/2, ?TRANSFERS:new(<<"s">>), [0, 10, 20])))),
    ?assertEqual([0], under_way(Away)),
    %% One that has been under way all the time.
    {{stored, 0, 7, _, 0}, Stored} = ?TRANSFERS:handle({transfer_result, attempt_of(0, Away), {ok, 7}}, Away),
    ?assertEqual([20, 30], under_way(Stored)),
    %% The one that is tried, in ways that are its own affair.
    [
        ?assertEqual([0, 20, 30], under_way(fail(10, Reason, next_attempt(10, Away))), Reason)
     || Reason <- [{http, 403}, {corrupt_chunk, 10}, {open_failed, <<"f">>, enoent}, timeout]
    ],
    ?assertEqual([0, 20, 30], under_way(?TRANSFERS:give_up(10, Away))),
    %% Others' are not.
    ?assertEqual([], under_way(?TRANSFERS:give_up(0, Away))),
    ?assertEqual([], under_way(fail(0, {http, 403}, Away))).

a_store_that_is_slow_or_busy_is_not_away(_Config) ->
    [
        begin
            T0 = away(0, Reason, submit(10, submit(0, ?TRANSFERS:new(<<"s">>)))),
            T1 = submit(20, fail(10, connection, T0)),
            ?assertEqual([10, 20], under_way(T1), Reason)
        end
     || Reason <- [throttled, timeout, {http, 403}, {http, 429}, {http, 408}]
    ].

submit(First, T) -> ?TRANSFERS:submit(First, "nowhere", meta(First), T).

%% It has failed so often that the others wait, where that is what they do.
away(Ref, Reason, T) ->
    fail(Ref, Reason, again(Ref, Reason, again(Ref, Reason, T))).

again(Ref, Reason, T0) ->
    T = fail(Ref, Reason, T0),
    case lists:member(Ref, under_way(T)) of
        true -> T;
        false -> next_attempt(Ref, T)
    end.

fail(Ref, Reason, T) ->
    {{failed, Ref, Reason, Meta, _}, Failed} = ?TRANSFERS:handle({transfer_result, attempt_of(Ref, T), {error, Reason}}, T),
    ?TRANSFERS:retry(Ref, "nowhere", Meta, Failed).

%% As if its time had come.
next_attempt(Ref, T) ->
    #{Ref := Fragment} = element(3, T),
    {none, Next} = ?TRANSFERS:handle({timeout, timer(Fragment), {next_attempt, Ref}}, T),
    Next.

what_is_cancelled_is_heard_of_no_more(_Config) ->
    {T0, [First]} = submitted(),
    {none, T1} = admit(T0),
    T2 = ?TRANSFERS:cancel_all(T1),
    ?assertMatch(#{in_flight := 0}, ?TRANSFERS:info(T2)),
    ?assertEqual({transfer_result, First, {error, cancelled}}, next_message()),
    ?assertEqual({none, T2}, ?TRANSFERS:handle({transfer_result, First, {error, cancelled}}, T2)),
    ?assertEqual({none, T2}, ?TRANSFERS:handle({transfer_admitted, First}, T2)).

the_oldest_fragment_that_fails_is_the_one_that_stalls(_Config) ->
    {T0, [_]} = submitted(),
    T1 = ?TRANSFERS:submit(second, "nowhere", meta(10), T0),
    T2 = ?TRANSFERS:submit(third, "nowhere", meta(20), T1),
    T3 = lists:foldl(
        fun({Ref, Reason}, T) ->
            [Attempt] = [A || {A, R} <- attempts_with_refs(T), R =:= Ref],
            {{failed, Ref, Reason, _, 1}, Next} = ?TRANSFERS:handle({transfer_result, Attempt, {error, Reason}}, T),
            Next
        end,
        T2,
        [{third, connection}, {second, {http, 403}}]
    ),
    ?assertMatch(#{in_flight := 3, stalled := {10, {http, 403}}}, ?TRANSFERS:info(T3)).

other_messages_are_left_to_others(_Config) ->
    {T, _} = submitted(),
    [?assertEqual({not_mine, T}, ?TRANSFERS:handle(M, T)) || M <- [drain, {timeout, make_ref(), persist}, {'EXIT', self(), x}]].

meta(First) ->
    meta(First, 1000).

meta(First, Size) ->
    #{
        first_offset => First, next_offset => First + 10, first_timestamp => 1, last_timestamp => 2, size => Size,
        num_chunks => 1, spans => [{0, 8, 8 + Size}]
    }.

submitted() ->
    T = ?TRANSFERS:submit(ref, "nowhere", meta(0), ?TRANSFERS:new(<<"s">>)),
    {T, attempts(T)}.

%% In place of the governor.
admit(T) ->
    [Attempt] = attempts(T),
    ?TRANSFERS:handle({transfer_admitted, Attempt}, T).

%% What the governor would know: element 4 of the state is the map of attempts, element 3 that of fragments.
attempts_with_refs(T) -> maps:to_list(element(4, T)).
attempts(T) -> [A || {A, _} <- attempts_with_refs(T)].
under_way(T) -> lists:usort([Ref || {_, Ref} <- attempts_with_refs(T)]).
attempt_of(Ref, T) -> hd([A || {A, R} <- attempts_with_refs(T), R =:= Ref]).
deadline(T) ->
    [Fragment] = maps:values(element(3, T)),
    timer(Fragment).
timer(Fragment) -> element(tuple_size(Fragment), Fragment).

next_message() ->
    receive
        Message -> Message
    after ?TIMEOUT -> error(no_message)
    end.

next_message_but_of(Attempt) ->
    case next_message() of
        {transfer_result, Attempt, _} -> next_message_but_of(Attempt);
        Message -> Message
    end.

%% --- against a server that misbehaves --------------------------------------------------------------------------------

a_stalled_upload_is_given_up_and_the_next_one_succeeds(Config) ->
    Writer = start_stream(Config),
    ok = fault(Config, "\"do\": \"stall\"", 1),
    write_and_settle(Config, Writer),
    ?assertMatch(#{transfers_failed := 1, transfers_completed := 1}, counters(Config)).

an_upload_whose_reply_is_lost_is_listed_once(Config) ->
    Writer = start_stream(Config),
    ok = fault(Config, "\"do\": \"lost_reply\"", 1),
    write_and_settle(Config, Writer),
    {Pointer, _} = stream_s3_world:pointer(?config(stream, Config)),
    {_, Fragments} = stream_s3_bucket:fragments(?config(bucket, Config), ?config(stream, Config), Pointer),
    ?assertMatch([_], Fragments),
    %% The first one is there as well, and nobody's.
    Keys = [K || K <- stream_s3_bucket:keys(?config(bucket, Config), ?config(stream, Config)), filename:extension(K) =:= <<".fragment">>],
    ?assertMatch([_, _], Keys).

after_an_outage_everything_is_uploaded_although_one_fragment_was_tried(Config) ->
    Writer = start_stream(Config),
    ok = fault(Config, "\"do\": \"status\", \"status\": 503", 10),
    [
        begin
            ok = stream_s3_osiris:write_chunk(Writer, [<<"one">>]),
            ok = ?READER:force_cut(?config(stream, Config))
        end
     || _ <- lists:seq(1, 8)
    ],
    stream_s3_world:settle(?config(stream, Config), stream_s3_osiris:next_offset(Writer), ?TIMEOUT),
    ?assertMatch(#{transfers_failed := 10, transfers_completed := 8}, counters(Config)).

a_passing_error_is_not_worth_a_word_and_a_lasting_one_is_told_once(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    ok = fault(Config, "\"do\": \"status\", \"status\": 500", 1),
    write_and_settle(Config, Writer),
    ?assertEqual([], told(Config)),
    ok = fault(Config, "\"do\": \"status\", \"status\": 403, \"code\": \"AccessDenied\"", 10),
    write_and_settle(Config, Writer),
    ?assertEqual(
        [
            {warning, <<"stream ", Stream/binary, ": uploading fails and is tried again: "
                "the store refuses access (HTTP 403): check the credentials and the bucket's policy">>},
            {notice, <<"stream ", Stream/binary, ": uploading succeeds again">>}
        ],
        told(Config)
    ).

the_rate_is_changed_while_uploads_wait(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    ok = rabbitmq_stream_s3:set_transfer_rate(1, 1),
    %% Larger than the burst: the first one is let through, and leaves a debt.
    write_and_settle(Config, Writer),
    ok = stream_s3_osiris:write_chunk(Writer, [<<"three">>]),
    ok = ?READER:force_cut(Stream),
    ?assertEqual({error, timeout}, ?READER:await_offset(Stream, 3, 100)),
    ?assertMatch(
        {error, <<"max_transfer_bytes_per_sec must be unlimited or an integer from 1 to ", _/binary>>},
        rabbitmq_stream_s3:set_transfer_rate(0, undefined)
    ),
    ?assertMatch({error, <<"max_transfer_burst_bytes is set", _/binary>>}, rabbitmq_stream_s3:set_transfer_rate(unlimited, 5)),
    ok = rabbitmq_stream_s3:set_transfer_rate(unlimited, undefined),
    ?assertEqual(ok, ?READER:await_offset(Stream, 3, ?TIMEOUT)),
    ?assertEqual({unlimited, undefined}, {
        rabbitmq_stream_s3_config:get(max_transfer_bytes_per_sec), rabbitmq_stream_s3_config:get(max_transfer_burst_bytes)
    }).

told(Config) ->
    Start = <<"stream ", (?config(stream, Config))/binary, ":">>,
    [Line || {Level, Text} = Line <- stream_s3_logs:lines(?config(logs, Config)),
        Level =:= warning orelse Level =:= notice, string:prefix(Text, Start) =/= nomatch].

start_stream(Config) ->
    Writer = stream_s3_osiris:start_stream(stream_s3_osiris:config(?config(stream, Config))),
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    ok = ?READER:await_offset(?config(stream, Config), 0),
    Writer.

write_and_settle(Config, Writer) ->
    ok = stream_s3_osiris:write_chunk(Writer, [<<"one">>, <<"two">>]),
    stream_s3_world:settle(?config(stream, Config), stream_s3_osiris:next_offset(Writer), ?TIMEOUT).

counters(Config) ->
    rabbitmq_stream_s3_counters:get({stream, ?config(stream, Config)}).

%% The next so many uploads of fragments of this stream meet this, in the words of s3local.
fault(Config, Do, Count) ->
    #{endpoint := Endpoint} = stream_s3_world:store(?config(world, Config)),
    Json = io_lib:format(
        "{\"op\": \"put\", \"key\": \"rabbitmq/stream/~ts/data/*\", \"count\": ~b, ~ts}", [?config(stream, Config), Count, Do]
    ),
    Request = {binary_to_list(Endpoint) ++ "/-/faults", [], "application/json", unicode:characters_to_binary(Json)},
    {ok, _} = application:ensure_all_started(inets),
    {ok, {{_, Status, _}, _, _}} = httpc:request(post, Request, [], []),
    ?assertEqual(2, Status div 100),
    ok.
