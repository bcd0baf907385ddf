//! Host memory that is lent, wanted and evicted: which prefixes stay there, and what the tier reports.

use dsv4_kv::device::{Device, EmuOptions, Emulator, Null, NullDevice};
use dsv4_kv::{
    Accepted, CacheConfig, CheckpointInfo, KvError, Launches, Origin, RequestId, RootKey,
    StepRequest, TierMiss,
};
use dsv4_kv_tests::fed::Fed;
use dsv4_kv_tests::lazy::Lazy;
use dsv4_kv_tests::stories::{STEP_TOKENS, Story};

use super::tier::{LAYERS, TOKENS, counts, lost, prompt, run, settings, tokens};

/// Blocks in the prefix of each prompt.
const BLOCKS: usize = 2;
/// A checkpoint of a prompt, without draft windows.
const OF_A_PROMPT: CheckpointInfo = CheckpointInfo { origin: Origin::Prompt, has_draft: false };

pub(super) fn story() -> Story {
    Story::random(&LAYERS, TOKENS, 441)
}

/// A cache with as much host memory as `prompts` prompts take.
pub(super) fn with_room_for(
    prompts: u64,
    change: impl FnOnce(CacheConfig) -> CacheConfig,
) -> Fed<Null> {
    let device = NullDevice::null(1 << 34);
    let base = CacheConfig { max_requests: 3, max_suspended: 1, ..settings() };
    let config = change(CacheConfig { poison: false, ..base });
    let fed = Fed::new(&device, config.clone());
    let (block, checkpoint) = fed.manager.host_image_bytes().unwrap();
    let units = prompts * (BLOCKS as u64 + checkpoint.div_ceil(block));
    Fed::new(&device, CacheConfig { host_bytes: units * block, ..config })
}

/// The same with `num_checkpoints` checkpoints on the device.
fn with_checkpoints(prompts: u64, num_checkpoints: u32) -> Fed<Null> {
    with_room_for(prompts, |base| CacheConfig { num_checkpoints, ..base })
}

/// Runs a prompt, waits until host memory has it, and ends it. Returns the number of reused tokens.
pub(super) fn pass(fed: &mut Fed<Null>, salt: &[u8]) -> u32 {
    let tokens = tokens();
    let admission = fed.manager.admit_with(&fed.stream, &prompt(&tokens, salt)).unwrap();
    run(fed, admission.id, &story(), admission.reused as usize);
    fed.manager.settle_tier(&fed.stream).unwrap();
    fed.manager.release(admission.id).unwrap();
    fed.manager.audit_tier().unwrap();
    admission.reused
}

/// A request of `tokens` tokens whose ids are not committed.
pub(super) fn fill(fed: &mut Fed<Null>, tokens: u32) -> RequestId {
    let id = fed.manager.admit().unwrap();
    for start in (0..tokens).step_by(STEP_TOKENS as usize) {
        let tokens = STEP_TOKENS.min(tokens - start);
        let request = [StepRequest { id, start, tokens }];
        let mut step = fed.manager.begin_step(&fed.stream, Launches::Eager, &request).unwrap();
        step.skip_kernels();
        step.commit(&[Accepted { id, accepted: tokens, tokens: &[] }]).unwrap();
    }
    id
}

/// Takes all blocks of the device for a moment, so that it loses every prompt.
fn evict(fed: &mut Fed<Null>) {
    let ids = [0, 1].map(|_| fill(fed, 640));
    assert_eq!(fed.manager.ledger().free_blocks(), 0);
    ids.iter().for_each(|&id| fed.manager.release(id).unwrap());
}

/// The tokens of another prompt with `blocks` blocks.
pub(super) fn other(blocks: usize) -> Vec<[u32; 128]> {
    vec![[7; 128]; blocks]
}

