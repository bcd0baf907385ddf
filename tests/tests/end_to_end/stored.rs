//! The contents of the cache: entries and indexer keys of a request, as bytes.

use anyhow::{Context, Result};
use dsv4_kv::device::Backend;
use dsv4_kv::kv_layout::geometry::{BLOCK_TOKENS, LayerKind};
use dsv4_kv::kv_layout::main_row::DATA_BYTES;
use dsv4_kv::{LayerId, PoolKind, RequestId};
use dsv4_kv_model::Engine;
use dsv4_kv_oracle::explain::Stored;

/// The entries of a layer, oldest first; none in layers without entries.
pub fn entries<B: Backend>(engine: &Engine<B>, layer: usize, id: RequestId) -> Result<Vec<Stored>> {
    let scale = engine.cache().config().main_format.scale_bytes();
    let planes = [(PoolKind::EntryData, DATA_BYTES), (PoolKind::EntryScale, scale)];
    rows(engine, layer, id, planes)
}

/// The indexer keys of a CSA layer, oldest first.
pub fn keys<B: Backend>(engine: &Engine<B>, layer: usize, id: RequestId) -> Result<Vec<Stored>> {
    let format = engine.cache().config().index_format;
    let planes =
        [(PoolKind::IndexCode, format.code_bytes()), (PoolKind::IndexScale, format.scale_bytes())];
    rows(engine, layer, id, planes)
}

fn rows<B: Backend>(
    engine: &Engine<B>,
    layer: usize,
    id: RequestId,
    planes: [(PoolKind, u64); 2],
) -> Result<Vec<Stored>> {
    let cache = engine.cache();
    let kind = cache.config().model.layers[layer];
    if kind == LayerKind::Swa {
        return Ok(Vec::new());
    }
    let per_block = kind.entries_per_block();
    let tokens = cache.ledger().committed(id)?;
    let entries = tokens / (BLOCK_TOKENS / per_block);
    let blocks = cache.block_table(id)?;
    let stream = cache.device().stream()?;
    let mut stored = Vec::new();
    for entry in 0..entries {
        let block = blocks.get((entry / per_block) as usize).context("an entry has its block")?;
        let row = u64::from(block.0) * u64::from(per_block) + u64::from(entry % per_block);
        let [data, scale] = planes.map(|(pool, bytes)| -> Result<Vec<u8>> {
            let mut values = vec![0; bytes as usize];
            let pool = cache.pool(LayerId(layer as u32), pool)?;
            stream.download(&pool, row * bytes, &mut values)?;
            Ok(values)
        });
        stored.push(Stored { data: data?, scale: scale? });
    }
    Ok(stored)
}
