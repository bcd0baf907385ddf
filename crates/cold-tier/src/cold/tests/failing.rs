//! Stores that fail, are slow, or count their calls.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use object_store::Result;
use object_store::memory::InMemory;
use object_store::path::Path;

use super::asking::{Call, below, fails, never};
use super::*;
use crate::image::NoMemory;
use crate::objects::QUICK;
use crate::open::Opened;

/// Five whole blocks, of which the first four have a checkpoint.
const LONG: usize = 640;

/// A cache with a checkpoint in each block, and its tier over these objects.
pub(super) fn over(
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

pub(super) fn long() -> Vec<u32> {
    (0..LONG as u32).collect()
}

pub(super) fn prompt(tokens: &[u32]) -> Prompt<'_> {
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
pub(super) fn stored() -> Arc<InMemory> {
    let objects = Arc::default();
    let (mut fed, mut cold) = over(&objects, |_| Ok(()));
    turn(&mut fed, &mut cold, &long());
    assert!(cold.stats().stored >= 4, "{:?}", cold.stats());
    objects
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
    let (objects, prefix) = (Box::new(InMemory::new()), Path::default());
    let opened = Opened { objects, prefix, directory: None };
    let mut cold = ColdTier::over(&mut fed.manager, || Ok(opened), owner).unwrap();
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

/// A cancelled read, and a read of a dropped tier, ends with the call that is under way.
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

/// A read that is cancelled in its last object brings nothing to host memory, where it could evict what others want.
#[test]
fn what_nobody_wants_evicts_nothing() {
    let objects = Arc::default();
    let (mut fed, mut cold) = over(&objects, |_| Ok(()));
    turn(&mut fed, &mut cold, &long()[..200]);
    assert_eq!(cold.stats().stored, 1, "the store has one object");
    drop((fed, cold));
    let gets = Arc::new(AtomicUsize::new(0));
    let (count, (go, wait)) = (Arc::clone(&gets), channel::<()>());
    let wait = Mutex::new(wait);
    let (mut fed, mut cold) = over(&objects, move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        // Until the sender is dropped.
        _ = wait.lock().unwrap().recv();
        Ok(())
    });
    let id = cold.fetch(&fed.manager, &prompt(&long())).unwrap().expect("the store has it");
    let begin = Instant::now();
    while gets.load(Ordering::Relaxed) == 0 {
        assert!(begin.elapsed() < Duration::from_secs(60), "it never begins");
        std::thread::yield_now();
    }
    cold.cancel(&fed.manager, id);
    drop(go);
    cold.settle(&mut fed.manager);
    let stats = cold.stats();
    assert_eq!((stats.restored, stats.no_room, stats.failed), (0, 0, 0), "{stats:?}");
    assert_eq!((cold.finished_reads(), cold.pending()), (1, 0));
}

/// A read that the store does not answer ends when it is cancelled, and the next prompt is read.
#[test]
fn a_cancelled_read_frees_the_thread() {
    let gets = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&gets);
    let (mut fed, mut cold) = over(&stored(), move |call| match call {
        Call::Get if count.fetch_add(1, Ordering::Relaxed) == 0 => Err(never()),
        _ => Ok(()),
    });
    let first = cold.fetch(&fed.manager, &prompt(&long())).unwrap().expect("the store has it");
    let begin = Instant::now();
    while gets.load(Ordering::Relaxed) == 0 {
        assert!(begin.elapsed() < Duration::from_secs(60), "it never begins");
        std::thread::yield_now();
    }
    cold.cancel(&fed.manager, first);
    cold.wait(&mut fed.manager, Duration::from_millis(50));
    assert_eq!(cold.pending(), 1, "without another job its answer tells whether the store answers");
    let next = cold.fetch(&fed.manager, &prompt(&long()[..300])).unwrap();
    let next = next.expect("the store has it");
    while cold.is_fetching(next) {
        assert!(begin.elapsed() < Duration::from_secs(60), "the first one keeps the thread");
        cold.wait(&mut fed.manager, Duration::from_millis(10));
    }
    cold.settle(&mut fed.manager);
    let stats = cold.stats();
    assert_eq!((stats.restored, stats.restored_tokens, stats.failed), (1, 256, 0), "{stats:?}");
    assert_eq!((cold.finished_reads(), cold.pending()), (1, 0), "the first one was not answered");
}

/// A message for a read that has ended by itself ends no later store.
#[test]
fn a_late_message_ends_no_store() {
    let (mut fed, mut cold) = over(&Arc::default(), |_| Ok(()));
    cold.store.shared().over.notify_one();
    turn(&mut fed, &mut cold, &long()[..200]);
    assert_eq!((cold.stats().stored, cold.stats().failed), (1, 0));
}

/// A store that does not answer is not asked for the size of an object too: each call waits for all its retries.
#[test]
fn a_store_that_does_not_answer_is_asked_once_for_a_header() {
    for (is_slow, expected) in [(false, 1), (true, 0)] {
        let objects = Arc::<InMemory>::default();
        let tokens = long();
        let (mut fed, mut cold) = over(&objects, |_| Ok(()));
        turn(&mut fed, &mut cold, &tokens[..400]);
        drop(cold);
        let heads = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&heads);
        let mut cold = below(&mut fed, &objects, move |call| {
            match call {
                Call::Head => _ = count.fetch_add(1, Ordering::Relaxed),
                Call::Get if is_slow => std::thread::sleep(QUICK * 5 / 4),
                _ => {}
            }
            if call == Call::Get { Err(fails()) } else { Ok(()) }
        });
        turn(&mut fed, &mut cold, &tokens[..520]);
        let stats = cold.stats();
        assert_eq!((stats.stored, stats.failed), (1, 1), "all blocks are stored");
        assert_eq!(heads.load(Ordering::Relaxed), expected, "slow: {is_slow}");
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
