//! Products with a weight in BF16: a single launch as a safe function. The launch checks every buffer against the shape
//! of the kernel table. Work in one stream runs in order; if two streams use a buffer, the caller orders them.

use dsv4_kv_device::{Backend, Buffer, DeviceError, Stream, View, bf16};
use kernels_gpu::launch::{Bf16Linear, Bf16LinearMany, Bf16Narrow, RouterLogits};
use kernels_gpu::linear::tiled;
use kernels_gpu::params::{Bf16LinearManyParams, Bf16LinearParams, RouterLogitsParams};
use kernels_gpu::table::MULTIPROCESSORS;
use kv_layout::linear::{INNER_STEP, LinearTile, MAX_DECODE_BATCH, MAX_NARROW_COLUMNS};
use kv_layout::router::LogitsSplit;

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

impl<B: Backend> Bf16Weight<'_, B> {
    /// Refuses a weight without columns, or with rows of a length that no kernel supports.
    ///
    /// # Errors
    /// [`DeviceError::Argument`].
    pub fn check(&self) -> Result<(), DeviceError> {
        for (what, value, multiple) in
            [("columns of a weight", self.columns, 1), ("values of a row", self.inner, INNER_STEP)]
        {
            if value == 0 || !value.is_multiple_of(multiple) {
                let [value, multiple, most] = [value, multiple, u32::MAX].map(u64::from);
                return Err(DeviceError::Argument { what, value, multiple, most });
            }
        }
        Ok(())
    }
}

/// Queues the product of `x` (`[tokens, inner]` BF16) with `weight`, into `y` (`[tokens, columns]` f32). The bits of a
/// token's sums do not depend on the number of tokens.
///
/// | columns | kernel up to 64 tokens; every 32 tokens read the whole weight | kernel for more tokens |
/// |---|---|---|
/// | up to 256 | `bf16_narrow_*` | `router_logits_*` |
/// | more | `bf16_linear_*` | `bf16_linear_many` |
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
    if tokens == 0 {
        return Ok(());
    }
    weight.check()?;
    let Bf16Weight { values, columns, inner } = weight;
    let tile = LinearTile::of(tokens);
    let (input, weight, output) = (x.ptr(), values.ptr(), y.ptr_mut());
    let params = Bf16LinearParams { tokens, columns, inner };
    // SAFETY: the launch checks every buffer.
    unsafe {
        match (columns <= MAX_NARROW_COLUMNS, tokens <= MAX_DECODE_BATCH) {
            (true, true) => stream.launch(tile, &Bf16Narrow { input, weight, output, params }),
            (false, true) => stream.launch(tile, &Bf16Linear { input, weight, output, params }),
            (true, false) => {
                let params = RouterLogitsParams { tokens, experts: columns, hidden: inner };
                let operation = RouterLogits { x: input, gate: weight, logits: output, params };
                stream.launch(LogitsSplit::of(tokens, columns), &operation)
            }
            (false, false) => {
                let splits = tiled_splits(tokens, columns);
                let params = Bf16LinearManyParams { tokens, columns, inner, splits };
                stream.launch((), &Bf16LinearMany { input, weight, output, params })
            }
        }
    }
}

/// Number of thread blocks for each 192 of `tokens` tokens, in a product with `columns` columns.
#[must_use]
pub const fn tiled_splits(tokens: u32, columns: u32) -> u32 {
    tiled::splits(tokens, columns.div_ceil(tiled::COLUMNS), MULTIPROCESSORS)
}
