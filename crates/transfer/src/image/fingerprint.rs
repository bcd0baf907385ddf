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
    /// Digest of the identity that the caller gives: of the weights, and of what else makes these bytes.
    pub weights: [u8; 32],
    /// Digest of salt and adapter.
    pub owner: [u8; 32],
}

impl Fingerprint {
    /// The fingerprint of requests with this salt and adapter, in a cache of this configuration.
    ///
    /// `identity` distinguishes the bytes of these caches from those of others with the same configuration: a digest of the
    /// weights or their revision, and of anything else that changes bytes, as for a cold tier. The same model has other bits
    /// on the CPU, on another kind of GPU, and in another build of the program. If machines that differ in these have one
    /// identity, a request continues from the bits of the machine that computed it, and a prompt at the target has other
    /// bits after a prefix came than before.
    ///
    /// # Errors
    /// [`ImageError::NoIdentity`].
    pub fn new(
        config: &CacheConfig,
        identity: &[u8],
        salt: &[u8],
        adapter: &[u8],
    ) -> Result<Self, ImageError> {
        let weights = Self::weights_of(identity)?;
        let (shape, owner) = (Self::shape_of(config), Self::owner_of(salt, adapter));
        Ok(Self { shape, weights, owner })
    }

    /// [`Self::weights`] for this identity ([`Self::new`]).
    ///
    /// # Errors
    /// [`ImageError::NoIdentity`] if it is empty, by which unlike weights would pass as equal.
    pub fn weights_of(identity: &[u8]) -> Result<[u8; 32], ImageError> {
        match identity {
            [] => Err(ImageError::NoIdentity),
            _ => Ok(blake3::hash(identity).into()),
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