/// A reservation of more than host memory can free is refused, and nothing is evicted for it.
#[test]
fn room_is_all_or_nothing() {
    let mut fed = with_checkpoints(3, 1);
    pass(&mut fed, b"a");
    let root = RootKey::new(b"root", b"", b"");
    let (block, checkpoint) = fed.manager.host_image_bytes().unwrap();
    let of_checkpoint = checkpoint.div_ceil(block) as usize;
    let (_, all) = fed.manager.host_units();
    let reservation = fed.manager.reserve_host(&root, &other(1)).expect("there is room");
    let before = fed.manager.host_units();
    let tokens = other(all as usize - of_checkpoint);
    assert!(fed.manager.reserve_host(&root, &tokens).is_none(), "memory for one is reserved");
    assert_eq!(fed.manager.host_units(), before, "nothing was evicted for it");
    assert_eq!(fed.manager.tier_stats().evicted_blocks, 0);
    assert!(fed.manager.give_host_back(reservation).is_ok());
    let reservation =
        fed.manager.reserve_host(&root, &tokens).expect("all of it, for which a goes");
    assert_eq!(fed.manager.host_units().0, 0);
    assert!(fed.manager.give_host_back(reservation).is_ok());
    fed.manager.audit_tier().unwrap();
}

/// An image that a lower tier reads is not evicted, since that would free nothing.
#[test]
fn what_is_read_is_not_evicted() {
    let mut fed = with_checkpoints(2, 1);
    fed.manager.offer_host_images();
    pass(&mut fed, b"a");
    pass(&mut fed, b"b");
    let image = fed.manager.next_host_image().expect("it has arrived");
    let root = RootKey::new(b"root", b"", b"");
    let (_, all) = fed.manager.host_units();
    let (block, checkpoint) = fed.manager.host_image_bytes().unwrap();
    let blocks = all as usize - checkpoint.div_ceil(block) as usize;
    assert!(fed.manager.reserve_host(&root, &other(blocks)).is_none(), "one prompt is read");
    assert_eq!(fed.manager.host_units().0, 0, "nothing was evicted for it");
    fed.manager.audit_tier().unwrap();
    // The other prompt is evicted to make room.
    let reservation = fed.manager.reserve_host(&root, &other(BLOCKS)).expect("b is not read");
    fed.manager.audit_tier().unwrap();
    drop(image);
    assert!(fed.manager.give_host_back(reservation).is_ok());
    let reservation =
        fed.manager.reserve_host(&root, &other(blocks)).expect("nobody reads any more");
    assert!(fed.manager.give_host_back(reservation).is_ok());
    fed.manager.audit_tier().unwrap();
}

/// Host memory offers its checkpoints to a lower tier. If the tier takes none, the oldest offers beyond 1,024 are
/// dropped and counted.
#[test]
fn offers_that_nobody_looks_at_are_counted() {
    const OFFERS: u16 = 1024;
    let mut fed = with_checkpoints(u64::from(OFFERS) + 1, 1);
    fed.manager.offer_host_images();
    let tokens = tokens();
    for salt in 0..=OFFERS {
        assert_eq!(fed.manager.tier_stats().lost_offers, 0, "{salt} were offered");
        let salt = salt.to_le_bytes();
        let id = fed.manager.admit_with(&fed.stream, &prompt(&tokens, &salt)).unwrap().id;
        let step = [StepRequest { id, start: 0, tokens: TOKENS as u32 }];
        let mut step = fed.manager.begin_step(&fed.stream, Launches::Eager, &step).unwrap();
        step.skip_kernels();
        step.commit(&[Accepted { id, accepted: TOKENS as u32, tokens: &tokens }]).unwrap();
        fed.manager.settle_tier(&fed.stream).unwrap();
        fed.manager.release(id).unwrap();
    }
    let stats = fed.manager.tier_stats();
    assert_eq!((stats.lost_offers, stats.evicted_checkpoints), (1, 0));
    for salt in 1..=OFFERS {
        let root = fed.manager.host_prompt(&prompt(&tokens, &salt.to_le_bytes())).unwrap().root;
        let image = fed.manager.next_host_image().expect("it is offered");
        assert_eq!(image.root, root, "{salt}");
    }
    assert!(fed.manager.next_host_image().is_none(), "the first one is not");
}

