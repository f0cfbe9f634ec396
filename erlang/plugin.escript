#!/usr/bin/env escript
%% Lays the plugin out as RabbitMQ takes it: `plugin.escript APPLICATION PRIV OUT' copies the compiled application and the library
%% to OUT/rabbitmq_stream_s3-VERSION, writes its resource file and its schema, and prints the name of the folder.
%%
%% The application itself depends on osiris and Khepri only, so that it also runs outside a broker. A plugin has to depend on the
%% broker, else RabbitMQ drops it.

-mode(compile).

-define(APP, rabbitmq_stream_s3).
%% Started before the plugin, in a broker that has it enabled.
-define(BROKER_APPLICATIONS, [rabbit_common, rabbit, credentials_obfuscation]).
%% The minor series on which the tests run. RabbitMQ takes each of them as `this one, any patch'.
-define(BROKERS, ["4.0.0", "4.3.0"]).
%% RabbitMQ deletes the modules of a plugin that is disabled, but a library with threads cannot be loaded a second time.
-define(KEPT, [rabbitmq_stream_s3_nif]).

main([Application, Priv, Out]) ->
    Ebin = filename:join(Application, "ebin"),
    true = code:add_patha(Ebin),
    {ok, [{application, ?APP, Keys}]} = file:consult(filename:join(Ebin, atom_to_list(?APP) ++ ".app")),
    Name = lists:concat([?APP, "-", proplists:get_value(vsn, Keys)]),
    Dir = filename:join(Out, Name),
    Modules = [list_to_atom(filename:basename(File, ".beam")) || File <- filelib:wildcard(filename:join(Ebin, "*.beam"))],
    [] = ?KEPT -- Modules,
    %% RabbitMQ loads the first one of the folder to see whether it can be loaded.
    false = lists:member(hd(lists:sort(Modules)), ?KEPT),
    [copy(filename:join(Ebin, atom_to_list(M) ++ ".beam"), filename:join(Dir, "ebin")) || M <- Modules],
    write(filename:join([Dir, "ebin", atom_to_list(?APP) ++ ".app"]), resource(Keys, Modules)),
    copy(filename:join(Priv, "rabbitmq_stream_s3_nif.so"), filename:join(Dir, "priv")),
    write(filename:join([Dir, "priv", "schema", atom_to_list(?APP) ++ ".schema"]), [mapping(Row) || Row <- rabbitmq_stream_s3_config:table()]),
    io:format("~ts~n", [Name]).

resource(Keys0, Modules) ->
    {applications, Needed} = lists:keyfind(applications, 1, Keys0),
    Changes = [
        {modules, lists:sort(Modules) -- ?KEPT},
        {applications, Needed ++ (?BROKER_APPLICATIONS -- Needed)},
        {broker_version_requirements, ?BROKERS}
    ],
    Keys = lists:foldl(fun({Key, _} = Change, Acc) -> lists:keystore(Key, 1, Acc, Change) end, Keys0, Changes),
    io_lib:format("~tp.~n", [{application, ?APP, Keys}]).

%% --- schema ----------------------------------------------------------------------------------------------------------

