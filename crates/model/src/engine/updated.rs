//! A layer of any kind after its update.

use std::ops::Range;

use dsv4_kv::indexer::Activations;
use dsv4_kv::step::{Csa, CsaInputs, Hca, HcaInputs, Swa, UpdatedLayer};
use dsv4_kv::{KvError, LayerId, Layers};
use dsv4_kv_device::{Backend, Stream};

use super::buffers::Buffers;
use super::device_layer::{DeviceCompressed, DeviceLayer};
use super::place::Place;
use super::tile::Tile;

/// A layer whose update is queued.
pub enum Updated<'s, B: Backend> {
    /// A layer with only a window.
    Swa(UpdatedLayer<'s, B, Swa>),
    /// A layer with entries, of which the indexer picks some.
    Csa(UpdatedLayer<'s, B, Csa>),
    /// A layer with entries, which are all read.
    Hca(UpdatedLayer<'s, B, Hca>),
}

impl<'s, B: Backend> Updated<'s, B> {
    /// Queues the update of layer `id` with the inputs in the buffers.
    pub fn update(
        layers: &'s mut Layers<'_, B>,
        id: LayerId,
        device: &DeviceLayer<B>,
        buffers: &Buffers<B>,
    ) -> Result<Self, KvError> {
        let kv = &buffers.kv;
        Ok(match device.compressed() {
            DeviceCompressed::Swa => Self::Swa(layers.swa(id)?.update(kv)?),
            DeviceCompressed::Csa { main, index, .. } => {
                let main = main.inputs(&buffers.main.kv, &buffers.main.gate);
                let index = index.inputs(&buffers.index.kv, &buffers.index.gate);
                Self::Csa(layers.csa(id)?.update(&CsaInputs { kv, main, index })?)
            }
            DeviceCompressed::Hca { main } => {
                let main = main.inputs(&buffers.main.kv, &buffers.main.gate);
                Self::Hca(layers.hca(id)?.update(&HcaInputs { kv, main })?)
            }
        })
    }

    /// Queues the device's part of attention for these queries: the indexer, then the gathers or attention itself.
    pub fn attend(
        &self,
        device: &DeviceLayer<B>,
        buffers: &Buffers<B>,
        queries: Range<u32>,
    ) -> Result<(), KvError> {
        if let Self::Csa(layer) = self {
            select(layer, device, buffers, queries.clone())?;
        }
        match &buffers.place {
            Place::Host { window, entries } => self.gather(buffers, (window, entries), queries),
            Place::Device(heads) => {
                heads.with(queries.len() as u32, device.sinks(), |heads| match self {
                    Self::Swa(layer) => layer.attend(queries, heads),
                    Self::Hca(layer) => layer.attend(queries, heads),
                    Self::Csa(layer) => {
                        layer.attend(queries.clone(), &buffers.entry_lists(queries), heads)
                    }
                })
            }
        }
    }

    /// Queues the gathers of these queries' rows, into the tiles.
    fn gather(
        &self,
        buffers: &Buffers<B>,
        (window, entries): (&Tile<B>, &Tile<B>),
        queries: Range<u32>,
    ) -> Result<(), KvError> {
        let (tile, lengths) = (&window.rows, &window.lengths);
        match self {
            Self::Swa(layer) => layer.gather_window(queries, tile, lengths),
            Self::Hca(layer) => {
                layer.gather_window(queries.clone(), tile, lengths)?;
                layer.gather_all(queries, buffers.most_all, &entries.rows, &entries.lengths)
            }
            Self::Csa(layer) => {
                layer.gather_window(queries.clone(), tile, lengths)?;
                layer.gather_entries(queries.clone(), &buffers.entry_lists(queries), &entries.rows)
            }
        }
    }

    /// Queues the append, the last launch of the layer.
    pub fn append(self) -> Result<(), KvError> {
        match self {
            Self::Swa(layer) => layer.append(),
            Self::Csa(layer) => layer.append(),
            Self::Hca(layer) => layer.append(),
        }
    }

    /// The stream of the step.
    pub fn stream(&self) -> &Stream<B> {
        match self {
            Self::Swa(layer) => layer.stream(),
            Self::Csa(layer) => layer.stream(),
            Self::Hca(layer) => layer.stream(),
        }
    }
}

/// Queues the indexer of a CSA layer for these queries.
fn select<B: Backend>(
    layer: &UpdatedLayer<'_, B, Csa>,
    device: &DeviceLayer<B>,
    buffers: &Buffers<B>,
    queries: Range<u32>,
) -> Result<(), KvError> {
    let DeviceCompressed::Csa { indexer, .. } = device.compressed() else {
        unreachable!("a CSA layer has a CSA layer's weights")
    };
    let (latent, hidden) = buffers.activations(queries.clone());
    let activations = Activations { latent: &latent, hidden: &hidden };
    layer.select(indexer, &activations, &buffers.workspace, &buffers.entry_lists(queries))
}
