//! Hashes of blocks: vLLM's hash chain `sha256_cbor`. The same prefix has the same hash in both engines, so a router
//! can mix them.
//!
//! A block's hash is the SHA-256 of the canonical CBOR of `(parent, tokens, extra)`: the 32-byte hash of the parent
//! block, or of the root; the token ids; and other data that distinguishes prefixes, or null. This is
//! `hash_block_tokens` of `vllm/v1/core/kv_cache_utils.py`, with `extra` as `generate_block_hash_extra_keys` builds it
//! (0.33.0).

use dsv4_kv_prefix::RootKey;
use sha2::{Digest, Sha256};

/// Tokens of a block.
pub const BLOCK: usize = 128;

/// The hash of a block and all its ancestors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockHash(pub [u8; 32]);

impl BlockHash {
    /// The parent hash of a first block: the SHA-256 of the CBOR of `"vllm-none-hash"`.
    #[must_use]
    pub fn root() -> Self {
        Self(Sha256::digest(b"\x6evllm-none-hash").into())
    }

    /// The form in events: its last eight bytes as a number.
    #[must_use]
    pub fn wire(self) -> u64 {
        let [.., a, b, c, d, e, f, g, h] = self.0;
        u64::from_be_bytes([a, b, c, d, e, f, g, h])
    }
}

/// Computes hashes of blocks.
#[derive(Debug, Default)]
pub struct Hasher {
    /// Buffer for the CBOR of a block.
    cbor: Vec<u8>,
}

impl Hasher {
    /// The hash of the block after `parent`, or of a first block. The salt enters only the hash of the first block, the
    /// adapter that of every block.
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
            // The third element is the path of the adapter's file, which is not known here.
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

/// Writes a major type and a number in the shortest encoding.
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

/// Writes text, the type of vLLM's salts and names. Bytes that are not UTF-8 are written as a byte string, so that they
/// differ from all text.
fn text(cbor: &mut Vec<u8>, text: &[u8]) {
    match std::str::from_utf8(text) {
        Ok(text) => head(cbor, TEXT, text.len() as u64),
        Err(_) => head(cbor, BYTES, text.len() as u64),
    }
    cbor.extend_from_slice(text);
}
