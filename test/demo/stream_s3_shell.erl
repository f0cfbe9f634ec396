%% @doc A small world to play in: osiris, the application, and a directory as bucket, all in a temporary directory that goes
%% with the shell. `make shell' starts it.
%%
%% Settings of the application given on the command line or in a configuration file hold: for instance
%% `ERL_FLAGS="-rabbitmq_stream_s3 fragment_target_size 1000" make shell'.
-module(stream_s3_shell).

-export([start/0, stream/1, write/2]).

-define(APP, rabbitmq_stream_s3).

%% @doc Starts the world, unless it is there, and prints what to try.
-spec start() -> ok.
start() ->
    %% The shell takes input while this still runs, and what it is given first needs the world: it waits here.
    global:trans({?MODULE, self()}, fun start_once/0, [node()]).

start_once() ->
    case lists:keymember(?APP, 1, application:which_applications()) of
        true -> ok;
        false -> start_world()
    end.

start_world() ->
    ok = logger:set_primary_config(level, warning),
    case stream_s3_temp:new("shell") of
        {ok, Dir} ->
            _ = application:load(?APP),
            Env = maps:from_list(application:get_all_env(?APP)),
            World = stream_s3_world:start(#{store => fs, dir => Dir, env => maps:remove(included_applications, Env)}),
            io:format("~nThe store is ~ts. Try:~n~n~ts~n", [stream_s3_world:describe(World), example()]);
        {error, Dir, Posix} ->
            io:format("cannot make the directory ~ts: ~ts~n", [Dir, file:format_error(Posix)])
    end.

example() ->
    [
        "  W = stream_s3_shell:stream(<<\"s\">>), stream_s3_shell:write(W, [\"first\", \"second\", \"third\"]).\n",
        "  rabbitmq_stream_s3:force_cut(<<\"s\">>), rabbitmq_stream_s3:await_offset(<<\"s\">>, 3).\n",
        "  rabbitmq_stream_s3:print_status().\n"
    ].

%% @doc Starts a stream with this id and a reader for it; answers its writer.
-spec stream(binary()) -> pid().
stream(Id) ->
    ok = start(),
    Writer = stream_s3_osiris:start_stream(stream_s3_osiris:config(Id)),
    ok = rabbitmq_stream_s3:reconcile(),
    %% Its reader has looked around by then, so that it takes orders.
    ok = rabbitmq_stream_s3:await_offset(Id, 0),
    Writer.

%% @doc Writes records and waits until they are committed.
-spec write(pid(), [iodata()]) -> ok.
write(Writer, Records) ->
    stream_s3_osiris:write(Writer, Records).
