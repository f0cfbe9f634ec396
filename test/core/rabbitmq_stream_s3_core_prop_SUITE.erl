%% Random histories of the replica reader, through the library and through a plain model side by side: every effect list, every
%% manifest and every status has to be the same. What the library broadcasts, applied to what was persisted before, has to give what is
%% persisted now.
%%
%% A history comes from one number. When one fails, its shortest form that still fails is shown with the way to repeat it:
%%     STREAM_S3_SEED=<number> make ct-file FILE=test/core/rabbitmq_stream_s3_core_prop_SUITE.erl
%% STREAM_S3_CASES sets how many there are: 2,000 by default, 100,000 in make test-deep.
-module(rabbitmq_stream_s3_core_prop_SUITE).

-include_lib("stdlib/include/assert.hrl").
-include("rabbitmq_stream_s3.hrl").

-compile([export_all, nowarn_export_all]).

-define(CORE, rabbitmq_stream_s3_replica_reader_core).
-define(NIF, rabbitmq_stream_s3_nif).
-define(MANIFEST, rabbitmq_stream_s3_manifest).
-define(MODEL, stream_s3_core_model).

-record(run, {
    core :: ?NIF:core(),
    model :: ?MODEL:model(),
    options :: ?MODEL:options(),
    now = 1000000 :: integer(),
    %% Where the next fragment begins; all there were, to be answered once more.
    tail = 0 :: non_neg_integer(),
    refs = [] :: [term()],
    uid = 0 :: non_neg_integer(),
    %% Objects by uid: the entries of groups.
    groups = #{} :: #{non_neg_integer() => binary()},
    %% The retention that was announced.
    retention = none :: none | #edit{},
    %% A replica's copy of what is persisted.
    replica :: #manifest{},
    %% Older states, and what they said.
    kept = [] :: [{?NIF:core(), term()}],
    %% Waiters that are owed an answer.
    waiting = [] :: [{non_neg_integer(), reference()}]
}).

suite() -> [{timetrap, {minutes, 60}}].

all() -> [the_library_agrees_with_a_plain_model, the_test_notices_a_difference].

the_library_agrees_with_a_plain_model(_) ->
    Seeds =
        case os:getenv("STREAM_S3_SEED") of
            false ->
                First = erlang:system_time() rem (1 bsl 48),
                lists:seq(First, First + cases() - 1);
            Text ->
                [list_to_integer(Text)]
        end,
    Start = erlang:monotonic_time(millisecond),
    Counts = in_parallel(fun try_seed/1, Seeds),
    Ms = erlang:monotonic_time(millisecond) - Start,
    ct:pal("~b histories, seeds from ~b on, ~b ms; events: ~tp", [length(Seeds), hd(Seeds), Ms, lists:sort(maps:to_list(sum(Counts)))]),
    ok.

%% A test that compares nothing would pass as well.
the_test_notices_a_difference(_) ->
    {Options, Commands} = history(1),
    ?assertMatch(#{}, run(Options, Commands)),
    Wrong = Options#{persist_threshold := maps:get(persist_threshold, Options) + 1},
    ?assertError(_, lists:foreach(fun(Seed) -> {_, More} = history(Seed), run(Options, Wrong, More) end, lists:seq(1, 50))).

cases() ->
    case {os:getenv("STREAM_S3_CASES"), os:getenv("STREAM_S3_DEEP")} of
        {false, false} -> 2000;
        {false, _} -> 100000;
        {Text, _} -> list_to_integer(Text)
    end.

%% --- histories -------------------------------------------------------------------------------------------------------

try_seed(Seed) ->
    {Options, Commands} = history(Seed),
    try
        run(Options, Commands)
    catch
        Class:Reason:Stack ->
            Short = shorten(Options, Commands),
            Again = again(Options, Short),
            error({history_failed, [
                {seed, Seed},
                {repeat, "STREAM_S3_SEED=" ++ integer_to_list(Seed) ++ " make ct-file FILE=test/core/" ?MODULE_STRING ".erl"},
                {options, maps:with([persist_threshold, rebalance_threshold, persist_interval_ms], Options)},
                {commands, {length(Commands), shortened_to, Short}},
                {failure, Again},
                {first_failure, {Class, Reason, hd(Stack)}}
            ]})
    end.

again(Options, Commands) ->
    try run(Options, Commands) of
        _ -> none
    catch
        Class:Reason:Stack -> {Class, Reason, lists:sublist(Stack, 5)}
    end.

history(Seed) ->
    R0 = rand:seed_s(exsss, Seed),
    {Threshold, R1} = rand:uniform_s(6, R0),
    {Rebalance, R2} = rand:uniform_s(4, R1),
    {Interval, R3} = rand:uniform_s(4, R2),
    {Length, R4} = rand:uniform_s(120, R3),
    {Mood, R5} = rand:uniform_s(length(moods()), R4),
    Options = #{
        stream => <<"s">>,
        dir => "/d",
        epoch => Seed rem 7,
        reference => {ref, Seed},
        persist_threshold => Threshold,
        persist_interval_ms => (Interval - 1) * 1000,
        rebalance_threshold => Rebalance + 1
    },
    {Commands, _} = lists:mapfoldl(
        fun(_, R) ->
            {Kind, Ra} = choose(lists:nth(Mood, moods()), R),
            {A, Rb} = rand:uniform_s(1 bsl 20, Ra),
            {B, Rc} = rand:uniform_s(1 bsl 20, Rb),
            {{Kind, A, B}, Rc}
        end,
        R5,
        lists:seq(1, Length)
    ),
    {Options, Commands}.

