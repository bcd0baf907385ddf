//! The result of a request.

use std::time::Duration;

use dsv4_kv::Capacity;
use dsv4_kv::device::{Backend, Device};
use dsv4_kv_model::Engine;
use dsv4_kv_model::generate::Summary;
use dsv4_kv_model::sequence;

use crate::generated::{Finish, Report};

/// The result of an engine's run.
pub fn report<B: Backend>(
    engine: &Engine<B>,
    device: &Device<B>,
    prompt: &[u32],
    summary: &Summary,
    text: Option<String>,
) -> Report {
    let Summary { tokens, finish, time_to_first_token, decode_time, .. } = summary;
    let bytes = Capacity::new(engine.cache().config()).bytes();
    Report {
        device: device.info().name.clone(),
        prompt_tokens: prompt.len(),
        tokens: tokens.clone(),
        text,
        finish: match finish {
            Some(sequence::Finish::Length) => Finish::Length,
            Some(sequence::Finish::End) => Finish::End,
            None => Finish::Interrupted,
        },
        time_to_first_token_ms: time_to_first_token.as_secs_f64() * 1e3,
        tokens_per_second: rate(tokens.len(), *decode_time),
        steps: summary.steps,
        drafts: summary.drafts,
        drafts_accepted: summary.accepted,
        cache_bytes: bytes,
    }
}

/// Tokens per second after the first; `None` without a second token.
fn rate(tokens: usize, time: Duration) -> Option<f64> {
    (tokens > 1).then(|| (tokens - 1) as f64 / time.as_secs_f64())
}
