//! The resource that limits a load (slots, blocks, or the tokens of a step), and the option to change.

use schemars::JsonSchema;
use serde::Serialize;

use super::scheduler::{Limits, Shortage};

/// Shares of steps below this are not reported.
const FEW: f64 = 0.01;

/// Counts of the steps in which a resource was short.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shortages {
    steps: u64,
    no_slot: u64,
    no_blocks: u64,
    full: u64,
    /// Sum over the steps without a free slot: the share of the blocks that were not in use.
    idle_blocks: f64,
    /// Sum over the steps without free blocks: the share of the slots that were not in use.
    idle_slots: f64,
}

impl Shortages {
    /// Records a step: what the head of the queue waited for, if the queue was not empty; the shares of blocks and
    /// slots in use; and whether the step had the most tokens that a step may have.
    pub fn step(
        &mut self,
        waits_for: Option<Shortage>,
        (blocks, slots): (f64, f64),
        is_full: bool,
    ) {
        self.steps += 1;
        self.full += u64::from(is_full);
        match waits_for {
            Some(Shortage::Slots) => {
                self.no_slot += 1;
                self.idle_blocks += 1.0 - blocks;
            }
            Some(Shortage::Blocks) => {
                self.no_blocks += 1;
                self.idle_slots += 1.0 - slots;
            }
            // Such a step is counted as full.
            Some(Shortage::Tokens) | None => {}
        }
    }
}

/// What limited a load.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Limit {
    /// Share of the steps in which a request waited because all slots were taken.
    pub waiting_for_slots: f64,
    /// In those steps, share of the blocks that no request used, on average.
    pub idle_blocks: f64,
    /// Share of the steps in which a request waited because its blocks did not fit beside those of the others.
    pub waiting_for_blocks: f64,
    /// In those steps, share of the slots that were free, on average.
    pub idle_slots: f64,
    /// Share of the steps that had as many tokens as a step may have.
    pub full_steps: f64,
    /// The same in words, with what to set: what limited most steps first, and requests that were rejected last.
    pub advice: Vec<String>,
}

impl Limit {
    /// The limits of a load, from `shortages` in a cache of `limits`, which `rejected` requests did not fit. With
    /// `balanced` slots, slots and blocks would suffice for the same number of requests of the load's mean length.
    pub fn new(shortages: &Shortages, limits: Limits, balanced: u32, rejected: u64) -> Self {
        let share = |count: u64, of: u64| count as f64 / of.max(1) as f64;
        let mean = |sum: f64, of: u64| sum / of.max(1) as f64;
        let Shortages { steps, no_slot, no_blocks, full, idle_blocks, idle_slots } = *shortages;
        let mut limit = Self {
            waiting_for_slots: share(no_slot, steps),
            idle_blocks: mean(idle_blocks, no_slot),
            waiting_for_blocks: share(no_blocks, steps),
            idle_slots: mean(idle_slots, no_blocks),
            full_steps: share(full, steps),
            advice: Vec::new(),
        };
        let mut told = [
            (limit.full_steps, limit.of_step_tokens(limits)),
            (limit.waiting_for_slots, limit.of_slots(limits, balanced)),
            (limit.waiting_for_blocks, limit.of_blocks()),
        ];
        told.sort_by(|a, b| b.0.total_cmp(&a.0));
        let told = told.into_iter().filter(|(share, _)| *share >= FEW).map(|(_, text)| text);
        limit.advice = told.chain((rejected > 0).then(|| of_rejected(rejected, limits))).collect();
        if limit.advice.is_empty() {
            limit
                .advice
                .push("nothing: requests were admitted as they came, and steps had room".into());
        }
        limit
    }

    fn of_step_tokens(&self, Limits { step_tokens, .. }: Limits) -> String {
        format!(
            "step tokens: {} of the steps had all {step_tokens}; only more of them (--max-step-tokens) compute prompts sooner",
            percent(self.full_steps)
        )
    }

    fn of_slots(&self, Limits { slots, .. }: Limits, balanced: u32) -> String {
        let advice = if balanced > slots {
            format!("set --max-requests {balanced}, or leave it out")
        } else {
            "slots and blocks are in balance for this load: give it more memory (--gpu-mem)".into()
        };
        format!(
            "slots: in {} of the steps requests waited for one of {slots}, with {} of the blocks unused; {advice}",
            percent(self.waiting_for_slots),
            percent(self.idle_blocks)
        )
    }

    fn of_blocks(&self) -> String {
        let advice = if self.idle_slots > 0.5 {
            "fewer slots (--max-requests) or more memory (--gpu-mem) make more of them"
        } else {
            "give it more memory (--gpu-mem)"
        };
        format!(
            "blocks: in {} of the steps requests waited for those of their whole length, with {} of the slots free; {advice}",
            percent(self.waiting_for_blocks),
            percent(self.idle_slots)
        )
    }
}

/// What to set for requests that no empty cache of `limits` holds.
fn of_rejected(rejected: u64, limits: Limits) -> String {
    let most = limits.most_tokens();
    let advice = if most < limits.context {
        "give it more memory (--gpu-mem), or divide their lengths (--shrink)"
    } else {
        "the model's context is no longer, so divide their lengths (--shrink)"
    };
    format!(
        "length: {rejected} requests need more than {most} tokens, all that one can have; {advice}"
    )
}

fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { slots: 4, blocks: 100, context: 1000, step_tokens: 64 };

    fn limit(steps: &[(Option<Shortage>, f64, f64, bool)], balanced: u32) -> Limit {
        let mut shortages = Shortages::default();
        for &(waits_for, blocks, slots, is_full) in steps {
            shortages.step(waits_for, (blocks, slots), is_full);
        }
        Limit::new(&shortages, LIMITS, balanced, 0)
    }

    #[test]
    fn slots_are_named_with_the_blocks_that_lie_free_and_what_to_set() {
        let found =
            limit(&[(Some(Shortage::Slots), 0.25, 1.0, false), (None, 0.1, 0.5, false)], 17);
        assert_eq!((found.waiting_for_slots, found.idle_blocks), (0.5, 0.75));
        let [advice] = &found.advice[..] else { panic!("{found:?}") };
        assert!(
            advice.starts_with("slots: in 50 %") && advice.contains("75 % of the blocks"),
            "{advice}"
        );
        assert!(advice.contains("--max-requests 17"), "{advice}");
        let found = limit(&[(Some(Shortage::Slots), 0.9, 1.0, false)], 4);
        assert!(found.advice[0].contains("more memory"), "{found:?}");
    }

    #[test]
    fn what_limited_most_steps_comes_first_and_nothing_is_told_too() {
        let found = limit(&[(Some(Shortage::Blocks), 1.0, 0.25, true), (None, 0.5, 0.25, true)], 9);
        assert_eq!(
            (found.full_steps, found.waiting_for_blocks, found.idle_slots),
            (1.0, 0.5, 0.75)
        );
        assert!(found.advice[0].starts_with("step tokens: 100 %"), "{found:?}");
        assert!(found.advice[1].starts_with("blocks: in 50 %"), "{found:?}");
        assert!(found.advice[1].contains("fewer slots"), "{found:?}");
        let found = limit(&[(None, 0.1, 0.1, false)], 9);
        assert!(found.advice[0].starts_with("nothing"), "{found:?}");
    }
}
