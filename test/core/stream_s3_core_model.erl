%% @doc The replica reader once more, the slow and plain way: a list of fragments, a list of root entries, and lists of everything
%% else. It is what the library is compared with, so nothing here is clever, and nothing here calls the library.
%%
%% Each event answers `{Model, Effects}', effects as the contract writes them, or `badarg' where the call has to be refused.
-module(stream_s3_core_model).

-include("rabbitmq_stream_s3.hrl").

-export([new/3, restart/1, cut/4, complete/3, failed/3, group_stored/2, group_failed/2]).
-export([persisted/3, persist_failed/2, tick/2, await/3, retention_started/1, retention_complete/2, retention_failed/1]).
-export([manifest/1, persisted_manifest/1, status/1, may_jump/1, unpersisted_retention/1, refs/1]).
-export_type([model/0, options/0]).

-type fragment() :: #{first := non_neg_integer(), next := pos_integer(), first_ts := integer(), last_ts := integer(),
    size := non_neg_integer(), uid => 0..16#FFFFFFFF}.
-type entry() :: {First :: non_neg_integer(), FirstTs :: integer(), LastTs :: integer(), Kind :: 0..3, Size :: non_neg_integer(), Uid :: integer()}.
-type options() :: #{persist_threshold := pos_integer(), persist_interval_ms := non_neg_integer(), rebalance_threshold := pos_integer(),
    epoch := non_neg_integer(), stream := term(), dir := term(), reference := term()}.

