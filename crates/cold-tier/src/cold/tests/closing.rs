//! Tiers that are closed while prefixes wait to be stored.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use dsv4_kv::Origin;
use object_store::Result;
use object_store::memory::InMemory;

use super::asking::{Call, below, fails, never};
use super::failing::{long, over, prompt, stored as stored_turns};
use super::*;
use crate::store::DROP_TIMEOUT;

/// Prompts whose prefixes wait.
const PROMPTS: u8 = 20;

/// A tier over these objects, in whose queue the prefixes of all prompts wait until a message is sent.
fn waiting(
    objects: &Arc<InMemory>,
    answer: impl Fn(Call) -> Result<()> + Send + Sync + 'static,
) -> (Fed<Null>, ColdTier<Null>, Sender<()>) {
    let mut fed = cache();
    let mut cold = below(&mut fed, objects, answer);
    let go = compute_while_blocked(&mut fed, &mut cold, PROMPTS);
    let all = 1 + usize::from(PROMPTS);
    assert_eq!(cold.pending, all, "the work that waits, and what waits for it");
    (fed, cold, go)
}

/// Number of these prompts of which the store has something.
fn stored(objects: &Arc<InMemory>) -> usize {
    let mut fed = cache();
    let mut cold = below(&mut fed, objects, |_| Ok(()));
    let tokens: Vec<u32> = (0..TOKENS as u32).collect();
    let is_there = |salt: &u8| {
        let prompt = Prompt { tokens: &tokens, salt: &[*salt], adapter: b"" };
        cold.fetch(&fed.manager, &prompt).unwrap().is_some()
    };
    (0..PROMPTS).filter(is_there).count()
}

/// A store that is gone is asked for one prefix, and not for all that wait: each call may last as long as all retries.
#[test]
fn a_store_that_fails_at_the_end_is_asked_once() {
    for is_dropped in [true, false] {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let (mut fed, cold, go) = waiting(&Arc::default(), move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            Err(fails())
        });
        let queue = cold.store.shared();
        let end = move || match is_dropped {
            true => {
                drop(cold);
                None
            }
            false => Some(cold.close(Duration::MAX)),
        };
        let thread = std::thread::spawn(end);
        wait_until_closed(&queue);
        go.send(()).unwrap();
        let unstored = thread.join().unwrap();
        assert_eq!(unstored, (!is_dropped).then_some(usize::from(PROMPTS)));
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        fed.manager.advance_tier(&fed.stream).unwrap();
        fed.manager.audit_tier().unwrap();
    }
}

/// A store that never answers is waited for no longer than the limit.
#[test]
fn a_store_that_hangs_at_the_end_is_left_alone() {
    let (answer, never) = channel::<()>();
    let never = Mutex::new(never);
    let (_fed, cold, go) = waiting(&Arc::default(), move |_| {
        // Until the sender is dropped.
        _ = never.lock().unwrap().recv();
        Err(fails())
    });
    go.send(()).unwrap();
    let (limit, begin) = (Duration::from_millis(100), Instant::now());
    assert_eq!(cold.close(limit), usize::from(PROMPTS));
    assert!((limit..Duration::from_secs(60)).contains(&begin.elapsed()), "{:?}", begin.elapsed());
    drop(answer);
}

/// Dropping waits for a store that never answers no longer than its limit.
#[test]
fn dropping_waits_no_longer_than_its_limit() {
    let (mut fed, cold, go) = waiting(&Arc::default(), |_| Err(never()));
    go.send(()).unwrap();
    let begin = Instant::now();
    drop(cold);
    let took = begin.elapsed();
    assert!((DROP_TIMEOUT..Duration::from_secs(60)).contains(&took), "{took:?}");
    // Nothing keeps host memory from eviction any more.
    fed.manager.advance_tier(&fed.stream).unwrap();
    fed.manager.audit_tier().unwrap();
}

/// Five blocks that are to be stored, and whether they were dropped.
struct Watched {
    root: RootKey,
    tokens: Vec<[u32; BLOCK]>,
    dropped: Arc<AtomicBool>,
}

impl Source for Watched {
    fn root(&self) -> &RootKey {
        &self.root
    }

    fn tokens(&self) -> &[[u32; BLOCK]] {
        &self.tokens
    }

    fn info(&self) -> CheckpointInfo {
        CheckpointInfo { origin: Origin::Prompt, has_draft: false }
    }

    fn blocks(&self, first: usize, bytes: &mut Vec<u8>) {
        bytes.extend(std::iter::repeat_n(1, 5000 * (self.tokens.len() - first)));
    }

    fn checkpoint(&self, bytes: &mut Vec<u8>) {
        bytes.push(2);
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.dropped.store(true, Ordering::Relaxed);
    }
}

/// A tier that was closed while the store does not answer holds no host memory, whichever call is under way. While the bytes
/// of a prefix are written, they are held no longer.
#[test]
fn a_closed_tier_holds_no_host_memory() {
    let cases: [&'static [Call]; 2] = [&[Call::Get], &[Call::Begin, Call::Put]];
    for hanging in cases {
        let asked = Arc::new(AtomicBool::new(false));
        let is_asked = Arc::clone(&asked);
        let (fed, cold) = over(&stored_turns(), move |call| {
            let hangs = hanging.contains(&call);
            is_asked.fetch_or(hangs, Ordering::Relaxed);
            if hangs { Err(never()) } else { Ok(()) }
        });
        let root = fed.manager.host_prompt(&prompt(&long())).unwrap().root;
        let dropped = Arc::<AtomicBool>::default();
        // The store has the first four blocks.
        let mut tokens = long()[..512].as_chunks().0.to_vec();
        tokens.push([7; BLOCK]);
        cold.store.store(Box::new(Watched { root, tokens, dropped: Arc::clone(&dropped) }));
        let (begin, is_written) = (Instant::now(), hanging.contains(&Call::Put));
        while !asked.load(Ordering::Relaxed) {
            assert!(begin.elapsed() < Duration::from_secs(60), "the store is not asked");
            std::thread::yield_now();
        }
        assert_eq!(dropped.load(Ordering::Relaxed), is_written);
        assert_eq!(cold.close(Duration::from_millis(100)), 1);
        assert!(dropped.load(Ordering::Relaxed), "{hanging:?}");
    }
}

/// What waits is stored, if there is time.
#[test]
fn what_waits_at_the_end_is_stored() {
    let objects = Arc::default();
    let (_fed, cold, go) = waiting(&objects, |_| Ok(()));
    go.send(()).unwrap();
    assert_eq!((cold.close(Duration::MAX), stored(&objects)), (0, usize::from(PROMPTS)));
    let objects = Arc::default();
    let (_fed, cold, go) = waiting(&objects, |_| Ok(()));
    assert_eq!(cold.close(Duration::ZERO), usize::from(PROMPTS));
    // Fails if the thread has not begun to wait.
    _ = go.send(());
    assert_eq!(stored(&objects), 0);
}
