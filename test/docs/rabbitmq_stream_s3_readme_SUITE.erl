%% @doc What the documents say of the settings is what the configuration module says.
-module(rabbitmq_stream_s3_readme_SUITE).

-include_lib("stdlib/include/assert.hrl").

-export([all/0, settings/0]).
-export([the_table_of_settings_is_that_of_the_configuration/1, each_setting_that_the_readme_names_exists/1]).

all() ->
    [the_table_of_settings_is_that_of_the_configuration, each_setting_that_the_readme_names_exists].

%% @doc The lines of the README's table of settings.
settings() ->
    [row(Row) || Row <- rabbitmq_stream_s3_config:table()].

the_table_of_settings_is_that_of_the_configuration(_Config) ->
    Expected = settings(),
    Found = [Line || <<"| `", _/binary>> = Line <- section(<<"## Settings">>)],
    %% The lines to put there are in the difference.
    ?assertEqual([], Expected -- Found),
    ?assertEqual(Expected, Found).

each_setting_that_the_readme_names_exists(_Config) ->
    Keys = [atom_to_binary(Key) || #{key := Key} <- rabbitmq_stream_s3_config:table()],
    {match, Named} = re:run(readme(), "`((?:remote|local|fragment|upload|task|persist|transfer|gc|history|store)_[a-z_]+)`", [
        global, {capture, all_but_first, binary}
    ]),
    ?assertEqual([], lists:usort(lists:append(Named)) -- Keys).

row(#{key := Key, type := Type, unit := Unit, default := Default, reason := Reason}) ->
    iolist_to_binary(io_lib:format("| `~ts` | ~ts | ~ts | ~ts |", [Key, values(Type, Unit), default(Default), Reason])).

values({one_of, Words}, _) -> lists:join(", ", [["`", atom_to_list(W), "`"] || W <- Words]);
values(boolean, _) -> "`true`, `false`";
values(secret, _) -> "text, kept secret";
values(string, <<>>) -> "text";
values(string, Unit) -> Unit;
values({integer, Min, Max}, Unit) -> number(Min, Max, Unit);
values({integer, Min, Max, Word}, Unit) -> [number(Min, Max, Unit), ", `", atom_to_list(Word), "`"].

%% Upper ends that only keep numbers within machine words say nothing to a user.
number(Min, Max, Unit) when Max >= 16#FFFFFFFF -> io_lib:format("~ts, ~b or more", [Unit, Min]);
number(Min, Max, Unit) -> io_lib:format("~ts, ~b to ~b", [Unit, Min, Max]).

default(undefined) -> "not set";
default(Value) when is_binary(Value); is_atom(Value) -> io_lib:format("`~ts`", [Value]);
default(Value) when is_integer(Value) -> integer_to_list(Value).

section(Title) ->
    Lines = binary:split(readme(), <<"\n">>, [global]),
    [Title | Rest] = lists:dropwhile(fun(Line) -> Line =/= Title end, Lines),
    lists:takewhile(fun(Line) -> not is_title(Line) end, Rest).

is_title(<<"## ", _/binary>>) -> true;
is_title(_) -> false.

readme() ->
    {ok, Text} = file:read_file(filename:join(root(filename:dirname(code:which(?MODULE))), "README.md")),
    Text.

%% The suite may have been compiled anywhere below the checkout.
root(Dir) ->
    case filelib:is_regular(filename:join(Dir, "ARCHITECTURE.md")) of
        true -> Dir;
        false when Dir =/= "/" -> root(filename:dirname(Dir))
    end.
