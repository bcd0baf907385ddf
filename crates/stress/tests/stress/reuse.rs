//! Tests of the stress test itself where prefixes are shared: the ledger must pass, and a ledger with any of these
//! mistakes must fail.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use dsv4_kv::events::{Drained, Event, EventBatch};
use dsv4_kv::reuse::PinRefused;
use dsv4_kv::{Admission, BlockId, CacheConfig, KvError, LayerGroup, RequestId};
use dsv4_kv_stress::answer::{Answer, Counts, Pinned, Report};
use dsv4_kv_stress::drive::Counts as Happened;
use dsv4_kv_stress::generate::Manners;
use dsv4_kv_stress::generate::reuse::reuse_config;
use dsv4_kv_stress::model::Model;
use dsv4_kv_stress::op::{Name, Part, Step};
use dsv4_kv_stress::reuse::Reuse;
use dsv4_kv_stress::subject::{LedgerOnly, Subject};
use dsv4_kv_stress::text::{BLOCK, Text};
use dsv4_kv_stress::{random_run, stress, try_script};

/// A short run of what `cargo xtask stress` does for longer. Every kind of answer must occur.
#[test]
fn the_ledger_never_leaves_the_model() {
    let mut counts = Happened::new();
    for seed in 0..16 {
        let config = reuse_config(seed);
        let new = || LedgerOnly::new(&config).unwrap();
        let done = stress(seed, 5_000, Manners::Any, &config, new);
        let done = done.unwrap_or_else(|failure| panic!("{failure:#?}"));
        done.into_iter().for_each(|(what, count)| *counts.entry(what).or_default() += count);
    }
    for what in [
        "admit",
        "admit refused: NoFreeSlot",
        "admit with a prompt",
        "admit with a prompt refused: NoFreeSlot",
        "blocks evicted",
        "batches of events",
        "discard",
        "event logs that overflowed",
        "expire",
        "fork",
        "fork refused: NoFreeSlot",
        "fork refused: OutOfBlocks",
        "fork refused: UnknownRequest",
        "pin",
        "pin refused: NothingThere",
        "pin refused: OverBudget",
        "resume",
        "resume refused: NoFreeSlot",
        "resume refused: NoSuchName",
        "suspend",
        "suspend refused: NoRoomToSuspend",
        "suspend refused: UnknownRequest",
        "tokens reused",
        "trunk step refused: OutOfBlocks",
        "unpin",
    ] {
        assert!(counts.get(what).is_some_and(|&count| count > 20), "{what}: {counts:#?}");
    }
}

/// A mistake in shared prefixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    /// Requests of all salts share prefixes.
    SaltIgnored,
    /// A request continues one block after its checkpoint.
    OneBlockMore,
    /// The whole prompt is reused, including its last token.
    NothingToCompute,
    /// A request counts a block of the prefix tree as its own, which it may write.
    SharedBlockWritten,
    /// A block of the prefix tree is given to a second request in place of its own block.
    TwoOwners,
    /// A fork gets no copy of the block that is still written.
    ForkWithoutCopy,
    /// Tokens of a dropped step count as saved in a checkpoint.
    CheckpointBeforeCommit,
    /// A request that ends keeps its references.
    ReferenceKept,
    /// A suspended request that ends keeps its blocks.
    DiscardKeepsBlocks,
    /// Commits pass no token ids.
    NothingTold,
    /// A step that is refused for lack of blocks evicts one.
    RefusalEvicts,
    /// A lease that its holder ended stays active.
    UnpinIgnored,
    /// A lease does not expire.
    LeaseForEver,
    /// A request that was admitted without a prompt shares prefixes.
    SharesWithoutPrompt,
    /// One of 50 batches of removal events is lost.
    RemovalLost,
    /// While no request refers to the tree, only the reused blocks count as matched.
    MatchedTooShort,
}

