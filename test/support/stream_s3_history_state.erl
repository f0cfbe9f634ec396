%% @doc A server's committed state of runs and their sealed segments, as a value, with the commands that change it: what the suites' hosts of the
%% history uploader have in common. One of them keeps it in a process, the other in a Ra cluster.
-module(stream_s3_history_state).

-export([new/0, apply/2, pending/3, read/3, run_state/2, catalog/2, acknowledged/1, violations/1, runs/1, purging/1, segment/3]).
-export_type([state/0, command/0]).

-type run() :: binary().
-type seq() :: non_neg_integer().
%% Bytes, or how many of them are to be made up of run and number.
-type content() :: binary() | {made_up, non_neg_integer()}.
-type command() ::
    {open, run()}
    | {seal, run(), seq(), content(), SealedMs :: integer()}
    | {acknowledge, rabbitmq_stream_s3_history_source:acknowledgment()}
    %% Drops the content of uploaded segments.
    | {prune, run()}
    | {close, run()}
    | {purge, run()}
    | {purged, run()}.
-opaque state() :: #{
    runs := #{run() => #{phase := open | closed | purging, segments := #{seq() => map()}}},
    %% The index.
    sealed := gb_sets:set({run(), seq()}),
    %% Every change from sealed to uploaded, the last one first.
    acknowledged := [{run(), seq()}],
    violations := [term()]
}.

-spec new() -> state().
new() ->
    #{runs => #{}, sealed => gb_sets:new(), acknowledged => [], violations => []}.

