//! Answers as OpenAI's clients read them.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::choice::{Reason, TokenInfo};

/// What stands for the logarithm of a probability of 0, which JSON has no number for.
const NEVER: f32 = -9999.0;

/// What all answers to one request have in common.
#[derive(Clone, Debug, Serialize)]
pub struct Head {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
}

impl Head {
    /// Of a request to `model`; `number` makes the id one of its own.
    #[must_use]
    pub fn new(model: &str, number: u64) -> Self {
        Self {
            id: format!("cmpl-{number:016x}"),
            object: "text_completion",
            created: unix_time(),
            model: model.into(),
        }
    }
}

/// Seconds since 1970.
#[must_use]
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |passed| passed.as_secs())
}

/// An answer, or a piece of one.
#[derive(Clone, Debug, Serialize)]
pub struct Answer<'a> {
    /// Whose it is.
    #[serde(flatten)]
    pub head: &'a Head,
    /// The completions, or what is new of one.
    pub choices: Vec<AnswerChoice>,
    /// `None` leaves the field out, `Some(None)` is null.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
}

/// A completion, or what is new of it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct AnswerChoice {
    /// The text.
    pub text: String,
    /// Which completion: those of the first prompt, then those of the second.
    pub index: usize,
    /// The tokens with their probabilities, if they were asked for.
    pub logprobs: Option<Logprobs>,
    /// Set at the end.
    pub finish_reason: Option<&'static str>,
}

/// Tokens with their probabilities.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Logprobs {
    /// Texts of the tokens.
    pub tokens: Vec<String>,
    /// Logarithms of their probabilities.
    pub token_logprobs: Vec<f32>,
    /// The most likely tokens at each place, and the one that was taken.
    pub top_logprobs: Vec<BTreeMap<String, f32>>,
    /// Characters of the completion before each token.
    pub text_offset: Vec<usize>,
}

/// How many tokens there were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Of the prompts, each counted once.
    pub prompt_tokens: usize,
    /// Of the completions.
    pub completion_tokens: usize,
    /// Of both.
    pub total_tokens: usize,
}

impl Usage {
    /// Of so many tokens.
    #[must_use]
    pub fn new(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Self { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens }
    }
}

impl Logprobs {
    /// Appends tokens.
    pub fn extend(&mut self, tokens: Vec<TokenInfo>) {
        let number = |logprob: f32| if logprob.is_finite() { logprob } else { NEVER };
        for TokenInfo { token, logprob, top, offset } in tokens {
            self.tokens.push(token);
            self.token_logprobs.push(number(logprob));
            let top = top.into_iter().map(|(token, logprob)| (token, number(logprob)));
            self.top_logprobs.push(top.collect());
            self.text_offset.push(offset);
        }
    }
}

/// The reason as OpenAI names it.
#[must_use]
pub fn finish_reason(reason: Reason) -> &'static str {
    match reason {
        Reason::Stop => "stop",
        Reason::Length => "length",
    }
}
