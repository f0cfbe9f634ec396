%% @doc How many requests of each kind a GiB takes, by fragment size and persist interval: a real stream written at a steady rate, tiered to
%% a local S3 server that counts. One line of JSON for each combination goes to standard output; test/bench/bench_cost.py makes a page of them.
-module(stream_s3_bench_cost).

-export([main/0]).

-define(RECORD_B, 65536).
-define(BATCH, 16).
-define(OPS, [put, get, list, delete, multi_delete]).
-define(TIMEOUT_MS, 120000).

%% @doc Environment: COST_FRAGMENTS_MIB, COST_INTERVALS_MS (lists with commas), COST_MIB (bytes of each run), COST_MIB_S (how fast).
-spec main() -> ok.
main() ->
    _ = logger:set_primary_config(level, error),
    {ok, Dir} = stream_s3_temp:new("cost"),
    try
        [
            measure(filename:join(Dir, io_lib:format("~b-~b", [Fragment, Interval])), Fragment, Interval)
         || Fragment <- numbers("COST_FRAGMENTS_MIB"), Interval <- numbers("COST_INTERVALS_MS")
        ]
    after
        stream_s3_temp:remove(Dir)
    end,
    ok.

measure(Dir, FragmentMiB, IntervalMs) ->
    [MiB] = numbers("COST_MIB"),
    [Rate] = numbers("COST_MIB_S"),
    Env = #{fragment_target_size => FragmentMiB * 1048576, persist_interval_ms => IntervalMs},
    World = stream_s3_world:start(#{store => s3, dir => lists:flatten(Dir), env => Env}),
    Server = stream_s3_world:s3local(World),
    Id = <<"cost">>,
    Writer = stream_s3_osiris:start_stream(stream_s3_osiris:config(Id)),
    ok = rabbitmq_stream_s3:reconcile(),
    ok = rabbitmq_stream_s3:await_offset(Id, 0),
    %% What a stream costs once, before it has a byte, is not what a GiB costs.
    ok = stream_s3_osiris:write(Writer, [<<"first">>]),
    ok = rabbitmq_stream_s3:flush(Id, ?TIMEOUT_MS),
    Before = counts(Server),
    Record = rand:bytes(?RECORD_B),
    ok = write(Writer, Record, MiB, Rate, erlang:monotonic_time(millisecond), 0),
    ok = rabbitmq_stream_s3:flush(Id, ?TIMEOUT_MS),
    Counts = maps:merge_with(fun(_, A, B) -> A - B end, counts(Server), Before),
    ok = stream_s3_world:stop(World),
    Rows = [io_lib:format(",\"~s\":~b", [Op, N]) || {Op, N} <- maps:to_list(Counts)],
    io:format("{\"fragment_mib\":~b,\"interval_ms\":~b,\"mib\":~b,\"mib_s\":~b~s}~n", [FragmentMiB, IntervalMs, MiB, Rate, Rows]).

counts(Server) ->
    #{Op => stream_s3_store_faults:requests(Server, Op) || Op <- ?OPS}.

%% A MiB at a time, each when it is due.
write(_Writer, _Record, MiB, _Rate, _Start, MiB) ->
    ok;
write(Writer, Record, MiB, Rate, Start, Done) ->
    Due = Start + Done * 1000 div Rate,
    timer:sleep(max(0, Due - erlang:monotonic_time(millisecond))),
    ok = stream_s3_osiris:write(Writer, lists:duplicate(?BATCH, Record)),
    write(Writer, Record, MiB, Rate, Start, Done + 1).

numbers(Name) ->
    [list_to_integer(Number) || Number <- string:lexemes(os:getenv(Name), ", ")].
