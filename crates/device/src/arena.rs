//! Several buffers in one allocation.

use crate::backend::Backend;
use crate::buffer::Buffer;
use crate::device::Device;
use crate::error::DeviceError;

/// What each buffer's offset is a multiple of, in bytes: what a driver aligns an allocation to.
const ALIGN: u64 = 256;

/// Bytes that [`Device::allocate_arena`] takes for `buffers` buffers of `bytes` bytes together: `bytes`, and as much
/// as aligning them may cost. Saturates.
#[must_use]
pub const fn arena_bytes(buffers: u64, bytes: u64) -> u64 {
    bytes.saturating_add(buffers.saturating_mul(ALIGN))
}

impl<B: Backend> Device<B> {
    /// Zeroed buffers of the sizes `bytes`, in one allocation of [`arena_bytes`], each at a multiple of 256 bytes: a
    /// driver rounds an allocation up, CUDA to 2 MiB. `label` names it in errors.
    ///
    /// On a device that checks a kernel's accesses against allocations each buffer has one of its own, and the same
    /// bytes are taken together.
    ///
    /// # Errors
    /// As [`Device::allocate`].
    pub fn allocate_arena(
        &self,
        label: &'static str,
        bytes: &[u64],
    ) -> Result<Vec<Buffer<B, u8>>, DeviceError> {
        if bytes.is_empty() {
            return Ok(Vec::new());
        }
        let sum = bytes.iter().fold(0, |sum: u64, &bytes| sum.saturating_add(bytes));
        let all = arena_bytes(bytes.len() as u64, sum);
        if self.backend().checks_allocations() {
            return self.allocate_each(label, bytes, all - sum);
        }
        let arena = self.allocate::<u8>(label, all)?;
        let mut next = 0;
        let buffers = bytes.iter().map(|&bytes| {
            let buffer = arena.slice(next, bytes);
            next = (next + bytes).next_multiple_of(ALIGN);
            buffer.expect("the arena has room for each and its alignment")
        });
        Ok(buffers.collect())
    }

    /// Buffers of the sizes `bytes`, in allocations of their own; the last has `spare` bytes behind it.
    fn allocate_each(
        &self,
        label: &'static str,
        bytes: &[u64],
        spare: u64,
    ) -> Result<Vec<Buffer<B, u8>>, DeviceError> {
        let last = bytes.len() - 1;
        let buffer = |(i, &bytes): (usize, &u64)| {
            let spare = if i == last { spare } else { 0 };
            let buffer = self.allocate::<u8>(label, bytes.saturating_add(spare))?;
            Ok(buffer.slice(0, bytes).expect("it has them"))
        };
        bytes.iter().enumerate().map(buffer).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::null::NullDevice;

    /// In one allocation: aligned, apart, and no more than was announced.
    #[test]
    fn buffers_share_an_allocation_and_no_byte() {
        let device = NullDevice::null(1 << 20);
        let sizes = [1, 300, 0, 256, 7];
        let buffers = device.allocate_arena("arena", &sizes).expect("it fits");
        let arena = buffers[0].memory().span();
        assert_eq!(arena.bytes(), arena_bytes(5, sizes.iter().sum()));
        let mut end = arena.address();
        for (buffer, size) in buffers.iter().zip(sizes) {
            let span = buffer.span();
            assert_eq!(buffer.memory().span().address(), arena.address(), "one allocation");
            assert_eq!(span.bytes(), size);
            assert!(span.address().is_multiple_of(ALIGN) && span.address() >= end);
            end = span.address() + size;
        }
        assert!(end <= arena.address() + arena.bytes());
    }
}
