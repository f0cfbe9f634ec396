%% @doc Compares what the persisted manifest of a stream lists with what is in the bucket, from the broker: groups are read, objects are
%% listed, and sizes compared. No fragment is read; `stream-s3 verify' does that, wherever there is time for it.
-module(rabbitmq_stream_s3_verify).

-include("rabbitmq_stream_s3.hrl").

-export([run/2]).

-define(PAGE, 1000).
%% Of findings, how many are told.
-define(MOST_FINDINGS, 100).
-define(OBJECT_HEADER_B, 8).

-type stream_id() :: binary().
-type verified() :: #{
    stream := stream_id(),
    ok := boolean(),
    first_offset := non_neg_integer(),
    next_offset := non_neg_integer(),
    fragments := non_neg_integer(),
    groups := non_neg_integer(),
    bytes := non_neg_integer(),
    findings := [binary()]
}.

%% @doc Checks that fragments follow each other from the manifest's first to its next offset, that each is there and has as many bytes as its
%% entry and whole index records make, that groups are there and hold what their entries say, and that sizes add up. The limit
%% is for each request, in milliseconds. One listing of the stream's objects and one request for each group. A stream that is being written to
%% may change meanwhile: what is missing because a newer manifest has dropped it is no finding.
-spec run(stream_id(), timeout()) -> {ok, verified()} | {error, term()}.
run(StreamId, Timeout) ->
    case rabbitmq_stream_s3_manifest_cache:get(StreamId) of
        {resolved, Manifest, _Revision} -> against_listing(StreamId, Manifest, Timeout);
        pending -> {error, unresolved};
        unknown -> {error, not_tiered_here}
    end.

against_listing(StreamId, Manifest, Timeout) ->
    Prefix = rabbitmq_stream_s3_store:key_prefix(StreamId),
    case list(Prefix, undefined, #{}, Timeout) of
        {ok, Objects} ->
            State0 = #{stream => StreamId, objects => Objects, timeout => Timeout, next => none, fragments => 0, groups => 0, bytes => 0, findings => []},
            try walk_root(Manifest, State0) of
                State -> {ok, report(StreamId, Manifest, State)}
            catch
                throw:{store, Error} -> {error, {store, Error}}
            end;
        {error, Error} ->
            {error, {store, Error}}
    end.

list(Prefix, From, Objects0, Timeout) ->
    case rabbitmq_stream_s3_store:list(Prefix, From, ?PAGE, Timeout) of
        {ok, #{objects := Page, next := Next}} ->
            Objects = lists:foldl(fun({Key, Size, _}, Acc) -> Acc#{Key => Size} end, Objects0, Page),
            case Next of
                undefined -> {ok, Objects};
                _ -> list(Prefix, Next, Objects, Timeout)
            end;
        {error, _} = Error ->
            Error
    end.

walk_root(#manifest{first_offset = First, next_offset = Next, total_size = Total, entries = Entries}, State0) ->
    #{bytes := Bytes} = State = walk(Entries, First, State0),
    State1 = expect(Entries =:= <<>> orelse maps:get(next, State) =/= none, "the manifest lists no fragment of its range", [], State),
    State2 = expect(Bytes =:= Total, "the fragments have ~b bytes, and the manifest says ~b", [Bytes, Total], State1),
    expect(First =< Next, "the manifest begins at ~b and ends at ~b", [First, Next], State2).

%% Entries whose successor begins at or below the first offset have been consumed by retention, within a group.
walk(<<>>, _First, State) ->
    State;
walk(?ENTRY(Offset, _, _, Kind, Size, Uid, Rest), First, State) ->
    case Rest of
        ?ENTRY(Following, _, _, _, _, _, _) when Following =< First -> walk(Rest, First, State);
        _ -> walk(Rest, First, entry(Kind, Offset, Size, Uid, First, State))
    end.

entry(?MANIFEST_KIND_FRAGMENT, Offset, Size, Uid, _First, #{stream := StreamId, fragments := N, bytes := Bytes, next := Last} = State0) ->
    Key = rabbitmq_stream_s3_store:fragment_key(StreamId, Offset, Uid),
    State1 = expect(Last =:= none orelse Offset > Last, "~ts does not follow what begins at ~p", [Key, Last], State0),
    State = State1#{fragments := N + 1, bytes := Bytes + Size, next := Offset},
    case maps:get(objects, State) of
        #{Key := Length} ->
            Index = Length - ?OBJECT_HEADER_B - Size,
            expect(Index > 0 andalso Index rem ?INDEX_RECORD_B =:= 0, "~ts has ~b bytes, which ~b of data and an index do not make", [Key, Length, Size], State);
        #{} ->
            missing(Key, Offset, State)
    end;
entry(Kind, Offset, _Size, Uid, First, #{stream := StreamId, groups := N, timeout := Timeout} = State) ->
    Key = rabbitmq_stream_s3_store:group_key(StreamId, Kind, Offset, Uid),
    case rabbitmq_stream_s3_store:get_group(StreamId, Kind, Offset, Uid, Timeout) of
        {ok, ?ENTRY(Begin, _, _, _, _, _, _) = Entries} ->
            walk(Entries, First, expect(Begin =:= Offset, "~ts begins at offset ~b", [Key, Begin], State#{groups := N + 1}));
        {ok, _} ->
            finding("~ts is empty", [Key], State);
        {error, {not_found, _}} ->
            missing(Key, Offset, State);
        {error, {corrupt, #{message := Why}}} ->
            finding("~ts cannot be read: ~ts", [Key, Why], State);
        {error, Error} ->
            throw({store, Error})
    end.

%% Retention and rebalancing take objects away once a newer manifest is persisted.
missing(Key, Offset, #{stream := StreamId} = State) ->
    case rabbitmq_stream_s3_manifest_cache:range(StreamId) of
        {First, _} when Offset < First -> State;
        _ -> finding("~ts is not there", [Key], State)
    end.

expect(true, _Format, _Args, State) -> State;
expect(false, Format, Args, State) -> finding(Format, Args, State).

finding(Format, Args, #{findings := Findings} = State) ->
    State#{findings := [unicode:characters_to_binary(io_lib:format(Format, Args)) | Findings]}.

report(StreamId, #manifest{first_offset = First, next_offset = Next}, #{fragments := Fragments, groups := Groups, bytes := Bytes, findings := Findings}) ->
    #{
        stream => StreamId,
        ok => Findings =:= [],
        first_offset => First,
        next_offset => Next,
        fragments => Fragments,
        groups => Groups,
        bytes => Bytes,
        findings => lists:sublist(lists:reverse(Findings), ?MOST_FINDINGS)
    }.
