//! Options of the suites that measure whole models: the models, and their loads.

use anyhow::Result;
use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};
use dsv4_kv::CacheConfig;
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::kv_layout::geometry::{BLOCK_TOKENS, MAX_CONTEXT};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::options::{ClusterChoice, integer};

/// How the weight of the indexer's query projection is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Weight {
    /// In BF16, as a released model is loaded.
    Bf16,
    /// In NVFP4.
    Nvfp4,
}

/// Models and loads of the suites that measure whole models. Options may be given several times; each combination is
/// measured.
#[derive(Args, Clone, Debug)]
#[command(
    next_help_heading = "Options of step, prefill, checkpoints, tier and attention; those with a list may be given several times"
)]
pub struct LoadArgs {
    /// For step, prefill, checkpoints and tier: the model.
    #[arg(long, value_name = "NAME", default_values = ["flash", "pro"], value_parser = PossibleValuesParser::new(ModelConfig::PRESETS))]
    pub model: Vec<String>,

    /// For step: tokens of each request, a multiple of 128 from 256 to 1048576.
    #[arg(long, value_name = "TOKENS", default_values_t = [8192, 131_072], value_parser = context)]
    pub context: Vec<u32>,

    /// For step: requests, a token each.
    #[arg(long, value_name = "N", default_values_t = [1, 32, 256], value_parser = integer(1..=CacheConfig::MAX_REQUESTS / 2))]
    pub batch: Vec<u32>,

    /// For step: also measure the step with attention in place instead of gathers.
    #[arg(long)]
    pub attention: bool,

    /// For step, with --attention: how many thread blocks share the keys of one query (64 heads).
    #[arg(long, value_enum, default_value_t = ClusterChoice::TwoBlocks, requires = "attention")]
    pub attention_cluster: ClusterChoice,

    /// For prefill and checkpoints: tokens of a chunk, 128 to 32768.
    #[arg(long, value_name = "TOKENS", default_values_t = [2048, 8192], value_parser = integer(128..=32_768))]
    pub chunk: Vec<u32>,

    /// For prefill and checkpoints: tokens before the chunk, 0 to 983040. For tier: the largest is the length of
    /// the prefix.
    #[arg(long, value_name = "TOKENS", default_values_t = [0, 32_768, 131_072], value_parser = integer(0..=983_040))]
    pub past: Vec<u32>,

    /// For attention: only cases whose description contains TEXT.
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,

    /// For step and prefill: how the weight of the indexer's query projection is stored.
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = Weight::Bf16)]
    pub index_weight: Weight,
}

/// Parses a context length at whose end both kinds of windows close.
fn context(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(tokens)
            if (2 * BLOCK_TOKENS..=MAX_CONTEXT).contains(&tokens)
                && tokens.is_multiple_of(BLOCK_TOKENS) =>
        {
            Ok(tokens)
        }
        _ => Err(format!(
            "it must be a multiple of {BLOCK_TOKENS} from {} to {MAX_CONTEXT}",
            2 * BLOCK_TOKENS
        )),
    }
}