%% What is tiered. `fragments' is the truth that the entries, with the groups they name, have to tell.
-record(tier, {
    first = 0 :: non_neg_integer(),
    next = 0 :: non_neg_integer(),
    fragments = [] :: [fragment()],
    entries = [] :: [entry()]
}).

-record(model, {
    options :: options(),
    revision = 0 :: non_neg_integer(),
    tier = #tier{} :: #tier{},
    persisted = #tier{} :: #tier{},
    queue = [] :: [{Ref :: term(), fragment(), Meta :: map(), none | 0..16#FFFFFFFF}],
    edits = [] :: [{fragment | group | retention, #edit{}}],
    since = 0 :: non_neg_integer(),
    persist = none :: none | {#tier{}, Edits :: list(), Fragments :: non_neg_integer()},
    failures = 0 :: non_neg_integer(),
    last :: integer(),
    group = none :: none | {Kind :: 1..3, Index :: non_neg_integer(), [entry()]},
    retention = false :: boolean(),
    waiters = [] :: [{Offset :: non_neg_integer(), From :: term()}]
}).
-opaque model() :: #model{}.

%% @doc A stream whose tier begins at an offset and is empty.
-spec new(non_neg_integer(), options(), Now :: integer()) -> model().
new(At, Options, Now) ->
    Tier = #tier{first = At, next = At},
    #model{options = Options, tier = Tier, persisted = Tier, last = Now}.

%% @doc What is left after the shell has thrown everything away and begun again with what is persisted.
-spec restart(model()) -> fun((Now :: integer()) -> model()).
restart(#model{options = Options, revision = Revision, persisted = Tier}) ->
    fun(Now) -> #model{options = Options, revision = Revision, tier = Tier, persisted = Tier, last = Now} end.

%% --- events ----------------------------------------------------------------------------------------------------------

cut(Ref, Fragment, Meta, #model{queue = Queue, edits = Edits, options = #{stream := Stream, dir := Dir}} = M) ->
    Timer = [timer(M) || Queue =:= [], Edits =:= []],
    {M#model{queue = Queue ++ [{Ref, Fragment, Meta, none}]}, [{submit_transfer, Ref, Stream, Dir, Meta} | Timer]}.

complete(Ref, Uid, #model{queue = Queue} = M) ->
    case lists:keyfind(Ref, 1, Queue) of
        {Ref, Fragment, Meta, none} ->
            M1 = M#model{queue = lists:keyreplace(Ref, 1, Queue, {Ref, Fragment, Meta, Uid})},
            case drain(M1) of
                M1 -> {M1, []};
                M2 -> then(fun persist_or_arm/1, rebalance_if_due(M2))
            end;
        _ ->
            {M, []}
    end.

failed(Ref, {Class, Reason}, #model{queue = Queue, options = #{stream := Stream, dir := Dir}} = M) ->
    case {lists:keyfind(Ref, 1, Queue), Class} of
        {{Ref, _, Meta, none}, transient} -> {M, [{resubmit_transfer, Ref, Stream, Dir, Meta}]};
        {{Ref, _, Meta, none}, permanent} -> {M, [{resubmit_transfer_delayed, Ref, Stream, Dir, Meta, Reason}]};
        _ -> {M, []}
    end.

group_stored(_Uid, #model{group = none} = M) ->
    {M, []};
group_stored(Uid, #model{group = {Kind, Index, Moving}, tier = #tier{entries = Entries} = Tier} = M) ->
    {Before, Rest} = lists:split(Index, Entries),
    {Moving, After} = lists:split(length(Moving), Rest),
    {First, FirstTs, _, _, _, _} = hd(Moving),
    {_, _, LastTs, _, _, _} = lists:last(Moving),
    Group = {First, FirstTs, LastTs, Kind, 0, Uid},
    Edit = (edit(Tier))#edit{entries = encode([Group]), pos = Index * ?ENTRY_B, len = length(Moving) * ?ENTRY_B},
    M1 = M#model{group = none, tier = Tier#tier{entries = Before ++ [Group] ++ After}},
    then(fun persist_or_arm/1, rebalance_if_due(wait({group, Edit}, M1))).

group_failed(_Class, #model{group = none} = M) -> {M, []};
group_failed(transient, M) -> {M, [upload_group(M)]};
group_failed(permanent, M) -> persist_or_arm(M#model{group = none}).

persisted(_Revision, _Now, #model{persist = none} = M) ->
    {M, []};
persisted(Revision, Now, #model{persist = {Tier, Edits, _}, waiters = Waiters, options = #{stream := Stream, dir := Dir}} = M) ->
    M1 = M#model{persist = none, persisted = Tier, revision = Revision, last = Now, failures = 0},
    Moved = lists:keymember(group, 1, M#model.edits),
    {Happy, Left} = lists:partition(fun({Offset, _}) -> Offset =< Tier#tier.next end, Waiters),
    Effects =
        [{update_range, Tier#tier.first, Tier#tier.next}, {broadcast, Stream, edits(Edits)}] ++
            [{evaluate_retention, Stream, Dir} || M#model.group =:= none, not Moved] ++
            [cancel_persist_timer] ++
            [{reply_waiters, [{From, ok} || {_, From} <- Happy]} || Happy =/= []],
    {M2, More} = persist_or_arm(M1#model{waiters = Left}),
    {M2, Effects ++ More}.

persist_failed(Reason, #model{persist = Persist, revision = Revision} = M0) ->
    M = take_back(M0),
    case Reason of
        conflict -> {M, [reinitialize]};
        not_found when Revision > 0 -> {M, [stop]};
        not_found -> {M, [reinitialize]};
        _ when Persist =:= none -> {M, []};
        _ ->
            M1 = M#model{failures = M#model.failures + 1},
            case M1#model.failures =:= 1 andalso may_persist(M1) of
                true -> start_persist(M1);
                false -> {M1, [timer(M1)]}
            end
    end.

tick(Now, #model{last = Last0, options = #{persist_interval_ms := Interval}} = M) ->
    Last = min(Last0, Now),
    M1 = M#model{last = Last},
    case may_persist(M1) andalso Now - Last >= Interval of
        true -> start_persist(M1);
        false -> {M1, []}
    end.

await(Offset, From, #model{persisted = #tier{next = Next}} = M) when Offset =< Next ->
    {M, [{reply_waiters, [{From, ok}]}]};
await(Offset, From, #model{waiters = Waiters} = M) ->
    {M#model{waiters = Waiters ++ [{Offset, From}]}, []}.

retention_started(M) ->
    M#model{retention = true}.

retention_complete(#edit{first_offset = At}, #model{tier = #tier{first = First}} = M) when At =< First ->
    then(fun persist_or_arm/1, rebalance_if_due(M#model{retention = false}));
retention_complete(#edit{first_offset = At}, #model{tier = Tier, group = Group} = M) ->
    #tier{fragments = Fragments, entries = Entries} = Tier,
    {Dropped, Kept} = lists:partition(fun(#{next := Next}) -> Next =< At end, Fragments),
    %% An entry ends where the next one begins.
    Ends = case Entries of [] -> []; [_ | Tail] -> [element(1, E) || E <- Tail] ++ [Tier#tier.next] end,
    Count = length([End || End <- Ends, End =< At]),
    Tier1 = Tier#tier{first = At, fragments = Kept, entries = lists:nthtail(Count, Entries)},
    Edit = (edit(Tier1))#edit{size = -bytes(Dropped), pos = 0, len = Count * ?ENTRY_B},
    case Group of
        {_, Index, _} when Index < Count ->
            badarg;
        {Kind, Index, Moving} ->
            dropped(Edit, M#model{tier = Tier1, group = {Kind, Index - Count, Moving}});
        none ->
            dropped(Edit, M#model{tier = Tier1})
    end.

dropped(Edit, M) ->
    then(fun persist_or_arm/1, rebalance_if_due(wait({retention, Edit}, M#model{retention = false}))).

retention_failed(M) ->
    then(fun arm_if_edits_wait/1, rebalance_if_due(M#model{retention = false})).

%% --- views -----------------------------------------------------------------------------------------------------------

manifest(#model{tier = Tier, revision = Revision}) -> (to_manifest(Tier))#manifest{revision = Revision}.
persisted_manifest(#model{persisted = Tier, revision = Revision}) -> (to_manifest(Tier))#manifest{revision = Revision}.

%% @doc What format_state/1 has to say.
status(#model{queue = Queue, tier = Tier, persisted = Persisted, persist = Persist} = M) ->
    Stored = length([x || {_, _, _, Uid} <- Queue, Uid =/= none]),
    #{
        manifest_first_offset => Tier#tier.first,
        manifest_next_offset => Tier#tier.next,
        manifest_total_size => bytes(Tier#tier.fragments),
        persisted_next_offset => Persisted#tier.next,
        transfers_in_flight => length(Queue) - Stored,
        transfers_pending_order => Stored,
        since_persist => M#model.since,
        in_persist_count => case Persist of none -> 0; {_, _, N} -> N end,
        persist_in_flight => Persist =/= none,
        last_persist_ts => M#model.last,
        rebalance_in_flight => M#model.group =/= none,
        retention_in_flight => M#model.retention,
        waiters => length(M#model.waiters)
    }.

%% @doc Whether the next fragment may start anywhere.
may_jump(#model{queue = Queue, tier = #tier{entries = Entries}}) -> Queue =:= [] andalso Entries =:= [].

%% @doc Whether a retention has changed the tier, and not what is persisted.
unpersisted_retention(#model{edits = Edits, persist = Persist}) ->
    InFlight = case Persist of none -> []; {_, Taken, _} -> Taken end,
    lists:keymember(retention, 1, InFlight ++ Edits).

%% @doc Fragments that are not in the tier, oldest first.
refs(#model{queue = Queue}) -> [Ref || {Ref, _, _, _} <- Queue].

%% --- steps -----------------------------------------------------------------------------------------------------------

%% Does one step after another, and puts their effects together.
then(Step, {M, Effects}) ->
    {M1, More} = Step(M),
    {M1, Effects ++ More}.

drain(#model{queue = [{_, #{first := First} = Fragment, _, Uid} | Rest], tier = #tier{next = Next, entries = Entries}} = M) when
    Uid =/= none, (Entries =:= [] orelse First =:= Next)
->
    drain(append(Fragment#{uid => Uid}, M#model{queue = Rest}));
drain(M) ->
    M.

append(#{first := First, next := Next, first_ts := FirstTs, last_ts := LastTs, size := Size, uid := Uid} = Fragment, #model{tier = Tier} = M) ->
    #tier{fragments = Fragments, entries = Entries} = Tier,
    Entry = {First, FirstTs, LastTs, ?MANIFEST_KIND_FRAGMENT, Size, Uid},
    Start = case Entries of [] -> First; _ -> Tier#tier.first end,
    Tier1 = #tier{first = Start, next = Next, fragments = Fragments ++ [Fragment], entries = Entries ++ [Entry]},
    Edit = (edit(Tier1))#edit{next_offset = Next, size = Size, entries = encode([Entry]), pos = length(Entries) * ?ENTRY_B},
    wait({fragment, Edit}, M#model{tier = Tier1, since = M#model.since + 1}).

wait(Edit, #model{edits = Edits} = M) -> M#model{edits = Edits ++ [Edit]}.

rebalance_if_due(#model{group = none, retention = false, tier = #tier{entries = Entries}, options = #{rebalance_threshold := Threshold}} = M) ->
    case run(Entries, 0, Threshold) of
        none ->
            {M, []};
        {Index, Moving} ->
            M1 = M#model{group = {element(4, hd(Moving)) + 1, Index, Moving}},
            {M1, [upload_group(M1)]}
    end;
rebalance_if_due(M) ->
    {M, []}.

%% The first `Threshold' entries in a row of one kind that can be grouped.
run([], _Index, _Threshold) ->
    none;
