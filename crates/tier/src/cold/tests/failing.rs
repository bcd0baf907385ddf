//! Stores that fail, are slow, or count their calls.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, UploadPart,
};

use super::*;
use crate::image::NoMemory;

/// Five whole blocks, of which the first four have a checkpoint.
const LONG: usize = 640;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Get,
    Put,
    /// The beginning of an object that is stored in parts.
    Begin,
    Part,
    Complete,
    Abort,
}

type Answer = Arc<dyn Fn(Call) -> Result<()> + Send + Sync>;

/// A store in memory that calls a hook before each operation.
#[derive(Clone)]
struct Asking {
    objects: Arc<InMemory>,
    answer: Answer,
}

impl std::fmt::Debug for Asking {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Asking")
    }
}

impl std::fmt::Display for Asking {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Asking")
    }
}

/// An object that is stored in parts.
struct AskingUpload {
    parts: Box<dyn MultipartUpload>,
    answer: Answer,
}

impl std::fmt::Debug for AskingUpload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AskingUpload")
    }
}

impl MultipartUpload for AskingUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        if let Err(error) = (self.answer)(Call::Part) {
            return Box::pin(std::future::ready(Err(error)));
        }
        self.parts.put_part(data)
    }

    fn complete<'s, 'f>(&'s mut self) -> BoxFuture<'f, Result<PutResult>>
    where
        's: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            (self.answer)(Call::Complete)?;
            self.parts.complete().await
        })
    }

    fn abort<'s, 'f>(&'s mut self) -> BoxFuture<'f, Result<()>>
    where
        's: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            (self.answer)(Call::Abort)?;
            self.parts.abort().await
        })
    }
}

impl ObjectStore for Asking {
    fn put_opts<'s, 'l, 'f>(
        &'s self,
        location: &'l Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> BoxFuture<'f, Result<PutResult>>
    where
        's: 'f,
        'l: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            (self.answer)(Call::Put)?;
            self.objects.put_opts(location, payload, options).await
        })
    }

    fn put_multipart_opts<'s, 'l, 'f>(
        &'s self,
        location: &'l Path,
        options: PutMultipartOptions,
    ) -> BoxFuture<'f, Result<Box<dyn MultipartUpload>>>
    where
        's: 'f,
        'l: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            (self.answer)(Call::Begin)?;
            let parts = self.objects.put_multipart_opts(location, options).await?;
            Ok(Box::new(AskingUpload { parts, answer: Arc::clone(&self.answer) }) as _)
        })
    }

    fn get_opts<'s, 'l, 'f>(
        &'s self,
        location: &'l Path,
        options: GetOptions,
    ) -> BoxFuture<'f, Result<GetResult>>
    where
        's: 'f,
        'l: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            (self.answer)(Call::Get)?;
            self.objects.get_opts(location, options).await
        })
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.objects.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.objects.list(prefix)
    }

    fn list_with_delimiter<'s, 'p, 'f>(
        &'s self,
        prefix: Option<&'p Path>,
    ) -> BoxFuture<'f, Result<ListResult>>
    where
        's: 'f,
        'p: 'f,
        Self: 'f,
    {
        self.objects.list_with_delimiter(prefix)
    }

    fn copy_opts<'s, 'a, 'b, 'f>(
        &'s self,
        from: &'a Path,
        to: &'b Path,
        options: CopyOptions,
    ) -> BoxFuture<'f, Result<()>>
    where
        's: 'f,
        'a: 'f,
        'b: 'f,
        Self: 'f,
    {
        self.objects.copy_opts(from, to, options)
    }
}

/// A cache with a checkpoint in each block, and its tier over these objects.
fn over(
    objects: &Arc<InMemory>,
    answer: impl Fn(Call) -> Result<()> + Send + Sync + 'static,
) -> (Fed<Null>, ColdTier<Null>) {
    let layers = [Swa, Csa, Hca];
    let base = config(&layers, (MainFormat::Ue8m0, IndexFormat::Mxfp4), 2);
    let settings =
        CacheConfig { num_checkpoints: 8, checkpoint_interval: 128, host_bytes: 64 << 20, ..base };
    let mut fed = Fed::new(&NullDevice::null(1 << 34), settings);
    let cold = below(&mut fed, objects, answer);
    (fed, cold)
}

