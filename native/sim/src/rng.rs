//! Randomness from one seed.
//!
//! `SplitMix64`, spelled out instead of taken from a crate: a seed that is the name of a finding must mean the same world after every update of
//! a dependency.

/// A generator. The same seed yields the same numbers everywhere.
#[derive(Debug, Clone)]
pub(crate) struct Rng(u64);

impl Rng {
    /// One that follows from `seed`.
    #[must_use]
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed ^ 0x5eed_0f7e_5eed_0f7e)
    }

    /// All 64 bits.
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// 32 bits.
    pub(crate) fn bits32(&mut self) -> u32 {
        (self.bits() >> 32) as u32
    }

    /// A number in `[low, high]`.
    pub(crate) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.bits() % (high - low + 1)
    }

    /// True in `per_mille` of a thousand cases.
    pub(crate) fn chance(&mut self, per_mille: u64) -> bool {
        self.bits() % 1000 < per_mille
    }

    /// One of `choices`, which is not empty.
    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.between(0, choices.len() as u64 - 1) as usize]
    }
}
