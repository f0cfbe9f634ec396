%% The state of a replica reader, shared by the two modules that make up its process:
%% rabbitmq_stream_s3_replica_reader, which finds out where to start and answers others, and
%% rabbitmq_stream_s3_replica_reader_effects, which runs the core.

-record(reader, {
    stream :: binary(),
    writer :: pid(),
    phase = resolving :: resolving | running,
    %% What the process does when the message at hand is dealt with: go on, resolve anew because of something, or end.
    verdict = continue :: continue | {resolve, Reason :: term()} | {stop, Reason :: term()},
    problems :: rabbitmq_stream_s3_problems:state(),
    tasks :: rabbitmq_stream_s3_replica_reader_tasks:state(),
    transfers :: rabbitmq_stream_s3_replica_reader_transfers:state(),
    %% Callers of await_offset by the offset they wait for, each with the moment (monotonic ms) at which it stops waiting.
    waiters = #{} :: #{non_neg_integer() => [{gen_server:from(), infinity | integer()}]},
    %% Callers of flush, with that moment, that have to wait until it is known where to begin.
    flushing = [] :: [{gen_server:from(), infinity | integer()}],
    %% Whether the writer owes us a message.
    listening = false :: boolean(),
    %% How often resolving has begun since the last persist that succeeded.
    resolutions = 0 :: non_neg_integer(),
    resolve_timer = none :: none | reference(),

    %% Known from the first resolution on.
    context = none :: none | rabbitmq_stream_s3_log:context(),
    epoch = none :: none | non_neg_integer(),
    %% The root that is current as far as we know, and since when (milliseconds since the Unix epoch) it is of a manifest that is
    %% to be discarded: it leads to objects that are to stay for a while, so it stays as well.
    root = none :: none | rabbitmq_stream_s3_metadata:entry(),
    discarded = none :: none | integer(),
    %% The range of a tier that has been said to be discarded, until that is true: a new beginning may fail before anything is persisted.
    announced = none :: none | {non_neg_integer(), non_neg_integer()},

    %% While running.
    core = none :: none | rabbitmq_stream_s3_replica_reader_core:state(),
    drain = none :: none | rabbitmq_stream_s3_replica_reader_drain:state(),
    %% Whether a message of ours is under way (or a timer runs) that goes on draining, or draining waits: for fragments in flight, or because the
    %% stream is paused.
    draining = false :: boolean(),
    paused = false :: boolean(),
    %% What has been lost behind all that is on its way, and where the log began when that was found out: when everything before is persisted
    %% the reader resolves anew.
    gap = none :: none | {gap, At :: non_neg_integer(), LogFirst :: non_neg_integer()},
    %% Whether the next fragment is cut with the first chunks that come, because the last beginning came to nothing.
    cut_early = false :: boolean(),
    %% End offsets of fragments that have been cut and are not in the core's manifest yet, oldest first.
    cut = queue:new() :: queue:queue(non_neg_integer()),
    %% Everything below this offset is to be cut and persisted without waiting for more.
    flush = none :: none | non_neg_integer(),
    %% Who has asked for a cut: it comes when everything below the offset is drained, or cannot be. Nobody waits beyond the moment (monotonic ms).
    forced = [] :: [{gen_server:from(), To :: non_neg_integer(), Until :: integer()}],
    age_timer = none :: none | {reference(), Since :: integer()},
    persist_timer = none :: none | reference(),
    group_timer = none :: none | reference(),
    %% What retention has dropped of the core's manifest, with the offset that a persisted manifest must begin at or behind
    %% before it may be deleted. While there is some, no further retention of the tier begins.
    dropped = [] :: [{non_neg_integer(), [rabbitmq_stream_s3_reaper:object()]}],
    %% Whether the local log is being trimmed, the replies that are due when that is done, and those that are due after
    %% another time, if one is wanted.
    trimming = none :: none | {[{Offset :: non_neg_integer(), ok}], none | [{Offset :: non_neg_integer(), ok}]},
    %% Until retention is looked at although nothing is persisted.
    retention_timer = none :: none | reference(),
    %% Failures in a row, and the last cause.
    persist_failures = {0, none} :: {non_neg_integer(), term()},
    group_failures = {0, none} :: {non_neg_integer(), term()},
    %% When a persist of this process succeeded last, milliseconds since the Unix epoch.
    last_persist = none :: none | integer(),
    %% The revision that the persist under way follows, and what the last one that succeeded is to tell other nodes.
    persisting_from = 0 :: non_neg_integer(),
    news = none :: none | reset | {Previous :: non_neg_integer(), Revision :: pos_integer()},
    %% Data bytes that the persist under way will publish.
    persisting_bytes = 0 :: non_neg_integer(),
    %% How fast they become durable.
    progress = rabbitmq_stream_s3_progress:new() :: rabbitmq_stream_s3_progress:state()
}).
