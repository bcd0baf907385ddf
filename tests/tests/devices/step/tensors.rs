//! Tensors of a step for any number of layers, from one set of random rows: layer `l` reads them from
//! row `l` on, so that a layer that writes to another's pools writes other bytes.

use std::sync::Arc;

use dsv4_kv::device::{Buffer, Device};
use dsv4_kv::handle::Projected;
use dsv4_kv::{KvCacheManager, KvError, LayerId};
use kv_layout::geometry::StateStream;

use crate::inputs::{rows, upload};
use crate::model::{History, shape};
use crate::stories::compressors;

const STREAMS: [StateStream; 3] = [StateStream::CsaMain, StateStream::CsaIndex, StateStream::Hca];

/// Window keys, and the projections and weights of each compressor.
pub struct Tensors<D: Device> {
    /// What the compressors are fed, one for each of them; `kv` and `gate` of all rows.
    pub histories: [History; 3],
    kv: Buffer<D, u16>,
    projections: [[Buffer<D, f32>; 2]; 3],
    weights: [[Buffer<D, f32>; 2]; 3],
}

/// One layer's part of [`Tensors`].
struct LayerTensors<'a, D: Device> {
    kv: Buffer<D, u16>,
    projections: Vec<[Buffer<D, f32>; 2]>,
    weights: Vec<&'a [Buffer<D, f32>; 2]>,
}

impl<D: Device> Tensors<D> {
    /// Random rows for steps of `tokens` tokens in `layers` layers.
    pub fn random(device: &D, stream: &D::Stream, tokens: usize, layers: usize, seed: u64) -> Self {
        let count = tokens + layers;
        let histories = STREAMS.map(|of| History::random(of, count, seed));
        let each = |of: fn(&History) -> [&[f32]; 2]| {
            histories.each_ref().map(|history| of(history).map(|x| upload(device, stream, x)))
        };
        Self {
            kv: upload(device, stream, &rows(count, seed).concat()),
            projections: each(|history| [&history.kv, &history.gate]),
            weights: each(|history| [&history.ape, &history.norm]),
            histories,
        }
    }

    /// Queues copies of `other`'s rows into these; the weights stay.
    pub fn copy_rows(&self, device: &D, stream: &D::Stream, other: &Self) {
        device.copy(stream, &other.kv, &self.kv).unwrap();
        let (from, to) = (other.projections.as_flattened(), self.projections.as_flattened());
        from.iter().zip(to).for_each(|(from, to)| device.copy(stream, from, to).unwrap());
    }

    /// All memory, for a graph to retain.
    pub fn memory(&self) -> Vec<Arc<D::Memory>> {
        let f32s = [self.projections.as_flattened(), self.weights.as_flattened()].concat();
        [self.kv.memory()].into_iter().chain(f32s.iter().map(Buffer::memory)).collect()
    }

    /// Window keys that `layer` reads.
    pub fn kv_of(&self, layer: LayerId) -> Buffer<D, u16> {
        from_row(&self.kv, layer, 512)
    }

    fn of(&self, manager: &KvCacheManager<D>, layer: LayerId) -> LayerTensors<'_, D> {
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
        manager: &KvCacheManager<D>,
        stream: &D::Stream,
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

impl<D: Device> LayerTensors<'_, D> {
    fn projected(&self) -> Vec<Projected<'_, D>> {
        let both = self.projections.iter().zip(&self.weights);
        both.map(|([kv, gate], [ape, norm])| Projected { kv, gate, ape, norm }).collect()
    }
}

/// The rows of a tensor from row `layer` on.
fn from_row<D: Device, T: bytemuck::Pod>(
    all: &Buffer<D, T>,
    layer: LayerId,
    columns: u64,
) -> Buffer<D, T> {
    let first = u64::from(layer.0) * columns;
    all.slice(first, all.len() - first).unwrap()
}
