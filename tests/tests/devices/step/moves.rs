//! Requests that move to another cache continue there with the bytes of a request that never moved.

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::transfer::{MoveError, Parts, PartsMut, Positions, TransferStaging};
use dsv4_kv::{Accepted, CacheConfig, KvError, Launches, LayerGroup, Prompt, RequestId, SlotId};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::forks::feed;
use super::told;
use crate::fed::{Fed, Padding, Part, begin};
use crate::inputs::{assert_same, download};
use crate::stories::{Story, config, tiny};

const FORMATS: (MainFormat, IndexFormat) = (MainFormat::Ue8m0, IndexFormat::Mxfp4);

/// A cache and the staging memory through which its requests move.
struct Site<B: Backend> {
    fed: Fed<B>,
    staging: TransferStaging<B>,
}

impl<B: Backend> Site<B> {
    fn new(device: &Device<B>, max_draft: u32, num_blocks: u32) -> Self {
        let config = config(&tiny(), FORMATS, 3);
        let config = CacheConfig { max_draft, num_blocks, poison: true, ..config };
        let fed = Fed::new(device, config);
        let staging = fed.manager.new_transfer_staging().unwrap();
        Self { fed, staging }
    }

    /// Exports a whole request: its blocks by `chunks` calls, then its state.
    fn export(&mut self, id: RequestId, chunks: u32) -> (Positions, Vec<u8>) {
        let Self { fed, staging } = self;
        let stream = fed.stream.clone();
        let (at, layout) = (fed.manager.positions(id).unwrap(), staging.layout().clone());
        let mut payload = vec![0xA5; layout.bytes(at) as usize];
        let (blocks, bytes) = (layout.blocks(at.trunk), layout.block_bytes() as usize);
        let mut export = fed.manager.export(&stream, staging, id).unwrap();
        let (of_blocks, of_state) = payload.split_at_mut(blocks as usize * bytes);
        let cuts: Vec<_> = (0..=chunks).map(|chunk| blocks * chunk / chunks).collect();
        for cut in cuts.windows(2) {
            let into = &mut of_blocks[cut[0] as usize * bytes..cut[1] as usize * bytes];
            export.blocks(cut[0]..cut[1], into).unwrap();
        }
        export.state(of_state).unwrap();
        (at, payload)
    }

    /// Asserts that an arrived request can continue: one token later it has the whole window of a request that never
    /// moved.
    fn goes_on(&mut self, device: &Device<B>, moved: RequestId, story: &Story, at: usize) {
        feed(&mut self.fed, moved, (story, story), at + 1, 1);
        self.fed.assert_holds(moved, story, &story.stored(device, FORMATS), at + 1);
    }

    fn import(&mut self, at: Positions, payload: &[u8]) -> Result<RequestId, MoveError> {
        let stream = self.fed.stream.clone();
        self.fed.manager.import(&stream, &mut self.staging, (at, payload))
    }
}

/// At every position in a block, between caches with other drafts and other block numbers, the arrived bytes are the
/// exported ones. Every few tokens the request continues there, with drafts; it then equals the oracle, and in every
/// byte a request that never moved.
pub fn a_request_moves_at_every_phase<B: Backend>(device: &Device<B>) {
    let stories = [91, 92].map(|seed| Story::random(&tiny(), 460, seed));
    let [x, wrong] = stories.each_ref();
    let stored = x.stored(device, FORMATS);
    for (drafts, first, seed) in [([0, 3], 1, 1), ([5, 1], 129, 2)] {
        let mut random = StdRng::seed_from_u64(seed);
        let mut source = Site::new(device, drafts[0], 15);
        let mut target = Site::new(device, drafts[1], 11);
        let id = source.fed.manager.admit().unwrap();
        // Blocks of other requests, so that the request gets other block numbers.
        let other = target.fed.manager.admit().unwrap();
        feed(&mut target.fed, other, (wrong, x), 140, seed);
        for tokens in first..first + 128 {
            feed(&mut source.fed, id, (x, wrong), tokens, tokens as u64);
            let (at, payload) = source.export(id, random.random_range(1..=3));
            let tokens = tokens as u32;
            assert_eq!((at.trunk, at.draft), (tokens, tokens));
            let moved = target.import(at, &payload).unwrap();
            let again = target.export(moved, 1);
            assert_same(&again.1, &payload, &format!("the request at {tokens}"));
            assert_eq!(again.0, at);
            if tokens.is_multiple_of(23) || tokens.is_multiple_of(128) {
                let end = tokens as usize + random.random_range(1..20);
                feed(&mut target.fed, moved, (x, wrong), end, random.random());
                target.fed.assert_holds(moved, x, &stored, end);
                let mut alone = Site::new(device, drafts[0], 15);
                let never = alone.fed.manager.admit().unwrap();
                feed(&mut alone.fed, never, (x, wrong), end, random.random());
                let (want, got) = (alone.export(never, 1), target.export(moved, 1));
                assert_same(&got.1, &want.1, &format!("moved at {tokens}, at {end}"));
            }
            target.fed.manager.release(moved).unwrap();
            let ledger = target.fed.manager.ledger();
            assert_eq!((ledger.free_blocks(), ledger.live_requests()), (9, 1), "all came back");
        }
        source.fed.assert_holds(id, x, &stored, first + 127);
        target.fed.assert_holds(other, wrong, &wrong.stored(device, FORMATS), 140);
    }
}

