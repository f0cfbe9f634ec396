//! Every event in every phase. What is not in a phase's list does nothing there.

use stream_s3_core::error::ErrorClass::{self, Permanent, Throttled, Transient};
use stream_s3_core::history::Effect::{
    Abort, AskPermit, Catalog, Delete, Examine, GivePermitBack, List, Put, Read, ReportMismatch,
    Sweep, TellHost, WakeAt,
};
use stream_s3_core::history::{
    Backlog, Effect, Event, Examined, Outcome, PURGE_RETRY_MS, Precondition, Put as PutResult,
    Read as ReadResult, Stored,
};
use stream_s3_core::units::TimestampMs;

use crate::rig::{ETAG, Rig, acknowledge, count, listing};

/// Every kind of event, with every outcome that is told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Sealed,
    ScannedSome,
    ScannedNone,
    ListedSome,
    ListedNone,
    Permit,
    Ready,
    NotSealed,
    Stored,
    Exists,
    Changed,
    Same,
    Other,
    Vanished,
    Acknowledged,
    HadSegments,
    HadNone,
    Done,
    Gone,
    Failed(ErrorClass),
    Tick,
    LateTick,
    Purge,
}

const ALL: [Told; 25] = [
    Told::Sealed,
    Told::ScannedSome,
    Told::ScannedNone,
    Told::ListedSome,
    Told::ListedNone,
    Told::Permit,
    Told::Ready,
    Told::NotSealed,
    Told::Stored,
    Told::Exists,
    Told::Changed,
    Told::Same,
    Told::Other,
    Told::Vanished,
    Told::Acknowledged,
    Told::HadSegments,
    Told::HadNone,
    Told::Done,
    Told::Gone,
    Told::Failed(Transient),
    Told::Failed(Throttled),
    Told::Failed(Permanent),
    Told::Tick,
    Told::LateTick,
    Told::Purge,
];
/// Later than anything waits.
const LATE: u64 = 10_000_000;

impl Told {
    fn event(self, attempt: u64) -> Event {
        let put = |put| Event::Put { attempt, put };
        let examined = |examined| Event::Examined { attempt, examined };
        match self {
            Self::Sealed => Event::Sealed {
                size: 1,
                sealed: TimestampMs(0),
            },
            Self::ScannedSome => Event::Rescanned {
                listing: listing(&[1, 2]),
            },
            Self::ScannedNone => Event::Rescanned {
                listing: listing(&[]),
            },
            Self::ListedSome => Event::Listed {
                attempt,
                listing: listing(&[1, 2]),
            },
            Self::ListedNone => Event::Listed {
                attempt,
                listing: listing(&[]),
            },
            Self::Permit => Event::Permit { attempt },
            Self::Ready => Event::Read {
                attempt,
                read: ReadResult::Ready,
            },
            Self::NotSealed => Event::Read {
                attempt,
                read: ReadResult::NotSealed,
            },
            Self::Stored => put(PutResult::Stored { crc: 7, size: 99 }),
            Self::Exists => put(PutResult::Exists {
                crc: 7,
                payload_len: 50,
            }),
            Self::Changed => put(PutResult::Changed),
            Self::Same => examined(Examined::Same { size: 99 }),
            Self::Other => examined(Examined::Other {
                etag: ETAG.to_owned(),
            }),
            Self::Vanished => examined(Examined::Vanished),
            Self::Acknowledged => Event::Acknowledged { attempt },
            Self::HadSegments => Event::Catalog {
                attempt,
                had_segments: true,
            },
            Self::HadNone => Event::Catalog {
                attempt,
                had_segments: false,
            },
            Self::Done => Event::Done { attempt },
            Self::Gone => Event::Gone { attempt },
            Self::Failed(class) => Event::Failed {
                attempt,
                class,
                jitter: u32::MAX,
            },
            Self::Tick | Self::LateTick => Event::Tick,
            Self::Purge => Event::Purge,
        }
    }

    /// Whether it has an attempt.
    fn answers(self) -> bool {
        match self {
            Self::Sealed
            | Self::ScannedSome
            | Self::ScannedNone
            | Self::Tick
            | Self::LateTick
            | Self::Purge => false,
            Self::ListedSome
            | Self::ListedNone
            | Self::Permit
            | Self::Ready
            | Self::NotSealed
            | Self::Stored
            | Self::Exists
            | Self::Changed
            | Self::Same
            | Self::Other
            | Self::Vanished
            | Self::Acknowledged
            | Self::HadSegments
            | Self::HadNone
            | Self::Done
            | Self::Gone
            | Self::Failed(_) => true,
        }
    }
}

