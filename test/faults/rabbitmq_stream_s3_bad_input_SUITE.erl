%% What a user gets to read when something is set wrong or is not there: the exact words, in the error, the log and the status.
%% Meanwhile the writer goes on, and uploads resume by themselves once the cause is mended.
-module(rabbitmq_stream_s3_bad_input_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-export([all/0, suite/0, init_per_suite/1, end_per_suite/1, init_per_testcase/2, end_per_testcase/2]).
-export([
    settings_that_cannot_be_meant_are_refused_by_name/1,
    a_store_that_cannot_be_opened_is_refused_by_the_setting/1,
    a_bucket_that_is_not_there/1,
    a_wrong_secret/1,
    an_endpoint_where_nobody_listens/1,
    a_file_in_place_of_the_folder/1,
    a_damaged_root/1,
    a_root_that_is_gone/1,
    a_stream_id_that_cannot_be_part_of_a_key/1
]).

-define(APP, rabbitmq_stream_s3).
-define(TIMEOUT, 20000).
-define(SECRET, <<"a-secret-that-nobody-must-see">>).
%% Delays so short that a test need not wait for them.
-define(QUICK, #{
    upload_retry_delay_ms => 20,
    upload_retry_delay_max_ms => 200,
    task_retry_delay_max_ms => 200,
    persist_interval_ms => 100
}).

suite() -> [{timetrap, {seconds, 60}}].

all() ->
    [
        settings_that_cannot_be_meant_are_refused_by_name,
        a_store_that_cannot_be_opened_is_refused_by_the_setting,
        a_bucket_that_is_not_there,
        a_wrong_secret,
        an_endpoint_where_nobody_listens,
        a_file_in_place_of_the_folder,
        a_damaged_root,
        a_root_that_is_gone,
        a_stream_id_that_cannot_be_part_of_a_key
    ].

init_per_suite(Config) ->
    ok = stream_s3_osiris:start(filename:join(?config(priv_dir, Config), "osiris")),
    #{level := Level} = logger:get_primary_config(),
    ok = logger:set_primary_config(level, notice),
    [{level, Level} | Config].

end_per_suite(Config) ->
    ok = logger:set_primary_config(level, ?config(level, Config)),
    stream_s3_osiris:stop().

init_per_testcase(Case, Config) ->
    Dir = filename:join(?config(priv_dir, Config), Case),
    ok = filelib:ensure_path(Dir),
    [{dir, Dir}, {stream, atom_to_binary(Case)}, {logs, stream_s3_logs:start()} | Config].

end_per_testcase(_Case, Config) ->
    ok = stream_s3_world:stop_application(),
    [ok = osiris:delete_cluster(stream_s3_osiris:config(Id)) || {Id, _Writer} <- rabbitmq_stream_s3_log:writers()],
    stream_s3_logs:stop(?config(logs, Config)).

%% --- refused at start ------------------------------------------------------------------------------------------------

