%% @doc What the suites of the history uploader have in common: a world with short delays, a host for each case, and looks at what goes on.
-module(stream_s3_history_case).

-include_lib("common_test/include/ct.hrl").

-export([init_suite/1, end_suite/1, init_case/1, end_case/1, server/1, restart_application/1]).
-export([run/1, content/2, now_ms/0, start/2, try_start/2, stop_all/0, seal/3, hint/3, all_uploaded/1, hang/2, nothing_left/1, scanned/1]).
-export([fault/2, counted/1, gauge/1, keys/1, put_segment/3, put_raw/3, runs/0, run_process/1, pauses/2, watch_memory/0, peak/1]).

-define(UPLOADER, rabbitmq_stream_s3_history_uploader).
-define(STORE, rabbitmq_stream_s3_store).
-define(HOST, stream_s3_history_host).
-define(STATE, stream_s3_history_state).
-define(TIMEOUT, 30000).
-define(ENV, #{
    task_retry_delay_ms => 5,
    task_retry_delay_max_ms => 50,
    upload_retry_delay_ms => 5,
    upload_retry_delay_max_ms => 50,
    transfer_deadline_ms => 180000,
    %% Scans come when a case asks for one.
    history_rescan_interval_ms => 600000,
    history_purge_wait_ms => 200,
    gc_interval_ms => 86400000,
    gc_min_age_ms => 0
}).

%% --- around suites and cases -----------------------------------------------------------------------------------------

