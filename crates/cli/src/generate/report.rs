//! The result: a table and JSON.

use std::fmt;
use std::time::Duration;

use bytesize::ByteSize;
use comfy_table::Table;
use comfy_table::presets::NOTHING;
use dsv4_kv::device::{Backend, Device};
use dsv4_kv_model::Engine;
use dsv4_kv_model::generate::Summary;
use dsv4_kv_model::sequence::Finish;
use serde::Serialize;

/// How a request went.
#[derive(Debug, Serialize)]
pub struct Report {
    device: String,
    prompt_tokens: usize,
    tokens: Vec<u32>,
    /// None if the vocabulary has no text.
    text: Option<String>,
    finish: &'static str,
    time_to_first_token_ms: f64,
    tokens_per_second: Option<f64>,
    steps: u32,
    drafts: u32,
    drafts_accepted: u32,
    cache_bytes: u64,
}

impl Report {
    /// What an engine did.
    pub fn new<B: Backend>(
        engine: &Engine<B>,
        device: &Device<B>,
        prompt: &[u32],
        summary: &Summary,
        text: Option<String>,
    ) -> Self {
        let Summary { tokens, finish, time_to_first_token, decode_time, .. } = summary;
        let bytes = engine.cache().memory_bytes().iter().map(|(_, bytes)| bytes).sum();
        Self {
            device: device.info().name.clone(),
            prompt_tokens: prompt.len(),
            tokens: tokens.clone(),
            text,
            finish: match finish {
                Finish::Length => "length",
                Finish::End => "end",
            },
            time_to_first_token_ms: time_to_first_token.as_secs_f64() * 1e3,
            tokens_per_second: rate(tokens.len(), *decode_time),
            steps: summary.steps,
            drafts: summary.drafts,
            drafts_accepted: summary.accepted,
            cache_bytes: bytes,
        }
    }
}

/// Tokens a second behind the first; none without a second token.
fn rate(tokens: usize, time: Duration) -> Option<f64> {
    (tokens > 1).then(|| (tokens - 1) as f64 / time.as_secs_f64())
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
        write!(f, "{table}")
    }
}
