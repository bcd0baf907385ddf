//! The cold tier of a cache: below host memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use dsv4_kv::device::Backend;
use dsv4_kv::{
    CacheId, CheckpointInfo, HostImage, HostPrompt, HostReservation, KvCacheManager, Prompt,
    RootKey,
};
use serde::Serialize;

use crate::error::{ColdError, ColdErrorKind};
use crate::image::BLOCK;
use crate::open::{Opened, open, text_without_secrets};
use crate::queue::{FetchRequest, Found, Owner, Source};
use crate::store::{Done, Store};

#[cfg(test)]
mod tests;

/// Identifies a prompt that is requested from the store; unique in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchId(u64);

/// Counters of a cold tier since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ColdStats {
    /// Checkpoints that were stored, each with the blocks above it that the store did not have.
    pub stored: u64,
    /// Bytes of the stored objects.
    pub bytes_written: u64,
    /// Prefixes that were brought to host memory.
    pub restored: u64,
    /// Tokens of these prefixes after the deepest checkpoint that host memory and device had of them.
    pub restored_tokens: u64,
    /// Bytes of their checkpoints, and of those of their blocks that host memory did not have: what was copied there.
    pub bytes_read: u64,
    /// Prompts of which the store has no more.
    pub not_there: u64,
    /// Objects that were damaged, or shorter or longer than their header says. They were found when they were read, or
    /// when another object was to rest on them.
    pub damaged: u64,
    /// Objects of another version, model, format, salt, adapter, or of other tokens, found likewise.
    pub foreign: u64,
    /// Calls of the store that failed.
    pub failed: u64,
    /// Prefixes for which host memory had no room, or that it already had when they were read.
    pub no_room: u64,
    /// Objects that the store had when the tier was opened, as far as its list was read.
    pub listed: u64,
    /// Whether only a part of that list was read. Objects that it lacks are misses, until they are stored again.
    pub is_list_partial: bool,
}

/// Options of a cold tier; none by default.
#[derive(Clone, Default)]
pub struct ColdOptions {
    /// Options of a cloud store, by name: keys, regions, endpoints.
    pub store: Vec<(String, String)>,
}

/// Prints only the names of the options: their values may be secrets.
impl std::fmt::Debug for ColdOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = self.store.iter().map(|(name, _)| name).collect();
        f.debug_struct("ColdOptions").field("store", &names).finish()
    }
}

/// Prefixes of the environment variables for cloud stores.
const VARIABLES: [&str; 3] = ["AWS_", "AZURE_", "GOOGLE_"];

impl ColdOptions {
    /// Options from the environment: variables that begin with `AWS_`, `AZURE_` or `GOOGLE_`, with the option names of
    /// the crate `object_store`, such as `AWS_ACCESS_KEY_ID`, `AWS_REGION` or `AWS_ENDPOINT`.
    #[must_use]
    pub fn from_env() -> Self {
        let variables = std::env::vars_os();
        Self::of(variables.filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        }))
    }

    fn of(variables: impl Iterator<Item = (String, String)>) -> Self {
        let is_of_a_store = |name: &str| VARIABLES.iter().any(|start| name.starts_with(start));
        Self { store: variables.filter(|(name, _)| is_of_a_store(name)).collect() }
    }
}

/// The cold tier of a cache: prefixes in a local directory, or in any store that a URL names.
///
/// It belongs to one cache, and lies below its host tier. Call [`Self::advance`] between steps, as
/// [`KvCacheManager::advance_tier`]. Only the store's own thread waits for the store.
///
/// Dropping it stores the prefixes that were handed to the store, and waits for that, but no longer than 10 s: a store's
/// client may repeat a call for minutes, and a directory may never answer. The first prefix that the store does not take is
/// the last one. [`Self::close`] has a limit of the caller's choice.
pub struct ColdTier<B: Backend> {
    /// The cache to which it belongs.
    cache: CacheId,
    store: Store,
    filled: (Sender<Filled<B>>, Receiver<Filled<B>>),
    /// Prompts that were requested.
    fetching: Vec<Fetching>,
    /// Number of reads, stores and fills that are under way.
    pending: usize,
    /// Number of prompts that the store's thread has finished reading.
    finished_reads: u64,
    /// Whether the store's thread has ended.
    has_ended: bool,
    stats: ColdStats,
    errors: Vec<ColdError>,
}

/// A prompt that is being fetched.
struct Fetching {
    request: FetchRequest,
    /// Number of requests for it, less the calls of [`ColdTier::cancel`].
    requests: u32,
}

/// Host memory that the store's thread has filled.
struct Filled<B: Backend> {
    id: u64,
    reservation: HostReservation<B>,
    tokens: u64,
    bytes: u64,
}

