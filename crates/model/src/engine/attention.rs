//! Attention of a layer in a step: copies inputs to the device, updates the layer, and copies gathered rows to the
//! host, or runs attention on the device and copies its results.

use dsv4_kv::{CapturedStep, LayerId, Step};
use dsv4_kv_device::{Backend, Stream};
use ndarray::{Array2, ArrayView2, Axis, concatenate, s};

use super::buffers::Buffers;
use super::device_layer::DeviceLayer;
use super::place::Place;
use super::tile::TILE_QUERIES;
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
    /// The graph of its launches, if the step fits the graph's bucket.
    pub graph: Option<&'r CapturedStep<B>>,
}

/// Attention over the step's tokens: from its input `x`, `[tokens, hidden]`, to the result that joins the streams,
/// `[tokens, hidden]`.
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
    let query = queries.view();
    let attended = match run.graph {
        Some(graph) => replay(step, run, graph, (query, positions), probe)?,
        None => eager(step, run, (query, positions), probe)?,
    };
    Ok(attention.project_output(attended.view()))
}

/// Queries, `[tokens, heads * 512]`, and their positions.
type Queries<'q> = (ArrayView2<'q, f32>, &'q [u32]);

/// Launches the layer's kernels one by one, for one tile of queries at a time: the rows of a long chunk would not fit
/// in memory. The append comes last, since the first queries of a chunk need the rows that it overwrites.
fn eager<B: Backend>(
    step: &mut Step<'_, B>,
    run: &LayerRun<'_, B>,
    (queries, positions): Queries<'_>,
    probe: &mut impl Probe,
) -> Result<Array2<f32>, ModelError> {
    let LayerRun { id, device, buffers, .. } = run;
    let updated = Updated::update(step, *id, device, buffers)?;
    let (mut parts, tokens) = (Vec::new(), positions.len());
    for first in (0..tokens).step_by(TILE_QUERIES as usize) {
        let range = first..tokens.min(first + TILE_QUERIES as usize);
        let tile = (queries.slice(s![range.clone(), ..]), &positions[range.clone()]);
        buffers.place.upload(updated.stream(), tile.0)?;
        updated.attend(device, buffers, range.start as u32..range.end as u32)?;
        parts.push(run.attended(updated.stream(), tile, probe)?);
    }
    updated.append()?;
    let views: Vec<_> = parts.iter().map(|part| part.view()).collect();
    Ok(concatenate(Axis(0), &views).expect("as wide as the queries"))
}

/// Replays the layer's launches as one graph.
fn replay<B: Backend>(
    step: &mut Step<'_, B>,
    run: &LayerRun<'_, B>,
    graph: &CapturedStep<B>,
    queries: Queries<'_>,
    probe: &mut impl Probe,
) -> Result<Array2<f32>, ModelError> {
    run.buffers.place.upload(step.stream(), queries.0)?;
    step.replay(graph)?;
    run.attended(step.stream(), queries, probe)
}

impl<B: Backend> LayerRun<'_, B> {
    /// Waits for the work of a tile of queries. Returns their weighted sums, `[tokens, heads * 512]`.
    fn attended(
        &self,
        stream: &Stream<B>,
        (queries, positions): Queries<'_>,
        probe: &mut impl Probe,
    ) -> Result<Array2<f32>, ModelError> {
        let Self { id, weights, buffers, .. } = self;
        let (kind, count) = (weights.compressed.kind(), positions.len());
        let lists = buffers.download_lists(stream, kind, count)?;
        lists.iter().for_each(|lists| probe.selected(id.0 as usize, lists));
        Ok(match &buffers.place {
            Place::Device(heads) => heads.download(stream, count)?,
            Place::Host { window, entries } => {
                let (tiles, lists) = ((window, entries), lists.as_ref());
                let keys = buffers.download_keys(stream, tiles, (kind, count), lists)?;
                weights.attention.attend(queries, &keys, positions)
            }
        })
    }
}
