//! The store's own thread: the only one that waits for a disk or a network.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dsv4_kv::RootKey;
use object_store::ObjectStore;
use object_store::path::Path;
use tokio::runtime::Runtime;

use crate::error::ColdError;
use crate::image::BLOCK;
use crate::key::Key;
use crate::objects::{Known, Objects};
use crate::queue::{Found, Job, Owner, Shared, Source, Wanted};

/// Most prefixes that wait to be stored. Each keeps its part of host memory from eviction, so that the cache hands none
/// out while they keep half of it.
const WAITING: usize = 64;

/// Result of a job.
pub(crate) enum Done {
    /// Number of bytes stored; 0 if the store already had the prefix. And why the prefix rests on fewer objects than
    /// the store seemed to have of it.
    Stored(Result<u64, ColdError>, Vec<ColdError>),
    /// Result of the read with this id: the prefix, or `None`; and why longer prefixes of the prompt were not read. A
    /// cancelled read has neither a prefix nor an error.
    Read(u64, Option<Box<Found>>, Vec<ColdError>),
    /// A work is done.
    Worked,
}

/// A store and its thread. Dropping it stores all prefixes that wait to be stored, until the store does not take one, and
/// waits for that.
pub(crate) struct Store {
    shared: Arc<Shared>,
    /// The objects that the store has, as far as is known.
    known: Arc<Known>,
    identity: Arc<[u8]>,
    done: Receiver<Done>,
    thread: Option<JoinHandle<()>>,
}

impl Store {
    /// Opens a store, and lists what it has.
    pub fn open(
        objects: Box<dyn ObjectStore>,
        prefix: Path,
        owner: Owner,
    ) -> Result<Self, ColdError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (known, identity) = (Arc::<Known>::default(), Arc::clone(&owner.identity));
        let objects = Objects::new(objects, prefix, owner, Arc::clone(&known));
        let (shared, (send, done)) = (Arc::<Shared>::default(), channel());
        let (queue, (tell, listed)) = (Arc::clone(&shared), channel());
        // On the thread, because the caller may be inside a tokio runtime, where blocking is not allowed.
        let work = move || match runtime.block_on(objects.list()) {
            Ok(()) => {
                if tell.send(Ok(())).is_ok() {
                    serve(objects, &runtime, &queue, &send);
                }
            }
            Err(error) => _ = tell.send(Err(error)),
        };
        let thread = std::thread::Builder::new().name("cold tier".into()).spawn(work)?;
        listed.recv().map_err(|_| ColdError::ThreadEnded)??;
        Ok(Self { shared, known, identity, done, thread: Some(thread) })
    }

    /// Whether another prefix may wait to be stored.
    pub fn has_room(&self) -> bool {
        self.shared.queue().stores.len() < WAITING
    }

    /// Queues a prefix to be stored.
    pub fn store(&self, source: Box<dyn Source>) {
        self.shared.store(source);
    }

    /// The keys of a prompt's whole blocks; `None` if the store is not known to have a prefix of more than `worth`
    /// blocks. Does not wait for the store.
    pub fn keys(&self, root: &RootKey, tokens: &[[u32; BLOCK]], worth: u32) -> Option<Arc<[Key]>> {
        let keys = Key::all(&self.identity, root.bytes(), tokens);
        let known = self.known.lock();
        let is_there = keys.iter().skip(worth as usize).any(|key| known.contains(key));
        is_there.then(|| keys.into())
    }

    /// Queues a prefix to be read, before those that wait to be stored.
    pub fn read(&self, wanted: Wanted) {
        self.shared.queue().reads.push_back(wanted);
        self.shared.changed.notify_one();
    }

    /// Its queue, which can be watched while the store is being dropped.
    #[cfg(test)]
    pub fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    /// Number of prefixes that were read and are not in host memory yet.
    #[cfg(test)]
    pub fn found(&self) -> usize {
        self.shared.queue().found
    }

    /// Cancels a read; returns whether it had not begun. A read that has begun ends before its next object.
    pub fn cancel(&self, id: u64) -> bool {
        let mut queue = self.shared.queue();
        queue.reading.take_if(|reading| *reading == id);
        let before = queue.reads.len();
        queue.reads.retain(|wanted| wanted.id != id);
        queue.reads.len() < before
    }

    /// Queues work for the thread, before all reads and stores.
    pub fn work(&self, work: impl FnOnce() + Send + 'static) {
        self.shared.queue().works.push_back(Box::new(work));
        self.shared.changed.notify_one();
    }

    /// The next result; waits for one, but no longer than `most`.
    ///
    /// # Errors
    /// [`ColdError::ThreadEnded`].
    pub fn next(&self, most: Duration) -> Result<Option<Done>, ColdError> {
        match self.done.recv_timeout(most) {
            Ok(done) => Ok(Some(done)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(ColdError::ThreadEnded),
        }
    }

    /// Removes all waiting jobs, which are not done any more.
    pub fn clear(&self) {
        // Works hold places, which lock the queue when they are dropped: so they are dropped after the guard.
        let _works = {
            let mut queue = self.shared.queue();
            queue.reads.clear();
            queue.stores.clear();
            std::mem::take(&mut queue.works)
        };
    }

    /// Stores the prefixes that wait to be stored, as dropping it does, but waits no longer than `most`. Returns the
    /// number of prefixes that are not stored. After `most` the thread is left alone: it ends when the store has answered
    /// the call under way.
    pub fn close(mut self, most: Duration) -> usize {
        self.shared.close();
        let begin = Instant::now();
        loop {
            match self.done.recv_timeout(most.saturating_sub(begin.elapsed())) {
                Ok(_) => {}
                // The thread has ended.
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    self.thread = None;
                    break;
                }
            }
        }
        // First, so that no further store begins after the count.
        self.clear();
        self.shared.queue().unstored
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.shared.close();
        // A panic of the thread cannot be reported here.
        self.thread.take().map(JoinHandle::join);
        // After a panic of the thread the remaining works hold references to the queue that holds
        // them. Clearing it breaks the cycle.
        self.clear();
    }
}

/// Runs jobs until the queue is empty and closed.
fn serve(mut objects: Objects, runtime: &Runtime, queue: &Arc<Shared>, done: &Sender<Done>) {
    while let Some(job) = queue.next() {
        let result = match job {
            Job::Store(source) => {
                let mut errors = Vec::new();
                let stored = runtime.block_on(objects.store(&*source, &mut errors));
                queue.stored(&stored);
                Done::Stored(stored, errors)
            }
            Job::Read(wanted) => {
                let id = wanted.id;
                let (found, errors) = runtime.block_on(objects.read(wanted, queue));
                Done::Read(id, found.map(Box::new), errors)
            }
            Job::Work(work) => {
                work();
                Done::Worked
            }
        };
        // Fails if the receiver was dropped; then the result is not needed.
        let _ = done.send(result);
    }
}
