%% @doc A small server on Ra that uses the history uploader: members keep runs and their segments in committed state, the leader uploads, and what is
%% uploaded is pruned. A worked example for hosts, and what the suites kill.
%%
%% Three parts: the Ra machine, what the uploader asks (the behaviour), and the owner, a process on each member that starts an uploader where the member leads.
-module(stream_s3_history_ra).
-behaviour(ra_machine).
-behaviour(rabbitmq_stream_s3_history_source).

-export([start_node/1, form/1, restart/1, command/2, query/2, leader/1, hand_over/2]).
-export([init/1, apply/3, state_enter/2]).
-export([pending/1, read_segment/3, acknowledge/2, run_state/2, catalog/2, purged/2]).
-export([notify/1, owner/1, ask/2, sync/0]).

-define(SYSTEM, stream_s3_history).
-define(NAME, stream_s3_history_member).
-define(OWNER, stream_s3_history_owner).
-define(UPLOADER, rabbitmq_stream_s3_history_uploader).
-define(STATE, stream_s3_history_state).
-define(TIMEOUT, 10000).
-define(START_AGAIN_MS, 500).
%% Commands between two snapshots.
-define(SNAPSHOT_EACH, 16).

%% --- to start it -----------------------------------------------------------------------------------------------------

%% @doc On each node: Ra, with its files below this directory, and the owner. The application runs already.
-spec start_node(file:filename()) -> ok.
start_node(Dir) ->
    {ok, _} = application:ensure_all_started(ra),
    Config = (ra_system:default_config())#{
        name => ?SYSTEM, data_dir => Dir, wal_data_dir => Dir, names => ra_system:derive_names(?SYSTEM)
    },
    {ok, _} = ra_system:start(Config),
    Caller = self(),
    Owner = spawn(fun() ->
        true = register(?OWNER, self()),
        process_flag(trap_exit, true),
        Caller ! {self(), ready},
        owner(none)
    end),
    receive
        {Owner, ready} -> ok
    end.

%% @doc On one of them: makes a cluster of the nodes.
-spec form([node()]) -> ok.
form(Nodes) ->
    Configs = [config(Node, Nodes) || Node <- Nodes],
    {ok, _, []} = ra:start_cluster(?SYSTEM, Configs, ?TIMEOUT),
    [ok = erpc:call(Node, ?MODULE, sync, []) || Node <- Nodes],
    ok.

%% @private
%% Ra keeps in tables of dets which of its directories belongs to which member, and dets writes seconds later: a member that is killed within these
%% seconds would not find its own again.
sync() ->
    lists:foreach(fun(Table) -> ok = dets:sync(Table) end, dets:all()).

config(Node, Nodes) ->
    Uid = ra:new_uid(atom_to_binary(?NAME)),
    #{
        id => {?NAME, Node},
        uid => Uid,
        cluster_name => ?NAME,
        initial_members => [{?NAME, N} || N <- Nodes],
        log_init_args => #{uid => Uid, min_snapshot_interval => 1},
        machine => {module, ?MODULE, #{}}
    }.

%% @doc On a node that had been there before.
-spec restart(file:filename()) -> ok.
restart(Dir) ->
    ok = start_node(Dir),
    case ra:restart_server(?SYSTEM, {?NAME, node()}) of
        ok -> ok;
        {error, {already_started, _}} -> ok
    end.

%% @doc Commits a command through one of the nodes, however long it takes to find a leader.
-spec command([node()], ?STATE:command()) -> term().
command([Node | Others], Command) ->
    try ra:process_command({?NAME, Node}, Command, ?TIMEOUT) of
        {ok, Answer, _Leader} -> Answer;
        _NoLeader -> command(Others ++ [Node], Command)
    catch
        exit:_ -> command(Others ++ [Node], Command)
    end.

%% @doc Asks the leader's current state.
-spec query([node()], fun((?STATE:state()) -> Answer)) -> Answer.
query([Node | Others], Query) ->
    try ra:consistent_query({?NAME, Node}, {?MODULE, ask, [Query]}, ?TIMEOUT) of
        {ok, Answer, _Leader} -> Answer;
        _NoLeader -> query(Others ++ [Node], Query)
    catch
        exit:_ -> query(Others ++ [Node], Query)
    end.

%% @private
ask(Query, State) -> Query(State).

%% @doc Which node leads.
-spec leader([node()]) -> node().
leader([Node | Others]) ->
    try ra:members({?NAME, Node}, ?TIMEOUT) of
        {ok, _Members, {?NAME, Leader}} -> Leader;
        _NoLeader -> leader(Others ++ [Node])
    catch
        exit:_ -> leader(Others ++ [Node])
    end.

%% @doc Makes another node lead.
-spec hand_over(From :: node(), To :: node()) -> term().
hand_over(From, To) ->
    ra:transfer_leadership({?NAME, From}, {?NAME, To}).

%% --- the machine -----------------------------------------------------------------------------------------------------

