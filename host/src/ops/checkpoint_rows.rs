//! Rows of checkpoints that launches over a step's tokens write.

use super::check_length;
use super::state_copy::in_granules;
use crate::device::{Backend, Buffer, DeviceError, DevicePtr, DevicePtrMut, View};

/// Where the rows of a layer lie in a checkpoint, in bytes, multiples of 256.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerImage {
    /// The 128 window rows: data, scales.
    pub window: [u64; 2],
    /// Of a CSA layer, the previous halves of 4 tokens: main, index.
    pub halves: [u64; 2],
}

/// Checkpoints whose rows a launch over the tokens of a step writes.
pub struct CheckpointRows<'a, B: Backend> {
    /// `[checkpoints, checkpoint_bytes]` u8.
    pub checkpoints: &'a Buffer<B, u8>,
    /// Checkpoints.
    pub number: u32,
    /// Bytes of a checkpoint, a multiple of 256.
    pub checkpoint_bytes: u64,
    /// `[tokens]` i32 row of each token, `128 * checkpoint + row`, with `row` 0 to 127; -1 = none.
    pub row: &'a View<B, i32>,
    /// Where the layer's rows lie.
    pub image: LayerImage,
}

/// Kernel arguments made from [`CheckpointRows`].
pub(super) struct CheckpointArguments {
    pub row: DevicePtr<i32>,
    pub checkpoints: DevicePtrMut<u8>,
    pub number: u32,
    /// Granules of 256 bytes of a checkpoint.
    pub granules: u32,
    /// Where each of the kernel's parts lies in a checkpoint, in granules.
    pub places: [u32; 2],
}

impl CheckpointArguments {
    /// Arguments without checkpoints: empty parts of `row` and `unused`.
    pub fn none<B: Backend>(row: &View<B, i32>, unused: &Buffer<B, u8>) -> Self {
        let none = "every buffer has no elements";
        let row = row.slice(0, 0).expect(none).ptr();
        let checkpoints = unused.slice(0, 0).expect(none).ptr_mut();
        Self { row, checkpoints, number: 0, granules: 0, places: [0; 2] }
    }
}

impl<B: Backend> CheckpointRows<'_, B> {
    /// The arguments for `parts`, each a place and a number of bytes. Fails for parts that do not lie in a checkpoint, and
    /// for places or a size that are no multiples of 256.
    pub(super) fn arguments(
        &self,
        parts: [(u64, u64); 2],
    ) -> Result<CheckpointArguments, DeviceError> {
        for (place, bytes) in parts {
            let end = place.saturating_add(bytes);
            check_length("bytes of a checkpoint", self.checkpoint_bytes, end)?;
        }
        let place = |(place, _)| in_granules("place in a checkpoint", place);
        let [first, second] = parts.map(place);
        Ok(CheckpointArguments {
            row: self.row.ptr(),
            checkpoints: self.checkpoints.ptr_mut(),
            number: self.number,
            granules: in_granules("bytes of a checkpoint", self.checkpoint_bytes)?,
            places: [first?, second?],
        })
    }
}
