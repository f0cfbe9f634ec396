%% @doc What a host implements so that {@link rabbitmq_stream_s3_history_uploader} can upload the sealed segments of its runs.
%%
%% A host keeps, in a state that it commits (a Ra machine, a database), runs and their segments. A segment is `SEALED' from the moment at
%% which its content can no longer change until its upload is acknowledged, and `UPLOADED' from then on. The uploader knows nothing but what these
%% functions answer, so a new owner of the state goes on where the old one stopped.
%%
%% == Rules ==
%%
%% <ul>
%% <li>The content of a segment follows from committed state alone: whoever reads it reads the same bytes, also after rows that are
%% in it were pruned from elsewhere.</li>
%% <li>Numbers of a run ascend in the order of sealing. A run's id is never used again.</li>
%% <li>A run is known to `run_state' before its first segment is sealed, and until it has been purged.</li>
%% <li>Every function may be called at any time, from any process of this node, several at once, and again after an answer was lost. All may
%% block: each call has a process of its own, which is killed when the run is purged or the uploader stops. `pending' and
%% `read_segment', for which others wait, are given up after `transfer_deadline_ms', which counts as a retryable failure; the others may take as long as
%% they need.</li>
%% <li>What a function raises counts as a retryable failure, an answer of another shape than below as a permanent one.</li>
%% </ul>
%%
%% == What failures mean ==
%%
%% `{error, {retryable, Reason}}': may pass by itself (no leader, a timeout). Repeated after a while, for ever. `{error, {permanent, Reason}}': somebody
%% has to mend something (a segment that does not fit its checksum). Logged as an error, and tried again by the next scan only.
-module(rabbitmq_stream_s3_history_source).

-export([call/3, implements/2, is_sealed/1, text/1]).
-export_type([run/0, seq/0, segment/0, query/0, page/0, acknowledgment/0, failure/0, source/0]).

%% 1 to 255 of `A-Za-z0-9_=-.', but neither `.' nor `..'.
-type run() :: binary().
-type seq() :: 0..16#FFFFFFFFFFFFFFFF.
%% size: payload in bytes, for the backlog, below 2^64; sealed_ms: milliseconds since the Unix epoch, of 64 bits.
-type segment() :: #{run := run(), seq := seq(), size := non_neg_integer(), sealed_ms := integer()}.
%% What to read of the index of pending segments, which is ordered by run, then by number: at most `limit' entries, from the beginning, from a run's
%% first segment (or the place where it would be), or from where the page ended whose `next' this is.
-type query() :: #{source := Argument :: term(), from := start | {run, run()} | {next, term()}, limit := pos_integer()}.
%% A run whose entries cannot be read has one row that says so, and does not end the page. A row that is not as it must be makes its run one that cannot
%% be read. `next' is another term for each place.
-type page() :: #{entries := [segment() | {unreadable, run(), Reason :: term()}], next := term() | done}.
-type acknowledgment() :: #{
    run := run(),
    seq := seq(),
    %% Where the object is.
    key := binary(),
    %% CRC-32/IEEE of the payload.
    checksum := 0..16#FFFFFFFF,
    %% Length of the object in bytes.
    size := pos_integer(),
    %% How it came to be there.
    stored := uploaded | already_present | replaced
}.
-type failure() :: {error, {retryable | permanent, Reason :: term()}}.
-type source() :: {module(), Argument :: term()}.

%% A page of the segments that are `SEALED' in committed state: runs that are purging left out. A page may be empty and still have a next one.
%% An empty index has to be cheap to read: it is read each `history_rescan_interval_ms'.
-callback pending(query()) -> {ok, page()} | failure().

%% The payload of a segment. `not_sealed': its upload is acknowledged already. `gone': the run is gone, or is being purged: nothing of it shall be
%% uploaded any more. Binaries are not copied, other iodata once.
-callback read_segment(Argument :: term(), run(), seq()) -> {ok, iodata()} | not_sealed | gone | failure().

