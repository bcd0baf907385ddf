//! The order in which lanes, warps and blocks of a cluster run: permutations drawn from the launch's seed.

use crate::limits::WARP_SIZE;

/// The lanes of a warp; also the most warps of a block.
const MAX_COUNT: usize = WARP_SIZE as usize;

/// A small deterministic generator (SplitMix64).
pub struct Order {
    state: u64,
}

impl Order {
    /// A generator of the orders of block `block`, in a launch seeded with `seed`.
    pub fn new(seed: u64, block: u64) -> Self {
        let mut seeded = Self { state: seed };
        Self { state: seeded.next() ^ block }
    }

    /// The numbers `0..count` shuffled, in the first `count` places; `count` is at most 32.
    pub fn shuffled(&mut self, count: u32) -> [u8; MAX_COUNT] {
        let mut order = [0; MAX_COUNT];
        for i in 0..count as usize {
            // The high half of a 32 x 32 bit product is uniform enough over at most 32 values.
            let random = self.next() >> 32;
            let j = ((random * (i as u64 + 1)) >> 32) as usize;
            order[i] = order[j];
            order[j] = i as u8;
        }
        order
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.state ^ (self.state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }
}
