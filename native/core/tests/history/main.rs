//! The history machine: events in, the whole list of effects out.

#![allow(clippy::disallowed_methods)]

mod phases;
mod purge;
mod rig;
mod upload;
