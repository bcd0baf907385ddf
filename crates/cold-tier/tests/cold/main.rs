//! Prefixes that another cache stored in files: every byte is that of a request alone, and a wrong file is a miss.

mod damaged;

use std::fs;
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dsv4_kv::device::{EmuDevice, EmuOptions, Emulator};
use dsv4_kv::{Accepted, CacheConfig, KvCacheManager, Prompt, RequestId};
use dsv4_kv_cold_tier::{ColdError, ColdOptions, ColdTier, FetchId, ImageError};
use dsv4_kv_tests::fed::{Fed, Padding, Part, begin};
use dsv4_kv_tests::rings::{assert_ring, assert_ring_is_zero};
use dsv4_kv_tests::stories::{Stored, Story, config, tiny};
use kv_layout::geometry::LayerKind::{self, Csa, Hca, Swa};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

const FORMATS: (MainFormat, IndexFormat) = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
/// A layer of every kind.
const LAYERS: [LayerKind; 3] = [Swa, Csa, Hca];
const TOKENS: usize = 420;

/// A cache with its host tier and its cold tier.
struct Cache {
    fed: Fed<Emulator>,
    cold: ColdTier<Emulator>,
}

fn tokens() -> Vec<u32> {
    (0..TOKENS as u32).collect()
}

fn prompt<'p>(tokens: &'p [u32], salt: &'p [u8]) -> Prompt<'p> {
    Prompt { tokens, salt, adapter: b"" }
}

fn open(fed: &mut Fed<Emulator>, directory: &Path, identity: &[u8]) -> ColdTier<Emulator> {
    let (url, options) = (directory.to_str().unwrap(), ColdOptions::default());
    ColdTier::open(&mut fed.manager, url, identity, &options).unwrap()
}

/// A checkpoint in each block.
fn settings() -> CacheConfig {
    CacheConfig {
        num_checkpoints: 4,
        checkpoint_interval: 128,
        host_bytes: 8 << 20,
        poison: true,
        ..config(&LAYERS, FORMATS, 2)
    }
}

impl Cache {
    fn new(device: &EmuDevice, directory: &Path, identity: &[u8]) -> Self {
        Self::with(device, directory, identity, settings())
    }

    fn with(device: &EmuDevice, directory: &Path, identity: &[u8], settings: CacheConfig) -> Self {
        let mut fed = Fed::new(device, settings);
        let cold = open(&mut fed, directory, identity);
        Self { fed, cold }
    }

    /// Opens the store again.
    fn reopen(&mut self, directory: &Path, identity: &[u8]) {
        self.cold = open(&mut self.fed, directory, identity);
    }

    /// Runs a request of the story's tokens to its end. Returns the number of reused tokens.
    fn run(&mut self, salt: &[u8], story: &Story, stored: &[Stored]) -> u32 {
        let (id, reused) = self.compute(salt, story, TOKENS);
        let Self { fed, .. } = self;
        fed.assert_holds(id, story, stored, TOKENS);
        fed.manager.check_faults(&fed.stream).unwrap();
        fed.manager.release(id).unwrap();
        self.settle();
        reused
    }

    /// Runs a request of the story's first tokens. Returns the request and the number of reused tokens.
    fn compute(&mut self, salt: &[u8], story: &Story, len: usize) -> (RequestId, u32) {
        let (id, reused) = self.admit(salt, len);
        self.step(id, story, reused as usize..len);
        (id, reused)
    }

    /// Admits a request of `len` tokens. Returns it and the number of reused tokens.
    fn admit(&mut self, salt: &[u8], len: usize) -> (RequestId, u32) {
        let Self { fed, .. } = self;
        let tokens = tokens();
        let admission =
            fed.manager.admit_waiting(&fed.stream, &prompt(&tokens[..len], salt)).unwrap();
        (admission.id, admission.reused)
    }

