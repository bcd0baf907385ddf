//! Samples the next token from logits.

use ndarray::ArrayView1;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits. 0 means greedy sampling: the most likely token.
    pub temperature: f32,
    /// Nucleus sampling: samples only from the most likely tokens whose probabilities add up to this; 1 for all.
    pub top_p: f32,
    /// Together with the position, the seed of a token's random draw. The draw does not depend on earlier draws, so
    /// that drafts and recomputed requests give the same tokens.
    pub seed: u64,
}

/// Greedy sampling: always the most likely token.
pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_p: 1.0, seed: 0 };

/// A token that was chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Picked {
    /// The token.
    pub token: u32,
    /// The logarithm of its probability under the unscaled logits (temperature 1).
    pub logprob: f32,
}

impl Picked {
    /// This token, with its probability under `logits`, `[vocabulary]`.
    ///
    /// # Panics
    /// If the token is outside the vocabulary.
    #[must_use]
    pub fn of(logits: ArrayView1<'_, f32>, token: u32) -> Self {
        Self { token, logprob: logprob(logits, token, normaliser(logits)) }
    }
}

impl Sampling {
    /// Chooses the token at `position` from the logits of the token before it, `[vocabulary]`. Of equal logits the
    /// lower token id comes first. A NaN is chosen only if all logits are NaN or -infinity.
    ///
    /// # Panics
    /// If there are no logits.
    #[must_use]
    pub fn pick(&self, logits: ArrayView1<'_, f32>, position: u32) -> Picked {
        let token = if self.temperature > 0.0 {
            self.draw(logits, position)
        } else {
            first_of_the_largest(logits)
        };
        Picked::of(logits, token)
    }

    fn draw(&self, logits: ArrayView1<'_, f32>, position: u32) -> u32 {
        let most = maximum(logits);
        let weight =
            |token: u32| exponential(difference(logits[token as usize], most) / self.temperature);
        let all: f64 = (0..logits.len() as u32).map(weight).sum();
        let mut kept = Vec::new();
        let mut sum = 0.0;
        for token in most_likely(logits) {
            kept.push(token);
            sum += weight(token);
            if sum >= all * f64::from(self.top_p) {
                break;
            }
        }
        let mut left = random(self.seed, position).random::<f64>() * sum;
        for &token in &kept {
            left -= weight(token);
            if left < 0.0 {
                return token;
            }
        }
        kept[0]
    }
}

/// The random generator for a seed and a position. Both are its key, so that different pairs give unrelated generators.
fn random(seed: u64, position: u32) -> StdRng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..12].copy_from_slice(&position.to_le_bytes());
    StdRng::from_seed(key)
}

/// The sort key of a logit: NaN counts as -infinity, and -0 as 0.
fn order(logit: f32) -> f32 {
    if logit.is_nan() { f32::NEG_INFINITY } else { logit + 0.0 }
}

/// The most likely token; of several, the one with the lowest id.
fn first_of_the_largest(logits: ArrayView1<'_, f32>) -> u32 {
    let tokens = (0..logits.len() as u32).rev();
    let key = |token: &u32| order(logits[*token as usize]);
    // Reversed above, since `max_by` returns the last of equal elements.
    tokens.max_by(|a, b| key(a).total_cmp(&key(b))).expect("a vocabulary")
}

/// Tokens, most likely first.
fn most_likely(logits: ArrayView1<'_, f32>) -> impl Iterator<Item = u32> {
    let key = |token: &u32| order(logits[*token as usize]);
    let mut tokens: Vec<u32> = (0..logits.len() as u32).collect();
    tokens.sort_by(|a, b| key(b).total_cmp(&key(a)));
    tokens.into_iter()
}

/// The `count` most likely tokens with the logarithms of their probabilities, most likely first.
#[must_use]
pub fn top_logprobs(logits: ArrayView1<'_, f32>, count: usize) -> Vec<Picked> {
    if count == 0 {
        return Vec::new();
    }
    let key = |token: &u32| order(logits[*token as usize]);
    // No two tokens are equal, so the list is that of `most_likely`.
    let compare = |a: &u32, b: &u32| key(b).total_cmp(&key(a)).then(a.cmp(b));
    let mut tokens: Vec<u32> = (0..logits.len() as u32).collect();
    if count < tokens.len() {
        tokens.select_nth_unstable_by(count, compare);
        tokens.truncate(count);
    }
    tokens.sort_unstable_by(compare);
    let normaliser = normaliser(logits);
    let picked = |token| Picked { token, logprob: logprob(logits, token, normaliser) };
    tokens.into_iter().map(picked).collect()
}

