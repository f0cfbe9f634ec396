%% @doc What operators ask for by the commands of RabbitMQ's tools, on the broker's side: finds the stream behind a queue, and the node of its
%% writer, has the work done there, and answers in JSON's own types.
-module(rabbitmq_stream_s3_operator).

-export([run/1, local/2, health/0]).
-export_type([request/0, answer/0]).

%% How long another node may take to answer beyond what the work itself takes.
-define(GRACE_MS, 5000).
-define(VERIFY_TIMEOUT_MS, 60000).
%% Of stalled streams, how many are told one by one.
-define(MOST_STALLED, 10).

-type queue() :: {VHost :: binary(), Name :: binary()}.
-type request() ::
    {gc, delete | dry_run}
    | health
    | {status | verify | force_cut | pause | resume | flush, node | queue(), timeout()}.
%% Of maps, lists, binaries, numbers, booleans and `null'.
-type answer() :: {ok, map()} | {error, not_found | failed, Text :: binary()} | {error, unhealthy, map()}.

%% @doc Does it. Takes as long as that takes.
-spec run(request()) -> answer().
run({gc, Mode}) ->
    case rabbitmq_stream_s3:gc(Mode) of
        {ok, Report} -> {ok, json(Report#{mode => Mode})};
        {error, Reason, _Report} -> failed(Reason);
        {error, Reason} -> failed(Reason)
    end;
run(health) ->
    health();
run({Command, node, Timeout}) ->
    local(Command, [node, Timeout]);
run({Command, {VHost, Name}, Timeout}) ->
    case lookup(VHost, Name) of
        {ok, Stream} -> for_stream(Command, Stream, Timeout);
        {error, Text} -> {error, not_found, Text}
    end.

lookup(VHost, Name) ->
    Said = fun(Text) -> {error, unicode:characters_to_binary(io_lib:format("queue ~ts in virtual host ~ts ~ts", [Name, VHost, Text]))} end,
    case rabbit_amqqueue:lookup(rabbit_misc:r(VHost, queue, Name)) of
        {ok, Queue} ->
            case amqqueue:get_type_state(Queue) of
                #{name := Id, leader_node := Leader, nodes := Nodes} ->
                    {ok, #{id => iolist_to_binary(Id), leader => writer(Queue, Leader), nodes => Nodes, vhost => VHost, queue => Name}};
                _ ->
                    Said("is no stream")
            end;
        {error, not_found} ->
            Said("does not exist")
    end.

%% After an election the queue's process is known before its state is.
writer(Queue, Leader) ->
    case amqqueue:get_pid(Queue) of
        Pid when is_pid(Pid) -> node(Pid);
        _ -> Leader
    end.

%% The marks belong to nodes, and the writer may move to any of them.
for_stream(Command, #{id := Id, nodes := Nodes}, _Timeout) when Command =:= pause; Command =:= resume ->
    Answers = [{Node, on(Node, Command, [Id], ?GRACE_MS)} || Node <- Nodes],
    case [{Node, Text} || {Node, {error, failed, Text}} <- Answers] of
        [] -> {ok, #{stream => Id, result => done(Command), nodes => [atom_to_binary(Node) || Node <- Nodes]}};
        [{Node, Text} | _] -> {error, failed, text("~ts: ~ts", [Node, Text])}
    end;
for_stream(Command, #{id := Id, leader := Leader, vhost := VHost, queue := Name}, Timeout) ->
    case on(Leader, Command, [Id, Timeout], Timeout) of
        {ok, Answer} -> {ok, Answer#{vhost => VHost, queue => Name, node => atom_to_binary(Leader)}};
        {error, _, _} = Failed -> Failed
    end.

on(Node, Command, Args, infinity) ->
    on_within(Node, Command, Args, infinity);
on(Node, Command, Args, Timeout) ->
    on_within(Node, Command, Args, Timeout + ?GRACE_MS).

on_within(Node, Command, Args, Timeout) ->
    try
        erpc:call(Node, ?MODULE, local, [Command, Args], Timeout)
    catch
        error:{exception, undef, _} -> {error, failed, <<"the plugin is not enabled there">>};
        error:{erpc, Reason} -> {error, failed, text("node ~ts does not answer: ~0tp", [Node, Reason])}
    end.

%% @doc What is done on the node itself.
-spec local(atom(), [term()]) -> answer().
local(status, [node, _Timeout]) ->
    #{streams := Streams} = Status = rabbitmq_stream_s3:status(),
    {ok, json(Status#{streams := [named(Stream) || Stream <- Streams]})};
local(status, [Id, _Timeout]) ->
    {ok, json(named(rabbitmq_stream_s3:status(Id)))};
local(verify, [Id, _Timeout]) ->
    case rabbitmq_stream_s3_verify:run(Id, ?VERIFY_TIMEOUT_MS) of
        {ok, #{ok := true} = Verified} ->
            {ok, json(Verified)};
        {ok, #{findings := Findings} = Verified} ->
            Message = [["wrong: ", Finding, $\n] || Finding <- Findings],
            {error, unhealthy, (json(Verified))#{message => unicode:characters_to_binary(Message)}};
        {error, Reason} -> failed(Reason)
    end;
local(force_cut, [Id, _Timeout]) ->
    case rabbitmq_stream_s3:force_cut(Id) of
        ok -> {ok, #{stream => Id, result => <<"cut">>}};
        {error, empty} -> {ok, #{stream => Id, result => <<"nothing to cut">>}}
    end;
local(pause, [node, _Timeout]) -> marked(pause, rabbitmq_stream_s3:pause());
local(pause, [Id]) -> marked(pause, rabbitmq_stream_s3:pause(Id));
local(resume, [node, _Timeout]) -> marked(resume, rabbitmq_stream_s3:resume());
local(resume, [Id]) -> marked(resume, rabbitmq_stream_s3:resume(Id));
local(flush, [node, Timeout]) ->
    case rabbitmq_stream_s3:flush(node, Timeout) of
        {error, not_running} -> not_running();
        {error, Reason} -> {error, failed, text("which streams are to be tiered could not be found out: ~0tP", [Reason, 20])};
        Flushed -> {ok, #{streams => [#{stream => Id, result => flushed(Result)} || {Id, Result} <- Flushed]}}
    end;
local(flush, [Id, Timeout]) ->
    case rabbitmq_stream_s3:flush(Id, Timeout) of
        ok -> {ok, #{streams => [#{stream => Id, result => flushed(ok)}]}};
        {error, _} = Error -> {error, failed, text("~ts: ~ts", [Id, flushed(Error)])}
    end.

marked(Command, ok) -> {ok, #{result => done(Command)}};
marked(_Command, {error, not_running}) -> not_running().

not_running() -> {error, failed, <<"the plugin does not run on this node">>}.

done(pause) -> <<"paused">>;
done(resume) -> <<"resumed">>.

flushed(ok) -> <<"all that was committed is tiered">>;
flushed({error, timeout}) -> <<"not done in time; it goes on, and the status says what stands in the way">>;
flushed({error, reader_down}) -> <<"it is not tiered from this node, or was just interrupted">>;
flushed({error, paused}) -> <<"it is paused">>.

%% @doc Whether tiering goes on on this node: not where the store cannot be used, nor where a stream fails or is paused. Asks only readers of
%% streams that are stalled.
-spec health() -> {ok, map()} | {error, unhealthy, map()}.
health() ->
    Stalled = [{Since, Id, Row} || {Id, #{stalled_since_timestamp_ms := Since} = Row} <- rabbitmq_stream_s3_gauges:streams(), Since > 0],
    Causes = store_cause(rabbitmq_stream_s3_store:status()) ++ [cause(S) || S <- lists:sublist(lists:sort(Stalled), ?MOST_STALLED)],
    case lists:sort(fun(#{since := A}, #{since := B}) -> A =< B end, Causes) of
        [] ->
            Streams = length(rabbitmq_stream_s3_gauges:streams()),
            {ok, #{result => <<"ok">>, streams => Streams, message => text("tiering goes on, ~b streams are tiered from this node", [Streams])}};
        [#{since := Since, cause := Cause} = First | _] = All ->
            Of =
                case First of
                    #{stream := Id} -> [" of stream ", Id];
                    #{} -> ""
                end,
            More =
                case length(Stalled) of
                    N when N > 1 -> text(" (~b streams are stalled)", [N]);
                    _ -> <<>>
                end,
            Message = text("tiering~ts is stalled since ~ts, because ~ts~ts", [Of, moment(Since), Cause, More]),
            {error, unhealthy, #{result => <<"stalled">>, message => Message, stalled => json(All), streams_stalled => length(Stalled)}}
    end.

store_cause(#{state := failing, since := Since, cause := Cause}) -> [#{since => Since, cause => Cause}];
store_cause(#{}) -> [].

cause({Since, Id, #{vhost := VHost, queue := Queue}}) ->
    Cause =
        case rabbitmq_stream_s3:status(Id) of
            #{stalled := #{cause := Text}} -> Text;
            #{} -> <<"its reader is too busy to say why">>
        end,
    #{since => Since, cause => Cause, stream => Id, vhost => VHost, queue => Queue}.

%% --- terms -----------------------------------------------------------------------------------------------------------

named(#{stream := Id} = Status) ->
    case lists:keyfind(Id, 1, rabbitmq_stream_s3_gauges:streams()) of
        {_, #{vhost := VHost, queue := Queue}} -> Status#{vhost => VHost, queue => Queue};
        false -> Status
    end.

failed(Reason) ->
    {error, failed, rabbitmq_stream_s3_problems:text(Reason)}.

%% Terms of a status as JSON has them. Ranges and the like become objects, so that no program has to take texts apart.
json({First, Next}) when is_integer(First), is_integer(Next) -> #{first => First, next => Next};
json({By, Since}) when is_atom(By), is_integer(Since) -> #{by => atom_to_binary(By), since => Since};
json({error, Reason}) -> #{error => text("~0tp", [Reason])};
json(Map) when is_map(Map) -> #{json_key(Key) => json(Value) || Key := Value <- Map};
json(List) when is_list(List) ->
    case io_lib:printable_unicode_list(List) andalso List =/= [] of
        true -> unicode:characters_to_binary(List);
        false -> [json(Element) || Element <- List]
    end;
json(Value) when is_binary(Value); is_number(Value); is_boolean(Value) -> Value;
json(Unset) when Unset =:= none; Unset =:= undefined -> null;
json(Atom) when is_atom(Atom) -> atom_to_binary(Atom);
json(Other) -> text("~0tp", [Other]).

json_key(Key) when is_atom(Key); is_binary(Key) -> Key;
json_key(Key) -> text("~0tp", [Key]).

moment(Ms) -> calendar:system_time_to_rfc3339(Ms, [{unit, millisecond}, {offset, "Z"}]).

text(Format, Args) -> unicode:characters_to_binary(io_lib:format(Format, Args)).