/// Tells each event to the machine, as the answer to attempt `last`, and compares what comes back: the rows, and nothing for every other event. An
/// answer to another attempt does nothing whatsoever.
fn check(phase: &str, rig: &Rig, last: u64, rows: &[(Told, Vec<Effect>)]) {
    assert_eq!(rig.phase(), phase);
    for told in ALL {
        let expected = rows
            .iter()
            .find(|(row, _)| *row == told)
            .map_or(&[][..], |(_, effects)| effects);
        let now = if told == Told::LateTick {
            LATE
        } else {
            rig.now
        };
        let mut machine = rig.machine.clone();
        let effects = machine.handle(now, told.event(last));
        assert_eq!(effects, expected, "{told:?} in {phase}");
        if matches!(phase, "gone" | "purging" | "purged") {
            assert_eq!(machine.status().backlog, Backlog::default());
        }
        if told.answers() {
            for other in [last.wrapping_sub(1), last + 1] {
                let mut machine = rig.machine.clone();
                assert_eq!(machine.handle(now, told.event(other)), []);
                assert_eq!(machine, rig.machine, "old {told:?} in {phase}");
            }
        }
    }
}

/// What failures of the three classes come to, at the time 0.
fn failures(first: &[Effect]) -> Vec<(Told, Vec<Effect>)> {
    let with = |rest: &[Effect]| [first, rest].concat();
    let retried = count(Outcome::RetryableError, 0);
    vec![
        (
            Told::Failed(Transient),
            with(&[retried.clone(), WakeAt { ms: 0 }]),
        ),
        (
            Told::Failed(Throttled),
            with(&[retried, WakeAt { ms: 1_000 }]),
        ),
        (
            Told::Failed(Permanent),
            with(&[count(Outcome::PermanentError, 0)]),
        ),
    ]
}

fn purge_failures(now: u64) -> Vec<(Told, Vec<Effect>)> {
    vec![
        (Told::Failed(Transient), vec![WakeAt { ms: now }]),
        (Told::Failed(Throttled), vec![WakeAt { ms: now + 1_000 }]),
        (
            Told::Failed(Permanent),
            vec![WakeAt {
                ms: now + PURGE_RETRY_MS,
            }],
        ),
    ]
}

fn purge(attempt: u64) -> (Told, Vec<Effect>) {
    (Told::Purge, vec![Abort, Catalog { attempt }])
}

fn purge_with_permit(attempt: u64) -> (Told, Vec<Effect>) {
    let effects = vec![Abort, GivePermitBack, Catalog { attempt }];
    (Told::Purge, effects)
}

fn put(attempt: u64, when: Precondition) -> Effect {
    Put {
        attempt,
        seq: 1,
        when,
    }
}

fn replaces() -> Precondition {
    Precondition::Matches(ETAG.to_owned())
}

/// The first segment is being read once more, in order to replace what is there.
fn reading_again() -> Rig {
    let mut rig = Rig::ready(&[1, 2]);
    rig.exists();
    rig.examined(Examined::Other {
        etag: ETAG.to_owned(),
    });
    rig
}

fn acknowledging() -> Rig {
    let mut rig = Rig::ready(&[1, 2]);
    rig.stored();
    rig
}

fn deleting() -> Rig {
    let mut rig = Rig::new();
    rig.tell(Event::Purge);
    rig.catalog(true);
    rig.now = 60_000;
    rig.tell(Event::Tick);
    rig
}

#[test]
fn an_idle_machine_begins_when_there_is_something() {
    let rows = [
        (Told::Sealed, vec![List { attempt: 1 }]),
        (Told::ScannedSome, vec![AskPermit { attempt: 1 }]),
        purge(1),
    ];
    check("idle", &Rig::new(), 0, &rows);
}

#[test]
fn a_listing_machine_waits_for_the_index() {
    let mut rig = Rig::new();
    rig.tell(Told::Sealed.event(0));
    let mut rows = failures(&[]);
    rows.extend([
        (Told::ListedSome, vec![AskPermit { attempt: 2 }]),
        (Told::Gone, vec![count(Outcome::Gone, 0)]),
        purge(2),
    ]);
    check("listing", &rig, 1, &rows);
}

#[test]
fn a_queued_machine_waits_for_a_permit() {
    let mut rows = failures(&[GivePermitBack]);
    rows.extend([
        (Told::Permit, vec![Read { attempt: 2, seq: 1 }]),
        purge_with_permit(2),
    ]);
    check("queued", &Rig::scanned(&[1, 2]), 1, &rows);
}

#[test]
fn a_reading_machine_waits_for_the_body() {
    let mut first = Rig::scanned(&[1, 2]);
    first.permit();
    let again = reading_again();
    for (rig, last, when) in [(first, 2, Precondition::Absent), (again, 5, replaces())] {
        let next = last + 1;
        let mut rows = failures(&[GivePermitBack]);
        rows.extend([
            (Told::Ready, vec![put(next, when)]),
            (
                Told::NotSealed,
                vec![GivePermitBack, AskPermit { attempt: next }],
            ),
            (Told::Gone, vec![GivePermitBack, count(Outcome::Gone, 0)]),
            purge_with_permit(next),
        ]);
        check("reading", &rig, last, &rows);
    }
}

