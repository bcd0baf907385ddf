//! Where the blocks of a window meet: each leaves its channels, and the last takes all of them.
//!
//! Without a fence and without a count, each of which would be a way to memory and back: a channel is one
//! word, and a word that is not there yet says so itself.

use kv_layout::geometry::HEAD_DIM;
use simt::atomic::DeviceAtomicU32;
use simt::grid;
use simt::mem::GlobalMut;

use super::Quad;

/// A channel that is not there: a NaN that no device computes.
const ABSENT: u32 = u32::MAX;

/// A place for each window.
#[derive(Clone, Copy)]
pub struct Meeting {
    /// `[capacity, 512]` words: the pooled vectors, f32; [`ABSENT`] between launches.
    pub pooled: GlobalMut<u32>,
}

impl Meeting {
    /// Leaves a channel of window `record`.
    ///
    /// # Safety
    /// There is a place for the record; `channel < 512`; no other thread leaves it.
    #[inline(always)]
    pub unsafe fn leave(self, record: u32, channel: u32, value: f32) {
        let word = value.to_bits();
        let word = if word == ABSENT { f32::NAN.to_bits() } else { word };
        // SAFETY: by this function's own contract; all access it atomically until it is taken.
        unsafe { DeviceAtomicU32::new(self.pooled, Self::at(record, channel)).store(word) }
    }

    /// Takes channels `channel..channel + 4` of window `record`, when all four were left.
    ///
    /// # Safety
    /// As [`Self::leave`]; `channel` is a multiple of 4; the four are left by earlier blocks, or
    /// were left by this one before a barrier.
    #[inline(always)]
    #[must_use]
    pub unsafe fn take(self, record: u32, channel: u32) -> Quad {
        let at = Self::at(record, channel);
        // SAFETY: by this function's own contract; nobody else accesses the words once they were left.
        unsafe {
            let words = grid::wait_for_earlier_blocks(|| {
                let words = DeviceAtomicU32::load_x4(self.pooled, at);
                words.iter().all(|&word| word != ABSENT).then_some(words)
            });
            self.pooled.store_u32x4(at, [ABSENT; 4]);
            words.map(f32::from_bits)
        }
    }

    #[inline(always)]
    fn at(record: u32, channel: u32) -> u64 {
        u64::from(record) * u64::from(HEAD_DIM) + u64::from(channel)
    }
}
