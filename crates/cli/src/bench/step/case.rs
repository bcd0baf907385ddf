//! A cache and its load, and the position of its requests in their windows.

use anyhow::Result;
use dsv4_kv::CacheConfig;
use dsv4_kv::kv_layout::geometry::{BLOCK_TOKENS, HCA_RATIO};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::super::load::Weight;
use super::super::trunk::{PREFILL_TOKENS, trunk_of};
use crate::error::InputError;
use crate::model;
use crate::options::ClusterChoice;

/// Drafts that the cache has room for. The steps have none.
const DRAFTS: u32 = 4;

/// Where in their windows all requests are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// No window closes.
    MidWindow,
    /// A CSA window and an HCA window close.
    Boundary,
}

impl Phase {
    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::MidWindow => "mid-window",
            Self::Boundary => "boundary",
        }
    }

    /// Tokens of a request before its step, chosen so that it has `context` tokens after the step of the later phase.
    pub fn start(self, context: u32) -> u32 {
        match self {
            Self::MidWindow => context - HCA_RATIO / 2 + 1,
            Self::Boundary => context - 1,
        }
    }
}

/// A cache and its load.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Case {
    /// A preset.
    pub model: String,
    /// Tokens of each request, its step's included.
    pub context: u32,
    /// Longest context that the cache is for.
    pub max_context: u32,
    /// Requests in the step, a token each.
    pub requests: u32,
    /// The indexer's.
    pub weight: Weight,
    /// Whether the step is measured with attention in place of the gathers too.
    pub attention: bool,
    /// How many thread blocks share a query's keys in attention in place.
    #[serde(default, alias = "attention_split")]
    pub attention_cluster: ClusterChoice,
}

impl Case {
    /// Number of query heads, if attention in place is measured.
    pub fn query_heads(&self) -> Result<Option<u32>, InputError> {
        self.attention.then(|| model::heads(&self.model)).transpose()
    }

    /// The configuration of the cache: the model's trunk, and blocks for all requests.
    pub fn config(&self) -> Result<CacheConfig> {
        Ok(CacheConfig {
            max_draft: DRAFTS,
            max_requests: self.requests,
            num_blocks: self.requests * self.context.div_ceil(BLOCK_TOKENS),
            max_context: self.max_context.max(self.context),
            max_step_tokens: PREFILL_TOKENS.max(self.requests),
            attention_cluster: self.attention_cluster.into(),
            ..CacheConfig::new(trunk_of(&self.model)?)
        })
    }
}
