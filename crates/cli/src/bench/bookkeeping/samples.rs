//! Times of repeated work.

use std::time::Instant;

/// The first times, which are not kept.
pub const WARM_UP: usize = 500;
/// Number of measurements of nothing, to determine the cost of reading the clock.
const EMPTY: usize = 2 * WARM_UP;

/// Times in microseconds. The first [`WARM_UP`] are not kept.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    done: usize,
    times: Vec<f64>,
}

impl Samples {
    /// Runs `work` and keeps its time, less the cost of reading the clock.
    pub fn time<R>(&mut self, clock: Clock, work: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = work();
        let microseconds = start.elapsed().as_secs_f64() * 1e6 - clock.0;
        self.keep(microseconds.max(0.0));
        result
    }

    /// Keeps the sum of the last times of all `parts`.
    pub fn sum_of_last(&mut self, parts: &[&Self]) {
        self.keep(parts.iter().filter_map(|part| part.times.last()).sum());
    }

    fn keep(&mut self, time: f64) {
        self.done += 1;
        if self.done > WARM_UP {
            self.times.push(time);
        }
    }

    /// The quantile `part` of the times, from 0 to 1.
    pub fn quantile(&self, part: f64) -> f64 {
        let mut sorted = self.times.clone();
        sorted.sort_by(f64::total_cmp);
        let at = ((sorted.len() as f64 * part) as usize).min(sorted.len().saturating_sub(1));
        sorted.get(at).copied().unwrap_or(f64::NAN)
    }
}

/// The cost of reading the clock twice, in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Clock(f64);

impl Clock {
    /// Measures it: the median of many.
    pub fn new() -> Self {
        let mut empty = Samples::default();
        (0..EMPTY).for_each(|_| empty.time(Self(0.0), || ()));
        Self(empty.quantile(0.5))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_times_that_were_measured() {
        let mut samples = Samples::default();
        (0..WARM_UP).for_each(|_| samples.keep(1e9));
        (0..200).rev().for_each(|time| samples.keep(f64::from(time)));
        assert_eq!(samples.quantile(0.5), 100.0);
        assert_eq!(samples.quantile(0.99), 198.0);
        assert_eq!(samples.quantile(1.0), 199.0);
        assert!(Samples::default().quantile(0.5).is_nan());
    }
}
