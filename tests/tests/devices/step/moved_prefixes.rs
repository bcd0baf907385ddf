//! Prefixes that move to the tree of another cache: prompts that continue from them have the bytes that they have
//! alone.

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::events::{Drained, Event, EventBatch, EventSource};
use dsv4_kv::transfer::{MoveError, Parts, PartsMut, Positions, PrefixImport, TransferStaging};
use dsv4_kv::{CacheConfig, KvError, Prompt, RequestId};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::told::{self, Alone, Cut, Told, admit, assert_table, reusable, same, settings};
use crate::fed::Fed;
use crate::inputs::{assert_same, download};
use crate::stories::{Story, tiny};

/// Number of tokens in a prompt.
const TOKENS: usize = 420;

/// A cache and the staging memory through which its prefixes move.
struct Site<B: Backend> {
    fed: Fed<B>,
    staging: TransferStaging<B>,
    /// Number of imports so far, refused ones included. Every second import is from device memory.
    imports: usize,
}

/// An exported prefix.
struct Left {
    salt: Vec<u8>,
    at: Positions,
    tokens: Vec<u32>,
    payload: Vec<u8>,
}

fn prompt(tokens: &[u32]) -> Prompt<'_> {
    Prompt { tokens, salt: b"", adapter: b"" }
}

impl<B: Backend> Site<B> {
    fn new(device: &Device<B>, settings: CacheConfig) -> Self {
        let fed = told::fed(device, settings);
        let staging = fed.manager.new_transfer_staging().unwrap();
        Self { fed, staging, imports: 0 }
    }

    /// Exports the prefix of a prompt that is in this cache; `None` if there is none.
    fn export(&mut self, tokens: &[u32]) -> Option<Left> {
        self.export_of(tokens, b"")
    }

    /// As [`Self::export`], for a prompt with a salt.
    fn export_of(&mut self, tokens: &[u32], salt: &[u8]) -> Option<Left> {
        let Self { fed, staging, .. } = self;
        let (stream, prompt) = (fed.stream.clone(), Prompt { salt, ..prompt(tokens) });
        let export = fed.manager.export_prefix(&stream, staging, &prompt).unwrap();
        export.map(|mut export| {
            let (at, tokens) = (export.positions(), export.prompt().tokens.to_vec());
            let mut payload = vec![0xA5; export.layout().prefix_bytes(at) as usize];
            export.all(&mut payload).unwrap();
            // The same bytes by an export to device memory.
            let memory = stream.device().allocate("a prefix", payload.len() as u64).unwrap();
            export.all_to(PartsMut::Device(memory.clone())).unwrap();
            assert!(download(&stream, &memory.view()) == payload);
            Left { salt: salt.to_vec(), at, tokens, payload }
        })
    }

    /// Exports the state of a request, which fills the staging memory.
    fn export_state(&mut self, id: RequestId) {
        let Self { fed, staging, .. } = self;
        let (stream, at) = (fed.stream.clone(), fed.manager.positions(id).unwrap());
        let bytes: u64 = staging.layout().state(at).map(|part| part.bytes).sum();
        let mut state = vec![0; bytes as usize];
        fed.manager.export(&stream, staging, id).unwrap().state(&mut state).unwrap();
    }

    fn import(&mut self, left: &Left) -> Result<Option<PrefixImport>, MoveError> {
        let Self { fed, staging, imports } = self;
        let stream = fed.stream.clone();
        let prompt = Prompt { salt: &left.salt, ..prompt(&left.tokens) };
        *imports += 1;
        if !imports.is_multiple_of(2) {
            return fed.manager.import_prefix(&stream, staging, &prompt, (left.at, &left.payload));
        }
        let memory = stream.device().allocate("a prefix", left.payload.len() as u64).unwrap();
        stream.upload(&left.payload, &memory, 0).unwrap();
        let parts = (left.at, Parts::Device(memory));
        fed.manager.import_prefix_from(&stream, staging, &prompt, parts)
    }
}

