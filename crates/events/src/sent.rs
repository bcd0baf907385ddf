//! Messages on their way to subscribers: their frames, and counts of them while any copy of them exists.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use zeromq::ZmqMessage;

use crate::exchange::{Counters, Exchange, Held};

/// Bytes of memory that each message takes besides its content, about: entries of queues, counts, allocations.
const OVERHEAD: usize = 256;

/// The bytes that a message takes in memory.
pub(crate) fn cost(message: &Bytes) -> usize {
    message.len() + OVERHEAD
}

/// A message that is counted until its last copy is dropped.
struct Counted {
    message: Bytes,
    exchange: Arc<Exchange>,
    counter: fn(&Counters) -> &Held,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.message
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let held = (self.counter)(&self.exchange.counters);
        held.messages.fetch_sub(1, Relaxed);
        held.bytes.fetch_sub(cost(&self.message) as u64, Relaxed);
    }
}

/// Adds a message to a part of [`Exchange::counters`] for as long as a copy of it exists.
pub(crate) fn counted(
    message: Bytes,
    exchange: &Arc<Exchange>,
    counter: fn(&Counters) -> &Held,
) -> Bytes {
    let held = counter(&exchange.counters);
    held.messages.fetch_add(1, Relaxed);
    held.bytes.fetch_add(cost(&message) as u64, Relaxed);
    Bytes::from_owner(Counted { message, exchange: Arc::clone(exchange), counter })
}

/// A message of these frames.
pub(crate) fn frames<const N: usize>(frames: [Bytes; N]) -> ZmqMessage {
    let [first, rest @ ..] = &frames[..] else { unreachable!("a message has frames") };
    let mut message = ZmqMessage::from(first.clone());
    rest.iter().for_each(|frame| message.push_back(frame.clone()));
    message
}
