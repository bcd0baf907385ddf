//! Token ids of a load's requests: those of prompts follow from the hash ids of a trace, those of answers from the
//! number of the request.

use dsv4_kv_trace::{HASH_TOKENS, Prompt};

/// Number of different token ids.
const VOCABULARY: u128 = 129_280;
/// Odd numbers whose multiples spread over all 64 bits: 2^64 over the golden ratio, and the first multiplier of
/// SplitMix64.
const SPREAD: [u64; 2] = [0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9];

/// Generates token ids. Equal hash ids at equal indices of two prompts give equal tokens. Tokens of answers, and of
/// prompts without hash ids, are different for every request.
#[derive(Clone, Copy, Debug)]
pub struct Texts {
    /// Tokens per hash id.
    tokens_per_id: f64,
}

impl Texts {
    /// Token ids of a load whose lengths are divided by `shrink`. A hash id then stands for 512 / `shrink` tokens.
    #[must_use]
    pub fn new(shrink: f64) -> Self {
        Self { tokens_per_id: f64::from(HASH_TOKENS) / shrink }
    }

    /// Adds the first `count` tokens of a prompt. If there are too few hash ids, the remaining tokens follow from the
    /// last one.
    pub fn push_prompt(self, tokens: &mut Vec<u32>, prompt: &Prompt, count: u32) {
        let end = tokens.len() + count as usize;
        let mut done = 0;
        for (ids, &id) in (1u32..).zip(&prompt.hash_ids) {
            let up_to = ((f64::from(ids) * self.tokens_per_id).ceil() as u32).min(count);
            let base = mixed(id);
            tokens.extend((0..up_to.saturating_sub(done)).map(|at| token(base, at)));
            done = done.max(up_to);
            if done == count {
                return;
            }
        }
        let base = mixed(prompt.hash_ids.last().map_or(0, |id| !id));
        tokens.extend((0..).take(end - tokens.len()).map(|at| token(base, at)));
    }

    /// The first `count` tokens of a request: those of its prompt, then its own.
    #[must_use]
    pub fn prompt(self, text: u64, prompt: Option<&Prompt>, count: u32) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(count as usize);
        if let Some(prompt) = prompt {
            self.push_prompt(&mut tokens, prompt, count);
        }
        let own = tokens.len() as u32..count;
        tokens.extend(own.map(|at| self.own_token(text, at)));
        tokens
    }

    /// The token at `position` of a text that shares no prefix with any other text.
    #[must_use]
    pub fn own_token(self, text: u64, position: u32) -> u32 {
        token(mixed(mixed(text) ^ SPREAD[1]), position)
    }
}

/// The token at index `at` of the sequence of `base`. Tokens look random.
fn token(base: u64, at: u32) -> u32 {
    let bits = base.wrapping_add(u64::from(at).wrapping_mul(SPREAD[0]));
    let bits = (bits ^ (bits >> 32)).wrapping_mul(SPREAD[1]);
    // The high bits of the product are an id below `VOCABULARY`, all about equally often.
    ((u128::from(bits) * VOCABULARY) >> u64::BITS) as u32
}

/// A hash of a number, unrelated to the hash of the next number: the finaliser of SplitMix64.
pub fn mixed(number: u64) -> u64 {
    let mut bits = number.wrapping_add(SPREAD[0]);
    bits = (bits ^ (bits >> 30)).wrapping_mul(SPREAD[1]);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

/// A hash of the text with hash `before` and one more token. Different texts have different hashes, up to collisions.
pub fn then(before: u64, token: u32) -> u64 {
    mixed(before ^ (u64::from(token) + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(shrink: f64, count: u32, hash_ids: &[u64]) -> Vec<u32> {
        let prompt = Prompt { tokens: count, hash_ids: hash_ids.to_vec() };
        let mut tokens = Vec::new();
        Texts::new(shrink).push_prompt(&mut tokens, &prompt, count);
        tokens
    }

    #[test]
    fn equal_ids_are_equal_tokens_and_the_first_other_id_ends_that() {
        for (shrink, per_id) in [(1.0, 512), (64.0, 8), (0.5, 1024)] {
            let count = 2 * per_id + 3;
            let one = tokens(shrink, count, &[7, 8, 9]);
            assert_eq!(one.len(), count as usize);
            assert_eq!(one, tokens(shrink, count, &[7, 8, 9]));
            let other = tokens(shrink, count, &[7, 8, 10]);
            let equal = one.iter().zip(&other).take_while(|(a, b)| a == b).count();
            assert_eq!(equal, 2 * per_id as usize);
            assert!(one.iter().all(|&token| u128::from(token) < VOCABULARY));
        }
        // If the tokens per id are not a whole number, an id still begins at the same token in every prompt.
        let (short, long) = (tokens(100.0, 8, &[1, 2]), tokens(100.0, 20, &[1, 2, 3, 4]));
        assert_eq!(short, long[..8]);
    }

    #[test]
    fn tokens_of_one_id_and_of_answers_differ() {
        let mut all = tokens(1.0, 512, &[3]);
        let texts = Texts::new(1.0);
        all.extend((0..512).map(|at| texts.own_token(3, at)));
        all.sort_unstable();
        all.dedup();
        assert!(all.len() > 1010, "{} different of 1024", all.len());
    }
}
