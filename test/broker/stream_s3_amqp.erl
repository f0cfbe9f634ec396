%% @doc Publishing to a stream by AMQP 0.9.1, with confirms.
-module(stream_s3_amqp).

-include_lib("amqp_client/include/amqp_client.hrl").

-export([open/1, close/1, declare/3, delete/2, publish/3, publish/4, publish/5, decode/1]).
-export_type([channel/0]).

-define(CONFIRM_TIMEOUT_S, 60).

-opaque channel() :: {Connection :: pid(), Channel :: pid()}.

%% @doc A connection and a channel with confirms to a broker's port on this machine.
-spec open(inet:port_number()) -> channel().
open(Port) ->
    {ok, _} = application:ensure_all_started(amqp_client),
    {ok, Connection} = amqp_connection:start(#amqp_params_network{host = "127.0.0.1", port = Port}),
    %% Both outlive the process that opened them.
    {ok, Channel} = amqp_connection:open_channel(Connection),
    #'confirm.select_ok'{} = amqp_channel:call(Channel, #'confirm.select'{}),
    {Connection, Channel}.

-spec close(channel()) -> ok.
close({Connection, _Channel}) ->
    amqp_connection:close(Connection).

%% @doc Declares a stream with these arguments besides its type.
-spec declare(channel(), binary(), [{binary(), atom(), term()}]) -> ok.
declare({_, Channel}, Queue, Arguments) ->
    #'queue.declare_ok'{} = amqp_channel:call(Channel, #'queue.declare'{
        queue = Queue, durable = true, arguments = [{<<"x-queue-type">>, longstr, <<"stream">>} | Arguments]
    }),
    ok.

-spec delete(channel(), binary()) -> ok.
delete({_, Channel}, Queue) ->
    #'queue.delete_ok'{} = amqp_channel:call(Channel, #'queue.delete'{queue = Queue}),
    ok.

%% @doc Publishes these messages and waits until all are confirmed; raises `not_confirmed' otherwise.
-spec publish(channel(), binary(), [binary()]) -> ok.
publish(Channel, Queue, Bodies) ->
    publish(Channel, Queue, Bodies, []).

%% @doc The same, with headers.
-spec publish(channel(), binary(), [binary()], [{binary(), atom(), term()}]) -> ok.
publish(Channel, Queue, Bodies, Headers) ->
    publish(Channel, Queue, Bodies, Headers, ?CONFIRM_TIMEOUT_S).

%% @doc The same, and waits at most so many seconds.
-spec publish(channel(), binary(), [binary()], [{binary(), atom(), term()}], pos_integer()) -> ok.
publish({_, Channel}, Queue, Bodies, Headers, TimeoutS) ->
    Properties = #'P_basic'{headers = Headers},
    lists:foreach(
        fun(Body) ->
            ok = amqp_channel:cast(Channel, #'basic.publish'{routing_key = Queue}, #amqp_msg{props = Properties, payload = Body})
        end,
        Bodies
    ),
    case amqp_channel:wait_for_confirms(Channel, TimeoutS) of
        true -> ok;
        Other -> error({not_confirmed, Other})
    end.

%% @doc The body of a message as a stream holds it: sections of AMQP 1.0, of which those with data are joined.
-spec decode(binary()) -> binary().
decode(Record) ->
    iolist_to_binary(data(Record)).

data(<<>>) ->
    [];
%% A section is a described type: 16#00, its descriptor as a small ulong, and a value.
data(<<16#00, 16#53, 16#75, 16#A0, Size, Data:Size/binary, Rest/binary>>) ->
    [Data | data(Rest)];
data(<<16#00, 16#53, 16#75, 16#B0, Size:32, Data:Size/binary, Rest/binary>>) ->
    [Data | data(Rest)];
data(<<16#00, 16#53, _Section, Rest/binary>>) ->
    data(skip(Rest)).

skip(<<16#45, Rest/binary>>) -> Rest;
skip(<<Code, Size, Rest/binary>>) when Code =:= 16#C0; Code =:= 16#C1; Code =:= 16#A0; Code =:= 16#A1 -> drop(Size, Rest);
skip(<<Code, Size:32, Rest/binary>>) when Code =:= 16#D0; Code =:= 16#D1; Code =:= 16#B0; Code =:= 16#B1 -> drop(Size, Rest).

drop(Size, Bytes) ->
    binary:part(Bytes, Size, byte_size(Bytes) - Size).
