//! Sent messages, kept for subscribers that missed some.

use std::collections::VecDeque;

use bytes::Bytes;

/// The last messages, up to a limit in bytes.
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

/// The kept messages from a number on.
#[derive(Debug)]
pub(crate) struct Since {
    pub messages: Vec<(u64, Bytes)>,
    /// Whether they contain all events from that number on.
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
        self.bytes += message.len();
        self.messages.push_back((number, message));
        while self.bytes > self.most {
            let Some((_, oldest)) = self.messages.pop_front() else { break };
            self.bytes -= oldest.len();
            self.is_complete = false;
        }
        number
    }

    /// The messages from `start` on.
    pub fn since(&self, start: u64) -> Since {
        let oldest = self.messages.front().map_or(self.next, |&(number, _)| number);
        let skipped = usize::try_from(start.saturating_sub(oldest)).unwrap_or(usize::MAX);
        let messages = self.messages.iter().skip(skipped).cloned().collect();
        Since { messages, has_all: self.is_complete || start >= oldest }
    }

    /// Bytes of the kept messages.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(replay: &Replay, start: u64) -> (Vec<u64>, bool) {
        let Since { messages, has_all } = replay.since(start);
        (messages.iter().map(|&(number, _)| number).collect(), has_all)
    }

    #[test]
    fn the_last_messages_are_kept_and_a_gap_is_told() {
        let mut replay = Replay::new(10, 100);
        replay.restart();
        for _ in 0..3 {
            replay.push(Bytes::from_static(b"abc"));
        }
        assert_eq!(numbers(&replay, 0), (vec![100, 101, 102], true));
        assert_eq!(numbers(&replay, 102), (vec![102], true));
        assert_eq!(numbers(&replay, 103), (vec![], true));
        // The first message is dropped, and with it the event that all earlier blocks are gone.
        replay.push(Bytes::from_static(b"abcd"));
        assert_eq!((numbers(&replay, 100), replay.bytes()), ((vec![101, 102, 103], false), 10));
        assert_eq!(numbers(&replay, 101), (vec![101, 102, 103], true));
        // A message that is too long is not kept.
        replay.push(Bytes::from_static(b"abcdefghijk"));
        assert_eq!((numbers(&replay, 104), replay.bytes()), ((vec![], false), 0));
        assert_eq!(numbers(&replay, 105), (vec![], true));
        // Messages before `AllBlocksCleared` do not matter.
        replay.push(Bytes::from_static(b"a"));
        replay.restart();
        assert_eq!(replay.push(Bytes::from_static(b"a")), 106);
        assert_eq!((numbers(&replay, 7), replay.bytes()), ((vec![106], true), 1));
        assert_eq!(numbers(&replay, u64::MAX), (vec![], true));
    }
}
