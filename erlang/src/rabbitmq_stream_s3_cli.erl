%% @doc The commands of this plugin in RabbitMQ's own tools: what they are called with, and how their answers are told. Runs in the VM of
%% the tool; the work is done on the broker by {@link rabbitmq_stream_s3_operator}.
%%
%% Answers are maps of JSON's own types. With `--formatter json' they are printed as they are; otherwise as text.
-module(rabbitmq_stream_s3_cli).

-export([scopes/1, usage/1, usage_additional/1, description/1, switches/1]).
-export([banner/3, validate/3, merge_defaults/3, run/3, output/3]).
-export_type([command/0]).

-define(OPERATOR, rabbitmq_stream_s3_operator).
-define(FLUSH_TIMEOUT_S, 60).
%% What the tools end with, as in BSD's sysexits.
-define(EXIT_UNAVAILABLE, 69).
-define(EXIT_SOFTWARE, 70).
-define(EXIT_DATAERR, 65).

-type command() :: status | gc | verify | force_cut | pause | resume | flush | health.
-type options() :: #{atom() => term()}.

%% @doc The tools that have the command.
-spec scopes(command()) -> [atom()].
scopes(health) -> [streams, diagnostics];
scopes(_Command) -> [streams].

%% @doc How to call it.
-spec usage(command()) -> binary().
usage(status) -> <<"stream_s3_status [--vhost <vhost>] [<stream>]">>;
usage(gc) -> <<"stream_s3_gc [--mode <dry_run|delete>]">>;
usage(verify) -> <<"stream_s3_verify [--vhost <vhost>] <stream>">>;
usage(force_cut) -> <<"stream_s3_force_cut [--vhost <vhost>] <stream>">>;
usage(pause) -> <<"stream_s3_pause [--vhost <vhost>] [<stream>]">>;
usage(resume) -> <<"stream_s3_resume [--vhost <vhost>] [<stream>]">>;
usage(flush) -> <<"stream_s3_flush [--vhost <vhost>] [--timeout <seconds>] [<stream>]">>;
usage(health) -> <<"stream_s3_health">>.

%% @doc What the arguments are.
-spec usage_additional(command()) -> [[binary()]].
usage_additional(gc) ->
    [[<<"--mode">>, <<"dry_run (the default) counts only, delete deletes">>]];
usage_additional(verify) ->
    [
        [<<"<stream>">>, <<"name of the queue; its persisted manifest is read, its objects are listed, none of them is read">>],
        [<<"stream-s3 verify">>, <<"the command that reads every byte and checks it, on any machine that reaches the bucket">>]
    ];
usage_additional(health) ->
    [];
usage_additional(force_cut) ->
    [[<<"<stream>">>, <<"name of the queue">>]];
usage_additional(Command) when Command =:= status; Command =:= pause; Command =:= resume; Command =:= flush ->
    [[<<"<stream>">>, <<"name of the queue; all streams of the node where it is left out">>]].

%% @doc One line of what it does.
-spec description(command()) -> binary().
description(status) -> <<"Shows what is tiered, what is under way, and what fails">>;
description(gc) -> <<"Looks for objects in the bucket that nothing refers to, and counts or deletes them">>;
description(verify) -> <<"Compares what the persisted manifest of a stream lists with the objects in the bucket">>;
description(force_cut) -> <<"Ends the fragment of a stream that is being assembled, so that it is uploaded now">>;
description(pause) -> <<"Stops tiering; what has been cut is still uploaded">>;
description(resume) -> <<"Goes on with tiering">>;
description(flush) -> <<"Tiers all that is committed now, and waits for it">>;
description(health) -> <<"Succeeds unless tiering is stalled on the node, and says since when and why">>.

%% @doc Options besides those that all commands have.
-spec switches(command()) -> [{atom(), atom()}].
switches(gc) -> [{mode, string}];
switches(_Command) -> [].

%% @doc What is printed before; nothing, so that the output is the answer alone.
-spec banner(command(), [binary()], options()) -> nil.
banner(_Command, _Args, _Options) -> nil.

