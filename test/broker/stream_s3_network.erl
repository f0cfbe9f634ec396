%% @doc A network between the brokers of this machine that can be cut: then nothing passes between two of them any more, neither
%% Erlang's distribution nor what osiris replicates, while connections stay as they are. It is what happens where a firewall drops packets:
%% both ends find out by themselves, after as long as they take for it. It needs no privilege.
%%
%% Each broker has a host name of its own. By a resolver file each of them finds another one's name at an address of 127.0.0.0/8 that is
%% for just this pair, in this direction. There, at every port where that other broker may listen, this VM listens more specifically (both
%% share the port by SO_REUSEPORT) and relays; where a pair is cut, it reads no more and opens nothing. This VM and the commands of a
%% broker are on no such path: they reach brokers directly, always.
-module(stream_s3_network).
-behaviour(gen_server).

-export([start/2, stop/1, options/2, conf/2, listen/2, cut/2, heal/1, replicating/1]).
-export([init/1, handle_call/3, handle_cast/2, handle_info/2]).
-export_type([network/0]).

%% osiris takes one of them at random for each replica.
-define(REPLICATION_PORTS, 8).
%% So much silence that a node is taken to be away; RabbitMQ's default of 60 s would only make tests wait.
-define(TICK_S, 12).

-opaque network() :: #{pid := pid(), dir := file:filename(), names := [string()], second := byte(), first_port := inet:port_number()}.

%% @doc A network for brokers with these names; its files are in this directory.
-spec start(file:filename(), [string()]) -> network().
start(Dir, Names) ->
    ok = filelib:ensure_path(Dir),
    {ok, Pid} = gen_server:start(?MODULE, [], []),
    Network = #{
        pid => Pid,
        dir => Dir,
        names => Names,
        %% Others may run this on the same machine. Below the ports that are given to whoever asks for any.
        second => 1 + rand:uniform(250),
        first_port => 15000 + 100 * rand:uniform(160)
    },
    %% This VM asks its own table first, as the brokers do.
    ok = inet_db:set_lookup([file, native]),
    ok = inet_db:add_host({127, 0, 0, 1}, [host(Name, Network) || Name <- Names]),
    [ok = file:write_file(resolver(Name, Network), resolver_of(Name, Network)) || Name <- Names],
    Network.

-spec stop(network()) -> ok.
stop(#{pid := Pid}) ->
    ok = inet_db:del_host({127, 0, 0, 1}),
    gen_server:stop(Pid).

%% @doc Options of a broker of this name.
-spec options(string(), network()) -> stream_s3_broker:options().
options(Name, Network) ->
    #{
        host => host(Name, Network),
        env => [
            {"ERL_INETRC", resolver(Name, Network)},
            {"RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS", "-kernel inet_default_listen_options [{reuseport,true}]"}
        ]
    }.

%% @doc Lines of rabbitmq.conf of a broker of this name.
-spec conf(string(), network()) -> iodata().
conf(Name, Network) ->
    {First, Last} = range(Name, Network),
    io_lib:format(
        "net_ticktime = ~b~nstream.replication.port_range.min = ~b~nstream.replication.port_range.max = ~b~n", [?TICK_S, First, Last]
    ).

