%% @doc Kills a VM that writes and tiers, again and again, with kill -9, and looks each time whether anything was lost.
%%
%% A round: the VM runs on what the last one left; it is killed at a random moment, or at a point between two steps of making
%% something durable; it is started again. Before it tiers anew the bucket must hold all that had been acknowledged, and
%% nothing else than what the log has; once it has caught up the bucket must be the log, byte for byte.
%%
%% `make soak ROUNDS=N' runs {@link main/0}.
-module(stream_s3_soak).

-include("rabbitmq_stream_s3.hrl").

-export([main/0, run/3]).
-export_type([point/0, report/0]).

-define(ROUNDS_A_STREAM, 10).
-define(TIMEOUT, 30000).
-define(LOOK_EVERY_MS, 10).
%% How often in a row a VM must be seen stuck before it is.
-define(LOOKS, 5).
-define(LONGEST_ROUND_MS, 800).
%% What retention is to leave of a tier.
-define(KEPT_BYTES, 100000).
-define(ENV, #{
    fragment_target_size => 20000,
    persist_threshold => 2,
    persist_interval_ms => 50,
    rebalance_threshold => 8,
    upload_concurrency => 4,
    task_retry_delay_max_ms => 100
}).

%% Where a VM is killed.
-type point() ::
    %% At any moment.
    random
    %% While a fragment is being sent.
    | fragment_in_flight
    %% Fragments are stored, the root that lists them is being sent.
    | root_in_flight
    %% The root is stored, the writer has not heard of it.
    | root_reply_lost
    %% The root is stored, and is not the current one.
    | root_not_current
    %% The new root is current, the old one is about to be deleted.
    | old_root_not_deleted
    %% Retention has dropped fragments, which are about to be deleted.
    | dropped_not_deleted.
-type report() :: #{round := pos_integer(), point := point(), ended := pos_integer(), acknowledged := non_neg_integer()}.

%% @doc As many rounds as the environment variable ROUNDS says, two in three of them on s3local. Prints a line for each; the last one is
%% `N passed, N failed'. Answers 0 if all passed.
-spec main() -> 0 | 1.
main() ->
    Rounds = list_to_integer(os:getenv("ROUNDS", "10")),
    {ok, Dir} = stream_s3_temp:new("soak"),
    OnS3 = (Rounds * 2 + 2) div 3,
    Results = [soak(s3, filename:join(Dir, "s3"), OnS3), soak(fs, filename:join(Dir, "fs"), Rounds - OnS3)],
    Passed = lists:sum([P || {P, _} <- Results]),
    Failed = lists:sum([F || {_, F} <- Results]),
    ok = stream_s3_temp:remove(Dir),
    io:format("~b passed, ~b failed~n", [Passed, Failed]),
    case Failed of
        0 -> 0;
        _ -> 1
    end.

soak(_Store, _Dir, 0) ->
    {0, 0};
