%% The store is away for a while, in each of the ways in which stores are away, while a stream is written to. Ten seconds each
%% in turn, a minute each with the environment variable STREAM_S3_DEEP.
-module(rabbitmq_stream_s3_outage_SUITE).

-include("rabbitmq_stream_s3.hrl").
-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-import(stream_s3_wait, [eventually/1]).

-export([all/0, suite/0, init_per_suite/1, end_per_suite/1]).
-export([
    a_store_that_is_away_costs_no_memory_no_record_and_no_patience/1,
    an_application_stops_in_bounded_time_while_the_store_is_dead/1
]).

-define(TIMEOUT, 60000).
-define(IN_FLIGHT, 4).
-define(FRAGMENT, 50000).
%% Of the readers and of the library together, above what they have while all is well. The backlog of each outage is larger.
-define(FLAT, 4000000).
-define(ENV, #{
    fragment_target_size => ?FRAGMENT,
    max_in_flight_fragments => ?IN_FLIGHT,
    persist_interval_ms => 50,
    transfer_deadline_ms => 1000,
    persist_timeout_ms => 1000,
    upload_retry_delay_ms => 10,
    upload_retry_delay_max_ms => 500,
    task_retry_delay_max_ms => 500
}).
%% Of each record, and the pause after it: 1 MB/s or somewhat less.
-define(RECORD, 5000).
-define(PAUSE_MS, 5).

suite() -> [{timetrap, {seconds, case os:getenv("STREAM_S3_DEEP") of false -> 150; _ -> 600 end}}].

all() ->
    [
        a_store_that_is_away_costs_no_memory_no_record_and_no_patience,
        an_application_stops_in_bounded_time_while_the_store_is_dead
    ].

seconds() ->
    case os:getenv("STREAM_S3_DEEP") of
        false -> 10;
        _ -> 60
    end.

init_per_suite(Config) ->
    Dir = filename:join(?config(priv_dir, Config), "world"),
    Keeper = stream_s3_keeper:start(fun() -> start_world(Dir) end),
    maps:to_list(stream_s3_keeper:value(Keeper)) ++ [{keeper, Keeper} | Config].

end_per_suite(Config) ->
    stream_s3_keeper:stop(?config(keeper, Config), fun stop_world/1).

