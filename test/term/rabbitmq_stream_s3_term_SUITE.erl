%% Each shape that crosses between Erlang and the native library, both ways, as the contract writes it.
-module(rabbitmq_stream_s3_term_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").
-include("rabbitmq_stream_s3.hrl").

-compile(nowarn_export_all).
-compile(export_all).

-define(ASSEMBLY, rabbitmq_stream_s3_fragment_assembly).
-define(CORE, rabbitmq_stream_s3_replica_reader_core).
-define(MANIFEST, rabbitmq_stream_s3_manifest).
-define(NIF, rabbitmq_stream_s3_nif).
-define(STREAM, <<"stream_1">>).

all() ->
    [
        the_library_loads_from_a_folder_that_is_no_application,
        loading_the_module_again_is_refused_and_leaves_it_usable,
        an_assembly_is_a_value,
        an_assembly_that_expects_an_offset_raises_the_gap,
        an_assembly_that_expects_nothing_takes_chunks_as_they_come,
        many_chunks_stop_at_the_cut_and_the_rest_comes_back,
        more_chunks_than_a_call_takes_are_taken_by_one_call_of_the_face,
        spans_join_within_a_segment_and_index_records_count_from_the_first_data_byte,
        misuse_names_the_field,
        opaque_terms_come_back_as_they_are,
        submit_and_resubmit_carry_stream_dir_and_meta,
        completions_apply_in_cut_order_and_old_ones_change_nothing,
        a_persist_has_all_effects_in_their_shapes,
        a_failed_persist_answers_as_the_contract_says,
        a_rebalance_uploads_a_group_and_then_persists,
        retention_goes_through_the_core,
        an_older_state_stays_usable,
        the_state_can_be_shown,
        a_reset_is_persisted_at_once_or_with_the_first_fragment,
        configured_defaults_fill_in_what_options_leave_out,
        sizes_beyond_64_bits_survive,
        a_root_has_its_golden_bytes,
        a_group_has_its_golden_bytes,
        bytes_that_are_no_root_are_refused,
        edits_splice_and_raise_for_splice_and_total_alone,
        lookups_find_fragments_and_go_through_groups,
        retention_goes_through_groups,
        well_formed_manifests_are_told_from_others,
        decisions_take_and_answer_their_terms,
        every_reason_has_its_class,
        failures_tell_a_store_that_is_away_from_others,
        keys_are_those_of_the_contract,
        keys_are_told_apart_and_prefixes_end_in_a_slash,
        retention_and_garbage_take_and_answer_their_terms,
        a_call_takes_less_than_a_millisecond
    ].

%% --- helpers ---------------------------------------------------------------------------------------------------------

chunk(Id, Records, DataSize, Position) ->
    #{
        chunk_id => Id,
        timestamp => 1000 + Id,
        num_records => Records,
        data_size => DataSize,
        position => Position,
        next_position => Position + 48 + DataSize,
        segment_offset => 0,
        crc => 16#FFFFFFFF,
        %% osiris' header maps have more keys than are needed.
        epoch => 1
    }.

