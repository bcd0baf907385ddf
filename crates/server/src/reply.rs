//! The reply to a request that was accepted: whole, or as a stream.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::http::HeaderValue;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, BoxStream, SelectAll, StreamExt};
use serde::Serialize;

use crate::answer::{Answer, AnswerChoice, Head, Logprobs, Usage, finish_reason};
use crate::choice::Piece;
use crate::error::Failure;
use crate::outcome::Outcome;
use crate::request::StreamUsage;

/// A request that was accepted.
pub struct Taken {
    /// The fields that all parts of the reply share.
    pub head: Head,
    /// The pieces of all completions.
    pub pieces: SelectAll<BoxStream<'static, Result<Piece, Failure>>>,
    /// Number of completions.
    pub choices: usize,
    /// Number of completions of each prompt.
    pub n: usize,
    /// The token counts so far.
    pub usage: Usage,
    /// Whether the client gets log probabilities.
    pub logprobs: bool,
    /// Whether it gets a stream.
    pub stream: bool,
    /// Which events of the stream have token counts.
    pub stream_usage: StreamUsage,
}

impl Taken {
    fn count(&mut self, piece: &Piece) {
        // A prompt counts once, with the first of its completions.
        let cached = if piece.index.is_multiple_of(self.n) { piece.cached } else { 0 };
        self.usage.add(piece.generated, cached);
    }

    fn choice(&self, index: usize) -> AnswerChoice {
        let logprobs = self.logprobs.then(Logprobs::default);
        AnswerChoice { index, logprobs, ..Default::default() }
    }

    fn event_of(&mut self, piece: Piece) -> Event {
        self.count(&piece);
        let mut choice = self.choice(piece.index);
        choice.add(piece);
        let usage = match self.stream_usage {
            StreamUsage::Never => None,
            StreamUsage::AtTheEnd => Some(None),
            StreamUsage::InEachEvent => Some(Some(self.usage)),
        };
        event(&Answer { head: &self.head, choices: vec![choice], usage })
    }
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

/// Returns all completions in one answer.
pub async fn whole(mut taken: Taken) -> Result<Response, Failure> {
    let mut choices: Vec<_> = (0..taken.choices).map(|index| taken.choice(index)).collect();
    while let Some(piece) = taken.pieces.next().await {
        let piece = piece?;
        taken.count(&piece);
        choices[piece.index].add(piece);
    }
    let usage = Some(Some(taken.usage));
    Ok(Json(Answer { head: &taken.head, choices, usage }).into_response())
}

/// Sends the completions as server-sent events, each with the new part of one completion. After `keep_alive` without an
/// event it sends a comment, if at all.
pub fn in_pieces(taken: Taken, outcome: Outcome, keep_alive: Option<Duration>) -> Response {
    let events = Sse::new(stream::unfold(Streaming::Pieces { taken, outcome }, next_event));
    let mut response = match keep_alive {
        None => events.into_response(),
        Some(time) => events.keep_alive(KeepAlive::new().interval(time)).into_response(),
    };
    // Otherwise nginx collects events until its buffer is full.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// The state of a stream.
enum Streaming {
    Pieces { taken: Taken, outcome: Outcome },
    Done { outcome: Outcome },
    End,
}

async fn next_event(state: Streaming) -> Option<(Result<Event, Infallible>, Streaming)> {
    let (event, next) = match state {
        Streaming::Pieces { mut taken, outcome } => match taken.pieces.next().await {
            Some(Ok(piece)) => (taken.event_of(piece), Streaming::Pieces { taken, outcome }),
            Some(Err(failure)) => (event(&outcome.failed(failure).body()), Streaming::End),
            None if taken.stream_usage != StreamUsage::Never => {
                let usage = Some(Some(taken.usage));
                let answer = Answer { head: &taken.head, choices: Vec::new(), usage };
                (event(&answer), Streaming::Done { outcome })
            }
            None => done(outcome),
        },
        Streaming::Done { outcome } => done(outcome),
        Streaming::End => return None,
    };
    Some((Ok(event), next))
}

fn done(outcome: Outcome) -> (Event, Streaming) {
    outcome.completed();
    (Event::default().data("[DONE]"), Streaming::End)
}

fn event(value: &impl Serialize) -> Event {
    Event::default().data(serde_json::to_string(value).expect("keys of the maps are strings"))
}