/// Memory whose reservation a lower tier drops is free again, and so are the references to the blocks above it.
#[test]
fn dropped_room_is_free_again() {
    let mut fed = with_checkpoints(2, 1);
    fed.manager.offer_host_images();
    pass(&mut fed, b"a");
    let image = fed.manager.next_host_image().expect("it has arrived");
    let (root, mut behind) = (image.root.clone(), image.tokens.clone());
    drop(image);
    behind.push([9; 128]);
    let (block, checkpoint) = fed.manager.host_image_bytes().unwrap();
    let (before, all) = fed.manager.host_units();
    for _ in 0..3 {
        let reservation = fed.manager.reserve_host(&root, &behind).expect("there is room");
        assert_eq!(reservation.above(), BLOCKS as u32);
        drop(reservation);
    }
    fed.manager.advance_tier(&fed.stream).unwrap();
    assert_eq!(fed.manager.host_units().0, before);
    fed.manager.audit_tier().unwrap();
    let blocks = all as usize - checkpoint.div_ceil(block) as usize;
    let reservation = fed.manager.reserve_host(&RootKey::new(b"", b"", b""), &other(blocks));
    let reservation = reservation.expect("nothing is held any more");
    assert!(fed.manager.give_host_back(reservation).is_ok());
}

/// Host memory keeps a prompt from which requests continue on the device, although the device has it too.
#[test]
fn what_the_device_uses_stays_in_host_memory() {
    let mut fed = with_checkpoints(2, 2);
    let tokens = tokens();
    pass(&mut fed, b"a");
    pass(&mut fed, b"b");
    assert_eq!(pass(&mut fed, b"a"), 256, "on the device");
    pass(&mut fed, b"c");
    evict(&mut fed);
    let there = |salt| fed.manager.host_prompt(&prompt(&tokens, salt)).unwrap().reusable;
    assert_eq!([there(&b"a"[..]), there(b"b"), there(b"c")], [256, 0, 256]);
    // No request asks for the prompt again, so it is evicted.
    let mut fed = with_checkpoints(2, 2);
    for salt in [b"a", b"b", b"c"] {
        pass(&mut fed, salt);
    }
    evict(&mut fed);
    let there = |salt| fed.manager.host_prompt(&prompt(&tokens, salt)).unwrap().reusable;
    assert_eq!([there(&b"a"[..]), there(b"b"), there(b"c")], [0, 256, 256]);
}

/// A stream of another device is refused before anything is evicted, taken or begun.
#[test]
fn a_stream_of_another_device_changes_nothing() {
    let mut fed = with_checkpoints(2, 1);
    let foreign = NullDevice::null(1 << 30).stream().unwrap();
    let tokens = tokens();
    pass(&mut fed, b"a");
    pass(&mut fed, b"b");
    // A request whose last block would be copied; that takes an eviction.
    let id = fed.manager.admit().unwrap();
    run(&mut fed, id, &story(), 0);
    let free = fed.manager.ledger().free_blocks();
    fill(&mut fed, free * 128);
    assert_eq!(fed.manager.ledger().free_blocks(), 0);
    let (before, stats) = (counts(&fed), fed.manager.tier_stats());
    let ask = prompt(&tokens, b"a");
    let errors = [
        fed.manager.prefetch(&foreign, &ask).map(drop),
        fed.manager.advance_tier(&foreign),
        fed.manager.settle_tier(&foreign),
        fed.manager.admit_waiting(&foreign, &ask).map(drop),
        fed.manager.admit_with(&foreign, &ask).map(drop),
        fed.manager.fork(&foreign, id).map(drop),
        fed.manager.suspend(&foreign, id).map(drop),
        fed.manager.save_checkpoints(&foreign, &[(id, 256)]).map(drop),
    ];
    for (call, result) in errors.into_iter().enumerate() {
        assert!(matches!(result, Err(KvError::Device(_))), "{call}: {result:?}");
    }
    assert_eq!(counts(&fed), before);
    assert_eq!(fed.manager.tier_stats(), stats);
    fed.manager.ledger().audit().unwrap();
    assert_eq!(fed.manager.ledger().committed(id).unwrap(), TOKENS as u32);
}

