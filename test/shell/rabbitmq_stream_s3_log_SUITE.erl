%% Reading real osiris logs: ranges, positions, segments, and nothing that is not committed.
-module(rabbitmq_stream_s3_log_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-import(stream_s3_wait, [kill/1]).

-compile(nowarn_export_all).
-compile(export_all).

-define(LOG, rabbitmq_stream_s3_log).
-define(TIMEOUT, 10000).

suite() -> [{timetrap, {seconds, 60}}].

all() ->
    [
        writers_are_found_while_they_live,
        a_killed_writer_has_no_context,
        the_epoch_is_the_writers,
        a_writer_that_takes_no_calls_yet_has_no_context,
        an_empty_log_has_no_first_offset,
        a_range_ends_behind_the_last_record_of_the_last_chunk,
        chunks_are_read_in_order_and_their_positions_give_their_bytes,
        a_read_takes_no_more_than_it_was_asked_for,
        reading_begins_in_the_middle_of_a_segment,
        reading_begins_at_the_end_of_the_log,
        an_offset_inside_a_chunk_cannot_be_read_from,
        an_offset_outside_the_log_cannot_be_read_from,
        nothing_beyond_the_committed_chunk_is_handed_out,
        reading_goes_on_behind_a_gap_with_the_chunk_that_is_there,
        a_chunk_is_identified_by_id_epoch_and_checksum,
        a_chunk_whose_segment_is_being_deleted_is_not_taken_for_another,
        a_listener_is_told_once_of_the_chunk_that_it_asked_for,
        a_listener_for_what_is_committed_is_told_at_once,
        a_listener_knows_rabbits_events_from_others
    ].

init_per_suite(Config) ->
    ok = stream_s3_osiris:start(filename:join(?config(priv_dir, Config), "osiris")),
    Config.

end_per_suite(_Config) ->
    stream_s3_osiris:stop().

init_per_testcase(Case, Config) ->
    Stream = atom_to_binary(Case),
    Conf = stream_s3_osiris:config(Stream, #{max_segment_size_bytes => 20000}),
    [{stream, Stream}, {conf, Conf}, {writer, stream_s3_osiris:start_stream(Conf)} | Config].

end_per_testcase(_Case, Config) ->
    osiris:delete_cluster(?config(conf, Config)).

%% --- cases -----------------------------------------------------------------------------------------------------------

writers_are_found_while_they_live(Config) ->
    {Stream, Writer} = {?config(stream, Config), ?config(writer, Config)},
    ?assertEqual([{Stream, Writer}], [W || {S, _} = W <- ?LOG:writers(), S =:= Stream]),
    ok = osiris:stop_member(node(), ?config(conf, Config)),
    ?assertEqual([], [W || {S, _} = W <- ?LOG:writers(), S =:= Stream]).

a_killed_writer_has_no_context(Config) ->
    Writer = ?config(writer, Config),
    {ok, #{name := Name}} = ?LOG:context(Writer, ?TIMEOUT),
    ?assertEqual(?config(stream, Config), Name),
    ok = kill(Writer),
    ?assertEqual({error, no_process}, ?LOG:context(Writer, ?TIMEOUT)).

the_epoch_is_the_writers(Config) ->
    Conf = ?config(conf, Config),
    ?assertEqual({ok, 1}, ?LOG:epoch(context(Config))),
    ok = osiris:stop_member(node(), Conf),
    ?assertEqual({error, unknown_epoch}, ?LOG:epoch(#{reference => maps:get(reference, Conf)})),
    {ok, Second} = osiris:start_writer(Conf#{epoch => 7}),
    {ok, Context} = ?LOG:context(Second, ?TIMEOUT),
    ?assertEqual({ok, 7}, ?LOG:epoch(Context)).

%% osiris publishes a writer's context before its epoch and its committed offset are set, and takes calls only after that. Here
%% the context is published and no call is taken, as in between.
a_writer_that_takes_no_calls_yet_has_no_context(Config) ->
    Writer = ?config(writer, Config),
    ok = sys:suspend(Writer),
    ?assertEqual({error, unknown_epoch}, ?LOG:context(Writer, 50)),
    ok = sys:resume(Writer),
    ?assertMatch({ok, _}, ?LOG:context(Writer, ?TIMEOUT)).

an_empty_log_has_no_first_offset(Config) ->
    ?assertEqual({ok, #{first => undefined, next => 0}}, ?LOG:range(context(Config))).

a_range_ends_behind_the_last_record_of_the_last_chunk(Config) ->
    ok = write_chunks(Config, [1, 5, 20]),
    ?assertEqual({ok, #{first => 0, next => 26}}, ?LOG:range(context(Config))).

chunks_are_read_in_order_and_their_positions_give_their_bytes(Config) ->
    ok = write_chunks(Config, lists:duplicate(60, 3)),
    #{dir := Dir} = Context = context(Config),
    Chunks = read_all(Context, 0),
    %% Tracking chunks at the start of segments take an offset each, so ids are compared by continuity.
    lists:foldl(
        fun(#{chunk_id := Id, num_records := N}, Expected) ->
            ?assertEqual(Expected, Id),
            Id + N
        end,
        0,
        Chunks
    ),
    Segments = lists:usort([Segment || #{segment_offset := Segment} <- Chunks]),
    ?assert(length(Segments) > 3),
    #{bytes := Bytes, segments := Segments} = stream_s3_chunks:of_log(Dir),
    ?assertEqual(Bytes, iolist_to_binary([bytes(Dir, Chunk) || Chunk <- Chunks])).

a_read_takes_no_more_than_it_was_asked_for(Config) ->
    ok = write_chunks(Config, lists:duplicate(10, 1)),
    {ok, Reader0} = ?LOG:open(context(Config), 0),
    {Three, more, Reader1} = read(Reader0, 3),
    ?assertEqual([0, 1, 2], ids(Three)),
    ?assertEqual(3, ?LOG:next_offset(Reader1)),
    {Rest, end_of_log, Reader2} = read(Reader1, 100),
    ?assertEqual(lists:seq(3, 9), ids(Rest)),
    ?assertMatch({[], end_of_log, _}, read(Reader2, 100)),
    ok = ?LOG:close(Reader2).

reading_begins_in_the_middle_of_a_segment(Config) ->
    ok = write_chunks(Config, lists:duplicate(60, 3)),
    Context = context(Config),
    All = read_all(Context, 0),
    [
        ?assertEqual(lists:nthtail(N, All), read_all(Context, maps:get(chunk_id, lists:nth(N + 1, All))))
     || N <- lists:seq(0, length(All) - 1)
    ].

reading_begins_at_the_end_of_the_log(Config) ->
    ok = write_chunks(Config, [2, 2]),
    {ok, Reader0} = ?LOG:open(context(Config), 4),
    {[], end_of_log, Reader1} = read(Reader0, 10),
    ok = write_chunks(Config, [2]),
    {[Chunk], end_of_log, Reader2} = read(Reader1, 10),
    ?assertMatch(#{chunk_id := 4, num_records := 2, segment_offset := 0}, Chunk),
    ok = ?LOG:close(Reader2).

an_offset_inside_a_chunk_cannot_be_read_from(Config) ->
    ok = write_chunks(Config, [5, 5]),
    ?assertMatch({error, {badmatch, _}}, ?LOG:open(context(Config), 7)).

an_offset_outside_the_log_cannot_be_read_from(Config) ->
    Context = context(Config),
    ?assertMatch({error, {offset_out_of_range, empty}}, ?LOG:open(Context, 1)),
    ok = write_chunks(Config, [5]),
    ?assertMatch({error, {offset_out_of_range, {0, 4}}}, ?LOG:open(Context, 6)).

nothing_beyond_the_committed_chunk_is_handed_out(Config) ->
    ok = write_chunks(Config, [3, 3, 3]),
    #{shared := Shared} = Context = context(Config),
    %% As a writer whose replicas are behind has it; -1 is what a new writer begins with.
    ok = osiris_log_shared:set_committed_chunk_id(Shared, -1),
    {ok, Reader0} = ?LOG:open(Context, 0),
    {[], end_of_log, Reader1} = read(Reader0, 10),
    ?assertEqual(0, ?LOG:next_offset(Reader1)),
    ok = osiris_log_shared:set_committed_chunk_id(Shared, 3),
    {Two, end_of_log, Reader2} = read(Reader1, 10),
    ?assertEqual([0, 3], ids(Two)),
    ?assertEqual(6, ?LOG:next_offset(Reader2)),
    ?assertMatch({[], end_of_log, _}, read(Reader2, 10)),
    ok = osiris_log_shared:set_committed_chunk_id(Shared, 6),
    {Last, end_of_log, Reader3} = read(Reader2, 10),
    ?assertEqual([6], ids(Last)),
    ok = ?LOG:close(Reader3).

reading_goes_on_behind_a_gap_with_the_chunk_that_is_there(Config) ->
    ok = write_chunks(Config, lists:duplicate(60, 3)),
    #{dir := Dir, shared := Shared} = Context = context(Config),
    {ok, Reader0} = ?LOG:open(Context, 0),
    {_, more, Reader1} = read(Reader0, 2),
    [_, Second, Third | _] = osiris_log:sorted_index_files(Dir),
    [ok = file:delete(F) || F <- [Second, segment(Second)]],
    Next = binary_to_integer(unicode:characters_to_binary(filename:basename(Third, ".index"))),
    ok = osiris_log_shared:set_first_chunk_id(Shared, Next),
    Ids = ids(read_all(Reader1)),
    ?assert(lists:member(Next, Ids)),
    ?assertNot(lists:member(Next - 1, Ids)),
    {ok, #{first := 0}} = ?LOG:range(Context).

a_chunk_is_identified_by_id_epoch_and_checksum(Config) ->
    ok = write_chunks(Config, [5, 5]),
    Context = context(Config),
    [#{crc := Crc}, _] = read_all(Context, 0),
    ?assertEqual({ok, #{chunk_id => 0, epoch => 1, crc => Crc}}, ?LOG:identity(Context, 0)),
    ?assertEqual({ok, inside_another}, ?LOG:identity(Context, 7)),
    ?assertEqual({ok, trimmed}, ?LOG:identity(Context, 10)),
    ?assertEqual({ok, trimmed}, ?LOG:identity(Context, 11)).

%% osiris' retention deletes the newest of the segments that go first: here it has come to the third one, and then to its end.
a_chunk_whose_segment_is_being_deleted_is_not_taken_for_another(Config) ->
    ok = write_chunks(Config, lists:duplicate(60, 3)),
    #{dir := Dir, shared := Shared} = Context = context(Config),
    [{First, FirstFile}, {Second, SecondFile}, {Third, ThirdFile}, {Left, _} | _] = ?LOG:index_files(Dir),
    Last = lists:last([Id || Id <- ids(read_all(Context, 0)), Id < Second]),
    {ok, #{chunk_id := Last} = Before} = ?LOG:identity(Context, Last),
    ok = delete_segment(ThirdFile),
    ?assertEqual({error, segment_deleted}, ?LOG:identity(Context, Third)),
    ?assertMatch({error, _}, ?LOG:identity(Context, Third + 1)),
    ok = delete_segment(SecondFile),
    ?assertEqual({error, segment_deleted}, ?LOG:identity(Context, Second)),
    ?assertMatch({error, _}, ?LOG:identity(Context, Third)),
    ?assertEqual({ok, Before}, ?LOG:identity(Context, Last)),
    ?assertEqual({ok, #{first => First, next => stream_s3_osiris:next_offset(?config(writer, Config))}}, ?LOG:range(Context)),
    %% It tells the readers last.
    ok = osiris_log_shared:set_first_chunk_id(Shared, Left),
    ?assertEqual({error, segment_deleted}, ?LOG:identity(Context, Second)),
    ok = delete_segment(FirstFile),
    [?assertEqual({ok, trimmed}, ?LOG:identity(Context, Offset)) || Offset <- [Last, Second, Third, Left - 1]],
    ?assertMatch({ok, #{chunk_id := Left}}, ?LOG:identity(Context, Left)).

delete_segment(IndexFile) ->
    ok = file:delete(IndexFile),
    file:delete(segment(IndexFile)).

a_listener_is_told_once_of_the_chunk_that_it_asked_for(Config) ->
    Writer = ?config(writer, Config),
    ok = write_chunks(Config, [20]),
    ok = ?LOG:listen(Writer, 20),
    ok = write_chunks(Config, [1, 1]),
    ok = heard(),
    %% One that comes after it proves that there was no second one for the same listener.
    ok = ?LOG:listen(Writer, 22),
    ok = write_chunks(Config, [1]),
    ok = heard(),
    ?assertEqual({messages, []}, process_info(self(), messages)).

a_listener_for_what_is_committed_is_told_at_once(Config) ->
    ok = write_chunks(Config, [2]),
    ok = ?LOG:listen(?config(writer, Config), 0),
    ok = heard().

a_listener_knows_rabbits_events_from_others(_Config) ->
    ?assert(?LOG:listened({osiris_offset, reference, 3})),
    ?assert(?LOG:listened({queue_event, queue, {osiris_offset, queue, 3}})),
    ?assertNot(?LOG:listened({queue_event, queue, {osiris_written, queue, undefined, []}})),
    ?assertNot(?LOG:listened(drain)).

%% --- helpers ---------------------------------------------------------------------------------------------------------

context(Config) ->
    {ok, Context} = ?LOG:context(?config(writer, Config), ?TIMEOUT),
    Context.

%% Chunks of so many records each.
write_chunks(Config, Sizes) ->
    [ok = stream_s3_osiris:write_chunk(?config(writer, Config), lists:duplicate(N, binary:copy(<<"r">>, 500))) || N <- Sizes],
    ok.

read_all(Context, Offset) ->
    {ok, Reader} = ?LOG:open(Context, Offset),
    read_all(Reader).

%% In steps of an odd size, so that steps end anywhere.
read_all(Reader0) ->
    case read(Reader0, 7) of
        {Chunks, more, Reader} ->
            Chunks ++ read_all(Reader);
        {Chunks, end_of_log, Reader} ->
            ok = ?LOG:close(Reader),
            Chunks
    end.

%% As many chunks as were asked for, if there are so many: waits for what the native library reads.
read(Reader, Max) ->
    read(Reader, Max, []).

read(Reader, Max, Chunks) when length(Chunks) =:= Max ->
    {Chunks, more, Reader};
read(Reader0, Max, Chunks) ->
    case ?LOG:read(Reader0, Max - length(Chunks)) of
        {More, more, Reader} -> read(Reader, Max, Chunks ++ More);
        {[], end_of_log, Reader} -> {Chunks, end_of_log, Reader};
        {[], wait, Reader} -> read(answered(Reader), Max, Chunks)
    end.

answered(Reader0) ->
    receive
        {pins_result, _, _} = Message ->
            {ok, Reader} = ?LOG:answered(Message, Reader0),
            Reader
    after ?TIMEOUT -> error(no_answer)
    end.

ids(Chunks) -> [Id || #{chunk_id := Id} <- Chunks].

bytes(Dir, #{segment_offset := Segment, position := Start, next_position := End}) ->
    Name = io_lib:format("~20..0b.segment", [Segment]),
    {ok, Fd} = file:open(filename:join(Dir, Name), [raw, read, binary]),
    {ok, Bytes} = file:pread(Fd, Start, End - Start),
    ok = file:close(Fd),
    Bytes.

segment(IndexFile) ->
    filename:join(filename:dirname(IndexFile), [filename:basename(IndexFile, ".index"), ".segment"]).

heard() ->
    receive
        Message ->
            ?assert(?LOG:listened(Message)),
            ok
    after ?TIMEOUT -> error(not_told)
    end.
