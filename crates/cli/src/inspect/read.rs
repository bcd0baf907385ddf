//! Reads blocks, rings and rows of a request from the cache and from the device's memory.

use anyhow::{Context, Result};
use dsv4_kv::device::{Emulator, Stream};
use dsv4_kv::kv_layout::geometry::{BLOCK_TOKENS, CompressorKind, LayerKind};
use dsv4_kv::{KvCacheManager, LayerId, Ledger, PoolKind, RequestId};
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

/// Reads what the cache of `drive` holds for request `index` of the load, after `steps` steps.
pub fn report(args: &InspectArgs, drive: &Driven<'_>, index: usize, steps: u64) -> Result<Report> {
    let full = drive.cache();
    let (cache, stream) = (full.cache(), full.stream());
    let id = drive.id_of(index).context("it runs")?;
    let tokens = cache.ledger().committed(id)?;
    let model = &cache.config().model;
    let first_csa = model.layers.iter().position(|&kind| kind == LayerKind::Csa).unwrap_or(0);
    let layer = args.layer.unwrap_or(first_csa as u32);
    let kind = model.layers[layer as usize];
    let position = args.position.unwrap_or(tokens - 1);
    let window = tokens.saturating_sub(dsv4_kv::kv_layout::geometry::WINDOW)..tokens;
    if !window.contains(&position) {
        return Err(
            InputError::NotInWindow { position, first: window.start, last: tokens - 1 }.into()
        );
    }
    let at = &At { cache, layer: LayerId(layer) };
    let history: Vec<_> = Prefix::EMPTY.each(&drive.tokens_of(index, tokens)).collect();
    let place = Place { request: index, layer: at.layer, history: &history, without_rows: 0 };
    let ring = |plane| -> Result<Vec<u8>> { at.ring_row(stream, id, plane, position) };
    let stored = EncodedRow { data: ring(PoolKind::SwaData)?, scale: ring(PoolKind::SwaScale)? };
    let source = full.source();
    let from = source.row(Source::row_of(history[position as usize], Source::row_set(layer)));
    let from: Vec<_> = from.iter().map(|&bits| bf16_value(bits)).collect();
    let format = row_format(cache.config().main_format);
    let what = format!("window row of token {position} in layer {layer}");
    let mut rows = vec![Row::new(what, format, &stored, &from)];
    let main = match kind {
        LayerKind::Swa => None,
        LayerKind::Csa => Some((CompressorKind::CsaMain, dsv4_kv::kv_layout::geometry::CSA_RATIO)),
        LayerKind::Hca => Some((CompressorKind::Hca, dsv4_kv::kv_layout::geometry::HCA_RATIO)),
    };
    if let Some((which, ratio)) = main.filter(|(_, ratio)| position + 1 >= *ratio) {
        let entry = ((position + 1) / ratio - 1) as usize;
        let blocks: Vec<_> = cache.block_table(id)?.into_iter().map(|block| block.0).collect();
        let found = Planes::of(cache, at.layer, which)?.fetch(stream, &blocks, entry..entry + 1)?;
        let stored = found.row(0);
        let stored = EncodedRow { data: stored.data, scale: stored.scale };
        let from = entries::entry(source, place, which, entry);
        let what = format!("entry {entry} of {ratio} tokens each in layer {layer}");
        rows.push(Row::new(what, format, &stored, &from));
    }
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

/// A layer of a cache.
struct At<'a> {
    cache: &'a KvCacheManager<Emulator>,
    layer: LayerId,
}

impl At<'_> {
    /// Reads a token's row from a plane of the request's window ring.
    fn ring_row(
        &self,
        stream: &Stream<Emulator>,
        id: RequestId,
        plane: PoolKind,
        position: u32,
    ) -> Result<Vec<u8>> {
        let schema = self.cache.schema().layers[self.layer.0 as usize].pool(plane);
        let ring = schema.context("every layer has a window")?;
        let row = u64::from(id.slot().0) * u64::from(ring.rows) + u64::from(position % ring.rows);
        let mut bytes = vec![0; ring.row_bytes as usize];
        stream.download(&self.cache.pool(self.layer, plane)?, row * ring.row_bytes, &mut bytes)?;
        Ok(bytes)
    }
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
