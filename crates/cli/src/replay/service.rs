//! The service that a load's users get: throughput, waiting times, and their limits. A part of the summary.

use schemars::JsonSchema;
use serde::Serialize;

use super::drive::Replayed;
use super::latency::Waits;
use super::limit::Limit;
use super::quantiles::Quantiles;
use super::scheduler::Limits;

/// Throughput and waits.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Service {
    /// The unit of its times.
    pub unit: Unit,
    /// Time of all steps.
    pub elapsed: f64,
    /// Tokens, of prompts and generated, that were computed in a unit of time.
    pub tokens_per_unit: f64,
    /// Tokens that were generated in a unit of time, the first one of each answer included.
    pub generated_per_unit: f64,
    /// From the arrival of a request to its slot.
    pub queueing: Quantiles,
    /// From its arrival to the end of the step that has computed its prompt.
    pub time_to_first_token: Quantiles,
    /// From a token to the next, the mean of each request.
    pub time_per_token: Quantiles,
    /// What held it back.
    pub limit: Limit,
}

/// A unit of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// Steps: where no kernels run there is no other time.
    Steps,
    /// Milliseconds: of a step, `begin_step` on the host and the kernels of the cache on the device. The model's own
    /// come on top.
    Ms,
}

impl Service {
    /// The service in `replayed`, in a cache of `limits`. For `balanced` see [`Limit::new`].
    pub fn new(replayed: &Replayed, limits: Limits, balanced: u32) -> Self {
        let (latency, timeline) = (&replayed.latency, &replayed.timeline);
        let unit = if replayed.work.kernel_ms.is_some() { Unit::Ms } else { Unit::Steps };
        let now = latency.now();
        let elapsed = if unit == Unit::Ms { now.ms } else { now.steps as f64 };
        let quantiles = |waits: &Waits| {
            Quantiles::of(&if unit == Unit::Ms { waits.in_ms() } else { waits.in_steps() })
        };
        let rate = |tokens: u64| if elapsed > 0.0 { tokens as f64 / elapsed } else { 0.0 };
        let moved = replayed.work.moved.as_ref();
        let elsewhere = moved.map_or(0.0, |moved| moved.rate[usize::from(unit == Unit::Ms)]);
        Self {
            unit,
            elapsed,
            tokens_per_unit: rate(timeline.prefill() + timeline.decode()) + elsewhere,
            generated_per_unit: rate(replayed.generated) + elsewhere,
            queueing: quantiles(&latency.queueing),
            time_to_first_token: quantiles(&latency.first_token),
            time_per_token: quantiles(&latency.per_token),
            limit: Limit::new(&replayed.shortages, limits, balanced, replayed.rejected),
        }
    }

    /// The rows of the table.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let (all, generated) = (self.tokens_per_unit, self.generated_per_unit);
        let throughput = match self.unit {
            Unit::Steps => format!("{all:.0} tokens a step computed, {generated:.0} generated"),
            Unit::Ms => {
                format!("{:.0} tokens/s computed, {:.0} generated", 1e3 * all, 1e3 * generated)
            }
        };
        let mut rows = vec![
            ("throughput", throughput),
            ("queueing", self.shown(self.queueing)),
            ("first token", self.shown(self.time_to_first_token)),
            ("time per token", self.shown(self.time_per_token)),
        ];
        let names = std::iter::once("limited by").chain(std::iter::repeat(""));
        rows.extend(names.zip(self.limit.advice.iter().cloned()));
        rows
    }

    fn shown(&self, Quantiles { p50, p99 }: Quantiles) -> String {
        let (Some(p50), Some(p99)) = (p50, p99) else { return "nobody".into() };
        match self.unit {
            Unit::Steps => format!("p50 {p50:.1}, p99 {p99:.1} steps"),
            Unit::Ms => format!("p50 {p50:.2}, p99 {p99:.2} ms"),
        }
    }
}
