//! Receives the body of a request, and parses it.

use std::error::Error;
use std::iter::successors;
use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, JsonRejection};
use axum::extract::{FromRequest, Request};
use axum::http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, EXPECT};
use axum::http::{HeaderMap, HeaderName, StatusCode};

use crate::api_error::ApiError;
use crate::app::App;
use crate::request::CompletionRequest;

/// Most characters of the error message for a body that cannot be parsed.
const MAX_MESSAGE: usize = 300;

/// Receives the body of a request, and parses it when few enough others are being parsed.
pub async fn read(app: &App, request: Request) -> Result<CompletionRequest, ApiError> {
    let headers = request.headers();
    let checked = check(headers, app.body_bytes);
    // A client that waits for "100 Continue" need not send a body that is refused. Other clients send it at once, and
    // might not see an answer to its first part, so as much of it is received as is allowed.
    let expected = headers.get(EXPECT).map(|value| value.as_bytes());
    if expected.is_some_and(|value| value.eq_ignore_ascii_case(b"100-continue")) {
        checked.clone()?;
    }
    let body = Bytes::from_request(request, &()).await;
    let body = body.map_err(|rejection| not_received(&rejection, app.body_bytes))?;
    checked?;
    // Only now, so that a client that sends slowly delays no other.
    let parser = Arc::clone(&app.parsers).acquire_owned().await.ok();
    // Parsing a long body takes time, and would block a thread that serves other connections.
    let parsed = tokio::task::spawn_blocking(move || -> Result<_, ApiError> {
        let _parser = parser;
        let Json(object) = Json::from_bytes(&body).map_err(unreadable)?;
        drop(body);
        CompletionRequest::read(object)
    });
    parsed.await.unwrap_or_else(|error| {
        Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, format!("the body: {error}")))
    })
}

/// Refuses a body by its headers.
fn check(headers: &HeaderMap, most: usize) -> Result<(), ApiError> {
    let value = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let length = value(CONTENT_LENGTH).and_then(|length| length.parse::<u64>().ok());
    if length.is_some_and(|length| length > most as u64) {
        return Err(too_large(most));
    }
    let kind = value(CONTENT_TYPE).and_then(|kind| kind.split(';').next()).unwrap_or_default();
    let kind = kind.trim().to_ascii_lowercase();
    let format = kind.strip_prefix("application/").unwrap_or_default();
    if format != "json" && !format.ends_with("+json") {
        let text = "the body must be JSON: send it with `content-type: application/json`";
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, text));
    }
    if headers.contains_key(CONTENT_ENCODING) && value(CONTENT_ENCODING) != Some("identity") {
        let text = "the body has a `content-encoding`: send it as it is";
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, text));
    }
    Ok(())
}

fn too_large(most: usize) -> ApiError {
    let text = format!("the body has more than {most} bytes");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, text)
}

fn not_received(rejection: &BytesRejection, most: usize) -> ApiError {
    match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => too_large(most),
        status if is_malformed(rejection) => ApiError::new(status, rejection.body_text()),
        _ => ApiError::client_left(),
    }
}

/// Whether a body could not be received because of its chunks. Else its connection has ended.
fn is_malformed(error: &(dyn Error + 'static)) -> bool {
    use std::io::ErrorKind::{InvalidData, InvalidInput};
    let causes = successors(Some(error), |&error| error.source());
    let mut causes = causes.filter_map(|error| error.downcast_ref::<std::io::Error>());
    causes.any(|error| matches!(error.kind(), InvalidData | InvalidInput))
}

fn unreadable(rejection: JsonRejection) -> ApiError {
    let status = match rejection.status() {
        StatusCode::UNPROCESSABLE_ENTITY => StatusCode::BAD_REQUEST,
        status => status,
    };
    // The message quotes the body, so it may be long.
    ApiError::new(status, rejection.body_text().chars().take(MAX_MESSAGE).collect::<String>())
}