/// Blocks move in rounds, here of two blocks, and the last round may have one. Each block arrives at its place, from
/// and to host memory and device memory.
pub fn blocks_go_in_rounds<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), 620, 99);
    let stored = story.stored(device, FORMATS);
    let (mut source, mut target) = (Site::new(device, 1, 15), Site::new(device, 1, 11));
    assert_eq!(format!("{:?}", source.staging), "TransferStaging { blocks: 2, .. }", "of five");
    let id = source.fed.manager.admit().unwrap();
    for tokens in [260, 390, 600] {
        feed(&mut source.fed, id, (&story, &story), tokens, tokens as u64);
        let (at, payload) = source.export(id, 1);
        let layout = source.staging.layout().clone();
        let blocks = layout.blocks(at.trunk);
        assert_eq!(blocks, tokens as u32 / 128 + 1);
        // The same with one call per block.
        assert_same(&source.export(id, blocks).1, &payload, &format!("blocks of {tokens} tokens"));
        let memory = device.allocate("a request", payload.len() as u64).unwrap();
        let stream = source.fed.stream.clone();
        let mut export = source.fed.manager.export(&stream, &mut source.staging, id).unwrap();
        let (of_blocks, end) = ((u64::from(blocks) * layout.block_bytes()) as usize, payload.len());
        let mut whole = PartsMut::Device(memory.clone());
        export.blocks_to(0..blocks, whole.part(0..of_blocks)).unwrap();
        export.state_to(whole.part(of_blocks..end)).unwrap();
        assert_same(&download(&stream, &memory.view()), &payload, "through memory of the device");
        for from in [Parts::Host(&payload), Parts::Device(memory)] {
            let Site { fed, staging } = &mut target;
            let reserved = fed.manager.reserve(at).unwrap();
            let stream = fed.stream.clone();
            let loaded = fed.manager.load_from(&stream, staging, reserved, from).unwrap();
            let moved = fed.manager.enter(loaded).unwrap();
            feed(fed, moved, (&story, &story), tokens + 1, 1);
            fed.assert_holds(moved, &story, &stored, tokens + 1);
            fed.manager.release(moved).unwrap();
        }
    }
}

