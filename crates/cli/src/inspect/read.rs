//! Reads blocks, rings and rows of a request from the cache and from the device's memory.

use anyhow::{Context, Result};
use dsv4_kv::device::Emulator;
use dsv4_kv::kv_layout::geometry::{
    BLOCK_TOKENS, CSA_RATIO, CompressorKind, HCA_RATIO, LayerKind, WINDOW,
};
use dsv4_kv::{KvCacheManager, LayerGroup, LayerId, Ledger, PoolKind, RequestId};
use dsv4_kv_oracle::number::bf16_value;
use dsv4_kv_oracle::row::EncodedRow;

use super::args::InspectArgs;
use super::report::{Block, Kept, Report, Ring};
use super::rows::Row;
use crate::error::InputError;
use crate::replay::drive::Drive;
use crate::replay::entries::{self, Planes, row_format};
use crate::replay::full::Full;
use crate::replay::history::{Place, Prefix};
use crate::replay::source::Source;

/// The replay that is inspected.
type Driven<'l> = Drive<'l, Full<Emulator>>;

/// Reads what the cache of `drive` holds for request `index` of the load, which reused `reused` tokens, after `steps`
/// steps.
pub fn report(
    args: &InspectArgs,
    drive: &Driven<'_>,
    (index, reused): (usize, u32),
    steps: u64,
) -> Result<Report> {
    let full = drive.cache();
    let cache = full.cache();
    let id = drive.id_of(index).context("it runs")?;
    let tokens = cache.ledger().committed(id)?;
    let model = &cache.config().model;
    let first_csa = model.layers.iter().position(|&kind| kind == LayerKind::Csa).unwrap_or(0);
    let layer = args.layer.unwrap_or(first_csa as u32);
    let position = args.position.unwrap_or(tokens - 1);
    let window = tokens.saturating_sub(WINDOW)..tokens;
    if !window.contains(&position) {
        return Err(
            InputError::NotInWindow { position, first: window.start, last: tokens - 1 }.into()
        );
    }
    let history: Vec<_> = Prefix::EMPTY.each(&drive.tokens_of(index, tokens)).collect();
    let is_draft = cache.config().group_layers(LayerGroup::Draft).contains(&layer);
    let without_rows = if is_draft { reused as usize } else { 0 };
    let place = Place { request: index, layer: LayerId(layer), history: &history, without_rows };
    let mut rows = vec![window_row(full, id, place, position)?];
    rows.extend(entry_row(full, id, place, position)?);
    Ok(Report {
        model: model.name.clone(),
        steps,
        request: index,
        slot: id.slot().0,
        tokens,
        blocks: blocks(drive, index, id)?,
        rings: rings(cache, tokens),
        kept: kept(&cache.ledger()),
        rows,
    })
}

/// A token's row of the window. If the token was reused, a draft layer may have no row of it: the ring is zero there.
fn window_row(
    full: &Full<Emulator>,
    id: RequestId,
    place: Place<'_>,
    position: u32,
) -> Result<Row> {
    let layer = place.layer;
    let ring = |plane| ring_row(full, id, (layer, plane), position);
    let stored = EncodedRow { data: ring(PoolKind::SwaData)?, scale: ring(PoolKind::SwaScale)? };
    let what = format!("window row of token {position} in layer {}", layer.0);
    let (at, mut bytes) = (position as usize, stored.data.iter().chain(&stored.scale));
    if at < place.without_rows && bytes.all(|&byte| byte == 0) {
        return Ok(Row::absent(what));
    }
    let from = Source::row_of(place.history[at], Source::row_set(layer.0));
    let from: Vec<_> = full.source().row(from).iter().map(|&bits| bf16_value(bits)).collect();
    let format = row_format(full.cache().config().main_format);
    Ok(Row::new(what, format, &stored, &from))
}

