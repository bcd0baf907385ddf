//! The state of requests: saved to checkpoints, restored from them, or copied to other slots, for all layers in one
//! launch; digests of payloads to transfer; and the append of a chunk that saves checkpoints, beside one that does not.
//!
//! Every node of a graph copies between its own slots and checkpoints, or appends to its own ring and checkpoints.

use anyhow::{Context, Result};
use dsv4_kv::device::{Backend, Buffer, Device, bf16};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::{HEAD_DIM, WINDOW, swa_ring_rows};
use dsv4_kv::kv_layout::main_row::{DATA_BYTES, MainFormat};
use dsv4_kv::ops::{
    self, CheckpointCopy, CheckpointRows, CopyDirection, CopyPieces, LayerImage, SectionRecords,
    SlotCopy, StateCopies, SwaRing,
};
use dsv4_kv::transfer::PartLayout;
use dsv4_kv::{CacheConfig, Capacity, CheckpointId, KvCacheManager, SlotId};

use super::inputs::{ensure_none_refused, part, repeated};
use super::timing::{Measurement, measurement, nodes_for};
use super::work::Work;

/// Tokens of the appended chunk, and tokens between its checkpoints.
const CHUNK: (u32, u32) = (8192, 2048);

pub(super) fn works<B: Backend>(device: &Device<B>) -> Vec<Work<'_, Measurement>> {
    let mut works = Vec::new();
    for model in ["flash", "pro"] {
        for (direction, jobs) in [
            (CopyDirection::Pack, 1),
            (CopyDirection::Pack, 8),
            (CopyDirection::Unpack, 1),
            (CopyDirection::Copy, 1),
        ] {
            let name = format!("{direction:?} {model} {jobs}");
            works.push(Work::row(name, move || copy(device, model, direction, jobs)));
        }
    }
    for model in ["flash", "pro"] {
        for blocks in [1, 64] {
            let name = format!("digests {model} {blocks}");
            works.push(Work::row(name, move || digests(device, model, blocks)));
        }
    }
    for saves in [false, true] {
        let name = format!("append, saving: {saves}");
        works.push(Work::row(name, move || append(device, CHUNK, saves)));
    }
    works
}

/// A launch that copies the state of `jobs` requests.
pub(super) fn copy<B: Backend>(
    device: &Device<B>,
    model: &str,
    direction: CopyDirection,
    jobs: u32,
) -> Result<Measurement> {
    let model = ModelConfig::preset(model).context("a preset")?;
    let name = model.name.clone();
    let smallest = CacheConfig { max_step_tokens: 1, ..CacheConfig::new(model) };
    let capacity = Capacity::new(&CacheConfig { num_checkpoints: 1, ..smallest.clone() });
    let (what, one) = match direction {
        CopyDirection::Pack => ("save", capacity.checkpoint_bytes),
        CopyDirection::Unpack => ("restore", capacity.checkpoint_bytes),
        CopyDirection::Copy => ("slot", capacity.slot_bytes),
    };
    // Each byte is read once and written once.
    let bytes = 2 * one * u64::from(jobs);
    let nodes = nodes_for(bytes);
    let all = nodes as u32 * jobs;
    let config = CacheConfig { max_requests: 2 * all, num_checkpoints: all, ..smallest };
    let max_context = config.max_context.min(1024);
    let cache = KvCacheManager::new(device.clone(), CacheConfig { max_context, ..config })?;
    let words = |job: u32| match direction {
        CopyDirection::Copy => SlotCopy { from: SlotId(job), to: SlotId(all + job) }.words(),
        _ => {
            let (slot, checkpoint) = (SlotId(job), CheckpointId(job));
            CheckpointCopy { slot, checkpoint, boundary: 1024, end: 1024 }.words()
        }
    };
    let stream = device.stream()?;
    let words: Vec<_> = (0..all).flat_map(words).collect();
    let (words, faults) = (stream.upload_new("jobs", &words)?, device.allocate("faults", 1)?);
    let retained = [cache.memory(), vec![words.memory(), faults.memory()]].concat();
    let graph = cache.into_copied_state(&stream, |arena, checkpoints, slots| {
        let pieces = if direction == CopyDirection::Copy { slots } else { checkpoints };
        let launch = |node: u64| {
            let (pieces, jobs_of_node) = (CopyPieces(pieces.0), part(&words, node, nodes));
            let (jobs_of_node, faults) = (&jobs_of_node, &faults);
            let copies =
                StateCopies { arena, pieces, jobs: jobs_of_node, count: jobs, direction, faults };
            ops::copy_state(&stream, &copies)
        };
        stream.capture(retained, || (0..nodes).try_for_each(launch))
    })??;
    let names = (format!("copy_state {what}"), format!("{name}, {jobs}"));
    let result = measurement(device, names, (bytes, nodes), &graph)?;
    ensure_none_refused(&stream, &faults)?;
    Ok(result)
}

