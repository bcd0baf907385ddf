//! Counts the bytes of messages while any copy of them exists.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytes::Bytes;

use crate::exchange::{Counters, Exchange};

/// A message that is counted until its last copy is dropped.
struct Counted {
    message: Bytes,
    exchange: Arc<Exchange>,
    counter: fn(&Counters) -> &AtomicU64,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.message
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let counter = (self.counter)(&self.exchange.counters);
        counter.fetch_sub(self.message.len() as u64, Relaxed);
    }
}

/// Adds a message to one of [`Exchange::counters`] for as long as a copy of it exists.
pub(crate) fn counted(
    message: Bytes,
    exchange: &Arc<Exchange>,
    counter: fn(&Counters) -> &AtomicU64,
) -> Bytes {
    counter(&exchange.counters).fetch_add(message.len() as u64, Relaxed);
    Bytes::from_owner(Counted { message, exchange: Arc::clone(exchange), counter })
}