%% `Count' chunks of one record and ten bytes each.
chunks(From, Count) ->
    [chunk(Id, 1, 10, 8 + (Id - From) * 58) || Id <- lists:seq(From, From + Count - 1)].

meta(First, Next) ->
    #{
        first_offset => First,
        next_offset => Next,
        first_timestamp => 10 * First,
        last_timestamp => 10 * Next - 1,
        size => 100
    }.

options() ->
    #{
        stream => ?STREAM,
        dir => "/a dir",
        epoch => 7,
        reference => {resource, <<"/">>, queue, <<"q">>},
        persist_threshold => 2,
        persist_interval_ms => 500,
        rebalance_threshold => 4
    }.

started(Options) ->
    {S, []} = ?CORE:init(#manifest{}, Options),
    S.

%% A core to which fragments of ten offsets each have been added.
with_fragments(Count, Options) ->
    lists:foldl(
        fun(N, S0) ->
            {S1, Ref, _} = ?CORE:fragment_cut(meta(10 * N, 10 * N + 10), S0),
            {S2, _} = ?CORE:transfer_complete(Ref, N, S1),
            S2
        end,
        started(Options),
        lists:seq(0, Count - 1)
    ).

entry(N) ->
    ?ENTRY(10 * N, 100 * N, 100 * N + 99, ?MANIFEST_KIND_FRAGMENT, 100, N).

entries(From, To) ->
    <<<<(entry(N))/binary>> || N <- lists:seq(From, To)>>.

manifest(From, To) ->
    #manifest{
        first_offset = 10 * From,
        first_timestamp = 100 * From,
        first_last_timestamp = 100 * From + 99,
        next_offset = 10 * To + 10,
        total_size = 100 * (To - From + 1),
        revision = 5,
        entries = entries(From, To)
    }.

%% --- loading ---------------------------------------------------------------------------------------------------------

%% A library with threads is never unloaded under them: new code needs a restart of the node, and what runs goes on.
loading_the_module_again_is_refused_and_leaves_it_usable(_Config) ->
    Paths = [filename:dirname(code:which(Module)) || Module <- [?NIF, ?MODULE]],
    {ok, Peer, _Node} = peer:start_link(#{connection => standard_io, args => ["-pa" | Paths]}),
    peer:call(Peer, ?MODULE, load_again, []),
    peer:stop(Peer).

load_again() ->
    {ok, Governor} = ?NIF:governor_start(#{rate => unlimited, burst => 1, concurrency => 1, owner => self()}),
    {error, on_load_failure} = code:load_file(?NIF),
    _ = code:soft_purge(?NIF),
    ok = ?NIF:governor_submit(Governor, external, 1, self(), ref),
    receive
        {governor_run, ref} -> ?NIF:governor_finished(Governor, ref)
    after 10_000 -> error(dead)
    end,
    erlang:garbage_collect(),
    ?NIF:abi_version().

%% In a VM of its own: this one has loaded it already.
the_library_loads_from_a_folder_that_is_no_application(Config) ->
    Dir = filename:join(?config(priv_dir, Config), "no application"),
    ok = filelib:ensure_path(filename:join(Dir, "ebin")),
    ok = filelib:ensure_path(filename:join(Dir, "priv")),
    Beam = code:which(?NIF),
    {ok, _} = file:copy(Beam, filename:join([Dir, "ebin", filename:basename(Beam)])),
    Library = "rabbitmq_stream_s3_nif.so",
    ok = file:make_symlink(
        filename:join(code:priv_dir(rabbitmq_stream_s3), Library), filename:join([Dir, "priv", Library])
    ),
    {ok, Peer, _Node} = peer:start_link(#{connection => standard_io, args => ["-pa", filename:join(Dir, "ebin")]}),
    ?assertEqual(1, peer:call(Peer, ?NIF, abi_version, [])),
    peer:stop(Peer).

%% --- assembly --------------------------------------------------------------------------------------------------------

an_assembly_is_a_value(_Config) ->
    A0 = ?ASSEMBLY:new(1000),
    A1 = ?ASSEMBLY:add_chunk(chunk(0, 5, 10, 8), A0),
    Left = ?ASSEMBLY:add_chunk(chunk(5, 1, 20, 66), A1),
    Right = ?ASSEMBLY:add_chunk(chunk(5, 2, 30, 66), A1),
    ?assertMatch(#{num_chunks := 0, first_offset := undefined}, ?ASSEMBLY:info(A0)),
    ?assertMatch(#{next_offset := 5, num_chunks := 1}, ?ASSEMBLY:metadata(A1)),
    ?assertMatch(#{next_offset := 6, num_chunks := 2}, ?ASSEMBLY:metadata(Left)),
    ?assertMatch(#{next_offset := 7, num_chunks := 2}, ?ASSEMBLY:metadata(Right)),
    ?assertNot(?ASSEMBLY:is_cut(Right)),
    ?assertError(badarg, ?ASSEMBLY:metadata(A0)).

an_assembly_that_expects_an_offset_raises_the_gap(_Config) ->
    A = ?ASSEMBLY:new(1000, 5),
    ?assertError({gap, 5, 7}, ?ASSEMBLY:add_chunk(chunk(7, 1, 10, 8), A)),
    A1 = ?ASSEMBLY:add_chunk(chunk(5, 3, 10, 8), A),
    ?assertError({gap, 8, 9}, ?ASSEMBLY:add_chunks([chunk(9, 1, 10, 66)], A1)),
    ?assertError({gap, 8, 5}, ?ASSEMBLY:add_chunk(chunk(5, 3, 10, 8), A1)).

an_assembly_that_expects_nothing_takes_chunks_as_they_come(_Config) ->
    {A, []} = ?ASSEMBLY:add_chunks([chunk(7, 1, 10, 8), chunk(100, 4, 10, 66)], ?ASSEMBLY:new(1000)),
    ?assertMatch(#{first_offset := 7, next_offset := 104}, ?ASSEMBLY:metadata(A)).

many_chunks_stop_at_the_cut_and_the_rest_comes_back(_Config) ->
    Chunks = chunks(0, 10),
    {A, Rest} = ?ASSEMBLY:add_chunks(Chunks, ?ASSEMBLY:new(35, 0)),
    ?assert(?ASSEMBLY:is_cut(A)),
    ?assertEqual(lists:nthtail(4, Chunks), Rest),
    ?assertEqual({A, Rest}, {A, element(2, ?ASSEMBLY:add_chunks(Rest, A))}).

more_chunks_than_a_call_takes_are_taken_by_one_call_of_the_face(_Config) ->
    Chunks = chunks(0, 1000),
    {_, Rest} = ?NIF:assembly_add_chunks(Chunks, ?NIF:assembly_new(1 bsl 40, 0)),
    ?assertEqual(872, length(Rest)),
    {A, []} = ?ASSEMBLY:add_chunks(Chunks, ?ASSEMBLY:new(1 bsl 40, 0)),
    ?assertMatch(#{num_chunks := 1000, next_offset := 1000}, ?ASSEMBLY:metadata(A)).

spans_join_within_a_segment_and_index_records_count_from_the_first_data_byte(_Config) ->
    Chunks = [chunk(0, 2, 10, 1000), chunk(2, 3, 20, 1058), (chunk(5, 1, 30, 8))#{segment_offset := 5}],
    {A, []} = ?ASSEMBLY:add_chunks(Chunks, ?ASSEMBLY:new(1 bsl 40, 0)),
    ?assertEqual(
        #{
            first_offset => 0,
            first_timestamp => 1000,
            last_timestamp => 1005,
            next_offset => 6,
            size => 58 + 68 + 78,
            num_chunks => 3,
            spans => [{0, 1000, 1126}, {5, 8, 86}]
        },
        ?ASSEMBLY:metadata(A)
    ),
    Records = ?ASSEMBLY:index_records(A),
    ?assertEqual(3 * ?INDEX_RECORD_B, byte_size(Records)),
    ?assertEqual(<<0:64, 1000:64, 0:32, 2:64, 1002:64, 58:32, 5:64, 1005:64, 126:32>>, Records).

misuse_names_the_field(_Config) ->
    Texts = [
        {<<"chunk.crc: expected a non-negative integer below 2^32, got -1">>, fun() ->
            ?ASSEMBLY:add_chunk((chunk(0, 1, 1, 8))#{crc := -1}, ?ASSEMBLY:new(1))
        end},
        {<<"#manifest.next_offset: expected a non-negative integer below 2^64, got an_atom">>, fun() ->
            ?MANIFEST:encode_root(setelement(#manifest.next_offset, #manifest{}, an_atom))
        end},
        {<<"#manifest.entries: entries, byte 33: expected 34 bytes, got 33">>, fun() ->
            ?MANIFEST:encode_root(#manifest{entries = <<0:(33 * 8)>>})
        end},
        {<<"rebalance_threshold has to be at least 2">>, fun() ->
            ?CORE:init(#manifest{}, (options())#{rebalance_threshold := 1})
        end},
        {<<"fragment at 5 ends at 5">>, fun() -> ?CORE:fragment_cut(meta(5, 5), started(options())) end}
    ],
    [?assertEqual(Text, misuse_text(Call)) || {Text, Call} <- Texts],
    ?assertError(badarg, ?CORE:init(#manifest{}, maps:remove(stream, options()))),
    ?assertError(badarg, ?CORE:tick(now, started(options()))),
    ?assertError(badarg, ?CORE:tick(0, make_ref())).

%% The text as a shell would print it.
misuse_text(Call) ->
    try Call() of
        Other -> error({no_misuse, Other})
    catch
        error:badarg:Stack ->
            #{general := Text} = ?NIF:format_error(badarg, Stack),
            Text
    end.

%% --- core ------------------------------------------------------------------------------------------------------------

opaque_terms_come_back_as_they_are(_Config) ->
    Odd = #{
        fun_ => fun lists:map/2,
        closure => fun(X) -> {X, ?STREAM} end,
        pid => self(),
        port => hd(erlang:ports()),
        ref => make_ref(),
        resource => ?ASSEMBLY:new(1),
        big => 1 bsl 200,
        float => 1.5,
        list => [1, [2 | 3]],
        bits => <<1:3>>,
        binary => binary:copy(<<"x">>, 1000)
    },
    S0 = started((options())#{stream := {stream, Odd}, dir := {dir, Odd}, reference := {reference, Odd}}),
    Meta = maps:merge(meta(0, 10), Odd),
    {S1, Ref, [{submit_transfer, Ref, {stream, Odd}, {dir, Odd}, Meta}, _]} = ?CORE:fragment_cut(Meta, S0),
    {_, [{resubmit_transfer_delayed, Ref, _, _, Meta, {odd, Odd}}]} = ?CORE:transfer_failed(Ref, {odd, Odd}, S1),
    {S2, []} = ?CORE:await_offset(10, {from, Odd}, S1),
    erlang:garbage_collect(),
    {S3, _} = ?CORE:transfer_complete(Ref, 1, S2),
    {S4, [{start_persist, _, 7, {reference, Odd}, 0, [_]}]} = ?CORE:tick(1 bsl 50, S3),
    {_, Effects} = ?CORE:persist_complete(1, S4),
    ?assertEqual([{{from, Odd}, ok}], proplists:get_value(reply_waiters, Effects)),
    #{resource := Assembly} = Odd,
    ?assertMatch(#{num_chunks := 0}, ?ASSEMBLY:info(Assembly)).

submit_and_resubmit_carry_stream_dir_and_meta(_Config) ->
    Meta = meta(0, 10),
    {S, Ref, Effects} = ?CORE:fragment_cut(Meta, started(options())),
    ?assertEqual([{submit_transfer, Ref, ?STREAM, "/a dir", Meta}, {start_persist_timer, 500}], Effects),
    {_, Ref2, Effects2} = ?CORE:fragment_cut(meta(10, 20), S),
    ?assertEqual([{submit_transfer, Ref2, ?STREAM, "/a dir", meta(10, 20)}], Effects2),
    ?assertNotEqual(Ref, Ref2),
    Transient = [{http, 500}, {http, 503}, {http, 408}, {http, 429}, timeout, connection, throttled, clock_skew],
    [
        ?assertEqual({Reason, [{resubmit_transfer, Ref, ?STREAM, "/a dir", Meta}]}, {
            Reason, element(2, ?CORE:transfer_failed(Ref, Reason, S))
        })
     || Reason <- Transient ++ [expired_token, write_conflict]
    ],
    Permanent = [{http, 403}, {http, 400}, {corrupt_chunk, 3}, {open_failed, "f", enoent}, {panic, <<"p">>}, checksum_mismatch],
    [
        ?assertEqual({Reason, [{resubmit_transfer_delayed, Ref, ?STREAM, "/a dir", Meta, Reason}]}, {
            Reason, element(2, ?CORE:transfer_failed(Ref, Reason, S))
        })
     || Reason <- Permanent ++ [cancelled, whatever, {http, none}, #{a => map}]
    ].

completions_apply_in_cut_order_and_old_ones_change_nothing(_Config) ->
    {S1, Ref1, _} = ?CORE:fragment_cut(meta(0, 10), started(options())),
    {S2, Ref2, _} = ?CORE:fragment_cut(meta(10, 20), S1),
    {S3, []} = ?CORE:transfer_complete(Ref2, 2, S2),
    ?assertEqual(<<>>, (?CORE:manifest(S3))#manifest.entries),
    {S4, [{start_persist, Manifest, 7, {resource, _, _, _}, 0, Edits}]} = ?CORE:transfer_complete(Ref1, 16#FFFFFFFF, S3),
    ?assertEqual(
        #manifest{
            first_offset = 0,
            first_timestamp = 0,
            first_last_timestamp = 99,
            next_offset = 20,
            total_size = 200,
            revision = 0,
            entries = <<(?ENTRY(0, 0, 99, 0, 100, 16#FFFFFFFF))/binary, (?ENTRY(10, 100, 199, 0, 100, 2))/binary>>
        },
        Manifest
    ),
    ?assertEqual(
        [
            #edit{
                first_offset = 0,
                first_timestamp = 0,
                first_last_timestamp = 99,
                next_offset = 10,
                size = 100,
                entries = ?ENTRY(0, 0, 99, 0, 100, 16#FFFFFFFF),
                pos = 0,
                len = 0
            },
            #edit{
                first_offset = 0,
                first_timestamp = 0,
                first_last_timestamp = 99,
                next_offset = 20,
                size = 100,
                entries = ?ENTRY(10, 100, 199, 0, 100, 2),
                pos = 34,
                len = 0
            }
        ],
        Edits
    ),
    ?assertEqual(Manifest, lists:foldl(fun ?MANIFEST:apply_edit/2, #manifest{}, Edits)),
    [
        ?assertEqual({Old, []}, {Old, element(2, ?CORE:transfer_complete(Old, 3, S4))})
     || Old <- [Ref1, Ref2, 0, -1, 1 bsl 70, make_ref(), {a, tuple}, undefined, <<"bin">>]
    ],
    [?assertEqual([], element(2, ?CORE:transfer_failed(Old, timeout, S4))) || Old <- [Ref1, make_ref(), foo]].

a_persist_has_all_effects_in_their_shapes(_Config) ->
    S0 = with_fragments(2, options()),
    {S1, []} = ?CORE:await_offset(20, {self(), tag}, S0),
    {S2, Effects} = ?CORE:persist_complete(1, S1),
    Edits = [Edit || {broadcast, _, L} <- Effects, Edit <- L],
    ?assertEqual(
        [
            {update_range, 0, 20},
            {broadcast, ?STREAM, Edits},
            {evaluate_retention, ?STREAM, "/a dir"},
            cancel_persist_timer,
            {reply_waiters, [{{self(), tag}, ok}]}
        ],
        Effects
    ),
    ?assertMatch([#edit{next_offset = 10}, #edit{next_offset = 20}], Edits),
    ?assertMatch(#manifest{revision = 1, next_offset = 20}, ?CORE:persisted_manifest(S2)),
    {_, [{reply_waiters, [{now, ok}]}]} = ?CORE:await_offset(20, now, S2).

a_failed_persist_answers_as_the_contract_says(_Config) ->
    S = with_fragments(2, options()),
    {_, [reinitialize]} = ?CORE:persist_failed(conflict, S),
    {_, [reinitialize]} = ?CORE:persist_failed(not_found, S),
    {S1, _} = ?CORE:persist_complete(1, S),
    {_, [stop]} = ?CORE:persist_failed(not_found, S1),
    {S2, [{start_persist, _, 7, _, 0, [_, _]}]} = ?CORE:persist_failed({transient, #{op => put}}, S),
    {_, [{start_persist_timer, 500}]} = ?CORE:persist_failed(timeout, S2).

a_rebalance_uploads_a_group_and_then_persists(_Config) ->
    S0 = with_fragments(3, (options())#{persist_threshold := 100}),
    {S1, Ref, _} = ?CORE:fragment_cut(meta(30, 40), S0),
    {S2, Effects} = ?CORE:transfer_complete(Ref, 3, S1),
    [Upload] = [E || E <- Effects, element(1, E) =:= upload_group],
    {upload_group, ?STREAM, ?MANIFEST_KIND_GROUP, Entries, 0, Len} = Upload,
    ?assertEqual({4 * ?ENTRY_B, 4 * ?ENTRY_B}, {Len, byte_size(Entries)}),
    ?assert(?CORE:rebalance_in_flight(S2)),
    {_, [Upload]} = ?CORE:group_upload_failed({http, 503}, S2),
    {_, [Upload]} = ?CORE:group_upload_failed({transient, #{op => put, reason => timeout, message => <<>>}}, S2),
    {GivenUp, _} = ?CORE:group_upload_failed({http, 403}, S2),
    ?assertNot(?CORE:rebalance_in_flight(GivenUp)),
    {S3, _} = ?CORE:group_upload_complete(77, S2),
    ?assertEqual(?ENTRY(0, 0, 399, ?MANIFEST_KIND_GROUP, 0, 77), (?CORE:manifest(S3))#manifest.entries).

retention_goes_through_the_core(_Config) ->
    S0 = with_fragments(2, options()),
    {S1, _} = ?CORE:persist_complete(1, S0),
    S2 = ?CORE:retention_started(S1),
    ?assertMatch(#{retention_in_flight := true}, ?CORE:format_state(S2)),
    {Edit, [#fragment_ref{offset = 0, uid = 0, size = 100}]} =
        ?MANIFEST:evaluate_remote_retention(?CORE:persisted_manifest(S2), [{max_bytes, 100}], 0),
    {S3, _} = ?CORE:retention_complete(Edit, S2),
    ?assertMatch(#manifest{first_offset = 10, total_size = 100}, ?CORE:manifest(S3)),
    {S4, _} = ?CORE:retention_failed(timeout, S2),
    ?assertMatch(#{retention_in_flight := false}, ?CORE:format_state(S4)),
    ?assertError(badarg, ?CORE:retention_complete(Edit#edit{size = -1000}, S2)).

an_older_state_stays_usable(_Config) ->
    {S1, Ref, _} = ?CORE:fragment_cut(meta(0, 10), started(options())),
    {A, _} = ?CORE:transfer_complete(Ref, 1, S1),
    {B, _} = ?CORE:transfer_complete(Ref, 2, S1),
    ?assertEqual(?ENTRY(0, 0, 99, 0, 100, 1), (?CORE:manifest(A))#manifest.entries),
    ?assertEqual(?ENTRY(0, 0, 99, 0, 100, 2), (?CORE:manifest(B))#manifest.entries),
    ?assertMatch(#{transfers_in_flight := 1}, ?CORE:format_state(S1)).

the_state_can_be_shown(_Config) ->
    {S1, _, _} = ?CORE:fragment_cut(meta(20, 30), with_fragments(2, options())),
    {S2, []} = ?CORE:await_offset(20, me, S1),
    Shown = ?CORE:format_state(S2),
    ?assertMatch(
        #{
            manifest_first_offset := 0,
            manifest_next_offset := 20,
            manifest_total_size := 200,
            persisted_next_offset := 0,
            transfers_in_flight := 1,
            transfers_pending_order := 0,
            since_persist := 0,
            in_persist_count := 2,
            persist_in_flight := true,
            rebalance_in_flight := false,
            retention_in_flight := false,
            waiters := 1
        },
        Shown
    ),
    ?assert(abs(erlang:system_time(millisecond) - maps:get(last_persist_ts, Shown)) < 60_000).

a_reset_is_persisted_at_once_or_with_the_first_fragment(_Config) ->
    Old = manifest(0, 2),
    {S, [{start_persist, Empty, 7, _, 5, [Edit]}]} = ?CORE:init_reset(Old, 100, at_once, options()),
    ?assertMatch(#manifest{first_offset = 100, next_offset = 100, total_size = 0, entries = <<>>}, Empty),
    ?assertEqual(Empty#manifest{revision = 5}, ?MANIFEST:apply_edit(Edit, Old)),
    ?assertEqual(Old, ?CORE:persisted_manifest(S)),
    {Waits, []} = ?CORE:init_reset(Old, 100, with_first_fragment, options()),
    ?assertEqual(Old, ?CORE:persisted_manifest(Waits)),
    ?assertError(badarg, ?CORE:init_reset(Old, 100, sometimes, options())).

configured_defaults_fill_in_what_options_leave_out(_Config) ->
    Given = maps:without([persist_threshold, persist_interval_ms, rebalance_threshold], options()),
    _ = application:load(rabbitmq_stream_s3),
    ok = application:set_env(rabbitmq_stream_s3, persist_interval_ms, 1234),
    try
        {_, _, Effects} = ?CORE:fragment_cut(meta(0, 10), started(Given)),
        ?assertEqual([{start_persist_timer, 1234}], tl(Effects))
    after
        application:unset_env(rabbitmq_stream_s3, persist_interval_ms)
    end.

%% --- manifest --------------------------------------------------------------------------------------------------------

sizes_beyond_64_bits_survive(_Config) ->
    [
        begin
            M = (manifest(0, 0))#manifest{total_size = Size, revision = 0},
            ?assertEqual({ok, M}, ?MANIFEST:decode_root(?MANIFEST:encode_root(M))),
            ?assertEqual(M, ?CORE:manifest(element(1, ?CORE:init(M, options())))),
            E = (?MANIFEST:new_edit(M))#edit{size = -Size},
            ?assertEqual(M#manifest{total_size = 0}, ?MANIFEST:apply_edit(E, M))
        end
     || Size <- [0, (1 bsl 63) - 1, 1 bsl 63, (1 bsl 64) - 1, 1 bsl 64, (1 bsl 70) - 1]
    ],
    ?assertError(badarg, ?MANIFEST:encode_root(#manifest{total_size = 1 bsl 70})),
    ?assertError(badarg, ?MANIFEST:encode_root(#manifest{total_size = -1})).

a_root_has_its_golden_bytes(_Config) ->
    M = #manifest{
        first_offset = 10,
        first_timestamp = -2,
        first_last_timestamp = 300,
        next_offset = 40,
        total_size = 16#3F_0102030405060708,
        revision = 9,
        entries = <<(?ENTRY(10, -2, 300, 1, 0, 16#DEADBEEF))/binary, (?ENTRY(20, 4, 5, 0, 16#FFFFFFFFFF, 1))/binary>>
    },
    Golden = <<
        "OSIR", 1:32, 10:64, 40:64, -2:64/signed, 300:64, 16#3F, 1, 2, 3, 4, 5, 6, 7, 8,
        10:64, -2:64/signed, 300:64, 1, 0:40, 16#DEADBEEF:32,
        20:64, 4:64, 5:64, 0, 16#FFFFFFFFFF:40, 1:32
    >>,
    ?assertEqual(Golden, ?MANIFEST:encode_root(M)),
    ?assertEqual(?MANIFEST_HEADER_SIZE + 2 * ?ENTRY_B, byte_size(Golden)),
    ?assertEqual({ok, M#manifest{revision = 0}}, ?MANIFEST:decode_root(Golden)),
    ?assertEqual(
        {ok, #manifest{}}, ?MANIFEST:decode_root(<<"OSIR", 1:32, 0:64, 0:64, -1:64, -1:64, 0:72>>)
    ).

a_group_has_its_golden_bytes(_Config) ->
    [
        begin
            Golden = <<Magic/binary, 1:32, 30:64, 0:64, 300:64, 0:64, 0:72, (entries(3, 4))/binary>>,
            ?assertEqual(Golden, ?MANIFEST:encode_group(Kind, entries(3, 4))),
            ?assertEqual({ok, {Kind, entries(3, 4)}}, ?MANIFEST:decode_group(Golden)),
            ?assertMatch({error, _}, ?MANIFEST:decode_root(Golden))
        end
     || {Kind, Magic} <- [
            {?MANIFEST_KIND_GROUP, <<"OSIG">>},
            {?MANIFEST_KIND_KILO_GROUP, <<"OSIK">>},
            {?MANIFEST_KIND_MEGA_GROUP, <<"OSIM">>}
        ]
    ],
    ?assertError(badarg, ?MANIFEST:encode_group(?MANIFEST_KIND_FRAGMENT, entries(3, 4))),
    ?assertError(badarg, ?MANIFEST:encode_group(?MANIFEST_KIND_GROUP, <<>>)),
    ?assertError(badarg, ?MANIFEST:encode_group(4, entries(3, 4))).

bytes_that_are_no_root_are_refused(_Config) ->
    Root = ?MANIFEST:encode_root(manifest(0, 1)),
    <<_:4/binary, AfterMagic/binary>> = Root,
    <<Magic:4/binary, _:4/binary, AfterVersion/binary>> = Root,
    Descending = (manifest(0, 1))#manifest{entries = <<(entry(1))/binary, (entry(0))/binary>>},
    [
        ?assertMatch({error, {corrupt, <<"root", _/binary>>}}, ?MANIFEST:decode_root(Bytes))
     || Bytes <- [
            <<>>,
            <<"OSIR">>,
            binary:part(Root, 0, byte_size(Root) - 1),
            <<Root/binary, 0>>,
            <<"OSIX", AfterMagic/binary>>,
            <<Magic/binary, 2:32, AfterVersion/binary>>,
            ?MANIFEST:encode_root(Descending)
        ]
    ],
    ?assertError(badarg, ?MANIFEST:decode_root(not_a_binary)).

edits_splice_and_raise_for_splice_and_total_alone(_Config) ->
    M = manifest(0, 3),
    ?assertEqual(M, ?MANIFEST:apply_edit(?MANIFEST:new_edit(M), M)),
    Edit = (?MANIFEST:new_edit(M))#edit{
        first_offset = 5, next_offset = 77, size = -150, entries = entry(9), pos = ?ENTRY_B, len = 2 * ?ENTRY_B
    },
    ?assertEqual(
        M#manifest{
            first_offset = 5,
            next_offset = 77,
            total_size = 250,
            entries = <<(entry(0))/binary, (entry(9))/binary, (entry(3))/binary>>
        },
        ?MANIFEST:apply_edit(Edit, M)
    ),
    [
        ?assertError(badarg, ?MANIFEST:apply_edit(Bad, M))
     || Bad <- [
            Edit#edit{pos = 1},
            Edit#edit{len = 33},
            Edit#edit{entries = <<0>>},
            Edit#edit{pos = 4 * ?ENTRY_B, len = ?ENTRY_B},
            Edit#edit{pos = 5 * ?ENTRY_B, len = 0},
            Edit#edit{size = -401}
        ]
    ],
    %% Nonsense of the right length: whoever asks is_well_formed/1 learns it.
    Nonsense = ?MANIFEST:apply_edit(Edit#edit{entries = binary:copy(<<255>>, ?ENTRY_B)}, M),
    ?assertNot(?MANIFEST:is_well_formed(Nonsense)).

lookups_find_fragments_and_go_through_groups(_Config) ->
    Group = ?ENTRY(0, 0, 399, ?MANIFEST_KIND_GROUP, 0, 77),
    M = (manifest(0, 5))#manifest{entries = <<Group/binary, (entries(4, 5))/binary>>},
    ?assertEqual({ok, #fragment_ref{offset = 50, uid = 5, size = 100}}, ?MANIFEST:lookup_offset(M, 59)),
    ?assertEqual(not_found, ?MANIFEST:lookup_offset(M, 60)),
    GroupRef = #group_ref{offset = 0, kind = ?MANIFEST_KIND_GROUP, uid = 77},
    {fetch, GroupRef, Cont} = ?MANIFEST:lookup_offset(M, 25),
    Found = {ok, #fragment_ref{offset = 20, uid = 2, size = 100}},
    ?assertEqual(Found, ?MANIFEST:resume({ok, entries(0, 3)}, Cont)),
    ?assertEqual({error, {transient, oops}}, ?MANIFEST:resume({error, {transient, oops}}, Cont)),
    ?assertEqual({error, {corrupt_group, GroupRef}}, ?MANIFEST:resume({ok, <<>>}, Cont)),
    ?assertEqual(Found, ?MANIFEST:resume({ok, entries(0, 3)}, Cont), "a continuation is a value"),
    ?assertError(badarg, ?MANIFEST:resume({ok, <<1>>}, Cont)),
    {fetch, GroupRef, Cont2} = ?MANIFEST:lookup_timestamp(M, 200),
    ?assertEqual(Found, ?MANIFEST:resume({ok, entries(0, 3)}, Cont2)),
    ?assertEqual({ok, #fragment_ref{offset = 40, uid = 4, size = 100}}, ?MANIFEST:lookup_timestamp(M, 400)),
    ?assertEqual(not_found, ?MANIFEST:lookup_timestamp(M, 600)).

retention_goes_through_groups(_Config) ->
    Group = ?ENTRY(0, 0, 399, ?MANIFEST_KIND_GROUP, 0, 77),
    M = (manifest(0, 5))#manifest{entries = <<Group/binary, (entries(4, 5))/binary>>},
    ?assertEqual(unchanged, ?MANIFEST:evaluate_remote_retention(M, [], 0)),
    ?assertEqual(unchanged, ?MANIFEST:evaluate_remote_retention(M, [{max_bytes, 600}, {max_age, 1000}], 1000)),
    GroupRef = #group_ref{offset = 0, kind = ?MANIFEST_KIND_GROUP, uid = 77},
    {fetch, GroupRef, Cont} = ?MANIFEST:evaluate_remote_retention(M, [{max_bytes, 150}], 0),
    All = {_, Objects} = ?MANIFEST:resume({ok, entries(0, 3)}, Cont),
    ?assertEqual(
        [#fragment_ref{offset = 10 * N, uid = N, size = 100} || N <- [0, 1, 2, 3]] ++
            [GroupRef, #fragment_ref{offset = 40, uid = 4, size = 100}],
        Objects
    ),
    Fetch = fun(Ref) when Ref =:= GroupRef -> {ok, entries(0, 3)} end,
    ?assertEqual(All, ?MANIFEST:evaluate_remote_retention(M, [{max_bytes, 150}], 0, Fetch)),
    %% By age, from within the group; of two limits of a kind the stricter one counts.
    {Edit, [#fragment_ref{offset = 0}]} =
        ?MANIFEST:evaluate_remote_retention(M, [{max_age, 900}, {max_age, 5000}], 1000, Fetch),
    ?assertMatch(#edit{first_offset = 10, first_timestamp = 100, first_last_timestamp = 199, size = -100, len = 0}, Edit),
    ?assertEqual(unchanged, ?MANIFEST:evaluate_remote_retention(M, [{max_bytes, 0}], 0, fun(_) -> {error, gone} end)),
    ?assertError(badarg, ?MANIFEST:evaluate_remote_retention(M, [{max_weight, 1}], 0)).

well_formed_manifests_are_told_from_others(_Config) ->
    Good = manifest(0, 3),
    ?assert(?MANIFEST:is_well_formed(Good)),
    ?assertEqual(ok, ?MANIFEST:assert_well_formed(#manifest{})),
    Bad = Good#manifest{first_offset = 5},
    [
        ?assertNot(?MANIFEST:is_well_formed(M))
     || M <- [Bad, Good#manifest{next_offset = 30}, Good#manifest{entries = <<1>>}, Good#manifest{total_size = 1 bsl 70}]
    ],
    ?assertError({malformed_manifest, Bad}, ?MANIFEST:assert_well_formed(Bad)),
    ?assertNot(?MANIFEST:is_well_formed(not_a_manifest)).

%% --- decisions and names ---------------------------------------------------------------------------------------------

decisions_take_and_answer_their_terms(_Config) ->
    ?assertEqual([true, true, false, false], [?NIF:chunk_is_committed(C, Committed) || {C, Committed} <- [{3, 3}, {2, 3}, {4, 3}, {0, -1}]]),
    M = manifest(0, 3),
    Compare = fun(Log) -> ?NIF:compare_log(M, Log) end,
    ?assertEqual({fresh, 7}, ?NIF:compare_log(#manifest{}, #{first => 7, next => 9})),
    ?assertEqual({resume, 40}, Compare(#{first => 7, next => 90})),
    ?assertEqual({remote_ahead, {0, 40}, 7}, Compare(#{first => 7, next => 39})),
    ?assertEqual({local_ahead, {0, 40}, 41}, Compare(#{first => 41, next => 90})),
    ?assertEqual({resume, 40}, Compare(#{first => 41, next => 90, pinned_first => 30})),
    ?assertEqual({local_ahead, {0, 40}, 41}, Compare(#{first => 41, next => 90, pinned_first => undefined})),
    ?assertEqual(wait_for_log, Compare(#{first => undefined, next => 0})),
    ?assertMatch({remote_ahead, {0, 40}, _}, ?NIF:start_on_other_timeline(M, #{first => 7, next => 90})),
    Chunk = #{chunk_id => 30, epoch => 1, crc => 5},
    ?assertEqual(
        [same, different, different, different, unverifiable],
        [?NIF:check_timeline(Chunk, L) || L <- [Chunk, Chunk#{epoch := 2}, Chunk#{crc := 6}, inside_another, trimmed]]
    ),
    ?assertEqual([different, unverifiable, unverifiable], [?NIF:check_beginning(40, First) || First <- [39, 40, undefined]]),
    ?assertEqual(
        [unverifiable, unverifiable, different, unverifiable, different],
        [
            ?NIF:check_continuation(Newest, Next)
         || {Newest, Next} <- [
                {undefined, trimmed}, {undefined, Chunk}, {undefined, inside_another}, {Chunk, Chunk}, {Chunk#{epoch := 2}, Chunk}
            ]
        ]
    ),
    ?assertEqual(
        [{take_over, {undefined, 5}}, {take_over, {undefined, 5}}, {take_over, {90, 5}}, {take_over, {100, 5}}, own, {fenced, 6}],
        [?NIF:claim_discard(Note, 5, 100) || Note <- [undefined, {undefined, 4}, {90, 4}, {101, 4}, {90, 5}, {undefined, 6}]]
    ),
    ?assertError({badarg, _}, ?NIF:claim_discard(90, 5, 100)),
    Present = {present, 8, 3, 5},
    ?assertEqual(
        [empty, retry, use_cache, {fetch, 8, 3, 5}, {fetch, 8, 3, 5}, {superseded, 3}],
        [
            ?NIF:resolve_manifest(Metadata, Cached, Epoch)
         || {Metadata, Cached, Epoch} <- [
                {absent, 5, 3}, {failed, 5, 3}, {Present, 5, 3}, {Present, 4, 3}, {Present, undefined, 9}, {Present, 5, 2}
            ]
        ]
    ),
    ?assertEqual({ok, M#manifest{revision = 9}}, ?NIF:resolve_root({ok, M}, 9)),
    ?assertEqual([{ok, #manifest{}}, retry, retry], [?NIF:resolve_root(F, R) || {F, R} <- [{not_found, 0}, {not_found, 1}, {failed, 0}]]),
    ?assertError({badarg, _}, ?NIF:resolve_manifest(perhaps, undefined, 1)),
    Delays = #{
        task_retry_delay_ms => 10,
        task_retry_delay_max_ms => 5000,
        upload_retry_delay_ms => 1000,
        upload_retry_delay_max_ms => 30000
    },
    ?assertEqual(0, ?NIF:retry_delay(transient, 1, Delays, 0.5)),
    Second = ?NIF:retry_delay(transient, 2, Delays, 0.0),
    ?assert(Second >= 5 andalso Second =< 10),
    Latest = ?NIF:retry_delay(permanent, 1 bsl 40, Delays, 0.999),
    ?assert(Latest >= 15000 andalso Latest =< 30000),
    ?assertError({badarg, _}, ?NIF:retry_delay(permanent, 1, Delays, 1.5)).

every_reason_has_its_class(_Config) ->
    Class = fun(Reason) -> {Reason, ?NIF:error_class(Reason)} end,
    [?assertEqual({R, transient}, Class(R)) || R <- [{http, 500}, {http, 408}, timeout, connection, clock_skew, expired_token, write_conflict]],
    [?assertEqual({R, throttled}, Class(R)) || R <- [throttled, {http, 429}]],
    [
        ?assertEqual({R, permanent}, Class(R))
     || R <- [
            {http, 400}, {http, 403}, {http, 409}, checksum_mismatch, {corrupt_chunk, 1}, {open_failed, <<"f">>, enoent},
            {panic, "text"}, cancelled, anything, {http, 1 bsl 80}, {}, [], <<>>, self()
        ]
    ],
    %% A failed store request stands for its reason.
    ?assertEqual(transient, ?NIF:error_class({transient, #{op => put, reason => timeout, message => <<>>}})).

failures_tell_a_store_that_is_away_from_others(_Config) ->
    ?assertEqual([doubtful, doubtful, away, away], [?NIF:outlook(connection, N) || N <- [1, 2, 3, 1 bsl 40]]),
    [?assertEqual({R, there}, {R, ?NIF:outlook(R, 10)}) || R <- [timeout, throttled, {http, 403}, {http, 1 bsl 80}, anything]],
    [?assertError({badarg, _}, ?NIF:outlook(connection, N)) || N <- [-1, often]].

keys_are_those_of_the_contract(_Config) ->
    Key = fun(Object) -> ?NIF:object_key(<<"rabbitmq">>, ?STREAM, Object) end,
    ?assertEqual(
        <<"rabbitmq/stream/stream_1/data/00000000000000000042.0000beef.fragment">>, Key({fragment, 42, 16#BEEF})
    ),
    ?assertEqual(<<"rabbitmq/stream/stream_1/metadata/root.7.ffffffff.manifest">>, Key({root, 7, 16#FFFFFFFF})),
    [
        ?assertEqual(
            <<"rabbitmq/stream/stream_1/metadata/18446744073709551615.00000001.", Suffix/binary>>,
            Key({group, Kind, 16#FFFFFFFFFFFFFFFF, 1})
        )
     || {Kind, Suffix} <- [{1, <<"group">>}, {2, <<"kgroup">>}, {3, <<"mgroup">>}]
    ],
    [?assertError({badarg, _}, Key(Bad)) || Bad <- [{group, 0, 1, 1}, {fragment, -1, 1}, {fragment, 1, 1 bsl 32}, {root, 1}, nothing]],
    [?assert(?NIF:valid_stream_id(Id)) || Id <- [<<"a">>, <<"__st1_1795962989599376068">>, <<"A-Z=">>, binary:copy(<<"x">>, 255)]],
    [
        ?assertNot(?NIF:valid_stream_id(Id))
     || Id <- [<<>>, <<".">>, <<"..">>, <<"a/b">>, <<"a b">>, <<"ü"/utf8>>, <<255>>, binary:copy(<<"x">>, 256), "string", atom]
    ],
    ?assertError({badarg, _}, ?NIF:object_key(<<"a//b">>, ?STREAM, {root, 1, 1})).

%% --- cost ------------------------------------------------------------------------------------------------------------

%% The bound of a scheduler call, on the largest root that usual thresholds allow. Of several tries the best one counts:
%% the machine does other things too.
keys_are_told_apart_and_prefixes_end_in_a_slash(_Config) ->
    Named = [
        {{fragment, ?STREAM, 7, 16#ab}, {fragment, 7, 16#ab}},
        {{root, ?STREAM, 3, 16#ab}, {root, 3, 16#ab}},
        {{group, ?STREAM, 2, 7, 16#ab}, {group, 2, 7, 16#ab}}
    ],
    [?assertEqual(Parsed, ?NIF:parse_key(<<"a/b">>, ?NIF:object_key(<<"a/b">>, ?STREAM, Object))) || {Parsed, Object} <- Named],
    ?assertEqual({history, <<"run.1">>, 5}, ?NIF:parse_key(<<"a">>, <<"a/history/run.1/00000000000000000005.segment">>)),
    ?assertEqual(unknown, ?NIF:parse_key(<<"a">>, <<"b/history/run.1/00000000000000000005.segment">>)),
    ?assertEqual(<<"a/b/stream/stream_1/">>, ?NIF:key_prefix(<<"a/b">>, ?STREAM)),
    ?assertEqual(<<"a/b/stream/">>, ?NIF:key_prefix(<<"a/b">>, all)),
    ?assertError({badarg, _}, ?NIF:key_prefix(<<"a">>, <<"no/id">>)).

retention_and_garbage_take_and_answer_their_terms(_Config) ->
    ?assertEqual({true, false}, {?NIF:may_delete(20, 20), ?NIF:may_delete(20, 19)}),
    ?assertEqual(2, ?NIF:deletable_segments([0, 10, 20, 30], 29, [])),
    ?assertEqual(1, ?NIF:deletable_segments([0, 10, 20, 30], 29, [40, 19])),
    ?assertError({badarg, _}, ?NIF:deletable_segments([0 | 10], 29, [])),
    ?assertEqual([30, 12, 0], [?NIF:replica_floor(30, 4, Epoch, Committed) || {Epoch, Committed} <- [{4, 40}, {4, 12}, {5, 40}]]),
    ?assertError({badarg, _}, ?NIF:replica_floor(30, 4, none, 40)),
    Limits = #{gc_min_age_ms => 100, discarded_tier_grace_ms => 1000},
    Key = ?NIF:object_key(<<"a">>, ?STREAM, {fragment, 7, 1}),
    Judge = fun(Age, Stream) -> ?NIF:gc_verdict(#{prefix => <<"a">>, key => Key, age_ms => Age}, Stream, Limits) end,
    Tier = #{epoch => 1, root_uid => 2, root_age_ms => 0, next_offset => 10, listed => false, discarded => undefined},
    ?assertEqual({keep, unknown}, Judge(200, unknown)),
    ?assertEqual({keep, unknown}, Judge(undefined, deleted)),
    ?assertEqual({keep, ahead}, Judge(200, never_persisted)),
    ?assertEqual({keep, young}, Judge(99, deleted)),
    ?assertEqual({delete, stream_deleted, always}, Judge(200, deleted)),
    ?assertEqual({keep, in_use}, Judge(200, {live, Tier#{listed := true}})),
    ?assertEqual({keep, unknown}, Judge(200, {live, Tier#{listed := undefined}})),
    ?assertEqual({keep, ahead}, Judge(200, {live, Tier#{next_offset := 7}})),
    ?assertEqual({keep, unknown}, Judge(200, {live, Tier#{root_age_ms := undefined}})),
    ?assertEqual({delete, orphan, optional}, Judge(200, {live, Tier})),
    ?assertEqual({keep, grace}, Judge(2000, {live, Tier#{discarded := {999, 1}}})),
    ?assertEqual({delete, discarded_tier, always}, Judge(2000, {live, Tier#{discarded := {1000, 1}}})),
    ?assertEqual({keep, grace}, Judge(2000, {live, Tier#{discarded := {1000, 2}}})),
    ?assertError({badarg, _}, Judge(200, {live, Tier#{discarded := 1000}})),
    ?assertEqual({keep, not_ours}, ?NIF:gc_verdict(#{prefix => <<"b">>, key => Key, age_ms => 200}, deleted, Limits)),
    ?assertError({badarg, _}, Judge(200, {live, maps:remove(listed, Tier)})),
    ?assertError({badarg, _}, Judge(200, gone)).

a_call_takes_less_than_a_millisecond(_Config) ->
    case os:getenv("STREAM_S3_SANITIZED") of
        false -> calls_take_less_than_a_millisecond();
        _ -> {skip, "calls take longer under AddressSanitizer"}
    end.

calls_take_less_than_a_millisecond() ->
    M = manifest(0, 4095),
    Root = ?MANIFEST:encode_root(M),
    {S, []} = ?CORE:init(M, (options())#{rebalance_threshold := 4096}),
    Chunks = chunks(0, 256),
    A = ?NIF:assembly_new(1 bsl 40, 0),
    Calls = #{
        encode_root => fun() -> ?MANIFEST:encode_root(M) end,
        decode_root => fun() -> ?MANIFEST:decode_root(Root) end,
        init => fun() -> ?CORE:init(M, options()) end,
        manifest => fun() -> ?CORE:manifest(S) end,
        retention => fun() -> ?MANIFEST:evaluate_remote_retention(M, [{max_bytes, 0}], 0) end,
        cut => fun() -> ?CORE:fragment_cut(meta(40960, 40970), S) end,
        add_chunks => fun() -> ?NIF:assembly_add_chunks(Chunks, A) end
    },
    Took = #{Name => best_of(20, Call) || Name := Call <- Calls},
    ct:pal("microseconds: ~tp", [Took]),
    ?assertEqual(#{}, maps:filter(fun(_, Us) -> Us > 1000 end, Took)).

best_of(Tries, Call) ->
    lists:min([element(1, timer:tc(Call)) || _ <- lists:seq(1, Tries)]).
