%% @doc One real broker with the plugin of `make dist': from enabling it to records compared with those in the bucket.
-module(rabbitmq_stream_s3_one_node_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-export([all/0, suite/0, init_per_suite/1, end_per_suite/1]).
-export([what_amqp_publishes_is_in_the_bucket/1]).

suite() ->
    [{timetrap, {minutes, 5}}].

all() ->
    [what_amqp_publishes_is_in_the_bucket].

init_per_suite(Config) ->
    {ok, Dir} = stream_s3_temp:new("broker"),
    Tier = stream_s3_tier:start(filename:join(Dir, "store")),
    Broker = stream_s3_broker:new(#{dir => filename:join(Dir, "a"), conf => stream_s3_tier:conf(Tier, #{}), plugins => [rabbitmq_stream]}),
    ok = stream_s3_broker:start(Broker),
    ok = use_khepri(Broker),
    _ = stream_s3_broker:cli(Broker, "rabbitmq-plugins", ["enable", "rabbitmq_stream_s3"]),
    [{dir, Dir}, {tier, Tier}, {broker, Broker} | Config].

end_per_suite(Config) ->
    ok = stream_s3_broker:stop(?config(broker, Config)),
    ok = stream_s3_tier:stop(?config(tier, Config)),
    stream_s3_temp:remove(?config(dir, Config)).

%% RabbitMQ 4.0 keeps its metadata in Mnesia unless told otherwise.
use_khepri(Broker) ->
    case stream_s3_broker:call(Broker, rabbit_khepri, is_enabled, []) of
        true ->
            ok;
        false ->
            _ = stream_s3_broker:cli(Broker, "rabbitmqctl", ["enable_feature_flag", "--experimental", "khepri_db"]),
            ok
    end.

what_amqp_publishes_is_in_the_bucket(Config) ->
    Broker = ?config(broker, Config),
    Tier = ?config(tier, Config),
    Queue = <<"amqp">>,
    Channel = stream_s3_amqp:open(stream_s3_broker:port(amqp, Broker)),
    ok = stream_s3_amqp:declare(Channel, Queue, []),
    Source = stream_s3_records:new(1),
    Bodies = [stream_s3_records:record(Source, 1, N) || N <- lists:seq(0, 999)],
    ok = stream_s3_amqp:publish(Channel, Queue, Bodies),
    StreamId = stream_s3_tier:stream_id(Broker, Queue),
    ok = stream_s3_tier:flush(Broker, StreamId),
    ?assertEqual(Bodies, [stream_s3_amqp:decode(Record) || Record <- stream_s3_tier:records(Tier, Broker, StreamId)]),
    ok = stream_s3_tier:verify(Tier, Broker, StreamId),
    ok = stream_s3_amqp:close(Channel).
