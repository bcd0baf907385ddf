//! The budget for the memory of reads, and a pool of memory for reuse.

use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::transport::{MemoryKind, Region};

/// The limit for the memory of all reads together, in bytes.
#[derive(Debug)]
pub(super) struct Budget {
    pub most: u64,
    taken: Arc<AtomicU64>,
}

/// Bytes taken from a [`Budget`]. Dropping it gives them back.
#[derive(Debug)]
pub(super) struct Share {
    bytes: u64,
    taken: Arc<AtomicU64>,
}

impl Budget {
    pub fn new(most: u64) -> Self {
        Self { most, taken: Arc::default() }
    }

    /// Takes `bytes`; `None` if the total would exceed the limit.
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

    /// Bytes that are not taken.
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

/// Memory that is neither registered nor holds a payload, kept for reuse: the system zeroes new memory page by page,
/// which takes several times as long as reading a payload into it.
#[derive(Clone, Debug, Default)]
pub(super) struct Pool(Arc<Mutex<Vec<Region>>>);

impl Pool {
    fn with<R>(&self, work: impl FnOnce(&mut Vec<Region>) -> R) -> R {
        // The list is consistent even if another thread has panicked.
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Memory that was given back, of this kind, with at least `bytes` and at most about twice as many. The smallest
    /// that fits.
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

    /// Gives memory back for reuse.
    pub fn put(&self, region: Region) {
        self.with(|regions| regions.push(region));
    }

    /// Frees memory, the oldest first, until at most `most` bytes are left.
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

    /// Bytes of all memory in the pool.
    pub fn bytes(&self) -> u64 {
        self.with(|regions| regions.iter().map(|region| region.len() as u64).sum())
    }

    /// Lends memory, which returns to the pool when it is dropped.
    pub fn lend(&self, region: Region) -> Lent {
        Lent { region: Some(region), pool: self.clone() }
    }
}

/// Memory of a pool.
#[derive(Debug)]
pub(super) struct Lent {
    /// `None` only while it is dropped.
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
