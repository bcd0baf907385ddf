//! What requests say where prefixes are shared: tokens of a small alphabet, written as runs.

use std::ops::Range;

use dsv4_kv::Prompt;
use serde::{Deserialize, Serialize};

/// Tokens of a block.
pub const BLOCK: u32 = 128;

/// A prompt under a salt, and what is answered to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Text {
    /// The salt.
    pub salt: u8,
    /// The prompt: token ids, each with how often it comes.
    pub runs: Vec<(u32, u32)>,
    /// The token that comes behind the prompt, again and again.
    pub answer: u32,
}

/// The first tokens of a text, under its salt. Two are equal if all of their tokens are.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Prefix {
    salt: u8,
    runs: Vec<(u32, u32)>,
}

impl Prefix {
    /// These tokens.
    #[must_use]
    pub fn of(salt: u8, tokens: &[u32]) -> Self {
        let mut prefix = Self { salt, runs: Vec::new() };
        prefix.go_on(tokens);
        prefix
    }

    /// More tokens.
    pub fn go_on(&mut self, tokens: &[u32]) {
        tokens.iter().for_each(|&token| self.go_on_with(token, 1));
    }

    /// The same token so many times more.
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

    /// Token ids, each with how often it comes.
    #[must_use]
    pub fn runs(&self) -> &[(u32, u32)] {
        &self.runs
    }

    /// Its tokens.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        self.runs.iter().map(|&(_, count)| count).sum()
    }
}

/// The salt of requests that share nothing.
const UNSHARED: u8 = u8::MAX;
/// What requests that share nothing say: so many different things.
const STORIES: u32 = 5;

impl Text {
    /// What a request says that shares nothing, by its name.
    #[must_use]
    pub fn unshared(name: u32) -> Self {
        Self { salt: UNSHARED, runs: Vec::new(), answer: 10 + name % STORIES }
    }

    /// Tokens of the prompt.
    #[must_use]
    pub fn prompt_tokens(&self) -> u32 {
        self.runs.iter().fold(0, |sum, &(_, count)| sum.saturating_add(count))
    }

    /// The first `tokens` tokens.
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

    /// Token ids of some positions.
    #[must_use]
    pub fn tokens(&self, positions: Range<u32>) -> Vec<u32> {
        let all = self.runs.iter().flat_map(|&(token, count)| (0..count).map(move |_| token));
        let all = all.chain(std::iter::repeat(self.answer));
        all.skip(positions.start as usize).take(positions.len()).collect()
    }

    /// The same first tokens, then another answer.
    #[must_use]
    pub fn continued(&self, tokens: u32, answer: u32) -> Self {
        Self { salt: self.salt, runs: self.prefix(tokens).runs, answer }
    }

    /// The prompt, as a cache is told of it; `tokens` and `salt` hold it.
    #[must_use]
    pub fn prompt<'p>(tokens: &'p [u32], salt: &'p [u8]) -> Prompt<'p> {
        Prompt { tokens, salt, adapter: b"" }
    }
}