%% @private
init(_Config) -> ?STATE:new().

%% @private
apply(#{index := Index}, Command, State0) when is_tuple(Command), element(1, Command) =/= machine_version ->
    {State, Answer} = ?STATE:apply(Command, State0),
    {State, Answer, effects(Command) ++ snapshot(Index, State)};
apply(_Meta, _OfRa, State) ->
    {State, ok}.

%% Effects are performed by the leader alone, when the command is committed.
effects({seal, Run, _Seq, Content, SealedMs}) -> [{mod_call, ?MODULE, notify, [{sealed, Run, byte_size(Content), SealedMs}]}];
effects({purge, Run}) -> [{mod_call, ?MODULE, notify, [{purge, [Run]}]}];
effects(_Other) -> [].

snapshot(Index, State) when Index rem ?SNAPSHOT_EACH =:= 0 -> [{release_cursor, Index, State}];
snapshot(_Index, _State) -> [].

%% @private
state_enter(Role, _State) -> [{mod_call, ?MODULE, notify, [{role, Role}]}].

%% @private
%% In the member's own process, so it only sends.
notify(Message) ->
    case whereis(?OWNER) of
        undefined -> ok;
        Owner -> Owner ! Message
    end,
    ok.

%% --- the owner -------------------------------------------------------------------------------------------------------

%% @private
%% `none': another member leads. `waits': this one does, and starts an uploader as soon as it can: it ends with its application, which may be away for a
%% while, and a member must not end for that.
owner(Uploader) ->
    receive
        {role, leader} when Uploader =:= none ->
            owner(start_uploader());
        start when Uploader =:= waits ->
            owner(start_uploader());
        {role, Role} when is_pid(Uploader), Role =/= leader ->
            ok = stop_uploader(Uploader),
            owner(none);
        {role, Role} when Role =/= leader ->
            owner(none);
        {sealed, Run, Size, SealedMs} when is_pid(Uploader) ->
            ok = ?UPLOADER:sealed(Uploader, Run, #{size => Size, sealed_ms => SealedMs}),
            owner(Uploader);
        {purge, Runs} when is_pid(Uploader) ->
            ok = purge_all(Uploader, Runs),
            owner(Uploader);
        {'EXIT', Uploader, _Reason} ->
            owner(start_later());
        _Other ->
            owner(Uploader)
    end.

start_uploader() ->
    case ?UPLOADER:start_link(#{source => ?MODULE, argument => {?NAME, node()}}) of
        {ok, Uploader} ->
            %% Purges that another has not finished. Those that are committed from now on come as messages.
            Owner = self(),
            _ = spawn_link(fun() -> Owner ! {purge, query([node()], fun ?STATE:purging/1)} end),
            Uploader;
        {error, _Refused} ->
            start_later()
    end.

start_later() ->
    _ = erlang:send_after(?START_AGAIN_MS, self(), start),
    waits.

%% It may just be ending by itself.
stop_uploader(Uploader) ->
    try
        ?UPLOADER:stop(Uploader)
    catch
        exit:_ -> ok
    end.

purge_all(Uploader, Runs) ->
    try
        lists:foreach(fun(Run) -> ok = ?UPLOADER:purge(Uploader, Run) end, Runs)
    catch
        %% It has just ended. The next one asks what is purging.
        exit:_ -> ok
    end.

%% --- what the uploader asks ------------------------------------------------------------------------------------------

%% The index and contents come from this member's state: it is the leader's, or lags behind.
%% @private
pending(#{source := Member, from := From, limit := Limit}) ->
    local(Member, fun(State) -> {ok, ?STATE:pending(From, Limit, State)} end).

%% @private
read_segment(Member, Run, Seq) -> local(Member, fun(State) -> ?STATE:read(Run, Seq, State) end).

local(Member, Query) ->
    case ra:local_query(Member, Query, ?TIMEOUT) of
        {ok, {_Index, Answer}, _Leader} -> Answer;
        Failed -> {error, {retryable, Failed}}
    end.

%% `gone' has to be proof, and a catalog has to know of the purge, so a majority is asked.
%% @private
run_state(Member, Run) -> consistent(Member, run_state, Run).

%% @private
catalog(Member, Run) -> consistent(Member, catalog, Run).

consistent(Member, Function, Run) ->
    case ra:consistent_query(Member, {?STATE, Function, [Run]}, ?TIMEOUT) of
        {ok, Answer, _Leader} -> Answer;
        Failed -> {error, {retryable, Failed}}
    end.

%% @private
acknowledge(Member, Acknowledgment) -> commit(Member, {acknowledge, Acknowledgment}).

%% @private
purged(Member, Run) -> commit(Member, {purged, Run}).

%% A command whose answer is lost may have been committed: both are made so that a second one changes nothing.
commit(Member, Command) ->
    case ra:process_command(Member, Command, ?TIMEOUT) of
        {ok, Answer, _Leader} -> Answer;
        Failed -> {error, {retryable, Failed}}
    end.