%% @doc Opens the ways between brokers, which must not run yet.
-spec listen(network(), #{string() => stream_s3_broker:broker()}) -> ok.
listen(#{pid := Pid, names := Names} = Network, Brokers) ->
    Ways = [
        {{From, To}, address(From, To, Network), Port}
     || From <- Names, To <- Names, From =/= To, Port <- [stream_s3_broker:port(distribution, maps:get(To, Brokers)) | ports(To, Network)]
    ],
    gen_server:call(Pid, {listen, Ways}).

%% @doc From now on nothing passes between this broker and all others.
-spec cut(network(), string()) -> ok.
cut(#{pid := Pid, names := Names}, Name) ->
    gen_server:call(Pid, {cut, [{From, To} || From <- Names, To <- Names, From =/= To, From =:= Name orelse To =:= Name]}).

%% @doc All ways are open again, and what was on them goes on.
-spec heal(network()) -> ok.
heal(#{pid := Pid}) ->
    gen_server:call(Pid, heal).

%% @doc Who replicates to whom, by a connection that is open.
-spec replicating(network()) -> [{From :: string(), To :: string()}].
replicating(#{pid := Pid} = Network) ->
    lists:usort([Way || {{_From, To} = Way, Port} <- gen_server:call(Pid, open), lists:member(Port, ports(To, Network))]).

%% --- names and numbers -----------------------------------------------------------------------------------------------

host(Name, #{second := Second}) ->
    lists:concat([Name, "-", os:getpid(), "-", Second]).

address(From, To, #{second := Second} = Network) ->
    {127, Second, number(From, Network), number(To, Network)}.

number(Name, #{names := Names}) ->
    {value, {Number, _}} = lists:search(fun({_, N}) -> N =:= Name end, lists:enumerate(Names)),
    Number.

%% osiris never takes the first one.
range(Name, #{first_port := FirstPort} = Network) ->
    First = FirstPort + number(Name, Network) * (?REPLICATION_PORTS + 1),
    {First, First + ?REPLICATION_PORTS}.

ports(Name, Network) ->
    {First, Last} = range(Name, Network),
    lists:seq(First + 1, Last).

resolver(Name, #{dir := Dir}) ->
    filename:join(Dir, Name ++ ".inetrc").

%% A replica names the addresses of its machine first, and only then its host's name. There is no way to the first ones.
resolver_of(Name, #{names := Names} = Network) ->
    {ok, Machine} = inet:gethostname(),
    Hosts =
        [{{127, 0, 0, 1}, ["localhost", host(Name, Network)]}, {{255, 255, 255, 255}, [Machine]}] ++
            [{address(Name, To, Network), [host(To, Network)]} || To <- Names, To =/= Name],
    [io_lib:format("~tp.~n", [Term]) || Term <- [{lookup, [file, native]} | [{host, Ip, Aliases} || {Ip, Aliases} <- Hosts]]].

%% --- the relay -------------------------------------------------------------------------------------------------------

%% @private
init([]) ->
    {ok, #{cut => [], waiting => [], open => #{}}}.

%% @private
handle_call({listen, Ways}, _From, State) ->
    [ok = accept_at(Way) || Way <- Ways],
    {reply, ok, State};
handle_call({cut, Ways}, _From, #{cut := Cut} = State) ->
    {reply, ok, State#{cut := lists:usort(Ways ++ Cut)}};
handle_call(heal, _From, #{waiting := Waiting} = State) ->
    [gen_server:reply(From, ok) || From <- Waiting],
    {reply, ok, State#{cut := [], waiting := []}};
handle_call(open, _From, #{open := Open} = State) ->
    {reply, maps:values(Open), State};
handle_call({pass, {From, To}}, Caller, #{cut := Cut, waiting := Waiting} = State) ->
    case lists:member({From, To}, Cut) orelse lists:member({To, From}, Cut) of
        true -> {noreply, State#{waiting := [Caller | Waiting]}};
        false -> {reply, ok, State}
    end.

%% @private
handle_cast({open, Relay, Way, Port}, #{open := Open} = State) ->
    _ = monitor(process, Relay),
    {noreply, State#{open := Open#{Relay => {Way, Port}}}}.

%% @private
handle_info({'DOWN', _, process, Relay, _}, #{open := Open} = State) ->
    {noreply, State#{open := maps:remove(Relay, Open)}}.

accept_at({Way, Address, Port}) ->
    {ok, Listen} = gen_tcp:listen(Port, [binary, {ip, Address}, {active, false}, {reuseaddr, true}, {reuseport, true}, {nodelay, true}]),
    Network = self(),
    _ = spawn_link(fun() -> accept(Listen, Way, Port, Network) end),
    ok.

accept(Listen, Way, Port, Network) ->
    case gen_tcp:accept(Listen) of
        {ok, Socket} ->
            Relay = spawn(fun() -> relay(Socket, Way, Port, Network) end),
            ok = gen_tcp:controlling_process(Socket, Relay),
            Relay ! go,
            accept(Listen, Way, Port, Network);
        {error, closed} ->
            %% With the network.
            ok
    end.

relay(Socket, Way, Port, Network) ->
    receive
        go -> ok
    end,
    ok = pass(Way, Network),
    case gen_tcp:connect({127, 0, 0, 1}, Port, [binary, {active, false}, {nodelay, true}]) of
        {ok, Other} ->
            ok = gen_server:cast(Network, {open, self(), Way, Port}),
            _ = spawn_link(fun() -> pump(Other, Socket, Way, Network) end),
            pump(Socket, Other, Way, Network);
        {error, _NobodyListens} ->
            gen_tcp:close(Socket)
    end.

%% What ends on one side ends on the other one, too, once it is told.
pump(From, To, Way, Network) ->
    Received = gen_tcp:recv(From, 0),
    ok = pass(Way, Network),
    case Received of
        {ok, Bytes} ->
            _ = gen_tcp:send(To, Bytes),
            pump(From, To, Way, Network);
        {error, _Ended} ->
            _ = gen_tcp:close(From),
            gen_tcp:close(To)
    end.

pass(Way, Network) ->
    gen_server:call(Network, {pass, Way}, infinity).
