//! The host tier on devices that defer their work, or fail: memory in a transfer stays held, and an error leaves
//! everything as it was.

use std::collections::BTreeMap;

use dsv4_kv::device::{Backend, Device, EmuDevice, EmuOptions, Emulator, NullDevice};
use dsv4_kv::{Accepted, CacheConfig, KvError, Prompt, RequestId, StepRequest, TierMiss};
use dsv4_kv_tests::failing::{Failing, Failure, each_call};
use dsv4_kv_tests::fed::{Fed, Padding, Part, begin};
use dsv4_kv_tests::lazy::Lazy;
use dsv4_kv_tests::stories::{Story, config, tiny};
use kv_layout::geometry::LayerKind::{self, Csa, Hca, Swa};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

pub(super) const FORMATS: (MainFormat, IndexFormat) = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
/// One layer of each kind.
pub(super) const LAYERS: [LayerKind; 3] = [Swa, Csa, Hca];
pub(super) const TOKENS: usize = 300;

pub(super) fn settings() -> CacheConfig {
    let base = config(&LAYERS, FORMATS, 2);
    CacheConfig {
        num_checkpoints: 1,
        checkpoint_interval: 0,
        host_bytes: 8 << 20,
        poison: true,
        ..base
    }
}

pub(super) fn tokens() -> Vec<u32> {
    (0..TOKENS as u32).collect()
}

pub(super) fn prompt<'p>(tokens: &'p [u32], salt: &'p [u8]) -> Prompt<'p> {
    Prompt { tokens, salt, adapter: b"" }
}

/// Runs the tokens of a request from `from` on, and commits their ids.
pub(super) fn run<B: Backend>(fed: &mut Fed<B>, id: RequestId, story: &Story, from: usize) {
    let tokens = tokens();
    let parts = [Part::new(id, story, from..TOKENS)];
    fed.inputs.load(&fed.stream, &parts, (TOKENS - from) as u32);
    let mut steps = begin(&mut fed.manager, &fed.stream, &parts, Padding::None).unwrap();
    for step in &mut steps {
        fed.inputs.run(step, &mut |_, _| Ok(())).unwrap();
    }
    let told = Accepted { id, accepted: (TOKENS - from) as u32, tokens: &tokens[from..] };
    steps.into_iter().for_each(|step| step.commit(&[told]).unwrap());
}

/// Counts of the blocks, checkpoints, requests and host units that are held or free.
pub(super) fn counts<B: Backend>(fed: &Fed<B>) -> Vec<u32> {
    fed.manager.ledger().audit().unwrap();
    let ledger = fed.manager.ledger();
    let (tree, (free, all)) = (ledger.tree_counts(), fed.manager.host_units());
    let blocks = [ledger.free_blocks(), tree.blocks, tree.evictable_blocks];
    let others = [ledger.free_checkpoints(), tree.checkpoints, ledger.live_requests(), free, all];
    blocks.into_iter().chain(others).collect()
}

/// A cache whose host memory has two prompts, the first of which the device has lost to the second.
pub(super) fn lost<B: Backend>(device: &Device<B>, stories: [&Story; 2]) -> Fed<B> {
    let mut fed = Fed::new(device, settings());
    let tokens = tokens();
    for (story, salt) in stories.into_iter().zip([b"a", b"b"]) {
        let admission = fed.manager.admit_with(&fed.stream, &prompt(&tokens, salt)).unwrap();
        run(&mut fed, admission.id, story, 0);
        fed.manager.settle_tier(&fed.stream).unwrap();
        fed.manager.release(admission.id).unwrap();
    }
    fed.manager.audit_tier().unwrap();
    fed
}

/// Steps come first on the device: the streams of the tier, two for each direction, have the lowest priority.
#[test]
fn steps_come_before_copies() {
    for (host_bytes, streams) in [(0, 0), (settings().host_bytes, 4)] {
        let device = Failing::emulated(EmuOptions::default());
        let _fed = Fed::new(&device, CacheConfig { host_bytes, ..settings() });
        assert_eq!(device.backend().background_streams(), streams, "{host_bytes} bytes");
    }
}

