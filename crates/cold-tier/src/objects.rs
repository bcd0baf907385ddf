//! The objects of a store: the list of known ones, and writing and reading prefixes.

use std::collections::{HashMap, HashSet};
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use dsv4_kv::{CheckpointInfo, Origin};
use futures_util::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{GetOptions, ObjectStore, ObjectStoreExt};

use crate::error::{ColdError, ColdErrorKind};
use crate::image::{self, HEADER, ImageError, Subject};
use crate::key::{FOLDER, Key};
use crate::open::Opened;
use crate::queue::{FetchRequest, Found, Owner, Parts, Shared, Source};

mod put;

/// How long a chain of objects that was seen whole counts as whole. Otherwise each turn of a conversation would check
/// all objects of the turns before. An object that expires meanwhile is noticed when it is read.
const WHOLE_TIME: Duration = Duration::from_secs(600);
/// Most objects for which this is remembered.
const MAX_WHOLE: usize = 1 << 16;
/// After so many objects that may not be read, no shorter prefix of a prompt is tried: the store denies all, it seems.
const MAX_DENIED: usize = 3;
/// Longest time for the list of a store's objects. Objects that are not listed by then are not read, and are stored again.
pub(crate) const LIST_TIMEOUT: Duration =
    Duration::from_millis(if cfg!(test) { 3000 } else { 30_000 });
/// Most objects that are taken from the list: their names take half a GiB.
pub(crate) const MAX_LISTED: usize = if cfg!(test) { 100 } else { 1 << 23 };
/// An answer that took longer was not one of the store: its client has repeated the call.
pub(crate) const QUICK: Duration = Duration::from_millis(if cfg!(test) { 400 } else { 5000 });

/// The objects of a store.
pub(crate) struct Objects {
    objects: Box<dyn ObjectStore>,
    prefix: Path,
    /// The local directory of the objects, if they are in one.
    directory: Option<PathBuf>,
    owner: Owner,
    known: Arc<Known>,
    whole: Whole,
    /// Objects that may not be read: the value of `successes` when that was seen first.
    denied: HashMap<Key, u64>,
    /// How often a prefix was read, or a chain of objects was seen whole.
    successes: u64,
}

/// The objects that a store has, as far as is known.
#[derive(Default)]
pub(crate) struct Known {
    keys: Mutex<HashSet<Key>>,
    /// Whether only a part of the store's list was read.
    is_partial: AtomicBool,
}

impl Known {
    pub fn lock(&self) -> MutexGuard<'_, HashSet<Key>> {
        // Ignores lock poisoning: every change is a single call, so that no panic leaves the set half changed.
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn is_partial(&self) -> bool {
        self.is_partial.load(Ordering::Relaxed)
    }
}

/// What one search was denied.
#[derive(Default)]
struct Denied {
    /// The objects that may not be read, and those that lead to them.
    keys: Vec<Key>,
    /// How often the store denied one.
    times: usize,
}

/// Objects that were seen with their whole chain, and when.
#[derive(Default)]
struct Whole(HashMap<Key, Instant>);

impl Whole {
    /// When an object was seen with its whole chain, if that is less than [`WHOLE_TIME`] ago.
    fn seen(&self, key: &Key) -> Option<Instant> {
        self.0.get(key).copied().filter(|seen| seen.elapsed() < WHOLE_TIME)
    }

    fn remember(&mut self, keys: impl IntoIterator<Item = Key>, seen: Instant) {
        if self.0.len() >= MAX_WHOLE {
            self.0.retain(|_, seen| seen.elapsed() < WHOLE_TIME);
        }
        if self.0.len() >= MAX_WHOLE {
            self.0.clear();
        }
        self.0.extend(keys.into_iter().map(|key| (key, seen)));
    }
}

impl Objects {
    pub fn new(opened: Opened, owner: Owner, known: Arc<Known>) -> Self {
        let Opened { objects, prefix, directory } = opened;
        let (whole, denied) = (Whole::default(), HashMap::new());
        Self { objects, prefix, directory, owner, known, whole, denied, successes: 0 }
    }

    fn path(&self, key: &Key) -> Path {
        key.name().split('/').fold(self.prefix.clone(), |path, part| path.join(part))
    }

