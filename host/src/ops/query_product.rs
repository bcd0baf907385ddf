//! Queries of the indexer from activations.

use dsv4_kv_linear::Nvfp4Linear;
use dsv4_kv_linear::ops::{Bf16Weight, tiled_splits};
use kernels_gpu::launch::{Bf16IndexQuery, Nvfp4IndexQuery};
use kernels_gpu::params::{Bf16IndexQueryParams, Nvfp4IndexQueryParams};
use kv_layout::geometry::INDEX_DIM;
use kv_layout::index_row::{IndexFormat, QUERY_HEADS};
use kv_layout::linear::LinearTile;

use super::{IndexQueries, StepQueries, check_equal};
use crate::device::{Backend, DeviceError, Stream, View, bf16};

/// Arguments of a query projection with weight `W`: activations, and the queries made from them in
/// the form that scores take.
pub struct QueryProduct<'a, B: Backend, W> {
    /// The queries.
    pub queries: &'a StepQueries<'a, B>,
    /// `[queries, inner]` BF16: the normed latent.
    pub latent: &'a View<B, bf16>,
    /// `[heads * 128, inner]`.
    pub weight: W,
    /// `[queries, heads]` f32: the heads' weights, projected.
    pub projected_weight: &'a View<B, f32>,
    /// `[32]` f32, the rotary frequencies of compressed layers.
    pub frequencies: &'a View<B, f32>,
    /// The format of the keys.
    pub format: IndexFormat,
    /// The resulting queries.
    pub to: &'a IndexQueries<'a, B>,
}

/// Queues `nvfp4_index_query_*`: the product with the query weight, then as [`super::index_query`], in one launch.
/// Padding stays untouched. Each 32 queries read all of the weight.
///
/// # Errors
/// [`DeviceError::Argument`] for too many heads, queries past `u32::MAX`, or a weight that does not have 128 columns a head;
/// [`DeviceError::TooShort`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn nvfp4_index_query<B: Backend>(
    stream: &Stream<B>,
    product: &QueryProduct<'_, B, &Nvfp4Linear<B>>,
) -> Result<(), DeviceError> {
    let QueryProduct { queries, latent, weight, projected_weight, frequencies, format, to } =
        *product;
    let (first, tokens, heads) = (queries.first, queries.count, to.heads);
    if tokens == 0 {
        return Ok(());
    }
    queries.check()?;
    to.check()?;
    let columns = heads * INDEX_DIM;
    check_equal("columns of the query weight", weight.columns(), columns)?;
    let operation = Nvfp4IndexQuery {
        input: latent.ptr(),
        codes: weight.codes().ptr(),
        scales: weight.scales().ptr(),
        projected_weight: projected_weight.ptr(),
        frequencies: frequencies.ptr(),
        token_position: queries.position.ptr(),
        token_slot: queries.slot.ptr(),
        query: to.query.ptr_mut(),
        weight: to.weight.ptr_mut(),
        params: Nvfp4IndexQueryParams {
            first,
            tokens,
            heads,
            inner: weight.inner(),
            scale_bits: weight.scale().to_bits(),
        },
    };
    // SAFETY: the launch checks every buffer; no launch writes an `Nvfp4Linear`.
    unsafe { stream.launch((format, LinearTile::of(tokens)), &operation) }
}

/// Queues `bf16_index_query_*`: the product with the query weight, then as [`super::index_query`], in one launch. With
/// more than two heads it has the bits of `dsv4_kv_linear::multiply_bf16` and `index_query`; of one or two heads that
/// product sums in another order. Padding stays untouched. For chunks of prompts: with few queries, the launch would
/// have too few blocks.
///
/// # Errors
/// [`DeviceError::Argument`] for too many heads, queries past `u32::MAX`, a weight that does not have 128 columns a head, or rows that are no
/// multiple of 32; [`DeviceError::TooShort`] for a buffer shorter than its shape; as [`Stream::launch`].
pub fn bf16_index_query<B: Backend>(
    stream: &Stream<B>,
    product: &QueryProduct<'_, B, Bf16Weight<'_, B>>,
) -> Result<(), DeviceError> {
    let QueryProduct { queries, latent, ref weight, projected_weight, frequencies, format, to } =
        *product;
    let (first, tokens, heads) = (queries.first, queries.count, to.heads);
    if tokens == 0 {
        return Ok(());
    }
    queries.check()?;
    to.check()?;
    weight.check()?;
    let Bf16Weight { values, columns, inner } = *weight;
    check_equal("columns of the query weight", columns, heads * INDEX_DIM)?;
    // The launch always has tiles for all 64 heads, also for those that the model does not have.
    let splits = tiled_splits(tokens, QUERY_HEADS * INDEX_DIM);
    let operation = Bf16IndexQuery {
        input: latent.ptr(),
        query_weight: values.ptr(),
        projected_weight: projected_weight.ptr(),
        frequencies: frequencies.ptr(),
        token_position: queries.position.ptr(),
        token_slot: queries.slot.ptr(),
        query: to.query.ptr_mut(),
        weight: to.weight.ptr_mut(),
        params: Bf16IndexQueryParams { first, tokens, heads, inner, splits },
    };
    // SAFETY: the launch checks every buffer.
    unsafe { stream.launch(format, &operation) }
}
