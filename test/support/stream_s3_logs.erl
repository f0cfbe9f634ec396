%% @doc What this node logs, to look at and to wait for.
-module(stream_s3_logs).

-export([start/0, stop/1, await/3, lines/1, clear/1]).
%% Called by logger.
-export([log/2]).
-export_type([logs/0]).

-type line() :: {logger:level(), Text :: binary()}.
-opaque logs() :: {pid(), HandlerId :: atom()}.

%% @doc Collects from now on, whatever the level of other handlers is.
-spec start() -> logs().
start() ->
    Collector = spawn(fun() -> collect([], []) end),
    Id = list_to_atom(lists:concat([?MODULE, "_", erlang:unique_integer([positive])])),
    ok = logger:add_handler(Id, ?MODULE, #{level => all, config => #{collector => Collector}}),
    {Collector, Id}.

%% @doc Stops collecting.
-spec stop(logs()) -> ok.
stop({Collector, Id}) ->
    ok = logger:remove_handler(Id),
    exit(Collector, kill),
    ok.

%% @doc The first line that matches the regular expression, now or within so many milliseconds. Raises `{not_logged, ...}' with
%% what was logged instead.
-spec await(logs(), iodata(), timeout()) -> line().
await({Collector, _Id} = Logs, Pattern, Timeout) ->
    Ref = make_ref(),
    Collector ! {await, Ref, self(), iolist_to_binary(Pattern)},
    receive
        {Ref, Line} -> Line
    after Timeout ->
        error({not_logged, iolist_to_binary(Pattern), lines(Logs)})
    end.

%% @doc All lines so far, oldest first.
-spec lines(logs()) -> [line()].
lines({Collector, _Id}) ->
    Ref = make_ref(),
    Collector ! {lines, Ref, self()},
    receive
        {Ref, Lines} -> Lines
    end.

%% @doc Forgets what was logged so far.
-spec clear(logs()) -> ok.
clear({Collector, _Id}) ->
    Collector ! clear,
    ok.

%% @private
-spec log(logger:log_event(), logger:handler_config()) -> ok.
log(#{level := Level} = Event, #{config := #{collector := Collector}}) ->
    Text = logger_formatter:format(Event, #{single_line => true, template => [msg]}),
    Collector ! {line, {Level, unicode:characters_to_binary(Text)}},
    ok.

collect(Lines, Waiting) ->
    receive
        {line, Line} ->
            {Served, Left} = lists:partition(fun({_, _, Pattern}) -> matches(Line, Pattern) end, Waiting),
            [From ! {Ref, Line} || {Ref, From, _} <- Served],
            collect([Line | Lines], Left);
        {await, Ref, From, Pattern} ->
            case [Line || Line <- lists:reverse(Lines), matches(Line, Pattern)] of
                [Line | _] ->
                    From ! {Ref, Line},
                    collect(Lines, Waiting);
                [] ->
                    collect(Lines, [{Ref, From, Pattern} | Waiting])
            end;
        clear ->
            collect([], Waiting);
        {lines, Ref, From} ->
            From ! {Ref, lists:reverse(Lines)},
            collect(Lines, Waiting)
    end.

matches({_Level, Text}, Pattern) ->
    re:run(Text, Pattern, [{capture, none}, unicode]) =:= match.
