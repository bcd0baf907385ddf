//! One run: a load, replayed several times through one cache.

use std::time::Instant;

use anyhow::Result;
use dsv4_kv::{CacheConfig, Ledger};
use indicatif::ProgressBar;

use super::checked::{Agreement, Checked};
use super::disturb::{Disturbances, Done, Shares};
use super::report::Row;
use crate::interrupt::Interrupt;
use crate::replay::clock::Clock;
use crate::replay::drive::Drive;
use crate::replay::execute::Execute;
use crate::replay::load::{self, Request};
use crate::replay::scheduler::Limits;
use crate::texts::Texts;

/// Most growth of the process in the second half of the rounds, as a fraction of its size before.
const DRIFT: f64 = 0.01;
/// Growth in bytes that is ignored, since allocators keep memory. Rounds of a process of 30 MiB differ by up to 1.1
/// MiB.
const NOISE: u64 = 4 << 20;

/// The plan of a run.
pub struct Plan<'a> {
    /// The configuration of the cache.
    pub config: &'a CacheConfig,
    /// The requests of a round, and their token ids.
    pub load: (&'a [Request], Texts),
    /// The shares of requests with each event.
    pub shares: Shares,
    /// Number of rounds.
    pub rounds: u32,
    /// Seed of all events.
    pub seed: u64,
}

impl Plan<'_> {
    /// Tokens of all rounds of a run.
    pub fn tokens(&self) -> u64 {
        u64::from(self.rounds) * load::tokens(self.load.0)
    }

    /// Runs all rounds. Requests hold up to `fill` percent of the blocks. `bar` advances by [`Self::tokens`].
    pub fn run(&self, fill: u32, bar: &ProgressBar, interrupt: &Interrupt) -> Result<Row> {
        let began = Instant::now();
        let mut cache = Checked::new(self.config, self.config)?;
        let mut row = Row { fill, ..Row::default() };
        let mut resident = Vec::new();
        for round in 0..self.rounds {
            bar.set_message(format!("fill {fill} %, round {} of {}", round + 1, self.rounds));
            cache = self.round(cache, (round, bar), &mut row, interrupt)?;
            if let Some(leak) = leak(&cache.ledger()) {
                row.faults.push(format!("after round {}: {leak}", round + 1));
            }
            row.interrupted = interrupt.is_requested();
            if row.interrupted {
                break;
            }
            row.rounds += 1;
            resident.extend(resident_bytes());
        }
        let stats = cache.ledger().reuse_stats();
        row.prompt_tokens = stats.prompt_tokens;
        row.evicted_blocks = stats.evicted_blocks;
        row.evicted_checkpoints = stats.evicted_checkpoints;
        row.judge_reuse(cache.found);
        row.judge_memory(&resident);
        row.judge_load();
        row.wall_s = began.elapsed().as_secs_f64();
        Ok(row)
    }

    fn round(
        &self,
        cache: Checked,
        (round, bar): (u32, &ProgressBar),
        row: &mut Row,
        interrupt: &Interrupt,
    ) -> Result<Checked> {
        let config = self.config;
        let blocks = u64::from(config.num_blocks) * u64::from(row.fill) / 100;
        let limits = Limits {
            slots: config.max_requests,
            blocks: blocks as u32,
            context: config.max_context,
            step_tokens: config.max_step_tokens,
        };
        row.rejected += self.rejected(&cache.ledger(), limits);
        let mut drive = Drive::new(cache, self.load, limits, Clock::new(33.0, 8192.0));
        let seed = self.seed.wrapping_add(round.into());
        let mut disturbances = Disturbances::new(seed, self.shares, self.load.0);
        let mut waiting = false;
        let (before, tokens) = (bar.position(), load::tokens(self.load.0));
        loop {
            if interrupt.is_requested() {
                drive.close();
            }
            drive.admit()?;
            let ran = drive.step()?;
            if ran.is_none() && !waiting {
                break;
            }
            // Running copies count as well.
            bar.set_position(before + drive.done().min(tokens));
            waiting = disturbances.between_steps(&mut drive)?;
        }
        // The tokens of aborted requests will not be computed.
        bar.set_position(before + tokens);
        row.finished += drive.finished();
        row.starved += drive.preempted() - disturbances.done.preempted;
        row.add(disturbances.done);
        Ok(drive.into_cache())
    }

    /// Requests of a round that the scheduler rejects: they would not fit into an empty cache.
    fn rejected(&self, ledger: &Ledger, limits: Limits) -> u64 {
        let lengths = self.load.0.iter().map(|request| request.arrival.context_tokens());
        let too_long =
            |tokens: &u32| *tokens > limits.context || ledger.blocks_of(*tokens) > limits.blocks;
        lengths.filter(too_long).count() as u64
    }
}

