//! The reader in `test/python` shares no code with this one: both must agree on what lies in a bucket.

mod support;

use std::path::PathBuf;
use std::process::Command;

use support::{Bucket, record};

/// Runs the other reader; `None` on a machine without Python.
fn read_bucket(bucket: &Bucket, first: u64, next: u64) -> Option<String> {
    let records = bucket.dir().join("records");
    let expected: Vec<u8> = (first..next)
        .map(record)
        .flat_map(|record| [&(record.len() as u32).to_be_bytes()[..], &record].concat())
        .collect();
    std::fs::write(&records, expected).unwrap();
    let program =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../test/python/read_bucket.py");
    let run = Command::new("python3")
        .arg("-B")
        .arg(program)
        .arg(bucket.dir())
        .args(["rabbitmq", "demo"])
        .arg(records)
        .output();
    match run {
        Ok(output) => Some(
            String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap(),
        ),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("python3 is not here; the other reader was not asked");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn both_readers_agree_on_a_flat_tree() {
    if let Some(said) = read_bucket(&Bucket::flat(4), 0, 60) {
        assert_eq!(said, "60 records equal\n");
    }
}

#[test]
fn both_readers_agree_on_groups_that_retention_has_begun_to_consume() {
    if let Some(said) = read_bucket(&Bucket::grouped(3), 45, 75) {
        assert_eq!(said, "30 records equal\n");
    }
}
