%% @doc Every knob of the application: name, type, unit, default and the reason for the default.
%%
%% Values come from the application environment of `rabbitmq_stream_s3'. Nothing else in this code base holds a default.
%% {@link validate/0} runs at application start and refuses what cannot be meant; {@link get/1} also works before that,
%% and without the application. Reads are lookups in the environment: cheap, and a changed value is seen at once by those
%% who read it again.
-module(rabbitmq_stream_s3_config).

-compile({no_auto_import, [get/1]}).

-export([get/1, validate/0, validate/1, check/2, table/0, store_settings/0, redact/1, hide_secrets/0]).
-export_type([key/0, row/0, type/0]).

-define(APP, rabbitmq_stream_s3).
-define(HIDDEN, <<"(hidden)">>).
%% A number that no size, rate or delay here has a use for, yet small enough for every native integer type.
-define(MAX, 1 bsl 62).
%% The longest time that the timers of the runtime system take.
-define(MAX_MS, 16#FFFFFFFF).

-type key() :: atom().
-type type() ::
    {one_of, [atom()]}
    | string
    | secret
    | boolean
    | {integer, Min :: integer(), Max :: integer()}
    | {integer, Min :: integer(), Max :: integer(), Word :: atom()}.
%% `Word' may stand in place of the number.
-type row() :: #{
    key := key(),
    type := type(),
    unit := binary(),
    default := term(),
    reason := binary()
}.
%% `undefined' as default: not set.

%% @doc The value of a knob, or its default. Strings come as binaries. Raises `badarg' for a name that is no knob.
-spec get(key()) -> term().
get(Key) ->
    #{type := Type, default := Default} = row(Key),
    case application:get_env(?APP, Key) of
        {ok, Value} -> normal(Type, Value);
        undefined -> Default
    end.

%% @doc Checks the application environment. See {@link validate/1}.
-spec validate() -> ok | {error, Text :: binary()}.
validate() ->
    validate(application:get_all_env(?APP)).