impl Mistake {
    const ALL: [Self; 14] = [
        Self::SaltIgnored,
        Self::OneBlockMore,
        Self::NothingToCompute,
        Self::SharedBlockWritten,
        Self::TwoOwners,
        Self::ForkWithoutCopy,
        Self::CheckpointBeforeCommit,
        Self::ReferenceKept,
        Self::DiscardKeepsBlocks,
        Self::NothingTold,
        Self::RefusalEvicts,
        Self::UnpinIgnored,
        Self::LeaseForEver,
        Self::SharesWithoutPrompt,
    ];

    /// Mistakes that only events show. A batch is lost only after 50 removals, so that scripts are not short.
    const TOLD: [Self; 2] = [Self::RemovalLost, Self::MatchedTooShort];

    /// Mistakes that also show without a prefix tree.
    const COPIES: [Self; 3] =
        [Self::SharedBlockWritten, Self::ForkWithoutCopy, Self::DiscardKeepsBlocks];
}

/// A ledger with a mistake.
struct Broken {
    ledger: LedgerOnly,
    mistake: Mistake,
    /// Admitted requests, and their texts.
    given: BTreeMap<RequestId, Option<Text>>,
    /// Forks, and the request of which each is a copy.
    forks: BTreeMap<RequestId, RequestId>,
    /// Dropped steps: the text, and the position at which the step ended.
    dropped: Vec<(Text, u32)>,
    next: Name,
    evicted: u32,
    /// Number of batches with removal events only.
    removals: u64,
}

impl Broken {
    fn new(config: &CacheConfig, mistake: Mistake) -> Self {
        let ledger = LedgerOnly::new(config).unwrap();
        let (given, forks) = (BTreeMap::new(), BTreeMap::new());
        // Names that no script uses.
        let (next, dropped) = (Name::MAX / 2, Vec::new());
        Self { ledger, mistake, given, forks, dropped, next, evicted: 0, removals: 0 }
    }

    /// Tokens of a prompt that a dropped step had, in whole blocks.
    fn dropped_of(&self, text: &Text) -> u32 {
        let most = text.prompt_tokens().saturating_sub(1) / BLOCK * BLOCK;
        let same = |(of, tokens): &(Text, u32)| {
            let tokens = tokens / BLOCK * BLOCK;
            (tokens <= most && of.prefix(tokens) == text.prefix(tokens)).then_some(tokens)
        };
        self.dropped.iter().filter_map(same).max().unwrap_or(0)
    }
}

impl Subject for Broken {
    const HAS_LAYERS: bool = false;

    fn admit(&mut self) -> Result<RequestId, KvError> {
        if self.mistake == Mistake::SharesWithoutPrompt {
            let nothing = Text { salt: 0, runs: Vec::new(), answer: 0 };
            return self.ledger.admit_with(&nothing).map(|admission| admission.id);
        }
        let id = self.ledger.admit()?;
        self.given.insert(id, None);
        Ok(id)
    }

    fn release(&mut self, id: RequestId) -> Result<(), KvError> {
        if let (Mistake::ReferenceKept, Some(Some(text))) = (self.mistake, self.given.get(&id)) {
            self.next += 1;
            let _ = self.ledger.pin(self.next, &text.clone(), Duration::MAX);
        }
        self.ledger.release(id)
    }

    fn rewind_draft(&mut self, id: RequestId, committed: u32) -> Result<(), KvError> {
        self.ledger.rewind_draft(id, committed)
    }

    fn step(&mut self, model: &Model, step: &Step) -> Report {
        if self.mistake == Mistake::NothingTold {
            let mut told = step.clone();
            for accept in told.commits.iter_mut().flatten() {
                accept.told = if accept.told == accept.accepted { 0 } else { accept.told };
            }
            return self.ledger.step(model, &told);
        }
        let report = self.ledger.step(model, step);
        let short = report.begun.as_ref().is_err_and(|error| error.starts_with("OutOfBlocks"));
        let there = Reuse::counts(&self.ledger).evictable > self.evicted;
        self.evicted += u32::from(short && there && self.mistake == Mistake::RefusalEvicts);
        if report.begun.is_ok() && !report.commits.iter().any(Result::is_ok) {
            for Part { request, tokens, .. } in &step.parts {
                let request = model.named(*request).filter(|_| step.group == LayerGroup::Trunk);
                let Some((request, text)) = request.and_then(|of| Some((of, of.text()?))) else {
                    continue;
                };
                let end = request.group(LayerGroup::Trunk).tokens + tokens;
                self.dropped.push((text.clone(), end));
            }
        }
        report
    }

