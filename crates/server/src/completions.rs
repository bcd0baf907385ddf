//! `POST /v1/completions`, answered at once or as a stream.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::rejection::JsonRejection;
use axum::extract::{FromRequest, Request, State};
use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use dsv4_kv_model::sample::Sampling;
use dsv4_kv_model::sequence::Continuation;
use futures_util::stream::{self, BoxStream, SelectAll, StreamExt};
use rand::TryRngCore;
use rand::rngs::OsRng;
use serde::Serialize;

use crate::answer::{Answer, AnswerChoice, Head, Logprobs, Usage, finish_reason};
use crate::api_error::ApiError;
use crate::app::App;
use crate::choice::{Piece, Style, pieces};
use crate::error::{Failure, Refusal};
use crate::outcome::Outcome;
use crate::queue::{Events, Queue, Submission};
use crate::request::{CompletionRequest, Prompt, random_seed};

/// Most characters of the error message for a body that cannot be parsed.
const MOST_MESSAGE: usize = 300;

/// A request that was accepted.
struct Taken {
    head: Head,
    pieces: SelectAll<BoxStream<'static, Result<Piece, Failure>>>,
    choices: usize,
    prompt_tokens: usize,
    logprobs: bool,
    stream: bool,
    include_usage: bool,
}

/// Answers a request. If the client disconnects, the answer is dropped, and with it the submitted sequences.
pub async fn completions(State(app): State<Arc<App>>, request: Request) -> Response {
    let outcome = Outcome::new(&app.metrics);
    match take(&app, request).await {
        Ok(taken) if taken.stream => in_pieces(taken, outcome),
        Ok(taken) => match whole(taken).await {
            Ok(answer) => {
                outcome.completed();
                answer
            }
            Err(failure) => outcome.failed(failure).into_response(),
        },
        Err(error) => outcome.error(error).into_response(),
    }
}

/// Receives the body of a request, and parses it when few enough others are being parsed.
async fn read(app: &App, request: Request) -> Result<CompletionRequest, ApiError> {
    let (head, body) = request.into_parts();
    let body = Bytes::from_request(Request::from_parts(head.clone(), body), &()).await;
    let body = body.map_err(|error| unreadable(error.into()))?;
    // Only now, so that a client that sends slowly delays no other.
    let _parser = app.parsers.acquire().await.ok();
    let request = Request::from_parts(head, Body::from(body));
    let Json(object) = Json::from_request(request, &()).await.map_err(unreadable)?;
    CompletionRequest::read(object)
}

async fn take(app: &Arc<App>, request: Request) -> Result<Taken, ApiError> {
    let request = read(app, request).await?;
    app.check_model(&request.model)?;
    let sequences = request.prompts.len() * request.n as usize;
    let places = app.queue.take_places(sequences)?;
    let texts = request.prompts.iter().filter_map(|prompt| match prompt {
        Prompt::Text(text) => Some(text),
        Prompt::Tokens(_) => None,
    });
    texts.clone().try_for_each(|text| check_length(app, text, request.max_tokens))?;
    // If the client disconnects, this wait ends, and its places are free. A thread that has started encoding keeps its permit
    // and the places until it is done, even then: they bound the memory of prompts.
    let encoder = match texts.count() {
        0 => None,
        _ => Arc::clone(&app.encoders).acquire_owned().await.ok(),
    };
    let reading = (Arc::clone(app), request);
    // Encoding a long prompt takes time, and would block a thread that serves other connections.
    let submitted = tokio::task::spawn_blocking(move || {
        let _encoder = encoder;
        submissions(&reading.0, reading.1).map(|taken| (places, taken))
    });
    let (places, (request, submissions)) = submitted.await.map_err(|error| {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, format!("the prompt: {error}"))
    })??;
    let prompts = submissions.iter().step_by(request.n as usize);
    let prompt_tokens = prompts.map(|submission| submission.prompt.len()).sum();
    let events = app.queue.submit_to(Some(places), submissions)?;
    let style = Arc::new(Style {
        text: Arc::clone(&app.text),
        stops: request.stop,
        end: app.end.clone(),
        logprobs: request.logprobs.is_some(),
    });
    let choices = events.len();
    let pieces = events.into_iter().enumerate();
    let pieces = pieces.map(|(index, events)| pieces_of(index, (&style, &app.queue), events));
    Ok(Taken {
        head: Head::new(&app.model, OsRng.try_next_u64().unwrap_or_default()),
        pieces: pieces.collect(),
        choices,
        prompt_tokens,
        logprobs: style.logprobs,
        stream: request.stream,
        include_usage: request.include_usage,
    })
}

