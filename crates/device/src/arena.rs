//! Several buffers in one allocation.

use std::ops::Range;

use crate::backend::Backend;
use crate::buffer::Buffer;
use crate::device::Device;
use crate::error::DeviceError;

/// The alignment of each buffer's offset, in bytes: that of a driver's allocations.
pub const ARENA_ALIGN: u64 = 256;

/// Bytes that [`Device::allocate_arena`] takes for `buffers` buffers of `bytes` bytes together: `bytes`, the most that
/// their alignment may cost, and 256 bytes that are in no buffer. Saturates.
#[must_use]
pub const fn arena_bytes(buffers: u64, bytes: u64) -> u64 {
    bytes.saturating_add(buffers.saturating_add(1).saturating_mul(ARENA_ALIGN))
}

/// Buffers that lie in one allocation, and the allocation, for kernels that reach several of them by one pointer and
/// a table of offsets.
///
/// A device that checks a kernel's accesses checks those through a buffer's pointer against that buffer, as if it had
/// an allocation of its own. The allocation begins with 256 bytes that are in no buffer, so that a pointer to the whole
/// allocation differs from one to the first buffer.
pub struct Arena<B: Backend> {
    /// The whole allocation.
    pub whole: Buffer<B, u8>,
    /// The buffers, in order.
    pub buffers: Vec<Buffer<B, u8>>,
}

impl<B: Backend> Arena<B> {
    /// Offset of one of [`Self::buffers`] in [`Self::whole`], in bytes.
    ///
    /// # Panics
    /// In a build that checks for overflow, if a buffer of another allocation lies before this one.
    #[must_use]
    pub fn offset(&self, buffer: &Buffer<B, u8>) -> u64 {
        buffer.span().address() - self.whole.span().address()
    }
}

/// The ranges of buffers of the sizes `bytes` in the allocation.
fn places(bytes: &[u64]) -> Vec<Range<u64>> {
    let mut next = ARENA_ALIGN;
    let place = |&bytes: &u64| {
        let place = next..next + bytes;
        next = place.end.next_multiple_of(ARENA_ALIGN);
        place
    };
    bytes.iter().map(place).collect()
}

impl<B: Backend> Device<B> {
    /// Zeroed buffers of the sizes `bytes`, in one allocation of [`arena_bytes`], each at a multiple of 256 bytes. One
    /// allocation wastes less, since a driver rounds each up, CUDA to 2 MiB. `label` names it in errors.
    ///
    /// # Errors
    /// As [`Device::allocate`].
    pub fn allocate_arena(
        &self,
        label: &'static str,
        bytes: &[u64],
    ) -> Result<Arena<B>, DeviceError> {
        let sum = bytes.iter().fold(0, |sum: u64, &bytes| sum.saturating_add(bytes));
        let whole = self.allocate::<u8>(label, arena_bytes(bytes.len() as u64, sum))?;
        let places = places(bytes);
        whole.divide(&places);
        let buffer = |place: &Range<u64>| {
            let buffer = whole.slice(place.start, place.end - place.start);
            buffer.expect("the arena has room for each and its alignment")
        };
        let buffers = places.iter().map(buffer).collect();
        Ok(Arena { whole, buffers })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::null::NullDevice;

    /// Buffers lie in one allocation, aligned and disjoint. Its size is `arena_bytes`.
    #[test]
    fn buffers_share_an_allocation_and_no_byte() {
        let device = NullDevice::null(1 << 20);
        let sizes = [1, 300, 0, 256, 7];
        let arena = device.allocate_arena("arena", &sizes).expect("it fits");
        let whole = arena.whole.span();
        assert_eq!(arena.buffers[0].memory().span(), whole, "one allocation");
        assert_eq!(whole.bytes(), arena_bytes(5, sizes.iter().sum()));
        let mut end = whole.address() + 1;
        for (buffer, size) in arena.buffers.iter().zip(sizes) {
            let span = buffer.span();
            assert_eq!(buffer.memory().span(), whole, "one allocation");
            assert_eq!(span.bytes(), size);
            assert_eq!(arena.offset(buffer), span.address() - whole.address());
            assert!(span.address().is_multiple_of(ARENA_ALIGN) && span.address() >= end);
            end = span.address() + size;
        }
        assert!(end <= whole.address() + whole.bytes());
    }
}
