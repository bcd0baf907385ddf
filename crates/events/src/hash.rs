//! Hashes of blocks: vLLM's chain `sha256_cbor`, so that a router has one hash for the same prefix in either engine.
//!
//! A block's hash is the SHA-256 of the canonical CBOR of `(parent, tokens, extra)`: the 32 bytes of the hash of the
//! block above, or of the root; the token ids; and what else tells two prefixes apart, or null. That is
//! `hash_block_tokens` of `vllm/v1/core/kv_cache_utils.py`, with `extra` as `generate_block_hash_extra_keys` has it
//! (0.33.0).

use dsv4_kv_prefix::RootKey;
use sha2::{Digest, Sha256};

/// Tokens of a block.
pub const BLOCK: usize = 128;

/// The hash of a block, and of all that is above it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockHash(pub [u8; 32]);

impl BlockHash {
    /// What has no block above it: the SHA-256 of the CBOR of `"vllm-none-hash"`.
    #[must_use]
    pub fn root() -> Self {
        Self(Sha256::digest(b"\x6evllm-none-hash").into())
    }

    /// What events have of it: its last eight bytes as a number.
    #[must_use]
    pub fn wire(self) -> u64 {
        let [.., a, b, c, d, e, f, g, h] = self.0;
        u64::from_be_bytes([a, b, c, d, e, f, g, h])
    }
}

/// Hashes blocks, one after the other.
#[derive(Debug, Default)]
pub struct Hasher {
    /// The CBOR of a block, written over by the next.
    cbor: Vec<u8>,
}

impl Hasher {
    /// The hash of the block below `parent`, or at the root. The salt counts in the first block only, the adapter in each.
    ///
    /// ```
    /// use dsv4_kv_events::{BlockHash, Hasher};
    /// use dsv4_kv_prefix::RootKey;
    ///
    /// let root = RootKey::new(b"tenant", b"", b"model");
    /// let mut hasher = Hasher::default();
    /// let first = hasher.hash(&root, None, &[1; 128]);
    /// let other = RootKey::new(b"", b"", b"model");
    /// assert_ne!(hasher.hash(&other, None, &[1; 128]), first);
    /// assert_ne!(hasher.hash(&root, Some(first), &[1; 128]), first);
    /// ```
    pub fn hash(
        &mut self,
        root: &RootKey,
        parent: Option<BlockHash>,
        tokens: &[u32; BLOCK],
    ) -> BlockHash {
        let cbor = &mut self.cbor;
        cbor.clear();
        head(cbor, ARRAY, 3);
        bytes(cbor, &parent.unwrap_or_else(BlockHash::root).0);
        head(cbor, ARRAY, BLOCK as u64);
        tokens.iter().for_each(|&token| head(cbor, NUMBER, token.into()));
        let salt = Some(root.salt()).filter(|salt| parent.is_none() && !salt.is_empty());
        let adapter = Some(root.adapter()).filter(|adapter| !adapter.is_empty());
        match u64::from(salt.is_some()) + u64::from(adapter.is_some()) {
            0 => cbor.push(NULL),
            keys => head(cbor, ARRAY, keys),
        }
        if let Some(adapter) = adapter {
            // The third is the path of the adapter's file, which is not known here.
            head(cbor, ARRAY, 3);
            [b"lora", adapter, b""].iter().for_each(|part| text(cbor, part));
        }
        if let Some(salt) = salt {
            head(cbor, ARRAY, 2);
            [b"cache_salt", salt].iter().for_each(|part| text(cbor, part));
        }
        BlockHash(Sha256::digest(cbor).into())
    }
}

/// Major types of CBOR (RFC 8949, section 3.1).
const NUMBER: u8 = 0;
const BYTES: u8 = 2;
const TEXT: u8 = 3;
const ARRAY: u8 = 4;
const NULL: u8 = 0xf6;

/// A type and a number in as few bytes as it takes.
fn head(cbor: &mut Vec<u8>, major: u8, number: u64) {
    let kind = major << 5;
    let all = number.to_be_bytes();
    match number {
        0..24 => cbor.push(kind | all[7]),
        24..0x100 => cbor.extend([kind | 24, all[7]]),
        0x100..0x1_0000 => cbor.extend([kind | 25, all[6], all[7]]),
        0x1_0000..0x1_0000_0000 => {
            cbor.push(kind | 26);
            cbor.extend_from_slice(&all[4..]);
        }
        _ => {
            cbor.push(kind | 27);
            cbor.extend_from_slice(&all);
        }
    }
}

fn bytes(cbor: &mut Vec<u8>, bytes: &[u8]) {
    head(cbor, BYTES, bytes.len() as u64);
    cbor.extend_from_slice(bytes);
}

/// Text, as vLLM's salts and names are; what is no text is bytes, so that it differs from all text.
fn text(cbor: &mut Vec<u8>, text: &[u8]) {
    match std::str::from_utf8(text) {
        Ok(text) => head(cbor, TEXT, text.len() as u64),
        Err(_) => head(cbor, BYTES, text.len() as u64),
    }
    cbor.extend_from_slice(text);
}
