//! Prefixes, from one cache's tree to another's.

use std::time::Duration;

use dsv4_kv::device::DeviceError;
use dsv4_kv::transfer::{MoveError, Positions, PrefixImport};
use dsv4_kv::{Accepted, CacheConfig, KvError, Prompt};
use dsv4_kv_tests::fed::{Padding, Part, begin};
use dsv4_kv_tests::stories::{Story, tiny};
use dsv4_kv_transfer::image::{Fact, decode_manifest};
use dsv4_kv_transfer::mistake::{Mistake, make};
use dsv4_kv_transfer::protocol::Offer;
use dsv4_kv_transfer::transport::{Fabric, Loopback, Storage};
use dsv4_kv_transfer::{
    Control, Expected, Fingerprint, ImageError, ImageKind, Receiver, Sender, Source, Target,
    TransferError, Transport, Verified,
};

use crate::world::{MAX_BYTES, NEVER, Site, World, deadlines, emulated, settings};

/// Tokens of a prompt, of which three blocks are full.
pub const TOKENS: usize = 400;

fn prompt<'p>(tokens: &'p [u32], salt: &'p [u8]) -> Prompt<'p> {
    Prompt { tokens, salt, adapter: b"adapter" }
}

/// A cache that has computed a prompt, and one that has not.
struct Trees {
    fabric: Fabric,
    sender: Sender<Loopback>,
    /// The memory into which the target reads.
    to: Storage,
    source: Site,
    target: Site,
    tokens: Vec<u32>,
}

/// A control channel to the source, for prefixes: it is never asked, only told.
struct Tells<'s>(&'s mut Sender<Loopback>);

impl Control for Tells<'_> {
    fn ask(&mut self, source: Source) -> Result<(), String> {
        panic!("nobody asks whose {source:?} is")
    }

    fn answer(&mut self, _source: Source) -> Result<Option<bool>, String> {
        panic!("nobody asks")
    }

    fn give_up(&mut self, source: Source) {
        assert!(self.0.give_up(source), "it was held until now");
    }
}

pub fn site(max_draft: u32, num_blocks: u32, num_checkpoints: u32) -> Site {
    let settings = settings(max_draft, 2, num_blocks);
    Site::new(&emulated(), CacheConfig { num_checkpoints, checkpoint_interval: 128, ..settings })
}

/// Computes a prompt, and commits it with its token ids.
fn compute(site: &mut Site, story: &Story, tokens: &[u32]) {
    let fed = &mut site.fed;
    let stream = fed.stream.clone();
    let admission = fed.manager.admit_with(&stream, &prompt(tokens, b"salt")).unwrap();
    let (id, reused) = (admission.id, admission.reused as usize);
    for from in (reused..tokens.len()).step_by(128) {
        let to = (from + 128).min(tokens.len());
        let parts = [Part::new(id, story, from..to)];
        fed.inputs.load(&stream, &parts, (to - from) as u32);
        let mut steps = begin(&mut fed.manager, &stream, &parts, Padding::None).unwrap();
        for step in &mut steps {
            fed.inputs.run(step, &mut |_, _| Ok(())).unwrap();
        }
        let accepted = Accepted { id, accepted: (to - from) as u32, tokens: &tokens[from..to] };
        steps.into_iter().for_each(|step| step.commit(&[accepted]).unwrap());
        fed.manager.save_wanted(&stream).unwrap();
    }
    fed.manager.release(id).unwrap();
}

/// A cache that has computed a prompt, and its tokens.
pub fn computed() -> (Site, Vec<u32>) {
    let mut source = site(0, 8, 6);
    let (story, tokens) = (Story::random(&tiny(), TOKENS, 81), 0..TOKENS as u32);
    let tokens: Vec<_> = tokens.map(|token| token + 1000).collect();
    compute(&mut source, &story, &tokens);
    (source, tokens)
}

/// Offers the cached prefix of a prompt.
pub fn offered<T: Transport>(site: &mut Site, tokens: &[u32], sender: &mut Sender<T>) -> Offer {
    let Site { fed, staging } = site;
    let stream = fed.stream.clone();
    let export = fed.manager.export_prefix(&stream, staging, &prompt(tokens, b"salt")).unwrap();
    sender.offer_prefix(&mut export.unwrap(), b"weights", NEVER).unwrap()
}