/// A prompt that is requested several times is brought back once. Blocks that the tree got meanwhile are not counted.
#[test]
fn a_prompt_is_wanted_once() {
    let device: Device<Lazy<Emulator>> = Lazy::emulated(EmuOptions::default());
    let [a, b] = [442, 443].map(|seed| Story::random(&LAYERS, TOKENS, seed));
    let mut fed = lost(&device, [&a, &b]);
    let tokens = tokens();
    let ask = prompt(&tokens, b"a");
    let ids =
        [0; 3].map(|_| fed.manager.prefetch(&fed.stream, &ask).unwrap().expect("it is there"));
    // Another request computes the prompt during its transfer.
    let admission = fed.manager.admit_with(&fed.stream, &ask).unwrap();
    assert_eq!(admission.reused, 0);
    run(&mut fed, admission.id, &a, 0);
    fed.manager.settle_tier(&fed.stream).unwrap();
    assert!(ids.iter().all(|&id| !fed.manager.is_prefetching(id)));
    let stats = fed.manager.tier_stats();
    assert_eq!(stats.misses, [0; TierMiss::ALL.len()], "{stats:?}");
    assert_eq!(stats.restored_blocks, 0, "the tree had them by then");
    fed.manager.release(admission.id).unwrap();
    assert_eq!(fed.manager.ledger().tree_counts().blocks, 2);

    // A cancelled prefetch is not wanted any more, unless another call wants the same prompt.
    let mut fed = lost(&device, [&a, &b]);
    let mut other = lost(&device, [&a, &b]);
    let id = fed.manager.prefetch(&fed.stream, &ask).unwrap().expect("it is there");
    let same = fed.manager.prefetch(&fed.stream, &ask).unwrap().expect("it is there");
    let foreign = other.manager.prefetch(&other.stream, &ask).unwrap().expect("it is there");
    assert!(!fed.manager.is_prefetching(foreign), "that is another cache's");
    assert!(!fed.manager.cancel_prefetch(foreign));
    assert!(fed.manager.cancel_prefetch(id));
    assert!(fed.manager.is_prefetching(same), "somebody else wants it");
    assert!(fed.manager.cancel_prefetch(same));
    assert!(!fed.manager.is_prefetching(same) && !fed.manager.is_prefetching(id));
    assert!(!fed.manager.cancel_prefetch(same));
}

/// A request that waits for a prompt gets it before all other prefetches, and does not wait for copies to host memory.
#[test]
fn waiting_is_for_one_prompt_alone() {
    let device: Device<Lazy<Emulator>> = Lazy::emulated(EmuOptions::default());
    let story = Story::random(&LAYERS, TOKENS, 442);
    let mut fed = Fed::new(&device, CacheConfig { num_checkpoints: 2, ..settings() });
    let tokens = tokens();
    let compute = |fed: &mut Fed<_>, salt: &[u8]| {
        let admission = fed.manager.admit_with(&fed.stream, &prompt(&tokens, salt)).unwrap();
        run(fed, admission.id, &story, 0);
        admission.id
    };
    for salt in [b"a", b"b", b"c", b"d"] {
        let id = compute(&mut fed, salt);
        fed.manager.settle_tier(&fed.stream).unwrap();
        fed.manager.release(id).unwrap();
    }
    let leaving = compute(&mut fed, b"e");
    fed.manager.advance_tier(&fed.stream).unwrap();
    // The device has d and e, and e is being copied to host memory.
    let [a, b] = [b"a", b"b"].map(|salt| prompt(&tokens, salt));
    let ids =
        [a, b].map(|ask| fed.manager.prefetch(&fed.stream, &ask).unwrap().expect("it is lost"));
    let before = fed.manager.tier_stats();
    let admission = fed.manager.admit_waiting(&fed.stream, &a).unwrap();
    assert_eq!(admission.reused, 256);
    let after = fed.manager.tier_stats();
    assert_eq!(after.restored_checkpoints - before.restored_checkpoints, 1, "a came once, b waits");
    assert_eq!(after.stored_checkpoints, before.stored_checkpoints, "e is still on its way");
    assert_eq!(ids.map(|id| fed.manager.is_prefetching(id)), [false, true]);
    // There is no room for b until e is in host memory: then the call waits for e.
    fed.manager.release(leaving).unwrap();
    fed.manager.release(admission.id).unwrap();
    let pinned = fed.manager.admit_with(&fed.stream, &a).unwrap();
    let admission = fed.manager.admit_waiting(&fed.stream, &b).unwrap();
    assert_eq!((pinned.reused, admission.reused), (256, 256));
    let after = fed.manager.tier_stats();
    assert_eq!(after.stored_checkpoints - before.stored_checkpoints, 1, "e made room");
}

