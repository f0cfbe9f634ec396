%% @doc Runs the core of a replica reader: turns what happens into its events, and performs its effects. Part of the reader's
%% process; every function takes the reader's state and returns the next one.
-module(rabbitmq_stream_s3_replica_reader_effects).

-include("rabbitmq_stream_s3.hrl").
-include("rabbitmq_stream_s3_replica_reader.hrl").

-export([start/3, drain/1, announced/1, headers/2, bring_on/1, resume/1, force_cut/3, too_old/1, tick/1, await/2]).
-export([transferred/2, persisted/2, grouped/2, upload_group/3]).
-export([retain/1, retained/2, trimmed/2, answer_trimming/1]).

-define(CORE, rabbitmq_stream_s3_replica_reader_core).
-define(DRAIN, rabbitmq_stream_s3_replica_reader_drain).
-define(TASKS, rabbitmq_stream_s3_replica_reader_tasks).
-define(TRANSFERS, rabbitmq_stream_s3_replica_reader_transfers).

%% How long chunks gather before they are drained.
-define(DRAIN_DELAY_MS, 50).
%% Those who wait for an offset wait for it.
-define(TRIM_TIMEOUT_MS, 5000).
%% A failure that passes with the next attempts is not worth a line in the log.
-define(WORTH_TELLING, 3).

-type reader() :: #reader{}.

%% --- events ----------------------------------------------------------------------------------------------------------