%% The application does not see the server but a place where it may be: so it can go and come back.
start_world(Dir) ->
    Objects = filename:join(Dir, "objects"),
    ok = filelib:ensure_path(Objects),
    Server = stream_s3_s3local:start(#{dir => Objects}),
    ok = stream_s3_s3local:create_bucket(Server, "bucket"),
    #{endpoint := Endpoint} = Settings = stream_s3_s3local:settings(Server),
    Proxy = stream_s3_proxy:start(Endpoint),
    Store = Settings#{store => s3, bucket => <<"bucket">>},
    ok = stream_s3_world:stop_metadata_store(),
    ok = stream_s3_osiris:start(filename:join(Dir, "osiris")),
    ok = stream_s3_world:start_application(maps:merge(?ENV, Store#{endpoint => stream_s3_proxy:endpoint(Proxy)})),
    #{server => Server, proxy => Proxy, store => Store}.

stop_world(#{server := Server, proxy := Proxy}) ->
    ok = stream_s3_world:stop_application(),
    ok = stream_s3_world:stop_metadata_store(),
    ok = stream_s3_osiris:stop(),
    ok = stream_s3_proxy:stop(Proxy),
    stream_s3_s3local:stop(Server).

%% --- cases -----------------------------------------------------------------------------------------------------------

a_store_that_is_away_costs_no_memory_no_record_and_no_patience(Config) ->
    Stream = <<"away">>,
    Writer = start_stream(Stream),
    Load = spawn_link(fun() -> load(Writer, 0, #{}) end),
    ok = rabbitmq_stream_s3:await_offset(Stream, 200),
    Calm = memory(Stream),
    [
        begin
            ok = How(away, Config),
            Worst = watch(Stream, erlang:monotonic_time(millisecond) + seconds() * 1000, 0),
            Status = rabbitmq_stream_s3:status(Stream),
            ok = How(back, Config),
            ct:pal("~ts: memory ~b kB beyond ~b, ~0tp", [
                Name, (Worst - Calm) div 1000, Calm div 1000, maps:with([lag_bytes, lag_ms, stalled, transfers_in_flight], Status)
            ]),
            %% As much lies behind as has been written, nobody drains it, and what stands in the way is told.
            #{lag_bytes := LagBytes, lag_ms := LagMs, waits_for_transfers := true, stalled := #{cause := _}} = Status,
            ?assert(LagMs > seconds() * 1000 div 2),
            ?assert(LagBytes > ?IN_FLIGHT * ?FRAGMENT),
            ?assert(Worst - Calm < ?FLAT, {Worst, Calm}),
            %% Nobody tells it to go on.
            ok = rabbitmq_stream_s3:await_offset(Stream, stream_s3_osiris:next_offset(Writer)),
            ok = eventually(fun() -> maps:get(problems, rabbitmq_stream_s3:status(Stream)) =:= [] end)
        end
     || {Name, How} <- ways()
    ],
    Confirmed = stop(Load),
    ok = assert_all_there(Stream, Writer, Confirmed, Config).

ways() ->
    [
        {"refused", fun(What, Config) -> stream_s3_proxy:set(?config(proxy, Config), mode(What, refuse)) end},
        {"black hole", fun(What, Config) -> stream_s3_proxy:set(?config(proxy, Config), mode(What, swallow)) end},
        {"503", fun
            (away, Config) -> stream_s3_store_faults:add(?config(server, Config), [#{do => status, status => 503, code => "ServiceUnavailable"}]);
            (back, Config) -> stream_s3_store_faults:clear(?config(server, Config))
        end}
    ].

mode(away, Mode) -> Mode;
mode(back, _Mode) -> pass.

an_application_stops_in_bounded_time_while_the_store_is_dead(Config) ->
    Stream = <<"dead">>,
    Writer = start_stream(Stream),
    ok = stream_s3_osiris:write(Writer, [<<0>>]),
    ok = stream_s3_world:settle(Stream, 1, ?TIMEOUT),
    #{endpoint := Endpoint} = maps:from_list(application:get_all_env(rabbitmq_stream_s3)),
    [
        begin
            ok = stream_s3_proxy:set(?config(proxy, Config), Mode),
            ok = stream_s3_osiris:write(Writer, [binary:copy(<<N>>, ?FRAGMENT) || N <- lists:seq(1, 10)]),
            ok = eventually(fun() -> maps:get(transfers_in_flight, rabbitmq_stream_s3:status(Stream)) > 0 end),
            Began = erlang:monotonic_time(millisecond),
            ok = stream_s3_world:stop_application(),
            Took = erlang:monotonic_time(millisecond) - Began,
            ct:pal("~s: stopped within ~b ms", [Mode, Took]),
            ?assert(Took < 15000),
            ok = stream_s3_proxy:set(?config(proxy, Config), pass),
            ok = stream_s3_world:start_application(maps:merge(?ENV, (?config(store, Config))#{endpoint => Endpoint})),
            ok = rabbitmq_stream_s3:reconcile(),
            ok = stream_s3_world:settle(Stream, stream_s3_osiris:next_offset(Writer), ?TIMEOUT)
        end
     || Mode <- [refuse, swallow]
    ].

%% --- helpers ---------------------------------------------------------------------------------------------------------

start_stream(Stream) ->
    Writer = stream_s3_osiris:start_stream(stream_s3_osiris:config(Stream, #{max_segment_size_bytes => 1000000})),
    ok = rabbitmq_stream_s3:reconcile(),
    Writer.

%% Numbers of the records that are confirmed, until somebody asks.
load(Writer, Number, Confirmed) ->
    receive
        {osiris_written, _Reference, undefined, Numbers} ->
            load(Writer, Number, maps:merge(Confirmed, maps:from_keys(Numbers, true)));
        {stop, From} ->
            From ! {self(), maps:keys(Confirmed)}
    after ?PAUSE_MS ->
        ok = osiris:write(Writer, undefined, Number, record(Number)),
        load(Writer, Number + 1, Confirmed)
    end.

record(Number) ->
    <<Number:64, (binary:copy(<<(Number rem 251)>>, ?RECORD - 8))/binary>>.

stop(Load) ->
    Load ! {stop, self()},
    receive
        {Load, Confirmed} -> Confirmed
    after ?TIMEOUT -> error(no_answer)
    end.

%% The most that is seen, each time after a collection.
watch(Stream, Until, Worst) ->
    case erlang:monotonic_time(millisecond) < Until of
        true ->
            receive
            after 200 -> watch(Stream, Until, max(Worst, memory(Stream)))
            end;
        false ->
            Worst
    end.

%% Of the stream's reader, of the governor, and of the buffers that the library holds.
memory(Stream) ->
    Pids = [rabbitmq_stream_s3_registry:whereis(Stream), whereis(rabbitmq_stream_s3_governor), whereis(rabbitmq_stream_s3_reaper)],
    [true = erlang:garbage_collect(Pid) || Pid <- Pids],
    Memory = [Bytes || Pid <- Pids, {memory, Bytes} <- [process_info(Pid, memory)]],
    #{upload_buffer_bytes := Buffers} = rabbitmq_stream_s3_governor:info(),
    lists:sum(Memory) + Buffers.

assert_all_there(Stream, Writer, Confirmed, Config) ->
    End = stream_s3_osiris:next_offset(Writer),
    ok = stream_s3_world:settle(Stream, End, ?TIMEOUT),
    {Pointer, _} = stream_s3_world:pointer(Stream),
    Store = ?config(store, Config),
    ok = stream_s3_cli:verify(Store, Stream, Pointer),
    Bucket = stream_s3_bucket:open(Store),
    {#manifest{first_offset = 0, next_offset = End}, Fragments} = stream_s3_bucket:fragments(Bucket, Stream, Pointer),
    Remote = iolist_to_binary([stream_s3_bucket:chunk_bytes(Bucket, Fragment) || Fragment <- Fragments]),
    #{bytes := Local} = stream_s3_chunks:of_log(stream_s3_osiris:dir(Writer)),
    ?assertEqual({byte_size(Local), erlang:md5(Local)}, {byte_size(Remote), erlang:md5(Remote)}),
    Numbers = [Number || Chunk <- stream_s3_chunks:all(Remote), <<Number:64, _/binary>> <- stream_s3_chunks:records(Chunk)],
    ?assertEqual([], lists:sort(Confirmed) -- Numbers),
    ok.
