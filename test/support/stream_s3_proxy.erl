%% @doc A place on the loopback that passes connections on to a server, or is as good as dead: it refuses connections, or takes them and
%% whatever comes and never answers. Connections that are open when it dies break, or fall silent.
-module(stream_s3_proxy).

-export([start/1, endpoint/1, port/1, set/2, stop/1]).
-export_type([proxy/0, mode/0]).

-type mode() :: pass | refuse | swallow.
-opaque proxy() :: #{pid := pid(), port := inet:port_number()}.

%% @doc Starts it in front of a server: its URL, or its port. Lives as long as the calling process.
-spec start(binary() | inet:port_number()) -> proxy().
start(Url) when is_binary(Url) ->
    #{port := Port} = uri_string:parse(Url),
    start(Port);
start(To) when is_integer(To) ->
    Owner = self(),
    Pid = spawn_link(fun() ->
        process_flag(trap_exit, true),
        Listener = listen(0),
        {ok, Port} = inet:port(Listener),
        Owner ! {self(), Port},
        loop(#{owner => Owner, to => To, port => Port, listener => Listener, mode => pass, pipes => []})
    end),
    receive
        {Pid, Port} -> #{pid => Pid, port => Port}
    end.

%% @doc Its URL.
-spec endpoint(proxy()) -> binary().
endpoint(#{port := Port}) ->
    iolist_to_binary(io_lib:format("http://127.0.0.1:~b", [Port])).

%% @doc Its port.
-spec port(proxy()) -> inet:port_number().
port(#{port := Port}) -> Port.

%% @doc From now on it is like that.
-spec set(proxy(), mode()) -> ok.
set(#{pid := Pid}, Mode) ->
    call(Pid, {mode, Mode}).

%% @doc Ends it.
-spec stop(proxy()) -> ok.
stop(#{pid := Pid}) ->
    call(Pid, stop).

call(Pid, Request) ->
    Monitor = monitor(process, Pid),
    Pid ! {call, self(), Monitor, Request},
    receive
        {Monitor, ok} ->
            true = demonitor(Monitor, [flush]),
            ok;
        {'DOWN', Monitor, process, Pid, Reason} ->
            error({proxy, Reason})
    end.

listen(Port) ->
    {ok, Listener} = gen_tcp:listen(Port, [binary, {active, false}, {reuseaddr, true}, {ip, {127, 0, 0, 1}}, {backlog, 1024}]),
    Listener.

loop(#{listener := none} = State) ->
    receive
        Message -> handle(Message, State)
    end;
loop(#{listener := Listener} = State) ->
    receive
        Message -> handle(Message, State)
    after 0 ->
        case gen_tcp:accept(Listener, 20) of
            {ok, Socket} -> loop(accepted(Socket, State));
            {error, timeout} -> loop(State)
        end
    end.

accepted(Socket, #{to := To, mode := Mode, pipes := Pipes} = State) ->
    Pipe = spawn_link(fun() ->
        receive
            go -> pipe(Socket, To, Mode)
        end
    end),
    ok = gen_tcp:controlling_process(Socket, Pipe),
    Pipe ! go,
    State#{pipes := [Pipe | Pipes]}.

handle({call, From, Tag, {mode, Mode}}, State) ->
    Next = mode(Mode, State),
    From ! {Tag, ok},
    loop(Next);
handle({call, From, Tag, stop}, State) ->
    _ = mode(refuse, State),
    From ! {Tag, ok};
handle({'EXIT', Owner, Reason}, #{owner := Owner}) ->
    exit(Reason);
handle({'EXIT', Pipe, _Reason}, #{pipes := Pipes} = State) ->
    loop(State#{pipes := lists:delete(Pipe, Pipes)}).

mode(refuse, #{listener := Listener, pipes := Pipes} = State) ->
    _ = Listener =/= none andalso gen_tcp:close(Listener),
    [exit(Pipe, kill) || Pipe <- Pipes],
    State#{listener := none, mode := refuse};
mode(Mode, #{listener := none, port := Port} = State) ->
    mode(Mode, State#{listener := listen(Port)});
mode(swallow, #{pipes := Pipes} = State) ->
    [Pipe ! swallow || Pipe <- Pipes],
    State#{mode := swallow};
mode(pass, #{pipes := Pipes} = State) ->
    %% Of those that were silent nothing is to be expected: the bytes are gone.
    [exit(Pipe, kill) || Pipe <- Pipes],
    State#{mode := pass}.

pipe(Socket, _To, swallow) ->
    ok = inet:setopts(Socket, [{active, true}]),
    swallow([Socket]);
pipe(Socket, To, pass) ->
    case gen_tcp:connect({127, 0, 0, 1}, To, [binary, {active, true}, {nodelay, true}]) of
        {ok, Other} ->
            ok = inet:setopts(Socket, [{active, true}, {nodelay, true}]),
            pass(Socket, Other);
        {error, _} ->
            ok
    end.

pass(Socket, Other) ->
    receive
        {tcp, Socket, Bytes} -> _ = gen_tcp:send(Other, Bytes), pass(Socket, Other);
        {tcp, Other, Bytes} -> _ = gen_tcp:send(Socket, Bytes), pass(Socket, Other);
        swallow -> swallow([Socket, Other]);
        %% Closed or broken on either side: both end with this process.
        {_ClosedOrError, _Which} -> ok;
        {tcp_error, _Which, _Reason} -> ok
    end.

swallow(Sockets) ->
    receive
        {tcp, _, _} -> swallow(Sockets);
        {_ClosedOrError, _Which} -> ok;
        {tcp_error, _Which, _Reason} -> ok
    end.
