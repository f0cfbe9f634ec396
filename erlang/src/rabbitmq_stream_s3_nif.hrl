%% Raised by the library for the version that rabbitmq_stream_s3_nif.erl was written for. Both change together.
-define(ABI_VERSION, 1).