/// Most errors that are kept for [`ColdTier::take_errors`].
const ERRORS: usize = 256;
/// Most prompts that are being fetched. Each holds a copy of its tokens, and is read to memory as a whole.
pub const MAX_FETCHES: usize = 64;

impl<B: Backend> ColdTier<B> {
    /// Opens the store of `url`, or a local directory, below the host tier of `cache`. A directory that does not exist
    /// is created, for the process's user alone: objects contain prompts and salts. Whoever can write to the store can
    /// change what prompts continue from, since digests have no key.
    ///
    /// A URL has `://` behind its scheme; a directory whose name looks like a scheme and a colon is written `./NAME`. What
    /// no store reads of a URL is refused: a query, a fragment, a password, a user name except Azure's container, and the
    /// port of a bucket. Keys and endpoints are options ([`ColdOptions`]).
    ///
    /// Waits for the list of the store's objects, but no longer than 30 s. What is not listed by then is a miss and is stored
    /// again, as is what a list has beyond its first 8 million objects: [`ColdStats::is_list_partial`] says so.
    ///
    /// `identity` distinguishes the bytes of this cache from those of others with the same configuration: a digest of
    /// the model's weights, and of anything else that changes the bytes. A prefix is read only if it was stored with
    /// the same identity.
    ///
    /// # Errors
    /// [`ColdError::NoIdentity`]; [`ColdError::Url`], also for a cache without a host tier; [`ColdError::Store`] if it cannot
    /// be listed; [`ColdError::NotListed`]; [`ColdError::Thread`].
    pub fn open(
        cache: &mut KvCacheManager<B>,
        url: &str,
        identity: &[u8],
        options: &ColdOptions,
    ) -> Result<Self, ColdError> {
        if identity.is_empty() {
            return Err(ColdError::NoIdentity);
        }
        let Some((block_bytes, checkpoint_bytes)) = cache.host_image_bytes() else {
            let (url, why) = (text_without_secrets(url), "the cache has no host tier".into());
            return Err(ColdError::Url { url, why });
        };
        let (url, options) = (url.to_owned(), options.store.clone());
        let owner = Owner { identity: identity.into(), block_bytes, checkpoint_bytes };
        Self::over(cache, move || open(&url, &options), owner)
    }

    /// Opens a store below the host tier of `cache`.
    fn over(
        cache: &mut KvCacheManager<B>,
        open: impl FnOnce() -> Result<Opened, ColdError> + Send + 'static,
        owner: Owner,
    ) -> Result<Self, ColdError> {
        let store = Store::open(open, owner)?;
        cache.offer_host_images();
        let (listed, is_list_partial) = store.listed();
        let stats = ColdStats { listed, is_list_partial, ..ColdStats::default() };
        Ok(Self {
            cache: cache.id(),
            store,
            filled: channel(),
            fetching: Vec::new(),
            pending: 0,
            finished_reads: 0,
            has_ended: false,
            stats,
            errors: Vec::new(),
        })
    }

    /// Requests the part of a prompt that the store has after the deepest checkpoint on the device and in host memory.
    /// `None` if the prompt closes no block after that checkpoint, or if the store is not known to have more of it.
    /// Does not wait for the store. Later calls of [`Self::advance`] bring that part to host memory, and
    /// [`KvCacheManager::prefetch`] brings it to the device. A second request for the same prompt returns the same id;
    /// call [`Self::cancel`] once for each request.
    ///
    /// # Errors
    /// [`ColdError::OtherCache`]; [`ColdError::TooManyFetches`]; [`ColdError::ThreadEnded`].
    pub fn fetch(
        &mut self,
        cache: &KvCacheManager<B>,
        prompt: &Prompt<'_>,
    ) -> Result<Option<FetchId>, ColdError> {
        if cache.id() != self.cache {
            return Err(ColdError::OtherCache);
        }
        if self.has_ended {
            return Err(ColdError::ThreadEnded);
        }
        let Some(HostPrompt { root, tokens, reusable, in_host }) = cache.host_prompt(prompt) else {
            return Ok(None);
        };
        // At least one token is left to compute. A prefix that does not fit in host memory is not worth reading.
        let tokens = tokens[..tokens.len().saturating_sub(1)].as_chunks::<BLOCK>().0;
        let tokens = &tokens[..tokens.len().min(cache.host_prefix_blocks() as usize)];
        let [already_reusable, in_host_memory] =
            [reusable, in_host].map(|tokens| tokens / BLOCK as u32);
        if tokens.len() <= already_reusable as usize {
            return Ok(None);
        }
        let is_it =
            |one: &&mut Fetching| one.request.root == root && *one.request.tokens == *tokens;
        if let Some(one) = self.fetching.iter_mut().find(is_it) {
            one.requests += 1;
            return Ok(Some(FetchId(one.request.id)));
        }
        if self.fetching.len() >= MAX_FETCHES {
            return Err(ColdError::TooManyFetches { most: MAX_FETCHES });
        }
        let Some(keys) = self.store.keys(&root, tokens, already_reusable) else {
            self.stats.not_there += 1;
            return Ok(None);
        };
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let request = FetchRequest {
            id,
            root,
            tokens: Arc::from(tokens),
            keys,
            already_reusable,
            in_host_memory,
        };
        self.store.read(request.clone());
        self.fetching.push(Fetching { request, requests: 1 });
        self.pending += 1;
        Ok(Some(FetchId(id)))
    }