/// For several positions at which a prompt differs from the one whose prefix arrived, in caches with other drafts and
/// other block numbers: the prompt continues from the last checkpoint of the prefix, and has every byte that it has
/// alone. The source is unchanged.
pub fn prompts_go_on_from_what_came<B: Backend>(device: &Device<B>) {
    let [a, b, wrong] = [401, 402, 403].map(|seed| Story::random(&tiny(), TOKENS, seed));
    let first = Told::parting(&a, &a, TOKENS, TOKENS);
    let cases = [
        ([0, 3], 128, 130, [Cut::Chunks(TOKENS), Cut::Chunks(TOKENS)]),
        ([3, 0], 128, 300, [Cut::Chunks(90), Cut::Chunks(150)]),
        ([2, 1], 256, TOKENS, [Cut::Drafts(&wrong), Cut::Chunks(7)]),
        ([1, 1], 0, 400, [Cut::Chunks(128), Cut::Drafts(&wrong)]),
    ];
    for (case, (drafts, interval, parting, cuts)) in cases.into_iter().enumerate() {
        let what = format!("{drafts:?} drafts, interval {interval}, parting {parting}");
        let mut source = Site::new(device, settings(drafts[0], 6, interval));
        let mut target = Site::new(device, settings(drafts[1], 6, interval));
        // The last two prefixes have three blocks, which take two rounds, from host memory and from device memory.
        assert_eq!(format!("{:?}", target.staging), "TransferStaging { blocks: 2, .. }");
        target.imports = case;
        let one = admit(&mut source.fed, &first, b"");
        told::compute(&mut source.fed, one.id, &first, 0, cuts[0]);
        let before = told::bytes(&source.fed, one.id, TOKENS);
        // Blocks of another request, so that the prefix gets other block numbers.
        let other = Told::of(&[(7, &wrong, 140)]);
        let occupied = admit(&mut target.fed, &other, b"");
        told::compute(&mut target.fed, occupied.id, &other, 0, Cut::Chunks(140));
        let second = Told::parting(&a, &b, parting, TOKENS);
        let left = source.export(&second.ids()).expect("a checkpoint is there");
        // What the staging memory has from other transfers is not exported.
        source.export_state(one.id);
        let again = source.export(&second.ids()).expect("it is still there");
        assert_same(&again.payload, &left.payload, &what);
        let at = left.at.trunk;
        let step = if interval == 0 { 384 } else { interval };
        let end = parting as u32 / 128 * 128;
        assert_eq!(at, if end == 384 { 384 } else { end / step * step }, "{what}");
        let came = target.import(&left).unwrap();
        assert_eq!(came, Some(PrefixImport { blocks: at / 128, checkpoint: true }), "{what}");
        assert_eq!(target.import(&left).unwrap(), None, "it is here");
        let again = target.export(&left.tokens).expect("it is here");
        assert_eq!((again.at, &again.tokens), (left.at, &left.tokens));
        assert_same(&again.payload, &left.payload, &what);
        let two = admit(&mut target.fed, &second, b"");
        assert_eq!((two.reused, two.matched), (at, at), "{what}");
        assert_table(&target.fed, two.id);
        told::compute(&mut target.fed, two.id, &second, at as usize, cuts[1]);
        let alone = Alone::of(device, &second, settings(drafts[1], 0, 0));
        same(&told::bytes(&target.fed, two.id, TOKENS), &alone.bytes, &what);
        let alone = Alone::of(device, &other, settings(drafts[1], 0, 0));
        same(&told::bytes(&target.fed, occupied.id, 140), &alone.bytes, "the other request");
        same(&told::bytes(&source.fed, one.id, TOKENS), &before, "where it came from");
        for site in [&source, &target] {
            site.fed.manager.ledger().audit().unwrap();
        }
    }
}

/// A tree that already has a part of an arriving prefix keeps that part, takes the rest, and sends events for the rest.
/// When the requests of both have ended, no block is lost.
pub fn what_is_here_stays<B: Backend>(device: &Device<B>) {
    let [a, b] = [411, 412].map(|seed| Story::random(&tiny(), TOKENS, seed));
    let first = Told::parting(&a, &a, TOKENS, TOKENS);
    let short = Told::parting(&a, &b, 140, 300);
    let mut source = Site::new(device, settings(1, 6, 128));
    let logged = CacheConfig { event_capacity: 64, ..settings(1, 6, 128) };
    let mut target = Site::new(device, logged);
    let one = admit(&mut source.fed, &first, b"");
    told::compute(&mut source.fed, one.id, &first, 0, Cut::Chunks(128));
    let here = admit(&mut target.fed, &short, b"");
    told::compute(&mut target.fed, here.id, &short, 0, Cut::Chunks(100));
    let before = told::bytes(&target.fed, here.id, 300);
    let left = source.export(&first.ids()).expect("a checkpoint is there");
    let mut events = EventBatch::with_capacity(64);
    assert_eq!(target.fed.manager.drain_events(&mut events), Drained::Events);
    let came = target.import(&left).unwrap();
    assert_eq!(came, Some(PrefixImport { blocks: 2, checkpoint: true }), "its first block is here");
    // Events name the blocks that arrived, and no others.
    assert_eq!(target.fed.manager.drain_events(&mut events), Drained::Events);
    let stored = events.iter().map(|event| match event {
        Event::Stored(run) => run.tokens.as_flattened().to_vec(),
        Event::Removed(_) => panic!("nothing has gone"),
    });
    assert_eq!(stored.collect::<Vec<_>>().concat(), left.tokens[128..]);
    same(&told::bytes(&target.fed, here.id, 300), &before, "what is here");
    let two = admit(&mut target.fed, &first, b"");
    assert_eq!(two.reused, 384);
    told::compute(&mut target.fed, two.id, &first, 384, Cut::Chunks(10));
    let alone = Alone::of(device, &first, settings(1, 0, 0));
    same(&told::bytes(&target.fed, two.id, TOKENS), &alone.bytes, "on both");
    let blocks = |site: &Site<B>| {
        let ledger = site.fed.manager.ledger();
        ledger.free_blocks() + ledger.evictable_blocks()
    };
    for id in [here.id, two.id] {
        target.fed.manager.release(id).unwrap();
    }
    assert_eq!(blocks(&target), target.fed.manager.ledger().total_blocks());
    target.fed.manager.ledger().audit().unwrap();
}

