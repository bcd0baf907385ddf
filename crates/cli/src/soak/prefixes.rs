//! The prefixes of the model: a map with one entry per block of 128 tokens, and the default eviction policy.
//!
//! A segment is a run of blocks that is held as a whole. It ends where a checkpoint was attached, where prompts
//! diverged, and where a request added blocks below blocks of others; still after the reason is gone.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use dsv4_kv::{CacheConfig, Capacity};

use crate::texts::mixed;

/// A hash of all tokens up to the end of a block.
pub type Path = u64;

/// The path before the first block. Its entry has no block.
pub const ROOT: Path = 0;

/// Paths are hashes already, and are not hashed again.
#[derive(Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.0 = mixed(self.0 ^ u64::from(byte)));
    }

    fn write_u64(&mut self, path: u64) {
        self.0 = path;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Why a checkpoint was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The last boundary of a prompt.
    Prompt,
    /// Where a prompt left the map.
    Branch,
    /// A multiple of the interval.
    Interval,
    /// The last boundary of an answer.
    Output,
}

/// A checkpoint at the end of a block.
#[derive(Clone, Copy, Debug)]
struct Saved {
    origin: Origin,
    /// Value of `shared_bytes`, which each use increments, when it was last used.
    last_use: i64,
    hits: i64,
}

/// A block that requests may share, or the root.
#[derive(Debug, Default)]
struct Entry {
    /// `None` for the root.
    above: Option<Path>,
    below: Vec<Path>,
    /// The number of the segment that ends at this block; `None` inside a segment.
    segment: Option<u32>,
    /// Number of references to that segment.
    references: u32,
    /// Number of references to segments that end at this block or below it.
    holds: u32,
    saved: Option<Saved>,
}

/// A request's place in the map.
#[derive(Debug)]
pub struct Reference {
    /// The last block of the request that is in the map.
    pub end: Path,
    /// The last block of the segment that the request holds.
    held: Path,
}

/// The map, and the pools of blocks and checkpoints.
#[derive(Debug)]
pub struct Prefixes {
    entries: HashMap<Path, Entry, BuildHasherDefault<AsItIs>>,
    /// Paths that have a checkpoint.
    saved: Vec<Path>,
    /// Blocks in the map that are held.
    held_blocks: i64,
    /// Blocks that are free; negative in a model that has reused less than the cache.
    pub free_blocks: i64,
    /// Checkpoints that are free.
    pub free_checkpoints: i64,
    block_bytes: i64,
    checkpoint_bytes: i64,
    capacity: i64,
    /// Bytes that were ever shared.
    shared_bytes: i64,
    /// Most segments that there were at once, the root included.
    numbers: u32,
    /// Numbers below `numbers` that no segment has. The next segment gets the last of them.
    free_numbers: Vec<u32>,
}

impl Prefixes {
    /// No prefixes, in an empty cache of this configuration.
    pub fn new(config: &CacheConfig) -> Self {
        let Capacity { block_bytes, checkpoint_bytes, blocks, checkpoints, .. } =
            Capacity::new(config);
        let (block_bytes, checkpoint_bytes) = (block_bytes as i64, checkpoint_bytes as i64);
        let (free_blocks, free_checkpoints) = (i64::from(blocks), i64::from(checkpoints));
        // A map that is more than half full grows when entries come and go; the process must not grow in later rounds.
        let room = 2 * blocks as usize;
        Self {
            entries: HashMap::with_capacity_and_hasher(room, BuildHasherDefault::default()),
            saved: Vec::new(),
            held_blocks: 0,
            free_blocks,
            free_checkpoints,
            block_bytes,
            checkpoint_bytes,
            capacity: free_blocks * block_bytes + free_checkpoints * checkpoint_bytes,
            shared_bytes: 0,
            numbers: 0,
            free_numbers: Vec::new(),
        }
    }

