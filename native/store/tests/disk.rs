//! A folder store on a disk that is full, or may only be read. The disks are mounted in a namespace of their own, by a child: this very
//! test program, told to run one test.

mod support;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use bytes::Bytes;
use stream_s3_store::{
    Body, ErrorKind, Failure, FsStore, ObjectStore, Part, PutOptions, StoreError,
};
use support::*;
use tempfile::TempDir;

const CASE: &str = "STREAM_S3_TEST_CASE";
const DISK: &str = "STREAM_S3_TEST_DISK";

/// Runs `case` in a child after `setup`, a script that finds the folder in `$disk`. `None` where this user may not mount.
async fn run_child(case: &str, setup: &str) -> Option<()> {
    let disk = TempDir::new().expect("a folder");
    let program = std::env::current_exe().expect("this program");
    let script = format!("set -e; disk=$1; {setup}; exec \"$2\" --exact child --nocapture");
    let mut child = Command::new("unshare");
    child
        .args(["--mount", "sh", "-c", &script, "setup"])
        .arg(disk.path())
        .arg(program)
        .env(CASE, case)
        .env(DISK, disk.path())
        .stdin(Stdio::null());
    let Output {
        status,
        stdout,
        stderr,
    } = tokio::task::spawn_blocking(move || child.output())
        .await
        .expect("no panic")
        .expect("unshare runs");
    let (stdout, stderr) = (
        String::from_utf8_lossy(&stdout),
        String::from_utf8_lossy(&stderr),
    );
    if !status.success() && !stdout.contains("running 1 test") {
        println!("skipped: this user cannot mount a file system: {stderr}");
        return None;
    }
    assert!(status.success(), "{stdout}{stderr}");
    Some(())
}

/// Does nothing unless it is run by one of the tests below.
#[tokio::test]
async fn child() {
    let (Ok(case), Ok(disk)) = (std::env::var(CASE), std::env::var(DISK)) else {
        return;
    };
    let disk = PathBuf::from(disk);
    let store = FsStore::open(&disk).expect("a store");
    match case.as_str() {
        "full" => full(&store, &disk).await,
        "limit" => limit(&store, &disk).await,
        "read_only" => read_only(&store, &disk).await,
        other => panic!("no such case: {other}"),
    }
}

/// One sentence that names what was done, the file, and what the system says to it.
fn is(error: &StoreError, kind: ErrorKind, posix: &str, said: &str) {
    assert_eq!(error.kind, kind, "{error}");
    assert!(
        matches!(&error.failure, Failure::File(file, name) if name == posix && file.contains(".stream_s3")),
        "{error:?}"
    );
    assert!(error.message.contains(said), "{error}");
    assert!(error.message.contains(".stream_s3"), "{error}");
    assert!(!error.message.contains('\n'), "{error}");
}

/// No object has appeared, and no unfinished file has stayed.
async fn nothing_new(store: &FsStore, disk: &Path, expected: &[&str]) {
    assert_eq!(keys(store, "", 1000).await, expected);
    let unfinished: Vec<_> = std::fs::read_dir(disk.join(".stream_s3"))
        .expect("the scratch folder")
        .map(|row| row.expect("a row").file_name())
        .filter(|name| name != "lock")
        .collect();
    assert!(unfinished.is_empty(), "{unfinished:?}");
}

async fn full(store: &FsStore, disk: &Path) {
    let (small, large) = (bytes(300_000), bytes(2 << 20));
    let put =
        |key: &'static str, body: Body, content: &Bytes| store.put(key, body, with_crc(content));
    put("p/a", stream(&small, 10_000), &small)
        .await
        .expect("fits");
    for body in [stream(&large, 100_000), Body::Bytes(large.clone())] {
        let error = put("p/b", body, &large).await.expect_err("full");
        is(
            &error,
            ErrorKind::Transient,
            "enospc",
            "No space left on device",
        );
        nothing_new(store, disk, &["p/a"]).await;
    }
    // What was there before is still what it was.
    let error = put("p/a", stream(&large, 100_000), &large)
        .await
        .expect_err("full");
    is(
        &error,
        ErrorKind::Transient,
        "enospc",
        "No space left on device",
    );
    assert_eq!(read(store, "p/a", Part::Whole).await.expect("there"), small);
    nothing_new(store, disk, &["p/a"]).await;
    // And with room again, it goes on.
    assert!(
        store
            .delete(&["p/a".to_owned()])
            .await
            .expect("deleted")
            .is_empty()
    );
    let fits = bytes(800_000);
    put("p/b", stream(&fits, 10_000), &fits)
        .await
        .expect("fits");
    assert_eq!(read(store, "p/b", Part::Whole).await.expect("there"), fits);
}

async fn limit(store: &FsStore, disk: &Path) {
    let (small, large) = (bytes(100_000), bytes(2 << 20));
    store
        .put("p/a", stream(&small, 10_000), with_crc(&small))
        .await
        .expect("fits");
    let put = store.put("p/b", stream(&large, 100_000), with_crc(&large));
    let error = put.await.expect_err("too large");
    is(&error, ErrorKind::Invalid, "efbig", "File too large");
    nothing_new(store, disk, &["p/a"]).await;
}

async fn read_only(store: &FsStore, disk: &Path) {
    assert_eq!(
        read(store, "p/a", Part::Whole).await.expect("there"),
        "there\n"
    );
    assert_eq!(
        read(store, "p/a", Part::Last(2)).await.expect("there"),
        "e\n"
    );
    assert_eq!(keys(store, "p/", 1000).await, ["p/a"]);
    let body = Body::Bytes(Bytes::from_static(b"x"));
    let error = store
        .put("p/b", body, PutOptions::default())
        .await
        .expect_err("read-only");
    is(&error, ErrorKind::Invalid, "erofs", "Read-only file system");
    let error = store
        .delete(&["p/a".to_owned()])
        .await
        .expect_err("read-only");
    is(&error, ErrorKind::Invalid, "erofs", "Read-only file system");
    let error = store.probe("p").await.expect_err("read-only");
    is(&error, ErrorKind::Invalid, "erofs", "Read-only file system");
    assert!(!disk.join(".stream_s3").exists());
    assert_eq!(keys(store, "", 1000).await, ["p/a"]);
}

#[tokio::test]
async fn a_full_disk_is_transient_and_leaves_nothing_half_written() {
    run_child("full", "mount -t tmpfs -o size=1m none \"$disk\"").await;
}

/// The kernel's limit on the size of files stands in where nobody may mount: an error in the middle of writing, too.
#[tokio::test]
async fn a_file_that_grows_too_large_leaves_nothing_half_written() {
    let disk = TempDir::new().expect("a folder");
    let mut child = Command::new("sh");
    child
        .args([
            "-c",
            "trap '' XFSZ; ulimit -f 2000; exec \"$1\" --exact child --nocapture",
            "setup",
        ])
        .arg(std::env::current_exe().expect("this program"))
        .env(CASE, "limit")
        .env(DISK, disk.path())
        .stdin(Stdio::null());
    let ended = tokio::task::spawn_blocking(move || child.output());
    let ended = ended.await.expect("no panic").expect("it runs");
    let text = [ended.stdout, ended.stderr].concat();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&text));
}

#[tokio::test]
async fn a_read_only_disk_can_be_read_and_refuses_writes_by_name() {
    let setup = "mount -t tmpfs -o size=1m none \"$disk\"; mkdir \"$disk/p\"; echo there > \"$disk/p/a\"; mount -o remount,ro \"$disk\"";
    run_child("read_only", setup).await;
}
