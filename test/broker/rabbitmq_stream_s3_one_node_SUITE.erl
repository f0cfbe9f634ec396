%% @doc One real broker with the plugin of `make dist': from enabling it to records compared with those in the bucket.
-module(rabbitmq_stream_s3_one_node_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-export([all/0, suite/0, init_per_suite/1, end_per_suite/1]).
-export([
    without_khepri_it_says_why_it_does_not_start/1,
    a_broker_with_a_wrong_setting_names_it_and_does_not_start/1,
    a_password_in_the_address_of_a_proxy_is_not_in_the_log/1,
    what_amqp_publishes_is_in_the_bucket/1,
    what_the_stream_protocol_publishes_is_in_the_bucket/1,
    messages_of_every_size_are_in_the_bucket/1,
    secrets_are_neither_in_the_environment_nor_in_the_log/1,
    an_argument_keeps_a_stream_out_of_the_tier/1,
    a_policy_takes_effect_on_a_live_stream/1,
    a_policy_with_a_wrong_value_is_refused/1,
    a_limit_by_policy_drops_what_is_oldest_in_the_tier/1,
    the_queues_own_limit_is_that_of_the_tier_where_local_segments_go/1,
    a_deleted_queue_takes_its_tier_along/1,
    it_is_disabled_and_enabled_again_while_streams_are_written/1,
    it_goes_on_after_a_restart_and_after_kill_9/1
]).

-define(WAIT_MS, 60000).

suite() ->
    [{timetrap, {minutes, 5}}].

all() ->
    [
        without_khepri_it_says_why_it_does_not_start,
        a_broker_with_a_wrong_setting_names_it_and_does_not_start,
        a_password_in_the_address_of_a_proxy_is_not_in_the_log,
        what_amqp_publishes_is_in_the_bucket,
        what_the_stream_protocol_publishes_is_in_the_bucket,
        messages_of_every_size_are_in_the_bucket,
        secrets_are_neither_in_the_environment_nor_in_the_log,
        an_argument_keeps_a_stream_out_of_the_tier,
        a_policy_takes_effect_on_a_live_stream,
        a_policy_with_a_wrong_value_is_refused,
        a_limit_by_policy_drops_what_is_oldest_in_the_tier,
        the_queues_own_limit_is_that_of_the_tier_where_local_segments_go,
        a_deleted_queue_takes_its_tier_along,
        it_is_disabled_and_enabled_again_while_streams_are_written,
        it_goes_on_after_a_restart_and_after_kill_9
    ].

init_per_suite(Config) ->
    {ok, Dir} = stream_s3_temp:new("broker"),
    Tier = stream_s3_tier:start(filename:join(Dir, "store")),
    %% Looks that could hide that something is not noticed at once are rare; the rest is fast.
    Settings = #{reconciliation_interval_ms => 600000, gc_min_age_ms => 1, persist_interval_ms => 100},
    Broker = stream_s3_broker:new(#{
        dir => filename:join(Dir, "a"),
        conf => stream_s3_tier:conf(Tier, Settings),
        env => [{"RABBITMQ_LOG", "debug"}],
        plugins => [rabbitmq_stream]
    }),
    ok = stream_s3_broker:start(Broker),
    Refusal = use_khepri(Broker),
    _ = stream_s3_broker:cli(Broker, "rabbitmq-plugins", ["enable", "rabbitmq_stream_s3"]),
    Channel = stream_s3_amqp:open(stream_s3_broker:port(amqp, Broker)),
    [{dir, Dir}, {tier, Tier}, {broker, Broker}, {channel, Channel}, {refusal, Refusal} | Config].

end_per_suite(Config) ->
    ok = stream_s3_broker:stop(?config(broker, Config)),
    ok = stream_s3_tier:stop(?config(tier, Config)),
    stream_s3_temp:remove(?config(dir, Config)).

%% RabbitMQ 4.0 keeps its metadata in Mnesia unless told otherwise. Answers what the plugin said to that.
use_khepri(Broker) ->
    case stream_s3_broker:call(Broker, rabbit_khepri, is_enabled, []) of
        true ->
            none;
        false ->
            Refusal = stream_s3_broker:try_cli(Broker, "rabbitmq-plugins", ["enable", "rabbitmq_stream_s3"]),
            _ = stream_s3_broker:cli(Broker, "rabbitmq-plugins", ["disable", "rabbitmq_stream_s3"]),
            _ = stream_s3_broker:cli(Broker, "rabbitmqctl", ["enable_feature_flag", "--experimental", "khepri_db"]),
            Refusal
    end.

%% --- cases -----------------------------------------------------------------------------------------------------------

without_khepri_it_says_why_it_does_not_start(Config) ->
    case ?config(refusal, Config) of
        none ->
            {skip, "this RabbitMQ has nothing but Khepri"};
        {Status, Output} ->
            ?assertNotEqual(0, Status),
            ?assertMatch({match, _}, re:run(Output, "tiered storage needs Khepri")),
            ?assertMatch({match, _}, re:run(stream_s3_broker:log(?config(broker, Config)), "tiered storage needs Khepri"))
    end.

%% As far as it comes: what is unknown is found first, then what is no value at all, then what is out of range, then what does not go
%% together.
a_broker_with_a_wrong_setting_names_it_and_does_not_start(Config) ->
    Wrong = [
        {[{bukcet, "b"}], ["stream_s3.bukcet", "stream_s3.bucket"]},
        {[{persist_interval_ms, "3s"}, {tiered, "some"}], ["stream_s3.persist_interval_ms", "stream_s3.tiered"]},
        {[{upload_concurrency, "5000"}, {fragment_target_size, "100kB"}], [
            "stream_s3.upload_concurrency invalid, must be an integer from 1 to 1024",
            "stream_s3.fragment_target_size invalid, must be a number of bytes from 1 to 4294967296, which may have a unit: KB, MB or GB"
        ]},
        {[{region, "r"}], ["bucket is not set: with store = s3 it must be the name of the bucket"]}
    ],
    lists:foreach(
        fun({N, {Settings, Expected}}) ->
            Broker = stream_s3_broker:new(#{
                name => "wrong",
                dir => filename:join([?config(dir, Config), "wrong", integer_to_list(N)]),
                conf => [["stream_s3.", atom_to_list(Key), " = ", Value, $\n] || {Key, Value} <- Settings]
            }),
            ?assertError({broker, _, _, _, _}, stream_s3_broker:start(Broker)),
            Log = stream_s3_broker:log(Broker),
            [?assertNotEqual({Text, nomatch}, {Text, binary:match(Log, list_to_binary(Text))}) || Text <- Expected]
        end,
        lists:enumerate(Wrong)
    ).

%% RabbitMQ logs the settings of a plugin also where it is not enabled.
a_password_in_the_address_of_a_proxy_is_not_in_the_log(Config) ->
    Broker = stream_s3_broker:new(#{
        name => "proxy",
        dir => filename:join(?config(dir, Config), "proxy"),
        conf => "stream_s3.bucket = b\nstream_s3.proxy = http://me:swordfish@127.0.0.1:3128\n",
        env => [{"RABBITMQ_LOG", "debug"}],
        plugins => [rabbitmq_stream]
    }),
    ok = stream_s3_broker:start(Broker),
    ok = stream_s3_broker:stop(Broker),
    Log = stream_s3_broker:log(Broker),
    ?assertMatch({match, _}, re:run(Log, "proxy = ")),
    ?assertEqual(nomatch, binary:match(Log, <<"swordfish">>)).

what_amqp_publishes_is_in_the_bucket(Config) ->
    StreamId = declare(Config, <<"amqp">>, []),
    Bodies = bodies(1, 1000),
    ok = publish(Config, <<"amqp">>, Bodies),
    ok = compare(Config, StreamId, Bodies, fun stream_s3_amqp:decode/1).

what_the_stream_protocol_publishes_is_in_the_bucket(Config) ->
    Broker = ?config(broker, Config),
    %% A batch has to fit into a frame of a megabyte.
    Bodies = [Body || Body <- bodies(2, 500), byte_size(Body) < 40000],
    lists:foreach(
        fun(How) ->
            Stream = atom_to_binary(How),
            StreamId = declare(Config, Stream, []),
            ok = stream_s3_client:publish(Broker, ?config(dir, Config), Stream, Bodies, How),
            ok = compare(Config, StreamId, Bodies, fun(Record) -> Record end)
        end,
        [plain, batch, gzip, filter]
    ),
    Filters = [Filter || #{type := user, filter := Filter} <- chunks(Config, stream_s3_tier:stream_id(Broker, <<"filter">>))],
    ?assertEqual([], [empty || <<>> <- Filters]),
    ?assertNotEqual([], Filters).

messages_of_every_size_are_in_the_bucket(Config) ->
    Broker = ?config(broker, Config),
    StreamId = declare(Config, <<"sizes">>, []),
    {ok, Largest} = stream_s3_broker:call(Broker, application, get_env, [rabbit, max_message_size]),
    Sizes = [0, 1, 255, 256, 65535, 65536, 1048576, Largest - 1, Largest],
    Block = rand:bytes(Largest),
    Bodies = [binary:part(Block, 0, Size) || Size <- Sizes],
    ok = publish(Config, <<"sizes">>, Bodies),
    ok = compare(Config, StreamId, Bodies, fun stream_s3_amqp:decode/1).

secrets_are_neither_in_the_environment_nor_in_the_log(Config) ->
    Broker = ?config(broker, Config),
    Secret = stream_s3_tier:secret(?config(tier, Config)),
    Environment = stream_s3_broker:cli(Broker, "rabbitmqctl", ["environment"]),
    ?assertMatch({match, _}, re:run(Environment, "secret_key")),
    ?assertEqual(nomatch, binary:match(Environment, Secret)),
    Log = stream_s3_broker:log(Broker),
    %% RabbitMQ has indeed written the settings to it.
    ?assertMatch({match, _}, re:run(Log, "secret_key = ")),
    ?assertEqual(nomatch, binary:match(Log, Secret)),
    Status = io_lib:format("~0p", [stream_s3_broker:call(Broker, rabbitmq_stream_s3, status, [])]),
    ?assertEqual(nomatch, string:find(Status, Secret)).

an_argument_keeps_a_stream_out_of_the_tier(Config) ->
    StreamId = declare(Config, <<"argument">>, [{<<"x-stream-s3-tiered">>, longstr, <<"none">>}]),
    ok = publish(Config, <<"argument">>, bodies(3, 10)),
    ok = stream_s3_broker:call(?config(broker, Config), rabbitmq_stream_s3, reconcile, []),
    ?assertMatch(#{state := not_tiered}, status(Config, StreamId)),
    ?assertEqual([], stream_s3_tier:keys(?config(tier, Config), StreamId)).

a_policy_takes_effect_on_a_live_stream(Config) ->
    Broker = ?config(broker, Config),
    StreamId = declare(Config, <<"policy">>, []),
    ok = await_state(Config, StreamId, running),
    ok = publish(Config, <<"policy">>, [<<"first">>]),
    %% A fragment that has been begun keeps the size with which it was.
    ok = stream_s3_tier:flush(Broker, StreamId),
    ok = set_policy(Config, <<"policy">>, "{\"stream-s3-fragment-target-size\": 10000}"),
    Next = [binary:copy(<<N>>, 1000) || N <- lists:seq(1, 100)],
    [ok = publish(Config, <<"policy">>, [Body]) || Body <- Next],
    First = [<<"first">> | Next],
    ok = compare(Config, StreamId, First, fun stream_s3_amqp:decode/1),
    ?assert(length([Key || Key <- stream_s3_tier:keys(?config(tier, Config), StreamId), filename:extension(Key) =:= <<".fragment">>]) > 5),
    ok = set_policy(Config, <<"policy">>, "{\"stream-s3-tiered\": \"none\"}"),
    ok = await_state(Config, StreamId, not_tiered),
    Second = bodies(5, 10),
    ok = publish(Config, <<"policy">>, Second),
    _ = stream_s3_broker:cli(Broker, "rabbitmqctl", ["clear_policy", "policy"]),
    ok = await_state(Config, StreamId, running),
    ok = compare(Config, StreamId, First ++ Second, fun stream_s3_amqp:decode/1).

a_policy_with_a_wrong_value_is_refused(Config) ->
    Wrong = [
        {"{\"stream-s3-tiered\": \"some\"}", "tiered must be all or none"},
        {"{\"stream-s3-fragment-target-size\": 0}", "fragment_target_size must be an integer"},
        {"{\"stream-s3-unheard-of\": 1}", "stream-s3-unheard-of"}
    ],
    lists:foreach(
        fun({Definition, Expected}) ->
            Args = ["set_policy", "wrong", "^wrong$", Definition, "--apply-to", "queues"],
            {Status, Output} = stream_s3_broker:try_cli(?config(broker, Config), "rabbitmqctl", Args),
            ?assertNotEqual(0, Status),
            ?assertMatch({match, _}, re:run(Output, Expected))
        end,
        Wrong
    ).

a_limit_by_policy_drops_what_is_oldest_in_the_tier(Config) ->
    Broker = ?config(broker, Config),
    StreamId = declare(Config, <<"limit">>, [{<<"x-stream-s3-fragment-target-size">>, long, 10000}]),
    Bodies = [binary:copy(<<N>>, 5000) || N <- lists:seq(1, 40)],
    [ok = publish(Config, <<"limit">>, [Body]) || Body <- Bodies],
    ok = stream_s3_tier:flush(Broker, StreamId),
    {0, _} = stream_s3_broker:call(Broker, rabbitmq_stream_s3, get_range, [StreamId]),
    ok = set_policy(Config, <<"limit">>, "{\"stream-s3-remote-max-bytes\": 50000}"),
    ok = limited(Config, <<"limit">>, StreamId, Bodies).

the_queues_own_limit_is_that_of_the_tier_where_local_segments_go(Config) ->
    Broker = ?config(broker, Config),
    Arguments = [{<<"x-stream-s3-fragment-target-size">>, long, 10000}, {<<"x-max-length-bytes">>, long, 50000}],
    StreamId = declare(Config, <<"own limit">>, Arguments),
    Bodies = [binary:copy(<<N>>, 5000) || N <- lists:seq(1, 40)],
    [ok = publish(Config, <<"own limit">>, [Body]) || Body <- Bodies],
    ok = stream_s3_tier:flush(Broker, StreamId),
    %% The log has one segment, which stays, so the limit does nothing to it.
    {0, _} = stream_s3_broker:call(Broker, rabbitmq_stream_s3, get_range, [StreamId]),
    ok = stream_s3_broker:call(Broker, application, set_env, [rabbitmq_stream_s3, local_retention, uploaded]),
    try
        limited(Config, <<"own limit">>, StreamId, Bodies)
    after
        stream_s3_broker:call(Broker, application, unset_env, [rabbitmq_stream_s3, local_retention])
    end.

%% Within 50000 bytes, and the newest.
limited(Config, Queue, StreamId, Bodies) ->
    Broker = ?config(broker, Config),
    %% Retention follows a persist.
    ok = publish(Config, Queue, [<<"last">>]),
    ok = stream_s3_tier:flush(Broker, StreamId),
    ok = stream_s3_tier:await("a shorter tier", ?WAIT_MS, fun() ->
        {First, _} = stream_s3_broker:call(Broker, rabbitmq_stream_s3, get_range, [StreamId]),
        First > 0
    end),
    Kept = [stream_s3_amqp:decode(Record) || Record <- stream_s3_tier:records(?config(tier, Config), Broker, StreamId)],
    ?assert(iolist_size(Kept) =< 50000),
    ?assert(lists:suffix(Kept, Bodies ++ [<<"last">>])),
    ok.

a_deleted_queue_takes_its_tier_along(Config) ->
    Broker = ?config(broker, Config),
    StreamId = declare(Config, <<"deleted">>, []),
    Other = declare(Config, <<"kept">>, []),
    [ok = publish(Config, Queue, bodies(6, 100)) || Queue <- [<<"deleted">>, <<"kept">>]],
    [ok = stream_s3_tier:flush(Broker, Id) || Id <- [StreamId, Other]],
    ?assertMatch([_, _ | _], stream_s3_tier:keys(?config(tier, Config), StreamId)),
    ok = stream_s3_amqp:delete(?config(channel, Config), <<"deleted">>),
    ?assertEqual({error, not_found}, stream_s3_broker:call(Broker, rabbitmq_stream_s3_metadata, tier, [StreamId, ?WAIT_MS])),
    %% Sooner than the next look at the metadata store.
    ok = stream_s3_tier:await("no object left", ?WAIT_MS, fun() -> stream_s3_tier:keys(?config(tier, Config), StreamId) =:= [] end),
    ok = compare(Config, Other, bodies(6, 100), fun stream_s3_amqp:decode/1).

it_is_disabled_and_enabled_again_while_streams_are_written(Config) ->
    Broker = ?config(broker, Config),
    Queues = [<<"load1">>, <<"load2">>],
    Ids = [declare(Config, Queue, []) || Queue <- Queues],
    Writers = [stream_s3_writer:start([stream_s3_broker:port(amqp, Broker)], Queue) || Queue <- Queues],
    Rounds =
        case os:getenv("STREAM_S3_DEEP") of
            false -> 10;
            _ -> ct:timetrap({minutes, 20}), 100
        end,
    %% What the first rounds leave behind (atoms, code) they leave behind once.
    [ok = off_and_on(Broker, N) || N <- [1, 2]],
    Before = held(Broker),
    {Time, _} = timer:tc(fun() -> [ok = off_and_on(Broker, N) || N <- lists:seq(3, Rounds)] end, millisecond),
    [ok = await_state(Config, Id, running) || Id <- Ids],
    Behind = held(Broker),
    ct:pal("~b rounds in ~b ms; held before: ~0p; behind: ~0p", [Rounds - 2, Time, counts(Before), counts(Behind)]),
    Outcomes = [stream_s3_writer:stop(Writer) || Writer <- Writers],
    ?assertEqual([[], []], [Errors || #{errors := Errors} <- Outcomes]),
    [
        ok = compare(Config, Id, [stream_s3_writer:record(N) || N <- Confirmed], fun stream_s3_amqp:decode/1)
     || {Id, #{confirmed := Confirmed}} <- lists:zip(Ids, Outcomes)
    ],
    %% Idle connections to the store end by themselves, soon.
    ok = stream_s3_tier:await(nothing_held, ?WAIT_MS, fun() -> [] =:= grown(Before, held(Broker)) orelse error(grown(Before, held(Broker))) end),
    ?assertEqual(nomatch, re:run(stream_s3_broker:log(Broker), "CRASH REPORT.*stream_s3")).

it_goes_on_after_a_restart_and_after_kill_9(Config) ->
    Broker = ?config(broker, Config),
    StreamId = declare(Config, <<"restarted">>, []),
    ok = publish(Config, <<"restarted">>, bodies(7, 200)),
    ok = stream_s3_broker:stop(Broker),
    ok = stream_s3_broker:start(Broker),
    Channel = stream_s3_amqp:open(stream_s3_broker:port(amqp, Broker)),
    ok = stream_s3_amqp:publish(Channel, <<"restarted">>, bodies(8, 200)),
    ok = stream_s3_broker:kill(Broker),
    ok = stream_s3_broker:start(Broker),
    Last = stream_s3_amqp:open(stream_s3_broker:port(amqp, Broker)),
    ok = stream_s3_amqp:publish(Last, <<"restarted">>, bodies(9, 200)),
    ok = stream_s3_amqp:close(Last),
    ok = compare(Config, StreamId, bodies(7, 200) ++ bodies(8, 200) ++ bodies(9, 200), fun stream_s3_amqp:decode/1).

%% --- helpers ---------------------------------------------------------------------------------------------------------

declare(Config, Queue, Arguments) ->
    ok = stream_s3_amqp:declare(?config(channel, Config), Queue, Arguments),
    stream_s3_tier:stream_id(?config(broker, Config), Queue).

publish(Config, Queue, Bodies) ->
    stream_s3_amqp:publish(?config(channel, Config), Queue, Bodies).

bodies(Seed, Count) ->
    Source = stream_s3_records:new(Seed),
    %% Without the one of a megabyte, which is too large for a frame of the stream protocol.
    [stream_s3_records:record(Source, 1, N) || N <- lists:seq(2, Count + 1)].

compare(Config, StreamId, Expected, Decode) ->
    Broker = ?config(broker, Config),
    Tier = ?config(tier, Config),
    ok = stream_s3_tier:flush(Broker, StreamId),
    Found = [Decode(Record) || Record <- stream_s3_tier:records(Tier, Broker, StreamId)],
    %% Not assertEqual, which would print all of them.
    ?assertEqual({length(Expected), same}, {length(Found), first_difference(Expected, Found, 0)}),
    stream_s3_tier:verify(Tier, Broker, StreamId).

first_difference([], [], _) -> same;
first_difference([One | As], [One | Bs], N) -> first_difference(As, Bs, N + 1);
first_difference(As, Bs, N) -> {differ_at, N, lists:sublist(As, 1), lists:sublist(Bs, 1)}.

chunks(Config, StreamId) ->
    stream_s3_tier:chunks(?config(tier, Config), ?config(broker, Config), StreamId).

status(Config, StreamId) ->
    stream_s3_broker:call(?config(broker, Config), rabbitmq_stream_s3, status, [StreamId]).

await_state(Config, StreamId, State) ->
    stream_s3_tier:await({StreamId, State}, ?WAIT_MS, fun() -> maps:get(state, status(Config, StreamId)) =:= State end).

set_policy(Config, Queue, Definition) ->
    Args = ["set_policy", Queue, ["^", Queue, "$"], Definition, "--apply-to", "queues"],
    _ = stream_s3_broker:cli(?config(broker, Config), "rabbitmqctl", [iolist_to_binary(Arg) || Arg <- Args]),
    ok.

%% By the command now and then, else by what the command calls, which takes a tenth of the time.
off_and_on(Broker, N) when N rem 10 =:= 1 ->
    _ = stream_s3_broker:cli(Broker, "rabbitmq-plugins", ["disable", "rabbitmq_stream_s3"]),
    false = is_started(Broker),
    _ = stream_s3_broker:cli(Broker, "rabbitmq-plugins", ["enable", "rabbitmq_stream_s3"]),
    true = is_started(Broker),
    ok;
off_and_on(Broker, _) ->
    ok = stream_s3_broker:set_enabled([rabbitmq_stream], Broker),
    false = is_started(Broker),
    ok = stream_s3_broker:set_enabled([rabbitmq_stream, rabbitmq_stream_s3], Broker),
    true = is_started(Broker),
    ok.

is_started(Broker) ->
    lists:keymember(rabbitmq_stream_s3, 1, stream_s3_broker:call(Broker, application, which_applications, [])).

held(Broker) ->
    {ok, Pid} = stream_s3_broker:pid(Broker),
    %% Each reader has a file open, from when it runs.
    ok = stream_s3_broker:call(Broker, rabbitmq_stream_s3, reconcile, []),
    ok = stream_s3_tier:await(all_running, ?WAIT_MS, fun() ->
        #{streams := Streams} = stream_s3_broker:call(Broker, rabbitmq_stream_s3, status, []),
        [] =:= [Id || #{stream := Id, state := State} <- Streams, State =/= running]
    end),
    _ = stream_s3_broker:call(Broker, rabbit_runtime, gc_all_processes, []),
    %% Before atoms are counted: the first call makes some hundred.
    Memory = stream_s3_broker:call(Broker, erlang, memory, [total]) div 1024,
    #{
        processes => length(stream_s3_broker:call(Broker, erlang, processes, [])),
        tables => length(stream_s3_broker:call(Broker, ets, all, [])),
        atoms => stream_s3_broker:call(Broker, erlang, system_info, [atom_count]),
        descriptors => open_files(Pid),
        threads => length(filelib:wildcard("/proc/" ++ Pid ++ "/task/*")),
        memory_kb => Memory,
        resident_kb => resident_kb(Pid)
    }.

%% With what is native.
resident_kb(Pid) ->
    {ok, Status} = file:read_file("/proc/" ++ Pid ++ "/status"),
    {match, [Kb]} = re:run(Status, "VmRSS:\\s+(\\d+) kB", [{capture, all_but_first, list}]),
    list_to_integer(Kb).

counts(Held) -> maps:map(fun(_, Value) -> size_of(Value) end, Held).

open_files(Pid) ->
    [File || Link <- filelib:wildcard("/proc/" ++ Pid ++ "/fd/*"), {ok, File} <- [file:read_link(Link)]].

%% What comes and goes by itself is allowed for; a leak of one a round is above it.
grown(Before, After) ->
    [{Key, size_of(Was), Is} || Key := Is <- After, #{Key := Was} <- [Before], size_of(Is) > size_of(Was) + allowance(Key)].

size_of(Files) when is_list(Files) -> length(Files);
size_of(N) -> N.

allowance(processes) -> 7;
allowance(tables) -> 7;
allowance(descriptors) -> 7;
allowance(threads) -> 2;
allowance(atoms) -> 200;
allowance(memory_kb) -> 20000;
allowance(resident_kb) -> 60000.