    /// Lists the objects of the store, and remembers them in `known`, but no more than [`MAX_LISTED`] of them, and only
    /// until `until`, [`LIST_TIMEOUT`] after the store was begun to open. A part of the list is enough to go on with: what
    /// it lacks is a miss, or is stored once more.
    pub async fn list(&self, until: Instant) -> Result<(), ColdError> {
        let folder = self.prefix.clone().join(FOLDER);
        let mut objects = self.objects.list(Some(&folder));
        let listed = async {
            let mut count = 0;
            let names = objects.by_ref().take(MAX_LISTED).try_for_each(|object| {
                count += 1;
                self.known.lock().extend(Key::of_name(object.location.as_ref()));
                std::future::ready(Ok(()))
            });
            names.await?;
            // A stream that has ended may not be asked for more.
            Ok::<_, object_store::Error>(count == MAX_LISTED && objects.try_next().await?.is_some())
        };
        let is_partial = match tokio::time::timeout_at(until.into(), listed).await {
            Ok(is_more) => is_more?,
            Err(_) if self.known.lock().is_empty() => {
                return Err(ColdError::NotListed { after: LIST_TIMEOUT });
            }
            Err(_) => true,
        };
        self.known.is_partial.store(is_partial, Ordering::Relaxed);
        Ok(())
    }

    /// Stores the missing part of a prefix: the blocks after the deepest earlier checkpoint of it that the store has,
    /// and the checkpoint. Returns the number of bytes written; 0 if nothing was missing. Appends to `errors` why
    /// deeper checkpoints that the store seemed to have were not used; not that they have expired. The source is dropped
    /// when its bytes are copied, before the store gets them.
    pub async fn store(
        &mut self,
        source: impl Deref<Target = dyn Source>,
        errors: &mut Vec<ColdError>,
    ) -> Result<u64, ColdError> {
        let (root, tokens) = (source.root().bytes(), source.tokens());
        let keys = Key::all(&self.owner.identity, root, tokens);
        let Some((key, above)) = keys.split_last() else { return Ok(0) };
        if self.known.lock().contains(key) {
            return Ok(0);
        }
        let (first, seen) = self.intact(above, errors).await;
        let Owner { identity, block_bytes, checkpoint_bytes } = &self.owner;
        let (block_bytes, checkpoint_bytes) = (*block_bytes, *checkpoint_bytes);
        let subject = Subject { identity, root, tokens, block_bytes, checkpoint_bytes };
        let CheckpointInfo { origin, has_draft } = source.info();
        let bytes = image::encode(
            &subject,
            (first as u32, origin.index() as u8, has_draft),
            |bytes| source.blocks(first, bytes),
            |bytes| source.checkpoint(bytes),
        )?;
        // Host memory need not wait for the store.
        drop(source);
        let len = bytes.len() as u64;
        let path = self.path(key);
        self.put(&path, bytes.into()).await.map_err(ColdError::NotStored)?;
        self.known.lock().insert(*key);
        self.whole.remember([*key], seen);
        Ok(len)
    }

    /// Number of blocks of a prefix down to the deepest of these objects whose chain is whole, and when that was seen.
    /// A missing object, for instance one that expired, is forgotten, together with the objects whose chains were found
    /// to lead to it. If the store fails, 0 blocks: then all blocks are stored in one object without a chain.
    async fn intact(&mut self, keys: &[Key], errors: &mut Vec<ColdError>) -> (usize, Instant) {
        let mut denied = Denied::default();
        for blocks in (1..=keys.len()).rev() {
            if !self.known.lock().contains(&keys[blocks - 1]) {
                continue;
            }
            let mut links = Vec::new();
            match self.follow(&keys[..blocks], &mut links).await {
                Ok(seen) => {
                    if !links.is_empty() {
                        self.allowed(&links, &denied.keys);
                    }
                    self.whole.remember(links, seen);
                    return (blocks, seen);
                }
                Err(error) => {
                    let goes_on = self.break_off(&error, &links, &mut denied);
                    if error.kind() != ColdErrorKind::NotThere {
                        errors.push(error);
                    }
                    if !goes_on {
                        break;
                    }
                }
            }
        }
        (0, Instant::now())
    }

    /// Follows a chain of objects to its end, or to one that was recently seen whole. Returns when the chain was whole.
    /// Appends the keys of its links to `links`; if a link is missing, it is the last of them.
    async fn follow(&self, keys: &[Key], links: &mut Vec<Key>) -> Result<Instant, ColdError> {
        let (mut end, now) = (keys.len(), Instant::now());
        while end > 0 {
            let key = keys[end - 1];
            if let Some(seen) = self.whole.seen(&key) {
                return Ok(seen);
            }
            links.push(key);
            let path = self.path(&key);
            let (header, size) = self.header(&path).await?;
            let wrong = |error| ColdError::Image { name: path.to_string(), error };
            end = image::first(&header, size, end).map_err(wrong)?;
        }
        Ok(now)
    }

