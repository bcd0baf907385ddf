//! Attention in the steps of a cache: compared with `f64`, with the same bits however tokens are batched; and refusals.

use std::ops::Range;
use std::slice::from_ref;

use dsv4_kv::device::{Backend, Device, DeviceError, bf16};
use dsv4_kv::step::{AttentionTensors, EntryLists, QueryForm};
use dsv4_kv::{Bucket, KvError, LayerId, RequestId, ops};
use kv_layout::attention::KeyCluster;
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};

use super::world::{Batch, HEADS, LAYERS, World, even_story};
use crate::fed::{Padding, Part, Updated, begin};
use crate::inputs::{CANARY_BF16, CANARY_F32, download, download_bits, filled, upload};
use crate::stories::{Formats, STEP_TOKENS, Story};

const FORMATS: [Formats; 2] =
    [(MainFormat::Ue8m0, IndexFormat::Mxfp4), (MainFormat::F32, IndexFormat::Nvfp4)];

/// The first, a middle and the last query of a range: attention of all would take long on the CPU.
fn sampled(queries: Range<usize>) -> Vec<Range<usize>> {
    let (first, middle, last) =
        (queries.start, queries.start.midpoint(queries.end), queries.end - 1);
    if queries.len() < 4 {
        vec![queries]
    } else {
        vec![first..first + 1, middle..middle + 1, last..last + 1]
    }
}

/// Chunks, whose own rows are not in the ring while attention reads them; decode steps with a draft, whose rows are in
/// the ring; and both in one step, of two requests. Rows that were not written yet are NaN.
pub fn steps_equal_the_oracle<B: Backend>(device: &Device<B>) {
    // So long that windows are full and every element of a list is an entry.
    let stories = [even_story(290, 31), even_story(20, 32)];
    for formats in FORMATS {
        let mut world = World::new(device, formats, &stories, (2, 2));
        let [a, b] = [0, 1].map(|_| world.fed.manager.admit().unwrap());
        let mut chunk = |a_range: Range<usize>, b_range: Range<usize>, pad: bool| {
            let batch = Batch::new().add(a, &stories, 0, a_range.clone());
            let batch = batch.add(b, &stories, 1, b_range);
            let (of_a, all) = (a_range.len(), batch.queries.len());
            let ranges = [sampled(0..of_a), sampled(of_a..all)].concat();
            let padding = match pad {
                true => world.fed.bucket(all as u32 + 3, STEP_TOKENS),
                false => Padding::None,
            };
            world.step(&batch, padding, &ranges);
        };
        // The window is full; the own rows of the second request follow those of the first.
        chunk(0..261, 0..4, false);
        chunk(261..262, 4..6, false);
        // Its last tokens take the ring rows that its first tokens need.
        chunk(262..287, 6..7, true);
        chunk(287..290, 7..9, false);
        world.fed.manager.check_faults(&world.fed.stream).unwrap();
    }
}

/// The same stories with other chunks, other requests in the batch, other slots, rejected drafts, padding and graphs:
/// the same bits.
pub fn a_query_has_the_same_bits_in_every_step<B: Backend>(device: &Device<B>) {
    let stories = [even_story(278, 41), even_story(12, 42), even_story(278, 43)];
    let drafts = &stories[2];
    let mut world = World::new(device, FORMATS[0], &stories, (4, 2));
    // Each story in one chunk, of which the last tokens attend.
    let [a, b] = [0, 1].map(|_| world.fed.manager.admit().unwrap());
    world.step(
        &Batch::new().add(a, &stories, 0, 0..278),
        Padding::None,
        &[253..254, 254..256, 256..263, 274..278],
    );
    let whole = Batch::new().add(b, &stories, 1, 0..12);
    world.step(&whole, Padding::None, from_ref(&whole.all()));
    let seen = world.repeated;
    assert_eq!(seen, 0);
    for id in [a, b] {
        world.fed.manager.release(id).unwrap();
    }

    let spare = world.fed.manager.admit().unwrap();
    let [b, a] = [0, 1].map(|_| world.fed.manager.admit().unwrap());
    let batch = Batch::new().add(a, &stories, 0, 0..254).add(b, &stories, 1, 0..3);
    world.step(&batch, Padding::None, from_ref(&(253..257)));
    // Drafts that are rejected, followed by the accepted tokens; padding in a bucket of longer chunks.
    let batch = Batch::new().add(b, &stories, 1, 3..4).add_drafts(drafts, 6);
    let batch = batch.add(a, &stories, 0, 254..256).add_drafts(drafts, 257);
    let bucket = world.fed.bucket(8, 3);
    world.step(&batch, bucket, from_ref(&(0..8)));
    let batch = Batch::new().add(a, &stories, 0, 256..260).add(b, &stories, 1, 4..5);
    // Graphs for the longest contexts: one of chunks, whose own rows are quantised in the graph, and one of decode
    // steps.
    let chunks = world.fed.bucket(9, 4);
    let graphs = world.capture(chunks, 9);
    world.replay(&batch, chunks, &graphs);
    let decode = world.fed.bucket(12, 3);
    let graphs = world.capture(decode, 12);
    world.fed.manager.release(spare).unwrap();
    let batch = Batch::new().add(b, &stories, 1, 5..6).add(a, &stories, 0, 260..263);
    world.replay(&batch, decode, &graphs);
    let batch = Batch::new().add(b, &stories, 1, 6..8).add_drafts(drafts, 9);
    world.replay(&batch, decode, &graphs);
    assert_eq!(world.repeated, LAYERS.len() * (10 + 8), "of both stories");
    world.fed.manager.check_faults(&world.fed.stream).unwrap();
}

