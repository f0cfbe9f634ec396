%% @doc One line that tells how far something is: a bar that is drawn anew on a terminal, a line at every quarter elsewhere.
-module(stream_s3_demo_progress).

-export([new/2, update/3, finish/2, break/1]).
-export_type([progress/0]).

-define(BAR_WIDTH, 30).
-define(REDRAW_MS, 100).

-record(progress, {
    title :: string(),
    total :: pos_integer(),
    terminal :: boolean(),
    %% On a terminal: when the bar was drawn last, in milliseconds of monotonic time. Elsewhere: quarters told.
    last :: integer()
}).
-opaque progress() :: #progress{}.

%% @doc `Total' is the amount, in any unit, at which all is done.
-spec new(string(), pos_integer()) -> progress().
new(Title, Total) ->
    Terminal = is_terminal(),
    Last =
        case Terminal of
            true -> now_ms() - ?REDRAW_MS;
            false -> 0
        end,
    #progress{title = Title, total = Total, terminal = Terminal, last = Last}.

%% @doc Shows the amount done so far and a remark, which is asked for only when it is shown.
-spec update(non_neg_integer(), fun(() -> iodata()), progress()) -> progress().
update(Done, Remark, #progress{terminal = true, last = Last} = Progress) ->
    case now_ms() of
        Now when Now - Last >= ?REDRAW_MS ->
            io:put_chars(["\r", line(Done, Remark(), Progress), "\e[K"]),
            Progress#progress{last = Now};
        _ ->
            Progress
    end;
update(Done, Remark, #progress{terminal = false, last = Told, total = Total} = Progress) ->
    case min(3, Done * 4 div Total) of
        Quarter when Quarter > Told ->
            io:put_chars([line(Done, Remark(), Progress), "\n"]),
            Progress#progress{last = Quarter};
        _ ->
            Progress
    end.

%% @doc All is done; the next output starts on a line of its own.
-spec finish(iodata(), progress()) -> ok.
finish(Remark, #progress{terminal = true, total = Total} = Progress) ->
    io:put_chars(["\r", line(Total, Remark, Progress), "\e[K\n"]);
finish(Remark, #progress{terminal = false, total = Total} = Progress) ->
    io:put_chars([line(Total, Remark, Progress), "\n"]).

%% @doc It ends here, undone; the next output starts on a line of its own.
-spec break(progress()) -> ok.
break(#progress{terminal = true}) -> io:put_chars("\n");
break(#progress{terminal = false}) -> ok.

line(Done0, Remark, #progress{title = Title, total = Total, terminal = Terminal}) ->
    Done = min(Done0, Total),
    Percent = io_lib:format("~3b%", [Done * 100 div Total]),
    case Terminal of
        true ->
            Full = Done * ?BAR_WIDTH div Total,
            Bar = [lists:duplicate(Full, $#), lists:duplicate(?BAR_WIDTH - Full, $.)],
            [string:pad(Title, 10), " [", Bar, "] ", Percent, "  ", Remark];
        false ->
            [string:pad(Title, 10), " ", Percent, "  ", Remark]
    end.

%% io:columns/0 knows of no terminal in a VM without a shell. What does know is not documented, so a release without it gets
%% plain lines.
is_terminal() ->
    try prim_tty:isatty(stdout) of
        Answer -> Answer =:= true
    catch
        error:_ -> false
    end.

now_ms() -> erlang:monotonic_time(millisecond).
