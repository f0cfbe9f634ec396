%% @doc What `make dist' makes, without a broker: its schema against the table of settings, its resource file, its library.
-module(rabbitmq_stream_s3_plugin_node_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-export([all/0, suite/0]).
-export([
    each_setting_is_read_from_the_configuration_file/1,
    values_out_of_range_are_refused_with_the_name_of_the_setting/1,
    a_size_may_have_a_unit/1,
    a_secret_is_not_in_clear_text_where_rabbitmq_logs_settings/1,
    a_password_in_a_url_is_not_in_clear_text_where_rabbitmq_logs_settings/1,
    a_secret_may_be_encrypted/1,
    the_resource_file_has_what_rabbitmq_asks_for/1,
    a_library_that_needs_a_newer_libc_says_so/1,
    a_library_of_another_version_is_refused/1,
    each_reason_for_not_loading_names_what_was_found/1
]).

suite() ->
    [{timetrap, {minutes, 2}}].

all() ->
    [
        each_setting_is_read_from_the_configuration_file,
        values_out_of_range_are_refused_with_the_name_of_the_setting,
        a_size_may_have_a_unit,
        a_secret_is_not_in_clear_text_where_rabbitmq_logs_settings,
        a_password_in_a_url_is_not_in_clear_text_where_rabbitmq_logs_settings,
        a_secret_may_be_encrypted,
        the_resource_file_has_what_rabbitmq_asks_for,
        a_library_that_needs_a_newer_libc_says_so,
        a_library_of_another_version_is_refused,
        each_reason_for_not_loading_names_what_was_found
    ].

%% --- schema ----------------------------------------------------------------------------------------------------------

each_setting_is_read_from_the_configuration_file(_Config) ->
    Rows = rabbitmq_stream_s3_config:table(),
    Conf = [{setting(Key), text(Type)} || #{key := Key, type := Type} <- Rows],
    Env = env(Conf),
    ?assertEqual(lists:sort([Key || #{key := Key} <- Rows]), lists:sort(proplists:get_keys(Env))),
    [?assertEqual(ok, rabbitmq_stream_s3_config:check(Key, Value)) || {Key, Value} <- Env],
    [?assertEqual({Key, expected(Type)}, {Key, plain(proplists:get_value(Key, Env))}) || #{key := Key, type := Type} <- Rows],
    ?assertEqual([], env([])).

values_out_of_range_are_refused_with_the_name_of_the_setting(_Config) ->
    lists:foreach(
        fun({Setting, Value}) ->
            Error = generate([{Setting, Value}]),
            ?assertMatch({error, _, _}, Error),
            ?assertNotEqual(nomatch, string:find(said(Error), Setting), {Setting, Value, said(Error)})
        end,
        [
            {setting(Key), Value}
         || #{key := Key, type := Type} <- rabbitmq_stream_s3_config:table(), Value <- wrong(Type)
        ]
    ).

a_size_may_have_a_unit(_Config) ->
    [
        ?assertEqual([{fragment_target_size, Bytes}], env([{"stream_s3.fragment_target_size", Text}]))
     || {Text, Bytes} <- [{"16MB", 16777216}, {"100KB", 102400}, {"100kb", 102400}, {"2GB", 2147483648}, {"7", 7}]
    ].

a_password_in_a_url_is_not_in_clear_text_where_rabbitmq_logs_settings(_Config) ->
    Url = "http://me:secret@proxy:3128",
    Env = env([{"stream_s3.proxy", Url}]),
    ?assertEqual([{proxy, [{password, list_to_binary(Url)}]}], Env),
    ?assertEqual(ok, rabbitmq_stream_s3_config:check(proxy, proplists:get_value(proxy, Env))),
    ?assertEqual([{proxy, <<"http://(hidden)@proxy:3128">>}], rabbitmq_stream_s3_config:redact(Env)),
    ?assertEqual([{proxy, "http://proxy:3128"}], env([{"stream_s3.proxy", "http://proxy:3128"}])).

a_secret_is_not_in_clear_text_where_rabbitmq_logs_settings(_Config) ->
    %% The form whose value RabbitMQ's log leaves out; the broker's own suite looks into a log.
    ?assertEqual([{secret_key, [{password, <<"tell:no/one">>}]}], env([{"stream_s3.secret_key", "tell:no/one"}])).

a_secret_may_be_encrypted(_Config) ->
    ?assertEqual([{secret_key, [{password, {encrypted, <<"c2VjcmV0">>}}]}], env([{"stream_s3.secret_key", "encrypted:c2VjcmV0"}])).

setting(gc_enabled) -> "stream_s3.gc.enabled";
setting(Key) -> "stream_s3." ++ atom_to_list(Key).

%% A value that is none of the defaults.
expected({one_of, Words}) -> lists:last(Words);
expected(boolean) -> true;
expected(string) -> "text";
expected(secret) -> <<"hidden">>;
expected({integer, _Min, Max}) -> Max;
expected({integer, _Min, _Max, Word}) -> Word.

text(Type) ->
    case expected(Type) of
        Value when is_atom(Value) -> atom_to_list(Value);
        Value when is_integer(Value) -> integer_to_list(Value);
        Value when is_binary(Value) -> binary_to_list(Value);
        Value -> Value
    end.

plain([{password, Value}]) -> Value;
plain(Value) -> Value.

wrong({one_of, _}) -> ["neither"];
wrong(boolean) -> ["perhaps"];
wrong(string) -> [];
wrong(secret) -> [];
wrong({integer, Min, Max, Word}) -> ["not_" ++ atom_to_list(Word) | wrong({integer, Min, Max})];
wrong({integer, Min, Max}) -> [integer_to_list(Min - 1), integer_to_list(Max + 1), "many", "100kB", "1.5GB"].

env(Conf) ->
    case generate(Conf) of
        {error, _, _} = Error -> error({refused, said(Error)});
        Generated -> proplists:get_value(rabbitmq_stream_s3, Generated, [])
    end.

generate(Conf) ->
    {ok, _} = application:ensure_all_started(cuttlefish),
    Schema = cuttlefish_schema:files([filename:join([plugin(), "priv", "schema", "rabbitmq_stream_s3.schema"])]),
    cuttlefish_generator:map(Schema, [{string:lexemes(Setting, "."), Value} || {Setting, Value} <- Conf]).

said({error, _Phase, {errorlist, Errors}}) ->
    %% RabbitMQ dies over a reason for which cuttlefish has no sentence.
    lists:flatten([cuttlefish_error:xlate(Reason) || {error, Reason} <- Errors]).

%% --- resource file ---------------------------------------------------------------------------------------------------

the_resource_file_has_what_rabbitmq_asks_for(_Config) ->
    Ebin = filename:join(plugin(), "ebin"),
    {ok, [{application, rabbitmq_stream_s3, Keys}]} = file:consult(filename:join(Ebin, "rabbitmq_stream_s3.app")),
    Beams = lists:sort([list_to_atom(filename:basename(File, ".beam")) || File <- filelib:wildcard(filename:join(Ebin, "*.beam"))]),
    ?assertEqual([rabbitmq_stream_s3_nif], Beams -- proplists:get_value(modules, Keys)),
    ?assertEqual([], proplists:get_value(modules, Keys) -- Beams),
    ?assertNotEqual(rabbitmq_stream_s3_nif, hd(Beams)),
    ?assertEqual([], [rabbit, osiris, khepri, credentials_obfuscation] -- proplists:get_value(applications, Keys)),
    ?assertMatch([_ | _], proplists:get_value(broker_version_requirements, Keys)).

%% --- library ---------------------------------------------------------------------------------------------------------

%% The name of the newest version that the library asks for, overwritten by one that no machine has.
a_library_that_needs_a_newer_libc_says_so(Config) ->
    Text = load_error(Config, fun(Library) ->
        {match, Found} = re:run(Library, "GLIBC_2\\.[0-9]+", [global, {capture, first, binary}]),
        [Newest | _] = lists:sort(fun(A, B) -> minor(A) >= minor(B) end, lists:usort(lists:append(Found))),
        Renamed = <<"GLIBC_9.", (binary:part(Newest, 8, byte_size(Newest) - 8))/binary>>,
        %% The linker compares hashes of the names first.
        Bytes = binary:replace(Library, <<Newest/binary, 0>>, <<Renamed/binary, 0>>, [global]),
        binary:replace(Bytes, <<(elf_hash(Newest)):32/little>>, <<(elf_hash(Renamed)):32/little>>, [global])
    end),
    ?assertMatch({match, _}, re:run(Text, "needs glibc 9\\.[0-9]+ or later, and this machine has glibc 2\\.")).

a_library_of_another_version_is_refused(Config) ->
    Text = load_error(Config, fun(Library) -> Library end, fun(Dir) ->
        Beam = filename:join([Dir, "ebin", "rabbitmq_stream_s3_nif.beam"]),
        {ok, {Module, [{abstract_code, {_, Forms}}]}} = beam_lib:chunks(Beam, [abstract_code]),
        {ok, Module, Bytes} = compile:forms(older(Forms), [debug_info]),
        ok = file:write_file(Beam, Bytes)
    end),
    ?assertMatch({match, _}, re:run(Text, "built for another version of the plugin")).

each_reason_for_not_loading_names_what_was_found(_Config) ->
    Machine = #{otp => "25", nif => "2.16", libc => "glibc 2.28", architecture => "x86_64-pc-linux-gnu"},
    Explain = fun(Cause) -> rabbitmq_stream_s3_library:explain(Cause, Machine) end,
    Old = Explain({bad_lib, "Library version (2.17) not compatible (with 2.16)."}),
    ?assertMatch({match, _}, re:run(Old, "needs Erlang/OTP 26 \\(NIF 2.17\\) or later, and this is OTP 25 \\(NIF 2.16\\)")),
    Missing = Explain({load_failed, "/x.so: version `GLIBC_2.9' not found, version `GLIBC_2.34' not found"}),
    ?assertMatch({match, _}, re:run(Missing, "needs glibc 2.34 or later, and this machine has glibc 2.28")),
    Other = Explain({load_failed, "/x.so: cannot open shared object file: No such file or directory"}),
    ?assertMatch({match, _}, re:run(Other, "x86_64-pc-linux-gnu with glibc 2.28")).