/// A cache without a free slot refuses before it waits, moves or evicts anything.
#[test]
fn a_full_cache_moves_nothing() {
    let mut fed = with_checkpoints(2, 1);
    let tokens = tokens();
    pass(&mut fed, b"a");
    pass(&mut fed, b"b");
    for _ in 0..3 {
        fed.manager.admit().unwrap();
    }
    let (before, stats) = (counts(&fed), fed.manager.tier_stats());
    let full = fed.manager.admit_waiting(&fed.stream, &prompt(&tokens, b"a"));
    assert!(matches!(full, Err(KvError::NoFreeSlot { slots: 3 })), "{full:?}");
    assert_eq!(counts(&fed), before);
    assert_eq!(fed.manager.tier_stats(), stats);
    assert!(!fed.manager.has_tier_transfers());
}

/// A checkpoint that is requested twice for one position is saved once.
#[test]
fn a_wanted_position_is_saved_once() {
    let mut fed = with_checkpoints(2, 4);
    let id = fill(&mut fed, 256);
    for _ in 0..2 {
        fed.manager.want_checkpoint(id, 256).unwrap();
    }
    fed.manager.save_wanted(&fed.stream).unwrap();
    assert_eq!(fed.manager.take_saved().len(), 1);
}

/// A reservation accepts images of exactly its sizes, all of them, and only in its own cache.
#[test]
fn room_is_filled_exactly() {
    let mut fed = with_checkpoints(2, 1);
    let root = RootKey::new(b"root", b"", b"");
    let (block, checkpoint) = fed.manager.host_image_bytes().unwrap();
    let [block, checkpoint] = [block, checkpoint].map(|bytes| vec![1; bytes as usize]);
    let (few, many) = (&block[1..], [&block[..], &[1]].concat());
    let mut reservation = fed.manager.reserve_host(&root, &other(2)).expect("there is room");
    let whole = &checkpoint[..];
    let longer = [whole, &[1]].concat();
    let one = &block[..];
    let wrong: [(&[&[u8]], &[u8]); 7] = [
        (&[one], whole),
        (&[one; 3], whole),
        (&[one, few], whole),
        (&[one, &many], whole),
        (&[one; 2], &whole[1..]),
        (&[one; 2], &longer),
        (&[one; 2], &[]),
    ];
    for (at, (blocks, checkpoint)) in wrong.into_iter().enumerate() {
        let blocks = blocks.iter().copied();
        assert!(!reservation.fill(blocks, checkpoint, OF_A_PROMPT), "{at}");
    }
    assert!(matches!(fed.manager.enter_host(reservation), Ok(false)), "it was not filled");
    fed.manager.audit_tier().unwrap();

    // A reservation that was filled, and is filled again by images that panic, is not full.
    let mut reservation = fed.manager.reserve_host(&root, &other(2)).expect("there is room");
    assert!(reservation.fill([one; 2], whole, OF_A_PROMPT));
    let panics = std::panic::AssertUnwindSafe(|| {
        let images = [one; 2].into_iter().enumerate().map(|(at, one)| match at {
            0 => one,
            _ => std::panic::resume_unwind(Box::new(())),
        });
        reservation.fill(images, whole, OF_A_PROMPT)
    });
    assert!(std::panic::catch_unwind(panics).is_err());
    assert!(matches!(fed.manager.enter_host(reservation), Ok(false)), "it was not filled again");

    let mut reservation = fed.manager.reserve_host(&root, &other(2)).expect("there is room");
    assert!(reservation.fill([&block[..]; 2], whole, OF_A_PROMPT));
    let mut strange = with_checkpoints(2, 1);
    let reservation =
        strange.manager.give_host_back(reservation).expect_err("it is another cache's");
    let reservation =
        strange.manager.enter_host(reservation).map(drop).expect_err("it is another cache's");
    assert!(matches!(fed.manager.enter_host(reservation), Ok(true)), "its own takes it still");
    assert!(fed.manager.reserve_host(&root, &other(2)).is_none(), "it is there");
    fed.manager.audit_tier().unwrap();
}

