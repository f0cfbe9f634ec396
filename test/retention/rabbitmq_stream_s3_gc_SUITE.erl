%% Garbage collection and the deletion of whole streams: real osiris, real Khepri, a bucket that is a folder, so that objects can
%% be given any age.
-module(rabbitmq_stream_s3_gc_SUITE).

-include("rabbitmq_stream_s3.hrl").
-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-import(stream_s3_wait, [eventually/2, kill/1]).

-compile(nowarn_export_all).
-compile(export_all).

-define(READER, rabbitmq_stream_s3_replica_reader).
-define(REAPER, rabbitmq_stream_s3_reaper).
-define(METADATA, rabbitmq_stream_s3_metadata).
-define(GC, rabbitmq_stream_s3_gc).
-define(TIMEOUT, 20000).
-define(HOUR_MS, 3600000).
-define(ENV, #{
    fragment_target_size => 2000,
    persist_interval_ms => 20,
    reconciliation_interval_ms => 60000,
    upload_retry_delay_ms => 10,
    upload_retry_delay_max_ms => 100,
    task_retry_delay_max_ms => 100,
    rebalance_threshold => 1024,
    remote_max_bytes => unlimited,
    retention_timeout_ms => 60000,
    discarded_tier_grace_ms => 86400000,
    gc_enabled => false,
    gc_mode => delete,
    gc_min_age_ms => ?HOUR_MS
}).

suite() -> [{timetrap, {seconds, 60}}].