%% @doc Commits a command.
-spec apply(command(), state()) -> {state(), term()}.
apply({open, Run}, #{runs := Runs} = State) ->
    {State#{runs := maps:merge(#{Run => #{phase => open, segments => #{}}}, Runs)}, ok};
apply({seal, Run, Seq, Content, SealedMs}, State) ->
    in_run(Run, State, fun
        (#{segments := Segments} = R) when not is_map_key(Seq, Segments) ->
            Segment = #{content => Content, size => size_of(Content), sealed_ms => SealedMs, state => sealed},
            {R#{segments := Segments#{Seq => Segment}}, State#{sealed := gb_sets:add({Run, Seq}, map_get(sealed, State))}, ok};
        (R) ->
            {R, State, ok}
    end);
apply({acknowledge, #{run := Run, seq := Seq} = Acknowledgment}, State) ->
    in_run(Run, State, fun
        (#{phase := purging} = R) -> {R, State, gone};
        (#{segments := #{Seq := #{state := sealed} = S} = Segments} = R) ->
            Uploaded = S#{state := uploaded, acknowledgment => Acknowledgment},
            {R#{segments := Segments#{Seq := Uploaded}}, acknowledge(Run, Seq, State), ok};
        (R) ->
            {R, State, ok}
    end);
apply({prune, Run}, State) ->
    in_run(Run, State, fun(#{segments := Segments} = R) ->
        Pruned = fun
            (_, #{state := uploaded} = S) -> S#{content := pruned};
            (_, S) -> S
        end,
        {R#{segments := maps:map(Pruned, Segments)}, State, ok}
    end);
apply({close, Run}, State) ->
    in_run(Run, State, fun(R) -> {R#{phase := closed}, State, ok} end);
apply({purge, Run}, State) ->
    in_run(Run, State, fun(R) -> {R#{phase := purging}, without_index(Run, State), ok} end);
apply({purged, Run}, #{runs := Runs} = State) ->
    {(without_index(Run, State))#{runs := maps:remove(Run, Runs)}, ok}.

in_run(Run, #{runs := Runs} = State0, Change) ->
    case Runs of
        #{Run := R0} ->
            {R, State, Answer} = Change(R0),
            {State#{runs := Runs#{Run := R}}, Answer};
        #{} ->
            {State0, gone}
    end.

acknowledge(Run, Seq, #{sealed := Sealed, acknowledged := Acknowledged, violations := Violations} = State) ->
    Out = [{out_of_order, Run, Seq, S} || {ok, {R, S}} <- [first(Run, Sealed)], R =:= Run, S < Seq],
    State#{sealed := gb_sets:delete({Run, Seq}, Sealed), acknowledged := [{Run, Seq} | Acknowledged], violations := Out ++ Violations}.

first(Run, Sealed) ->
    case gb_sets:next(gb_sets:iterator_from({Run, 0}, Sealed)) of
        {First, _} -> {ok, First};
        none -> none
    end.

without_index(Run, #{runs := Runs, sealed := Sealed} = State) ->
    Seqs = maps:keys(maps:get(segments, maps:get(Run, Runs, #{segments => #{}}))),
    State#{sealed := lists:foldl(fun(Seq, S) -> gb_sets:del_element({Run, Seq}, S) end, Sealed, Seqs)}.

size_of({made_up, Size}) -> Size;
size_of(Content) -> byte_size(Content).

%% @doc A page of the index, as the uploader wants it.
-spec pending(start | {run, run()} | {next, {run(), seq()}}, pos_integer(), state()) -> rabbitmq_stream_s3_history_source:page().
pending(From, Limit, #{sealed := Sealed, runs := Runs}) ->
    First =
        case From of
            start -> {<<>>, 0};
            {run, Run} -> {Run, 0};
            {next, Next} -> Next
        end,
    page(gb_sets:next(gb_sets:iterator_from(First, Sealed)), Limit, Runs, []).

page(none, _Limit, _Runs, Acc) ->
    #{entries => lists:reverse(Acc), next => done};
page({Next, _}, 0, _Runs, Acc) ->
    #{entries => lists:reverse(Acc), next => Next};
page({{Run, Seq}, Iterator}, Limit, Runs, Acc) ->
    #{Run := #{segments := #{Seq := #{size := Size, sealed_ms := Ms}}}} = Runs,
    page(gb_sets:next(Iterator), Limit - 1, Runs, [#{run => Run, seq => Seq, size => Size, sealed_ms => Ms} | Acc]).

%% @doc The content of a sealed segment.
-spec read(run(), seq(), state()) -> {ok, binary()} | not_sealed | gone.
read(Run, Seq, #{runs := Runs}) ->
    case Runs of
        #{Run := #{phase := purging}} -> gone;
        #{Run := #{segments := #{Seq := #{state := sealed, content := Content}}}} -> {ok, content(Run, Seq, Content)};
        #{Run := #{}} -> not_sealed;
        #{} -> gone
    end.

content(Run, Seq, {made_up, Size}) ->
    Piece = crypto:hash(sha256, [Run, integer_to_binary(Seq)]),
    binary:part(binary:copy(Piece, Size div 32 + 1), 0, Size);
content(_Run, _Seq, Content) ->
    Content.

-spec run_state(run(), state()) -> {open | closed | purging, #{sealed := non_neg_integer()}} | gone.
run_state(Run, #{runs := Runs}) ->
    case Runs of
        #{Run := #{phase := Phase, segments := Segments}} ->
            {Phase, #{sealed => length([sealed || #{state := sealed} <- maps:values(Segments)])}};
        #{} ->
            gone
    end.

-spec catalog(run(), state()) -> {ok, [seq()]} | none | gone.
catalog(Run, #{runs := Runs}) ->
    case Runs of
        #{Run := #{segments := Segments}} when Segments =:= #{} -> none;
        #{Run := #{segments := Segments}} -> {ok, lists:sort(maps:keys(Segments))};
        #{} -> gone
    end.

%% @doc Every change of a segment from sealed to uploaded, in order.
-spec acknowledged(state()) -> [{run(), seq()}].
acknowledged(#{acknowledged := Acknowledged}) -> lists:reverse(Acknowledged).

%% @doc What must not have happened: acknowledgments out of order.
-spec violations(state()) -> [term()].
violations(#{violations := Violations}) -> Violations.

-spec runs(state()) -> [run()].
runs(#{runs := Runs}) -> lists:sort(maps:keys(Runs)).

-spec purging(state()) -> [run()].
purging(#{runs := Runs}) -> [Run || {Run, #{phase := purging}} <- maps:to_list(Runs)].

%% @doc All that is known of a segment.
-spec segment(run(), seq(), state()) -> map().
segment(Run, Seq, #{runs := Runs}) ->
    #{Run := #{segments := #{Seq := Segment}}} = Runs,
    Segment.
