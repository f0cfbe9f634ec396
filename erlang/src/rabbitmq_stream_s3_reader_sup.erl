%% @doc Supervises the readers: one supervisor a stream, so that a stream whose reader keeps failing uses up its own restarts
%% and nobody else's. When they are used up the stream rests until the reconciler finds it again.
-module(rabbitmq_stream_s3_reader_sup).
-behaviour(supervisor).

-export([start_link/0, start_reader/2]).
-export([init/1, start_stream/1]).

%% A reader that fails more often than that fails for a reason that another restart does not mend.
-define(RESTARTS, 5).
-define(RESTARTS_WITHIN_S, 60).

%% @doc Starts the supervisor of all streams.
-spec start_link() -> {ok, pid()} | ignore | {error, term()}.
start_link() ->
    supervisor:start_link({local, ?MODULE}, ?MODULE, all).

%% @doc Starts a reader for a stream, under a supervisor whose process is returned: it ends when the reader has ended in
%% an orderly way, or has failed too often.
-spec start_reader(StreamId :: binary(), Writer :: pid()) -> {ok, Supervisor :: pid()} | {error, term()}.
start_reader(StreamId, Writer) ->
    case supervisor:start_child(?MODULE, [#{stream => StreamId, writer => Writer}]) of
        {ok, Pid} when is_pid(Pid) -> {ok, Pid};
        {error, _} = Error -> Error
    end.

%% @private
start_stream(Args) ->
    supervisor:start_link(?MODULE, {stream, Args}).

%% @private
init(all) ->
    Stream = #{
        id => stream,
        start => {?MODULE, start_stream, []},
        restart => temporary,
        type => supervisor,
        shutdown => infinity
    },
    {ok, {#{strategy => simple_one_for_one}, [Stream]}};
init({stream, Args}) ->
    Reader = #{
        id => reader,
        start => {rabbitmq_stream_s3_replica_reader, start_link, [Args]},
        restart => transient,
        significant => true
    },
    Flags = #{
        strategy => one_for_one,
        intensity => ?RESTARTS,
        period => ?RESTARTS_WITHIN_S,
        auto_shutdown => any_significant
    },
    {ok, {Flags, [Reader]}}.
