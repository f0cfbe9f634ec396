%% @doc Three real brokers in a cluster, whose nodes come and go while streams are written. After each of these things the bucket has
%% every record that was confirmed, in order, none twice, and nothing that nobody wrote.
%%
%% Writers are connected to a node that stays where that is possible. Then not one publish may fail: a broker without the plugin could
%% not do better. That it does no better anywhere else is shown by the same script on brokers that do not even have the plugin: what
%% writers saw there, and how often, is the most that they may see with it.
-module(rabbitmq_stream_s3_three_nodes_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-export([all/0, groups/0, suite/0, init_per_suite/1, end_per_suite/1, init_per_group/2, end_per_group/2]).
-export([
    the_leader_is_moved/1,
    the_node_of_the_leader_is_killed/1,
    the_node_of_the_leader_is_stopped/1,
    a_member_is_removed_and_added/1,
    the_node_of_the_leader_is_cut_off/1,
    all_nodes_are_restarted_with_a_new_version_of_the_plugin/1,
    all_nodes_are_restarted/1,
    a_stream_that_is_not_tiered_any_more_is_known_on_no_node/1,
    a_deleted_queue_takes_its_tier_along_from_any_node/1,
    producers_see_no_error_that_they_do_not_see_without_the_plugin/1
]).

-define(QUEUE, <<"stream">>).
-define(WAIT_MS, 60000).
%% The code of AMQP with which a broker that stops closes.
-define(CONNECTION_FORCED, 320).
%% And that for a channel that has crashed.
-define(INTERNAL_ERROR, 541).
%% The first number of a writer besides the other one.
-define(CUT_OFF, 1 bsl 40).

suite() ->
    [{timetrap, {minutes, 8}}].

all() ->
    [{group, without_plugin}, {group, with_plugin}].

groups() ->
    Deep = os:getenv("STREAM_S3_DEEP") =/= false,
    Script = [
        the_leader_is_moved,
        the_node_of_the_leader_is_killed,
        the_node_of_the_leader_is_stopped,
        a_member_is_removed_and_added,
        the_node_of_the_leader_is_cut_off
    ],
    [
        {without_plugin, [], Script ++ [all_nodes_are_restarted]},
        {with_plugin, [],
            Script ++ [all_nodes_are_restarted_with_a_new_version_of_the_plugin] ++ [all_nodes_are_restarted || Deep] ++
                [producers_see_no_error_that_they_do_not_see_without_the_plugin, a_stream_that_is_not_tiered_any_more_is_known_on_no_node,
                    a_deleted_queue_takes_its_tier_along_from_any_node]}
    ].

init_per_suite(Config) ->
    {ok, Dir} = stream_s3_temp:new("brokers"),
    Tier = stream_s3_tier:start(filename:join(Dir, "store")),
    Seen = ets:new(seen, [public, {heir, whereis(init), none}]),
    [{dir, Dir}, {tier, Tier}, {seen, Seen} | Config].

end_per_suite(Config) ->
    ok = stream_s3_tier:stop(?config(tier, Config)),
    stream_s3_temp:remove(?config(dir, Config)).

init_per_group(Group, Config) ->
    Dir = filename:join(?config(dir, Config), Group),
    Names = ["a", "b", "c"],
    Network = stream_s3_network:start(filename:join(Dir, "network"), Names),
    New = [
        {Name, stream_s3_broker:new(maps:merge(options(Group, Name, Dir), stream_s3_network:options(Name, Network)))}
     || Name <- Names
    ],
    ok = stream_s3_network:listen(Network, maps:from_list(New)),
    Conf = [
        plugin_conf(Group, Config),
        "cluster_formation.peer_discovery_backend = classic_config\n"
        | [
            io_lib:format("cluster_formation.classic_config.nodes.~b = ~ts~n", [N, stream_s3_broker:node(Broker)])
         || {N, {_, Broker}} <- lists:enumerate(New)
        ]
    ],
    Brokers = [stream_s3_broker:set_conf([Conf, stream_s3_network:conf(Name, Network)], Broker) || {Name, Broker} <- New],
    ok = stream_s3_broker:start_all(Brokers),
    ok = stream_s3_tier:await(three_nodes, ?WAIT_MS, fun() ->
        lists:all(fun(B) -> length(stream_s3_broker:call(B, rabbit_nodes, list_running, [])) =:= 3 end, Brokers)
    end),
    Channel = stream_s3_amqp:open(stream_s3_broker:port(amqp, hd(Brokers))),
    ok = stream_s3_amqp:declare(Channel, ?QUEUE, [{<<"x-stream-s3-fragment-target-size">>, long, 200000}]),
    ok = stream_s3_amqp:close(Channel),
    ok = lists:foreach(fun remember_coordinator/1, Brokers),
    StreamId = stream_s3_tier:stream_id(hd(Brokers), ?QUEUE),
    Written = ets:new(written, [public, {heir, whereis(init), none}]),
    true = ets:insert(Written, {all, #{confirmed => [], lost => [], next => 0}}),
    [
        {group, Group}, {group_dir, Dir}, {network, Network},
        {names, maps:from_list([{stream_s3_broker:node(B), Name} || {Name, B} <- New])},
        {brokers, Brokers}, {stream, StreamId}, {written, Written}
        | Config
    ].

options(with_plugin, Name, Dir) ->
    #{name => Name, dir => filename:join(Dir, Name)};
options(without_plugin, Name, Dir) ->
    #{name => Name, dir => filename:join(Dir, Name), plugins => [rabbitmq_stream], plugin_dir => none}.

plugin_conf(with_plugin, Config) ->
    stream_s3_tier:conf(?config(tier, Config), #{gc_min_age_ms => 1, persist_interval_ms => 100, reconciliation_interval_ms => 5000});
plugin_conf(without_plugin, _Config) ->
    "".

end_per_group(_Group, Config) ->
    lists:foreach(fun stream_s3_broker:stop/1, ?config(brokers, Config)),
    ok = stream_s3_network:stop(?config(network, Config)).

%% The first stream brings the coordinator of streams into being. Ra notes the names of its servers in a table that is on disk half a
%% second later at the earliest: a node that is killed before forgets its coordinator for good, and the cluster is one member short.
remember_coordinator(Broker) ->
    Registered = fun() -> stream_s3_broker:call(Broker, ra_directory, uid_of, [coordination, rabbit_stream_coordinator]) =/= undefined end,
    ok = stream_s3_tier:await({coordinator, stream_s3_broker:node(Broker)}, ?WAIT_MS, Registered),
    lists:foreach(fun(Table) -> ok = stream_s3_broker:call(Broker, dets, sync, [Table]) end, stream_s3_broker:call(Broker, dets, all, [])).

%% --- cases -----------------------------------------------------------------------------------------------------------

the_leader_is_moved(Config) ->
    {Leader, [Next | _] = Others} = leader(Config),
    undisturbed(?FUNCTION_NAME, Config, Others, fun() -> move(Config, Leader, Next, 10) end).

%% RabbitMQ prefers the node that it is asked to prefer only if that one is not behind another, which is luck while somebody writes.
move(Config, Leader, Next, Tries) when Tries > 0 ->
    Epoch = epoch(Leader),
    Args = ["restart_stream", ?QUEUE, "--preferred-leader-node", atom_to_list(stream_s3_broker:node(Next))],
    _ = stream_s3_broker:cli(Leader, "rabbitmq-streams", Args),
    ok = stream_s3_tier:await(another_epoch, ?WAIT_MS, fun() -> epoch(Leader) > Epoch end),
    ok = await_members(Config, 3),
    case stream_s3_tier:writer(Leader, ?QUEUE) =:= stream_s3_broker:node(Leader) of
        true -> move(Config, Leader, Next, Tries - 1);
        false -> ok
    end.

epoch(Broker) ->
    #{epoch := Epoch} = stream_s3_tier:state(Broker, ?QUEUE),
    Epoch.

the_node_of_the_leader_is_killed(Config) ->
    {Leader, Others} = leader(Config),
    undisturbed(?FUNCTION_NAME, Config, Others, fun() ->
        ok = stream_s3_broker:kill(Leader),
        ok = await_leader(Config, fun(Node) -> Node =/= stream_s3_broker:node(Leader) end),
        ok = stream_s3_broker:start(Leader)
    end).

the_node_of_the_leader_is_stopped(Config) ->
    {Leader, Others} = leader(Config),
    undisturbed(?FUNCTION_NAME, Config, Others, fun() ->
        ok = stream_s3_broker:stop(Leader),
        ok = await_leader(Config, fun(Node) -> Node =/= stream_s3_broker:node(Leader) end),
        ok = stream_s3_broker:start(Leader)
    end).

a_member_is_removed_and_added(Config) ->
    {Leader, [Member | _] = Others} = leader(Config),
    Node = atom_to_list(stream_s3_broker:node(Member)),
    undisturbed(?FUNCTION_NAME, Config, [Leader | tl(Others)], fun() ->
        _ = stream_s3_broker:cli(Leader, "rabbitmq-streams", ["delete_replica", ?QUEUE, Node]),
        ok = await_members(Config, 2),
        _ = stream_s3_broker:cli(Leader, "rabbitmq-streams", ["add_replica", ?QUEUE, Node]),
        ok = await_members(Config, 3)
    end).

%% Nothing reaches it and nothing leaves it, so it goes on as leader until it finds out, and somebody who is connected to it goes on to
%% write. What it takes then and cannot replicate is in no log afterwards, and must not be in the bucket either.
the_node_of_the_leader_is_cut_off(Config) ->
    {Leader, Others} = leader(Config),
    Node = stream_s3_broker:node(Leader),
    #{Node := Name} = ?config(names, Config),
    Writer = stream_s3_writer:start([stream_s3_broker:port(amqp, Leader)], ?QUEUE, ?CUT_OFF, 10),
    ok = stream_s3_writer:await(Writer),
    ?assertMatch([{Name, _}, {Name, _}], stream_s3_network:replicating(?config(network, Config))),
    undisturbed(?FUNCTION_NAME, Config, Others, fun() ->
        ok = stream_s3_network:cut(?config(network, Config), Name),
        ok = stream_s3_tier:await("a chunk that is not replicated", ?WAIT_MS, fun() ->
            #{offset := Last, committed_offset := Committed} =
                stream_s3_broker:call(Leader, osiris_counters, overview, [{osiris_writer, {resource, <<"/">>, queue, ?QUEUE}}]),
            Last > Committed
        end),
        ok = await_leader_at(Others, fun(New) -> New =/= Node end),
        ?assertEqual([Node], stream_s3_broker:call(Leader, rabbit_nodes, list_running, [])),
        ok = stream_s3_network:heal(?config(network, Config)),
        ok = stream_s3_tier:await(three_nodes, ?WAIT_MS, fun() ->
            lists:all(fun(B) -> length(stream_s3_broker:call(B, rabbit_nodes, list_running, [])) =:= 3 end, [Leader | Others])
        end),
        ok = await_members(Config, 3),
        #{errors := Errors} = Outcome = stream_s3_writer:stop(Writer),
        ok = seen(cut_off, Errors, Config),
        written(Config, Outcome)
    end).

all_nodes_are_restarted_with_a_new_version_of_the_plugin(Config) ->
    rolling(Config, fun(Broker) -> stream_s3_broker:set_plugin_dir(new_version(Config), Broker) end),
    [
        ?assertMatch({rabbitmq_stream_s3, _, "0.99.0"}, lists:keyfind(rabbitmq_stream_s3, 1, stream_s3_broker:call(Broker, application, which_applications, [])))
     || Broker <- ?config(brokers, Config)
    ].

all_nodes_are_restarted(Config) ->
    rolling(Config, fun(Broker) -> Broker end).

%% Of what each case in front of this one has remembered, in both groups.
producers_see_no_error_that_they_do_not_see_without_the_plugin(Config) ->
    Seen = maps:from_list(ets:tab2list(?config(seen, Config))),
    ct:pal("seen by writers: ~0p", [Seen]),
    Whats = [What || {with_plugin, What} <- maps:keys(Seen)],
    ?assertEqual(7, length(Whats)),
    ?assertEqual([], [
        {What, With, Without}
     || What <- Whats,
        #{{with_plugin, What} := With, {without_plugin, What} := Without} <- [Seen],
        lists:usort(With) -- lists:usort(Without) =/= [] orelse length(With) > most(What, length(Without))
    ]).

%% Somebody who writes to a node that is cut off is told after some seconds each time, and whether once more depends on how long it takes.
most(cut_off, Without) -> Without + 1;
%% One for each stop of the node that a writer is connected to; to which ones it comes on its way through the list is luck. More than one
%% for each of the three nodes are refused in both groups.
most(restart, Without) -> max(Without, 3);
most(_, Without) -> Without.

a_stream_that_is_not_tiered_any_more_is_known_on_no_node(Config) ->
    {Leader, _Others} = leader(Config),
    StreamId = ?config(stream, Config),
    Ranges = fun() -> [stream_s3_broker:call(Broker, rabbitmq_stream_s3, get_range, [StreamId]) || Broker <- ?config(brokers, Config)] end,
    ok = stream_s3_tier:await(known, ?WAIT_MS, fun() -> [{0, Next}, {0, Next}, {0, Next}] = Ranges(), Next > 0 end),
    Before = Ranges(),
    Policy = ["set_policy", "tiered", ["^", ?QUEUE, "$"], "{\"stream-s3-tiered\": \"none\"}", "--apply-to", "queues"],
    _ = stream_s3_broker:cli(Leader, "rabbitmqctl", [iolist_to_binary(Arg) || Arg <- Policy]),
    ok = stream_s3_tier:await(forgotten, ?WAIT_MS, fun() -> lists:usort(Ranges()) =:= [{error, unresolved}] end),
    _ = stream_s3_broker:cli(Leader, "rabbitmqctl", ["clear_policy", "tiered"]),
    ok = stream_s3_tier:await(known_again, ?WAIT_MS, fun() -> Ranges() =:= Before end).

a_deleted_queue_takes_its_tier_along_from_any_node(Config) ->
    {_Leader, [Other | _]} = leader(Config),
    StreamId = ?config(stream, Config),
    ?assertMatch([_ | _], stream_s3_tier:keys(?config(tier, Config), StreamId)),
    Channel = stream_s3_amqp:open(stream_s3_broker:port(amqp, Other)),
    ok = stream_s3_amqp:delete(Channel, ?QUEUE),
    ok = stream_s3_amqp:close(Channel),
    ok = stream_s3_tier:await("no object left", ?WAIT_MS, fun() -> stream_s3_tier:keys(?config(tier, Config), StreamId) =:= [] end).

%% --- writing and comparing -------------------------------------------------------------------------------------------

%% A writer that is connected to one of these brokers, which stay, sees no error.
undisturbed(What, Config, Stay, Fun) ->
    #{errors := Errors} = written_during(Config, Stay, Fun),
    ok = seen(What, Errors, Config),
    ?assertEqual([], Errors),
    compare(Config).

%% Restarts each node in turn. A writer loses its connection when its own node goes, and nothing else.
rolling(Config, Change) ->
    Brokers = ?config(brokers, Config),
    #{errors := Errors} = written_during(Config, Brokers, fun() ->
        lists:foreach(
            fun(Broker) ->
                ok = stream_s3_broker:stop(Broker),
                ok = stream_s3_broker:start(Change(Broker)),
                %% What an operator waits for before the next one.
                ok = await_members(Config, 3)
            end,
            Brokers
        )
    end),
    {Unlucky, Own} = lists:partition(fun(Error) -> kind(Error) =:= {closed, [?INTERNAL_ERROR]} end, Errors),
    ok = seen(restart, Own, Config),
    ?assert(length(Own) =< length(Brokers), Errors),
    %% With the plugin or without: where the first message of a connection meets a coordinator of streams that is about to stop, RabbitMQ's
    %% channel dies of the answer (in rabbit_stream_queue:init/1, of {error, shutdown}).
    ?assert(length(Unlucky) =< length(Brokers), Errors),
    compare(Config).

%% Remembers what a writer has seen: how often what kind of error.
seen(What, Errors, Config) ->
    true = ets:insert(?config(seen, Config), {{?config(group, Config), What}, [kind(Error) || Error <- Errors]}),
    ok.

%% A connection that a broker closes as it stops is noticed by its own end, by the closing, or by the absence of its processes: by
%% luck. What a broker closes for another reason has another code.
kind({exit, Reason}) ->
    case lists:usort(codes(Reason)) -- [?CONNECTION_FORCED] of
        [] -> connection_ended;
        Codes -> {closed, Codes}
    end;
kind(Other) ->
    Other.

codes({server_initiated_close, Code, _Text}) -> [Code];
codes(Term) when is_tuple(Term) -> codes(tuple_to_list(Term));
codes([Head | Tail]) -> codes(Head) ++ codes(Tail);
codes(_) -> [].

written_during(Config, Brokers, Fun) ->
    [{all, #{next := First}}] = ets:lookup(?config(written, Config), all),
    Writer = stream_s3_writer:start([stream_s3_broker:port(amqp, Broker) || Broker <- Brokers], ?QUEUE, First),
    %% Else its first message may meet what is about to happen.
    ok = stream_s3_writer:await(Writer),
    try
        ok = Fun()
    catch
        Class:Reason:Stack ->
            %% It would go on into the next case.
            _ = stream_s3_writer:stop(Writer),
            erlang:raise(Class, Reason, Stack)
    end,
    Outcome = #{next := Next} = stream_s3_writer:stop(Writer),
    ?assertNotEqual([], maps:get(confirmed, Outcome)),
    ok = written(Config, Outcome),
    [{all, All}] = ets:lookup(?config(written, Config), all),
    true = ets:insert(?config(written, Config), {all, All#{next := Next}}),
    Outcome.

%% Remembers what a writer has written.
written(Config, #{confirmed := MoreConfirmed, lost := MoreLost}) ->
    [{all, #{confirmed := Confirmed, lost := Lost} = All}] = ets:lookup(?config(written, Config), all),
    true = ets:insert(?config(written, Config), {all, All#{confirmed := Confirmed ++ MoreConfirmed, lost := Lost ++ MoreLost}}),
    ok.

compare(Config) ->
    %% A writer that was deposed while it was cut off takes a moment to end, and has nothing to flush.
    ok = await_members(Config, 3),
    case ?config(group, Config) of
        with_plugin -> compare_bucket(Config);
        without_plugin -> ok
    end.

compare_bucket(Config) ->
    StreamId = ?config(stream, Config),
    Brokers = ?config(brokers, Config),
    ok = stream_s3_tier:await(flushed, ?WAIT_MS, fun() -> lists:any(fun(Broker) -> flushed(Broker, StreamId) end, Brokers) end),
    Numbers = [
        stream_s3_writer:number(stream_s3_amqp:decode(Record))
     || Record <- stream_s3_tier:records(?config(tier, Config), hd(Brokers), StreamId)
    ],
    [{all, #{confirmed := Confirmed, lost := Lost}}] = ets:lookup(?config(written, Config), all),
    ?assertEqual([], Confirmed -- Numbers),
    ?assertEqual([], Numbers -- lists:usort(Numbers)),
    %% In order, for each of the writers. A batch that was given up goes on in its connection, while the next one is sent by another.
    GivenUp = sets:from_list([N || N <- Lost, N >= ?CUT_OFF]),
    {CutOff, Other} = lists:partition(fun(N) -> N >= ?CUT_OFF end, [N || N <- Numbers, not sets:is_element(N, GivenUp)]),
    [?assertEqual([], [{A, B} || {A, B} <- lists:zip(lists:droplast([-1 | One]), One), A >= B]) || One <- [CutOff, Other]],
    ?assertEqual([], (Numbers -- Confirmed) -- Lost),
    ok = stream_s3_tier:verify(?config(tier, Config), hd(Brokers), StreamId),
    ct:pal("~b records confirmed, ~b in the bucket", [length(Confirmed), length(Numbers)]).

%% One of them has the writer.
flushed(Broker, StreamId) ->
    stream_s3_broker:is_running(Broker) andalso
        stream_s3_broker:call(Broker, rabbitmq_stream_s3, reconcile, []) =:= ok andalso
        stream_s3_broker:call(Broker, rabbitmq_stream_s3, flush, [StreamId, 20000]) =:= ok.

%% --- the cluster -----------------------------------------------------------------------------------------------------

leader(Config) ->
    Brokers = ?config(brokers, Config),
    ok = await_members(Config, 3),
    Node = stream_s3_tier:writer(hd(Brokers), ?QUEUE),
    {[Leader], Others} = lists:partition(fun(Broker) -> stream_s3_broker:node(Broker) =:= Node end, Brokers),
    {Leader, Others}.

await_leader(Config, Is) ->
    await_leader_at([Broker || Broker <- ?config(brokers, Config), stream_s3_broker:is_running(Broker)], Is).

await_leader_at(Brokers, Is) ->
    stream_s3_tier:await(another_leader, ?WAIT_MS, fun() -> Is(stream_s3_tier:writer(hd(Brokers), ?QUEUE)) end).

%% So many nodes run a member of the stream, one of them the writer.
await_members(Config, Count) ->
    StreamId = ?config(stream, Config),
    stream_s3_tier:await({members, Count}, ?WAIT_MS, fun() ->
        Running = [Broker || Broker <- ?config(brokers, Config), stream_s3_broker:is_running(Broker)],
        Writers = [Broker || Broker <- Running, has(osiris_writer, StreamId, Broker)],
        Replicas = [Broker || Broker <- Running, has(osiris_replica, StreamId, Broker)],
        {length(Writers), length(Replicas)} =:= {1, Count - 1}
    end).

has(Module, StreamId, Broker) ->
    Children = stream_s3_broker:call(Broker, supervisor, which_children, [osiris_server_sup]),
    [] =/= [Pid || {Name, Pid, worker, [M]} <- Children, M =:= Module, is_pid(Pid), iolist_to_binary(Name) =:= StreamId].

%% A copy of the plugin that says it is another version.
new_version(Config) ->
    Dir = filename:join(?config(group_dir, Config), "new_plugin"),
    case filelib:is_dir(Dir) of
        true ->
            ok;
        false ->
            [Old] = filelib:wildcard(filename:join(stream_s3_broker:plugin_dir(), "rabbitmq_stream_s3-*[0-9]")),
            New = filename:join(Dir, "rabbitmq_stream_s3-0.99.0"),
            ok = filelib:ensure_path(Dir),
            "" = os:cmd("cp -r '" ++ Old ++ "' '" ++ New ++ "'"),
            App = filename:join([New, "ebin", "rabbitmq_stream_s3.app"]),
            {ok, [{application, Name, Keys}]} = file:consult(App),
            ok = file:write_file(App, io_lib:format("~p.~n", [{application, Name, lists:keyreplace(vsn, 1, Keys, {vsn, "0.99.0"})}]))
    end,
    Dir.
