//! How much memory reads may take.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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
