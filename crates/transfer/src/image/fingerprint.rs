//! Which caches may take an image.

use dsv4_kv::{CacheConfig, RootKey};

/// What two caches must have in common so that one may take the other's bytes. There are three digests, so that a
/// refusal can say which of them differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// Digest of model and formats: kinds of layers, ratios, rotary embedding, how rows and keys are stored.
    /// `max_draft` and the size of the cache are not included.
    pub shape: [u8; 32],
    /// Digest of the identity of the weights, which the caller gives: a digest of them, or their revision.
    pub weights: [u8; 32],
    /// Digest of salt and adapter.
    pub owner: [u8; 32],
}

impl Fingerprint {
    /// The fingerprint of requests with this salt and adapter, in a cache of this configuration that serves weights of
    /// this identity.
    #[must_use]
    pub fn new(config: &CacheConfig, weights: &[u8], salt: &[u8], adapter: &[u8]) -> Self {
        Self {
            shape: Self::shape_of(config),
            weights: Self::weights_of(weights),
            owner: Self::owner_of(salt, adapter),
        }
    }

    /// [`Self::weights`] for weights of this identity.
    #[must_use]
    pub fn weights_of(weights: &[u8]) -> [u8; 32] {
        blake3::hash(weights).into()
    }

    /// [`Self::owner`] for this salt and adapter.
    #[must_use]
    pub fn owner_of(salt: &[u8], adapter: &[u8]) -> [u8; 32] {
        blake3::hash(RootKey::new(salt, adapter, b"").bytes()).into()
    }

    /// [`Self::shape`] for a cache of this configuration.
    #[must_use]
    pub fn shape_of(config: &CacheConfig) -> [u8; 32] {
        blake3::hash(&config.identity()).into()
    }
}
