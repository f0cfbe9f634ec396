%% @doc The manifest of a stream's remote tier: what is in it, how it changes, its bytes, how it is searched.
%%
%% All functions are pure. The cost of each is linear in the number of entries, some tens of nanoseconds an entry, unless it says
%% otherwise. A group that has to be read is asked for with `{fetch, #group_ref{}, Cont}'; `resume/2' goes on from there.
-module(rabbitmq_stream_s3_manifest).

-include("rabbitmq_stream_s3.hrl").

-export([new_edit/1, apply_edit/2, is_well_formed/1, assert_well_formed/1]).
-export([encode_root/1, decode_root/1, encode_group/2, decode_group/1]).
-export([lookup_offset/2, lookup_timestamp/2, evaluate_remote_retention/3, evaluate_remote_retention/4, resume/2]).
-export_type([cont/0, lookup/0, retention/0, spec/0, object_ref/0]).

-type cont() :: rabbitmq_stream_s3_nif:cont().
-type lookup() :: rabbitmq_stream_s3_nif:lookup().
-type object_ref() :: #fragment_ref{} | #group_ref{}.
-type spec() :: {max_bytes, non_neg_integer()} | {max_age, Ms :: non_neg_integer()}.
-type retention() :: unchanged | {#edit{}, [object_ref()]} | {fetch, #group_ref{}, cont()}.

%% See rabbitmq_stream_s3_replica_reader_core.
-define(CALL(Call, Args),
    try
        rabbitmq_stream_s3_nif:Call
    catch
        error:{badarg, Text__} -> rabbitmq_stream_s3_nif:misuse(Text__, Args)
    end
).

%% @doc An edit that changes nothing of this manifest: to be filled in.
-spec new_edit(#manifest{}) -> #edit{}.
new_edit(Manifest) ->
    ?CALL(manifest_new_edit(Manifest), [Manifest]).

%% @doc The manifest after an edit. Raises where the splice is out of bounds or off the grid of entries, or the total
%% would become negative, and for nothing else: whether the result makes sense is for {@link is_well_formed/1} to say.
-spec apply_edit(#edit{}, #manifest{}) -> #manifest{}.
apply_edit(Edit, Manifest) ->
    ?CALL(manifest_apply_edit(Edit, Manifest), [Edit, Manifest]).

%% @doc Whether entries ascend, and offsets and sizes of the manifest fit them. Any term may be asked about.
-spec is_well_formed(#manifest{} | term()) -> boolean().
is_well_formed(Manifest) ->
    rabbitmq_stream_s3_nif:manifest_is_well_formed(Manifest).

%% @doc Raises `{malformed_manifest, Manifest}' unless {@link is_well_formed/1}.
-spec assert_well_formed(#manifest{}) -> ok.
assert_well_formed(Manifest) ->
    case is_well_formed(Manifest) of
        true -> ok;
        false -> erlang:error({malformed_manifest, Manifest}, [Manifest])
    end.

%% @doc The bytes of a root object. The revision is not in them.
-spec encode_root(#manifest{}) -> binary().
encode_root(Manifest) ->
    ?CALL(manifest_encode_root(Manifest), [Manifest]).

%% @doc The manifest in a root object, with revision 0.
-spec decode_root(binary()) -> {ok, #manifest{}} | {error, Reason :: term()}.
decode_root(Bin) ->
    ?CALL(manifest_decode_root(Bin), [Bin]).

%% @doc The bytes of a group object of these entries, at least one.
-spec encode_group(Kind :: ?MANIFEST_KIND_GROUP..?MANIFEST_KIND_MEGA_GROUP, Entries :: binary()) -> binary().
encode_group(Kind, Entries) ->
    ?CALL(manifest_encode_group(Kind, Entries), [Kind, Entries]).

%% @doc The entries in a group object.
-spec decode_group(binary()) ->
    {ok, {Kind :: ?MANIFEST_KIND_GROUP..?MANIFEST_KIND_MEGA_GROUP, Entries :: binary()}} | {error, Reason :: term()}.
decode_group(Bin) ->
    ?CALL(manifest_decode_group(Bin), [Bin]).

%% @doc The fragment that has this offset.
-spec lookup_offset(#manifest{}, rabbitmq_stream_s3_nif:offset()) -> lookup().
lookup_offset(Manifest, Offset) ->
    ?CALL(manifest_lookup_offset(Manifest, Offset), [Manifest, Offset]).

%% @doc The oldest fragment whose last timestamp is not below this one, in milliseconds.
-spec lookup_timestamp(#manifest{}, Ts :: integer()) -> lookup().
lookup_timestamp(Manifest, Ts) ->
    ?CALL(manifest_lookup_timestamp(Manifest, Ts), [Manifest, Ts]).

%% @doc What remote retention has to drop: an edit, and the objects that are garbage once the edit is persisted.
-spec evaluate_remote_retention(#manifest{}, [spec()], NowMs :: integer()) -> retention().
evaluate_remote_retention(Manifest, Specs, NowMs) ->
    ?CALL(manifest_evaluate_remote_retention(Manifest, Specs, NowMs), [Manifest, Specs, NowMs]).

%% @doc The same, with a function that reads a group, and may block. It is called in the calling process. A group that
%% cannot be read ends the evaluation with what has been decided so far; the next one tries again.
-spec evaluate_remote_retention(#manifest{}, [spec()], NowMs :: integer(), Fetch) ->
    unchanged | {#edit{}, [object_ref()]}
when
    Fetch :: fun((#group_ref{}) -> {ok, Entries :: binary()} | {error, Reason :: term()}).
evaluate_remote_retention(Manifest, Specs, NowMs, Fetch) when is_function(Fetch, 1) ->
    fetch_all(evaluate_remote_retention(Manifest, Specs, NowMs), Fetch).

fetch_all({fetch, Group, Cont}, Fetch) ->
    fetch_all(resume(Fetch(Group), Cont), Fetch);
fetch_all(unchanged, _Fetch) ->
    unchanged;
fetch_all({#edit{}, _Garbage} = Decided, _Fetch) ->
    Decided.

%% @doc Goes on with a call that had to read a group: answers as that call does. A failed read ends a lookup with that
%% error (so do entries that are not those of the group), and an evaluation of retention with what has been decided so far.
-spec resume({ok, Entries :: binary()} | {error, Reason :: term()}, cont()) -> lookup() | retention() | {error, Reason :: term()}.
resume(Fetched, Cont) ->
    ?CALL(manifest_resume(Fetched, Cont), [Fetched, Cont]).