%% How often what happens: a calm stream, one with much trouble, one with much retention, one that waits long for transfers.
moods() ->
    [
        [{cut, 10}, {complete, 12}, {fail, 1}, {persist_ok, 6}, {persist_bad, 1}, {group_ok, 6}, {group_bad, 1}, {tick, 3}, {await, 2},
            {retention_start, 1}, {retention_end, 2}, {retention_failed, 1}, {retention_at_once, 1}],
        [{cut, 8}, {complete, 8}, {old_answer, 4}, {fail, 6}, {persist_ok, 3}, {persist_bad, 6}, {group_ok, 3}, {group_bad, 5}, {tick, 6},
            {await, 3}, {retention_start, 2}, {retention_end, 2}, {retention_failed, 2}, {retention_at_once, 1}],
        [{cut, 10}, {complete, 12}, {persist_ok, 8}, {group_ok, 6}, {tick, 4}, {retention_start, 4}, {retention_end, 6},
            {retention_at_once, 4}, {await, 1}],
        [{cut, 14}, {complete, 9}, {old_answer, 1}, {fail, 2}, {persist_ok, 3}, {group_ok, 4}, {tick, 1}, {await, 2}]
    ].

choose(Weights, R) ->
    {N, R1} = rand:uniform_s(lists:sum([W || {_, W} <- Weights]), R),
    {choose_at(N, Weights), R1}.

choose_at(N, [{Kind, W} | _]) when N =< W -> Kind;
choose_at(N, [{_, W} | Rest]) -> choose_at(N - W, Rest).

%% Leaves out ever smaller parts for as long as it still fails.
shorten(Options, Commands) -> shorten(Options, Commands, max(1, length(Commands) div 2)).

shorten(Options, Commands, Size) ->
    case [Without || Without <- without(Commands, Size), again(Options, Without) =/= none] of
        [Shorter | _] -> shorten(Options, Shorter, min(Size, max(1, length(Shorter) div 2)));
        [] when Size > 1 -> shorten(Options, Commands, Size div 2);
        [] -> Commands
    end.

without(Commands, Size) ->
    [lists:sublist(Commands, At) ++ lists:nthtail(min(length(Commands), At + Size), Commands) || At <- lists:seq(0, length(Commands) - 1, Size)].

%% --- one history -----------------------------------------------------------------------------------------------------

run(Options, Commands) -> run(Options, Options, Commands).