    /// The header of an object, and the object's size.
    async fn header(&self, path: &Path) -> Result<(Bytes, u64), ColdError> {
        let asked = Instant::now();
        let error = match self.first_bytes(path).await {
            Ok(found) => return Ok(found),
            Err(error) => ColdError::Store(error),
        };
        // A store that does not answer is not asked once more.
        if error.is_final() || error.is_denied() || asked.elapsed() > QUICK {
            return Err(error);
        }
        // A range of an empty file, as a loss of power may leave it, is an error that each store reports in its own way.
        match self.objects.head(path).await {
            Ok(object) if object.size < HEADER as u64 => {
                let error = ImageError::Length { needed: HEADER as u64, found: object.size };
                Err(ColdError::Image { name: path.to_string(), error })
            }
            _ => Err(error),
        }
    }

    async fn first_bytes(&self, path: &Path) -> object_store::Result<(Bytes, u64)> {
        let range = Some((0..HEADER as u64).into());
        let found =
            self.objects.get_opts(path, GetOptions { range, ..GetOptions::default() }).await?;
        let size = found.meta.size;
        Ok((found.bytes().await?, size))
    }

    /// Handles the error of a chain, whose last link could not be read. Returns whether the store may have a shorter
    /// prefix. A missing, damaged, foreign or archived object is forgotten, together with the objects whose chains lead
    /// to it, so that they are stored again. The store may deny all objects, and not for long: so an object that may not
    /// be read is added to `denied`, whose objects are forgotten when this search can read a shorter prefix, and only a
    /// few of those are tried. One that is denied again is forgotten at once if others could be read meanwhile.
    fn break_off(&mut self, error: &ColdError, chain: &[Key], denied: &mut Denied) -> bool {
        if error.is_final() {
            self.forget(chain);
            return true;
        }
        if !error.is_denied() {
            return false;
        }
        let first = chain.last().map(|key| *self.denied.entry(*key).or_insert(self.successes));
        if first.is_some_and(|first| first < self.successes) {
            self.forget(chain);
        }
        denied.keys.extend(chain);
        denied.times += 1;
        denied.times < MAX_DENIED
    }

    /// Handles that a chain could be read: its links are denied no longer, and what this search was `denied` is
    /// forgotten.
    fn allowed(&mut self, chain: &[Key], denied: &[Key]) {
        self.successes += 1;
        for key in chain {
            self.denied.remove(key);
        }
        // A link of this chain may have been denied a moment before.
        let others: Vec<_> = denied.iter().filter(|key| !chain.contains(key)).copied().collect();
        self.forget(&others);
    }

    /// Forgets objects, so that they are stored again. Forgets also which chains are whole, since any of them
    /// may lead to these objects.
    fn forget(&mut self, keys: &[Key]) {
        if keys.is_empty() {
            return;
        }
        let mut known = self.known.lock();
        for key in keys {
            known.remove(key);
            self.denied.remove(key);
        }
        self.whole.0.clear();
    }

    /// Reads the deepest prefix of a prompt of which the store has the whole chain; also returns why deeper ones were
    /// not read. If the store fails, shorter prefixes are not tried, because each call already waits for all its
    /// retries.
    pub async fn read(
        &mut self,
        request: FetchRequest,
        queue: &Arc<Shared>,
    ) -> (Option<Found>, Vec<ColdError>) {
        let keys = Arc::clone(&request.keys);
        let (mut errors, mut denied) = (Vec::new(), Denied::default());
        for blocks in (request.already_reusable as usize + 1..=keys.len()).rev() {
            if !self.known.lock().contains(&keys[blocks - 1]) {
                continue;
            }
            let mut chain = Vec::new();
            match self.read_parts(&request, &keys[..blocks], (queue, &mut chain)).await {
                Ok(None) => return (None, errors),
                Ok(Some(parts)) => {
                    self.allowed(&chain, &denied.keys);
                    let sizes = (blocks, self.owner.block_bytes);
                    return (Some(Found::new(request, sizes, parts, queue)), errors);
                }
                Err(error) => {
                    let goes_on = self.break_off(&error, &chain, &mut denied);
                    errors.push(error);
                    if !goes_on {
                        break;
                    }
                }
            }
        }
        if errors.is_empty() {
            errors.push(ColdError::NotThere);
        }
        (None, errors)
    }

    /// Reads the images of a prefix, the last one first, back to the blocks that host memory has. Appends the keys of
    /// the objects to `chain`; if one cannot be read, it is the last of them. `None` if the read is cancelled.
    async fn read_parts(
        &mut self,
        request: &FetchRequest,
        keys: &[Key],
        (queue, chain): (&Shared, &mut Vec<Key>),
    ) -> Result<Option<Parts>, ColdError> {
        let (mut parts, mut end, mut last) = (Vec::new(), keys.len(), None);
        let now = Instant::now();
        while last.is_none() || end > request.in_host_memory as usize {
            if !queue.is_wanted(request.id) {
                return Ok(None);
            }
            let key = keys[end - 1];
            chain.push(key);
            let (first, blocks, at_end) = self.read_one(request, &key, end).await?;
            // Copied, so that the rest of the object can be freed.
            let blocks = if last.is_some() { Bytes::copy_from_slice(&blocks) } else { blocks };
            last.get_or_insert(at_end);
            parts.push((first, blocks));
            end = first as usize;
        }
        if end == 0 {
            self.whole.remember(chain.iter().copied(), now);
        }
        let (checkpoint, info) = last.ok_or(ColdError::NotThere)?;
        Ok(Some((parts, checkpoint, info)))
    }