/// A prefix that arrived is kept in host memory like one that was computed here, so it survives its eviction.
pub fn what_came_goes_to_host_memory<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), TOKENS, 415);
    let told = Told::parting(&story, &story, TOKENS, TOKENS);
    let mut source = Site::new(device, settings(1, 6, 0));
    let one = admit(&mut source.fed, &told, b"");
    told::compute(&mut source.fed, one.id, &told, 0, Cut::Chunks(TOKENS));
    let left = source.export(&told.ids()).expect("a checkpoint is there");
    let host = CacheConfig { host_bytes: 64 << 20, ..settings(1, 2, 0) };
    let mut target = Site::new(device, host);
    target.import(&left).unwrap().expect("it was not here");
    let Site { fed, .. } = &mut target;
    fed.manager.settle_tier(&fed.stream).unwrap();
    let stats = fed.manager.tier_stats();
    let blocks = u64::from(left.at.trunk / 128);
    assert_eq!((stats.stored_checkpoints, stats.stored_blocks), (1, blocks));
    fed.manager.audit_tier().unwrap();
    // Two other prompts take the device's two checkpoints.
    let other = Story::random(&tiny(), 140, 416);
    let others = Told::of(&[(7, &other, 140)]);
    for salt in [b"a", b"b"] {
        let id = admit(fed, &others, salt).id;
        told::compute(fed, id, &others, 0, Cut::Chunks(140));
        fed.manager.release(id).unwrap();
    }
    assert_eq!(reusable(fed, &told, b""), 0, "the device lost it");
    let ids = told.ids();
    let two = fed.manager.admit_waiting(&fed.stream, &prompt(&ids)).unwrap();
    assert_eq!((two.reused, two.matched), (384, 384));
    assert_table(fed, two.id);
    told::compute(fed, two.id, &told, 384, Cut::Chunks(10));
    let alone = Alone::of(device, &told, settings(1, 0, 0));
    same(&told::bytes(fed, two.id, TOKENS), &alone.bytes, "back from host memory");
    fed.manager.audit_tier().unwrap();
    fed.manager.ledger().audit().unwrap();
}

