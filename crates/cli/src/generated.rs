//! The result of `generate`: a table, and JSON. It is compiled even without the command, since the command's schema
//! needs it.
#![cfg_attr(
    not(feature = "generate"),
    expect(dead_code, reason = "only its schema is asked for where the command is not built")
)]

use std::fmt;

use bytesize::ByteSize;
use comfy_table::Table;
use comfy_table::presets::NOTHING;
use schemars::JsonSchema;
use serde::Serialize;

/// How a request went.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The device's name.
    pub device: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// The tokens that were generated.
    pub tokens: Vec<u32>,
    /// Their text; none if the vocabulary has no text.
    pub text: Option<String>,
    /// Why it has ended.
    pub finish: Finish,
    /// Milliseconds from the begin of the first step to the first token.
    pub time_to_first_token_ms: f64,
    /// Tokens a second behind the first; none without a second token.
    pub tokens_per_second: Option<f64>,
    /// Steps that have run.
    pub steps: u32,
    /// Tokens that were proposed.
    pub drafts: u32,
    /// Those of them that the model would have chosen.
    pub drafts_accepted: u32,
    /// Bytes of the cache on the device.
    pub cache_bytes: u64,
}

/// Why a request has ended.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// It has as many tokens as were asked for.
    Length,
    /// A token that ends it was generated.
    End,
    /// The program was interrupted.
    Interrupted,
}

impl fmt::Display for Finish {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Length => "length",
            Self::End => "end",
            Self::Interrupted => "interrupted",
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_preset(NOTHING);
        let rate = self.tokens_per_second.map_or("-".into(), |rate| format!("{rate:.1}"));
        let rows = [
            ("device", self.device.clone()),
            ("prompt", format!("{} tokens", self.prompt_tokens)),
            ("generated", format!("{} tokens, ended by {}", self.tokens.len(), self.finish)),
            ("time to first token", format!("{:.1} ms", self.time_to_first_token_ms)),
            ("tokens a second", rate),
            ("steps", self.steps.to_string()),
            ("drafts accepted", format!("{} of {}", self.drafts_accepted, self.drafts)),
            ("cache", ByteSize(self.cache_bytes).to_string()),
        ];
        for (what, value) in rows {
            table.add_row([what.to_owned(), value]);
        }
        f.write_str(&table.trim_fmt())
    }
}
