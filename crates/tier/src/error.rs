//! Why a prefix was not stored, or not read.

use crate::image::ImageError;

/// Why a prefix was not stored, or not read.
#[derive(Debug, thiserror::Error)]
pub enum ColdError {
    /// The store has nothing of the prompt behind what is there.
    #[error("the store has no more of this prompt")]
    NotThere,
    /// An object is not what it should be.
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
    /// The store did not take a prefix, also one that says that it is not there itself.
    #[error("the store did not take a prefix: {0}")]
    NotStored(#[source] object_store::Error),
    /// The store's URL cannot be used.
    #[error("{url}: {why}")]
    Url {
        /// As it was given.
        url: String,
        /// Why.
        why: String,
    },
    /// The identity of the model is empty: bytes of any weights would be read.
    #[error("the identity of the model is empty; give a digest of its weights")]
    NoIdentity,
    /// As many prompts as may be on their way are.
    #[error("{most} prompts are on their way from the store; ask again when one of them has come")]
    TooManyFetches {
        /// Most of them.
        most: usize,
    },
    /// The tier was called with another cache than the one that it was opened for, whose bytes are of another model perhaps.
    #[error("this cold tier was opened for another cache; open one for this cache")]
    OtherCache,
    /// The store's thread has ended by a panic: nothing is stored or read any more.
    #[error("the store's thread has ended; open the tier again")]
    ThreadEnded,
    /// The store's thread could not be started.
    #[error("the store's thread could not be started: {0}")]
    Thread(#[from] std::io::Error),
}

/// What kind of reason a [`ColdError`] is: as [`crate::ColdStats`] counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColdErrorKind {
    /// The store has no more of a prompt, or not any more.
    NotThere,
    /// An object is damaged, or shorter or longer than it says.
    Damaged,
    /// An object of another version, model, format, salt, adapter, or of other tokens.
    Foreign,
    /// A call failed.
    Failed,
}

impl ColdErrorKind {
    /// How many kinds there are.
    pub const COUNT: usize = 4;

    /// Its number, below [`Self::COUNT`].
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

impl ColdError {
    /// What kind of reason it is.
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

    /// Whether the object is not there, or not what it should be: asking again would not help.
    pub(crate) fn is_final(&self) -> bool {
        matches!(self, Self::Image { .. } | Self::Store(object_store::Error::NotFound { .. }))
    }
}
