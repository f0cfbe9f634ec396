//! What a world is like: settings and faults, all of which follow from its seed.

use stream_s3_core::admission::Rate;
use stream_s3_core::decisions::retry::RetryDelays;

use crate::rng::Rng;
use crate::twin::Twin;

/// What bounds a run from outside: the seed says everything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Activity and faults end at this moment at the latest, in milliseconds of the world's time.
    pub horizon_ms: u64,
    /// After so many faults there are no more.
    pub faults: u64,
    /// The guard that is taken out.
    pub twin: Option<Twin>,
}

impl Limits {
    /// None, and all guards are in place.
    pub const NONE: Self = Self {
        horizon_ms: u64::MAX,
        faults: u64::MAX,
        twin: None,
    };
}

/// The settings of one world. Times are in milliseconds, sizes in bytes, chances in a thousandth.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// Streams that share the machines.
    pub(crate) streams: usize,
    /// When activity and faults end.
    pub(crate) horizon: u64,
    /// Between writes.
    pub(crate) write_every: u64,
    /// At which a segment ends.
    pub(crate) segment_bytes: u64,
    /// Sum of data at which a fragment is cut.
    pub(crate) fragment_target: u64,
    /// Age at which a fragment is cut.
    pub(crate) fragment_max_age: u64,
    /// See the core's options.
    pub(crate) persist_threshold: u64,
    /// See the core's options.
    pub(crate) persist_interval: u64,
    /// See the core's options.
    pub(crate) rebalance_threshold: usize,
    /// Fragments of the stream between cut and manifest.
    pub(crate) max_in_flight: usize,
    /// Transfers of a node at a time.
    pub(crate) permits: usize,
    /// Of a node.
    pub(crate) rate: Rate,
    /// Of a node.
    pub(crate) burst: u64,
    /// Limit of an attempt, from its admission.
    pub(crate) transfer_deadline: u64,
    /// Limit of a task.
    pub(crate) persist_timeout: u64,
    /// Between attempts.
    pub(crate) delays: RetryDelays,
    /// Limit of the remote tier.
    pub(crate) remote_max_bytes: Option<u128>,
    /// Age limit of the remote tier.
    pub(crate) remote_max_age: Option<u64>,
    /// Whether local segments go once they are tiered.
    pub(crate) local_uploaded: bool,
    /// Whether and how often osiris' own retention deletes segments.
    pub(crate) trim_every: Option<u64>,
    /// Chance that a request to the store goes wrong.
    pub(crate) store_faults: u64,
    /// Chance that a request to the metadata store goes wrong.
    pub(crate) metadata_faults: u64,
    /// Between greater misfortunes.
    pub(crate) nemesis_every: Option<u64>,
    /// Whether a machine that goes down forgets what it had not written to its disk.
    pub(crate) lose_cache: bool,
    /// How long a machine may take to write its cache back.
    pub(crate) flush_every: u64,
    /// How long a new writer may run without a reader.
    pub(crate) attach_within: u64,
    /// When the stream is deleted.
    pub(crate) delete_at: Option<u64>,
    /// How often garbage is collected.
    pub(crate) gc_every: Option<u64>,
    /// Whether that takes orphans, too.
    pub(crate) gc_orphans: bool,
    /// How long the objects of a discarded tier stay.
    pub(crate) discarded_grace: u64,
    /// How often readers, reconcilers and replicas look by themselves.
    pub(crate) reconcile_every: u64,
    /// Whether a deposed writer goes on beside one that does not reach the metadata store.
    pub(crate) split: bool,
    /// Bytes of deleted segments that may be held open.
    pub(crate) pin_budget: u64,
}

