//! What became of requests that moved: a part of the summary.

use bytesize::ByteSize;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::latency::{Moment, Waits};
use super::quantiles::Quantiles;
use super::verification::Verification;

/// What a decode process did.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Decoded {
    /// Requests that came.
    pub arrived: u64,
    /// Requests that ran to their end.
    pub finished: u64,
    /// Tokens that it generated.
    pub tokens: u64,
    /// Its steps, and the time that they took.
    pub time: Moment,
    /// Compressed entries that it wrote.
    pub entries: u64,
    /// Bytes of requests that came; in bookkeeping those that would have.
    pub bytes: u64,
    /// Bytes that came while their prompt was computed.
    pub early_bytes: u64,
    /// Of all bytes those that came to memory of the device.
    pub device_bytes: u64,
    /// Time of its kernels.
    pub kernel_ms: Option<f64>,
    /// What it compared with the reference.
    pub verification: Verification,
    /// From the end of each prompt to the request's entry, in milliseconds.
    pub move_ms: Vec<f32>,
    /// From the end of each prompt to the end of the first step behind it.
    pub next_token_ms: Vec<f32>,
    /// From token to token.
    pub per_token: Waits,
}

/// Prompts were computed in one process, and answers in others.
#[derive(Clone, Debug, Default, Serialize, JsonSchema)]
pub struct Moves {
    /// Processes that computed answers.
    pub decode_processes: u32,
    /// How bytes went there.
    pub transport: String,
    /// Requests that moved.
    pub requests: u64,
    /// Bytes that moved; in bookkeeping those that would have.
    pub bytes: u64,
    /// Bytes that moved while their prompt was still computed.
    pub early_bytes: u64,
    /// Of all bytes those that came to memory of the device.
    pub device_bytes: u64,
    /// Tokens that the decode processes generated.
    pub tokens: u64,
    /// Steps of the decode processes.
    pub steps: u64,
    /// From the end of a prompt to the request's entry in the other cache, in milliseconds of real time.
    pub move_ms: Quantiles,
    /// From the end of a prompt, where its first token is, to the end of the step that gives the second, in milliseconds of
    /// real time, comparisons with the reference included.
    pub next_token_ms: Quantiles,
}

/// The same, and what other parts of the summary need of it.
#[derive(Clone, Debug, Default)]
pub struct Moved {
    /// For the summary.
    pub moves: Moves,
    /// Requests that left.
    pub sent: u64,
    /// Requests that ran to their end elsewhere.
    pub finished: u64,
    /// Tokens generated in a step, and in a millisecond, by all together.
    pub rate: [f64; 2],
    /// From token to token.
    pub per_token: Waits,
}

impl Moves {
    /// The same for people.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let Self { requests, decode_processes, bytes, early_bytes, device_bytes, .. } = self;
        let share = 100 * early_bytes / (*bytes).max(1);
        let to_device = match device_bytes {
            0 => String::new(),
            _ => format!("; {} to memory of the device", ByteSize(*device_bytes)),
        };
        let shown = |Quantiles { p50, p99 }: Quantiles| match p50.zip(p99) {
            Some((p50, p99)) => format!("p50 {p50:.2}, p99 {p99:.2} ms"),
            None => "nobody".into(),
        };
        vec![
            (
                "moved",
                format!(
                    "{requests} requests to {decode_processes} decode processes, by {}",
                    self.transport
                ),
            ),
            (
                "bytes moved",
                format!(
                    "{}, {share} % of them while prompts were computed{to_device}",
                    ByteSize(*bytes)
                ),
            ),
            ("moving", format!("{} from the end of a prompt", shown(self.move_ms))),
            ("second token", format!("{} from the end of a prompt", shown(self.next_token_ms))),
            ("decoded", format!("{} tokens in {} steps", self.tokens, self.steps)),
        ]
    }
}
