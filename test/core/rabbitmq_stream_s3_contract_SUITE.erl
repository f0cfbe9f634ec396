%% The term contract as somebody reads it who has nothing else: names and arities, header, manifests and their bytes, searches,
%% retention; and what happens to calls that break it.
-module(rabbitmq_stream_s3_contract_SUITE).

-include_lib("stdlib/include/assert.hrl").
-include("include/rabbitmq_stream_s3.hrl").

-compile([export_all, nowarn_export_all]).

-define(CORE, rabbitmq_stream_s3_replica_reader_core).
-define(ASSEMBLY, rabbitmq_stream_s3_fragment_assembly).
-define(M, rabbitmq_stream_s3_manifest).

suite() ->
    [{timetrap, {minutes, 2}}].

all() ->
    [
        {group, names},
        {group, manifests},
        {group, searches},
        {group, misuse}
    ].

groups() ->
    [
        {names, [parallel], [
            every_function_of_the_contract_is_exported,
            the_header_is_found_either_way_and_needs_nothing,
            records_have_the_fields_and_defaults_of_the_contract,
            entry_macros_build_and_match
        ]},
        {manifests, [parallel], [
            a_root_has_the_bytes_of_the_contract,
            a_group_has_the_bytes_of_the_contract,
            totals_above_2_to_the_64_survive,
            what_is_decoded_has_revision_0,
            damaged_objects_are_refused,
            a_new_edit_changes_nothing,
            an_edit_replaces_splices_and_adds,
            an_edit_raises_for_splice_and_total_and_nothing_else,
            a_manifest_is_well_formed_or_not
        ]},
        {searches, [parallel], [
            an_offset_is_found_in_its_fragment,
            a_timestamp_finds_the_oldest_fragment_that_is_young_enough,
            a_search_goes_through_groups,
            a_continuation_is_a_value,
            retention_drops_from_the_head_while_the_total_is_above_the_limit,
            retention_drops_while_the_last_timestamp_is_below_the_limit,
            retention_without_limits_changes_nothing,
            retention_may_empty_the_tier,
            retention_goes_into_groups,
            a_group_that_cannot_be_read_ends_the_evaluation_with_what_is_decided
        ]},
        {misuse, [], [
            misuse_raises_badarg_and_the_state_stays_usable,
            misuse_is_explained,
            chunks_that_are_none_raise_badarg,
            random_terms_never_bring_the_vm_down
        ]}
    ].

%% --- names -----------------------------------------------------------------------------------------------------------

every_function_of_the_contract_is_exported(_) ->
    Contract = [
        {?ASSEMBLY, [
            {new, 1}, {new, 2}, {add_chunk, 2}, {add_chunks, 2}, {is_cut, 1}, {metadata, 1}, {index_records, 1}, {info, 1}
        ]},
        {?CORE, [
            {init, 2}, {manifest, 1}, {persisted_manifest, 1}, {rebalance_in_flight, 1}, {format_state, 1}, {fragment_cut, 2},
            {transfer_complete, 3}, {transfer_failed, 3}, {group_upload_complete, 2}, {group_upload_failed, 2},
            {persist_complete, 2}, {persist_failed, 2}, {tick, 2}, {await_offset, 3}, {retention_started, 1},
            {retention_complete, 2}, {retention_failed, 2}
        ]},
        {?M, [
            {new_edit, 1}, {apply_edit, 2}, {is_well_formed, 1}, {assert_well_formed, 1}, {encode_root, 1}, {decode_root, 1},
            {encode_group, 2}, {decode_group, 1}, {lookup_offset, 2}, {lookup_timestamp, 2}, {evaluate_remote_retention, 3},
            {evaluate_remote_retention, 4}, {resume, 2}
        ]},
        {rabbitmq_stream_s3_governor, [{start_link, 1}, {submit, 4}, {cancel, 1}]},
        {rabbitmq_stream_s3_replica_reader, [{await_offset, 2}, {await_offset, 3}, {force_cut, 1}]},
        {rabbitmq_stream_s3, [{get_range, 1}, {status, 0}, {status, 1}]}
    ],
    Missing = [
        {Module, Function}
     || {Module, Functions} <- Contract,
        {module, Module} =:= code:ensure_loaded(Module) orelse error(Module),
        Function <- Functions,
        not lists:member(Function, Module:module_info(exports))
    ],
    ?assertEqual([], Missing).

the_header_is_found_either_way_and_needs_nothing(_) ->
    Top = filename:dirname(filename:dirname(filename:dirname(source_file()))),
    Erlang = filename:join(Top, "erlang"),
    Compile = fun(Include, Options) ->
        Forms = [
            "-module(stream_s3_header).\n-export([m/0, e/0]).\n",
            "-include(\"", Include, "\").\n",
            %% Twice: it guards itself.
            "-include(\"", Include, "\").\n",
            "m() -> #manifest{}.\n",
            "e() -> ?ENTRY(1, 2, 3, ?MANIFEST_KIND_MEGA_GROUP, 5, 6).\n"
        ],
        Dir = filename:join(os:getenv("TMPDIR", "/tmp"), lists:concat(["stream_s3_header.", os:getpid(), ".", erlang:unique_integer([positive])])),
        ok = filelib:ensure_path(Dir),
        File = filename:join(Dir, "stream_s3_header.erl"),
        ok = file:write_file(File, Forms),
        Result = compile:file(File, [binary, return, warnings_as_errors, nowarn_unused_record | Options]),
        ok = file:del_dir_r(Dir),
        Result
    end,
    ?assertMatch({ok, stream_s3_header, _, []}, Compile("rabbitmq_stream_s3.hrl", [{i, filename:join(Erlang, "include")}])),
    ?assertMatch({ok, stream_s3_header, _, []}, Compile("include/rabbitmq_stream_s3.hrl", [{i, Erlang}])),
    %% Alone: with an empty code path but for OTP's own.
    {ok, Text} = file:read_file(filename:join(Erlang, "include/rabbitmq_stream_s3.hrl")),
    ?assertEqual(nomatch, re:run(Text, "-include")).