/// A tier below a cache, over these objects, of which it knows only the names.
pub(super) fn below(
    fed: &mut Fed<Null>,
    objects: &Arc<InMemory>,
    answer: impl Fn(Call) -> Result<()> + Send + Sync + 'static,
) -> ColdTier<Null> {
    let (block_bytes, checkpoint_bytes) = fed.manager.host_image_bytes().unwrap();
    let owner = Owner { identity: b"weights"[..].into(), block_bytes, checkpoint_bytes };
    let store = Asking { objects: Arc::clone(objects), answer: Arc::new(answer) };
    ColdTier::over(&mut fed.manager, Box::new(store), Path::default(), owner).unwrap()
}

fn long() -> Vec<u32> {
    (0..LONG as u32).collect()
}

fn prompt(tokens: &[u32]) -> Prompt<'_> {
    Prompt { tokens, salt: b"", adapter: b"" }
}

/// Runs a request until it has the given number of tokens, and stores the prefixes that have arrived in host memory.
fn turn(fed: &mut Fed<Null>, cold: &mut ColdTier<Null>, tokens: &[u32]) {
    let admission = fed.manager.admit_waiting(&fed.stream, &prompt(tokens)).unwrap();
    let id = admission.id;
    run(fed, id, admission.reused as usize..tokens.len(), tokens);
    fed.manager.settle_tier(&fed.stream).unwrap();
    fed.manager.release(id).unwrap();
    cold.settle(&mut fed.manager);
}

fn run(fed: &mut Fed<Null>, id: dsv4_kv::RequestId, range: Range<usize>, tokens: &[u32]) {
    for start in range.clone().step_by(128) {
        let end = range.end.min(start + 128);
        let step = [StepRequest { id, start: start as u32, tokens: (end - start) as u32 }];
        let mut step = fed.manager.begin_step(&fed.stream, Launches::Eager, &step).unwrap();
        step.skip_kernels();
        let accepted = (end - start) as u32;
        step.commit(&[Accepted { id, accepted, tokens: &tokens[start..end] }]).unwrap();
        fed.manager.save_wanted(&fed.stream).unwrap();
    }
}

/// Objects of all depths of the long prompt.
fn stored() -> Arc<InMemory> {
    let objects = Arc::default();
    let (mut fed, mut cold) = over(&objects, |_| Ok(()));
    turn(&mut fed, &mut cold, &long());
    assert!(cold.stats().stored >= 4, "{:?}", cold.stats());
    objects
}

pub(super) fn fails() -> object_store::Error {
    object_store::Error::Generic { store: "the test's", source: "it is down".into() }
}

/// A store that does not exist is no miss: prefixes cannot be stored in it, and this is reported.
#[test]
fn what_is_not_stored_has_failed() {
    let not_found =
        || object_store::Error::NotFound { path: "bucket".into(), source: "no bucket".into() };
    let answer = move |call| if call == Call::Get { Ok(()) } else { Err(not_found()) };
    let (mut fed, mut cold) = over(&Arc::default(), answer);
    turn(&mut fed, &mut cold, &long()[..200]);
    let stats = cold.stats();
    assert_eq!((stats.failed, stats.not_there, stats.stored), (1, 0, 0));
    let errors = cold.take_errors();
    let [error @ ColdError::NotStored(_)] = &errors[..] else { panic!("{errors:?}") };
    assert_eq!(error.kind(), ColdErrorKind::Failed);
}

/// A prefix for whose bytes the host has no memory is not stored. The process goes on.
#[test]
fn what_memory_cannot_hold_is_not_stored() {
    let mut fed = cache();
    let (_, checkpoint_bytes) = fed.manager.host_image_bytes().unwrap();
    let owner = Owner { identity: b"weights"[..].into(), block_bytes: 1 << 62, checkpoint_bytes };
    let objects = Box::new(InMemory::new());
    let mut cold = ColdTier::over(&mut fed.manager, objects, Path::default(), owner).unwrap();
    compute(&mut fed, &prompt(&long()[..TOKENS]));
    cold.settle(&mut fed.manager);
    let errors = cold.take_errors();
    let [ColdError::NoMemory(NoMemory { bytes })] = errors[..] else { panic!("{errors:?}") };
    assert!(bytes > 1 << 62);
    assert_eq!((cold.stats().failed, cold.stats().stored), (1, 0));
}

