//! The pure part: formats, fragment assembly, manifest, the replica-reader machine, and every decision of the upload path.
//!
//! No I/O, clock, thread or randomness: whatever happens comes in as an argument, and what is to be done goes out as a value. State
//! is a value too; a clone is cheap and an older state stays usable.
//!
//! In reading order: [`units`] and [`error`]; the bytes ([`chunk`], [`fragment`], [`manifest`], [`history`], [`key`]); the machine
//! ([`replica_reader`]); the governor's queue ([`admission`], [`token_bucket`]); small [`decisions`], one a module; and
//! [`invariants`], which says in code what must hold.

#![forbid(unsafe_code)]
// A test may fail where the code it tests may not; the same code is linted without tests too.
#![cfg_attr(test, allow(clippy::disallowed_methods))]

pub mod error;
pub mod units;

mod bytes;
pub mod chunk;
pub mod fragment;
pub mod history;
pub mod key;
pub mod manifest;

pub mod replica_reader;

pub mod admission;
pub mod congestion;
pub mod token_bucket;

pub mod decisions;
pub mod invariants;