    /// Reads one object: the number of blocks before its own, the images of its blocks, and the checkpoint at its
    /// end with origin and whether it has draft windows.
    async fn read_one(
        &self,
        request: &FetchRequest,
        key: &Key,
        end: usize,
    ) -> Result<(u32, Bytes, (Bytes, CheckpointInfo)), ColdError> {
        let path = self.path(key);
        let object = self.objects.get(&path).await?;
        let Owner { identity, block_bytes, checkpoint_bytes } = &self.owner;
        let (block_bytes, checkpoint_bytes) = (*block_bytes, *checkpoint_bytes);
        let (root, tokens) = (request.root.bytes(), &request.tokens[..end]);
        let subject = Subject { identity, root, tokens, block_bytes, checkpoint_bytes };
        let wrong = |error| ColdError::Image { name: path.to_string(), error };
        // Otherwise a large object in the store could exhaust memory.
        let (found, most) = (object.meta.size, subject.most_bytes());
        if found > most {
            return Err(wrong(ImageError::TooLong { most, found }));
        }
        let bytes = object.bytes().await?;
        let image = image::decode(&bytes, &subject).map_err(wrong)?;
        let origin = Origin::ALL.get(image.origin as usize).copied();
        let header = || wrong(ImageError::Damaged { section: image::Section::Header });
        // An image without blocks would make the chain endless.
        let is_part = (image.first as usize) < end;
        let origin = origin.filter(|_| is_part).ok_or_else(header)?;
        let part = |part: &[u8]| bytes.slice_ref(part);
        let info = CheckpointInfo { origin, has_draft: image.has_draft };
        let at_end = (part(image.checkpoint), info);
        Ok((image.first, part(image.blocks), at_end))
    }
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;

    mod turns;

    /// The objects of a store, of which none is known.
    fn over(store: &Arc<InMemory>) -> Objects {
        let owner =
            Owner { identity: Arc::from(&b"identity"[..]), block_bytes: 1, checkpoint_bytes: 1 };
        let (objects, prefix) = (Box::new(Arc::clone(store)), Path::default());
        Objects::new(Opened { objects, prefix, directory: None }, owner, Arc::default())
    }

    /// The objects of an empty store, of which these are believed to be there.
    fn objects<const N: usize>(names: [u8; N]) -> (Objects, [Key; N]) {
        let objects = over(&Arc::default());
        let keys = names.map(|n| Key::of_name(&format!("{n:02x}").repeat(32)).unwrap());
        objects.known.lock().extend(keys);
        (objects, keys)
    }

    /// An object that is denied again after another one could be read is forgotten, so that it is stored again. Denials
    /// alone make nothing forgotten, and end the search for shorter prefixes.
    #[test]
    fn what_alone_is_denied_is_forgotten() {
        let (mut objects, keys) = objects([1, 2, 3]);
        let error = denied();
        for _ in 0..2 {
            let mut denied = Denied::default();
            let goes_on = keys.map(|key| objects.break_off(&error, &[key], &mut denied));
            assert_eq!((goes_on, &denied.keys[..]), ([true, true, false], &keys[..]));
        }
        objects.successes += 1;
        assert!(objects.break_off(&error, &keys[..1], &mut Denied::default()));
        let known = objects.known.lock();
        assert_eq!(keys.map(|key| known.contains(&key)), [false, true, true]);
    }

    /// A whole period of denials, behind one that is over, forgets nothing: not objects that were read between them, nor the
    /// links before one that is denied.
    #[test]
    fn a_second_period_of_denials_forgets_nothing() {
        let (mut objects, keys) = objects([1, 2, 3, 4]);
        let error = denied();
        for _ in 0..2 {
            let mut denied = Denied::default();
            // The links before it were read a moment before.
            assert!(objects.break_off(&error, &keys, &mut denied), "a shorter prefix is tried");
            assert_eq!(denied.keys, keys);
            objects.allowed(&keys, &[]);
        }
        assert!(keys.iter().all(|key| objects.known.lock().contains(key)));
    }

    fn denied() -> ColdError {
        let source = Box::<dyn std::error::Error + Send + Sync>::from("403");
        ColdError::Store(object_store::Error::PermissionDenied { path: "object".into(), source })
    }
}
