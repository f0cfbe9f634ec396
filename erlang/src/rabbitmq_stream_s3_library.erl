%% @doc Loads the native library when the application starts, and says in one sentence why it cannot be loaded: what it needs, and
%% what was found. At the first call it would be an `undef' in some process.
-module(rabbitmq_stream_s3_library).

-include("rabbitmq_stream_s3_nif.hrl").

-export([load/0, explain/2]).
-export_type([cause/0, machine/0]).

%% What `erlang:load_nif/2' gives as the reason.
-type cause() :: {Class :: atom(), Text :: string()}.
%% What the library meets here.
-type machine() :: #{otp := string(), nif := string(), libc := string(), architecture := string()}.

%% @doc Loads it, unless it is loaded: a broker that disables the plugin keeps it. What is loaded may then belong to an earlier
%% version of the plugin, and no library can take the place of another within one VM.
-spec load() -> ok | {error, Text :: binary()}.
load() ->
    case code:ensure_loaded(rabbitmq_stream_s3_nif) of
        {module, _} -> check_version(rabbitmq_stream_s3_nif:abi_version());
        {error, Reason} -> {error, explain(cause(Reason), machine())}
    end.

check_version(?ABI_VERSION) ->
    ok;
check_version(Loaded) ->
    {error, text("this node has the native library of another version of the plugin in use (interface ~b, this version needs ~b): restart the node", [
        Loaded, ?ABI_VERSION
    ])}.

cause(Reason) ->
    persistent_term:get({rabbitmq_stream_s3_nif, not_loaded}, {Reason, "the module rabbitmq_stream_s3_nif cannot be loaded"}).

%% @doc The sentence for an error of `erlang:load_nif/2' on a machine.
-spec explain(cause(), machine()) -> Text :: binary().
explain({Class, Cause}, Machine) ->
    text("the native library could not be loaded: ~ts; ~ts", [string:trim(Cause), advice(Class, Cause, Machine)]).

%% The dynamic linker names each version of glibc that it misses.
advice(load_failed, Cause, #{libc := Libc, architecture := Architecture}) ->
    case re:run(Cause, "GLIBC_([0-9.]+[0-9])", [global, {capture, all_but_first, list}]) of
        {match, Missed} ->
            [Highest | _] = lists:sort(fun(A, B) -> numbers(A) >= numbers(B) end, lists:append(Missed)),
            io_lib:format("it needs glibc ~ts or later, and this machine has ~ts", [Highest, Libc]);
        nomatch ->
            io_lib:format("this machine is ~ts with ~ts: is the library built for it, and is it where the plugin is?", [Architecture, Libc])
    end;
advice(load, _Cause, _Machine) ->
    "it was built for another version of the plugin: install the plugin as a whole";
%% Its text names the two versions of the interface between Erlang and libraries.
advice(bad_lib, _Cause, #{otp := Otp, nif := Nif}) ->
    io_lib:format("it needs Erlang/OTP 26 (NIF 2.17) or later, and this is OTP ~ts (NIF ~ts)", [Otp, Nif]);
advice(_Class, _Cause, #{otp := Otp}) ->
    io_lib:format("this is OTP ~ts", [Otp]).

numbers(Version) ->
    [list_to_integer(Part) || Part <- string:lexemes(Version, ".")].

machine() ->
    #{
        otp => erlang:system_info(otp_release),
        nif => erlang:system_info(nif_version),
        libc => libc(),
        architecture => erlang:system_info(system_architecture)
    }.

%% Erlang does not tell. Asked for only where the library did not load.
libc() ->
    case string:trim(os:cmd("getconf GNU_LIBC_VERSION 2>/dev/null")) of
        "" -> "another C library than glibc";
        Version -> Version
    end.

text(Format, Args) ->
    <<_/binary>> = unicode:characters_to_binary(io_lib:format(Format, Args)).