impl Plan {
    /// The plan of a seed.
    pub(crate) fn new(rng: &mut Rng) -> Self {
        let horizon = rng.between(4_000, 40_000);
        let calm = rng.chance(100);
        let faulty = |rng: &mut Rng, most: u64| if calm { 0 } else { rng.between(0, most) };
        let store_faults = faulty(rng, 250);
        let metadata_faults = faulty(rng, 250);
        let mut plan = Self {
            streams: if rng.chance(120) {
                rng.between(2, 3) as usize
            } else {
                1
            },
            horizon,
            write_every: rng.between(40, 400),
            segment_bytes: rng.between(120, 2_000),
            fragment_target: rng.between(40, 700),
            fragment_max_age: rng.between(500, 5_000),
            persist_threshold: rng.between(1, 5),
            persist_interval: rng.between(50, 2_000),
            rebalance_threshold: rng.pick(&[2, 3, 4, 8, 1024]),
            max_in_flight: rng.between(1, 8) as usize,
            permits: rng.between(1, 4) as usize,
            rate: if rng.chance(700) {
                Rate::Unlimited
            } else {
                Rate::BytesPerSec(rng.between(1_000, 20_000))
            },
            burst: rng.between(100, 4_000),
            transfer_deadline: rng.between(300, 4_000),
            persist_timeout: rng.between(400, 6_000),
            delays: RetryDelays {
                transient_ms: 10,
                transient_max_ms: 500,
                permanent_ms: 100,
                permanent_max_ms: 2_000,
            },
            remote_max_bytes: rng
                .chance(500)
                .then(|| u128::from(rng.between(500, 10_000))),
            remote_max_age: rng.chance(150).then(|| rng.between(1_000, 30_000)),
            local_uploaded: rng.chance(250),
            trim_every: rng.chance(450).then(|| rng.between(150, 8_000)),
            store_faults,
            metadata_faults,
            nemesis_every: (!calm && rng.chance(850)).then(|| rng.between(300, 5_000)),
            lose_cache: rng.chance(400),
            flush_every: rng.between(200, 25_000),
            attach_within: 600,
            delete_at: rng.chance(70).then(|| rng.between(1_000, horizon)),
            gc_every: rng.chance(400).then(|| rng.between(1_000, 8_000)),
            gc_orphans: rng.chance(700),
            discarded_grace: rng.between(1_000, 15_000),
            reconcile_every: rng.between(1_500, 8_000),
            split: false,
            pin_budget: match rng.between(0, 3) {
                0 => 0,
                1 => rng.between(200, 4_000),
                _ => u64::MAX,
            },
        };
        if rng.chance(80) {
            plan.hurry(rng);
        } else if !calm && rng.chance(100) {
            plan.forget(rng);
        }
        plan
    }

    /// Makes it a world in which a deposed writer goes on beside one that does not reach the metadata store.
    pub(crate) fn split(&mut self, rng: &mut Rng) {
        self.split = true;
        self.streams = 1;
        self.horizon = rng.between(42_000, 48_000);
        self.write_every = rng.between(40, 150);
        self.segment_bytes = rng.between(60, 200);
        self.fragment_target = rng.between(40, 200);
        // The tier stays well behind the log.
        self.persist_threshold = 1_000;
        self.persist_interval = 2_000;
        self.rate = Rate::Unlimited;
        self.trim_every = None;
        self.pin_budget = 0;
        self.delete_at = None;
        self.nemesis_every = None;
        self.store_faults /= 8;
        self.metadata_faults /= 8;
        self.gc_every = Some(rng.between(800, 1_500));
        self.discarded_grace = rng.between(1_000, 2_000);
    }

    /// Makes it a world in which retention is always on the heels of the uploads.
    fn hurry(&mut self, rng: &mut Rng) {
        self.segment_bytes = rng.between(60, 200);
        self.fragment_target = rng.between(20, 80);
        self.max_in_flight = 1;
        self.trim_every = Some(rng.between(40, 200));
        self.store_faults /= 8;
    }

    /// Makes it a world of machines that often forget, and of logs that are soon trimmed where they grew anew.
    fn forget(&mut self, rng: &mut Rng) {
        self.lose_cache = true;
        self.flush_every = rng.between(10_000, 60_000);
        self.nemesis_every = Some(rng.between(600, 2_500));
        self.horizon = rng.between(20_000, 40_000);
        self.store_faults /= 4;
        self.metadata_faults /= 4;
        self.write_every = rng.between(30, 150);
        self.segment_bytes = rng.between(60, 300);
        self.delete_at = None;
        self.trim_every = Some(rng.between(100, 500));
        self.attach_within = 6_000;
    }
}
