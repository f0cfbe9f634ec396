%% @doc The hot path of the core in plain Erlang, as somebody would write it who does not want a native library: entries in one binary
%% that is appended to, transfers in a map and a queue. A rival for the benchmark, and nothing else: it knows neither groups nor
%% retention, and checks no more than it must.
-module(stream_s3_bench_plain).

-include("rabbitmq_stream_s3.hrl").

-export([new_assembly/2, add_chunk/2]).
-export([init/2, fragment_cut/2, transfer_complete/3, persist_complete/2, lookup_offset/2]).

-record(assembly, {target, expected, first, first_ts, last_ts, data_size = 0, size = 0, chunks = 0, spans = [], index = <<>>, cut = false}).

new_assembly(Target, Expected) -> #assembly{target = Target, expected = Expected}.

add_chunk(#{chunk_id := Id} = Chunk, #assembly{first = undefined, expected = Id} = A) ->
    add(Chunk, A#assembly{first = Id, first_ts = maps:get(timestamp, Chunk)});
add_chunk(#{chunk_id := Id} = Chunk, #assembly{expected = Id} = A) ->
    add(Chunk, A);
add_chunk(#{chunk_id := Id}, #assembly{expected = Expected}) ->
    error({gap, Expected, Id}).

add(Chunk, #assembly{target = Target, data_size = Sum, size = Size, chunks = Chunks, spans = Spans, index = Index} = A) ->
    #{chunk_id := Id, timestamp := Ts, num_records := Records, data_size := DataSize, position := From, next_position := To,
        segment_offset := Segment} = Chunk,
    A#assembly{
        expected = Id + Records,
        last_ts = Ts,
        data_size = Sum + DataSize,
        size = Size + To - From,
        chunks = Chunks + 1,
        spans = case Spans of
            [{Segment, Start, From} | Rest] -> [{Segment, Start, To} | Rest];
            _ -> [{Segment, From, To} | Spans]
        end,
        index = <<Index/binary, Id:64, Ts:64/signed, Size:32>>,
        cut = Sum + DataSize >= Target orelse Chunks + 1 >= 262144
    }.

-record(state, {
    options, manifest, persisted, queue = queue:new(), transfers = #{}, edits = [], since = 0, persist = none, last, waiters = []
}).

init(Manifest, Options) ->
    #state{options = Options, manifest = Manifest, persisted = Manifest, last = erlang:system_time(millisecond)}.

fragment_cut(Meta, #state{queue = Queue, transfers = Transfers, edits = Edits, options = Options} = S) ->
    #{stream := Stream, dir := Dir} = Options,
    Ref = erlang:unique_integer([positive]),
    Timer = [timer(S) || map_size(Transfers) =:= 0, Edits =:= []],
    S1 = S#state{queue = queue:in(Ref, Queue), transfers = Transfers#{Ref => {Meta, none}}},
    {S1, Ref, [{submit_transfer, Ref, Stream, Dir, Meta} | Timer]}.

transfer_complete(Ref, Uid, #state{transfers = Transfers} = S) ->
    case Transfers of
        #{Ref := {Meta, none}} -> persist_or_arm(drain(S#state{transfers = Transfers#{Ref := {Meta, Uid}}}));
        #{} -> {S, []}
    end.

drain(#state{queue = Queue, transfers = Transfers, manifest = #manifest{next_offset = Next, entries = Entries}} = S) ->
    case queue:peek(Queue) of
        {value, Ref} ->
            case Transfers of
                #{Ref := {#{first_offset := First} = Meta, Uid}} when Uid =/= none, (First =:= Next orelse Entries =:= <<>>) ->
                    drain(append(Meta, Uid, S#state{queue = queue:drop(Queue), transfers = maps:remove(Ref, Transfers)}));
                #{} ->
                    S
            end;
        empty ->
            S
    end.

append(Meta, Uid, #state{manifest = M0, edits = Edits, since = Since} = S) ->
    #{first_offset := First, next_offset := Next, first_timestamp := FirstTs, last_timestamp := LastTs, size := Size} = Meta,
    M = case M0 of
        #manifest{entries = <<>>} -> M0#manifest{first_offset = First, first_timestamp = FirstTs, first_last_timestamp = LastTs};
        #manifest{} -> M0
    end,
    #manifest{entries = Entries, total_size = Total} = M,
    Entry = ?ENTRY(First, FirstTs, LastTs, ?MANIFEST_KIND_FRAGMENT, Size, Uid),
    Edit = #edit{
        first_offset = M#manifest.first_offset,
        first_timestamp = M#manifest.first_timestamp,
        first_last_timestamp = M#manifest.first_last_timestamp,
        next_offset = Next,
        size = Size,
        entries = Entry,
        pos = byte_size(Entries)
    },
    S#state{
        manifest = M#manifest{next_offset = Next, total_size = Total + Size, entries = <<Entries/binary, Entry/binary>>},
        edits = [Edit | Edits],
        since = Since + 1
    }.

persist_complete(Revision, #state{persist = {Manifest, Edits}, waiters = Waiters, options = #{stream := Stream, dir := Dir}} = S) ->
    #manifest{first_offset = First, next_offset = Next} = Manifest,
    {Happy, Left} = lists:partition(fun({Offset, _}) -> Offset =< Next end, Waiters),
    S1 = S#state{
        persist = none,
        persisted = Manifest#manifest{revision = Revision},
        manifest = (S#state.manifest)#manifest{revision = Revision},
        last = erlang:system_time(millisecond),
        waiters = Left
    },
    Effects =
        [{update_range, First, Next}, {broadcast, Stream, Edits}, {evaluate_retention, Stream, Dir}, cancel_persist_timer] ++
            [{reply_waiters, [{From, ok} || {_, From} <- Happy]} || Happy =/= []],
    {S2, More} = persist_or_arm(S1),
    {S2, Effects ++ More}.

persist_or_arm(#state{persist = none, edits = [_ | _] = Edits, since = Since, manifest = M, options = #{persist_threshold := Threshold} = Options} = S)
        when Since >= Threshold ->
    #{epoch := Epoch, reference := Reference} = Options,
    InOrder = lists:reverse(Edits),
    {S#state{persist = {M, InOrder}, edits = [], since = 0}, [{start_persist, M, Epoch, Reference, M#manifest.revision, InOrder}]};
persist_or_arm(#state{edits = []} = S) -> {S, []};
persist_or_arm(S) -> {S, [timer(S)]}.

timer(#state{options = #{persist_interval_ms := Ms}}) -> {start_persist_timer, Ms}.

lookup_offset(#manifest{first_offset = First, next_offset = Next}, Offset) when Offset < First; Offset >= Next -> not_found;
lookup_offset(#manifest{entries = Entries}, Offset) -> search(Entries, Offset, 0, byte_size(Entries) div ?ENTRY_B).

%% The last entry that starts at or before the offset lies in [Low, High).
search(Entries, _Offset, Low, High) when High - Low =:= 1 ->
    ?ENTRY(First, _, _, ?MANIFEST_KIND_FRAGMENT, Size, Uid) = binary:part(Entries, Low * ?ENTRY_B, ?ENTRY_B),
    {ok, #fragment_ref{offset = First, uid = Uid, size = Size}};
search(Entries, Offset, Low, High) ->
    Middle = (Low + High) div 2,
    Skip = Middle * ?ENTRY_B,
    case Entries of
        <<_:Skip/binary, First:64, _/binary>> when First =< Offset -> search(Entries, Offset, Middle, High);
        _ -> search(Entries, Offset, Low, Middle)
    end.
