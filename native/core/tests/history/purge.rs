//! Purges.

use stream_s3_core::error::ErrorClass::{Permanent, Transient};
use stream_s3_core::history::Effect::{
    Abort, Catalog, Delete, GivePermitBack, Sweep, TellHost, WakeAt,
};
use stream_s3_core::history::{Backlog, Effect, Event, PURGE_RETRY_MS};
use stream_s3_core::units::TimestampMs;

use crate::rig::{Rig, listing};

#[test]
fn a_purge_stops_the_upload_waits_deletes_by_key_sweeps_and_tells() {
    let mut rig = Rig::ready(&[1, 2]);
    rig.now = 500;
    let effects = rig.tell(Event::Purge);
    let catalog = Catalog {
        attempt: rig.attempt,
    };
    assert_eq!(effects, [Abort, GivePermitBack, catalog]);
    assert_eq!(rig.machine.status().backlog, Backlog::default());
    rig.now = 1_000;
    // The wait began with the purge, not with the answer.
    assert_eq!(
        rig.catalog(true),
        [WakeAt { ms: 60_500 }],
        "nothing is deleted yet"
    );
    rig.now = 60_500;
    let effects = rig.tell(Event::Tick);
    let delete = Delete {
        attempt: rig.attempt,
    };
    assert_eq!(effects, [delete]);
    assert!(matches!(rig.done()[..], [Sweep { .. }]));
    assert!(matches!(rig.done()[..], [TellHost { .. }]));
    assert_eq!(rig.done(), []);
    assert_eq!(rig.phase(), "purged");
    assert!(rig.machine.status().is_idle);
}

#[test]
fn a_run_without_segment_state_is_purged_at_once() {
    let mut rig = Rig::new();
    rig.tell(Event::Purge);
    assert!(matches!(rig.catalog(false)[..], [Sweep { .. }]));
}

#[test]
fn a_purge_repeats_what_is_refused_each_minute_and_what_passes_sooner() {
    let mut rig = Rig::new();
    rig.tell(Event::Purge);
    rig.catalog(false);
    assert_eq!(rig.fail(Permanent), [WakeAt { ms: PURGE_RETRY_MS }]);
    rig.now = PURGE_RETRY_MS;
    assert!(matches!(rig.tell(Event::Tick)[..], [Sweep { .. }]));
    assert_eq!(rig.fail(Transient), [WakeAt { ms: rig.now }]);
    assert!(matches!(rig.tell(Event::Tick)[..], [Sweep { .. }]));
    assert!(matches!(rig.done()[..], [TellHost { .. }]));
}

#[test]
fn nothing_is_uploaded_while_a_run_is_purged_or_afterwards() {
    let mut rig = Rig::scanned(&[1]);
    rig.tell(Event::Purge);
    let sealed = Event::Sealed {
        size: 1,
        sealed: TimestampMs(0),
    };
    let scanned = Event::Rescanned {
        listing: listing(&[1]),
    };
    for event in [sealed, scanned, Event::Purge] {
        assert_eq!(rig.tell(event), []);
    }
    rig.catalog(true);
    assert_eq!(rig.tell(Event::Purge), []);
}

#[test]
fn each_step_of_a_purge_that_is_refused_for_good_is_repeated_after_a_minute_however_often() {
    let walk: [fn(&mut Rig) -> Vec<Effect>; 4] = [
        |rig| rig.tell(Event::Purge),
        |rig| {
            rig.catalog(true);
            rig.now += 60_000;
            rig.tell(Event::Tick)
        },
        Rig::done,
        Rig::done,
    ];
    let kinds: [fn(&Effect) -> bool; 4] = [
        |effect| matches!(effect, Catalog { .. }),
        |effect| matches!(effect, Delete { .. }),
        |effect| matches!(effect, Sweep { .. }),
        |effect| matches!(effect, TellHost { .. }),
    ];
    let mut rig = Rig::new();
    for (step, is_it) in walk.iter().zip(kinds) {
        let effects = step(&mut rig);
        assert!(effects.last().is_some_and(is_it), "{effects:?}");
        for _ in 0..3 {
            let at = rig.now + PURGE_RETRY_MS;
            assert_eq!(rig.fail(Permanent), [WakeAt { ms: at }]);
            rig.now = at - 1;
            assert_eq!(rig.tell(Event::Tick), [WakeAt { ms: at }]);
            rig.now = at;
            let effects = rig.tell(Event::Tick);
            assert!(effects.len() == 1 && is_it(&effects[0]), "{effects:?}");
        }
    }
    assert_eq!(rig.done(), []);
    assert_eq!(rig.phase(), "purged");
}

#[test]
fn a_catalog_that_comes_late_shortens_the_wait_and_one_that_comes_later_ends_it() {
    for (late, left) in [(0, 60_000), (59_000, 1_000), (60_000, 0), (100_000, 0)] {
        let mut rig = Rig::new();
        rig.tell(Event::Purge);
        rig.now = late;
        assert_eq!(rig.catalog(true), [WakeAt { ms: late + left }]);
    }
}

#[test]
fn a_run_that_another_owner_has_purged_meanwhile_needs_nothing_more() {
    for steps in 0..3 {
        let mut rig = Rig::new();
        rig.tell(Event::Purge);
        if steps > 0 {
            rig.catalog(true);
            rig.now = 60_000;
            rig.tell(Event::Tick);
        }
        if steps > 1 {
            rig.done();
        }
        assert_eq!(rig.gone(), []);
        assert_eq!(rig.phase(), "purged");
        assert!(rig.machine.status().is_idle);
    }
}
