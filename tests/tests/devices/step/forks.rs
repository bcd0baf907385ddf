//! Forks continue independently, and suspended requests continue in other slots, with the bytes that they have alone.

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::schema::PoolUnit;
use dsv4_kv::{Accepted, CacheConfig, KvCacheManager, KvError, LayerGroup, Prompt, RequestId};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::fed::{Fed, Padding, Part, begin};
use crate::inputs::{assert_same, download};
use crate::stories::{Story, config, tiny};

const FORMATS: (MainFormat, IndexFormat) = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
const BLOCKS: u32 = 24;

fn fed<B: Backend>(device: &Device<B>, max_draft: u32, max_requests: u32) -> Fed<B> {
    let base = config(&tiny(), FORMATS, max_requests);
    let config =
        CacheConfig { max_draft, num_blocks: BLOCKS, max_suspended: 1, poison: true, ..base };
    Fed::new(device, config)
}

/// Feeds `id` up to `end` tokens, in chunks and in steps with rejected drafts, which `seed` decides. Gathers every row
/// of the steps' windows, and asserts that no kernel left one unwritten.
pub(super) fn feed<B: Backend>(
    fed: &mut Fed<B>,
    id: RequestId,
    (story, wrong): (&Story, &Story),
    end: usize,
    seed: u64,
) {
    let mut random = StdRng::seed_from_u64(seed);
    let drafts = fed.manager.config().max_draft as usize;
    let stream = fed.stream.clone();
    let mut done = fed.manager.ledger().committed(id).unwrap() as usize;
    while done < end {
        let is_chunk = random.random();
        let most = if is_chunk { 150 } else { drafts + 1 };
        let accepted = random.random_range(1..=most).min(end - done);
        let behind = if is_chunk { 0 } else { drafts + 1 - accepted };
        let last = done + accepted + behind;
        let pieces = vec![(story, done..done + accepted), (wrong, done + accepted..last)];
        let written = (last - done) as u32;
        fed.run(&[Part { id, pieces }], Padding::None, &[accepted as u32], &mut |_, layer| {
            layer.read_windows(written)
        });
        fed.manager.check_poison(&stream).unwrap();
        done += accepted;
    }
    fed.manager.check_faults(&stream).unwrap();
}

/// All bytes of a request: its slot and the blocks of its tokens, in each pool.
fn bytes_of<B: Backend>(fed: &Fed<B>, id: RequestId) -> Vec<(String, Vec<u8>)> {
    let tokens = fed.manager.ledger().committed(id).unwrap();
    let held = fed.manager.ledger().blocks_of(tokens) as usize;
    let blocks = fed.manager.block_table(id).unwrap()[..held].to_vec();
    let table = download(&fed.stream, &fed.manager.device_block_table());
    let row = &table[id.slot().0 as usize * 5..][..held];
    assert!(row.iter().zip(&blocks).all(|(&block, known)| block == known.0 as i32), "{row:?}");
    let mut all = Vec::new();
    for layer in &fed.manager.schema().layers {
        for pool in &layer.pools {
            let units = match pool.unit {
                PoolUnit::Slot => vec![id.slot().0],
                PoolUnit::Block => blocks.iter().map(|block| block.0).collect(),
            };
            let buffer = fed.manager.pool(layer.layer, pool.kind).unwrap();
            let unit = |unit: u32| {
                let unit = buffer.slice(u64::from(unit) * pool.unit_bytes(), pool.unit_bytes());
                download(&fed.stream, &unit.unwrap())
            };
            let bytes = units.into_iter().flat_map(unit).collect();
            all.push((format!("{:?} {:?}", layer.layer, pool.kind), bytes));
        }
    }
    all
}

fn assert_equal<B: Backend>(fed: &Fed<B>, got: RequestId, want: &[(String, Vec<u8>)], what: &str) {
    for ((name, got), (_, want)) in bytes_of(fed, got).iter().zip(want) {
        assert_same(got, want, &format!("{name} of {what}"));
    }
}

/// The bytes of a request that is fed alone: with one story up to `fork` tokens, then with another.
fn alone<B: Backend>(
    device: &Device<B>,
    max_draft: u32,
    [first, second, wrong]: [&Story; 3],
    [fork, end]: [usize; 2],
) -> Vec<(String, Vec<u8>)> {
    let mut fed = fed(device, max_draft, 1);
    let id = fed.manager.admit().unwrap();
    feed(&mut fed, id, (first, wrong), fork, 1);
    feed(&mut fed, id, (second, wrong), end, 2);
    bytes_of(&fed, id)
}