/// The last compressed entry that a token sees; none in a layer without entries, and before the first one.
fn entry_row(
    full: &Full<Emulator>,
    id: RequestId,
    place: Place<'_>,
    position: u32,
) -> Result<Option<Row>> {
    let (cache, layer) = (full.cache(), place.layer);
    let (which, ratio) = match cache.config().model.layers[layer.0 as usize] {
        LayerKind::Swa => return Ok(None),
        LayerKind::Csa => (CompressorKind::CsaMain, CSA_RATIO),
        LayerKind::Hca => (CompressorKind::Hca, HCA_RATIO),
    };
    let Some(entry) = ((position + 1) / ratio).checked_sub(1) else { return Ok(None) };
    let entry = entry as usize;
    let blocks: Vec<_> = cache.block_table(id)?.into_iter().map(|block| block.0).collect();
    let planes = Planes::of(cache, layer, which)?;
    let stored = planes.fetch(full.stream(), &blocks, entry..entry + 1)?.row(0);
    let stored = EncodedRow { data: stored.data, scale: stored.scale };
    let from = entries::entry(full.source(), place, which, entry);
    let what = format!("entry {entry} of {ratio} tokens each in layer {}", layer.0);
    Ok(Some(Row::new(what, row_format(cache.config().main_format), &stored, &from)))
}

/// The counts of the whole cache.
fn kept(ledger: &Ledger) -> Kept {
    let counts = ledger.tree_counts();
    Kept {
        blocks: counts.blocks,
        evictable_blocks: counts.evictable_blocks,
        checkpoints: counts.checkpoints,
        free_blocks: ledger.free_blocks(),
        total_blocks: ledger.total_blocks(),
    }
}

/// Reads a token's row from a plane of a layer's window ring.
fn ring_row(
    full: &Full<Emulator>,
    id: RequestId,
    (layer, plane): (LayerId, PoolKind),
    position: u32,
) -> Result<Vec<u8>> {
    let cache = full.cache();
    let schema = cache.schema().layers[layer.0 as usize].pool(plane);
    let ring = schema.context("every layer has a window")?;
    let row = u64::from(id.slot().0) * u64::from(ring.rows) + u64::from(position % ring.rows);
    let mut bytes = vec![0; ring.row_bytes as usize];
    full.stream().download(&cache.pool(layer, plane)?, row * ring.row_bytes, &mut bytes)?;
    Ok(bytes)
}

/// The block table, and the other owners of each block.
fn blocks(drive: &Driven<'_>, index: usize, id: RequestId) -> Result<Vec<Block>> {
    let cache = drive.cache().cache();
    let tables = drive.progress().filter(|(of, _)| *of != index).map(|(of, _)| {
        let id = drive.id_of(of).context("it runs")?;
        Ok((of, cache.block_table(id)?))
    });
    let tables = tables.collect::<Result<Vec<_>>>()?;
    let own: Vec<_> = cache.ledger().own_blocks(id)?.collect();
    let shared_with = |place: usize, block| {
        let has = |table: &[dsv4_kv::BlockId]| table.get(place) == Some(&block);
        let mut with: Vec<_> =
            tables.iter().filter(|(_, table)| has(table)).map(|(of, _)| *of).collect();
        with.sort_unstable();
        with
    };
    let table = cache.block_table(id)?.into_iter().zip(own).enumerate();
    Ok(table
        .map(|(place, (block, is_own))| Block {
            first_token: place as u32 * BLOCK_TOKENS,
            block: block.0,
            is_own,
            shared_with: shared_with(place, block),
        })
        .collect())
}

/// The rings of a request with `tokens` tokens, for each kind of layer.
fn rings(cache: &KvCacheManager<Emulator>, tokens: u32) -> Vec<Ring> {
    let mut rings: Vec<Ring> = Vec::new();
    for schema in &cache.schema().layers {
        for plane in [PoolKind::SwaData, PoolKind::MainState, PoolKind::IndexState] {
            let Some(pool) = schema.pool(plane) else { continue };
            let what = format!("{plane:?} of {:?} layers", schema.kind);
            match rings.iter_mut().find(|ring| ring.what == what) {
                Some(ring) => ring.layers.push(schema.layer.0),
                None => {
                    // In a window ring, the row is the position modulo the length. A state consists of rings of several
                    // lengths.
                    let is_window = plane == PoolKind::SwaData;
                    let first = tokens.saturating_sub(pool.rows);
                    rings.push(Ring {
                        what,
                        layers: vec![schema.layer.0],
                        rows: pool.rows,
                        row_bytes: pool.row_bytes,
                        positions: is_window.then_some((first, tokens)),
                        next_row: is_window.then_some(tokens % pool.rows),
                    });
                }
            }
        }
    }
    rings
}
