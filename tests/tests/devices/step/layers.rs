//! The whole cache: layers of every kind, through `KvCacheManager` and its handles.

use dsv4_kv::device::{Backend, Device, bf16};
use dsv4_kv::step::EntryLists;
use dsv4_kv::{CacheConfig, LayerId, RequestId};
use dsv4_kv_oracle::compressor::visible;
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::fed::{Fed, Padding, Part, Updated, assert_pools};
use crate::inputs::{CANARY_BF16, assert_same, download, download_bits, filled, oracle, upload};
use crate::step::gathered::Gathered;
use crate::stories::{Formats, STEP_TOKENS, Stored, Story, config, tiny};

/// Every format of main rows and of indexer keys at least once.
const FORMATS: [Formats; 3] = [
    (MainFormat::Ue8m0, IndexFormat::Mxfp4),
    (MainFormat::F32, IndexFormat::Nvfp4),
    (MainFormat::Ue8m0, IndexFormat::Fp8),
];

/// A request and its progress in its story.
struct Progress {
    id: RequestId,
    story: usize,
    done: usize,
}

/// Four stories run through two slots, in mixed steps of random sizes with padding. The blocks and windows of each
/// request equal those of its tokens in one chunk, alone, in a new cache.
pub fn every_layer_holds_what_the_history_says<B: Backend>(device: &Device<B>) {
    let mut random = StdRng::seed_from_u64(1);
    for formats in FORMATS {
        let stories = [(262, 1), (131, 2), (90, 3), (33, 4)]
            .map(|(tokens, seed)| Story::random(&tiny(), tokens, seed));
        let stored = stories.each_ref().map(|story| story.stored(device, formats));
        let mut fed = Fed::new(device, config(&tiny(), formats, 2));
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
            let tokens: u32 = parts.iter().map(|part| part.request().tokens).sum();
            let bucket = fed.bucket(tokens.next_power_of_two().min(STEP_TOKENS), STEP_TOKENS);
            fed.step(&parts, bucket);
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

/// The gathers of every compressed layer give each query the entries that it sees, including those that close in the
/// same step. Padding gets nothing.
pub fn gathers_equal_the_oracle<B: Backend>(device: &Device<B>) {
    const PADDED: u32 = 16;
    for formats in &FORMATS[..2] {
        let stories = [(170, 11), (40, 12), (300, 13)]
            .map(|(tokens, seed)| Story::random(&tiny(), tokens, seed));
        let stored = stories.each_ref().map(|story| story.stored(device, *formats));
        let mut fed = Fed::new(device, config(&tiny(), *formats, 3));
        let mut requests = Vec::new();
        for (story, prompt) in stories.iter().zip([122, 1, 252]) {
            let id = fed.manager.admit().unwrap();
            fed.step(&[Part::new(id, story, 0..prompt)], Padding::None);
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
            let decoded: Vec<[Vec<Vec<u16>>; 3]> = (0..tiny().len())
                .map(|layer| stored.each_ref().map(|stored| decode(formats.0, &stored[layer])))
                .collect();
            let all: Vec<_> = parts.iter().map(|part| part.request().tokens).collect();
            let bucket = fed.bucket(PADDED, PADDED);
            fed.run(&parts, bucket, &all, &mut |layer, updated| {
                if let Updated::Csa(_) | Updated::Hca(_) = updated {
                    check_gathers(layer, updated, PADDED, &queries, &decoded[layer.0 as usize]);
                }
                Ok(())
            });
        }
        fed.manager.check_faults(&fed.stream).unwrap();
    }
}

fn decode(format: MainFormat, stored: &Stored) -> Vec<Vec<u16>> {
    stored.entries.iter().map(|entry| oracle(format).decode(entry)).collect()
}

/// Compares gathers for all queries of a step, given as (story, position) and followed by padding, with the decoded
/// entries of each story.
fn check_gathers<B: Backend>(
    layer: LayerId,
    updated: &Updated<'_, B>,
    bucket: u32,
    queries: &[(usize, usize)],
    decoded: &[Vec<Vec<u16>>],
) {
    let stream = updated.stream();
    let ratio = updated.schema().kind.ratio().unwrap() as usize;
    let seen: Vec<usize> = queries.iter().map(|&(_, position)| visible(position, ratio)).collect();
    let rows = *seen.iter().max().unwrap();

    // The newest entry, the oldest, one between, and none.
    let list = |&seen: &usize| {
        let seen = seen as i32;
        [seen - 1, -1, seen / 2 - 1, (seen - 1).min(0), -1, seen - 1]
    };
    let mut lists: Vec<[i32; 6]> = seen.iter().map(list).collect();
    lists.resize(bucket as usize, [0; 6]);
    let selected = upload(stream, lists.as_flattened());
    let listed = filled::<B, bf16>(stream, bucket as usize * 6 * 512);
    let of_queries = EntryLists { queries: 0..bucket, k: 6, indices: &selected };
    updated.gather_entries(0..bucket, &of_queries, &listed).unwrap();

    let all = filled::<B, bf16>(stream, bucket as usize * rows * 512);
    let lengths = filled::<B, i32>(stream, bucket as usize);
    updated.gather_all(0..bucket, rows as u32, &all, &lengths).unwrap();
    let valid = filled::<B, i32>(stream, bucket as usize);
    updated.entry_counts(0..bucket, &valid).unwrap();

    let (listed, all) = (download_bits(stream, &listed), download_bits(stream, &all));
    let mut want = Vec::new();
    for (at, (&(story, position), &seen)) in queries.iter().zip(&seen).enumerate() {
        let what = format!("{layer:?} story {story} position {position}");
        for (row, &entry) in lists[at].iter().enumerate() {
            let got = &listed[(at * 6 + row) * 512..][..512];
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
    let untouched =
        |tile: &[u16], from: usize| tile[from * 512..].iter().all(|&x| x == CANARY_BF16);
    assert!(untouched(&listed, queries.len() * 6) && untouched(&all, queries.len() * rows));
    want.resize(bucket as usize, 0);
    assert_eq!(download(stream, &lengths), want);
    assert_eq!(download(stream, &valid), want);
}

/// Tokens of the captured step.
const BUCKET: u32 = 8;
/// Requests of the captured step have fewer tokens than this.
const MAX_TOKENS: u32 = 268;

/// The graph has separate launches for the operations of a layer.
pub fn a_captured_step_equals_eager_steps<B: Backend>(device: &Device<B>) {
    check_capture(device, 2);
}

/// The graph has one launch per layer.
pub fn a_captured_fused_step_equals_eager_steps<B: Backend>(device: &Device<B>) {
    check_capture(device, 1);
}

/// One graph of the update and the gathers of every layer is captured for `tokens_per_request` tokens per request. It
/// is replayed for batches of one to eight requests that cross the ends of entries, windows and blocks, and compared
/// with eager launches of the separate kernels without padding.
fn check_capture<B: Backend>(device: &Device<B>, tokens_per_request: u32) {
    const STARTS: [usize; BUCKET as usize] = [124, 125, 126, 127, 250, 253, 254, 255];
    let stories = STARTS.map(|start| Story::random(&tiny(), start + 10, start as u64));
    let new = || Fed::new(device, config(&tiny(), FORMATS[0], BUCKET));
    let (mut eager, mut captured) = (new(), new());
    let mut requests = Vec::new();
    for (story, start) in stories.iter().zip(STARTS) {
        let id = eager.manager.admit().unwrap();
        let twin = captured.manager.admit().unwrap();
        for (fed, id) in [(&mut eager, id), (&mut captured, twin)] {
            fed.step(&[Part::new(id, story, 0..start)], Padding::None);
        }
        requests.push(([id, twin], story, start));
    }
    let gathered =
        |fed: &Fed<B>| Gathered::of_layers(&fed.manager, &fed.stream, BUCKET, MAX_TOKENS);
    let (eager_out, graph_out) = (gathered(&eager), gathered(&captured));
    let padding = captured.bucket(BUCKET, tokens_per_request);
    let retained: Vec<_> = graph_out.iter().flat_map(Gathered::memory).collect();
    let graphs = captured.capture(padding, &retained, &mut |layer, updated| {
        graph_out[layer.0 as usize].gather(updated, BUCKET)
    });

    let free = captured.manager.ledger().free_blocks();
    for batch in [8, 3, 8, 1, 8, 8, 5, 8, 8, 7] {
        requests.rotate_left(3);
        let (mut parts, mut positions) = ([Vec::new(), Vec::new()], Vec::new());
        for (ids, story, done) in &mut requests[..batch] {
            for (parts, &id) in parts.iter_mut().zip(&*ids) {
                parts.push(Part::new(id, story, *done..*done + 1));
            }
            positions.push(*done);
            *done += 1;
        }
        eager_out.iter().for_each(|out| out.reset(&eager.stream, &positions));
        graph_out.iter().for_each(|out| out.reset(&captured.stream, &positions));
        let ones = vec![1; batch];
        let separate = eager.bucket(batch as u32, 2);
        eager.run(&parts[0], separate, &ones, &mut |layer, updated| {
            eager_out[layer.0 as usize].gather(updated, batch as u32)
        });
        captured.replay(&parts[1], padding, &graphs, &ones);
        let what = format!("positions {positions:?}");
        assert_pools(&captured, &eager.pool_bytes(), &what);
        for (layer, (graph_out, eager_out)) in graph_out.iter().zip(&eager_out).enumerate() {
            let what = format!("gathers of layer {layer} at {what}");
            let bytes = |out: &Gathered<B>| out.bytes(&captured.stream);
            assert_same(&bytes(graph_out), &bytes(eager_out), &what);
        }
    }
    let taken = free - captured.manager.ledger().free_blocks();
    assert!(taken > BUCKET / 2, "blocks were taken between replays: {taken}");
    captured.manager.check_faults(&captured.stream).unwrap();
}

/// Verify steps of up to three drafts, of which any number of tokens is accepted, or none. Entries, indexer keys and
/// windows equal those of a request without drafts.
pub fn rejected_drafts_leave_no_trace<B: Backend>(device: &Device<B>) {
    const MAX_DRAFT: usize = 3;
    let mut random = StdRng::seed_from_u64(21);
    for (formats, prompt) in FORMATS.into_iter().zip([100, 0, 245]) {
        let tokens = prompt + 50;
        let [story, drafts] = [22, 23].map(|seed| Story::random(&tiny(), tokens, seed));
        let stored = story.stored(device, formats);
        let max_draft = MAX_DRAFT as u32;
        let mut fed = Fed::new(device, CacheConfig { max_draft, ..config(&tiny(), formats, 1) });
        let id = fed.manager.admit().unwrap();
        if prompt > 0 {
            fed.step(&[Part::new(id, &story, 0..prompt)], Padding::None);
        }
        let (mut done, mut rejected) = (prompt, 0);
        while done < tokens {
            let end = (done + 1 + random.random_range(0..=MAX_DRAFT)).min(tokens);
            let accepted = random.random_range(done..=end);
            let pieces = vec![(&story, done..accepted), (&drafts, accepted..end)];
            let (bucket, count) = (fed.bucket(max_draft + 1, max_draft + 1), accepted - done);
            fed.run(&[Part { id, pieces }], bucket, &[count as u32], &mut |_, _| Ok(()));
            rejected += end - accepted;
            done = accepted;
        }
        fed.assert_holds(id, &story, &stored, tokens);
        assert!(rejected > 10, "drafts were rejected");
        fed.manager.check_faults(&fed.stream).unwrap();
    }
}
