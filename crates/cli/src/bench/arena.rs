//! What a kernel loses when the blocks or slots of its layer lie apart, with the other layers' between them,
//! as in one arena that holds a block of all layers in one piece.
//!
//! Each row is measured twice: with the units of a layer packed in a pool of its own, and with units as many
//! of that layer's sizes apart as all layers' have bytes. Scales lie in a plane of their own either way. The
//! arena is as large as a real one, and units are drawn from all of it.

use anyhow::{Context, Result, ensure};
use dsv4_kv::device::{Backend, Device};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::schema::{PoolUnit, Schema};
use dsv4_kv::{CacheConfig, PoolKind};
use indicatif::ProgressBar;

use super::indexer::Node;
use super::placement::Placement;
use super::timing::Measurement;
use super::{gather, indexer, swa};

/// Bytes of all layers' blocks.
const BLOCKS: [u64; 2] = [40 << 30, 96 << 30];
/// Slots.
const SLOTS: u64 = 512;
/// Drafts of the cache that has them.
const DRAFTS: u32 = 4;

/// One kernel, and its sizes.
#[derive(Clone, Copy)]
pub(super) enum Kernel {
    /// Entries of a list, and queries.
    GatherList(u32, u32),
    /// Entries that a query sees, and queries.
    GatherAll(u32, u32),
    /// Entries that a query sees, and queries.
    Scores(u32, u32),
    /// Requests, a token each.
    Append(u32),
    /// Queries.
    GatherWindow(u32),
}

/// What is measured in each arena.
const KERNELS: [Kernel; 9] = [
    Kernel::GatherList(512, 32),
    Kernel::GatherList(1024, 256),
    Kernel::GatherAll(1024, 32),
    Kernel::GatherAll(8192, 32),
    Kernel::Scores(2048, 256),
    Kernel::Scores(32_768, 32),
    Kernel::Append(32),
    Kernel::Append(256),
    Kernel::GatherWindow(256),
];

pub(super) fn measure<B: Backend>(
    device: &Device<B>,
    progress: &ProgressBar,
) -> Result<Vec<Measurement>> {
    let mut results = Vec::new();
    for model in ["flash", "pro"] {
        for blocks in BLOCKS {
            let arena = Arena::new(model, blocks, SLOTS)?;
            for kernel in KERNELS {
                progress.set_message(format!("arena of {model}, {} GiB", blocks >> 30));
                results.extend(arena.measure(device, kernel)?);
            }
        }
    }
    Ok(results)
}

/// The memory of a cache: `blocks` bytes of blocks, and slots.
pub(super) struct Arena {
    config: CacheConfig,
    blocks: u64,
    slots: u64,
}

impl Arena {
    pub(super) fn new(model: &str, blocks: u64, slots: u64) -> Result<Self> {
        let model = ModelConfig::preset(model).context("a preset")?;
        let config = CacheConfig { max_draft: DRAFTS, ..CacheConfig::smallest(model) };
        Ok(Self { config, blocks, slots })
    }

    /// Times `kernel` with units packed, and with units apart.
    pub(super) fn measure<B: Backend>(
        &self,
        device: &Device<B>,
        kernel: Kernel,
    ) -> Result<[Measurement; 2]> {
        let apart = self.apart(kernel)?;
        let packed = Placement { apart: 1, ..apart };
        let run = |placement| self.run(device, kernel, placement);
        Ok([run(packed)?, run(apart)?])
    }

    /// The placement of the units that `kernel` touches in one arena.
    fn apart(&self, kernel: Kernel) -> Result<Placement> {
        let (of, pool) = match kernel {
            Kernel::GatherList(..) => (LayerKind::Csa, PoolKind::EntryData),
            Kernel::GatherAll(..) => (LayerKind::Hca, PoolKind::EntryData),
            Kernel::Scores(..) => (LayerKind::Csa, PoolKind::IndexCode),
            Kernel::Append(_) | Kernel::GatherWindow(_) => (LayerKind::Csa, PoolKind::SwaData),
        };
        let schema = Schema::new(&self.config);
        let layer = schema.layers.iter().find(|layer| layer.kind == of);
        let pool = layer.and_then(|layer| layer.pool(pool)).context("a pool of the model")?;
        let (all, units) = match pool.unit {
            PoolUnit::Block => (schema.block_bytes(), self.blocks / schema.block_bytes()),
            PoolUnit::Slot => (schema.slot_bytes(), self.slots),
        };
        ensure!(units > 0, "{} bytes hold no block of {all} bytes", self.blocks);
        let apart = all.div_ceil(pool.unit_bytes());
        Ok(Placement { units, layers: self.config.model.count(of).into(), apart })
    }

    fn run<B: Backend>(
        &self,
        device: &Device<B>,
        kernel: Kernel,
        placement: Placement,
    ) -> Result<Measurement> {
        let (main, index) = (self.config.main_format, self.config.index_format);
        let given = Some(placement);
        let measured = match kernel {
            Kernel::GatherList(rows, queries) => {
                gather::gather_kv(device, main, (rows, queries), given)
            }
            Kernel::GatherAll(rows, queries) => {
                gather::gather_all(device, main, (rows, queries), given)
            }
            Kernel::Scores(entries, queries) => {
                indexer::scores(device, index, (entries, queries), Node::Scores, given)
            }
            Kernel::Append(requests) => swa::append(device, main, (requests, 1), given),
            Kernel::GatherWindow(requests) => swa::gather(device, main, requests, given),
        }?;
        let Placement { units, apart, .. } = placement;
        let lie = if apart == 1 { String::from("packed") } else { format!("{apart} apart") };
        let size = format!("{}, {}: {units} units {lie}", measured.size, self.config.model.name);
        Ok(Measurement { size, ..measured })
    }
}