load_error(Config, Change) ->
    load_error(Config, Change, fun(_Dir) -> ok end).

%% What a VM of its own says to a copy of the plugin with another library.
load_error(Config, Change, Prepare) ->
    Dir = filename:join(?config(priv_dir, Config), "rabbitmq_stream_s3-0"),
    "" = os:cmd("rm -rf '" ++ Dir ++ "' && cp -r '" ++ plugin() ++ "' '" ++ Dir ++ "'"),
    Library = filename:join([Dir, "priv", "rabbitmq_stream_s3_nif.so"]),
    {ok, Bytes} = file:read_file(Library),
    ok = file:write_file(Library, Change(Bytes)),
    ok = Prepare(Dir),
    {ok, Peer, _} = peer:start_link(#{connection => standard_io, args => ["-pa", filename:join(Dir, "ebin"), "-kernel", "logger_level", "none"]}),
    {error, Text} = peer:call(Peer, rabbitmq_stream_s3_library, load, []),
    ok = peer:stop(Peer),
    ct:pal("~ts", [Text]),
    Text.

minor(<<"GLIBC_2.", Minor/binary>>) -> binary_to_integer(Minor).

elf_hash(Name) ->
    lists:foldl(
        fun(Char, Hash0) ->
            Hash = (Hash0 bsl 4) + Char,
            High = Hash band 16#F0000000,
            (Hash bxor (High bsr 24)) band (bnot High) band 16#FFFFFFFF
        end,
        0,
        binary_to_list(Name)
    ).

%% As if the module had been written for the version before.
older(Forms) ->
    [
        case Form of
            {function, Line, on_load, 0, _} -> {function, Line, on_load, 0, older_body(Form)};
            _ -> Form
        end
     || Form <- Forms
    ].

%% Its only number is that of the version.
older_body({function, _, _, _, Clauses}) ->
    Lower = fun(Node) ->
        case erl_syntax:type(Node) of
            integer -> erl_syntax:integer(erl_syntax:integer_value(Node) - 1);
            _ -> Node
        end
    end,
    [erl_syntax:revert(erl_syntax_lib:map(Lower, Clause)) || Clause <- Clauses].

plugin() ->
    [Dir] = filelib:wildcard(filename:join(stream_s3_broker:plugin_dir(), "rabbitmq_stream_s3-*[0-9]")),
    Dir.
