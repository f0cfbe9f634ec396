%% The term contract of the pure part, through the library: shapes, whole effect lists, and that states are values.
-module(rabbitmq_stream_s3_core_SUITE).

-include_lib("stdlib/include/assert.hrl").
-include("rabbitmq_stream_s3.hrl").

-compile([export_all, nowarn_export_all]).

-define(CORE, rabbitmq_stream_s3_replica_reader_core).
-define(ASSEMBLY, rabbitmq_stream_s3_fragment_assembly).
-define(STREAM, <<"__st1_1">>).
-define(DIR, "/data/stream/__st1_1").
-define(REFERENCE, {resource, <<"/">>, queue, <<"st1">>}).
-define(EPOCH, 7).
-define(INTERVAL, 2000).

suite() ->
    [{timetrap, {minutes, 2}}].

all() ->
    [{group, assembly}, {group, effects}, {group, values}].

groups() ->
    [
        {assembly, [parallel], [
            a_fragment_is_described_by_its_chunks,
            the_chunk_that_reaches_the_target_cuts_the_fragment,
            chunks_behind_a_cut_come_back_as_they_were,
            one_chunk_more_is_taken_after_the_cut_when_asked_for,
            a_batch_of_any_length_is_taken_in_one_call,
            a_span_ends_where_the_segment_changes_or_bytes_are_skipped,
            a_missing_chunk_raises_the_gap_and_leaves_the_state_usable,
            without_an_expected_offset_chunks_come_in_any_order,
            index_records_are_twenty_bytes_a_chunk_and_count_from_the_first_data_byte,
            a_fragment_has_at_most_262144_chunks,
            a_fragment_has_at_most_2_to_the_32_bytes,
            an_empty_assembly_has_no_metadata,
            keys_of_the_header_map_that_nobody_needs_are_ignored
        ]},
        {effects, [parallel], [
            options_left_out_come_from_the_configuration,
            the_first_cut_submits_and_arms_the_timer_and_the_second_only_submits,
            callers_may_leave_added_keys_of_a_description_out,
            a_fragment_ahead_of_its_turn_waits,
            the_threshold_starts_a_persist_with_one_edit_a_fragment,
            a_persisted_manifest_is_published_in_the_order_of_the_contract,
            waiters_are_told_after_range_broadcast_and_retention,
            edits_that_come_during_a_persist_wait_for_the_next,
            a_tick_persists_once_the_interval_has_passed,
            every_transient_reason_is_resubmitted_at_once,
            every_other_reason_is_resubmitted_later_with_the_reason,
            a_conflict_reinitializes_and_nothing_else,
            not_found_stops_a_stream_that_was_persisted_and_reinitializes_another,
            the_first_failure_retries_at_once_and_the_second_arms_the_timer,
            a_failure_during_retention_arms_the_timer,
            a_group_moves_its_entries_and_holds_the_persist_up,
            a_group_that_cannot_be_stored_is_given_up_until_the_next_fragment,
            groups_of_groups_reach_up_to_mega_groups,
            retention_needs_no_announcement,
            an_announced_retention_holds_persists_up,
            a_failed_retention_arms_the_timer_and_starts_no_persist,
            an_empty_tier_takes_any_first_fragment,
            a_fragment_that_does_not_follow_is_never_applied,
            answers_to_what_is_not_known_change_nothing,
            the_state_is_shown_with_the_keys_of_the_contract,
            references_are_unique_on_the_node
        ]},
        {values, [], [
            an_older_state_answers_as_before,
            forked_histories_do_not_touch_each_other,
            any_term_comes_back_as_it_was,
            literals_outlive_the_module_they_came_from,
            states_move_between_processes_and_outlive_their_maker,
            states_are_freed_with_their_last_reference,
            schedulers_share_a_state
        ]}
    ].

%% --- assembly --------------------------------------------------------------------------------------------------------

a_fragment_is_described_by_its_chunks(_) ->
    S = add([chunk(10, 3, 100), chunk(13, 2, 50)], ?ASSEMBLY:new(1000, 10)),
    ?assertEqual(
        #{
            first_offset => 10,
            first_timestamp => 1010,
            last_timestamp => 1013,
            next_offset => 15,
            size => 48 + 100 + 48 + 50,
            num_chunks => 2,
            spans => [{0, 1008, 1008 + 100 + 48}, {0, 1308, 1308 + 50 + 48}]
        },
        contract_keys(?ASSEMBLY:metadata(S))
    ),
    ?assert(is_map(?ASSEMBLY:info(S))),
    ?assertNot(?ASSEMBLY:is_cut(S)).

the_chunk_that_reaches_the_target_cuts_the_fragment(_) ->
    Below = ?ASSEMBLY:add_chunk(chunk(0, 1, 99), ?ASSEMBLY:new(100)),
    ?assertNot(?ASSEMBLY:is_cut(Below)),
    ?assert(?ASSEMBLY:is_cut(?ASSEMBLY:add_chunk(chunk(1, 1, 1), Below))),
    %% data_size counts towards the target, headers do not.
    ?assertNot(?ASSEMBLY:is_cut(?ASSEMBLY:add_chunk(chunk(1, 1, 0), Below))).

