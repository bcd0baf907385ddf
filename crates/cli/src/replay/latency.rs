//! Waiting times of requests: for admission, for the first token, and between tokens.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

/// A time in a replay, in steps and in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Moment {
    /// Number of steps so far.
    pub steps: u64,
    /// Time that the host and the device took for these steps, in milliseconds; 0 if no kernels run.
    pub ms: f64,
}

impl Moment {
    fn since(self, earlier: Self) -> [f64; 2] {
        [(self.steps - earlier.steps) as f64, self.ms - earlier.ms]
    }
}

/// The events of a request that has not ended.
#[derive(Clone, Copy, Debug)]
struct Marks {
    submitted: Moment,
    admitted: bool,
    first_token: Option<Moment>,
}

/// Waiting times of one kind, each in steps and in milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Waits([Vec<f32>; 2]);

impl Waits {
    fn push(&mut self, wait: [f64; 2]) {
        self.0.iter_mut().zip(wait).for_each(|(of, wait)| of.push(wait as f32));
    }

    /// Appends other waiting times.
    pub fn extend(&mut self, others: Self) {
        self.0.iter_mut().zip(others.0).for_each(|(of, others)| of.extend(others));
    }

    /// All waiting times in steps, sorted.
    pub fn in_steps(&self) -> Vec<f32> {
        sorted(&self.0[0])
    }

    /// All waiting times in milliseconds, sorted.
    pub fn in_ms(&self) -> Vec<f32> {
        sorted(&self.0[1])
    }
}

fn sorted(waits: &[f32]) -> Vec<f32> {
    let mut waits = waits.to_vec();
    waits.sort_unstable_by(f32::total_cmp);
    waits
}

/// The waiting times of all requests. A preempted request keeps waiting: it counts as submitted and admitted once.
#[derive(Clone, Debug, Default)]
pub struct Latency {
    now: Moment,
    live: HashMap<usize, Marks>,
    /// From submission to admission.
    pub queueing: Waits,
    /// From submission to the end of the step that has computed the prompt.
    pub first_token: Waits,
    /// Mean time between tokens, for requests with more than one generated token.
    pub per_token: Waits,
}

impl Latency {
    /// The time now.
    pub fn now(&self) -> Moment {
        self.now
    }

    /// Records that a request has arrived.
    pub fn submit(&mut self, index: usize) {
        let marks = Marks { submitted: self.now, admitted: false, first_token: None };
        self.live.insert(index, marks);
    }

    /// Records that a request got its slot.
    pub fn admit(&mut self, index: usize) {
        let Some(marks) = self.live.get_mut(&index).filter(|marks| !marks.admitted) else { return };
        marks.admitted = true;
        self.queueing.push(self.now.since(marks.submitted));
    }

    /// Records a step that took `ms` milliseconds.
    pub fn step(&mut self, ms: f64) {
        self.now = Moment { steps: self.now.steps + 1, ms: self.now.ms + ms };
    }

    /// Records that the last step completed the prompt of a request.
    pub fn prompt_done(&mut self, index: usize) {
        let Some(marks) = self.live.get_mut(&index) else { return };
        if marks.first_token.is_none() {
            marks.first_token = Some(self.now);
            self.first_token.push(self.now.since(marks.submitted));
        }
    }

    /// Records that a request with `output` generated tokens ended in the last step.
    pub fn finish(&mut self, index: usize, output: u32) {
        let Some(marks) = self.live.remove(&index) else { return };
        let first = marks.first_token.filter(|_| output > 1);
        if let Some(first) = first {
            let tokens = f64::from(output - 1);
            self.per_token.push(self.now.since(first).map(|wait| wait / tokens));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_counted_from_submission_once() {
        let mut latency = Latency::default();
        latency.submit(7);
        latency.step(2.0);
        latency.admit(7);
        latency.step(4.0);
        latency.prompt_done(7);
        // A request that is preempted and admitted again keeps waiting.
        latency.step(1.0);
        latency.admit(7);
        latency.step(1.0);
        latency.prompt_done(7);
        latency.finish(7, 3);
        assert_eq!((latency.queueing.in_steps(), latency.queueing.in_ms()), (vec![1.0], vec![2.0]));
        assert_eq!(
            (latency.first_token.in_steps(), latency.first_token.in_ms()),
            (vec![2.0], vec![6.0])
        );
        assert_eq!(
            (latency.per_token.in_steps(), latency.per_token.in_ms()),
            (vec![1.0], vec![1.0])
        );
        assert_eq!(latency.now(), Moment { steps: 4, ms: 8.0 });
        // A single token has no time between tokens, and a copy was never submitted.
        latency.submit(8);
        latency.prompt_done(8);
        latency.finish(8, 1);
        latency.finish(99, 5);
        assert_eq!(latency.per_token.in_steps().len(), 1);
        assert_eq!(latency.first_token.in_steps(), [0.0, 2.0]);
    }
}