    /// Withdraws one request for a prompt. After the last one is withdrawn, no further object of it is read, and an object
    /// that is being read delays no other prompt. Does nothing for a prompt that is not being fetched.
    pub fn cancel(&mut self, cache: &KvCacheManager<B>, id: FetchId) {
        if !self.is_below(cache) {
            return;
        }
        let Some(one) = self.fetching.iter_mut().find(|one| one.request.id == id.0) else { return };
        one.requests = one.requests.saturating_sub(1);
        if one.requests == 0 {
            // A read that has begun stays pending until the thread reports its end.
            self.pending -= usize::from(self.store.cancel(id.0));
            self.forget(id.0);
        }
    }

    /// Whether a prompt is still being fetched.
    #[must_use]
    pub fn is_fetching(&self, id: FetchId) -> bool {
        self.fetching.iter().any(|one| one.request.id == id.0)
    }

    /// Number of prefixes that the store still has to read or to write.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// Number of prompts that the store has finished reading, those that failed included. While it stays the same, the
    /// store has answered no prompt.
    #[must_use]
    pub fn finished_reads(&self) -> u64 {
        self.finished_reads
    }

    /// Number of prompts that are being fetched.
    #[must_use]
    pub fn fetching(&self) -> usize {
        self.fetching.len()
    }

    /// Hands prefixes that arrived in host memory to the store, as long as its queue has room and the queued ones hold at
    /// most half of host memory. Enters into host memory the prefixes that the store has read. Call it between steps; it
    /// waits for nothing. With another cache it does nothing, except that [`Self::take_errors`] reports it.
    pub fn advance(&mut self, cache: &mut KvCacheManager<B>) {
        if !self.is_below(cache) {
            return;
        }
        self.take_done(cache, Duration::ZERO);
        self.enter(cache);
        while !self.has_ended && self.store.has_room() {
            let Some(image) = cache.next_host_image() else { return };
            self.store.store(Box::new(Stored { image }));
            self.pending += 1;
        }
    }

    /// As [`Self::advance`], after the store has finished one of the jobs under way. The host waits for that, but no
    /// longer than `most`.
    pub fn wait(&mut self, cache: &mut KvCacheManager<B>, most: Duration) {
        if !self.is_below(cache) {
            return;
        }
        self.take_done(cache, if self.pending > 0 { most } else { Duration::ZERO });
        self.advance(cache);
    }

    /// Repeats [`Self::advance`] until no job is left. The host waits for the store.
    pub fn settle(&mut self, cache: &mut KvCacheManager<B>) {
        if !self.is_below(cache) {
            return;
        }
        self.advance(cache);
        while self.pending > 0 {
            self.wait(cache, Duration::MAX);
        }
    }

    /// Closes the tier as dropping it does, but gives up after `most`: then it waits only until the bytes of the prefix that
    /// is under way are copied, or for 2 s if a directory does not answer. Returns the number of prefixes that were handed
    /// to the store and are not stored. One that is being written may be stored later, unless the process ends before. Call
    /// [`Self::advance`] or [`Self::settle`] before, to hand over what has arrived in host memory.
    ///
    /// A tier that was closed or dropped holds none of the cache's host memory, so that the cache, its device and its
    /// context can be dropped.
    #[must_use = "prefixes may not be stored"]
    pub fn close(self, most: Duration) -> usize {
        self.store.close(most)
    }

    /// Whether the tier belongs to this cache; records an error if not.
    fn is_below(&mut self, cache: &KvCacheManager<B>) -> bool {
        let is_its = cache.id() == self.cache;
        if !is_its {
            self.note(ColdError::OtherCache);
        }
        is_its
    }

    /// Counters since it was opened.
    #[must_use]
    pub fn stats(&self) -> ColdStats {
        self.stats
    }

    /// The errors since the last call, at most the first 256: why prefixes were not stored or read.
    pub fn take_errors(&mut self) -> Vec<ColdError> {
        std::mem::take(&mut self.errors)
    }