/// A world in which a block takes several queries of layers with a window alone, if a launch has more queries than
/// multiprocessors. That requires prepared queries; raw ones take another form.
fn of_consecutive_windows<'s, B: Backend>(
    device: &Device<B>,
    formats: Formats,
    stories: &'s [Story],
    requests: (u32, u32),
) -> World<'s, B> {
    let mut world = World::new(device, formats, stories, requests);
    world.window_queries = QueryForm::Rotated;
    world
}

/// Chunks of two requests by graphs with more queries than multiprocessors, with padding, twice; and the same stories
/// by eager launches with fewer queries.
pub fn chunks_in_graphs_have_the_same_bits<B: Backend>(device: &Device<B>) {
    const BUCKET: u32 = 140;
    const { assert!(BUCKET > ops::MULTIPROCESSORS) }
    let stories = [even_story(60, 47), even_story(40, 48)];
    let mut world = of_consecutive_windows(device, FORMATS[0], &stories, (4, 1));
    let [a, b, c, d] = [0, 1, 2, 3].map(|_| world.fed.manager.admit().unwrap());
    for (id, at, range) in [(a, 0, 0..60), (b, 1, 0..40)] {
        let batch = Batch::new().add(id, &stories, at, range);
        world.step(&batch, Padding::None, from_ref(&batch.all()));
    }
    let bucket = world.fed.bucket(BUCKET, 100);
    let graphs = world.capture(bucket, BUCKET as usize);
    let batch = Batch::new().add(d, &stories, 1, 0..23).add(c, &stories, 0, 0..60);
    world.replay(&batch, bucket, &graphs);
    world.replay(&Batch::new().add(d, &stories, 1, 23..40), bucket, &graphs);
    assert_eq!(world.repeated, LAYERS.len() * 100);
    world.fed.manager.check_faults(&world.fed.stream).unwrap();
}

/// A chunk with more queries than multiprocessors, so that a block takes several windows; and the same story in two
/// chunks.
pub fn a_long_chunk_has_the_bits_of_short_ones<B: Backend>(device: &Device<B>) {
    const TOKENS: usize = 200;
    const FIRST: usize = 90;
    assert!(
        TOKENS > ops::MULTIPROCESSORS as usize && TOKENS - FIRST < ops::MULTIPROCESSORS as usize
    );
    let stories = [even_story(TOKENS, 47)];
    for formats in FORMATS {
        let mut world = of_consecutive_windows(device, formats, &stories, (2, 0));
        let [whole, cut] = [0, 1].map(|_| world.fed.manager.admit().unwrap());
        for (id, range) in [(whole, 0..TOKENS), (cut, 0..FIRST), (cut, FIRST..TOKENS)] {
            let batch = Batch::new().add(id, &stories, 0, range);
            world.step(&batch, Padding::None, from_ref(&batch.all()));
        }
        assert_eq!(world.repeated, LAYERS.len() * TOKENS);
        world.fed.manager.check_faults(&world.fed.stream).unwrap();
    }
}

/// A cache for contexts so long that queries may have several splits also has the memory for them, in graphs too. Short
/// requests get the same bits in it as in other caches.
pub fn long_contexts_change_no_bit<B: Backend>(device: &Device<B>) {
    const CONTEXT: u32 = 1 << 19;
    let stories = [even_story(280, 45)];
    let mut seen = [0, 1].map(|_| Vec::new());
    for (max_context, seen) in [640, CONTEXT].into_iter().zip(&mut seen) {
        let mut world = World::with_context(device, &stories, max_context);
        let id = world.fed.manager.admit().unwrap();
        let batch = Batch::new().add(id, &stories, 0, 0..277);
        world.step(&batch, Padding::None, &[250..252, 276..277]);
        let decode = world.fed.bucket(4, 2);
        let graphs = world.capture(decode, 4);
        world.replay(&Batch::new().add(id, &stories, 0, 277..279), decode, &graphs);
        world.fed.manager.check_faults(&world.fed.stream).unwrap();
        *seen = world.seen();
    }
    assert_eq!(seen[0].len(), LAYERS.len() * 5);
    assert!(seen[0] == seen[1], "other bits in a cache for long contexts");
}

