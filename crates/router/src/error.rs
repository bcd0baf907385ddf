//! Errors of the router. A refused call changes nothing.

use dsv4_kv_device::DeviceError;
use dsv4_kv_model_files::ModelFileError;
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
    /// A number of experts that no kernel supports.
    #[error("{what}: {value}; it must be from {multiple} to {most}, in steps of {multiple}")]
    Selection {
        /// `experts of a layer` or `experts of a token`.
        what: &'static str,
        /// The number.
        value: u32,
        /// It must be a multiple of this, which is also the least allowed value.
        multiple: u32,
        /// Most allowed.
        most: u32,
    },
    /// A width of the hidden state that no kernel supports.
    #[error("the hidden state has {hidden} elements; it must be a multiple of {multiple}")]
    HiddenSize {
        /// Its width.
        hidden: u32,
        /// It must be a multiple of this.
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
        /// Number of layers of the model.
        layers: u32,
    },
    /// The checkpoint lacks a tensor, or has it in another shape or type.
    #[error(transparent)]
    ModelFile(#[from] ModelFileError),
    /// Weights whose shape is not that of the configuration.
    #[error("{name} has the shape {found:?}; the configuration says {expected:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape it must have.
        expected: Vec<usize>,
    },
    /// A table that lists an expert that the layer does not have.
    #[error("{name} lists expert {expert} for token {token}; the layer has {experts}")]
    NoSuchExpert {
        /// The table.
        name: String,
        /// The token id.
        token: usize,
        /// The listed expert.
        expert: i64,
        /// Experts of the layer.
        experts: u32,
    },
    /// More tokens than the router was created for.
    #[error("{tokens} tokens; the router was made for at most {most}")]
    TooManyTokens {
        /// Tokens of the call.
        tokens: u32,
        /// The most tokens, as the router was created.
        most: u32,
    },
    /// Kernels found token ids or experts out of range, or NaNs.
    #[error("the router refused {count} token ids, experts or logits")]
    Refused {
        /// Number of them since the last check.
        count: u32,
    },
    /// Launches of the router did not end, or two ran at once. The results since the last check may be those of earlier
    /// batches. The router can be used again.
    #[error(
        "the router's arrival counters are not zero ({counts:?}): a launch did not end, or two ran at once; order \
         replays in several streams one after the other, and route again"
    )]
    Unfinished {
        /// Thread blocks that were counted and that no last block of a launch has reset.
        counts: [u32; DECODE_SLICES as usize],
    },
    /// The device refused or failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
