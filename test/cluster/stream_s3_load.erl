%% @doc Writes to a stream without a pause while its members come and go, and keeps account: which records were confirmed, and up to which
%% offset they were acknowledged as tiered.
-module(stream_s3_load).

-export([start/3, lead/3, stop/1, record/1]).
%% Called on the node of the writer.
-export([await_next/1]).
-export_type([load/0]).

%% Never more records than that are ahead of what is confirmed, and so long a pause after each confirmation: what is written is read back.
-define(WINDOW, 10).
-define(PAUSE_MS, 2).
-define(AWAIT_MS, 1000).
-define(TIMEOUT, 30000).

-opaque load() :: {Writing :: pid(), Awaiting :: pid()}.

%% @doc Starts with a writer on a node.
-spec start(binary(), pid(), node()) -> load().
start(Stream, Writer, Node) ->
    {spawn_link(fun() -> write(Writer, 0, #{}, []) end), spawn_link(fun() -> await(Stream, Node, 0) end)}.

%% @doc Goes on with another writer. What was not confirmed by then is not written again.
-spec lead(load(), pid(), node()) -> ok.
lead({Writing, Awaiting}, Writer, Node) ->
    Writing ! {lead, Writer},
    Awaiting ! {lead, Node},
    ok.

%% @doc Ends. `confirmed' are numbers of records, ascending; `acknowledged' is an offset below which all is tiered.
-spec stop(load()) -> #{confirmed := [non_neg_integer()], acknowledged := non_neg_integer()}.
stop({Writing, Awaiting}) ->
    #{confirmed => lists:sort(ask(Writing)), acknowledged => ask(Awaiting)}.

ask(Pid) ->
    Pid ! {stop, self()},
    receive
        {Pid, Answer} -> Answer
    after ?TIMEOUT -> error({no_answer, Pid})
    end.

%% @doc The record with this number.
-spec record(non_neg_integer()) -> binary().
record(Number) ->
    <<Number:64, (binary:copy(<<(Number rem 251)>>, 100 + Number * 7919 rem 1500))/binary>>.

write(Writer, Next, Flight, Confirmed) when map_size(Flight) < ?WINDOW ->
    ok = osiris:write(Writer, undefined, Next, record(Next)),
    write(Writer, Next + 1, Flight#{Next => true}, Confirmed);
write(Writer, Next, Flight, Confirmed) ->
    receive
        {osiris_written, _Reference, undefined, Corrs} ->
            receive
            after ?PAUSE_MS -> ok
            end,
            write(Writer, Next, maps:without(Corrs, Flight), Corrs ++ Confirmed);
        {lead, Other} ->
            write(Other, Next, #{}, Confirmed);
        {stop, From} ->
            From ! {self(), Confirmed}
    end.

await(Stream, Node, Acknowledged) ->
    receive
        {lead, Other} -> await(Stream, Other, Acknowledged);
        {stop, From} -> From ! {self(), Acknowledged}
    after 0 ->
        try erpc:call(Node, ?MODULE, await_next, [Stream], ?TIMEOUT) of
            {ok, Offset} ->
                await(Stream, Node, max(Offset, Acknowledged));
            {error, _} ->
                await(Stream, Node, Acknowledged)
        catch
            %% The node, or something on it, is just not there.
            _:_ -> await(Stream, Node, Acknowledged)
        end
    end.

%% @doc Waits until what is committed now is tiered.
-spec await_next(binary()) -> {ok, non_neg_integer()} | {error, term()}.
await_next(Stream) ->
    Offset = stream_s3_osiris:committed_chunk_id(stream_s3_osiris:writer(Stream)) + 1,
    case rabbitmq_stream_s3_replica_reader:await_offset(Stream, Offset, ?AWAIT_MS) of
        ok ->
            {ok, Offset};
        {error, _} = Error ->
            receive
            after 20 -> Error
            end
    end.
