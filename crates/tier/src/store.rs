//! The store's own thread: what is asked of it waits for a disk or a network there, and nowhere else.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use dsv4_kv::RootKey;
use object_store::ObjectStore;
use object_store::path::Path;
use tokio::runtime::Runtime;

use crate::error::ColdError;
use crate::image::BLOCK;
use crate::key::Key;
use crate::objects::{Known, Objects};
use crate::queue::{Found, Job, Owner, Shared, Source, Wanted};

/// Prefixes that wait to be stored at most: each holds its part of host memory.
const WAITING: usize = 64;

/// What has become of something that was asked for.
pub(crate) enum Done {
    /// So many bytes were stored; none, if the store has it already.
    Stored(Result<u64, ColdError>),
    /// A prefix was read, with why others of the same prompt were not; or nothing was, with no reason if nobody wanted it any more.
    Read(u64, Option<Box<Found>>, Vec<ColdError>),
    /// Work that was handed over is done.
    Worked,
}

/// A store and its thread. Dropping it stores what waits to be stored, and waits for that.
pub(crate) struct Store {
    shared: Arc<Shared>,
    /// The objects that there are, as far as is known.
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
        // On the thread, as whoever calls this may be in a runtime of its own, in which one may not wait.
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

    /// Stores a prefix when its turn comes.
    pub fn store(&self, source: Box<dyn Source>) {
        self.shared.queue().stores.push_back(source);
        self.shared.changed.notify_one();
    }

    /// The keys of a prompt's whole blocks; `None` if the store is not known to have a prefix of more than `worth` of them. Does not wait for
    /// the store.
    pub fn keys(&self, root: &RootKey, tokens: &[[u32; BLOCK]], worth: u32) -> Option<Arc<[Key]>> {
        let keys = Key::all(&self.identity, root.bytes(), tokens);
        let known = self.known.lock();
        let is_there = keys.iter().skip(worth as usize).any(|key| known.contains(key));
        is_there.then(|| keys.into())
    }

    /// Reads a prefix, before what waits to be stored.
    pub fn read(&self, wanted: Wanted) {
        self.shared.queue().reads.push_back(wanted);
        self.shared.changed.notify_one();
    }

    /// Prefixes that were read and are not in host memory yet.
    #[cfg(test)]
    pub fn found(&self) -> usize {
        self.shared.queue().found
    }

    /// Takes a read back; whether it had not begun. One that has begun ends before its next object.
    pub fn cancel(&self, id: u64) -> bool {
        let mut queue = self.shared.queue();
        queue.reading.take_if(|reading| *reading == id);
        let before = queue.reads.len();
        queue.reads.retain(|wanted| wanted.id != id);
        queue.reads.len() < before
    }

    /// Does some work on the thread, before what waits to be read or stored.
    pub fn work(&self, work: impl FnOnce() + Send + 'static) {
        self.shared.queue().works.push_back(Box::new(work));
        self.shared.changed.notify_one();
    }

    /// What is done; waits until something is, but no longer than `most`.
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

    /// Forgets what waits, of which nothing is done any more.
    pub fn clear(&self) {
        // Works have places, which lock the queue when they are dropped.
        let _works = {
            let mut queue = self.shared.queue();
            queue.reads.clear();
            queue.stores.clear();
            std::mem::take(&mut queue.works)
        };
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // Nobody asks for what is to be read any more.
        self.shared.queue().is_closed = true;
        self.shared.changed.notify_one();
        // A panic of the thread has nobody to go to.
        self.thread.take().map(JoinHandle::join);
        // What a panic of the thread has left holds the queue that it is in.
        self.clear();
    }
}

/// Does what is asked for until nothing is left and nothing comes.
fn serve(mut objects: Objects, runtime: &Runtime, queue: &Arc<Shared>, done: &Sender<Done>) {
    while let Some(job) = queue.next() {
        let result = match job {
            Job::Store(source) => Done::Stored(runtime.block_on(objects.store(&*source))),
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
        // Nobody asks any more.
        let _ = done.send(result);
    }
}