    fn blocks(&self, id: RequestId) -> Option<Vec<BlockId>> {
        let mut blocks = self.ledger.blocks(id)?;
        match self.mistake {
            Mistake::TwoOwners => {
                let others = self.given.keys().filter(|&&other| other != id);
                let lent = others.filter_map(|&other| {
                    let own = self.ledger.own_blocks(other)?;
                    let all = self.ledger.blocks(other)?.into_iter().zip(own);
                    all.into_iter().find(|(_, own)| !own).map(|(block, _)| block)
                });
                let own = self.ledger.own_blocks(id)?;
                if let (Some(block), Some(true)) = (lent.into_iter().next(), own.last()) {
                    *blocks.last_mut()? = block;
                }
            }
            Mistake::ForkWithoutCopy => {
                let parent = self.forks.get(&id).and_then(|&of| self.ledger.blocks(of));
                if let Some(parent) = parent.filter(|parent| parent.len() >= blocks.len()) {
                    blocks = parent[..blocks.len()].to_vec();
                }
            }
            _ => {}
        }
        Some(blocks)
    }

    fn tokens(&self, group: LayerGroup, id: RequestId) -> Option<u32> {
        self.ledger.tokens(group, id)
    }

    fn counts(&self) -> (u32, u32) {
        let (free, live) = Subject::counts(&self.ledger);
        (free + self.evicted.min(Reuse::counts(&self.ledger).evictable), live)
    }

    fn reuse(&mut self) -> &mut dyn Reuse {
        self
    }
}

impl Reuse for Broken {
    fn admit_with(&mut self, text: &Text) -> Result<Admission, KvError> {
        let text = match self.mistake {
            Mistake::SaltIgnored => Text { salt: 0, ..text.clone() },
            Mistake::NothingToCompute => {
                let mut longer = text.clone();
                longer.runs.push((text.answer, 1));
                longer
            }
            _ => text.clone(),
        };
        let before = Reuse::counts(&self.ledger);
        let mut admission = self.ledger.admit_with(&text)?;
        match self.mistake {
            Mistake::MatchedTooShort if before.tree == before.evictable => {
                admission.matched = admission.reused;
            }
            Mistake::OneBlockMore if admission.reused > 0 => admission.reused += BLOCK,
            Mistake::CheckpointBeforeCommit => {
                admission.reused = admission.reused.max(self.dropped_of(&text));
                admission.matched = admission.matched.max(admission.reused);
            }
            _ => {}
        }
        self.given.insert(admission.id, Some(text));
        Ok(admission)
    }

    fn fork(&mut self, of: RequestId) -> Result<RequestId, KvError> {
        let id = self.ledger.fork(of)?;
        self.forks.insert(id, of);
        Ok(id)
    }

    fn suspend(&mut self, name: Name, id: RequestId) -> Result<(), KvError> {
        self.ledger.suspend(name, id)
    }

    fn resume(&mut self, name: Name) -> Option<Answer<RequestId>> {
        self.ledger.resume(name)
    }

    fn discard(&mut self, name: Name) -> bool {
        if self.mistake == Mistake::DiscardKeepsBlocks {
            let suspended = self.ledger.suspended.remove(&name);
            let there = suspended.is_some();
            std::mem::forget(suspended);
            return there;
        }
        self.ledger.discard(name)
    }

    fn pin(&mut self, lease: Name, text: &Text, until: Duration) -> Result<Pinned, PinRefused> {
        let for_ever = self.mistake == Mistake::LeaseForEver;
        self.ledger.pin(lease, text, if for_ever { Duration::MAX } else { until })
    }

    fn unpin(&mut self, lease: Name) -> bool {
        if self.mistake == Mistake::UnpinIgnored {
            return self.ledger.leases.remove(&lease).is_some();
        }
        self.ledger.unpin(lease)
    }

