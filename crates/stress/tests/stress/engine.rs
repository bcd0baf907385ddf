//! Tests of the stress test itself: the ledger must pass, and a ledger with any of these mistakes must fail.

use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::step_meta::{Section, StepLayout};
use dsv4_kv::{BlockId, CacheConfig, KvError, LayerGroup, RequestId, SlotId};
use dsv4_kv_stress::answer::Report;
use dsv4_kv_stress::drive::Counts;
use dsv4_kv_stress::generate::{Manners, config};
use dsv4_kv_stress::model::Model;
use dsv4_kv_stress::op::{Accept, Layers, Op, Part, Script, Step};
use dsv4_kv_stress::reuse::Reuse;
use dsv4_kv_stress::subject::{LedgerOnly, Subject};
use dsv4_kv_stress::{random_run, stress, try_script};
use include_dir::{Dir, include_dir};

/// A short run of what `cargo xtask stress` does for longer. Every kind of answer must occur.
#[test]
fn the_ledger_never_leaves_the_model() {
    let mut counts = Counts::new();
    for seed in 0..16 {
        let config = config(seed);
        let done =
            stress(seed, 20_000, Manners::Any, &config, || LedgerOnly::new(&config).unwrap());
        let done = done.unwrap_or_else(|failure| panic!("{failure:#?}"));
        done.into_iter().for_each(|(what, count)| *counts.entry(what).or_default() += count);
    }
    for what in [
        "admit",
        "admit refused: NoFreeSlot",
        "blocks given back by a drop",
        "commit",
        "commit refused: AcceptedTooMany",
        "commit refused: CommitMismatch",
        "commit refused: DuplicateRequest",
        "commit refused: ForeignRequest",
        "commit refused: NotInStep",
        "commit refused: NotRollbackable",
        "commit refused: TokenCount",
        "commit refused: UnknownRequest",
        "draft step",
        "draft step refused: ContextTooLong",
        "draft step refused: Overwritten",
        "dropped after kernels",
        "discard",
        "dropped untouched",
        "fork",
        "fork refused: ForeignRequest",
        "fork refused: NoFreeSlot",
        "fork refused: OutOfBlocks",
        "fork refused: UnknownRequest",
        "release",
        "release refused: ForeignRequest",
        "release refused: UnknownRequest",
        "rewind",
        "rewind refused: CannotRewind",
        "rewind refused: ForeignRequest",
        "rewind refused: UnknownRequest",
        "resume",
        "resume refused: NoFreeSlot",
        "suspend",
        "suspend refused: NoRoomToSuspend",
        "steps during another",
        "tokens accepted",
        "tokens rejected",
        "trunk step",
        "trunk step refused: ContextTooLong",
        "trunk step refused: DuplicateRequest",
        "trunk step refused: ForeignRequest",
        "trunk step refused: NoTokens",
        "trunk step refused: OutOfBlocks",
        "trunk step refused: Overwritten",
        "trunk step refused: StepTooLong",
        "trunk step refused: TooManyRequests",
        "trunk step refused: UnknownRequest",
        "trunk step refused: WrongStart",
    ] {
        assert!(counts.get(what).is_some_and(|&count| count > 100), "{what}: {counts:#?}");
    }
}

/// A mistake in the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mistake {
    /// A released block is never free again.
    LeakedBlock,
    /// Blocks of a dropped step are never free again.
    DropKeepsBlocks,
    /// The second request reports a block of the first.
    SharedBlock,
    /// A request gets the same block twice.
    RepeatedBlock,
    /// Rejected tokens become final.
    RejectedTokensKept,
    /// Tokens of a dropped step become final.
    DroppedTokensKept,
    /// A dropped step counts as one whose kernels never ran.
    WrittenForgotten,
    /// Every dropped step counts as one whose kernels ran.
    WrittenAlways,
    /// Steps of the draft layers are recorded as steps of the trunk.
    WrongGroup,
    /// The number of tokens in one group is reported for the other.
    MixedGroups,
    /// A refused commit ends the step.
    RefusedCommitEnds,
    /// A commit may leave out requests of the step.
    HalfACommit,
    /// The draft layers are rewound to more tokens than they have.
    RewoundTooFar,
    /// A request can be released while a step with it is open.
    ReleasedInStep,
    /// The ring has one row less than the drafts need.
    ShortRing,
    /// A refused step changes StepMeta.
    HalfAStep,
    /// A new block is not entered into the device's table.
    StaleTable,
    /// A stale handle reaches the next owner of its slot.
    StaleHandle,
    /// A second release of the same request is accepted.
    DoubleRelease,
    /// A handle of another cache is refused as a stale handle.
    ForeignHandle,
    /// A refusal names the wrong number.
    WrongShortfall,
    /// The cache fails when it becomes idle after [`FEW`] operations. It is not one of [`Mistake::ALL`].
    FailsWhenIdle,
}

/// Random operations of the runs with [`Mistake::FailsWhenIdle`].
const FEW: u64 = 40;

