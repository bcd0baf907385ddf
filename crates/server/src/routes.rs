//! The paths that are served.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::header::{CONNECTION, CONTENT_TYPE};
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::map_response_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};

use crate::api_error::ApiError;
use crate::app::App;
use crate::completions::completions;

/// The content type of Prometheus' text format.
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The router of all paths.
pub fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(DefaultBodyLimit::max(app.body_bytes))
        .layer(map_response_with_state(Arc::clone(&app), close_if_shutting_down))
        .with_state(app)
}

/// While the server shuts down, every answer closes its connection. Otherwise a client would send the retry of a
/// refused request through it, to this server again.
async fn close_if_shutting_down(State(app): State<Arc<App>>, mut response: Response) -> Response {
    if !app.queue.is_open() {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [app.description()] }))
}

async fn model(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(name) = name.map_err(|error| ApiError::new(error.status(), error.body_text()))?;
    app.check_model(&name)?;
    Ok(Json(app.description()))
}

async fn health(State(app): State<Arc<App>>) -> Response {
    let (status, text) = match app.queue.is_open() {
        true => (StatusCode::OK, "ok"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "shutting down"),
    };
    (status, Json(json!({ "status": text }))).into_response()
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    ([(CONTENT_TYPE, PROMETHEUS)], app.rendered_metrics()).into_response()
}

async fn no_such_path() -> ApiError {
    let paths = "POST /v1/completions, GET /v1/models, GET /health or GET /metrics";
    ApiError::new(StatusCode::NOT_FOUND, format!("there is nothing at this path; use {paths}"))
}

async fn no_such_method() -> ApiError {
    let text = "this path is not for this method; completions are POST, all else is GET";
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, text)
}