/// Digests of a payload of `blocks` blocks.
fn digests<B: Backend>(device: &Device<B>, model: &str, blocks: u32) -> Result<Measurement> {
    let config = CacheConfig::new(ModelConfig::preset(model).context("a preset")?);
    let block = PartLayout::new(&config).block_bytes();
    let bytes = block * u64::from(blocks);
    let (nodes, words) = (nodes_for(bytes), (block / 8) as u32);
    let stream = device.stream()?;
    let payload = device.allocate::<u8>("payload", nodes * bytes)?;
    let sections: Vec<_> = (0..blocks).flat_map(|block| [block * words, words]).collect();
    let sections = stream.upload_new("sections", &sections)?.view();
    let secret = stream.upload_new("secret", &ops::digest_secret())?.view();
    let records = device.allocate("digests", u64::from(blocks * ops::DIGEST_RECORD))?;
    let faults = device.allocate("faults", 1)?;
    let inputs = [payload.memory(), sections.memory(), secret.memory()];
    let retained = [inputs.to_vec(), vec![records.memory(), faults.memory()]].concat();
    let launch = |node: u64| {
        let records = SectionRecords {
            payload: &part(&payload, node, nodes),
            sections: &sections,
            secret: &secret,
            count: blocks,
            records: &records,
            faults: &faults,
        };
        ops::digest_sections(&stream, &records)
    };
    let graph = stream.capture(retained, || (0..nodes).try_for_each(launch))?;
    let names = ("digest_sections".to_string(), format!("{model}, {blocks} blocks"));
    let result = measurement(device, names, (bytes, nodes), &graph)?;
    ensure_none_refused(&stream, &faults)?;
    Ok(result)
}

/// The append of a chunk of one request in one layer, with checkpoints at multiples of an interval.
pub(super) fn append<B: Backend>(
    device: &Device<B>,
    (tokens, interval): (u32, u32),
    saves: bool,
) -> Result<Measurement> {
    let (format, ring) = (MainFormat::default(), swa_ring_rows(1));
    let window = u64::from(WINDOW);
    let number = if saves { tokens / interval } else { 0 };
    let (in_ring, in_checkpoints) = (ring_rows(tokens, ring), saved_rows(tokens, interval));
    // Only rows that are stored must be read; the row numbers of all tokens are.
    let is_stored = |(ring, saved): &(&i32, &i32)| **ring >= 0 || (saves && **saved >= 0);
    let read = in_ring.iter().zip(&in_checkpoints).filter(is_stored).count() as u64;
    let numbers = u64::from(tokens) * (1 + u64::from(saves));
    let stored = u64::from(ring.min(tokens)) + window * u64::from(number);
    let bytes = 4 * numbers + read * 2 * u64::from(HEAD_DIM) + stored * format.row_bytes();
    let nodes = nodes_for(bytes);
    let stream = device.stream()?;
    let plane = |row: u64| device.allocate::<u8>("ring", nodes * u64::from(ring) * row);
    let (data, scale) = (plane(DATA_BYTES)?, plane(format.scale_bytes())?);
    let values: Vec<bf16> = (0..64 * HEAD_DIM).map(|i| bf16::from_f32(i as f32 / 999.0)).collect();
    let rows = nodes * u64::from(tokens * HEAD_DIM);
    let kv = repeated(&stream, "kv rows", rows, &values)?;
    let row = stream.upload_new("ring rows", &in_ring)?;
    let saved = stream.upload_new("checkpoint rows", &in_checkpoints)?;
    let image = LayerImage { window: [0, window * DATA_BYTES], halves: [0; 2] };
    let checkpoint_bytes = window * format.row_bytes();
    let all = nodes * u64::from(number.max(1)) * checkpoint_bytes;
    let (checkpoints, faults) =
        (device.allocate::<u8>("checkpoints", all)?, device.allocate("faults", 1)?);
    let memory = [kv.memory(), data.memory(), scale.memory(), row.memory(), saved.memory()];
    let retained = [memory.to_vec(), vec![checkpoints.memory(), faults.memory()]].concat();
    let launch = |node: u64| {
        let of_node = |buffer: &Buffer<B, u8>| part(buffer, node, nodes);
        let (data, scale, checkpoints) = (of_node(&data), of_node(&scale), of_node(&checkpoints));
        let ring = SwaRing { data: &data, scale: &scale, format, ring, slots: 1 };
        let append = ops::WindowAppend {
            kv: &part(&kv, node, nodes),
            row: &row,
            ring: &ring,
            faults: &faults,
            tokens,
        };
        let rows = CheckpointRows {
            checkpoints: &checkpoints,
            number,
            checkpoint_bytes,
            row: &saved,
            image,
        };
        ops::append_swa_saving(&stream, &append, saves.then_some(&rows))
    };
    let graph = stream.capture(retained, || (0..nodes).try_for_each(launch))?;
    let size = format!("{tokens} tokens, {number} checkpoints");
    let names = (format!("append_swa_{}", format.name()), size);
    let result = measurement(device, names, (bytes, nodes), &graph)?;
    ensure_none_refused(&stream, &faults)?;
    Ok(result)
}

/// The ring row of each token of a chunk; -1 for tokens that later tokens of the chunk overwrite.
fn ring_rows(tokens: u32, ring: u32) -> Vec<i32> {
    let row = |token: u32| if token + ring < tokens { -1 } else { (token % ring).cast_signed() };
    (0..tokens).map(row).collect()
}

/// The checkpoint row of each token of a chunk. The window before each multiple of the interval is saved.
fn saved_rows(tokens: u32, interval: u32) -> Vec<i32> {
    let row = |token: u32| {
        let (checkpoint, within) = (token / interval, token % interval);
        let row = (checkpoint * WINDOW + within + WINDOW).cast_signed() - interval.cast_signed();
        if within + WINDOW >= interval { row } else { -1 }
    };
    (0..tokens).map(row).collect()
}