/// A checkpoint that a chunk saved has no windows of draft layers. In its place on the device are those of a request that used it
/// before, perhaps one of another salt; they do not go to host memory.
#[test]
fn draft_windows_of_others_stay_on_the_device() {
    let device = EmuDevice::new(EmuOptions::default());
    let base = config(&tiny(), FORMATS, 2);
    let settings = CacheConfig { model: base.model.clone(), num_blocks: 10, ..settings() };
    let mut fed = Fed::new(&device, CacheConfig { max_context: base.max_context, ..settings });
    fed.manager.offer_host_images();
    let (story, tokens) = (Story::random(&tiny(), TOKENS, 436), tokens());
    let id = fed.manager.admit_with(&fed.stream, &prompt(&tokens, b"a")).unwrap().id;
    run(&mut fed, id, &story, 0);
    fed.manager.settle_tier(&fed.stream).unwrap();
    let image = fed.manager.next_host_image().expect("it has arrived");
    assert!(!image.info.has_draft);
    let bytes: Vec<u8> = image.checkpoint().flatten().copied().collect();
    // The cache is poisoned, so that memory to which nothing was written is not 0.
    let (trunk, draft) = bytes.split_at(bytes.len() - 128 * (576 + 8));
    assert!(trunk.iter().any(|&byte| byte != 0) && draft.iter().all(|&byte| byte == 0));
}

/// Every device call of a transfer fails in turn, in both directions. Afterwards everything is held as before, and the
/// next attempt moves every byte.
#[test]
fn a_transfer_that_fails_changes_nothing() {
    for how in [Failure::Instead, Failure::After] {
        let device = Failing::emulated(EmuOptions::default());
        let [story, other] = [431, 432].map(|seed| Story::random(&LAYERS, TOKENS, seed));
        let stored = story.stored(&device, FORMATS);
        let mut fed = lost(&device, [&story, &other]);
        let tokens = tokens();
        // The first attempt makes room on the device, which stays free.
        device.backend().fail(0, how);
        fed.manager.prefetch(&fed.stream, &prompt(&tokens, b"a")).unwrap_err();
        device.backend().fail_nothing();
        let before = counts(&fed);
        assert_eq!((before[0], before[3]), (10, 1), "all of it: nobody runs");
        let mut failures = 0;
        for call in each_call() {
            device.backend().fail(call, how);
            let result = fed.manager.prefetch(&fed.stream, &prompt(&tokens, b"a"));
            let failed = device.backend().failed();
            device.backend().fail_nothing();
            match result {
                Err(KvError::Device(_)) => assert!(failed.is_some()),
                Ok(Some(id)) => {
                    assert!(failed.is_none(), "the failure of {failed:?} was swallowed");
                    assert!(fed.manager.is_prefetching(id));
                    break;
                }
                other => panic!("{other:?}"),
            }
            failures += 1;
            assert_eq!(counts(&fed), before, "{how:?}, call {call}, {failed:?}");
            fed.manager.audit_tier().unwrap();
        }
        assert!(failures >= 8, "{failures} calls of a prefetch fail");
        let misses = fed.manager.tier_stats().misses;
        assert_eq!(misses[TierMiss::Device.index()], failures + 1, "each once");
        assert_eq!(misses[TierMiss::Cancelled.index()], 0, "nobody cancelled anything");
        // The call that enters a finished load in the tree may fail too; the next call repeats it.
        for call in 0..2 {
            device.backend().fail(call, how);
            let result = fed.manager.settle_tier(&fed.stream);
            device.backend().fail_nothing();
            assert!(matches!(result, Err(KvError::Device(_))), "{result:?}");
        }
        fed.manager.settle_tier(&fed.stream).unwrap();
        let admission = fed.manager.admit_with(&fed.stream, &prompt(&tokens, b"a")).unwrap();
        assert_eq!(admission.reused, 256);
        run(&mut fed, admission.id, &story, 256);
        fed.assert_holds(admission.id, &story, &stored, TOKENS);
        fed.manager.release(admission.id).unwrap();
        fed.manager.check_faults(&fed.stream).unwrap();

        // From the device to host memory.
        let admission = fed.manager.admit_with(&fed.stream, &prompt(&tokens, b"c")).unwrap();
        run(&mut fed, admission.id, &story, 0);
        let before = counts(&fed);
        let (mut failures, units) = (0, before[6]);
        for call in each_call() {
            device.backend().fail(call, how);
            let result = fed.manager.advance_tier(&fed.stream);
            let failed = device.backend().failed();
            device.backend().fail_nothing();
            match result {
                Ok(()) if failed.is_none() => break,
                Err(KvError::Device(_)) => {}
                other => panic!("{other:?}, {failed:?}"),
            }
            assert_eq!(counts(&fed), before, "{how:?}, call {call}, {failed:?}");
            fed.manager.audit_tier().unwrap();
            failures += 1;
        }
        assert!(failures >= 8, "{failures} calls of a transfer to the host fail");
        fed.manager.settle_tier(&fed.stream).unwrap();
        assert!(fed.manager.host_units().0 < units, "it is there now");
        fed.manager.release(admission.id).unwrap();
        assert!(fed.manager.tier_stats().misses[TierMiss::Device.index()] > 8);
    }
}

