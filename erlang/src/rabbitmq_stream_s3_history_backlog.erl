%% @doc What the uploaders of this node have pending, in tables that a scrape reads without asking a process; and the metrics made of it.
%%
%% One table says which uploaders there are, `{Pid, {Table, Module, RunPrefix}}'. It belongs to the top supervisor, so it also tells whether the application
%% runs. The others belong to an uploader each: `{Run, Segments, Bytes, OldestMs | undefined, Phase}', written by the process of the run.
-module(rabbitmq_stream_s3_history_backlog).

-export([init/0, owner/0, other_host/2, new/2, drop/0, sum/1, phases/1, metrics/0]).
-export_type([metric/0]).

%% By the name of the module that users know.
-define(TABLE, rabbitmq_stream_s3_history_uploader).

%% Without the prefix that all metrics of the plugin have.
-type metric() :: {Name :: atom(), Labels :: #{atom() => atom()}, Value :: non_neg_integer() | float()}.

%% @doc Makes the table of uploaders, which belongs to the calling process.
-spec init() -> ok.
init() ->
    ?TABLE = ets:new(?TABLE, [named_table, public]),
    ok.

%% @doc The process that the table of uploaders belongs to; `undefined' while the application does not run.
-spec owner() -> pid() | undefined.
owner() ->
    ets:info(?TABLE, owner).

%% @doc The module of another host on this node, if one has run ids that may begin like these: each would take the other's objects for those of runs
%% that are gone.
-spec other_host(module(), RunPrefix :: binary()) -> {ok, module()} | none.
other_host(Module, RunPrefix) ->
    case [Other || {Pid, {_, Other, Prefix}} <- uploaders(), Other =/= Module, overlap(Prefix, RunPrefix), is_process_alive(Pid)] of
        [Other | _] -> {ok, Other};
        [] -> none
    end.

overlap(A, B) ->
    Common = min(byte_size(A), byte_size(B)),
    binary:part(A, 0, Common) =:= binary:part(B, 0, Common).

%% @doc Makes the table of the calling process, an uploader. It goes with the process.
-spec new(module(), RunPrefix :: binary()) -> ets:table().
new(Module, RunPrefix) ->
    Table = ets:new(rabbitmq_stream_s3_history_runs, [public, {write_concurrency, true}]),
    _ = registered(fun() ->
        %% Who is killed takes no leave.
        _ = [ets:delete(?TABLE, Pid) || {Pid, _} <- ets:tab2list(?TABLE), not is_process_alive(Pid)],
        ets:insert(?TABLE, {self(), {Table, Module, RunPrefix}})
    end),
    Table.

%% @doc The calling process is an uploader no longer.
-spec drop() -> ok.
drop() ->
    _ = registered(fun() -> ets:delete(?TABLE, self()) end),
    ok.

%% Where the application has just ended there is nothing to be found in.
registered(Fun) ->
    try
        Fun()
    catch
        error:badarg -> false
    end.

%% @doc The sum of a table, or of all. Linear in the runs with something to do.
-spec sum(ets:table() | all) -> {Segments :: non_neg_integer(), Bytes :: non_neg_integer(), OldestMs :: integer() | undefined}.
sum(all) -> lists:foldl(fun sum/2, {0, 0, undefined}, [Table || {_Pid, {Table, _, _}} <- uploaders()]);
sum(Table) -> sum(Table, {0, 0, undefined}).

sum(Table, Sum) ->
    try
        ets:foldl(fun({_Run, N, B, O, _Phase}, {Segments, Bytes, Oldest}) -> {Segments + N, Bytes + B, min(Oldest, O)} end, Sum, Table)
    catch
        %% Its uploader has just ended.
        error:badarg -> Sum
    end.

uploaders() ->
    try
        ets:tab2list(?TABLE)
    catch
        error:badarg -> []
    end.

%% @doc How many runs of a table there are in each phase.
-spec phases(ets:table()) -> #{atom() => pos_integer()}.
phases(Table) ->
    ets:foldl(fun({_, _, _, _, Phase}, Sum) -> maps:update_with(Phase, fun(N) -> N + 1 end, 1, Sum) end, #{}, Table).

%% @doc See {@link rabbitmq_stream_s3_history_uploader:metrics/0}.
-spec metrics() -> #{counters := [metric()], gauges := [metric()]}.
metrics() ->
    Counts = rabbitmq_stream_s3_counters:get(history),
    Outcomes = [uploaded, already_present, replaced, retryable_error, permanent_error, gone],
    {Segments, Bytes, Oldest} = sum(all),
    Age =
        case Oldest of
            undefined -> 0.0;
            %% The host's clock may go before this one.
            _ -> max(0, erlang:system_time(millisecond) - Oldest) / 1000
        end,
    #{
        counters =>
            [{history_uploads_total, #{outcome => O}, map_get(O, Counts)} || O <- Outcomes] ++
                [
                    {history_upload_bytes_total, #{}, map_get(bytes, Counts)},
                    {history_upload_checksum_mismatches_total, #{}, map_get(checksum_mismatches, Counts)},
                    {history_upload_rescan_errors_total, #{}, map_get(rescan_errors, Counts)}
                ],
        gauges => [
            {history_upload_backlog_segments, #{}, Segments},
            {history_upload_backlog_bytes, #{}, Bytes},
            {history_upload_oldest_sealed_age_seconds, #{}, Age}
        ]
    }.