    /// Numbers of blocks, checkpoints, blocks and checkpoints that no request holds, and segments.
    pub fn counts(&self) -> [i64; 5] {
        let roots = i64::from(self.entries.contains_key(&ROOT));
        let blocks = self.entries.len() as i64 - roots;
        let is_free = |path: &&Path| self.entries[*path].holds == 0;
        let free_checkpoints = self.saved.iter().filter(is_free).count() as i64;
        let segments = i64::from(self.numbers) - self.free_numbers.len() as i64 - roots;
        let checkpoints = self.saved.len() as i64;
        [blocks, checkpoints, blocks - self.held_blocks, free_checkpoints, segments]
    }

    /// Whether a block is in the map.
    pub fn contains(&self, path: Path) -> bool {
        self.entries.contains_key(&path)
    }

    /// Whether a block has a checkpoint.
    pub fn is_saved(&self, path: Path) -> bool {
        self.entries.get(&path).is_some_and(|entry| entry.saved.is_some())
    }

    /// The block that lies `blocks` blocks above another.
    pub fn above(&self, path: Path, blocks: u32) -> Option<Path> {
        (0..blocks).try_fold(path, |path, _| self.entries.get(&path)?.above)
    }

    /// A reference to a block of the map, or to the root.
    pub fn refer(&mut self, end: Path) -> Reference {
        if end == ROOT && !self.contains(ROOT) {
            let segment = Some(self.take_number());
            self.entries.insert(ROOT, Entry { segment, ..Entry::default() });
        }
        let held = self.segment_end(end);
        self.hold(held);
        Reference { end, held }
    }

    /// Releases a reference, and frees blocks that cannot be reused any more.
    pub fn release(&mut self, at: &Reference) {
        self.let_go(at.held);
    }

    /// Moves a reference down along `paths`, whose blocks follow it, and adds those that are not in the map. Returns
    /// the number of blocks added. Without blocks too the reference moves to the segment in which it now is: others
    /// may have divided the one that it held.
    pub fn extend(&mut self, at: &mut Reference, paths: &[Path]) -> usize {
        let known = paths.iter().take_while(|path| self.contains(**path)).count();
        let (known, new) = paths.split_at(known);
        at.end = known.last().copied().unwrap_or(at.end);
        if let Some(&last) = new.last() {
            self.append(at, new);
            at.end = last;
        }
        let held = self.segment_end(at.end);
        if held != at.held {
            self.hold(held);
            self.let_go(std::mem::replace(&mut at.held, held));
        }
        new.len()
    }

    /// Adds a checkpoint at the end of a block, unless there is one. Returns whether it was added.
    pub fn attach(&mut self, path: Path, origin: Origin) -> bool {
        self.end_segment(path);
        let Some(entry) = self.entries.get_mut(&path) else { return false };
        let is_new = entry.saved.is_none();
        if is_new {
            self.shared_bytes += self.checkpoint_bytes;
            entry.saved = Some(Saved { origin, last_use: self.shared_bytes, hits: 0 });
            self.saved.push(path);
        }
        is_new
    }

    /// Records that a request continues from a checkpoint: this one and those above it were used now.
    pub fn use_now(&mut self, hit: Path) {
        self.shared_bytes += i64::from(hit != ROOT);
        let now = self.shared_bytes;
        let mut next = Some(hit);
        while let Some(path) = next
            && let Some(Entry { above, saved, .. }) = self.entries.get_mut(&path)
        {
            if let Some(saved) = saved {
                saved.last_use = now;
                saved.hits += i64::from(path == hit);
            }
            next = *above;
        }
    }

    /// Takes blocks, for which others are evicted if too few are free.
    pub fn take_blocks(&mut self, count: i64) {
        while self.free_blocks < count && self.evict_first(false) {}
        self.free_blocks -= count;
    }

    /// Evicts until `count` checkpoints are free, or as many as possible.
    pub fn evict_checkpoints(&mut self, count: i64) {
        while self.free_checkpoints < count && self.evict_first(true) {}
    }

