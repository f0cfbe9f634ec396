%% @doc Tiers one stream: reads the log of its writer, has fragments uploaded, and makes roots current that list them.
%%
%% Decisions are taken by the core. This process performs its effects and reports what came of them; it waits for nobody:
%% what may block runs in tasks. It ends with the writer; when it fails it is started again and finds out anew where it was.
%%
%% While `resolving' it finds out what is persisted; while `running' it drains, uploads and persists.
-module(rabbitmq_stream_s3_replica_reader).
-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").
-include("rabbitmq_stream_s3.hrl").
-include("rabbitmq_stream_s3_replica_reader.hrl").

-export([start_link/1, await_offset/2, await_offset/3, force_cut/1, not_tiered/1, flush/2, flush_all/2, pause_changed/1, status/2]).
-export([resolve_anew/1]).
-export([init/1, handle_continue/2, handle_call/3, handle_cast/2, handle_info/2, terminate/2]).

-define(EFFECTS, rabbitmq_stream_s3_replica_reader_effects).
-define(DRAIN, rabbitmq_stream_s3_replica_reader_drain).
-define(TRANSFERS, rabbitmq_stream_s3_replica_reader_transfers).
-define(TASKS, rabbitmq_stream_s3_replica_reader_tasks).
-define(RESOLVE, rabbitmq_stream_s3_replica_reader_resolve).

-define(AWAIT_TIMEOUT_MS, 60000).
-define(FORCE_CUT_TIMEOUT_MS, 30000).
%% A reader answers between two turns of its drain.
-define(PAUSE_TIMEOUT_MS, 5000).
%% One file is opened.
-define(HOLD_TIMEOUT_MS, 5000).
%% A writer that starts, or a queue that is being declared, is found unready once or twice.
-define(WORTH_TELLING, 3).

-type stream_id() :: binary().
-type offset() :: non_neg_integer().

%%% Interface

