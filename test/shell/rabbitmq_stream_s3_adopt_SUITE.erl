%% A stream whose entry in the metadata store was lost gets it back from the bucket, if somebody asks for it.
-module(rabbitmq_stream_s3_adopt_SUITE).

-include("rabbitmq_stream_s3.hrl").
-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-import(stream_s3_wait, [eventually/1]).

-export([all/0, suite/0, init_per_suite/1, end_per_suite/1, init_per_testcase/2, end_per_testcase/2]).
-export([
    a_metadata_store_that_was_lost_is_rebuilt_and_tiering_goes_on/1,
    a_reader_that_has_begun_anew_takes_what_is_adopted/1,
    of_rival_roots_that_of_the_later_epoch_is_taken/1,
    newer_roots_that_are_damaged_are_passed_over/1,
    a_named_root_that_is_damaged_is_refused/1,
    a_stream_that_has_an_entry_is_left_alone/1,
    a_writer_is_not_fenced_by_an_adoption/1,
    what_cannot_be_adopted_is_refused_with_a_reason/1
]).

-define(TIMEOUT, 20000).
-define(ENV, #{
    fragment_target_size => 2000,
    persist_interval_ms => 50,
    rebalance_threshold => 4,
    upload_retry_delay_ms => 10,
    upload_retry_delay_max_ms => 100,
    task_retry_delay_max_ms => 100
}).

suite() -> [{timetrap, {seconds, 60}}].

all() ->
    [
        a_metadata_store_that_was_lost_is_rebuilt_and_tiering_goes_on,
        a_reader_that_has_begun_anew_takes_what_is_adopted,
        of_rival_roots_that_of_the_later_epoch_is_taken,
        newer_roots_that_are_damaged_are_passed_over,
        a_named_root_that_is_damaged_is_refused,
        a_stream_that_has_an_entry_is_left_alone,
        a_writer_is_not_fenced_by_an_adoption,
        what_cannot_be_adopted_is_refused_with_a_reason
    ].

