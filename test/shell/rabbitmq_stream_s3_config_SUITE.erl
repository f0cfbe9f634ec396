%% The table of knobs, and the words in which a setting is refused.
-module(rabbitmq_stream_s3_config_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-compile(nowarn_export_all).
-compile(export_all).

-define(CONFIG, rabbitmq_stream_s3_config).

all() ->
    [
        every_default_passes_its_own_check,
        every_knob_has_a_reason_and_every_number_a_unit,
        defaults_are_those_of_the_contract,
        values_come_from_the_environment_and_strings_as_binaries,
        a_name_that_is_no_knob_is_misuse,
        an_unknown_key_is_refused_by_name,
        a_wrong_type_is_refused_with_what_is_expected,
        a_value_out_of_range_is_refused_with_the_range,
        contradictions_are_refused,
        a_prefix_that_makes_no_key_is_refused,
        secrets_are_in_no_message_and_in_no_redacted_term,
        what_is_obfuscated_in_the_environment_is_read_as_it_was,
        the_store_gets_what_is_set_and_no_more
    ].

init_per_testcase(_Case, Config) ->
    _ = application:load(rabbitmq_stream_s3),
    Config.

end_per_testcase(_Case, _Config) ->
    [application:unset_env(rabbitmq_stream_s3, Key) || {Key, _} <- application:get_all_env(rabbitmq_stream_s3)].

%% The least that can be meant.
fs() -> #{store => fs, fs_dir => "/somewhere"}.

%% --- cases -----------------------------------------------------------------------------------------------------------

what_is_obfuscated_in_the_environment_is_read_as_it_was(_Config) ->
    {ok, Started} = application:ensure_all_started(credentials_obfuscation),
    ok = credentials_obfuscation:set_secret(<<"cookie">>),
    Proxy = <<"http://user:hunter2@proxy:3128">>,
    Set = #{proxy => Proxy, secret_key => [{password, <<"hunter2">>}], access_key_id => "id", endpoint => "http://store"},
    [ok = application:set_env(rabbitmq_stream_s3, Key, Value) || Key := Value <- maps:merge(fs(), Set)],
    ok = ?CONFIG:hide_secrets(),
    Env = application:get_all_env(rabbitmq_stream_s3),
    ?assertEqual(nomatch, string:find(io_lib:format("~p", [Env]), "hunter2")),
    ?assertEqual("http://store", proplists:get_value(endpoint, Env)),
    ?assertEqual({Proxy, <<"hunter2">>}, {?CONFIG:get(proxy), ?CONFIG:get(secret_key)}),
    ?assertEqual(ok, ?CONFIG:validate()),
    ?assertEqual(<<"(hidden)">>, maps:get(proxy, ?CONFIG:redact(maps:from_list(Env)))),
    %% A plugin that is enabled again finds them so.
    ok = ?CONFIG:hide_secrets(),
    ?assertEqual(Env, application:get_all_env(rabbitmq_stream_s3)),
    lists:foreach(fun application:stop/1, Started).

every_default_passes_its_own_check(_Config) ->
    [
        ?assertEqual(ok, ?CONFIG:validate(maps:merge(fs(), #{Key => Default})))
     || #{key := Key, default := Default} <- ?CONFIG:table(), Default =/= undefined, Key =/= store
    ],
    ?assertEqual(ok, ?CONFIG:validate(#{bucket => "b"})).

every_knob_has_a_reason_and_every_number_a_unit(_Config) ->
    [
        begin
            ?assertNotEqual(<<>>, Reason),
            ?assert(not is_number_type(Type) orelse Unit =/= <<>>, Key)
        end
     || #{key := Key, type := Type, unit := Unit, reason := Reason} <- ?CONFIG:table()
    ],
    Keys = [Key || #{key := Key} <- ?CONFIG:table()],
    ?assertEqual(length(Keys), length(lists:usort(Keys))).

is_number_type(Type) ->
    is_tuple(Type) andalso element(1, Type) =:= integer.

defaults_are_those_of_the_contract(_Config) ->
    Expected = #{
        store => s3, prefix => <<"rabbitmq">>, tiered => all, fragment_target_size => 67108864,
        fragment_max_age_ms => 600000, persist_threshold => 5, persist_interval_ms => 2000, rebalance_threshold => 1024,
        max_transfer_bytes_per_sec => unlimited, max_transfer_burst_bytes => undefined, upload_concurrency => 16,
        max_in_flight_fragments => 8, pinned_segment_bytes => 2147483648, upload_retry_delay_ms => 1000,
        upload_retry_delay_max_ms => 30000, task_retry_delay_ms => 10, task_retry_delay_max_ms => 5000,
        transfer_deadline_ms => 180000, persist_timeout_ms => 60000, retention_timeout_ms => 60000,
        local_retention => policy, remote_max_bytes => unlimited, remote_max_age_ms => unlimited,
        discarded_tier_grace_ms => 86400000, reconciliation_interval_ms => 60000, bucket_check_interval_ms => 300000,
        gc_enabled => false, gc_interval_ms => 86400000, gc_mode => delete, gc_min_age_ms => 3600000,
        history_upload_concurrency => 16, history_rescan_interval_ms => 60000, history_purge_wait_ms => 60000,
        fs_dir => undefined, bucket => undefined, region => undefined, endpoint => undefined, path_style => undefined,
        access_key_id => undefined, secret_key => undefined, session_token => undefined, ca_file => undefined,
        proxy => undefined, kms_key_id => undefined, storage_class => undefined, expected_bucket_owner => undefined
    },
    ?assertEqual(Expected, #{Key => ?CONFIG:get(Key) || #{key := Key} <- ?CONFIG:table()}).

values_come_from_the_environment_and_strings_as_binaries(_Config) ->
    set(#{bucket => "b\x{fc}cket", upload_concurrency => 3, fragment_max_age_ms => infinity}),
    ?assertEqual(<<"b\x{fc}cket"/utf8>>, ?CONFIG:get(bucket)),
    ?assertEqual(3, ?CONFIG:get(upload_concurrency)),
    ?assertEqual(infinity, ?CONFIG:get(fragment_max_age_ms)),
    ?assertEqual(ok, ?CONFIG:validate()).

a_name_that_is_no_knob_is_misuse(_Config) ->
    ?assertError(badarg, ?CONFIG:get(no_such_knob)).

an_unknown_key_is_refused_by_name(_Config) ->
    ?assertEqual({error, <<"there is no setting no_such_knob">>}, ?CONFIG:validate((fs())#{no_such_knob => 1})),
    ?assertEqual(
        {error, <<"there is no setting upload_concurency (upload_concurrency is meant?)">>},
        ?CONFIG:validate((fs())#{upload_concurency => 1})
    ),
    ?assertEqual({error, <<"there is no setting {a,b}">>}, ?CONFIG:validate([{{a, b}, 1} | maps:to_list(fs())])).

a_wrong_type_is_refused_with_what_is_expected(_Config) ->
    Cases = [
        {store, gcs, <<"store must be s3 or fs, not gcs">>},
        {fs_dir, 17, <<"fs_dir must be a non-empty string without control characters, not 17">>},
        {bucket, "", <<"bucket must be a non-empty string without control characters, not \"\"">>},
        {bucket, <<"a\nb">>, <<"bucket must be a non-empty string without control characters, not \"a\\nb\"">>},
        {path_style, "yes", <<"path_style must be true or false, not \"yes\"">>},
        {fragment_target_size, "64MB", <<"fragment_target_size must be an integer from 1 to 4294967296, not \"64MB\"">>},
        {remote_max_bytes, infinity, <<"remote_max_bytes must be unlimited or an integer from 1 to 4611686018427387904, not infinity">>}
    ],
    [?assertEqual({error, Text}, ?CONFIG:validate((fs())#{Key => Value})) || {Key, Value, Text} <- Cases].

a_value_out_of_range_is_refused_with_the_range(_Config) ->
    Cases = [
        {rebalance_threshold, 1, <<"rebalance_threshold must be an integer from 2 to 4096, not 1">>},
        {rebalance_threshold, 4097, <<"rebalance_threshold must be an integer from 2 to 4096, not 4097">>},
        {upload_concurrency, 0, <<"upload_concurrency must be an integer from 1 to 1024, not 0">>},
        {upload_concurrency, 1025, <<"upload_concurrency must be an integer from 1 to 1024, not 1025">>},
        {fragment_max_age_ms, -1, <<"fragment_max_age_ms must be infinity or an integer from 1 to 4294967295, not -1">>}
    ],
    [?assertEqual({error, Text}, ?CONFIG:validate((fs())#{Key => Value})) || {Key, Value, Text} <- Cases].

contradictions_are_refused(_Config) ->
    Cases = [
        {#{}, <<"bucket is not set: with store = s3 it must be the name of the bucket">>},
        {#{store => fs}, <<"fs_dir is not set: with store = fs it must be the directory for the objects">>},
        {(fs())#{access_key_id => "id"}, <<"access_key_id is set, so secret_key must be set as well">>},
        {(fs())#{secret_key => "s"}, <<"secret_key is set, so access_key_id must be set as well">>},
        {(fs())#{session_token => "t"}, <<"session_token is set, so access_key_id must be set as well">>},
        {(fs())#{upload_retry_delay_ms => 2000, upload_retry_delay_max_ms => 1000},
            <<"upload_retry_delay_ms must not be above upload_retry_delay_max_ms, but 2000 is above 1000">>},
        %% One of the two is the default.
        {(fs())#{task_retry_delay_ms => 6000},
            <<"task_retry_delay_ms must not be above task_retry_delay_max_ms, but 6000 is above 5000">>},
        {(fs())#{max_transfer_burst_bytes => 1000},
            <<"max_transfer_burst_bytes is set, so max_transfer_bytes_per_sec must be a number, not unlimited">>}
    ],
    [?assertEqual({error, Text}, ?CONFIG:validate(Settings)) || {Settings, Text} <- Cases].

a_prefix_that_makes_no_key_is_refused(_Config) ->
    [?assertEqual({Good, ok}, {Good, ?CONFIG:validate((fs())#{prefix => Good})}) || Good <- ["rabbitmq", "a/b/c", "prod-1_x.y"]],
    [
        ?assertMatch({Bad, {error, <<"prefix must be ", _/binary>>}}, {Bad, ?CONFIG:validate((fs())#{prefix => Bad})})
     || Bad <- ["/a", "a/", "a//b", "a b", "a\x{fc}", lists:duplicate(513, $a)]
    ].

secrets_are_in_no_message_and_in_no_redacted_term(_Config) ->
    Secret = "do-not-show-me",
    {error, Text} = ?CONFIG:validate((fs())#{access_key_id => "id", secret_key => [Secret, 1]}),
    ?assertEqual(nomatch, string:find(Text, Secret)),
    Settings = #{
        secret_key => Secret, session_token => Secret, secretkey => Secret,
        proxy => "http://user:" ++ Secret ++ "@proxy:3128", endpoint => <<"https://", (list_to_binary(Secret))/binary, "@s3">>
    },
    [
        ?assertEqual(nomatch, string:find(io_lib:format("~p", [?CONFIG:redact(Term)]), Secret))
     || Term <- [Settings, maps:to_list(Settings)]
    ],
    ?assertMatch(#{bucket := <<"b">>, upload_concurrency := 3}, ?CONFIG:redact(#{bucket => <<"b">>, upload_concurrency => 3})).

the_store_gets_what_is_set_and_no_more(_Config) ->
    set(#{store => fs, fs_dir => "/d"}),
    ?assertEqual(#{store => fs, fs_dir => <<"/d">>, prefix => <<"rabbitmq">>, path_style => false}, ?CONFIG:store_settings()),
    set(#{store => s3, bucket => <<"b">>, endpoint => "http://h:1"}),
    ?assertMatch(#{store := s3, bucket := <<"b">>, endpoint := <<"http://h:1">>, path_style := true}, ?CONFIG:store_settings()),
    set(#{path_style => false}),
    ?assertMatch(#{path_style := false}, ?CONFIG:store_settings()).

set(Env) ->
    maps:foreach(fun(Key, Value) -> ok = application:set_env(rabbitmq_stream_s3, Key, Value) end, Env).