%% @doc Whether the arguments make sense.
-spec validate(command(), [binary()], options()) -> ok | {validation_failure, term()}.
validate(gc, [], #{mode := Mode}) when Mode =/= <<"dry_run">>, Mode =/= <<"delete">> ->
    {validation_failure, {bad_argument, <<"--mode must be dry_run or delete">>}};
validate(_Command, [_, _ | _], _Options) ->
    {validation_failure, too_many_args};
validate(Command, [_], _Options) when Command =:= gc; Command =:= health ->
    {validation_failure, too_many_args};
validate(Command, [], _Options) when Command =:= verify; Command =:= force_cut ->
    {validation_failure, not_enough_args};
validate(_Command, _Args, _Options) ->
    ok.

%% @doc The arguments and options with what was left out.
-spec merge_defaults(command(), [binary()], options()) -> {[binary()], options()}.
merge_defaults(_Command, Args, Options) ->
    {Args, maps:merge(#{vhost => <<"/">>, mode => <<"dry_run">>}, Options)}.

%% @doc Has the broker do it.
-spec run(command(), [binary()], options()) ->
    {ok, map()} | {unhealthy, map()} | {error, Code :: pos_integer(), binary()} | {badrpc, term()}.
run(Command, Args, #{node := Node, vhost := VHost} = Options) ->
    Timeout = timeout(Command, Options),
    Request = request(Command, Args, VHost, Timeout, Options),
    case rabbit_misc:rpc_call(Node, ?OPERATOR, run, [Request], limit(Timeout)) of
        {ok, Answer} -> {ok, Answer};
        {error, not_found, Text} -> {error, ?EXIT_DATAERR, Text};
        {error, unhealthy, Answer} -> {unhealthy, Answer};
        {error, failed, Text} -> {error, ?EXIT_SOFTWARE, Text};
        {badrpc, {'EXIT', {undef, _}}} -> {error, ?EXIT_UNAVAILABLE, <<"the plugin rabbitmq_stream_s3 is not enabled on that node">>};
        {badrpc, _} = Failed -> Failed
    end.

request(gc, [], _VHost, _Timeout, #{mode := <<"delete">>}) -> {gc, delete};
request(gc, [], _VHost, _Timeout, #{mode := <<"dry_run">>}) -> {gc, dry_run};
request(health, [], _VHost, _Timeout, _Options) -> health;
request(Command, [], _VHost, Timeout, _Options) -> {Command, node, Timeout};
request(Command, [Queue], VHost, Timeout, _Options) -> {Command, {VHost, Queue}, Timeout}.

%% In milliseconds.
timeout(_Command, #{timeout := Seconds}) when is_integer(Seconds), Seconds > 0 -> Seconds * 1000;
timeout(flush, _Options) -> ?FLUSH_TIMEOUT_S * 1000;
timeout(_Command, _Options) -> infinity.

%% The broker is to say what took so long.
limit(infinity) -> infinity;
limit(Timeout) -> Timeout + 5000.

%% @doc What the tool prints, and how it ends.
-spec output(command(), term(), options()) -> term().
output(_Command, {ok, Answer}, #{formatter := <<"json">>}) -> {ok, Answer};
output(Command, {ok, Answer}, _Options) -> {ok, unicode:characters_to_binary(text(Command, Answer))};
output(_Command, {unhealthy, Answer}, #{formatter := <<"json">>}) -> {error, check_failed, Answer};
output(_Command, {unhealthy, #{message := Text}}, _Options) -> {error, ?EXIT_UNAVAILABLE, Text};
output(_Command, Other, _Options) -> Other.

%% --- text ------------------------------------------------------------------------------------------------------------

text(status, #{store := Store, streams := Streams}) ->
    [store(Store), [stream(Stream) || Stream <- Streams]];
text(status, Stream) ->
    stream(Stream);
text(gc, #{mode := Mode, garbage := Garbage, reclaimed := #{objects := Objects, bytes := Bytes}} = Report) ->
    [
        [io_lib:format("~ts: ~b objects, ~b bytes~n", [Kind, N, B]) || Kind := #{objects := N, bytes := B} <- Garbage],
        io_lib:format("~ts: ~b objects deleted, ~b bytes, ~b failed", [Mode, Objects, Bytes, maps:get(failed, Report, 0)])
    ];
text(verify, #{stream := Id, ok := Ok, fragments := Fragments, groups := Groups, bytes := Bytes, findings := Findings}) ->
    [
        [["wrong: ", Finding, $\n] || Finding <- Findings],
        io_lib:format("~ts: ~ts, ~b fragments, ~b groups, ~b bytes; sizes compared, contents not read", [
            Id, case Ok of true -> "ok"; false -> "wrong" end, Fragments, Groups, Bytes
        ])
    ];
text(health, #{message := Text}) ->
    Text;
text(flush, #{streams := Streams}) ->
    lists:join($\n, [[Id, ": ", Result] || #{stream := Id, result := Result} <- Streams]);
text(_Command, #{result := Result}) ->
    Result.

store(#{state := <<"failing">>, cause := Cause}) -> ["store: failing: ", Cause, $\n];
store(#{state := State}) -> ["store: ", State, $\n].

stream(#{stream := Id, state := State} = Status) ->
    Known = [
        {"epoch", number(epoch, Status)},
        {"local", range(local, Status)},
        {"tiered", range(remote, Status)},
        {"behind", number(behind, Status)},
        {"in flight", number(transfers_in_flight, Status)},
        {"lag", number(lag_bytes, Status)}
    ],
    Words = [[", ", Name, $\s, Value] || {Name, Value} <- Known, Value =/= none],
    [Id, name(Status), ": ", State, Words, $\n, [problem(P) || P <- maps:get(problems, Status, [])]].

name(#{vhost := VHost, queue := Queue}) when Queue =/= <<>> -> io_lib:format(" (~ts in ~ts)", [Queue, VHost]);
name(_Status) -> "".

number(Key, Status) ->
    case Status of
        #{Key := N} when is_integer(N) -> integer_to_list(N);
        #{} -> none
    end.

range(Key, Status) ->
    case Status of
        #{Key := #{first := First, next := Next}} -> io_lib:format("~b..~b", [First, Next]);
        #{Key := Word} when is_binary(Word) -> Word;
        #{} -> none
    end.

problem(#{doing := Doing, cause := Cause, since := Since}) ->
    io_lib:format("  ~ts fails since ~ts: ~ts~n", [Doing, calendar:system_time_to_rfc3339(Since, [{unit, millisecond}]), Cause]).
