%% Records and bytes that other code shares with this plugin. Compiles alone: neither rabbit nor osiris need be on the path.
-ifndef(RABBITMQ_STREAM_S3_HRL).
-define(RABBITMQ_STREAM_S3_HRL, true).

%% What the remote tier of one stream holds: the half-open range [first_offset, next_offset), and the entries that cover it.
-record(manifest, {
    first_offset = 0 :: non_neg_integer(),
    %% Milliseconds since the Unix epoch, -1 while there is no entry.
    first_timestamp = -1 :: integer(),
    %% Last timestamp of the oldest fragment, -1 while there is no entry.
    first_last_timestamp = -1 :: integer(),
    next_offset = 0 :: non_neg_integer(),
    %% Data bytes of all fragments, also of those inside groups.
    total_size = 0 :: non_neg_integer(),
    %% payload_version in the metadata store; 0: not stored yet.
    revision = 0 :: non_neg_integer(),
    %% ?ENTRY after ?ENTRY, oldest first.
    entries = <<>> :: binary()
}).

%% One change of a manifest. The four first fields replace those of the manifest; `size` is added to its total;
%% `entries` takes the place of the `len` bytes at byte `pos` of its entries.
-record(edit, {
    first_offset :: non_neg_integer() | undefined,
    first_timestamp :: integer() | undefined,
    first_last_timestamp :: integer() | undefined,
    %% undefined: leave it as it is.
    next_offset :: non_neg_integer() | undefined,
    %% Signed, in bytes.
    size = 0 :: integer(),
    entries = <<>> :: binary(),
    pos = 0 :: non_neg_integer(),
    len = 0 :: non_neg_integer()
}).

%% What the key of a fragment object is made from, and its data bytes.
-record(fragment_ref, {
    offset :: non_neg_integer(),
    uid :: 0..16#FFFFFFFF,
    size :: non_neg_integer()
}).

%% What the key of a group object is made from.
-record(group_ref, {
    offset :: non_neg_integer(),
    kind :: 1..3,
    uid :: 0..16#FFFFFFFF
}).

-define(MANIFEST_KIND_FRAGMENT, 0).
-define(MANIFEST_KIND_GROUP, 1).
-define(MANIFEST_KIND_KILO_GROUP, 2).
-define(MANIFEST_KIND_MEGA_GROUP, 3).

%% Size of an entry in bytes.
-define(ENTRY_B, 34).
%% Builds or matches one entry. Size is that of a fragment's data, and 0 for groups.
-define(ENTRY(Offset, FirstTs, LastTs, Kind, Size, Uid), <<
    (Offset):64/unsigned,
    (FirstTs):64/signed,
    (LastTs):64/signed,
    (Kind):8/unsigned,
    (Size):40/unsigned,
    (Uid):32/unsigned
>>).
%% The same, followed by the entries in Rest.
-define(ENTRY(Offset, FirstTs, LastTs, Kind, Size, Uid, Rest), <<
    (Offset):64/unsigned,
    (FirstTs):64/signed,
    (LastTs):64/signed,
    (Kind):8/unsigned,
    (Size):40/unsigned,
    (Uid):32/unsigned,
    (Rest)/binary
>>).

%% Size in bytes of an index record at the end of a fragment object.
-define(INDEX_RECORD_B, 20).
%% Size in bytes of what stands before the entries in root and group objects.
-define(MANIFEST_HEADER_SIZE, 49).

-endif.