    /// Handles all results of the thread; waits for the first one, but no longer than `most`.
    fn take_done(&mut self, cache: &mut KvCacheManager<B>, mut most: Duration) {
        while !self.has_ended {
            match self.store.next(most) {
                Ok(Some(done)) => self.take(cache, done),
                Ok(None) => return,
                Err(error) => self.end(error),
            }
            most = Duration::ZERO;
        }
    }

    /// Handles the end of the store's thread: drops all requests, and records the error.
    fn end(&mut self, error: ColdError) {
        self.has_ended = true;
        self.pending = 0;
        self.fetching.clear();
        self.store.clear();
        self.note(error);
    }

    fn take(&mut self, cache: &mut KvCacheManager<B>, done: Done) {
        self.pending -= 1;
        self.finished_reads += u64::from(matches!(done, Done::Read(..)));
        match done {
            // It was forgotten when it was cancelled.
            Done::Worked | Done::GivenUp => {}
            Done::Stored(stored, errors) => {
                errors.into_iter().for_each(|error| self.note(error));
                match stored {
                    Ok(0) => {}
                    Ok(bytes) => {
                        self.stats.stored += 1;
                        self.stats.bytes_written += bytes;
                    }
                    Err(error) => self.note(error),
                }
            }
            Done::Read(id, found, errors) => {
                errors.into_iter().for_each(|error| self.note(error));
                match found {
                    Some(found) if self.is_fetching(FetchId(id)) => self.fill(cache, id, *found),
                    // A prompt that nobody wants evicts no other from host memory.
                    _ => self.forget(id),
                }
            }
        }
    }

    /// Removes a prompt from those that are being fetched.
    fn forget(&mut self, id: u64) {
        self.fetching.retain(|one| one.request.id != id);
    }

    /// Reserves host memory for a prefix that was read, and lets the store's thread copy it there.
    fn fill(&mut self, cache: &mut KvCacheManager<B>, id: u64, found: Found) {
        let tokens = &found.request.tokens[..found.blocks as usize];
        let reservation = cache.reserve_host(&found.request.root, tokens);
        // Host memory may now have fewer blocks of the prefix than when it was read.
        let Some(mut reservation) =
            reservation.filter(|reservation| reservation.above() >= found.first())
        else {
            self.stats.no_room += 1;
            self.forget(id);
            return;
        };
        let send = self.filled.0.clone();
        self.pending += 1;
        self.store.work(move || {
            let first = reservation.above();
            let blocks = found.images(first).map(<[u8]>::len).sum::<usize>();
            reservation.fill(found.images(first), &found.checkpoint, found.info);
            let tokens = u64::from(found.blocks - found.request.already_reusable) * BLOCK as u64;
            let bytes = (blocks + found.checkpoint.len()) as u64;
            // Fails only if the tier was dropped.
            let _ = send.send(Filled { id, reservation, tokens, bytes });
        });
    }

    /// Enters the prefixes that the thread has copied to host memory.
    fn enter(&mut self, cache: &mut KvCacheManager<B>) {
        while let Ok(Filled { id, reservation, tokens, bytes }) = self.filled.1.try_recv() {
            self.forget(id);
            if cache.enter_host(reservation).unwrap_or(false) {
                self.stats.restored += 1;
                self.stats.restored_tokens += tokens;
                self.stats.bytes_read += bytes;
            } else {
                self.stats.no_room += 1;
            }
        }
    }

    fn note(&mut self, error: ColdError) {
        let count = match error.kind() {
            ColdErrorKind::NotThere => &mut self.stats.not_there,
            ColdErrorKind::Damaged => &mut self.stats.damaged,
            ColdErrorKind::Foreign => &mut self.stats.foreign,
            ColdErrorKind::Failed => &mut self.stats.failed,
        };
        *count += 1;
        if self.errors.len() < ERRORS {
            self.errors.push(error);
        }
    }
}

/// An image in host memory that will be stored.
struct Stored<B: Backend> {
    image: HostImage<B>,
}

impl<B: Backend> Source for Stored<B> {
    fn root(&self) -> &RootKey {
        &self.image.root
    }

    fn tokens(&self) -> &[[u32; BLOCK]] {
        &self.image.tokens
    }

    fn info(&self) -> CheckpointInfo {
        self.image.info
    }

    fn blocks(&self, first: usize, bytes: &mut Vec<u8>) {
        let blocks = (first..self.image.tokens.len()).filter_map(|at| self.image.block(at));
        blocks.for_each(|image| bytes.extend_from_slice(image));
    }

    fn checkpoint(&self, bytes: &mut Vec<u8>) {
        self.image.checkpoint().for_each(|part| bytes.extend_from_slice(part));
    }
}