run([{_, _, _, Kind, _, _} | Tail] = Entries, Index, Threshold) ->
    Same = lists:takewhile(fun(E) -> element(4, E) =:= Kind end, Entries),
    case length(Same) >= Threshold andalso Kind < ?MANIFEST_KIND_MEGA_GROUP of
        true -> {Index, lists:sublist(Same, Threshold)};
        false -> run(Tail, Index + 1, Threshold)
    end.

upload_group(#model{group = {Kind, Index, Moving}, options = #{stream := Stream}}) ->
    {upload_group, Stream, Kind, encode(Moving), Index * ?ENTRY_B, length(Moving) * ?ENTRY_B}.

may_persist(#model{persist = none, group = none, retention = false, edits = [_ | _]}) -> true;
may_persist(#model{}) -> false.

persist_or_arm(#model{since = Since, options = #{persist_threshold := Threshold}} = M) ->
    case may_persist(M) andalso Since >= Threshold of
        true -> start_persist(M);
        false -> arm_if_edits_wait(M)
    end.

arm_if_edits_wait(#model{edits = []} = M) -> {M, []};
arm_if_edits_wait(M) -> {M, [timer(M)]}.

timer(#model{options = #{persist_interval_ms := Ms}}) -> {start_persist_timer, Ms}.

start_persist(#model{tier = Tier, edits = Edits, since = Since, revision = Revision, options = Options} = M) ->
    #{epoch := Epoch, reference := Reference} = Options,
    Effect = {start_persist, manifest(M), Epoch, Reference, Revision, edits(Edits)},
    {M#model{persist = {Tier, Edits, Since}, edits = [], since = 0}, [Effect]}.

take_back(#model{persist = none} = M) -> M;
take_back(#model{persist = {_, Taken, N}, edits = Edits, since = Since} = M) ->
    M#model{persist = none, edits = Taken ++ Edits, since = Since + N}.

%% --- terms -----------------------------------------------------------------------------------------------------------

edits(Edits) -> [Edit || {_, Edit} <- Edits].

%% An edit with the header that this tier has.
edit(Tier) ->
    #manifest{first_offset = First, first_timestamp = FirstTs, first_last_timestamp = LastTs} = to_manifest(Tier),
    #edit{first_offset = First, first_timestamp = FirstTs, first_last_timestamp = LastTs}.

to_manifest(#tier{first = First, next = Next, fragments = Fragments, entries = Entries}) ->
    {FirstTs, LastTs} = case Fragments of [] -> {-1, -1}; [#{first_ts := F, last_ts := L} | _] -> {F, L} end,
    #manifest{
        first_offset = First,
        first_timestamp = FirstTs,
        first_last_timestamp = LastTs,
        next_offset = Next,
        total_size = bytes(Fragments),
        entries = encode(Entries)
    }.

bytes(Fragments) -> lists:sum([Size || #{size := Size} <- Fragments]).

encode(Entries) ->
    << <<?ENTRY(First, FirstTs, LastTs, Kind, Size, Uid)/binary>> || {First, FirstTs, LastTs, Kind, Size, Uid} <- Entries >>.
