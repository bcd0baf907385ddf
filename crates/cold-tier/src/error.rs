//! Why a prefix was not stored, or not read.

use std::time::Duration;

use crate::image::{ImageError, NoMemory};

/// Why a prefix was not stored, or not read.
#[derive(Debug, thiserror::Error)]
pub enum ColdError {
    /// The store has no more of the prompt than host memory and the device.
    #[error("the store has no more of this prompt")]
    NotThere,
    /// An object is damaged, or of another prefix.
    #[error("{name}: {error}")]
    Image {
        /// The object.
        name: String,
        /// Why.
        error: ImageError,
    },
    /// The store failed.
    #[error("the store failed: {0}")]
    Store(#[from] object_store::Error),
    /// The store has listed nothing in time.
    #[error(
        "the store has listed nothing for {after:?}: it does not answer, or its client repeats a call that fails; check its URL and endpoint, try again later, or go on without it"
    )]
    NotListed {
        /// How long it had.
        after: Duration,
    },
    /// The store did not take a prefix, for instance because the store itself does not exist.
    #[error("the store did not take a prefix: {0}")]
    NotStored(#[source] object_store::Error),
    /// The host has no memory for the bytes of a prefix, which was not stored.
    #[error(transparent)]
    NoMemory(#[from] NoMemory),
    /// The store's URL cannot be used.
    #[error("{url}: {why}")]
    Url {
        /// The URL, without parts that may be keys.
        url: String,
        /// Why.
        why: String,
    },
    /// The identity of the model is empty: it would accept bytes of any weights.
    #[error("the identity of the model is empty; give a digest of its weights")]
    NoIdentity,
    /// Too many prompts are being read.
    #[error("{most} prompts are on their way from the store; ask again when one of them has come")]
    TooManyFetches {
        /// Most prompts at a time.
        most: usize,
    },
    /// The tier was called with another cache than the one for which it was opened. Its bytes may be of another model.
    #[error("this cold tier was opened for another cache; open one for this cache")]
    OtherCache,
    /// The tier was closed before the prefixes were stored that were handed to the store.
    #[error(
        "{prefixes} prefixes were not stored before the cold tier was closed; they are computed again"
    )]
    Unstored {
        /// Number of prefixes, as [`crate::ColdTier::close`] returns it.
        prefixes: usize,
    },
    /// The store's thread has panicked: nothing is stored or read any more.
    #[error("the store's thread has ended; open the tier again")]
    ThreadEnded,
    /// The store's thread could not be started.
    #[error("the store's thread could not be started: {0}")]
    Thread(#[from] std::io::Error),
}

/// The kind of a [`ColdError`], as [`crate::ColdStats`] counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColdErrorKind {
    /// The store has no more of a prompt, or has it no longer.
    NotThere,
    /// An object is damaged, or shorter or longer than it says.
    Damaged,
    /// An object of another version, model, format, salt, adapter, or of other tokens.
    Foreign,
    /// A call failed.
    Failed,
}

impl ColdErrorKind {
    /// Number of kinds.
    pub const COUNT: usize = 4;

    /// Its number, below [`Self::COUNT`].
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

impl ColdError {
    /// The kind of the error.
    #[must_use]
    pub fn kind(&self) -> ColdErrorKind {
        match self {
            Self::NotThere | Self::Store(object_store::Error::NotFound { .. }) => {
                ColdErrorKind::NotThere
            }
            Self::Image { error, .. } => match error {
                ImageError::Magic
                | ImageError::Length { .. }
                | ImageError::TooLong { .. }
                | ImageError::Damaged { .. } => ColdErrorKind::Damaged,
                _ => ColdErrorKind::Foreign,
            },
            _ => ColdErrorKind::Failed,
        }
    }

    /// Whether the object that was read is missing, damaged, foreign or archived: a retry would not help, and shorter
    /// prefixes may be there.
    pub(crate) fn is_final(&self) -> bool {
        use object_store::Error::{AlreadyExists, NotFound};
        match self {
            Self::Image { .. } => true,
            // A read of an archived blob of Azure is a conflict, status 409.
            Self::Store(error) => matches!(error, NotFound { .. } | AlreadyExists { .. }),
            _ => false,
        }
    }

    /// Whether the object may not be read: it alone, for instance because it is archived in S3, or all objects, for
    /// instance because a signature has expired.
    pub(crate) fn is_denied(&self) -> bool {
        matches!(self, Self::Store(object_store::Error::PermissionDenied { .. }))
    }
}