all() ->
    [
        %% First, as no stream is there yet.
        a_metadata_store_that_knows_no_stream_condemns_none,
        orphans_of_a_crash_are_found_by_a_dry_run_and_gone_after_a_deletion,
        listed_objects_stay_however_old,
        a_busy_stream_loses_nothing,
        young_orphans_stay,
        fragments_beyond_the_manifest_stay,
        keys_of_unknown_shape_stay,
        a_group_that_cannot_be_read_protects_all_of_its_stream,
        a_deleted_stream_leaves_nothing_and_one_with_a_longer_id_everything,
        a_deletion_is_noticed_when_no_reader_is_there,
        objects_of_a_deleted_stream_go_when_they_are_old_enough,
        what_is_too_young_is_remembered_by_the_bucket_when_a_node_is_restarted,
        a_stream_that_is_there_again_is_left_alone,
        a_walk_collects_what_earlier_deletions_have_left,
        nothing_goes_while_the_metadata_store_does_not_answer,
        the_deletion_of_a_stream_goes_on_when_the_metadata_store_is_back,
        a_discarded_tier_stays_for_its_time_and_then_goes,
        a_deposed_writer_cannot_discard_what_the_live_one_has_not_persisted_yet,
        orphans_go_only_where_that_is_enabled,
        a_walk_that_dies_is_told_and_the_next_one_comes
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
    stream_s3_world:set(?ENV).

%% --- orphans ---------------------------------------------------------------------------------------------------------

a_metadata_store_that_knows_no_stream_condemns_none(Config) ->
    ?assertEqual({ok, []}, ?METADATA:streams(?TIMEOUT)),
    Key = put_object(Config, "data/00000000000000000000.0000abcd.fragment", 100),
    ok = age(Config, [Key], 100 * ?HOUR_MS),
    ?assertMatch({ok, #{kept := #{unknown := 1}, reclaimed := #{objects := 0}}}, rabbitmq_stream_s3:gc(delete)),
    ?assertEqual([Key], keys(Config)),
    ok = delete_object(Config, Key).

orphans_of_a_crash_are_found_by_a_dry_run_and_gone_after_a_deletion(Config) ->
    Stream = ?config(stream, Config),
    ok = stream_s3_world:set(#{rebalance_threshold => 3}),
    Writer = start_stream(Config),
    write(Writer, 0, 100),
    ok = settle(Config, Writer),
    %% Retention drops fragments, also some inside groups, and those who would delete them die.
    ok = sys:suspend(?REAPER),
    ok = stream_s3_world:set(#{remote_max_bytes => 17000, reconciliation_interval_ms => 20}),
    write(Writer, 100, 10),
    ok = settle(Config, Writer),
    ok = eventually(true, fun() -> stream_s3_world:tiered_bytes(Stream) =< 17000 end),
    ok = stream_s3_world:kill_reader(Stream),
    ok = kill(whereis(?REAPER)),
    ok = eventually(true, fun() -> is_pid(whereis(?REAPER)) andalso is_pid(rabbitmq_stream_s3_registry:whereis(Stream)) end),
    {First, _} = rabbitmq_stream_s3:get_range(Stream),
    Orphans = [Key || {fragment, Offset, Key} <- parsed(Config), Offset < First],
    ?assert(length(Orphans) > 5),
    ok = age(Config, keys(Config), 3 * ?HOUR_MS),
    ok = age(Config, [current_root(Config)], ?HOUR_MS),
    Keys = keys(Config),
    Bytes = size_of(Config, Orphans),
    {ok, #{garbage := #{orphan := #{objects := N, bytes := Found}}, reclaimed := #{objects := 0}}} = rabbitmq_stream_s3:gc(dry_run),
    %% Old roots and groups that have gone as a whole are among them.
    ?assert(N >= length(Orphans)),
    ?assert(Found >= Bytes),
    ?assertEqual(Keys, keys(Config)),
    Before = rabbitmq_stream_s3_counters:get(objects),
    ?assertMatch({ok, #{reclaimed := #{objects := N, bytes := Found}, failed := 0}}, rabbitmq_stream_s3:gc(delete)),
    ?assertEqual([], [Key || Key <- keys(Config), lists:member(Key, Orphans)]),
    ok = verify(Config),
    #{gc_objects_reclaimed := Objects, gc_bytes_reclaimed := Reclaimed} = rabbitmq_stream_s3_counters:get(objects),
    ?assertEqual({N, Found}, {Objects - maps:get(gc_objects_reclaimed, Before), Reclaimed - maps:get(gc_bytes_reclaimed, Before)}),
    ?assertMatch({ok, #{garbage := Nothing}} when Nothing =:= #{}, rabbitmq_stream_s3:gc(delete)).

listed_objects_stay_however_old(Config) ->
    ok = stream_s3_world:set(#{rebalance_threshold => 3}),
    Writer = start_stream(Config),
    write(Writer, 0, 100),
    ok = settle(Config, Writer),
    ok = old_roots_go(Config),
    Keys = keys(Config),
    ?assert(length([Key || {group, _, Key} <- parsed(Config)]) > 3),
    ok = age(Config, Keys, 1000 * ?HOUR_MS),
    ?assertMatch({ok, _}, rabbitmq_stream_s3:gc(delete)),
    ?assertEqual(Keys, keys(Config)),
    %% Not even those that are much older than the root.
    ok = age(Config, [current_root(Config)], 0),
    ?assertMatch({ok, _}, rabbitmq_stream_s3:gc(delete)),
    ?assertEqual(Keys, keys(Config)),
    verify(Config).

a_busy_stream_loses_nothing(Config) ->
    ok = stream_s3_world:set(#{rebalance_threshold => 3, gc_min_age_ms => 0}),
    Writer = start_stream(Config),
    Test = self(),
    Collector = spawn_link(fun() -> collect(Test, 0) end),
    write(Writer, 0, 600),
    ok = settle(Config, Writer),
    Collector ! stop,
    receive
        {collected, Rounds} -> ?assert(Rounds > 0)
    end,
    ok = verify(Config).

collect(Test, Rounds) ->
    {ok, _} = rabbitmq_stream_s3:gc(delete),
    receive
        stop -> Test ! {collected, Rounds + 1}
    after 0 -> collect(Test, Rounds + 1)
    end.

young_orphans_stay(Config) ->
    Writer = start_stream(Config),
    write(Writer, 0, 10),
    ok = settle(Config, Writer),
    ok = old_roots_go(Config),
    Young = put_object(Config, "data/00000000000000000000.0000abcd.fragment", 100),
    Old = put_object(Config, "data/00000000000000000000.0000abce.fragment", 100),
    ok = age(Config, [Young], ?HOUR_MS - 60000),
    ok = age(Config, [Old], ?HOUR_MS + 60000),
    {ok, _} = rabbitmq_stream_s3:gc(delete),
    ?assert(lists:member(Young, keys(Config))),
    ?assertNot(lists:member(Old, keys(Config))),
    %% Old, but not much older than the root: it may belong to what is persisted next.
    ok = age(Config, [Young], 10 * ?HOUR_MS),
    ok = age(Config, [current_root(Config)], 10 * ?HOUR_MS - ?HOUR_MS div 2),
    {ok, _} = rabbitmq_stream_s3:gc(delete),
    ?assert(lists:member(Young, keys(Config))).

fragments_beyond_the_manifest_stay(Config) ->
    Writer = start_stream(Config),
    write(Writer, 0, 10),
    ok = settle(Config, Writer),
    Ahead = put_object(Config, "data/00000000000000000010.0000abcd.fragment", 100),
    Root = put_object(Config, "metadata/root.2.0000abcd.manifest", 100),
    ok = age(Config, [Ahead, Root], 100 * ?HOUR_MS),
    {ok, _} = rabbitmq_stream_s3:gc(delete),
    ?assertEqual([Ahead, Root], [Key || Key <- keys(Config), Key =:= Ahead orelse Key =:= Root]).

keys_of_unknown_shape_stay(Config) ->
    Writer = start_stream(Config),
    write(Writer, 0, 10),
    ok = settle(Config, Writer),
    Names = [
        "data/00000000000000000000.0000ABCD.fragment",
        "data/0.0000abcd.fragment",
        "data/00000000000000000000.0000abcd.fragment.bak",
        "data/deeper/00000000000000000000.0000abcd.fragment",
        "metadata/root.01.0000abcd.manifest",
        "metadata/00000000000000000000.0000abcd.ggroup",
        "notes.txt"
    ],
    Strange = [put_object(Config, Name, 10) || Name <- Names],
    Elsewhere = [put_file(Config, Key, 10) || Key <- [<<"rabbitmq/history/run/00000000000000000001.segment">>, <<"rabbitmq/notes">>, <<"notes">>]],
    ok = age(Config, Strange ++ Elsewhere, 100 * ?HOUR_MS),
    {ok, #{kept := #{not_ours := N}}} = rabbitmq_stream_s3:gc(delete),
    ?assert(N >= length(Strange)),
    ?assertEqual([], Strange -- keys(Config)),
    %% Not even with their stream.
    ok = stream_s3_world:set(#{gc_min_age_ms => 0}),
    ok = delete_stream(Config, Writer),
    ok = eventually(lists:sort(Strange), fun() -> keys(Config) end),
    ?assertEqual([], [Key || Key <- Elsewhere, not filelib:is_regular(file(Config, Key))]).

a_group_that_cannot_be_read_protects_all_of_its_stream(Config) ->
    ok = stream_s3_world:set(#{rebalance_threshold => 3}),
    Writer = start_stream(Config),
    write(Writer, 0, 60),
    ok = settle(Config, Writer),
    ok = old_roots_go(Config),
    Orphan = put_object(Config, "data/00000000000000000000.0000abcd.fragment", 100),
    ok = age(Config, [Orphan], 100 * ?HOUR_MS),
    Groups = [file(Config, Key) || {group, _, Key} <- parsed(Config)],
    [ok = file:rename(File, <<File/binary, ".away">>) || File <- Groups],
    {ok, _} = rabbitmq_stream_s3:gc(delete),
    ?assert(lists:member(Orphan, keys(Config))),
    [ok = file:rename(<<File/binary, ".away">>, File) || File <- Groups],
    {ok, _} = rabbitmq_stream_s3:gc(delete),
    ?assertNot(lists:member(Orphan, keys(Config))),
    verify(Config).

%% --- deleted streams -------------------------------------------------------------------------------------------------

a_deleted_stream_leaves_nothing_and_one_with_a_longer_id_everything(Config) ->
    Stream = ?config(stream, Config),
    ok = stream_s3_world:set(#{gc_min_age_ms => 0}),
    Writer = start_stream(Config),
    LongerId = <<Stream/binary, "_">>,
    LongerConf = stream_s3_osiris:config(LongerId),
    Longer = stream_s3_osiris:start_stream(LongerConf),
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    write(Writer, 0, 40),
    write(Longer, 0, 40),
    ok = settle(Config, Writer),
    ok = stream_s3_world:settle(LongerId, 40, ?TIMEOUT),
    ok = old_roots_go([{stream, LongerId} | Config]),
    Others = stream_s3_bucket:keys(?config(bucket, Config), LongerId),
    ?assert(length(keys(Config)) > 5),
    %% The reader finds out when it persists the next time.
    ok = ?METADATA:delete(Stream, ?TIMEOUT),
    write(Writer, 40, 20),
    ok = eventually([], fun() -> keys(Config) end),
    {notice, _} = stream_s3_logs:await(?config(logs, Config), ["garbage of the deleted stream ", Stream, ": [1-9]"], ?TIMEOUT),
    ?assertEqual(Others, stream_s3_bucket:keys(?config(bucket, Config), LongerId)),
    osiris:delete_cluster(LongerConf).

a_deletion_is_noticed_when_no_reader_is_there(Config) ->
    ok = stream_s3_world:set(#{gc_min_age_ms => 0}),
    Writer = start_stream(Config),
    write(Writer, 0, 20),
    ok = settle(Config, Writer),
    ok = look(),
    ok = osiris:stop_member(node(), ?config(conf, Config)),
    ok = eventually(undefined, fun() -> rabbitmq_stream_s3_registry:whereis(?config(stream, Config)) end),
    ok = ?METADATA:delete(?config(stream, Config), ?TIMEOUT),
    ok = look(),
    eventually([], fun() -> keys(Config) end).

objects_of_a_deleted_stream_go_when_they_are_old_enough(Config) ->
    ok = stream_s3_world:set(#{gc_min_age_ms => 3000}),
    Writer = start_stream(Config),
    write(Writer, 0, 40),
    ok = settle(Config, Writer),
    [Old | _] = [Key || {fragment, _, Key} <- parsed(Config)],
    ok = age(Config, [Old], ?HOUR_MS),
    ok = delete_stream(Config, Writer),
    ok = eventually(false, fun() -> lists:member(Old, keys(Config)) end),
    ?assert(length(keys(Config)) > 3),
    eventually([], fun() -> keys(Config) end).

what_is_too_young_is_remembered_by_the_bucket_when_a_node_is_restarted(Config) ->
    %% So that the metadata store knows one.
    Other = stream_s3_osiris:config(<<(?config(stream, Config))/binary, "_other">>),
    _ = stream_s3_osiris:start_stream(Other),
    Writer = start_stream(Config),
    ok = ?READER:await_offset(maps:get(name, Other), 0, ?TIMEOUT),
    write(Writer, 0, 40),
    ok = settle(Config, Writer),
    ok = delete_stream(Config, Writer),
    ok = kill(whereis(?GC)),
    ok = eventually(true, fun() -> is_pid(whereis(?GC)) end),
    ok = idle(),
    %% They stay young, however long the walk takes.
    Keys = [_, _, _ | _] = keys(Config),
    ok = age(Config, Keys, -?HOUR_MS),
    ok = stream_s3_world:set(#{gc_min_age_ms => 1000}),
    %% As the one that comes soon after each start.
    ok = walk(),
    ?assertEqual(Keys, keys(Config)),
    ok = age(Config, Keys, ?HOUR_MS),
    ok = eventually([], fun() -> keys(Config) end),
    osiris:delete_cluster(Other).

a_stream_that_is_there_again_is_left_alone(Config) ->
    Stream = ?config(stream, Config),
    ok = stream_s3_world:set(#{gc_min_age_ms => 0}),
    Writer = start_stream(Config),
    write(Writer, 0, 20),
    ok = settle(Config, Writer),
    Monitor = monitor(process, rabbitmq_stream_s3_registry:whereis(Stream)),
    ok = osiris:stop_member(node(), ?config(conf, Config)),
    receive
        {'DOWN', Monitor, process, _, _} -> ok
    end,
    ok = ?METADATA:delete(Stream, ?TIMEOUT),
    ok = ?METADATA:anchor(Stream, Stream, ?TIMEOUT),
    ok = old_enough(Config),
    ok = ?GC:stream_deleted(Stream),
    ok = idle(),
    ?assert(length(keys(Config)) > 3),
    ok = ?METADATA:delete(Stream, ?TIMEOUT),
    ok = ?GC:stream_deleted(Stream),
    eventually([], fun() -> keys(Config) end).

a_walk_collects_what_earlier_deletions_have_left(Config) ->
    _Writer = start_stream(Config),
    Id = <<"never_heard_of">>,
    Keys = [
        put_file(Config, iolist_to_binary(["rabbitmq/stream/", Id, "/data/", io_lib:format("~20..0b", [N]), ".0000abcd.fragment"]), 10)
     || N <- lists:seq(1, 1200)
    ],
    ok = age(Config, Keys, 2 * ?HOUR_MS),
    ok = ?READER:await_offset(?config(stream, Config), 0, ?TIMEOUT),
    %% While an operator has paused the node, streams may be about to be adopted.
    ok = rabbitmq_stream_s3:pause(),
    ok = walk(),
    ok = rabbitmq_stream_s3:resume(),
    ?assertEqual(1200, length(stream_s3_bucket:keys(?config(bucket, Config), Id))),
    ok = walk(),
    ?assertEqual([], stream_s3_bucket:keys(?config(bucket, Config), Id)),
    #{last := #{garbage := #{stream_deleted := #{objects := N, bytes := Bytes}}}} = ?GC:status(),
    ?assert(N >= 1200 andalso Bytes >= 12000).

nothing_goes_while_the_metadata_store_does_not_answer(Config) ->
    Writer = start_stream(Config),
    write(Writer, 0, 20),
    ok = settle(Config, Writer),
    Orphan = put_object(Config, "data/00000000000000000000.0000abcd.fragment", 100),
    ok = age(Config, [Orphan], 100 * ?HOUR_MS),
    Keys = keys(Config),
    ok = stream_s3_world:set(#{retention_timeout_ms => 200}),
    Khepri = whereis(?METADATA:store_id()),
    ok = sys:suspend(Khepri),
    try
        ?assertMatch({error, {metadata, timeout}, #{reclaimed := #{objects := 0}}}, rabbitmq_stream_s3:gc(delete)),
        ?assertEqual(Keys, keys(Config))
    after
        ok = sys:resume(Khepri)
    end,
    ok = stream_s3_world:set(#{retention_timeout_ms => 60000}),
    ?assertMatch({ok, _}, rabbitmq_stream_s3:gc(delete)),
    ?assertNot(lists:member(Orphan, keys(Config))).

the_deletion_of_a_stream_goes_on_when_the_metadata_store_is_back(Config) ->
    Stream = ?config(stream, Config),
    ok = stream_s3_world:set(#{gc_min_age_ms => 0, retention_timeout_ms => 200}),
    Writer = start_stream(Config),
    write(Writer, 0, 20),
    ok = settle(Config, Writer),
    ok = old_enough(Config),
    ok = osiris:stop_member(node(), ?config(conf, Config)),
    ok = ?METADATA:delete(Stream, ?TIMEOUT),
    Khepri = whereis(?METADATA:store_id()),
    ok = sys:suspend(Khepri),
    try
        ok = ?GC:stream_deleted(Stream),
        {warning, _} = stream_s3_logs:await(?config(logs, Config), ["garbage of the deleted stream ", Stream, " could not be looked for"], ?TIMEOUT),
        ?assert(length(keys(Config)) > 3)
    after
        ok = sys:resume(Khepri)
    end,
    eventually([], fun() -> keys(Config) end).

%% --- discarded tiers -------------------------------------------------------------------------------------------------

a_discarded_tier_stays_for_its_time_and_then_goes(Config) ->
    Stream = ?config(stream, Config),
    ok = stream_s3_world:set(#{gc_min_age_ms => 0}),
    First = start_stream(Config),
    write(First, 0, 30),
    ok = settle(Config, First),
    ok = old_roots_go(Config),
    Discarded = keys(Config),
    ok = old_enough(Config),
    %% Another log, shorter than the tier.
    Dir = stream_s3_osiris:dir(First),
    Monitor = monitor(process, rabbitmq_stream_s3_registry:whereis(Stream)),
    ok = osiris:stop_member(node(), ?config(conf, Config)),
    receive
        {'DOWN', Monitor, process, _, _} -> ok
    end,
    ok = file:del_dir_r(Dir),
    {ok, Second} = osiris:start_writer((?config(conf, Config))#{epoch => 2}),
    write(Second, 1000, 10),
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    ok = settle(Config, Second),
    {ok, #{discarded := {Ms, 2}}} = ?METADATA:tier(Stream, ?TIMEOUT),
    ?assert(abs(erlang:system_time(millisecond) - Ms) < ?TIMEOUT),
    {ok, #{kept := #{grace := Grace}}} = rabbitmq_stream_s3:gc(delete),
    ?assert(Grace >= length(Discarded)),
    ?assertEqual([], Discarded -- keys(Config)),
    ok = stream_s3_world:set(#{discarded_tier_grace_ms => 0}),
    %% Whether or not orphans are collected.
    ok = walk(),
    ?assertEqual([], [Key || Key <- keys(Config), lists:member(Key, Discarded)]),
    verify(Config).

%% It notes a discard, and is gone before it could put another tier in place. For GC what the live one has uploaded would be of a discarded tier.
a_deposed_writer_cannot_discard_what_the_live_one_has_not_persisted_yet(Config) ->
    Stream = ?config(stream, Config),
    First = start_stream(Config),
    write(First, 0, 30),
    ok = settle(Config, First),
    ok = osiris:stop_member(node(), ?config(conf, Config)),
    ok = stream_s3_world:set(#{persist_interval_ms => ?HOUR_MS, persist_threshold => 1000, gc_min_age_ms => 0, discarded_tier_grace_ms => 0}),
    {ok, Second} = osiris:start_writer((?config(conf, Config))#{epoch => 2}),
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    write(Second, 30, 30),
    Ahead = fun() -> [Key || {fragment, Offset, Key} <- parsed(Config), Offset >= 30] end,
    ok = eventually(true, fun() -> length(Ahead()) > 3 end),
    ?assertEqual({0, 30}, rabbitmq_stream_s3:get_range(Stream)),
    Now = erlang:system_time(millisecond),
    ?assertEqual({error, conflict}, ?METADATA:discard(Stream, Now, 1, ?TIMEOUT)),
    Uploaded = Ahead(),
    ok = age(Config, Uploaded, ?HOUR_MS),
    ?assertMatch({ok, _}, rabbitmq_stream_s3:gc(delete)),
    ?assertEqual([], Uploaded -- Ahead()),
    ?assertEqual({error, {fenced, 2}}, ?METADATA:claim_discards(Stream, 1, ?TIMEOUT)),
    ok = rabbitmq_stream_s3:flush(Stream, ?TIMEOUT),
    ?assertEqual({0, 60}, rabbitmq_stream_s3:get_range(Stream)),
    verify(Config).

%% --- settings --------------------------------------------------------------------------------------------------------

orphans_go_only_where_that_is_enabled(Config) ->
    Writer = start_stream(Config),
    write(Writer, 0, 20),
    ok = settle(Config, Writer),
    Orphan = put_object(Config, "data/00000000000000000000.0000abcd.fragment", 100),
    ok = age(Config, [Orphan], 100 * ?HOUR_MS),
    ok = walk(),
    ?assert(lists:member(Orphan, keys(Config))),
    ok = stream_s3_world:set(#{gc_enabled => true, gc_mode => dry_run}),
    ok = walk(),
    ?assert(lists:member(Orphan, keys(Config))),
    ?assertMatch(#{last := #{garbage := #{orphan := #{objects := N}}, reclaimed := #{objects := 0}}} when N > 0, ?GC:status()),
    ok = stream_s3_world:set(#{gc_mode => delete}),
    ok = walk(),
    ?assertNot(lists:member(Orphan, keys(Config))).

a_walk_that_dies_is_told_and_the_next_one_comes(Config) ->
    Writer = start_stream(Config),
    write(Writer, 0, 20),
    ok = settle(Config, Writer),
    Khepri = whereis(?METADATA:store_id()),
    ok = sys:suspend(Khepri),
    try
        whereis(?GC) ! {due, walk},
        {walk, Pid} = eventually_running(),
        exit(Pid, kill)
    after
        ok = sys:resume(Khepri)
    end,
    {warning, _} = stream_s3_logs:await(?config(logs, Config), "garbage of all streams could not be looked for: it crashed", ?TIMEOUT),
    ?assertMatch(#{last := #{error := _}}, ?GC:status()),
    ok = walk(),
    #{last := Last} = ?GC:status(),
    ?assertNot(is_map_key(error, Last)).

eventually_running() ->
    State = sys:get_state(?GC),
    case [{Job, Pid} || {Pid, _Monitor, Job} <- tuple_to_list(State), Job =:= walk] of
        [Running] ->
            Running;
        [] ->
            receive
            after 10 -> eventually_running()
            end
    end.

%% --- helpers ---------------------------------------------------------------------------------------------------------

start_stream(Config) ->
    Writer = stream_s3_osiris:start_stream(?config(conf, Config)),
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    Writer.

write(Writer, First, Count) ->
    [ok = stream_s3_osiris:write_chunk(Writer, [<<N:32, 0:(496 * 8)>>]) || N <- lists:seq(First, First + Count - 1)],
    ok.

settle(Config, Writer) ->
    stream_s3_world:settle(?config(stream, Config), stream_s3_osiris:next_offset(Writer), ?TIMEOUT).

%% As the deletion of a queue does it: metadata and log go, and the reader hears of the one or the other first.
delete_stream(Config, Writer) ->
    Stream = ?config(stream, Config),
    ok = ?METADATA:delete(Stream, ?TIMEOUT),
    write(Writer, 5000, 10),
    eventually(undefined, fun() -> rabbitmq_stream_s3_registry:whereis(Stream) end).

look() ->
    whereis(?GC) ! {due, look},
    idle().

walk() ->
    whereis(?GC) ! {due, walk},
    idle().

%% The server has taken all that was sent to it before, and nothing is under way.
idle() ->
    eventually(true, fun() ->
        #{running := Running, waiting := Waiting} = ?GC:status(),
        Running =:= none andalso Waiting =:= []
    end).

keys(Config) ->
    stream_s3_bucket:keys(?config(bucket, Config), ?config(stream, Config)).

parsed(Config) ->
    [
        {element(1, Parsed), element(tuple_size(Parsed) - 1, Parsed), Key}
     || Key <- keys(Config), Parsed <- [rabbitmq_stream_s3_store:parse_key(Key)], is_tuple(Parsed)
    ].

current_root(Config) ->
    {Pointer, _} = stream_s3_world:pointer(?config(stream, Config)),
    stream_s3_bucket:root_key(?config(bucket, Config), ?config(stream, Config), Pointer).

%% They are deleted behind the reader's back.
old_roots_go(Config) ->
    eventually(1, fun() -> length([Key || {root, _, Key} <- parsed(Config)]) end).

file(Config, Key) ->
    #{fs_dir := Dir} = stream_s3_world:store(?config(world, Config)),
    filename:join(Dir, Key).

put_object(Config, Name, Size) ->
    put_file(Config, iolist_to_binary(["rabbitmq/stream/", ?config(stream, Config), "/", Name]), Size).

put_file(Config, Key, Size) ->
    File = file(Config, Key),
    ok = filelib:ensure_dir(File),
    ok = file:write_file(File, binary:copy(<<0>>, Size)),
    Key.

delete_object(Config, Key) ->
    file:delete(file(Config, Key)).

size_of(Config, Keys) ->
    lists:sum([filelib:file_size(file(Config, Key)) || Key <- Keys]).

%% Stored so long ago. Roots that are just being deleted may be gone.
age(Config, Keys, Ms) ->
    At = calendar:system_time_to_local_time(erlang:system_time(second) - Ms div 1000, second),
    [_ = file:change_time(file(Config, Key), At) || Key <- Keys],
    ok.

%% For a minimum age of zero, which means what the store's clock can tell apart.
old_enough(Config) ->
    age(Config, keys(Config), 10000).

verify(Config) ->
    {Pointer, _} = stream_s3_world:pointer(?config(stream, Config)),
    stream_s3_cli:verify(stream_s3_world:store(?config(world, Config)), ?config(stream, Config), Pointer).