%% Commits that a segment is `UPLOADED'. `ok' only once that is committed, also if it has been since earlier: a second acknowledgment of a segment must
%% change nothing. Answers may take as long as they need.
-callback acknowledge(Argument :: term(), acknowledgment()) -> ok | gone | failure().

%% What is known of a run; `sealed': how many of its segments are `SEALED'. Objects are deleted where this answers `gone', so that must be
%% proof: a read of the current committed state, not of what this node happens to have. It is asked about every run of which something lies in the bucket
%% (below the uploader's `run_prefix'), so a host that is made of partitions answers for the runs of all of them, or gives each a `run_prefix' of its own.
-callback run_state(Argument :: term(), run()) -> {open | closed | purging, #{sealed := non_neg_integer()}} | gone | failure().

%% All segments that a purging run ever had, uploaded or not; `none': it never had segment state. Answered from a state that knows of the purge: one that
%% lags behind may say `none' of a run of which somebody's upload is still on its way. Asked twice, before the purge waits and afterwards.
-callback catalog(Argument :: term(), run()) -> {ok, [seq()]} | none | gone | failure().

%% Nothing of this run is left in the bucket: the host may delete it for good.
-callback purged(Argument :: term(), run()) -> ok | gone | failure().

%% A host that never purges a run needs neither.
-optional_callbacks([catalog/2, purged/2]).

%% @doc Calls a function of a host, of which the first argument is the source's. Never raises: see above.
-spec call(source(), Function :: atom(), [term()]) -> term().
call({Module, Argument}, Function, Args) ->
    guarded(fun() -> apply(Module, Function, [Argument | Args]) end).

guarded(Call) ->
    try
        Call()
    catch
        Class:Reason:Stack -> {error, {retryable, {raised, Class, Reason, hd(Stack ++ [none])}}}
    end.

%% @doc Whether a module has the functions that every host needs, or those that only a purge asks.
-spec implements(module(), always | purge) -> boolean().
implements(Module, Which) ->
    Optional = ?MODULE:behaviour_info(optional_callbacks),
    Wanted =
        case Which of
            always -> ?MODULE:behaviour_info(callbacks) -- Optional;
            purge -> Optional
        end,
    Exists = fun({Function, Arity}) -> erlang:function_exported(Module, Function, Arity) end,
    code:ensure_loaded(Module) =:= {module, Module} andalso lists:all(Exists, Wanted).

%% @doc Whether size and time of a segment are what they must be.
-spec is_sealed(term()) -> boolean().
is_sealed(#{size := Size, sealed_ms := Ms}) when is_integer(Size), is_integer(Ms) ->
    Size >= 0 andalso Size < 1 bsl 64 andalso Ms >= -(1 bsl 63) andalso Ms < 1 bsl 63;
is_sealed(_Other) ->
    false.

%% @doc What went wrong in a host, in words. What it gives as a reason is printed as it is, whatever it looks like.
-spec text(Reason :: term()) -> binary().
text({raised, Class, Reason, Where}) -> format("the host has raised ~0tp ~0tP in ~0tP", [Class, Reason, 30, Where, 30]);
text({crashed, Reason}) -> format("the process that asked the host has died: ~0tP", [Reason, 30]);
text({no_answer, Function, Ms}) -> format("the host's ~0tp has not answered in ~0tp ms", [Function, Ms]);
text({bad_answer, Function, Answer}) -> format("the host's ~0tp must not answer ~0tP", [Function, Answer, 30]);
text({bad_row, Row}) -> format("its index has a row that is none: ~0tP", [Row, 30]);
text({not_ascending, Seq}) -> format("in its index ~0tp comes behind a number that is not below it", [Seq]);
text(listed_twice) -> <<"its rows do not stand together in the index">>;
text(Reason) -> format("the host says ~0tP", [Reason, 30]).

format(Format, Args) ->
    <<Text/binary>> = unicode:characters_to_binary(io_lib:format(Format, Args)),
    Text.