/// On a device that defers its work: memory in a transfer cannot be taken by others, whatever requests end or are
/// admitted in the meantime, and the room of a cancelled transfer is free when the transfer is done.
#[test]
fn what_is_on_its_way_is_held() {
    let device: Device<Lazy<Emulator>> = Lazy::emulated(EmuOptions::default());
    let [story, other] = [433, 434].map(|seed| Story::random(&LAYERS, TOKENS, seed));
    let mut fed = lost(&device, [&story, &other]);
    let tokens = tokens();
    // The request that waited for the prompt ends, which does not affect the transfer.
    let waiting = fed.manager.admit().unwrap();
    let id =
        fed.manager.prefetch(&fed.stream, &prompt(&tokens, b"a")).unwrap().expect("it is there");
    fed.manager.advance_tier(&fed.stream).unwrap();
    assert!(fed.manager.is_prefetching(id), "nobody waited");
    fed.manager.release(waiting).unwrap();
    assert_eq!(fed.manager.ledger().free_blocks(), 8, "room for two blocks is taken");
    assert_eq!(fed.manager.ledger().evictable_blocks(), 0);
    // Other requests cannot take the room.
    let others = [0, 1].map(|_| fed.manager.admit().unwrap());
    for id in others {
        fed.lose(&[Part::new(id, &other, 0..512)]);
    }
    let more = [StepRequest { id: others[0], start: 512, tokens: 128 }];
    let refused = fed.manager.begin_step(&fed.stream, dsv4_kv::Launches::Eager, &more).map(drop);
    assert!(matches!(refused, Err(KvError::OutOfBlocks { needed: 1, free: 0 })), "{refused:?}");
    let refused = fed.manager.save_checkpoints(&fed.stream, &[(others[0], 512)]);
    assert!(
        matches!(refused, Err(KvError::OutOfCheckpoints { needed: 1, free: 0 })),
        "{refused:?}"
    );
    others.iter().for_each(|&id| fed.manager.release(id).unwrap());
    assert!(fed.manager.is_prefetching(id), "nobody waited");
    assert!(fed.manager.cancel_prefetch(id));
    assert!(!fed.manager.cancel_prefetch(id), "once");
    assert_eq!(fed.manager.ledger().free_blocks(), 8, "it is still written");
    fed.manager.settle_tier(&fed.stream).unwrap();
    assert!(!fed.manager.is_prefetching(id));
    assert_eq!(fed.manager.ledger().free_blocks(), 10);
    assert_eq!(fed.manager.ledger().free_checkpoints(), 1);
    assert_eq!(fed.manager.tier_stats().misses[TierMiss::Cancelled.index()], 1);

    // From the device to host memory: the request ends, and the blocks stay until they were read.
    let stored = story.stored(&device, FORMATS);
    let admission = fed.manager.admit_with(&fed.stream, &prompt(&tokens, b"c")).unwrap();
    run(&mut fed, admission.id, &story, 0);
    fed.manager.advance_tier(&fed.stream).unwrap();
    fed.manager.release(admission.id).unwrap();
    assert_eq!(fed.manager.ledger().tree_counts().evictable_blocks, 0, "it is still read");
    // Writes of other requests must not reach host memory.
    let next = fed.manager.admit().unwrap();
    fed.lose(&[Part::new(next, &other, 0..TOKENS)]);
    fed.manager.settle_tier(&fed.stream).unwrap();
    assert_eq!(fed.manager.ledger().tree_counts().evictable_blocks, 2);
    fed.manager.release(next).unwrap();
    let next = fed.manager.admit_with(&fed.stream, &prompt(&tokens, b"d")).unwrap();
    run(&mut fed, next.id, &other, 0);
    fed.manager.release(next.id).unwrap();
    // The first prompt was copied right after its steps, for the last of which the host had not waited.
    for salt in [b"a", b"c"] {
        let back = fed.manager.admit_waiting(&fed.stream, &prompt(&tokens, salt)).unwrap();
        assert_eq!(back.reused, 256);
        run(&mut fed, back.id, &story, 256);
        fed.assert_holds(back.id, &story, &stored, TOKENS);
        fed.manager.release(back.id).unwrap();
    }
    fed.manager.check_faults(&fed.stream).unwrap();
}

