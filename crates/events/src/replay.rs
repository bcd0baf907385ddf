//! Sent messages, kept for subscribers that missed some.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use crate::sent::cost;

/// The last messages, up to a limit in bytes of memory.
#[derive(Debug)]
pub(crate) struct Replay {
    messages: VecDeque<(u64, Bytes)>,
    bytes: usize,
    most: usize,
    /// The number of the next message.
    next: u64,
    /// Whether the first kept message says that all earlier blocks are gone, so that no earlier message matters.
    is_complete: bool,
}

/// What is kept from a number on.
#[derive(Debug)]
pub(crate) struct Since {
    /// The first message, with its number.
    pub message: Option<(u64, Bytes)>,
    /// Whether no event from that number on is missing.
    pub has_all: bool,
}

impl Replay {
    /// Keeps up to `most` bytes; the first message has number `first`.
    pub fn new(most: usize, first: u64) -> Self {
        Self { messages: VecDeque::new(), bytes: 0, most, next: first, is_complete: false }
    }

    /// Drops all messages, since the next one says that all earlier blocks are gone.
    pub fn restart(&mut self) {
        self.messages.clear();
        self.bytes = 0;
        self.is_complete = true;
    }

    /// Keeps a message, and returns its number.
    pub fn push(&mut self, message: Bytes) -> u64 {
        let number = self.next;
        self.next += 1;
        self.bytes += cost(&message);
        self.messages.push_back((number, message));
        while self.bytes > self.most {
            let Some((_, oldest)) = self.messages.pop_front() else { break };
            self.bytes -= cost(&oldest);
            self.is_complete = false;
        }
        number
    }

    /// The number of the next message.
    pub fn end(&self) -> u64 {
        self.next
    }

    /// What is kept from `start` on.
    pub fn since(&self, start: u64) -> Since {
        let oldest = self.messages.front().map_or(self.next, |&(number, _)| number);
        let skipped = usize::try_from(start.saturating_sub(oldest)).unwrap_or(usize::MAX);
        let message = self.messages.get(skipped).cloned();
        Since { message, has_all: self.is_complete || start >= oldest }
    }

    /// The memory that the kept messages take.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Locks the kept messages.
pub(crate) fn lock(replay: &Mutex<Replay>) -> MutexGuard<'_, Replay> {
    // Nothing can panic in the middle of a change.
    replay.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(replay: &Replay, start: u64) -> (Vec<u64>, bool) {
        let (mut numbers, mut next) = (Vec::new(), start);
        while let Some((number, _)) = replay.since(next).message {
            numbers.push(number);
            next = number + 1;
        }
        (numbers, replay.since(start).has_all)
    }

    #[test]
    fn the_last_messages_are_kept_and_a_gap_is_told() {
        let most = 10 + 3 * cost(&Bytes::new());
        let mut replay = Replay::new(most, 100);
        replay.restart();
        for _ in 0..3 {
            replay.push(Bytes::from_static(b"abc"));
        }
        assert_eq!(numbers(&replay, 0), (vec![100, 101, 102], true));
        assert_eq!(numbers(&replay, 102), (vec![102], true));
        assert_eq!(numbers(&replay, 103), (vec![], true));
        // The first message is dropped, and with it the event that all earlier blocks are gone.
        replay.push(Bytes::from_static(b"abcd"));
        assert_eq!((numbers(&replay, 100), replay.bytes()), ((vec![101, 102, 103], false), most));
        assert_eq!(numbers(&replay, 101), (vec![101, 102, 103], true));
        // A message that is too long is not kept.
        replay.push(Bytes::from(vec![0; most]));
        assert_eq!((numbers(&replay, 104), replay.bytes()), ((vec![], false), 0));
        assert_eq!(numbers(&replay, 105), (vec![], true));
        // Messages before `AllBlocksCleared` do not matter.
        replay.push(Bytes::from_static(b"a"));
        replay.restart();
        assert_eq!(replay.push(Bytes::from_static(b"a")), 106);
        let one = cost(&Bytes::from_static(b"a"));
        assert_eq!((numbers(&replay, 7), replay.bytes()), ((vec![106], true), one));
        assert_eq!(numbers(&replay, u64::MAX), (vec![], true));
    }

    /// A message without events has 12 bytes, and takes about 200 more.
    #[test]
    fn small_messages_count_as_the_memory_that_they_take() {
        let mut replay = Replay::new(1 << 20, 0);
        for _ in 0..100_000 {
            replay.push(Bytes::from_static(&[0; 12]));
        }
        assert!(replay.messages.len() <= 4096, "{} are kept", replay.messages.len());
    }
}
