//! The kinds of requests that can move: in every format, with blocks shared with others; and the refusals of a cache.

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::transfer::{MoveError, PartKind, Positions, TransferStaging};
use dsv4_kv::{CacheConfig, KvError, LayerGroup, RequestId};
use kv_layout::geometry::LayerKind;
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

use super::forks::feed;
use super::told::{self, Cut, Told};
use crate::fed::Fed;
use crate::inputs::assert_same;
use crate::stories::{Formats, Story, config, tiny};

const FORMATS: Formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);

/// A cache with these formats, and the staging memory through which its requests move.
struct Site<B: Backend> {
    fed: Fed<B>,
    staging: TransferStaging<B>,
}

impl<B: Backend> Site<B> {
    fn new(device: &Device<B>, formats: Formats, max_draft: u32) -> Self {
        let config = config(&tiny(), formats, 3);
        Self::with(device, CacheConfig { max_draft, poison: true, ..config })
    }

    fn with(device: &Device<B>, config: CacheConfig) -> Self {
        let fed = Fed::new(device, config);
        let staging = fed.manager.new_transfer_staging().unwrap();
        Self { fed, staging }
    }

    fn export(&mut self, id: RequestId) -> (Positions, Vec<u8>) {
        let stream = self.fed.stream.clone();
        let mut export = self.fed.manager.export(&stream, &mut self.staging, id).unwrap();
        let mut payload = vec![0xA5; export.layout().bytes(export.positions()) as usize];
        export.all(&mut payload).unwrap();
        (export.positions(), payload)
    }

    fn import(&mut self, (at, payload): (Positions, &[u8])) -> Result<RequestId, MoveError> {
        let stream = self.fed.stream.clone();
        self.fed.manager.import(&stream, &mut self.staging, (at, payload))
    }
}

/// Rows and keys of every format move, and the request continues with the bytes of one that never moved.
pub fn requests_of_every_format_move<B: Backend>(device: &Device<B>) {
    let [story, wrong] = [101, 102].map(|seed| Story::random(&tiny(), 320, seed));
    let others = [(MainFormat::F32, IndexFormat::Fp8), (MainFormat::F32, IndexFormat::Nvfp4)];
    for formats in others.into_iter().chain([(MainFormat::Ue8m0, IndexFormat::Fp8)]) {
        let stored = story.stored(device, formats);
        let (mut source, mut target) =
            (Site::new(device, formats, 1), Site::new(device, formats, 3));
        let id = source.fed.manager.admit().unwrap();
        for end in [7, 131, 256] {
            feed(&mut source.fed, id, (&story, &wrong), end, end as u64);
            let (at, payload) = source.export(id);
            let moved = target.import((at, &payload)).unwrap();
            assert_same(&target.export(moved).1, &payload, &format!("{formats:?} at {end}"));
            feed(&mut target.fed, moved, (&story, &wrong), end + 40, 1);
            target.fed.assert_holds(moved, &story, &stored, end + 40);
            target.fed.manager.release(moved).unwrap();
        }
    }
}

/// A fork moves. The blocks that it shares stay with the other requests; these continue, and so does the fork. Both
/// requests arrive as requests that share nothing.
pub fn forks_move<B: Backend>(device: &Device<B>) {
    let stories = [103, 104, 105].map(|seed| Story::random(&tiny(), 420, seed));
    let [x, y, wrong] = stories.each_ref();
    let stored = [x, y].map(|story| story.stored(device, FORMATS));
    let (mut source, mut target) = (Site::new(device, FORMATS, 0), Site::new(device, FORMATS, 2));
    let first = source.fed.manager.admit().unwrap();
    feed(&mut source.fed, first, (x, wrong), 270, 1);
    let stream = source.fed.stream.clone();
    let fork = source.fed.manager.fork(&stream, first).unwrap();
    let table = |site: &Site<B>, id| site.fed.manager.block_table(id).unwrap();
    assert_eq!(table(&source, first)[..2], table(&source, fork)[..2], "they share two blocks");
    let (at, payload) = source.export(fork);
    let moved = target.import((at, &payload)).unwrap();
    source.fed.manager.release(fork).unwrap();
    // The first request continues where it was, and leaves too.
    feed(&mut source.fed, first, (x, wrong), 300, 2);
    source.fed.assert_holds(first, x, &stored[0], 300);
    let (at, payload) = source.export(first);
    let other = target.import((at, &payload)).unwrap();
    let shared = table(&target, other).iter().any(|block| table(&target, moved).contains(block));
    assert!(!shared, "each has its own");
    for (id, end) in [(moved, 290), (other, 330)] {
        feed(&mut target.fed, id, (x, wrong), end, 3);
        target.fed.assert_holds(id, x, &stored[0], end);
    }
    source.fed.manager.release(first).unwrap();
    let free = |site: &Site<B>| site.fed.manager.ledger().free_blocks();
    assert_eq!(free(&source), 15, "all came back");
    // Their blocks belong to another request now, which has none of their bytes.
    let id = source.fed.manager.admit().unwrap();
    feed(&mut source.fed, id, (y, wrong), 140, 4);
    source.fed.assert_holds(id, y, &stored[1], 140);
}

