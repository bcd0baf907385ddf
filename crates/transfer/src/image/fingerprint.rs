//! Which caches may take an image.

use dsv4_kv::{CacheConfig, RootKey};

use super::{Fact, ImageError};

/// What two caches must have in common so that one may take the other's bytes. There are three digests, so that a
/// refusal can say which of them differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// Digest of model and formats: kinds of layers, ratios, rotary embedding, how rows and keys are stored.
    /// `max_draft` and the size of the cache are not included.
    pub shape: [u8; 32],
    /// Digest of the identity of the weights, which the caller gives: a digest of them, or their revision; never empty.
    pub weights: [u8; 32],
    /// Digest of salt and adapter.
    pub owner: [u8; 32],
}

impl Fingerprint {
    /// The fingerprint of requests with this salt and adapter, in a cache of this configuration that serves weights of
    /// this identity.
    ///
    /// # Errors
    /// [`ImageError::NoIdentity`].
    pub fn new(
        config: &CacheConfig,
        weights: &[u8],
        salt: &[u8],
        adapter: &[u8],
    ) -> Result<Self, ImageError> {
        let weights = Self::weights_of(weights)?;
        let (shape, owner) = (Self::shape_of(config), Self::owner_of(salt, adapter));
        Ok(Self { shape, weights, owner })
    }

    /// [`Self::weights`] for weights of this identity.
    ///
    /// # Errors
    /// [`ImageError::NoIdentity`] if it is empty, by which unlike weights would pass as equal.
    pub fn weights_of(weights: &[u8]) -> Result<[u8; 32], ImageError> {
        match weights {
            [] => Err(ImageError::NoIdentity),
            _ => Ok(blake3::hash(weights).into()),
        }
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

    /// Refuses an image whose digest of `fact` is not the one that it must have.
    pub(crate) fn compare(
        fact: Fact,
        needed: &[u8; 32],
        found: &[u8; 32],
    ) -> Result<(), ImageError> {
        if needed == found {
            return Ok(());
        }
        let start =
            |digest: &[u8; 32]| u32::from_be_bytes([digest[0], digest[1], digest[2], digest[3]]);
        Err(ImageError::Foreign { fact, needed: start(needed), found: start(found) })
    }
}
