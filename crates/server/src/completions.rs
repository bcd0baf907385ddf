//! `POST /v1/completions`, answered at once or as a stream.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use dsv4_kv_model::sample::Sampling;
use dsv4_kv_model::sequence::Continuation;
use futures_util::stream::{BoxStream, StreamExt};
use rand::TryRngCore;
use rand::rngs::OsRng;

use crate::answer::{Head, Usage};
use crate::api_error::ApiError;
use crate::app::App;
use crate::body::read;
use crate::choice::{Piece, Style, pieces};
use crate::echo::Echo;
use crate::error::{Failure, Refusal};
use crate::outcome::Outcome;
use crate::queue::{Events, Submission};
use crate::reply::{Taken, in_pieces, whole};
use crate::request::{CompletionRequest, Prompt, random_seed};

/// Answers a request. If the client disconnects, the answer is dropped, and with it the submitted sequences.
pub async fn completions(State(app): State<Arc<App>>, request: Request) -> Response {
    let outcome = Outcome::new(&app.metrics);
    match take(&app, request).await {
        Ok(taken) if taken.stream => in_pieces(taken, outcome, app.keep_alive),
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
    let (places, Read { request, submissions, echoes }) = submitted.await.map_err(|error| {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, format!("the prompt: {error}"))
    })??;
    let prompts = submissions.iter().step_by(request.n as usize);
    let prompt_tokens = prompts.map(|submission| submission.prompt.len()).sum();
    let events = app.queue.submit_to(places, submissions)?;
    let style = Arc::new(Style {
        text: Arc::clone(&app.text),
        end: end(app, &request),
        logprobs: request.logprobs.is_some(),
        echo: request.echo,
        stops: request.stop,
    });
    let choices = events.len();
    let n = request.n as usize;
    let piece = |(index, events): (usize, Events)| -> BoxStream<'static, Result<Piece, Failure>> {
        let echo = echoes.get(index / n).cloned();
        pieces(index, (Arc::clone(&style), echo), Arc::clone(&app.queue), events).boxed()
    };
    Ok(Taken {
        head: Head::new(&app.model, OsRng.try_next_u64().unwrap_or_default()),
        pieces: events.into_iter().enumerate().map(piece).collect(),
        choices,
        n,
        usage: Usage::new(prompt_tokens),
        logprobs: style.logprobs,
        stream: request.stream,
        stream_usage: request.stream_usage,
    })
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

/// A request whose prompts were read.
struct Read {
    request: CompletionRequest,
    /// All completions: `n` of the first prompt, then `n` of the second, and so on.
    submissions: Vec<Submission>,
    /// The prompts, if they are echoed.
    echoes: Vec<Arc<Echo>>,
}

/// Reads the prompts of a request.
fn submissions(app: &App, mut request: CompletionRequest) -> Result<Read, ApiError> {
    let (mut submissions, mut echoes) = (Vec::new(), Vec::new());
    for prompt in std::mem::take(&mut request.prompts) {
        let (tokens, text) = match prompt {
            Prompt::Tokens(tokens) => (tokens, None),
            Prompt::Text(text) => {
                let refused = |error: dsv4_kv_model::text::TextError| error.to_string();
                let tokens = app.text.encode(&text).map_err(refused);
                (tokens.map_err(|error| ApiError::invalid("prompt", error))?, Some(text))
            }
        };
        // Checked before it is copied `n` times.
        app.queue.check(&tokens, request.max_tokens)?;
        if request.echo {
            echoes.push(Arc::new(match text {
                Some(text) => Echo::of_text(text, &tokens, &app.text),
                None => Echo::of_tokens(&tokens, &app.text),
            }));
        }
        // Each prompt of a request gets its own random seed, even if prompts are equal, unless the client gives a seed.
        let first_seed = request.seed.unwrap_or_else(random_seed);
        submissions.extend((0..request.n).map(|choice| Submission {
            prompt: tokens.clone(),
            continuation: continuation(app, &request, first_seed.wrapping_add(choice.into())),
            salt: request.cache_salt.clone().into_bytes(),
        }));
    }
    Ok(Read { request, submissions, echoes })
}

fn continuation(app: &App, request: &CompletionRequest, seed: u64) -> Continuation {
    let CompletionRequest { temperature, top_p, max_tokens, logprobs, .. } = *request;
    Continuation {
        sampling: Sampling { temperature, top_p, seed },
        max_tokens,
        end: end(app, request),
        drafts: app.drafts,
        top_logprobs: logprobs.unwrap_or(0),
        prompt_logits: request.scores_prompt(),
    }
}

/// The tokens that end the completions of a request.
fn end(app: &App, request: &CompletionRequest) -> Vec<u32> {
    if request.ignore_eos { Vec::new() } else { app.end.clone() }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::time::Duration;

    use axum::body::Body;
    use axum::http::header::CONTENT_TYPE;
    use dsv4_kv_model::text::Text;
    use serde_json::{Value, json};
    use tokio::sync::Semaphore;
    use tokio::time::timeout;

    use super::*;
    use crate::metrics::Metrics;
    use crate::queue::{Queue, QueueLimits};

    /// So long is waited for an answer that must not come.
    const WAIT: Duration = Duration::from_millis(200);
    /// Longest wait for an answer that must come.
    const LONGEST: Duration = Duration::from_secs(60);

    /// A server without a scheduler, with so many places and permits.
    fn app(waiting: usize, encoders: usize, parsers: usize) -> Arc<App> {
        app_with(None, (waiting, encoders, parsers))
    }

    /// As [`app`], with streams that send comments so often.
    fn app_with(
        keep_alive: Option<Duration>,
        (waiting, encoders, parsers): (usize, usize, usize),
    ) -> Arc<App> {
        let limits = QueueLimits { vocabulary: 256, longest: 100, waiting, drafts: 0 };
        Arc::new(App {
            queue: Arc::new(Queue::new(limits)),
            most_bytes_per_token: Some(2),
            encoders: Arc::new(Semaphore::new(encoders)),
            parsers: Arc::new(Semaphore::new(parsers)),
            body_bytes: 4096,
            keep_alive,
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

    /// A stream without events sends nothing, unless comments are asked for: clients of benchmarks fail on them.
    #[test]
    fn a_stream_is_silent_until_it_has_an_event() {
        for keep_alive in [None, Some(Duration::from_secs(20))] {
            let app = app_with(keep_alive, (1, 0, 1));
            let body = json!({ "model": "m", "prompt": [1], "stream": true });
            let sent = run(async {
                let answer = completions(State(app), post(body)).await;
                let mut events = answer.into_body().into_data_stream();
                // From now on time passes at once while there is nothing to do.
                tokio::time::pause();
                timeout(Duration::from_secs(3600), events.next()).await.ok().flatten()
            });
            let sent = sent.map(|sent| sent.expect("no error"));
            assert_eq!(sent.as_deref(), keep_alive.map(|_| &b":\n\n"[..]));
        }
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
