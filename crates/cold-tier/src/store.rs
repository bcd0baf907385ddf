//! The store's own thread: the only one that waits for a disk or a network.

use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dsv4_kv::RootKey;
use futures_util::future::{Either, select};
use tokio::runtime::Runtime;
use tokio::sync::Notify;

use crate::error::ColdError;
use crate::image::BLOCK;
use crate::key::Key;
use crate::objects::{Known, LIST_TIMEOUT, Objects};
use crate::open::Opened;
use crate::queue::{FetchRequest, Found, Job, Owner, Shared, Source, Taken};

/// Most prefixes that wait to be stored. Each keeps its part of host memory from eviction, so that the cache hands none
/// out while they keep half of it.
const WAITING: usize = 64;
/// How long a tier that is dropped goes on storing what waits; [`Store::close`] has a limit of its own.
pub(crate) const DROP_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 10 });
/// How long the thread may still run after its call was given up. Beyond that it waits for a system call of a directory,
/// which nothing can end.
const GRACE: Duration = Duration::from_millis(if cfg!(test) { 200 } else { 2000 });

/// Result of a job.
pub(crate) enum Done {
    /// Number of bytes stored; 0 if the store already had the prefix. And why the prefix rests on fewer objects than
    /// the store seemed to have of it.
    Stored(Result<u64, ColdError>, Vec<ColdError>),
    /// Result of the read with this id: the prefix, or `None`; and why longer prefixes of the prompt were not read. A
    /// read that is cancelled has neither a prefix nor an error; one that is cancelled in its last object may have either.
    Read(u64, Option<Box<Found>>, Vec<ColdError>),
    /// A cancelled read was given up for another job, without an answer of the store.
    GivenUp,
    /// A work is done.
    Worked,
}

/// A store and its thread. Dropping it stores all prefixes that wait to be stored, until the store does not take one, and
/// waits for that, but no longer than [`DROP_TIMEOUT`].
pub(crate) struct Store {
    shared: Arc<Shared>,
    /// The objects that the store has, as far as is known.
    known: Arc<Known>,
    identity: Arc<[u8]>,
    done: Receiver<Done>,
    thread: Option<JoinHandle<()>>,
}

