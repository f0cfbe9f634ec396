%% @doc Runs Common Test suites and tells the outcome in lines a person can read.
%%
%% `.ci/ct FLAVOUR [FILE ...]' starts it. Common Test's own output is long and goes to a log; what is meant for the
%% reader goes to file descriptor 3: one line a test case when it ends, `FAILED suite:case' with the reason, and as last
%% line `N passed, N failed'. A case that was skipped because something before it failed counts as failed.
-module(ct_main).
-behaviour(gen_event).

-export([main/0]).
%% Event handler of Common Test.
-export([init/1, handle_event/2, handle_call/2, handle_info/2, terminate/2]).

-include_lib("common_test/include/ct_event.hrl").

-define(MAX_REASON_CHARS, 4000).
-define(LOG_DIRS_KEPT, 10).

%% @doc Takes the files from the command line (all suites under test/ if there are none) and halts the node with 0 if
%% something ran and nothing failed, else with 1.
-spec main() -> no_return().
main() ->
    persistent_term:put({?MODULE, out}, open_port({fd, 0, 3}, [out, binary])),
    Outcome =
        try
            run([filename:absname(F) || F <- init:get_plain_arguments()])
        catch
            Class:Reason:Stack ->
                say("FAILED ct_main: ~ts", [exception(Class, Reason, Stack)]),
                {0, 1, 0}
        end,
    halt(report(Outcome)).

report({Passed, Failed, Skipped}) ->
    [say("~b skipped, reasons above", [Skipped]) || Skipped > 0],
    [say("no test ran", []) || Passed + Failed =:= 0],
    say("~b passed, ~b failed", [Passed, Failed]),
    case Failed =:= 0 andalso Passed > 0 of
        true -> 0;
        false -> 1
    end.

run(Files0) ->
    {ok, Top} = file:get_cwd(),
    Base = filename:join([Top, "_build", os:getenv("STREAM_S3_FLAVOUR")]),
    Files =
        case Files0 of
            [] -> all_suites(Top);
            _ -> Files0
        end,
    Ebin = filename:join([Base, "test", "ebin"]),
    Outside = filename:join([Base, "test", "outside"]),
    ok = filelib:ensure_path(Ebin),
    ok = filelib:ensure_path(Outside),
    {Suites, Broken} = compile_suites(Files, Top, Ebin, Outside),
    LogDir = new_log_dir(filename:join(Base, "ct_logs")),
    say("suites: ~b, log: ~ts", [length(Files), filename:join(LogDir, "index.html")]),
    Epmd = start_distribution(),
    try
        {Passed, Failed, Skipped} = run_suites(Suites, LogDir),
        {Passed, Failed + Broken, Skipped}
    after
        stop_distribution(Epmd)
    end.

%% Those in real brokers take minutes, and have a command of their own.
all_suites(Top) ->
    All = filelib:wildcard(filename:join([Top, "test", "**", "*_SUITE.erl"])),
    lists:sort(All -- filelib:wildcard(filename:join([Top, "test", "broker", "*_SUITE.erl"]))).

run_suites([], _LogDir) ->
    {0, 0, 0};
run_suites(Suites, LogDir) ->
    Counters = counters:new(3, []),
    %% Not an argument of the handler: Common Test writes those to a file.
    persistent_term:put({?MODULE, counters}, Counters),
    %% By directory, so that Common Test finds the beam files that we compiled.
    Result = ct:run_test([
        {dir, lists:usort([filename:dirname(code:which(S)) || S <- Suites])},
        {suite, Suites},
        {auto_compile, false},
        {logdir, LogDir},
        {event_handler, [?MODULE]},
        {ct_hooks, []}
    ]),
    Count = [counters:get(Counters, I) || I <- [1, 2, 3]],
    case {Result, Count} of
        {{Passed, Failed, {User, Auto}}, [Passed, F, User]} when F >= Failed + Auto ->
            ok;
        {{Passed, Failed, {User, Auto}}, _} ->
            %% Cannot be, by what Common Test promises; but then rather a red run than a wrong number.
            say("FAILED ct_main: Common Test counts ~b passed, ~b failed, ~b and ~b skipped, and told of ~w", [
                Passed, Failed, User, Auto, Count
            ]),
            counters:add(Counters, 2, 1);
        {Error, _} ->
            say("FAILED ct_main: Common Test did not run: ~ts", [term(Error)]),
            counters:add(Counters, 2, 1)
    end,
    {counters:get(Counters, 1), counters:get(Counters, 2), counters:get(Counters, 3)}.

%% --- compilation -----------------------------------------------------------------------------------------------------

%% Helper modules of test/ were compiled by .ci/build. A suite from elsewhere brings the helpers that lie beside it.
compile_suites(Files, Top, Ebin, Outside) ->
    {In, Out} = lists:partition(fun(F) -> lists:prefix(filename:join(Top, "test") ++ "/", F) end, Files),
    true = code:add_patha(Ebin),
    [code:add_patha(Outside) || Out =/= []],
    Helpers = lists:usort(lists:append([helpers(F) || F <- Out])),
    [compile(F, Top, Outside) || F <- Helpers],
    Results = [compile(F, Top, Ebin) || F <- In] ++ [compile(F, Top, Outside) || F <- Out],
    {[M || {ok, M} <- Results], length([E || E = error <- Results])}.

helpers(Suite) ->
    All = filelib:wildcard(filename:join(filename:dirname(Suite), "*.erl")),
    [F || F <- All, not lists:suffix("_SUITE.erl", F)].

compile(File, Top, Dir) ->
    Options = [
        binary, return, debug_info, nowarn_export_all,
        {i, filename:dirname(File)},
        {i, filename:join(Top, "erlang")},
        {i, filename:join([Top, "erlang", "include"])},
        {i, filename:join(Top, "test")}
    ],
    case compile:file(File, Options) of
        {ok, Module, Beam, Warnings} ->
            [say("~ts", [T]) || T <- messages(Warnings, "warning: ")],
            install(filename:join(Dir, atom_to_list(Module) ++ ".beam"), Beam),
            link_data(filename:rootname(File) ++ "_data", Dir),
            {ok, Module};
        {error, Errors, _} ->
            say("FAILED ~ts: does not compile", [filename:basename(File)]),
            [say("    ~ts", [T]) || T <- messages(Errors, "")],
            error
    end.

%% Atomic, since another run may load from the same directory.
install(File, Beam) ->
    case file:read_file(File) of
        {ok, Beam} ->
            ok;
        _ ->
            Temp = File ++ "." ++ os:getpid(),
            ok = file:write_file(Temp, Beam),
            ok = file:rename(Temp, File)
    end.

%% Common Test looks for a suite's data beside its beam file.
link_data(Data, Dir) ->
    Link = filename:join(Dir, filename:basename(Data)),
    case filelib:is_dir(Data) of
        true ->
            _ = file:delete(Link),
            ok = file:make_symlink(Data, Link);
        false ->
            ok
    end.

messages(PerFile, Prefix) ->
    [
        io_lib:format("~ts:~ts: ~ts~ts", [filename:basename(F), position(At), Prefix, Module:format_error(What)])
     || {F, Infos} <- PerFile, {At, Module, What} <- Infos
    ].

position({Line, _Column}) -> integer_to_list(Line);
position(Line) -> io_lib:format("~p", [Line]).

%% --- distribution and logs -------------------------------------------------------------------------------------------

%% Answers whether an epmd was there before. Suites need a named node for their peers.
start_distribution() ->
    Before = erl_epmd:names(localhost),
    Name = list_to_atom(lists:concat(["ct_", os:getpid(), "_", erlang:phash2(make_ref(), 10000), "@localhost"])),
    ok = start_distribution(Name, 50),
    element(1, Before).

%% Again and again for a while: epmd needs a moment to listen, and another run may just have ended the one we saw.
start_distribution(Name, Tries) ->
    _ = os:cmd("epmd -daemon"),
    case net_kernel:start(Name, #{name_domain => shortnames}) of
        {ok, _} -> ok;
        {error, _} when Tries > 1 -> timer:sleep(100), start_distribution(Name, Tries - 1);
        {error, Reason} -> {error, Reason}
    end.

%% epmd refuses to end while a node is registered, so another run that came to use ours keeps it.
stop_distribution(Epmd) ->
    _ = net_kernel:stop(),
    [os:cmd("epmd -kill") || Epmd =:= error],
    ok.

new_log_dir(Parent) ->
    Old = lists:sort(filelib:wildcard(filename:join(Parent, "*"))),
    [file:del_dir_r(D) || D <- lists:sublist(Old, max(0, length(Old) - ?LOG_DIRS_KEPT + 1))],
    {{Y, Mo, D}, {H, Mi, S}} = calendar:local_time(),
    Name = io_lib:format("~4..0b~2..0b~2..0b-~2..0b~2..0b~2..0b-~ts", [Y, Mo, D, H, Mi, S, os:getpid()]),
    Dir = filename:join(Parent, lists:flatten(Name)),
    ok = filelib:ensure_path(Dir),
    Dir.

%% --- events ----------------------------------------------------------------------------------------------------------

-spec init(term()) -> {ok, map()}.
init(_) ->
    {ok, #{counters => persistent_term:get({?MODULE, counters}), started => #{}}}.

handle_event(#event{name = tc_start, data = {Suite, Case}}, #{started := Started} = State) ->
    {ok, State#{started := Started#{{Suite, name(Case)} => erlang:monotonic_time(millisecond)}}};
handle_event(#event{name = tc_done, data = {Suite, Case, Result}}, #{started := Started} = State) ->
    Name = name(Case),
    Ms =
        case Started of
            #{{Suite, Name} := Since} -> erlang:monotonic_time(millisecond) - Since;
            #{} -> 0
        end,
    done(Suite, Name, Result, Ms, State),
    {ok, State#{started := maps:remove({Suite, Name}, Started)}};
handle_event(#event{name = tc_user_skip, data = {Suite, Case, Reason}}, State) ->
    skipped(Suite, name(Case), Reason, State),
    {ok, State};
handle_event(#event{name = tc_auto_skip, data = {Suite, Case, Reason}}, State) ->
    not_run(Suite, name(Case), Reason, State),
    {ok, State};
handle_event(_Other, State) ->
    {ok, State}.

handle_call(_Request, State) -> {ok, ok, State}.
handle_info(_Info, State) -> {ok, State}.
terminate(_Reason, _State) -> ok.

%% The functions around the cases do not count when all is well, nor when they fail before their cases (then each case
%% counts), but a failure after the cases would otherwise pass unseen.
done(Suite, Name, ok, Ms, State) ->
    case is_config(Name) of
        true ->
            ok;
        false ->
            count(1, State),
            say("ok      ~ts  ~ts", [title(Suite, Name), time(Ms)])
    end;
done(Suite, Name, {failed, Reason}, Ms, State) ->
    [count(2, State) || not is_before(Name)],
    say("FAILED  ~ts  ~ts~n    ~ts", [title(Suite, Name), time(Ms), indent(reason(Reason))]);
done(Suite, Name, {auto_skipped, Reason}, _Ms, State) ->
    not_run(Suite, Name, Reason, State);
done(Suite, Name, {skipped, Reason}, _Ms, State) ->
    skipped(Suite, Name, Reason, State).

skipped(Suite, Name, Reason, State) ->
    case is_config(Name) of
        true ->
            ok;
        false ->
            count(3, State),
            say("skipped ~ts: ~ts", [title(Suite, Name), indent(reason(Reason))])
    end.

not_run(Suite, Name, Reason, State) ->
    case is_config(Name) of
        true ->
            ok;
        false ->
            count(2, State),
            say("FAILED  ~ts  not run: ~ts", [title(Suite, Name), indent(reason(Reason))])
    end.

count(I, #{counters := Counters}) ->
    counters:add(Counters, I, 1).

name({Function, Group, _Properties}) -> {Function, Group};
name(Name) -> Name.

function({Function, _Group}) -> Function;
function(Function) -> Function.

is_before(Name) -> lists:member(function(Name), [init_per_suite, init_per_group]).
is_config(Name) -> is_before(Name) orelse lists:member(function(Name), [end_per_suite, end_per_group]).

title(Suite, {Function, Group}) -> io_lib:format("~ts:~tw (~tw)", [Suite, Function, Group]);
title(Suite, Function) -> io_lib:format("~ts:~tw", [Suite, Function]).

time(Ms) -> io_lib:format("~.2f s", [Ms / 1000]).

%% --- text ------------------------------------------------------------------------------------------------------------

reason({error, Reason}) -> reason(Reason);
reason({failed, Reason}) -> reason(Reason);
reason({test_case_failed, Reason}) -> reason(Reason);
reason({_Suite, {error, Reason}}) -> reason(Reason);
reason({_Suite, Function, Reason}) when Function =:= init_per_testcase; Function =:= end_per_testcase ->
    [atom_to_list(Function), ": ", reason(Reason)];
reason({_Suite, Function, {'EXIT', _}}) when Function =:= init_per_suite; Function =:= init_per_group ->
    [atom_to_list(Function), " failed"];
reason({'EXIT', Reason}) -> reason(Reason);
reason({Reason, [{M, F, A, I} | _] = Stack}) when is_atom(M), is_atom(F), is_list(I), (is_list(A) orelse is_integer(A)) ->
    exception(error, Reason, Stack);
reason({timetrap_timeout, Ms}) -> io_lib:format("no end after ~b ms (timetrap)", [Ms]);
reason(Reason) ->
    case is_list(Reason) andalso io_lib:printable_unicode_list(Reason) of
        true -> Reason;
        false -> term(Reason)
    end.

exception(Class, Reason, Stack) ->
    Short = #{
        format_fun => fun(Term, _Indent) -> io_lib:format("~tp", [Term]) end,
        %% Common Test's own frames are the same for every case.
        stack_trim_fun => fun(Module, _, _) -> Module =:= test_server end
    },
    cut(erl_error:format_exception(Class, Reason, Stack, Short)).

term(Term) -> cut(io_lib:format("~tp", [Term])).

cut(Text) ->
    case string:slice(Text, 0, ?MAX_REASON_CHARS + 1) of
        Short when length(Short) > ?MAX_REASON_CHARS -> [string:slice(Short, 0, ?MAX_REASON_CHARS), " ..."];
        _ -> Text
    end.

indent(Text) -> lists:join("\n    ", string:split(Text, "\n", all)).

say(Format, Args) ->
    Line = unicode:characters_to_binary(io_lib:format(Format ++ "~n", Args)),
    true = port_command(persistent_term:get({?MODULE, out}), Line),
    ok.