#[test]
fn a_storing_machine_waits_for_the_store() {
    let mut again = reading_again();
    again.read();
    let first = (Rig::ready(&[1, 2]), 3, Stored::Uploaded);
    for (rig, last, stored) in [first, (again, 6, Stored::Replaced)] {
        let next = last + 1;
        let examine = Examine {
            attempt: next,
            seq: 1,
            crc: 7,
            payload_len: 50,
        };
        let mut rows = failures(&[GivePermitBack]);
        rows.extend([
            (
                Told::Stored,
                vec![
                    count(Outcome::Stored(stored), 99),
                    GivePermitBack,
                    acknowledge(next, 1, stored),
                ],
            ),
            (Told::Exists, vec![examine]),
            (
                Told::Changed,
                vec![
                    GivePermitBack,
                    count(Outcome::RetryableError, 0),
                    WakeAt { ms: 0 },
                ],
            ),
            (Told::Gone, vec![GivePermitBack, count(Outcome::Gone, 0)]),
            purge_with_permit(next),
        ]);
        check("storing", &rig, last, &rows);
    }
}

#[test]
fn an_examining_machine_waits_for_what_is_there() {
    let mut rig = Rig::ready(&[1, 2]);
    rig.exists();
    let mut rows = failures(&[GivePermitBack]);
    rows.extend([
        (
            Told::Same,
            vec![
                count(Outcome::Stored(Stored::AlreadyPresent), 0),
                GivePermitBack,
                acknowledge(5, 1, Stored::AlreadyPresent),
            ],
        ),
        (
            Told::Other,
            vec![ReportMismatch { seq: 1 }, Read { attempt: 5, seq: 1 }],
        ),
        (
            Told::Vanished,
            vec![
                GivePermitBack,
                count(Outcome::RetryableError, 0),
                WakeAt { ms: 0 },
            ],
        ),
        (Told::Gone, vec![GivePermitBack, count(Outcome::Gone, 0)]),
        purge_with_permit(5),
    ]);
    check("examining", &rig, 4, &rows);
}

#[test]
fn an_acknowledging_machine_waits_for_the_host_without_a_permit() {
    let mut rows = failures(&[]);
    rows.extend([
        (Told::Acknowledged, vec![AskPermit { attempt: 5 }]),
        (Told::Gone, vec![count(Outcome::Gone, 0)]),
        purge(5),
    ]);
    check("acknowledging", &acknowledging(), 4, &rows);
}

#[test]
fn a_pausing_machine_waits_for_its_time() {
    let mut before_all = Rig::ready(&[1, 2]);
    before_all.fail(Throttled);
    let mut stored = acknowledging();
    stored.fail(Throttled);
    let mut without_index = Rig::new();
    without_index.tell(Told::Sealed.event(0));
    without_index.fail(Throttled);
    let cases = [
        (without_index, 2, List { attempt: 3 }),
        (before_all, 4, AskPermit { attempt: 5 }),
        (stored, 5, acknowledge(6, 1, Stored::Uploaded)),
    ];
    for (rig, last, then) in cases {
        let rows = [
            (Told::Tick, vec![WakeAt { ms: 1_000 }]),
            (Told::LateTick, vec![then]),
            purge(last + 1),
        ];
        check("pausing", &rig, last, &rows);
    }
}

#[test]
fn a_blocked_machine_waits_for_a_scan() {
    let mut rig = Rig::ready(&[1, 2]);
    rig.fail(Permanent);
    let rows = [
        (Told::ScannedSome, vec![AskPermit { attempt: 4 }]),
        purge(4),
    ];
    check("blocked", &rig, 3, &rows);
}

#[test]
fn a_machine_of_a_run_that_is_gone_waits_for_nothing() {
    let mut rig = Rig::ready(&[1, 2]);
    rig.gone();
    check("gone", &rig, 4, &[purge(5)]);
}

#[test]
fn a_purging_machine_goes_step_by_step() {
    let mut rig = Rig::new();
    rig.tell(Event::Purge);
    let mut rows = purge_failures(0);
    rows.extend([
        (Told::HadSegments, vec![WakeAt { ms: 60_000 }]),
        (Told::HadNone, vec![Sweep { attempt: 2 }]),
    ]);
    check("purging", &rig, 1, &rows);

    rig.catalog(true);
    let rows = [
        (Told::Tick, vec![WakeAt { ms: 60_000 }]),
        (Told::LateTick, vec![Delete { attempt: 3 }]),
    ];
    check("purging", &rig, 2, &rows);

    let mut rig = deleting();
    let mut rows = purge_failures(60_000);
    rows.push((Told::Done, vec![Sweep { attempt: 4 }]));
    check("purging", &rig, 3, &rows);

    rig.done();
    let mut rows = purge_failures(60_000);
    rows.push((Told::Done, vec![TellHost { attempt: 5 }]));
    check("purging", &rig, 4, &rows);

    rig.done();
    check("purging", &rig, 5, &purge_failures(60_000));
}

#[test]
fn a_machine_of_a_purged_run_purges_it_once_more_if_asked() {
    let mut rig = deleting();
    rig.done();
    rig.done();
    rig.done();
    check("purged", &rig, 5, &[purge(6)]);
}
