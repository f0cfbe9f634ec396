%% @doc A directory that goes when this VM goes, however it goes.
-module(stream_s3_temp).

-export([new/1, remove/1]).

%% Outlives the VM: the end of its input tells it that the VM is gone, also after kill -9. Control-C, which the terminal
%% sends to all of its processes, is not for it.
-define(WATCH, "trap '' INT HUP TERM; cat >/dev/null; rm -rf -- \"$1\"").

%% @doc Makes a fresh directory below TMPDIR, or /tmp, whose name begins with the given word.
-spec new(string()) -> {ok, file:filename()} | {error, file:filename(), file:posix()}.
new(Word) ->
    Name = lists:concat(["stream_s3_", Word, ".", os:getpid(), ".", erlang:system_time(microsecond)]),
    Dir = filename:join(os:getenv("TMPDIR", "/tmp"), Name),
    case file:make_dir(Dir) of
        ok ->
            _ = stream_s3_keeper:start(fun() -> watch(Dir) end),
            {ok, Dir};
        {error, Posix} ->
            {error, Dir, Posix}
    end.

watch(Dir) ->
    open_port({spawn_executable, os:find_executable("sh")}, [{args, ["-c", ?WATCH, "watch", Dir]}]).

%% @doc Removes the directory now.
-spec remove(file:filename()) -> ok.
remove(Dir) ->
    ok = file:del_dir_r(Dir).
