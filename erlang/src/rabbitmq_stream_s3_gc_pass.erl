%% @doc One walk over the objects of one stream or of all streams, which finds those that are garbage and deletes them.
%%
%% Works through the listing page by page. Each object is judged by the core, against what a majority of the metadata store says
%% of its stream *after* the page was listed; and before anything is deleted the metadata store is asked once more, and must
%% answer the same. Whatever is not known for sure is left alone, so a walk that ends early has done no harm.
-module(rabbitmq_stream_s3_gc_pass).

-include("rabbitmq_stream_s3.hrl").

-export([run/1]).
-export_type([plan/0, report/0]).

-define(PAGE, 1000).
%% Stores tell times in whole seconds, so what seems to be of one age may have come one after the other.
-define(CLOCK_GRAIN_MS, 1000).
%% Between two pages: neither the store nor this node is meant to notice the walk.
-define(PAUSE_MS, 20).
%% A busy stream gets a new root every few seconds; the second look is much faster than the first.
-define(LOOKS, 5).

-type stream_id() :: binary().
%% What to do with orphans (`optional'), and with what nobody can want any more (`always').
-type plan() :: #{streams := stream_id() | all, optional := delete | count, always := delete | count}.
-type amount() :: #{objects := non_neg_integer(), bytes := non_neg_integer()}.
-type report() :: #{
    listed := amount(),
    %% Objects that stay, by reason; `changing': their stream got new roots faster than they could be judged.
    kept := #{not_ours | unknown | young | in_use | ahead | grace | changing => non_neg_integer()},
    %% What is garbage, deleted or not.
    garbage := #{orphan | discarded_tier | stream_deleted => amount()},
    reclaimed := amount(),
    %% Objects whose deletion has failed.
    failed := non_neg_integer(),
    %% Deleted streams that have objects which are too young yet.
    too_young := [stream_id()]
}.
%% What is known of one stream, and what it took to find out: groups never change.
-record(view, {
    facts :: unknown | deleted | never_persisted | {live, rabbitmq_stream_s3_metadata:tier()},
    manifest = none :: none | #manifest{},
    root_stored_ms = undefined :: integer() | undefined,
    listed = unknown :: unknown | #{{Kind :: 0..3, non_neg_integer(), non_neg_integer()} => []},
    groups = #{} :: #{{Kind :: 1..3, non_neg_integer(), non_neg_integer()} => binary()}
}).
-record(pass, {
    plan :: plan(),
    limits :: map(),
    %% Whether the metadata store knows no stream at all. Then it is more likely a new one than that all streams were deleted.
    blank :: boolean(),
    stream = none :: none | {stream_id(), #view{}},
    report :: report()
}).

%% @doc Walks. An error is that of a listing, or of the metadata store at the beginning; the report says what was done before. Waits
%% for the store and for the metadata store. Memory grows with the entries of the largest manifest.
-spec run(plan()) -> {ok, report()} | {error, term(), report()}.
run(#{streams := Streams} = Plan) ->
    Limits = #{
        gc_min_age_ms => max(?CLOCK_GRAIN_MS, rabbitmq_stream_s3_config:get(gc_min_age_ms)),
        discarded_tier_grace_ms => rabbitmq_stream_s3_config:get(discarded_tier_grace_ms)
    },
    Nothing = amount(0, 0),
    Report = #{listed => Nothing, kept => #{}, garbage => #{}, reclaimed => Nothing, failed => 0, too_young => []},
    case rabbitmq_stream_s3_metadata:streams(timeout()) of
        {ok, Known} ->
            Blank = Streams =:= all andalso Known =:= [],
            Pass = #pass{plan = Plan, limits = Limits, blank = Blank, report = Report},
            pages(rabbitmq_stream_s3_store:key_prefix(Streams), undefined, Pass);
        {error, Reason} ->
            {error, {metadata, Reason}, Report}
    end.

pages(Prefix, From, #pass{report = Report} = Pass0) ->
    case rabbitmq_stream_s3_store:list(Prefix, From, ?PAGE, timeout()) of
        {ok, #{objects := Objects, next := Next}} ->
            Pass = lists:foldl(fun one_stream/2, Pass0, by_stream(Objects)),
            case Next of
                undefined ->
                    {ok, Pass#pass.report};
                _ ->
                    ok = pause(),
                    pages(Prefix, Next, Pass)
            end;
        {error, Error} ->
            {error, {store, Error}, Report}
    end.

pause() ->
    receive
    after ?PAUSE_MS -> ok
    end.

%% Of one request.
timeout() ->
    rabbitmq_stream_s3_config:get(retention_timeout_ms).

%% Keys come in order, so those of a stream follow each other.
by_stream([]) ->
    [];
by_stream(Objects) ->
    Parsed = [{stream_of(rabbitmq_stream_s3_store:parse_key(Key)), Object} || {Key, _, _} = Object <- Objects],
    [{First, _} | _] = Parsed,
    {Same, Others} = lists:splitwith(fun({Stream, _}) -> Stream =:= First end, Parsed),
    [{First, [Object || {_, Object} <- Same]} | by_stream([Object || {_, Object} <- Others])].

stream_of({fragment, StreamId, _, _}) -> StreamId;
stream_of({root, StreamId, _, _}) -> StreamId;
stream_of({group, StreamId, _, _, _}) -> StreamId;
stream_of({history, _, _}) -> none;
stream_of(unknown) -> none.

one_stream({none, Objects}, Pass) ->
    lists:foldl(fun(_, P) -> keep(not_ours, P) end, listed(Objects, Pass), Objects);
one_stream({StreamId, Objects}, #pass{stream = {StreamId, View}} = Pass) ->
    judge(StreamId, Objects, View, ?LOOKS, listed(Objects, Pass));
one_stream({StreamId, Objects}, Pass) ->
    judge(StreamId, Objects, #view{facts = unknown}, ?LOOKS, listed(Objects, Pass)).

judge(_StreamId, Objects, _View, 0, Pass) ->
    lists:foldl(fun(_, P) -> keep(changing, P) end, Pass, Objects);
judge(StreamId, Objects, View0, Looks, #pass{plan = Plan} = Pass0) ->
    View = look(StreamId, View0),
    Now = erlang:system_time(millisecond),
    Verdicts = [{verdict(Object, View, Now, Pass0), Object} || Object <- Objects],
    Doomed = [Object || {{delete, _, When}, Object} <- Verdicts, maps:get(When, Plan) =:= delete],
    Pass = too_young(StreamId, View, Verdicts, Pass0#pass{stream = {StreamId, View}}),
    case Doomed =:= [] orelse facts(StreamId) =:= View#view.facts of
        true -> delete(Doomed, lists:foldl(fun tally/2, Pass, Verdicts));
        false -> judge(StreamId, Objects, View, Looks - 1, Pass)
    end.

too_young(StreamId, #view{facts = deleted}, Verdicts, #pass{blank = false, report = #{too_young := Streams} = Report} = Pass) ->
    case lists:any(fun({Verdict, _Object}) -> Verdict =:= {keep, young} end, Verdicts) of
        true -> Pass#pass{report = Report#{too_young := lists:usort([StreamId | Streams])}};
        false -> Pass
    end;
too_young(_StreamId, _View, _Verdicts, Pass) ->
    Pass.

tally({{keep, Reason}, _Object}, Pass) ->
    keep(Reason, Pass);
tally({{delete, Reason, _When}, {_Key, Size, _}}, #pass{report = #{garbage := Garbage} = Report} = Pass) ->
    Sum = add(amount(1, Size), maps:get(Reason, Garbage, amount(0, 0))),
    Pass#pass{report = Report#{garbage := Garbage#{Reason => Sum}}}.

keep(Reason, #pass{report = #{kept := Kept} = Report} = Pass) ->
    Pass#pass{report = Report#{kept := maps:update_with(Reason, fun(N) -> N + 1 end, 1, Kept)}}.

listed(Objects, #pass{report = #{listed := Listed} = Report} = Pass) ->
    Pass#pass{report = Report#{listed := add(Listed, amount(length(Objects), lists:sum([Size || {_, Size, _} <- Objects])))}}.

amount(Objects, Bytes) ->
    #{objects => Objects, bytes => Bytes}.

add(#{objects := N, bytes := A}, #{objects := M, bytes := B}) ->
    amount(N + M, A + B).

%% --- what is known ---------------------------------------------------------------------------------------------------

facts(StreamId) ->
    case rabbitmq_stream_s3_metadata:tier(StreamId, timeout()) of
        {ok, #{root := none}} -> never_persisted;
        {ok, Tier} -> {live, Tier};
        {error, not_found} -> deleted;
        {error, _} -> unknown
    end.

look(StreamId, #view{facts = Known, groups = Groups} = View) ->
    case facts(StreamId) of
        Known when Known =/= unknown -> View;
        {live, #{root := {{Uid, Epoch}, _Revision}}} = Facts -> look(StreamId, Epoch, Uid, #view{facts = Facts, groups = Groups});
        Facts -> #view{facts = Facts}
    end.

look(StreamId, Epoch, Uid, View) ->
    case rabbitmq_stream_s3_store:get_root(StreamId, Epoch, Uid, timeout()) of
        {ok, #manifest{entries = Entries, first_offset = First} = Manifest} ->
            {Listed, Groups} = walk(Entries, infinity, First, StreamId, {#{}, View#view.groups}),
            View#view{
                manifest = Manifest,
                listed = Listed,
                groups = Groups,
                root_stored_ms = stored_ms(rabbitmq_stream_s3_store:root_key(StreamId, Epoch, Uid))
            };
        {error, _} ->
            %% Replaced and deleted meanwhile, or out of reach.
            #view{facts = unknown}
    end.

stored_ms(Key) ->
    case rabbitmq_stream_s3_store:list(Key, undefined, 1, timeout()) of
        {ok, #{objects := [{Key, _Size, ModifiedMs}]}} -> ModifiedMs;
        {ok, #{objects := _}} -> undefined;
        {error, _} -> undefined
    end.

%% All that a manifest lists from its first offset on. What ends at or below it has been dropped, and may be gone.
walk(<<>>, _End, _First, _StreamId, Acc) ->
    Acc;
walk(?ENTRY(Offset, _, _, Kind, _, Uid, Rest), End, First, StreamId, Acc) ->
    Next =
        case Rest of
            ?ENTRY(Following, _, _, _, _, _, _) -> Following;
            <<>> -> End
        end,
    walk(Rest, End, First, StreamId, entry({Kind, Offset, Uid}, Next, First, StreamId, Acc)).

%% (`infinity' is above every number.)
entry(_Entry, Next, First, _StreamId, Acc) when Next =< First ->
    Acc;
entry(_Entry, _Next, _First, _StreamId, {unknown, Groups}) ->
    {unknown, Groups};
entry({?MANIFEST_KIND_FRAGMENT, _, _} = Entry, _Next, _First, _StreamId, {Listed, Groups}) ->
    {Listed#{Entry => []}, Groups};
entry({Kind, Offset, Uid} = Entry, Next, First, StreamId, {Listed, Groups}) ->
    case read_group(StreamId, Entry, Groups) of
        {ok, Entries} ->
            walk(Entries, Next, First, StreamId, {Listed#{{Kind, Offset, Uid} => []}, Groups#{Entry => Entries}});
        {error, _} ->
            {unknown, Groups}
    end.

read_group(StreamId, {Kind, Offset, Uid} = Entry, Groups) ->
    case Groups of
        #{Entry := Entries} -> {ok, Entries};
        #{} -> rabbitmq_stream_s3_store:get_group(StreamId, Kind, Offset, Uid, timeout())
    end.

%% --- verdicts --------------------------------------------------------------------------------------------------------

verdict({Key, _Size, ModifiedMs}, View, Now, #pass{limits = Limits, blank = Blank}) ->
    Object = #{prefix => rabbitmq_stream_s3_config:get(prefix), key => Key, age_ms => age(ModifiedMs, Now)},
    case rabbitmq_stream_s3_nif:gc_verdict(Object, stream(Key, View, Now), Limits) of
        {delete, stream_deleted, _} when Blank -> {keep, unknown};
        Verdict -> Verdict
    end.

stream(Key, #view{facts = {live, #{root := {{Uid, Epoch}, _}, discarded := Discarded}}} = View, Now) ->
    #view{manifest = #manifest{next_offset = Next}, root_stored_ms = Stored, listed = Listed} = View,
    {live, #{
        epoch => Epoch,
        root_uid => Uid,
        root_age_ms => age(Stored, Now),
        next_offset => Next,
        listed => is_listed(rabbitmq_stream_s3_store:parse_key(Key), Listed),
        discarded => discarded(Discarded, Now)
    }};
stream(_Key, #view{facts = Facts}, _Now) ->
    Facts.

discarded({AtMs, Epoch}, Now) when is_integer(AtMs) -> {age(AtMs, Now), Epoch};
discarded({undefined, _Epoch}, _Now) -> undefined;
discarded(none, _Now) -> undefined.

is_listed(_Parsed, unknown) -> undefined;
is_listed({fragment, _, Offset, Uid}, Listed) -> is_map_key({?MANIFEST_KIND_FRAGMENT, Offset, Uid}, Listed);
is_listed({group, _, Kind, Offset, Uid}, Listed) -> is_map_key({Kind, Offset, Uid}, Listed);
is_listed({root, _, _, _}, _Listed) -> false.

age(Ms, Now) when is_integer(Ms) -> max(0, Now - Ms);
age(_Unknown, _Now) -> undefined.

%% --- deletion --------------------------------------------------------------------------------------------------------

%% At most a page, so one request.
delete([], Pass) ->
    Pass;
delete(Objects, #pass{report = #{reclaimed := Reclaimed, failed := Failed} = Report} = Pass) ->
    Left =
        case rabbitmq_stream_s3_store:delete([Key || {Key, _, _} <- Objects], timeout()) of
            {ok, Undeleted} -> [Key || {Key, _Error} <- Undeleted];
            {error, _} -> [Key || {Key, _, _} <- Objects]
        end,
    Sizes = maps:without(Left, #{Key => Size || {Key, Size, _} <- Objects}),
    Sum = amount(map_size(Sizes), lists:sum(maps:values(Sizes))),
    ok = count(Sum, length(Left)),
    Pass#pass{report = Report#{reclaimed := add(Reclaimed, Sum), failed := Failed + length(Left)}}.

count(#{objects := Objects, bytes := Bytes}, Failed) ->
    Numbers = [{objects_deleted, Objects}, {objects_delete_failed, Failed}, {gc_objects_reclaimed, Objects}, {gc_bytes_reclaimed, Bytes}],
    lists:foreach(fun({Name, N}) -> ok = rabbitmq_stream_s3_counters:add(objects, Name, N) end, Numbers).
