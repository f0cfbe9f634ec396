//! Looks that end after something else has happened: a look is two steps, and here the other things happen in between.

use std::fs;
use std::path::Path;

use tempfile::TempDir;

use super::*;

const PLENTY: u64 = 1 << 30;
const SIZE: u64 = 100;

/// Files that are segments by their names, which is all that a look goes by.
fn log_of(segments: &[u64]) -> TempDir {
    let dir = TempDir::new().expect("a folder");
    for segment in segments {
        fs::write(path(dir.path(), *segment), [7; SIZE as usize]).expect("a file");
    }
    dir
}

fn path(dir: &Path, segment: u64) -> PathBuf {
    segment_path(dir, Offset(segment))
}

fn unlink(dir: &Path, segment: u64) {
    fs::remove_file(path(dir, segment)).expect("it was there");
}

/// A registry that is not watched: nothing happens but what a test does.
fn entered(dir: &Path, budget: u64) -> Pins {
    let pins = Pins(Arc::new(Shared {
        watch: OnceLock::from(None),
        ..Shared::default()
    }));
    enter(&pins, dir, b"writer", budget);
    pins
}

fn enter(pins: &Pins, dir: &Path, writer: &[u8], budget: u64) {
    let stream = StreamId::parse("stream").expect("an id");
    pins.enter(stream, dir, writer, || true, budget)();
}

/// The first step of a look.
fn surveyed(pins: &Pins, dir: &Path) -> Found {
    let known = pins.0.state.lock().known(dir).expect("entered");
    survey(dir, known)
}

/// The second one.
fn take(pins: &Pins, dir: &Path, found: Found) {
    drop(pins.0.state.lock().take(dir, found));
}

fn numbers(pins: &Pins) -> (u64, u64) {
    let info = pins.info();
    assert_eq!(info.problem, None);
    (info.segments, info.unlinked_bytes)
}

fn pinned(pins: &Pins, dir: &Path) -> Vec<u64> {
    let state = pins.0.state.lock();
    let log = state.logs.get(dir).expect("entered");
    log.pins.keys().map(|segment| segment.0).collect()
}

#[test]
fn a_look_that_ends_late_does_not_take_back_what_another_saw_deleted() {
    let log = log_of(&[0, 15]);
    let pins = entered(log.path(), PLENTY);
    let before = surveyed(&pins, log.path());
    unlink(log.path(), 0);
    pins.look(log.path());
    assert_eq!(numbers(&pins), (2, SIZE));
    take(&pins, log.path(), before);
    assert_eq!(numbers(&pins), (2, SIZE));
}

#[test]
fn a_look_that_ends_late_does_not_bring_back_what_is_persisted() {
    let log = log_of(&[0, 15, 30]);
    let pins = entered(log.path(), 0);
    pins.0.state.lock().budget = PLENTY;
    // It has opened all three.
    let before = surveyed(&pins, log.path());
    assert_eq!(before.opened.len(), 3);
    pins.persisted(log.path(), Offset(30))();
    assert_eq!(pinned(&pins, log.path()), [30]);
    take(&pins, log.path(), before);
    assert_eq!(pinned(&pins, log.path()), [30]);
}

#[test]
fn a_look_that_ends_late_brings_nothing_into_the_log_of_the_next_writer() {
    let log = log_of(&[0]);
    let pins = entered(log.path(), PLENTY);
    let mut before = surveyed(&pins, log.path());
    let file = File::open(path(log.path(), 0)).expect("a file");
    before.opened.push((Offset(99), Arc::new(file)));
    enter(&pins, log.path(), b"another", PLENTY);
    take(&pins, log.path(), before);
    assert_eq!(pinned(&pins, log.path()), [0]);
}

#[test]
fn two_looks_at_once_pin_a_segment_once() {
    let log = log_of(&[0]);
    let pins = entered(log.path(), PLENTY);
    fs::write(path(log.path(), 15), [7; SIZE as usize]).expect("a file");
    let [one, other] = [surveyed(&pins, log.path()), surveyed(&pins, log.path())];
    unlink(log.path(), 15);
    take(&pins, log.path(), one);
    pins.look(log.path());
    take(&pins, log.path(), other);
    assert_eq!(pinned(&pins, log.path()), [0, 15]);
    assert_eq!(numbers(&pins), (2, SIZE));
}

/// What is in front of a gap is of no use, so what is behind it must not go first.
#[test]
fn a_segment_that_is_seen_late_is_let_go_before_those_behind_it() {
    let log = log_of(&[0, 30]);
    let pins = entered(log.path(), 2 * SIZE);
    fs::write(path(log.path(), 15), [7; SIZE as usize]).expect("a file");
    pins.look(log.path());
    assert_eq!(pinned(&pins, log.path()), [0, 15, 30]);
    for segment in [0, 15, 30] {
        unlink(log.path(), segment);
    }
    pins.look(log.path());
    assert_eq!(pinned(&pins, log.path()), [15, 30]);
    enter(&pins, log.path(), b"writer", SIZE);
    assert_eq!(pinned(&pins, log.path()), [30]);
}

/// A link to nowhere is in the list, and cannot be opened: like a segment that is deleted in between.
#[test]
fn a_segment_that_is_listed_and_gone_is_no_problem() {
    let log = log_of(&[0, 30]);
    std::os::unix::fs::symlink("nowhere", path(log.path(), 15)).expect("a link");
    let pins = entered(log.path(), PLENTY);
    assert_eq!(pinned(&pins, log.path()), [0, 30]);
    assert_eq!(numbers(&pins), (2, 0));
}
