%% @doc What shall go wrong with the requests to a server `s3local', and how often it did.
-module(stream_s3_store_faults).

-export([add/2, clear/1, count/2, requests/2]).
-export_type([rule/0]).

%% op: `put', `get', `delete', `multi_delete', ..., all where left out; key: a pattern in which `*' stands for anything; skip: so many pass first;
%% count: so often, without end where left out; do: `stall', `lost_reply', ... `stream-s3''s server documents them all.
-type rule() :: #{do := atom(), op => atom(), key => string(), skip => non_neg_integer(), count => pos_integer(),
    status => 400..599, code => string()}.

%% @doc Adds rules; the first one that fits a request is applied.
-spec add(stream_s3_s3local:server(), [rule()]) -> ok.
add(Server, Rules) ->
    Body = iolist_to_binary(["[", lists:join(",", [json(Rule) || Rule <- Rules]), "]"]),
    {200, _} = request(post, {url(Server, "faults"), [], "application/json", Body}),
    ok.

json(Rule) ->
    Members = [io_lib:format("\"~s\":~s", [Key, value(Value)]) || {Key, Value} <- maps:to_list(Rule)],
    ["{", lists:join(",", Members), "}"].

value(N) when is_integer(N) -> integer_to_list(N);
value(Word) -> io_lib:format("\"~s\"", [Word]).

%% @doc Removes all rules. A request that stalls already stays so.
-spec clear(stream_s3_s3local:server()) -> ok.
clear(Server) ->
    {204, _} = request(delete, {url(Server, "faults"), []}),
    ok.

%% @doc How many faults have been applied to an operation since the server's start.
-spec count(stream_s3_s3local:server(), atom()) -> non_neg_integer().
count(Server, Op) ->
    counter(Server, Op, "faults").

%% @doc How many requests of an operation have come in since the server's start.
-spec requests(stream_s3_s3local:server(), atom()) -> non_neg_integer().
requests(Server, Op) ->
    counter(Server, Op, "requests").

counter(Server, Op, Name) ->
    {200, Body} = request(get, {url(Server, "counters"), []}),
    Pattern = ["\"", atom_to_list(Op), "\":{[^}]*\"", Name, "\":([0-9]+)"],
    {match, [Count]} = re:run(Body, Pattern, [{capture, all_but_first, list}]),
    list_to_integer(Count).

url(Server, What) ->
    #{endpoint := Endpoint} = stream_s3_s3local:settings(Server),
    lists:concat([binary_to_list(Endpoint), "/-/", What]).

request(Method, Request) ->
    {ok, _} = application:ensure_all_started(inets),
    {ok, {{_, Status, _}, _, Body}} = httpc:request(Method, Request, [{timeout, 10000}], []),
    {Status, Body}.
