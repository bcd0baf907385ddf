//! Products with a weight in BF16: a single launch as a safe function. The launch checks every buffer against the
//! shape of the kernel table.

use dsv4_kv_device::{Backend, Buffer, DeviceError, Stream, View, bf16};
use kernels_gpu::launch::{Bf16Linear, Bf16Narrow};
use kernels_gpu::params::Bf16LinearParams;
use kv_layout::linear::{INNER_STEP, LinearTile, MOST_NARROW_COLUMNS};

/// A weight in BF16.
#[derive(Clone, Copy)]
pub struct Bf16Weight<'a, B: Backend> {
    /// `[columns, inner]`.
    pub values: &'a View<B, bf16>,
    /// Columns of the product, at least one.
    pub columns: u32,
    /// Values of a row, a multiple of 32.
    pub inner: u32,
}

/// Queues the product of `x` (`[tokens, inner]` BF16) with `weight`, into `y` (`[tokens, columns]` f32):
/// `bf16_narrow_*` for up to 256 columns, `bf16_linear_*` for more. The number of tokens changes no bit of a token's
/// sums. Each 32 tokens read all of the weight: this is for decode batches.
///
/// # Errors
/// [`DeviceError::Argument`] if `inner` is no multiple of 32, or there are no columns;
/// [`DeviceError::TooShort`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn multiply_bf16<B: Backend>(
    stream: &Stream<B>,
    weight: Bf16Weight<'_, B>,
    x: &View<B, bf16>,
    tokens: u32,
    y: &Buffer<B, f32>,
) -> Result<(), DeviceError> {
    let Bf16Weight { values, columns, inner } = weight;
    if tokens == 0 {
        return Ok(());
    }
    for (what, value, multiple) in
        [("columns of a weight", columns, 1), ("values of a row", inner, INNER_STEP)]
    {
        if value == 0 || !value.is_multiple_of(multiple) {
            let [value, multiple, most] = [value, multiple, u32::MAX].map(u64::from);
            return Err(DeviceError::Argument { what, value, multiple, most });
        }
    }
    let tile = LinearTile::of(tokens);
    let (input, weight, output) = (x.ptr(), values.ptr(), y.ptr_mut());
    let params = Bf16LinearParams { tokens, columns, inner };
    // SAFETY: the launch checks every buffer.
    unsafe {
        if columns <= MOST_NARROW_COLUMNS {
            stream.launch(tile, &Bf16Narrow { input, weight, output, params })
        } else {
            stream.launch(tile, &Bf16Linear { input, weight, output, params })
        }
    }
}