    /// Runs some of its tokens.
    fn step(&mut self, id: RequestId, story: &Story, range: Range<usize>) {
        let Self { fed, .. } = self;
        let count = range.len() as u32;
        let parts = [Part::new(id, story, range.clone())];
        fed.inputs.load(&fed.stream, &parts, count);
        let mut steps = begin(&mut fed.manager, &fed.stream, &parts, Padding::None).unwrap();
        for step in &mut steps {
            fed.inputs.run(step, &mut |_, _| Ok(())).unwrap();
        }
        let told = Accepted { id, accepted: count, tokens: &tokens()[range] };
        steps.into_iter().for_each(|step| step.commit(&[told]).unwrap());
        fed.manager.save_wanted(&fed.stream).unwrap();
    }

    fn settle(&mut self) {
        let Self { fed, cold } = self;
        fed.manager.settle_tier(&fed.stream).unwrap();
        cold.settle(&mut fed.manager);
        fed.manager.audit_tier().unwrap();
        fed.manager.ledger().audit().unwrap();
    }

    /// Fetches the story's prompt from the store. Returns the errors.
    fn fetch(&mut self, salt: &[u8]) -> Vec<ColdError> {
        let id = self.ask(salt).unwrap().expect("it is not there");
        assert!(self.cold.is_fetching(id));
        self.settle();
        assert!(!self.cold.is_fetching(id));
        self.cold.take_errors()
    }

    fn ask(&mut self, salt: &[u8]) -> Result<Option<FetchId>, ColdError> {
        self.cold.fetch(&self.fed.manager, &prompt(&tokens(), salt))
    }
}

struct Setup {
    device: EmuDevice,
    story: Story,
    stored: Vec<Stored>,
    directory: tempfile::TempDir,
}

impl Setup {
    /// A directory in which a cache has stored the story under the salt `a`, in three objects.
    fn new() -> Self {
        let device = EmuDevice::new(EmuOptions::default());
        let story = Story::random(&LAYERS, TOKENS, 501);
        let stored = story.stored(&device, FORMATS);
        let directory = tempfile::tempdir().unwrap();
        let this = Self { device, story, stored, directory };
        let mut cache = this.cache(b"weights");
        assert_eq!(cache.run(b"a", &this.story, &this.stored), 0);
        let stats = cache.cold.stats();
        assert_eq!((stats.stored, stats.failed, this.files().len()), (3, 0, 3));
        let on_disk: u64 = this.files().iter().map(|file| fs::metadata(file).unwrap().len()).sum();
        assert_eq!(stats.bytes_written, on_disk);
        // Prefixes that the store has are not stored again.
        assert_eq!(cache.run(b"a", &this.story, &this.stored), 384);
        assert_eq!(cache.cold.stats().stored, 3);
        this
    }

    fn cache(&self, identity: &[u8]) -> Cache {
        Cache::new(&self.device, self.directory.path(), identity)
    }

    fn files(&self) -> Vec<PathBuf> {
        let folder = fs::read_dir(self.directory.path().join("v1")).unwrap();
        let mut files: Vec<_> = folder.map(|entry| entry.unwrap().path()).collect();
        // The longest prefix last.
        let blocks = |file: &PathBuf| fs::read(file).unwrap().get(36).copied();
        files.sort_by_key(blocks);
        files
    }

    /// With these bytes in the object of the longest prefix, the error is noticed, a shorter prefix is used, and every
    /// byte is right.
    fn assert_miss(&self, bytes: &[u8], is_right: impl Fn(&ImageError) -> bool) {
        let last = self.files().remove(2);
        let whole = fs::read(&last).unwrap();
        fs::write(&last, bytes).unwrap();
        let mut cache = self.cache(b"weights");
        let errors = cache.fetch(b"a");
        match &errors[..] {
            [ColdError::Image { name, error }] => {
                assert!(is_right(error), "{error}");
                assert!(last.ends_with(name), "{name}");
            }
            other => panic!("{other:?}"),
        }
        let stats = cache.cold.stats();
        assert_eq!((stats.damaged + stats.foreign, stats.restored_tokens), (1, 256));
        assert_eq!(cache.run(b"a", &self.story, &self.stored), 256, "the shorter prefix is had");
        // The prefix that was dropped from the index is stored again.
        assert_eq!(fs::read(&last).unwrap(), whole);
    }
}

