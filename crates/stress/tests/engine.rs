//! The stress test's engine: the books pass it, and books with any of these mistakes do not.

use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::{BlockId, CacheConfig, KvError, RequestId, StepPlan, StepRequest};
use dsv4_kv_stress::drive::Counts;
use dsv4_kv_stress::generate::{Manners, config};
use dsv4_kv_stress::model::Model;
use dsv4_kv_stress::op::{Op, Part, Script};
use dsv4_kv_stress::subject::{Books, Subject};
use dsv4_kv_stress::{stress, try_script};
use include_dir::{Dir, include_dir};

/// A short run of what `cargo xtask stress` does for long; every kind of answer comes about.
#[test]
fn the_books_never_leave_the_model() {
    let mut counts = Counts::new();
    for seed in 0..16 {
        let config = config(seed);
        let done = stress(seed, 20_000, Manners::Any, &config, || Books::new(&config).unwrap());
        let done = done.unwrap_or_else(|failure| panic!("{failure:#?}"));
        done.into_iter().for_each(|(what, count)| *counts.entry(what).or_default() += count);
    }
    for what in [
        "admit",
        "admit refused: NoFreeSlot",
        "commit",
        "commit refused: AcceptedTooMany",
        "commit refused: NotRollbackable",
        "commit refused: UnknownRequest",
        "prepare",
        "prepare refused: ContextTooLong",
        "prepare refused: DuplicateRequest",
        "prepare refused: NotRollbackable",
        "prepare refused: NoTokens",
        "prepare refused: OutOfBlocks",
        "prepare refused: StepTooLong",
        "prepare refused: TooManyRequests",
        "prepare refused: UnknownRequest",
        "prepare refused: WrongStart",
        "release",
        "release refused: UnknownRequest",
        "tokens accepted",
        "tokens rejected",
    ] {
        assert!(counts.get(what).is_some_and(|&count| count > 100), "{what}: {counts:#?}");
    }
}

/// A mistake in the books.
#[derive(Clone, Copy, Debug)]
enum Mistake {
    /// A released block never comes back.
    LeakedBlock,
    /// The second request is shown a block of the first.
    SharedBlock,
    /// A request gets a block twice.
    RepeatedBlock,
    /// Rejected tokens become final.
    RejectedTokensKept,
    /// The ring has one row less than the drafts need.
    ShortRing,
    /// A refused step leaves something behind in StepMeta.
    HalfAStep,
    /// A new block is not entered into the device's table.
    StaleTable,
    /// A handle reaches the slot's next owner.
    StaleHandle,
    /// Releasing twice is accepted.
    DoubleRelease,
    /// A refusal names the wrong number.
    WrongShortfall,
}

/// Books with a mistake.
struct Broken {
    books: Books,
    mistake: Mistake,
    leaked: u32,
    given: Vec<RequestId>,
}

impl Broken {
    fn new(config: &CacheConfig, mistake: Mistake) -> Self {
        Self { books: Books::new(config).unwrap(), mistake, leaked: 0, given: Vec::new() }
    }

    /// Changes the ring rows of a step.
    fn shorten_ring(&mut self) {
        use dsv4_kv::plan::Section;
        let layout = self.books.ledger.layout();
        let (at, positions) = (layout.range(Section::RingRow), layout.range(Section::Position));
        for (row, position) in at.zip(positions) {
            let (row_now, position) = (self.books.array[row], self.books.array[position]);
            if row_now >= 0 && position >= 128 {
                self.books.array[row] = row_now - row_now % 128 + position % 128;
            }
        }
    }
}

impl Subject for Broken {
    fn admit(&mut self) -> Result<RequestId, KvError> {
        let id = self.books.admit()?;
        self.given.push(id);
        Ok(id)
    }

    fn release(&mut self, id: RequestId) -> Result<(), KvError> {
        let newest = self.given.iter().rfind(|given| given.slot == id.slot);
        let id = match self.mistake {
            Mistake::StaleHandle => newest.copied().unwrap_or(id),
            _ => id,
        };
        match self.books.release(id) {
            Err(_) if matches!(self.mistake, Mistake::DoubleRelease) => Ok(()),
            Ok(()) if matches!(self.mistake, Mistake::LeakedBlock) => {
                self.leaked += 1;
                Ok(())
            }
            result => result,
        }
    }

