//! Errors of a model.

use dsv4_kv::KvError;
use dsv4_kv_device::DeviceError;
use dsv4_kv_model_files::ModelFileError;
use dsv4_kv_router::RouterError;

/// Why a model, an engine or a step was refused.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A token id outside of the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocabulary} tokens")]
    TokenOutOfVocabulary {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocabulary: u32,
    },
    /// A step without a chunk.
    #[error("the step has no tokens; give at least one chunk")]
    EmptyStep,
    /// A prompt without tokens.
    #[error("the prompt is empty; a request needs a token to begin with")]
    EmptyPrompt,
    /// A step's logits have a NaN: products of weights and activations have left the range of f32.
    #[error(
        "logits of the step are NaN: a product left the range of f32; check the model's weights"
    )]
    NotANumber,
    /// A bucket with more tokens than one tile of queries, which a graph attends at once.
    #[error("a bucket of {tokens} tokens is larger than the {most} that a layer's graph gathers")]
    BucketTooLarge {
        /// Tokens asked for.
        tokens: u32,
        /// The most.
        most: u32,
    },
    /// The model's files lack a tensor, or have it in another shape or type.
    #[error(transparent)]
    ModelFile(Box<ModelFileError>),
    /// An error of the cache.
    #[error(transparent)]
    Cache(#[from] KvError),
    /// An error of a router.
    #[error(transparent)]
    Router(#[from] RouterError),
    /// An error of the device.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl From<ModelFileError> for ModelError {
    fn from(error: ModelFileError) -> Self {
        Self::ModelFile(Box::new(error))
    }
}

impl ModelError {
    /// Whether a number of the step was NaN: in a router's logits, or in those of the model. That depends on the tokens
    /// of a chunk, so other chunks of the same step may succeed without it.
    ///
    /// [`RouterError::Refused`] has one count for NaNs and for token ids and experts out of range. Ids and experts are
    /// checked on the host too, so that a count of those means damaged memory of the device; it is not told apart.
    #[must_use]
    pub fn is_numerical(&self) -> bool {
        matches!(self, Self::NotANumber | Self::Router(RouterError::Refused { .. }))
    }
}