    fn expire(&mut self, now: Duration) -> usize {
        self.ledger.expire(now)
    }

    fn own_blocks(&self, id: RequestId) -> Option<Vec<bool>> {
        let mut own = self.ledger.own_blocks(id)?;
        if self.mistake == Mistake::SharedBlockWritten {
            own.fill(true);
        }
        Some(own)
    }

    fn counts(&self) -> Counts {
        let counts = Reuse::counts(&self.ledger);
        let evicted = self.evicted.min(counts.evictable);
        Counts { tree: counts.tree - evicted, evictable: counts.evictable - evicted, ..counts }
    }

    fn drain(&mut self, batch: &mut EventBatch) -> Drained {
        let drained = self.ledger.drain(batch);
        let removes =
            !batch.is_empty() && batch.iter().all(|event| matches!(event, Event::Removed(_)));
        self.removals += u64::from(removes);
        if removes && self.mistake == Mistake::RemovalLost && self.removals.is_multiple_of(50) {
            batch.clear();
        }
        drained
    }

    fn snapshot(&mut self) -> EventBatch {
        self.ledger.snapshot()
    }

    fn resident(&self) -> EventBatch {
        self.ledger.resident()
    }

    fn audit(&self) -> Result<(), String> {
        self.ledger.audit()
    }
}

/// A cache in which each mistake is found, even without events.
fn mistaken_config(seed: u64, num_checkpoints: u32) -> CacheConfig {
    CacheConfig {
        max_draft: 3,
        max_requests: 4,
        num_blocks: 12,
        max_context: 700,
        max_step_tokens: 500,
        num_checkpoints,
        checkpoint_interval: 128,
        max_suspended: 2,
        lease_bytes: u64::MAX,
        event_capacity: 0,
        ..reuse_config(seed)
    }
}

/// Each mistake is found from every one of `seeds`, and shrinks to a script that a person can read.
fn all_are_found(mistakes: &[Mistake], num_checkpoints: u32, seeds: Range<u64>) {
    for &mistake in mistakes {
        for seed in seeds.clone() {
            let config = mistaken_config(seed, num_checkpoints);
            let new = || Broken::new(&config, mistake);
            let failure = stress(seed, 20_000, Manners::Any, &config, new)
                .err()
                .unwrap_or_else(|| panic!("{mistake:?} was not found from seed {seed}"));
            let ops = failure.script.ops.len();
            println!("{mistake:?}: operation {}, in short {ops}", failure.found.op);
            assert!(ops <= 30, "{mistake:?}, seed {seed}: {ops} operations: {failure:#?}");
            assert_eq!(try_script(new, &failure.script).unwrap_err(), failure.shrunk);
            let ledger = try_script(|| LedgerOnly::new(&config).unwrap(), &failure.script);
            ledger.unwrap_or_else(|divergence| panic!("the ledger passes: {divergence:?}"));
        }
    }
}

#[test]
fn every_mistake_is_found_and_shrunk() {
    all_are_found(&Mistake::ALL, 5, 0..2);
}

#[test]
#[ignore = "half a minute: cargo test --release -p dsv4-kv-stress --test stress -- --ignored from_other_seeds"]
fn every_mistake_is_found_from_other_seeds() {
    all_are_found(&Mistake::ALL, 5, 2..4);
}

#[test]
fn mistakes_in_copies_are_found_without_a_prefix_tree() {
    all_are_found(&Mistake::COPIES, 0, 0..4);
}

#[test]
fn mistakes_that_only_events_show_are_found() {
    for mistake in Mistake::TOLD {
        for seed in 0..4 {
            let config = CacheConfig { event_capacity: 4096, ..mistaken_config(seed, 5) };
            let new = || Broken::new(&config, mistake);
            let found = random_run(seed, 20_000, Manners::Any, &config, &new, &mut |_| ());
            let found = found.expect_err(&format!("{mistake:?} was not found from seed {seed}"));
            println!("{mistake:?}, seed {seed}: operation {}, {}", found.op, found.what);
        }
    }
}