/// Another cache, as after a restart, continues from the files; but not under another salt or with other weights.
#[test]
fn another_cache_goes_on_from_files() {
    let setup = Setup::new();
    let mut cache = setup.cache(b"weights");
    for (salt, identity) in [(b"b", &b"weights"[..]), (b"a", b"other weights")] {
        let mut other = setup.cache(identity);
        assert_eq!(other.ask(salt).unwrap(), None);
        assert_eq!((other.cold.stats().not_there, other.cold.stats().restored), (1, 0));
    }
    let errors = cache.fetch(b"a");
    assert!(errors.is_empty(), "{errors:?}");
    let stats = cache.cold.stats();
    assert_eq!((stats.restored, stats.restored_tokens), (1, 384));
    assert_eq!(cache.run(b"a", &setup.story, &setup.stored), 384);
    assert_eq!(cache.fed.manager.tier_stats().restored_tokens, 384);
    // A prompt that is in host memory is not fetched again.
    assert!(cache.ask(b"a").unwrap().is_none());
    assert_eq!(cache.cold.stats().stored, 0, "it came from there");
}

/// An object that cannot be read now can be fetched later.
#[test]
fn a_store_that_fails_once_is_asked_again() {
    let setup = Setup::new();
    let last = &setup.files()[2];
    let aside = last.with_extension("aside");
    let mut cache = setup.cache(b"weights");
    fs::rename(last, &aside).unwrap();
    // A symbolic link to itself cannot be opened, which differs from a missing file.
    std::os::unix::fs::symlink(last, last).unwrap();
    let errors = cache.fetch(b"a");
    let [ColdError::Store(error)] = &errors[..] else { panic!("{errors:?}") };
    assert!(!error.to_string().contains("not found"), "{error}");
    assert_eq!(cache.cold.stats().restored_tokens, 0, "it is not asked for shorter ones now");
    fs::rename(&aside, last).unwrap();
    assert!(cache.fetch(b"a").is_empty());
    let stats = cache.cold.stats();
    assert_eq!((stats.failed, stats.restored, stats.restored_tokens), (1, 1, 384));
    assert_eq!(cache.run(b"a", &setup.story, &setup.stored), 384);
}

/// A prefix that could not be stored does not count as stored: a longer prefix is later stored with all its blocks.
#[test]
fn a_store_that_was_full_misses_nothing() {
    let setup = Setup::new();
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path().join("v1");
    let cache = || Cache::new(&setup.device, directory.path(), b"weights");
    let mut first = cache();
    // The folder cannot be created, because a file has its name.
    fs::write(&folder, b"").unwrap();
    let (id, _) = first.compute(b"a", &setup.story, 300);
    first.fed.manager.release(id).unwrap();
    first.settle();
    let stats = first.cold.stats();
    assert_eq!((stats.stored, stats.failed), (0, 2));
    let errors = first.cold.take_errors();
    assert!(matches!(errors[..], [ColdError::NotStored(_), ColdError::NotStored(_)]), "{errors:?}");
    fs::remove_file(&folder).unwrap();
    assert_eq!(first.run(b"a", &setup.story, &setup.stored), 256);
    assert_eq!(first.cold.stats().stored, 1);
    let mut second = cache();
    assert!(second.fetch(b"a").is_empty());
    assert_eq!(second.run(b"a", &setup.story, &setup.stored), 384);
}

/// If the device has a prefix that host memory lacks, a longer prefix can still come to host memory.
#[test]
fn the_device_may_have_more_than_host_memory() {
    let setup = Setup::new();
    let mut cache = setup.cache(b"weights");
    let (id, _) = cache.compute(b"a", &setup.story, 300);
    cache.fed.manager.release(id).unwrap();
    let tokens = tokens();
    let found = cache.fed.manager.host_prompt(&prompt(&tokens, b"a")).unwrap();
    assert_eq!((found.reusable, found.in_host), (256, 0));
    cache.ask(b"a").unwrap().expect("the store has more");
    cache.cold.settle(&mut cache.fed.manager);
    let stats = cache.cold.stats();
    assert_eq!((stats.no_room, stats.restored, stats.restored_tokens), (0, 1, 128));
    assert_eq!(cache.run(b"a", &setup.story, &setup.stored), 384);
}