fn pieces_of(
    index: usize,
    (style, queue): (&Arc<Style>, &Arc<Queue>),
    events: Events,
) -> BoxStream<'static, Result<Piece, Failure>> {
    pieces(index, Arc::clone(style), Arc::clone(queue), events).boxed()
}

fn unreadable(rejection: JsonRejection) -> ApiError {
    let status = match rejection.status() {
        StatusCode::UNPROCESSABLE_ENTITY => StatusCode::BAD_REQUEST,
        status => status,
    };
    // The message quotes the body, so it may be long.
    ApiError::new(status, rejection.body_text().chars().take(MOST_MESSAGE).collect::<String>())
}

/// Refuses a text that is certain to have too many tokens, before it is encoded.
fn check_length(app: &App, text: &str, max_tokens: usize) -> Result<(), Refusal> {
    let (bytes, longest) = (text.len(), app.queue.limits().longest);
    let least = app.most_bytes_per_token.map_or(0, |most| bytes.div_ceil(most.max(1)));
    if least.saturating_add(max_tokens) > longest as usize && least > 0 {
        return Err(Refusal::TextTooLong { bytes, least, max_tokens, longest });
    }
    Ok(())
}

/// All completions: `n` of the first prompt, then `n` of the second, and so on.
fn submissions(
    app: &App,
    request: CompletionRequest,
) -> Result<(CompletionRequest, Vec<Submission>), ApiError> {
    let mut submissions = Vec::new();
    for prompt in &request.prompts {
        let prompt = match prompt {
            Prompt::Tokens(tokens) => tokens.clone(),
            Prompt::Text(text) => {
                let refused = |error: dsv4_kv_model::text::TextError| error.to_string();
                let tokens = app.text.encode(text).map_err(refused);
                tokens.map_err(|error| ApiError::invalid("prompt", error))?
            }
        };
        // Checked before it is copied `n` times.
        app.queue.check(&prompt, request.max_tokens)?;
        // Each prompt of a request gets its own random seed, even if prompts are equal, unless the client gives a seed.
        let first_seed = request.seed.unwrap_or_else(random_seed);
        submissions.extend((0..request.n).map(|choice| Submission {
            prompt: prompt.clone(),
            continuation: continuation(app, &request, first_seed.wrapping_add(choice.into())),
            salt: request.cache_salt.clone().into_bytes(),
        }));
    }
    Ok((request, submissions))
}

fn continuation(app: &App, request: &CompletionRequest, seed: u64) -> Continuation {
    let CompletionRequest { temperature, top_p, max_tokens, logprobs, .. } = *request;
    Continuation {
        sampling: Sampling { temperature, top_p, seed },
        max_tokens,
        end: app.end.clone(),
        drafts: app.drafts,
        top_logprobs: logprobs.unwrap_or(0),
        prompt_logits: false,
    }
}

/// Returns all completions in one answer.
async fn whole(mut taken: Taken) -> Result<Response, Failure> {
    let logprobs = taken.logprobs.then(Logprobs::default);
    let choice = |index| AnswerChoice { index, logprobs: logprobs.clone(), ..Default::default() };
    let mut choices: Vec<_> = (0..taken.choices).map(choice).collect();
    let mut generated = 0;
    while let Some(piece) = taken.pieces.next().await {
        let piece = piece?;
        generated += piece.generated;
        choices[piece.index].add(piece);
    }
    let usage = Some(Some(Usage::new(taken.prompt_tokens, generated)));
    Ok(Json(Answer { head: &taken.head, choices, usage }).into_response())
}

impl AnswerChoice {
    fn add(&mut self, piece: Piece) {
        self.text += &piece.text;
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.extend(piece.tokens);
        }
        self.finish_reason = piece.finish.map(finish_reason);
    }
}

