//! The options for attention of a model.

use clap::{Args, ValueEnum};
use dsv4_kv::device::{Backend, Device};
use dsv4_kv_model::{AttentionPlace, Model};

use crate::error::InputError;
use crate::options::ClusterChoice;

/// Where attention runs, and how.
#[derive(Args, Clone, Copy, Debug)]
pub struct AttentionArgs {
    /// Where attention runs: on the device over the rows where they lie, in BF16, or on the host in f32 over gathered
    /// rows; auto takes a GPU.
    #[arg(long, value_enum, default_value_t = AttentionChoice::Auto)]
    pub attention: AttentionChoice,

    /// How many thread blocks share the keys of one query (64 heads) in attention on the device. Results differ in
    /// their last bits.
    #[arg(long, value_enum, default_value_t = ClusterChoice::TwoBlocks)]
    pub attention_cluster: ClusterChoice,
}

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

impl AttentionArgs {
    /// The chosen place, or the best one for a device and a model.
    ///
    /// # Errors
    /// [`InputError::ClusterOnHost`].
    pub fn place<B: Backend>(
        self,
        device: &Device<B>,
        model: &Model,
    ) -> Result<AttentionPlace, InputError> {
        let place = match self.attention {
            AttentionChoice::Auto => AttentionPlace::of_device(device, model.config.heads),
            AttentionChoice::Host => AttentionPlace::Host,
            AttentionChoice::Device => AttentionPlace::Device,
        };
        if place == AttentionPlace::Host && self.attention_cluster != ClusterChoice::default() {
            return Err(InputError::ClusterOnHost);
        }
        Ok(place)
    }
}
