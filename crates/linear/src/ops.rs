//! Products with a weight in BF16, to compare with: a single launch as a safe function. The launch checks every
//! buffer against the shape of the kernel table.

use dsv4_kv_device::{Backend, Buffer, DeviceError, Stream, View, bf16};
use kernels_gpu::launch::Bf16Linear;
use kernels_gpu::params::Bf16LinearParams;
use kv_layout::linear::{INNER_STEP, LinearTile};

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

/// Queues `bf16_linear_*`: the product of `x` (`[tokens, inner]` BF16) with `weight`, into `y` (`[tokens, columns]`
/// f32). Each 32 rows read all of the weight.
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
    let operation = Bf16Linear {
        input: x.ptr(),
        weight: values.ptr(),
        output: y.ptr_mut(),
        params: Bf16LinearParams { tokens, columns, inner },
    };
    // SAFETY: the launch checks every buffer.
    unsafe { stream.launch(LinearTile::of(tokens), &operation) }
}
