/* The processor time of the calling thread, which Erlang does not tell. For benchmarks on one scheduler; .ci/bench-core builds it. */

#include <erl_nif.h>
#include <time.h>

static ERL_NIF_TERM now(ErlNifEnv *env, int argc, const ERL_NIF_TERM argv[]) {
    struct timespec t;
    (void)argc;
    (void)argv;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return enif_make_int64(env, (ErlNifSInt64)t.tv_sec * 1000000000 + t.tv_nsec);
}

static ErlNifFunc functions[] = {{"now", 0, now, 0}};

ERL_NIF_INIT(stream_s3_bench_cputime, functions, NULL, NULL, NULL, NULL)
