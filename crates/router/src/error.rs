//! What the router answers instead of doing what it was asked. Every refusal leaves all as it was.

use dsv4_kv_checkpoint::CheckpointError;
use dsv4_kv_device::DeviceError;
use kv_layout::router::DECODE_SLICES;

/// Why the router refused or failed.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    /// A setting outside its range.
    #[error("{setting} is {value}; it must be between {least} and {most}")]
    Config {
        /// The field of `RouterConfig`.
        setting: &'static str,
        /// Its value.
        value: f64,
        /// Least value allowed.
        least: f64,
        /// Greatest value allowed.
        most: f64,
    },
    /// Numbers of experts that no kernel is made for.
    #[error("{what}: {value}; it must be from {multiple} to {most}, in steps of {multiple}")]
    Selection {
        /// `experts of a layer` or `experts of a token`.
        what: &'static str,
        /// How many.
        value: u32,
        /// What it must be a multiple of, and the least allowed.
        multiple: u32,
        /// Most allowed.
        most: u32,
    },
    /// A width of the hidden state that no kernel is made for.
    #[error("the hidden state has {hidden} elements; it must be a multiple of {multiple}")]
    HiddenSize {
        /// Its width.
        hidden: u32,
        /// What it must be a multiple of.
        multiple: u32,
    },
    /// More tokens than one launch routes from hidden states.
    #[error("{tokens} tokens in one launch; it routes at most {most}. Split the batch")]
    DecodeTokens {
        /// Tokens of the call.
        tokens: u32,
        /// Most that one launch routes.
        most: u32,
    },
    /// The layer does not exist.
    #[error("layer {layer} does not exist; the model has {layers}")]
    NoSuchLayer {
        /// The layer asked for.
        layer: u32,
        /// Layers there are.
        layers: u32,
    },
    /// The checkpoint lacks a tensor, or has it in another shape or type.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Weights of another shape than the configuration's.
    #[error("{name} has the shape {found:?}; the configuration says {expected:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape it must have.
        expected: Vec<usize>,
    },
    /// A table that lists an expert the layer has not.
    #[error("{name} lists expert {expert} for token {token}; the layer has {experts}")]
    NoSuchExpert {
        /// The table.
        name: String,
        /// The token id.
        token: usize,
        /// What is listed for it.
        expert: i64,
        /// Experts of the layer.
        experts: u32,
    },
    /// More tokens than the router was made for.
    #[error("{tokens} tokens; the router was made for at most {most}")]
    TooManyTokens {
        /// Tokens of the call.
        tokens: u32,
        /// What it was made for.
        most: u32,
    },
    /// A kernel met token ids or experts out of range, or numbers that are none.
    #[error("the router refused {count} token ids, experts or logits")]
    Refused {
        /// How many since the last check.
        count: u32,
    },
    /// Launches of the router did not end, or two ran at once: the experts since the last check may be
    /// those of earlier batches. The router can be used again.
    #[error(
        "launches of the router did not end, or two ran at once (blocks left over: {counts:?}); let \
         replays in several streams follow each other, and route again"
    )]
    Unfinished {
        /// Blocks that were counted, and not taken back by a launch's last block.
        counts: [u32; DECODE_SLICES as usize],
    },
    /// The device refused or failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