%% No defaults here: what is not set is not in the environment, and the configuration module knows what that means.
mapping(#{key := Key, type := Type, unit := Unit, reason := Reason}) ->
    Setting = setting(Key),
    Target = lists:concat([?APP, ".", Key]),
    {Datatypes, Range} = datatypes(Type, Unit),
    Validators = [[", {validators, [\"", Setting, "\"]}"] || Range =/= any],
    [
        ["%% ", [[Unit, ": "] || Unit =/= <<>>], Reason, $\n],
        io_lib:format("{mapping, \"~ts\", \"~ts\", [{datatype, ~0tp}~ts]}.~n", [Setting, Target, Datatypes, Validators]),
        validator(Setting, Unit, Range),
        translation(Type, Unit, Setting, Target),
        $\n
    ].

%% One name has a dot where the application has an underscore, as those of RabbitMQ's own switches have.
setting(gc_enabled) -> "stream_s3.gc.enabled";
setting(Key) -> lists:concat(["stream_s3.", Key]).

datatypes({one_of, Words}, _) -> {[{enum, Words}], any};
datatypes(boolean, _) -> {[{enum, [true, false]}], any};
datatypes(string, _) -> {[string], any};
datatypes(secret, _) -> {[tagged_binary, binary], any};
datatypes({integer, Min, Max}, Unit) -> numbers(is_size(Unit), {Min, Max, []});
datatypes({integer, Min, Max, Word}, Unit) -> numbers(is_size(Unit), {Min, Max, [Word]}).

numbers(true, Range) -> {[string], Range};
numbers(false, {_, _, []} = Range) -> {[integer], Range};
numbers(false, {_, _, Words} = Range) -> {[{enum, Words}, integer], Range}.

%% What is counted in bytes may be written as `64MB'. cuttlefish has a type for that, but over a text that is none it dies, and does
%% not say which setting it is about.
is_size(<<"bytes", _/binary>>) -> true;
is_size(_Unit) -> false.

%% As cuttlefish reads it. An expression over `Text', for a function of a schema cannot call another one.
size_of_text(Words) ->
    io_lib:format(
        "case re:run(Text, \"^([0-9]+)(KB|kb|MB|mb|GB|gb|)$\", [dollar_endonly, {capture, all_but_first, list}]) of~n"
        "        {match, [Digits, Unit]} ->~n"
        "            list_to_integer(Digits) * proplists:get_value(string:uppercase(Unit), [{\"KB\", 1 bsl 10}, {\"MB\", 1 bsl 20}, {\"GB\", 1 bsl 30}], 1);~n"
        "        nomatch ->~n"
        "            proplists:get_value(Text, ~0p)~n"
        "    end",
        [[{atom_to_list(Word), Word} || Word <- Words]]
    ).

validator(_Setting, _Unit, any) ->
    [];
validator(Setting, Unit, Range) ->
    case is_size(Unit) of
        true -> size_validator(Setting, Range);
        false -> number_validator(Setting, Range)
    end.

size_validator(Setting, {Min, Max, Words}) ->
    io_lib:format(
        "{validator, \"~ts\", \"must be ~tsa number of bytes from ~b to ~b, which may have a unit: KB, MB or GB\",~n"
        "    fun(Text) -> V = ~ts, lists:member(V, ~w) orelse (is_integer(V) andalso V >= ~b andalso V =< ~b) end}.~n",
        [Setting, [[atom_to_list(Word), " or "] || Word <- Words], Min, Max, size_of_text(Words), Words, Min, Max]
    ).

number_validator(Setting, {Min, Max, Words}) ->
    io_lib:format(
        "{validator, \"~ts\", \"must be ~tsan integer from ~b to ~b\",~n"
        "    fun(V) -> lists:member(V, ~w) orelse (is_integer(V) andalso V >= ~b andalso V =< ~b) end}.~n",
        [Setting, [[atom_to_list(Word), " or "] || Word <- Words], Min, Max, Words, Min, Max]
    ).

%% RabbitMQ writes all settings to its log at level debug, but of a list like this one it hides the value. With the tag `encrypted' it
%% replaces the value by the decrypted one, also inside of the list. Any other `tag' is a secret with a colon in it.
translation(secret, _Unit, Setting, Target) ->
    io_lib:format(
        "{translation, \"~ts\", fun(Conf) ->~n"
        "    Value = case cuttlefish:conf_get(\"~ts\", Conf) of~n"
        "        {encrypted, Encrypted} -> {encrypted, iolist_to_binary(Encrypted)};~n"
        "        {Tag, Rest} -> unicode:characters_to_binary([atom_to_list(Tag), $:, Rest]);~n"
        "        Plain -> unicode:characters_to_binary(Plain)~n"
        "    end,~n"
        "    [{password, Value}]~n"
        "end}.~n",
        [Target, Setting]
    );
%% A URL may have a password in it.
translation(string, <<"URL">>, Setting, Target) ->
    io_lib:format(
        "{translation, \"~ts\", fun(Conf) ->~n"
        "    Text = cuttlefish:conf_get(\"~ts\", Conf),~n"
        "    case lists:member($@, Text) of true -> [{password, unicode:characters_to_binary(Text)}]; false -> Text end~n"
        "end}.~n",
        [Target, Setting]
    );
translation(Type, Unit, Setting, Target) ->
    case is_size(Unit) of
        true -> io_lib:format("{translation, \"~ts\", fun(Conf) -> Text = cuttlefish:conf_get(\"~ts\", Conf), ~ts end}.~n", [Target, Setting, size_of_text(words(Type))]);
        false -> []
    end.

words({integer, _Min, _Max}) -> [];
words({integer, _Min, _Max, Word}) -> [Word].

%% --- files -----------------------------------------------------------------------------------------------------------

copy(File, Dir) ->
    To = filename:join(Dir, filename:basename(File)),
    ok = filelib:ensure_dir(To),
    {ok, _} = file:copy(File, To).

write(File, Text) ->
    ok = filelib:ensure_dir(File),
    ok = file:write_file(File, unicode:characters_to_binary(Text)).