/// Blocks that entered host memory from a lower tier while they were copied there are not counted as stored.
#[test]
fn what_host_memory_has_by_then_is_not_stored() {
    let device: Device<Lazy<Emulator>> = Lazy::emulated(EmuOptions::default());
    let story = Story::random(&LAYERS, TOKENS, 444);
    let mut fed = Fed::new(&device, settings());
    let tokens = tokens();
    let ask = prompt(&tokens, b"a");
    let admission = fed.manager.admit_with(&fed.stream, &ask).unwrap();
    run(&mut fed, admission.id, &story, 0);
    fed.manager.advance_tier(&fed.stream).unwrap();
    let root = fed.manager.host_prompt(&ask).unwrap().root;
    let (block, checkpoint) = fed.manager.host_image_bytes().unwrap();
    let [block, checkpoint] = [block, checkpoint].map(|bytes| vec![1; bytes as usize]);
    let blocks = &tokens.as_chunks().0[..BLOCKS];
    let mut reservation = fed.manager.reserve_host(&root, blocks).expect("it is on its way");
    assert!(reservation.fill([&block[..]; BLOCKS], &checkpoint, OF_A_PROMPT));
    assert!(matches!(fed.manager.enter_host(reservation), Ok(true)));
    fed.manager.settle_tier(&fed.stream).unwrap();
    let stats = fed.manager.tier_stats();
    assert_eq!((stats.stored_blocks, stats.stored_checkpoints), (0, 0));
    assert!(stats.bytes_to_host > 0, "they were copied");
    fed.manager.audit_tier().unwrap();
}

/// The queue of prompts has a limit.
#[test]
fn the_queue_of_prompts_is_bounded() {
    let device = Device::from_backend(Lazy::new(Null::new(1 << 34)));
    let mut fed =
        Fed::new(&device, CacheConfig { poison: false, host_bytes: 64 << 20, ..settings() });
    let (tokens, story) = (tokens(), story());
    for salt in 0..70 {
        let admission = fed.manager.admit_with(&fed.stream, &prompt(&tokens, &[salt])).unwrap();
        run(&mut fed, admission.id, &story, 0);
        fed.manager.settle_tier(&fed.stream).unwrap();
        fed.manager.release(admission.id).unwrap();
    }
    // One is being moved, and 64 wait.
    for salt in 0..65 {
        assert!(fed.manager.prefetch(&fed.stream, &prompt(&tokens, &[salt])).unwrap().is_some());
    }
    let refused = fed.manager.prefetch(&fed.stream, &prompt(&tokens, &[65]));
    assert!(matches!(refused, Err(KvError::TooManyPrefetches { most: 64 })), "{refused:?}");
    let again = fed.manager.prefetch(&fed.stream, &prompt(&tokens, &[64])).unwrap();
    assert!(again.is_some(), "it waits already");
    // A request that waits is served all the same.
    let admission = fed.manager.admit_waiting(&fed.stream, &prompt(&tokens, &[66])).unwrap();
    assert_eq!(admission.reused, 256);
}

/// A cache ends its transfers before it is taken apart.
#[test]
fn a_cache_is_given_up_when_nothing_moves() {
    let device: Device<Lazy<Emulator>> = Lazy::emulated(EmuOptions::default());
    let [a, b] = [445, 446].map(|seed| Story::random(&LAYERS, TOKENS, seed));
    let tokens = tokens();
    let images = [true, false].map(|settled| {
        let mut fed = lost(&device, [&a, &b]);
        fed.manager.prefetch(&fed.stream, &prompt(&tokens, b"a")).unwrap().expect("it is there");
        if settled {
            fed.manager.settle_tier(&fed.stream).unwrap();
        }
        let stream = fed.stream.clone();
        let copied = fed.manager.into_copied_state(&fed.stream, |arena, _, _| {
            let mut bytes = vec![0; arena.image_bytes as usize];
            stream.download(&arena.images.view(), 0, &mut bytes).unwrap();
            bytes
        });
        copied.unwrap()
    });
    assert!(images[0] == images[1], "the checkpoint had arrived");
}