/// NaN rows and heads of one request never reach the result of another.
pub fn no_number_reaches_another_request<B: Backend>(device: &Device<B>) {
    let spoilt = Story::of_rows(&LAYERS, 40, 52, &|count, _| vec![vec![0x7FC0; 512]; count]);
    let stories = [even_story(40, 51), spoilt];
    let mut world = World::new(device, FORMATS[0], &stories, (2, 0));
    let [bad, good] = [0, 1].map(|_| world.fed.manager.admit().unwrap());
    let mut step = |range: Range<usize>| {
        // `world` does not check the tokens of the spoilt story.
        let mut batch = Batch::new().add(bad, &stories, 1, range.clone());
        batch.queries.fill(None);
        let batch = batch.add(good, &stories, 0, range.clone());
        let last = 2 * range.len() - 1;
        world.step(&batch, Padding::None, &[range.len() - 1..range.len(), last..last + 1]);
    };
    step(0..38);
    step(38..39);
}

/// Bad calls are refused with the value and the limit, and nothing is queued. The append of a long chunk ends the
/// attention of the layer.
pub fn bad_calls_are_refused<B: Backend>(device: &Device<B>) {
    const TOKENS: u64 = 3;
    let stories = [even_story(6, 61)];
    let mut world = World::new(device, FORMATS[0], &stories, (1, 1));
    let id = world.fed.manager.admit().unwrap();
    let parts = [Part::new(id, &stories[0], 0..TOKENS as usize)];
    world.fed.inputs.load(&world.fed.stream, &parts, TOKENS as u32);
    let World { fed, .. } = &mut world;
    let stream = fed.stream.clone();
    let (query, out) = (filled::<B, bf16>(&stream, 3 * 1024), filled::<B, bf16>(&stream, 3 * 1024));
    let (sinks, lse) = (upload(&stream, &[0.0_f32; 2]), filled::<B, f32>(&stream, 6));
    let lists = upload(&stream, &[-1_i32; 12]);
    let heads = || AttentionTensors {
        heads: HEADS as u32,
        query: &query,
        form: QueryForm::Rotated,
        sinks: &sinks,
        out: &out,
        lse: Some(&lse),
    };
    let mut steps = begin(&mut fed.manager, &stream, &parts, Padding::None).unwrap();
    for layer in (0..LAYERS.len() as u32).map(LayerId) {
        let updated = fed.inputs.update(&mut steps[0], layer).unwrap();
        let attend = |queries: Range<u32>, k, heads: AttentionTensors<'_, B>| {
            let lists = EntryLists { queries: queries.clone(), k, indices: &lists };
            updated.attend(queries, &lists, &heads)
        };
        refuse_ranges(&|queries| attend(queries, 4, heads()));
        for wrong in [0, 129, u32::MAX] {
            let error = attend(0..3, 4, AttentionTensors { heads: wrong, ..heads() }).unwrap_err();
            let KvError::Device(DeviceError::Argument { what, value, most, .. }) = error else {
                panic!("{error}")
            };
            assert_eq!((what, value, most), ("heads", wrong.into(), 128));
        }
        let [query, out] = [&query, &out].map(|all| all.slice(0, all.len() - 1).unwrap());
        let [sinks, lse] = [&sinks, &lse].map(|all| all.slice(0, all.len() - 1).unwrap());
        for (name, heads) in [
            ("query", AttentionTensors { query: &query, ..heads() }),
            ("sinks", AttentionTensors { sinks: &sinks, ..heads() }),
            ("out", AttentionTensors { out: &out, ..heads() }),
            ("lse", AttentionTensors { lse: Some(&lse), ..heads() }),
        ] {
            assert_short(attend(0..3, 4, heads), name);
        }
        if let Updated::Csa(_) = updated {
            assert_short(attend(0..3, 5, heads()), "selected");
            let of_two = EntryLists { queries: 1..3, k: 4, indices: &lists };
            let error = updated.attend(0..3, &of_two, &heads()).unwrap_err();
            let KvError::ListsMismatch(found) = error else { panic!("{error}") };
            assert_eq!((found.queries, found.lists), (0..3, 1..3));
            for wrong in [0, 1 << 31, u32::MAX] {
                let error = attend(0..3, wrong, heads()).unwrap_err();
                let KvError::Device(DeviceError::Argument { what, value, most, .. }) = error else {
                    panic!("{error}")
                };
                let expected = ("entries of a query", wrong.into(), i32::MAX as u64);
                assert_eq!((what, value, most), expected);
            }
        }
        updated.append().unwrap();
        let updated = fed.inputs.resume(&mut steps[0], layer).unwrap();
        let lists = EntryLists { queries: 0..3, k: 4, indices: &lists };
        let error = updated.attend(0..3, &lists, &heads()).unwrap_err();
        assert!(matches!(error, KvError::WindowOverwritten { tokens: 3, limit: 2 }), "{error}");
    }
    drop(steps);
    assert_eq!(download_bits(&stream, &out), vec![CANARY_BF16; 3 * 1024]);
    assert_eq!(download(&stream, &lse.view().cast::<u32>().unwrap()), vec![CANARY_F32; 6]);
}

