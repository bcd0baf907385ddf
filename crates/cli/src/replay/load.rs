//! Loads: arrivals and lengths of requests, from a trace or synthetic.
//!
//! The synthetic load resembles one hour of a public conversation trace (Mooncake, FAST'25: 12,031 requests, mean input
//! 12,035 tokens, mean output 343). Arrivals are a Poisson process. Input and output lengths are log-normal,
//! independent of each other, and limited to the longest of the trace. Three of four requests are a turn of a
//! conversation: their prompts begin like one of the last [`REMEMBERED`] prompts, up to the end of the shorter of the
//! two.

use std::collections::VecDeque;

use dsv4_kv_trace::{Arrival, HASH_TOKENS, Prompt};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Exp, LogNormal};

/// Requests per second.
const RATE: f64 = 3.34;
/// Median input tokens. With [`INPUT_SIGMA`] the mean is 12,035.
const INPUT_MEDIAN: f64 = 6000.0;
/// Standard deviation of the logarithm of input tokens.
const INPUT_SIGMA: f64 = 1.18;
/// Longest input, in tokens.
const INPUT_MOST: f64 = 126_195.0;
/// Median output tokens. With [`OUTPUT_SIGMA`] the mean is 344.
const OUTPUT_MEDIAN: f64 = 250.0;
/// Standard deviation of the logarithm of output tokens.
const OUTPUT_SIGMA: f64 = 0.8;
/// Longest output, in tokens.
const OUTPUT_MOST: f64 = 2000.0;
/// Share of requests that continue an earlier one.
const TURNS: f64 = 0.75;
/// Number of last requests that others may continue.
const REMEMBERED: usize = 256;

/// A request of a load.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Arrival time and lengths.
    pub arrival: Arrival,
    /// The prompt, whose ids tell what it has in common with others, before lengths are divided; `None` if nothing is
    /// known.
    pub prompt: Option<Prompt>,
}

/// Tokens of prompts and answers of all requests, as a cache holds them.
pub fn tokens(load: &[Request]) -> u64 {
    load.iter().map(|request| u64::from(request.arrival.context_tokens())).sum()
}

/// The synthetic load: endless, and the same for the same seed.
pub fn synthetic(seed: u64) -> impl Iterator<Item = Request> {
    let mut conversations = Conversations::new(seed);
    arrivals(seed).map(move |arrival| {
        let prompt = Some(conversations.prompt(arrival.input));
        Request { arrival, prompt }
    })
}

/// The prompts of the last requests, which others may continue.
struct Conversations {
    rng: ChaCha8Rng,
    next_id: u64,
    last: VecDeque<Vec<u64>>,
}

impl Conversations {
    fn new(seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        // The first stream of random numbers gives arrivals and lengths.
        rng.set_stream(1);
        Self { rng, next_id: 0, last: VecDeque::new() }
    }

    /// A prompt of `tokens` tokens. Its last id is unique, since it may stand for fewer than 512 tokens.
    fn prompt(&mut self, tokens: u32) -> Prompt {
        let ids = tokens.div_ceil(HASH_TOKENS) as usize;
        let mut hash_ids = Vec::with_capacity(ids);
        if !self.last.is_empty() && self.rng.random_bool(TURNS) {
            let earlier = &self.last[self.rng.random_range(0..self.last.len())];
            hash_ids.extend_from_slice(&earlier[..(earlier.len() - 1).min(ids - 1)]);
        }
        let new = (ids - hash_ids.len()) as u64;
        hash_ids.extend(self.next_id..self.next_id + new);
        self.next_id += new;
        if self.last.len() == REMEMBERED {
            self.last.pop_front();
        }
        self.last.push_back(hash_ids.clone());
        Prompt { tokens, hash_ids }
    }
}

/// Arrival times and lengths of requests.
fn arrivals(seed: u64) -> impl Iterator<Item = Arrival> {
    const VALID: &str = "the constants are finite and positive";
    let gap = Exp::new(RATE / 1e3).expect(VALID);
    let input = LogNormal::new(INPUT_MEDIAN.ln(), INPUT_SIGMA).expect(VALID);
    let output = LogNormal::new(OUTPUT_MEDIAN.ln(), OUTPUT_SIGMA).expect(VALID);
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut at_ms = 0.0;
    std::iter::from_fn(move || {
        at_ms += gap.sample(&mut rng);
        let input = input.sample(&mut rng).clamp(1.0, INPUT_MOST) as u32;
        let output = output.sample(&mut rng).clamp(1.0, OUTPUT_MOST) as u32;
        Some(Arrival { at_ms, input, output })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_synthetic_load_is_distributed_as_documented() {
        let load: Vec<_> = arrivals(7).take(50_000).collect();
        let mean = |of: fn(&Arrival) -> u32| {
            load.iter().map(|arrival| f64::from(of(arrival))).sum::<f64>() / load.len() as f64
        };
        // The limits on lengths reduce the means by about 4 %.
        assert!((11_000.0..12_100.0).contains(&mean(|a| a.input)), "{}", mean(|a| a.input));
        assert!((325.0..350.0).contains(&mean(|a| a.output)), "{}", mean(|a| a.output));
        let seconds = load.last().unwrap().at_ms / 1e3;
        let rate = load.len() as f64 / seconds;
        assert!((3.3..3.4).contains(&rate), "{rate}");
        assert!(load.is_sorted_by_key(|arrival| arrival.at_ms));
    }

    #[test]
    fn the_same_seed_gives_the_same_load_and_another_another() {
        let first = |seed| synthetic(seed).take(8).collect::<Vec<_>>();
        assert_eq!(first(1), first(1));
        assert_ne!(first(1), first(2));
    }

    #[test]
    fn prompts_have_ids_for_their_tokens_and_a_third_of_them_was_there_before() {
        let mut known = std::collections::HashSet::new();
        let (mut all, mut shared) = (0, 0);
        for Request { arrival, prompt } in synthetic(7).take(5000) {
            let Prompt { tokens, hash_ids } = prompt.expect("every request has one");
            assert_eq!(tokens, arrival.input);
            assert_eq!(hash_ids.len(), tokens.div_ceil(HASH_TOKENS) as usize);
            all += hash_ids.len();
            shared += hash_ids.into_iter().filter(|&id| !known.insert(id)).count();
        }
        let share = shared as f64 / all as f64;
        assert!((0.25..0.4).contains(&share), "{share}");
    }
}