/// Sends the completions as server-sent events, each with the new part of one completion.
fn in_pieces(taken: Taken, outcome: Outcome) -> Response {
    let stream = stream::unfold(Streaming::Pieces { taken, outcome, generated: 0 }, next_event);
    Sse::new(stream).keep_alive(KeepAlive::default()).into_response()
}

/// The state of a stream.
enum Streaming {
    Pieces { taken: Taken, outcome: Outcome, generated: usize },
    Done { outcome: Outcome },
    End,
}

async fn next_event(state: Streaming) -> Option<(Result<Event, Infallible>, Streaming)> {
    let (event, next) = match state {
        Streaming::Pieces { mut taken, outcome, mut generated } => {
            match taken.pieces.next().await {
                Some(Ok(piece)) => {
                    generated += piece.generated;
                    let event = taken.event_of(piece);
                    (event, Streaming::Pieces { taken, outcome, generated })
                }
                Some(Err(failure)) => (event(&outcome.failed(failure).body()), Streaming::End),
                None if taken.include_usage => {
                    let usage = Some(Some(Usage::new(taken.prompt_tokens, generated)));
                    let answer = Answer { head: &taken.head, choices: Vec::new(), usage };
                    (event(&answer), Streaming::Done { outcome })
                }
                None => done(outcome),
            }
        }
        Streaming::Done { outcome } => done(outcome),
        Streaming::End => return None,
    };
    Some((Ok(event), next))
}

fn done(outcome: Outcome) -> (Event, Streaming) {
    outcome.completed();
    (Event::default().data("[DONE]"), Streaming::End)
}

impl Taken {
    fn event_of(&self, piece: Piece) -> Event {
        let logprobs = self.logprobs.then(Logprobs::default);
        let mut choice = AnswerChoice { index: piece.index, logprobs, ..Default::default() };
        choice.add(piece);
        let usage = self.include_usage.then_some(None);
        event(&Answer { head: &self.head, choices: vec![choice], usage })
    }
}

