//! The reasons for which a `config.json` is refused: the field, its value, and what it must be.

use alloc::string::String;

/// The reason for which a `config.json` is refused.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Not JSON.
    #[error("the configuration is no valid JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// A field that is never guessed is absent, or `null`.
    #[error("config.json has no `{field}`; it is never guessed")]
    Missing {
        /// The field, with the sections it is in.
        field: String,
    },
    /// A field of another type.
    #[error("{field} is {found}; it must be {expected}")]
    Type {
        /// The field.
        field: String,
        /// The value found, as JSON.
        found: String,
        /// The type it must have.
        expected: &'static str,
    },
    /// Neither spelling of the layer schedule is present. It is never guessed: the released models differ.
    #[error(
        "config.json has neither `compress_ratios` nor `layer_types`; the schedule cannot be guessed"
    )]
    NoSchedule,
    /// Nothing says which tokens end a text. They are never guessed.
    #[error(
        "config.json has no `eos_token_id`; it is never guessed: give it there or in generation_config.json, `null` if \
         no token ends a text"
    )]
    NoEndTokens,
    /// A ratio other than 0, 4 or 128.
    #[error("compress_ratios[{layer}] is {value}; a DeepSeek-V4 layer has 0, 4 or 128")]
    BadRatio {
        /// Index into `compress_ratios`.
        layer: usize,
        /// The value found.
        value: i64,
    },
    /// A kind of layer that DeepSeek-V4 does not have.
    #[error("{field}[{layer}] is {found:?}; a DeepSeek-V4 layer has one of {expected}")]
    BadLayerType {
        /// `layer_types` or `mlp_layer_types`.
        field: &'static str,
        /// Index into it.
        layer: usize,
        /// The value found.
        found: String,
        /// The values allowed.
        expected: &'static str,
    },
    /// A list without exactly one entry per layer.
    #[error(
        "{field} has {found} entries; {layers} layers and {mtp_layers} MTP layers need {}",
        layers + mtp_layers
    )]
    BadLength {
        /// The list.
        field: &'static str,
        /// Entries found.
        found: usize,
        /// `num_hidden_layers`.
        layers: u32,
        /// Multi-token-prediction layers that the list must have too.
        mtp_layers: u32,
    },
    /// A dimension that the kernels are not built for.
    #[error("{field} is {value}; the kernels are built for {expected}")]
    BadDimension {
        /// The field.
        field: String,
        /// The value found.
        value: u32,
        /// The only value supported.
        expected: u32,
    },
    /// A constant that kernels or model are not built for.
    #[error("{field} is {value}; only {expected} is supported")]
    BadConstant {
        /// The field.
        field: String,
        /// The value found.
        value: f64,
        /// The only value supported.
        expected: f64,
    },
    /// A method that differs from DeepSeek-V4's.
    #[error("{field} is {found}; only {expected} is supported")]
    Unsupported {
        /// The field.
        field: String,
        /// The value found, as JSON.
        found: String,
        /// The value that it must have.
        expected: String,
    },
    /// A count outside the range that is supported.
    #[error("{field} is {value}; it must be between {least} and {most}")]
    OutOfRange {
        /// The field.
        field: String,
        /// The value found.
        value: f64,
        /// Least value allowed.
        least: f64,
        /// Greatest value allowed.
        most: f64,
    },
    /// A count that the kernels take in steps.
    #[error("{field} is {value}; it must be a multiple of {multiple}")]
    NotMultiple {
        /// The field.
        field: String,
        /// The value found.
        value: u32,
        /// The number of which it must be a multiple.
        multiple: u32,
    },
    /// Two fields that must agree have different values.
    #[error("{first} and {second} disagree; remove one of them")]
    Disagree {
        /// One field.
        first: String,
        /// The other.
        second: String,
    },
}