/// Prompts with common prefixes, under three salts, in two caches that are too small for all of them. Their prefixes
/// move from one cache to the other and back, are evicted and arrive again. Each prompt has every byte that it has
/// alone.
pub fn prefixes_go_back_and_forth<B: Backend>(device: &Device<B>) {
    let stories = [431, 432, 433].map(|seed| Story::random(&tiny(), 300, seed));
    let mut random = StdRng::seed_from_u64(434);
    let tellings: Vec<_> = [(0, 1, 300), (0, 1, 130), (0, 2, 270), (2, 0, 140)]
        .iter()
        .map(|&(from, to, parting)| {
            let (first, second) = (&stories[from], &stories[to]);
            Told::of(&[(from as u32, first, parting), (to as u32, second, 300)])
        })
        .collect();
    let alone: Vec<_> =
        tellings.iter().map(|told| Alone::of(device, told, settings(1, 0, 0))).collect();
    let small =
        |drafts| CacheConfig { num_blocks: 7, num_checkpoints: 3, ..settings(drafts, 3, 128) };
    let mut sites = [Site::new(device, small(1)), Site::new(device, small(1))];
    let (mut moved, mut reused, mut evicted) = (0, 0, 0);
    for round in 0..70 {
        let (which, at) = (random.random_range(0..tellings.len()), random.random_range(0..2));
        let (told, salt) = (&tellings[which], [b"a", b"b", b"c"][random.random_range(0..3)]);
        if random.random() {
            let Some(left) = sites[at].export_of(&told.ids(), salt) else { continue };
            let here = sites[1 - at].export_of(&left.tokens, salt);
            let came = sites[1 - at].import(&left).unwrap();
            let new = here.is_none_or(|here| here.tokens.len() < left.tokens.len());
            assert_eq!(came.is_some(), new, "round {round}: {came:?}");
            moved += u32::from(new);
        } else {
            let fed = &mut sites[at].fed;
            let admission = admit(fed, told, salt);
            reused += u32::from(admission.reused > 0);
            let cut = Cut::Chunks(random.random_range(60..=128));
            told::compute(fed, admission.id, told, admission.reused as usize, cut);
            let got = told::bytes(fed, admission.id, 300);
            same(&got, &alone[which].bytes, &format!("round {round}, prompt {which}"));
            fed.manager.release(admission.id).unwrap();
        }
        for Site { fed, .. } in &sites {
            let ledger = fed.manager.ledger();
            ledger.audit().unwrap();
            assert_eq!(ledger.free_blocks() + ledger.evictable_blocks(), 7, "round {round}");
            evicted = evicted.max(ledger.reuse_stats().evicted_blocks);
        }
    }
    assert!(moved > 6 && reused > 6 && evicted > 8, "{moved} moved, {reused} reused, {evicted}");
}

/// Imports that do not fit, or are no prefix, change nothing in the cache that refuses them.
pub fn what_cannot_come_changes_nothing<B: Backend>(device: &Device<B>) {
    let a = Story::random(&tiny(), TOKENS, 421);
    let first = Told::parting(&a, &a, TOKENS, TOKENS);
    let mut source = Site::new(device, settings(1, 6, 128));
    assert!(source.export(&first.ids()).is_none(), "nothing was computed");
    let one = admit(&mut source.fed, &first, b"");
    told::compute(&mut source.fed, one.id, &first, 0, Cut::Chunks(128));
    let left = source.export(&first.ids()).expect("a checkpoint is there");
    let few = CacheConfig { num_blocks: 2, ..settings(1, 6, 128) };
    let mut target = Site::new(device, few);
    let error = target.import(&left).unwrap_err();
    let is_short = matches!(error, MoveError::Cache(KvError::OutOfBlocks { needed: 3, free: 2 }));
    assert!(is_short, "{error}");
    let with = |at, tokens: &[u32], payload: &[u8]| Left {
        salt: Vec::new(),
        at,
        tokens: tokens.to_vec(),
        payload: payload.to_vec(),
    };
    let (at, tokens, payload) = (left.at, &left.tokens[..], &left.payload[..]);
    let at_draft = |draft| Positions { draft, ..at };
    let cases = [
        with(at, &tokens[1..], payload),
        with(Positions { trunk: 383, draft: 383 }, &tokens[1..], payload),
        with(Positions::default(), &[], &[]),
        with(at_draft(128), tokens, payload),
    ];
    for case in cases {
        let error = target.import(&case).unwrap_err();
        assert!(matches!(error, MoveError::NoPrefix { .. }), "{error}");
    }
    let error = target.import(&with(at, tokens, &payload[1..])).unwrap_err();
    assert!(matches!(error, MoveError::Length { .. }), "{error}");
    let error = target.import(&with(Positions { trunk: 768, draft: 0 }, tokens, payload));
    assert!(matches!(error, Err(MoveError::TooLong { limit: 640, .. })), "{error:?}");
    let Site { fed, .. } = &mut target;
    let stream = fed.stream.clone();
    let error =
        fed.manager.import_prefix(&stream, &mut source.staging, &prompt(tokens), (at, payload));
    assert!(matches!(error, Err(MoveError::ForeignStaging)), "{error:?}");
    assert_eq!(fed.manager.ledger().free_blocks(), 2);
    assert_eq!(fed.manager.ledger().tree_counts().blocks, 0);
    fed.manager.ledger().audit().unwrap();
    // A cache without prefix reuse.
    let mut alone = Site::new(device, settings(1, 0, 0));
    let error = alone.import(&left).unwrap_err();
    assert!(matches!(error, MoveError::NothingShared), "{error}");
    assert!(alone.export(tokens).is_none());
}
