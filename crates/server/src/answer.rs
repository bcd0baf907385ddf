//! Answers in OpenAI's format.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::choice::{Reason, TokenInfo};

/// Replaces the logarithm of probability 0, since JSON has no infinities.
const NEVER: f32 = -9999.0;

/// The fields that all answers to one request share.
#[derive(Clone, Debug, Serialize)]
pub struct Head {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
}

impl Head {
    /// The head for a request to `model`; `number` makes the id unique.
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
    /// The fields that all answers to the request share.
    #[serde(flatten)]
    pub head: &'a Head,
    /// The completions, or the new part of one.
    pub choices: Vec<AnswerChoice>,
    /// `None` leaves the field out, `Some(None)` is null.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
}

/// A completion, or its new part.
#[derive(Clone, Debug, Default, Serialize)]
pub struct AnswerChoice {
    /// The text.
    pub text: String,
    /// The number of the completion: first those of the first prompt, then those of the second, and so on.
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
    /// Logarithms of their probabilities. The first token of a prompt has none.
    pub token_logprobs: Vec<Option<f32>>,
    /// The most likely tokens at each place, and the one that was taken.
    pub top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    /// Characters of the text before each token.
    pub text_offset: Vec<usize>,
}

/// Token counts of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Tokens of the prompts; each prompt counts once.
    pub prompt_tokens: usize,
    /// Tokens of the completions.
    pub completion_tokens: usize,
    /// The sum of both.
    pub total_tokens: usize,
    /// More about the prompts.
    pub prompt_tokens_details: PromptTokensDetails,
}

/// More about the tokens of the prompts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    /// Those that were in the cache; of each prompt those that its first completion has found there.
    pub cached_tokens: usize,
}

impl Usage {
    /// The usage of a request with so many tokens in its prompts, before anything is known of its completions.
    #[must_use]
    pub fn new(prompt_tokens: usize) -> Self {
        Self { prompt_tokens, total_tokens: prompt_tokens, ..Self::default() }
    }

    /// Adds tokens of completions, and tokens of prompts that were in the cache.
    pub fn add(&mut self, completion_tokens: usize, cached_tokens: usize) {
        self.completion_tokens += completion_tokens;
        self.total_tokens += completion_tokens;
        self.prompt_tokens_details.cached_tokens += cached_tokens;
    }
}

impl Logprobs {
    /// Appends tokens.
    pub fn extend(&mut self, tokens: Vec<TokenInfo>) {
        let number = |logprob: f32| if logprob.is_finite() { logprob } else { NEVER };
        for TokenInfo { token, logprob, top, offset } in tokens {
            self.tokens.push(token);
            self.token_logprobs.push(logprob.map(number));
            let top = top.into_iter().map(|(token, logprob)| (token, number(logprob)));
            // Without a probability of its own the position has none of others.
            self.top_logprobs.push(logprob.map(|_| top.collect()));
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