/// A long object is stored in parts, and read again. If a part or the end fails, there is no object, and the parts are given
/// up. A store that takes no parts gets the whole object.
#[test]
fn long_objects_are_stored_in_parts() {
    let not_there = || object_store::Error::NotImplemented {
        operation: "parts".into(),
        implementer: "the test's".into(),
    };
    for failing in [None, Some(Call::Begin), Some(Call::Part), Some(Call::Complete)] {
        let calls = Arc::new(Mutex::new(Vec::new()));
        let asked = Arc::clone(&calls);
        let objects = Arc::default();
        let (mut fed, mut cold) = over(&objects, move |call| {
            asked.lock().unwrap().push(call);
            match failing {
                Some(Call::Begin) if call == Call::Begin => Err(not_there()),
                Some(failing) if call == failing => Err(fails()),
                _ => Ok(()),
            }
        });
        turn(&mut fed, &mut cold, &long()[..200]);
        let calls = calls.lock().unwrap().clone();
        let of = |call| calls.iter().filter(|&&other| other == call).count();
        let (stored, failed) = (cold.stats().stored, cold.stats().failed);
        match failing {
            None => {
                assert_eq!((stored, failed, of(Call::Put), of(Call::Complete)), (1, 0, 0, 1));
                assert!(of(Call::Part) > 1, "{calls:?}");
            }
            Some(Call::Begin) => assert_eq!((stored, failed, of(Call::Put)), (1, 0, 1)),
            _ => assert_eq!((stored, failed, of(Call::Abort), of(Call::Put)), (0, 1, 1, 0)),
        }
        drop((fed, cold));
        // Another cache finds what was stored, and nothing else.
        let (fed, mut later) = over(&objects, |_| Ok(()));
        let found = later.fetch(&fed.manager, &prompt(&long())).unwrap();
        assert_eq!(found.is_some(), stored == 1, "{failing:?}");
        if let Some(id) = found {
            later.cancel(&fed.manager, id);
        }
    }
}

/// A store that is down is called once per prompt, and not for each shorter prefix of it.
#[test]
fn a_store_that_is_down_is_asked_once() {
    let gets = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&gets);
    let (mut fed, mut cold) = over(&stored(), move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        Err(fails())
    });
    cold.fetch(&fed.manager, &prompt(&long())).unwrap().expect("the store has it");
    cold.settle(&mut fed.manager);
    assert_eq!((gets.load(Ordering::Relaxed), cold.stats().failed), (1, 1));
}

/// The answer of S3 to a read of an archived object, or of Azure to any read with an expired signature.
fn denied() -> object_store::Error {
    object_store::Error::PermissionDenied { path: "an object".into(), source: "403".into() }
}

/// The answer of Azure to a read of an archived object.
fn archived() -> object_store::Error {
    object_store::Error::AlreadyExists { path: "an object".into(), source: "409".into() }
}

/// An object that may not be read is a miss: the next shorter prefix is read, and the object is stored again. This holds
/// for the object of a prefix, and for one on which it rests. That one is tried by itself too, unless it was archived.
#[test]
fn what_may_not_be_read_is_stored_again() {
    let cases: [(fn() -> _, _, _); 4] =
        [(denied, 0, 1), (denied, 1, 1), (archived, 0, 1), (archived, 1, 2)];
    for (error, refused, stored_again) in cases {
        let gets = AtomicUsize::new(0);
        let answer = move |call| match call {
            Call::Get if gets.fetch_add(1, Ordering::Relaxed) == refused => Err(error()),
            _ => Ok(()),
        };
        let (mut fed, mut cold) = over(&stored(), answer);
        cold.fetch(&fed.manager, &prompt(&long())).unwrap().expect("the store has it");
        cold.settle(&mut fed.manager);
        assert_eq!((cold.stats().restored, cold.stats().failed), (1, 1), "{:?}", cold.stats());
        turn(&mut fed, &mut cold, &long());
        assert_eq!(cold.stats().stored, stored_again, "{:?}", cold.stats());
    }
}