/// Refusals leave everything as it was.
pub fn what_cannot_move_changes_nothing<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), 300, 93);
    let mut source = Site::new(device, 1, 15);
    let stream = source.fed.stream.clone();
    let id = source.fed.manager.admit().unwrap();
    feed(&mut source.fed, id, (&story, &story), 270, 1);
    let (at, payload) = source.export(id, 1);
    let mut target = Site::new(device, 1, 3);
    let counts = |site: &Site<B>| {
        let ledger = site.fed.manager.ledger();
        (ledger.free_blocks(), ledger.live_requests())
    };
    let before = counts(&target);
    let short = target.import(at, &payload[1..]).unwrap_err();
    assert!(matches!(short, MoveError::Length { needed, found } if needed == found + 1), "{short}");
    let far = Positions { trunk: 641, draft: 641 };
    let error = target.import(far, &payload).unwrap_err();
    assert!(matches!(error, MoveError::TooLong { at, limit: 640 } if at == far), "{error}");
    let ahead = Positions { trunk: 200, draft: 201 };
    let error = target.fed.manager.reserve(ahead).unwrap_err();
    assert!(matches!(error, MoveError::DraftAhead { at } if at == ahead), "{error}");
    let error = target.fed.manager.reserve(Positions { trunk: 400, draft: 400 }).unwrap_err();
    let is_short = matches!(error, MoveError::Cache(KvError::OutOfBlocks { needed: 4, free: 3 }));
    assert!(is_short, "{error}");
    // Staging memory, and a reservation, of the other cache.
    let reserved = target.fed.manager.reserve(at).unwrap();
    let manager = &mut target.fed.manager;
    let error = manager.load(&stream, &mut source.staging, reserved, &payload).unwrap_err();
    assert!(matches!(error, MoveError::ForeignStaging), "{error}");
    let reserved = target.fed.manager.reserve(at).unwrap();
    let reserved = source.fed.manager.give_back(reserved).unwrap_err();
    // The cache that refuses the reservation returns it, empty or loaded, and it is as usable as before.
    let (manager, staging) = (&mut source.fed.manager, &mut source.staging);
    let MoveError::ForeignReservation(reserved) =
        manager.load(&stream, staging, reserved, &payload).unwrap_err()
    else {
        panic!("the reservation is of the other cache")
    };
    let own = target.fed.stream.clone();
    let loaded = target.fed.manager.load(&own, &mut target.staging, reserved, &payload).unwrap();
    let loaded = manager.enter(loaded).unwrap_err();
    let moved = target.fed.manager.enter(loaded).unwrap();
    target.goes_on(device, moved, &story, 270);
    target.fed.manager.release(moved).unwrap();
    assert_eq!(counts(&target), before);
    // Exports of blocks and bytes that do not exist.
    let (manager, staging) = (&mut source.fed.manager, &mut source.staging);
    let mut export = manager.export(&stream, staging, id).unwrap();
    let error = export.blocks(2..4, &mut []).unwrap_err();
    assert!(matches!(error, MoveError::NoSuchBlock { block: 3, blocks: 3, .. }), "{error}");
    let [first, end] = [2, 1];
    let error = export.blocks(first..end, &mut []).unwrap_err();
    assert!(matches!(error, MoveError::Backward { first: 2, end: 1, .. }), "{error}");
    for error in [export.state(&mut [0]), export.all(&mut [0])].map(Result::unwrap_err) {
        assert!(matches!(error, MoveError::Length { found: 1, .. }), "{error}");
    }
    manager.release(id).unwrap();
    let error = manager.export(&stream, staging, id).unwrap_err();
    assert!(matches!(error, MoveError::Cache(KvError::UnknownRequest { .. })), "{error}");
    // The request still fits.
    let moved = target.import(at, &payload).unwrap();
    target.goes_on(device, moved, &story, 270);
}

/// A reservation belongs to no request until `enter`. Calls on requests in the meantime do not touch it. It never
/// touches the slot of another request, whether it is entered or given back.
pub fn reserved_room_is_nobodys<B: Backend>(device: &Device<B>) {
    let [story, other] = [94, 95].map(|seed| Story::random(&tiny(), 300, seed));
    let (mut source, mut target) = (Site::new(device, 1, 15), Site::new(device, 1, 15));
    let stream = target.fed.stream.clone();
    let id = source.fed.manager.admit().unwrap();
    feed(&mut source.fed, id, (&story, &other), 270, 1);
    let (at, payload) = source.export(id, 1);
    for enter in [true, false] {
        let reserved = target.fed.manager.reserve(at).unwrap();
        // Releases every request that the ledger names: none of them has the reserved slot.
        for slot in (0..3).map(SlotId) {
            let named = target.fed.manager.ledger().request_in(slot);
            named.into_iter().for_each(|id| target.fed.manager.release(id).unwrap());
        }
        let neighbour = target.fed.manager.admit().unwrap();
        feed(&mut target.fed, neighbour, (&other, &story), 140, 2);
        let before = target.export(neighbour, 1);
        let Site { fed, staging } = &mut target;
        let loaded = fed.manager.load(&stream, staging, reserved, &payload).unwrap();
        let moved = if enter {
            Some(fed.manager.enter(loaded).unwrap())
        } else {
            fed.manager.give_back(loaded).unwrap();
            None
        };
        assert_same(&target.export(neighbour, 1).1, &before.1, "the neighbour");
        feed(&mut target.fed, neighbour, (&other, &story), 150, 3);
        target.fed.assert_holds(neighbour, &other, &other.stored(device, FORMATS), 150);
        if let Some(moved) = moved {
            target.goes_on(device, moved, &story, 270);
            target.fed.manager.release(moved).unwrap();
        }
        target.fed.manager.release(neighbour).unwrap();
        let ledger = target.fed.manager.ledger();
        assert_eq!((ledger.free_blocks(), ledger.live_requests()), (15, 0), "all came back");
    }
}

