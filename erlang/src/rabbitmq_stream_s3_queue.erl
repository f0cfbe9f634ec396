%% @doc What the queue behind a stream says of its tier. A queue overrides four of the settings: by a key of its policy, which may
%% change at any time, or by an argument of its declaration. RabbitMQ's own rule for streams holds: a policy wins over an argument.
%%
%% Outside a broker, and for a queue that is just being deleted, the settings of the application hold. Reads are lookups in tables of
%% this node; nothing is kept here.
-module(rabbitmq_stream_s3_queue).
-behaviour(rabbit_policy_validator).

-export([setting/2, limits/1, tiered/0, complaints/1]).
-export([register_keys/0, unregister_keys/0, validate_policy/1]).
-export_type([overridden/0]).

%% RabbitMQ refuses keys of policies that nobody has registered. Known from the boot on, so that definitions can be imported then.
-rabbit_boot_step(
    {?MODULE, [
        {description, "policy keys of tiered storage for streams"},
        {mfa, {?MODULE, register_keys, []}},
        {cleanup, {?MODULE, unregister_keys, []}},
        {requires, rabbit_registry},
        {enables, recovery}
    ]}
).

-define(OVERRIDES, [
    {<<"tiered">>, tiered},
    {<<"fragment-target-size">>, fragment_target_size},
    {<<"remote-max-bytes">>, remote_max_bytes},
    {<<"remote-max-age-ms">>, remote_max_age_ms}
]).

-type overridden() :: tiered | fragment_target_size | remote_max_bytes | remote_max_age_ms.

%% @doc The value that holds for one stream. `Reference' is osiris' name for it; in a broker it is the queue.
-spec setting(overridden(), Reference :: term()) -> term().
setting(Key, Reference) ->
    case lookup(Reference) of
        {ok, Queue} ->
            case override(Key, Queue) of
                {ok, Value} -> Value;
                none -> rabbitmq_stream_s3_config:get(Key)
            end;
        none ->
            rabbitmq_stream_s3_config:get(Key)
    end.

%% @doc The limits of a stream's remote tier. Where local segments are deleted once they are uploaded, the tier is what is left of the
%% stream, so the queue's own `max-length-bytes' and `max-age' limit the tier, unless the tier has a limit of its own.
-spec limits(Reference :: term()) -> [rabbitmq_stream_s3_retention:limit()].
limits(Reference) ->
    Own = own_limits(rabbitmq_stream_s3_config:get(local_retention), Reference),
    Tier = [{max_bytes, setting(remote_max_bytes, Reference)}, {max_age, setting(remote_max_age_ms, Reference)}],
    Set = [Limit || {_, Value} = Limit <- Tier, Value =/= unlimited],
    Set ++ [Limit || {Kind, _} = Limit <- Own, not lists:keymember(Kind, 1, Set)].

own_limits(policy, _Reference) ->
    [];
own_limits(uploaded, Reference) ->
    case lookup(Reference) of
        {ok, Queue} ->
            [{max_bytes, Bytes} || Bytes <- [own(<<"max-length-bytes">>, Queue)], is_integer(Bytes)] ++
                [{max_age, Ms} || Age <- [own(<<"max-age">>, Queue)], is_binary(Age), Ms <- [rabbit_amqqueue:check_max_age(Age)], is_integer(Ms)];
        none ->
            []
    end.

%% @doc For each stream whose queue has a say in it, whether it is to be tiered. Looks at all streams of the broker.
-spec tiered() -> #{StreamId :: binary() => all | none}.
tiered() ->
    case rabbitmq_stream_s3_metadata:in_broker() of
        true ->
            maps:from_list([
                {iolist_to_binary(Name), Value}
             || Queue <- rabbit_db_queue:get_all_by_type(rabbit_stream_queue),
                {ok, Value} <- [override(tiered, Queue)],
                #{name := Name} <- [amqqueue:get_type_state(Queue)]
            ]);
        false ->
            #{}
    end.

%% @doc What a queue's arguments say that cannot be meant, one sentence each. RabbitMQ checks no arguments that it does not know, so
%% such a one is passed over.
-spec complaints(Reference :: term()) -> [Text :: binary()].
complaints(Reference) ->
    case lookup(Reference) of
        {ok, Queue} ->
            [
                iolist_to_binary([argument(Name), ": ", Text])
             || {Name, Key} <- ?OVERRIDES,
                {_Type, Value} <- [rabbit_misc:table_lookup(amqqueue:get_arguments(Queue), argument(Name))],
                {error, Text} <- [valid(Key, Value)]
            ];
        none ->
            []
    end.

lookup(Reference) ->
    case rabbitmq_stream_s3_metadata:in_broker() of
        true ->
            case rabbit_amqqueue:lookup(Reference) of
                {ok, Queue} -> {ok, Queue};
                {error, _NotFound} -> none
            end;
        false ->
            none
    end.

override(Key, Queue) ->
    {Name, Key} = lists:keyfind(Key, 2, ?OVERRIDES),
    Said = [
        rabbit_policy:get(policy_key(Name), Queue)
        | [Value || {_Type, Value} <- [rabbit_misc:table_lookup(amqqueue:get_arguments(Queue), argument(Name))]]
    ],
    case [Value || One <- Said, One =/= undefined, {ok, Value} <- [valid(Key, One)]] of
        [Value | _] -> {ok, Value};
        [] -> none
    end.

%% What a stream's retention is set to, in the way RabbitMQ finds it.
own(Name, Queue) ->
    case {rabbit_policy:get(Name, Queue), rabbit_misc:table_lookup(amqqueue:get_arguments(Queue), <<"x-", Name/binary>>)} of
        {undefined, undefined} -> undefined;
        {undefined, {_Type, Value}} -> Value;
        {Value, _} -> Value
    end.

policy_key(Name) -> <<"stream-s3-", Name/binary>>.
argument(Name) -> <<"x-stream-s3-", Name/binary>>.

%% Words come as strings, whoever writes them.
valid(Key, Value0) ->
    Value = word(Value0),
    case rabbitmq_stream_s3_config:check(Key, Value) of
        ok -> {ok, Value};
        {error, _} = Error -> Error
    end.

word(<<"all">>) -> all;
word(<<"none">>) -> none;
word(<<"unlimited">>) -> unlimited;
word(Value) -> Value.

%% --- policies --------------------------------------------------------------------------------------------------------

%% @doc Makes RabbitMQ accept our keys in policies.
-spec register_keys() -> ok.
register_keys() ->
    lists:foreach(fun({Name, _}) -> rabbit_registry:register(policy_validator, policy_key(Name), ?MODULE) end, ?OVERRIDES).

%% @doc Takes the keys back. Policies that have them stay as they are.
-spec unregister_keys() -> ok.
unregister_keys() ->
    lists:foreach(fun({Name, _}) -> rabbit_registry:unregister(policy_validator, policy_key(Name)) end, ?OVERRIDES).

%% @private
validate_policy(Terms) ->
    Checks = [valid(Key, Value) || {Name, Key} <- ?OVERRIDES, {PolicyKey, Value} <- Terms, PolicyKey =:= policy_key(Name)],
    case [Text || {error, Text} <- Checks] of
        [] -> ok;
        [Text | _] -> {error, "~ts", [Text]}
    end.
