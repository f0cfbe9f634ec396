//! The machine: events in, whole effect lists out.

#![allow(clippy::disallowed_methods)]

#[path = "../support/mod.rs"]
mod support;

mod fragments;
mod persists;
mod rebalance;
mod reset;
mod retention;
mod rig;