init_per_suite(Config) ->
    Dir = filename:join(?config(priv_dir, Config), "world"),
    Keeper = stream_s3_keeper:start(fun() -> stream_s3_world:start(#{store => fs, dir => Dir, env => ?ENV}) end),
    World = stream_s3_keeper:value(Keeper),
    [{keeper, Keeper}, {world, World}, {bucket, stream_s3_world:bucket(World)}, {dir, Dir} | Config].

end_per_suite(Config) ->
    stream_s3_keeper:stop(?config(keeper, Config), fun stream_s3_world:stop/1).

init_per_testcase(Case, Config) ->
    Stream = atom_to_binary(Case),
    Conf = stream_s3_osiris:config(Stream, #{max_segment_size_bytes => 10000}),
    Writer = stream_s3_osiris:start_stream(Conf),
    ok = rabbitmq_stream_s3:reconcile(),
    [{stream, Stream}, {conf, Conf}, {writer, Writer} | Config].

end_per_testcase(_Case, Config) ->
    ok = rabbitmq_stream_s3:resume(?config(stream, Config)),
    ok = osiris:delete_cluster(?config(conf, Config)).

%% --- cases -----------------------------------------------------------------------------------------------------------

%% As an operator does it: tiering is off until all is adopted, so no reader begins anew.
a_metadata_store_that_was_lost_is_rebuilt_and_tiering_goes_on(Config) ->
    Stream = ?config(stream, Config),
    ok = write(Config, 0, 30),
    {Pointer, Manifest} = tiered(Config),
    #manifest{next_offset = End} = Manifest,
    ok = lose_metadata(Config),
    ?assertEqual({error, not_found}, rabbitmq_stream_s3_metadata:get(Stream)),
    {ok, #{root := Pointer, range := {0, End}, groups := Groups, why := Why} = Dry} = rabbitmq_stream_s3:adopt(Stream, #{dry_run => true}),
    ?assert(Groups > 0),
    ?assertMatch(<<"it is the newest: ", _/binary>>, Why),
    ?assertNot(maps:is_key(revision, Dry)),
    ?assertEqual({error, not_found}, rabbitmq_stream_s3_metadata:get(Stream)),
    ?assertEqual({ok, Dry#{revision => 1}}, rabbitmq_stream_s3:adopt(Stream)),
    ok = stream_s3_world:set(#{tiered => all}),
    ok = rabbitmq_stream_s3:reconcile(),
    ok = rabbitmq_stream_s3:await_offset(Stream, End),
    ?assertEqual({0, End}, rabbitmq_stream_s3:get_range(Stream)),
    ok = write(Config, 30, 20),
    {_, #manifest{entries = Entries}} = tiered(Config),
    %% It went on with what there was.
    ?assertEqual(binary:part(Manifest#manifest.entries, 0, ?ENTRY_B), binary:part(Entries, 0, ?ENTRY_B)),
    ?assertMatch(#{remote_tier_ahead_recoveries := 0, local_log_ahead_recoveries := 0}, counters(Config)).

a_reader_that_has_begun_anew_takes_what_is_adopted(Config) ->
    Stream = ?config(stream, Config),
    ok = write(Config, 0, 10),
    {Pointer, #manifest{next_offset = End}} = tiered(Config),
    %% It has nothing to persist for as long as it is paused.
    ok = rabbitmq_stream_s3:pause(Stream),
    ok = rabbitmq_stream_s3_metadata:delete(Stream, ?TIMEOUT),
    ok = rabbitmq_stream_s3_manifest_cache:forget(Stream),
    ok = stream_s3_world:kill_reader(Stream),
    ok = eventually(fun() -> rabbitmq_stream_s3:get_range(Stream) =:= empty end),
    ok = write(Config, 10, 5),
    {ok, #{root := Pointer, revision := 1}} = rabbitmq_stream_s3:adopt(Stream),
    ok = eventually(fun() -> rabbitmq_stream_s3:get_range(Stream) =:= {0, End} end),
    ok = rabbitmq_stream_s3:resume(Stream),
    {_, #manifest{first_offset = 0}} = tiered(Config),
    ?assertMatch(#{remote_tier_ahead_recoveries := 0, local_log_ahead_recoveries := 0}, counters(Config)).

of_rival_roots_that_of_the_later_epoch_is_taken(Config) ->
    Stream = ?config(stream, Config),
    ok = write(Config, 0, 10),
    {_, Manifest} = tiered(Config),
    ok = next_writer(2, Config),
    ok = write(Config, 10, 1),
    {{_, 2} = Pointer, _} = tiered(Config),
    %% The writer before had gone on, on a log that was thrown away.
    {ok, _} = rival(Manifest, 1, Config),
    ok = lose_entry(Config),
    {ok, #{root := Pointer, passed_over := [], why := Why}} = rabbitmq_stream_s3:adopt(Stream, #{dry_run => true}),
    ?assertMatch({match, _}, re:run(Why, "its epoch 2 is the highest")).

%% A root that lists one more fragment, which is there, than a manifest.
rival(#manifest{next_offset = Next, entries = Entries, total_size = Total} = Manifest, Epoch, Config) ->
    #{fs_dir := Dir} = stream_s3_world:store(?config(world, Config)),
    Stream = ?config(stream, Config),
    ok = file:write_file(filename:join(Dir, rabbitmq_stream_s3_store:fragment_key(Stream, Next, 77)), binary:copy(<<0>>, 8 + 100 + 20)),
    More = ?ENTRY(Next, 1, 1, ?MANIFEST_KIND_FRAGMENT, 100, 77),
    rabbitmq_stream_s3_store:put_root(
        Stream, Epoch,
        Manifest#manifest{next_offset = Next + 50, total_size = Total + 100, entries = <<Entries/binary, More/binary>>}, ?TIMEOUT
    ).

newer_roots_that_are_damaged_are_passed_over(Config) ->
    Stream = ?config(stream, Config),
    ok = write(Config, 0, 10),
    {Pointer, #manifest{next_offset = End} = Manifest} = tiered(Config),
    {ok, Lost} = rabbitmq_stream_s3_store:put_root(Stream, 1, lists_too_much(Manifest), ?TIMEOUT),
    ok = damaged_root(2, Config),
    ok = next_writer(3, Config),
    ok = lose_entry(Config),
    {ok, #{root := Pointer, range := {0, End}, passed_over := Passed}} = rabbitmq_stream_s3:adopt(Stream, #{dry_run => true}),
    [{{7, 2}, Unreadable}, {{Lost, 1}, Missing}] = Passed,
    ?assertMatch(<<"it cannot be read: ", _/binary>>, Unreadable),
    ?assertEqual(iolist_to_binary(io_lib:format("its fragment at offset ~b is not there", [End])), Missing).

lists_too_much(#manifest{next_offset = Next, entries = Entries, total_size = Total} = Manifest) ->
    More = ?ENTRY(Next, 1, 1, ?MANIFEST_KIND_FRAGMENT, 100, 99),
    Manifest#manifest{next_offset = Next + 50, total_size = Total + 100, entries = <<Entries/binary, More/binary>>}.

damaged_root(Epoch, Config) ->
    #{fs_dir := Dir} = stream_s3_world:store(?config(world, Config)),
    file:write_file(filename:join(Dir, rabbitmq_stream_s3_store:root_key(?config(stream, Config), Epoch, 7)), <<"OSIR and no more">>).

a_named_root_that_is_damaged_is_refused(Config) ->
    Stream = ?config(stream, Config),
    ok = write(Config, 0, 10),
    {{Uid, 1} = Pointer, _} = tiered(Config),
    ok = damaged_root(1, Config),
    ok = lose_entry(Config),
    {error, {unsound, Text}} = rabbitmq_stream_s3:adopt(Stream, #{root => {1, 7}}),
    ?assertMatch({match, _}, re:run(Text, "root.1.00000007.manifest: it cannot be read")),
    ?assertMatch({error, {no_root, _}}, rabbitmq_stream_s3:adopt(Stream, #{root => {1, 8}})),
    ?assertEqual({error, not_found}, rabbitmq_stream_s3_metadata:get(Stream)),
    ?assertMatch({ok, #{root := Pointer, why := <<"it was asked for", _/binary>>}}, rabbitmq_stream_s3:adopt(Stream, #{root => {1, Uid}})).

a_stream_that_has_an_entry_is_left_alone(Config) ->
    Stream = ?config(stream, Config),
    ok = write(Config, 0, 10),
    {Pointer, _} = tiered(Config),
    {_, Revision} = stream_s3_world:pointer(Stream),
    [?assertMatch({error, {exists, _}}, rabbitmq_stream_s3:adopt(Stream, Options)) || Options <- [#{}, #{dry_run => true}]],
    ?assertEqual({Pointer, Revision}, stream_s3_world:pointer(Stream)).

a_writer_is_not_fenced_by_an_adoption(Config) ->
    Stream = ?config(stream, Config),
    ok = write(Config, 0, 10),
    {_, Manifest} = tiered(Config),
    {ok, _} = rabbitmq_stream_s3_store:put_root(Stream, 9, Manifest, ?TIMEOUT),
    ok = lose_entry(Config),
    {error, {fenced, Text}} = rabbitmq_stream_s3:adopt(Stream),
    ?assertMatch({match, _}, re:run(Text, "of epoch 9, but the stream's writer is of epoch 1")),
    ?assertEqual({error, not_found}, rabbitmq_stream_s3_metadata:get(Stream)).

what_cannot_be_adopted_is_refused_with_a_reason(Config) ->
    Stream = ?config(stream, Config),
    ?assertMatch({error, {no_member, _}}, rabbitmq_stream_s3:adopt(<<"nobody">>)),
    ?assertMatch({error, {no_root, _}}, rabbitmq_stream_s3:adopt(Stream)),
    ok = write(Config, 0, 10),
    _ = tiered(Config),
    ok = lose_entry(Config),
    %% What is not known is not lost.
    Khepri = whereis(rabbitmq_stream_s3_metadata:store_id()),
    ok = stream_s3_world:set(#{retention_timeout_ms => 300}),
    ok = sys:suspend(Khepri),
    Answer = rabbitmq_stream_s3:adopt(Stream),
    ok = sys:resume(Khepri),
    ok = stream_s3_world:set(#{retention_timeout_ms => 60000}),
    ?assertMatch({error, {metadata, _}}, Answer).

%% --- helpers ---------------------------------------------------------------------------------------------------------

write(Config, First, Count) ->
    Writer = stream_s3_osiris:writer(?config(stream, Config)),
    [ok = stream_s3_osiris:write_chunk(Writer, [<<N:32, 0:(496 * 8)>>]) || N <- lists:seq(First, First + Count - 1)],
    ok.

%% All that is written is in the bucket, byte for byte and by the command's judgement, too.
tiered(Config) ->
    Stream = ?config(stream, Config),
    Bucket = ?config(bucket, Config),
    Writer = stream_s3_osiris:writer(Stream),
    End = stream_s3_osiris:next_offset(Writer),
    ok = stream_s3_world:settle(Stream, End, ?TIMEOUT),
    {Pointer, _} = stream_s3_world:pointer(Stream),
    {#manifest{first_offset = 0, next_offset = End} = Manifest, Fragments} = stream_s3_bucket:fragments(Bucket, Stream, Pointer),
    Remote = iolist_to_binary([stream_s3_bucket:chunk_bytes(Bucket, Fragment) || Fragment <- Fragments]),
    #{bytes := Local} = stream_s3_chunks:of_log(stream_s3_osiris:dir(Writer)),
    ?assertEqual(erlang:md5(Local), erlang:md5(Remote)),
    ok = stream_s3_cli:verify(stream_s3_world:store(?config(world, Config)), Stream, Pointer),
    {Pointer, Manifest}.

%% The entry alone, and so that nobody makes another.
lose_entry(Config) ->
    Stream = ?config(stream, Config),
    ok = rabbitmq_stream_s3:pause(Stream),
    rabbitmq_stream_s3_metadata:delete(Stream, ?TIMEOUT).

lose_metadata(Config) ->
    {ok, Osiris} = application:get_env(osiris, data_dir),
    ok = stream_s3_world:stop_application(),
    ok = stream_s3_world:stop_metadata_store(),
    ok = file:del_dir_r([Osiris, ".metadata"]),
    Store = stream_s3_world:store(?config(world, Config)),
    stream_s3_world:start_application(maps:merge(maps:merge(?ENV, Store), #{tiered => none})).

next_writer(Epoch, Config) ->
    Conf = ?config(conf, Config),
    ok = osiris:stop_member(node(), Conf),
    {ok, _} = osiris:start_writer(Conf#{epoch => Epoch}),
    rabbitmq_stream_s3:reconcile().

counters(Config) ->
    rabbitmq_stream_s3_counters:get({stream, ?config(stream, Config)}).
