//! The key of a root: prompts share prefixes only below the same root.

use std::sync::Arc;

/// Salt, adapter and model. Two requests can share prefixes only if their keys are equal. Keys are compared byte by
/// byte, so that no hash collision leads to another root.
///
/// ```
/// use dsv4_kv_prefix::RootKey;
/// let alice = RootKey::new(b"alice", b"", b"V4-Flash, ue8m0, mxfp4");
/// assert_eq!((alice.salt(), alice.adapter()), (&b"alice"[..], &b""[..]));
/// assert_ne!(alice, RootKey::new(b"", b"alice", b"V4-Flash, ue8m0, mxfp4"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RootKey(Arc<[u8]>);

impl RootKey {
    /// The root of a salt (who may share), an adapter, and the identity of the model and of the formats that it is
    /// stored in. Each part is preceded by its length, so that different triples have different bytes.
    #[must_use]
    pub fn new(salt: &[u8], adapter: &[u8], model: &[u8]) -> Self {
        let mut bytes = Vec::with_capacity(24 + salt.len() + adapter.len() + model.len());
        for part in [salt, adapter, model] {
            bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
            bytes.extend_from_slice(part);
        }
        Self(bytes.into())
    }

    /// The salt.
    #[must_use]
    pub fn salt(&self) -> &[u8] {
        self.part(0)
    }

    /// The adapter.
    #[must_use]
    pub fn adapter(&self) -> &[u8] {
        self.part(1)
    }

    fn part(&self, number: usize) -> &[u8] {
        let mut rest = &self.0[..];
        let parts = std::iter::from_fn(|| {
            let (length, behind) = rest.split_first_chunk()?;
            let part;
            (part, rest) = behind.split_at(u64::from_le_bytes(*length) as usize);
            Some(part)
        });
        parts.into_iter().nth(number).unwrap_or_default()
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}
