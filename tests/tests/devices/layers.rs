//! The whole cache: layers of every kind, through `KvCacheManager` and its handles.

use std::num::NonZeroU32;
use std::ops::Range;

use dsv4_kv::device::ops::{self, GatherQueries};
use dsv4_kv::device::{Buffer, Device, DeviceError};
use dsv4_kv::schema::PoolKind;
use dsv4_kv::{KvError, LayerId, Projected, RequestId};
use dsv4_kv_oracle::compressor::visible;
use kv_layout::geometry::LayerKind::{self, Csa, Hca, Swa};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::inputs::{assert_same, download, oracle, upload};
use crate::stories::{Fed, Formats, Part, Stored, Story, config};

/// The layers of the preset `tiny`.
const TINY: [LayerKind; 5] = [Swa, Csa, Hca, Csa, Swa];

/// Every format of main rows and of indexer keys at least once.
const FORMATS: [Formats; 3] = [
    (MainFormat::Ue8m0, IndexFormat::Mxfp4),
    (MainFormat::F32, IndexFormat::Nvfp4),
    (MainFormat::Ue8m0, IndexFormat::Fp8),
];

/// A request on its way through its story.
struct Progress {
    id: RequestId,
    story: usize,
    done: usize,
}

/// Four stories through two slots in mixed steps of any sizes, padded: each request's blocks and
/// windows hold what its tokens give in one chunk, alone, on a fresh cache.
pub fn every_layer_holds_what_the_history_says<D: Device>(device: &D) {
    let mut random = StdRng::seed_from_u64(1);
    for formats in FORMATS {
        let stories = [(290, 1), (135, 2), (170, 3), (33, 4)]
            .map(|(tokens, seed)| Story::random(&TINY, tokens, seed));
        let stored = stories.each_ref().map(|story| story.stored(device, formats));
        let mut fed = Fed::new(device, config(&TINY, formats, 2));
        let (mut live, mut next) = (Vec::new(), 0);
        while next < stories.len() || !live.is_empty() {
            while live.len() < 2 && next < stories.len() {
                live.push(Progress { id: fed.manager.admit().unwrap(), story: next, done: 0 });
                next += 1;
            }
            let mut parts = Vec::new();
            for Progress { id, story, done } in &mut live {
                let chunk = [1, 1, 2, 3, 7, 29, 64, 127, 128, 131][random.random_range(0..10)];
                let end = (*done + chunk).min(stories[*story].tokens());
                parts.push(Part::new(*id, &stories[*story], *done..end));
                *done = end;
            }
            let tokens: usize = live_tokens(&parts);
            fed.step(&parts, tokens.next_power_of_two() as u32);
            live.retain(|&Progress { id, story, done }| {
                let over = done == stories[story].tokens();
                if over {
                    fed.assert_holds(id, &stories[story], &stored[story], done);
                    fed.manager.release(id).unwrap();
                }
                !over
            });
        }
        fed.manager.check_faults(&fed.stream).unwrap();
    }
}

