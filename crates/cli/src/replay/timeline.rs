//! The steps of a replay in bounded memory: totals, points over time, and a sample of the times of `begin_step`.

/// Most points over time. With more steps, one point stands for several steps: 2, 4, 8 ...
const MAX_POINTS: usize = 4096;
/// Most times of `begin_step` that are kept. With more steps, every 2nd, 4th, 8th ... is kept.
const MAX_TIMES: usize = 1 << 20;

/// One step, or the largest values of several consecutive steps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Virtual time after the last step, in milliseconds.
    pub at_ms: f64,
    /// Blocks that requests use during the step.
    pub blocks: u32,
    /// Blocks that are kept for later requests, and that no request uses.
    pub cached: u32,
    /// Requests that run during the step.
    pub requests: u32,
    /// Prompt tokens of the step.
    pub prefill: u32,
    /// Generated tokens of the step.
    pub decode: u32,
    /// Time of `begin_step`, in microseconds.
    pub prepare_us: f32,
    /// Tokens of all prompts that were admitted so far, those of requests too long to share included.
    pub prompts: u64,
    /// Those of them that were reused.
    pub reused: u64,
    /// Blocks that were evicted so far.
    pub evicted_blocks: u64,
    /// Checkpoints that were evicted so far.
    pub evicted_checkpoints: u64,
    /// Bytes that were copied to host memory so far.
    pub to_host: u64,
    /// Bytes that were copied back so far.
    pub from_host: u64,
}

/// The record of all steps.
#[derive(Clone, Debug)]
pub struct Timeline {
    steps: u64,
    prefill: u64,
    decode: u64,
    largest: Sample,
    points: Vec<Sample>,
    steps_per_point: u64,
    times: Vec<f32>,
    steps_per_time: u64,
}

impl Default for Timeline {
    fn default() -> Self {
        Self {
            steps: 0,
            prefill: 0,
            decode: 0,
            largest: Sample::default(),
            points: Vec::new(),
            steps_per_point: 1,
            times: Vec::new(),
            steps_per_time: 1,
        }
    }
}

impl Timeline {
    /// Adds the next step.
    pub fn push(&mut self, step: Sample) {
        if self.steps.is_multiple_of(self.steps_per_point) {
            if self.points.len() == MAX_POINTS {
                let pairs = self.points.chunks(2);
                self.points = pairs.map(|pair| pair.iter().fold(pair[0], larger)).collect();
                self.steps_per_point *= 2;
            }
            self.points.push(step);
        } else if let Some(last) = self.points.last_mut() {
            *last = larger(*last, &step);
        }
        if self.steps.is_multiple_of(self.steps_per_time) {
            if self.times.len() == MAX_TIMES {
                self.times = self.times.iter().step_by(2).copied().collect();
                self.steps_per_time *= 2;
            }
            self.times.push(step.prepare_us);
        }
        self.steps += 1;
        self.prefill += u64::from(step.prefill);
        self.decode += u64::from(step.decode);
        self.largest = larger(self.largest, &step);
    }

    /// Number of steps.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Prompt tokens of all steps.
    pub fn prefill(&self) -> u64 {
        self.prefill
    }

    /// Generated tokens of all steps.
    pub fn decode(&self) -> u64 {
        self.decode
    }

    /// The largest value of each field, with the time of the last step.
    pub fn largest(&self) -> Sample {
        self.largest
    }

    /// At most 4096 points over time, each with the largest values of [`Self::steps_per_point`] steps.
    pub fn points(&self) -> &[Sample] {
        &self.points
    }

    /// Number of steps per point. The last point may stand for fewer.
    pub fn steps_per_point(&self) -> u64 {
        self.steps_per_point
    }

    /// Sorted times of `begin_step` in microseconds: of every step, or of steps at equal distances if there are more
    /// than a million.
    pub fn sorted_times(&self) -> Vec<f32> {
        let mut times = self.times.clone();
        times.sort_unstable_by(f32::total_cmp);
        times
    }
}

/// The larger value of each field, with the time of `b`, which follows `a`.
fn larger(a: Sample, b: &Sample) -> Sample {
    Sample {
        at_ms: b.at_ms,
        blocks: a.blocks.max(b.blocks),
        requests: a.requests.max(b.requests),
        prefill: a.prefill.max(b.prefill),
        decode: a.decode.max(b.decode),
        cached: a.cached.max(b.cached),
        prepare_us: a.prepare_us.max(b.prepare_us),
        // Counters since the start never decrease.
        ..*b
    }
}

/// The value that `percent` of `sorted` do not exceed; 0 if `sorted` is empty.
pub fn percentile(sorted: &[f32], percent: usize) -> f32 {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline(steps: u32) -> Timeline {
        let mut timeline = Timeline::default();
        for i in 0..steps {
            let blocks = if i == 4321 { 99 } else { 1 };
            let prepare_us = i as f32;
            timeline.push(Sample {
                at_ms: i.into(),
                blocks,
                prefill: 2,
                prepare_us,
                ..Sample::default()
            });
        }
        timeline
    }

    #[test]
    fn every_step_is_a_point_while_there_is_room() {
        let timeline = timeline(MAX_POINTS as u32);
        assert_eq!((timeline.points().len(), timeline.steps_per_point()), (MAX_POINTS, 1));
        assert!(timeline.points().iter().zip(0..).all(|(point, i)| point.at_ms == f64::from(i)));
        assert!(Timeline::default().points().is_empty());
    }

    #[test]
    fn peaks_and_totals_survive_merging() {
        let timeline = timeline(100_001);
        assert_eq!(timeline.steps_per_point(), 32);
        assert_eq!(timeline.points().len(), 100_001_usize.div_ceil(32));
        let peaks: Vec<_> = timeline.points().iter().filter(|point| point.blocks == 99).collect();
        assert_eq!(peaks.len(), 1);
        assert_eq!(peaks[0].at_ms, f64::from(4321 / 32 * 32 + 31));
        assert_eq!(timeline.points().last().map(|point| point.at_ms), Some(100_000.0));
        assert_eq!(
            (timeline.steps(), timeline.prefill(), timeline.decode()),
            (100_001, 200_002, 0)
        );
        assert_eq!((timeline.largest().blocks, timeline.largest().at_ms), (99, 100_000.0));
    }

    #[test]
    fn times_are_sampled_at_equal_distances() {
        let timeline = timeline((MAX_TIMES + 2) as u32);
        let times = timeline.sorted_times();
        assert_eq!(times.len(), MAX_TIMES / 2 + 1);
        assert!(times.iter().zip(0..).all(|(&time, i)| time == (2 * i) as f32));
    }

    #[test]
    fn percentiles_are_values_that_occurred() {
        let values: Vec<f32> = (1..=200u8).map(f32::from).collect();
        assert_eq!((percentile(&values, 50), percentile(&values, 99)), (100.0, 198.0));
        assert_eq!((percentile(&[7.0], 50), percentile(&[7.0], 99)), (7.0, 7.0));
        assert_eq!(percentile(&[], 50), 0.0);
    }
}
