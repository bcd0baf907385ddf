//! Virtual time: the duration of a step on an assumed server.

/// A clock that steps advance.
///
/// A step takes `max(step_ms, tokens / rate)`: at least the time for reading the weights, and otherwise the time given
/// by the throughput.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    now_ms: f64,
    step_ms: f64,
    tokens_per_ms: f64,
}

impl Clock {
    /// A clock at 0. `step_ms` is the shortest time of a step; `token_rate` is the most tokens per second.
    pub fn new(step_ms: f64, token_rate: f64) -> Self {
        Self { now_ms: 0.0, step_ms, tokens_per_ms: token_rate / 1e3 }
    }

    /// Milliseconds since the start.
    pub fn now_ms(&self) -> f64 {
        self.now_ms
    }

    /// Advances by a step of `tokens` tokens.
    pub fn step(&mut self, tokens: u32) {
        self.now_ms += self.step_ms.max(f64::from(tokens) / self.tokens_per_ms);
    }

    /// Advances to `at_ms` without a step.
    pub fn idle_until(&mut self, at_ms: f64) {
        self.now_ms = self.now_ms.max(at_ms);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_takes_the_longer_of_the_two_and_idling_never_turns_back() {
        let mut clock = Clock::new(33.0, 8000.0);
        clock.step(1);
        assert_eq!(clock.now_ms(), 33.0);
        clock.step(8000);
        assert_eq!(clock.now_ms(), 1033.0);
        clock.idle_until(5.0);
        assert_eq!(clock.now_ms(), 1033.0);
        clock.idle_until(2000.0);
        assert_eq!(clock.now_ms(), 2000.0);
    }
}