/// A request that continues from a prefix of others moves with copies of the blocks that it shares with the tree, where
/// they stay.
pub fn requests_with_shared_prefixes_move<B: Backend>(device: &Device<B>) {
    let stories = [106, 107].map(|seed| Story::random(&tiny(), 400, seed));
    let [x, y] = stories.each_ref();
    let mut fed = told::fed(device, told::settings(0, 2, 128));
    let staging = fed.manager.new_transfer_staging().unwrap();
    let first = Told::of(&[(0, x, 300)]);
    let id = told::admit(&mut fed, &first, b"").id;
    told::compute(&mut fed, id, &first, 0, Cut::Chunks(128));
    let second = Told::parting(x, y, 256, 310);
    let admission = told::admit(&mut fed, &second, b"");
    assert_eq!(admission.reused, 256);
    told::compute(&mut fed, admission.id, &second, 256, Cut::Chunks(64));
    let mut source = Site { fed, staging };
    let (at, payload) = source.export(admission.id);
    // The same tokens in a request that shares nothing.
    let mut alone = Site::new(device, FORMATS, 0);
    let never = alone.fed.manager.admit().unwrap();
    let parts = [second.part(never, 0..310, None)];
    alone.fed.step(&parts, crate::fed::Padding::None);
    let want = alone.export(never).1;
    let trunk = source.fed.manager.config().group_layers(LayerGroup::Trunk).end;
    let mut from = 0;
    for part in source.staging.layout().parts(at) {
        let bytes = from..from + part.bytes as usize;
        from = bytes.end;
        // Draft layers begin anew after a shared prefix, so their windows differ.
        if part.kind == PartKind::Block || part.unit < trunk {
            assert_same(&payload[bytes.clone()], &want[bytes], &format!("{part:?}"));
        }
    }
    let mut target = Site::new(device, FORMATS, 1);
    let moved = target.import((at, &payload)).unwrap();
    let before = source.export(id).1;
    source.fed.manager.release(admission.id).unwrap();
    assert_same(&source.export(id).1, &before, "the other request");
    // The tree still has the prefix.
    let again = told::admit(&mut source.fed, &second, b"");
    assert_eq!(again.reused, 256);
    assert_same(&target.export(moved).1, &payload, "what came");
}

/// Imports for which a cache has no room or no layers, and streams of another device, are refused and change nothing.
pub fn caches_refuse_what_they_cannot_hold<B: Backend>(device: &Device<B>, other: &Device<B>) {
    let story = Story::random(&tiny(), 20, 108);
    let mut site = Site::new(device, FORMATS, 1);
    let ids = [(); 3].map(|()| site.fed.manager.admit().unwrap());
    feed(&mut site.fed, ids[0], (&story, &story), 9, 1);
    let (at, payload) = site.export(ids[0]);
    let error = site.import((at, &payload)).unwrap_err();
    assert!(matches!(error, MoveError::Cache(KvError::NoFreeSlot { slots: 3 })), "{error}");
    site.fed.manager.release(ids[2]).unwrap();
    let foreign = other.stream().unwrap();
    let error = site.fed.manager.import(&foreign, &mut site.staging, (at, &payload)).unwrap_err();
    assert!(matches!(error, MoveError::Cache(KvError::Device(_))), "{error}");
    let error = site.fed.manager.export(&foreign, &mut site.staging, ids[0]).unwrap_err();
    assert!(matches!(error, MoveError::Cache(KvError::Device(_))), "{error}");
    assert_eq!(site.fed.manager.ledger().live_requests(), 2);
    // A model without draft layers.
    let layers = vec![LayerKind::Swa; 2];
    let tiny = ModelConfig::preset("tiny").unwrap();
    let model = ModelConfig { layers, mtp_layers: 0, ..tiny };
    let mut trunk = Site::with(device, CacheConfig { model, ..site.fed.manager.config().clone() });
    let at = Positions { trunk: 9, draft: 9 };
    let draft = LayerGroup::Draft;
    for error in
        [trunk.fed.manager.reserve(at).unwrap_err(), trunk.import((at, &payload)).unwrap_err()]
    {
        let is_draft =
            matches!(error, MoveError::Cache(KvError::NoSuchGroup { group }) if group == draft);
        assert!(is_draft, "{error}");
    }
    assert_eq!(trunk.fed.manager.ledger().live_requests(), 0);
}
