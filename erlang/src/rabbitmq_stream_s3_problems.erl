%% @doc What keeps failing for a stream: told to the log when it begins, when its cause changes and when it ends, and to the
%% status as long as it lasts. Also puts causes into words.
-module(rabbitmq_stream_s3_problems).

-include_lib("kernel/include/logger.hrl").

-export([new/1, failed/3, ended/2, list/1, text/1]).
-export_type([state/0, doing/0, problem/0]).

%% What fails, as a status names it.
-type doing() :: resolving | draining | uploading | persisting | grouping | retaining | trimming.
%% since: milliseconds since the Unix epoch.
-type problem() :: #{doing := doing(), cause := binary(), since := integer()}.
-opaque state() :: #{stream := binary(), doing() => problem()}.

%% @doc None.
-spec new(StreamId :: binary()) -> state().
new(StreamId) ->
    #{stream => StreamId}.

%% @doc It has failed once more. Logs, unless it had failed for the same cause the last time.
-spec failed(doing(), Reason :: term(), state()) -> state().
failed(Doing, Reason, #{stream := StreamId} = State) ->
    Cause = text(Reason),
    case State of
        #{Doing := #{cause := Cause}} ->
            State;
        #{Doing := Problem} ->
            ok = complain(StreamId, Doing, Cause),
            State#{Doing := Problem#{cause := Cause}};
        #{} ->
            ok = complain(StreamId, Doing, Cause),
            State#{Doing => #{doing => Doing, cause => Cause, since => erlang:system_time(millisecond)}}
    end.

complain(StreamId, Doing, Cause) ->
    ?LOG_WARNING("stream ~ts: ~ts fails and is tried again: ~ts", [StreamId, Doing, Cause], meta(StreamId)).

%% @doc It has succeeded.
-spec ended(doing(), state()) -> state().
ended(Doing, #{stream := StreamId} = State) ->
    case maps:is_key(Doing, State) of
        true ->
            ?LOG_NOTICE("stream ~ts: ~ts succeeds again", [StreamId, Doing], meta(StreamId)),
            maps:remove(Doing, State);
        false ->
            State
    end.

%% @doc What fails now, the oldest first.
-spec list(state()) -> [problem()].
list(State) ->
    Problems = maps:values(maps:remove(stream, State)),
    lists:sort(fun(#{since := A}, #{since := B}) -> A =< B end, Problems).

meta(StreamId) ->
    #{domain => [rabbitmq, stream_s3], stream => StreamId}.

%% @doc A cause in words.
-spec text(Reason :: term()) -> binary().
text({store, {_Kind, #{message := Message}}}) -> Message;
text({metadata, timeout}) -> <<"the metadata store does not answer in time (has it lost its majority?)">>;
text({metadata, noproc}) -> <<"the metadata store does not run on this node">>;
text({metadata, Reason}) -> format("the metadata store says ~0tP", [Reason, 20]);
text(unresolved) -> <<"it is not known yet what is tiered">>;
text(not_tiered_here) -> <<"the stream is not tiered from this node">>;
text(no_queue) -> <<"the metadata store does not know the stream's queue (yet)">>;
text({fenced, Epoch}) -> format("a writer of the later epoch ~b has been there, so this one must not write", [Epoch]);
text(conflict) -> <<"somebody else has made another root current">>;
text({gap, Expected, Got}) -> format("the log goes on at offset ~b where ~b must follow: it has lost what lies between", [Got, Expected]);
text(no_process) -> <<"the writer has ended">>;
text(unknown_epoch) -> <<"the writer is still starting">>;
text(empty_log) -> <<"the local log is empty although the stream is tiered: its writer may still be recovering">>;
text({http, 403}) -> <<"the store refuses access (HTTP 403): check the credentials and the bucket's policy">>;
text({http, 404}) -> <<"the store has no such bucket (HTTP 404)">>;
text({http, Status}) -> format("the store answers HTTP ~b", [Status]);
text(timeout) -> <<"it takes too long">>;
text(connection) -> <<"there is no connection to the store, or it breaks">>;
text(throttled) -> <<"the store asks to slow down">>;
text(checksum_mismatch) -> <<"the bytes changed on the way to the store">>;
text({corrupt_chunk, ChunkId}) -> format("the chunk at offset ~b does not fit its checksum: the local copy is damaged", [ChunkId]);
text({damaged_object, Key}) -> format("the object ~ts is not what was stored under that key", [Key]);
text({open_failed, File, Posix}) -> format("~ts cannot be opened: ~ts", [File, file:format_error(Posix)]);
text({panic, Text}) -> format("the library failed: ~ts", [Text]);
text(does_not_fit) -> <<"the manifest has changed meanwhile">>;
text({delete_failed, File, Posix}) -> format("~ts cannot be deleted: ~ts", [File, file:format_error(Posix)]);
text(cancelled) -> <<"it was cancelled">>;
text(clock_skew) -> <<"this machine's clock and the store's are too far apart">>;
text(expired_token) -> <<"the credentials have expired">>;
text(write_conflict) -> <<"another write to the same key was under way">>;
text({crashed, Reason}) -> format("it crashed: ~0tP", [Reason, 30]);
text(Other) -> format("~0tP", [Other, 30]).

format(Format, Args) ->
    unicode:characters_to_binary(io_lib:format(Format, Args)).
