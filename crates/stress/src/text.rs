//! The texts of requests where prefixes are shared: tokens of a small alphabet, written as runs.

use std::ops::Range;

use dsv4_kv::Prompt;
use serde::{Deserialize, Serialize};

/// Tokens per block.
pub const BLOCK: u32 = 128;

/// A prompt with a salt, and its answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Text {
    /// The salt.
    pub salt: u8,
    /// The prompt as runs: token ids, and how often each is repeated.
    pub runs: Vec<(u32, u32)>,
    /// The token that follows the prompt, repeated without end.
    pub answer: u32,
}

/// The first tokens of a text, with its salt. Two prefixes are equal if the salts and all tokens are.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Prefix {
    salt: u8,
    runs: Vec<(u32, u32)>,
}

impl Prefix {
    /// A prefix of these tokens.
    #[must_use]
    pub fn of(salt: u8, tokens: &[u32]) -> Self {
        let mut prefix = Self { salt, runs: Vec::new() };
        prefix.go_on(tokens);
        prefix
    }

    /// Appends tokens.
    pub fn go_on(&mut self, tokens: &[u32]) {
        tokens.iter().for_each(|&token| self.go_on_with(token, 1));
    }

    /// Appends `count` times the same token.
    fn go_on_with(&mut self, token: u32, count: u32) {
        match self.runs.last_mut() {
            Some((last, sum)) if *last == token => *sum += count,
            _ if count > 0 => self.runs.push((token, count)),
            _ => {}
        }
    }

    /// Its salt.
    #[must_use]
    pub fn salt(&self) -> u8 {
        self.salt
    }

    /// Token ids, and how often each is repeated.
    #[must_use]
    pub fn runs(&self) -> &[(u32, u32)] {
        &self.runs
    }

    /// Number of tokens.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        self.runs.iter().map(|&(_, count)| count).sum()
    }
}

/// The salt of requests that share no prefixes.
const UNSHARED: u8 = u8::MAX;
/// Number of different texts of requests that share no prefixes.
const STORIES: u32 = 5;

impl Text {
    /// The text of a request that shares no prefixes, by its name.
    #[must_use]
    pub fn unshared(name: u32) -> Self {
        Self { salt: UNSHARED, runs: Vec::new(), answer: 10 + name % STORIES }
    }

    /// Number of tokens of the prompt.
    #[must_use]
    pub fn prompt_tokens(&self) -> u32 {
        self.runs.iter().fold(0, |sum, &(_, count)| sum.saturating_add(count))
    }

    /// The first `tokens` tokens, of the prompt and then of the answer.
    #[must_use]
    pub fn prefix(&self, tokens: u32) -> Prefix {
        let mut prefix = Prefix::of(self.salt, &[]);
        let mut left = tokens;
        for &(token, count) in self.runs.iter().chain([&(self.answer, u32::MAX)]) {
            let count = count.min(left);
            left -= count;
            prefix.go_on_with(token, count);
        }
        prefix
    }

    /// The first `blocks` blocks.
    #[must_use]
    pub fn blocks(&self, blocks: u32) -> Prefix {
        self.prefix(blocks * BLOCK)
    }

    /// Token ids at these positions.
    #[must_use]
    pub fn tokens(&self, positions: Range<u32>) -> Vec<u32> {
        let all = self.runs.iter().flat_map(|&(token, count)| (0..count).map(move |_| token));
        let all = all.chain(std::iter::repeat(self.answer));
        all.skip(positions.start as usize).take(positions.len()).collect()
    }

    /// A text with the same first tokens, and then another answer.
    #[must_use]
    pub fn continued(&self, tokens: u32, answer: u32) -> Self {
        Self { salt: self.salt, runs: self.prefix(tokens).runs, answer }
    }

    /// The prompt in the form that a cache takes. `tokens` and `salt` are its contents.
    #[must_use]
    pub fn prompt<'p>(tokens: &'p [u32], salt: &'p [u8]) -> Prompt<'p> {
        Prompt { tokens, salt, adapter: b"" }
    }
}
