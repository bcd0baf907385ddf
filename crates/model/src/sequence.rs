//! The tokens of one request: which to run next, and which the logits generate.

use ndarray::{ArrayView2, s};

use crate::engine::Logits;
use crate::prompt_lookup;
use crate::sample::{Picked, Sampling, top_logprobs};

/// How a request is continued.
#[derive(Clone, Debug, PartialEq)]
pub struct Continuation {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// Tokens that end the request; they are generated too.
    pub end: Vec<u32>,
    /// Most drafts of a step, found by prompt lookup. The generated tokens are the same with and without drafts.
    pub drafts: usize,
    /// Number of most likely tokens that are reported with each generated token.
    pub top_logprobs: usize,
    /// Whether logits are also computed for every token of the prompt, as [`Sequence::score`] needs them.
    pub prompt_logits: bool,
}

/// A token that was generated, or one of the prompt with the probability that the model gives it.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// The token and its log probability.
    pub picked: Picked,
    /// The most likely tokens at its position.
    pub top: Vec<Picked>,
}

/// Why a request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// It has generated [`Continuation::max_tokens`] tokens.
    Length,
    /// It has generated a token that ends it.
    End,
}

/// The tokens of a request: prompt and generated tokens, and how many of them are in the cache.
#[derive(Clone, Debug)]
pub struct Sequence {
    tokens: Vec<u32>,
    prompt: usize,
    cached: usize,
    /// Number of tokens of the prompt that need no score any more: the first, and those that [`Self::score`] has
    /// returned.
    scored: usize,
    continuation: Continuation,
    finish: Option<Finish>,
}

/// The part of a request in the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Work {
    /// The tokens, drafts last.
    pub tokens: Vec<u32>,
    /// The tokens whose logits are needed.
    pub logits: Logits,
    /// Number of drafts among the tokens.
    pub drafts: usize,
}

impl Work {
    /// Number of drafts that were also generated. A draft that ends the request is one of them, although it does not
    /// become final.
    pub(crate) fn accepted_drafts(&self, generated: &[Generated]) -> usize {
        let drafts = &self.tokens[self.tokens.len() - self.drafts..];
        let pairs = drafts.iter().zip(generated);
        pairs.take_while(|(draft, generated)| **draft == generated.picked.token).count()
    }
}

impl Sequence {
    /// A request with this prompt; `None` if the prompt is empty.
    #[must_use]
    pub fn new(prompt: Vec<u32>, continuation: Continuation) -> Option<Self> {
        if prompt.is_empty() {
            return None;
        }
        // Logits of the prompt are computed also where nothing is generated.
        let is_done = continuation.max_tokens == 0 && !continuation.prompt_logits;
        let finish = is_done.then_some(Finish::Length);
        Some(Self {
            prompt: prompt.len(),
            tokens: prompt,
            cached: 0,
            // The first token has no logits before it.
            scored: 1,
            continuation,
            finish,
        })
    }

    /// Its part of the next step, at most `budget` tokens: a chunk of the tokens that are not in the cache yet, or its
    /// last token and drafts.
    #[must_use]
    pub fn next(&self, budget: usize) -> Work {
        let left = &self.tokens[self.cached..];
        if left.len() > 1 || budget <= 1 {
            let chunk = left.len().min(budget);
            let logits = match chunk == left.len() {
                _ if self.continuation.prompt_logits => Logits::All,
                true => Logits::Last,
                false => Logits::None,
            };
            return Work { tokens: left[..chunk].to_vec(), logits, drafts: 0 };
        }
        // A draft after the last token to be generated would be of no use.
        let wanted = self.continuation.max_tokens.saturating_sub(self.generated().len() + 1);
        let most = self.continuation.drafts.min(budget - 1).min(wanted);
        let drafts = prompt_lookup::drafts(&self.tokens, most);
        let tokens = [left, drafts].concat();
        Work { tokens, logits: Logits::All, drafts: drafts.len() }
    }

    /// The tokens of the prompt whose probabilities are in the logits of `work`, `[tokens asked for, vocabulary]`, with
    /// the most likely tokens at their positions. Each token but the first, which has no probability, is returned once,
    /// in order, also if the request is computed again. Call it before [`Self::advance`]. Empty without
    /// [`Continuation::prompt_logits`].
    ///
    /// # Panics
    /// As [`Self::advance`].
    pub fn score(&mut self, work: &Work, logits: ArrayView2<'_, f32>) -> Vec<Generated> {
        if !self.continuation.prompt_logits {
            return Vec::new();
        }
        // The row of a token has the probabilities of its successor.
        let end = self.prompt.min(self.cached + work.tokens.len() + 1);
        let scored = self.scored.min(end)..end;
        self.scored = self.scored.max(end);
        let first = self.cached + 1;
        let score = |at: usize| {
            let logits = logits.row(at - first);
            let picked = Picked::of(logits, self.tokens[at]);
            Generated { picked, top: top_logprobs(logits, self.continuation.top_logprobs) }
        };
        scored.map(score).collect()
    }

