//! Tiers that are closed while prefixes wait to be stored.

use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;

use object_store::Result;
use object_store::memory::InMemory;

use super::failing::{Call, below, fails};
use super::*;

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
