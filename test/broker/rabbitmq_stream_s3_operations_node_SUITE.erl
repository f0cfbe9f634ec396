%% @doc What operators see and do, on one real broker: metrics as RabbitMQ serves them, the queries of dashboard and alerts, commands of RabbitMQ's own
%% tools, log lines, and the way of records from the bucket back into a stream.
-module(rabbitmq_stream_s3_operations_node_SUITE).

-include_lib("amqp_client/include/amqp_client.hrl").
-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-export([all/0, suite/0, init_per_suite/1, end_per_suite/1]).
-export([
    metrics_appear_when_rabbitmq_prometheus_comes_later/1,
    every_metric_is_served_in_sum_and_for_each_stream/1,
    every_query_of_dashboard_and_alerts_finds_what_it_asks_for/1,
    what_is_exported_and_restored_is_the_same_byte_for_byte/1,
    records_are_restored_by_tls_to_a_broker_that_shows_who_it_is/1,
    properties_of_both_protocols_are_exported_as_json/1,
    commands_answer_in_json_and_as_text/1,
    a_stalled_stream_is_unhealthy_and_says_since_when_and_why/1,
    sums_do_not_fall_when_a_stream_is_deleted/1,
    log_lines_are_of_rabbitmqs_own_domain/1,
    metrics_go_with_the_plugin/1
]).

-define(QUEUE, <<"orders">>).
-define(FOUND_MS, 30000).
-define(ROW, "^rabbitmq_stream_s3_(\\w+?)(?:_bucket|_sum|_count)?(?:{(.*)})? ([0-9.e+-]+|[+]Inf)$").

suite() ->
    [{timetrap, {minutes, 5}}].

%% In this order: each leaves the broker as the next one wants it.
all() ->
    [
        metrics_appear_when_rabbitmq_prometheus_comes_later,
        every_metric_is_served_in_sum_and_for_each_stream,
        every_query_of_dashboard_and_alerts_finds_what_it_asks_for,
        what_is_exported_and_restored_is_the_same_byte_for_byte,
        records_are_restored_by_tls_to_a_broker_that_shows_who_it_is,
        properties_of_both_protocols_are_exported_as_json,
        commands_answer_in_json_and_as_text,
        a_stalled_stream_is_unhealthy_and_says_since_when_and_why,
        sums_do_not_fall_when_a_stream_is_deleted,
        log_lines_are_of_rabbitmqs_own_domain,
        metrics_go_with_the_plugin
    ].

