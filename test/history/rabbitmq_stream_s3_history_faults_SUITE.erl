%% Hosts of the history uploader that misbehave, and processes that die: what others do must go on, and nothing must be lost.
-module(rabbitmq_stream_s3_history_faults_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-import(stream_s3_wait, [eventually/1, kill/1]).
-import(stream_s3_history_case, [server/1, run/1, content/2, now_ms/0, start/2, try_start/2, stop_all/0, seal/3, hint/3, all_uploaded/1, hang/2, nothing_left/1]).
-import(stream_s3_history_case, [scanned/1, fault/2, counted/1, gauge/1, keys/1, put_segment/3, runs/0, pauses/2]).

-compile(nowarn_export_all).
-compile(export_all).

-define(UPLOADER, rabbitmq_stream_s3_history_uploader).
-define(HOST, stream_s3_history_host).
-define(STATE, stream_s3_history_state).
-define(LOGS, stream_s3_logs).
-define(FAULTS, stream_s3_store_faults).
-define(TIMEOUT, 30000).
%% A place of the index for each number.
-define(LONG, 20000).

suite() -> [{timetrap, {seconds, 120}}].

all() ->
    [
        an_idle_rescan_reads_one_empty_page_and_asks_the_store_nothing,
        what_is_no_run_id_is_refused_with_a_text,
        a_bad_call_does_not_end_an_uploader,
        a_probe_that_dies_without_an_answer_is_made_again,
        a_bad_row_of_the_index_costs_its_run_alone,
        a_bad_row_in_the_listing_of_one_run_costs_that_run_alone,
        a_run_whose_rows_do_not_stand_together_is_not_uploaded_out_of_order,
        an_index_that_goes_round_in_circles_is_left,
        a_listing_of_a_long_run_reads_one_page,
        a_reason_that_looks_like_one_of_the_library_is_printed_as_it_is,
        an_answer_of_another_shape_is_a_permanent_failure_and_kills_nobody,
        a_commit_whose_answer_is_lost_is_made_again_and_counts_once,
        the_application_takes_its_uploaders_along_and_they_go_on_when_it_is_back,
        an_application_that_crashes_does_so_too,
        an_uploader_is_killed_at_each_step_of_an_upload_and_the_next_one_goes_on,
        a_process_of_a_run_is_killed_at_each_step_and_the_scan_takes_the_run_up,
        the_row_of_an_uploader_that_was_killed_goes_when_another_starts,
        a_read_that_never_answers_holds_no_permit_for_ever,
        a_page_that_never_comes_ends_its_scan_and_not_those_after_it,
        an_uploader_stops_at_once_whichever_call_of_the_host_blocks,
        an_uploader_is_killed_or_stopped_at_each_step_of_a_purge_and_the_next_one_ends_it,
        a_purge_in_the_middle_of_an_examination_or_a_replacement_leaves_nothing,
        one_owner_purges_while_the_other_uploads,
        an_acknowledgment_in_the_middle_of_a_purge_comes_to_nothing,
        a_purge_needs_no_store_that_is_proven,
        a_host_does_not_sweep_what_is_another_ones,
        hints_of_runs_that_nobody_knows_are_bounded_in_memory_and_calls,
        a_store_that_refuses_each_condition_is_asked_less_and_less
    ].

init_per_suite(Config) -> stream_s3_history_case:init_suite(Config).

end_per_suite(Config) -> stream_s3_history_case:end_suite(Config).

init_per_testcase(_Case, Config) -> [{logs, ?LOGS:start()} | stream_s3_history_case:init_case(Config)].

end_per_testcase(_Case, Config) ->
    ok = ?LOGS:stop(?config(logs, Config)),
    stream_s3_history_case:end_case(Config).

%% --- calls -----------------------------------------------------------------------------------------------------------

an_idle_rescan_reads_one_empty_page_and_asks_the_store_nothing(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = seal(Host, Run, [1]),
    Uploader = start(Host, #{}),
    ok = all_uploaded(Host),
    ok = nothing_left(Uploader),
    Calls = calls(Host),
    Before = requests(Config),
    ok = scanned(Uploader),
    ?assertEqual([{pending, [start, 1000]}], calls_so_far(Calls)),
    ?assertEqual(Before, requests(Config)).

requests(Config) ->
    [{Op, ?FAULTS:requests(server(Config), Op)} || Op <- [put, get, head, list, delete, multi_delete]].

what_is_no_run_id_is_refused_with_a_text(Config) ->
    Uploader = start(?config(host, Config), #{}),
    Segment = #{size => 1, sealed_ms => 1},
    Calls = [
        fun(Run) -> ?UPLOADER:sealed(Uploader, Run, Segment) end,
        fun(Run) -> ?UPLOADER:purge(Uploader, Run) end,
        fun(Run) -> ?UPLOADER:postpone_retention(Uploader, Run) end,
        fun(Run) -> ?UPLOADER:read(Run, 1) end
    ],
    Bad = [<<>>, <<".">>, <<"..">>, <<"a/b">>, <<"a b">>, <<"\n">>, <<255>>, binary:copy(<<"a">>, 256), "text", atom, 17],
    [?assertMatch(<<"run id", _/binary>>, misuse(fun() -> Call(Run) end)) || Run <- Bad, Call <- Calls],
    ?assertMatch(<<"seq", _/binary>>, misuse(fun() -> ?UPLOADER:read(<<"r">>, -1) end)),
    Sealed = fun(Wrong) -> misuse(fun() -> ?UPLOADER:sealed(Uploader, <<"r">>, Wrong) end) end,
    Wrong = [#{size => -1, sealed_ms => 1}, #{size => 1 bsl 64, sealed_ms => 1}, #{size => 1}, #{size => 1, sealed_ms => 1.5}, none],
    [?assertMatch(<<"segment: expected size", _/binary>>, Sealed(W)) || W <- Wrong],
    %% None of it has come to anything.
    ?assertMatch(#{runs := Runs} when Runs =:= #{}, ?UPLOADER:status(Uploader)).

%% The text that goes with a badarg.
misuse(Fun) ->
    try Fun() of
        Answer -> error({not_refused, Answer})
    catch
        error:badarg:Stack ->
            #{general := Text} = rabbitmq_stream_s3_nif:format_error(badarg, Stack),
            Text
    end.

a_bad_call_does_not_end_an_uploader(Config) ->
    Host = ?config(host, Config),
    Uploader = start(Host, #{}),
    ?assertEqual({error, badarg}, gen_server:call(Uploader, nonsense)),
    ok = gen_server:cast(Uploader, nonsense),
    %% As answers that come late.
    [Uploader ! Message || Message <- [nonsense, {make_ref(), late}, {store_result, make_ref(), {error, late}}, {found, self(), []}, {proven, self(), ok}]],
    ok = seal(Host, run(?FUNCTION_NAME), [1]),
    ok = ?UPLOADER:rescan(Uploader),
    ok = all_uploaded(Host),
    ?assert(is_process_alive(Uploader)).

%% --- the host's index ------------------------------------------------------------------------------------------------

a_bad_row_of_the_index_costs_its_run_alone(Config) ->
    Host = ?config(host, Config),
    Name = fun(Letter) -> <<(run(?FUNCTION_NAME))/binary, Letter>> end,
    [ok = seal(Host, Name(Letter), [1, 2, 3]) || Letter <- "abcdefgh"],
    Bad = #{
        $b => fun(#{seq := Seq} = Row) -> case Seq of 1 -> maps:remove(seq, Row); _ -> Row end end,
        $c => fun(#{seq := Seq} = Row) -> case Seq of 2 -> Row#{size := -1}; _ -> Row end end,
        $d => fun(#{seq := Seq} = Row) -> case Seq of 3 -> Row#{size := 1.0}; _ -> Row end end,
        $e => fun(#{seq := Seq} = Row) -> Row#{seq := 4 - Seq} end,
        $f => fun(#{seq := Seq} = Row) -> case Seq of 2 -> Row#{sealed_ms := now}; _ -> Row end end,
        $g => fun(#{seq := Seq, run := Run} = Row) -> case Seq of 2 -> {unreadable, Run, {http, teapot}}; _ -> Row end end
    },
    Stray = [nonsense, #{}, #{run => <<"a/b">>, seq => 1, size => 1, sealed_ms => 1}, #{run => 7}, {unreadable, <<"..">>, why}],
    ok = ?HOST:hook(Host, fun
        (pending, [From, Limit]) ->
            #{entries := Rows} = Page = ?STATE:pending(From, Limit, ?HOST:state(Host)),
            Answer = [(maps:get(binary:last(Run), Bad, fun(R) -> R end))(Row) || #{run := Run} = Row <- Rows],
            {A, B} = lists:split(length(Answer) div 2, Answer),
            {answer, {ok, Page#{entries := A ++ [S || S <- Stray, From =:= start] ++ B}}};
        (_, _) ->
            go_on
    end),
    %% Pages end anywhere.
    Uploader = start(Host, #{page_size => 7}),
    Good = [{Name(Letter), Seq} || Letter <- "ah", Seq <- [1, 2, 3]],
    ok = ?HOST:await(Host, fun(State) -> length(?STATE:acknowledged(State)) =:= length(Good) end),
    ?assertEqual(Good, lists:sort(?STATE:acknowledged(?HOST:state(Host)))),
    ok = eventually(fun() -> not maps:get(scanning, ?UPLOADER:status(Uploader)) end),
    ?assertMatch(#{rescan_errors := 11, uploaded := 6}, counted(Config)),
    [{error, _} = ?LOGS:await(?config(logs, Config), ["history of run ", Name(Letter), ": the scan cannot read it"], ?TIMEOUT) || Letter <- "bcdefg"],
    {error, _} = ?LOGS:await(?config(logs, Config), "rows of no run, which are passed over: 5, such as nonsense", ?TIMEOUT),
    ?assertEqual(#{scans => 1}, maps:with([scans], ?UPLOADER:status(Uploader))),
    ok = ?HOST:hook(Host, fun(_, _) -> go_on end),
    ok = ?UPLOADER:rescan(Uploader),
    ok = all_uploaded(Host).

a_bad_row_in_the_listing_of_one_run_costs_that_run_alone(Config) ->
    Host = ?config(host, Config),
    [Bad, Good] = [<<(run(?FUNCTION_NAME))/binary, Letter>> || Letter <- "ab"],
    Uploader = start(Host, #{}),
    ok = scanned(Uploader),
    ok = ?HOST:hook(Host, fun
        (pending, [{run, Run} = From, Limit]) ->
            {ok, #{entries := [First | Rows]} = Page} = {ok, ?STATE:pending(From, Limit, ?HOST:state(Host))},
            case Run of
                Bad -> {answer, {ok, Page#{entries := [First#{size := many} | Rows]}}};
                _ -> {answer, {ok, Page#{entries := [First, nonsense | Rows]}}}
            end;
        (_, _) ->
            go_on
    end),
    [ok = seal(Host, Run, [1, 2]) || Run <- [Bad, Good]],
    [ok = hint(Uploader, Run, 1) || Run <- [Bad, Good]],
    ok = ?HOST:await(Host, fun(State) -> ?STATE:acknowledged(State) =:= [{Good, 1}, {Good, 2}] end),
    ok = eventually(fun() -> maps:get(runs, ?UPLOADER:status(Uploader)) =:= #{blocked => 1} end),
    ?assertMatch(#{permanent_error := 1}, counted(Config)),
    ok = ?HOST:hook(Host, fun(_, _) -> go_on end),
    ok = ?UPLOADER:rescan(Uploader),
    ok = all_uploaded(Host).

a_run_whose_rows_do_not_stand_together_is_not_uploaded_out_of_order(Config) ->
    Host = ?config(host, Config),
    [Torn, Whole] = [<<(run(?FUNCTION_NAME))/binary, Letter>> || Letter <- "ab"],
    [ok = seal(Host, Run, Seqs) || {Run, Seqs} <- [{Torn, [1, 2, 3, 4]}, {Whole, [1]}]],
    ok = ?HOST:hook(Host, fun
        (pending, [start, _]) ->
            #{entries := [A1, A2, A3, A4, B1]} = Page = ?STATE:pending(start, 10, ?HOST:state(Host)),
            {answer, {ok, Page#{entries := [A1, A2, B1, A3, A4]}}};
        %% Nothing is uploaded until the scan is through.
        (read_segment, _) ->
            receive
                never -> go_on
            end;
        (_, _) ->
            go_on
    end),
    Uploader = start(Host, #{}),
    ok = eventually(fun() -> maps:get(rescan_errors, counted(Config), 0) =:= 1 end),
    ok = ?HOST:hook(Host, fun(_, _) -> go_on end),
    [ok = kill_worker(Pid) || Pid <- runs()],
    ok = ?HOST:await(Host, fun(State) -> length(?STATE:acknowledged(State)) =:= 3 end),
    ok = scanned(Uploader),
    ok = all_uploaded(Host),
    ?assertEqual([], ?STATE:violations(?HOST:state(Host))).

%% What works for the process of a run.
kill_worker(Pid) ->
    {links, Links} = process_info(Pid, links),
    [ok = kill(Linked) || Linked <- Links, process_info(Linked, current_function) =/= {current_function, {gen_server, loop, 5}}, Linked =/= parent(Pid)],
    ok.

parent(Pid) ->
    {dictionary, D} = process_info(Pid, dictionary),
    hd(proplists:get_value('$ancestors', D)).

an_index_that_goes_round_in_circles_is_left(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = seal(Host, Run, [1]),
    ok = ?HOST:hook(Host, fun
        %% Whatever it is asked, it answers its first page.
        (pending, _) -> {answer, {ok, (?STATE:pending(start, 1, ?HOST:state(Host)))#{next := here}}};
        (_, _) -> go_on
    end),
    Uploader = start(Host, #{}),
    ok = eventually(fun() -> not maps:get(scanning, ?UPLOADER:status(Uploader)) end),
    ?assertMatch(#{rescan_errors := 1}, counted(Config)),
    {error, _} = ?LOGS:await(?config(logs, Config), "the index of pending history segments cannot be read", ?TIMEOUT),
    ok = ?HOST:hook(Host, fun(_, _) -> go_on end),
    ok = ?UPLOADER:rescan(Uploader),
    ok = all_uploaded(Host).

a_listing_of_a_long_run_reads_one_page(_Config) ->
    Host = ?HOST:start(long(run(?FUNCTION_NAME))),
    Calls = calls(Host),
    _ = start(Host, #{}),
    ok = ?HOST:await(Host, fun(State) -> length(?STATE:acknowledged(State)) >= 64 end),
    ok = stop_all(),
    Uploaded = length(?STATE:acknowledged(?HOST:state(Host))),
    Listings = [Limit || {pending, [From, Limit]} <- calls_so_far(Calls), From =/= start, Limit < 1000],
    ct:pal("~b segments of ~b uploaded with ~b pages of ~p entries", [Uploaded, ?LONG, length(Listings), lists:usort(Listings)]),
    ?assert(length(Listings) =< Uploaded div 16 + 1),
    ?HOST:stop(Host).

%% --- the host's answers ----------------------------------------------------------------------------------------------

a_reason_that_looks_like_one_of_the_library_is_printed_as_it_is(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = seal(Host, Run, [1]),
    Reasons = [{http, teapot}, {gap, here, there}, {fenced, node()}, {open_failed, 1, 2}, {panic, self()}, {store, {x, #{message => 5}}}, {corrupt_chunk, x}],
    Uploader = start(Host, #{}),
    ok = all_uploaded(Host),
    lists:foreach(
        fun({Seq, Reason}) ->
            ok = ?LOGS:clear(?config(logs, Config)),
            ok = ?HOST:hook(Host, fun
                (pending, [start, _]) -> {answer, {error, {permanent, Reason}}};
                (read_segment, _) -> {answer, {error, {permanent, Reason}}};
                (_, _) -> go_on
            end),
            ok = scanned(Uploader),
            {error, _} = ?LOGS:await(?config(logs, Config), "the index of pending .*: the host says ", ?TIMEOUT),
            ok = seal(Host, Run, [Seq]),
            ok = hint(Uploader, Run, 1),
            {error, _} = ?LOGS:await(?config(logs, Config), "history of run .*: the host says .* waits for the next scan", ?TIMEOUT),
            ok = ?HOST:hook(Host, fun(_, _) -> go_on end),
            ok = scanned(Uploader),
            ok = all_uploaded(Host)
        end,
        lists:enumerate(2, Reasons)
    ),
    ?assertMatch(#{permanent_error := N, rescan_errors := N} when N =:= length(Reasons), counted(Config)).

an_answer_of_another_shape_is_a_permanent_failure_and_kills_nobody(Config) ->
    Host = ?config(host, Config),
    Bad = [nonsense, [], {ok, nonsense}, {ok, #{entries => nonsense, next => done}}, {body, 5}, {error, oops}, {error, {odd, oops}}, {error, {store, oops}}],
    Cases = [{F, A} || F <- [pending, read_segment, acknowledge], A <- Bad] ++ [{acknowledge, not_sealed}, {read_segment, ok}, {read_segment, {ok, <<1:3>>}}],
    Uploader = start(Host, #{}),
    ok = scanned(Uploader),
    lists:foreach(
        fun({I, {Function, Answer}}) ->
            Run = <<(run(?FUNCTION_NAME))/binary, (integer_to_binary(I))/binary>>,
            ok = ?HOST:hook(Host, fun
                (pending, [start, _]) -> go_on;
                (F, _) when F =:= Function -> {answer, Answer};
                (_, _) -> go_on
            end),
            ok = seal(Host, Run, [1]),
            ok = hint(Uploader, Run, 1),
            ok = eventually(fun() -> {I, #{blocked => 1}} =:= {maps:get(permanent_error, counted(Config), 0), maps:get(runs, ?UPLOADER:status(Uploader))} end),
            ok = ?HOST:hook(Host, fun(_, _) -> go_on end),
            ok = ?UPLOADER:rescan(Uploader),
            ok = all_uploaded(Host),
            ok = nothing_left(Uploader)
        end,
        lists:enumerate(Cases)
    ),
    Purges = [{F, A} || F <- [catalog, purged], A <- [nonsense, {ok, nonsense}, {error, {odd, oops}}]],
    %% A purge waits a minute: see `a_permanent_rejection_during_a_purge_is_retried'.
    lists:foreach(
        fun({I, {Function, Answer}}) ->
            Run = <<(run(?FUNCTION_NAME))/binary, "-purged", (integer_to_binary(I))/binary>>,
            ok = ?HOST:commit_all(Host, [{open, Run}, {purge, Run}]),
            ok = ?HOST:hook(Host, fun(F, _) -> case F of Function -> {answer, Answer}; _ -> go_on end end),
            ok = ?UPLOADER:purge(Uploader, Run),
            ok = eventually(fun() -> pauses(Run, 30000) end),
            ok = kill(stream_s3_history_case:run_process(Run)),
            ok = ?HOST:hook(Host, fun(_, _) -> go_on end),
            %% Begun anew by the scan, since it was not through.
            ok = ?UPLOADER:rescan(Uploader),
            ok = ?HOST:await(Host, fun(State) -> ?STATE:purging(State) =:= [] end)
        end,
        lists:enumerate(Purges)
    ),
    %% An answer that says nothing lets retention wait.
    ok = ?HOST:hook(Host, fun(_, _) -> {answer, {closed, #{sealed => few}}} end),
    ?assertEqual({postpone, 3600000}, ?UPLOADER:postpone_retention(Uploader, <<"r">>)),
    ok = ?HOST:hook(Host, fun(_, _) -> {answer, nonsense} end),
    ?assertEqual({postpone, 3600000}, ?UPLOADER:postpone_retention(Uploader, <<"r">>)),
    Died = [Line || {_, Line} <- ?LOGS:lines(?config(logs, Config)), string:find(Line, "has died") =/= nomatch],
    ?assertEqual(length(Purges), length(Died)).

a_commit_whose_answer_is_lost_is_made_again_and_counts_once(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    Commits = counters:new(1, []),
    Lost = fun(Command) ->
        ok = counters:add(Commits, 1, 1),
        ok = ?HOST:commit(Host, Command),
        case counters:get(Commits, 1) rem 3 of
            0 -> {answer, ok};
            1 -> {answer, {error, {retryable, no_leader}}};
            2 -> exit(no_leader)
        end
    end,
    ok = ?HOST:hook(Host, fun
        (acknowledge, [Acknowledgment]) -> Lost({acknowledge, Acknowledgment});
        (purged, [R]) -> Lost({purged, R});
        (_, _) -> go_on
    end),
    ok = seal(Host, Run, [1, 2, 3]),
    Uploader = start(Host, #{purge_wait_ms => 0}),
    ok = all_uploaded(Host),
    ok = nothing_left(Uploader),
    ?assertEqual([{Run, 1}, {Run, 2}, {Run, 3}], ?STATE:acknowledged(?HOST:state(Host))),
    ?assertEqual(9, counters:get(Commits, 1)),
    %% Nothing is uploaded twice for that.
    ?assertEqual(#{uploaded => 3, retryable_error => 6}, counted(Config)),
    ok = purge(Host, Uploader, Run),
    ok = nothing_left(Uploader),
    ?assertEqual({12, []}, {counters:get(Commits, 1), ?STATE:runs(?HOST:state(Host))}).

%% --- processes that end ----------------------------------------------------------------------------------------------

a_probe_that_dies_without_an_answer_is_made_again(Config) ->
    Host = ?config(host, Config),
    ok = seal(Host, run(?FUNCTION_NAME), [1]),
    ok = ?FAULTS:add(server(Config), [#{op => put, do => status, status => 503, count => 1}, #{op => put, do => stall}]),
    Uploader = start(Host, #{}),
    Probing = fun() ->
        {links, Links} = process_info(Uploader, links),
        [Pid || Pid <- Links, process_info(Pid, current_function) =:= {current_function, {rabbitmq_stream_s3_store, wait, 3}}]
    end,
    ok = eventually(fun() -> length(Probing()) =:= 1 end),
    [Prober] = Probing(),
    ok = kill(Prober),
    ok = ?FAULTS:clear(server(Config)),
    ok = all_uploaded(Host),
    ?assertMatch(#{proven := true}, ?UPLOADER:status(Uploader)).

the_application_takes_its_uploaders_along_and_they_go_on_when_it_is_back(Config) ->
    Logs = ?config(logs, Config),
    ok = ends_with_the_application(fun stream_s3_world:stop_application/0, Config),
    {notice, _} = ?LOGS:await(Logs, "history is uploaded no longer, since the application has ended", ?TIMEOUT),
    ?assertEqual([], [Line || {Level, Line} <- ?LOGS:lines(Logs), Level =:= error]).

an_application_that_crashes_does_so_too(Config) ->
    Crash = fun() ->
        ok = kill(whereis(rabbitmq_stream_s3_sup)),
        eventually(fun() -> not lists:keymember(rabbitmq_stream_s3, 1, application:which_applications()) end)
    end,
    ok = ends_with_the_application(Crash, Config).

ends_with_the_application(End, Config) ->
    Host = ?config(host, Config),
    [Stalled, Asked, Purged] = [<<(run(?FUNCTION_NAME))/binary, Letter>> || Letter <- "abc"],
    [ok = seal(Host, Run, [1, 2]) || Run <- [Stalled, Asked, Purged]],
    ok = fault(Config, #{op => put, key => "*" ++ binary_to_list(Stalled) ++ "/*", do => stall}),
    ok = ?HOST:hook(Host, fun
        (acknowledge, _) ->
            receive
                never -> go_on
            end;
        (_, _) ->
            go_on
    end),
    Uploader = start(Host, #{}),
    Monitor = monitor(process, Uploader),
    ok = ?HOST:commit(Host, {purge, Purged}),
    ok = ?UPLOADER:purge(Uploader, Purged),
    ok = eventually(fun() -> maps:with([storing, acknowledging], maps:get(runs, ?UPLOADER:status(Uploader))) =:= #{storing => 1, acknowledging => 1} end),
    ok = End(),
    receive
        {'DOWN', Monitor, process, Uploader, Reason} -> ?assertEqual({shutdown, application_stopped}, Reason)
    after 5000 -> error(still_running)
    end,
    ?assertEqual([], runs()),
    ok = eventually(fun() -> rabbitmq_stream_s3_nif:history_body_bytes() =:= 0 end),
    ?assertMatch({error, {not_running, <<"the application ", _/binary>>}}, try_start(Host, #{})),
    ?assertMatch(#{gauges := [_ | _]}, ?UPLOADER:metrics()),
    ok = ?FAULTS:clear(server(Config)),
    ok = ?HOST:hook(Host, fun(_, _) -> go_on end),
    ok = stream_s3_history_case:restart_application(Config),
    New = start(Host, #{}),
    ok = ?UPLOADER:purge(New, Purged),
    ok = all_uploaded(Host),
    ok = ?HOST:await(Host, fun(State) -> ?STATE:purging(State) =:= [] end),
    ?assertEqual([{Run, Seq} || Run <- [Stalled, Asked], Seq <- [1, 2]], lists:sort(?STATE:acknowledged(?HOST:state(Host)))),
    ok.

the_row_of_an_uploader_that_was_killed_goes_when_another_starts(Config) ->
    Host = ?config(host, Config),
    ok = kill(start(Host, #{})),
    ?assertMatch([_], ets:tab2list(?UPLOADER)),
    ?assertEqual(0, gauge(history_upload_backlog_segments)),
    Uploader = start(Host, #{}),
    ?assertMatch([{Uploader, _}], ets:tab2list(?UPLOADER)).

an_uploader_is_killed_at_each_step_of_an_upload_and_the_next_one_goes_on(Config) ->
    Host = ?config(host, Config),
    killed_at_each_step(Config, fun(Uploader, _Run) ->
        ok = kill(Uploader),
        ok = eventually(fun() -> runs() =:= [] end),
        fun() -> start(Host, #{}) end
    end).

a_process_of_a_run_is_killed_at_each_step_and_the_scan_takes_the_run_up(Config) ->
    killed_at_each_step(Config, fun(Uploader, Run) ->
        ok = kill(stream_s3_history_case:run_process(Run)),
        ok = eventually(fun() -> maps:with([permits, waiting, runs], ?UPLOADER:status(Uploader)) =:= #{permits => 0, waiting => 0, runs => #{}} end),
        fun() -> Uploader end
    end),
    {error, _} = ?LOGS:await(?config(logs, Config), "history of run .*: its process has died, the next scan takes it up again", ?TIMEOUT).

killed_at_each_step(Config, Kill) ->
    Host = ?config(host, Config),
    Steps = [
        {listing, pending},
        {reading, read_segment},
        {storing, #{op => put, do => stall}},
        {examining, #{op => get, do => stall}},
        {acknowledging, acknowledge}
    ],
    lists:foreach(
        fun({Phase, Stop}) ->
            Run = <<(run(?FUNCTION_NAME))/binary, "-", (atom_to_binary(Phase))/binary>>,
            Uploader = start(Host, #{}),
            ok = scanned(Uploader),
            _ = Phase =:= examining andalso put_segment(Run, 1, content(Run, 1)),
            case Stop of
                #{} -> ok = fault(Config, Stop#{key => "*/history/*"});
                _ -> ok = ?HOST:hook(Host, blocked_in(Stop))
            end,
            ok = seal(Host, Run, [1, 2]),
            ok = hint(Uploader, Run, 1),
            ok = eventually(fun() -> maps:get(runs, ?UPLOADER:status(Uploader)) =:= #{Phase => 1} end),
            GoOn = Kill(Uploader, Run),
            ok = ?HOST:hook(Host, fun(_, _) -> go_on end),
            ok = ?FAULTS:clear(server(Config)),
            Next = GoOn(),
            ok = ?UPLOADER:rescan(Next),
            ok = all_uploaded(Host),
            ok = nothing_left(Next),
            [?assertEqual({ok, content(Run, Seq)}, ?UPLOADER:read(Run, Seq)) || Seq <- [1, 2]],
            ok = eventually(fun() -> rabbitmq_stream_s3_nif:history_body_bytes() =:= 0 end),
            ok = stop_all()
        end,
        Steps
    ),
    ?assertEqual([], ?STATE:violations(?HOST:state(Host))).

%% Of the index only what is asked about one run.
blocked_in(Function) ->
    fun
        (pending, [start, _]) ->
            go_on;
        (F, _) when F =:= Function ->
            receive
                never -> go_on
            end;
        (_, _) ->
            go_on
    end.

%% --- hosts that do not answer ----------------------------------------------------------------------------------------

a_read_that_never_answers_holds_no_permit_for_ever(Config) ->
    Host = ?config(host, Config),
    [Slow, Quick] = [<<(run(?FUNCTION_NAME))/binary, Letter>> || Letter <- "ab"],
    [ok = seal(Host, Run, [1]) || Run <- [Slow, Quick]],
    ok = stream_s3_world:set(#{transfer_deadline_ms => 300}),
    ok = ?HOST:hook(Host, fun
        (read_segment, [Run, _]) when Run =:= Slow ->
            receive
                never -> go_on
            end;
        (_, _) ->
            go_on
    end),
    _ = start(Host, #{concurrency => 1}),
    ok = ?HOST:await(Host, fun(State) -> ?STATE:acknowledged(State) =:= [{Quick, 1}] end),
    {warning, _} = ?LOGS:await(?config(logs, Config), ["history of run ", Slow, ".*read_segment has not answered in 300 ms"], ?TIMEOUT),
    ok = ?HOST:hook(Host, fun(_, _) -> go_on end),
    ok = all_uploaded(Host).

a_page_that_never_comes_ends_its_scan_and_not_those_after_it(Config) ->
    Host = ?config(host, Config),
    ok = seal(Host, run(?FUNCTION_NAME), [1]),
    ok = stream_s3_world:set(#{transfer_deadline_ms => 300}),
    Once = counters:new(1, []),
    ok = ?HOST:hook(Host, fun
        (pending, _) ->
            ok = counters:add(Once, 1, 1),
            case counters:get(Once, 1) of
                1 ->
                    receive
                        never -> go_on
                    end;
                _ ->
                    go_on
            end;
        (_, _) ->
            go_on
    end),
    _ = start(Host, #{}),
    ok = all_uploaded(Host),
    ?assertMatch(#{rescan_errors := 1}, counted(Config)).

an_uploader_stops_at_once_whichever_call_of_the_host_blocks(Config) ->
    Host = ?config(host, Config),
    lists:foreach(
        fun(Function) ->
            Run = <<(run(?FUNCTION_NAME))/binary, "-", (atom_to_binary(Function))/binary>>,
            ok = seal(Host, Run, [1]),
            Called = hang(Host, Function),
            Uploader = start(Host, #{purge_wait_ms => 0}),
            _ = lists:member(Function, [catalog, purged]) andalso purge(Host, Uploader, Run),
            _ = Function =:= run_state andalso spawn(fun() -> sweep_until_it_stops(Uploader) end),
            ok = Called(),
            {Us, ok} = timer:tc(fun() -> ?UPLOADER:stop(Uploader) end),
            ?assert(Us < 2000000),
            ?assertEqual([], runs()),
            ok = ?HOST:hook(Host, fun(_, _) -> go_on end),
            New = start(Host, #{purge_wait_ms => 0}),
            [ok = ?UPLOADER:purge(New, P) || P <- ?STATE:purging(?HOST:state(Host))],
            ok = all_uploaded(Host),
            ok = ?HOST:await(Host, fun(State) -> ?STATE:purging(State) =:= [] end),
            ok = stop_all()
        end,
        %% A sweep asks of objects that are there.
        [pending, read_segment, acknowledge, catalog, purged, run_state]
    ),
    ?assertEqual([], ?STATE:violations(?HOST:state(Host))).

sweep_until_it_stops(Uploader) ->
    try ?UPLOADER:sweep(Uploader) of
        Swept -> error({swept, Swept})
    catch
        exit:_ -> ok
    end.

purge(Host, Uploader, Run) ->
    ok = ?HOST:commit(Host, {purge, Run}),
    ok = ?UPLOADER:purge(Uploader, Run).

%% --- purges ----------------------------------------------------------------------------------------------------------

an_uploader_is_killed_or_stopped_at_each_step_of_a_purge_and_the_next_one_ends_it(Config) ->
    Host = ?config(host, Config),
    Server = server(Config),
    Asked = fun(Op) ->
        Before = ?FAULTS:count(Server, Op),
        ok = fault(Config, #{op => Op, do => stall}),
        fun() -> eventually(fun() -> ?FAULTS:count(Server, Op) > Before end) end
    end,
    Waits = fun(Run) -> fun() -> eventually(fun() -> pauses(Run, 0) end) end end,
    Steps = [
        {catalog, fun(_) -> hang(Host, catalog) end},
        {wait, Waits},
        {delete, fun(_) -> Asked(multi_delete) end},
        {sweep, fun(_) -> Asked(list) end},
        {tell, fun(_) -> hang(Host, purged) end}
    ],
    lists:foreach(
        fun({End, {Step, Prepare}}) ->
            Run = iolist_to_binary(io_lib:format("~ts-~p-~p", [run(?FUNCTION_NAME), Step, element(1, End)])),
            ok = seal(Host, Run, [1, 2, 3]),
            Wait = case Step of wait -> 3600000; _ -> 0 end,
            Uploader = start(Host, #{purge_wait_ms => Wait}),
            ok = all_uploaded(Host),
            ok = nothing_left(Uploader),
            Await = Prepare(Run),
            ok = purge(Host, Uploader, Run),
            ok = Await(),
            ok = (element(2, End))(Uploader),
            ok = eventually(fun() -> runs() =:= [] end),
            ok = ?HOST:hook(Host, fun(_, _) -> go_on end),
            ok = ?FAULTS:clear(Server),
            ?assertEqual([Run], ?STATE:purging(?HOST:state(Host))),
            New = start(Host, #{purge_wait_ms => 0}),
            ok = ?UPLOADER:purge(New, Run),
            ok = ?HOST:await(Host, fun(State) -> ?STATE:runs(State) =:= [] end),
            ?assertEqual([], keys(Run)),
            ok = stop_all()
        end,
        [{End, Step} || Step <- Steps, End <- [{killed, fun stream_s3_wait:kill/1}, {stopped, fun ?UPLOADER:stop/1}]]
    ).

a_purge_in_the_middle_of_an_examination_or_a_replacement_leaves_nothing(Config) ->
    Host = ?config(host, Config),
    Uploader = start(Host, #{purge_wait_ms => 0}),
    lists:foreach(
        fun({Phase, Rule}) ->
            Run = <<(run(?FUNCTION_NAME))/binary, "-", (atom_to_binary(Phase))/binary>>,
            {stored, _, _} = put_segment(Run, 1, <<"something else">>),
            ok = fault(Config, Rule#{key => "*/history/*", do => stall}),
            ok = seal(Host, Run, [1]),
            ok = hint(Uploader, Run, 1),
            ok = eventually(fun() -> ?FAULTS:count(server(Config), map_get(op, Rule)) > 0 andalso maps:get(runs, ?UPLOADER:status(Uploader)) =:= #{Phase => 1} end),
            ?assertMatch(#{permits := 1}, ?UPLOADER:status(Uploader)),
            ok = purge(Host, Uploader, Run),
            ok = ?HOST:await(Host, fun(State) -> ?STATE:runs(State) =:= [] end),
            ?assertEqual([], keys(Run)),
            ?assertMatch(#{permits := 0, waiting := 0}, ?UPLOADER:status(Uploader)),
            ?assertEqual(0, rabbitmq_stream_s3_nif:history_body_bytes()),
            ok = ?FAULTS:clear(server(Config))
        end,
        %% The first put finds the other object, the second one is to replace it.
        [{examining, #{op => get}}, {storing, #{op => put, skip => 1}}]
    ),
    ok = nothing_left(Uploader).

one_owner_purges_while_the_other_uploads(Config) ->
    Host = ?config(host, Config),
    Runs = [<<(run(?FUNCTION_NAME))/binary, Letter>> || Letter <- "abcdefgh"],
    [ok = seal(Host, Run, lists:seq(1, 30)) || Run <- Runs],
    [Purges, Uploads] = [start(Host, #{purge_wait_ms => 20}) || _ <- [1, 2]],
    ok = ?HOST:await(Host, fun(State) -> length(?STATE:acknowledged(State)) > 20 end),
    [ok = purge(Host, Purges, Run) || Run <- Runs],
    ok = ?HOST:await(Host, fun(State) -> ?STATE:runs(State) =:= [] end),
    [ok = nothing_left(Uploader) || Uploader <- [Purges, Uploads]],
    %% What the other one had under way may have come later than the purge waited.
    {ok, #{failed := 0, deleted := Late}} = ?UPLOADER:sweep(Uploads),
    ct:pal("~b segments acknowledged, ~b objects came late", [length(?STATE:acknowledged(?HOST:state(Host))), Late]),
    ?assertEqual([], lists:append([keys(Run) || Run <- Runs])),
    ?assertEqual([], ?STATE:violations(?HOST:state(Host))).

an_acknowledgment_in_the_middle_of_a_purge_comes_to_nothing(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = seal(Host, Run, [1, 2]),
    Uploader = start(Host, #{purge_wait_ms => 0}),
    Test = self(),
    ok = all_uploaded(Host),
    %% The host commits on behalf of somebody who is dead by then.
    ok = ?HOST:hook(Host, fun
        (acknowledge, [Acknowledgment]) ->
            Caller = self(),
            Late = spawn(fun() ->
                receive
                    now -> Test ! {late, ?HOST:commit(Host, {acknowledge, Acknowledgment}), Caller}
                end
            end),
            Test ! {committing, Late},
            receive
                never -> go_on
            end;
        (_, _) ->
            go_on
    end),
    ok = seal(Host, Run, [3]),
    ok = hint(Uploader, Run, 1),
    Committing =
        receive
            {committing, Late} -> Late
        after ?TIMEOUT -> error(not_called)
        end,
    ok = purge(Host, Uploader, Run),
    Committing ! now,
    receive
        {late, Answer, Caller} ->
            ?assertEqual(gone, Answer),
            ?assertNot(is_process_alive(Caller))
    after ?TIMEOUT -> error(no_commit)
    end,
    ok = ?HOST:await(Host, fun(State) -> ?STATE:runs(State) =:= [] end),
    ok = nothing_left(Uploader),
    ?assertEqual({[], 2}, {keys(Run), length(?STATE:acknowledged(?HOST:state(Host)))}).

%% It puts nothing.
a_purge_needs_no_store_that_is_proven(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    ok = seal(Host, Run, [1, 2]),
    {stored, _, _} = put_segment(Run, 1, content(Run, 1)),
    ok = fault(Config, #{op => put, do => status, status => 503}),
    Uploader = start(Host, #{purge_wait_ms => 0}),
    ok = purge(Host, Uploader, Run),
    ok = ?HOST:await(Host, fun(State) -> ?STATE:runs(State) =:= [] end),
    ?assertEqual([], keys(Run)),
    ?assertMatch(#{proven := false}, ?UPLOADER:status(Uploader)).

a_host_does_not_sweep_what_is_another_ones(Config) ->
    [One, Other] = [?config(host, Config), ?HOST:start()],
    [Mine, Yours] = [<<Letter, "-", (run(?FUNCTION_NAME))/binary>> || Letter <- "ab"],
    ok = seal(One, Mine, [1]),
    ok = seal(Other, Yours, [1]),
    [A, B] = [start(Host, #{run_prefix => Prefix}) || {Host, Prefix} <- [{One, <<"a-">>}, {Other, <<"b-">>}]],
    [ok = all_uploaded(Host) || Host <- [One, Other]],
    {stored, _, _} = put_segment(<<"a-gone">>, 1, <<"late">>),
    ?assertEqual({ok, #{listed => 1, deleted => 0, failed => 0}}, ?UPLOADER:sweep(B)),
    ?assertEqual({ok, #{listed => 2, deleted => 1, failed => 0}}, ?UPLOADER:sweep(A)),
    ?assertEqual([1, 1], [length(keys(Run)) || Run <- [Mine, Yours]]),
    %% A host of another kind is refused as long as their runs might be mixed up.
    Kind = fun(Prefix) -> #{source => stream_s3_history_ra, argument => {no_member, node()}, run_prefix => Prefix} end,
    Refused = [try_start(One, Kind(Prefix)) || Prefix <- [<<>>, <<"a">>, <<"a-">>, <<"a-1">>]],
    [?assertMatch({error, {bad_option, <<"run_prefix must keep ", _/binary>>}}, R) || R <- Refused],
    ?assertMatch({error, {bad_option, <<"run_prefix must be ", _/binary>>}}, try_start(One, #{run_prefix => <<"a/">>})),
    {ok, _} = try_start(One, Kind(<<"c">>)),
    ok = stop_all(),
    ?HOST:stop(Other).

%% --- floods ----------------------------------------------------------------------------------------------------------

hints_of_runs_that_nobody_knows_are_bounded_in_memory_and_calls(Config) ->
    Host = ?config(host, Config),
    Run = run(?FUNCTION_NAME),
    Uploader = start(Host, #{}),
    ok = scanned(Uploader),
    Asks = counters:new(1, []),
    Test = self(),
    ok = ?HOST:hook(Host, fun
        (pending, [{run, _}, _]) ->
            ok = counters:add(Asks, 1, 1),
            Test ! {asks, self()},
            receive
                go_on -> go_on
            end;
        (_, _) ->
            go_on
    end),
    Before = erlang:memory(total),
    [ok = hint(Uploader, <<"unknown-", (integer_to_binary(N))/binary>>, 1) || N <- lists:seq(1, 50000)],
    %% One that is in the index, and comes last.
    ok = seal(Host, Run, [1]),
    ok = hint(Uploader, Run, 1),
    %% The scan has found it although there was no room to ask.
    ok = ?HOST:await(Host, fun(State) -> ?STATE:acknowledged(State) =:= [{Run, 1}] end),
    ok = eventually(fun() -> counters:get(Asks, 1) =:= 1000 end),
    Grown = erlang:memory(total) - Before,
    ct:pal("50,000 hints of unknown runs while the host blocks: ~b processes, ~b MiB", [length(runs()), Grown div 1048576]),
    ?assert(length(runs()) =< 1001),
    ?assert(Grown < 64 * 1048576),
    ok = ?HOST:hook(Host, fun(_, _) -> go_on end),
    ok = let_all_go_on(),
    ok = nothing_left(Uploader),
    %% And of one run as many.
    [ok = hint(Uploader, Run, 1) || _ <- lists:seq(1, 50000)],
    ok = nothing_left(Uploader),
    ?assertEqual(0, gauge(history_upload_backlog_segments)).

let_all_go_on() ->
    receive
        {asks, Pid} ->
            Pid ! go_on,
            let_all_go_on()
    after 0 -> ok
    end.

a_store_that_refuses_each_condition_is_asked_less_and_less(Config) ->
    Host = ?config(host, Config),
    ok = stream_s3_world:set(#{task_retry_delay_ms => 10, task_retry_delay_max_ms => 3600000}),
    Uploader = start(Host, #{}),
    lists:foreach(
        fun({Name, There, Status, Code}) ->
            Run = <<(run(?FUNCTION_NAME))/binary, "-", Name/binary>>,
            [{stored, _, _} = put_segment(Run, 1, <<"something else">>) || There],
            ok = fault(Config, #{op => put, key => "*/history/*", do => status, status => Status, code => Code}),
            ok = seal(Host, Run, [1]),
            ok = hint(Uploader, Run, 1),
            ok = eventually(fun() -> pauses(Run, 150) end),
            ok = ?FAULTS:clear(server(Config)),
            ok = all_uploaded(Host),
            ok = nothing_left(Uploader)
        end,
        [
            {<<"absent">>, false, 412, 'PreconditionFailed'},
            {<<"other">>, true, 412, 'PreconditionFailed'},
            {<<"conflict">>, false, 409, 'ConditionalRequestConflict'}
        ]
    ),
    ?assertMatch(#{replaced := 1, uploaded := 2}, counted(Config)),
    ct:pal("~p", [counted(Config)]).

%% --- support ---------------------------------------------------------------------------------------------------------

%% From now on the calls of the host are noted.
calls(Host) ->
    Calls = ets:new(calls, [ordered_set, public]),
    ok = ?HOST:hook(Host, fun(Function, Args) ->
        true = ets:insert(Calls, {erlang:unique_integer([monotonic]), Function, Args}),
        go_on
    end),
    Calls.

calls_so_far(Calls) -> [{Function, Args} || {_, Function, Args} <- ets:tab2list(Calls)].

long(Run) ->
    {Opened, ok} = ?STATE:apply({open, Run}, ?STATE:new()),
    lists:foldl(fun(Seq, State) -> element(1, ?STATE:apply({seal, Run, Seq, {made_up, 100}, 0}, State)) end, Opened, lists:seq(1, ?LONG)).