/// A request that waits for a prompt uses the transfer of another prompt with the same prefix. A third prompt, which
/// would evict it, is brought back later.
#[test]
fn what_another_prompt_brought_is_there_for_a_request_that_waits() {
    let device: Device<Lazy<Emulator>> = Lazy::emulated(EmuOptions::default());
    let [story, other] = [436, 437].map(|seed| Story::random(&LAYERS, TOKENS, seed));
    let mut fed = lost(&device, [&story, &other]);
    let (tokens, mut longer) = (tokens(), tokens());
    longer.push(7);
    // The first is in transfer, to the only checkpoint of the device, and the second waits for its turn.
    let wanted = [b"a", b"b"]
        .map(|salt| fed.manager.prefetch(&fed.stream, &prompt(&tokens, salt)).unwrap().unwrap());
    assert!(wanted.iter().all(|&id| fed.manager.is_prefetching(id)));
    let admission = fed.manager.admit_waiting(&fed.stream, &prompt(&longer, b"a")).unwrap();
    assert_eq!(admission.reused, 256);
    assert_eq!(wanted.map(|id| fed.manager.is_prefetching(id)), [false, true]);
    fed.manager.release(admission.id).unwrap();
    fed.manager.settle_tier(&fed.stream).unwrap();
    let admission = fed.manager.admit_with(&fed.stream, &prompt(&tokens, b"b")).unwrap();
    assert_eq!(admission.reused, 256, "it came in its turn");
    fed.manager.release(admission.id).unwrap();
}

