//! Tensors of a step for any number of layers, from one set of random rows: layer `l` reads them from
//! row `l` on, so that a layer that writes to another's pools writes other bytes.

use dsv4_kv::device::{Backend, Buffer, Memory, Stream};
use dsv4_kv::handle::Projected;
use dsv4_kv::{KvCacheManager, KvError, LayerId};
use kv_layout::geometry::StateStream;

use crate::inputs::{rows, upload};
use crate::model::{History, shape};
use crate::stories::compressors;

const STREAMS: [StateStream; 3] = [StateStream::CsaMain, StateStream::CsaIndex, StateStream::Hca];

/// Window keys, and the projections and weights of each compressor.
pub struct Tensors<B: Backend> {
    /// What the compressors are fed, one for each of them; `kv` and `gate` of all rows.
    pub histories: [History; 3],
    kv: Buffer<B, u16>,
    projections: [[Buffer<B, f32>; 2]; 3],
    weights: [[Buffer<B, f32>; 2]; 3],
}

/// One layer's part of [`Tensors`].
struct LayerTensors<'a, B: Backend> {
    kv: Buffer<B, u16>,
    projections: Vec<[Buffer<B, f32>; 2]>,
    weights: Vec<&'a [Buffer<B, f32>; 2]>,
}

impl<B: Backend> Tensors<B> {
    /// Random rows for steps of `tokens` tokens in `layers` layers.
    pub fn random(stream: &Stream<B>, tokens: usize, layers: usize, seed: u64) -> Self {
        let count = tokens + layers;
        let histories = STREAMS.map(|of| History::random(of, count, seed));
        let each = |of: fn(&History) -> [&[f32]; 2]| {
            histories.each_ref().map(|history| of(history).map(|x| upload(stream, x)))
        };
        Self {
            kv: upload(stream, &rows(count, seed).concat()),
            projections: each(|history| [&history.kv, &history.gate]),
            weights: each(|history| [&history.ape, &history.norm]),
            histories,
        }
    }

    /// Queues copies of `other`'s rows into these; the weights stay.
    pub fn copy_rows(&self, stream: &Stream<B>, other: &Self) {
        stream.copy(&other.kv, &self.kv).unwrap();
        let (from, to) = (other.projections.as_flattened(), self.projections.as_flattened());
        from.iter().zip(to).for_each(|(from, to)| stream.copy(from, to).unwrap());
    }

    /// All memory, for a graph to retain.
    pub fn memory(&self) -> Vec<Memory<B>> {
        let f32s = [self.projections.as_flattened(), self.weights.as_flattened()].concat();
        [self.kv.memory()].into_iter().chain(f32s.iter().map(Buffer::memory)).collect()
    }

    /// Window keys that `layer` reads.
    pub fn kv_of(&self, layer: LayerId) -> Buffer<B, u16> {
        from_row(&self.kv, layer, 512)
    }

    fn of(&self, manager: &KvCacheManager<B>, layer: LayerId) -> LayerTensors<'_, B> {
        let kind = manager.config().model.layers[layer.0 as usize];
        let streams = STREAMS.iter().enumerate();
        let own = || streams.clone().filter(|(_, of)| compressors(kind).contains(of));
        LayerTensors {
            kv: self.kv_of(layer),
            projections: own()
                .map(|(at, &of)| {
                    let columns = shape(of).columns() as u64;
                    self.projections[at].each_ref().map(|all| from_row(all, layer, columns))
                })
                .collect(),
            weights: own().map(|(at, _)| &self.weights[at]).collect(),
        }
    }

    /// Queues one layer's append and update in launches of `bucket` tokens: by the separate kernels, or
    /// fused, which takes one token a request.
    pub fn update(
        &self,
        manager: &KvCacheManager<B>,
        stream: &Stream<B>,
        layer: LayerId,
        bucket: u32,
        fused: bool,
    ) -> Result<(), KvError> {
        let (tensors, handle) = (self.of(manager, layer), manager.layer_for(layer, bucket)?);
        let (kv, projected) = (&tensors.kv, tensors.projected());
        match projected.as_slice() {
            [hca] if fused => return handle.decode_hca(stream, kv, hca),
            [main, index] if fused => return handle.decode_csa(stream, kv, main, index),
            _ => handle.append_swa(stream, kv)?,
        }
        match projected.as_slice() {
            [] => Ok(()),
            [hca] => handle.update_hca(stream, hca),
            [main, index, ..] => handle.update_csa(stream, main, index),
        }
    }
}

impl<B: Backend> LayerTensors<'_, B> {
    fn projected(&self) -> Vec<Projected<'_, B>> {
        let both = self.projections.iter().zip(&self.weights);
        both.map(|([kv, gate], [ape, norm])| Projected { kv, gate, ape, norm }).collect()
    }
}

/// The rows of a tensor from row `layer` on.
fn from_row<B: Backend, T: bytemuck::Pod>(
    all: &Buffer<B, T>,
    layer: LayerId,
    columns: u64,
) -> Buffer<B, T> {
    let first = u64::from(layer.0) * columns;
    all.slice(first, all.len() - first).unwrap()
}
