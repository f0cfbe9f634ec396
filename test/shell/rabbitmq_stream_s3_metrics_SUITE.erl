%% What metrics cost others: nothing. And what `verify' on the broker finds.
-module(rabbitmq_stream_s3_metrics_SUITE).

-include("rabbitmq_stream_s3.hrl").
-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-import(stream_s3_wait, [eventually/1]).

-export([all/0, suite/0, init_per_suite/1, end_per_suite/1, init_per_testcase/2, end_per_testcase/2]).
-export([
    a_scrape_waits_for_no_process/1,
    every_metric_is_there_once_in_each_registry/1,
    the_collector_is_registered_again_when_the_registry_has_been_away/1,
    a_scrape_without_the_application_tells_of_no_stream_and_is_no_error/1,
    verify_finds_what_is_gone_and_what_has_another_size/1
]).

-define(REGISTRIES, [default, 'per-object']).
-define(SCRAPE_MS, 2000).
-define(ENV, #{fragment_target_size => 10000, persist_interval_ms => 50, rebalance_threshold => 4, persist_threshold => 4}).

suite() -> [{timetrap, {seconds, 60}}].

all() ->
    [
        a_scrape_waits_for_no_process,
        every_metric_is_there_once_in_each_registry,
        the_collector_is_registered_again_when_the_registry_has_been_away,
        a_scrape_without_the_application_tells_of_no_stream_and_is_no_error,
        verify_finds_what_is_gone_and_what_has_another_size
    ].

init_per_suite(Config) ->
    {ok, _} = application:ensure_all_started(prometheus),
    Config.

end_per_suite(_Config) ->
    application:stop(prometheus).

init_per_testcase(Case, Config) ->
    Dir = filename:join([?config(priv_dir, Config), Case]),
    Keeper = stream_s3_keeper:start(fun() -> stream_s3_world:start(#{store => fs, dir => Dir, env => ?ENV}) end),
    Stream = atom_to_binary(Case),
    Writer = stream_s3_osiris:start_stream(stream_s3_osiris:config(Stream)),
    ok = rabbitmq_stream_s3:reconcile(),
    ok = rabbitmq_stream_s3:await_offset(Stream, 0),
    [ok = stream_s3_osiris:write_chunk(Writer, [binary:copy(<<N>>, 3000)]) || N <- lists:seq(1, 40)],
    ok = rabbitmq_stream_s3:flush(Stream),
    [{keeper, Keeper}, {stream, Stream}, {writer, Writer}, {objects, filename:join([Dir, "objects", "bucket"])} | Config].

end_per_testcase(_Case, Config) ->
    stream_s3_keeper:stop(?config(keeper, Config), fun stream_s3_world:stop/1).

a_scrape_waits_for_no_process(Config) ->
    Reader = rabbitmq_stream_s3_registry:whereis(?config(stream, Config)),
    Servers = [rabbitmq_stream_s3_store, rabbitmq_stream_s3_gc, rabbitmq_stream_s3_reaper, rabbitmq_stream_s3_governor, rabbitmq_stream_s3_prometheus],
    Busy = [Reader, ?config(writer, Config) | [whereis(Server) || Server <- Servers]],
    ok = lists:foreach(fun sys:suspend/1, Busy),
    [?assertMatch([_ | _], scrape(Registry)) || Registry <- ?REGISTRIES],
    ok = lists:foreach(fun sys:resume/1, Busy).

%% Names and kinds; the numbers are looked at in a broker.
every_metric_is_there_once_in_each_registry(_Config) ->
    Expected = lists:sort([{atom_to_binary(Name), Kind} || {Name, Kind, _Help} <- rabbitmq_stream_s3_prometheus:metrics()]),
    [?assertEqual(Expected, lists:sort(scrape(Registry))) || Registry <- ?REGISTRIES].

the_collector_is_registered_again_when_the_registry_has_been_away(_Config) ->
    ok = await_registration(),
    ok = application:stop(prometheus),
    %% Nobody minds.
    ?assertMatch(#{streams := [_]}, rabbitmq_stream_s3:status()),
    ok = application:start(prometheus),
    ok = await_registration(),
    Pid = whereis(rabbitmq_stream_s3_prometheus),
    ok = stream_s3_world:stop_application(),
    ?assertNot(is_process_alive(Pid)),
    ?assertEqual([], [R || R <- ?REGISTRIES, prometheus_registry:collector_registeredp(R, rabbitmq_stream_s3_prometheus)]).

await_registration() ->
    Is = fun(Registry) -> prometheus_registry:collector_registeredp(Registry, rabbitmq_stream_s3_prometheus) end,
    eventually(fun() -> lists:all(Is, ?REGISTRIES) end).

a_scrape_without_the_application_tells_of_no_stream_and_is_no_error(_Config) ->
    ok = stream_s3_world:stop_application(),
    %% As a scrape that had begun before the collector was deregistered.
    Families = families('per-object'),
    ?assertMatch({_, _, []}, lists:keyfind(<<"transfers_completed">>, 1, Families)),
    ?assertEqual(false, lists:keyfind(<<"governor_tasks_in_flight">>, 1, Families)),
    ?assertMatch({_, _, [_]}, lists:keyfind(<<"streams">>, 1, families(default))).

%% In a process of its own, so that one that waits does so for a while only. As RabbitMQ does it.
scrape(Registry) ->
    Self = self(),
    {Pid, Monitor} = spawn_monitor(fun() -> Self ! {scraped, self(), families(Registry)} end),
    receive
        {scraped, Pid, Families} ->
            true = demonitor(Monitor, [flush]),
            [{Name, Kind} || {Name, Kind, _} <- Families];
        {'DOWN', Monitor, process, Pid, Reason} ->
            error(Reason)
    after ?SCRAPE_MS ->
        error(blocked)
    end.

%% Of the record that prometheus has for a family: name, help, type, metrics.
families(Registry) ->
    Self = self(),
    ok = rabbitmq_stream_s3_prometheus:collect_mf(Registry, fun(Family) -> Self ! {family, Family} end),
    collected([]).

collected(Families) ->
    receive
        {family, Family} ->
            <<"rabbitmq_stream_s3_", Name/binary>> = iolist_to_binary(element(2, Family)),
            collected([{Name, kind(element(4, Family)), element(5, Family)} | Families])
    after 0 -> Families
    end.

kind('COUNTER') -> counter;
kind('GAUGE') -> gauge;
kind('HISTOGRAM') -> histogram.

verify_finds_what_is_gone_and_what_has_another_size(Config) ->
    Stream = ?config(stream, Config),
    {ok, #{ok := true, findings := [], fragments := Fragments, groups := Groups}} = rabbitmq_stream_s3_verify:run(Stream, 5000),
    ?assert(Fragments > 4 andalso Groups > 0),
    [First, Second | _] = lists:sort(filelib:wildcard(filename:join(?config(objects, Config), "rabbitmq/stream/*/data/*.fragment"))),
    ok = file:delete(First),
    {ok, File} = file:open(Second, [append, raw]),
    ok = file:write(File, <<0>>),
    ok = file:close(File),
    {ok, #{ok := false, findings := [Gone, Longer]}} = rabbitmq_stream_s3_verify:run(Stream, 5000),
    ?assertMatch({match, _}, re:run(Gone, [filename:basename(First), " is not there"])),
    ?assertMatch({match, _}, re:run(Longer, [filename:basename(Second), " has \\d+ bytes, which \\d+ of data and an index do not make"])),
    ?assertEqual({error, not_tiered_here}, rabbitmq_stream_s3_verify:run(<<"nobody">>, 5000)).