init_suite(Config) ->
    Dir = filename:join(?config(priv_dir, Config), "world"),
    [{world, stream_s3_world:start(#{store => s3, dir => Dir, env => ?ENV})} | Config].

end_suite(Config) ->
    stream_s3_world:stop(?config(world, Config)).

init_case(Config) ->
    ok = stream_s3_store_faults:clear(server(Config)),
    ok = stream_s3_world:set(?ENV),
    [{host, ?HOST:start()}, {before, counters()} | Config].

%% The next case finds no uploader, and an empty bucket.
end_case(Config) ->
    ok = stream_s3_store_faults:clear(server(Config)),
    ok = stop_all(),
    ok = empty(),
    ?HOST:stop(?config(host, Config)).

empty() ->
    {ok, #{objects := Objects}} = ?STORE:list(?STORE:history_prefix(all), undefined, 1000, ?TIMEOUT),
    case [Key || {Key, _, _} <- Objects] of
        [] ->
            ok;
        Keys ->
            {ok, []} = ?STORE:delete(Keys, ?TIMEOUT),
            empty()
    end.

%% The server s3local.
server(Config) -> stream_s3_world:s3local(?config(world, Config)).

%% Starts the application again. What was counted is forgotten.
restart_application(Config) ->
    stream_s3_world:start_application(maps:merge(stream_s3_world:store(?config(world, Config)), ?ENV)).

%% --- hosts and uploaders ---------------------------------------------------------------------------------------------

%% An id for a case.
run(Name) -> <<"r-", (atom_to_binary(Name))/binary>>.

content(Run, Seq) -> iolist_to_binary([[Run, " row ", integer_to_list(N), $\n] || N <- lists:seq(1, 10 + Seq)]).

now_ms() -> erlang:system_time(millisecond).

start(Host, Options) ->
    case try_start(Host, Options) of
        {ok, Uploader} -> Uploader;
        Refused -> error(Refused)
    end.

%% Not linked to the process of the case.
try_start(Host, Options) ->
    Test = self(),
    Ref = make_ref(),
    _ = spawn(fun() ->
        process_flag(trap_exit, true),
        Test ! {Ref, ?UPLOADER:start_link(maps:merge(#{source => ?HOST, argument => Host}, Options))},
        receive
            {'EXIT', _, _} -> ok
        end
    end),
    receive
        {Ref, Started} -> Started
    after ?TIMEOUT -> error(not_started)
    end.

stop_all() ->
    _ = [?UPLOADER:stop(Pid) || {Pid, _} <- ets:tab2list(?UPLOADER), is_process_alive(Pid)],
    ok.

seal(Host, Run, Seqs) ->
    ok = ?HOST:commit_all(Host, [{open, Run} | [{seal, Run, Seq, content(Run, Seq), now_ms()} || Seq <- Seqs]]).

%% Tells of one sealed segment.
hint(Uploader, Run, Size) -> ?UPLOADER:sealed(Uploader, Run, #{size => Size, sealed_ms => now_ms()}).

all_uploaded(Host) ->
    ?HOST:await(Host, fun(State) -> maps:get(entries, ?STATE:pending(start, 1, State)) =:= [] end).

%% From now on calls of this function of the host never return. What is answered waits until there has been one.
hang(Host, Function) ->
    Test = self(),
    Ref = make_ref(),
    ok = ?HOST:hook(Host, fun
        (F, _) when F =:= Function ->
            Test ! Ref,
            receive
                never -> go_on
            end;
        (_, _) ->
            go_on
    end),
    fun() ->
        receive
            Ref -> ok
        after ?TIMEOUT -> error({not_called, Function})
        end
    end.

%% No run has anything to do.
nothing_left(Uploader) ->
    stream_s3_wait:eventually(fun() -> maps:get(runs, ?UPLOADER:status(Uploader)) =:= #{} end).

%% One more scan, to its end.
scanned(Uploader) ->
    ok = not_scanning(Uploader, 1),
    #{scans := Scans} = ?UPLOADER:status(Uploader),
    ok = ?UPLOADER:rescan(Uploader),
    not_scanning(Uploader, Scans + 1).

not_scanning(Uploader, AtLeast) ->
    stream_s3_wait:eventually(fun() ->
        #{scans := Scans, scanning := Scanning} = ?UPLOADER:status(Uploader),
        Scans >= AtLeast andalso not Scanning
    end).

%% --- looks -----------------------------------------------------------------------------------------------------------

fault(Config, Rule) -> stream_s3_store_faults:add(server(Config), [Rule]).

counters() -> rabbitmq_stream_s3_counters:get(history).

%% What has been counted in this case; bytes left out.
counted(Config) ->
    Before = ?config(before, Config),
    maps:filter(fun(_, N) -> N > 0 end, maps:without([bytes], maps:map(fun(Name, N) -> N - map_get(Name, Before) end, counters()))).

gauge(Name) ->
    #{gauges := Gauges} = ?UPLOADER:metrics(),
    {Name, _, Value} = lists:keyfind(Name, 1, Gauges),
    Value.

keys(Run) ->
    {ok, #{objects := Objects, next := undefined}} = ?STORE:list(?STORE:history_prefix(Run), undefined, 1000, ?TIMEOUT),
    [Key || {Key, _, _} <- Objects].

put_segment(Run, Seq, Content) ->
    Ref = make_ref(),
    ok = rabbitmq_stream_s3_nif:history_put(?STORE:handle(), self(), Ref, {Run, Seq}, Content, undefined),
    receive
        {store_result, Ref, {ok, Put}} -> Put;
        {store_result, Ref, Error} -> error(Error)
    after ?TIMEOUT -> error(no_answer)
    end.

put_raw(Run, Seq, Bytes) ->
    Ref = make_ref(),
    Key = iolist_to_binary(io_lib:format("rabbitmq/history/~ts/~20..0b.segment", [Run, Seq])),
    ok = rabbitmq_stream_s3_nif:store_put(?STORE:handle(), self(), Ref, Key, Bytes, #{}),
    receive
        {store_result, Ref, {ok, _}} -> ok
    after ?TIMEOUT -> error(no_answer)
    end.

%% The processes of all runs.
runs() ->
    [Pid || Pid <- processes(), {dictionary, D} <- [process_info(Pid, dictionary)], proplists:get_value('$initial_call', D) =:= {rabbitmq_stream_s3_history_run, init, 1}].

run_process(Run) ->
    [Pid] = of_run(Run),
    Pid.

of_run(Run) -> [Pid || Pid <- runs(), element(3, state(Pid)) =:= Run].

state(Pid) ->
    try
        sys:get_state(Pid)
    catch
        %% It has just ended.
        exit:_ -> {none, none, none}
    end.

%% Whether the machine of a run pauses, and for longer than that from now on.
pauses(Run, Ms) ->
    Timers = [T || Pid <- of_run(Run), T <- tuple_to_list(state(Pid)), is_reference(T)],
    lists:any(fun(Left) -> is_integer(Left) andalso Left > Ms end, [read_timer(T) || T <- Timers]).

read_timer(Reference) ->
    try
        erlang:read_timer(Reference)
    catch
        error:badarg -> none
    end.

%% The largest numbers from now on, looked at each few milliseconds. Binaries count where they last: a scheduler frees what others have let go of
%% a little later. `resident': of the whole process, as the kernel counts it.
watch_memory() -> spawn_link(fun() -> watch_memory([], #{binary => 0, lent => 0, resident => 0}) end).

watch_memory(Last, #{binary := Binary, lent := Lent, resident := Resident}) ->
    Lasting = lists:sublist([erlang:memory(binary) | Last], 10),
    Most = #{
        binary => max(Binary, lists:min(Lasting)),
        lent => max(Lent, rabbitmq_stream_s3_nif:history_body_bytes()),
        resident => max(Resident, resident())
    },
    receive
        {peak, From} -> From ! {self(), Most}
    after 2 -> watch_memory(Lasting, Most)
    end.

resident() ->
    {ok, Statm} = file:read_file("/proc/self/statm"),
    [_Size, Pages | _] = binary:split(Statm, <<" ">>, [global]),
    4096 * binary_to_integer(Pages).

peak(Watch) ->
    Watch ! {peak, self()},
    receive
        {Watch, Most} -> Most
    end.