/// Random requests, transfers, cancellations and evictions, compared with a plain record of all computed prefixes. Only
/// computed prefixes are reused; every prefix in host memory can be brought back if there is room; and no block,
/// checkpoint or unit is lost.
#[test]
fn random_operations_lose_nothing() {
    let (mut restored, mut waited) = (0, 0);
    for seed in 0..6 {
        let device = NullDevice::null(1 << 34);
        let base = CacheConfig { max_requests: 4, num_blocks: 20, ..settings() };
        let host_bytes = [300_000, 700_000, 8 << 20][seed as usize % 3];
        let config =
            CacheConfig { num_checkpoints: 3, checkpoint_interval: 128, host_bytes, ..base };
        let mut fed = Fed::new(&device, CacheConfig { poison: false, ..config });
        let story = Story::random(&LAYERS, TOKENS, 435);
        let mut random = StdRng::seed_from_u64(seed);
        // The computed prefixes, by salt and tokens up to a boundary.
        let mut computed: BTreeMap<(u8, Vec<u32>), ()> = BTreeMap::new();
        let (mut live, mut wanted) = (Vec::<RequestId>::new(), Vec::new());
        for _ in 0..400 {
            let (salt, branch) = ([random.random_range(0..2u8)], random.random_range(0..6u32));
            let parts = 100 + 50 * (branch % 4);
            let tokens: Vec<u32> = (0..TOKENS as u32)
                .map(|at| if at < parts { at } else { at + 1000 * branch })
                .collect();
            let prompt = prompt(&tokens, &salt);
            match random.random_range(0..10) {
                0..4 if live.len() < 3 => {
                    let admission = if random.random_bool(0.5) {
                        let there = fed.manager.host_prompt(&prompt).unwrap().reusable;
                        let full = TierMiss::NoRoomOnDevice.index();
                        let before = fed.manager.tier_stats().misses[full];
                        let admission = fed.manager.admit_waiting(&fed.stream, &prompt).unwrap();
                        let had_room = fed.manager.tier_stats().misses[full] == before;
                        assert!(admission.reused == there || !had_room, "{admission:?}, {there}");
                        waited += u64::from(had_room && there > 0);
                        admission
                    } else {
                        fed.manager.admit_with(&fed.stream, &prompt).unwrap()
                    };
                    let reused = admission.reused as usize;
                    let was = computed.contains_key(&(salt[0], tokens[..reused].to_vec()));
                    assert!(reused == 0 || was, "{reused} tokens were never computed");
                    let id = admission.id;
                    let part = [Part::new(id, &story, reused..TOKENS)];
                    fed.inputs.load(&fed.stream, &part, (TOKENS - reused) as u32);
                    let mut steps =
                        begin(&mut fed.manager, &fed.stream, &part, Padding::None).unwrap();
                    for step in &mut steps {
                        fed.inputs.run(step, &mut |_, _| Ok(())).unwrap();
                    }
                    let accepted = (TOKENS - reused) as u32;
                    let told = Accepted { id, accepted, tokens: &tokens[reused..] };
                    steps.into_iter().for_each(|step| step.commit(&[told]).unwrap());
                    for boundary in [128, 256] {
                        computed.insert((salt[0], tokens[..boundary].to_vec()), ());
                    }
                    live.push(id);
                }
                0..5 if !live.is_empty() => {
                    let id = live.swap_remove(random.random_range(0..live.len()));
                    fed.manager.release(id).unwrap();
                }
                5..7 => match fed.manager.prefetch(&fed.stream, &prompt) {
                    Ok(id) => wanted.extend(id),
                    Err(KvError::OutOfBlocks { .. } | KvError::OutOfCheckpoints { .. }) => {}
                    Err(error) => panic!("{error}"),
                },
                7 if !wanted.is_empty() => {
                    let id = wanted.swap_remove(random.random_range(0..wanted.len()));
                    let expected = fed.manager.is_prefetching(id);
                    assert_eq!(fed.manager.cancel_prefetch(id), expected);
                }
                _ => fed.manager.advance_tier(&fed.stream).unwrap(),
            }
            fed.manager.ledger().audit().unwrap();
            fed.manager.audit_tier().unwrap();
        }
        live.into_iter().for_each(|id| fed.manager.release(id).unwrap());
        fed.manager.settle_tier(&fed.stream).unwrap();
        let (ledger, stats) = (fed.manager.ledger(), fed.manager.tier_stats());
        let tree = ledger.tree_counts();
        assert_eq!(ledger.free_blocks() + tree.blocks, 20, "seed {seed}");
        assert_eq!(ledger.free_checkpoints() + tree.checkpoints, 3, "seed {seed}");
        assert_eq!(tree.evictable_blocks, tree.blocks, "nothing is referred to");
        assert!(stats.stored_checkpoints > 4, "{stats:?}");
        restored += stats.restored_checkpoints;
    }
    assert!(restored > 60, "{restored} checkpoints came back");
    assert!(waited > 60, "{waited} prompts had all that host memory had");
}
