//! Messages whose bytes are counted while anybody has them.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;

use crate::exchange::Exchange;

/// A message, counted until the last of its copies is gone.
struct Counted {
    message: Bytes,
    exchange: Arc<Exchange>,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.message
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.exchange.counters.bytes.fetch_sub(self.message.len() as u64, Relaxed);
    }
}

/// Counts a message among [`Exchange::counters`].
pub(crate) fn counted(message: Bytes, exchange: &Arc<Exchange>) -> Bytes {
    exchange.counters.bytes.fetch_add(message.len() as u64, Relaxed);
    Bytes::from_owner(Counted { message, exchange: Arc::clone(exchange) })
}