/// The exported bytes of the cached prefix of a prompt; `None` without a checkpoint.
pub fn exported(site: &mut Site, tokens: &[u32], salt: &[u8]) -> Option<Vec<u8>> {
    let Site { fed, staging } = site;
    let stream = fed.stream.clone();
    let export = fed.manager.export_prefix(&stream, staging, &prompt(tokens, salt)).unwrap();
    export.map(|mut export| {
        let mut payload = vec![0; export.layout().prefix_bytes(export.positions()) as usize];
        export.all(&mut payload).unwrap();
        payload
    })
}

impl Trees {
    fn new(target: Site) -> Self {
        let (fabric, (source, tokens)) = (Fabric::default(), computed());
        let sender = Sender::new(Loopback::new(&fabric), MAX_BYTES);
        Self { fabric, sender, to: Storage::host(), source, target, tokens }
    }

    /// As [`Self::new`], with payloads in memory of the caches' devices.
    fn on_devices(target: Site) -> Self {
        let storage = |site: &Site| Storage::device(site.fed.manager.device(), 0).unwrap();
        let mut trees = Self::new(target);
        let own = (storage(&trees.source), MAX_BYTES);
        trees.sender = Sender::with_storage(Loopback::new(&trees.fabric), own);
        trees.to = storage(&trees.target);
        trees
    }

    fn offer(&mut self, tokens: usize) -> Offer {
        offered(&mut self.source, &self.tokens[..tokens], &mut self.sender)
    }

    fn fingerprint(&self, salt: &[u8]) -> Fingerprint {
        Fingerprint::new(self.target.fed.manager.config(), b"weights", salt, b"adapter").unwrap()
    }

    fn receive(&self, offer: &Offer, expected: &Expected<'_>) -> Result<Verified, TransferError> {
        let (transport, to) = (Loopback::new(&self.fabric), (self.to.clone(), 1 << 30));
        let mut receiver = Receiver::with_storage(transport, deadlines(), to);
        receiver.begin(Duration::ZERO, offer, expected)?;
        receiver.poll(Duration::ZERO).remove(0).1
    }

    fn expect(&self, offer: &Offer) -> Verified {
        let fingerprint = self.fingerprint(b"salt");
        let layout = self.target.staging.layout();
        let expected =
            Expected { fingerprint: &fingerprint, layout, tokens: None, max_context: 640 };
        self.receive(offer, &expected).unwrap()
    }

    fn admit(
        &mut self,
        verified: &Verified,
        salt: &[u8],
    ) -> Result<Option<PrefixImport>, TransferError> {
        let Site { fed, staging } = &mut self.target;
        let stream = fed.stream.clone();
        let mut target = Target {
            cache: &mut fed.manager,
            stream: &stream,
            staging,
            weights: crate::world::weights(),
        };
        target.admit_prefix(verified, (salt, b"adapter"), &mut Tells(&mut self.sender))
    }
}

/// Prefixes arrive with every byte; only missing blocks are written. Prompts continue from them, and the source's
/// memory is freed. Through host memory, and through device memory.
pub fn a_prefix_comes_to_another_tree() {
    comes(Trees::new(site(3, 5, 4)));
    comes(Trees::on_devices(site(3, 5, 4)));
}

fn comes(mut trees: Trees) {
    // A prompt that ends at a block boundary counts up to its end.
    for (tokens, blocks, new) in [(256, 2, 2), (200, 1, 0), (TOKENS, 3, 1), (384, 3, 0)] {
        let offer = trees.offer(tokens);
        let manifest = decode_manifest(&offer.manifest).unwrap().0;
        assert_eq!((manifest.kind, manifest.at.trunk), (ImageKind::Prefix, blocks * 128));
        assert_eq!(manifest.tokens, trees.tokens[..blocks as usize * 128]);
        let verified = trees.expect(&offer);
        let got = trees.admit(&verified, b"salt").unwrap();
        let is_new = tokens != 384;
        let import = PrefixImport { blocks: new, checkpoint: true };
        assert_eq!(got, is_new.then_some(import), "{tokens} tokens");
        assert_eq!((trees.sender.offers(), trees.sender.held_bytes()), (0, 0));
        let (Trees { source, target, tokens: ids, .. }, tokens) = (&mut trees, &tokens);
        let of = |site: &mut Site| exported(site, &ids[..*tokens], b"salt").unwrap();
        assert!(of(source) == of(target) && of(target) == verified.copy().unwrap(), "every byte");
        target.fed.manager.ledger().audit().unwrap();
    }
    let Site { fed, .. } = &mut trees.target;
    let stream = fed.stream.clone();
    let admission = fed.manager.admit_with(&stream, &prompt(&trees.tokens, b"salt")).unwrap();
    assert_eq!(admission.reused, 384);
    let other = fed.manager.admit_with(&stream, &prompt(&trees.tokens, b"other")).unwrap();
    assert_eq!(other.reused, 0, "of another salt");
}