settings_that_cannot_be_meant_are_refused_by_name(Config) ->
    Good = #{store => fs, fs_dir => directory(Config)},
    [
        begin
            ?assertEqual(refused(Text), stream_s3_world:try_application(maps:merge(Good, Bad))),
            await_log(Config, error, ["tiered storage for streams does not start: ", Text])
        end
     || {Bad, Text} <- [
            {#{fragment_target_sise => 1000}, <<"there is no setting fragment_target_sise (fragment_target_size is meant?)">>},
            {#{xyzzy => 1}, <<"there is no setting xyzzy">>},
            {#{fragment_target_size => "64MB"}, <<"fragment_target_size must be an integer from 1 to 4294967296, not \"64MB\"">>},
            {#{upload_concurrency => 0}, <<"upload_concurrency must be an integer from 1 to 1024, not 0">>},
            {#{fragment_max_age_ms => never}, <<"fragment_max_age_ms must be infinity or an integer from 1 to 4294967295, not never">>},
            {#{tiered => some}, <<"tiered must be all or none, not some">>},
            {#{store => s3, bucket => ""}, <<"bucket must be a non-empty string without control characters, not \"\"">>},
            {#{secret_key => 1234567890}, <<"secret_key must be a non-empty string without control characters, not what it is set to">>},
            {#{access_key_id => "a"}, <<"access_key_id is set, so secret_key must be set as well">>},
            {#{store => s3}, <<"bucket is not set: with store = s3 it must be the name of the bucket">>}
        ]
    ].

a_store_that_cannot_be_opened_is_refused_by_the_setting(Config) ->
    Nowhere = filename:join(directory(Config), "ca.pem"),
    S3 = #{store => s3, bucket => "b", endpoint => "http://127.0.0.1:1", access_key_id => "a", secret_key => ?SECRET},
    [
        ?assertEqual(refused(iolist_to_binary(Text)), stream_s3_world:try_application(Settings))
     || {Settings, Text} <- [
            {#{store => fs, fs_dir => "relative"},
                "fs_dir: \"relative\" is not an absolute path; the node's working directory is nobody's choice"},
            {S3#{endpoint => "localhost:9000"}, "endpoint: must be a URL that begins with http:// or https://"},
            {S3#{bucket => "a/b"}, "bucket: \"a/b\" is not a bucket's name"},
            {S3#{ca_file => Nowhere}, ["ca_file: ", Nowhere, ": No such file or directory (os error 2)"]},
            {maps:remove(endpoint, S3), "region: is needed where no endpoint is set"}
        ]
    ].

refused(Text) ->
    {error, {?APP, {Text, {rabbitmq_stream_s3_app, start, [normal, []]}}}}.

%% --- tried again -----------------------------------------------------------------------------------------------------

a_bucket_that_is_not_there(Config) ->
    with_s3local(Config, fun(Server, S3) ->
        Place = place("missing", S3),
        Cause = <<"the store has no such bucket (HTTP 404)">>,
        Writer = start(Config, S3#{bucket => <<"missing">>}),
        assert_waiting(Config, Writer, uploading, Cause),
        await_log(Config, warning, [
            "the object store cannot be used, uploads wait: list ",
            Place,
            " was answered with 404 NoSuchBucket: The specified bucket does not exist",
            " (create the bucket, or correct the setting bucket)"
        ]),
        ok = stream_s3_s3local:create_bucket(Server, "missing"),
        assert_resumed(Config, Writer, uploading)
    end).

a_wrong_secret(Config) ->
    with_s3local(Config, fun(Server, S3) ->
        ok = stream_s3_s3local:create_bucket(Server, "bucket"),
        Settings = S3#{bucket => <<"bucket">>},
        Cause = <<"the store refuses access (HTTP 403): check the credentials and the bucket's policy">>,
        Writer = start(Config, Settings#{secret_key => ?SECRET}),
        assert_waiting(Config, Writer, uploading, Cause),
        Lines = stream_s3_logs:lines(?config(logs, Config)),
        ?assertEqual([], [Line || {_, Line} <- Lines, binary:match(Line, ?SECRET) =/= nomatch]),
        ?assertEqual(nomatch, binary:match(term_to_binary(rabbitmq_stream_s3:status()), ?SECRET)),
        %% Credentials are read at start.
        ok = stream_s3_world:stop_application(),
        ok = stream_s3_world:start_application(maps:merge(?QUICK, Settings)),
        assert_tiered(Config, Writer)
    end).

an_endpoint_where_nobody_listens(Config) ->
    Port = free_port(),
    Settings = #{
        store => s3,
        bucket => <<"bucket">>,
        endpoint => iolist_to_binary(["http://127.0.0.1:", integer_to_list(Port)]),
        access_key_id => <<"id">>,
        secret_key => ?SECRET
    },
    Writer = start(Config, Settings),
    assert_waiting(Config, Writer, uploading, <<"there is no connection to the store, or it breaks">>),
    with_s3local(Config, #{port => Port, access_key_id => <<"id">>, secret_key => ?SECRET}, fun(Server, _S3) ->
        ok = stream_s3_s3local:create_bucket(Server, "bucket"),
        assert_resumed(Config, Writer, uploading)
    end).

a_file_in_place_of_the_folder(Config) ->
    Dir = filename:join(?config(dir, Config), "bucket"),
    ok = file:write_file(Dir, <<"in the way">>),
    Writer = start(Config, #{store => fs, fs_dir => unicode:characters_to_binary(Dir)}),
    assert_waiting(Config, Writer, uploading, iolist_to_binary([Dir, "/.stream_s3 cannot be opened: not a directory"])),
    ok = file:delete(Dir),
    assert_resumed(Config, Writer, uploading).

a_damaged_root(Config) ->
    Writer = start(Config, fs(Config)),
    ok = stream_s3_osiris:write(Writer, [<<"before">>]),
    assert_tiered(Config, Writer),
    Key = root_key(Config),
    Root = filename:join(directory(Config), Key),
    %% One entry.
    {ok, <<Good:83/binary>>} = file:read_file(Root),
    [
        begin
            %% A reader that is only restarted trusts the manifest that this node knows.
            ok = stream_s3_world:stop_application(),
            ok = stream_s3_logs:clear(?config(logs, Config)),
            ok = file:write_file(Root, Bad),
            ok = stream_s3_world:start_application(maps:merge(?QUICK, fs(Config))),
            assert_unresolved(Config, Writer, iolist_to_binary([Key, ": root, ", What])),
            ok = file:write_file(Root, Good),
            await_log(Config, notice, ["stream ", ?config(stream, Config), ": resolving succeeds again"])
        end
     || {Bad, What} <- [
            {<<>>, "byte 0: expected 49 bytes, got 0"},
            {binary:part(Good, 0, 82), "byte 82: expected 83 bytes, got 82"},
            {<<"OSIG", (binary:part(Good, 4, 79))/binary>>, "byte 0: wrong magic [4f, 53, 49, 47]"}
        ]
    ],
    assert_tiered(Config, Writer).

a_root_that_is_gone(Config) ->
    Writer = start(Config, fs(Config)),
    ok = stream_s3_osiris:write(Writer, [<<"before">>]),
    assert_tiered(Config, Writer),
    Key = root_key(Config),
    Root = filename:join(directory(Config), Key),
    ok = stream_s3_world:stop_application(),
    ok = file:rename(Root, <<Root/binary, ".away">>),
    ok = stream_s3_world:start_application(maps:merge(?QUICK, fs(Config))),
    assert_unresolved(Config, Writer, iolist_to_binary(["get \"", Key, "\" in ", directory(Config), ": no such object"])),
    ok = file:rename(<<Root/binary, ".away">>, Root),
    await_log(Config, notice, ["stream ", ?config(stream, Config), ": resolving succeeds again"]),
    assert_tiered(Config, Writer).

a_stream_id_that_cannot_be_part_of_a_key(Config) ->
    Good = start(Config, fs(Config)),
    %% osiris:start_cluster/1 refuses such a name; a writer itself does not.
    {ok, Bad} = osiris:start_writer(stream_s3_osiris:config(<<"no.good">>)),
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    await_log(Config, warning, "stream <<\"no.good\">> is not tiered: its name cannot be part of an object key"),
    ok = stream_s3_osiris:write(Bad, [<<"still written">>]),
    ?assertEqual(#{stream => <<"no.good">>, state => not_tiered}, rabbitmq_stream_s3:status(<<"no.good">>)),
    ?assertEqual({error, unresolved}, rabbitmq_stream_s3:get_range(<<"no.good">>)),
    ?assertEqual({error, reader_down}, rabbitmq_stream_s3_replica_reader:await_offset(<<"no.good">>, 1, 0)),
    ok = stream_s3_osiris:write(Good, [<<"tiered">>]),
    assert_tiered(Config, Good).

%% --- what each case asserts ------------------------------------------------------------------------------------------

start(Config, Settings) ->
    Writer = stream_s3_osiris:start_stream(stream_s3_osiris:config(?config(stream, Config))),
    ok = stream_s3_world:start_application(maps:merge(?QUICK, Settings)),
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    %% Nothing is tiered yet, so nothing has to be read to begin.
    ok = rabbitmq_stream_s3_replica_reader:await_offset(?config(stream, Config), 0, ?TIMEOUT),
    Writer.

%% The writer writes, nothing is tiered, and log and status say why.
assert_waiting(Config, Writer, Doing, Cause) ->
    Stream = ?config(stream, Config),
    ok = stream_s3_osiris:write(Writer, [<<"while it fails">>]),
    _ = rabbitmq_stream_s3_replica_reader:force_cut(Stream),
    await_log(Config, warning, ["stream ", Stream, ": ", atom_to_list(Doing), " fails and is tried again: ", Cause]),
    #{problems := Problems} = rabbitmq_stream_s3:status(Stream),
    ?assertMatch([#{doing := Doing, cause := Cause}], Problems),
    ok = stream_s3_osiris:write(Writer, [<<"and">>, <<"some more">>]),
    ?assertEqual({error, timeout}, rabbitmq_stream_s3_replica_reader:await_offset(Stream, 1, 0)),
    ?assertEqual(empty, rabbitmq_stream_s3:get_range(Stream)).

assert_resumed(Config, Writer, Doing) ->
    Stream = ?config(stream, Config),
    assert_tiered(Config, Writer),
    await_log(Config, notice, ["stream ", Stream, ": ", atom_to_list(Doing), " succeeds again"]),
    ?assertMatch(#{problems := []}, rabbitmq_stream_s3:status(Stream)),
    ok = rabbitmq_stream_s3_store:probe(),
    await_log(Config, notice, "the object store can be used again, uploads resume").

assert_unresolved(Config, Writer, Cause) ->
    Stream = ?config(stream, Config),
    ok = rabbitmq_stream_s3_reconciler:reconcile(),
    await_log(Config, warning, ["stream ", Stream, ": resolving fails and is tried again: ", Cause]),
    ?assertMatch(#{problems := [#{doing := resolving, cause := Cause}]}, rabbitmq_stream_s3:status(Stream)),
    ok = stream_s3_osiris:write(Writer, [<<"while it is damaged">>]),
    ?assertEqual({error, unresolved}, rabbitmq_stream_s3:get_range(Stream)).

assert_tiered(Config, Writer) ->
    Stream = ?config(stream, Config),
    End = stream_s3_osiris:next_offset(Writer),
    ok = stream_s3_world:settle(Stream, End, ?TIMEOUT),
    ?assertEqual({0, End}, rabbitmq_stream_s3:get_range(Stream)).

%% The text is a whole line of the log.
await_log(Config, Level, Text) ->
    {Level, _} = stream_s3_logs:await(?config(logs, Config), ["^\\Q", Text, "\\E$"], ?TIMEOUT),
    ok.

%% --- stores ----------------------------------------------------------------------------------------------------------

with_s3local(Config, Fun) ->
    with_s3local(Config, #{}, Fun).

with_s3local(Config, Options, Fun) ->
    Server = stream_s3_s3local:start(Options#{dir => directory(Config)}),
    try
        Fun(Server, (stream_s3_s3local:settings(Server))#{store => s3})
    after
        stream_s3_s3local:stop(Server)
    end.

place(Bucket, #{endpoint := Endpoint}) -> ["s3://", Bucket, "/rabbitmq at ", Endpoint].

fs(Config) -> #{store => fs, fs_dir => unicode:characters_to_binary(directory(Config))}.

directory(Config) ->
    Dir = filename:join(?config(dir, Config), "objects"),
    ok = filelib:ensure_path(Dir),
    Dir.

root_key(Config) ->
    {Pointer, _Revision} = stream_s3_world:pointer(?config(stream, Config)),
    stream_s3_bucket:root_key(stream_s3_bucket:open(fs(Config)), ?config(stream, Config), Pointer).

%% Free a moment ago; that another process takes it meanwhile is unlikely enough.
free_port() ->
    {ok, Socket} = gen_tcp:listen(0, [{ip, {127, 0, 0, 1}}]),
    {ok, Port} = inet:port(Socket),
    ok = gen_tcp:close(Socket),
    Port.