fn maximum(logits: ArrayView1<'_, f32>) -> f32 {
    logits.fold(f32::NEG_INFINITY, |most, &logit| most.max(logit))
}

/// A term of the softmax; 0 for NaN, which is never sampled.
fn exponential(logit: f32) -> f64 {
    if logit.is_nan() { 0.0 } else { f64::from(logit).exp() }
}

/// A logit minus the largest; 0 for the largest itself, also if it is infinite.
fn difference(logit: f32, most: f32) -> f32 {
    if logit == most { 0.0 } else { logit - most }
}

/// The largest logit, and the logarithm of the sum of the terms of the softmax.
fn normaliser(logits: ArrayView1<'_, f32>) -> (f32, f64) {
    let most = maximum(logits);
    let sum: f64 = logits.iter().map(|&logit| exponential(difference(logit, most))).sum();
    (most, sum.ln())
}

fn logprob(logits: ArrayView1<'_, f32>, token: u32, (most, log_sum): (f32, f64)) -> f32 {
    (f64::from(difference(logits[token as usize], most)) - log_sum) as f32
}

#[cfg(test)]
mod tests {
    use std::array;

    use ndarray::{arr1, array};
    use rand::Rng;

    use super::{GREEDY, Picked, Sampling, most_likely, random, top_logprobs};

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        let logits = array![0.5, f32::NAN, 2.0, 2.0];
        let picked = GREEDY.pick(logits.view(), 7);
        assert_eq!(picked.token, 2);
        let sum = (0.5f32 - 2.0).exp() + 2.0;
        assert!((picked.logprob + sum.ln()).abs() < 1e-6, "{picked:?}: the others' softmax");
    }

    /// The largest logit is infinite, or all are -infinity: the tokens that have it share the probability.
    #[test]
    fn infinite_logits_have_probabilities() {
        let (most, least) = (f32::INFINITY, f32::NEG_INFINITY);
        let half = -std::f32::consts::LN_2;
        for temperature in [0.0, 1.0] {
            let sampling = Sampling { temperature, ..GREEDY };
            let pick = |logits: [f32; 2]| sampling.pick(arr1(&logits).view(), 0);
            assert_eq!(pick([most, 0.0]), Picked { token: 0, logprob: 0.0 });
            assert_eq!(pick([0.0, most]), Picked { token: 1, logprob: 0.0 });
            assert_eq!([pick([most; 2]).logprob, pick([least; 2]).logprob], [half; 2]);
        }
        let [first, second] = shares(&[most; 2], 1.0, 1.0);
        assert!((first - second).abs() < 0.03, "{first} and {second}");
    }

    #[test]
    fn a_draw_depends_on_seed_and_position_alone() {
        let logits = array![0.0, 0.0, 0.0, 0.0];
        let draw = |seed, position| {
            Sampling { temperature: 1.0, top_p: 1.0, seed }.pick(logits.view(), position).token
        };
        assert_eq!(draw(1, 5), draw(1, 5));
        let drawn = |seed| (0..64).map(|position| draw(seed, position)).collect::<Vec<_>>();
        assert_ne!(drawn(1), drawn(2));
        for token in 0..4 {
            assert!(drawn(1).contains(&token), "token {token} is never drawn");
        }
        // Pairs of seed and position with both swapped, and pairs of equal numbers.
        let numbers = |pairs: [(u64, u32); 64]| {
            pairs.map(|(seed, position)| random(seed, position).random::<u64>())
        };
        let at = |i: usize| (i as u64 + 100, i as u32);
        let there = numbers(array::from_fn(at));
        let back = numbers(array::from_fn(|i| (u64::from(at(i).1), at(i).0 as u32)));
        let same = numbers(array::from_fn(|i| (i as u64, i as u32)));
        // Seeds that differ above their 32nd bit.
        let high = numbers(array::from_fn(|i| ((i as u64 + 1) << 32, 7)));
        let mut all: Vec<_> = [there, back, same, high].concat();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 256);
    }

    #[test]
    fn draws_have_the_probabilities_of_the_softmax() {
        let logits = array![1.0f32, 3.0f32.ln(), 0.0];
        let total = 1f32.exp() + 3.0 + 1.0;
        let sampling = |seed| Sampling { temperature: 1.0, top_p: 1.0, seed };
        let draws = 20_000;
        let count = (0..draws).filter(|&p| sampling(3).pick(logits.view(), p).token == 1).count();
        let (share, expected) = (count as f32 / draws as f32, 3.0 / total);
        assert!((share - expected).abs() < 0.015, "{share} instead of {expected}");
        let logprob = sampling(3).pick(logits.view(), 0);
        let expected = (logits[logprob.token as usize].exp() / total).ln();
        assert!((logprob.logprob - expected).abs() < 1e-6);
    }

    /// Shares of 20,000 draws.
    fn shares<const N: usize>(logits: &[f32; N], temperature: f32, top_p: f32) -> [f32; N] {
        let (logits, sampling) = (arr1(logits), Sampling { temperature, top_p, seed: 5 });
        let mut counts = [0.0; N];
        (0..20_000).for_each(|at| counts[sampling.pick(logits.view(), at).token as usize] += 1.0);
        counts.map(|count| count / 20_000.0)
    }

    #[test]
    fn logits_are_divided_by_the_temperature() {
        let odds = [8.0_f32, 4.0, 2.0, 1.0];
        for temperature in [0.5, 2.0] {
            let weights = odds.map(|odds| odds.powf(1.0 / temperature));
            let total: f32 = weights.iter().sum();
            let found = shares(&odds.map(f32::ln), temperature, 1.0);
            for (found, weight) in found.into_iter().zip(weights) {
                assert!((found - weight / total).abs() < 0.015, "{temperature}: {found}");
            }
        }
    }

    /// The nucleus is the fewest tokens that have `top_p` together, after the temperature.
    #[test]
    fn the_nucleus_has_the_token_that_reaches_top_p() {
        // Probabilities 8/15, 4/15, 2/15 and 1/15; at temperature 2 about 0.39, 0.28, 0.20 and 0.14.
        let logits = [8.0_f32, 4.0, 2.0, 1.0].map(f32::ln);
        let drawn = |temperature, top_p| shares(&logits, temperature, top_p).map(|of| of > 0.0);
        assert_eq!(drawn(1.0, 0.5), [true, false, false, false]);
        assert_eq!(drawn(1.0, 0.7), [true, true, false, false]);
        assert_eq!(drawn(1.0, 0.85), [true, true, true, false]);
        assert_eq!(drawn(2.0, 0.7), [true, true, true, false]);
        let [first, second, ..] = shares(&logits, 1.0, 0.7);
        assert!((first - 2.0 * second).abs() < 0.03, "{first} and {second}: the odds stay");
    }

    /// Also of equal logits, zeros of both signs and NaNs.
    #[test]
    fn the_top_tokens_are_the_first_of_all_in_order() {
        let (nan, least) = (f32::NAN, f32::NEG_INFINITY);
        let logits = array![0.0, nan, 2.0, -0.0, least, 2.0, 1.0, 0.0, -nan, 2.0];
        let all: Vec<_> =
            most_likely(logits.view()).map(|token| Picked::of(logits.view(), token)).collect();
        for count in 0..=12 {
            let (top, expected) = (top_logprobs(logits.view(), count), &all[..count.min(10)]);
            assert_eq!(format!("{top:?}"), format!("{expected:?}"));
        }
    }

    #[test]
    fn top_p_keeps_the_most_likely() {
        let logits = array![0.0, 5.0, 0.0];
        let sampling = Sampling { temperature: 1.0, top_p: 0.5, seed: 9 };
        assert!((0..200).all(|position| sampling.pick(logits.view(), position).token == 1));
        assert_eq!(
            top_logprobs(logits.view(), 2).iter().map(|p| p.token).collect::<Vec<_>>(),
            [1, 0]
        );
    }
}
