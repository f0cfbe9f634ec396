%% @doc The pure core of the replica reader of one stream: events in, effects out.
%%
%% A state is a value: every call returns a new one, and older ones stay usable. The machine itself is in `native/core'; this
%% module adds what it must not know: the clock, unique references, configured defaults. Effects are to be performed in
%% the order in which they come. An answer to something that the machine does not know (any more) changes nothing.
-module(rabbitmq_stream_s3_replica_reader_core).

-include("rabbitmq_stream_s3.hrl").

-export([init/2, init_reset/4, manifest/1, persisted_manifest/1, rebalance_in_flight/1, format_state/1]).
-export([fragment_cut/2, transfer_complete/3, transfer_failed/3, group_upload_complete/2, group_upload_failed/2]).
-export([persist_complete/2, persist_failed/2, tick/2, await_offset/3]).
-export([retention_started/1, retention_complete/2, retention_failed/2]).
-export_type([state/0, opts/0, effect/0, ref/0]).

-type state() :: rabbitmq_stream_s3_nif:core().
-type ref() :: term().
-type effect() :: rabbitmq_stream_s3_nif:effect().
%% stream, dir and reference come back in effects as they are. The three last ones default to the configuration.
-type opts() :: #{
    stream := term(),
    dir := term(),
    epoch := non_neg_integer(),
    reference := term(),
    persist_threshold => pos_integer(),
    persist_interval_ms => non_neg_integer(),
    rebalance_threshold => pos_integer(),
    _ => _
}.

-define(CONFIGURED, [persist_threshold, persist_interval_ms, rebalance_threshold]).

%% The library refuses misuse with a text; callers get badarg, with the text as error information.
-define(CALL(Call, Args),
    try
        rabbitmq_stream_s3_nif:Call
    catch
        error:{badarg, Text__} -> rabbitmq_stream_s3_nif:misuse(Text__, Args)
    end
).

%% @doc Starts from the manifest that the metadata store anchors, or from an empty one with revision 0.
-spec init(#manifest{}, opts()) -> {state(), [effect()]}.
init(Manifest, Opts) ->
    ?CALL(core_init(Manifest, with_defaults(Opts), now_ms()), [Manifest, Opts]).

%% @doc Starts on an empty manifest at `At' that takes the place of `Old', on the same revision. With `at_once' the effects
%% persist it; with `with_first_fragment' the old one stays published until a fragment is persisted in its stead.
-spec init_reset(Old :: #manifest{}, At :: rabbitmq_stream_s3_nif:offset(), at_once | with_first_fragment, opts()) ->
    {state(), [effect()]}.
init_reset(Old, At, When, Opts) ->
    ?CALL(core_init_reset(Old, At, When, with_defaults(Opts), now_ms()), [Old, At, When, Opts]).

with_defaults(Opts) ->
    Missing = [Key || Key <- ?CONFIGURED, not is_map_key(Key, Opts)],
    maps:merge(maps:from_list([{Key, rabbitmq_stream_s3_config:get(Key)} || Key <- Missing]), Opts).

%% @doc The manifest with every completed transfer in it, persisted or not. Costs a copy of its entries.
-spec manifest(state()) -> #manifest{}.
manifest(State) ->
    rabbitmq_stream_s3_nif:core_manifest(State).

%% @doc The manifest as persisted last: the only one that may be shown to others. Costs a copy of its entries.
-spec persisted_manifest(state()) -> #manifest{}.
persisted_manifest(State) ->
    rabbitmq_stream_s3_nif:core_persisted_manifest(State).

%% @doc Whether a group is being uploaded.
-spec rebalance_in_flight(state()) -> boolean().
rebalance_in_flight(State) ->
    rabbitmq_stream_s3_nif:core_rebalance_in_flight(State).

%% @doc A view of the state for status calls and logs. Cheap: counts, no entries.
-spec format_state(state()) -> map().
format_state(State) ->
    rabbitmq_stream_s3_nif:core_format_state(State).

%% @doc A fragment has been cut. `Ref' names it in the effects and in the answers. `Meta' comes back in effects untouched.
-spec fragment_cut(rabbitmq_stream_s3_nif:meta(), state()) -> {state(), ref(), [effect()]}.
fragment_cut(Meta, State) ->
    Ref = erlang:unique_integer([positive]),
    {Next, Effects} = ?CALL(core_fragment_cut(Meta, Ref, State), [Meta, State]),
    {Next, Ref, Effects}.

%% @doc The fragment is in the store, under a key with this uid.
-spec transfer_complete(ref(), rabbitmq_stream_s3_nif:uid(), state()) -> {state(), [effect()]}.
transfer_complete(Ref, Uid, State) ->
    ?CALL(core_transfer_complete(Ref, Uid, State), [Ref, Uid, State]).

%% @doc One attempt to upload the fragment has failed.
-spec transfer_failed(ref(), Reason :: rabbitmq_stream_s3_nif:reason() | term(), state()) -> {state(), [effect()]}.
transfer_failed(Ref, Reason, State) ->
    ?CALL(core_transfer_failed(Ref, Reason, State), [Ref, Reason, State]).

%% @doc The group asked for last is in the store, under a key with this uid.
-spec group_upload_complete(rabbitmq_stream_s3_nif:uid(), state()) -> {state(), [effect()]}.
group_upload_complete(Uid, State) ->
    ?CALL(core_group_upload_complete(Uid, State), [Uid, State]).

%% @doc The group asked for last could not be stored.
-spec group_upload_failed(Reason :: term(), state()) -> {state(), [effect()]}.
group_upload_failed(Reason, State) ->
    ?CALL(core_group_upload_failed(Reason, State), [Reason, State]).

%% @doc Root and metadata are written; `Revision' is what the metadata store now has.
-spec persist_complete(Revision :: non_neg_integer(), state()) -> {state(), [effect()]}.
persist_complete(Revision, State) ->
    ?CALL(core_persist_complete(Revision, now_ms(), State), [Revision, State]).

%% @doc The persist in flight has failed.
-spec persist_failed(conflict | not_found | term(), state()) -> {state(), [effect()]}.
persist_failed(Reason, State) ->
    ?CALL(core_persist_failed(Reason, State), [Reason, State]).

%% @doc The persist timer has fired.
-spec tick(NowMs :: integer(), state()) -> {state(), [effect()]}.
tick(NowMs, State) ->
    ?CALL(core_tick(NowMs, State), [NowMs, State]).

%% @doc Asks for `{reply_waiters, [{From, ok}]}' once everything below `Offset' is persisted.
-spec await_offset(rabbitmq_stream_s3_nif:offset(), From :: term(), state()) -> {state(), [effect()]}.
await_offset(Offset, From, State) ->
    ?CALL(core_await_offset(Offset, From, State), [Offset, From, State]).

%% @doc Remote retention is being evaluated: neither persist nor rebalance starts until it ends.
-spec retention_started(state()) -> state().
retention_started(State) ->
    rabbitmq_stream_s3_nif:core_retention_started(State).

%% @doc Remote retention has decided on an edit. Raises `badarg' where it does not fit the manifest.
-spec retention_complete(#edit{}, state()) -> {state(), [effect()]}.
retention_complete(Edit, State) ->
    ?CALL(core_retention_complete(Edit, State), [Edit, State]).

%% @doc Remote retention came to nothing: it failed, or there was nothing to do.
-spec retention_failed(Reason :: term(), state()) -> {state(), [effect()]}.
retention_failed(Reason, State) ->
    ?CALL(core_retention_failed(Reason, State), [Reason, State]).

now_ms() ->
    erlang:system_time(millisecond).
