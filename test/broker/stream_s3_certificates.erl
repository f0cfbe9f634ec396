%% @doc Certificates for a broker of this machine, made anew.
-module(stream_s3_certificates).

-include_lib("public_key/include/public_key.hrl").

-export([write/1, conf/1]).
-export_type([files/0]).

-type files() :: #{authority := file:filename(), certificate := file:filename(), key := file:filename()}.

%% @doc Writes an authority, a certificate for localhost and 127.0.0.1 that it has issued, and the key of that, as PEM, to a directory.
-spec write(file:filename()) -> files().
write(Dir) ->
    ok = filelib:ensure_path(Dir),
    Options = [{digest, sha256}, {key, {namedCurve, secp256r1}}],
    Names = #'Extension'{extnID = ?'id-ce-subjectAltName', extnValue = [{dNSName, "localhost"}, {iPAddress, <<127, 0, 0, 1>>}], critical = false},
    #{cert := Root, key := RootKey} = public_key:pkix_test_root_cert("stream_s3", Options),
    Authority = signed(Root, RootKey),
    Made = public_key:pkix_test_data(#{
        root => #{cert => Authority, key => RootKey}, intermediates => [], peer => [{extensions, [Names]} | Options]
    }),
    {KeyType, Key} = proplists:get_value(key, Made),
    #{
        authority => pem(Dir, "authority.pem", [{'Certificate', Authority, not_encrypted}]),
        certificate => pem(Dir, "certificate.pem", [{'Certificate', signed(proplists:get_value(cert, Made), RootKey), not_encrypted}]),
        key => pem(Dir, "key.pem", [{KeyType, Key, not_encrypted}])
    }.

%% OTP gives the signature's algorithm a parameter that the standard forbids there, and others refuse.
signed(Der, Key) ->
    #'OTPCertificate'{tbsCertificate = #'OTPTBSCertificate'{signature = {Record, Algorithm, _}} = Content} = public_key:pkix_decode_cert(Der, otp),
    public_key:pkix_sign(Content#'OTPTBSCertificate'{signature = {Record, Algorithm, asn1_NOVALUE}}, Key).

pem(Dir, Name, Entries) ->
    File = filename:join(Dir, Name),
    ok = file:write_file(File, public_key:pem_encode(Entries)),
    File.

%% @doc Lines of rabbitmq.conf with which a broker uses them.
-spec conf(files()) -> iodata().
conf(#{authority := Authority, certificate := Certificate, key := Key}) ->
    io_lib:format("ssl_options.cacertfile = ~ts~nssl_options.certfile = ~ts~nssl_options.keyfile = ~ts~n", [Authority, Certificate, Key]).