/// A store that denies all objects for a while makes nothing forgotten: afterwards the whole prefix is read.
#[test]
fn what_is_denied_for_a_while_is_known_afterwards() {
    let is_denying = Arc::new(AtomicBool::new(true));
    let denies = Arc::clone(&is_denying);
    let answer = move |call| match call {
        Call::Get if denies.load(Ordering::Relaxed) => Err(denied()),
        _ => Ok(()),
    };
    let (mut fed, mut cold) = over(&stored(), answer);
    for (is_denied, restored) in [(true, 0), (false, 512)] {
        is_denying.store(is_denied, Ordering::Relaxed);
        cold.fetch(&fed.manager, &prompt(&long())).unwrap().expect("the store has it");
        cold.settle(&mut fed.manager);
        assert_eq!(cold.stats().restored_tokens, restored, "{:?}", cold.stats());
        assert!(cold.stats().failed > 0);
    }
}

/// A cancelled read, and a read of a dropped tier, ends with the object that is under way.
#[test]
fn a_read_that_nobody_wants_ends() {
    for is_dropped in [false, true] {
        let gets = Arc::new(AtomicUsize::new(0));
        let (count, (go, wait)) = (Arc::clone(&gets), channel::<()>());
        let wait = Mutex::new(wait);
        let (mut fed, mut cold) = over(&stored(), move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            // Waits until a message comes, or until the sender is dropped.
            _ = wait.lock().unwrap().recv();
            Ok(())
        });
        let id = cold.fetch(&fed.manager, &prompt(&long())).unwrap().expect("the store has it");
        let begin = Instant::now();
        while gets.load(Ordering::Relaxed) == 0 {
            assert!(begin.elapsed() < Duration::from_secs(60), "it never begins");
            std::thread::yield_now();
        }
        if is_dropped {
            let queue = cold.store.shared();
            let thread = std::thread::spawn(move || drop(cold));
            wait_until_closed(&queue);
            drop(go);
            thread.join().unwrap();
        } else {
            cold.cancel(&fed.manager, id);
            assert!(!cold.is_fetching(id));
            drop(go);
            cold.settle(&mut fed.manager);
            assert_eq!(cold.pending(), 0);
            assert!(cold.take_errors().is_empty(), "nobody asks why");
        }
        assert_eq!(gets.load(Ordering::Relaxed), 1);
    }
}

/// The chain of a new object is checked once, and not in each turn of a conversation.
#[test]
fn a_chain_is_followed_once() {
    let gets = Arc::new(AtomicUsize::new(0));
    let (count, objects) = (Arc::clone(&gets), Arc::<InMemory>::default());
    let tokens = long();
    let (mut fed, mut cold) = over(&objects, |_| Ok(()));
    turn(&mut fed, &mut cold, &tokens[..270]);
    drop(cold);
    let mut cold = below(&mut fed, &objects, move |call| {
        count.fetch_add(usize::from(call == Call::Get), Ordering::Relaxed);
        Ok(())
    });
    let mut asked = Vec::new();
    for len in [400, 520] {
        turn(&mut fed, &mut cold, &tokens[..len]);
        asked.push((gets.swap(0, Ordering::Relaxed), cold.stats().stored));
    }
    assert_eq!(asked, [(2, 1), (0, 2)]);
    // All of it is there.
    let (mut fed, mut cold) = over(&objects, |_| Ok(()));
    cold.fetch(&fed.manager, &prompt(&tokens)).unwrap().expect("the store has it");
    cold.settle(&mut fed.manager);
    assert_eq!(cold.stats().restored_tokens, 512);
}

/// If the chain cannot be checked, it is not used: all blocks are stored.
#[test]
fn a_store_that_cannot_tell_gets_all() {
    let objects = Arc::<InMemory>::default();
    let tokens = long();
    let (mut fed, mut cold) = over(&objects, |_| Ok(()));
    turn(&mut fed, &mut cold, &tokens[..400]);
    drop(cold);
    let gets = AtomicUsize::new(0);
    let mut cold = below(&mut fed, &objects, move |call| match call {
        Call::Get if gets.fetch_add(1, Ordering::Relaxed) == 0 => Err(fails()),
        _ => Ok(()),
    });
    turn(&mut fed, &mut cold, &tokens[..520]);
    let stats = cold.stats();
    assert_eq!((stats.stored, stats.failed), (1, 1));
    let block_bytes = fed.manager.host_image_bytes().unwrap().0;
    assert!(stats.bytes_written > 4 * block_bytes, "{stats:?}");
}