/// If host memory has no room for a prefix, only the part that fits is read.
#[test]
fn no_more_is_read_than_host_memory_has_room_for() {
    let setup = Setup::new();
    let (block, checkpoint) = setup.cache(b"weights").fed.manager.host_image_bytes().unwrap();
    let host_bytes = (checkpoint.div_ceil(block) + 2) * block;
    let settings = CacheConfig { host_bytes, ..settings() };
    let mut cache = Cache::with(&setup.device, setup.directory.path(), b"weights", settings);
    assert!(cache.fetch(b"a").is_empty());
    let stats = cache.cold.stats();
    assert_eq!((stats.no_room, stats.restored, stats.restored_tokens), (0, 1, 256));
    assert_eq!(cache.ask(b"a").unwrap(), None);
    assert_eq!(cache.run(b"a", &setup.story, &setup.stored), 256);
}

/// Windows of draft layers are stored with a checkpoint that has them. For a checkpoint that a chunk saved, which has
/// none, they are zero, whatever its memory held before.
#[test]
fn draft_windows_come_back_if_they_were_saved() {
    let device = EmuDevice::new(EmuOptions::default());
    let directory = tempfile::tempdir().unwrap();
    // Both use the same device memory for their checkpoint.
    let (num_checkpoints, max_draft, host_bytes) = (1, 1, 64 << 20);
    let base = config(&tiny(), FORMATS, 2);
    let settings = CacheConfig { num_checkpoints, max_draft, host_bytes, ..base };
    let cache = || Cache::with(&device, directory.path(), b"weights", settings.clone());
    let cases = [(b"a", 380, 511), (b"b", TOKENS, 512)];
    let cases =
        cases.map(|(salt, chunk, seed)| (salt, chunk, Story::random(&tiny(), TOKENS, seed)));
    let mut first = cache();
    for (salt, chunk, story) in &cases {
        let (id, _) = first.admit(*salt, TOKENS);
        first.step(id, story, 0..*chunk);
        (*chunk..TOKENS).for_each(|at| first.step(id, story, at..at + 1));
        first.settle();
        first.fed.manager.release(id).unwrap();
    }
    let mut second = cache();
    for (salt, chunk, story) in &cases {
        let errors = second.fetch(*salt);
        assert!(errors.is_empty(), "{errors:?}");
        let (id, reused) = second.admit(*salt, TOKENS);
        assert_eq!(reused, 384);
        let fed = &mut second.fed;
        let draft = fed.layer_ids().last().unwrap();
        if *chunk < TOKENS {
            assert_ring(&fed.manager, &fed.stream, draft, id, &story.window_rows(draft)[..384]);
        } else {
            assert_ring_is_zero(&fed.manager, &fed.stream, draft, id);
        }
        fed.manager.release(id).unwrap();
    }
}

/// A prompt is fetched only once at a time, and an id is valid only in its own tier.
#[test]
fn prompts_are_fetched_once() {
    let setup = Setup::new();
    let [mut cache, mut other] = [0; 2].map(|_| setup.cache(b"weights"));
    let id = cache.ask(b"a").unwrap().unwrap();
    assert_eq!(cache.ask(b"a").unwrap(), Some(id));
    let others = other.ask(b"a").unwrap().unwrap();
    assert_ne!(others, id);
    assert!(!other.cold.is_fetching(id) && other.cold.is_fetching(others));
    cache.settle();
    let stats = cache.cold.stats();
    assert_eq!((stats.restored, stats.no_room, stats.not_there), (1, 0, 0));
}

