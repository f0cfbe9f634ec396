%% A few rounds of the soak; `make soak ROUNDS=N' runs more of them.
-module(rabbitmq_stream_s3_soak_SUITE).

-include_lib("common_test/include/ct.hrl").
-include_lib("stdlib/include/assert.hrl").

-export([all/0, suite/0]).
-export([a_vm_killed_at_any_step_over_s3_loses_nothing/1, a_vm_killed_over_a_folder_loses_nothing/1]).

suite() -> [{timetrap, {seconds, 240}}].

all() -> [a_vm_killed_at_any_step_over_s3_loses_nothing, a_vm_killed_over_a_folder_loses_nothing].

a_vm_killed_at_any_step_over_s3_loses_nothing(Config) ->
    ?assertEqual(8, length(run(s3, 8, Config))).

a_vm_killed_over_a_folder_loses_nothing(Config) ->
    ?assertEqual(3, length(run(fs, 3, Config))).

run(Store, Rounds, Config) ->
    Dir = filename:join(?config(priv_dir, Config), atom_to_list(Store)),
    stream_s3_soak:run(Store, Dir, #{rounds => Rounds, told => fun(Report) -> ct:pal("~0tp", [Report]) end}).
