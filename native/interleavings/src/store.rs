//! In the place of the store's client.

/// Nothing is stored.
#[derive(Debug, Clone, Copy, Default)]
pub struct Store;
