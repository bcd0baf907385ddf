//! Exchange between the blocks of a window: each publishes its channels, and the last block collects all of
//! them.
//!
//! Each word starts as a sentinel NaN, so no flag is needed to see that it was written. That saves a fence and
//! an atomic counter, each of which would cost a round trip to memory.

use kv_layout::geometry::HEAD_DIM;
use simt::atomic::DeviceAtomicU32;
use simt::grid;
use simt::mem::GlobalMut;

use super::Quad;

/// A channel that is not published yet: a NaN that no device computes.
const SENTINEL: u32 = u32::MAX;

/// Pooled vectors in global memory, one for each window.
#[derive(Clone, Copy)]
pub struct BlockExchange {
    /// `[capacity, 512]` words: the pooled vectors, f32; `SENTINEL` between launches.
    pub pooled: GlobalMut<u32>,
}

impl BlockExchange {
    /// Publishes a channel of window `record`.
    ///
    /// # Safety
    /// `pooled` has a row for the record; `channel < 512`; no other thread publishes this channel.
    #[inline(always)]
    pub unsafe fn publish(self, record: u32, channel: u32, value: f32) {
        let word = value.to_bits();
        let word = if word == SENTINEL { f32::NAN.to_bits() } else { word };
        // SAFETY: by this function's own contract; all accesses are atomic until it is collected.
        unsafe { DeviceAtomicU32::new(self.pooled, Self::at(record, channel)).store(word) }
    }

    /// Waits until channels `channel..channel + 4` of window `record` are published, returns them, and resets the
    /// words to the sentinel.
    ///
    /// # Safety
    /// As [`Self::publish`]; `channel` is a multiple of 4; earlier blocks publish the four channels, or
    /// this one did before a barrier.
    #[inline(always)]
    #[must_use]
    pub unsafe fn collect(self, record: u32, channel: u32) -> Quad {
        let at = Self::at(record, channel);
        // SAFETY: by this function's own contract; no other thread accesses the words once they are published.
        unsafe {
            let words = grid::wait_for_earlier_blocks(|| {
                let words = DeviceAtomicU32::load_x4(self.pooled, at);
                words.iter().all(|&word| word != SENTINEL).then_some(words)
            });
            self.pooled.store_u32x4(at, [SENTINEL; 4]);
            words.map(f32::from_bits)
        }
    }

    #[inline(always)]
    fn at(record: u32, channel: u32) -> u64 {
        u64::from(record) * u64::from(HEAD_DIM) + u64::from(channel)
    }
}
