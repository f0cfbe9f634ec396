%% @doc Says in one sentence why the demo failed, as far as the reason is one that can be expected.
-module(stream_s3_demo_reason).

-export([text/3]).

-spec text(error | exit | throw, term(), erlang:stacktrace()) -> unicode:chardata().
text(exit, {Id, {Reason, Stack}}, _) when is_binary(Id), is_list(Stack) ->
    [Id, ": ", reason(Reason, Stack)];
text(exit, {Id, Reason}, Stack) when is_binary(Id) ->
    [Id, ": ", reason(Reason, Stack)];
text(_Class, Reason, Stack) ->
    reason(Reason, Stack).

reason({demo, _Id, Text}, _Stack) ->
    Text;
reason({world, Text}, _Stack) ->
    Text;
reason({bucket, open, Why}, _Stack) ->
    io_lib:format("the bucket could not be opened: ~0tp", [Why]);
reason({bucket, Key, {_Kind, #{message := Message}}}, _Stack) ->
    io_lib:format("~ts could not be read from the bucket: ~ts", [Key, Message]);
reason({bucket, Key, Why}, _Stack) ->
    io_lib:format("the object ~ts is not as it should be: ~0tp", [Key, Why]);
reason({corrupt_chunk, ChunkId, Why}, _Stack) ->
    io_lib:format("chunk ~0tp came back damaged: ~0tp", [ChunkId, Why]);
reason({not_committed, Count}, _Stack) ->
    io_lib:format("osiris did not commit ~b records", [Count]);
reason(Other, Stack) ->
    io_lib:format("~0tp in ~0tp", [Other, lists:sublist(Stack, 3)]).
