//! The blocks in the prefix tree: maps each serial number to a hash, and turns events into messages.

use bytes::Bytes;
use dsv4_kv_prefix::{Event, EventBatch, Serial, Stored};
use hashbrown::HashMap;

use std::time::SystemTime;

use crate::hash::{BLOCK, BlockHash, Hasher};
use crate::message::{MAX_BLOCKS, Message, StoredBlocks};

/// An event names an unknown block. This should never happen; a snapshot repairs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an event names block {}, which was not told to be there", .0.number())]
pub(crate) struct Missing(pub Serial);

/// The hash of each block in the prefix tree, 40 bytes per block.
#[derive(Debug, Default)]
pub(crate) struct Resident {
    hashes: HashMap<Serial, BlockHash>,
    hasher: Hasher,
    message: Message,
    /// The hashes of the blocks that are being encoded.
    wire: Vec<u64>,
    /// The rank in the messages.
    rank: u32,
    /// Whether an event named an unknown block. No events are encoded from then until a snapshot.
    is_lost: bool,
}

/// Numbers of blocks in the events of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Told {
    pub stored: u64,
    pub removed: u64,
}

impl Resident {
    pub fn new(rank: u32) -> Self {
        Self { rank, ..Self::default() }
    }

    /// A message without events; only its number matters.
    pub fn nothing(&self) -> Bytes {
        Message::default().finish(SystemTime::now(), self.rank)
    }

    /// Number of known blocks.
    pub fn blocks(&self) -> usize {
        self.hashes.len()
    }

    /// Replaces all blocks by those of a snapshot, and sends messages that say so.
    pub fn restart(
        &mut self,
        snapshot: &EventBatch<BLOCK>,
        send: impl FnMut(Bytes),
    ) -> Result<Told, Missing> {
        self.hashes.clear();
        self.hashes.shrink_to(snapshot.blocks() as usize);
        self.message = Message::default();
        self.message.cleared();
        self.is_lost = false;
        self.tell(snapshot, send)
    }

    /// Sends messages with the events of a batch. After an error, the messages sent so far are right, and no events are
    /// sent until a snapshot.
    pub fn tell(
        &mut self,
        batch: &EventBatch<BLOCK>,
        send: impl FnMut(Bytes),
    ) -> Result<Told, Missing> {
        if self.is_lost {
            return Ok(Told::default());
        }
        let told = self.tell_each(batch, send);
        self.is_lost = told.is_err();
        told
    }

    fn tell_each(
        &mut self,
        batch: &EventBatch<BLOCK>,
        mut send: impl FnMut(Bytes),
    ) -> Result<Told, Missing> {
        let mut told = Told::default();
        for event in batch.iter() {
            match event {
                Event::Stored(run) => {
                    self.stored(run, &mut send)?;
                    told.stored += run.serials.len() as u64;
                }
                Event::Removed(serials) => {
                    self.removed(serials, &mut send)?;
                    told.removed += serials.len() as u64;
                }
            }
        }
        self.send(&mut send);
        Ok(told)
    }

    fn stored(
        &mut self,
        run: Stored<'_, BLOCK>,
        send: &mut impl FnMut(Bytes),
    ) -> Result<(), Missing> {
        let Stored { root, parent, serials, tokens } = run;
        let known = |parent| self.hashes.get(&parent).copied().ok_or(Missing(parent));
        let mut parent = parent.map(known).transpose()?;
        let (mut serials, mut tokens) = (serials, tokens);
        while !serials.is_empty() {
            let count = self.room(send).min(serials.len());
            let above = parent;
            self.wire.clear();
            for (&serial, tokens) in serials[..count].iter().zip(tokens) {
                let hash = self.hasher.hash(root, parent, tokens);
                self.hashes.insert(serial, hash);
                self.wire.push(hash.wire());
                parent = Some(hash);
            }
            let (hashes, parent) = (&self.wire[..], above.map(BlockHash::wire));
            self.message.stored(&StoredBlocks { root, parent, hashes, tokens: &tokens[..count] });
            (serials, tokens) = (&serials[count..], &tokens[count..]);
        }
        Ok(())
    }

    fn removed(&mut self, serials: &[Serial], send: &mut impl FnMut(Bytes)) -> Result<(), Missing> {
        let mut serials = serials;
        while !serials.is_empty() {
            let count = self.room(send).min(serials.len());
            self.wire.clear();
            for serial in &serials[..count] {
                let hash = self.hashes.remove(serial).ok_or(Missing(*serial))?;
                self.wire.push(hash.wire());
            }
            self.message.removed(&self.wire);
            serials = &serials[count..];
        }
        Ok(())
    }

    /// Number of blocks for which the message has room. Sends a full message first.
    fn room(&mut self, send: &mut impl FnMut(Bytes)) -> usize {
        if self.message.room() == 0 {
            self.send(send);
        }
        self.message.room().min(MAX_BLOCKS)
    }

    fn send(&mut self, send: &mut impl FnMut(Bytes)) {
        if !self.message.is_empty() {
            send(self.message.finish(SystemTime::now(), self.rank));
        }
    }
}

#[cfg(test)]
mod tests {
    use dsv4_kv_prefix::{EventSource, Limits, PrefixTree, RootKey, ScoredLru};

    use super::*;

    /// After a batch was missed, no events are sent until a snapshot, even if they could be.
    #[test]
    fn after_a_gap_nothing_is_told_until_a_snapshot() {
        let limits = Limits {
            block_bytes: 1,
            checkpoint_bytes: 1,
            lease_bytes: 0,
            remembered: 0,
            reserved_blocks: 8,
        };
        let mut tree = PrefixTree::<(), (), _, BLOCK>::new(limits, ScoredLru { capacity: 100 });
        tree.log_events(8);
        let (mut resident, mut batch) = (Resident::new(0), EventBatch::with_capacity(8));
        let mut messages = 0;
        let mut tell = |resident: &mut Resident, batch: &_| resident.tell(batch, |_| messages += 1);
        let root = RootKey::new(b"", b"", b"");
        let mut at = tree.match_and_lock(&root, &[]).reference;
        tree.extend(&mut at, &[[1; BLOCK]], |_| (), drop).unwrap();
        // This batch is not passed on.
        let _ = tree.drain_events(&mut batch);
        tree.extend(&mut at, &[[2; BLOCK]], |_| (), drop).unwrap();
        let _ = tree.drain_events(&mut batch);
        assert!(tell(&mut resident, &batch).is_err());
        let mut other = tree.match_and_lock(&root, &[]).reference;
        tree.extend(&mut other, &[[3; BLOCK]], |_| (), drop).unwrap();
        let _ = tree.drain_events(&mut batch);
        assert_eq!(tell(&mut resident, &batch), Ok(Told::default()));
        assert_eq!((messages, resident.blocks()), (0, 0));
        let told = resident.restart(&tree.snapshot_events(), |_| messages += 1);
        assert_eq!(told, Ok(Told { stored: 3, removed: 0 }));
        assert_eq!((messages, resident.blocks()), (1, 3));
    }
}