%% @doc Starts the reader of a stream whose writer runs on this node.
-spec start_link(#{stream := stream_id(), writer := pid()}) -> {ok, pid()} | ignore | {error, term()}.
start_link(#{stream := StreamId, writer := _} = Args) ->
    gen_server:start_link({via, rabbitmq_stream_s3_registry, StreamId}, ?MODULE, Args, []).

%% @doc {@link await_offset/3} with a limit of one minute.
-spec await_offset(gen_server:server_ref() | stream_id(), offset()) -> ok | {error, timeout | reader_down}.
await_offset(Server, Offset) ->
    await_offset(Server, Offset, ?AWAIT_TIMEOUT_MS).

%% @doc Waits until the persisted manifest covers everything below `Offset', for at most so many milliseconds. `reader_down':
%% the stream has no reader on this node, or it ended meanwhile; ask again when it has been started anew.
-spec await_offset(gen_server:server_ref() | stream_id(), offset(), timeout()) -> ok | {error, timeout | reader_down}.
await_offset(Server, Offset, Timeout) when is_integer(Offset), Offset >= 0 ->
    call(Server, {await_offset, Offset, moment(Timeout)}, Timeout).

%% @doc Ends the fragment that is being assembled, with all that is committed by now. `empty': there is nothing to end, or
%% nobody here assembles anything. Does not wait for the upload.
-spec force_cut(gen_server:server_ref() | stream_id()) -> ok | {error, empty}.
force_cut(Server) ->
    case call(Server, {force_cut, moment(?FORCE_CUT_TIMEOUT_MS)}, ?FORCE_CUT_TIMEOUT_MS) of
        ok -> ok;
        {error, _} -> {error, empty}
    end.

%% @doc Ends a reader whose stream is not to be tiered any more. What is in the tier stays there.
-spec not_tiered(pid()) -> ok.
not_tiered(Reader) ->
    gen_server:cast(Reader, not_tiered).

%% @doc Cuts, uploads and persists all that is committed now, and waits for it, for at most so many milliseconds. `paused': the
%% stream is paused, so nothing would happen. `timeout': it goes on all the same; the status says what stands in the way. While it is
%% not known yet what is tiered, that is waited for, too.
-spec flush(gen_server:server_ref() | stream_id(), timeout()) -> ok | {error, timeout | reader_down | paused}.
flush(Server, Timeout) ->
    call(Server, {flush, moment(Timeout)}, Timeout).

%% @doc {@link flush/2} of several streams at once, within one limit.
-spec flush_all([{stream_id(), pid()}], timeout()) -> [{stream_id(), ok | {error, timeout | reader_down | paused}}].
flush_all(Readers, Timeout) ->
    Until = moment(Timeout),
    Requests = [{StreamId, gen_server:send_request(Reader, {flush, Until})} || {StreamId, Reader} <- Readers],
    [{StreamId, flushed(Request, Until)} || {StreamId, Request} <- Requests].

flushed(Request, Until) ->
    Limit =
        case Until of
            infinity -> infinity;
            _ -> {abs, Until}
        end,
    case gen_server:receive_response(Request, Limit) of
        {reply, Answer} -> Answer;
        timeout -> {error, timeout};
        {error, {_Reason, _Server}} -> {error, reader_down}
    end.

%% @doc The stream has been paused or resumed: when this returns `ok', the reader acts on it.
-spec pause_changed(pid()) -> ok | {error, timeout | reader_down}.
pause_changed(Reader) ->
    call(Reader, pause_changed, ?PAUSE_TIMEOUT_MS).

%% @doc What is persisted has been changed by somebody else: whatever is under way is given up, and found out again.
-spec resolve_anew(pid()) -> ok.
resolve_anew(Reader) ->
    gen_server:cast(Reader, resolve_anew).

%% @doc What the reader is doing. `state' is its phase, `paused' whether an operator has paused the stream or the node; `local' and
%% `remote' are half-open ranges of offsets; `behind' is how many offsets of the local log are not tiered, `lag_bytes' how
%% many bytes these are and `lag_ms' how long the oldest of them has been in the log; `problems' is what fails now, with its
%% cause and since when, and `stalled' is the oldest of that, or the pause; `progress' is how much of the local log is tiered, how fast that
%% goes on, and how long it will take ({@link rabbitmq_stream_s3_progress:info/4}); `cut_in_flight' how many fragments are cut
%% and not yet in the manifest, `waits_for_transfers' whether these are as many as may be, or the stream is paused; `counters' has its numbers under their metric
%% names. While running, what {@link rabbitmq_stream_s3_replica_reader_core:format_state/1} answers is part of it. Reads the
%% ends of the local log, a header, and the sizes of its files.
-spec status(gen_server:server_ref() | stream_id(), timeout()) -> {ok, map()} | {error, timeout | reader_down}.
status(Server, Timeout) ->
    call(Server, status, Timeout).

call(StreamId, Request, Timeout) when is_binary(StreamId) ->
    call({via, rabbitmq_stream_s3_registry, StreamId}, Request, Timeout);
call(Server, Request, Timeout) ->
    try
        gen_server:call(Server, Request, Timeout)
    catch
        exit:{timeout, _} -> {error, timeout};
        exit:_ -> {error, reader_down}
    end.

%%% Life

%% @private
init(#{stream := StreamId, writer := Writer}) ->
    %% For tasks, which are linked, and so that transfers are cancelled when a supervisor ends this process.
    process_flag(trap_exit, true),
    ok = logger:update_process_metadata(#{domain => [rabbitmq, stream_s3], stream => StreamId}),
    _ = monitor(process, Writer),
    ok = rabbitmq_stream_s3_manifest_cache:pending(StreamId),
    Reader = #reader{
        stream = StreamId,
        writer = Writer,
        problems = rabbitmq_stream_s3_problems:new(StreamId),
        tasks = ?TASKS:new(),
        transfers = ?TRANSFERS:new(StreamId)
    },
    {ok, publish(Reader), {continue, resolve}}.

%% @private
handle_continue(resolve, Reader) ->
    {noreply, resolve(Reader)}.

%% @private
terminate(Reason, Reader) ->
    _ = release(Reader),
    ok = rabbitmq_stream_s3_gauges:forget(Reader#reader.stream),
    case Reason of
        {shutdown, stream_deleted} -> forget(Reader);
        {shutdown, not_tiered} -> forget(Reader);
        %% The writer has ended. The next one may run elsewhere, and then what this node knows goes out of date.
        normal -> forget(Reader);
        _ -> ok
    end.

forget(#reader{stream = StreamId, context = Context, writer = Writer}) ->
    _ = Context =/= none andalso rabbitmq_stream_s3_pins:leave(Context, Writer),
    ok = rabbitmq_stream_s3_manifest_cache:forget(StreamId),
    rabbitmq_stream_s3_counters:forget(StreamId).

%% Lets go of all that is under way and of the log's file. Keeps those who wait, and what has failed.
release(Reader0) ->
    #reader{drain = Drain, tasks = Tasks, transfers = Transfers} = Reader = ?EFFECTS:answer_trimming(Reader0),
    #reader{persist_timer = Persist, group_timer = Group, resolve_timer = Resolve, age_timer = Age} = Reader,
    #reader{retention_timer = Retention, forced = Forced} = Reader,
    _ = [gen_server:reply(From, {error, empty}) || {From, _To, _Until} <- Forced],
    _ = Drain =/= none andalso ?DRAIN:close(Drain),
    _ = [erlang:cancel_timer(Timer) || Timer <- [Persist, Group, Resolve, Retention], Timer =/= none],
    _ = Age =/= none andalso erlang:cancel_timer(element(1, Age)),
    Reader#reader{
        phase = resolving,
        tasks = ?TASKS:cancel_all(Tasks),
        transfers = ?TRANSFERS:cancel_all(Transfers),
        resolve_timer = none,
        core = none,
        drain = none,
        draining = false,
        paused = false,
        gap = none,
        cut = queue:new(),
        forced = [],
        age_timer = none,
        persist_timer = none,
        group_timer = none,
        retention_timer = none,
        %% Perhaps never dropped by a manifest that was persisted, so the garbage collection's to judge.
        dropped = [],
        persist_failures = {0, none},
        group_failures = {0, none},
        persisting_bytes = 0
    }.

%%% Messages

%% @private
handle_call({await_offset, Offset, Until}, From, Reader) ->
    noreply(wait_for(Offset, From, Until, Reader));
handle_call({flush, Until}, From, Reader) ->
    noreply(flush_for({From, Until}, Reader));
handle_call(pause_changed, From, #reader{phase = running} = Reader) ->
    gen_server:reply(From, ok),
    noreply(?EFFECTS:resume(Reader));
handle_call(pause_changed, _From, Reader) ->
    {reply, ok, Reader};
handle_call({force_cut, Until}, From, #reader{phase = running, stream = StreamId} = Reader) ->
    case rabbitmq_stream_s3_pause:since(StreamId) of
        none -> noreply(?EFFECTS:force_cut(From, Until, Reader));
        {_By, _Since} -> {reply, {error, empty}, Reader}
    end;
handle_call({force_cut, _Until}, _From, Reader) ->
    {reply, {error, empty}, Reader};
handle_call(status, _From, Reader) ->
    {reply, {ok, status_map(Reader)}, Reader}.

%% @private
handle_cast(resolve_anew, Reader) ->
    noreply(Reader#reader{verdict = {resolve, conflict}});
handle_cast(not_tiered, #reader{stream = StreamId} = Reader) ->
    ?LOG_NOTICE("stream ~ts is not to be tiered any more, its reader stops", [StreamId]),
    {stop, {shutdown, not_tiered}, Reader};
handle_cast(Message, Reader) ->
    listened(Message, Reader).

%% @private
handle_info(drain, #reader{draining = true} = Reader) ->
    noreply(?EFFECTS:drain(Reader#reader{draining = false}));
handle_info(drain, Reader) ->
    {noreply, Reader};
handle_info({timeout, Timer, persist}, #reader{persist_timer = Timer} = Reader) ->
    noreply(?EFFECTS:tick(Reader#reader{persist_timer = none}));
handle_info({timeout, Timer, age}, #reader{age_timer = {Timer, _}} = Reader) ->
    noreply(?EFFECTS:too_old(Reader#reader{age_timer = none}));
handle_info({timeout, Timer, {group, Kind, Entries}}, #reader{group_timer = Timer} = Reader) ->
    noreply(?EFFECTS:upload_group(Kind, Entries, Reader));
handle_info({timeout, Timer, retention}, #reader{retention_timer = Timer} = Reader) ->
    noreply(?EFFECTS:retain(Reader#reader{retention_timer = none}));
handle_info({timeout, Timer, resolve}, #reader{resolve_timer = Timer} = Reader) ->
    {noreply, start_resolving(Reader#reader{resolve_timer = none})};
handle_info({'DOWN', _Monitor, process, Writer, _Reason}, #reader{writer = Writer} = Reader) ->
    {stop, normal, Reader};
handle_info(Message, #reader{tasks = Tasks0, transfers = Transfers0} = Reader) ->
    case ?TRANSFERS:handle(Message, Transfers0) of
        {not_mine, _} ->
            case ?TASKS:handle(Message, Tasks0) of
                {not_mine, _} -> other(Message, Reader);
                {none, Tasks} -> {noreply, Reader#reader{tasks = Tasks}};
                {{Kind, Result}, Tasks} -> noreply(finished(Kind, Result, Reader#reader{tasks = Tasks}))
            end;
        {Outcome, Transfers} ->
            noreply(?EFFECTS:transferred(Outcome, Reader#reader{transfers = Transfers}))
    end.

other({'EXIT', _Pid, Reason}, Reader) ->
    {stop, Reason, Reader};
other({timeout, _CancelledTooLate, _}, Reader) ->
    {noreply, Reader};
other({pins_result, _Ref, _Answer} = Message, #reader{phase = running} = Reader) ->
    noreply(?EFFECTS:headers(Message, Reader));
other({pins_result, _Ref, _OfADrainGivenUp}, Reader) ->
    {noreply, Reader};
other(Message, Reader) ->
    listened(Message, Reader).

listened(Message, #reader{phase = Phase} = Reader) ->
    case rabbitmq_stream_s3_log:listened(Message) of
        true when Phase =:= running -> noreply(?EFFECTS:announced(Reader#reader{listening = false}));
        true -> {noreply, Reader#reader{listening = false}};
        false -> {noreply, Reader}
    end.

noreply(#reader{verdict = continue, phase = running} = Reader) ->
    case ?EFFECTS:bring_on(Reader) of
        #reader{verdict = continue} = Next -> {noreply, publish(Next)};
        Next -> noreply(Next)
    end;
noreply(#reader{verdict = continue} = Reader) ->
    {noreply, publish(Reader)};
noreply(#reader{verdict = {resolve, Reason}} = Reader) ->
    {noreply, publish(resolve_again(Reason, Reader))};
noreply(#reader{verdict = {stop, {shutdown, stream_deleted} = Reason}, writer = Writer, stream = StreamId} = Reader) ->
    ?LOG_NOTICE("stream ~ts has been deleted, its reader stops", [StreamId]),
    ok = rabbitmq_stream_s3_gc:stream_deleted(StreamId),
    ok = rabbitmq_stream_s3_reconciler:ignore(Writer),
    {stop, Reason, Reader}.

finished(resolve, Result, Reader) -> resolved(Result, Reader);
finished(persist, Result, Reader) -> ?EFFECTS:persisted(Result, Reader);
finished(group, Result, Reader) -> ?EFFECTS:grouped(Result, Reader);
finished(retention, Result, Reader) -> ?EFFECTS:retained(Result, Reader);
finished(local_retention, Result, Reader) -> ?EFFECTS:trimmed(Result, Reader).

%%% Finding out where to start

resolve(#reader{resolutions = 0} = Reader) ->
    start_resolving(Reader).

resolve_again(Reason, Reader0) ->
    #reader{resolutions = N} = Reader = release(Reader0#reader{verdict = continue}),
    Delay = ?TASKS:retry_delay(Reason, max(1, N)),
    Reader#reader{resolve_timer = erlang:start_timer(Delay, self(), resolve)}.

start_resolving(#reader{stream = StreamId, writer = Writer, resolutions = N, tasks = Tasks} = Reader) ->
    Work = fun(Until) -> ?RESOLVE:resolve(StreamId, Writer, Until) end,
    Timeout = rabbitmq_stream_s3_config:get(persist_timeout_ms),
    Reader#reader{resolutions = N + 1, tasks = ?TASKS:start(resolve, Work, Timeout, Tasks)}.

resolved({ok, Resolved}, #reader{stream = StreamId} = Reader0) ->
    #{context := #{reference := Reference} = Context, epoch := Epoch, root := Root, manifest := Manifest} = Resolved,
    count(manifests_resolved, Reader0),
    ok = rabbitmq_stream_s3_events:stream_of(Reference, StreamId),
    [?LOG_WARNING("stream ~ts: ~ts", [StreamId, Text]) || Text <- rabbitmq_stream_s3_queue:complaints(Reference)],
    ok = rabbitmq_stream_s3_manifest_cache:put(StreamId, Manifest),
    Reader = Reader0#reader{context = Context, epoch = Epoch, root = Root, discarded = none},
    begin_at(where_to_begin(Resolved), Manifest, Reader);
resolved({error, Reason}, Reader) ->
    count(manifest_resolution_failures, Reader),
    not_resolved(Reason, Reader).

not_resolved(Reason, #reader{resolutions = N, problems = Problems} = Reader) when N >= ?WORTH_TELLING ->
    Reader#reader{
        problems = rabbitmq_stream_s3_problems:failed(resolving, Reason, Problems),
        verdict = {resolve, Reason}
    };
not_resolved(Reason, Reader) ->
    Reader#reader{verdict = {resolve, Reason}}.

where_to_begin(#{timeline := different, manifest := Manifest, range := Range}) ->
    rabbitmq_stream_s3_nif:start_on_other_timeline(Manifest, Range);
where_to_begin(#{manifest := Manifest, range := Range}) ->
    rabbitmq_stream_s3_nif:compare_log(Manifest, Range).

begin_at({fresh, At}, Manifest, Reader) ->
    run(At, Manifest, resume, Reader);
begin_at({resume, At}, Manifest, Reader) ->
    run(At, Manifest, resume, Reader);
%% The old tier stays published until the new one has a fragment. So a log that loses segments faster than they are uploaded never
%% makes an empty tier of it.
begin_at({local_ahead, Discarded, At}, Manifest, #reader{announced = Discarded} = Reader) ->
    begin_anew(At, Manifest, Reader);
begin_at({local_ahead, Discarded, At}, Manifest, Reader) ->
    count(local_log_ahead_recoveries, Reader),
    log_reset("retention has deleted what was not tiered yet", Discarded, At, Reader),
    begin_anew(At, Manifest, Reader#reader{announced = Discarded});
begin_at({remote_ahead, Discarded, At}, Manifest, Reader) ->
    count(remote_tier_ahead_recoveries, Reader),
    log_reset("it is not of the local log's timeline", Discarded, At, Reader),
    run(At, Manifest, {reset, At, at_once}, Reader);
begin_at(wait_for_log, _Manifest, Reader) ->
    not_resolved(empty_log, Reader).

%% Where nothing is pinned, what was begun last may have been deleted while its upload waited for its turn. Once is enough: of this beginning
%% something is persisted, whatever becomes of the log.
begin_anew(At, Manifest, #reader{cut_early = true, context = Context} = Reader) ->
    case rabbitmq_stream_s3_pins:hold(Context, At, ?HOLD_TIMEOUT_MS) of
        ok -> run(At, Manifest, {reset, At, with_first_fragment}, Reader);
        {error, Reason} -> not_resolved({pins, Reason}, Reader)
    end;
begin_anew(At, Manifest, Reader) ->
    run(At, Manifest, {reset, At, with_first_fragment}, Reader).

log_reset(Why, {First, Next}, At, #reader{stream = StreamId}) ->
    ?LOG_WARNING(
        "stream ~ts: the remote tier of the ~b offsets from ~b is discarded, because ~ts; tiering begins anew at offset ~b",
        [StreamId, Next - First, First, Why, At]
    ).

run(At, Manifest, How, #reader{context = Context, problems = Problems, waiters = Waiters} = Reader) ->
    case ?DRAIN:open(Context, At) of
        {ok, Drain} ->
            ok = rabbitmq_stream_s3_pins:persisted(Context, At),
            self() ! drain,
            Running = ?EFFECTS:start(Manifest, How, Reader#reader{
                phase = running,
                drain = Drain,
                draining = true,
                problems = lists:foldl(fun rabbitmq_stream_s3_problems:ended/2, Problems, [resolving, draining])
            }),
            Awaited = lists:foldl(fun ?EFFECTS:await/2, Running#reader{flushing = []}, lists:sort(maps:keys(Waiters))),
            lists:foldl(fun flush_for/2, Awaited, Reader#reader.flushing);
        {error, Reason} ->
            not_resolved(Reason, Reader)
    end.

%%% Those who wait and those who look

flush_for({From, _} = Caller, #reader{stream = StreamId} = Reader) ->
    case rabbitmq_stream_s3_pause:since(StreamId) of
        none ->
            start_flush(Caller, Reader);
        {_By, _Since} ->
            ok = gen_server:reply(From, {error, paused}),
            Reader
    end.

start_flush({From, Until}, #reader{phase = running, context = Context} = Reader) ->
    To = rabbitmq_stream_s3_log:committed_chunk_id(Context) + 1,
    wait_for(To, From, Until, Reader#reader{flush = To});
start_flush(Caller, #reader{flushing = Callers} = Reader) ->
    Reader#reader{flushing = [Caller | still_waiting(Callers)]}.

wait_for(Offset, From, Until, #reader{waiters = Waiters0, phase = Phase} = Reader) ->
    %% The core keeps one entry for each offset until it is reached; here those leave whose callers have gone.
    Waiters = maps:map(fun(_, Callers) -> still_waiting(Callers) end, Waiters0),
    case Waiters of
        #{Offset := Callers} ->
            Reader#reader{waiters = Waiters#{Offset := [{From, Until} | Callers]}};
        #{} when Phase =:= running ->
            ?EFFECTS:await(Offset, Reader#reader{waiters = Waiters#{Offset => [{From, Until}]}});
        #{} ->
            Reader#reader{waiters = Waiters#{Offset => [{From, Until}]}}
    end.

still_waiting(Callers) ->
    Now = erlang:monotonic_time(millisecond),
    [Caller || {_From, Until} = Caller <- Callers, Until > Now].

moment(infinity) -> infinity;
moment(Timeout) -> erlang:monotonic_time(millisecond) + Timeout.

status_map(#reader{stream = StreamId, phase = Phase, writer = Writer, epoch = Epoch, problems = Problems} = Reader) ->
    Paused = rabbitmq_stream_s3_pause:since(StreamId),
    All = rabbitmq_stream_s3_problems:list(Problems),
    maps:merge(running_status(Reader), #{
        stream => StreamId,
        state => Phase,
        paused => Paused,
        stalled => stalled(Paused, All),
        role => writer,
        reader => self(),
        writer => Writer,
        epoch => Epoch,
        remote => rabbitmq_stream_s3_manifest_cache:range(StreamId),
        problems => All,
        counters => (rabbitmq_stream_s3_counters:get({stream, StreamId}))#{
            pinned_segment_bytes => rabbitmq_stream_s3_pins:stream_bytes(StreamId)
        }
    }).

running_status(#reader{phase = running, core = Core, drain = Drain, transfers = Transfers, context = Context} = Reader) ->
    #{bytes := BytesInTransfer, stalled := Stalled} = ?TRANSFERS:info(Transfers),
    #{bytes := BytesInAssembly} = ?DRAIN:info(Drain),
    CoreState = #{persisted_next_offset := Persisted} = rabbitmq_stream_s3_replica_reader_core:format_state(Core),
    Local = local_status(Context, Persisted),
    maps:merge(CoreState, maps:merge(Local, #{
        progress => rabbitmq_stream_s3_progress:info(Local, Persisted, erlang:monotonic_time(millisecond), Reader#reader.progress),
        waits_for_transfers => Reader#reader.paused,
        cut_in_flight => queue:len(Reader#reader.cut),
        last_persist_timestamp_ms => Reader#reader.last_persist,
        bytes_in_assembly => BytesInAssembly,
        bytes_in_transfer => BytesInTransfer,
        bytes_in_persist => Reader#reader.persisting_bytes,
        upload_stalled_offset => stalled_offset(Stalled)
    }));
running_status(_Reader) ->
    #{}.

local_status(Context, Persisted) ->
    case rabbitmq_stream_s3_log:range(Context) of
        {ok, #{first := undefined}} ->
            #{local => empty, behind => 0, lag_bytes => 0, lag_ms => 0};
        {ok, #{first := First, next := Next}} ->
            From = max(First, Persisted),
            maps:merge(#{local => {First, Next}, behind => max(0, Next - From)}, lag(Context, From));
        {error, Reason} ->
            #{local => {error, Reason}}
    end.

lag(Context, From) ->
    case rabbitmq_stream_s3_log:rest(Context, From) of
        {ok, none} -> #{lag_bytes => 0, lag_ms => 0};
        {ok, #{bytes := Bytes, timestamp := Ms}} -> #{lag_bytes => Bytes, lag_ms => max(0, erlang:system_time(millisecond) - Ms)};
        %% Of a log that has just lost or not yet got that chunk.
        {error, _} -> #{}
    end.

stalled({stream, Since}, _Problems) -> #{cause => <<"an operator has paused the stream">>, since => Since};
stalled({node, Since}, _Problems) -> #{cause => <<"an operator has paused the node">>, since => Since};
stalled(none, [Oldest | _]) -> maps:with([cause, since], Oldest);
stalled(none, []) -> none.

%% For those who collect metrics: they must not wait for this process.
publish(#reader{stream = StreamId, context = Context, problems = Problems} = Reader) ->
    {VHost, Queue} =
        case Context of
            none -> {<<>>, <<>>};
            #{reference := Reference} -> rabbitmq_stream_s3_gauges:labels(Reference)
        end,
    Since =
        case stalled(rabbitmq_stream_s3_pause:since(StreamId), rabbitmq_stream_s3_problems:list(Problems)) of
            none -> 0;
            #{since := Ms} -> Ms
        end,
    Row = maps:merge(#{vhost => VHost, queue => Queue, stalled_since_timestamp_ms => Since}, gauges(Reader)),
    ok = rabbitmq_stream_s3_gauges:put(StreamId, Row),
    Reader.

gauges(#reader{last_persist = LastPersist, transfers = Transfers, drain = Drain, persisting_bytes = BytesInPersist}) ->
    #{in_flight := InFlight, bytes := BytesInTransfer, stalled := Stalled} = ?TRANSFERS:info(Transfers),
    #{
        transfers_in_flight => InFlight,
        upload_stalled_offset => or_else(-1, stalled_offset(Stalled)),
        bytes_in_assembly => bytes_in_assembly(Drain),
        bytes_in_transfer => BytesInTransfer,
        bytes_in_persist => BytesInPersist,
        last_persist_timestamp_ms => or_else(0, LastPersist)
    }.

bytes_in_assembly(none) ->
    0;
bytes_in_assembly(Drain) ->
    #{bytes := Bytes} = ?DRAIN:info(Drain),
    Bytes.

or_else(Default, none) -> Default;
or_else(_Default, Value) -> Value.

stalled_offset({Offset, _Reason}) -> Offset;
stalled_offset(none) -> none.

count(Name, #reader{stream = StreamId}) ->
    rabbitmq_stream_s3_counters:add({stream, StreamId}, Name).