chunks_behind_a_cut_come_back_as_they_were(_) ->
    Chunks = [chunk(N, 1, 60) || N <- lists:seq(0, 4)],
    {S, Rest} = ?ASSEMBLY:add_chunks(Chunks, ?ASSEMBLY:new(100, 0)),
    ?assert(?ASSEMBLY:is_cut(S)),
    ?assertEqual(lists:nthtail(2, Chunks), Rest),
    {Same, Rest} = ?ASSEMBLY:add_chunks(Rest, S),
    ?assertEqual(?ASSEMBLY:metadata(S), ?ASSEMBLY:metadata(Same)),
    ?assertMatch({_, []}, ?ASSEMBLY:add_chunks([], S)),
    ?assertMatch(#{next_offset := 2}, ?ASSEMBLY:metadata(S)).

one_chunk_more_is_taken_after_the_cut_when_asked_for(_) ->
    S = add([chunk(0, 1, 100), chunk(1, 1, 100)], ?ASSEMBLY:new(100, 0)),
    ?assert(?ASSEMBLY:is_cut(S)),
    ?assertMatch(#{num_chunks := 2, next_offset := 2}, ?ASSEMBLY:metadata(S)).

a_batch_of_any_length_is_taken_in_one_call(_) ->
    [
        begin
            Chunks = [chunk(N, 1, 10) || N <- lists:seq(0, Length - 1)],
            {S, []} = ?ASSEMBLY:add_chunks(Chunks, ?ASSEMBLY:new(1 bsl 30, 0)),
            ?assertEqual(?ASSEMBLY:metadata(add(Chunks, ?ASSEMBLY:new(1 bsl 30, 0))), ?ASSEMBLY:metadata(S)),
            ?assertEqual(?ASSEMBLY:index_records(add(Chunks, ?ASSEMBLY:new(1 bsl 30, 0))), ?ASSEMBLY:index_records(S))
        end
     || Length <- [1, 63, 64, 65, 255, 256, 257, 512, 1000, 4097]
    ].

a_span_ends_where_the_segment_changes_or_bytes_are_skipped(_) ->
    Chunk = fun(Id, Segment, From, To) ->
        (chunk(Id, 1, 10))#{segment_offset := Segment, position := From, next_position := To}
    end,
    S = add([Chunk(5, 0, 8, 100), Chunk(6, 0, 100, 200), Chunk(7, 7, 8, 58), Chunk(8, 7, 60, 70)], ?ASSEMBLY:new(100)),
    ?assertMatch(#{spans := [{0, 8, 200}, {7, 8, 58}, {7, 60, 70}], size := 252}, ?ASSEMBLY:metadata(S)).

a_missing_chunk_raises_the_gap_and_leaves_the_state_usable(_) ->
    S = ?ASSEMBLY:new(1000, 10),
    ?assertError({gap, 10, 11}, ?ASSEMBLY:add_chunk(chunk(11, 1, 1), S)),
    ?assertError({gap, 10, 9}, ?ASSEMBLY:add_chunk(chunk(9, 1, 1), S)),
    S1 = ?ASSEMBLY:add_chunk(chunk(10, 5, 1), S),
    ?assertError({gap, 15, 10}, ?ASSEMBLY:add_chunk(chunk(10, 5, 1), S1)),
    ?assertError({gap, 16, 17}, ?ASSEMBLY:add_chunks([chunk(15, 1, 1), chunk(17, 1, 1)], S1)),
    ?assertMatch(#{next_offset := 16}, ?ASSEMBLY:metadata(?ASSEMBLY:add_chunk(chunk(15, 1, 1), S1))).

without_an_expected_offset_chunks_come_in_any_order(_) ->
    S = add([chunk(50, 1, 1), chunk(3, 2, 1), chunk(3, 2, 1)], ?ASSEMBLY:new(1000)),
    ?assertMatch(#{first_offset := 50, next_offset := 5, num_chunks := 3}, ?ASSEMBLY:metadata(S)).

index_records_are_twenty_bytes_a_chunk_and_count_from_the_first_data_byte(_) ->
    S = add([(chunk(10, 3, 100))#{timestamp := -5}, chunk(13, 2, 50)], ?ASSEMBLY:new(1000, 10)),
    ?assertEqual(<<10:64, -5:64/signed, 0:32, 13:64, 1013:64/signed, 148:32>>, ?ASSEMBLY:index_records(S)),
    ?assertEqual(2 * ?INDEX_RECORD_B, byte_size(?ASSEMBLY:index_records(S))),
    ?assertEqual(<<>>, ?ASSEMBLY:index_records(?ASSEMBLY:new(1))).

a_fragment_has_at_most_262144_chunks(_) ->
    Chunks = [chunk(N, 1, 0) || N <- lists:seq(0, 262144)],
    {S, Rest} = ?ASSEMBLY:add_chunks(Chunks, ?ASSEMBLY:new(1 bsl 40, 0)),
    ?assert(?ASSEMBLY:is_cut(S)),
    ?assertMatch([#{chunk_id := 262144}], Rest),
    ?assertEqual(262144 * ?INDEX_RECORD_B, byte_size(?ASSEMBLY:index_records(S))),
    ?assertError(badarg, ?ASSEMBLY:add_chunk(hd(Rest), S)).

a_fragment_has_at_most_2_to_the_32_bytes(_) ->
    Large = fun(Id, Size) -> (chunk(Id, 1, 1))#{position := 8, next_position := 8 + Size, segment_offset := Id} end,
    Half = ?ASSEMBLY:add_chunk(Large(0, 1 bsl 31), ?ASSEMBLY:new(1 bsl 40, 0)),
    {Full, []} = ?ASSEMBLY:add_chunks([Large(1, 1 bsl 31)], Half),
    ?assertMatch(#{size := 16#100000000}, ?ASSEMBLY:metadata(Full)),
    TooLarge = Large(1, (1 bsl 31) + 1),
    {Cut, [TooLarge]} = ?ASSEMBLY:add_chunks([TooLarge], Half),
    ?assert(?ASSEMBLY:is_cut(Cut)),
    ?assertMatch(#{next_offset := 1}, ?ASSEMBLY:metadata(Cut)),
    ?assertError(badarg, ?ASSEMBLY:add_chunk(TooLarge, Half)).

an_empty_assembly_has_no_metadata(_) ->
    ?assertError(badarg, ?ASSEMBLY:metadata(?ASSEMBLY:new(1))),
    ?assertError(badarg, ?ASSEMBLY:metadata(?ASSEMBLY:new(1, 0))),
    ?assert(is_map(?ASSEMBLY:info(?ASSEMBLY:new(1)))).

keys_of_the_header_map_that_nobody_needs_are_ignored(_) ->
    Header = (chunk(0, 1, 10))#{
        epoch => 3, type => 0, num_entries => 1, trailer_size => 0, filter_size => 16, header_data => <<0:384>>, <<"x">> => y
    },
    ?assertMatch(#{next_offset := 1}, ?ASSEMBLY:metadata(?ASSEMBLY:add_chunk(Header, ?ASSEMBLY:new(1, 0)))),
    %% More keys than a small map has.
    Large = maps:merge(maps:from_list([{N, N} || N <- lists:seq(1, 100)]), Header),
    ?assertMatch(#{next_offset := 1}, ?ASSEMBLY:metadata(?ASSEMBLY:add_chunk(Large, ?ASSEMBLY:new(1, 0)))).

%% --- effects ---------------------------------------------------------------------------------------------------------

options_left_out_come_from_the_configuration(_) ->
    Opts = #{stream => ?STREAM, dir => ?DIR, epoch => 1, reference => ref},
    {S, []} = ?CORE:init(#manifest{}, Opts),
    {S1, Ref, Effects} = ?CORE:fragment_cut(meta(0), S),
    ?assertEqual([{submit_transfer, Ref, ?STREAM, ?DIR, meta(0)}, {start_persist_timer, ?INTERVAL}], Effects),
    {_, Applied} = cut_and_complete(lists:seq(1, 5), element(1, ?CORE:transfer_complete(Ref, 1, S1))),
    ?assertMatch([{start_persist, _, 1, ref, 0, [_, _, _, _, _]}], [E || E <- Applied, element(1, E) =:= start_persist]).

the_first_cut_submits_and_arms_the_timer_and_the_second_only_submits(_) ->
    {S1, R1, E1} = ?CORE:fragment_cut(meta(0), new()),
    ?assertEqual([{submit_transfer, R1, ?STREAM, ?DIR, meta(0)}, {start_persist_timer, ?INTERVAL}], E1),
    {_, R2, E2} = ?CORE:fragment_cut(meta(1), S1),
    ?assertEqual([{submit_transfer, R2, ?STREAM, ?DIR, meta(1)}], E2).

callers_may_leave_added_keys_of_a_description_out(_) ->
    Short = maps:with([first_offset, first_timestamp, last_timestamp, next_offset, size, num_chunks, spans], meta(0)),
    {_, Ref, Effects} = ?CORE:fragment_cut(Short, new()),
    ?assertMatch([{submit_transfer, Ref, ?STREAM, ?DIR, Short}, _], Effects),
    Long = Short#{whatever => self()},
    {_, Ref2, Effects2} = ?CORE:fragment_cut(Long, new()),
    ?assertMatch([{submit_transfer, Ref2, ?STREAM, ?DIR, Long}, _], Effects2).

a_fragment_ahead_of_its_turn_waits(_) ->
    {S, [R0, R1, R2]} = cut(0, 2, new()),
    {S1, E1} = ?CORE:transfer_complete(R2, uid(2), S),
    ?assertEqual([], E1),
    {S2, E2} = ?CORE:transfer_complete(R1, uid(1), S1),
    ?assertEqual([], E2),
    ?assertEqual(#manifest{}, ?CORE:manifest(S2)),
    {S3, E3} = ?CORE:transfer_complete(R0, uid(0), S2),
    ?assertMatch([{start_persist, _, ?EPOCH, ?REFERENCE, 0, [_, _, _]}], E3),
    ?assertEqual(tier(0, 2, 0), ?CORE:manifest(S3)),
    ?assertEqual(#manifest{}, ?CORE:persisted_manifest(S3)).

the_threshold_starts_a_persist_with_one_edit_a_fragment(_) ->
    {S, E1} = cut_and_complete([0], new()),
    ?assertEqual([{start_persist_timer, ?INTERVAL}], E1),
    {S1, E2} = cut_and_complete([1], S),
    ?assertEqual([{start_persist_timer, ?INTERVAL}], E2),
    {S2, E3} = cut_and_complete([2], S1),
    ?assertEqual([{start_persist, tier(0, 2, 0), ?EPOCH, ?REFERENCE, 0, [append(0), append(1), append(2)]}], E3),
    ?assertEqual(tier(0, 2, 0), lists:foldl(fun apply_edit/2, #manifest{}, [append(N) || N <- [0, 1, 2]])),
    ?assertEqual(#manifest{}, ?CORE:persisted_manifest(S2)).

a_persisted_manifest_is_published_in_the_order_of_the_contract(_) ->
    {S, _} = cut_and_complete([0, 1, 2], new()),
    {S1, Effects} = ?CORE:persist_complete(1, S),
    ?assertEqual(
        [
            {update_range, 0, 30},
            {broadcast, ?STREAM, [append(0), append(1), append(2)]},
            {evaluate_retention, ?STREAM, ?DIR},
            cancel_persist_timer
        ],
        Effects
    ),
    ?assertEqual(tier(0, 2, 1), ?CORE:persisted_manifest(S1)),
    ?assertEqual(tier(0, 2, 1), ?CORE:manifest(S1)).

waiters_are_told_after_range_broadcast_and_retention(_) ->
    {S, _} = cut_and_complete([0, 1, 2], new()),
    {S1, []} = ?CORE:await_offset(30, {self(), a}, S),
    {S2, []} = ?CORE:await_offset(31, {self(), b}, S1),
    {S3, []} = ?CORE:await_offset(1, {self(), c}, S2),
    {S4, Effects} = ?CORE:persist_complete(1, S3),
    ?assertMatch(
        [
            {update_range, 0, 30},
            {broadcast, _, _},
            {evaluate_retention, ?STREAM, ?DIR},
            cancel_persist_timer,
            {reply_waiters, [{{_, a}, ok}, {{_, c}, ok}]}
        ],
        Effects
    ),
    %% What is persisted is answered at once.
    ?assertEqual({S4, [{reply_waiters, [{late, ok}]}]}, same_state(S4, ?CORE:await_offset(30, late, S4))),
    ?assertMatch(#{waiters := 1}, ?CORE:format_state(S4)),
    ?assertMatch({_, [{reply_waiters, [{now, ok}]}]}, ?CORE:await_offset(0, now, new())).

edits_that_come_during_a_persist_wait_for_the_next(_) ->
    {S, _} = cut_and_complete([0, 1, 2], new()),
    {S1, Meanwhile} = cut_and_complete([3, 4, 5], S),
    ?assertEqual([{start_persist_timer, ?INTERVAL}], lists:usort(Meanwhile)),
    {S2, Effects} = ?CORE:persist_complete(9, S1),
    ?assertEqual(
        {start_persist, tier(0, 5, 9), ?EPOCH, ?REFERENCE, 9, [append(3), append(4), append(5)]},
        lists:last(Effects)
    ),
    {S3, _} = cut_and_complete([6], S2),
    {_, Effects3} = ?CORE:persist_complete(10, S3),
    ?assertEqual({start_persist_timer, ?INTERVAL}, lists:last(Effects3)).

a_tick_persists_once_the_interval_has_passed(_) ->
    Now = erlang:system_time(millisecond),
    ?assertMatch({_, []}, ?CORE:tick(Now + 10 * ?INTERVAL, new())),
    {S, _} = cut_and_complete([0], new()),
    ?assertMatch({_, []}, ?CORE:tick(Now, S)),
    {S1, Effects} = ?CORE:tick(Now + 10 * ?INTERVAL, S),
    ?assertEqual([{start_persist, tier(0, 0, 0), ?EPOCH, ?REFERENCE, 0, [append(0)]}], Effects),
    ?assertMatch({_, []}, ?CORE:tick(Now + 100 * ?INTERVAL, S1)).

every_transient_reason_is_resubmitted_at_once(_) ->
    {S, [Ref]} = cut(0, 0, new()),
    [
        ?assertEqual(
            {Reason, [{resubmit_transfer, Ref, ?STREAM, ?DIR, meta(0)}]},
            {Reason, element(2, ?CORE:transfer_failed(Ref, Reason, S))}
        )
     || Reason <-
            [{http, Status} || Status <- [408, 429 | lists:seq(500, 599)]] ++
                [timeout, connection, throttled, clock_skew, expired_token, write_conflict]
    ].

every_other_reason_is_resubmitted_later_with_the_reason(_) ->
    {S, [Ref]} = cut(0, 0, new()),
    [
        ?assertEqual(
            {Reason, [{resubmit_transfer_delayed, Ref, ?STREAM, ?DIR, meta(0), Reason}]},
            {Reason, element(2, ?CORE:transfer_failed(Ref, Reason, S))}
        )
     || Reason <- [
            {http, 400}, {http, 403}, {http, 404}, {http, 409}, {http, 412}, {http, 301}, {http, 200}, {http, -500}, {http, 65536 + 500},
            {http, <<"500">>}, {http, 500, x}, checksum_mismatch, {corrupt_chunk, 17}, {corrupt_chunk, x},
            {open_failed, <<"/x">>, enoent}, {open_failed, x, <<"y">>}, {panic, <<"text">>}, {panic, [1 | 2]}, cancelled,
            whatever, {a, b, c}, [], #{}, <<255>>, 1.5, self(), fun() -> ok end, "timeout", <<"timeout">>
        ]
    ].

a_conflict_reinitializes_and_nothing_else(_) ->
    {S, _} = cut_and_complete([0, 1, 2], new()),
    ?assertMatch({_, [reinitialize]}, ?CORE:persist_failed(conflict, S)),
    ?assertMatch({_, [reinitialize]}, ?CORE:persist_failed(conflict, persisting_at_revision(4))).

not_found_stops_a_stream_that_was_persisted_and_reinitializes_another(_) ->
    {S, _} = cut_and_complete([0, 1, 2], new()),
    ?assertMatch({_, [reinitialize]}, ?CORE:persist_failed(not_found, S)),
    ?assertMatch({_, [stop]}, ?CORE:persist_failed(not_found, persisting_at_revision(4))),
    {Loaded, _} = cut_and_complete([3, 4, 5], new(tier(0, 2, 8))),
    ?assertMatch({_, [stop]}, ?CORE:persist_failed(not_found, Loaded)).

the_first_failure_retries_at_once_and_the_second_arms_the_timer(_) ->
    {S, _} = cut_and_complete([0, 1, 2, 3], new()),
    {S1, E1} = ?CORE:persist_failed({error, whatever}, S),
    %% On a fresh snapshot: the fragment that came meanwhile is in it.
    ?assertEqual([{start_persist, tier(0, 3, 0), ?EPOCH, ?REFERENCE, 0, [append(N) || N <- [0, 1, 2, 3]]}], E1),
    {S2, E2} = ?CORE:persist_failed(timeout, S1),
    ?assertEqual([{start_persist_timer, ?INTERVAL}], E2),
    {S3, [{start_persist, _, _, _, _, [_, _, _, _]}]} = ?CORE:tick(later(), S2),
    {S4, E4} = ?CORE:persist_failed(timeout, S3),
    ?assertEqual([{start_persist_timer, ?INTERVAL}], E4),
    {S5, [{start_persist, _, _, _, _, _}]} = ?CORE:tick(later(), S4),
    {S6, _} = ?CORE:persist_complete(1, S5),
    %% A success begins anew.
    {S7, _} = cut_and_complete([4, 5, 6], S6),
    ?assertMatch({_, [{start_persist, _, _, _, 1, [_, _, _]}]}, ?CORE:persist_failed(x, S7)).

a_failure_during_retention_arms_the_timer(_) ->
    {S, _} = cut_and_complete([0, 1, 2], new()),
    S1 = ?CORE:retention_started(S),
    ?assertMatch({_, [{start_persist_timer, ?INTERVAL}]}, ?CORE:persist_failed(x, S1)).

a_group_moves_its_entries_and_holds_the_persist_up(_) ->
    {S, E} = cut_and_complete([0, 1, 2, 3], new(#manifest{}, #{rebalance_threshold => 4, persist_threshold => 4})),
    Entries = entries(0, 3),
    ?assertEqual(
        [{upload_group, ?STREAM, ?MANIFEST_KIND_GROUP, Entries, 0, 4 * ?ENTRY_B}, {start_persist_timer, ?INTERVAL}],
        lists:nthtail(length(E) - 2, E)
    ),
    ?assert(?CORE:rebalance_in_flight(S)),
    ?assertMatch({_, []}, ?CORE:tick(later(), S)),
    {S1, E1} = ?CORE:group_upload_complete(77, S),
    Group = ?ENTRY(0, 1000, 1035, ?MANIFEST_KIND_GROUP, 0, 77),
    Moved = (tier(0, 3, 0))#manifest{entries = Group},
    Move = #edit{
        first_offset = 0, first_timestamp = 1000, first_last_timestamp = 1005, size = 0, entries = Group, pos = 0, len = 4 * ?ENTRY_B
    },
    ?assertEqual([{start_persist, Moved, ?EPOCH, ?REFERENCE, 0, [append(N) || N <- [0, 1, 2, 3]] ++ [Move]}], E1),
    ?assertNot(?CORE:rebalance_in_flight(S1)),
    %% All of it is in the snapshot, so nothing has moved since.
    ?assertMatch(
        {_, [{update_range, 0, 40}, {broadcast, _, _}, {evaluate_retention, _, _}, cancel_persist_timer]},
        ?CORE:persist_complete(1, S1)
    ).

a_group_that_cannot_be_stored_is_given_up_until_the_next_fragment(_) ->
    {S, _} = cut_and_complete([0, 1, 2], new(#manifest{}, #{rebalance_threshold => 3})),
    ?assert(?CORE:rebalance_in_flight(S)),
    {S1, E1} = ?CORE:group_upload_failed({http, 503}, S),
    ?assertEqual([{upload_group, ?STREAM, ?MANIFEST_KIND_GROUP, entries(0, 2), 0, 3 * ?ENTRY_B}], E1),
    {S2, E2} = ?CORE:group_upload_failed({http, 403}, S1),
    ?assertEqual([{start_persist, tier(0, 2, 0), ?EPOCH, ?REFERENCE, 0, [append(N) || N <- [0, 1, 2]]}], E2),
    ?assertNot(?CORE:rebalance_in_flight(S2)),
    {S3, _, _} = ?CORE:fragment_cut(meta(3), S2),
    ?assertNot(?CORE:rebalance_in_flight(S3)),
    {S4, E4} = cut_and_complete([3], S2),
    ?assert(?CORE:rebalance_in_flight(S4)),
    ?assertMatch([{upload_group, ?STREAM, 1, _, 0, 102}, {start_persist_timer, _}], E4).

groups_of_groups_reach_up_to_mega_groups(_) ->
    Opts = #{rebalance_threshold => 2, persist_threshold => 1000000},
    {S, Kinds} = lists:foldl(
        fun(N, {S0, Kinds0}) ->
            {S1, Effects} = cut_and_complete([N], S0),
            {S2, More} = store_groups(Effects, S1),
            {S2, Kinds0 ++ More}
        end,
        {new(#manifest{}, Opts), []},
        lists:seq(0, 15)
    ),
    ?assertEqual([1, 2, 3], lists:usort(Kinds)),
    #manifest{entries = Entries, total_size = 1600, first_offset = 0, next_offset = 160} = ?CORE:manifest(S),
    ?ENTRY(0, 1000, 1075, ?MANIFEST_KIND_MEGA_GROUP, 0, _, Second) = Entries,
    ?ENTRY(80, 1080, 1155, ?MANIFEST_KIND_MEGA_GROUP, 0, _) = Second.

retention_needs_no_announcement(_) ->
    S = new(tier(0, 4, 3)),
    Edit = drop(2, tier(0, 4, 3)),
    {S1, Effects} = ?CORE:retention_complete(Edit, S),
    ?assertEqual([{start_persist_timer, ?INTERVAL}], Effects),
    ?assertEqual(tier(2, 4, 3), ?CORE:manifest(S1)),
    ?assertEqual(tier(0, 4, 3), ?CORE:persisted_manifest(S1)),
    {S2, [{start_persist, Persisting, _, _, 3, [Edit]}]} = ?CORE:tick(later(), S1),
    ?assertEqual(tier(2, 4, 3), Persisting),
    ?assertMatch({_, [{update_range, 20, 50}, {broadcast, ?STREAM, [Edit]} | _]}, ?CORE:persist_complete(4, S2)).

an_announced_retention_holds_persists_up(_) ->
    S = ?CORE:retention_started(new(tier(0, 4, 3))),
    {S1, E1} = cut_and_complete([5, 6, 7], S),
    ?assertEqual([{start_persist_timer, ?INTERVAL}], lists:usort(E1)),
    ?assertMatch({_, []}, ?CORE:tick(later(), S1)),
    {S2, E2} = ?CORE:retention_complete(drop(1, tier(0, 4, 3)), S1),
    ?assertMatch([{start_persist, _, _, _, 3, [_, _, _, _]}], E2),
    ?assertEqual(tier(1, 7, 3), ?CORE:manifest(S2)),
    ?assertMatch(#{retention_in_flight := true}, ?CORE:format_state(S1)),
    ?assertMatch(#{retention_in_flight := false}, ?CORE:format_state(S2)).

a_failed_retention_arms_the_timer_and_starts_no_persist(_) ->
    S = ?CORE:retention_started(new(tier(0, 4, 3))),
    ?assertMatch({_, []}, ?CORE:retention_failed(x, S)),
    {S1, _} = cut_and_complete([5, 6, 7], S),
    ?assertMatch({_, [{start_persist_timer, ?INTERVAL}]}, ?CORE:retention_failed(x, S1)).

an_empty_tier_takes_any_first_fragment(_) ->
    {S, _} = cut_and_complete([100], new(#manifest{first_offset = 5, next_offset = 5, revision = 2})),
    ?assertEqual(tier(100, 100, 2), ?CORE:manifest(S)).

a_fragment_that_does_not_follow_is_never_applied(_) ->
    {S, Ref, _} = ?CORE:fragment_cut(meta(7), new(tier(0, 4, 1))),
    {S1, Effects} = ?CORE:transfer_complete(Ref, 1, S),
    ?assertEqual([], Effects),
    ?assertEqual(tier(0, 4, 1), ?CORE:manifest(S1)).

answers_to_what_is_not_known_change_nothing(_) ->
    {S, [Ref | _]} = cut(0, 1, new()),
    {S1, _} = ?CORE:transfer_complete(Ref, 5, S),
    State = everything(S1),
    [
        begin
            {S2, Effects} = Event(S1),
            ?assertEqual({I, []}, {I, Effects}),
            ?assertEqual({I, State}, {I, everything(S2)})
        end
     || {I, Event} <- lists:enumerate([
            fun(X) -> ?CORE:transfer_complete(Ref, 6, X) end,
            fun(X) -> ?CORE:transfer_failed(Ref, timeout, X) end,
            fun(X) -> ?CORE:transfer_complete(make_ref(), 6, X) end,
            fun(X) -> ?CORE:transfer_failed(make_ref(), timeout, X) end,
            fun(X) -> ?CORE:transfer_complete({any, "term"}, 6, X) end,
            fun(X) -> ?CORE:transfer_complete(-1, 6, X) end,
            fun(X) -> ?CORE:transfer_complete(1 bsl 70, 6, X) end,
            fun(X) -> ?CORE:group_upload_complete(6, X) end,
            fun(X) -> ?CORE:group_upload_failed(timeout, X) end,
            fun(X) -> ?CORE:persist_complete(6, X) end,
            fun(X) -> ?CORE:persist_failed(whatever, X) end
        ])
    ].

the_state_is_shown_with_the_keys_of_the_contract(_) ->
    {S, [R0, R1, R2, _]} = cut(0, 3, new()),
    {S1, _} = ?CORE:transfer_complete(R0, 1, S),
    {S2, _} = ?CORE:transfer_complete(R2, 1, S1),
    {S3, _} = ?CORE:await_offset(99, me, S2),
    ?assertMatch(
        #{
            manifest_first_offset := 0,
            manifest_next_offset := 10,
            manifest_total_size := 100,
            persisted_next_offset := 0,
            transfers_in_flight := 2,
            transfers_pending_order := 1,
            since_persist := 1,
            in_persist_count := 0,
            persist_in_flight := false,
            last_persist_ts := Ts,
            rebalance_in_flight := false,
            retention_in_flight := false,
            waiters := 1
        } when is_integer(Ts),
        ?CORE:format_state(S3)
    ),
    {S4, _} = ?CORE:transfer_complete(R1, 1, S3),
    ?assertMatch(
        #{since_persist := 0, in_persist_count := 3, persist_in_flight := true, transfers_in_flight := 1, transfers_pending_order := 0},
        ?CORE:format_state(S4)
    ).

references_are_unique_on_the_node(_) ->
    Self = self(),
    Pids = [
        spawn_link(fun() ->
            S = new(),
            Self ! {self(), [element(2, ?CORE:fragment_cut(meta(0), S)) || _ <- lists:seq(1, 1000)]}
        end)
     || _ <- lists:seq(1, 8)
    ],
    Refs = lists:append([receive {Pid, Got} -> Got end || Pid <- Pids]),
    ?assertEqual(8000, length(lists:usort(Refs))).

%% --- values ----------------------------------------------------------------------------------------------------------

an_older_state_answers_as_before(_) ->
    Opts = #{rebalance_threshold => 3, persist_threshold => 2},
    History = lists:foldl(
        fun(N, [S | _] = Before) ->
            {S1, Effects} = cut_and_complete([N], S),
            {S2, _} = store_groups(Effects, S1),
            [element(1, ?CORE:persist_complete(N + 1, S2)), S2, S1 | Before]
        end,
        [new(#manifest{}, Opts)],
        lists:seq(0, 40)
    ),
    Views = [everything(S) || S <- History],
    erlang:garbage_collect(),
    ?assertEqual(Views, [everything(S) || S <- History]),
    %% The same event on the same state has the same answer.
    [
        ?assertEqual(element(2, ?CORE:tick(later(), S)), element(2, ?CORE:tick(later(), S)))
     || S <- History
    ].

forked_histories_do_not_touch_each_other(_) ->
    {Base, [R0]} = cut(0, 0, new(#manifest{}, #{persist_threshold => 1})),
    {Left, [{start_persist, L, _, _, _, _}]} = ?CORE:transfer_complete(R0, 1, Base),
    {Right, [{start_persist, R, _, _, _, _}]} = ?CORE:transfer_complete(R0, 2, Base),
    ?assertEqual(?ENTRY(0, 1000, 1005, 0, 100, 1), L#manifest.entries),
    ?assertEqual(?ENTRY(0, 1000, 1005, 0, 100, 2), R#manifest.entries),
    {Left1, _} = ?CORE:persist_complete(5, Left),
    {Right1, [{start_persist, _, _, _, 0, _}]} = ?CORE:persist_failed(x, Right),
    ?assertMatch(#manifest{revision = 5, next_offset = 10}, ?CORE:persisted_manifest(Left1)),
    ?assertEqual(#manifest{}, ?CORE:persisted_manifest(Right1)),
    ?assertEqual(#manifest{}, ?CORE:manifest(Base)),
    A = ?ASSEMBLY:add_chunk(chunk(0, 1, 10), ?ASSEMBLY:new(100, 0)),
    ?assertNotEqual(
        ?ASSEMBLY:metadata(?ASSEMBLY:add_chunk(chunk(1, 1, 10), A)),
        ?ASSEMBLY:metadata(?ASSEMBLY:add_chunk(chunk(1, 9, 10), A))
    ),
    ?assertMatch(#{num_chunks := 1}, ?ASSEMBLY:metadata(A)).

any_term_comes_back_as_it_was(_) ->
    Table = ets:new(t, [public]),
    Port = open_port({spawn, "cat"}, [binary]),
    Large = lists:duplicate(1000, {binary:copy(<<"x">>, 100), [1.5, -1 bsl 200], #{a => b}}),
    Captured = self(),
    Terms = [
        atom, '', <<>>, <<1:3>>, 0, -(1 bsl 300), 1.0e308, -0.0, [], [a | b], {}, #{}, make_ref(), self(), Table,
        ets:whereis(kernel_config), Port, fun lists:map/2, fun() -> Captured end, Large, binary:copy(<<1>>, 1 bsl 20),
        binary:part(binary:copy(<<2>>, 1000), 10, 900), atomics:new(1, []), persistent_term, ?ASSEMBLY:new(1), new(),
        maps:from_list([{N, N} || N <- lists:seq(1, 1000)]), #{#{} => {[]}}, "text", 'ünïcode'
    ],
    [
        begin
            {S, []} = ?CORE:init(#manifest{}, (options(#{}))#{stream := T, dir := T, reference := T, persist_threshold := 1}),
            {S1, []} = ?CORE:await_offset(5, {self(), T}, S),
            {S2, Ref, [{submit_transfer, Ref, A, B, Meta}, _]} = ?CORE:fragment_cut((meta(0))#{extra => T}, S1),
            {_, [{resubmit_transfer_delayed, Ref, _, _, Meta, C}]} = ?CORE:transfer_failed(Ref, {odd, T}, S2),
            {S3, [{start_persist, _, _, D, _, _}]} = ?CORE:transfer_complete(Ref, 1, S2),
            erlang:garbage_collect(),
            {_, [_, {broadcast, E, _}, {evaluate_retention, F, G}, _, {reply_waiters, [{{_, H}, ok}]}]} =
                ?CORE:persist_complete(1, S3),
            ?assert(lists:all(fun(X) -> X =:= T end, [A, B, element(2, C), D, E, F, G, H, maps:get(extra, Meta)]))
        end
     || T <- Terms
    ],
    %% They still work, not only look the same.
    {S4, []} = ?CORE:await_offset(50, {Table, Port, fun() -> {works, Captured} end}, new(tier(0, 0, 1))),
    {S5, _} = cut_and_complete([1, 2, 3], S4),
    {S6, _} = cut_and_complete([4], S5),
    {S7, _} = ?CORE:persist_complete(2, S6),
    {S8, [_]} = ?CORE:tick(later(), S7),
    {_, Effects} = ?CORE:persist_complete(3, S8),
    {reply_waiters, [{{Table1, Port1, Fun}, ok}]} = lists:last(Effects),
    true = ets:insert(Table1, {x, 1}),
    true = port_command(Port1, <<"hello">>),
    receive
        {Port, {data, <<"hello">>}} -> ok
    end,
    ?assertEqual({works, self()}, Fun()),
    port_close(Port).

literals_outlive_the_module_they_came_from(_) ->
    Module = stream_s3_core_literal,
    Forms = [
        {attribute, 1, module, Module},
        {attribute, 1, export, [{get, 0}]},
        {function, 1, get, 0, [{clause, 1, [], [], [erl_parse:abstract({literal, <<"of a module">>, [1, 2, 3]})]}]}
    ],
    {ok, Module, Beam} = compile:forms(Forms, []),
    {module, Module} = code:load_binary(Module, "none", Beam),
    {S, []} = ?CORE:init(#manifest{}, (options(#{}))#{dir := Module:get()}),
    true = code:delete(Module),
    _ = code:purge(Module),
    [erlang:garbage_collect(Pid) || Pid <- processes()],
    _ = [lists:duplicate(100, {N, <<"of another module">>}) || N <- lists:seq(1, 10000)],
    {_, Ref, Effects} = ?CORE:fragment_cut(meta(0), S),
    ?assertMatch([{submit_transfer, Ref, ?STREAM, {literal, <<"of a module">>, [1, 2, 3]}, _}, _], Effects).

states_move_between_processes_and_outlive_their_maker(_) ->
    Self = self(),
    {Pid, Mon} = spawn_monitor(fun() ->
        {S, _} = cut_and_complete([0, 1, 2], new()),
        {S1, []} = ?CORE:await_offset(10, {self(), make_ref()}, S),
        Self ! {self(), S1, ?ASSEMBLY:new(1, 7)}
    end),
    receive {'DOWN', Mon, process, Pid, Reason} -> ?assertEqual(normal, Reason) end,
    {State, Assembly} = receive {Pid, S2, A} -> {S2, A} end,
    erlang:garbage_collect(),
    ?assertEqual(tier(0, 2, 0), ?CORE:manifest(State)),
    ?assertMatch({_, [_, _, _, _, {reply_waiters, [{{Pid, _}, ok}]}]}, ?CORE:persist_complete(1, State)),
    ?assertMatch(#{next_offset := 8}, ?ASSEMBLY:metadata(?ASSEMBLY:add_chunk(chunk(7, 1, 1), Assembly))).

%% One round makes 50,000 states that are held at once, some hundred megabytes together, and 50,000 that are dropped as soon as they
%% are made. Terms live in the memory of the VM, the states around them in that of the library, which counts as resident only.
states_are_freed_with_their_last_reference(_) ->
    Round = fun() ->
        in_a_process(fun() ->
            Blob = lists:seq(1, 200),
            {Base, _} = cut_and_complete(lists:seq(0, 50), new(#manifest{}, #{persist_threshold => 1000})),
            Kept = [
                begin
                    {S, []} = ?CORE:await_offset(1000000 + N, {N, Blob}, Base),
                    element(1, ?CORE:fragment_cut((meta(51))#{blob => Blob}, S))
                end
             || N <- lists:seq(1, 50000)
            ],
            _ = [?ASSEMBLY:add_chunk(chunk(N, 1, 1), ?ASSEMBLY:new(1)) || N <- lists:seq(1, 50000)],
            Full = memory_mb(),
            ?assertMatch(#{waiters := 1}, ?CORE:format_state(lists:last(Kept))),
            Full
        end)
    end,
    {VmBefore, _} = memory_mb(),
    {VmFull, ResidentFull} = Round(),
    ?assert(VmFull - VmBefore > 100, {VmBefore, VmFull}),
    %% A monitor tells of the end of a process before its heap is gone.
    VmAfter = falls_below(VmBefore + 20),
    _ = [Round() || _ <- lists:seq(1, 4)],
    VmEnd = falls_below(VmBefore + 20),
    {_, ResidentEnd} = memory_mb(),
    ct:pal("VM: ~b MB before, ~b MB with 50,000 states, ~b MB after them, ~b MB after four rounds more; resident: ~b MB, ~b MB", [
        VmBefore, VmFull, VmAfter, VmEnd, ResidentFull, ResidentEnd
    ]),
    ?assert(ResidentEnd < ResidentFull + 100, {ResidentFull, ResidentEnd}).

falls_below(Mb) -> falls_below(Mb, 500).

falls_below(Mb, Tries) ->
    case memory_mb() of
        {Vm, _} when Vm < Mb -> Vm;
        {Vm, _} when Tries =:= 0 -> error({still, Vm, limit, Mb});
        _ ->
            receive after 20 -> falls_below(Mb, Tries - 1) end
    end.

schedulers_share_a_state(_) ->
    {S, [R0, R1, _]} = cut(0, 2, new(#manifest{}, #{persist_threshold => 2})),
    {Waiting, []} = ?CORE:await_offset(20, {self(), lists:seq(1, 100)}, S),
    Work = fun() ->
        [
            begin
                {S1, _} = ?CORE:transfer_complete(R0, N, Waiting),
                {S2, _} = ?CORE:transfer_complete(R1, N, S1),
                {_, [{update_range, 0, 20}, _, _, _, {reply_waiters, [{{_, L}, ok}]}]} = ?CORE:persist_complete(N + 1, S2),
                100 = length(L)
            end
         || N <- lists:seq(0, 2000)
        ],
        done
    end,
    ?assertEqual(lists:duplicate(8, done), in_processes(lists:duplicate(8, Work))).

%% --- helpers ---------------------------------------------------------------------------------------------------------

%% Chunk `Id' of `Records' records; every chunk is 100 bytes away from where the one before it would end.
chunk(Id, Records, DataSize) ->
    #{
        chunk_id => Id,
        timestamp => 1000 + Id,
        num_records => Records,
        data_size => DataSize,
        position => 8 + Id * 100,
        next_position => 8 + Id * 100 + 48 + DataSize,
        segment_offset => 0,
        crc => 16#FFFFFFFF
    }.

add(Chunks, State) -> lists:foldl(fun ?ASSEMBLY:add_chunk/2, State, Chunks).

contract_keys(Meta) ->
    maps:with([first_offset, first_timestamp, last_timestamp, next_offset, size, num_chunks, spans], Meta).

new() -> new(#manifest{}).
new(Manifest) -> new(Manifest, #{}).
new(Manifest, Overrides) ->
    {State, []} = ?CORE:init(Manifest, options(Overrides)),
    State.

options(Overrides) ->
    maps:merge(
        #{
            stream => ?STREAM,
            dir => ?DIR,
            epoch => ?EPOCH,
            reference => ?REFERENCE,
            persist_threshold => 3,
            persist_interval_ms => ?INTERVAL,
            rebalance_threshold => 1024
        },
        Overrides
    ).

%% Fragment N has the records [10 N, 10 N + 10) and 100 bytes.
meta(N) ->
    #{
        first_offset => 10 * N,
        next_offset => 10 * N + 10,
        first_timestamp => 1000 + 10 * N,
        last_timestamp => 1005 + 10 * N,
        size => 100,
        num_chunks => 1,
        spans => [{0, 8, 108}]
    }.

entries(First, Last) ->
    << <<?ENTRY(10 * N, 1000 + 10 * N, 1005 + 10 * N, ?MANIFEST_KIND_FRAGMENT, 100, uid(N))/binary>> || N <- lists:seq(First, Last) >>.

uid(N) -> 16#FFFFFFFF - N.

%% The tier of the fragments First..Last.
tier(First, Last, Revision) ->
    #manifest{
        first_offset = 10 * First,
        first_timestamp = 1000 + 10 * First,
        first_last_timestamp = 1005 + 10 * First,
        next_offset = 10 * Last + 10,
        total_size = 100 * (Last - First + 1),
        revision = Revision,
        entries = entries(First, Last)
    }.

%% The edit that adds fragment N to the tier of 0..N-1.
append(N) ->
    #edit{
        first_offset = 0,
        first_timestamp = 1000,
        first_last_timestamp = 1005,
        next_offset = 10 * N + 10,
        size = 100,
        entries = entries(N, N),
        pos = N * ?ENTRY_B,
        len = 0
    }.

%% The edit that drops the oldest fragments.
drop(Count, #manifest{first_offset = First} = Manifest) ->
    N = First div 10 + Count,
    (rabbitmq_stream_s3_manifest:new_edit(Manifest))#edit{
        first_offset = 10 * N,
        first_timestamp = 1000 + 10 * N,
        first_last_timestamp = 1005 + 10 * N,
        size = -100 * Count,
        len = Count * ?ENTRY_B
    }.

apply_edit(Edit, Manifest) -> rabbitmq_stream_s3_manifest:apply_edit(Edit, Manifest).

cut(First, Last, State) ->
    lists:foldl(
        fun(N, {S, Refs}) ->
            {S1, Ref, _} = ?CORE:fragment_cut(meta(N), S),
            {S1, Refs ++ [Ref]}
        end,
        {State, []},
        lists:seq(First, Last)
    ).

%% The effects are those of the completions.
cut_and_complete(Ns, State) ->
    lists:foldl(
        fun(N, {S, Effects}) ->
            {S1, Ref, _} = ?CORE:fragment_cut(meta(N), S),
            {S2, More} = ?CORE:transfer_complete(Ref, uid(N), S1),
            {S2, Effects ++ More}
        end,
        {State, []},
        Ns
    ).

%% Stores the groups asked for, and those that this makes due; answers their kinds.
store_groups(Effects, State) ->
    case [Kind || {upload_group, _, Kind, _, _, _} <- Effects] of
        [] ->
            {State, []};
        [Kind] ->
            {State1, More} = ?CORE:group_upload_complete(Kind, State),
            {State2, Kinds} = store_groups(More, State1),
            {State2, [Kind | Kinds]}
    end.

persisting_at_revision(Revision) ->
    {S, _} = cut_and_complete([0, 1, 2], new()),
    {S1, _} = ?CORE:persist_complete(Revision, S),
    {S2, Effects} = cut_and_complete([3, 4, 5], S1),
    {start_persist, _, _, _, Revision, _} = lists:last(Effects),
    S2.

later() -> erlang:system_time(millisecond) + 1000 * ?INTERVAL.

everything(S) ->
    {?CORE:manifest(S), ?CORE:persisted_manifest(S), ?CORE:rebalance_in_flight(S), ?CORE:format_state(S)}.

%% Handles of equal states are not equal; what they say is.
same_state(Old, {New, Effects}) ->
    ?assertEqual(everything(Old), everything(New)),
    {Old, Effects}.

in_a_process(Fun) ->
    [Result] = in_processes([Fun]),
    Result.

in_processes(Funs) ->
    Pids = [spawn_monitor(fun() -> exit({answer, Fun()}) end) || Fun <- Funs],
    [
        receive
            {'DOWN', Mon, process, Pid, {answer, Answer}} -> Answer;
            {'DOWN', Mon, process, Pid, Reason} -> error(Reason)
        end
     || {Pid, Mon} <- Pids
    ].

%% Of the VM's own books, and of the process as the kernel sees it.
memory_mb() ->
    erlang:garbage_collect(),
    {ok, Text} = file:read_file("/proc/self/statm"),
    [_, Pages | _] = binary:split(Text, <<" ">>, [global]),
    {erlang:memory(total) bsr 20, binary_to_integer(Pages) * 4096 bsr 20}.
