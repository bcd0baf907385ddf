//! What waits for the store's thread, and what it has read.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use dsv4_kv::{Origin, RootKey};

use crate::image::BLOCK;
use crate::key::Key;

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

/// What the thread is to do.
pub(crate) enum Job {
    Store(Box<dyn Source>),
    Read(Wanted),
    Work(Box<dyn FnOnce() + Send>),
}

/// What waits for the thread. Works come first: what was read waits for them in memory. Then reads, for which somebody waits,
/// then stores.
#[derive(Default)]
pub(crate) struct Queue {
    pub works: VecDeque<Box<dyn FnOnce() + Send>>,
    pub reads: VecDeque<Wanted>,
    pub stores: VecDeque<Box<dyn Source>>,
    /// The read that is under way, as long as somebody wants it.
    pub reading: Option<u64>,
    /// Prefixes that were read and are not in host memory yet: with [`FOUND`] of them no other is read.
    pub found: usize,
    pub is_closed: bool,
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
    pub changed: Condvar,
}

impl Shared {
    pub fn queue(&self) -> MutexGuard<'_, Queue> {
        // Every change of the queue is one call.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether somebody still wants the read that is under way.
    pub fn is_wanted(&self, id: u64) -> bool {
        let queue = self.queue();
        !queue.is_closed && queue.reading == Some(id)
    }

    /// The next job; `None` when nothing is left and nothing comes.
    pub fn next(&self) -> Option<Job> {
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
