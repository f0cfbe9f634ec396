%% @doc The object store that the configuration names: its handle, calls that wait for an answer, and a probe in the background.
%%
%% The calls are for processes that may wait. A probe that fails stops nothing: it is logged in one sentence, shown by
%% {@link status/0}, and tried again; uploads go on trying by themselves.
-module(rabbitmq_stream_s3_store).
-behaviour(gen_server).

-include_lib("kernel/include/logger.hrl").
-include("rabbitmq_stream_s3.hrl").

-export([open/0, close/0, handle/0, start_link/0, status/0, probe/0, reload/0, metrics/0]).
-export([put_root/4, get_root/4, put_group/4, get_group/5, get/3, list/4, delete/2]).
-export([probe/1, history_get/3, history_key/2, history_prefix/1]).
-export([root_key/3, fragment_key/3, group_key/4, key_prefix/1, parse_key/1]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2]).
-export_type([error/0, status/0]).

-define(HANDLE, {?MODULE, handle}).
%% What the handle was opened with.
-define(OPENED, {?MODULE, opened}).
%% Where objects are. Another place would have other objects in it.
-define(PLACE, [store, fs_dir, bucket, prefix]).
-define(LOG_META, #{domain => [rabbitmq, stream_s3]}).

-type stream_id() :: binary().
-type offset() :: non_neg_integer().
-type uid() :: 0..16#FFFFFFFF.
-type error() :: {transient | conflict | not_found | corrupt | closed | invalid, #{op := atom(), reason := term(), message := binary()}}.
-type status() :: #{
    state := unknown | accessible | failing,
    %% Milliseconds since the Unix epoch; of the first such outcome in a row.
    since := integer(),
    %% What the last probe complained of.
    cause := binary() | none,
    %% What the store turned out to support.
    capabilities := map()
}.

%% --- handle ----------------------------------------------------------------------------------------------------------

%% @doc Opens the configured store. Reads credentials and certificates, sends nothing.
-spec open() -> ok | {error, Text :: binary()}.
open() ->
    Settings = rabbitmq_stream_s3_config:store_settings(),
    case rabbitmq_stream_s3_nif:store_open(Settings) of
        {ok, Store} ->
            ok = persistent_term:put(?OPENED, opened(Settings)),
            persistent_term:put(?HANDLE, Store);
        {error, {Key, Text}} ->
            {error, named(atom_to_binary(Key), Text)}
    end.

%% The place, and a digest of everything: there are secrets in it.
opened(Settings) ->
    {maps:with(?PLACE, Settings), erlang:md5(term_to_binary(Settings, [deterministic]))}.

%% The sentence must name the setting, once.
named(Key, Text) ->
    case string:prefix(Text, Key) of
        nomatch -> <<Key/binary, ": ", Text/binary>>;
        _ -> Text
    end.

%% @doc Gives the handle up. Requests under way are not affected.
-spec close() -> ok.
close() ->
    _ = persistent_term:erase(?HANDLE),
    _ = persistent_term:erase(?OPENED),
    ok.

%% @doc The handle, as the functions of `rabbitmq_stream_s3_nif' take it. Raises `badarg' before {@link open/0}.
-spec handle() -> term().
handle() ->
    persistent_term:get(?HANDLE).

%% --- calls -----------------------------------------------------------------------------------------------------------

%% @doc Stores a root under a new uid. The limit is in milliseconds, here and below; beyond it the request is aborted,
%% which does not mean that nothing was stored. One request.
-spec put_root(stream_id(), Epoch :: non_neg_integer(), #manifest{}, timeout()) -> {ok, uid()} | {error, error()}.
put_root(StreamId, Epoch, Manifest, Timeout) ->
    wait(put, Timeout, fun(Ref) -> rabbitmq_stream_s3_nif:put_root(handle(), self(), Ref, StreamId, Epoch, Manifest) end).

%% @doc Reads and decodes a root; its revision is 0. One request.
-spec get_root(stream_id(), Epoch :: non_neg_integer(), uid(), timeout()) -> {ok, #manifest{}} | {error, error()}.
get_root(StreamId, Epoch, Uid, Timeout) ->
    wait(get, Timeout, fun(Ref) -> rabbitmq_stream_s3_nif:get_root(handle(), self(), Ref, StreamId, Epoch, Uid) end).

%% @doc Stores a group under a new uid. One request.
-spec put_group(stream_id(), Kind :: 1..3, Entries :: binary(), timeout()) -> {ok, uid()} | {error, error()}.
put_group(StreamId, Kind, Entries, Timeout) ->
    wait(put, Timeout, fun(Ref) -> rabbitmq_stream_s3_nif:put_group(handle(), self(), Ref, StreamId, Kind, Entries) end).

%% @doc Reads and decodes a group's entries. One request.
-spec get_group(stream_id(), Kind :: 1..3, offset(), uid(), timeout()) -> {ok, Entries :: binary()} | {error, error()}.
get_group(StreamId, Kind, Offset, Uid, Timeout) ->
    wait(get, Timeout, fun(Ref) -> rabbitmq_stream_s3_nif:get_group(handle(), self(), Ref, StreamId, Kind, Offset, Uid) end).

%% @doc Reads an object or a part of it: bytes from start up to, not including, end, or the last ones. One request.
-spec get(Key :: binary(), whole | {Start :: non_neg_integer(), End :: non_neg_integer()} | {last, pos_integer()}, timeout()) ->
    {ok, term()} | {error, error()}.
get(Key, Part, Timeout) ->
    wait(get, Timeout, fun(Ref) -> rabbitmq_stream_s3_nif:store_get(handle(), self(), Ref, Key, Part) end).

%% @doc A page of keys that begin so, in order, with sizes in bytes and the moments at which they were stored (milliseconds since
%% the Unix epoch, by the store's clock). `next' is where the following page begins. One request.
-spec list(Prefix :: binary(), From :: binary() | undefined, Max :: 1..1000, timeout()) ->
    {ok, #{objects := [{Key :: binary(), Size :: non_neg_integer(), ModifiedMs :: integer() | undefined}], next := binary() | undefined}}
    | {error, error()}.
list(Prefix, From, Max, Timeout) ->
    wait(list, Timeout, fun(Ref) -> rabbitmq_stream_s3_nif:store_list(handle(), self(), Ref, Prefix, From, Max) end).

%% @doc Deletes objects, those that are gone already included; answers those that could not be deleted. One request for each thousand.
-spec delete([Key :: binary()], timeout()) -> {ok, [{Key :: binary(), error()}]} | {error, error()}.
delete(Keys, Timeout) ->
    wait(delete, Timeout, fun(Ref) -> rabbitmq_stream_s3_nif:store_delete(handle(), self(), Ref, Keys) end).

%% @doc Tries out what the store allows and supports, now. A handful of requests.
-spec probe(timeout()) -> {ok, #{conditional_writes := boolean(), verifies_checksums := boolean()}} | {error, error()}.
probe(Timeout) ->
    wait(probe, Timeout, fun(Ref) -> rabbitmq_stream_s3_nif:store_probe(handle(), self(), Ref) end).

%% @doc The payload of a history segment; `corrupt' where the object is something else. One request.
-spec history_get(Run :: binary(), Seq :: non_neg_integer(), timeout()) -> {ok, binary()} | {error, error()}.
history_get(Run, Seq, Timeout) ->
    wait(get, Timeout, fun(Ref) -> rabbitmq_stream_s3_nif:history_get(handle(), self(), Ref, {Run, Seq}) end).

%% @doc The key of a history segment.
-spec history_key(Run :: binary(), Seq :: non_neg_integer()) -> binary().
history_key(Run, Seq) ->
    rabbitmq_stream_s3_nif:history_key(prefix(), {Run, Seq}).

%% @doc What the keys of a run's segments, or of all runs', begin with.
-spec history_prefix(Run :: binary() | all) -> binary().
history_prefix(Runs) ->
    rabbitmq_stream_s3_nif:history_prefix(prefix(), Runs).

%% @doc The key of a root.
-spec root_key(stream_id(), Epoch :: non_neg_integer(), uid()) -> binary().
root_key(StreamId, Epoch, Uid) ->
    rabbitmq_stream_s3_nif:object_key(prefix(), StreamId, {root, Epoch, Uid}).

%% @doc The key of a fragment.
-spec fragment_key(stream_id(), offset(), uid()) -> binary().
fragment_key(StreamId, Offset, Uid) ->
    rabbitmq_stream_s3_nif:object_key(prefix(), StreamId, {fragment, Offset, Uid}).

%% @doc The key of a group.
-spec group_key(stream_id(), Kind :: 1..3, offset(), uid()) -> binary().
group_key(StreamId, Kind, Offset, Uid) ->
    rabbitmq_stream_s3_nif:object_key(prefix(), StreamId, {group, Kind, Offset, Uid}).

%% @doc What the keys of a stream, or of all streams, begin with.
-spec key_prefix(stream_id() | all) -> binary().
key_prefix(Streams) ->
    rabbitmq_stream_s3_nif:key_prefix(prefix(), Streams).

%% @doc What a key names; `unknown' for one that is not made here.
-spec parse_key(Key :: binary()) -> rabbitmq_stream_s3_nif:parsed_key().
parse_key(Key) ->
    rabbitmq_stream_s3_nif:parse_key(prefix(), Key).

prefix() ->
    rabbitmq_stream_s3_config:get(prefix).

wait(Op, Timeout, Send) ->
    Ref = make_ref(),
    ok = Send(Ref),
    receive
        {store_result, Ref, Result} -> Result
    after Timeout ->
        ok = rabbitmq_stream_s3_nif:store_cancel([Ref]),
        receive
            {store_result, Ref, {ok, _} = Late} -> Late
        after 0 ->
            {error, {transient, #{op => Op, reason => timeout, message => <<"the store did not answer in time">>}}}
        end
    end.

%% --- probe -----------------------------------------------------------------------------------------------------------

-record(state, {
    status :: status(),
    %% The probe under way, and the timer that gives it up.
    probe = none :: none | {reference(), reference()},
    %% Until the next probe.
    timer :: reference() | undefined,
    %% Why the settings in the environment are not those in use; said once.
    refused = none :: binary() | none
}).

%% @doc Starts the process that probes.
-spec start_link() -> {ok, pid()} | ignore | {error, term()}.
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

%% @doc What the last probe found out.
-spec status() -> status().
status() ->
    gen_server:call(?MODULE, status).

%% @doc Opens the store anew with the settings in the application's environment, and probes it: corrected credentials need no restart.
%% Requests under way go on with what they began with. Settings that cannot be used change nothing, and neither do those that name
%% another place. Before each probe the same happens by itself if settings have changed; this call also reads `ca_file' again.
-spec reload() -> ok | {error, Text :: binary()}.
reload() ->
    gen_server:call(?MODULE, reload, infinity).

%% @doc What {@link rabbitmq_stream_s3_nif:store_metrics/0} answers, and whether the last probe could use the bucket (1) or not, or not
%% yet (0). Asks no process.
-spec metrics() -> #{bucket_accessible := 0 | 1, atom() => term()}.
metrics() ->
    (rabbitmq_stream_s3_nif:store_metrics())#{bucket_accessible => rabbitmq_stream_s3_gauges:bucket_accessible()}.

%% @doc Probes now, unless a probe is under way.
-spec probe() -> ok.
probe() ->
    gen_server:cast(?MODULE, probe).

%% @private
init([]) ->
    ok = rabbitmq_stream_s3_gauges:put_store(false),
    Status = #{state => unknown, since => now_ms(), cause => none, capabilities => #{}},
    {ok, start_probe(#state{status = Status})}.

%% @private
handle_call(status, _From, #state{status = Status} = State) ->
    {reply, Status, State};
handle_call(reload, _From, State) ->
    case reopen() of
        ok -> {reply, ok, start_probe(stop_probe(State#state{refused = none}))};
        {error, _} = Error -> {reply, Error, State}
    end.

%% @private
handle_cast(probe, State) ->
    {noreply, start_probe(State)}.

%% @private
handle_info({store_result, Ref, Result}, #state{probe = {Ref, Timer}} = State) ->
    _ = erlang:cancel_timer(Timer),
    {noreply, probed(Result, State#state{probe = none})};
handle_info({probe_expired, Ref}, #state{probe = {Ref, _}} = State) ->
    ok = rabbitmq_stream_s3_nif:store_cancel([Ref]),
    Error = {transient, #{op => probe, reason => timeout, message => <<"the store did not answer in time">>}},
    {noreply, probed({error, Error}, State#state{probe = none})};
handle_info(probe, State) ->
    {noreply, start_probe(State)};
handle_info(_Stale, State) ->
    {noreply, State}.

start_probe(#state{probe = none} = State) ->
    send_probe(reopen_if_changed(State));
start_probe(State) ->
    State.

send_probe(#state{timer = Timer} = State) ->
    _ = Timer =/= undefined andalso erlang:cancel_timer(Timer),
    Ref = make_ref(),
    ok = rabbitmq_stream_s3_nif:store_probe(handle(), self(), Ref),
    Expiry = erlang:send_after(rabbitmq_stream_s3_config:get(persist_timeout_ms), self(), {probe_expired, Ref}),
    State#state{probe = {Ref, Expiry}, timer = undefined}.

stop_probe(#state{probe = {Ref, Expiry}} = State) ->
    _ = erlang:cancel_timer(Expiry),
    ok = rabbitmq_stream_s3_nif:store_cancel([Ref]),
    State#state{probe = none};
stop_probe(#state{probe = none} = State) ->
    State.

reopen_if_changed(#state{refused = Refused} = State) ->
    case persistent_term:get(?OPENED) =:= opened(rabbitmq_stream_s3_config:store_settings()) of
        true ->
            State#state{refused = none};
        false ->
            case reopen() of
                ok ->
                    ?LOG_NOTICE("the settings of the object store have changed, and are in use now", [], ?LOG_META),
                    State#state{refused = none};
                {error, Refused} ->
                    State;
                {error, Text} ->
                    ?LOG_WARNING("the settings of the object store have changed, and cannot be used: ~ts", [Text], ?LOG_META),
                    State#state{refused = Text}
            end
    end.

reopen() ->
    {Place, _} = persistent_term:get(?OPENED),
    Steps = [
        fun rabbitmq_stream_s3_config:validate/0,
        fun rabbitmq_stream_s3_config:hide_secrets/0,
        fun() -> same_place(Place, rabbitmq_stream_s3_config:store_settings()) end,
        fun open/0
    ],
    lists:foldl(
        fun
            (Step, ok) -> Step();
            (_, {error, _} = Error) -> Error
        end,
        ok,
        Steps
    ).

same_place(Place, Settings) ->
    case [Key || Key <- ?PLACE, maps:find(Key, Place) =/= maps:find(Key, Settings)] of
        [] -> ok;
        [Key | _] -> {error, <<(atom_to_binary(Key))/binary, " cannot be changed while the application runs: restart it">>}
    end.

probed(Result, #state{status = Old} = State) ->
    New = new_status(Result, Old),
    ok = log_change(Old, New),
    ok = rabbitmq_stream_s3_gauges:put_store(maps:get(state, New) =:= accessible),
    %% Sooner than usual while it fails, so that the status is right soon after the cause is mended.
    Interval = rabbitmq_stream_s3_config:get(bucket_check_interval_ms),
    Delay =
        case New of
            #{state := failing} -> min(Interval, rabbitmq_stream_s3_config:get(upload_retry_delay_max_ms));
            _ -> Interval
        end,
    State#state{status = New, timer = erlang:send_after(Delay, self(), probe)}.

new_status({ok, Capabilities}, Old) ->
    since(accessible, Old#{cause => none, capabilities => Capabilities});
new_status({error, {_Kind, #{message := Message}}}, Old) ->
    since(failing, Old#{cause => Message}).

since(State, #{state := State} = Status) -> Status;
since(State, Status) -> Status#{state => State, since => now_ms()}.

log_change(#{state := State, cause := Cause}, #{state := State, cause := Cause}) ->
    ok;
log_change(_, #{state := failing, cause := Cause}) ->
    ?LOG_WARNING("the object store cannot be used, uploads wait: ~ts", [Cause], ?LOG_META);
log_change(#{state := failing}, #{state := accessible}) ->
    ?LOG_NOTICE("the object store can be used again, uploads resume", [], ?LOG_META);
log_change(_, #{state := accessible}) ->
    ok.

now_ms() ->
    erlang:system_time(millisecond).
