//! Tensors of a step for any number of layers, from one set of random rows. Layer `l` reads them from row `l` on, so
//! that a write to the pools of another layer shows in the bytes.

use dsv4_kv::device::{Backend, Buffer, Memory, Stream, bf16};
use dsv4_kv::step::CompressorInputs;
use dsv4_kv::{KvError, LayerId, Layers};
use kv_layout::geometry::{CompressorKind, LayerKind};

use crate::fed::{self, Updated};
use crate::history::{History, shape};
use crate::inputs::{rows, upload, upload_bf16};
use crate::stories::compressors;

const STREAMS: [CompressorKind; 3] =
    [CompressorKind::CsaMain, CompressorKind::CsaIndex, CompressorKind::Hca];

/// Window keys, and the projections and weights of each compressor.
pub struct Tensors<B: Backend> {
    /// The inputs of the three compressors; `kv` and `gate` have all rows.
    pub histories: [History; 3],
    kv: Buffer<B, bf16>,
    projections: [[Buffer<B, f32>; 2]; 3],
    weights: [[Buffer<B, f32>; 2]; 3],
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
            kv: upload_bf16(stream, &rows(count, seed).concat()),
            projections: each(|history| [&history.kv, &history.gate]),
            weights: each(|history| [&history.ape, &history.norm]),
            histories,
        }
    }

    /// Queues copies of the rows of `other` into these tensors; the weights stay.
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

    /// The window keys that `layer` reads.
    pub fn kv_of(&self, layer: LayerId) -> Buffer<B, bf16> {
        from_row(&self.kv, layer, 512)
    }

    /// Queues one layer's update.
    pub fn update<'s>(
        &self,
        layers: &'s mut Layers<'_, B>,
        layer: LayerId,
        kind: LayerKind,
    ) -> Result<Updated<'s, B>, KvError> {
        let own = STREAMS.iter().enumerate().filter(|(_, of)| compressors(kind).contains(of));
        let tensors: Vec<_> = own
            .map(|(at, &of)| {
                let columns = shape(of).columns() as u64;
                (self.projections[at].each_ref().map(|all| from_row(all, layer, columns)), at)
            })
            .collect();
        let inputs = tensors.iter().map(|([kv, gate], at)| {
            let [ape, norm] = &self.weights[*at];
            CompressorInputs { kv, gate, ape, norm }
        });
        fed::update(layers, layer, &self.kv_of(layer), &inputs.collect::<Vec<_>>())
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