impl Mistake {
    const ALL: [Self; 21] = [
        Self::LeakedBlock,
        Self::DropKeepsBlocks,
        Self::SharedBlock,
        Self::RepeatedBlock,
        Self::RejectedTokensKept,
        Self::DroppedTokensKept,
        Self::WrittenForgotten,
        Self::WrittenAlways,
        Self::WrongGroup,
        Self::MixedGroups,
        Self::RefusedCommitEnds,
        Self::HalfACommit,
        Self::RewoundTooFar,
        Self::ReleasedInStep,
        Self::ShortRing,
        Self::HalfAStep,
        Self::StaleTable,
        Self::StaleHandle,
        Self::DoubleRelease,
        Self::ForeignHandle,
        Self::WrongShortfall,
    ];
}

/// A ledger with a mistake.
struct Broken {
    ledger: LedgerOnly,
    mistake: Mistake,
    leaked: u32,
    slots: u32,
}

impl Broken {
    fn new(config: &CacheConfig, mistake: Mistake) -> Self {
        let ledger = LedgerOnly::new(config).unwrap();
        Self { ledger, mistake, leaked: 0, slots: config.max_requests }
    }

    /// The step as the ledger receives it.
    fn told(&self, step: &Step) -> Step {
        let mut told = step.clone();
        match self.mistake {
            Mistake::RejectedTokensKept => {
                for accept in told.commits.iter_mut().flatten() {
                    let mut parts = step.parts.iter();
                    let part = parts.find(|part| part.request == accept.request);
                    accept.accepted = part.map_or(accept.accepted, |part| part.tokens);
                }
            }
            Mistake::DroppedTokensKept if told.commits.is_empty() => {
                let all =
                    |part: &Part| Accept { request: part.request, accepted: part.tokens, told: 0 };
                told.commits.push(step.parts.iter().map(all).collect());
            }
            Mistake::WrittenForgotten if told.commits.len() < 2 => told.layers = Layers::None,
            Mistake::WrittenAlways => told.layers = Layers::All,
            Mistake::WrongGroup => told.group = LayerGroup::Trunk,
            Mistake::RefusedCommitEnds => told.commits.truncate(1),
            Mistake::HalfACommit => {
                let names = |commit: &[Accept], part: &Part| {
                    commit.iter().any(|accept| accept.request == part.request)
                };
                for commit in &mut told.commits {
                    let missing = step.parts.iter().filter(|part| !names(commit, part));
                    let missing = missing.map(|part| (part.request, part.tokens));
                    for (request, accepted) in missing.collect::<Vec<_>>() {
                        commit.push(Accept { request, accepted, told: 0 });
                    }
                }
            }
            _ => {}
        }
        told
    }

    /// Applies the mistake to the answer.
    fn change(&mut self, step: &Step, report: &mut Report) {
        let group = step.group.index();
        let Ok(plan) = report.begun.clone() else {
            match (self.mistake, &mut report.begun) {
                (Mistake::HalfAStep, _) => {
                    self.ledger.arrays[group][0] += 1;
                    report.array = Some(self.ledger.arrays[group].clone());
                }
                (Mistake::WrongShortfall, Err(error)) => {
                    *error = error.replace("needed: ", "needed: 1");
                }
                _ => {}
            }
            return;
        };
        let layout = plan.layout();
        let dropped = !report.commits.iter().any(Result::is_ok);
        let array = report.array.as_mut().unwrap();
        match self.mistake {
            Mistake::DropKeepsBlocks if dropped => self.leaked += plan.new_blocks,
            Mistake::RefusedCommitEnds => {
                let refused = Err(format!("{:?}", KvError::NoOpenStep { group: step.group }));
                let tried = step.commits.len();
                if dropped {
                    report.commits.resize(tried, refused);
                }
            }
            Mistake::ReleasedInStep => report.releases.fill(Ok(())),
            Mistake::ShortRing => shorten_ring(array, layout),
            Mistake::StaleTable if plan.new_blocks > 0 => {
                array[layout.range(Section::TableBlock).start] = -1;
            }
            _ => {}
        }
    }
}

/// Changes the ring rows of a step.
fn shorten_ring(array: &mut [i32], layout: StepLayout) {
    let (at, positions) = (layout.range(Section::RingRow), layout.range(Section::Position));
    for (row, position) in at.zip(positions) {
        let (row_now, position) = (array[row], array[position]);
        if row_now >= 0 && position >= 128 {
            array[row] = row_now - row_now % 128 + position % 128;
        }
    }
}

impl Subject for Broken {
    const HAS_LAYERS: bool = false;

    fn admit(&mut self) -> Result<RequestId, KvError> {
        self.ledger.admit()
    }

    fn release(&mut self, id: RequestId) -> Result<(), KvError> {
        let id = match self.mistake {
            Mistake::StaleHandle => self.ledger.ledger.request_in(id.slot()).unwrap_or(id),
            _ => id,
        };
        match (self.ledger.release(id), self.mistake) {
            (Err(_), Mistake::DoubleRelease) => Ok(()),
            (Err(KvError::ForeignRequest { request }), Mistake::ForeignHandle) => {
                Err(KvError::UnknownRequest { request })
            }
            (Ok(()), Mistake::LeakedBlock) => {
                self.leaked += 1;
                Ok(())
            }
            (result, _) => result,
        }
    }

