%% Settings of the store that are corrected while the application runs.
-module(rabbitmq_stream_s3_store_reload_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-import(stream_s3_wait, [eventually/1]).

-compile(nowarn_export_all).
-compile(export_all).

-define(APP, rabbitmq_stream_s3).
-define(STORE, rabbitmq_stream_s3_store).
-define(WAIT, 20_000).

all() ->
    [
        corrected_credentials_are_used_without_a_restart,
        the_bucket_check_notices_that_credentials_have_changed,
        requests_under_way_are_not_disturbed,
        what_cannot_be_used_changes_nothing,
        unchanged_settings_keep_the_handle
    ].

init_per_suite(Config) ->
    {ok, Dir} = stream_s3_temp:new("reload"),
    Server = stream_s3_s3local:start(#{dir => Dir}),
    ok = stream_s3_s3local:create_bucket(Server, "bucket"),
    _ = application:load(?APP),
    [{server, Server}, {dir, Dir} | Config].

end_per_suite(Config) ->
    ok = stream_s3_s3local:stop(?config(server, Config)),
    stream_s3_temp:remove(?config(dir, Config)).

init_per_testcase(_Case, Config) ->
    Settings = maps:merge(stream_s3_s3local:settings(?config(server, Config)), #{store => s3, bucket => <<"bucket">>}),
    set(Settings),
    [{right, Settings} | Config].

end_per_testcase(_Case, Config) ->
    ok = stream_s3_store_faults:clear(?config(server, Config)),
    _ = whereis(?STORE) =/= undefined andalso gen_server:stop(?STORE),
    ok = ?STORE:close(),
    [application:unset_env(?APP, Key) || {Key, _} <- application:get_all_env(?APP)].

%% --- cases -----------------------------------------------------------------------------------------------------------

corrected_credentials_are_used_without_a_restart(Config) ->
    set(#{secret_key => <<"wrong">>}),
    start(),
    #{cause := Cause} = becomes(failing),
    ?assertMatch({_, _}, binary:match(Cause, <<"secret_key">>)),
    set(?config(right, Config)),
    ?assertEqual(ok, ?APP:reload_store()),
    becomes(accessible),
    ?assertMatch({ok, #{objects := []}}, ?STORE:list(<<"p/">>, undefined, 1, ?WAIT)).

the_bucket_check_notices_that_credentials_have_changed(Config) ->
    set(#{secret_key => <<"wrong">>, bucket_check_interval_ms => 1000}),
    start(),
    becomes(failing),
    set(?config(right, Config)),
    becomes(accessible).

requests_under_way_are_not_disturbed(Config) ->
    Server = ?config(server, Config),
    start(),
    becomes(accessible),
    Before = ?STORE:handle(),
    Served = stream_s3_store_faults:requests(Server, put),
    ok = stream_s3_store_faults:add(Server, [#{op => put, key => "rabbitmq/slow", do => delay, ms => 1500, count => 1}]),
    ok = rabbitmq_stream_s3_nif:store_put(Before, self(), slow, <<"rabbitmq/slow">>, <<"body">>, #{}),
    eventually(fun() -> stream_s3_store_faults:requests(Server, put) > Served end),
    set(#{region => <<"eu-north-1">>}),
    ?assertEqual(ok, ?APP:reload_store()),
    ?assertNotEqual(Before, ?STORE:handle()),
    erlang:garbage_collect(),
    receive
        {store_result, slow, Result} -> ?assertMatch({ok, _}, Result)
    after ?WAIT -> error(no_answer)
    end,
    ?assertMatch({ok, #{body := <<"body">>}}, ?STORE:get(<<"rabbitmq/slow">>, whole, ?WAIT)).

what_cannot_be_used_changes_nothing(_Config) ->
    start(),
    becomes(accessible),
    Before = ?STORE:handle(),
    [
        begin
            Old = application:get_env(?APP, Key),
            set(#{Key => Value}),
            {error, Text} = ?APP:reload_store(),
            ?assertMatch({0, _}, binary:match(Text, atom_to_binary(Key))),
            ?assertEqual(Before, ?STORE:handle()),
            restore(Key, Old)
        end
     || {Key, Value} <- [
            {bucket, <<"another">>},
            {prefix, <<"another">>},
            {ca_file, <<"/nowhere/ca.pem">>},
            {region, 7},
            {upload_concurrency, 0}
        ]
    ],
    ?assertEqual(ok, ?APP:reload_store()),
    becomes(accessible).

unchanged_settings_keep_the_handle(_Config) ->
    start(),
    becomes(accessible),
    Before = ?STORE:handle(),
    Probes = probes(),
    ok = ?STORE:probe(),
    eventually(fun() -> probes() > Probes end),
    ?assertMatch(#{state := accessible}, ?STORE:status()),
    ?assertEqual(Before, ?STORE:handle()),
    %% Asked for, it is opened again: a certificate may be another one in the same file.
    ?assertEqual(ok, ?APP:reload_store()),
    ?assertNotEqual(Before, ?STORE:handle()).

%% --- helpers ---------------------------------------------------------------------------------------------------------

set(Settings) ->
    [ok = application:set_env(?APP, Key, Value) || Key := Value <- Settings].

restore(Key, undefined) -> application:unset_env(?APP, Key);
restore(Key, {ok, Value}) -> application:set_env(?APP, Key, Value).

start() ->
    %% In the application another process has it.
    ok = rabbitmq_stream_s3_gauges:init(),
    ok = ?STORE:open(),
    {ok, _} = ?STORE:start_link().

becomes(State) ->
    eventually(fun() -> map_get(state, ?STORE:status()) =:= State end),
    ?assertEqual(bucket_accessible(State), map_get(bucket_accessible, ?STORE:metrics())),
    ?STORE:status().

bucket_accessible(accessible) -> 1;
bucket_accessible(failing) -> 0.

probes() ->
    #{durations := Rows} = ?STORE:metrics(),
    {probe, _, _, Count} = lists:keyfind(probe, 1, Rows),
    Count.