/// An offer of a prefix that was already admitted is not read again: its source has freed the memory.
pub fn a_prefix_is_read_once() {
    let mut trees = Trees::new(site(1, 5, 4));
    let offer = trees.offer(256);
    let (fingerprint, layout) = (trees.fingerprint(b"salt"), trees.target.staging.layout().clone());
    let expected =
        Expected { fingerprint: &fingerprint, layout: &layout, tokens: None, max_context: 640 };
    let (transport, to) = (Loopback::new(&trees.fabric), (trees.to.clone(), 1 << 30));
    let mut receiver = Receiver::with_storage(transport, deadlines(), to);
    receiver.begin(Duration::ZERO, &offer, &expected).unwrap();
    let verified = receiver.poll(Duration::ZERO).remove(0).1.unwrap();
    trees.admit(&verified, b"salt").unwrap().expect("it is new");
    drop(verified);
    let error = receiver.begin(Duration::ZERO, &offer, &expected).unwrap_err();
    assert!(matches!(error, TransferError::AskedBefore { .. }), "{error}");
    assert!(receiver.poll(Duration::ZERO).is_empty(), "nothing is read");
}

/// A prefix with another salt, adapter or model, or with other tokens, is refused before it is read. A prefix that was
/// verified for one owner is not entered for another.
pub fn a_prefix_is_one_owners() {
    let mut trees = Trees::new(site(1, 5, 4));
    let offer = trees.offer(256);
    let (right, wrong) = (trees.fingerprint(b"salt"), trees.fingerprint(b"other"));
    let layout = trees.target.staging.layout().clone();
    let expected =
        |fingerprint| Expected { fingerprint, layout: &layout, tokens: None, max_context: 640 };
    let weights = Fingerprint { weights: [0; 32], ..right };
    let shape = Fingerprint { shape: [0; 32], ..right };
    for (fingerprint, fact) in
        [(&wrong, Fact::Owner), (&weights, Fact::Weights), (&shape, Fact::Shape)]
    {
        let error = trees.receive(&offer, &expected(fingerprint)).unwrap_err();
        let is_foreign = matches!(
            &error,
            TransferError::Image(ImageError::Foreign { fact: found, .. }) if *found == fact
        );
        assert!(is_foreign, "{error}");
    }
    let mut tokens = trees.tokens[..256].to_vec();
    tokens[200] += 1;
    let others = Expected { tokens: Some(&tokens), ..expected(&right) };
    let error = trees.receive(&offer, &others).unwrap_err();
    let is_other = matches!(error, TransferError::Image(ImageError::OtherTokens { position: 200 }));
    assert!(is_other, "{error}");
    let short = Expected { max_context: 255, ..expected(&right) };
    let error = trees.receive(&offer, &short).unwrap_err();
    assert!(matches!(error, TransferError::Image(ImageError::TooLong { limit: 255, .. })));
    for mistake in [Mistake::Nothing, Mistake::OwnerIgnored] {
        let offer = trees.offer(256);
        let verified = trees.expect(&offer);
        make(mistake);
        let admitted = trees.admit(&verified, b"other");
        make(Mistake::Nothing);
        let ids = trees.tokens.clone();
        let is_entered = exported(&mut trees.target, &ids, b"other").is_some();
        if mistake == Mistake::OwnerIgnored {
            assert!(admitted.is_ok() && is_entered, "what the check is against");
            continue;
        }
        let error = admitted.unwrap_err();
        let is_owner =
            matches!(error, TransferError::Image(ImageError::Foreign { fact: Fact::Owner, .. }));
        assert!(is_owner, "{error}");
        assert!(!is_entered && trees.target.fed.manager.ledger().free_blocks() == 5);
    }
    assert_eq!(trees.sender.offers(), 1, "but the first, which nobody took");
}

