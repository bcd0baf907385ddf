//! Work that waits for the store's thread, and prefixes that it has read.

use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use dsv4_kv::{CheckpointInfo, RootKey};
use tokio::sync::Notify;

use crate::error::ColdError;
use crate::image::BLOCK;
use crate::key::Key;

/// Most prefixes that were read and are not in host memory yet. Each is held in memory as a whole.
const FOUND: usize = 2;

/// The sizes of a cache, and the identity that distinguishes its bytes from those of others.
#[derive(Clone, Debug)]
pub(crate) struct Owner {
    pub identity: Arc<[u8]>,
    pub block_bytes: u64,
    pub checkpoint_bytes: u64,
}

/// A prefix to be stored. Its bytes are read on the store's thread.
pub(crate) trait Source: Send {
    /// Its root: salt, adapter, model and formats.
    fn root(&self) -> &RootKey;
    /// Its tokens.
    fn tokens(&self) -> &[[u32; BLOCK]];
    /// Its checkpoint's origin, and whether it has the windows of draft layers.
    fn info(&self) -> CheckpointInfo;
    /// Appends the images of the blocks from `first` on.
    fn blocks(&self, first: usize, bytes: &mut Vec<u8>);
    /// Appends its checkpoint.
    fn checkpoint(&self, bytes: &mut Vec<u8>);
}

/// The prefix that is being stored. The queue says so until this is dropped.
pub(crate) struct Taken {
    source: Box<dyn Source>,
    /// Last field, so that the source is dropped first.
    _mark: TakenMark,
}

impl Taken {
    pub fn new(source: Box<dyn Source>, shared: &Arc<Shared>) -> Self {
        shared.queue().has_source = true;
        Self { source, _mark: TakenMark(Arc::clone(shared)) }
    }
}

impl Deref for Taken {
    type Target = dyn Source;

    fn deref(&self) -> &Self::Target {
        &*self.source
    }
}

struct TakenMark(Arc<Shared>);

impl Drop for TakenMark {
    fn drop(&mut self) {
        self.0.queue().has_source = false;
    }
}

/// A prompt whose prefix was requested.
#[derive(Clone, Debug)]
pub(crate) struct FetchRequest {
    pub id: u64,
    pub root: RootKey,
    /// Tokens of its whole blocks.
    pub tokens: Arc<[[u32; BLOCK]]>,
    /// Their keys, one per block.
    pub keys: Arc<[Key]>,
    /// Blocks down to the deepest checkpoint on the device or in host memory, which need not be read. Only a longer prefix
    /// is worth reading.
    pub already_reusable: u32,
    /// Number of leading blocks that host memory has, which are not read.
    pub in_host_memory: u32,
}

/// Images of a prefix, the last one first, each with the number of blocks before it; the checkpoint; and its origin
/// and whether it has draft windows.
pub(crate) type Parts = (Vec<(u32, Bytes)>, Bytes, CheckpointInfo);

/// A prefix that was read and verified.
pub(crate) struct Found {
    pub request: FetchRequest,
    /// Blocks down to its checkpoint.
    pub blocks: u32,
    /// Its parts, the last one first: number of blocks before the part, and images.
    parts: Vec<(u32, Bytes)>,
    pub checkpoint: Bytes,
    pub info: CheckpointInfo,
    block_bytes: usize,
    /// Counts against [`FOUND`] until it is dropped.
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
        request: FetchRequest,
        (blocks, block_bytes): (usize, u64),
        (parts, checkpoint, info): Parts,
        queue: &Arc<Shared>,
    ) -> Self {
        let (blocks, block_bytes) = (blocks as u32, block_bytes as usize);
        Self { request, blocks, parts, checkpoint, info, block_bytes, _place: Place::new(queue) }
    }

    /// Number of blocks before its first one.
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

/// A job of the thread.
pub(crate) enum Job {
    Store(Box<dyn Source>),
    Read(FetchRequest),
    Work(Box<dyn FnOnce() + Send>),
}