fn live_tokens(parts: &[Part<'_>]) -> usize {
    parts.iter().flat_map(|part| &part.pieces).map(|(_, range)| range.len()).sum()
}

/// The gathers of every compressed layer give each query the entries that it sees, those that close
/// in the very step included, and padding nothing.
pub fn gathers_equal_the_oracle<D: Device>(device: &D) {
    const BUCKET: u32 = 16;
    for formats in &FORMATS[..2] {
        let stories =
            [(170, 11), (40, 12), (300, 13)].map(|(tokens, seed)| Story::random(&TINY, tokens, seed));
        let stored = stories.each_ref().map(|story| story.stored(device, *formats));
        let mut fed = Fed::new(device, config(&TINY, *formats, 3));
        let mut requests = Vec::new();
        for (story, prompt) in stories.iter().zip([122, 1, 252]) {
            let id = fed.manager.admit().unwrap();
            fed.step(&[Part::new(id, story, 0..prompt)], prompt as u32);
            requests.push((id, prompt));
        }
        for chunks in [[5, 3, 4], [1, 6, 1], [9, 1, 5]] {
            let mut parts = Vec::new();
            let mut queries = Vec::new();
            for (story, ((id, done), chunk)) in requests.iter_mut().zip(chunks).enumerate() {
                parts.push(Part::new(*id, &stories[story], *done..*done + chunk));
                queries.extend((*done..*done + chunk).map(|position| (story, position)));
                *done += chunk;
            }
            fed.step(&parts, BUCKET);
            for layer in [1, 2, 3] {
                let decode = |stored: &Vec<Stored>| -> Vec<Vec<u16>> {
                    let entries = stored[layer].entries.iter();
                    entries.map(|entry| oracle(formats.0).decode(entry)).collect()
                };
                let decoded = stored.each_ref().map(decode);
                check_gathers(&fed, LayerId(layer as u32), BUCKET, &queries, &decoded);
            }
        }
        fed.manager.check_faults(&fed.stream).unwrap();
    }
}

/// Gathers for all queries of a step (story and position each, then padding) against the decoded
/// entries of each story.
fn check_gathers<D: Device>(
    fed: &Fed<D>,
    layer: LayerId,
    bucket: u32,
    queries: &[(usize, usize)],
    decoded: &[Vec<Vec<u16>>],
) {
    const LIST: usize = 6;
    let (device, stream) = (fed.manager.device(), &fed.stream);
    let handle = fed.manager.layer_for(layer, bucket).unwrap();
    let ratio = NonZeroU32::new(handle.schema().kind.ratio().unwrap()).unwrap();
    let seen: Vec<usize> =
        queries.iter().map(|&(_, position)| visible(position, ratio.get() as usize)).collect();
    let rows = *seen.iter().max().unwrap();

    // The newest entry, the oldest, one between, none.
    let list = |&seen: &usize| {
        let seen = seen as i32;
        [seen - 1, -1, seen / 2 - 1, if seen > 0 { 0 } else { -1 }, -1, seen - 1]
    };
    let mut lists: Vec<[i32; LIST]> = seen.iter().map(list).collect();
    lists.resize(bucket as usize, [0; LIST]);
    let selected = upload(device, stream, lists.as_flattened());
    let listed = filled::<D, u16>(fed, bucket as usize * LIST * 512);
    handle.gather_kv(stream, 0..bucket, &selected, LIST as u32, &listed).unwrap();

    let all = filled::<D, u16>(fed, bucket as usize * rows * 512);
    let lengths = filled::<D, i32>(fed, bucket as usize);
    handle.gather_all(stream, 0..bucket, rows as u32, &all, &lengths).unwrap();
    let valid = filled::<D, i32>(fed, bucket as usize);
    let tokens = handle.step_tokens();
    let (position, slot, index) = (&tokens.position, &tokens.slot, &tokens.index);
    let every = GatherQueries { position, slot, index, first: 0, count: bucket };
    ops::valid_lens(device, stream, &every, ratio, &valid).unwrap();

    let (listed, all) = (download(device, stream, &listed), download(device, stream, &all));
    let mut want = Vec::new();
    for (at, (&(story, position), &seen)) in queries.iter().zip(&seen).enumerate() {
        let what = format!("{layer:?} story {story} position {position}");
        for (row, &entry) in lists[at].iter().enumerate() {
            let got = &listed[(at * LIST + row) * 512..][..512];
            match usize::try_from(entry) {
                Ok(entry) => assert_same(got, &decoded[story][entry], &what),
                Err(_) => assert_same(got, &[0; 512], &what),
            }
        }
        for (entry, values) in decoded[story][..seen].iter().enumerate() {
            let got = &all[(at * rows + entry) * 512..][..512];
            assert_same(got, values, &format!("{what}, entry {entry}"));
        }
        want.push(seen as i32);
    }
    let untouched = |tile: &[u16], from: usize| tile[from * 512..].iter().all(|&x| x == 0xA5A5);
    assert!(untouched(&listed, queries.len() * LIST) && untouched(&all, queries.len() * rows));
    want.resize(bucket as usize, 0);
    assert_eq!(download(device, stream, &lengths), want);
    assert_eq!(download(device, stream, &valid), want);
}

/// A buffer of canaries.
fn filled<D: Device, T: bytemuck::Pod>(fed: &Fed<D>, elements: usize) -> Buffer<D, T> {
    let device = fed.manager.device();
    let buffer = device.allocate("output", elements as u64).unwrap();
    device.fill(&fed.stream, &buffer, 0xA5).unwrap();
    buffer
}

/// What a decode step writes for attention, of one layer.
struct Outputs<D: Device> {
    window: Buffer<D, u16>,
    window_lengths: Buffer<D, i32>,
    listed: Buffer<D, u16>,
    all: Buffer<D, u16>,
    lengths: Buffer<D, i32>,
}

impl<D: Device> Outputs<D> {
    const BUCKET: u32 = 8;
    /// Entries of a query's list.
    const LIST: u32 = 3;
    /// Rows for all entries of a query: enough for those of 260 tokens.
    const ALL: u32 = 66;

    fn new(fed: &Fed<D>) -> Self {
        let tile = |rows: u32| filled(fed, (Self::BUCKET * rows * 512) as usize);
        let lengths = || filled(fed, Self::BUCKET as usize);
        let (listed, all) = (tile(Self::LIST), tile(Self::ALL));
        Self { window: tile(128), window_lengths: lengths(), listed, all, lengths: lengths() }
    }

    fn memory(&self) -> [std::sync::Arc<D::Memory>; 5] {
        let Self { window, window_lengths, listed, all, lengths } = self;
        let (lengths, window_lengths) = (lengths.memory(), window_lengths.memory());
        [window.memory(), window_lengths, listed.memory(), all.memory(), lengths]
    }

    fn bytes(&self, fed: &Fed<D>) -> [Vec<u8>; 5] {
        let Self { window, window_lengths, listed, all, lengths } = self;
        [window.cast(), window_lengths.cast(), listed.cast(), all.cast(), lengths.cast()]
            .map(|output: Buffer<D, u8>| download(fed.manager.device(), &fed.stream, &output))
    }
}

/// Queues a decode step of all layers, in launches of `bucket` tokens: every layer's update, then
/// what its attention reads.
fn decode<D: Device>(
    fed: &Fed<D>,
    bucket: u32,
    selected: &Buffer<D, i32>,
    outputs: &[Outputs<D>],
) -> Result<(), KvError> {
    let stream = &fed.stream;
    fed.update(bucket)?;
    for (layer, to) in fed.layer_ids().zip(outputs) {
        let handle = fed.manager.layer_for(layer, bucket)?;
        let rows = fed.rows(layer);
        handle.gather_swa(stream, rows, 0..bucket, &to.window, &to.window_lengths)?;
        if handle.schema().kind != Swa {
            let (list, all) = (Outputs::<D>::LIST, Outputs::<D>::ALL);
            handle.gather_kv(stream, 0..bucket, selected, list, &to.listed)?;
            handle.gather_all(stream, 0..bucket, all, &to.all, &to.lengths)?;
        }
    }
    Ok(())
}

/// One graph of a decode step of every layer, replayed for batches of one to eight requests that
/// cross the ends of entries, windows and blocks, against eager launches without padding.
pub fn a_captured_step_equals_eager_steps<D: Device>(device: &D) {
    const BUCKET: u32 = 8;
    const STARTS: [usize; BUCKET as usize] = [124, 125, 126, 127, 250, 253, 254, 255];
    let formats = FORMATS[0];
    let stories = STARTS.map(|start| Story::random(&TINY, start + 8, start as u64));
    let [mut eager, mut captured] =
        [(); 2].map(|()| Fed::new(device, config(&TINY, formats, BUCKET)));
    let mut requests = Vec::new();
    for (story, start) in stories.iter().zip(STARTS) {
        let id = eager.manager.admit().unwrap();
        assert_eq!(captured.manager.admit().unwrap(), id, "both caches go the same way");
        for fed in [&mut eager, &mut captured] {
            fed.step(&[Part::new(id, story, 0..start)], start as u32);
        }
        requests.push((id, story, start));
    }

    let selected = upload(device, &captured.stream, &[[0, 17, 30]; BUCKET as usize].concat());
    let outputs = |fed: &Fed<D>| -> Vec<_> { TINY.map(|_| Outputs::new(fed)).into() };
    let (eager_outputs, graph_outputs) = (outputs(&eager), outputs(&captured));
    let mut retained = captured.inputs();
    retained.push(selected.memory());
    retained.extend(graph_outputs.iter().flat_map(Outputs::memory));
    let record = |_: &_| decode(&captured, BUCKET, &selected, &graph_outputs);
    let graph = captured.manager.capture(&captured.stream, retained, record).unwrap();

    let free = captured.manager.ledger().free_blocks();
    for batch in [8, 3, 8, 1, 5, 8, 8, 7, 4] {
        requests.rotate_left(3);
        let mut parts = Vec::new();
        for (id, story, done) in &mut requests[..batch] {
            if *done < story.tokens() {
                parts.push(Part::new(*id, story, *done..*done + 1));
                *done += 1;
            }
        }
        eager.prepare(&parts, parts.len() as u32);
        captured.prepare(&parts, BUCKET);
        decode(&eager, parts.len() as u32, &selected, &eager_outputs).unwrap();
        device.replay(&captured.stream, &graph).unwrap();
        for part in &parts {
            eager.manager.commit(part.id, 1).unwrap();
            captured.manager.commit(part.id, 1).unwrap();
        }
        assert_equal_pools(&captured, &eager.pool_bytes(), "after a replay");
    }
    assert!(captured.manager.ledger().free_blocks() <= free - BUCKET, "each took a block between");
    for fed in [&eager, &captured] {
        assert!(matches!(
            fed.manager.check_faults(&fed.stream),
            Err(KvError::KernelRefused { kernel: "gather_kv_ue8m0", .. })
        ));
    }
}

fn assert_equal_pools<D: Device>(fed: &Fed<D>, want: &[(String, Vec<u8>)], when: &str) {
    for ((name, got), (_, want)) in fed.pool_bytes().iter().zip(want) {
        assert_same(got, want, &format!("{name} {when}"));
    }
}