fn refuse_ranges(attend: &dyn Fn(Range<u32>) -> Result<(), KvError>) {
    for queries in [0..4, 3..u32::MAX, Range { start: 2, end: 1 }] {
        let Err(KvError::NoSuchQueries { first, end, tokens }) = attend(queries.clone()) else {
            panic!("{queries:?}")
        };
        assert_eq!((first..end, tokens), (queries, 3));
    }
}

fn assert_short(result: Result<(), KvError>, name: &str) {
    let Err(KvError::Device(DeviceError::TooShort { argument, found, needed, .. })) = result else {
        panic!("{name}: {result:?}")
    };
    assert!(argument == name && found < needed, "{argument}: {found}");
}

/// A request and its progress in its story.
struct Progress {
    id: RequestId,
    story: usize,
    done: usize,
}

/// Random batches of several requests with chunks, drafts, padding and shapes of graphs. Each query is near `f64` when
/// it comes first, and has the same bits whenever it comes again.
fn random_batches<B: Backend>(device: &Device<B>, cluster: KeyCluster, batches: usize) {
    let mut random = StdRng::seed_from_u64(71);
    let stories: Vec<_> = [(140, 72), (70, 73), (270, 74), (33, 75), (280, 76)]
        .map(|(tokens, seed)| even_story(tokens, seed))
        .into();
    let drafts = stories.last().unwrap();
    let mut world = World::with_cluster(device, FORMATS[0], &stories, (3, 2), cluster);
    let mut live: Vec<Progress> = Vec::new();
    for _ in 0..batches {
        while live.len() < 3 {
            let (id, story) = (world.fed.manager.admit().unwrap(), random.random_range(0..4));
            live.push(Progress { id, story, done: 0 });
        }
        live.shuffle(&mut random);
        let mut batch = Batch::new();
        let mut ranges = Vec::new();
        let count = random.random_range(1..=live.len());
        for Progress { id, story, done } in &mut live[..count] {
            let (tokens, from) = (stories[*story].tokens(), batch.queries.len());
            let chunk = *[1, 1, 1, 2, 3, 9, 40, 128].choose(&mut random).unwrap();
            let end = (*done + chunk).min(tokens);
            batch = batch.add(*id, &stories, *story, *done..end);
            if end - *done < 3 && random.random_range(0..3) == 0 {
                batch = batch.add_drafts(drafts, *done + 3);
            }
            ranges.extend(sampled(from..batch.queries.len()));
            *done = end;
        }
        let tokens = batch.queries.len() as u32;
        let most = batch.parts.iter().map(|part| part.request().tokens).max().unwrap();
        let padding = match random.random_range(0..3) {
            0 => Padding::None,
            extra => Padding::Bucket(Bucket {
                tokens: (tokens + extra).min(3 * most),
                tokens_per_request: most,
                requests: 3,
                context: world.fed.manager.config().max_context,
            }),
        };
        world.step(&batch, padding, &ranges);
        live.retain(|&Progress { id, story, done }| {
            let over = done == stories[story].tokens();
            if over {
                world.fed.manager.release(id).unwrap();
            }
            !over
        });
    }
    world.fed.manager.check_faults(&world.fed.stream).unwrap();
    assert!(world.repeated > batches / 10, "{} queries came again", world.repeated);
}

/// A few of the batches of [`ten_thousand_batches_have_the_same_bits`].
pub fn some_batches_have_the_same_bits<B: Backend>(device: &Device<B>) {
    random_batches(device, KeyCluster::TwoBlocks, 6);
    random_batches(device, KeyCluster::OneBlock, 6);
}

/// Run by hand.
pub fn ten_thousand_batches_have_the_same_bits<B: Backend>(device: &Device<B>) {
    random_batches(device, KeyCluster::TwoBlocks, 10_000);
}

/// Run by hand.
pub fn ten_thousand_batches_have_the_same_bits_in_one_block<B: Backend>(device: &Device<B>) {
    random_batches(device, KeyCluster::OneBlock, 10_000);
}
