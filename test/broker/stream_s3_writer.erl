%% @doc Writes numbered records to a stream by AMQP 0.9.1 until it is told to stop: batches, the next one when the last is confirmed.
%%
%% When that fails it does not send a batch again, since nobody knows whether it was written; it connects anew, to the next port of its
%% list, and goes on with the numbers behind. So each number is in the stream once, or not at all if it was never confirmed.
-module(stream_s3_writer).

-export([start/2, start/3, start/4, await/1, stop/1, record/1, number/1]).
-export_type([writer/0, outcome/0]).

-define(BATCH, 20).
-define(PAUSE_MS, 20).
-define(CONFIRM_TIMEOUT_S, 60).
-define(STOP_TIMEOUT_MS, 120000).

-opaque writer() :: {pid(), reference()}.
%% Numbers in order; `next' is the first one that was not used.
-type outcome() :: #{confirmed := [non_neg_integer()], lost := [non_neg_integer()], next := non_neg_integer(), errors := [term()]}.

%% @doc Starts to write to a queue that is there, with the number 0.
-spec start([inet:port_number()], binary()) -> writer().
start(Ports, Queue) ->
    start(Ports, Queue, 0).

%% @doc Starts to write with this number.
-spec start([inet:port_number()], binary(), non_neg_integer()) -> writer().
start(Ports, Queue, First) ->
    start(Ports, Queue, First, ?CONFIRM_TIMEOUT_S).

%% @doc The same, and waits at most so many seconds for a batch to be confirmed.
-spec start([inet:port_number()], binary(), non_neg_integer(), pos_integer()) -> writer().
start(Ports, Queue, First, TimeoutS) ->
    spawn_monitor(fun() ->
        write(none, Ports, {Queue, TimeoutS}, #{confirmed => [], lost => [], next => First, errors => []})
    end).

%% @doc Waits until something is confirmed.
-spec await(writer()) -> ok.
await({Pid, Monitor}) ->
    Pid ! {await, self()},
    receive
        {Pid, writes} -> ok;
        {'DOWN', Monitor, process, Pid, Reason} -> error({writer, Reason})
    after ?STOP_TIMEOUT_MS -> error({writer, no_answer})
    end.

%% @doc Ends it and tells what came of it. Raises what ended it before.
-spec stop(writer()) -> outcome().
stop({Pid, Monitor}) ->
    Pid ! {stop, self()},
    receive
        {Pid, #{confirmed := Confirmed, lost := Lost, errors := Errors} = Outcome} ->
            true = demonitor(Monitor, [flush]),
            Outcome#{confirmed := lists:append(lists:reverse(Confirmed)), lost := lists:append(lists:reverse(Lost)), errors := lists:reverse(Errors)};
        {'DOWN', Monitor, process, Pid, Reason} ->
            error({writer, Reason})
    after ?STOP_TIMEOUT_MS ->
        error({writer, no_answer})
    end.

write(Channel, Ports, Queue, #{confirmed := Confirmed} = Outcome) ->
    receive
        {await, From} when Confirmed =/= [] ->
            From ! {self(), writes},
            write(Channel, Ports, Queue, Outcome);
        {stop, From} ->
            _ = Channel =/= none andalso catch_all(fun() -> stream_s3_amqp:close(Channel) end),
            From ! {self(), Outcome}
    after ?PAUSE_MS ->
        write_one(Channel, Ports, Queue, Outcome)
    end.

write_one(none, [Port | Others] = Ports, Queue, Outcome) ->
    case catch_all(fun() -> stream_s3_amqp:open(Port) end) of
        {ok, Channel} -> write(Channel, Ports, Queue, Outcome);
        {error, _NobodyThere} -> write(none, Others ++ [Port], Queue, Outcome)
    end;
write_one(Channel, [Port | Others] = Ports, {Name, TimeoutS} = Queue, #{confirmed := Confirmed, lost := Lost, next := First, errors := Errors} = Outcome0) ->
    Numbers = lists:seq(First, First + ?BATCH - 1),
    Outcome = Outcome0#{next := First + ?BATCH},
    case catch_all(fun() -> stream_s3_amqp:publish(Channel, Name, [record(N) || N <- Numbers], [], TimeoutS) end) of
        {ok, ok} -> write(Channel, Ports, Queue, Outcome#{confirmed := [Numbers | Confirmed]});
        {error, Reason} -> write(none, Others ++ [Port], Queue, Outcome#{lost := [Numbers | Lost], errors := [Reason | Errors]})
    end.

catch_all(Fun) ->
    try
        {ok, Fun()}
    catch
        Class:Reason -> {error, {Class, Reason}}
    end.

%% @doc A number, and a size that follows from it.
-spec record(non_neg_integer()) -> binary().
record(N) ->
    <<N:64, 0:(8 * (N rem 997))>>.

%% @doc The number of a record; raises if it is none.
-spec number(binary()) -> non_neg_integer().
number(<<N:64, _/binary>> = Record) ->
    Record = record(N),
    N.
