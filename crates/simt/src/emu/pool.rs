//! The OS threads that run blocks: rayon's, in a pool of the emulator's own.
//!
//! A worker of rayon's that waits for others runs their jobs meanwhile, whatever they are. If the emulator ran blocks in the pool
//! of its caller, the caller's other jobs would run in the middle of a launch, under whatever locks it holds: one that launches
//! under the same lock would wait for itself. So the caller does nothing while it waits, and who waits for blocks runs blocks.

use std::any::Any;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::LazyLock;
use std::sync::mpsc::{SyncSender, sync_channel};

use rayon::{ThreadPool, ThreadPoolBuilder};

use super::fault::FaultKind;

/// What a thread of the pool is to do, and who waits for the result.
struct Job<W, R> {
    // Dropped first: when nobody can send any more, nothing of the work is left.
    work: W,
    result: SyncSender<Result<R, Box<dyn Any + Send>>>,
}

impl<W: FnOnce() -> R, R> Job<W, R> {
    fn run(self) {
        let Self { work, result } = self;
        let done = catch_unwind(AssertUnwindSafe(work));
        // It is waited for: the channel takes it.
        let _ = result.send(done);
    }
}

/// Calls `work` on a thread of the pool, whose parallel iterators run in the pool. The calling thread waits, and does nothing else.
///
/// # Errors
/// The system has no threads.
///
/// # Panics
/// When `work` does, with its payload.
pub fn run<R: Send>(work: impl FnOnce() -> R + Send) -> Result<R, FaultKind> {
    // As many threads as rayon's own pool: `RAYON_NUM_THREADS`, or one a core.
    static POOL: LazyLock<Result<ThreadPool, String>> = LazyLock::new(|| {
        let named = ThreadPoolBuilder::new().thread_name(|index| format!("emulator {index}"));
        named.build().map_err(|error| error.to_string())
    });
    let no_threads = |reason: &String| FaultKind::NoThreads { reason: reason.clone() };
    let pool = POOL.as_ref().map_err(no_threads)?;
    let (sender, receiver) = sync_channel(1);
    let job = Job { work, result: sender };
    let job: Box<dyn FnOnce() + Send + '_> = Box::new(move || job.run());
    // SAFETY: the types differ in the lifetime alone, that of what `work` borrows, and this call outlasts every use of it: it ends
    // only once `recv` has. That has a result when `work` was called, and so consumed; or none when the job was dropped, whose work
    // is dropped before its sender. Between here and there nothing unwinds: `spawn` puts the job into a queue.
    let job: Box<dyn FnOnce() + Send> = unsafe { mem::transmute(job) };
    pool.spawn(job);
    match receiver.recv() {
        Ok(Ok(result)) => Ok(result),
        Ok(Err(payload)) => resume_unwind(payload),
        Err(_) => unreachable!("the pool runs what is put into it"),
    }
}