soak(Store, Dir, Rounds) ->
    try run(Store, Dir, #{rounds => Rounds, told => fun(Report) -> tell(Store, Report) end}) of
        Reports -> {length(Reports), 0}
    catch
        Class:Reason:Stack ->
            %% What later rounds would find says nothing any more.
            io:put_chars([erl_error:format_exception(Class, Reason, Stack), 10]),
            Done = get(?MODULE),
            {Done, Rounds - Done}
    end.

tell(Store, #{round := Round, point := Point, ended := End, acknowledged := Acknowledged}) ->
    io:format("ok      ~s round ~b, killed at ~s: ~b offsets, ~b acknowledged~n", [Store, Round, Point, End, Acknowledged]).

%% @doc Runs rounds below a directory; raises what is wrong. `told' hears of each round that passed.
-spec run(fs | s3, file:filename(), #{rounds := pos_integer(), told => fun((report()) -> term())}) -> [report()].
run(Kind, Dir, #{rounds := Rounds} = Options) ->
    put(?MODULE, 0),
    Objects = filename:join(Dir, "objects"),
    ok = filelib:ensure_path(Objects),
    {Server, Store} = store(Kind, Objects),
    World = #{
        kind => Kind, dir => Dir, server => Server, store => Store, bucket => stream_s3_bucket:open(Store),
        told => maps:get(told, Options, fun(_) -> ok end)
    },
    try
        Vm = start_vm(1, World),
        {Reports, Last} = lists:mapfoldl(fun(Round, Running) -> round(Round, Running, World) end, Vm, lists:seq(1, Rounds)),
        ok = kill(Last),
        Reports
    after
        Server =:= none orelse stream_s3_s3local:stop(Server)
    end.

store(fs, Objects) ->
    {none, #{store => fs, fs_dir => unicode:characters_to_binary(Objects)}};
store(s3, Objects) ->
    Server = stream_s3_s3local:start(#{dir => Objects}),
    ok = stream_s3_s3local:create_bucket(Server, "bucket"),
    {Server, (stream_s3_s3local:settings(Server))#{store => s3, bucket => <<"bucket">>}}.

%% --- a round ---------------------------------------------------------------------------------------------------------

round(Round, #{stream := Stream} = Vm, #{told := Told} = World) ->
    Point = point(Round, World),
    Journal = journal(Stream, World),
    ok = call(Vm, stream_s3_soak_node, tier, []),
    ok = call(Vm, stream_s3_soak_node, write, [maps:get(writer, Vm), {Stream, Round}, Journal]),
    ok = reach(Point, Vm, World),
    ok = kill(Vm),
    ok = no_faults(World),
    Again = start_vm(Round, World),
    Read = stream_s3_soak_node:read_journal(Journal),
    ok = check_left(Point, Read, Again, World),
    ok = call(Again, stream_s3_soak_node, tier, []),
    End = check_caught_up(Point, Read, Again, World),
    Report = #{round => Round, point => Point, ended => End, acknowledged => maps:get(acknowledged, Read)},
    put(?MODULE, get(?MODULE) + 1),
    _ = Told(Report),
    {Report, next_vm(Round, Again, World)}.

%% The log of a stream grows with each round, and is read as a whole after each.
next_vm(Round, Vm, World) ->
    case stream(Round + 1) =:= stream(Round) of
        true ->
            Vm;
        false ->
            ok = kill(Vm),
            start_vm(Round + 1, World)
    end.

stream(Round) ->
    iolist_to_binary(io_lib:format("soak_~b", [(Round - 1) div ?ROUNDS_A_STREAM])).

journal(Stream, #{dir := Dir}) ->
    filename:join(Dir, <<Stream/binary, ".journal">>).

point(Round, #{kind := s3}) ->
    Points = [random, fragment_in_flight, root_in_flight, root_reply_lost, root_not_current, old_root_not_deleted, dropped_not_deleted, random],
    lists:nth((Round - 1) rem length(Points) + 1, Points);
point(Round, #{kind := fs}) ->
    Points = [random, root_not_current, random],
    lists:nth((Round - 1) rem length(Points) + 1, Points).

reach(random, _Vm, _World) ->
    %% Not to wait for anything: it is the moment that is drawn.
    receive
    after rand:uniform(?LONGEST_ROUND_MS) -> ok
    end;
reach(fragment_in_flight, _Vm, World) ->
    fault(put, [#{op => put, key => "*.fragment", skip => rand:uniform(10), do => stall}], World);
reach(root_in_flight, _Vm, World) ->
    fault(put, [#{op => put, key => "*.manifest", skip => rand:uniform(5), do => stall}], World);
reach(root_reply_lost, _Vm, World) ->
    %% The writer tries again, with another root, which gets no further.
    fault(put, 2, [#{op => put, key => "*.manifest", count => 1, do => lost_reply}, #{op => put, key => "*.manifest", do => stall}], World);
reach(root_not_current, #{stream := Stream} = Vm, _World) ->
    ok = call(Vm, rabbitmq_stream_s3, await_offset, [Stream, 1]),
    ok = call(Vm, stream_s3_soak_node, suspend_metadata, []),
    look(fun() -> call(Vm, stream_s3_soak_node, is_stuck_before_cas, [Stream]) end, ?LOOKS);
reach(old_root_not_deleted, _Vm, #{server := Server} = World) ->
    Before = deletes(Server),
    ok = stream_s3_store_faults:add(Server, [#{op => Op, do => stall} || Op <- [delete, multi_delete]]),
    look(fun() -> deletes(maps:get(server, World)) > Before end, 1);
reach(dropped_not_deleted, #{stream := Stream} = Vm, #{server := Server}) ->
    look(fun() -> call(Vm, stream_s3_world, tiered_bytes, [Stream]) > 2 * ?KEPT_BYTES end, 1),
    ok = stream_s3_store_faults:add(Server, [#{op => Op, do => stall} || Op <- [delete, multi_delete]]),
    ok = call(Vm, stream_s3_world, set, [#{remote_max_bytes => ?KEPT_BYTES}]),
    {Before, _} = call(Vm, rabbitmq_stream_s3, get_range, [Stream]),
    look(fun() -> element(1, call(Vm, rabbitmq_stream_s3, get_range, [Stream])) > Before end, 1).

deletes(Server) ->
    stream_s3_store_faults:count(Server, delete) + stream_s3_store_faults:count(Server, multi_delete).

fault(Op, Rules, World) ->
    fault(Op, 1, Rules, World).

fault(Op, Times, Rules, #{server := Server}) ->
    Before = stream_s3_store_faults:count(Server, Op),
    ok = stream_s3_store_faults:add(Server, Rules),
    look(fun() -> stream_s3_store_faults:count(Server, Op) >= Before + Times end, 1).

no_faults(#{server := none}) -> ok;
no_faults(#{server := Server}) -> stream_s3_store_faults:clear(Server).

%% Until it is so, several times in a row. Nobody outside tells when.
look(IsSo, Looks) ->
    look(IsSo, Looks, Looks, erlang:monotonic_time(millisecond) + ?TIMEOUT).

look(_IsSo, _Looks, 0, _Deadline) ->
    ok;
look(IsSo, Looks, Left, Deadline) ->
    erlang:monotonic_time(millisecond) < Deadline orelse error(point_not_reached),
    receive
    after ?LOOK_EVERY_MS -> ok
    end,
    case IsSo() of
        true -> look(IsSo, Looks, Left - 1, Deadline);
        false -> look(IsSo, Looks, Looks, Deadline)
    end.

%% --- the VM ----------------------------------------------------------------------------------------------------------

%% Without a name: it needs no distribution, and so none of the parent's either. The epoch is that of the VM.
start_vm(Round, #{dir := Dir, store := Store}) ->
    Paths = [Path || Path <- code:get_path(), Path =/= "."],
    {ok, Peer, nonode@nohost} = peer:start(#{connection => standard_io, args => ["-pa" | Paths]}),
    Stream = stream(Round),
    Epoch = erlang:system_time(millisecond),
    Conf = stream_s3_osiris:config(Stream, #{epoch => Epoch, max_segment_size_bytes => 200000}),
    Writer = peer:call(Peer, stream_s3_soak_node, start, [Dir, {maps:merge(?ENV, Store), Conf}], ?TIMEOUT),
    #{peer => Peer, pid => peer:call(Peer, os, getpid, []), stream => Stream, writer => Writer}.

call(#{peer := Peer}, Module, Function, Args) ->
    peer:call(Peer, Module, Function, Args, ?TIMEOUT).

kill(#{peer := Peer, pid := Pid}) ->
    Monitor = monitor(process, Peer),
    [] = os:cmd("kill -9 " ++ Pid),
    receive
        {'DOWN', Monitor, process, Peer, _} -> ok
    after ?TIMEOUT ->
        error({not_dead, Pid})
    end.

%% --- what must hold --------------------------------------------------------------------------------------------------

%% As the killed VM left it: nothing has been tiered since.
check_left(Point, #{acknowledged := Acknowledged}, #{stream := Stream} = Vm, #{bucket := Bucket} = World) ->
    {Root, {First, End}, Remote} =
        case call(Vm, rabbitmq_stream_s3_metadata, get, [Stream]) of
            {ok, Pointer, _Revision} -> tiered(Pointer, Stream, World);
            {error, not_found} -> {none, {0, 0}, <<>>}
        end,
    Acknowledged =< End orelse error({acknowledged_and_not_there, Acknowledged, End}),
    Local = behind(First, local(Vm)),
    %% Also tells that nothing was tiered that the log has lost since.
    byte_size(Remote) =< byte_size(Local) andalso Remote =:= binary:part(Local, 0, byte_size(Remote)) orelse
        error({not_the_beginning_of_the_log, byte_size(Remote), byte_size(Local)}),
    check_point(Point, Root, First, stream_s3_bucket:keys(Bucket, Stream)).

%% The points that leave something to be seen.
check_point(Point, Root, _First, Keys) when Point =:= root_not_current; Point =:= old_root_not_deleted; Point =:= root_reply_lost ->
    Roots = [Key || Key <- Keys, filename:extension(Key) =:= <<".manifest">>],
    lists:delete(Root, Roots) =/= [] orelse error({no_other_root, Point, Root, Roots}),
    ok;
check_point(dropped_not_deleted, _Root, First, Keys) ->
    [Key || Key <- Keys, {fragment, _, Offset, _} <- [parsed(Key)], Offset < First] =/= [] orelse error({nothing_dropped, First}),
    ok;
check_point(_Point, _Root, _First, _Keys) ->
    ok.

check_caught_up(Point, #{confirmed := Confirmed}, #{stream := Stream, writer := Writer} = Vm, World) ->
    End = call(Vm, stream_s3_osiris, next_offset, [Writer]),
    ok = call(Vm, stream_s3_world, settle, [Stream, End, ?TIMEOUT - 5000]),
    {Pointer, _Revision} = call(Vm, stream_s3_world, pointer, [Stream]),
    {_Root, {First, End}, Remote} = tiered(Pointer, Stream, World),
    Local = local(Vm),
    behind(First, Local) =:= Remote orelse error({not_the_log, byte_size(Remote)}),
    Records = lists:append([stream_s3_chunks:records(Chunk) || Chunk <- stream_s3_chunks:all(Local)]),
    ok = check_records(Records, Confirmed),
    ok = check_garbage(Point, Pointer, Vm, World),
    End.

%% The chunks from an offset on.
behind(First, Bytes) ->
    Before = lists:sum([Size || #{chunk_id := Id, size := Size} <- stream_s3_chunks:all(Bytes), Id < First]),
    binary:part(Bytes, Before, byte_size(Bytes) - Before).

%% What was dropped and not deleted is found once it is old enough, all of it and nothing else, and then it is gone.
check_garbage(dropped_not_deleted, Pointer, #{stream := Stream} = Vm, #{dir := Dir, bucket := Bucket} = World) ->
    {_Manifest, Fragments} = listed(Pointer, Stream, World),
    Listed = [Key || #{key := Key} <- Fragments],
    Unlisted = fun() -> [Key || Key <- stream_s3_bucket:keys(Bucket, Stream), element(1, parsed(Key)) =:= fragment] -- Listed end,
    Garbage = Unlisted(),
    LongAgo = calendar:system_time_to_local_time(erlang:system_time(second) - 2 * 3600, second),
    [ok = file:change_time(filename:join([Dir, "objects", "bucket", Key]), LongAgo) || Key <- Garbage],
    {ok, #{garbage := #{orphan := #{objects := Found}}}} = call(Vm, rabbitmq_stream_s3, gc, [dry_run]),
    Found =:= length(Garbage) orelse error({garbage, Found, Garbage}),
    {ok, #{reclaimed := #{objects := Found}}} = call(Vm, rabbitmq_stream_s3, gc, [delete]),
    [] = Unlisted(),
    _ = tiered(Pointer, Stream, World),
    ok;
check_garbage(_Point, _Pointer, _Vm, _World) ->
    ok.

parsed(Key) ->
    rabbitmq_stream_s3_nif:parse_key(<<"rabbitmq">>, Key).

%% Each round's records from the first one on, each once and in order, up to the last confirmed one at least.
check_records(Records, Confirmed) ->
    Lasts = lists:foldl(
        fun(<<Round:32, Number:32, _/binary>> = Record, Seen) ->
            Expected = maps:get(Round, Seen, -1) + 1,
            Expected =:= Number orelse error({out_of_order, Round, Number, Expected}),
            Record =:= stream_s3_soak_node:record(Round, Number) orelse error({changed, Round, Number}),
            Seen#{Round => Number}
        end,
        #{},
        Records
    ),
    Missing = [{Round, Last} || {Round, Last} <- maps:to_list(Confirmed), Last > maps:get(Round, Lasts, -1)],
    Missing =:= [] orelse error({confirmed_and_not_there, Missing}),
    ok.

tiered(Pointer, Stream, #{bucket := Bucket, store := Store} = World) ->
    ok = stream_s3_cli:verify(Store, Stream, Pointer),
    {Manifest, Fragments} = listed(Pointer, Stream, World),
    #manifest{first_offset = First, next_offset = End} = Manifest,
    Bytes = iolist_to_binary([stream_s3_bucket:chunk_bytes(Bucket, Fragment) || Fragment <- Fragments]),
    {stream_s3_bucket:root_key(Bucket, Stream, Pointer), {First, End}, Bytes}.

%% A group that retention has consumed in part still has what it took.
listed(Pointer, Stream, #{bucket := Bucket}) ->
    {#manifest{first_offset = First} = Manifest, Fragments} = stream_s3_bucket:fragments(Bucket, Stream, Pointer),
    {Manifest, [Fragment || #{first_offset := At} = Fragment <- Fragments, At >= First]}.

local(#{writer := Writer} = Vm) ->
    #{bytes := Bytes} = stream_s3_chunks:of_log(call(Vm, stream_s3_osiris, dir, [Writer])),
    Bytes.
