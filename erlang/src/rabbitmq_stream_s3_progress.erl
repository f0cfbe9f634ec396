%% @doc How far a stream's tier has come, and how fast: for whoever watches one that has much to catch up with.
-module(rabbitmq_stream_s3_progress).

-export([new/0, add/3, info/4]).
-export_type([state/0, info/0]).

%% A rate over less says little, one over more is of the past.
-define(WINDOW_MS, 60000).
-define(SAMPLES, 64).

%% When so many bytes became durable (monotonic milliseconds), newest first.
-opaque state() :: [{integer(), non_neg_integer()}].
-type info() :: #{
    %% Of the offsets of the local log, rounded down: 100 means all.
    percent := 0..100,
    offsets_left := non_neg_integer(),
    bytes_left => non_neg_integer(),
    %% Of what became durable within the last minute.
    bytes_per_second := non_neg_integer(),
    %% At this rate; not there while there is none.
    ms_left => non_neg_integer()
}.

%% @doc Nothing has happened.
-spec new() -> state().
new() ->
    [].

%% @doc So many bytes have become durable.
-spec add(non_neg_integer(), NowMs :: integer(), state()) -> state().
add(Bytes, Now, Samples) ->
    lists:sublist([{Now, Bytes} | recent(Now, Samples)], ?SAMPLES).

%% @doc What a status shows, from the local part of it and the offset up to which all is durable. Does nothing else.
-spec info(Local :: map(), Persisted :: non_neg_integer(), NowMs :: integer(), state()) -> info().
info(#{local := {First, Next}, behind := Behind} = Local, Persisted, Now, Samples) ->
    Done = max(0, min(Next, Persisted) - First),
    Rate = rate(Now, recent(Now, Samples)),
    Percent =
        case Behind of
            0 -> 100;
            _ -> Done * 100 div max(1, Next - First)
        end,
    Info = #{percent => Percent, offsets_left => Behind, bytes_per_second => Rate},
    case Local of
        #{lag_bytes := 0} -> Info#{bytes_left => 0, ms_left => 0};
        #{lag_bytes := Bytes} when Rate > 0 -> Info#{bytes_left => Bytes, ms_left => Bytes * 1000 div Rate};
        #{lag_bytes := Bytes} -> Info#{bytes_left => Bytes};
        #{} -> Info
    end;
info(#{local := _NoneOrUnknown}, _Persisted, Now, Samples) ->
    #{percent => 100, offsets_left => 0, bytes_per_second => rate(Now, recent(Now, Samples))}.

recent(Now, Samples) ->
    lists:takewhile(fun({At, _}) -> Now - At =< ?WINDOW_MS end, Samples).

%% From the oldest sample, whose own bytes came before it, to this moment: so a rate falls while nothing happens.
rate(_Now, []) ->
    0;
rate(Now, [{At, Bytes}]) ->
    Bytes * 1000 div max(1000, Now - At);
rate(Now, Samples) ->
    {Oldest, _} = lists:last(Samples),
    Bytes = lists:sum([B || {_, B} <- lists:droplast(Samples)]),
    Bytes * 1000 div max(1, Now - Oldest).