/// Rejected tokens leave nothing in the exported bytes: neither a step that is rejected as a whole, nor draft layers
/// that are ahead of the trunk.
pub fn rejected_tokens_do_not_move<B: Backend>(device: &Device<B>) {
    let [story, wrong] = [96, 97].map(|seed| Story::random(&tiny(), 300, seed));
    let (mut source, mut target) = (Site::new(device, 5, 15), Site::new(device, 3, 15));
    let id = source.fed.manager.admit().unwrap();
    feed(&mut source.fed, id, (&story, &wrong), 200, 1);
    let before = source.export(id, 1);
    let parts = [Part { id, pieces: vec![(&wrong, 200..206)] }];
    source.fed.run(&parts, Padding::None, &[0], &mut |_, _| Ok(()));
    assert!(source.export(id, 1) == before, "a step that was dropped");
    let parts = [Part { id, pieces: vec![(&wrong, 200..203)] }];
    let Fed { manager, stream, inputs } = &mut source.fed;
    inputs.load(stream, &parts, 3);
    let mut draft = manager.group(LayerGroup::Draft).unwrap();
    let mut ahead = draft.begin_step(stream, Launches::Eager, &[parts[0].request()]).unwrap();
    inputs.run(&mut ahead, &mut |_, _| Ok(())).unwrap();
    ahead.commit(&[Accepted::count(id, 3)]).unwrap();
    assert_eq!(manager.ledger().committed_in(LayerGroup::Draft, id).unwrap(), 203);
    let (at, payload) = source.export(id, 1);
    assert!((at, &payload) == (before.0, &before.1), "drafts ahead of the trunk");
    let moved = target.import(at, &payload).unwrap();
    feed(&mut target.fed, moved, (&story, &wrong), 230, 2);
    target.fed.assert_holds(moved, &story, &story.stored(device, FORMATS), 230);
}

/// Imports that are refused at once evict nothing, nor do refused reservations.
pub fn refused_imports_evict_nothing<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), 300, 98);
    let mut source = Site::new(device, 1, 15);
    let id = source.fed.manager.admit().unwrap();
    feed(&mut source.fed, id, (&story, &story), 270, 1);
    let (at, payload) = source.export(id, 1);
    let settings = CacheConfig { num_blocks: 4, ..told::settings(1, 2, 128) };
    let mut fed = told::fed(device, settings);
    let staging = fed.manager.new_transfer_staging().unwrap();
    let ids: Vec<u32> = (0..300).collect();
    let stream = fed.stream.clone();
    let prompt = Prompt { tokens: &ids, salt: b"", adapter: b"" };
    let first = fed.manager.admit_with(&stream, &prompt).unwrap().id;
    for (from, to) in [(0, 128), (128, 256)] {
        let parts = [Part::new(first, &story, from..to)];
        fed.inputs.load(&stream, &parts, (to - from) as u32);
        let mut steps = begin(&mut fed.manager, &stream, &parts, Padding::None).unwrap();
        for step in &mut steps {
            fed.inputs.run(step, &mut |_, _| Ok(())).unwrap();
        }
        let tokens = &ids[from..to];
        let accepted = Accepted { id: first, accepted: (to - from) as u32, tokens };
        steps.into_iter().for_each(|step| step.commit(&[accepted]).unwrap());
    }
    fed.manager.release(first).unwrap();
    let mut target = Site { fed, staging };
    let cached = |site: &Site<B>| site.fed.manager.ledger().evictable_blocks();
    assert_eq!(cached(&target), 2);
    let error = target.import(at, &payload[1..]).unwrap_err();
    assert!(matches!(error, MoveError::Length { .. }), "{error}");
    let Site { fed, .. } = &mut target;
    let given = (at, &payload[..]);
    let error = fed.manager.import(&stream, &mut source.staging, given).unwrap_err();
    assert!(matches!(error, MoveError::ForeignStaging), "{error}");
    // One block more than is free or evictable; later, no slot.
    let far = Positions { trunk: 5 * 128, draft: 5 * 128 };
    let error = target.fed.manager.reserve(far).unwrap_err();
    let is_short = matches!(error, MoveError::Cache(KvError::OutOfBlocks { needed: 5, free: 4 }));
    assert!(is_short, "{error}");
    let ids: Vec<_> = std::iter::from_fn(|| target.fed.manager.admit().ok()).collect();
    let error = target.fed.manager.reserve(at).unwrap_err();
    assert!(matches!(error, MoveError::Cache(KvError::NoFreeSlot { .. })), "{error}");
    ids.into_iter().for_each(|id| target.fed.manager.release(id).unwrap());
    assert_eq!(cached(&target), 2, "nothing was evicted");
    let moved = target.import(at, &payload).unwrap();
    assert_eq!(cached(&target), 1, "there was room for it");
    target.goes_on(device, moved, &story, 270);
}
