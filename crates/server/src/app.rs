//! Shared state of the HTTP handlers.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use dsv4_kv_model::text::Text;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::api_error::ApiError;
use crate::fields::shortened;
use crate::metrics::Metrics;
use crate::queue::Queue;

/// The state that all handlers share.
pub struct App {
    /// The queue to which requests are submitted.
    pub queue: Arc<Queue>,
    /// The tokenizer.
    pub text: Arc<Text>,
    /// Most bytes of text that one token encodes, if known.
    pub most_bytes_per_token: Option<usize>,
    /// Permits to encode texts. They bound the number of texts that are encoded at once, since a long text takes much
    /// time and memory.
    pub encoders: Arc<Semaphore>,
    /// Permits to parse bodies. They bound the memory of bodies that are being parsed, which take a multiple of their
    /// size before the queue can refuse them.
    pub parsers: Arc<Semaphore>,
    /// Most bytes of a body.
    pub body_bytes: usize,
    /// After so long without an event a stream sends a comment, if at all.
    pub keep_alive: Option<Duration>,
    /// The model's name.
    pub model: String,
    /// When the server was started, in seconds since 1970.
    pub created: u64,
    /// Tokens that end a completion.
    pub end: Vec<u32>,
    /// Draft tokens of a sequence in a step.
    pub drafts: usize,
    /// The metrics.
    pub metrics: Metrics,
}

impl App {
    /// Checks that `name` is the model that is served.
    ///
    /// # Errors
    /// 404 for any other name.
    pub fn check_model(&self, name: &str) -> Result<(), ApiError> {
        if name == self.model {
            return Ok(());
        }
        let given = shortened(&Value::from(name));
        let text = format!("the model {given} does not exist; this server has `{}`", self.model);
        let error = ApiError::new(StatusCode::NOT_FOUND, text);
        Err(ApiError { param: Some("model".into()), code: Some("model_not_found"), ..error })
    }

    /// The metrics in Prometheus' text format.
    pub fn rendered_metrics(&self) -> String {
        // The scheduler, which sets it after each step, does not notice that prompts are being read.
        self.metrics.waiting.set(self.queue.all_waiting() as f64);
        self.metrics.render()
    }

    /// The model object of `/v1/models`, with the fields of vLLM that its clients read.
    pub fn description(&self) -> Value {
        let (id, created, longest) = (&self.model, self.created, self.queue.limits().longest);
        json!({
            "id": id, "object": "model", "created": created, "owned_by": "dsv4-kv",
            "root": id, "parent": null, "max_model_len": longest,
        })
    }
}