/// Forked at several places of a block, after rejected drafts too, a request and its fork continue with different
/// tokens. Each has the bytes of a request that was fed alone. A fork takes one block, or none at the end of a block.
/// When all requests have ended, in any order, all blocks are free.
pub fn forks_go_on_by_themselves<B: Backend>(device: &Device<B>) {
    let stories = [81, 82, 83].map(|seed| Story::random(&tiny(), 420, seed));
    let [x, y, wrong] = stories.each_ref();
    for (max_draft, fork, end) in [(0, 256, 300), (2, 131, 290), (3, 127, 260), (1, 3, 140)] {
        let mut fed = fed(device, max_draft, 3);
        let a = fed.manager.admit().unwrap();
        feed(&mut fed, a, (x, wrong), fork, 1);
        let stream = fed.stream.clone();
        let free = |fed: &Fed<B>| fed.manager.ledger().free_blocks();
        let before = free(&fed);
        let b = fed.manager.fork(&stream, a).unwrap();
        // Three tokens have no entry, and so no block.
        assert_eq!(before - free(&fed), u32::from(fork % 128 > 3), "at {fork}");
        assert_equal(&fed, b, &bytes_of(&fed, a), "a fork");
        for group in LayerGroup::ALL {
            assert_eq!(fed.manager.ledger().committed_in(group, b).unwrap(), fork as u32);
        }
        feed(&mut fed, b, (y, wrong), end, 2);
        feed(&mut fed, a, (x, wrong), end, 2);
        let want = [x, y].map(|then| alone(device, max_draft, [x, then, wrong], [fork, end]));
        assert_equal(&fed, a, &want[0], "the request");
        assert_equal(&fed, b, &want[1], "its fork");
        // A fork of the fork outlives both.
        let c = fed.manager.fork(&stream, b).unwrap();
        fed.manager.release(if max_draft % 2 == 0 { a } else { b }).unwrap();
        fed.manager.release(if max_draft % 2 == 0 { b } else { a }).unwrap();
        // Freed blocks become poison here; blocks that are still shared must not.
        let d = fed.manager.admit().unwrap();
        feed(&mut fed, d, (y, wrong), 130, 3);
        assert_equal(&fed, c, &want[1], "a fork of it");
        fed.manager.release(c).unwrap();
        fed.manager.release(d).unwrap();
        assert_eq!(free(&fed), BLOCKS, "all came back");
    }
}

/// Suspended at several positions, after rejected drafts too, a request continues in another slot while its old slot
/// has another request. It has the bytes of a request that was never suspended.
pub fn a_suspended_request_goes_on_elsewhere<B: Backend>(device: &Device<B>) {
    let stories = [84, 85, 86].map(|seed| Story::random(&tiny(), 420, seed));
    let [x, y, wrong] = stories.each_ref();
    for (max_draft, at, end) in [(0, 130, 200), (2, 126, 270), (3, 128, 131), (8, 259, 300)] {
        let mut fed = fed(device, max_draft, 2);
        let stream = fed.stream.clone();
        let a = fed.manager.admit().unwrap();
        feed(&mut fed, a, (x, wrong), at, 1);
        let before = bytes_of(&fed, a);
        let suspended = fed.manager.suspend(&stream, a).unwrap();
        assert_eq!(suspended.committed() as usize, at);
        let error = fed.manager.ledger().committed(a).unwrap_err();
        assert!(matches!(error, KvError::UnknownRequest { .. }), "{error}");
        let others = [0, 1].map(|_| fed.manager.admit().unwrap());
        for other in others {
            feed(&mut fed, other, (y, wrong), 150, 4);
        }
        let refused = fed.manager.resume(&stream, suspended).unwrap_err();
        assert!(matches!(refused.error(), KvError::NoFreeSlot { slots: 2 }), "{refused}");
        let error = fed.manager.suspend(&stream, others[1]).unwrap_err();
        assert!(matches!(error, KvError::NoRoomToSuspend { suspended: 1 }), "{error}");
        let slot = others.iter().find(|other| other.slot() != a.slot()).unwrap();
        fed.manager.release(*slot).unwrap();
        let b = fed.manager.resume(&stream, refused.into_suspended()).unwrap();
        assert_ne!(b.slot(), a.slot());
        assert_equal(&fed, b, &before, "the resumed request");
        feed(&mut fed, b, (x, wrong), end, 2);
        let want = alone(device, max_draft, [x, x, wrong], [at, end]);
        assert_equal(&fed, b, &want, "a request that went on");
        // Another request may be suspended now, and be discarded.
        let suspended = fed.manager.suspend(&stream, b).unwrap();
        let mut foreign =
            KvCacheManager::new(device.clone(), fed.manager.config().clone()).unwrap();
        let refused = foreign.discard(suspended).unwrap_err();
        assert!(matches!(refused.error(), KvError::ForeignSuspended), "{refused}");
        fed.manager.discard(refused.into_suspended()).unwrap();
        assert_eq!(fed.manager.ledger().free_suspended(), 1);
        let other = others.into_iter().find(|other| other.slot() == a.slot()).unwrap();
        fed.manager.release(other).unwrap();
        assert_eq!(fed.manager.ledger().free_blocks(), BLOCKS);
    }
}