impl Store {
    /// Opens a store, and lists what it has. Waits no longer than [`LIST_TIMEOUT`], and a moment.
    pub fn open(
        open: impl FnOnce() -> Result<Opened, ColdError> + Send + 'static,
        owner: Owner,
    ) -> Result<Self, ColdError> {
        let until = Instant::now() + LIST_TIMEOUT;
        let (known, identity) = (Arc::<Known>::default(), Arc::clone(&owner.identity));
        let (shared, (send, done)) = (Arc::<Shared>::default(), channel());
        let (queue, (tell, listed)) = (Arc::clone(&shared), channel());
        let names = Arc::clone(&known);
        // On the thread, because a directory may not answer, and because the caller may be inside a tokio runtime, where
        // blocking is not allowed.
        let work = move || {
            // Made here: if there can be no thread, it is not dropped inside the caller's runtime, which would panic.
            let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => {
                    _ = tell.send(Err(ColdError::from(error)));
                    return;
                }
            };
            let opened = open().map(|opened| Objects::new(opened, owner, names));
            let listed = opened.and_then(|objects| {
                runtime.block_on(objects.list(until))?;
                Ok(objects)
            });
            match listed {
                Ok(objects) => {
                    if tell.send(Ok(())).is_ok() {
                        serve(objects, &runtime, &queue, &send);
                    }
                }
                Err(error) => _ = tell.send(Err(error)),
            }
            // Else a call of a directory that was given up would keep the thread.
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("cold tier".into()).spawn(work)?;
        match listed.recv_timeout(LIST_TIMEOUT + GRACE) {
            Ok(listed) => listed?,
            Err(RecvTimeoutError::Disconnected) => return Err(ColdError::ThreadEnded),
            Err(RecvTimeoutError::Timeout) => {
                return Err(ColdError::NotListed { after: LIST_TIMEOUT });
            }
        }
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

    /// Number of objects that the store is known to have; whether only a part of its list was read.
    pub fn listed(&self) -> (u64, bool) {
        (self.known.lock().len() as u64, self.known.is_partial())
    }

    /// The keys of a prompt's whole blocks; `None` if the store is not known to have a prefix of more than
    /// `already_reusable` blocks. Does not wait for the store.
    pub fn keys(
        &self,
        root: &RootKey,
        tokens: &[[u32; BLOCK]],
        already_reusable: u32,
    ) -> Option<Arc<[Key]>> {
        let keys = Key::all(&self.identity, root.bytes(), tokens);
        let known = self.known.lock();
        let is_there = keys.iter().skip(already_reusable as usize).any(|key| known.contains(key));
        is_there.then(|| keys.into())
    }

    /// Queues a prefix to be read, before those that wait to be stored.
    pub fn read(&self, request: FetchRequest) {
        self.shared.queue().reads.push_back(request);
        self.shared.tell();
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

    /// Cancels a read; returns whether it had not begun. A read that has begun ends before its next object, and at once if
    /// there is another job.
    pub fn cancel(&self, id: u64) -> bool {
        let mut queue = self.shared.queue();
        if queue.reading.take_if(|reading| *reading == id).is_some() {
            self.shared.over.notify_one();
        }
        let before = queue.reads.len();
        queue.reads.retain(|request| request.id != id);
        queue.reads.len() < before
    }

    /// Queues work for the thread, before all reads and stores.
    pub fn work(&self, work: impl FnOnce() + Send + 'static) {
        self.shared.queue().works.push_back(Box::new(work));
        self.shared.tell();
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
    /// number of prefixes that are not stored. After `most` the call of the store under way is given up, and the thread
    /// ends, so that nothing of the tier holds host memory. Only a thread that a directory does not answer is left alone.
    pub fn close(mut self, most: Duration) -> usize {
        self.finish(most)
    }

    fn finish(&mut self, most: Duration) -> usize {
        self.shared.close();
        let (begin, mut is_over) = (Instant::now(), false);
        loop {
            let left = if is_over { GRACE } else { most.saturating_sub(begin.elapsed()) };
            match self.done.recv_timeout(left) {
                Ok(_) => {}
                // The thread has ended.
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) if !is_over => {
                    // First, so that no further store begins.
                    self.clear();
                    self.shared.abandon();
                    is_over = true;
                }
                // It copies from host memory or to it, which does not last.
                Err(RecvTimeoutError::Timeout) if self.shared.queue().copies() => {}
                Err(RecvTimeoutError::Timeout) => {
                    self.thread = None;
                    break;
                }
            }
        }
        // After a panic of the thread the remaining works hold references to the queue that holds them. Clearing it breaks
        // the cycle.
        self.clear();
        self.shared.queue().unstored
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.finish(DROP_TIMEOUT);
        }
        // If it is still there, the thread has ended. A panic of it cannot be reported here.
        self.thread.take().map(JoinHandle::join);
    }
}

/// The answer of a call of the store; `None` once it is not wanted any more, which `over` tells.
async fn while_wanted<T>(
    call: impl Future<Output = T>,
    over: &Notify,
    is_over: impl Fn() -> bool,
) -> Option<T> {
    let mut call = pin!(call);
    loop {
        match select(call.as_mut(), pin!(over.notified())).await {
            Either::Left((answer, _)) => return Some(answer),
            Either::Right(_) if is_over() => return None,
            // It was meant for an earlier call, which ended by itself.
            Either::Right(_) => {}
        }
    }
}

/// Runs jobs until the queue is empty and closed, or a store was given up.
fn serve(mut objects: Objects, runtime: &Runtime, queue: &Arc<Shared>, done: &Sender<Done>) {
    while let Some(job) = queue.next() {
        let result = match job {
            Job::Store(source) => {
                let mut errors = Vec::new();
                let call = objects.store(Taken::new(source, queue), &mut errors);
                let is_over = || queue.queue().is_abandoned;
                let stored = runtime.block_on(while_wanted(call, &queue.over, is_over));
                // It remains among those that are not stored.
                let Some(stored) = stored else { return };
                queue.stored(&stored);
                Done::Stored(stored, errors)
            }
            Job::Read(request) => {
                let id = request.id;
                let call = objects.read(request, queue);
                let read = while_wanted(call, &queue.over, || queue.gives_up(id));
                match runtime.block_on(read) {
                    Some((found, errors)) => Done::Read(id, found.map(Box::new), errors),
                    None => Done::GivenUp,
                }
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
