%% @doc Writes to a stream by AMQP 0.9.1 until it is told to stop: batches of records, the next one when the last is confirmed.
-module(stream_s3_writer).

-export([start/2, stop/1]).

-define(BATCH, 20).
-define(PAUSE_MS, 20).
-define(STOP_TIMEOUT_MS, 60000).

-opaque writer() :: {pid(), reference()}.
-export_type([writer/0]).

%% @doc Starts to write to a queue that is there.
-spec start(inet:port_number(), binary()) -> writer().
start(Port, Queue) ->
    spawn_monitor(fun() -> write(stream_s3_amqp:open(Port), Queue, 0) end).

%% @doc Ends it; answers what has been confirmed, in order. Raises what ended it before.
-spec stop(writer()) -> [binary()].
stop({Pid, Monitor}) ->
    Pid ! {stop, self()},
    receive
        {Pid, Count} ->
            true = demonitor(Monitor, [flush]),
            [record(N) || N <- lists:seq(0, Count - 1)];
        {'DOWN', Monitor, process, Pid, Reason} ->
            error({writer, Reason})
    after ?STOP_TIMEOUT_MS ->
        error({writer, no_answer})
    end.

write(Channel, Queue, Count) ->
    receive
        {stop, From} ->
            ok = stream_s3_amqp:close(Channel),
            From ! {self(), Count}
    after ?PAUSE_MS ->
        ok = stream_s3_amqp:publish(Channel, Queue, [record(N) || N <- lists:seq(Count, Count + ?BATCH - 1)]),
        write(Channel, Queue, Count + ?BATCH)
    end.

%% Its number, and a size that follows from it.
record(N) ->
    <<N:64, 0:(8 * (N rem 997))>>.
