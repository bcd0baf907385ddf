//! Messages whose bytes are counted while anybody has them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bytes::Bytes;

use crate::exchange::{Counters, Exchange};

/// A message, counted until the last of its copies is gone.
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

/// Counts a message by one of [`Exchange::counters`].
pub(crate) fn counted(
    message: Bytes,
    exchange: &Arc<Exchange>,
    counter: fn(&Counters) -> &AtomicU64,
) -> Bytes {
    counter(&exchange.counters).fetch_add(message.len() as u64, Relaxed);
    Bytes::from_owner(Counted { message, exchange: Arc::clone(exchange), counter })
}
