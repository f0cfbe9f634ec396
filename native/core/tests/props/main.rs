//! Properties over random inputs. `PROPTEST_CASES` sets the number of cases of each (2,000 otherwise).

#![allow(clippy::disallowed_methods)]

#[path = "../support/mod.rs"]
mod support;

mod admission;
mod assembly;
mod formats;
mod history;
mod machine;
mod manifest;
mod model;
mod world;

use proptest::prelude::ProptestConfig;

/// The number of cases; failures are printed, not written into the tree.
pub(crate) fn config() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|cases| cases.parse().ok());
    ProptestConfig {
        cases: cases.unwrap_or(2_000),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}
