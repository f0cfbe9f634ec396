%% @doc What this node knows of the remote tier of each stream: the persisted manifest, never a speculative one.
%%
%% Reads are lookups in a table and block nobody; they copy the manifest, which a rebalanced stream keeps below some hundred
%% kilobytes, except {@link range/1}, which copies two numbers.
-module(rabbitmq_stream_s3_manifest_cache).
-behaviour(gen_server).

-include("rabbitmq_stream_s3.hrl").

-export([start_link/0, put/2, pending/1, forget/1, get/1, range/1, summary/1, streams/0]).
-export([init/1, handle_call/3, handle_cast/2]).

-define(TABLE, ?MODULE).

-type stream_id() :: binary().
-type offset() :: non_neg_integer().

%% @doc Starts the owner of the table.
-spec start_link() -> {ok, pid()} | ignore | {error, term()}.
start_link() ->
    gen_server:start_link({local, ?MODULE}, ?MODULE, [], []).

%% @doc Publishes the manifest that the metadata store accepted with the manifest's revision.
-spec put(stream_id(), #manifest{}) -> ok.
put(StreamId, #manifest{first_offset = First, next_offset = Next, total_size = Bytes, entries = Entries} = Manifest) ->
    Range =
        case Entries of
            <<>> -> empty;
            _ -> {First, Next}
        end,
    true = ets:insert(?TABLE, {StreamId, Range, Manifest, Bytes}),
    ok.

%% @doc Says that somebody is finding out. A manifest that is known already stays: it is still the persisted one as far as
%% anyone here can tell.
-spec pending(stream_id()) -> ok.
pending(StreamId) ->
    _ = ets:insert_new(?TABLE, {StreamId, {error, unresolved}, pending, 0}),
    ok.

%% @doc Drops what is known of a stream.
-spec forget(stream_id()) -> ok.
forget(StreamId) ->
    true = ets:delete(?TABLE, StreamId),
    ok.

%% @doc The persisted manifest and its revision; `pending' while it is being resolved; `unknown' if nobody here tiers the stream.
-spec get(stream_id()) -> {resolved, #manifest{}, Revision :: non_neg_integer()} | pending | unknown.
get(StreamId) ->
    case lookup(StreamId, 3) of
        {ok, #manifest{revision = Revision} = Manifest} -> {resolved, Manifest, Revision};
        {ok, pending} -> pending;
        unknown -> unknown
    end.

%% @doc The half-open range of offsets in the remote tier.
-spec range(stream_id()) -> {First :: offset(), Next :: offset()} | empty | {error, unresolved}.
range(StreamId) ->
    case lookup(StreamId, 2) of
        {ok, Range} -> Range;
        unknown -> {error, unresolved}
    end.

%% @doc {@link range/1}, and the data bytes in the remote tier; `unknown' if nobody here tiers the stream. Copies no manifest.
-spec summary(stream_id()) -> {{First :: offset(), Next :: offset()} | empty | {error, unresolved}, Bytes :: non_neg_integer()} | unknown.
summary(StreamId) ->
    case {lookup(StreamId, 2), lookup(StreamId, 4)} of
        {{ok, Range}, {ok, Bytes}} -> {Range, Bytes};
        {_, _} -> unknown
    end.

%% @doc All streams of which something is known or being found out.
-spec streams() -> [stream_id()].
streams() ->
    [StreamId || [StreamId] <- ets:match(?TABLE, {'$1', '_', '_', '_'})].

lookup(StreamId, Position) ->
    try
        {ok, ets:lookup_element(?TABLE, StreamId, Position)}
    catch
        error:badarg -> unknown
    end.

%% @private
init([]) ->
    ?TABLE = ets:new(?TABLE, [named_table, public, {read_concurrency, true}]),
    {ok, none}.

%% @private
handle_call(_Request, _From, State) ->
    {reply, {error, badarg}, State}.

%% @private
handle_cast(_Message, State) ->
    {noreply, State}.
