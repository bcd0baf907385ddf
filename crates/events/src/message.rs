//! Encodes messages: vLLM's msgpack of events, byte for byte as vLLM's `msgspec` writes them (0.33.0).
//!
//! A message is `[time, [event, ..], rank]`. An event is a map: `BlockStored`, `BlockRemoved` or `AllBlocksCleared`.

use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use dsv4_kv_prefix::RootKey;
use rmp::encode::{
    ByteBuf, write_array_len, write_bin, write_f64, write_map_len, write_nil, write_str, write_uint,
};

use crate::hash::BLOCK;

/// Most blocks of a message; a stored block takes about 550 bytes.
pub(crate) const MAX_BLOCKS: usize = 1024;

/// The storage medium of blocks, as routers know it.
const MEDIUM: &str = "GPU";

/// A message under construction.
#[derive(Debug, Default)]
pub(crate) struct Message {
    events: ByteBuf,
    count: u32,
    /// Number of blocks that its events name.
    blocks: usize,
}

/// Consecutive blocks of a prefix that were stored together.
pub(crate) struct StoredBlocks<'b> {
    pub root: &'b RootKey,
    /// The hash of the first block's parent.
    pub parent: Option<u64>,
    pub hashes: &'b [u64],
    pub tokens: &'b [[u32; BLOCK]],
}

impl Message {
    /// Whether it has no events.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Number of blocks for which it has room.
    pub fn room(&self) -> usize {
        MAX_BLOCKS.saturating_sub(self.blocks)
    }

    /// Adds the event that all blocks are gone.
    pub fn cleared(&mut self) {
        map(&mut self.events, 1);
        self.begin("AllBlocksCleared", 0);
    }

    /// Adds the event that blocks were removed.
    pub fn removed(&mut self, hashes: &[u64]) {
        map(&mut self.events, 3);
        self.begin("BlockRemoved", hashes.len());
        self.hashes(hashes);
        self.medium();
    }

    /// Adds the event that blocks were stored.
    pub fn stored(&mut self, stored: &StoredBlocks<'_>) {
        let StoredBlocks { root, parent, hashes, tokens } = *stored;
        let salt = Some(root.salt()).filter(|salt| parent.is_none() && !salt.is_empty());
        let adapter = Some(root.adapter()).filter(|adapter| !adapter.is_empty());
        let has_keys = salt.is_some() || adapter.is_some();
        // A map header with a 16-bit length, which msgspec writes for structures that can have more than 15 fields.
        self.events.as_mut_vec().extend([0xde, 0, 8 + u8::from(has_keys)]);
        self.begin("BlockStored", hashes.len());
        self.hashes(hashes);
        let events = &mut self.events;
        key(events, "parent_block_hash");
        match parent {
            Some(parent) => number(events, parent),
            None => infallible(write_nil(events)),
        }
        key(events, "token_ids");
        array(events, tokens.len() * BLOCK);
        tokens.as_flattened().iter().for_each(|&token| number(events, token.into()));
        key(events, "block_size");
        number(events, BLOCK as u64);
        key(events, "lora_id");
        infallible(write_nil(events));
        self.medium();
        let events = &mut self.events;
        key(events, "lora_name");
        match adapter {
            Some(adapter) => name(events, adapter),
            None => infallible(write_nil(events)),
        }
        if has_keys {
            key(events, "extra_keys");
            array(events, hashes.len());
            (0..hashes.len()).for_each(|at| keys(events, adapter, salt.filter(|_| at == 0)));
        }
    }

    /// Encodes the message with the time, and removes its events.
    pub fn finish(&mut self, time: SystemTime, rank: u32) -> Bytes {
        let mut message = ByteBuf::with_capacity(self.events.as_slice().len() + 24);
        // Always three elements: Dynamo refuses two, though vLLM's structure has a default for the third.
        array(&mut message, 3);
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        infallible(write_f64(&mut message, since.as_secs_f64()));
        array(&mut message, self.count as usize);
        let mut message = message.into_vec();
        message.extend_from_slice(self.events.as_slice());
        let mut message = ByteBuf::from_vec(message);
        number(&mut message, rank.into());
        (self.count, self.blocks) = (0, 0);
        self.events.as_mut_vec().clear();
        message.into_vec().into()
    }

    fn begin(&mut self, kind: &str, blocks: usize) {
        self.count += 1;
        self.blocks += blocks;
        key(&mut self.events, "type");
        key(&mut self.events, kind);
    }

    fn hashes(&mut self, hashes: &[u64]) {
        key(&mut self.events, "block_hashes");
        array(&mut self.events, hashes.len());
        hashes.iter().for_each(|&hash| number(&mut self.events, hash));
    }

    fn medium(&mut self) {
        key(&mut self.events, "medium");
        key(&mut self.events, MEDIUM);
    }
}

/// Asserts that a write to memory has succeeded, since it cannot fail.
fn infallible<T, E>(written: Result<T, E>) {
    debug_assert!(written.is_ok(), "writing to memory fails");
}

fn map(to: &mut ByteBuf, fields: u32) {
    infallible(write_map_len(to, fields));
}

fn array(to: &mut ByteBuf, length: usize) {
    infallible(write_array_len(to, length as u32));
}

fn key(to: &mut ByteBuf, text: &str) {
    infallible(write_str(to, text));
}

fn number(to: &mut ByteBuf, number: u64) {
    infallible(write_uint(to, number));
}

/// Writes the extra keys of one block.
fn keys(to: &mut ByteBuf, adapter: Option<&[u8]>, salt: Option<&[u8]>) {
    let keys = usize::from(adapter.is_some()) + usize::from(salt.is_some());
    if keys == 0 {
        return infallible(write_nil(to));
    }
    array(to, keys);
    for part in adapter.into_iter().chain(salt) {
        match std::str::from_utf8(part) {
            Ok(text) => key(to, text),
            Err(_) => infallible(write_bin(to, part)),
        }
    }
}

/// Writes a name, which must be text: bytes that are not UTF-8 are written in hexadecimal.
fn name(to: &mut ByteBuf, name: &[u8]) {
    match std::str::from_utf8(name) {
        Ok(text) => key(to, text),
        Err(_) => key(to, &name.iter().map(|byte| format!("{byte:02x}")).collect::<String>()),
    }
}