    fn rewind_draft(&mut self, id: RequestId, committed: u32) -> Result<(), KvError> {
        match self.ledger.rewind_draft(id, committed) {
            Err(KvError::CannotRewind { .. }) if matches!(self.mistake, Mistake::RewoundTooFar) => {
                Ok(())
            }
            result => result,
        }
    }

    fn step(&mut self, model: &Model, step: &Step) -> Report {
        let mut report = self.ledger.step(model, &self.told(step));
        self.change(step, &mut report);
        report
    }

    fn blocks(&self, id: RequestId) -> Option<Vec<BlockId>> {
        let mut blocks = self.ledger.blocks(id)?;
        match self.mistake {
            Mistake::SharedBlock => {
                let slots = (0..self.slots).map(SlotId);
                let others = slots.filter_map(|slot| self.ledger.ledger.request_in(slot));
                let others = others.filter(|&other| other != id);
                let other = others.filter_map(|other| self.ledger.blocks(other)).flatten().next();
                if let (Some(block), Some(other)) = (blocks.last_mut(), other) {
                    *block = other;
                }
            }
            Mistake::RepeatedBlock if blocks.len() > 1 => blocks[1] = blocks[0],
            _ => {}
        }
        Some(blocks)
    }

    fn tokens(&self, group: LayerGroup, id: RequestId) -> Option<u32> {
        let group = if self.mistake == Mistake::MixedGroups { LayerGroup::Draft } else { group };
        self.ledger.tokens(group, id)
    }

    fn counts(&self) -> (u32, u32) {
        let (free, live) = Subject::counts(&self.ledger);
        (free.saturating_sub(self.leaked), live)
    }

    fn reuse(&mut self) -> &mut dyn Reuse {
        &mut self.ledger
    }

    fn check_bytes(&mut self, model: &Model, turn: u64) -> Result<(), String> {
        let is_late = turn >= FEW && model.live().next().is_none();
        match self.mistake {
            Mistake::FailsWhenIdle if is_late => Err("it is idle".to_owned()),
            _ => Ok(()),
        }
    }
}

fn broken_config() -> CacheConfig {
    CacheConfig {
        max_draft: 3,
        max_requests: 4,
        num_blocks: 6,
        max_context: 400,
        max_step_tokens: 300,
        max_suspended: 2,
        ..CacheConfig::new(ModelConfig::preset("tiny").unwrap())
    }
}

/// A divergence of the releases at the end of a run is recorded with the operations of that run, and no others.
#[test]
fn a_divergence_at_the_end_is_shrunk() {
    let config = broken_config();
    let new = || Broken::new(&config, Mistake::FailsWhenIdle);
    let mut at_the_end = 0;
    for seed in 0..10 {
        let run = random_run(seed, FEW, Manners::Any, &config, &new, &mut |_| ());
        // No request may be left to release.
        let Err(found) = run else { continue };
        let failure = stress(seed, FEW, Manners::Any, &config, new).expect_err("a divergence");
        assert_eq!(failure.found, found, "seed {seed}");
        assert!(found.op >= FEW && failure.script.ops.len() <= FEW as usize, "{failure:#?}");
        assert_eq!(try_script(new, &failure.script).unwrap_err(), failure.shrunk);
        at_the_end += 1;
    }
    assert!(at_the_end >= 5, "only {at_the_end} runs end with requests");
}

/// Each mistake is found from every seed, and shrinks to a script that a person can read.
#[test]
fn every_mistake_is_found_and_shrunk() {
    let config = broken_config();
    for mistake in Mistake::ALL {
        for seed in 0..10 {
            let new = || Broken::new(&config, mistake);
            let failure = stress(seed, 20_000, Manners::Any, &config, new)
                .err()
                .unwrap_or_else(|| panic!("{mistake:?} was not found from seed {seed}"));
            let ops = failure.script.ops.len();
            assert!(ops <= 25, "{mistake:?}, seed {seed}: {ops} operations: {failure:#?}");
            assert_eq!(try_script(new, &failure.script).unwrap_err(), failure.shrunk);
            let ledger = try_script(|| LedgerOnly::new(&config).unwrap(), &failure.script);
            ledger.unwrap_or_else(|divergence| panic!("the ledger passes: {divergence:?}"));
        }
    }
}

/// Scripts that once failed, or that are difficult.
static SCRIPTS: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/scripts");

#[test]
fn the_scripts_pass() {
    assert!(SCRIPTS.files().count() > 3);
    for file in SCRIPTS.files() {
        let path = file.path().display();
        let script: Script = serde_json::from_slice(file.contents())
            .unwrap_or_else(|error| panic!("{path}: {error}"));
        assert!(script.ops.iter().any(|op| matches!(op, Op::Step(_))));
        try_script(|| LedgerOnly::new(&script.config).unwrap(), &script)
            .unwrap_or_else(|divergence| panic!("{path}: {divergence:?}"));
    }
}
