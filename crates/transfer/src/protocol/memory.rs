//! How much memory reads may take, and memory that is used again.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::transport::{MemoryKind, Region};

/// Bytes that reads may take together.
#[derive(Debug)]
pub(super) struct Budget {
    pub most: u64,
    taken: Arc<AtomicU64>,
}

/// A part of it, which is free again when this is dropped.
#[derive(Debug)]
pub(super) struct Share {
    bytes: u64,
    taken: Arc<AtomicU64>,
}

impl Budget {
    pub fn new(most: u64) -> Self {
        Self { most, taken: Arc::default() }
    }

    /// Takes so many bytes; `None` if that would be too many.
    pub fn take(&mut self, bytes: u64) -> Option<Share> {
        let all = self.taken().checked_add(bytes).filter(|&all| all <= self.most);
        all.map(|_| {
            self.taken.fetch_add(bytes, Ordering::Relaxed);
            Share { bytes, taken: Arc::clone(&self.taken) }
        })
    }

    /// Bytes that are taken.
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Bytes that are not.
    pub fn left(&self) -> u64 {
        self.most.saturating_sub(self.taken())
    }
}

impl Share {
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.taken.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Memory that no transport has, and no payload is in: the system gives new memory page by page, zeroed, which takes several
/// times as long as to read a payload to it.
#[derive(Clone, Debug, Default)]
pub(super) struct Pool(Arc<Mutex<Vec<Region>>>);

impl Pool {
    fn with<R>(&self, work: impl FnOnce(&mut Vec<Region>) -> R) -> R {
        // A list of memory is whole whoever panicked.
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Memory that was given back, of this kind, of at least so many bytes and at most twice as many.
    pub fn take(&self, kind: MemoryKind, bytes: u64) -> Option<Region> {
        let fits = |region: &Region| {
            let len = region.len() as u64;
            region.kind() == kind && len >= bytes && len / 2 <= bytes
        };
        self.with(|regions| {
            let fitting = regions.iter().enumerate().filter(|(_, region)| fits(region));
            let least = fitting.min_by_key(|(_, region)| region.len()).map(|(place, _)| place);
            least.map(|place| regions.remove(place))
        })
    }

    /// Memory that somebody else may have now.
    pub fn put(&self, region: Region) {
        self.with(|regions| regions.push(region));
    }

    /// Frees what is more than so many bytes together, the oldest first.
    pub fn trim(&self, most: u64) {
        self.with(|regions| {
            let mut bytes: u64 = regions.iter().map(|region| region.len() as u64).sum();
            regions.retain(|region| {
                let stays = bytes <= most;
                bytes -= if stays { 0 } else { region.len() as u64 };
                stays
            });
        });
    }

    /// Bytes of its memory.
    pub fn bytes(&self) -> u64 {
        self.with(|regions| regions.iter().map(|region| region.len() as u64).sum())
    }

    /// It comes back when it is dropped.
    pub fn lend(&self, region: Region) -> Lent {
        Lent { region: Some(region), pool: self.clone() }
    }
}

/// Memory of a pool.
#[derive(Debug)]
pub(super) struct Lent {
    /// Until it is dropped.
    region: Option<Region>,
    pool: Pool,
}

impl Deref for Lent {
    type Target = Region;

    fn deref(&self) -> &Region {
        self.region.as_ref().expect("it is there until it is dropped")
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(region) = self.region.take() {
            self.pool.put(region);
        }
    }
}