%% @doc Starts the core from the manifest that the metadata store has: to go on with it, or to put an empty one that begins at
%% an offset in its place, at once or together with the first fragment.
-spec start(#manifest{}, resume | {reset, non_neg_integer(), at_once | with_first_fragment}, reader()) -> reader().
start(Manifest, resume, Reader) ->
    arm_retention_timer(perform_all(?CORE:init(Manifest, options(Reader)), Reader));
start(Manifest, {reset, At, When}, Reader) ->
    %% Now, and not when it is persisted: what this process uploads meanwhile is no part of the discarded tier.
    Discarded = Reader#reader{discarded = erlang:system_time(millisecond)},
    arm_retention_timer(perform_all(?CORE:init_reset(Manifest, At, When, options(Reader)), Discarded)).

options(#reader{stream = StreamId, epoch = Epoch, context = #{dir := Dir, reference := Reference}}) ->
    #{
        stream => StreamId,
        dir => Dir,
        epoch => Epoch,
        reference => Reference,
        persist_threshold => rabbitmq_stream_s3_config:get(persist_threshold),
        persist_interval_ms => rabbitmq_stream_s3_config:get(persist_interval_ms),
        rebalance_threshold => rabbitmq_stream_s3_config:get(rebalance_threshold)
    }.

%% @doc One turn of the drain. Goes on by a message to itself, so that other messages have their turn, too.
-spec drain(reader()) -> reader().
drain(#reader{drain = Drain} = Reader) ->
    case has_room(Reader) of
        false ->
            Reader#reader{paused = true};
        true ->
            case ?DRAIN:turn(Drain) of
                {cut, Meta, Next} -> go_on(cut(Meta, Reader#reader{drain = Next}));
                {more, Next} -> go_on(cut_early(watch_age(Reader#reader{drain = Next})));
                {end_of_log, Next} -> end_of_log(cut_early(watch_age(Reader#reader{drain = Next})));
                {wait, Next} -> watch_age(Reader#reader{drain = Next});
                {error, Reason, Next} -> drain_failed(Reason, Reader#reader{drain = Next})
            end
    end.

%% @doc Takes the writer's word that something is committed. Drains a moment later, so that a stream with many small chunks is drained in
%% batches: each time costs the writer two messages and the reader two turns, and nobody waits for a fragment that is still growing.
-spec announced(reader()) -> reader().
announced(#reader{draining = true} = Reader) ->
    Reader;
announced(Reader) ->
    _ = erlang:send_after(?DRAIN_DELAY_MS, self(), drain),
    Reader#reader{draining = true}.

%% @doc Takes the headers that the native library has read.
-spec headers(term(), reader()) -> reader().
headers(Message, #reader{drain = Drain} = Reader) ->
    case ?DRAIN:answered(Message, Drain) of
        {more, Next} -> go_on(Reader#reader{drain = Next});
        {error, Reason, Next} -> drain_failed(Reason, Reader#reader{drain = Next});
        %% Of a drain that was given up.
        not_mine -> Reader
    end.

%% Of a paused stream nothing is cut; what has been cut is uploaded and persisted. Behind a gap nothing is of use.
has_room(#reader{stream = StreamId, cut = Cut, gap = Gap}) ->
    Gap =:= none andalso
        rabbitmq_stream_s3_pause:since(StreamId) =:= none andalso
        queue:len(Cut) < rabbitmq_stream_s3_config:get(max_in_flight_fragments).

go_on(#reader{draining = true} = Reader) ->
    Reader;
go_on(Reader) ->
    self() ! drain,
    Reader#reader{draining = true}.

end_of_log(#reader{listening = true} = Reader) ->
    Reader;
end_of_log(#reader{writer = Writer, drain = Drain} = Reader) ->
    ok = rabbitmq_stream_s3_log:listen(Writer, ?DRAIN:next_offset(Drain)),
    %% And look again: a commit that came before the writer knew of us is announced to nobody.
    go_on(Reader#reader{listening = true}).

drain_failed({gap, At}, #reader{drain = Drain} = Reader) ->
    case ?DRAIN:cut(Drain) of
        {cut, Meta, Next} -> lost(At, cut(Meta, Reader#reader{drain = Next}));
        empty -> lost(At, Reader)
    end;
drain_failed(Reason, #reader{problems = Problems} = Reader) ->
    Reader#reader{
        problems = rabbitmq_stream_s3_problems:failed(draining, Reason, Problems),
        verdict = {resolve, Reason}
    }.

%% Retention has deleted what must come next before it was uploaded. What is on its way in front of it may still arrive, and is persisted before the
%% reader looks where to begin anew: otherwise a log that loses segments faster than they are uploaded would never get anything persisted.
lost(At, #reader{context = Context, gap = Gap} = Reader) ->
    First =
        case rabbitmq_stream_s3_log:range(Context) of
            {ok, #{first := LogFirst}} when is_integer(LogFirst) -> LogFirst;
            _ -> At
        end,
    settle(Reader#reader{gap = first_gap({gap, At, First}, Gap)}).

first_gap(Gap, none) -> Gap;
first_gap({gap, At, _}, {gap, Before, _} = Gap) when Before =< At -> Gap;
first_gap(Gap, _Later) -> Gap.

%% Resolves anew because of a gap, as soon as all that lies in front of it is persisted.
settle(#reader{gap = {gap, At, _}, core = Core, transfers = Transfers, discarded = Discarded} = Reader) ->
    case ?TRANSFERS:any_before(At, Transfers) orelse ?CORE:format_state(Core) of
        true -> Reader;
        #{persist_in_flight := true} -> Reader;
        %% A new beginning of which nothing has been uploaded: there is nothing to be persisted.
        #{manifest_total_size := 0} when Discarded =/= none -> begin_anew(true, Reader);
        #{edits_waiting := Waiting} = State when Waiting > 0 -> persist_now(State, Reader);
        #{manifest_total_size := Size} -> begin_anew(Size =:= 0, Reader)
    end.

begin_anew(NothingUploaded, #reader{gap = Gap, problems = Problems} = Reader) ->
    Reader#reader{
        problems = rabbitmq_stream_s3_problems:failed(draining, Gap, Problems),
        cut_early = NothingUploaded,
        verdict = {resolve, Gap}
    }.

%% Where a beginning came to nothing, the next one's first fragment does not wait for more data: what it has is deleted next.
cut_early(#reader{cut_early = true, drain = Drain} = Reader) ->
    case ?DRAIN:cut(Drain) of
        {cut, Meta, Next} -> cut(Meta, Reader#reader{drain = Next});
        empty -> Reader
    end;
cut_early(Reader) ->
    Reader.

cut(#{next_offset := Next, size := Size} = Meta, #reader{core = Core0, cut = Cut} = Reader) ->
    count(bytes_drained_total, Size, Reader),
    {Core, _Ref, Effects} = ?CORE:fragment_cut(Meta, Core0),
    perform_all({Core, Effects}, watch_age(Reader#reader{cut = queue:in(Next, Cut), cut_early = false})).

%% @doc Takes a request to end the fragment that is being assembled with what is committed by now, which is answered with `ok' when
%% that has happened, or with `{error, empty}', at once if nothing is committed that is not cut.
-spec force_cut(gen_server:from(), Until :: integer(), reader()) -> reader().
force_cut(From, Until, #reader{context = Context, drain = Drain, forced = Forced} = Reader) ->
    To = rabbitmq_stream_s3_log:committed_chunk_id(Context) + 1,
    case ?DRAIN:info(Drain) of
        #{range := {First, _}} when First >= To ->
            ok = gen_server:reply(From, {error, empty}),
            Reader;
        #{} ->
            self() ! drain,
            Reader#reader{draining = true, forced = Forced ++ [{From, To, Until}]}
    end.

forced(#reader{verdict = continue, forced = [{From, To, Until} | Others], drain = Drain} = Reader0) ->
    #{range := {First, Next}} = ?DRAIN:info(Drain),
    case First < To andalso Next < To andalso has_room(Reader0) andalso now_monotonic() < Until of
        true ->
            Reader0;
        false ->
            {Result, Reader} = end_forced(First >= To, Reader0#reader{forced = Others}),
            ok = gen_server:reply(From, Result),
            forced(Reader)
    end;
forced(Reader) ->
    Reader.

%% The fragment has ended meanwhile, because of its size; or all of it is drained, or the drain does not go on: then what there is is cut.
end_forced(true, Reader) ->
    {ok, Reader};
end_forced(false, #reader{stream = StreamId, drain = Drain} = Reader) ->
    case rabbitmq_stream_s3_pause:since(StreamId) =:= none andalso ?DRAIN:cut(Drain) of
        {cut, Meta, Next} -> {ok, go_on(cut(Meta, Reader#reader{drain = Next}))};
        empty -> {{error, empty}, Reader};
        false -> {{error, empty}, Reader}
    end.

%% @doc Brings on what waits for something else: to be called whenever something has happened.
-spec bring_on(reader()) -> reader().
bring_on(#reader{gap = none} = Reader) -> forced(flush(Reader));
bring_on(Reader) -> forced(settle(Reader)).

%% Ends the fragment that has the last of what is to be flushed as soon as that is drained, and has it persisted as soon as it is uploaded.
flush(#reader{flush = none} = Reader) ->
    Reader;
flush(#reader{flush = To, core = Core} = Reader) ->
    case ?CORE:format_state(Core) of
        #{persisted_next_offset := Persisted} when Persisted >= To -> Reader#reader{flush = none};
        #{manifest_next_offset := Next} = State when Next >= To -> persist_now(State, Reader);
        #{} -> cut_now(Reader)
    end.

%% Not after a failure, which has to wait for its delay like any other.
persist_now(#{persist_in_flight := false, edits_waiting := Waiting}, #reader{persist_failures = {0, _}, core = Core} = Reader) when
    Waiting > 0
->
    perform_all(?CORE:tick(erlang:system_time(millisecond) + rabbitmq_stream_s3_config:get(persist_interval_ms), Core), Reader);
persist_now(_State, Reader) ->
    Reader.

cut_now(#reader{flush = To, drain = Drain} = Reader) ->
    #{range := {First, Next}} = ?DRAIN:info(Drain),
    case First < To andalso Next >= To andalso has_room(Reader) andalso ?DRAIN:cut(Drain) of
        {cut, Meta, Rest} -> cut(Meta, Reader#reader{drain = Rest});
        empty -> Reader;
        false -> Reader
    end.

%% @doc The fragment that is being assembled has reached the age at which it is cut.
-spec too_old(reader()) -> reader().
too_old(#reader{drain = Drain} = Reader) ->
    case has_room(Reader) andalso ?DRAIN:cut(Drain) of
        {cut, Meta, Next} -> cut(Meta, Reader#reader{drain = Next});
        empty -> Reader;
        %% The next turn sets the timer anew, with nothing left to wait.
        false -> Reader#reader{paused = true}
    end.

watch_age(#reader{drain = Drain, age_timer = Timer} = Reader) ->
    case {?DRAIN:since(Drain), Timer} of
        {Since, {_, Since}} -> Reader;
        {Since, {Ref, _}} -> watch_age(Since, stop_age_timer(Ref, Reader));
        {Since, none} -> watch_age(Since, Reader)
    end.

watch_age(none, Reader) ->
    Reader;
watch_age(Since, Reader) ->
    case rabbitmq_stream_s3_config:get(fragment_max_age_ms) of
        infinity ->
            Reader;
        MaxAge ->
            Left = max(0, Since + MaxAge - now_monotonic()),
            Reader#reader{age_timer = {erlang:start_timer(Left, self(), age), Since}}
    end.

stop_age_timer(Ref, Reader) ->
    _ = erlang:cancel_timer(Ref),
    Reader#reader{age_timer = none}.

%% @doc What became of an upload.
-spec transferred(?TRANSFERS:outcome(), reader()) -> reader().
transferred(none, Reader) ->
    Reader;
transferred({stored, Ref, Uid, #{size := Size}, _Failures}, #reader{core = Core, transfers = Transfers} = Reader0) ->
    count(transfers_completed, 1, Reader0),
    count(bytes_transferred, Size, Reader0),
    Reader =
        case ?TRANSFERS:info(Transfers) of
            #{stalled := none} -> ended(uploading, Reader0);
            #{stalled := _} -> Reader0
        end,
    resume(applied(perform_all(?CORE:transfer_complete(Ref, Uid, Core), Reader)));
transferred({failed, Ref, Reason, #{first_offset := First}, Failures}, #reader{core = Core, transfers = Transfers} = Reader0) ->
    Reader = upload_failed(Reason, Failures, Reader0),
    case is_out_of_reach(Reason, First, Reader) of
        false -> perform_all(?CORE:transfer_failed(Ref, Reason, Core), Reader);
        true -> lost(First, Reader#reader{transfers = ?TRANSFERS:give_up(Ref, Transfers)})
    end.

upload_failed(Reason, Failures, #reader{problems = Problems} = Reader) ->
    Class = rabbitmq_stream_s3_nif:error_class(Reason),
    count(transfers_failed, 1, Reader),
    count(transfer_retries, 1, Reader),
    _ = Class =:= permanent andalso count(nontransient_transfer_retries, 1, Reader),
    _ = is_tuple(Reason) andalso element(1, Reason) =:= corrupt_chunk andalso count(corrupt_chunks, 1, Reader),
    case Class =:= permanent orelse Failures >= ?WORTH_TELLING of
        true -> Reader#reader{problems = rabbitmq_stream_s3_problems:failed(uploading, Reason, Problems)};
        false -> Reader
    end.

%% Retention of the local log may delete a segment before it is uploaded. One that is pinned can be opened all the same.
is_out_of_reach({open_failed, _File, enoent}, Offset, #reader{context = Context}) ->
    case rabbitmq_stream_s3_log:range(Context) of
        {ok, #{first := First}} when is_integer(First) -> First > Offset;
        _ -> false
    end;
is_out_of_reach(_Reason, _Offset, _Reader) ->
    false.

%% Fragments that the core has in its manifest are not in flight any more. Those that wait behind a missing one are.
applied(#reader{core = Core, cut = Cut} = Reader) ->
    #{manifest_next_offset := Next} = ?CORE:format_state(Core),
    Reader#reader{cut = drop_until(Next, Cut)}.

drop_until(Next, Cut) ->
    case queue:peek(Cut) of
        {value, End} when End =< Next -> drop_until(Next, queue:drop(Cut));
        _ -> Cut
    end.

%% @doc Goes on draining, if that waits for something that may have come.
-spec resume(reader()) -> reader().
resume(#reader{paused = true} = Reader) ->
    case has_room(Reader) of
        true -> go_on(Reader#reader{paused = false});
        false -> Reader
    end;
resume(Reader) ->
    Reader.

%% @doc What became of a persist.
-spec persisted({ok, rabbitmq_stream_s3_metadata:entry(), pos_integer()} | {error, term()}, reader()) -> reader().
persisted({ok, Root, Revision}, #reader{core = Core, root = Old, discarded = Discarded, persisting_bytes = Bytes} = Reader0) ->
    count(persists_completed, 1, Reader0),
    count(bytes_persisted_total, Bytes, Reader0),
    Reader = perform_all(?CORE:persist_complete(Revision, Core), ended(persisting, Reader0#reader{
        root = Root,
        discarded = none,
        announced = none,
        news = news(Revision, Reader0),
        resolutions = 0,
        last_persist = erlang:system_time(millisecond),
        progress = rabbitmq_stream_s3_progress:add(Bytes, now_monotonic(), Reader0#reader.progress),
        persist_failures = {0, none},
        persisting_bytes = 0
    })),
    %% Last, when everybody has been told of the new one.
    _ = Discarded =:= none andalso delete_root(Old, Reader),
    delete_dropped(Reader);
persisted({error, conflict}, #reader{core = Core} = Reader) ->
    count(persist_conflicts, 1, Reader),
    perform_all(?CORE:persist_failed(conflict, Core), Reader);
persisted({error, not_found}, #reader{core = Core} = Reader) ->
    perform_all(?CORE:persist_failed(not_found, Core), Reader);
persisted({error, Reason}, #reader{core = Core, problems = Problems, persist_failures = {N, _}} = Reader) ->
    count(persists_failed, 1, Reader),
    perform_all(?CORE:persist_failed(Reason, Core), Reader#reader{
        problems = rabbitmq_stream_s3_problems:failed(persisting, Reason, Problems),
        persist_failures = {N + 1, Reason}
    }).

%% The edits of a new tier do not lead there from the old one.
news(Revision, #reader{discarded = none, persisting_from = Previous}) -> {Previous, Revision};
news(_Revision, #reader{discarded = _}) -> reset.

delete_root(none, _Reader) ->
    ok;
delete_root({Uid, Epoch}, #reader{stream = StreamId}) ->
    rabbitmq_stream_s3_reaper:delete(StreamId, [{root, rabbitmq_stream_s3_store:root_key(StreamId, Epoch, Uid)}]).

delete_dropped(#reader{dropped = []} = Reader) ->
    Reader;
delete_dropped(#reader{stream = StreamId, core = Core, dropped = Dropped} = Reader) ->
    #manifest{first_offset = First} = ?CORE:persisted_manifest(Core),
    {Dead, Waiting} = lists:partition(fun({Below, _}) -> rabbitmq_stream_s3_nif:may_delete(Below, First) end, Dropped),
    ok = lists:foreach(fun({_, Objects}) -> rabbitmq_stream_s3_reaper:delete(StreamId, Objects) end, Dead),
    Reader#reader{dropped = Waiting}.

%% @doc What became of the upload of a group.
-spec grouped({Kind :: 1..3, {ok, non_neg_integer()} | {error, term()}} | {error, term()}, reader()) -> reader().
grouped({Kind, {ok, Uid}}, #reader{core = Core} = Reader) ->
    count(group_counter(Kind), 1, Reader),
    perform_all(?CORE:group_upload_complete(Uid, Core), ended(grouping, Reader#reader{group_failures = {0, none}}));
grouped({Kind, {error, {_, #{reason := Reason}} = Error}}, Reader) when is_integer(Kind) ->
    group_failed(Reason, {store, Error}, Reader);
grouped({error, Reason}, Reader) ->
    group_failed(Reason, Reason, Reader).

group_failed(Reason, Cause, #reader{core = Core, problems = Problems, group_failures = {N, _}} = Reader) ->
    perform_all(?CORE:group_upload_failed(Reason, Core), Reader#reader{
        problems = rabbitmq_stream_s3_problems:failed(grouping, Cause, Problems),
        group_failures = {N + 1, Reason}
    }).

group_counter(?MANIFEST_KIND_GROUP) -> groups_created;
group_counter(?MANIFEST_KIND_KILO_GROUP) -> kilo_groups_created;
group_counter(?MANIFEST_KIND_MEGA_GROUP) -> mega_groups_created.

%% @doc The persist timer has run out.
-spec tick(reader()) -> reader().
tick(#reader{core = Core} = Reader0) ->
    Reader = perform_all(?CORE:tick(erlang:system_time(millisecond), Core), Reader0),
    %% Not by `since_persist', which counts fragments only: the edit of a rebalance or of retention waits as well.
    case ?CORE:format_state(Reader#reader.core) of
        #{edits_waiting := Waiting, persist_in_flight := false} when Waiting > 0 ->
            arm_persist_timer(rabbitmq_stream_s3_config:get(persist_interval_ms), Reader);
        #{} ->
            Reader
    end.

%% @doc Looks at retention although nothing was persisted: time passes, settings change, replicas catch up.
-spec retain(reader()) -> reader().
retain(#reader{core = Core, discarded = Discarded, context = Context} = Reader0) ->
    Reader = arm_retention_timer(Reader0),
    ok = rabbitmq_stream_s3_pins:look(Context),
    case ?CORE:format_state(Core) of
        %% Otherwise a persist is to come, and retention with it. A tier that is discarded says nothing of the log.
        #{since_persist := 0, persist_in_flight := false, rebalance_in_flight := false} when Discarded =:= none ->
            evaluate_remote(evaluate_local(Reader));
        #{} ->
            Reader
    end.

arm_retention_timer(Reader) ->
    Interval = rabbitmq_stream_s3_config:get(reconciliation_interval_ms),
    Reader#reader{retention_timer = erlang:start_timer(Interval, self(), retention)}.

evaluate_remote(#reader{tasks = Tasks, dropped = Dropped, context = #{reference := Reference}} = Reader) ->
    case rabbitmq_stream_s3_queue:limits(Reference) of
        [_ | _] = Limits when Dropped =:= [] ->
            case ?TASKS:is_running(retention, Tasks) of
                false -> start_retention(Limits, Reader);
                true -> Reader
            end;
        _ ->
            Reader
    end.

start_retention(Limits, #reader{stream = StreamId, core = Core, tasks = Tasks} = Reader) ->
    case ?CORE:persisted_manifest(Core) of
        #manifest{entries = <<>>} ->
            Reader;
        Manifest ->
            Work = fun(Until) -> rabbitmq_stream_s3_retention:remote(StreamId, Manifest, Limits, Until) end,
            Timeout = rabbitmq_stream_s3_config:get(retention_timeout_ms),
            Reader#reader{
                core = ?CORE:retention_started(Core),
                tasks = ?TASKS:start(retention, Work, Timeout, Tasks)
            }
    end.

%% @doc What retention of the remote tier has come to.
-spec retained(rabbitmq_stream_s3_retention:decision() | {error, term()}, reader()) -> reader().
retained({error, Reason}, Reader) ->
    retained({unchanged, {incomplete, Reason}}, Reader);
retained({Decision, {incomplete, Reason}}, #reader{problems = Problems} = Reader) ->
    count(remote_tier_retention_failures, 1, Reader),
    drop(Decision, Reader#reader{problems = rabbitmq_stream_s3_problems:failed(retaining, Reason, Problems)});
retained({Decision, complete}, Reader) ->
    drop(Decision, ended(retaining, Reader)).

drop(unchanged, #reader{core = Core} = Reader) ->
    perform_all(?CORE:retention_failed(unchanged, Core), Reader);
drop({#edit{first_offset = First} = Edit, Garbage}, #reader{stream = StreamId, core = Core, problems = Problems} = Reader) ->
    try ?CORE:retention_complete(Edit, Core) of
        Result ->
            Objects = rabbitmq_stream_s3_retention:objects(StreamId, Garbage),
            perform_all(Result, Reader#reader{dropped = [{First, Objects}]})
    catch
        %% The manifest has changed in a way that the edit does not fit: nothing is dropped, and nothing may be deleted.
        error:badarg ->
            count(remote_tier_retention_failures, 1, Reader),
            perform_all(?CORE:retention_failed(does_not_fit, Core), Reader#reader{
                problems = rabbitmq_stream_s3_problems:failed(retaining, does_not_fit, Problems)
            })
    end.

evaluate_local(#reader{trimming = none} = Reader) ->
    case rabbitmq_stream_s3_config:get(local_retention) of
        policy -> Reader;
        uploaded -> start_trimming([], Reader)
    end;
evaluate_local(#reader{trimming = {Due, none}} = Reader) ->
    Reader#reader{trimming = {Due, []}};
evaluate_local(#reader{trimming = {_Due, _Later}} = Reader) ->
    Reader.

start_trimming(Due, #reader{core = Core, context = Context, writer = Writer, tasks = Tasks} = Reader) ->
    #{persisted_next_offset := Next} = ?CORE:format_state(Core),
    Work = fun(Until) -> rabbitmq_stream_s3_retention:local(Context, Writer, Next, Until) end,
    Timeout = min(?TRIM_TIMEOUT_MS, rabbitmq_stream_s3_config:get(retention_timeout_ms)),
    Reader#reader{trimming = {Due, none}, tasks = ?TASKS:start(local_retention, Work, Timeout, Tasks)}.

%% @doc What retention of the local log has come to.
-spec trimmed({ok, non_neg_integer()} | {error, term()}, reader()) -> reader().
trimmed({ok, _Deleted}, Reader) ->
    next_trimming(ended(trimming, Reader));
trimmed({error, Reason}, #reader{problems = Problems} = Reader) ->
    next_trimming(Reader#reader{problems = rabbitmq_stream_s3_problems:failed(trimming, Reason, Problems)}).

next_trimming(#reader{trimming = {Due, Later}} = Reader0) ->
    Reader = lists:foldl(fun reply/2, Reader0#reader{trimming = none}, Due),
    case Later of
        none -> Reader;
        _ -> start_trimming(Later, Reader)
    end.

%% @doc Answers those who wait for the local log, which will not be looked at now. What they were to be told is true.
-spec answer_trimming(reader()) -> reader().
answer_trimming(#reader{trimming = none} = Reader) ->
    Reader;
answer_trimming(#reader{trimming = {Due, none}} = Reader) ->
    lists:foldl(fun reply/2, Reader#reader{trimming = none}, Due);
answer_trimming(#reader{trimming = {Due, Later}} = Reader) ->
    lists:foldl(fun reply/2, Reader#reader{trimming = none}, Due ++ Later).

%% @doc Somebody waits for an offset. Of those that wait for the same one the core knows one.
-spec await(non_neg_integer(), reader()) -> reader().
await(Offset, #reader{core = Core} = Reader) ->
    perform_all(?CORE:await_offset(Offset, Offset, Core), Reader).

%% --- effects ---------------------------------------------------------------------------------------------------------

perform_all({Core, Effects}, Reader) ->
    lists:foldl(fun perform/2, Reader#reader{core = Core}, Effects).

%% No clause for anything else: an effect that nobody performs must crash this process, which is then started anew from what
%% is persisted. Dropped in silence, it would stall the stream.
perform({submit_transfer, Ref, _Stream, Dir, Meta}, #reader{transfers = Transfers} = Reader) ->
    Reader#reader{transfers = ?TRANSFERS:submit(Ref, Dir, Meta, Transfers)};
perform({resubmit_transfer, Ref, _Stream, Dir, Meta}, #reader{transfers = Transfers} = Reader) ->
    Reader#reader{transfers = ?TRANSFERS:retry(Ref, Dir, Meta, Transfers)};
perform({resubmit_transfer_delayed, Ref, _Stream, Dir, Meta, _Reason}, #reader{transfers = Transfers} = Reader) ->
    %% The delay follows from the reason, which the transfers know.
    Reader#reader{transfers = ?TRANSFERS:retry(Ref, Dir, Meta, Transfers)};
perform({start_persist, Manifest, Epoch, _Reference, Expected, Edits}, #reader{stream = StreamId, tasks = Tasks} = Reader) ->
    Discarded = Reader#reader.discarded,
    Work = fun(Until) ->
        rabbitmq_stream_s3_replica_reader_resolve:persist(StreamId, Epoch, Manifest, {Expected, Discarded}, Until)
    end,
    Reader#reader{
        tasks = ?TASKS:start(persist, Work, rabbitmq_stream_s3_config:get(persist_timeout_ms), Tasks),
        persisting_from = Expected,
        persisting_bytes = lists:sum([Size || #edit{size = Size} <- Edits, Size > 0])
    };
perform({start_persist_timer, Ms}, #reader{persist_failures = {0, _}} = Reader) ->
    arm_persist_timer(Ms, Reader);
perform({start_persist_timer, Ms}, #reader{persist_failures = {Failures, Reason}} = Reader) ->
    arm_persist_timer(max(Ms, ?TASKS:retry_delay(Reason, Failures)), Reader);
perform(cancel_persist_timer, #reader{persist_timer = none} = Reader) ->
    Reader;
perform(cancel_persist_timer, #reader{persist_timer = Timer} = Reader) ->
    _ = erlang:cancel_timer(Timer),
    Reader#reader{persist_timer = none};
perform({upload_group, _Stream, Kind, Entries, _Pos, _Len}, #reader{group_failures = {0, _}} = Reader) ->
    upload_group(Kind, Entries, Reader);
perform({upload_group, _Stream, Kind, Entries, _Pos, _Len}, #reader{group_failures = {Failures, Reason}} = Reader) ->
    Delay = ?TASKS:retry_delay(Reason, Failures),
    Reader#reader{group_timer = erlang:start_timer(Delay, self(), {group, Kind, Entries})};
perform({update_range, First, Next}, #reader{stream = StreamId, core = Core, context = Context} = Reader) ->
    #manifest{first_offset = First, next_offset = Next} = Manifest = ?CORE:persisted_manifest(Core),
    ok = rabbitmq_stream_s3_manifest_cache:put(StreamId, Manifest),
    ok = rabbitmq_stream_s3_pins:persisted(Context, Next),
    Reader;
perform({broadcast, _Stream, _Edits}, #reader{stream = StreamId, epoch = Epoch, news = reset} = Reader) ->
    ok = rabbitmq_stream_s3_replicas:broadcast(nodes(), StreamId, Epoch, reset),
    Reader;
perform({broadcast, _Stream, Edits}, #reader{stream = StreamId, epoch = Epoch, news = {Previous, Revision}} = Reader) ->
    %% To all of them: osiris tells nobody where the replicas are but the writer, which must not be waited for.
    ok = rabbitmq_stream_s3_replicas:broadcast(nodes(), StreamId, Epoch, {Previous, Revision, Edits}),
    Reader;
perform({evaluate_retention, _Stream, _Dir}, Reader) ->
    evaluate_remote(evaluate_local(Reader));
perform({reply_waiters, Replies}, #reader{trimming = none} = Reader) ->
    lists:foldl(fun reply/2, Reader, Replies);
%% Whoever is told that an offset is in the tier may look at what that means for the local log.
perform({reply_waiters, Replies}, #reader{trimming = {Due, none}} = Reader) ->
    Reader#reader{trimming = {Due ++ Replies, none}};
perform({reply_waiters, Replies}, #reader{trimming = {Due, Later}} = Reader) ->
    Reader#reader{trimming = {Due, Later ++ Replies}};
perform(reinitialize, Reader) ->
    Reader#reader{verdict = {resolve, conflict}};
perform(stop, Reader) ->
    Reader#reader{verdict = {stop, {shutdown, stream_deleted}}}.

%% @doc Starts the upload of a group.
-spec upload_group(Kind :: 1..3, Entries :: binary(), reader()) -> reader().
upload_group(Kind, Entries, #reader{stream = StreamId, tasks = Tasks} = Reader) ->
    Timeout = rabbitmq_stream_s3_config:get(persist_timeout_ms),
    Work = fun(_Until) -> {Kind, rabbitmq_stream_s3_store:put_group(StreamId, Kind, Entries, Timeout)} end,
    Reader#reader{group_timer = none, tasks = ?TASKS:start(group, Work, Timeout, Tasks)}.

arm_persist_timer(Ms, #reader{persist_timer = none} = Reader) ->
    Reader#reader{persist_timer = erlang:start_timer(Ms, self(), persist)};
arm_persist_timer(_Ms, Reader) ->
    Reader.

reply({Offset, Reply}, #reader{waiters = Waiters} = Reader) ->
    {Callers, Rest} = maps:take(Offset, Waiters),
    lists:foreach(fun({From, _Until}) -> gen_server:reply(From, Reply) end, lists:reverse(Callers)),
    Reader#reader{waiters = Rest}.

ended(Doing, #reader{problems = Problems} = Reader) ->
    Reader#reader{problems = rabbitmq_stream_s3_problems:ended(Doing, Problems)}.

count(Name, N, #reader{stream = StreamId}) ->
    rabbitmq_stream_s3_counters:add({stream, StreamId}, Name, N).

now_monotonic() ->
    erlang:monotonic_time(millisecond).
