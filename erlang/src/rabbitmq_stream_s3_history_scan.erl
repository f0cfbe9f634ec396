%% @doc Reading a host's index of pending segments, and looking for objects of runs that are gone. For processes that may wait.
-module(rabbitmq_stream_s3_history_scan).

-export([scan/3, run/2, had_segments/2, purge_by_key/2, purge_by_prefix/1, orphans/2]).
-export_type([listing/0, found/0, report/0]).

%% As many as a machine knows one by one, and one more to see whether there are others.
-define(WINDOW, 16).
%% As many keys as a request to S3 may have.
-define(OBJECTS, 1000).
%% Numbers of the library have 64 bits.
-define(MAX, 16#FFFFFFFFFFFFFFFF).

-type run() :: rabbitmq_stream_s3_history_source:run().
-type source() :: rabbitmq_stream_s3_history_source:source().
%% The first segments of a run, and the number, bytes and oldest time of the others.
-type listing() :: rabbitmq_stream_s3_nif:history_listing().
%% What a page of the index has come to: a run, a run that cannot be read, and rows that belong to no run, one of them shown.
-type found() :: {run(), listing()} | {unreadable, run(), Reason :: term()} | {stray, pos_integer(), Row :: term()}.
-type report() :: #{listed := non_neg_integer(), deleted := non_neg_integer(), failed := non_neg_integer()}.

%% Of a run, while its rows come.
-record(listing, {
    known = 0 :: 0..?WINDOW,
    first = [] :: [{rabbitmq_stream_s3_history_source:seq(), non_neg_integer(), integer()}],
    last = -1 :: integer(),
    %% Behind the first ones.
    segments = 0 :: non_neg_integer(),
    bytes = 0 :: non_neg_integer(),
    oldest = undefined :: integer() | undefined
}).

%% --- the index -------------------------------------------------------------------------------------------------------

%% @doc Walks the whole index. After each page the function is told the runs that are complete by then, those that cannot be read, and how many rows belong
%% to no run, with one of them. A bad row costs its run alone. Memory: one page and one listing.
-spec scan(source(), PageSize :: pos_integer(), fun(([found()]) -> ok)) -> ok | {error, {retryable | permanent, term()}}.
scan(Source, PageSize, Tell) ->
    scan(Source, PageSize, Tell, start, none).

scan(Source, PageSize, Tell, From, Open0) ->
    case page(Source, From, PageSize) of
        {ok, Rows, Next} ->
            {Found0, Open, Stray} = lists:foldl(fun row/2, {[], Open0, none}, Rows),
            Found = [{stray, N, Row} || {N, Row} <- [Stray]] ++ Found0,
            case Next of
                done ->
                    Tell(lists:reverse(close(Open, Found)));
                _ ->
                    ok = Tell(lists:reverse(Found)),
                    scan(Source, PageSize, Tell, {next, Next}, Open)
            end;
        {error, _} = Error ->
            Error
    end.

row({unreadable, Run, Reason} = Row, Acc) -> of_run(Run, Row, {error, Reason}, Acc);
row(#{run := Run} = Row, Acc) -> of_run(Run, Row, segment, Acc);
row(Row, Acc) -> stray(Row, Acc).

%% What cannot be read is told once, and drops what was read of the run before.
of_run(Run, _Row, _What, {_, {Run, unreadable}, _} = Acc) ->
    Acc;
of_run(Run, _Row, {error, Reason}, {Found, {Run, _}, Stray}) ->
    {[{unreadable, Run, Reason} | Found], {Run, unreadable}, Stray};
of_run(Run, Row, segment, {Found, {Run, Listing0}, Stray}) ->
    case add(Row, Listing0) of
        {ok, Listing} -> {Found, {Run, Listing}, Stray};
        {error, _} = Error -> of_run(Run, Row, Error, {Found, {Run, Listing0}, Stray})
    end;
of_run(Run, Row, What, {Found, Open, Stray} = Acc) ->
    case rabbitmq_stream_s3_nif:valid_run_id(Run) of
        true -> of_run(Run, Row, What, {close(Open, Found), {Run, #listing{}}, Stray});
        false -> stray(Row, Acc)
    end.

stray(Row, {Found, Open, none}) -> {Found, Open, {1, Row}};
stray(_Row, {Found, Open, {N, First}}) -> {Found, Open, {N + 1, First}}.

close(none, Found) -> Found;
close({_Run, unreadable}, Found) -> Found;
close({Run, Listing}, Found) -> [{Run, finish(Listing)} | Found].

add(#{seq := Seq} = Row, #listing{known = Known, last = Last, first = First, segments = Segments, bytes = Bytes, oldest = Oldest} = Listing) when
    is_integer(Seq), Seq >= 0, Seq =< ?MAX
->
    case rabbitmq_stream_s3_history_source:is_sealed(Row) of
        true when Seq =< Last ->
            {error, {not_ascending, Seq}};
        true when Known < ?WINDOW ->
            #{size := Size, sealed_ms := Ms} = Row,
            {ok, Listing#listing{known = Known + 1, last = Seq, first = [{Seq, Size, Ms} | First]}};
        true ->
            #{size := Size, sealed_ms := Ms} = Row,
            %% (An atom is above every number.)
            {ok, Listing#listing{last = Seq, segments = Segments + 1, bytes = min(?MAX, Bytes + Size), oldest = min(Oldest, Ms)}};
        false ->
            {error, {bad_row, Row}}
    end;
add(Row, _Listing) ->
    {error, {bad_row, Row}}.

finish(#listing{first = First, segments = Segments, bytes = Bytes, oldest = Oldest}) ->
    {lists:reverse(First), {Segments, Bytes, Oldest}}.

%% @doc What the index has of one run. One page of a few entries.
-spec run(source(), run()) -> {ok, listing()} | {error, {retryable | permanent, term()}}.
run(Source, Run) ->
    run(Source, Run, {run, Run}, #listing{}).

run(Source, Run, From, Listing0) ->
    case page(Source, From, ?WINDOW + 1) of
        {ok, Rows, Next} ->
            case listing(Run, Rows, Listing0) of
                {error, Reason} -> {error, {permanent, Reason}};
                {others, Listing} -> {ok, finish(Listing)};
                %% The page ends within the run, or before it.
                {more, #listing{segments = 0} = Listing} when Next =/= done -> run(Source, Run, {next, Next}, Listing);
                {more, Listing} -> {ok, finish(Listing)}
            end;
        {error, _} = Error ->
            Error
    end.

listing(Run, [#{run := Run} = Row | Rows], Listing0) ->
    case add(Row, Listing0) of
        {ok, Listing} -> listing(Run, Rows, Listing);
        {error, _} = Error -> Error
    end;
listing(Run, [{unreadable, Run, Reason} | _], _Listing) ->
    {error, Reason};
listing(Run, [Row | Rows], Listing) ->
    case is_of_a_run(Row) of
        true -> {others, Listing};
        %% The scan tells of it.
        false -> listing(Run, Rows, Listing)
    end;
listing(_Run, [], Listing) ->
    {more, Listing}.

is_of_a_run({unreadable, Run, _}) -> rabbitmq_stream_s3_nif:valid_run_id(Run);
is_of_a_run(#{run := Run}) -> rabbitmq_stream_s3_nif:valid_run_id(Run);
is_of_a_run(_) -> false.

page({Module, Argument}, From, Limit) ->
    Query = #{source => Argument, from => From, limit => Limit},
    %% The query takes the place of the argument.
    case rabbitmq_stream_s3_history_source:call({Module, Query}, pending, []) of
        %% That would go on for ever.
        {ok, #{next := Next}} when From =:= {next, Next} -> {error, {permanent, {bad_answer, pending, From}}};
        {ok, #{entries := Rows, next := Next}} when is_list(Rows) -> {ok, Rows, Next};
        {error, {Kind, _Reason}} = Error when Kind =:= retryable; Kind =:= permanent -> Error;
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

page_of_keys(Run, [Seq | Seqs], N, Keys) when N > 0, is_integer(Seq), Seq >= 0, Seq =< ?MAX ->
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

%% @doc Looks through the objects of all runs whose ids begin so for those of runs that are gone, and deletes them once they are older than `gc_min_age_ms':
%% writes that the store took in after the purge. A listing of all of them, and a question to the host for each run on each page, asked after the page was listed.
-spec orphans(source(), RunPrefix :: binary()) -> {ok, report()} | {error, term(), report()}.
orphans(Source, RunPrefix) ->
    Prefix = <<(rabbitmq_stream_s3_store:history_prefix(all))/binary, RunPrefix/binary>>,
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
