//! The option for where attention runs.

use clap::ValueEnum;
use dsv4_kv::device::{Backend, Device};
use dsv4_kv_model::{AttentionPlace, Model};

/// Where a model's attention is to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AttentionChoice {
    /// On the device if that is a GPU, else on the host.
    Auto,
    /// On the host, in f32, over gathered rows.
    Host,
    /// On the device, in BF16, over the rows where they lie.
    Device,
}

impl AttentionChoice {
    /// The chosen place, or the best one for a device and a model.
    pub fn place<B: Backend>(self, device: &Device<B>, model: &Model) -> AttentionPlace {
        match self {
            Self::Auto => AttentionPlace::of_device(device, model.config.heads),
            Self::Host => AttentionPlace::Host,
            Self::Device => AttentionPlace::Device,
        }
    }
}