    fn prepare(
        &mut self,
        model: &Model,
        parts: &[Part],
        step: &[StepRequest],
    ) -> Result<StepPlan, KvError> {
        use dsv4_kv::plan::Section;
        let result = self.books.prepare(model, parts, step);
        let layout = self.books.ledger.layout();
        match (self.mistake, result) {
            (Mistake::HalfAStep, Err(error)) => {
                self.books.array[0] += 1;
                Err(error)
            }
            (Mistake::WrongShortfall, Err(KvError::OutOfBlocks { needed, free })) => {
                Err(KvError::OutOfBlocks { needed: needed + 1, free })
            }
            (Mistake::ShortRing, Ok(plan)) => {
                self.shorten_ring();
                Ok(plan)
            }
            (Mistake::StaleTable, Ok(plan)) if plan.new_blocks > 0 => {
                self.books.array[layout.range(Section::TableBlock).start] = -1;
                Ok(plan)
            }
            (_, result) => result,
        }
    }

    fn commit(&mut self, id: RequestId, accepted: u32) -> Result<(), KvError> {
        self.books.commit(id, accepted)
    }

    fn array(&self) -> Vec<i32> {
        self.books.array()
    }

    fn blocks(&self, id: RequestId) -> Option<Vec<BlockId>> {
        let mut blocks = self.books.blocks(id)?;
        match self.mistake {
            Mistake::SharedBlock => {
                let others = self.given.iter().filter(|&&other| other != id);
                let other = others.filter_map(|&other| self.books.blocks(other)).flatten().next();
                if let (Some(block), Some(other)) = (blocks.last_mut(), other) {
                    *block = other;
                }
            }
            Mistake::RepeatedBlock if blocks.len() > 1 => blocks[1] = blocks[0],
            _ => {}
        }
        Some(blocks)
    }

    fn tokens(&self, id: RequestId) -> Option<u32> {
        let tokens = self.books.tokens(id)?;
        Some(tokens + u32::from(matches!(self.mistake, Mistake::RejectedTokensKept) && tokens > 2))
    }

    fn counts(&self) -> (u32, u32) {
        let (free, live) = self.books.counts();
        (free.saturating_sub(self.leaked), live)
    }
}

/// Each mistake is found from every seed, and comes down to a script a person can read.
#[test]
fn every_mistake_is_found_and_shrunk() {
    use Mistake::*;
    let all = [
        LeakedBlock,
        SharedBlock,
        RepeatedBlock,
        RejectedTokensKept,
        ShortRing,
        HalfAStep,
        StaleTable,
        StaleHandle,
        DoubleRelease,
        WrongShortfall,
    ];
    for mistake in all {
        for seed in 0..10 {
            let config = CacheConfig {
                max_draft: 3,
                max_requests: 4,
                num_blocks: 6,
                max_context: 400,
                max_step_tokens: 300,
                ..CacheConfig::smallest(ModelConfig::preset("tiny").unwrap())
            };
            let new = || Broken::new(&config, mistake);
            let failure = stress(seed, 20_000, Manners::Any, &config, new)
                .err()
                .unwrap_or_else(|| panic!("{mistake:?} was not found from seed {seed}"));
            let ops = failure.script.ops.len();
            assert!(ops <= 25, "{mistake:?}, seed {seed}: {ops} operations: {failure:#?}");
            assert_eq!(try_script(new, &failure.script).unwrap_err(), failure.shrunk);
            let books = try_script(|| Books::new(&config).unwrap(), &failure.script);
            books.unwrap_or_else(|divergence| panic!("the books pass: {divergence:?}"));
        }
    }
}

/// Scripts that once failed, or that are hard.
static SCRIPTS: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/scripts");

#[test]
fn the_scripts_pass() {
    assert!(SCRIPTS.files().count() > 3);
    for file in SCRIPTS.files() {
        let path = file.path().display();
        let script: Script = serde_json::from_slice(file.contents())
            .unwrap_or_else(|error| panic!("{path}: {error}"));
        assert!(script.ops.iter().any(|op| matches!(op, Op::Prepare(_))));
        try_script(|| Books::new(&script.config).unwrap(), &script)
            .unwrap_or_else(|divergence| panic!("{path}: {divergence:?}"));
    }
}