/// Describes blocks, checkpoints and slots that are neither free nor the prefix tree's although no request is left.
pub fn leak(ledger: &Ledger) -> Option<String> {
    let tree = ledger.tree_counts();
    let faults = [
        ("requests", ledger.live_requests(), 0),
        ("blocks", ledger.free_blocks() + tree.blocks, ledger.total_blocks()),
        ("checkpoints", ledger.free_checkpoints() + tree.checkpoints, ledger.total_checkpoints()),
        ("blocks that can be evicted", tree.evictable_blocks, tree.blocks),
        ("checkpoints that can be evicted", tree.evictable_checkpoints, tree.checkpoints),
        ("places of suspended requests", ledger.free_suspended(), SUSPENDED),
    ];
    let wrong = faults.into_iter().find(|(_, found, expected)| found != expected);
    let wrong = wrong.map(|(what, found, expected)| format!("{found} {what}, not {expected}"));
    wrong.or_else(|| ledger.audit().err())
}

/// Most requests that are suspended at once.
pub const SUSPENDED: u32 = 8;

/// Resident memory of the process in bytes, if the system reports it.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

impl Row {
    fn add(&mut self, done: Done) {
        self.done.aborted += done.aborted;
        self.done.forked += done.forked;
        self.done.suspended += done.suspended;
        self.done.preempted += done.preempted;
    }

    /// Records the reused tokens, and faults if the cache reused or held other than the model.
    pub fn judge_reuse(&mut self, found: Agreement) {
        let Agreement { admissions, differing, reused, expected, first, .. } = found;
        (self.admissions, self.differing) = (admissions, differing);
        (self.reused, self.expected) = (reused, expected);
        self.off_percent = 100.0 * reused.abs_diff(expected) as f64 / expected.max(1) as f64;
        self.faults.extend(first);
        if differing > 0 {
            self.faults.push(format!("{reused} tokens were reused, and {expected} in the model"));
        }
    }

    /// Records a fault if nothing has run.
    fn judge_load(&mut self) {
        if self.finished + self.done.aborted == 0 && !self.interrupted {
            self.faults.push(format!("no request ran, and {} were rejected", self.rejected));
        }
    }

    /// Records the process's memory after each round, and a fault if it grew.
    pub fn judge_memory(&mut self, resident: &[u64]) {
        self.resident_bytes = resident.to_vec();
        let [.., last] = resident[..] else { return };
        let first = resident[(resident.len() - 1) / 2];
        let drift = last as f64 / first.max(1) as f64 - 1.0;
        self.drift_percent = (resident.len() > 1).then_some(100.0 * drift);
        if drift > DRIFT && last - first > NOISE {
            self.faults.push(format!("the process grew from {first} to {last} bytes"));
        }
    }
}

#[cfg(test)]
mod tests {
    use dsv4_kv::kv_layout::config::ModelConfig;
    use dsv4_kv::{KvError, StepRequest};

    use super::*;
    use crate::replay::load::synthetic;

    /// A configuration with blocks for the longest request of the load, and a third more.
    fn config(load: &[Request]) -> CacheConfig {
        let model = ModelConfig::preset("tiny").expect("a preset");
        let max_context = crate::replay::setup::longest(load);
        let config = CacheConfig { max_context, max_requests: 16, ..CacheConfig::new(model) };
        let num_blocks = config.max_blocks_per_request() * 4 / 3;
        let config = CacheConfig { max_suspended: SUSPENDED, ..config };
        CacheConfig { num_blocks, num_checkpoints: 100, ..config }
    }

    /// The result of a run of a cache of `config`, compared with a model of `expected`.
    fn run(load: &[Request], config: &CacheConfig, expected: &CacheConfig) -> Row {
        let shares = Shares { aborts: 0.1, forks: 0.2, preemptions: 0.2 };
        let load = (load, Texts::new(1.0));
        let plan = Plan { config, load, shares, rounds: 1, seed: 3 };
        let interrupt = Interrupt::listen().expect("signals can be listened to");
        let mut row = Row { fill: 100, ..Row::default() };
        let cache = Checked::new(config, expected).expect("a valid configuration");
        let bar = ProgressBar::hidden();
        let cache = plan.round(cache, (0, &bar), &mut row, &interrupt).expect("nothing fails");
        assert_eq!(leak(&cache.ledger()), None);
        assert_eq!(bar.position(), plan.tokens());
        row.judge_reuse(cache.found);
        row
    }

