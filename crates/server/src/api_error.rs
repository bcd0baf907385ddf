//! Errors in OpenAI's format.

use axum::Json;
use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::error::{Failure, Refusal};

/// The status that nginx logs if a client closes its connection.
const CLIENT_LEFT: u16 = 499;

/// An error with its HTTP status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// The status.
    pub status: StatusCode,
    /// What is wrong, and what to do.
    pub message: String,
    /// The field that is wrong.
    pub param: Option<String>,
    /// A short name, for programs.
    pub code: Option<&'static str>,
}

impl ApiError {
    /// A field that is wrong: 400.
    #[must_use]
    pub fn invalid(param: &str, message: String) -> Self {
        let param = Some(param.into());
        Self { param, ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    /// An error with this status and message.
    #[must_use]
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None }
    }

    /// The client has left before its request was complete. Nobody gets this answer. The status is that of nginx.
    #[must_use]
    pub fn client_left() -> Self {
        let status = StatusCode::from_u16(CLIENT_LEFT).expect("it has three digits");
        Self::new(status, "the client has closed the connection")
    }

    /// Whether it is [`Self::client_left`].
    #[must_use]
    pub fn has_client_left(&self) -> bool {
        self.status.as_u16() == CLIENT_LEFT
    }

    /// The JSON body, `{"error": ..}`.
    #[must_use]
    pub fn body(&self) -> Value {
        let kind = match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        let Self { message, param, code, .. } = self;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.to_string();
        let (status, param, code) = match refusal {
            Refusal::EmptyPrompt | Refusal::TokenOutOfVocabulary { .. } => {
                (StatusCode::BAD_REQUEST, Some("prompt"), None)
            }
            Refusal::TooLong { .. } | Refusal::TextTooLong { .. } => {
                (StatusCode::BAD_REQUEST, Some("max_tokens"), Some("context_length_exceeded"))
            }
            Refusal::TooManySequences { .. } => (StatusCode::BAD_REQUEST, Some("n"), None),
            Refusal::QueueFull { .. } => (StatusCode::TOO_MANY_REQUESTS, None, Some("queue_full")),
            Refusal::ShuttingDown => (StatusCode::SERVICE_UNAVAILABLE, None, Some("shutting_down")),
        };
        Self { param: param.map(Into::into), code, ..Self::new(status, message) }
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        let message = failure.to_string();
        match failure {
            Failure::Step(_) => {
                let status = StatusCode::INTERNAL_SERVER_ERROR;
                Self { code: Some("step_failed"), ..Self::new(status, message) }
            }
            Failure::Server => {
                let status = StatusCode::INTERNAL_SERVER_ERROR;
                Self { code: Some("server_failed"), ..Self::new(status, message) }
            }
            Failure::ShutDown => {
                let status = StatusCode::SERVICE_UNAVAILABLE;
                Self { code: Some("shutting_down"), ..Self::new(status, message) }
            }
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            response.headers_mut().insert(RETRY_AFTER, 1.into());
        }
        response
    }
}