init_per_suite(Config) ->
    {ok, Dir} = stream_s3_temp:new("operations"),
    Tier = stream_s3_tier:start(filename:join(Dir, "store")),
    Settings = #{fragment_target_size => "100KB", upload_retry_delay_max_ms => "1000"},
    Certificates = stream_s3_certificates:write(filename:join(Dir, "certificates")),
    New = stream_s3_broker:new(#{dir => filename:join(Dir, "a"), plugins => [rabbitmq_stream]}),
    Conf = [
        stream_s3_tier:conf(Tier, Settings),
        "log.file.formatter = json\nlog.file = broker.log\n",
        "stream.frame_max = 4194304\n",
        io_lib:format("stream.listeners.ssl.1 = 127.0.0.1:~b~n", [stream_s3_broker:port(stream_tls, New)]),
        stream_s3_certificates:conf(Certificates)
    ],
    Broker = stream_s3_broker:set_conf(Conf, New),
    ok = stream_s3_broker:start(Broker),
    ok = use_khepri(Broker),
    _ = stream_s3_broker:cli(Broker, "rabbitmq-plugins", ["enable", "rabbitmq_stream_s3"]),
    Channel = stream_s3_amqp:open(stream_s3_broker:port(amqp, Broker)),
    ok = stream_s3_amqp:declare(Channel, ?QUEUE, []),
    %% One request is told to slow down, so that there is a row for that.
    SlowDown = #{op => put, key => "*.fragment", count => 1, do => status, status => 503, code => "SlowDown"},
    ok = stream_s3_store_faults:add(stream_s3_tier:server(Tier), [SlowDown]),
    ok = stream_s3_amqp:publish(Channel, ?QUEUE, bodies(), [{<<"trace">>, long, 7}]),
    StreamId = stream_s3_tier:stream_id(Broker, ?QUEUE),
    ok = stream_s3_tier:flush(Broker, StreamId),
    [{dir, Dir}, {tier, Tier}, {broker, Broker}, {channel, Channel}, {stream, StreamId}, {certificates, Certificates} | Config].

end_per_suite(Config) ->
    ok = stream_s3_broker:stop(?config(broker, Config)),
    ok = stream_s3_tier:stop(?config(tier, Config)),
    stream_s3_temp:remove(?config(dir, Config)).

%% Not part of Config, which Common Test writes to its log.
bodies() ->
    Source = stream_s3_records:new(7),
    [stream_s3_records:record(Source, 1, N) || N <- lists:seq(0, 1999)].

%% RabbitMQ 4.0 keeps its metadata in Mnesia unless told otherwise.
use_khepri(Broker) ->
    case stream_s3_broker:call(Broker, rabbit_khepri, is_enabled, []) of
        true ->
            ok;
        false ->
            _ = stream_s3_broker:cli(Broker, "rabbitmqctl", ["enable_feature_flag", "--experimental", "khepri_db"]),
            ok
    end.

%% --- metrics ---------------------------------------------------------------------------------------------------------

metrics_appear_when_rabbitmq_prometheus_comes_later(Config) ->
    Broker = ?config(broker, Config),
    _ = stream_s3_broker:cli(Broker, "rabbitmq-plugins", ["enable", "rabbitmq_prometheus"]),
    ok = stream_s3_tier:await("metrics of the plugin", ?FOUND_MS, fun() -> scrape(Broker, "/metrics") =/= #{} end).

every_metric_is_served_in_sum_and_for_each_stream(Config) ->
    Broker = ?config(broker, Config),
    Sums = scrape(Broker, "/metrics"),
    Each = scrape(Broker, "/metrics/per-object"),
    ?assertEqual([], [Name || Name <- stream_metrics() ++ node_metrics(), not is_map_key(Name, Sums)]),
    ?assertEqual([], [Name || Name <- stream_metrics() ++ node_metrics(), not is_map_key(Name, Each)]),
    Labels = #{<<"stream">> => ?config(stream, Config), <<"vhost">> => <<"/">>, <<"queue">> => ?QUEUE},
    ?assertEqual([], [Name || Name <- stream_metrics(), not is_map_key(Labels, map_get(Name, Each))]),
    ?assertEqual([], [Name || Name <- stream_metrics(), map_get(Name, Sums) =/= #{#{} => value(Name, #{}, Sums)}]),
    %% And they say what is so.
    #{manifest_next_offset := Next, manifest_total_size := Size} = reader_status(Broker, ?config(stream, Config)),
    ?assertEqual(Next, value(<<"manifest_next_offset">>, Labels, Each)),
    ?assertEqual(Size, value(<<"remote_bytes">>, Labels, Each)),
    ?assertEqual(Size, value(<<"bytes_persisted_total">>, #{}, Sums)),
    ?assert(value(<<"transfers_completed">>, Labels, Each) > 5),
    ?assert(value(<<"transfer_retries">>, Labels, Each) >= 1),
    ?assertEqual(1, value(<<"bucket_accessible">>, #{}, Sums)),
    Put = #{<<"operation">> => <<"put">>, <<"outcome">> => <<"ok">>, <<"object_kind">> => <<"fragment">>},
    ?assertEqual(value(<<"transfers_completed">>, #{}, Sums), value(<<"requests">>, Put, Sums)),
    ?assert(is_map_key(Put#{<<"outcome">> := <<"throttled">>}, map_get(<<"requests">>, Sums))),
    ?assertEqual(has_help(Broker), []).

reader_status(Broker, StreamId) ->
    stream_s3_broker:call(Broker, rabbitmq_stream_s3, status, [StreamId]).

%% Each has a type and a help text.
has_help(Broker) ->
    Text = stream_s3_broker:metrics(Broker, "/metrics"),
    Described = fun(What, Name) -> binary:match(Text, <<"# ", What/binary, " rabbitmq_stream_s3_", Name/binary, " ">>) =/= nomatch end,
    [Name || Name <- stream_metrics() ++ node_metrics(), not (Described(<<"TYPE">>, Name) andalso Described(<<"HELP">>, Name))].

sums_do_not_fall_when_a_stream_is_deleted(Config) ->
    Broker = ?config(broker, Config),
    Channel = ?config(channel, Config),
    ok = stream_s3_amqp:declare(Channel, <<"short">>, []),
    ok = stream_s3_amqp:publish(Channel, <<"short">>, [binary:copy(<<"x">>, 1000) || _ <- lists:seq(1, 50)]),
    StreamId = stream_s3_tier:stream_id(Broker, <<"short">>),
    ok = stream_s3_tier:flush(Broker, StreamId),
    Labels = #{<<"stream">> => StreamId, <<"vhost">> => <<"/">>, <<"queue">> => <<"short">>},
    ?assert(value(<<"bytes_transferred">>, Labels, scrape(Broker, "/metrics/per-object")) > 50000),
    Before = scrape(Broker, "/metrics"),
    ok = stream_s3_amqp:delete(Channel, <<"short">>),
    ok = stream_s3_tier:await("the end of the stream's rows", ?FOUND_MS, fun() ->
        not is_map_key(Labels, map_get(<<"bytes_transferred">>, scrape(Broker, "/metrics/per-object")))
    end),
    Behind = scrape(Broker, "/metrics"),
    ?assertEqual([], [Name || Name <- counters(), value(Name, #{}, Behind) < value(Name, #{}, Before)]),
    ?assertEqual(value(<<"streams">>, #{}, Before) - 1, value(<<"streams">>, #{}, Behind)).

counters() ->
    {Counters, _Gauges} = lists:split(22, stream_metrics()),
    Counters.

%% Counters first.
stream_metrics() ->
    words(
        "transfers_completed transfers_failed transfer_retries nontransient_transfer_retries bytes_transferred bytes_drained_total "
        "bytes_persisted_total persists_completed persists_failed persist_conflicts groups_created kilo_groups_created "
        "mega_groups_created roots_created manifests_resolved manifest_resolution_failures fragments_deleted groups_deleted "
        "local_log_ahead_recoveries remote_tier_ahead_recoveries remote_tier_retention_failures corrupt_chunks "
        "transfers_in_flight upload_stalled_offset bytes_in_assembly bytes_in_transfer bytes_in_persist last_persist_timestamp_ms "
        "manifest_first_offset manifest_next_offset remote_bytes pinned_segment_bytes"
    ).

node_metrics() ->
    words(
        "governor_submissions_received governor_tasks_in_flight governor_pending_submissions governor_oversized_admissions "
        "governor_dropped_dead_replyto upload_permits_in_use upload_buffer_bytes "
        "gets puts put_successes put_conflicts put_not_founds put_errors "
        "objects_deleted objects_delete_failed gc_objects_reclaimed gc_bytes_reclaimed "
        "requests request_duration_seconds bytes_sent bytes_received bucket_accessible streams "
        "history_uploads_total history_upload_bytes_total history_upload_checksum_mismatches_total history_upload_rescan_errors_total "
        "history_upload_backlog_segments history_upload_backlog_bytes history_upload_oldest_sealed_age_seconds"
    ).

words(Text) -> string:lexemes(list_to_binary(Text), " ").

%% The plugin's rows: by name without prefix, by labels, the value.
scrape(Broker, Path) ->
    Text = stream_s3_broker:metrics(Broker, Path),
    Options = [global, multiline, {capture, all_but_first, binary}],
    case re:run(Text, ?ROW, Options) of
        {match, Rows} -> lists:foldl(fun row/2, #{}, Rows);
        nomatch -> #{}
    end.

row([Name, Labels, Value], Rows) ->
    Of = maps:get(Name, Rows, #{}),
    Rows#{Name => Of#{labels(Labels) => number(Value)}}.

labels(Text) ->
    case re:run(Text, "(\\w+)=\"((?:[^\"\\\\]|\\\\.)*)\"", [global, {capture, all_but_first, binary}]) of
        {match, Pairs} -> maps:from_list([{Label, Value} || [Label, Value] <- Pairs]);
        nomatch -> #{}
    end.

number(<<"+Inf">>) -> infinity;
number(Text) ->
    try binary_to_integer(Text) catch error:badarg -> binary_to_float(Text) end.

value(Name, Labels, Scrape) ->
    #{Name := #{Labels := Value}} = Scrape,
    Value.

%% By Prometheus itself. A comparison leaves nothing where all is well, so each query is also evaluated with comparisons that answer 0 or 1:
%% then everything that it selects has to be there, with the labels that it is selected and summed up by.
every_query_of_dashboard_and_alerts_finds_what_it_asks_for(Config) ->
    Root = filename:dirname(filename:dirname(filename:dirname(?FILE))),
    {ok, Dashboard} = file:read_file(filename:join([Root, "docs", "grafana", "rabbitmq_stream_s3.json"])),
    #{<<"panels">> := Panels, <<"templating">> := #{<<"list">> := Variables}} = json:decode(Dashboard),
    Server = stream_s3_prometheus:start(
        filename:join(?config(dir, Config), "prometheus"), ?config(broker, Config), filename:join([Root, "docs", "alerts.yml"])
    ),
    try
        ok = stream_s3_tier:await("an evaluation of each rule", ?FOUND_MS, fun() ->
            [] =:= [Rule || #{<<"health">> := <<"unknown">>} = Rule <- stream_s3_prometheus:rules(Server)]
        end),
        Rules = stream_s3_prometheus:rules(Server),
        ?assert(length(Rules) > 10),
        ?assertEqual([], [Rule || #{<<"health">> := Health} = Rule <- Rules, Health =/= <<"ok">>]),
        Queries =
            [filled_in(Expr) || #{<<"targets">> := Targets} <- Panels, #{<<"expr">> := Expr} <- Targets] ++
                [selector(Definition) || #{<<"definition">> := Definition} <- Variables] ++ [Query || #{<<"query">> := Query} <- Rules],
        ?assert(length(Queries) > 60),
        _ = [stream_s3_prometheus:query(Server, Query) || Query <- Queries],
        ?assertEqual([], [Query || Query <- Queries, stream_s3_prometheus:query(Server, as_numbers(Query)) =:= []]),
        %% One that selects nothing would be found.
        ?assertEqual([], stream_s3_prometheus:query(Server, <<"rabbitmq_stream_s3_streams{job=\"nobody\"}">>))
    after
        stream_s3_prometheus:stop(Server)
    end.

%% As Grafana replaces its variables.
filled_in(Query) ->
    Values = [{"$__rate_interval", "1m"}, {"$job", "broker"}, {"$per_object_job", "streams"}, {"$queue", ?QUEUE}],
    Filled = lists:foldl(fun({Variable, Value}, Acc) -> iolist_to_binary(string:replace(Acc, Variable, Value, all)) end, Query, Values),
    ?assertEqual(nomatch, binary:match(Filled, <<"$">>)),
    Filled.

%% What Grafana looks for values of a label in: only rows that have it.
selector(Definition) ->
    {match, [Name, Label]} = re:run(Definition, "^label_values\\((\\w+), (\\w+)\\)$", [{capture, all_but_first, binary}]),
    <<Name/binary, "{", Label/binary, "!=\"\"}">>.

as_numbers(Query) ->
    re:replace(Query, " (==|!=|>=|<=|>|<) ", " \\1 bool ", [global, {return, binary}]).

%% --- export and restore ----------------------------------------------------------------------------------------------

what_is_exported_and_restored_is_the_same_byte_for_byte(Config) ->
    Broker = ?config(broker, Config),
    Tier = ?config(tier, Config),
    StreamId = ?config(stream, Config),
    Records = stream_s3_tier:records(Tier, Broker, StreamId),
    ?assertEqual(bodies(), [stream_s3_amqp:decode(Record) || Record <- Records]),
    File = filename:join(?config(dir, Config), "records"),
    {0, _} = stream_s3(Tier, ["export", StreamId, "--output", File]),
    ?assertEqual(Records, read_records(File)),
    %% Half of it, all of it, and all of it again: nothing is there twice.
    ok = stream_s3_amqp:declare(?config(channel, Config), <<"restored">>, []),
    Restore = fun(More) -> stream_s3(Tier, ["restore", StreamId, "--into", "restored", "--broker", stream_address(Broker) | More]) end,
    {0, _} = Restore(["--to", "777"]),
    {0, _} = Restore([]),
    {0, Again} = Restore(["--json"]),
    ?assertMatch(#{<<"published">> := 0, <<"behind">> := Behind} when Behind > 777, json:decode(string:trim(Again))),
    Restored = stream_s3_tier:stream_id(Broker, <<"restored">>),
    ok = stream_s3_tier:flush(Broker, Restored),
    ?assertEqual(Records, stream_s3_tier:records(Tier, Broker, Restored)),
    Second = filename:join(?config(dir, Config), "records again"),
    {0, _} = stream_s3(Tier, ["export", Restored, "--output", Second]),
    ?assertEqual(file:read_file(File), file:read_file(Second)),
    %% The file does as well as the bucket.
    ok = stream_s3_amqp:declare(?config(channel, Config), <<"from file">>, []),
    {0, _} = stream_s3(Tier, ["restore", "--input", File, "--into", "from file", "--broker", stream_address(Broker)]),
    FromFile = stream_s3_tier:stream_id(Broker, <<"from file">>),
    ok = stream_s3_tier:flush(Broker, FromFile),
    ?assertEqual(Records, stream_s3_tier:records(Tier, Broker, FromFile)),
    %% And what cannot work says why.
    {2, Nobody} = stream_s3(Tier, ["restore", StreamId, "--into", "nobody", "--broker", stream_address(Broker)]),
    ?assertMatch({match, _}, re:run(Nobody, "there is no such stream")),
    {2, Wrong} = stream_s3(Tier, ["restore", StreamId, "--into", "restored", "--password", "wrong", "--broker", stream_address(Broker)]),
    ?assertMatch({match, _}, re:run(Wrong, "user name or password are wrong")).

records_are_restored_by_tls_to_a_broker_that_shows_who_it_is(Config) ->
    Broker = ?config(broker, Config),
    Tier = ?config(tier, Config),
    StreamId = ?config(stream, Config),
    #{authority := Authority} = ?config(certificates, Config),
    ok = stream_s3_amqp:declare(?config(channel, Config), <<"by TLS">>, []),
    Restore = fun(Host, Port, More) ->
        Address = lists:concat([Host, ":", stream_s3_broker:port(Port, Broker)]),
        stream_s3(Tier, ["restore", StreamId, "--into", "by TLS", "--broker", Address | More])
    end,
    %% Another authority has not issued its certificate, the system's neither, and the other port has none.
    #{authority := Stranger} = stream_s3_certificates:write(filename:join(?config(dir, Config), "others")),
    {2, Unknown} = Restore("localhost", stream_tls, ["--broker-ca-file", Stranger]),
    ?assertMatch({{match, _}, _}, {re:run(Unknown, "no TLS connection to localhost:.*invalid peer certificate: (UnknownIssuer|BadSignature)"), Unknown}),
    {2, System} = Restore("localhost", stream_tls, ["--broker-tls"]),
    ?assertMatch({{match, _}, _}, {re:run(System, "no TLS connection to localhost:.*invalid peer certificate: UnknownIssuer.*--broker-ca-file"), System}),
    {2, Plain} = Restore("localhost", stream, ["--broker-ca-file", Authority]),
    ?assertMatch({{match, _}, _}, {re:run(Plain, "its port for TLS \\(5551 by default\\)"), Plain}),
    {2, Clear} = Restore("localhost", stream_tls, []),
    ?assertMatch({{match, _}, _}, {re:run(Clear, "does not answer any more|needs --broker-tls"), Clear}),
    %% By its name and by its address, both of which the certificate has.
    {0, _} = Restore("localhost", stream_tls, ["--broker-ca-file", Authority, "--to", "777"]),
    {0, _} = Restore("127.0.0.1", stream_tls, ["--broker-tls", "--broker-ca-file", Authority]),
    Restored = stream_s3_tier:stream_id(Broker, <<"by TLS">>),
    ok = stream_s3_tier:flush(Broker, Restored),
    ?assertEqual(stream_s3_tier:records(Tier, Broker, StreamId), stream_s3_tier:records(Tier, Broker, Restored)).

properties_of_both_protocols_are_exported_as_json(Config) ->
    Broker = ?config(broker, Config),
    Tier = ?config(tier, Config),
    {_, Channel} = Both = ?config(channel, Config),
    ok = stream_s3_amqp:declare(Both, <<"properties">>, []),
    Properties = #'P_basic'{
        content_type = <<"text/plain">>, headers = [{<<"h">>, longstr, <<"v">>}, {<<"x-mine">>, long, 7}], delivery_mode = 2, priority = 3,
        correlation_id = <<"c">>, reply_to = <<"re ply">>, expiration = <<"60000">>, message_id = <<"m">>, timestamp = 1700000000,
        type = <<"kind">>, user_id = <<"guest">>, app_id = <<"app">>
    },
    ok = amqp_channel:cast(Channel, #'basic.publish'{routing_key = <<"properties">>}, #amqp_msg{props = Properties, payload = <<"hello">>}),
    true = amqp_channel:wait_for_confirms(Channel, 60),
    StreamId = stream_s3_tier:stream_id(Broker, <<"properties">>),
    ok = stream_s3_tier:flush(Broker, StreamId),
    {0, Line} = stream_s3(Tier, ["export", StreamId, "--json"]),
    #{
        <<"body">> := #{<<"text">> := <<"hello">>},
        <<"properties">> := #{<<"message_id">> := <<"m">>, <<"content_type">> := <<"text/plain">>, <<"creation_time">> := 1700000000000},
        <<"application_properties">> := #{<<"h">> := <<"v">>},
        <<"amqp091">> := Said
    } = json:decode(string:trim(Line)),
    ?assertEqual(
        #{
            <<"exchange">> => <<>>,
            <<"routing_key">> => <<"properties">>,
            <<"properties">> => #{
                <<"content_type">> => <<"text/plain">>, <<"headers">> => #{<<"h">> => <<"v">>, <<"x-mine">> => 7},
                <<"delivery_mode">> => 2, <<"priority">> => 3, <<"correlation_id">> => <<"c">>, <<"reply_to">> => <<"re ply">>,
                <<"expiration">> => <<"60000">>, <<"message_id">> => <<"m">>, <<"timestamp">> => 1700000000,
                <<"type">> => <<"kind">>, <<"user_id">> => <<"guest">>, <<"app_id">> => <<"app">>
            }
        },
        Said
    ).

stream_s3(Tier, Args) ->
    stream_s3_cli:run(stream_s3_tier:settings(Tier), Args ++ ["--quiet"]).

stream_address(Broker) ->
    lists:concat(["127.0.0.1:", stream_s3_broker:port(stream, Broker)]).

read_records(File) ->
    {ok, Bytes} = file:read_file(File),
    [Record || <<Size:32, Record:Size/binary>> <= Bytes].

%% --- commands --------------------------------------------------------------------------------------------------------

commands_answer_in_json_and_as_text(Config) ->
    Broker = ?config(broker, Config),
    StreamId = ?config(stream, Config),
    #{<<"streams">> := Streams, <<"store">> := #{<<"state">> := <<"accessible">>}} = json(Broker, "stream_s3_status", []),
    ?assertMatch([_], [S || #{<<"stream">> := Id, <<"queue">> := ?QUEUE} = S <- Streams, Id =:= StreamId]),
    #{<<"remote">> := #{<<"first">> := 0, <<"next">> := Next}, <<"node">> := _, <<"vhost">> := <<"/">>} =
        json(Broker, "stream_s3_status", ["--vhost", "/", ?QUEUE]),
    ?assertMatch(
        #{<<"stream">> := StreamId, <<"ok">> := true, <<"next_offset">> := Next, <<"findings">> := []},
        json(Broker, "stream_s3_verify", [?QUEUE])
    ),
    ok = stream_s3_amqp:publish(?config(channel, Config), ?QUEUE, [<<"one more">>]),
    ?assertMatch(#{<<"stream">> := StreamId, <<"result">> := <<"cut">>}, json(Broker, "stream_s3_force_cut", [?QUEUE])),
    ?assertMatch(#{<<"mode">> := <<"dry_run">>, <<"reclaimed">> := #{<<"objects">> := 0}}, json(Broker, "stream_s3_gc", ["--mode", "dry_run"])),
    ?assertMatch(#{<<"streams">> := [#{<<"stream">> := StreamId}]}, json(Broker, "stream_s3_flush", [?QUEUE])),
    Text = stream_s3_broker:cli(Broker, "rabbitmq-streams", ["stream_s3_status", ?QUEUE]),
    ?assertMatch({match, _}, re:run(Text, <<StreamId/binary, " \\(orders in /\\): running">>)),
    {Status, Missing} = stream_s3_broker:try_cli(Broker, "rabbitmq-streams", ["stream_s3_verify", "nobody"]),
    ?assertEqual({65, match}, {Status, element(1, re:run(Missing, "queue nobody in virtual host / does not exist"))}).

a_stalled_stream_is_unhealthy_and_says_since_when_and_why(Config) ->
    Broker = ?config(broker, Config),
    Server = stream_s3_tier:server(?config(tier, Config)),
    Good = stream_s3_broker:cli(Broker, "rabbitmq-diagnostics", ["stream_s3_health"]),
    ?assertMatch({match, _}, re:run(Good, "tiering goes on")),
    ok = stream_s3_store_faults:add(Server, [#{op => put, key => "*.fragment", do => status, status => 403, code => "AccessDenied"}]),
    ok = stream_s3_amqp:publish(?config(channel, Config), ?QUEUE, [<<"refused">>]),
    ok = stream_s3_broker:call(Broker, rabbitmq_stream_s3, force_cut, [?config(stream, Config)]),
    ok = stream_s3_tier:await("a stream that is stalled", ?FOUND_MS, fun() ->
        value(<<"stalled_since_timestamp_ms">>, #{}, scrape(Broker, "/metrics")) =:= 1
    end),
    {69, Bad} = stream_s3_broker:try_cli(Broker, "rabbitmq-streams", ["stream_s3_health"]),
    Sentence = "tiering of stream __orders_\\d+ is stalled since 20\\d\\d-\\S+Z, because the store refuses access \\(HTTP 403\\)",
    ?assertMatch({match, _}, re:run(Bad, Sentence)),
    ok = stream_s3_store_faults:clear(Server),
    ok = stream_s3_tier:flush(Broker, ?config(stream, Config)),
    ?assertMatch(#{<<"result">> := <<"ok">>}, json(Broker, "stream_s3_health", [])),
    %% A pause is a stall as well, and takes one command to see and one to end.
    ?assertMatch(#{<<"result">> := <<"paused">>}, json(Broker, "stream_s3_pause", [?QUEUE])),
    ?assertMatch({error, unhealthy, #{stalled := [#{cause := <<"an operator has paused the stream">>, queue := ?QUEUE}]}}, health(Broker)),
    ?assertMatch(#{<<"result">> := <<"resumed">>}, json(Broker, "stream_s3_resume", [?QUEUE])),
    ?assertMatch({ok, _}, health(Broker)).

health(Broker) ->
    stream_s3_broker:call(Broker, rabbitmq_stream_s3_operator, health, []).

json(Broker, Command, Args) ->
    json:decode(stream_s3_broker:cli(Broker, "rabbitmq-streams", [Command, "--formatter", "json" | Args])).

%% --- log -------------------------------------------------------------------------------------------------------------

%% What stalled further up was told by the stream's reader.
log_lines_are_of_rabbitmqs_own_domain(Config) ->
    Broker = ?config(broker, Config),
    {ok, Log} = file:read_file(filename:join([stream_s3_broker:dir(Broker), "log", "broker.log"])),
    Lines = [json:decode(Line) || Line <- binary:split(Log, <<"\n">>, [global, trim_all])],
    Domains = [Domain || #{<<"msg">> := Text, <<"domain">> := Domain} <- Lines, re:run(Text, "uploading fails and is tried again: the store refuses access") =/= nomatch],
    ?assertMatch([_ | _], Domains),
    ?assertEqual([<<"rabbitmq.stream_s3">>], lists:usort(Domains)).

metrics_go_with_the_plugin(Config) ->
    Broker = ?config(broker, Config),
    _ = stream_s3_broker:cli(Broker, "rabbitmq-plugins", ["disable", "rabbitmq_stream_s3"]),
    ?assertEqual(#{}, scrape(Broker, "/metrics")),
    ?assertEqual(#{}, scrape(Broker, "/metrics/per-object")),
    ?assertMatch({match, _}, re:run(stream_s3_broker:metrics(Broker, "/metrics"), "^rabbitmq_queues ", [multiline])).
