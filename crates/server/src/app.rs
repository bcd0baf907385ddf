//! Shared state of the HTTP handlers.

use std::sync::Arc;

use axum::http::StatusCode;
use dsv4_kv_model::text::Text;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::api_error::ApiError;
use crate::fields::shortened;
use crate::metrics::Metrics;
use crate::queue::Queue;

/// What all handlers share.
pub struct App {
    /// Where requests are submitted.
    pub queue: Arc<Queue>,
    /// How text becomes tokens and back.
    pub text: Arc<Text>,
    /// Bytes of a text that a token of it stands for at most, if that is known.
    pub most_bytes_per_token: Option<usize>,
    /// Texts that may be encoded at once: a long one takes much time and memory.
    pub encoders: Arc<Semaphore>,
    /// The model's name.
    pub model: String,
    /// When the server began, in seconds since 1970.
    pub created: u64,
    /// Tokens that end a completion.
    pub end: Vec<u32>,
    /// Drafts of a step.
    pub drafts: usize,
    /// What is counted.
    pub metrics: Metrics,
}

impl App {
    /// Whether a model is the one that is served.
    ///
    /// # Errors
    /// 404 for the name of another model.
    pub fn check_model(&self, name: &str) -> Result<(), ApiError> {
        if name == self.model {
            return Ok(());
        }
        let given = shortened(&Value::from(name));
        let text = format!("the model {given} does not exist; this server has `{}`", self.model);
        let error = ApiError::new(StatusCode::NOT_FOUND, text);
        Err(ApiError { param: Some("model".into()), code: Some("model_not_found"), ..error })
    }

    /// The model as clients are told of it.
    pub fn description(&self) -> Value {
        let (id, created) = (&self.model, self.created);
        json!({ "id": id, "object": "model", "created": created, "owned_by": "dsv4-kv" })
    }
}
