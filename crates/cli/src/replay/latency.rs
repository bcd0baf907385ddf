//! How long requests wait: in line, for their first token, and from token to token.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

/// A moment of a replay: after so many steps, which took so long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Moment {
    /// Steps until then.
    pub steps: u64,
    /// Time that the host and the device took for them, in milliseconds; 0 where no kernels run.
    pub ms: f64,
}

impl Moment {
    fn since(self, earlier: Self) -> [f64; 2] {
        [(self.steps - earlier.steps) as f64, self.ms - earlier.ms]
    }
}

/// What has happened to a request that has not ended.
#[derive(Clone, Copy, Debug)]
struct Marks {
    submitted: Moment,
    admitted: bool,
    first_token: Option<Moment>,
}

/// Waits of one kind, each in steps and in milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Waits([Vec<f32>; 2]);

impl Waits {
    fn push(&mut self, wait: [f64; 2]) {
        self.0.iter_mut().zip(wait).for_each(|(of, wait)| of.push(wait as f32));
    }

    /// Adds others.
    pub fn extend(&mut self, others: Self) {
        self.0.iter_mut().zip(others.0).for_each(|(of, others)| of.extend(others));
    }

    /// All of them in steps, the shortest first.
    pub fn in_steps(&self) -> Vec<f32> {
        sorted(&self.0[0])
    }

    /// All of them in milliseconds, the shortest first.
    pub fn in_ms(&self) -> Vec<f32> {
        sorted(&self.0[1])
    }
}

fn sorted(waits: &[f32]) -> Vec<f32> {
    let mut waits = waits.to_vec();
    waits.sort_unstable_by(f32::total_cmp);
    waits
}

/// The waits of all requests. A request that is preempted waits on: it is submitted and admitted once.
#[derive(Clone, Debug, Default)]
pub struct Latency {
    now: Moment,
    live: HashMap<usize, Marks>,
    /// From submission to admission.
    pub queueing: Waits,
    /// From submission to the end of the step that has computed the prompt.
    pub first_token: Waits,
    /// Mean time from a token to the next, of a request with more than one.
    pub per_token: Waits,
}

impl Latency {
    /// All steps until now.
    pub fn now(&self) -> Moment {
        self.now
    }

    /// A request has arrived.
    pub fn submit(&mut self, index: usize) {
        let marks = Marks { submitted: self.now, admitted: false, first_token: None };
        self.live.insert(index, marks);
    }

    /// A request has got its slot.
    pub fn admit(&mut self, index: usize) {
        let Some(marks) = self.live.get_mut(&index).filter(|marks| !marks.admitted) else { return };
        marks.admitted = true;
        self.queueing.push(self.now.since(marks.submitted));
    }

    /// A step has run that took so long.
    pub fn step(&mut self, ms: f64) {
        self.now = Moment { steps: self.now.steps + 1, ms: self.now.ms + ms };
    }

    /// The prompt of a request was computed in the last step.
    pub fn prompt_done(&mut self, index: usize) {
        let Some(marks) = self.live.get_mut(&index) else { return };
        if marks.first_token.is_none() {
            marks.first_token = Some(self.now);
            self.first_token.push(self.now.since(marks.submitted));
        }
    }

    /// A request with `output` tokens of its own has ended in the last step.
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
        // Preempted and admitted again: it waits on.
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
        // One token has nothing to wait for; a copy was never submitted.
        latency.submit(8);
        latency.prompt_done(8);
        latency.finish(8, 1);
        latency.finish(99, 5);
        assert_eq!(latency.per_token.in_steps().len(), 1);
        assert_eq!(latency.first_token.in_steps(), [0.0, 2.0]);
    }
}