    /// Takes the logits of `work`, `[tokens asked for, vocabulary]`. Returns how many tokens of `work` are final, and
    /// the generated tokens. A draft is final if it was also generated.
    ///
    /// # Panics
    /// If `work` is not the last result of [`Self::next`], or if `logits` has fewer rows than it asked for.
    pub fn advance(&mut self, work: &Work, logits: ArrayView2<'_, f32>) -> (u32, Vec<Generated>) {
        let undrafted = work.tokens.len() - work.drafts;
        let mut final_tokens = undrafted;
        let mut generated = Vec::new();
        // Logits of tokens whose successor is known generate nothing; only the caller uses them.
        let is_last_chunk = self.cached + undrafted == self.tokens.len();
        let generates = is_last_chunk && self.continuation.max_tokens > 0;
        let deciding = if generates { work.drafts + 1 } else { 0 };
        let decided = logits.slice(s![logits.nrows() - deciding.., ..]);
        for (row, logits) in decided.outer_iter().enumerate() {
            let Continuation { sampling, max_tokens, end, top_logprobs: top, .. } =
                &self.continuation;
            let picked = sampling.pick(logits, self.tokens.len() as u32);
            generated.push(Generated { picked, top: top_logprobs(logits, *top) });
            self.tokens.push(picked.token);
            if end.contains(&picked.token) {
                self.finish = Some(Finish::End);
            } else if self.tokens.len() - self.prompt >= *max_tokens {
                self.finish = Some(Finish::Length);
            }
            let draft = work.tokens.get(undrafted + row);
            if self.finish.is_some() || draft != Some(&picked.token) {
                break;
            }
            final_tokens += 1;
        }
        self.cached += final_tokens;
        if is_last_chunk && !generates {
            self.finish = Some(Finish::Length);
        }
        (final_tokens as u32, generated)
    }

    /// Marks the first `tokens` tokens as cached, because other requests have computed them. Their logits are not
    /// computed, so do not call it for a request with [`Continuation::prompt_logits`].
    pub fn reuse(&mut self, tokens: usize) {
        self.cached = tokens.min(self.tokens.len() - 1);
    }

    /// Whether it may reuse tokens that other requests have computed.
    #[must_use]
    pub fn may_reuse(&self) -> bool {
        !self.continuation.prompt_logits
    }

    /// Marks no tokens as cached: the request was released from the cache, and will be computed again.
    pub fn restart(&mut self) {
        self.cached = 0;
    }

    /// Prompt and generated tokens.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The generated tokens, after the prompt.
    #[must_use]
    pub fn generated(&self) -> &[u32] {
        &self.tokens[self.prompt..]
    }

    /// Number of its tokens that are in the cache.
    #[must_use]
    pub fn cached(&self) -> usize {
        self.cached
    }

    /// Whether it has ended, and why.
    #[must_use]
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array2;

    use super::*;
    use crate::sample::GREEDY;

    /// Prompt lookup proposes tokens 2 and 1 after the prompt 1, 2, 1. Returns how many tokens become final, and how
    /// many drafts were accepted, if the model generates these tokens.
    fn verified(end: u32, tokens: [u32; 3]) -> (u32, usize) {
        let continuation = Continuation {
            sampling: GREEDY,
            max_tokens: 8,
            end: vec![end],
            drafts: 2,
            top_logprobs: 0,
            prompt_logits: false,
        };
        let mut sequence = Sequence::new(vec![1, 2, 1], continuation).expect("a prompt");
        sequence.reuse(2);
        let work = sequence.next(8);
        assert_eq!((&work.tokens[..], work.drafts), (&[1, 2, 1][..], 2));
        let is_next = |(row, token): (usize, usize)| tokens[row] as usize == token;
        let logits = Array2::from_shape_fn((3, 8), |at| f32::from(u8::from(is_next(at))));
        let (count, generated) = sequence.advance(&work, logits.view());
        (count, work.accepted_drafts(&generated))
    }

    /// A request that was restarted in the middle of its prompt scores the rest, and no token twice.
    #[test]
    fn each_token_of_the_prompt_is_scored_once() {
        let prompt = vec![1, 2, 1, 3, 4];
        let continuation = Continuation {
            sampling: GREEDY,
            max_tokens: 1,
            end: Vec::new(),
            drafts: 0,
            top_logprobs: 1,
            prompt_logits: true,
        };
        let rows = Array2::from_shape_fn((5, 8), |(row, token)| (row * token % 5) as f32);
        let mut sequence = Sequence::new(prompt.clone(), continuation.clone()).expect("a prompt");
        let mut scored = Vec::new();
        for (tokens, restarts) in [(2, false), (1, true), (1, false), (3, false), (1, false)] {
            let work = sequence.next(tokens);
            let from = sequence.cached();
            let logits = rows.slice(s![from..from + work.tokens.len(), ..]);
            scored.extend(sequence.score(&work, logits));
            sequence.advance(&work, logits);
            if restarts {
                sequence.restart();
            }
        }
        assert_eq!(sequence.finish(), Some(Finish::Length));
        let expected = (1..prompt.len()).map(|at| {
            let logits = rows.row(at - 1);
            Generated { picked: Picked::of(logits, prompt[at]), top: top_logprobs(logits, 1) }
        });
        assert_eq!(scored, Vec::from_iter(expected));
        let without = Continuation { prompt_logits: false, ..continuation };
        let mut sequence = Sequence::new(prompt, without).expect("a prompt");
        let work = sequence.next(2);
        assert!(sequence.score(&work, rows.slice(s![..0, ..])).is_empty());
    }

    /// A draft that ends the request does not become final, but was accepted.
    #[test]
    fn drafts_are_accepted_if_they_are_generated() {
        assert_eq!(verified(7, [3, 1, 4]), (1, 0));
        assert_eq!(verified(7, [2, 3, 4]), (2, 1));
        assert_eq!(verified(7, [2, 1, 4]), (3, 2));
        assert_eq!(verified(1, [2, 1, 4]), (2, 2));
        assert_eq!(verified(2, [2, 1, 4]), (1, 1));
        assert_eq!(verified(3, [3, 1, 4]), (1, 0));
    }
}