%% Answers how often what happened.
run(Options, ModelOptions, Commands) ->
    Now = 1000000,
    Manifest = #manifest{first_offset = 7, next_offset = 7},
    {Core, []} = ?NIF:core_init(Manifest, Options, Now),
    Run0 = #run{core = Core, model = ?MODEL:new(7, ModelOptions, Now), options = Options, now = Now, tail = 7, replica = Manifest},
    {Run, Counts} = lists:foldl(
        fun({Kind, A, B} = Command, {R, Counts}) ->
            R1 = same_views(keep(A, command(Command, R#run{now = R#run.now + B rem 700}))),
            {R1, maps:update_with(Kind, fun(N) -> N + 1 end, 1, Counts)}
        end,
        {same_views(Run0), #{}},
        Commands
    ),
    %% Whatever came later, the older states say what they said.
    [?assertEqual(View, view(Older)) || {Older, View} <- Run#run.kept],
    Counts.

keep(A, #run{core = Core, kept = Kept} = Run) when A rem 8 =:= 0 -> Run#run{kept = [{Core, view(Core)} | Kept]};
keep(_, Run) -> Run.

command({cut, A, B}, #run{model = Model, tail = Tail0} = Run) ->
    Tail =
        case ?MODEL:may_jump(Model) andalso A rem 3 =:= 0 of
            true -> Tail0 + B rem 50;
            false -> Tail0
        end,
    Next = Tail + 1 + A rem 30,
    Fragment = #{first => Tail, next => Next, first_ts => Run#run.now - A rem 20, last_ts => Run#run.now + B rem 20, size => B rem 1000},
    Meta = #{
        first_offset => Tail,
        next_offset => Next,
        first_timestamp => maps:get(first_ts, Fragment),
        last_timestamp => maps:get(last_ts, Fragment),
        size => B rem 1000,
        spans => [],
        num_chunks => 1,
        added => {A, B}
    },
    {Core, Ref, Effects} = ?CORE:fragment_cut(Meta, Run#run.core),
    effects(Effects, ?MODEL:cut(Ref, Fragment, Meta, Model), Run#run{core = Core, tail = Next, refs = [Ref | Run#run.refs]});
command({complete, A, _}, #run{model = Model} = Run) ->
    case ?MODEL:refs(Model) of
        [] -> Run;
        %% Half of them in order.
        [Ref | _] when A rem 2 =:= 0 -> complete(Ref, Run);
        Refs -> complete(lists:nth(1 + A rem length(Refs), Refs), Run)
    end;
command({old_answer, _, _}, #run{refs = []} = Run) ->
    Run;
command({old_answer, A, B}, #run{refs = Refs} = Run) ->
    Ref = lists:nth(1 + A rem length(Refs), Refs),
    case B rem 3 of
        0 -> complete(Ref, Run);
        1 -> fail(Ref, reason(B), Run);
        2 -> complete({unknown, Ref}, Run)
    end;
command({fail, A, B}, #run{model = Model} = Run) ->
    case ?MODEL:refs(Model) of
        [] -> Run;
        Refs -> fail(lists:nth(1 + A rem length(Refs), Refs), reason(B), Run)
    end;
command({persist_ok, A, _}, #run{model = Model, now = Now} = Run) ->
    #manifest{revision = Revision} = ?MODEL:persisted_manifest(Model),
    both(
        fun(Core) -> ?NIF:core_persist_complete(Revision + 1 + A rem 3, Now, Core) end,
        fun(M) -> ?MODEL:persisted(Revision + 1 + A rem 3, Now, M) end,
        Run
    );
command({persist_bad, A, _}, Run) ->
    Reason = lists:nth(1 + A rem 8, [timeout, {error, x}, timeout, timeout, {http, 500}, whatever, conflict, not_found]),
    both(fun(Core) -> ?CORE:persist_failed(Reason, Core) end, fun(M) -> ?MODEL:persist_failed(Reason, M) end, Run);
command({group_ok, _, _}, #run{uid = Uid} = Run) ->
    both(
        fun(Core) -> ?CORE:group_upload_complete(Uid, Core) end,
        fun(M) -> ?MODEL:group_stored(Uid, M) end,
        group_written(Uid, Run#run{uid = Uid + 1})
    );
command({group_bad, _, B}, Run) ->
    {Class, Reason} = reason(B),
    both(fun(Core) -> ?CORE:group_upload_failed(Reason, Core) end, fun(M) -> ?MODEL:group_failed(Class, M) end, Run);
command({tick, A, _}, #run{now = Now} = Run) ->
    %% Sometimes the clock has been set back.
    At = case A rem 10 of 0 -> Now - 5000; _ -> Now + A rem 4000 end,
    both(fun(Core) -> ?CORE:tick(At, Core) end, fun(M) -> ?MODEL:tick(At, M) end, Run);
command({await, A, _}, #run{tail = Tail} = Run) ->
    From = make_ref(),
    Offset = max(0, Tail + 40 - A rem 80),
    both(
        fun(Core) -> ?CORE:await_offset(Offset, From, Core) end,
        fun(M) -> ?MODEL:await(Offset, From, M) end,
        Run#run{waiting = [{Offset, From} | Run#run.waiting]}
    );
command({retention_start, A, B}, #run{core = Core, model = Model, retention = none} = Run) ->
    Edit = evaluate(A, B, Run),
    Run#run{core = ?CORE:retention_started(Core), model = ?MODEL:retention_started(Model), retention = Edit};
command({retention_start, _, _}, Run) ->
    Run;
command({retention_end, _, _}, #run{retention = none} = Run) ->
    Run;
command({retention_end, _, _}, #run{retention = Edit} = Run) ->
    retention_complete(Edit, Run);
command({retention_failed, _, _}, #run{retention = none} = Run) ->
    Run;
command({retention_failed, _, _}, Run) ->
    both(fun(Core) -> ?CORE:retention_failed(timeout, Core) end, fun ?MODEL:retention_failed/1, Run#run{retention = none});
command({retention_at_once, A, B}, #run{retention = none, model = Model} = Run) ->
    case ?MODEL:unpersisted_retention(Model) of
        true -> Run;
        false -> retention_complete(evaluate(A, B, Run), Run)
    end;
command({retention_at_once, _, _}, Run) ->
    Run.

reason(B) -> lists:nth(1 + B rem 6, [{transient, timeout}, {transient, {http, 503}}, {transient, throttled}, {permanent, {http, 403}},
    {permanent, cancelled}, {permanent, {odd, B}}]).

complete(Ref, #run{uid = Uid} = Run) ->
    both(fun(Core) -> ?CORE:transfer_complete(Ref, Uid, Core) end, fun(M) -> ?MODEL:complete(Ref, Uid, M) end, Run#run{uid = Uid + 1}).

fail(Ref, {_, Reason} = Failure, Run) ->
    both(fun(Core) -> ?CORE:transfer_failed(Ref, Reason, Core) end, fun(M) -> ?MODEL:failed(Ref, Failure, M) end, Run).

%% The entries of the group that is being stored are those of the last order.
group_written(Uid, #run{groups = #{uploading := Entries} = Groups} = Run) -> Run#run{groups = Groups#{Uid => Entries}};
group_written(_, Run) -> Run.

%% Retention of what is persisted, by size or by age, through the library with its groups.
evaluate(A, B, #run{core = Core, groups = Groups, now = Now}) ->
    Persisted = #manifest{total_size = Total} = ?CORE:persisted_manifest(Core),
    Limits =
        case A rem 4 of
            0 -> [{max_age, B rem 20000}];
            _ -> [{max_bytes, Total * (B rem 11) div 10}]
        end,
    Fetch = fun(#group_ref{uid = Uid}) -> {ok, maps:get(Uid, Groups)} end,
    case ?MANIFEST:evaluate_remote_retention(Persisted, Limits, Now, Fetch) of
        unchanged -> ?MANIFEST:new_edit(Persisted);
        {Edit, Objects} ->
            %% Exactly the objects that lie below, each of them once.
            ?assertEqual(length(Objects), length(lists:usort(Objects))),
            ?assert(?MANIFEST:is_well_formed(?MANIFEST:apply_edit(Edit, Persisted))),
            Edit
    end.

retention_complete(Edit, #run{core = Core, model = Model} = Run) ->
    case ?MODEL:retention_complete(Edit, Model) of
        badarg ->
            ?assertError(badarg, ?CORE:retention_complete(Edit, Core)),
            Run;
        _ ->
            both(
                fun(C) -> ?CORE:retention_complete(Edit, C) end,
                fun(M) -> ?MODEL:retention_complete(Edit, M) end,
                Run#run{retention = none}
            )
    end.

both(Library, Model, #run{core = Core0} = Run) ->
    {Core, Effects} = Library(Core0),
    %% States are values: once more gives the same.
    {Twin, Effects} = Library(Core0),
    ?assertEqual(view(Core), view(Twin)),
    effects(Effects, Model(Run#run.model), Run#run{core = Core}).

effects(Effects, {Model, Expected}, Run) ->
    ?assertEqual(Expected, Effects),
    lists:foldl(fun effect/2, Run#run{model = Model}, Effects).

effect({upload_group, _, _, Entries, _, _}, #run{groups = Groups} = Run) ->
    Run#run{groups = Groups#{uploading => Entries}};
effect({start_persist, Manifest, _, _, _, Edits}, #run{core = Core} = Run) ->
    Persisted = ?CORE:persisted_manifest(Core),
    ?assertEqual(Manifest, lists:foldl(fun ?MANIFEST:apply_edit/2, Persisted, Edits)),
    ?assert(?MANIFEST:is_well_formed(Manifest)),
    ?assertEqual({ok, Manifest#manifest{revision = 0}}, ?MANIFEST:decode_root(?MANIFEST:encode_root(Manifest))),
    Run;
effect({broadcast, _, Edits}, #run{replica = Replica0, core = Core} = Run) ->
    Replica = lists:foldl(fun ?MANIFEST:apply_edit/2, Replica0, Edits),
    Persisted = ?CORE:persisted_manifest(Core),
    ?assertEqual(Persisted, Replica#manifest{revision = Persisted#manifest.revision}),
    Run#run{replica = Replica};
effect({update_range, First, Next}, #run{core = Core} = Run) ->
    ?assertMatch(#manifest{first_offset = First, next_offset = Next}, ?CORE:persisted_manifest(Core)),
    Run;
effect({reply_waiters, Replies}, #run{core = Core, waiting = Waiting} = Run) ->
    #manifest{next_offset = Next} = ?CORE:persisted_manifest(Core),
    {Answered, Left} = lists:partition(fun({_, From}) -> lists:member({From, ok}, Replies) end, Waiting),
    %% Each is answered once, none too early, and none is left that could be.
    ?assertEqual(length(Replies), length(Answered)),
    ?assert(lists:all(fun({Offset, _}) -> Offset =< Next end, Answered)),
    ?assert(lists:all(fun({Offset, _}) -> Offset > Next end, Left)),
    Run#run{waiting = Left};
effect(Effect, Run) when Effect =:= reinitialize; Effect =:= stop ->
    restart(Run);
effect(Effect, Run) when
    Effect =:= cancel_persist_timer; element(1, Effect) =:= start_persist_timer; element(1, Effect) =:= submit_transfer;
    element(1, Effect) =:= resubmit_transfer; element(1, Effect) =:= resubmit_transfer_delayed;
    element(1, Effect) =:= evaluate_retention
->
    Run.

%% As the shell does: all is forgotten, and what is persisted is where it goes on.
restart(#run{core = Old, model = Model, options = Options, now = Now} = Run) ->
    Persisted = #manifest{next_offset = Next} = ?CORE:persisted_manifest(Old),
    {Core, []} = ?NIF:core_init(Persisted, Options, Now),
    Run#run{core = Core, model = (?MODEL:restart(Model))(Now), tail = Next, retention = none, waiting = []}.

same_views(#run{core = Core, model = Model} = Run) ->
    ?assertEqual(?MODEL:manifest(Model), ?CORE:manifest(Core)),
    ?assertEqual(?MODEL:persisted_manifest(Model), ?CORE:persisted_manifest(Core)),
    Status = ?MODEL:status(Model),
    ?assertEqual(Status, maps:with(maps:keys(Status), ?CORE:format_state(Core))),
    ?assertEqual(maps:get(rebalance_in_flight, Status), ?CORE:rebalance_in_flight(Core)),
    covered(?CORE:manifest(Core), Run),
    covered(?CORE:persisted_manifest(Core), Run),
    Run.

%% Entries, with the groups they name opened, are fragments that follow each other from the first offset to the end, and their sizes
%% are the total.
covered(#manifest{first_offset = First, next_offset = Next, total_size = Total, entries = Entries}, #run{groups = Groups}) ->
    Fragments = open(Entries, Groups),
    Ends = case Fragments of [] -> []; [_ | Tail] -> [Offset || {Offset, _} <- Tail] ++ [Next] end,
    Alive = [Fragment || {Fragment, End} <- lists:zip(Fragments, Ends), End > First],
    ?assertEqual(Total, lists:sum([Size || {_, Size} <- Alive])),
    ?assertEqual(lists:sort(Fragments), Fragments),
    case Alive of
        [] -> ?assertEqual(First, Next);
        [{Oldest, _} | _] -> ?assertEqual(First, Oldest)
    end.

open(Entries, Groups) ->
    lists:append([
        case Kind of
            ?MANIFEST_KIND_FRAGMENT -> [{Offset, Size}];
            _ -> open(maps:get(Uid, Groups), Groups)
        end
     || ?ENTRY(Offset, _, _, Kind, Size, Uid) <= Entries
    ]).

view(Core) ->
    {?CORE:manifest(Core), ?CORE:persisted_manifest(Core), ?CORE:format_state(Core)}.

%% --- workers ---------------------------------------------------------------------------------------------------------

%% On every scheduler at once.
in_parallel(Fun, Items) ->
    Workers = erlang:system_info(schedulers_online),
    Parts = [[Item || {I, Item} <- lists:enumerate(Items), I rem Workers =:= W] || W <- lists:seq(0, Workers - 1)],
    Pids = [spawn_monitor(fun() -> exit({answers, sum([Fun(Item) || Item <- Part])}) end) || Part <- Parts],
    [
        receive
            {'DOWN', Mon, process, Pid, {answers, Answers}} -> Answers;
            {'DOWN', Mon, process, Pid, {Reason, _}} -> error(Reason);
            {'DOWN', Mon, process, Pid, Reason} -> error(Reason)
        end
     || {Pid, Mon} <- Pids
    ].

sum(Maps) ->
    lists:foldl(fun(Map, Sum) -> maps:merge_with(fun(_, A, B) -> A + B end, Map, Sum) end, #{}, Maps).
