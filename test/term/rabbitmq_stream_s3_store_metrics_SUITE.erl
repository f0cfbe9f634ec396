%% The counts of store requests, beside what a server has served.
-module(rabbitmq_stream_s3_store_metrics_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").
-include("rabbitmq_stream_s3.hrl").

-compile(nowarn_export_all).
-compile(export_all).

-define(NIF, rabbitmq_stream_s3_nif).
-define(STREAM, <<"stream_1">>).
-define(WAIT, 20_000).
-define(OPERATIONS, [put, get, list, delete, multi_delete]).

all() ->
    [
        counts_are_what_the_server_has_served,
        transfers_are_counted_like_all_other_requests,
        counts_only_grow
    ].

init_per_suite(Config) ->
    {ok, Dir} = stream_s3_temp:new("metrics"),
    Server = stream_s3_s3local:start(#{dir => Dir}),
    ok = stream_s3_s3local:create_bucket(Server, "bucket"),
    {ok, Store} = ?NIF:store_open((stream_s3_s3local:settings(Server))#{store => s3, bucket => <<"bucket">>, path_style => true, prefix => <<"p">>}),
    [{server, Server}, {store, Store}, {dir, Dir} | Config].

end_per_suite(Config) ->
    ok = stream_s3_s3local:stop(?config(server, Config)),
    stream_s3_temp:remove(?config(dir, Config)).

end_per_testcase(_Case, Config) ->
    stream_s3_store_faults:clear(?config(server, Config)).

%% --- cases -----------------------------------------------------------------------------------------------------------

counts_are_what_the_server_has_served(Config) ->
    {Server, Store} = {?config(server, Config), ?config(store, Config)},
    {Counted, Served, Rows} = during(Server, fun() ->
        Entry = <<10:64, 1:64, 2:64, 0, 100:40, 7:32>>,
        Root = #manifest{first_offset = 10, first_timestamp = 1, first_last_timestamp = 2, next_offset = 20, total_size = 100, entries = Entry},
        {ok, Uid} = ask(fun(Ref) -> ?NIF:put_root(Store, self(), Ref, ?STREAM, 1, Root) end),
        {ok, #manifest{}} = ask(fun(Ref) -> ?NIF:get_root(Store, self(), Ref, ?STREAM, 1, Uid) end),
        {error, {not_found, _}} = ask(fun(Ref) -> ?NIF:get_root(Store, self(), Ref, ?STREAM, 2, Uid) end),
        {ok, _} = ask(fun(Ref) -> ?NIF:put_group(Store, self(), Ref, ?STREAM, 1, Entry) end),
        ok = stream_s3_store_faults:add(Server, [#{op => put, do => status, status => 503, code => 'SlowDown', count => 2}]),
        [{error, {transient, _}} = ask(fun(Ref) -> ?NIF:put_root(Store, self(), Ref, ?STREAM, 1, Root) end) || _ <- [1, 2]],
        {ok, #{objects := Objects}} = ask(fun(Ref) -> ?NIF:store_list(Store, self(), Ref, <<"p/">>, undefined, 1000) end),
        {ok, []} = ask(fun(Ref) -> ?NIF:store_delete(Store, self(), Ref, [Key || {Key, _, _} <- Objects]) end)
    end),
    ?assertEqual(Served, Counted),
    ?assertEqual(
        [
            {get, not_found, root, 1},
            {get, ok, root, 1},
            {list, ok, unknown, 1},
            {multi_delete, ok, unknown, 1},
            {put, ok, group, 1},
            {put, ok, root, 1},
            {put, throttled, root, 2}
        ],
        Rows
    ).

transfers_are_counted_like_all_other_requests(Config) ->
    {Server, Store} = {?config(server, Config), ?config(store, Config)},
    {Dir, Meta, Object} = log(Config, binary:copy(<<"0123456789">>, 10_000)),
    {ok, Governor} = ?NIF:governor_start(#{rate => unlimited, burst => 1, concurrency => 1, owner => self()}),
    ok = stream_s3_store_faults:add(Server, [#{op => put, do => status, status => 500, skip => 1, count => 1}]),
    #{bytes_sent := Before} = ?NIF:store_metrics(),
    Transfer = fun() ->
        Ref = make_ref(),
        ok = ?NIF:governor_submit(Governor, {fragment, Store, ?STREAM, Dir, Meta}, maps:get(size, Meta), self(), Ref),
        receive
            {transfer_result, Ref, Result} -> Result
        after ?WAIT -> error(no_result)
        end
    end,
    {Counted, Served, Rows} = during(Server, fun() ->
        ?assertMatch([{ok, _}, {error, {http, 500}}, {ok, _}], [Transfer() || _ <- [1, 2, 3]])
    end),
    ?assertEqual(Served, Counted),
    ?assertEqual([{put, ok, fragment, 2}, {put, transient, fragment, 1}], Rows),
    %% The second one was sent whole as well, and in vain.
    #{bytes_sent := After} = ?NIF:store_metrics(),
    ?assertEqual(3 * byte_size(Object), After - Before).

counts_only_grow(Config) ->
    Store = ?config(store, Config),
    Get = fun() -> ask(fun(Ref) -> ?NIF:store_get(Store, self(), Ref, <<"p/none">>, whole) end) end,
    lists:foldl(
        fun(_, Old) ->
            {error, {not_found, _}} = Get(),
            New = ?NIF:store_metrics(),
            [?assert(maps:get(Key, requests(New)) >= Count) || Key := Count <- requests(Old)],
            [true = N >= O || {Op, Buckets, _, _} <- maps:get(durations, Old), {{B, O}, {B, N}} <- lists:zip(Buckets, buckets(Op, New))],
            [?assertEqual({infinity, N}, lists:last(Buckets)) || {_, Buckets, _, N} <- maps:get(durations, New)],
            ?assert(maps:get(get, totals(New)) > maps:get(get, totals(Old), 0)),
            New
        end,
        ?NIF:store_metrics(),
        lists:seq(1, 20)
    ).

%% --- helpers ---------------------------------------------------------------------------------------------------------

ask(Request) ->
    Ref = make_ref(),
    ok = Request(Ref),
    receive
        {store_result, Ref, Result} -> Result
    after ?WAIT -> error(no_answer)
    end.

%% What was counted here and served there meanwhile, by operation, and the rows that grew.
during(Server, Fun) ->
    Served = fun() -> #{Op => stream_s3_store_faults:requests(Server, Op) || Op <- ?OPERATIONS} end,
    {CountedBefore, ServedBefore} = {?NIF:store_metrics(), Served()},
    Fun(),
    {CountedAfter, ServedAfter} = {?NIF:store_metrics(), Served()},
    Old = requests(CountedBefore),
    Rows = [
        {Op, Outcome, Kind, N - maps:get(Key, Old, 0)}
     || {Op, Outcome, Kind} = Key := N <- requests(CountedAfter), N > maps:get(Key, Old, 0)
    ],
    {Before, After} = {totals(CountedBefore), totals(CountedAfter)},
    {
        #{Op => maps:get(Op, After, 0) - maps:get(Op, Before, 0) || Op <- ?OPERATIONS},
        #{Op => maps:get(Op, ServedAfter) - maps:get(Op, ServedBefore) || Op <- ?OPERATIONS},
        lists:sort(Rows)
    }.

requests(#{requests := Rows}) ->
    #{{Op, Outcome, Kind} => N || {Op, Outcome, Kind, N} <- Rows}.

totals(#{durations := Rows}) ->
    #{Op => N || {Op, _, _, N} <- Rows}.

buckets(Op, #{durations := Rows}) ->
    {Op, Buckets, _, _} = lists:keyfind(Op, 1, Rows),
    Buckets.

%% A segment file with one chunk, and the fragment that it is.
log(Config, Data) ->
    Dir = filename:join(?config(dir, Config), "log"),
    ok = filelib:ensure_path(Dir),
    Chunk =
        <<5:4, 0:4, 0, 1:16, 3:32, 1000:64, 1:64, 0:64, (erlang:crc32(Data)):32, (byte_size(Data)):32, 0:32, 0, 0:24, Data/binary>>,
    ok = file:write_file(filename:join(Dir, "00000000000000000000.segment"), [<<"OSIL", 1:32>>, Chunk]),
    Size = byte_size(Chunk),
    Meta = #{
        first_offset => 0,
        first_timestamp => 1000,
        last_timestamp => 1000,
        next_offset => 3,
        size => Size,
        num_chunks => 1,
        spans => [{0, 8, 8 + Size}]
    },
    {Dir, Meta, <<"OSIF", 1:32, Chunk/binary, 0:64, 1000:64, 0:32>>}.