    #[test]
    fn the_model_reuses_what_the_cache_does_and_another_does_not() {
        let load: Vec<_> = synthetic(5).take(150).collect();
        let config = config(&load);
        let row = run(&load, &config, &config);
        assert!(row.faults.is_empty() && row.reused > 0, "{row:?}");
        let Done { aborted, forked, suspended, preempted } = row.done;
        assert!([aborted, forked, suspended, preempted].iter().all(|&count| count > 0), "{row:?}");
        let others = [
            CacheConfig { checkpoint_interval: 0, ..config.clone() },
            CacheConfig { keep_outputs: false, ..config.clone() },
            CacheConfig { num_checkpoints: 90, ..config.clone() },
            CacheConfig { num_blocks: config.num_blocks * 9 / 10, ..config.clone() },
        ];
        for other in others {
            let row = run(&load, &config, &other);
            assert!(!row.faults.is_empty(), "{row:?}");
        }
    }

    #[test]
    fn every_difference_is_a_fault() {
        let faults = |found| {
            let mut row = Row { finished: 1, ..Row::default() };
            row.judge_reuse(found);
            row.judge_load();
            row.faults.len()
        };
        let found = Agreement { admissions: 9, reused: 128, expected: 128, ..Agreement::default() };
        assert_eq!(faults(found.clone()), 0);
        assert_eq!(faults(Agreement { differing: 2, ..found.clone() }), 1);
        assert_eq!(faults(Agreement { first: Some("one block more".into()), ..found }), 1);
    }

    #[test]
    fn a_run_of_nothing_is_a_fault() {
        let faults = |mut row: Row| {
            row.judge_load();
            row.faults
        };
        let nothing = || Row { rejected: 7, ..Row::default() };
        assert_eq!(faults(nothing()), ["no request ran, and 7 were rejected"]);
        let aborted = Done { aborted: 1, ..Done::default() };
        let others = [
            Row { finished: 1, ..nothing() },
            Row { done: aborted, ..nothing() },
            Row { interrupted: true, ..nothing() },
        ];
        for other in others {
            assert!(faults(other).is_empty());
        }
    }

    #[test]
    fn what_is_lost_is_found() -> Result<(), KvError> {
        let load: Vec<_> = synthetic(5).take(1).collect();
        let config = config(&load);
        let mut ledger = Ledger::new(&config)?;
        assert_eq!(leak(&ledger), None);
        let id = ledger.admit()?;
        assert_eq!(leak(&ledger).as_deref(), Some("1 requests, not 0"));
        let mut array = vec![0; ledger.largest_layout().elements()];
        let step = [StepRequest { id, start: 0, tokens: 129 }];
        ledger.begin_step(dsv4_kv::LayerGroup::Trunk, &step, &mut array)?;
        ledger.reject_step(dsv4_kv::LayerGroup::Trunk, dsv4_kv::ledger::Written::Nothing);
        let suspended = ledger.suspend(id)?;
        drop(suspended);
        let found = leak(&ledger).expect("a place is lost");
        assert_eq!(found, "7 places of suspended requests, not 8");
        Ok(())
    }

    #[test]
    fn growth_of_the_process_is_found() {
        let faults = |resident: &[u64]| {
            let mut row = Row::default();
            row.judge_memory(resident);
            (row.faults.len(), row.drift_percent.is_some())
        };
        assert_eq!(faults(&[1000 << 20, 1009 << 20]), (0, true));
        assert_eq!(faults(&[1000 << 20, 900 << 20]), (0, true));
        assert_eq!(faults(&[1000 << 20, 1005 << 20, 1016 << 20]), (1, true));
        // Growth in the first half of the rounds does not count.
        assert_eq!(faults(&[900 << 20, 1000 << 20, 1001 << 20, 1002 << 20]), (0, true));
        // In a small process, 1 % is less than the normal difference between rounds.
        assert_eq!(faults(&[30 << 20, 33 << 20]), (0, true));
        assert_eq!(faults(&[30 << 20, 35 << 20]), (1, true));
        assert_eq!(faults(&[1000 << 20]), (0, false));
    }
}