%% @doc Checks settings as they stand in the environment: no unknown key, right types, values in range, no contradiction.
%% The text is one sentence that names the key and what is expected of it; it never contains a secret.
-spec validate([{key(), term()}] | #{key() => term()}) -> ok | {error, Text :: binary()}.
validate(Env) when is_map(Env) ->
    validate(maps:to_list(Env));
validate(Env0) ->
    %% OTP puts this key into each environment.
    Env = [{K, V} || {K, V} <- Env0, K =/= included_applications],
    Checks = [fun() -> check_key(K, V) end || {K, V} <- lists:sort(Env)] ++ [fun() -> check_all(maps:from_list(Env)) end],
    first_error(Checks).

%% @doc Checks one value of one knob, for those that have it from somewhere else than the environment.
-spec check(key(), term()) -> ok | {error, Text :: binary()}.
check(Key, Value) ->
    check_key(Key, Value).

%% @doc Replaces the secrets in the environment, and URLs with a password in them, by what RabbitMQ's obfuscation of credentials
%% makes of them, so that they are read neither in `rabbitmqctl environment' nor in a crash report. Outside a broker they stay as they are.
-spec hide_secrets() -> ok.
hide_secrets() ->
    case lists:keymember(credentials_obfuscation, 1, application:which_applications(infinity)) of
        true -> lists:foreach(fun hide_secret/1, [{Key, Type} || {Key, Type, _, _, _} <- rows(), Type =:= secret orelse Type =:= string]);
        false -> ok
    end.

hide_secret({Key, Type}) ->
    case application:get_env(?APP, Key) of
        undefined -> ok;
        {ok, {obfuscated, _}} -> ok;
        {ok, _} -> hide_secret(Type, Key, get(Key))
    end.

hide_secret(string, Key, Value) ->
    case without_password(Value) of
        Value -> ok;
        _ -> hide_secret(secret, Key, Value)
    end;
hide_secret(secret, Key, Secret) ->
    %% Persistent, as RabbitMQ sets it: a plugin that is disabled is unloaded, and finds its settings again when it is enabled.
    %% In a tuple of our own: RabbitMQ takes what is tagged `encrypted' for a secret of the configuration file, whenever a plugin is
    %% enabled.
    application:set_env(?APP, Key, {obfuscated, credentials_obfuscation:encrypt(Secret)}, [{persistent, true}]).

%% @doc All knobs, in the order in which a reader wants them: where to store, what, when, how fast, and the rest.
-spec table() -> [row()].
table() ->
    [#{key => K, type => T, unit => U, default => D, reason => R} || {K, T, U, D, R} <- rows()].

%% @doc What opens the store: the knobs of the store that are set, and those that have a default.
-spec store_settings() -> #{key() => atom() | boolean() | binary()}.
store_settings() ->
    Keys = [
        store, fs_dir, bucket, region, endpoint, prefix, access_key_id, secret_key, session_token, ca_file, proxy,
        kms_key_id, storage_class, expected_bucket_owner
    ],
    Settings = #{K => V || K <- Keys, V <- [get(K)], V =/= undefined},
    Settings#{path_style => path_style()}.

%% Own servers rarely have a DNS name for each bucket, so an endpoint means path style unless the user says otherwise.
path_style() ->
    case get(path_style) of
        undefined -> get(endpoint) =/= undefined;
        Said -> Said
    end.

%% @doc The same settings with everything hidden that must not reach a log or a status: secrets, and passwords inside URLs.
-spec redact(#{key() => term()} | [{key(), term()}]) -> #{key() => term()} | [{key(), term()}].
redact(Settings) when is_map(Settings) ->
    maps:map(fun redact/2, Settings);
redact(Settings) ->
    [{K, redact(K, V)} || {K, V} <- Settings].

redact(Key, Value) ->
    case lists:keyfind(Key, 1, rows()) of
        {_, _, _, _, _} when is_tuple(Value), element(1, Value) =:= obfuscated -> ?HIDDEN;
        {_, secret, _, _, _} -> ?HIDDEN;
        {_, string, _, _, _} -> without_password(Value);
        {_, _, _, _, _} -> Value;
        %% A misspelt `secret_key' is a secret, too.
        false -> ?HIDDEN
    end.

without_password([{password, Value}]) ->
    without_password(Value);
without_password(Value) ->
    case text(Value) of
        {ok, Text} -> re:replace(Text, "://[^/@]*@", "://(hidden)@", [{return, binary}, unicode]);
        error -> Value
    end.

%% --- the table -------------------------------------------------------------------------------------------------------

row(Key) ->
    case lists:keyfind(Key, 1, rows()) of
        {_, Type, Unit, Default, Reason} ->
            #{key => Key, type => Type, unit => Unit, default => Default, reason => Reason};
        false ->
            error(badarg, [Key])
    end.

rows() ->
    [
        %% Where.
        {store, {one_of, [s3, fs]}, <<>>, s3, <<"S3 is what tiering is for; fs is a directory, for trying it out and for tests">>},
        {fs_dir, string, <<"path">>, undefined, <<"needed with store = fs; there is no directory that is right everywhere">>},
        {bucket, string, <<>>, undefined, <<"needed with store = s3; it must exist">>},
        {region, string, <<>>, undefined, <<"needed unless there is an endpoint, whose region is us-east-1 then">>},
        {endpoint, string, <<"URL">>, undefined, <<"only for servers other than AWS">>},
        {path_style, boolean, <<>>, undefined, <<"when unset, true with an endpoint: own servers rarely have a DNS name for each bucket">>},
        {prefix, string, <<>>, <<"rabbitmq">>, <<"keeps the objects apart from others in the bucket">>},
        {access_key_id, string, <<>>, undefined, <<"when unset, the SDK's chain finds credentials">>},
        {secret_key, secret, <<>>, undefined, <<"goes with access_key_id">>},
        {session_token, secret, <<>>, undefined, <<"goes with access_key_id, for temporary credentials">>},
        {ca_file, string, <<"path of a PEM file">>, undefined, <<"the system's certificates serve unless the store has its own authority">>},
        {proxy, string, <<"URL">>, undefined, <<"straight to the store">>},
        {kms_key_id, string, <<>>, undefined, <<"the bucket's own encryption setting holds">>},
        {storage_class, string, <<>>, undefined, <<"the store's default class">>},
        {expected_bucket_owner, string, <<"account id">>, undefined, <<"set it to be refused by a bucket that changed hands">>},
        %% What, and in which portions.
        {tiered, {one_of, [all, none]}, <<>>, all, <<"who enables the plugin wants it; a queue may say otherwise">>},
        {fragment_target_size, {integer, 1, 1 bsl 32}, <<"bytes">>, 67108864,
            <<"large enough that requests cost little next to bytes, small enough to repeat">>},
        {fragment_max_age_ms, {integer, 1, ?MAX_MS, infinity}, <<"ms">>, 600000,
            <<"bounds how long a slow stream stays untiered; infinity: only size cuts">>},
        {persist_threshold, {integer, 1, 1000000}, <<"fragments">>, 5, <<"a busy stream writes one root for several fragments">>},
        {persist_interval_ms, {integer, 1, ?MAX_MS}, <<"ms">>, 2000, <<"a slow stream is still published within seconds">>},
        {rebalance_threshold, {integer, 2, 4096}, <<"entries">>, 1024,
            <<"keeps the root below some hundred kilobytes, as it is written anew each time">>},
        %% How fast.
        {max_transfer_bytes_per_sec, {integer, 1, ?MAX, unlimited}, <<"bytes/s">>, unlimited,
            <<"the network's own limit serves until uploads are seen to disturb others">>},
        {max_transfer_burst_bytes, {integer, 1, ?MAX}, <<"bytes">>, undefined,
            <<"when unset, a fifth of the rate: one burst lasts 200 ms">>},
        {upload_concurrency, {integer, 1, 1024}, <<"uploads a node">>, 16, <<"fills a 10 Gbit/s link to S3; each holds some buffers">>},
        {max_in_flight_fragments, {integer, 1, 100000}, <<"fragments a stream">>, 8,
            <<"one stream cannot take every permit of the node for long">>},
        {pinned_segment_bytes, {integer, 0, ?MAX}, <<"bytes a node">>, 2147483648,
            <<"disk that deleted segments may still hold until they are uploaded; 0: what retention deletes first is lost for the tier">>},
        %% When something fails.
        {upload_retry_delay_ms, {integer, 1, ?MAX_MS}, <<"ms">>, 1000, <<"first delay after an error that needs an operator">>},
        {upload_retry_delay_max_ms, {integer, 1, ?MAX_MS}, <<"ms">>, 30000, <<"uploads resume within half a minute after the cause is mended">>},
        {task_retry_delay_ms, {integer, 1, ?MAX_MS}, <<"ms">>, 10, <<"first delay after a passing error, behind one retry at once">>},
        {task_retry_delay_max_ms, {integer, 1, ?MAX_MS}, <<"ms">>, 5000, <<"a store that is back is noticed within seconds">>},
        {transfer_deadline_ms, {integer, 1, ?MAX_MS}, <<"ms">>, 180000,
            <<"of one upload from its admission, times max(1, size / 64 MiB): well above what S3 ever needs">>},
        {persist_timeout_ms, {integer, 1, ?MAX_MS}, <<"ms">>, 60000, <<"longer than an election of the metadata store">>},
        {retention_timeout_ms, {integer, 1, ?MAX_MS}, <<"ms">>, 60000, <<"as for a persist: it reads groups and writes a root">>},
        %% What may go.
        {local_retention, {one_of, [policy, uploaded]}, <<>>, policy, <<"stock brokers serve consumers from local segments only">>},
        {remote_max_bytes, {integer, 1, ?MAX, unlimited}, <<"bytes a stream">>, unlimited, <<"nothing is deleted unless somebody asks for it">>},
        {remote_max_age_ms, {integer, 1, ?MAX, unlimited}, <<"ms">>, unlimited, <<"nothing is deleted unless somebody asks for it">>},
        {discarded_tier_grace_ms, {integer, 0, ?MAX}, <<"ms">>, 86400000, <<"a day to notice that a tier was discarded, and to save its objects">>},
        %% Upkeep.
        {reconciliation_interval_ms, {integer, 1, ?MAX_MS}, <<"ms">>, 60000, <<"how late a new stream is found; the look costs one local call">>},
        {bucket_check_interval_ms, {integer, 1, ?MAX_MS}, <<"ms">>, 300000, <<"a handful of requests each time">>},
        {gc_enabled, boolean, <<>>, false, <<"orphans cost money but do no harm; deleting asks for consent">>},
        {gc_interval_ms, {integer, 1, ?MAX_MS}, <<"ms">>, 86400000, <<"a full listing costs requests">>},
        {gc_mode, {one_of, [delete, dry_run]}, <<>>, delete, <<"who enables it wants it to delete; dry_run only counts">>},
        {gc_min_age_ms, {integer, 0, ?MAX}, <<"ms">>, 3600000, <<"far longer than any upload takes to be listed in a root">>},
        %% History segments.
        {history_upload_concurrency, {integer, 1, 1024}, <<"uploads">>, 16, <<"bounds the bodies held in memory">>},
        {history_rescan_interval_ms, {integer, 1, ?MAX_MS}, <<"ms">>, 60000, <<"how late a missed segment is found">>},
        {history_purge_wait_ms, {integer, 0, ?MAX_MS}, <<"ms">>, 60000, <<"abandoned requests have ended by then">>}
    ].

%% --- checks ----------------------------------------------------------------------------------------------------------

first_error([]) ->
    ok;
first_error([Check | Rest]) ->
    case Check() of
        ok -> first_error(Rest);
        {error, _} = Error -> Error
    end.

check_key(Key, Value) ->
    case lists:keyfind(Key, 1, rows()) of
        {_, Type, _Unit, _Default, _Reason} ->
            case is_of_type(Type, Value) of
                true -> ok;
                false -> refuse("~ts must be ~ts, not ~ts", [Key, expected(Type), shown(Type, Value)])
            end;
        false ->
            refuse("there is no setting ~0tp~ts", [Key, hint(Key)])
    end.

is_of_type({one_of, Words}, Value) ->
    lists:member(Value, Words);
is_of_type(boolean, Value) ->
    is_boolean(Value);
is_of_type({integer, Min, Max}, Value) ->
    is_integer(Value) andalso Value >= Min andalso Value =< Max;
is_of_type({integer, Min, Max, Word}, Value) ->
    Value =:= Word orelse is_of_type({integer, Min, Max}, Value);
is_of_type(Type, {obfuscated, _Ours}) when Type =:= string; Type =:= secret ->
    true;
is_of_type(Type, [{password, Value}]) when Type =:= string; Type =:= secret ->
    is_of_type(Type, Value);
is_of_type(Type, Value) when Type =:= string; Type =:= secret ->
    case text(Value) of
        {ok, <<>>} -> false;
        {ok, Text} -> not lists:any(fun(C) -> C < 32 end, unicode:characters_to_list(Text));
        error -> false
    end.

expected({one_of, Words}) -> lists:join(" or ", [atom_to_list(W) || W <- Words]);
expected(boolean) -> "true or false";
expected(string) -> "a non-empty string without control characters";
expected(secret) -> "a non-empty string without control characters";
expected({integer, Min, Max}) -> io_lib:format("an integer from ~b to ~b", [Min, Max]);
expected({integer, Min, Max, Word}) -> io_lib:format("~ts or an integer from ~b to ~b", [Word, Min, Max]).

shown(secret, _Value) -> "what it is set to";
shown(string, Value) -> quoted(without_password(Value));
shown(_Type, Value) -> io_lib:format("~0tP", [Value, 20]).

%% Strings may be lists or binaries, but people wrote them between quotes.
quoted(Value) ->
    case text(Value) of
        {ok, Text} -> io_lib:write_string(string:slice(unicode:characters_to_list(Text), 0, 100));
        error -> io_lib:format("~0tP", [Value, 20])
    end.

%% A misspelt key is the usual reason.
hint(Key) when is_atom(Key) ->
    Name = atom_to_list(Key),
    Scored = [{string:jaro_similarity(Name, atom_to_list(K)), K} || {K, _, _, _, _} <- rows()],
    case lists:max(Scored) of
        {Score, Nearest} when Score > 0.85 -> io_lib:format(" (~ts is meant?)", [Nearest]);
        _ -> ""
    end;
hint(_Key) ->
    "".

check_all(Env) ->
    Get = fun(Key) ->
        #{type := Type, default := Default} = row(Key),
        case Env of
            #{Key := Value} -> normal(Type, Value);
            #{} -> Default
        end
    end,
    first_error([fun() -> Check(Get) end || Check <- contradictions()]).

contradictions() ->
    [
        fun(Get) -> needs(Get, store, s3, bucket, "the name of the bucket") end,
        fun(Get) -> needs(Get, store, fs, fs_dir, "the directory for the objects") end,
        fun(Get) -> together(Get, access_key_id, secret_key) end,
        fun(Get) -> together(Get, secret_key, access_key_id) end,
        fun(Get) -> together(Get, session_token, access_key_id) end,
        fun(Get) -> not_above(Get, upload_retry_delay_ms, upload_retry_delay_max_ms) end,
        fun(Get) -> not_above(Get, task_retry_delay_ms, task_retry_delay_max_ms) end,
        fun check_burst/1,
        fun check_prefix/1
    ].

needs(Get, Key, Value, Needed, What) ->
    case Get(Key) =:= Value andalso Get(Needed) =:= undefined of
        true -> refuse("~ts is not set: with ~ts = ~ts it must be ~ts", [Needed, Key, Value, What]);
        false -> ok
    end.

together(Get, Key, Other) ->
    case Get(Key) =/= undefined andalso Get(Other) =:= undefined of
        true -> refuse("~ts is set, so ~ts must be set as well", [Key, Other]);
        false -> ok
    end.

not_above(Get, Low, High) ->
    case Get(Low) =< Get(High) of
        true -> ok;
        false -> refuse("~ts must not be above ~ts, but ~b is above ~b", [Low, High, Get(Low), Get(High)])
    end.

check_burst(Get) ->
    case Get(max_transfer_burst_bytes) =/= undefined andalso Get(max_transfer_bytes_per_sec) =:= unlimited of
        true -> refuse("max_transfer_burst_bytes is set, so max_transfer_bytes_per_sec must be a number, not unlimited", []);
        false -> ok
    end.

%% Keys are built as <prefix>/stream/..., so a slash at an end would make an empty path element.
check_prefix(Get) ->
    Prefix = Get(prefix),
    case re:run(Prefix, "^[A-Za-z0-9!_.*'()=-]+(/[A-Za-z0-9!_.*'()=-]+)*$", [dollar_endonly, {capture, none}]) of
        match when byte_size(Prefix) =< 512 ->
            ok;
        _ ->
            refuse(
                "prefix must be at most 512 characters of A-Z a-z 0-9 ! _ . * ' ( ) = - with single slashes in between, not ~ts",
                [quoted(Prefix)]
            )
    end.

refuse(Format, Args) ->
    {error, unicode:characters_to_binary(io_lib:format(Format, Args))}.

%% --- values ----------------------------------------------------------------------------------------------------------

%% How our schema hands it over: RabbitMQ does not log the value of such a list.
normal(Type, [{password, Value}]) when Type =:= string; Type =:= secret ->
    normal(Type, Value);
normal(Type, {obfuscated, Hidden}) when Type =:= string; Type =:= secret ->
    credentials_obfuscation:decrypt(Hidden);
normal(Type, Value) when Type =:= string; Type =:= secret ->
    case text(Value) of
        {ok, Text} -> Text;
        error -> Value
    end;
normal(_Type, Value) ->
    Value.

text(Value) when is_list(Value); is_binary(Value) ->
    try unicode:characters_to_binary(Value) of
        Text when is_binary(Text) -> {ok, Text};
        _ -> error
    catch
        error:badarg -> error
    end;
text(_Value) ->
    error.
