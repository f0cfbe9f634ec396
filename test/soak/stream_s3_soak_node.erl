%% @doc What runs inside the VM that the soak kills: osiris, the application with its metadata store, a process that writes,
%% and one that waits for what it wrote to be tiered.
%%
%% Both tell a journal, a file that outlives the VM: what is written to it is with the operating system before the next line
%% of code runs. {@link stream_s3_soak} reads it.
-module(stream_s3_soak_node).

-export([start/2, tier/0, write/3, is_stuck_before_cas/1, suspend_metadata/0, record/2, read_journal/1]).

%% Never more records than that are ahead of what is confirmed, and so long a pause after each confirmation: a round is to write
%% some dozens of fragments and no more, since all of it is read after each.
-define(WINDOW, 4).
-define(PAUSE_MS, 2).

%% @doc Starts all of it on what an earlier VM left, but does not tier yet, and answers the writer of the stream.
-spec start(file:filename(), {Env :: map(), StreamConfig :: map()}) -> pid().
start(Dir, {Env, Conf}) ->
    ok = logger:set_primary_config(level, none),
    ok = stream_s3_osiris:start(filename:join(Dir, "osiris")),
    ok = stream_s3_world:start_application(Env#{tiered => none}),
    {ok, Writer} = osiris:start_writer(Conf#{leader_node => node()}),
    Writer.

%% @doc Tiers from now on.
-spec tier() -> ok.
tier() ->
    ok = stream_s3_world:set(#{tiered => all}),
    rabbitmq_stream_s3:reconcile().

%% @doc Writes the records of a round, and waits for them to be tiered, until the end of this VM.
-spec write(pid(), {StreamId :: binary(), Round :: non_neg_integer()}, file:filename()) -> ok.
write(Writer, {StreamId, Round}, Journal) ->
    _ = spawn(fun() -> write(Writer, Round, open(Journal), 0, 0) end),
    _ = spawn(fun() -> await(Writer, StreamId, open(Journal)) end),
    ok.

open(Journal) ->
    {ok, File} = file:open(Journal, [append, raw, binary]),
    File.

write(Writer, Round, Journal, Next, Confirmed) when Next - Confirmed < ?WINDOW ->
    ok = osiris:write(Writer, undefined, Next, record(Round, Next)),
    write(Writer, Round, Journal, Next + 1, Confirmed);
write(Writer, Round, Journal, Next, _Confirmed) ->
    receive
        {osiris_written, _Reference, undefined, Corrs} ->
            Last = lists:max(Corrs),
            ok = file:write(Journal, <<$c, Round:32, Last:32>>),
            receive
            after ?PAUSE_MS -> ok
            end,
            write(Writer, Round, Journal, Next, Last + 1)
    end.

%% Each wait is for what is committed when it begins.
await(Writer, StreamId, Journal) ->
    Offset = stream_s3_osiris:committed_chunk_id(Writer) + 1,
    case rabbitmq_stream_s3:await_offset(StreamId, Offset) of
        ok -> ok = file:write(Journal, <<$a, Offset:64>>);
        %% Of a reader that is being started anew, or with a store that stalls.
        {error, _} -> ok
    end,
    await(Writer, StreamId, Journal).

%% @doc From now on nothing that is sent to the metadata store has any effect.
-spec suspend_metadata() -> ok.
suspend_metadata() ->
    sys:suspend(whereis(rabbitmq_stream_s3_metadata:store_id())).

%% @doc Whether a root has been stored and the outcome of making it current is not known.
-spec is_stuck_before_cas(binary()) -> boolean().
is_stuck_before_cas(StreamId) ->
    #{roots_created := Created, persists_completed := Completed, persists_failed := Failed, persist_conflicts := Conflicts} =
        rabbitmq_stream_s3_counters:get({stream, StreamId}),
    Created > Completed + Failed + Conflicts.

%% @doc The record of a round with this number: its name, and bytes that follow from it.
-spec record(non_neg_integer(), non_neg_integer()) -> binary().
record(Round, Number) ->
    <<Round:32, Number:32, (binary:copy(<<(Number rem 251)>>, 100 + Number * 7919 rem 1500))/binary>>.

%% @doc The last confirmed record of each round, and the highest offset whose tiering was acknowledged.
-spec read_journal(file:filename()) -> #{confirmed := #{Round :: non_neg_integer() => non_neg_integer()}, acknowledged := non_neg_integer()}.
read_journal(File) ->
    case file:read_file(File) of
        {ok, Bytes} -> journal(Bytes, #{confirmed => #{}, acknowledged => 0});
        {error, enoent} -> #{confirmed => #{}, acknowledged => 0}
    end.

journal(<<$c, Round:32, Last:32, Rest/binary>>, #{confirmed := Confirmed} = Journal) ->
    journal(Rest, Journal#{confirmed := Confirmed#{Round => max(Last, maps:get(Round, Confirmed, 0))}});
journal(<<$a, Offset:64, Rest/binary>>, #{acknowledged := Acknowledged} = Journal) ->
    journal(Rest, Journal#{acknowledged := max(Acknowledged, Offset)});
journal(<<>>, Journal) ->
    Journal.