/// Jobs that wait for the thread. Works come first, because prefixes that were read wait for them in memory. Then come
/// reads, for which prompts wait, then stores.
#[derive(Default)]
pub(crate) struct Queue {
    pub works: VecDeque<Box<dyn FnOnce() + Send>>,
    pub reads: VecDeque<FetchRequest>,
    pub stores: VecDeque<Box<dyn Source>>,
    /// The read that is under way, until it is cancelled.
    pub reading: Option<u64>,
    /// Number of prefixes that were read and are not in host memory yet. With [`FOUND`] of them no other is read.
    pub found: usize,
    /// Number of prefixes that were to be stored and are not. One that failed while the queue was open does not count.
    pub unstored: usize,
    /// Whether the thread holds the prefix that it stores: until its bytes are copied.
    pub has_source: bool,
    pub is_closed: bool,
    /// Whether the thread gives up the call under way. It is closed then, and has no jobs.
    pub is_abandoned: bool,
}

impl Queue {
    fn pop(&mut self) -> Option<Job> {
        if let Some(work) = self.works.pop_front() {
            return Some(Job::Work(work));
        }
        let may_read = self.found < FOUND && !self.is_closed;
        let read = if may_read { self.reads.pop_front() } else { None };
        self.reading = read.as_ref().map(|request| request.id);
        read.map(Job::Read).or_else(|| self.stores.pop_front().map(Job::Store))
    }

    /// Whether the thread of a queue that was cleared still copies from host memory or to it. Results that were not
    /// received count too, until they are dropped.
    pub fn copies(&self) -> bool {
        self.has_source || self.found > 0
    }

    fn has_jobs(&self) -> bool {
        !(self.works.is_empty() && self.reads.is_empty() && self.stores.is_empty())
    }
}

#[derive(Default)]
pub(crate) struct Shared {
    queue: Mutex<Queue>,
    pub changed: Condvar,
    /// Notified when the call under way may be one that nobody wants any more.
    pub over: Notify,
}

impl Shared {
    pub fn queue(&self) -> MutexGuard<'_, Queue> {
        // Ignores lock poisoning: every change of the queue is a single call, so that no panic leaves it half changed.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a prefix that is to be stored.
    pub fn store(&self, source: Box<dyn Source>) {
        let mut queue = self.queue();
        queue.unstored += 1;
        queue.stores.push_back(source);
        self.tell();
    }

    /// Tells the thread of a job, for which it may give up a read that nobody wants.
    pub fn tell(&self) {
        self.changed.notify_one();
        self.over.notify_one();
    }

    /// Notes the end of a store. In a closed queue the first prefix that the store does not take is the last one: each
    /// could wait for all retries of a store that is gone.
    pub fn stored(&self, result: &Result<u64, ColdError>) {
        let mut queue = self.queue();
        if result.is_ok() || !queue.is_closed {
            queue.unstored -= 1;
        } else if matches!(result, Err(ColdError::NotStored(_))) {
            queue.stores.clear();
        }
    }

    /// From now on hands out no more reads, and no jobs at all once the others are done. A read under way ends.
    pub fn close(&self) {
        self.queue().is_closed = true;
        self.tell();
    }

    /// From now on the thread waits for no call of the store.
    pub fn abandon(&self) {
        self.queue().is_abandoned = true;
        self.over.notify_one();
    }

    /// Whether the read that is under way was not cancelled.
    pub fn is_wanted(&self, id: u64) -> bool {
        let queue = self.queue();
        !queue.is_closed && queue.reading == Some(id)
    }

    /// Whether the read that is under way is given up: it was cancelled, and there is something else to do. Else its answer
    /// tells whether the store answers.
    pub fn gives_up(&self, id: u64) -> bool {
        let queue = self.queue();
        queue.is_closed || (queue.reading != Some(id) && queue.has_jobs())
    }

    /// Waits for the next job; `None` if the queue is empty and closed.
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
