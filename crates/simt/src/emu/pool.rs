//! The OS threads that run blocks: a rayon pool of the emulator's own.
//!
//! A rayon worker that waits runs other jobs of its pool meanwhile. If the emulator ran blocks in the pool of its
//! caller, a worker that waits for a launch could run another job of the caller, while it holds the caller's locks. If
//! that job launches under the same lock, the worker deadlocks with itself. So the calling thread does nothing else
//! while it waits, and the workers of the emulator's pool run only blocks.

use std::any::Any;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::LazyLock;
use std::sync::mpsc::{SyncSender, sync_channel};

use rayon::{ThreadPool, ThreadPoolBuilder};

use super::fault::FaultKind;

/// Work for a thread of the pool, and the channel for its result.
struct Job<W, R> {
    // Dropped before the sender: once the channel is closed, nothing of the work is left.
    work: W,
    result: SyncSender<Result<R, Box<dyn Any + Send>>>,
}

impl<W: FnOnce() -> R, R> Job<W, R> {
    fn run(self) {
        let Self { work, result } = self;
        let done = catch_unwind(AssertUnwindSafe(work));
        // Cannot fail: the receiver waits for the result.
        let _ = result.send(done);
    }
}

/// Calls `work` on a thread of the pool, so that its parallel iterators run in the pool too. The calling thread waits,
/// and does nothing else.
///
/// # Errors
/// [`FaultKind::NoThreads`], if the system starts no threads.
///
/// # Panics
/// If `work` panics, with the same payload.
pub fn run<R: Send>(work: impl FnOnce() -> R + Send) -> Result<R, FaultKind> {
    // As many threads as rayon's own pool has: `RAYON_NUM_THREADS`, or one per core.
    static POOL: LazyLock<Result<ThreadPool, String>> = LazyLock::new(|| {
        let named = ThreadPoolBuilder::new().thread_name(|index| format!("emulator {index}"));
        named.build().map_err(|error| error.to_string())
    });
    let no_threads = |reason: &String| FaultKind::NoThreads { reason: reason.clone() };
    let pool = POOL.as_ref().map_err(no_threads)?;
    let (sender, receiver) = sync_channel(1);
    let job = Job { work, result: sender };
    let job: Box<dyn FnOnce() + Send + '_> = Box::new(move || job.run());
    // SAFETY: the types differ only in a lifetime, that of the borrows of `work`, and this call outlasts every use of
    // them: it ends only once `recv` has returned. `recv` returns a result if `work` was called, and so consumed, or an
    // error if the job was dropped, whose work is dropped before its sender. Between here and there nothing unwinds:
    // `spawn` puts the job into a queue.
    let job: Box<dyn FnOnce() + Send> = unsafe { mem::transmute(job) };
    pool.spawn(job);
    match receiver.recv() {
        Ok(Ok(result)) => Ok(result),
        Ok(Err(payload)) => resume_unwind(payload),
        Err(_) => unreachable!("the pool runs what is put into it"),
    }
}
