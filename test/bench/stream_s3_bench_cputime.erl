%% @doc Processor time of the scheduler's thread. The library comes from stream_s3_bench_cputime.c; `STREAM_S3_BENCH_CPUTIME' says where
%% it is, without `.so'.
-module(stream_s3_bench_cputime).

-export([load/0, now/0]).

-spec load() -> ok.
load() ->
    ok = erlang:load_nif(os:getenv("STREAM_S3_BENCH_CPUTIME"), 0).

%% @doc Nanoseconds.
-spec now() -> integer().
now() ->
    erlang:nif_error({not_loaded, ?MODULE}).