/// The image of a prefix is not admitted as a request, nor the image of a request as a prefix.
pub fn a_prefix_is_no_request() {
    let mut trees = Trees::new(site(1, 5, 4));
    let offer = trees.offer(128);
    let verified = trees.expect(&offer);
    let Site { fed, staging } = &mut trees.target;
    let stream = fed.stream.clone();
    let reserved = fed.manager.reserve(verified.manifest().at).unwrap();
    let mut target = Target {
        cache: &mut fed.manager,
        stream: &stream,
        staging,
        weights: crate::world::weights(),
    };
    let mut control = Tells(&mut trees.sender);
    let error = target.load(&verified, reserved, NEVER, &mut control).unwrap_err();
    let is_kind = matches!(
        error,
        TransferError::OtherKind { needed: ImageKind::Request, found: ImageKind::Prefix }
    );
    assert!(is_kind && fed.manager.ledger().free_blocks() == 5, "{error}");
    let mut world = World::new();
    let mut sender = Sender::new(Loopback::new(&trees.fabric), MAX_BYTES);
    let offer = world.offer(&mut sender, 2);
    let verified = trees.receive(&offer, &world.expected()).unwrap();
    let Site { fed, staging } = &mut trees.target;
    let mut target = Target {
        cache: &mut fed.manager,
        stream: &stream,
        staging,
        weights: crate::world::weights(),
    };
    let owner = (&b"salt"[..], &b""[..]);
    let error = target.admit_prefix(&verified, owner, &mut Tells(&mut sender)).unwrap_err();
    let is_kind = matches!(
        error,
        TransferError::OtherKind { needed: ImageKind::Prefix, found: ImageKind::Request }
    );
    assert!(is_kind && sender.offers() == 0, "{error}");
}

/// Without enough room nothing is taken and nothing is evicted, and the source is still told.
pub fn room_is_taken_whole() {
    let refused = |target: Site| {
        let mut trees = Trees::new(target);
        let offer = trees.offer(384);
        let verified = trees.expect(&offer);
        let counts = |trees: &Trees| {
            let ledger = trees.target.fed.manager.ledger();
            (ledger.free_blocks(), ledger.tree_counts(), ledger.live_requests())
        };
        let before = counts(&trees);
        let error = trees.admit(&verified, b"salt").unwrap_err();
        assert_eq!(counts(&trees), before, "{error}");
        assert_eq!(trees.sender.held_bytes(), 0);
        match error {
            TransferError::Cache(error) => error,
            other => panic!("{other}"),
        }
    };
    let error = refused(site(1, 2, 4));
    let is_short = matches!(error, MoveError::Cache(KvError::OutOfBlocks { needed: 3, free: 2 }));
    assert!(is_short, "{error}");
    // Two blocks hold an unreferenced prefix. They and the free blocks are not enough, so the prefix stays.
    let mut busy = site(1, 3, 4);
    let story = Story::random(&tiny(), 200, 82);
    compute(&mut busy, &story, &(0..200).collect::<Vec<_>>());
    let running = busy.fed.manager.admit().unwrap();
    busy.fed.step(&[Part::new(running, &story, 0..5)], Padding::None);
    let error = refused(busy);
    let is_short = matches!(error, MoveError::Cache(KvError::OutOfBlocks { needed: 3, free: 2 }));
    assert!(is_short, "{error}");
    let error = refused(site(1, 8, 0));
    assert!(matches!(error, MoveError::NothingShared), "{error}");
}

/// While the stream is captured, a prefix is refused before anything is evicted for it, and the capture goes on.
pub fn a_captured_stream_evicts_nothing() {
    let Site { mut fed, mut staging } = site(1, 2, 1);
    let (cache, stream) = (&mut fed.manager, &fed.stream);
    let tokens: Vec<u32> = (0..256).collect();
    let at = Positions { trunk: 256, draft: 0 };
    let payload = vec![0; staging.layout().prefix_bytes(at) as usize];
    let [first, second] = [&b"one"[..], b"two"].map(|salt| prompt(&tokens, salt));
    let whole = Some(PrefixImport { blocks: 2, checkpoint: true });
    let came = cache.import_prefix(stream, &mut staging, &first, (at, &payload)).unwrap();
    assert_eq!(came, whole);
    let before = cache.ledger().tree_counts();
    let captured = stream.capture(Vec::new(), || {
        let refused = cache.import_prefix(stream, &mut staging, &second, (at, &payload));
        let is_it = matches!(
            refused,
            Err(MoveError::Cache(KvError::Device(DeviceError::ForbiddenInCapture { .. })))
        );
        assert!(is_it, "{refused:?}");
        Ok::<_, DeviceError>(())
    });
    assert!(captured.is_ok());
    assert_eq!(cache.ledger().tree_counts(), before);
    assert!(cache.export_prefix(stream, &mut staging, &first).unwrap().is_some());
    // After the capture it takes the room of the other one.
    let came = cache.import_prefix(stream, &mut staging, &second, (at, &payload)).unwrap();
    assert_eq!(came, whole);
    assert!(cache.export_prefix(stream, &mut staging, &first).unwrap().is_none());
}