/// `file://` with a path is that path, unescaped, and is created if it does not exist; so is a path with a colon. A URL
/// without a store, and a scheme without `://`, are refused with an error that names them.
#[test]
fn a_store_is_named_by_a_path_or_a_url() {
    let setup = Setup::new();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a%20b");
    // Schemes have no case.
    let url = format!("FILE://{}", path.display());
    let mut cache = Cache::new(&setup.device, Path::new(&url), b"weights");
    assert_eq!(cache.run(b"a", &setup.story, &setup.stored), 0);
    assert_eq!(fs::read_dir(path.join("v1")).unwrap().count(), 3);
    // Prompts and salts are in the objects, so that the directory is of one user.
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
    let mut other = Cache::new(&setup.device, &path, b"weights");
    assert!(other.fetch(b"a").is_empty());
    assert_eq!(other.run(b"a", &setup.story, &setup.stored), 384);
    // A path below a file, an unknown scheme, an invalid URL, and a URL whose host could be taken for a directory.
    let below = format!("{}/below", setup.files()[0].display());
    let bare = ["s3:/bucket/x", "s3:bucket", "file:/var/x", "FILE:x"];
    let urls = [&below, "nowhere://bucket", "s3://[/", "file://localhost/var"];
    for wrong in urls.into_iter().chain(bare) {
        let manager = &mut other.fed.manager;
        let refused = ColdTier::open(manager, wrong, b"weights", &ColdOptions::default()).map(drop);
        let Err(ColdError::Url { url, why }) = refused else { panic!("{wrong}: {refused:?}") };
        assert!(url == wrong && !why.is_empty(), "{url}: {why}");
    }
    let colon = directory.path().join("s3:x");
    let mut cache = Cache::new(&setup.device, &colon, b"weights");
    assert_eq!(cache.run(b"a", &setup.story, &setup.stored), 0);
    assert_eq!(fs::read_dir(colon.join("v1")).unwrap().count(), 3);
    let base = config(&LAYERS, FORMATS, 2);
    let mut manager = KvCacheManager::new(setup.device.clone(), base).unwrap();
    let refused = ColdTier::open(&mut manager, &url, b"weights", &ColdOptions::default()).map(drop);
    assert!(matches!(refused, Err(ColdError::Url { .. })), "without a host tier: {refused:?}");
}

/// A directory that is deleted while the tier runs is created again, for the process's user alone.
#[test]
fn a_directory_that_was_deleted_is_of_one_user() {
    let setup = Setup::new();
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("prefixes");
    let mut cache = Cache::new(&setup.device, &directory, b"weights");
    for salt in [b"a", b"b"] {
        assert_eq!(cache.run(salt, &setup.story, &setup.stored), 0);
        assert_eq!(fs::read_dir(directory.join("v1")).unwrap().count(), 3);
        assert_eq!(fs::metadata(&directory).unwrap().permissions().mode() & 0o077, 0);
        fs::remove_dir_all(&directory).unwrap();
    }
    assert_eq!(cache.cold.stats().failed, 0, "{:?}", cache.cold.take_errors());
}

/// A tier without an identity is refused, since it would accept bytes of any weights.
#[test]
fn a_tier_has_an_identity() {
    let setup = Setup::new();
    let mut cache = setup.cache(b"weights");
    let (url, options) = (setup.directory.path().to_str().unwrap(), ColdOptions::default());
    let refused = ColdTier::open(&mut cache.fed.manager, url, b"", &options).map(drop);
    assert!(matches!(refused, Err(ColdError::NoIdentity)), "{refused:?}");
}

/// A tier belongs to one cache: prefixes of its store do not reach a cache with other weights, and that cache's
/// prefixes are not stored there.
#[test]
fn a_tier_is_one_caches() {
    let setup = Setup::new();
    let [mut own, mut other] = [&b"weights"[..], b"other weights"].map(|of| setup.cache(of));
    let all = tokens();
    let refused = own.cold.fetch(&other.fed.manager, &prompt(&all, b"a"));
    assert!(matches!(refused, Err(ColdError::OtherCache)), "{refused:?}");
    own.ask(b"a").unwrap().expect("the store has it");
    let before = other.fed.manager.host_units();
    type Call = fn(&mut ColdTier<Emulator>, &mut KvCacheManager<Emulator>);
    let wait =
        |cold: &mut ColdTier<_>, cache: &mut KvCacheManager<_>| cold.wait(cache, Duration::MAX);
    for call in [ColdTier::advance as Call, wait, ColdTier::settle] {
        call(&mut own.cold, &mut other.fed.manager);
        let errors = own.cold.take_errors();
        assert!(matches!(errors[..], [ColdError::OtherCache]), "{errors:?}");
    }
    assert_eq!(other.fed.manager.host_units(), before);
    // The prompts that were fetched arrive in the cache that requested them.
    own.settle();
    assert_eq!(own.cold.stats().restored_tokens, 384);
    assert_eq!(own.run(b"a", &setup.story, &setup.stored), 384);
}