fn event(value: &impl Serialize) -> Event {
    Event::default().data(serde_json::to_string(value).expect("keys of the maps are strings"))
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::time::Duration;

    use axum::http::header::CONTENT_TYPE;
    use dsv4_kv_model::text::Text;
    use serde_json::{Value, json};
    use tokio::sync::Semaphore;
    use tokio::time::timeout;

    use super::*;
    use crate::metrics::Metrics;
    use crate::queue::QueueLimits;

    /// So long is waited for an answer that must not come.
    const WAIT: Duration = Duration::from_millis(200);
    /// Longest wait for an answer that must come.
    const LONGEST: Duration = Duration::from_secs(60);

    /// A server without a scheduler, with so many places and permits.
    fn app(waiting: usize, encoders: usize, parsers: usize) -> Arc<App> {
        let limits = QueueLimits { vocabulary: 256, longest: 100, waiting, drafts: 0 };
        Arc::new(App {
            queue: Arc::new(Queue::new(limits)),
            most_bytes_per_token: Some(2),
            encoders: Arc::new(Semaphore::new(encoders)),
            parsers: Semaphore::new(parsers),
            text: Arc::new(Text::Bytes),
            model: "m".into(),
            created: 0,
            end: Vec::new(),
            drafts: 0,
            metrics: Metrics::new().expect("metrics"),
        })
    }

    /// A request with this body.
    fn post(body: impl ToString) -> Request {
        let request = Request::post("/v1/completions").header(CONTENT_TYPE, "application/json");
        request.body(Body::from(body.to_string())).expect("a request")
    }

    fn run<T>(work: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(work)
    }

    /// The answer to a request for ten new tokens while no encoder is free; `None` if there is none within `most`.
    fn answer(app: &Arc<App>, prompt: &Value, most: Duration) -> Option<Result<Taken, ApiError>> {
        let body = json!({ "model": "m", "prompt": prompt, "max_tokens": 10 });
        run(async { timeout(most, take(app, post(body))).await.ok() })
    }

    fn assert_metric(app: &App, line: &str) {
        let text = app.rendered_metrics();
        assert!(text.lines().any(|other| other == line), "no {line} in {text}");
    }

    /// Requests that are too long, or for which the queue has no place, are refused before their text is encoded.
    /// Prompts of token ids need no encoder.
    #[test]
    fn what_is_refused_is_not_encoded() {
        let app = app(1, 0, 1);
        let refused = |prompt: &Value| match answer(&app, prompt, LONGEST) {
            Some(Err(error)) => error.body()["error"].clone(),
            Some(Ok(_)) => panic!("it is taken"),
            None => panic!("it waits for an encoder"),
        };
        let text = |bytes| json!("x".repeat(bytes));
        assert!(answer(&app, &text(180), WAIT).is_none(), "it may fit");
        let error = refused(&text(181));
        let of_tokens = refused(&json!(vec![1; 91]));
        for field in ["type", "param", "code"] {
            assert_eq!(error[field], of_tokens[field]);
        }
        assert_eq!(error["code"], "context_length_exceeded");
        let message = error["message"].as_str().expect("a text");
        assert!(message.contains("181 bytes") && message.contains("91 tokens"), "{message}");
        // One request now occupies the queue's only place.
        let taken = answer(&app, &json!([1]), LONGEST).expect("it needs no encoder");
        let _waits = taken.expect("there is room");
        assert_eq!(refused(&text(2))["code"], "queue_full");
        assert_eq!(refused(&json!([text(2), text(2)]))["param"], "n");
    }

    /// Requests whose texts are not encoded yet are told as waiting, also while the scheduler rests.
    #[test]
    fn who_waits_for_an_encoder_waits() {
        let app = app(4, 0, 1);
        let body = json!({ "model": "m", "prompt": "text", "max_tokens": 1 });
        run(async {
            let mut all: Vec<_> = (0..3).map(|_| Box::pin(take(&app, post(&body)))).collect();
            for waits in &mut all {
                assert!(timeout(WAIT, waits).await.is_err(), "there is no encoder");
            }
            assert_metric(&app, "dsv4_num_requests_waiting 3");
        });
        assert_metric(&app, "dsv4_num_requests_waiting 0");
    }

    /// A body is not parsed while too many others are.
    #[test]
    fn few_bodies_are_parsed_at_once() {
        let app = app(1, 0, 0);
        run(async {
            let mut waits = Box::pin(take(&app, post("{")));
            assert!(timeout(WAIT, &mut waits).await.is_err(), "it was parsed");
            app.parsers.add_permits(1);
            for request in [waits, Box::pin(take(&app, post("{")))] {
                let error = request.await.err().expect("it is no object");
                assert_eq!(error.status, StatusCode::BAD_REQUEST);
            }
        });
    }

    /// An accepted request that ends without its last event has failed, and was not refused: with 500 if the scheduler
    /// has stopped in the middle of its work, else with 503.
    #[test]
    fn who_was_accepted_was_not_refused() {
        for (panicked, status, code) in
            [(true, 500, "server_failed"), (false, 503, "shutting_down")]
        {
            for stream in [false, true] {
                let app = app(1, 0, 1);
                let body = json!({ "model": "m", "prompt": [1], "stream": stream });
                let text = run(async {
                    let mut asked = Box::pin(completions(State(Arc::clone(&app)), post(body)));
                    // The answer is there at once if it is a stream, else once the queue is dropped.
                    let mut early = None;
                    while early.is_none() && app.queue.waiting() == 0 {
                        early = timeout(Duration::from_millis(1), &mut asked).await.ok();
                    }
                    app.queue.set_running(panicked);
                    app.queue.drain();
                    let answer = if let Some(early) = early { early } else { asked.await };
                    assert_eq!(answer.status(), if stream { 200 } else { status });
                    let body = axum::body::to_bytes(answer.into_body(), usize::MAX).await;
                    String::from_utf8(body.expect("a body").to_vec()).expect("text")
                });
                assert!(text.contains(code), "{text}");
                assert_metric(&app, "dsv4_requests_total{outcome=\"failed\"} 1");
                assert_metric(&app, "dsv4_requests_total{outcome=\"refused\"} 0");
            }
        }
    }
}
