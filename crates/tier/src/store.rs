//! The store's own thread: what is asked of it waits for a disk or a network there, and nowhere else.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use dsv4_kv::{Origin, RootKey};
use object_store::ObjectStore;
use object_store::path::Path;
use tokio::runtime::Runtime;

use crate::error::ColdError;
use crate::image::BLOCK;
use crate::key::Key;
use crate::objects::{Known, Objects};

/// Prefixes that wait to be stored at most: each holds its part of host memory.
const WAITING: usize = 64;
/// Prefixes that were read and are not in host memory yet at most: each is held wholly in memory.
const FOUND: usize = 2;

/// The sizes of a cache, and what tells its bytes from those of others.
#[derive(Clone, Debug)]
pub(crate) struct Owner {
    pub identity: Arc<[u8]>,
    pub block_bytes: u64,
    pub checkpoint_bytes: u64,
}

/// A prefix that is to be stored: its bytes are read on the store's thread.
pub(crate) trait Source: Send {
    /// Whose it is.
    fn root(&self) -> &RootKey;
    /// Its tokens.
    fn tokens(&self) -> &[[u32; BLOCK]];
    /// Its checkpoint's origin, and whether it has the windows of draft layers.
    fn about(&self) -> (Origin, bool);
    /// Appends the images of the blocks from `first` on.
    fn blocks(&self, first: usize, bytes: &mut Vec<u8>);
    /// Appends its checkpoint.
    fn checkpoint(&self, bytes: &mut Vec<u8>);
}

/// A prompt whose prefix is to be read.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub id: u64,
    pub root: RootKey,
    /// Whole blocks.
    pub tokens: Arc<[[u32; BLOCK]]>,
    /// Their keys, one a block.
    pub keys: Arc<[Key]>,
    /// Blocks down to a checkpoint that is nearer: a prefix that is no longer is not worth reading.
    pub worth: u32,
    /// Blocks that host memory has: what is above their end is not read.
    pub there: u32,
}

/// Images of a prefix, the last one first, each with the blocks before it; its checkpoint, and what is said of that.
pub(crate) type Parts = (Vec<(u32, Bytes)>, Bytes, (Origin, bool));

/// A prefix that was read and is what it should be.
pub(crate) struct Found {
    pub wanted: Wanted,
    /// Blocks down to its checkpoint.
    pub blocks: u32,
    /// Parts of it, the last one first: blocks before it, and images.
    parts: Vec<(u32, Bytes)>,
    pub checkpoint: Bytes,
    pub about: (Origin, bool),
    block_bytes: usize,
    /// Held until it is dropped.
    _place: Place,
}

/// The place of a prefix among those that were read and are not in host memory yet; dropping it makes room for the next read.
struct Place(Arc<Shared>);

impl Place {
    fn new(shared: &Arc<Shared>) -> Self {
        shared.queue().found += 1;
        Self(Arc::clone(shared))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.queue().found -= 1;
        self.0.changed.notify_one();
    }
}

impl Found {
    pub fn new(
        wanted: Wanted,
        (blocks, block_bytes): (usize, u64),
        (parts, checkpoint, about): Parts,
        queue: &Arc<Shared>,
    ) -> Self {
        let (blocks, block_bytes) = (blocks as u32, block_bytes as usize);
        Self { wanted, blocks, parts, checkpoint, about, block_bytes, _place: Place::new(queue) }
    }

    /// Blocks before the first that it has.
    pub fn first(&self) -> u32 {
        self.parts.last().map_or(self.blocks, |&(before, _)| before)
    }

    /// The images of its blocks from `first` on.
    pub fn images(&self, first: u32) -> impl Iterator<Item = &[u8]> {
        let images =
            self.parts.iter().rev().flat_map(|(before, images)| {
                (*before..).zip(images.chunks_exact(self.block_bytes))
            });
        images.filter(move |&(number, _)| number >= first).map(|(_, image)| image)
    }
}

/// What has become of something that was asked for.
pub(crate) enum Done {
    /// So many bytes were stored; none, if the store has it already.
    Stored(Result<u64, ColdError>),
    /// A prefix was read, with why others of the same prompt were not; or nothing was, with no reason if nobody wanted it any more.
    Read(u64, Option<Box<Found>>, Vec<ColdError>),
    /// Work that was handed over is done.
    Worked,
}

/// What the thread is to do.
enum Job {
    Store(Box<dyn Source>),
    Read(Wanted),
    Work(Box<dyn FnOnce() + Send>),
}

/// What waits for the thread. Works come first: what was read waits for them in memory. Then reads, for which somebody waits,
/// then stores.
#[derive(Default)]
struct Queue {
    works: VecDeque<Box<dyn FnOnce() + Send>>,
    reads: VecDeque<Wanted>,
    stores: VecDeque<Box<dyn Source>>,
    /// The read that is under way, as long as somebody wants it.
    reading: Option<u64>,
    /// Prefixes that were read and are not in host memory yet: with [`FOUND`] of them no other is read.
    found: usize,
    is_closed: bool,
}

impl Queue {
    fn pop(&mut self) -> Option<Job> {
        if let Some(work) = self.works.pop_front() {
            return Some(Job::Work(work));
        }
        let may_read = self.found < FOUND && !self.is_closed;
        let read = if may_read { self.reads.pop_front() } else { None };
        self.reading = read.as_ref().map(|wanted| wanted.id);
        read.map(Job::Read).or_else(|| self.stores.pop_front().map(Job::Store))
    }
}

#[derive(Default)]
pub(crate) struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        // Every change of the queue is one call.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether somebody still wants the read that is under way.
    pub fn is_wanted(&self, id: u64) -> bool {
        let queue = self.queue();
        !queue.is_closed && queue.reading == Some(id)
    }

    /// The next job; `None` when nothing is left and nothing comes.
    fn next(&self) -> Option<Job> {
        let mut queue = self.queue();
        loop {
            if let Some(job) = queue.pop() {
                return Some(job);
            }
            if queue.is_closed {
                return None;
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
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
