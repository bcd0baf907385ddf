//! Requests that move to another cache go on there with the bytes of one that never moved.

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::transfer::{MoveError, Port, Positions};
use dsv4_kv::{CacheConfig, KvError, RequestId};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::forks::feed;
use crate::fed::Fed;
use crate::inputs::assert_same;
use crate::stories::{Story, config, tiny};

const FORMATS: (MainFormat, IndexFormat) = (MainFormat::Ue8m0, IndexFormat::Mxfp4);

/// A cache and the memory through which its requests move.
struct Site<B: Backend> {
    fed: Fed<B>,
    port: Port<B>,
}

impl<B: Backend> Site<B> {
    fn new(device: &Device<B>, max_draft: u32, num_blocks: u32) -> Self {
        let config = config(&tiny(), FORMATS, 3);
        let config = CacheConfig { max_draft, num_blocks, poison: true, ..config };
        let fed = Fed::new(device, config);
        let port = fed.manager.open_port().unwrap();
        Self { fed, port }
    }

    /// All of a request: its blocks by `chunks` calls, then its state.
    fn export(&mut self, id: RequestId, chunks: u32) -> (Positions, Vec<u8>) {
        let Self { fed, port } = self;
        let stream = fed.stream.clone();
        let at = fed.manager.positions(id).unwrap();
        let parts = port.layout().parts(at);
        let mut payload = vec![0xA5; parts.iter().map(|part| part.bytes as usize).sum()];
        let (blocks, bytes) =
            (port.layout().blocks(at.trunk), port.layout().block_bytes() as usize);
        let (of_blocks, of_state) = payload.split_at_mut(blocks as usize * bytes);
        let cuts: Vec<_> = (0..=chunks).map(|chunk| blocks * chunk / chunks).collect();
        for cut in cuts.windows(2) {
            let into = &mut of_blocks[cut[0] as usize * bytes..cut[1] as usize * bytes];
            fed.manager.export_blocks(&stream, port, (id, cut[0]..cut[1]), into).unwrap();
        }
        fed.manager.export_state(&stream, port, id, of_state).unwrap();
        (at, payload)
    }

    fn import(&mut self, at: Positions, payload: &[u8]) -> Result<RequestId, MoveError> {
        let stream = self.fed.stream.clone();
        self.fed.manager.import(&stream, &mut self.port, (at, payload))
    }
}

/// At every phase of a block, between caches that differ in drafts and blocks, what arrives is what left; every few tokens
/// it decodes on there, with drafts, and has what was computed in one place, by the oracle and in every byte.
pub fn a_request_moves_at_every_phase<B: Backend>(device: &Device<B>) {
    let stories = [91, 92].map(|seed| Story::random(&tiny(), 460, seed));
    let [x, wrong] = stories.each_ref();
    let stored = x.stored(device, FORMATS);
    for (drafts, first, seed) in [([0, 3], 1, 1), ([5, 1], 129, 2)] {
        let mut random = StdRng::seed_from_u64(seed);
        let mut source = Site::new(device, drafts[0], 15);
        let mut target = Site::new(device, drafts[1], 11);
        let id = source.fed.manager.admit().unwrap();
        // Blocks of other requests, so that the same block has another number there.
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
    let is_long = |error: &MoveError| {
        matches!(error, MoveError::Cache(KvError::ContextTooLong { end: 641, .. }))
    };
    assert!(is_long(&error), "{error}");
    let error = target.fed.manager.reserve(Positions { trunk: 400, draft: 400 }).unwrap_err();
    let is_short = matches!(error, MoveError::Cache(KvError::OutOfBlocks { needed: 4, free: 3 }));
    assert!(is_short, "{error}");
    // A port, and room, of the other cache.
    let room = target.fed.manager.reserve(at).unwrap();
    let manager = &mut target.fed.manager;
    let error = manager.load(&stream, &mut source.port, room, &payload).unwrap_err();
    assert!(matches!(error, MoveError::ForeignPort), "{error}");
    let room = target.fed.manager.reserve(at).unwrap();
    let room = source.fed.manager.give_back(room).unwrap_err();
    target.fed.manager.give_back(room).unwrap();
    assert_eq!(counts(&target), before);
    // What is not there to be exported.
    let (manager, port) = (&mut source.fed.manager, &mut source.port);
    let error = manager.export_blocks(&stream, port, (id, 2..4), &mut []).unwrap_err();
    assert!(matches!(error, MoveError::NoSuchBlock { block: 3, blocks: 3, .. }), "{error}");
    let error = manager.export_state(&stream, port, id, &mut [0]).unwrap_err();
    assert!(matches!(error, MoveError::Length { found: 1, .. }), "{error}");
    manager.release(id).unwrap();
    let error = manager.export_state(&stream, port, id, &mut []).unwrap_err();
    assert!(matches!(error, MoveError::Cache(KvError::UnknownRequest { .. })), "{error}");
    // It fits all the same.
    let moved = target.import(at, &payload).unwrap();
    target.fed.assert_holds(moved, &story, &story.stored(device, FORMATS), 270);
}