source_file() ->
    proplists:get_value(source, ?MODULE:module_info(compile)).

records_have_the_fields_and_defaults_of_the_contract(_) ->
    ?assertEqual({manifest, 0, -1, -1, 0, 0, 0, <<>>}, #manifest{}),
    ?assertEqual(
        [first_offset, first_timestamp, first_last_timestamp, next_offset, total_size, revision, entries],
        record_info(fields, manifest)
    ),
    ?assertEqual({edit, undefined, undefined, undefined, undefined, 0, <<>>, 0, 0}, #edit{}),
    ?assertEqual(
        [first_offset, first_timestamp, first_last_timestamp, next_offset, size, entries, pos, len],
        record_info(fields, edit)
    ),
    ?assertEqual([offset, uid, size], record_info(fields, fragment_ref)),
    ?assertEqual([offset, kind, uid], record_info(fields, group_ref)),
    ?assertEqual(
        {34, 20, 49, 0, 1, 2, 3},
        {?ENTRY_B, ?INDEX_RECORD_B, ?MANIFEST_HEADER_SIZE, ?MANIFEST_KIND_FRAGMENT, ?MANIFEST_KIND_GROUP,
            ?MANIFEST_KIND_KILO_GROUP, ?MANIFEST_KIND_MEGA_GROUP}
    ).

entry_macros_build_and_match(_) ->
    One = ?ENTRY(1 + 1, -3, 4, ?MANIFEST_KIND_KILO_GROUP, 16#FFFFFFFFFF, 16#FFFFFFFF),
    ?assertEqual(<<2:64, -3:64, 4:64, 2, 16#FFFFFFFFFF:40, 16#FFFFFFFF:32>>, One),
    ?assertEqual(?ENTRY_B, byte_size(One)),
    ?ENTRY(2, First, _, Kind, Size, Uid) = One,
    ?assertEqual({-3, 2, 16#FFFFFFFFFF, 16#FFFFFFFF}, {First, Kind, Size, Uid}),
    Two = ?ENTRY(7, 8, 9, 0, 10, 11, One),
    ?ENTRY(7, _, Last, 0, _, _, Rest) = Two,
    ?assertEqual({9, One}, {Last, Rest}),
    ?assertEqual([7, 2], [Offset || ?ENTRY(Offset, _, _, _, _, _) <= Two]),
    Count = fun
        Count(?ENTRY(_, _, _, _, _, _, Tail)) -> 1 + Count(Tail);
        Count(<<>>) -> 0
    end,
    ?assertEqual(2, Count(Two)).

%% --- manifests -------------------------------------------------------------------------------------------------------

a_root_has_the_bytes_of_the_contract(_) ->
    Manifest = tier(3),
    Entries = Manifest#manifest.entries,
    Root = <<"OSIR", 1:32, 0:64, 30:64, 1000:64/signed, 1005:64/signed, 0:2, 300:70, Entries/binary>>,
    ?assertEqual(Root, ?M:encode_root(Manifest)),
    ?assertEqual({ok, Manifest}, ?M:decode_root(Root)),
    Empty = <<"OSIR", 1:32, 0:64, 0:64, -1:64, -1:64, 0:72>>,
    ?assertEqual(?MANIFEST_HEADER_SIZE, byte_size(Empty)),
    ?assertEqual(Empty, ?M:encode_root(#manifest{})),
    ?assertEqual({ok, #manifest{}}, ?M:decode_root(Empty)).

a_group_has_the_bytes_of_the_contract(_) ->
    #manifest{entries = Entries} = tier(3),
    [
        begin
            Group = <<Magic/binary, 1:32, 0:64, 0:64, 1000:64, 0:64, 0:72, Entries/binary>>,
            ?assertEqual(Group, ?M:encode_group(Kind, Entries)),
            ?assertEqual({ok, {Kind, Entries}}, ?M:decode_group(Group))
        end
     || {Kind, Magic} <- [{1, <<"OSIG">>}, {2, <<"OSIK">>}, {3, <<"OSIM">>}]
    ].

totals_above_2_to_the_64_survive(_) ->
    [
        begin
            Manifest = (tier(2))#manifest{total_size = Total},
            Root = ?M:encode_root(Manifest),
            <<_:40/binary, 0:2, Total:70, _/binary>> = Root,
            ?assertEqual({ok, Manifest}, ?M:decode_root(Root)),
            {S, []} = ?CORE:init(Manifest, options()),
            ?assertEqual(Manifest, ?CORE:manifest(S)),
            ?assertMatch(#{manifest_total_size := Total}, ?CORE:format_state(S)),
            {S1, Ref, _} = ?CORE:fragment_cut(meta(2), S),
            {_, [{start_persist, #manifest{total_size = Grown}, _, _, _, [#edit{size = 100}]}]} = ?CORE:transfer_complete(Ref, 1, S1),
            ?assertEqual(Total + 100, Grown),
            Edit = (?M:new_edit(Manifest))#edit{size = -Total},
            ?assertMatch(#manifest{total_size = 0}, ?M:apply_edit(Edit, Manifest))
        end
     || Total <- [1 bsl 63, (1 bsl 64) - 1, 1 bsl 64, (1 bsl 64) + 1, (1 bsl 70) - 1]
    ],
    ?assertError(badarg, ?M:encode_root((tier(2))#manifest{total_size = 1 bsl 70})).

what_is_decoded_has_revision_0(_) ->
    Manifest = (tier(2))#manifest{revision = 17},
    ?assertEqual({ok, Manifest#manifest{revision = 0}}, ?M:decode_root(?M:encode_root(Manifest))).

damaged_objects_are_refused(_) ->
    Root = ?M:encode_root(tier(3)),
    Group = ?M:encode_group(1, (tier(3))#manifest.entries),
    <<_:4/binary, AfterMagic/binary>> = Root,
    [
        ?assertMatch({_, {error, _}}, {I, ?M:decode_root(Bytes)})
     || {I, Bytes} <- lists:enumerate([
            <<>>, <<"OSIR">>, binary:part(Root, 0, 48), binary:part(Root, 0, byte_size(Root) - 1), <<Root/binary, 0>>,
            <<"OSIX", AfterMagic/binary>>, Group, set(Root, 4, <<2:32>>), set(Root, 4, <<0:32>>), set(Root, 40, <<1:1, 0:7>>),
            %% Offsets that do not ascend; a kind that is none; an end before the last entry.
            set(Root, 49 + 34, <<0:64>>), set(Root, 49 + 68, <<10:64>>), set(Root, 49 + 24, <<4>>), set(Root, 16, <<20:64>>),
            set(Root, 8, <<31:64>>)
        ])
    ],
    [
        ?assertMatch({_, {error, _}}, {I, ?M:decode_group(Bytes)})
     || {I, Bytes} <- lists:enumerate([
            <<>>, Root, binary:part(Group, 0, byte_size(Group) - 1), <<Group/binary, 0>>, set(Group, 0, <<"OSIR">>), set(Group, 0, <<"OSIF">>),
            set(Group, 4, <<2:32>>), set(Group, 16, <<1:64>>), set(Group, 32, <<1:64>>), set(Group, 40, <<1:72>>),
            set(Group, 49 + 34, <<0:64>>)
        ])
    ].

a_new_edit_changes_nothing(_) ->
    [?assertEqual(M, ?M:apply_edit(?M:new_edit(M), M)) || M <- [#manifest{}, tier(3), (tier(2))#manifest{revision = 5}]],
    ?assertEqual(
        #edit{first_offset = 0, first_timestamp = 1000, first_last_timestamp = 1005, next_offset = undefined},
        ?M:new_edit(tier(3))
    ).

an_edit_replaces_splices_and_adds(_) ->
    #manifest{entries = <<A:34/binary, _:34/binary, C:34/binary>>} = M = (tier(3))#manifest{revision = 4},
    New = ?ENTRY(7, 7, 7, 1, 0, 7),
    Edit = #edit{
        first_offset = 5, first_timestamp = 6, first_last_timestamp = 7, next_offset = 99, size = -50, entries = <<New/binary, New/binary>>,
        pos = 34, len = 34
    },
    ?assertEqual(
        #manifest{
            first_offset = 5, first_timestamp = 6, first_last_timestamp = 7, next_offset = 99, total_size = 250, revision = 4,
            entries = <<A/binary, New/binary, New/binary, C/binary>>
        },
        ?M:apply_edit(Edit, M)
    ),
    ?assertMatch(#manifest{next_offset = 30}, ?M:apply_edit(Edit#edit{next_offset = undefined}, M)),
    ?assertMatch(#manifest{entries = <<>>, total_size = 0}, ?M:apply_edit(Edit#edit{pos = 0, len = 102, entries = <<>>, size = -300}, M)).

an_edit_raises_for_splice_and_total_and_nothing_else(_) ->
    M = tier(3),
    Edit = ?M:new_edit(M),
    [
        ?assertError(_, ?M:apply_edit(Bad, M), Bad)
     || Bad <- [
            Edit#edit{pos = 33}, Edit#edit{len = 1}, Edit#edit{pos = 136}, Edit#edit{pos = 102, len = 34}, Edit#edit{len = 136},
            Edit#edit{pos = -34}, Edit#edit{len = -34}, Edit#edit{pos = 1 bsl 64}, Edit#edit{pos = 34 * (1 bsl 59), len = 34 * (1 bsl 59)},
            Edit#edit{entries = <<0:8>>}, Edit#edit{size = -301}, Edit#edit{size = -(1 bsl 100)}
        ]
    ],
    [
        ?assertMatch({_, #manifest{}}, {Odd, ?M:apply_edit(Odd, M)})
     || Odd <- [
            Edit#edit{pos = 102}, Edit#edit{size = -300}, Edit#edit{size = 1 bsl 80},
            %% Whether the result makes sense is another question.
            Edit#edit{first_offset = 1000}, Edit#edit{next_offset = 0}, Edit#edit{first_timestamp = -1 bsl 62},
            Edit#edit{entries = binary:copy(<<255>>, 34)}, Edit#edit{entries = ?ENTRY(5, 0, 0, 9, 0, 0), pos = 34}, #edit{}
        ]
    ].

a_manifest_is_well_formed_or_not(_) ->
    M = tier(3),
    [?assert(?M:is_well_formed(Good)) || Good <- [#manifest{}, M, #manifest{first_offset = 9, next_offset = 9}]],
    ?assertEqual(ok, ?M:assert_well_formed(M)),
    [
        begin
            ?assertEqual({Bad, false}, {Bad, ?M:is_well_formed(Bad)}),
            ?assertError(_, ?M:assert_well_formed(Bad))
        end
     || Bad <- [
            M#manifest{entries = <<0:8>>}, M#manifest{entries = <<(M#manifest.entries)/binary, 1>>}, M#manifest{next_offset = 20},
            M#manifest{first_offset = 31}, M#manifest{first_offset = 5}, M#manifest{total_size = -1}, M#manifest{total_size = 1 bsl 70},
            M#manifest{entries = iolist_to_binary(lists:duplicate(2, ?ENTRY(0, 0, 0, 0, 0, 0)))}, M#manifest{revision = -1},
            M#manifest{entries = undefined}, M#manifest{first_offset = -1}, M#manifest{entries = ?ENTRY(0, 0, 0, 4, 0, 0)}
        ]
    ].

%% --- searches --------------------------------------------------------------------------------------------------------

an_offset_is_found_in_its_fragment(_) ->
    M = tier(3),
    [
        ?assertEqual({Offset, {ok, #fragment_ref{offset = 10 * N, uid = uid(N), size = 100}}}, {Offset, ?M:lookup_offset(M, Offset)})
     || N <- [0, 1, 2], Offset <- [10 * N, 10 * N + 5, 10 * N + 9]
    ],
    [?assertEqual(not_found, ?M:lookup_offset(M, Offset)) || Offset <- [30, 31, (1 bsl 64) - 1]],
    ?assertEqual(not_found, ?M:lookup_offset(#manifest{}, 0)),
    ?assertEqual(not_found, ?M:lookup_offset((tail(2, 5)), 19)).

a_timestamp_finds_the_oldest_fragment_that_is_young_enough(_) ->
    M = tier(3),
    [
        ?assertMatch({_, {ok, #fragment_ref{offset = Found}}}, {Ts, ?M:lookup_timestamp(M, Ts)})
     || {Ts, Found} <- [{-1 bsl 63, 0}, {0, 0}, {1005, 0}, {1006, 10}, {1015, 10}, {1025, 20}]
    ],
    ?assertEqual(not_found, ?M:lookup_timestamp(M, 1026)),
    ?assertEqual(not_found, ?M:lookup_timestamp(#manifest{}, -5)).

a_search_goes_through_groups(_) ->
    {M, Fetch} = grouped(),
    [
        ?assertEqual({Offset, {ok, #fragment_ref{offset = Offset div 10 * 10, uid = uid(Offset div 10), size = 100}}}, {
            Offset, found(?M:lookup_offset(M, Offset), Fetch)
        })
     || Offset <- lists:seq(0, 99)
    ],
    [
        ?assertEqual({N, {ok, #fragment_ref{offset = 10 * N, uid = uid(N), size = 100}}}, {
            N, found(?M:lookup_timestamp(M, 1005 + 10 * N), Fetch)
        })
     || N <- lists:seq(0, 9)
    ],
    {fetch, #group_ref{offset = 0, kind = 2, uid = 500}, Cont} = ?M:lookup_offset(M, 15),
    ?assertMatch({error, no_such_object}, ?M:resume({error, no_such_object}, Cont)),
    %% Entries that are not that group's.
    ?assertMatch({error, _}, ?M:resume({ok, (tail(5, 8))#manifest.entries}, Cont)),
    ?assertMatch({error, _}, ?M:resume({ok, <<>>}, Cont)).

a_continuation_is_a_value(_) ->
    {M, Fetch} = grouped(),
    {fetch, Group, Cont} = ?M:lookup_offset(M, 15),
    First = found(?M:resume(Fetch(Group), Cont), Fetch),
    erlang:garbage_collect(),
    ?assertEqual(First, found(?M:resume(Fetch(Group), Cont), Fetch)),
    {fetch, Oldest, Cont2} = ?M:evaluate_remote_retention(M, [{max_bytes, 450}], 0),
    Step = fun(R) -> case R of {fetch, G, _} -> G; Done -> Done end end,
    ?assertEqual(Step(?M:resume(Fetch(Oldest), Cont2)), Step(?M:resume(Fetch(Oldest), Cont2))).

retention_drops_from_the_head_while_the_total_is_above_the_limit(_) ->
    M = tier(5),
    [
        ?assertEqual({Max, dropped(M, Count)}, {Max, ?M:evaluate_remote_retention(M, [{max_bytes, Max}], 0)})
     || {Max, Count} <- [{499, 1}, {400, 1}, {399, 2}, {300, 2}, {101, 4}, {100, 4}]
    ],
    [?assertEqual(unchanged, ?M:evaluate_remote_retention(M, [{max_bytes, Max}], 0)) || Max <- [500, 501, 1 bsl 100]].

retention_drops_while_the_last_timestamp_is_below_the_limit(_) ->
    M = tier(5),
    %% Last timestamps are 1005, 1015, ...
    [
        ?assertEqual({Now, dropped(M, Count)}, {Now, ?M:evaluate_remote_retention(M, [{max_age, 100}], Now)})
     || {Now, Count} <- [{1106, 1}, {1115, 1}, {1116, 2}, {1145, 4}]
    ],
    [?assertEqual(unchanged, ?M:evaluate_remote_retention(M, [{max_age, 100}], Now)) || Now <- [0, 1105, -5]],
    %% Either limit condemns.
    ?assertEqual(dropped(M, 3), ?M:evaluate_remote_retention(M, [{max_age, 100}, {max_bytes, 200}], 1116)),
    ?assertEqual(dropped(M, 3), ?M:evaluate_remote_retention(M, [{max_bytes, 400}, {max_age, 100}], 1126)).

retention_without_limits_changes_nothing(_) ->
    ?assertEqual(unchanged, ?M:evaluate_remote_retention(tier(5), [], 1 bsl 50)),
    ?assertEqual(unchanged, ?M:evaluate_remote_retention(#manifest{}, [{max_bytes, 0}, {max_age, 0}], 1 bsl 50)).

retention_may_empty_the_tier(_) ->
    M = tier(3),
    {Edit, Objects} = ?M:evaluate_remote_retention(M, [{max_bytes, 0}], 0),
    ?assertEqual([#fragment_ref{offset = 10 * N, uid = uid(N), size = 100} || N <- [0, 1, 2]], Objects),
    Emptied = ?M:apply_edit(Edit, M),
    ?assertEqual(#manifest{first_offset = 30, next_offset = 30}, Emptied),
    ?assert(?M:is_well_formed(Emptied)).

retention_goes_into_groups(_) ->
    {M, Fetch} = grouped(),
    [
        begin
            Count = 10 - Kept,
            {Edit, Objects} = ?M:evaluate_remote_retention(M, [{max_bytes, 100 * Kept}], 0, Fetch),
            After = ?M:apply_edit(Edit, M),
            ?assert(?M:is_well_formed(After)),
            {First, Last} = case Kept of 0 -> {-1, -1}; _ -> {1000 + 10 * Count, 1005 + 10 * Count} end,
            ?assertMatch(
                {Kept, #manifest{first_offset = F, first_timestamp = First, first_last_timestamp = Last, next_offset = 100, total_size = T}}
                when F =:= 10 * Count andalso T =:= 100 * Kept,
                {Kept, After}
            ),
            ?assertEqual([10 * N || N <- lists:seq(0, Count - 1)], [O || #fragment_ref{offset = O} <- Objects]),
            %% A group goes when all below it has gone.
            Groups = [{Kind, Uid} || #group_ref{kind = Kind, uid = Uid} <- Objects],
            ?assertEqual({Kept, [G || {G, Gone} <- [{{1, 100}, 2}, {{1, 101}, 4}, {{2, 500}, 4}, {{1, 102}, 6}], Gone =< Count]}, {Kept, Groups}),
            %% Doing it again finds nothing more to do.
            ?assertEqual(unchanged, ?M:evaluate_remote_retention(After, [{max_bytes, 100 * Kept}], 0, Fetch))
        end
     || Kept <- lists:seq(0, 9)
    ].

a_group_that_cannot_be_read_ends_the_evaluation_with_what_is_decided(_) ->
    {M, Fetch} = grouped(),
    Broken = fun
        (#group_ref{uid = 101}) -> {error, timeout};
        (Group) -> Fetch(Group)
    end,
    ?assertEqual(unchanged, ?M:evaluate_remote_retention(M, [{max_bytes, 0}], 0, fun(_) -> {error, timeout} end)),
    {Edit, Objects} = ?M:evaluate_remote_retention(M, [{max_bytes, 0}], 0, Broken),
    After = ?M:apply_edit(Edit, M),
    ?assert(?M:is_well_formed(After)),
    %% Only what lies in front of the group that could not be read, and only what has gone by the manifest.
    [?assert(Offset + 10 =< After#manifest.first_offset) || #fragment_ref{offset = Offset} <- Objects],
    ?assert(After#manifest.first_offset =< 20).

%% --- misuse ----------------------------------------------------------------------------------------------------------

misuse_raises_badarg_and_the_state_stays_usable(_) ->
    {S, []} = ?CORE:init(tier(3), options()),
    {S1, Ref, _} = ?CORE:fragment_cut(meta(3), S),
    A = ?ASSEMBLY:new(100, 0),
    M = tier(3),
    Group = ?M:encode_group(1, M#manifest.entries),
    {G, _} = grouped(),
    {fetch, _, Cont} = ?M:lookup_offset(G, 5),
    {fetch, _, Cont2} = ?M:evaluate_remote_retention(G, [{max_bytes, 0}], 0),
    Calls =
        [{?ASSEMBLY, new, [Bad]} || Bad <- [-1, 1 bsl 64, 1.0, a, <<>>, undefined]] ++
        [{?ASSEMBLY, add_chunks, [Bad, A]} || Bad <- [x, [x], [#{}], #{}, <<>>]] ++
        [{?ASSEMBLY, F, [Bad]} || F <- [is_cut, metadata, index_records, info], Bad <- [S, make_ref(), Cont, x, <<>>]] ++
        [{?CORE, F, [Bad]} || F <- [manifest, persisted_manifest, rebalance_in_flight, format_state, retention_started],
            Bad <- [A, make_ref(), Cont, x, <<>>, []]] ++
        [{?CORE, init, [Bad, options()]} || Bad <- bad_manifests(M)] ++
        [{?CORE, init, [M, (options())#{Key => Bad}]} ||
            {Key, Bads} <- [
                {epoch, [-1, 1 bsl 64, x]}, {persist_threshold, [0, -1, x, 1.0]}, {persist_interval_ms, [-1, x, 1 bsl 64]},
                {rebalance_threshold, [0, 1, -5, x, 1 bsl 64]}
            ], Bad <- Bads] ++
        [{?CORE, init, [M, maps:remove(Key, options())]} || Key <- [stream, dir, epoch, reference]] ++
        [{?CORE, init, [M, #{}]}] ++
        [{?CORE, fragment_cut, [Bad, S1]} || Bad <- [
            x, [], #{}, (meta(3))#{next_offset := 30}, (meta(3))#{next_offset := 29}, (meta(3))#{size := 1 bsl 40},
            (meta(3))#{size := -1}, (meta(3))#{first_offset := -1}, (meta(3))#{first_timestamp := 1 bsl 63}, maps:remove(size, meta(3))
        ]] ++
        [{?CORE, transfer_complete, [Ref, Bad, S1]} || Bad <- bad_uids()] ++
        [{?CORE, group_upload_complete, [Bad, S1]} || Bad <- bad_uids()] ++
        [{?CORE, persist_complete, [Bad, S1]} || Bad <- [-1, 1 bsl 64, x, 1.0]] ++
        [{?CORE, tick, [Bad, S1]} || Bad <- [1 bsl 63, -(1 bsl 63) - 1, x, 1.0]] ++
        [{?CORE, await_offset, [Bad, me, S1]} || Bad <- [-1, 1 bsl 64, x]] ++
        [{?CORE, retention_complete, [Bad, S1]} || Bad <- [
            x, M, #edit{}, (?M:new_edit(M))#edit{first_offset = 31, size = -300, len = 102}, (?M:new_edit(M))#edit{first_offset = 15, size = -100},
            (?M:new_edit(M))#edit{first_offset = 10, size = -99, len = 34}, (?M:new_edit(M))#edit{first_offset = 10, size = 100, len = 34},
            (?M:new_edit(M))#edit{first_offset = 10, size = -100, len = 34, pos = 34}
        ]] ++
        [{?CORE, F, [x, Bad]} || F <- [transfer_failed_2, group_upload_failed, persist_failed, retention_failed],
            F =/= transfer_failed_2, Bad <- [x, A, make_ref()]] ++
        [{?M, encode_root, [Bad]} || Bad <- bad_manifests(M)] ++
        [{?M, new_edit, [Bad]} || Bad <- [x, {}, {manifest}, setelement(1, M, edit)]] ++
        [{?M, apply_edit, [Bad, M]} || Bad <- [x, {}, M]] ++
        [{?M, apply_edit, [?M:new_edit(M), Bad]} || Bad <- [x, {}, ?M:new_edit(M)]] ++
        [{?M, F, [Bad]} || F <- [decode_root, decode_group], Bad <- [x, 1, <<1:3>>, [<<"OSIR">>], #{}]] ++
        [{?M, encode_group, [Bad, M#manifest.entries]} || Bad <- [0, 4, -1, 256, 257, 65537, 1 bsl 32, 1 bsl 70, x]] ++
        [{?M, encode_group, [1, Bad]} || Bad <- [<<>>, <<1>>, x, Group, [M#manifest.entries]]] ++
        [{?M, lookup_offset, [M, Bad]} || Bad <- [-1, 1 bsl 64, x]] ++
        [{?M, lookup_timestamp, [M, Bad]} || Bad <- [1 bsl 63, x]] ++
        [{?M, evaluate_remote_retention, [M, Bad, 0]} || Bad <- [
            x, [x], [{max_bytes, -1}], [{max_bytes, x}], [{max_age, -1}], [{max_age, 1 bsl 64}], [{max_bytes, 1, 2}], [{other, 1}],
            [{max_bytes, 1} | x], [{max_bytes, 1} | {max_age, 1}], #{max_bytes => 1}
        ]] ++
        [{?M, evaluate_remote_retention, [M, [], Bad]} || Bad <- [x, 1 bsl 63]] ++
        [{?M, resume, [Bad, C]} || C <- [Cont, Cont2], Bad <- [x, {ok, x}, {ok, <<1>>}, {perhaps, <<>>}, {ok}, {ok, [<<>>]}]] ++
        [{?M, resume, [{ok, <<>>}, Bad]} || Bad <- [x, S, A, make_ref()]],
    Before = {?CORE:manifest(S1), ?CORE:format_state(S1)},
    [
        try apply(Mod, F, Args) of
            Answer -> error({accepted, Mod, F, Args, Answer})
        catch
            error:badarg -> ok
        end
     || {Mod, F, Args} <- Calls
    ],
    [?assertError(_, ?CORE:init(M, Bad)) || Bad <- [[], x, [{stream, x}]]],
    ?assertEqual(Before, {?CORE:manifest(S1), ?CORE:format_state(S1)}),
    ct:pal("~b calls refused", [length(Calls)]).

misuse_is_explained(_) ->
    try ?CORE:persist_complete(-1, element(1, ?CORE:init(#manifest{}, options()))) of
        _ -> error(accepted)
    catch
        error:badarg:Stack ->
            Text = unicode:characters_to_binary(erl_error:format_exception(error, badarg, Stack)),
            ?assertNotEqual(nomatch, binary:match(Text, <<"revision">>))
    end.

chunks_that_are_none_raise_badarg(_) ->
    A = ?ASSEMBLY:new(100, 0),
    Chunk = chunk(0),
    [
        begin
            ?assertError(badarg, ?ASSEMBLY:add_chunk(Bad, A)),
            ?assertError(badarg, ?ASSEMBLY:add_chunks([Bad], A)),
            ?assertError(badarg, ?ASSEMBLY:add_chunks([Chunk, Bad], ?ASSEMBLY:new(100)))
        end
     || Bad <-
            [maps:remove(Key, Chunk) || Key <- maps:keys(Chunk)] ++
                [Chunk#{Key := Value} || Key <- maps:keys(Chunk), Value <- [x, 1.0, <<1>>, 1 bsl 64, 1 bsl 100, -(1 bsl 64), []]] ++
                [Chunk#{Key := -1} || Key <- maps:keys(Chunk), Key =/= timestamp] ++
                [Chunk#{Key := 1 bsl 32} || Key <- [num_records, data_size, crc]] ++
                [Chunk#{next_position := 7}, x, [], {}, <<>>, #{}, 1]
    ],
    [?assertError(badarg, ?ASSEMBLY:add_chunks(Bad, A)) || Bad <- [[Chunk | x], [Chunk | Chunk], x]],
    ?assertMatch(#{num_chunks := 1}, ?ASSEMBLY:metadata(?ASSEMBLY:add_chunk(Chunk, A))).

%% Every function of the library that answers at once, with terms of all kinds in every place.
random_terms_never_bring_the_vm_down(_) ->
    Seed = seed(),
    ct:pal("STREAM_S3_SEED=~b repeats these calls", [Seed]),
    _ = rand:seed(exsss, Seed),
    {S, []} = ?CORE:init(tier(3), options()),
    {G, _} = grouped(),
    {fetch, _, Cont} = ?M:lookup_offset(G, 5),
    Good = [
        S, ?ASSEMBLY:new(5), Cont, tier(3), G, ?M:new_edit(tier(3)), options(), meta(3), chunk(0), [chunk(0)], ?M:encode_root(tier(3)),
        ?M:encode_group(1, (tier(2))#manifest.entries), (tier(2))#manifest.entries, 0, 1, 3, 5, undefined, {ok, <<>>}, [{max_bytes, 5}]
    ],
    Pure = [
        {F, N}
     || {F, N} <- rabbitmq_stream_s3_nif:module_info(exports),
        Prefix <- ["assembly_", "core_", "manifest_", "chunk_is", "compare_log", "start_on", "check_timeline", "error_class", "retry_delay",
            "valid_stream_id", "object_key"],
        lists:prefix(Prefix, atom_to_list(F))
    ],
    ?assert(length(Pure) > 40),
    Outcomes = [
        begin
            {F, N} = pick(Pure),
            Args = [argument(Good) || _ <- lists:seq(1, N)],
            try apply(rabbitmq_stream_s3_nif, F, Args) of
                _ -> answered
            catch
                error:{badarg, Text} when is_binary(Text) -> refused;
                error:badarg -> refused;
                error:{gap, _, _} -> refused;
                Class:Reason -> error({Seed, F, Args, Class, Reason})
            end
        end
     || _ <- lists:seq(1, 30000)
    ],
    Answered = length([x || answered <- Outcomes]),
    ct:pal("~b calls answered, ~b refused", [Answered, length(Outcomes) - Answered]),
    ?assert(Answered > 500),
    ?assertEqual(tier(3), ?CORE:manifest(S)).

seed() ->
    case os:getenv("STREAM_S3_SEED") of
        false -> erlang:system_time() rem (1 bsl 32);
        Text -> list_to_integer(Text)
    end.

argument(Good) ->
    case rand:uniform(10) of
        N when N =< 5 -> pick(Good);
        6 -> mutate(pick(Good));
        _ -> term(3)
    end.

%% A good term with one element replaced, or one byte.
mutate(Tuple) when is_tuple(Tuple), Tuple =/= {} -> setelement(rand:uniform(tuple_size(Tuple)), Tuple, term(2));
mutate(Map) when is_map(Map), map_size(Map) > 0 ->
    Map#{pick(maps:keys(Map)) := term(2)};
mutate([Head | Tail]) -> pick([[mutate(Head) | Tail], [Head | term(1)]]);
mutate(Binary) when is_binary(Binary), Binary =/= <<>> -> set(Binary, rand:uniform(byte_size(Binary)) - 1, <<(rand:uniform(256) - 1)>>);
mutate(_) -> term(2).

term(Depth) ->
    Leaves = [
        fun() -> pick([0, 1, -1, 255, 256, 65536, 1 bsl 31, 1 bsl 32, 1 bsl 59, 1 bsl 60, 1 bsl 63, (1 bsl 64) - 1, 1 bsl 64, -(1 bsl 63),
            1 bsl 127, 1 bsl 128, -(1 bsl 127), 1 bsl 1000, 1.5, -0.0]) end,
        fun() -> pick([ok, error, undefined, true, conflict, timeout, '', max_bytes, fragment, root, group]) end,
        fun() -> rand:bytes(rand:uniform(80) - 1) end,
        fun() -> pick([<<>>, <<1:7>>, <<"a-stream">>, <<255, 254>>, "text", [], {}, #{}, [a | b], [[[]] | <<>>]]) end,
        fun() -> pick([self(), make_ref(), fun() -> ok end, fun lists:map/2]) end
    ],
    Nodes = [
        fun() -> list_to_tuple([term(Depth - 1) || _ <- lists:seq(1, rand:uniform(9))]) end,
        fun() -> [term(Depth - 1) || _ <- lists:seq(1, rand:uniform(4))] end,
        fun() -> #{term(Depth - 1) => term(Depth - 1), term(Depth - 1) => term(Depth - 1)} end,
        fun() -> {pick([manifest, edit, ok, error, http, fragment]), term(Depth - 1)} end
    ],
    Make = case Depth of 0 -> pick(Leaves); _ -> pick(Leaves ++ Nodes) end,
    Make().

pick(List) -> lists:nth(rand:uniform(length(List)), List).

%% --- helpers ---------------------------------------------------------------------------------------------------------

bad_uids() -> [-1, 1 bsl 32, 1 bsl 64, 1.0, x, <<"00000001">>, undefined].

bad_manifests(M) ->
    [
        x, {}, {manifest}, setelement(1, M, edit), erlang:append_element(M, x), ?M:new_edit(M),
        M#manifest{first_offset = -1}, M#manifest{first_offset = 1 bsl 64}, M#manifest{first_timestamp = x},
        M#manifest{first_last_timestamp = 1 bsl 63}, M#manifest{next_offset = 1.0}, M#manifest{total_size = -1},
        M#manifest{total_size = 1 bsl 200}, M#manifest{revision = -1}, M#manifest{entries = x}, M#manifest{entries = <<1>>},
        M#manifest{entries = <<1:3>>}, M#manifest{entries = ?ENTRY(0, 0, 0, 4, 0, 0)}, M#manifest{entries = [M#manifest.entries]}
    ].

options() ->
    #{
        stream => <<"s">>, dir => "/d", epoch => 1, reference => r, persist_threshold => 1, persist_interval_ms => 1000,
        rebalance_threshold => 1024
    }.

chunk(Id) ->
    #{
        chunk_id => Id, timestamp => 1, num_records => 1, data_size => 10, position => 8, next_position => 66, segment_offset => 0, crc => 0
    }.

meta(N) ->
    #{
        first_offset => 10 * N, first_timestamp => 1000 + 10 * N, last_timestamp => 1005 + 10 * N, next_offset => 10 * N + 10, size => 100,
        num_chunks => 1, spans => [{0, 8, 108}]
    }.

uid(N) -> 1000 + N.

fragment(N) -> ?ENTRY(10 * N, 1000 + 10 * N, 1005 + 10 * N, ?MANIFEST_KIND_FRAGMENT, 100, uid(N)).

group(Kind, First, Last, Uid) -> ?ENTRY(10 * First, 1000 + 10 * First, 1005 + 10 * Last, Kind, 0, Uid).

tier(Count) -> tail(0, Count).

%% Fragments First to Count - 1.
tail(First, Count) ->
    #manifest{
        first_offset = 10 * First,
        first_timestamp = 1000 + 10 * First,
        first_last_timestamp = 1005 + 10 * First,
        next_offset = 10 * Count,
        total_size = 100 * (Count - First),
        entries = iolist_to_binary([fragment(N) || N <- lists:seq(First, Count - 1)])
    }.

%% Ten fragments: two groups of two in a kilo-group, a group of two, four by themselves.
grouped() ->
    Objects = #{
        {2, 0, 500} => <<(group(1, 0, 1, 100))/binary, (group(1, 2, 3, 101))/binary>>,
        {1, 0, 100} => <<(fragment(0))/binary, (fragment(1))/binary>>,
        {1, 20, 101} => <<(fragment(2))/binary, (fragment(3))/binary>>,
        {1, 40, 102} => <<(fragment(4))/binary, (fragment(5))/binary>>
    },
    Entries = [group(2, 0, 3, 500), group(1, 4, 5, 102) | [fragment(N) || N <- lists:seq(6, 9)]],
    Fetch = fun(#group_ref{kind = Kind, offset = Offset, uid = Uid}) -> {ok, maps:get({Kind, Offset, Uid}, Objects)} end,
    {(tier(10))#manifest{entries = iolist_to_binary(Entries)}, Fetch}.

found({fetch, Group, Cont}, Fetch) -> found(?M:resume(Fetch(Group), Cont), Fetch);
found(Answer, _Fetch) -> Answer.

%% What retention answers when it drops so many of the oldest fragments, but not all.
dropped(M, Count) ->
    {
        (?M:new_edit(M))#edit{
            first_offset = 10 * Count,
            first_timestamp = 1000 + 10 * Count,
            first_last_timestamp = 1005 + 10 * Count,
            size = -100 * Count,
            len = 34 * Count
        },
        [#fragment_ref{offset = 10 * N, uid = uid(N), size = 100} || N <- lists:seq(0, Count - 1)]
    }.

set(Bytes, At, New) ->
    Size = byte_size(New),
    <<Head:At/binary, _:Size/binary, Tail/binary>> = Bytes,
    <<Head/binary, New/binary, Tail/binary>>.
