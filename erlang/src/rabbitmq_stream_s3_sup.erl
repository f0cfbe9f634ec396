%% @doc The top supervisor.
-module(rabbitmq_stream_s3_sup).
-behaviour(supervisor).

-export([start_link/0, init/1]).

%% @doc Starts everything. The configuration has been checked, and the store and the metadata store are open.
-spec start_link() -> {ok, pid()} | ignore | {error, term()}.
start_link() ->
    supervisor:start_link({local, ?MODULE}, ?MODULE, []).

%% @private
%% Who depends on a process stands behind it and is restarted with it: readers on the names, on what is published, and on the
%% governor, which takes their uploads along when it dies. A reader that fails concerns its own supervisor only.
init([]) ->
    ok = rabbitmq_stream_s3_pause:init(),
    ok = rabbitmq_stream_s3_history_backlog:init(),
    Children = [
        worker(rabbitmq_stream_s3_registry, []),
        worker(rabbitmq_stream_s3_manifest_cache, []),
        (worker(rabbitmq_stream_s3_governor, [governor_options()]))#{shutdown => 10000},
        (worker(rabbitmq_stream_s3_reader_sup, []))#{type => supervisor, shutdown => infinity},
        worker(rabbitmq_stream_s3_reconciler, []),
        worker(rabbitmq_stream_s3_store, []),
        worker(rabbitmq_stream_s3_reaper, []),
        worker(rabbitmq_stream_s3_gc, []),
        worker(rabbitmq_stream_s3_replicas, []),
        worker(rabbitmq_stream_s3_prometheus, [])
        | [worker(rabbitmq_stream_s3_events, []) || rabbitmq_stream_s3_metadata:in_broker()]
    ],
    {ok, {#{strategy => rest_for_one, intensity => 10, period => 60}, Children}}.

worker(Module, Args) ->
    #{id => Module, start => {Module, start_link, Args}}.

governor_options() ->
    #{
        rate => rabbitmq_stream_s3_config:get(max_transfer_bytes_per_sec),
        burst => rabbitmq_stream_s3_config:get(max_transfer_burst_bytes),
        concurrency => rabbitmq_stream_s3_config:get(upload_concurrency)
    }.