    /// Adds blocks below a reference. They become part of its segment if that ends there, and no other request refers
    /// to it; else they become a segment.
    fn append(&mut self, at: &Reference, paths: &[Path]) {
        self.end_segment(at.end);
        let is_open = |entry: &&mut Entry| {
            let ends = entry.below.is_empty() && entry.saved.is_none() && entry.above.is_some();
            ends && entry.references == 1 && at.end == at.held
        };
        let open = self.entries.get_mut(&at.end).filter(is_open);
        let number = open.and_then(|entry| entry.segment.take());
        let segment = Some(number.unwrap_or_else(|| self.take_number()));
        let mut above = at.end;
        for &path in paths {
            self.shared_bytes += self.block_bytes;
            self.entries.insert(path, Entry { above: Some(above), ..Entry::default() });
            if let Some(entry) = self.entries.get_mut(&above) {
                entry.below.push(path);
            }
            above = path;
        }
        if let Some(last) = self.entries.get_mut(&above) {
            last.segment = segment;
        }
    }

    /// Divides a segment behind a block, unless it ends there. The lower part keeps the number and the references.
    fn end_segment(&mut self, path: Path) {
        if self.entries.get(&path).is_some_and(|entry| entry.segment.is_none()) {
            let number = self.take_number();
            self.entries.entry(path).and_modify(|entry| entry.segment = Some(number));
        }
    }

    /// The number of a new segment. The prefix tree reuses numbers in the same order, and of segments of equal rank it
    /// evicts the one of the lowest number.
    fn take_number(&mut self) -> u32 {
        self.free_numbers.pop().unwrap_or_else(|| {
            self.numbers += 1;
            self.numbers - 1
        })
    }

    /// The last block of the segment that contains a block.
    fn segment_end(&self, path: Path) -> Path {
        let mut end = path;
        while let Some(Entry { segment: None, below, .. }) = self.entries.get(&end)
            && let [only] = below[..]
        {
            end = only;
        }
        end
    }

    /// Holds the segment that ends at a block, and those above it.
    fn hold(&mut self, end: Path) {
        self.entries.entry(end).and_modify(|entry| entry.references += 1);
        let mut next = Some(end);
        while let Some(path) = next
            && let Some(entry) = self.entries.get_mut(&path)
        {
            entry.holds += 1;
            self.held_blocks += i64::from(entry.holds == 1 && path != ROOT);
            next = entry.above;
        }
    }

    /// Releases what [`Self::hold`] held, and frees blocks that cannot be reused any more.
    fn let_go(&mut self, end: Path) {
        self.entries.entry(end).and_modify(|entry| entry.references -= 1);
        let mut next = Some(end);
        while let Some(path) = next
            && let Some(entry) = self.entries.get_mut(&path)
        {
            entry.holds -= 1;
            self.held_blocks -= i64::from(entry.holds == 0 && path != ROOT);
            next = entry.above;
        }
        self.trim(end);
    }

    /// Frees a block from which no request can continue, and such blocks above it.
    fn trim(&mut self, mut path: Path) {
        while let Some(Entry { above, below, segment, holds: 0, saved: None, .. }) =
            self.entries.get(&path)
            && below.is_empty()
        {
            self.free_numbers.extend(*segment);
            let above = *above;
            self.entries.remove(&path);
            let Some(above) = above else { break };
            self.free_blocks += 1;
            self.entries.entry(above).and_modify(|entry| entry.below.retain(|&at| at != path));
            path = above;
        }
    }

    /// Evicts the checkpoint of the lowest rank that no request holds: one at the end of a path or, if `expendable`
    /// ones may be evicted, one of an interval or an answer that was never hit.
    fn evict_first(&mut self, expendable: bool) -> bool {
        let rank = |(place, path): (usize, &Path)| {
            let entry = &self.entries[path];
            let Saved { origin, last_use, hits } = entry.saved?;
            let unused = matches!(origin, Origin::Interval | Origin::Output) && hits == 0;
            let may_go = entry.holds == 0 && (entry.below.is_empty() || (expendable && unused));
            let quarter = self.capacity / 4;
            let rank = last_use + hits.min(3) * quarter - if unused { 5 * quarter } else { 0 };
            may_go.then_some((rank, entry.segment, place))
        };
        let first = self.saved.iter().enumerate().filter_map(rank).min();
        let Some((_, _, place)) = first else { return false };
        let path = self.saved.swap_remove(place);
        self.entries.entry(path).and_modify(|entry| entry.saved = None);
        self.free_checkpoints += 1;
        self.trim(path);
        true
    }
}
