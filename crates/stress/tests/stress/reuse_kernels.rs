//! Tests of the stress test with kernels where prefixes are shared: a cache must pass, and a cache whose memory does
//! not match its ledger must fail.

use std::sync::Arc;
use std::time::Duration;

use dsv4_kv::device::{EmuDevice, EmuOptions, Emulator};
use dsv4_kv::events::{Drained, EventBatch};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::reuse::PinRefused;
use dsv4_kv::{Admission, BlockId, CacheConfig, KvError, LayerGroup, LayerId, PoolKind, RequestId};
use dsv4_kv_stress::answer::{Answer, Counts, Pinned, Report};
use dsv4_kv_stress::cache::Cache;
use dsv4_kv_stress::drive::{Counts as Happened, Divergence};
use dsv4_kv_stress::generate::Manners;
use dsv4_kv_stress::generate::reuse::kernel_reuse_config;
use dsv4_kv_stress::library::Library;
use dsv4_kv_stress::model::Model;
use dsv4_kv_stress::op::{Name, Step};
use dsv4_kv_stress::random_run;
use dsv4_kv_stress::reuse::Reuse;
use dsv4_kv_stress::subject::Subject;
use dsv4_kv_stress::text::Text;
use rayon::prelude::*;

/// A mistake in the rows of a request that continues from a checkpoint, a copy or a suspended request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    /// None.
    Nothing,
    /// After reuse, the window is not that of the checkpoint.
    StaleWindow,
    /// After reuse, the state of the CSA compressors is not that of the checkpoint.
    StaleState,
    /// After reuse, a shared block is overwritten.
    SharedBlockWritten,
    /// A copy has the window, but not the state of the compressors.
    HalfAFork,
    /// After resumption, the window is not that of the request.
    StaleImage,
    /// Requests of all salts share prefixes.
    SaltIgnored,
}

impl Mistake {
    const ALL: [Self; 6] = [
        Self::StaleWindow,
        Self::StaleState,
        Self::SharedBlockWritten,
        Self::HalfAFork,
        Self::StaleImage,
        Self::SaltIgnored,
    ];
}

/// A cache with a mistake.
struct Broken {
    cache: Cache<Emulator>,
    mistake: Mistake,
}

impl Broken {
    /// Overwrites a slot or block in all pools of a kind, in all layers of the trunk that have one.
    fn spoil(&self, kind: PoolKind, unit: u32) {
        let fed = self.cache.fed();
        for layer in fed.manager.config().group_layers(LayerGroup::Trunk).map(LayerId) {
            let Ok(pool) = fed.manager.writable_pool(layer, kind) else { continue };
            let schema = fed.manager.schema().layers[layer.0 as usize].pool(kind);
            let bytes = schema.expect("it has the pool").unit_bytes();
            let part = pool.slice(u64::from(unit) * bytes, bytes).expect("it has the unit");
            fed.stream.fill(&part, 0x11).expect("the emulator does not fail");
        }
    }

    fn spoil_slot(&self, kind: PoolKind, id: RequestId) {
        self.spoil(kind, id.slot().0);
    }
}

impl Subject for Broken {
    const HAS_LAYERS: bool = true;

    fn admit(&mut self) -> Result<RequestId, KvError> {
        self.cache.admit()
    }

    fn release(&mut self, id: RequestId) -> Result<(), KvError> {
        self.cache.release(id)
    }

    fn rewind_draft(&mut self, id: RequestId, committed: u32) -> Result<(), KvError> {
        self.cache.rewind_draft(id, committed)
    }

    fn step(&mut self, model: &Model, step: &Step) -> Report {
        self.cache.step(model, step)
    }

    fn blocks(&self, id: RequestId) -> Option<Vec<BlockId>> {
        self.cache.blocks(id)
    }

    fn tokens(&self, group: LayerGroup, id: RequestId) -> Option<u32> {
        self.cache.tokens(group, id)
    }

    fn counts(&self) -> (u32, u32) {
        Subject::counts(&self.cache)
    }

    fn reuse(&mut self) -> &mut dyn Reuse {
        self
    }

    fn check_bytes(&mut self, model: &Model, turn: u64) -> Result<(), String> {
        self.cache.check_bytes(model, turn)
    }
}

impl Reuse for Broken {
    fn admit_with(&mut self, text: &Text) -> Result<Admission, KvError> {
        let salt = if self.mistake == Mistake::SaltIgnored { 0 } else { text.salt };
        let admission = self.cache.admit_with(&Text { salt, ..text.clone() })?;
        if admission.reused > 0 {
            match self.mistake {
                Mistake::StaleWindow => self.spoil_slot(PoolKind::SwaData, admission.id),
                Mistake::StaleState => self.spoil_slot(PoolKind::MainState, admission.id),
                Mistake::SharedBlockWritten => {
                    let blocks = self.cache.blocks(admission.id).unwrap_or_default();
                    blocks.last().into_iter().for_each(|block| {
                        self.spoil(PoolKind::EntryData, block.0);
                    });
                }
                _ => {}
            }
        }
        Ok(admission)
    }