/// Blocks that the prefix tree keeps for a request it also keeps for its fork, and while the request is suspended. They
/// can be evicted only when all of these have ended.
pub fn forks_and_suspended_requests_share_the_tree<B: Backend>(device: &Device<B>) {
    let base = config(&tiny(), FORMATS, 3);
    let config = CacheConfig { num_blocks: BLOCKS, num_checkpoints: 2, max_suspended: 1, ..base };
    let mut fed = Fed::new(device, CacheConfig { poison: true, ..config });
    let (stream, story) = (fed.stream.clone(), Story::random(&tiny(), 420, 88));
    let ids: Vec<u32> = (0..420).collect();
    let run = |fed: &mut Fed<B>, id: RequestId, to: usize| {
        let from = fed.manager.ledger().committed(id).unwrap() as usize;
        let parts = [Part::new(id, &story, from..to)];
        fed.inputs.load(&stream, &parts, (to - from) as u32);
        let mut steps = begin(&mut fed.manager, &stream, &parts, Padding::None).unwrap();
        for step in &mut steps {
            fed.inputs.run(step, &mut |_, _| Ok(())).unwrap();
        }
        let accepted = Accepted { id, accepted: (to - from) as u32, tokens: &ids[from..to] };
        steps.into_iter().for_each(|step| step.commit(&[accepted]).unwrap());
    };
    let prompt = Prompt { tokens: &ids[..300], salt: b"", adapter: b"" };
    let first = fed.manager.admit_with(&stream, &prompt).unwrap().id;
    run(&mut fed, first, 300);
    let second = fed.manager.admit_with(&stream, &prompt).unwrap();
    assert_eq!(second.reused, 256);
    run(&mut fed, second.id, 300);
    let fork = fed.manager.fork(&stream, second.id).unwrap();
    let before = bytes_of(&fed, second.id);
    assert_equal(&fed, fork, &before, "the fork");
    let suspended = fed.manager.suspend(&stream, second.id).unwrap();
    fed.manager.release(first).unwrap();
    let counts = |fed: &Fed<B>| {
        let ledger = fed.manager.ledger();
        (ledger.evictable_blocks(), ledger.free_blocks())
    };
    // Two shared blocks, and the last block of each request.
    assert_eq!(counts(&fed), (0, BLOCKS - 4));
    // The fork registers the blocks that it computes, as any request does.
    run(&mut fed, fork, 420);
    assert_equal(&fed, fork, &alone_of(device, &story), "the fork that went on");
    fed.manager.release(fork).unwrap();
    // The block that the fork completed, with a checkpoint at its end. The suspended request still uses the others.
    assert_eq!(fed.manager.ledger().evictable_blocks(), 1);
    let resumed = fed.manager.resume(&stream, suspended).unwrap();
    assert_equal(&fed, resumed, &before, "the resumed request");
    let suspended = fed.manager.suspend(&stream, resumed).unwrap();
    fed.manager.discard(suspended).unwrap();
    assert_eq!(counts(&fed), (3, BLOCKS - 3));
    fed.manager.check_faults(&stream).unwrap();
}

/// The bytes of a request that was computed alone, in the same steps as the fork, to the end of a story.
fn alone_of<B: Backend>(device: &Device<B>, story: &Story) -> Vec<(String, Vec<u8>)> {
    let mut fed = Fed::new(device, config(&tiny(), FORMATS, 1));
    let id = fed.manager.admit().unwrap();
    for range in [0..256, 256..300, 300..420] {
        fed.step(&[Part::new(id, story, range)], Padding::None);
    }
    bytes_of(&fed, id)
}

/// Refusals leave everything as it was.
pub fn what_cannot_fork_changes_nothing<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), 140, 87);
    let mut fed = fed(device, 0, 2);
    let stream = fed.stream.clone();
    let [a, b] = [0, 1].map(|_| fed.manager.admit().unwrap());
    fed.step(&[Part::new(a, &story, 0..140)], Padding::None);
    let error = fed.manager.fork(&stream, a).unwrap_err();
    assert!(matches!(error, KvError::NoFreeSlot { slots: 2 }), "{error}");
    fed.manager.release(b).unwrap();
    let error = fed.manager.fork(&stream, b).unwrap_err();
    assert!(matches!(error, KvError::UnknownRequest { .. }), "{error}");
    let error = fed.manager.suspend(&stream, b).unwrap_err();
    assert!(matches!(error, KvError::UnknownRequest { .. }), "{error}");
    let ledger = fed.manager.ledger();
    assert_eq!(ledger.free_blocks(), BLOCKS - 2);
    assert_eq!((ledger.live_requests(), ledger.free_suspended()), (1, 1));
}
