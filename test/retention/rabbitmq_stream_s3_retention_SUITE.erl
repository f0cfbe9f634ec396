%% Retention of the remote tier and of the local log: real osiris, real Khepri, a bucket that is a folder, and one behind a
%% server that refuses deletions.
-module(rabbitmq_stream_s3_retention_SUITE).

-include("rabbitmq_stream_s3.hrl").
-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-import(stream_s3_wait, [eventually/2, kill/1]).

-compile(nowarn_export_all).
-compile(export_all).

-define(READER, rabbitmq_stream_s3_replica_reader).
-define(REAPER, rabbitmq_stream_s3_reaper).
-define(TIMEOUT, 20000).
%% Fragments of four records and the overhead of their chunks.
-define(ENV, #{
    fragment_target_size => 2000,
    persist_interval_ms => 20,
    reconciliation_interval_ms => 50,
    upload_retry_delay_ms => 10,
    upload_retry_delay_max_ms => 100,
    task_retry_delay_max_ms => 100,
    rebalance_threshold => 1024,
    remote_max_bytes => unlimited,
    remote_max_age_ms => unlimited,
    local_retention => policy
}).

suite() -> [{timetrap, {seconds, 60}}].

all() ->
    [{group, folder}, {group, server}].

groups() ->
    [
        {folder, [], [
            a_tier_above_its_limit_loses_its_oldest_fragments,
            limits_hold_for_a_stream_that_is_idle,
            a_tier_that_is_consumed_wholly_goes_on_where_it_ended,
            groups_are_consumed_in_part_and_as_a_whole,
            nothing_that_is_listed_is_missing_when_all_dies_between_persist_and_deletion,
            what_a_conflict_leaves_undecided_is_not_deleted,
            segments_below_the_tier_go_and_the_last_one_stays,
            a_segment_that_is_not_tiered_as_a_whole_stays,
            whoever_waits_for_an_offset_finds_the_log_trimmed,
            readers_of_osiris_go_on_when_segments_go,
            a_replica_that_is_behind_holds_segments_back,
            by_default_the_local_log_is_left_to_osiris,
            a_log_that_cannot_be_trimmed_harms_nobody,
            the_application_ends_when_osiris_is_through_with_it
        ]},
        {server, [], [
            a_group_that_cannot_be_read_stops_retention_until_it_can,
            deletions_that_fail_are_repeated,
            a_key_that_cannot_be_deleted_does_not_keep_the_others
        ]}
    ].

init_per_group(folder, Config) -> start_world(fs, Config);
init_per_group(server, Config) -> start_world(s3, Config).