    fn fork(&mut self, of: RequestId) -> Result<RequestId, KvError> {
        let fork = self.cache.fork(of)?;
        if self.mistake == Mistake::HalfAFork {
            self.spoil_slot(PoolKind::MainState, fork);
        }
        Ok(fork)
    }

    fn suspend(&mut self, name: Name, id: RequestId) -> Result<(), KvError> {
        self.cache.suspend(name, id)
    }

    fn resume(&mut self, name: Name) -> Option<Answer<RequestId>> {
        let resumed = self.cache.resume(name);
        if let (Mistake::StaleImage, Some(Ok(id))) = (self.mistake, &resumed) {
            self.spoil_slot(PoolKind::SwaData, *id);
        }
        resumed
    }

    fn discard(&mut self, name: Name) -> bool {
        self.cache.discard(name)
    }

    fn pin(&mut self, lease: Name, text: &Text, until: Duration) -> Result<Pinned, PinRefused> {
        self.cache.pin(lease, text, until)
    }

    fn unpin(&mut self, lease: Name) -> bool {
        self.cache.unpin(lease)
    }

    fn expire(&mut self, now: Duration) -> usize {
        self.cache.expire(now)
    }

    fn own_blocks(&self, id: RequestId) -> Option<Vec<bool>> {
        self.cache.own_blocks(id)
    }

    fn counts(&self) -> Counts {
        Reuse::counts(&self.cache)
    }

    fn drain(&mut self, batch: &mut EventBatch) -> Drained {
        self.cache.drain(batch)
    }

    fn snapshot(&mut self) -> EventBatch {
        self.cache.snapshot()
    }

    fn resident(&self) -> EventBatch {
        self.cache.resident()
    }

    fn audit(&self) -> Result<(), String> {
        self.cache.audit()
    }
}

/// Runs a mistake from a seed: the divergence if it is found, else the counts.
fn run(mistake: Mistake, seed: u64, ops: u64) -> Result<Happened, Divergence> {
    let config = CacheConfig {
        model: ModelConfig::preset("tiny").expect("a preset"),
        max_draft: [0, 3][seed as usize % 2],
        max_requests: 3,
        num_blocks: 5,
        max_context: 280,
        max_step_tokens: 260,
        num_checkpoints: 4,
        checkpoint_interval: 128,
        max_suspended: 2,
        ..kernel_reuse_config(seed)
    };
    let library = Arc::new(Library::new(&config));
    let device = EmuDevice::new(EmuOptions { seed, ..EmuOptions::default() });
    let new = || Broken { cache: Cache::new(&device, &config, &library, seed), mistake };
    random_run(seed, ops, Manners::Genuine, &config, &new, &mut |_| ())
}

/// Without a mistake nothing is found, and requests reuse prefixes, are copied and are resumed.
#[test]
fn a_cache_never_leaves_the_model() {
    let runs: Vec<_> =
        (0..2_u64).into_par_iter().map(|seed| run(Mistake::Nothing, seed, 250)).collect();
    let mut counts = Happened::new();
    for done in runs {
        let done = done.unwrap_or_else(|found| panic!("{found:?}"));
        done.into_iter().for_each(|(what, count)| *counts.entry(what).or_default() += count);
    }
    for what in ["blocks evicted", "fork", "resume", "suspend", "tokens reused"] {
        assert!(counts.get(what).is_some_and(|&count| count > 0), "{what}: {counts:?}");
    }
}

/// Each mistake is found, every other one with drafts.
#[test]
fn every_mistake_is_found() {
    all_are_found(0);
}

#[test]
#[ignore = "half a minute: cargo test --release -p dsv4-kv-stress --test stress -- --ignored from_other_seeds"]
fn every_mistake_is_found_from_other_seeds() {
    all_are_found(1);
}

fn all_are_found(first: u64) {
    let cases: Vec<_> = (first..).map(|seed| seed % 2).zip(Mistake::ALL).collect();
    let found: Vec<_> =
        cases.par_iter().map(|&(seed, mistake)| run(mistake, seed, 1_500)).collect();
    for ((seed, mistake), found) in cases.into_iter().zip(found) {
        let found =
            found.err().unwrap_or_else(|| panic!("{mistake:?} was missed from seed {seed}"));
        println!("{mistake:?}, seed {seed}: operation {}, {}", found.op, found.what);
    }
}
