//! Whose bytes an image has.

use dsv4_kv::{CacheConfig, RootKey};

/// What two caches must have in common for one to take the other's bytes: three digests, so that a refusal says which of
/// them differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// Of model and formats: kinds of layers, ratios, rotary embedding, how rows and keys are stored. Not of `max_draft`,
    /// nor of how large the cache is.
    pub shape: [u8; 32],
    /// Of the identity of the weights that the caller names: a digest of them, or their revision.
    pub weights: [u8; 32],
    /// Of salt and adapter.
    pub owner: [u8; 32],
}

impl Fingerprint {
    /// Of a request with this salt and adapter, in a cache of this configuration that runs weights of this identity.
    #[must_use]
    pub fn new(config: &CacheConfig, weights: &[u8], salt: &[u8], adapter: &[u8]) -> Self {
        Self {
            shape: Self::shape_of(config),
            weights: Self::weights_of(weights),
            owner: Self::owner_of(salt, adapter),
        }
    }

    /// What [`Self::weights`] is of weights of this identity.
    #[must_use]
    pub fn weights_of(weights: &[u8]) -> [u8; 32] {
        blake3::hash(weights).into()
    }

    /// What [`Self::owner`] is of this salt and adapter.
    #[must_use]
    pub fn owner_of(salt: &[u8], adapter: &[u8]) -> [u8; 32] {
        blake3::hash(RootKey::new(salt, adapter, b"").bytes()).into()
    }

    /// What [`Self::shape`] is in a cache of this configuration.
    #[must_use]
    pub fn shape_of(config: &CacheConfig) -> [u8; 32] {
        blake3::hash(&config.identity()).into()
    }
}