start_world(Store, Config) ->
    Dir = filename:join(?config(priv_dir, Config), Store),
    Keeper = stream_s3_keeper:start(fun() -> stream_s3_world:start(#{store => Store, dir => Dir, env => ?ENV}) end),
    World = stream_s3_keeper:value(Keeper),
    [{keeper, Keeper}, {world, World}, {bucket, stream_s3_world:bucket(World)} | Config].

end_per_group(_Group, Config) ->
    stream_s3_keeper:stop(?config(keeper, Config), fun stream_s3_world:stop/1).

init_per_testcase(Case, Config) ->
    Conf = stream_s3_osiris:config(atom_to_binary(Case), #{max_segment_size_bytes => 10000}),
    [{stream, atom_to_binary(Case)}, {conf, Conf}, {logs, stream_s3_logs:start()} | Config].

end_per_testcase(_Case, Config) ->
    ok = stream_s3_logs:stop(?config(logs, Config)),
    ok = osiris:delete_cluster(?config(conf, Config)),
    stream_s3_world:set(?ENV).

%% --- the remote tier -------------------------------------------------------------------------------------------------

a_tier_above_its_limit_loses_its_oldest_fragments(Config) ->
    Stream = ?config(stream, Config),
    ok = stream_s3_world:set(#{remote_max_bytes => 20000}),
    Writer = start_stream(Config),
    Before = maps:get(objects_deleted, rabbitmq_stream_s3_counters:get(objects)),
    write(Writer, 0, 200),
    ok = settle(Config, Writer),
    End = stream_s3_osiris:next_offset(Writer),
    ok = eventually(true, fun() -> stream_s3_world:tiered_bytes(Stream) =< 20000 end),
    {First, End} = rabbitmq_stream_s3:get_range(Stream),
    ?assert(First > 0),
    ok = only_listed_objects_stay(Config),
    {#manifest{total_size = Total}, Fragments} = listed(Config),
    ?assertEqual(Total, lists:sum([Size || #{size := Size} <- Fragments])),
    %% No more than it takes: with the youngest that went it would be above the limit.
    ?assert(Total > 20000 - 3000),
    %% Counted when the store has answered. Four records make a fragment.
    ok = eventually(true, fun() -> maps:get(fragments_deleted, counters(Config)) >= First div 4 end),
    #{fragments_deleted := Deleted, remote_tier_retention_failures := 0} = counters(Config),
    ?assert(maps:get(objects_deleted, rabbitmq_stream_s3_counters:get(objects)) - Before >= Deleted),
    verify(Config).

limits_hold_for_a_stream_that_is_idle(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    write(Writer, 0, 40),
    ok = settle(Config, Writer),
    ?assertEqual({0, 40}, rabbitmq_stream_s3:get_range(Stream)),
    Fragments = length(element(2, listed(Config))),
    ok = stream_s3_world:set(#{remote_max_bytes => 5000}),
    ok = eventually(true, fun() -> stream_s3_world:tiered_bytes(Stream) =< 5000 end),
    {First, 40} = rabbitmq_stream_s3:get_range(Stream),
    ok = only_listed_objects_stay(Config),
    ?assertMatch(#{fragments_deleted := N} when N < Fragments, counters(Config)),
    ok = stream_s3_world:set(#{remote_max_bytes => unlimited}),
    write(Writer, 40, 40),
    ok = settle(Config, Writer),
    ?assertMatch({First, _}, rabbitmq_stream_s3:get_range(Stream)).

a_tier_that_is_consumed_wholly_goes_on_where_it_ended(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    write(Writer, 0, 40),
    ok = settle(Config, Writer),
    ok = stream_s3_world:set(#{remote_max_age_ms => 1}),
    ok = eventually(empty, fun() -> rabbitmq_stream_s3:get_range(Stream) end),
    {#manifest{first_offset = First, next_offset = Next, total_size = Total}, []} = listed(Config),
    ?assertEqual({40, 40, 0}, {First, Next, Total}),
    ok = only_listed_objects_stay(Config),
    ok = stream_s3_world:set(#{remote_max_age_ms => unlimited}),
    write(Writer, 40, 20),
    ok = settle(Config, Writer),
    ?assertMatch({40, _}, rabbitmq_stream_s3:get_range(Stream)),
    %% And so does a reader that finds the empty tier.
    ok = stream_s3_world:set(#{remote_max_age_ms => 1}),
    ok = eventually(empty, fun() -> rabbitmq_stream_s3:get_range(Stream) end),
    ok = stream_s3_world:set(#{remote_max_age_ms => unlimited}),
    From = stream_s3_osiris:next_offset(Writer),
    ok = stream_s3_world:kill_reader(Stream),
    write(Writer, 60, 20),
    ok = settle(Config, Writer),
    ?assertMatch({From, _}, rabbitmq_stream_s3:get_range(Stream)),
    ?assertMatch(#{remote_tier_ahead_recoveries := 0, local_log_ahead_recoveries := 0}, counters(Config)),
    verify(Config).

groups_are_consumed_in_part_and_as_a_whole(Config) ->
    Stream = ?config(stream, Config),
    ok = stream_s3_world:set(#{rebalance_threshold => 3}),
    Writer = start_stream(Config),
    write(Writer, 0, 160),
    ok = settle(Config, Writer),
    {#manifest{entries = Entries}, _} = listed(Config),
    ?assertMatch(?ENTRY(0, _, _, Kind, 0, _, _) when Kind >= ?MANIFEST_KIND_KILO_GROUP, Entries),
    [
        begin
            ok = stream_s3_world:set(#{remote_max_bytes => Limit}),
            ok = eventually(true, fun() -> stream_s3_world:tiered_bytes(Stream) =< Limit end),
            ok = dropped_objects_go(Config),
            ok = verify(Config),
            write(Writer, 1000 + N * 20, 20),
            ok = settle(Config, Writer),
            %% What the limit drops while the next fragments come.
            ok = dropped_objects_go(Config)
        end
     || {N, Limit} <- lists:enumerate([80000, 77000, 60000, 41000, 20000, 3000])
    ],
    ok = eventually(true, fun() -> maps:get(groups_deleted, counters(Config)) > 0 end),
    ok = eventually(true, fun() -> stream_s3_world:tiered_bytes(Stream) =< 3000 end),
    verify(Config).

nothing_that_is_listed_is_missing_when_all_dies_between_persist_and_deletion(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    write(Writer, 0, 80),
    ok = settle(Config, Writer),
    Keys = keys(Config),
    ok = sys:suspend(?REAPER),
    ok = stream_s3_world:set(#{remote_max_bytes => 10000}),
    ok = eventually(true, fun() -> stream_s3_world:tiered_bytes(Stream) =< 10000 end),
    ok = stream_s3_world:kill_reader(Stream),
    ok = kill(whereis(?REAPER)),
    write(Writer, 80, 20),
    ok = settle(Config, Writer),
    %% What nobody knows of any more stays, and what is listed is there.
    Stayed = keys(Config),
    ?assertEqual([], [Key || Key <- Keys, filename:extension(Key) =:= <<".fragment">>] -- Stayed),
    {_, Fragments} = listed(Config),
    ?assertEqual([], [Key || #{key := Key} <- Fragments] -- Stayed),
    [_ = stream_s3_bucket:chunk_bytes(?config(bucket, Config), Fragment) || Fragment <- Fragments],
    ok.

what_a_conflict_leaves_undecided_is_not_deleted(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    write(Writer, 0, 80),
    ok = settle(Config, Writer),
    {#manifest{}, Before} = listed(Config),
    %% A rival persists the same manifest; so the persist that would drop fragments fails, and the reader starts anew.
    {{Uid, Epoch}, Revision} = stream_s3_world:pointer(Stream),
    {ok, Manifest} = rabbitmq_stream_s3_store:get_root(Stream, Epoch, Uid, ?TIMEOUT),
    {ok, NewUid} = rabbitmq_stream_s3_store:put_root(Stream, Epoch, Manifest, ?TIMEOUT),
    {ok, _, _} = rabbitmq_stream_s3_metadata:put(Stream, {NewUid, Epoch}, Revision),
    ok = sys:suspend(?REAPER),
    ok = stream_s3_world:set(#{remote_max_bytes => 10000}),
    ok = eventually(true, fun() -> maps:get(persist_conflicts, counters(Config)) =:= 1 end),
    ok = stream_s3_world:set(#{remote_max_bytes => unlimited}),
    ok = sys:resume(?REAPER),
    write(Writer, 80, 20),
    ok = settle(Config, Writer),
    {_, After} = listed(Config),
    case rabbitmq_stream_s3:get_range(Stream) of
        {0, _} -> ?assertEqual([], [Key || #{key := Key} <- Before] -- [Key || #{key := Key} <- After]);
        %% The reader that started anew was quick to evaluate again, before the limit was lifted.
        {First, _} when First > 0 -> ok
    end,
    verify(Config).

a_group_that_cannot_be_read_stops_retention_until_it_can(Config) ->
    Stream = ?config(stream, Config),
    ok = stream_s3_world:set(#{rebalance_threshold => 3}),
    Writer = start_stream(Config),
    write(Writer, 0, 100),
    ok = settle(Config, Writer),
    Server = stream_s3_world:s3local(?config(world, Config)),
    ok = stream_s3_store_faults:add(Server, [#{op => get, key => "*group", do => status, status => 403, code => "AccessDenied"}]),
    ok = stream_s3_world:set(#{remote_max_bytes => 3000}),
    {warning, _} = stream_s3_logs:await(?config(logs, Config), ["^stream ", Stream, ": retaining fails and is tried again: .*403"], ?TIMEOUT),
    ?assertMatch(#{remote_tier_retention_failures := N} when N > 0, counters(Config)),
    ?assertMatch({0, 100}, rabbitmq_stream_s3:get_range(Stream)),
    ?assertMatch(#{problems := [#{doing := retaining}]}, rabbitmq_stream_s3:status(Stream)),
    ok = stream_s3_store_faults:clear(Server),
    ok = eventually(true, fun() -> stream_s3_world:tiered_bytes(Stream) =< 3000 end),
    ok = dropped_objects_go(Config),
    ?assertMatch(#{problems := []}, rabbitmq_stream_s3:status(Stream)),
    verify(Config).

deletions_that_fail_are_repeated(Config) ->
    Writer = start_stream(Config),
    write(Writer, 0, 80),
    ok = settle(Config, Writer),
    Server = stream_s3_world:s3local(?config(world, Config)),
    [ok = stream_s3_store_faults:add(Server, [#{op => Op, do => status, status => 503}]) || Op <- [multi_delete, delete]],
    Keys = keys(Config),
    ok = stream_s3_world:set(#{remote_max_bytes => 10000}),
    ok = eventually(true, fun() -> maps:get(failures, ?REAPER:status()) > 2 end),
    ?assertEqual([], [Key || Key <- Keys, filename:extension(Key) =:= <<".fragment">>] -- keys(Config)),
    ?assertMatch(#{waiting := N} when N > 0, ?REAPER:status()),
    ?assertMatch(#{fragments_deleted := 0}, counters(Config)),
    ok = stream_s3_store_faults:clear(Server),
    ok = only_listed_objects_stay(Config),
    ok = eventually(#{waiting => 0, failures => 0, cause => none}, fun() -> ?REAPER:status() end),
    ?assertMatch(#{objects_delete_failed := N} when N > 0, rabbitmq_stream_s3_counters:get(objects)),
    verify(Config).

a_key_that_cannot_be_deleted_does_not_keep_the_others(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    write(Writer, 0, 80),
    ok = settle(Config, Writer),
    {_, [#{key := Kept} | _]} = listed(Config),
    Server = stream_s3_world:s3local(?config(world, Config)),
    ok = stream_s3_store_faults:add(Server, [#{op => delete_key, key => Kept, do => status, status => 403, code => "AccessDenied"}]),
    ok = stream_s3_world:set(#{remote_max_bytes => 10000}),
    ok = eventually(true, fun() -> stream_s3_world:tiered_bytes(Stream) =< 10000 end),
    ok = eventually([Kept], fun() -> unlisted(Config) end),
    ok = stream_s3_store_faults:clear(Server),
    only_listed_objects_stay(Config).

%% --- the local log ---------------------------------------------------------------------------------------------------

segments_below_the_tier_go_and_the_last_one_stays(Config) ->
    Writer = start_stream(Config),
    write(Writer, 0, 200),
    Before = segments(Writer),
    ?assert(length(Before) > 5),
    ok = stream_s3_world:set(#{local_retention => uploaded}),
    ok = settle(Config, Writer),
    ok = eventually([lists:last(Before)], fun() -> segments(Writer) end),
    #{first := First, next := Next} = range(Writer),
    ?assertEqual({lists:last(Before), stream_s3_osiris:next_offset(Writer)}, {First, Next}),
    ?assertMatch(#{first_offset := First, segments := 1}, osiris_counters:overview({osiris_writer, maps:get(reference, ?config(conf, Config))})),
    %% All that is gone is in the tier, byte for byte.
    {_, Fragments} = listed(Config),
    Remote = iolist_to_binary([stream_s3_bucket:chunk_bytes(?config(bucket, Config), Fragment) || Fragment <- Fragments]),
    ?assertEqual(lists:seq(0, 199), records(Remote)),
    %% And the stream lives on.
    write(Writer, 200, 100),
    ok = settle(Config, Writer),
    ok = eventually(1, fun() -> length(segments(Writer)) end).

a_segment_that_is_not_tiered_as_a_whole_stays(Config) ->
    ok = stream_s3_world:set(#{local_retention => uploaded, fragment_target_size => 1 bsl 30}),
    Writer = start_stream(Config),
    ok = ?READER:await_offset(?config(stream, Config), 0),
    write(Writer, 0, 100),
    ok = ?READER:force_cut(?config(stream, Config)),
    Tiered = stream_s3_osiris:next_offset(Writer),
    ok = ?READER:await_offset(?config(stream, Config), Tiered, ?TIMEOUT),
    %% What follows is committed, but in no fragment.
    write(Writer, 100, 100),
    Kept = segments(Writer),
    ok = eventually(true, fun() -> hd(segments(Writer)) > 0 end),
    Holding = lists:last([First || First <- Kept, First =< Tiered]),
    ok = eventually(Holding, fun() -> hd(segments(Writer)) end),
    ok = nothing_changes(fun() -> segments(Writer) end),
    ?assert(Holding =< Tiered).

whoever_waits_for_an_offset_finds_the_log_trimmed(Config) ->
    Stream = ?config(stream, Config),
    %% So that no look at an idle stream comes to help.
    ok = stream_s3_world:set(#{local_retention => uploaded, reconciliation_interval_ms => 600000, fragment_target_size => 1 bsl 30}),
    Writer = start_stream(Config),
    ok = ?READER:await_offset(Stream, 0),
    [
        begin
            write(Writer, N * 40, 40),
            ok = ?READER:force_cut(Stream),
            ok = ?READER:await_offset(Stream, stream_s3_osiris:next_offset(Writer), ?TIMEOUT),
            ?assertEqual(1, length(segments(Writer)))
        end
     || N <- lists:seq(0, 4)
    ].

readers_of_osiris_go_on_when_segments_go(Config) ->
    Writer = start_stream(Config),
    write(Writer, 0, 60),
    {ok, Log} = osiris:init_reader(Writer, first, {reader, []}),
    {[_ | _], Log1} = osiris_log:read_chunk_parsed(Log),
    ok = stream_s3_world:set(#{local_retention => uploaded}),
    write(Writer, 60, 60),
    ok = settle(Config, Writer),
    ok = eventually(1, fun() -> length(segments(Writer)) end),
    write(Writer, 120, 10),
    %% It jumps over what is gone and reads to the end.
    ?assertEqual(stream_s3_osiris:next_offset(Writer) - 1, last_read(Log1, none)).

last_read(Log, Last) ->
    case osiris_log:read_chunk_parsed(Log) of
        {end_of_stream, Next} ->
            ok = osiris_log:close(Next),
            Last;
        {Records, Next} ->
            last_read(Next, element(1, lists:last(Records)))
    end.

a_replica_that_is_behind_holds_segments_back(Config) ->
    Writer = start_stream(Config),
    write(Writer, 0, 100),
    ok = settle(Config, Writer),
    {ok, Context} = rabbitmq_stream_s3_log:context(Writer, ?TIMEOUT),
    [_, Second, Third | _] = segments(Writer),
    Until = fun() -> erlang:monotonic_time(millisecond) + ?TIMEOUT end,
    %% The position as osiris tells it; the answer stands in for the writer's.
    Writing = fun(Position) -> spawn_link(fun() -> answer_for_a_writer(#{node() => {99, 0}, other@node => {Position, 0}}) end) end,
    ?assertEqual({ok, 0}, rabbitmq_stream_s3_retention:local(Context, Writing(-1), 100, Until())),
    ?assertEqual({ok, 0}, rabbitmq_stream_s3_retention:local(Context, Writing(Second - 1), 100, Until())),
    ?assertEqual({ok, 1}, rabbitmq_stream_s3_retention:local(Context, Writing(Third - 1), 100, Until())),
    ?assertEqual(Second, hd(segments(Writer))).

answer_for_a_writer(Positions) ->
    receive
        {'$gen_call', From, query_replication_state} -> gen:reply(From, Positions);
        {'$gen_cast', _} -> answer_for_a_writer(Positions);
        Call when element(1, Call) =:= '$gen_call' -> gen:reply(element(2, Call), Positions)
    end.

by_default_the_local_log_is_left_to_osiris(Config) ->
    Writer = start_stream(Config),
    write(Writer, 0, 100),
    ok = settle(Config, Writer),
    Segments = segments(Writer),
    ?assert(length(Segments) > 1),
    ok = nothing_changes(fun() -> segments(Writer) end).

a_log_that_cannot_be_trimmed_harms_nobody(Config) ->
    Stream = ?config(stream, Config),
    Writer = start_stream(Config),
    write(Writer, 0, 40),
    ok = settle(Config, Writer),
    {ok, Context} = rabbitmq_stream_s3_log:context(Writer, ?TIMEOUT),
    Retention = whereis(osiris_retention),
    Until = erlang:monotonic_time(millisecond) + ?TIMEOUT,
    %% An atomics reference that is none raises inside osiris' process; so does a folder that is gone.
    ?assertMatch({error, _}, rabbitmq_stream_s3_retention:local(Context#{shared := none}, Writer, 1 bsl 40, Until)),
    ok = rabbitmq_stream_s3_retention:settle(),
    ?assertEqual(Retention, whereis(osiris_retention)),
    write(Writer, 40, 10),
    ok = settle(Config, Writer),
    ?assertMatch(#{state := running}, rabbitmq_stream_s3:status(Stream)).

the_application_ends_when_osiris_is_through_with_it(Config) ->
    Writer = start_stream(Config),
    write(Writer, 0, 1),
    Test = self(),
    Busy = fun(_Evaluated) ->
        Test ! {busy, self()},
        receive
            go_on -> ok
        end
    end,
    ok = osiris_retention:eval(<<"busy">>, stream_s3_osiris:dir(Writer), [{max_bytes, 1 bsl 62}], Busy),
    Osiris =
        receive
            {busy, Pid} -> Pid
        end,
    {_, Settling} = spawn_monitor(fun() -> ok = rabbitmq_stream_s3_retention:settle() end),
    receive
        {'DOWN', Settling, process, _, Early} -> ct:fail({settled, Early})
    after 200 -> ok
    end,
    Osiris ! go_on,
    receive
        {'DOWN', Settling, process, _, Reason} -> ?assertEqual(normal, Reason)
    end.

%% --- helpers ---------------------------------------------------------------------------------------------------------

start_stream(Config) ->
    Writer = stream_s3_osiris:start_stream(?config(conf, Config)),
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    Writer.

%% So many chunks of one record of 500 bytes.
write(Writer, First, Count) ->
    [ok = stream_s3_osiris:write_chunk(Writer, [<<N:32, 0:(496 * 8)>>]) || N <- lists:seq(First, First + Count - 1)],
    ok.

settle(Config, Writer) ->
    stream_s3_world:settle(?config(stream, Config), stream_s3_osiris:next_offset(Writer), ?TIMEOUT).

records(Bytes) ->
    [N || Chunk <- stream_s3_chunks:all(Bytes), <<N:32, _/binary>> <- stream_s3_chunks:records(Chunk)].

range(Writer) ->
    {ok, Context} = rabbitmq_stream_s3_log:context(Writer, ?TIMEOUT),
    {ok, Range} = rabbitmq_stream_s3_log:range(Context),
    Range.

segments(Writer) ->
    [First || {First, _} <- rabbitmq_stream_s3_log:index_files(stream_s3_osiris:dir(Writer))].

keys(Config) ->
    stream_s3_bucket:keys(?config(bucket, Config), ?config(stream, Config)).

%% The persisted manifest, and the fragments that it lists: those inside groups that lie below its first offset are not.
listed(Config) ->
    {Pointer, _} = stream_s3_world:pointer(?config(stream, Config)),
    stream_s3_bucket:fragments(?config(bucket, Config), ?config(stream, Config), Pointer).

%% Fragments that no manifest lists.
unlisted(Config) ->
    {_, Fragments} = listed(Config),
    [Key || Key <- keys(Config), filename:extension(Key) =:= <<".fragment">>] -- [Key || #{key := Key} <- Fragments].

only_listed_objects_stay(Config) ->
    eventually([], fun() -> unlisted(Config) end).

%% For a manifest with groups: no fragment below its first offset is there, and each one from there on is.
dropped_objects_go(Config) ->
    Stream = ?config(stream, Config),
    eventually([], fun() ->
        {ok, {Uid, Epoch}, _} = rabbitmq_stream_s3_metadata:get(Stream),
        case rabbitmq_stream_s3_store:get_root(Stream, Epoch, Uid, ?TIMEOUT) of
            {ok, #manifest{first_offset = First}} ->
                [
                    Offset
                 || Key <- keys(Config),
                    {fragment, _, Offset, _} <- [rabbitmq_stream_s3_store:parse_key(Key)],
                    Offset < First
                ];
            {error, {not_found, _}} ->
                replaced_meanwhile
        end
    end).

counters(Config) ->
    rabbitmq_stream_s3_counters:get({stream, ?config(stream, Config)}).

%% The second reader of the bucket finds all that is listed.
verify(Config) ->
    Stream = ?config(stream, Config),
    {Pointer, _} = stream_s3_world:pointer(Stream),
    try
        stream_s3_cli:verify(stream_s3_world:store(?config(world, Config)), Stream, Pointer)
    catch
        error:{not_clean, _, _} = NotClean ->
            %% What retention decides is persisted by itself, and then the root so far is deleted.
            case stream_s3_world:pointer(Stream) of
                {Pointer, _} -> error(NotClean);
                {_Next, _} -> verify(Config)
            end
    end.

%% Over several looks of the reader.
nothing_changes(Fun) ->
    Value = Fun(),
    [
        receive
        after 20 -> ?assertEqual(Value, Fun())
        end
     || _ <- lists:seq(1, 15)
    ],
    ok.
