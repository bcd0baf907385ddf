//! Loads: what arrives when, from a trace or made up.
//!
//! The synthetic load resembles one hour of a public conversation trace (Mooncake, FAST'25:
//! 12,031 requests, mean input 12,035 tokens, mean output 343): arrivals are a Poisson process,
//! input and output lengths are log-normal, independent of each other, and cut off at the longest
//! of the trace. It has no shared prefixes.

use dsv4_kv_cli::trace::Arrival;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Exp, LogNormal};

/// Requests a second.
const RATE: f64 = 3.34;
/// Median input tokens; with [`INPUT_SIGMA`] the mean is 12,035.
const INPUT_MEDIAN: f64 = 6000.0;
/// Standard deviation of the logarithm of input tokens.
const INPUT_SIGMA: f64 = 1.18;
/// Longest input, in tokens.
const INPUT_MOST: f64 = 126_195.0;
/// Median output tokens; with [`OUTPUT_SIGMA`] the mean is 344.
const OUTPUT_MEDIAN: f64 = 250.0;
/// Standard deviation of the logarithm of output tokens.
const OUTPUT_SIGMA: f64 = 0.8;
/// Longest output, in tokens.
const OUTPUT_MOST: f64 = 2000.0;

/// The synthetic load: endless, the same for the same seed.
pub fn synthetic(seed: u64) -> impl Iterator<Item = Arrival> {
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
        let load: Vec<_> = synthetic(7).take(50_000).collect();
        let mean = |of: fn(&Arrival) -> u32| {
            load.iter().map(|arrival| f64::from(of(arrival))).sum::<f64>() / load.len() as f64
        };
        // The cut at the longest takes about 4 % off the means.
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
}
