//! Attention of a layer in a step: inputs to the device, update, gathers, and rows back to the host.

use std::ops::Range;

use dsv4_kv::{CapturedStep, LayerId, Step};
use dsv4_kv_device::Backend;
use ndarray::{Array2, ArrayView2, Axis, concatenate, s};

use super::buffers::{Buffers, TILE_QUERIES};
use super::device_layer::DeviceLayer;
use super::updated::Updated;
use crate::error::ModelError;
use crate::layer::Layer;
use crate::probe::Probe;

/// A layer in a step.
pub struct LayerRun<'r, B: Backend> {
    pub id: LayerId,
    pub weights: &'r Layer,
    pub device: &'r DeviceLayer<B>,
    pub buffers: &'r Buffers<B>,
    /// Its launches as a graph, if the step is one of its bucket.
    pub graph: Option<&'r CapturedStep<B>>,
}

/// Attention over the step's tokens: from what the layer reads, `x` (`[tokens, hidden]`), to what joins the
/// streams, `[tokens, hidden]`.
pub fn attend<B: Backend>(
    step: &mut Step<'_, B>,
    run: &LayerRun<'_, B>,
    x: ArrayView2<'_, f32>,
    positions: &[u32],
    probe: &mut impl Probe,
) -> Result<Array2<f32>, ModelError> {
    let LayerRun { weights, buffers, .. } = run;
    let attention = &weights.attention;
    let latent = attention.latent(x);
    let queries = attention.queries(latent.view(), positions);
    let rows = attention.window_rows(x, positions);
    buffers.upload(step.stream(), &weights.compressed, &rows, x, latent.view())?;
    let mut tile = |range: Range<usize>, keys: &[Vec<f32>]| {
        attention.attend(queries.slice(s![range.clone(), ..]), keys, &positions[range])
    };
    let attended = match run.graph {
        Some(graph) => replay(step, run, graph, positions.len(), &mut tile, probe)?,
        None => eager(step, run, positions.len(), &mut tile, probe)?,
    };
    Ok(attention.project_output(attended.view()))
}

/// The layer's launches one by one, a tile of queries at a time: the rows of a long chunk would fill the
/// memory. The append comes last, since the first queries of a chunk need the rows that it replaces.
fn eager<B: Backend>(
    step: &mut Step<'_, B>,
    run: &LayerRun<'_, B>,
    tokens: usize,
    attend: &mut impl FnMut(Range<usize>, &[Vec<f32>]) -> Array2<f32>,
    probe: &mut impl Probe,
) -> Result<Array2<f32>, ModelError> {
    let LayerRun { id, device, buffers, .. } = run;
    let updated = Updated::update(step, *id, device, buffers)?;
    let mut parts = Vec::new();
    for first in (0..tokens).step_by(TILE_QUERIES as usize) {
        let range = first..tokens.min(first + TILE_QUERIES as usize);
        updated.gather(device, buffers, range.start as u32..range.end as u32)?;
        let tile = buffers.download(updated.stream(), updated.kind(), range.len())?;
        tile.lists.iter().for_each(|lists| probe.selected(id.0 as usize, lists));
        parts.push(attend(range, &tile.keys));
    }
    updated.append()?;
    let views: Vec<_> = parts.iter().map(|part| part.view()).collect();
    Ok(concatenate(Axis(0), &views).expect("as wide as the queries"))
}

/// The layer's launches as one graph.
fn replay<B: Backend>(
    step: &mut Step<'_, B>,
    run: &LayerRun<'_, B>,
    graph: &CapturedStep<B>,
    tokens: usize,
    attend: &mut impl FnMut(Range<usize>, &[Vec<f32>]) -> Array2<f32>,
    probe: &mut impl Probe,
) -> Result<Array2<f32>, ModelError> {
    step.replay(graph)?;
    let tile = run.buffers.download(step.stream(), run.weights.compressed.kind(), tokens)?;
    tile.lists.iter().for_each(|lists| probe.selected(run.id.0 as usize, lists));
    Ok(attend(0..tokens, &tile.keys))
}
