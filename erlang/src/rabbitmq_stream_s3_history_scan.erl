%% @doc Reading a host's index of pending segments, and looking for objects of runs that are gone. For processes that may wait.
-module(rabbitmq_stream_s3_history_scan).

-export([scan/3, run/2, had_segments/2, purge_by_key/2, purge_by_prefix/1, orphans/1]).
-export_type([listing/0, report/0]).

%% As many as a machine knows one by one, and one more to see whether there are others.
-define(WINDOW, 16).
%% As many keys as a request to S3 may have.
-define(OBJECTS, 1000).
-define(MAX_SEQ, 16#FFFFFFFFFFFFFFFF).

-type run() :: rabbitmq_stream_s3_history_source:run().
-type source() :: rabbitmq_stream_s3_history_source:source().
%% The first segments of a run, and the number, bytes and oldest time of the others.
-type listing() :: rabbitmq_stream_s3_nif:history_listing().
-type report() :: #{listed := non_neg_integer(), deleted := non_neg_integer(), failed := non_neg_integer()}.

%% --- the index -------------------------------------------------------------------------------------------------------

%% @doc Walks the whole index. After each page the function is told the runs that are complete by then, and those that cannot be read. Memory: one page
%% and one listing.
-spec scan(source(), PageSize :: pos_integer(), fun(([{run(), listing()} | {unreadable, run(), term()}]) -> ok)) ->
    ok | {error, {retryable | permanent, term()}}.
scan(Source, PageSize, Tell) ->
    scan(Source, PageSize, Tell, start, none).

scan(Source, PageSize, Tell, From, Open) ->
    case page(Source, From, PageSize) of
        {ok, Entries, Next} ->
            {Found, StillOpen} = lists:foldl(fun entry/2, {[], Open}, Entries),
            case Next of
                done ->
                    Tell(lists:reverse(close(StillOpen, Found)));
                _ ->
                    ok = Tell(lists:reverse(Found)),
                    scan(Source, PageSize, Tell, {next, Next}, StillOpen)
            end;
        {error, _} = Error ->
            Error
    end.

entry({unreadable, Run, Reason}, {Found, Open}) ->
    {[{unreadable, Run, Reason} | close(Open, Found)], none};
entry(#{run := Run} = Segment, {Found, {Run, Listing}}) ->
    {Found, {Run, add(Segment, Listing)}};
entry(#{run := Run} = Segment, {Found, Open}) ->
    {close(Open, Found), {Run, add(Segment, empty())}}.

close(none, Found) -> Found;
close({Run, Listing}, Found) -> [{Run, finish(Listing)} | Found].

empty() ->
    {0, [], {0, 0, undefined}}.

add(#{seq := Seq, size := Size, sealed_ms := Ms}, {N, First, Beyond}) when N < ?WINDOW ->
    {N + 1, [{Seq, Size, Ms} | First], Beyond};
add(#{size := Size, sealed_ms := Ms}, {N, First, {Segments, Bytes, Oldest}}) ->
    %% (An atom is above every number.)
    {N + 1, First, {Segments + 1, Bytes + Size, min(Oldest, Ms)}}.

finish({_N, First, Beyond}) ->
    {lists:reverse(First), Beyond}.

%% @doc What the index has of one run. One page of a few entries.
-spec run(source(), run()) -> {ok, listing()} | {error, {retryable | permanent, term()}}.
run(Source, Run) ->
    run(Source, Run, {run, Run}, empty()).

run(Source, Run, From, Listing0) ->
    case page(Source, From, ?WINDOW + 1) of
        {ok, Entries, Next} ->
            case of_run(Run, Entries, Listing0) of
                {unreadable, Reason} -> {error, {permanent, Reason}};
                {others, Listing} -> {ok, finish(Listing)};
                %% The page ends within the run, or before it.
                {more, {N, _, _} = Listing} when Next =/= done, N =< ?WINDOW -> run(Source, Run, {next, Next}, Listing);
                {more, Listing} -> {ok, finish(Listing)}
            end;
        {error, _} = Error ->
            Error
    end.

of_run(Run, [#{run := Run} = Segment | Entries], Listing) -> of_run(Run, Entries, add(Segment, Listing));
of_run(Run, [{unreadable, Run, Reason} | _], _Listing) -> {unreadable, Reason};
of_run(_Run, [_Other | _], Listing) -> {others, Listing};
of_run(_Run, [], Listing) -> {more, Listing}.

page({Module, Argument}, From, Limit) ->
    Query = #{source => Argument, from => From, limit => Limit},
    %% The query takes the place of the argument.
    case rabbitmq_stream_s3_history_source:call({Module, Query}, pending, []) of
        {ok, #{entries := Entries, next := Next}} -> {ok, Entries, Next};
        {error, {_Kind, _Reason}} = Error -> Error;
        Other -> {error, {permanent, {bad_answer, pending, Other}}}
    end.

%% --- a purge ---------------------------------------------------------------------------------------------------------

%% @doc Whether a run ever had a segment. The catalog stays here: it may be long, and a library call must not be.
-spec had_segments(source(), run()) -> {had_segments, boolean()} | gone | rabbitmq_stream_s3_history_source:failure().
had_segments(Source, Run) ->
    case catalog(Source, Run) of
        {ok, _Seqs} -> {had_segments, true};
        none -> {had_segments, false};
        NoCatalog -> NoCatalog
    end.

%% @doc Deletes the objects of all segments that the host's catalog has by now. `gone': the host has finished with the run meanwhile, so another owner has
%% purged it. Where it says that there never was a segment, there is nothing to do here: whatever lies there is swept next. Memory: the catalog, as the host answers
%% it, and the keys of one request. After a failure somewhere in the middle all is to be done again.
-spec purge_by_key(source(), run()) -> ok | gone | rabbitmq_stream_s3_history_source:failure() | {error, {store, rabbitmq_stream_s3_store:error()}}.
purge_by_key(Source, Run) ->
    case catalog(Source, Run) of
        {ok, Seqs} -> delete_catalog(Run, Seqs);
        none -> ok;
        NoCatalog -> NoCatalog
    end.

catalog(Source, Run) ->
    case rabbitmq_stream_s3_history_source:call(Source, catalog, [Run]) of
        {ok, Seqs} when is_list(Seqs) -> {ok, Seqs};
        none -> none;
        gone -> gone;
        {error, {Kind, _Reason}} = Error when Kind =:= retryable; Kind =:= permanent -> Error;
        Other -> {error, {permanent, {bad_answer, catalog, Other}}}
    end.

delete_catalog(_Run, []) ->
    ok;
delete_catalog(Run, Seqs) ->
    case page_of_keys(Run, Seqs, ?OBJECTS, []) of
        {ok, Keys, Rest} ->
            case delete(Keys) of
                ok -> delete_catalog(Run, Rest);
                {error, Error} -> {error, {store, Error}}
            end;
        {not_a_seq, What} ->
            {error, {permanent, {bad_answer, catalog, What}}}
    end.

page_of_keys(Run, [Seq | Seqs], N, Keys) when N > 0, is_integer(Seq), Seq >= 0, Seq =< ?MAX_SEQ ->
    page_of_keys(Run, Seqs, N - 1, [rabbitmq_stream_s3_store:history_key(Run, Seq) | Keys]);
page_of_keys(_Run, Rest, N, Keys) when N =:= 0; Rest =:= [] ->
    {ok, lists:reverse(Keys), Rest};
page_of_keys(_Run, [What | _], _N, _Keys) ->
    {not_a_seq, What};
page_of_keys(_Run, Tail, _N, _Keys) ->
    {not_a_seq, Tail}.

%% @doc Deletes whatever lies under the prefix of a run.
-spec purge_by_prefix(run()) -> ok | {error, term()}.
purge_by_prefix(Run) ->
    purge_page(rabbitmq_stream_s3_store:history_prefix(Run), undefined).

purge_page(Prefix, From) ->
    case rabbitmq_stream_s3_store:list(Prefix, From, ?OBJECTS, timeout()) of
        {ok, #{objects := Objects, next := Next}} ->
            case delete([Key || {Key, _, _} <- Objects]) of
                ok when Next =:= undefined -> ok;
                ok -> purge_page(Prefix, Next);
                {error, _} = Error -> Error
            end;
        {error, _} = Error ->
            Error
    end.

delete([]) ->
    ok;
delete(Keys) ->
    case rabbitmq_stream_s3_store:delete(Keys, timeout()) of
        {ok, []} -> ok;
        {ok, [{_Key, Error} | _]} -> {error, Error};
        {error, _} = Error -> Error
    end.

timeout() ->
    rabbitmq_stream_s3_config:get(retention_timeout_ms).

%% --- orphans ---------------------------------------------------------------------------------------------------------

%% @doc Looks through all history objects for those of runs that are gone, and deletes them once they are older than `gc_min_age_ms': writes that the store
%% took in after the purge. A listing of all of them, and a question to the host for each run on each page, asked after the page was listed.
-spec orphans(source()) -> {ok, report()} | {error, term(), report()}.
orphans(Source) ->
    Prefix = rabbitmq_stream_s3_store:history_prefix(all),
    orphans(Source, Prefix, undefined, #{listed => 0, deleted => 0, failed => 0}).

orphans(Source, Prefix, From, #{listed := Listed} = Report0) ->
    case rabbitmq_stream_s3_store:list(Prefix, From, ?OBJECTS, timeout()) of
        {ok, #{objects := Objects, next := Next}} ->
            Report = sweep(doomed(Source, Objects), Report0#{listed := Listed + length(Objects)}),
            case Next of
                undefined -> {ok, Report};
                _ -> orphans(Source, Prefix, Next, Report)
            end;
        {error, Error} ->
            {error, {store, Error}, Report0}
    end.

doomed(Source, Objects) ->
    Now = erlang:system_time(millisecond),
    MinAge = rabbitmq_stream_s3_config:get(gc_min_age_ms),
    {Doomed, _} = lists:foldl(
        fun({Key, _Size, Modified}, {Acc, Known0}) ->
            case rabbitmq_stream_s3_store:parse_key(Key) of
                {history, Run, _Seq} ->
                    Known = look(Source, Run, Known0),
                    case rabbitmq_stream_s3_nif:history_may_sweep(map_get(Run, Known), age(Modified, Now), MinAge) of
                        true -> {[Key | Acc], Known};
                        false -> {Acc, Known}
                    end;
                _NotOurs ->
                    {Acc, Known0}
            end
        end,
        {[], #{}},
        Objects
    ),
    Doomed.

%% Keys come in order, so the last run is all that needs to be remembered.
look(_Source, Run, Known) when is_map_key(Run, Known) ->
    Known;
look(Source, Run, _Known) ->
    #{Run => rabbitmq_stream_s3_history_source:call(Source, run_state, [Run]) =:= gone}.

age(Ms, Now) when is_integer(Ms) -> max(0, Now - Ms);
age(undefined, _Now) -> undefined.

sweep([], Report) ->
    Report;
sweep(Keys, #{deleted := Deleted, failed := Failed} = Report) ->
    Left =
        case rabbitmq_stream_s3_store:delete(Keys, timeout()) of
            {ok, Undeleted} -> length(Undeleted);
            {error, _} -> length(Keys)
        end,
    Report#{deleted := Deleted + length(Keys) - Left, failed := Failed + Left}.
