//! What a cache answers, as something that can be kept and compared.

use dsv4_kv::{KvError, StepPlan};

/// An answer; a refusal as its `Debug` text.
pub type Answer<T> = Result<T, String>;

/// An answer of the cache as one that can be kept and compared.
///
/// # Errors
/// The text of the cache's error.
pub fn answer<T>(result: Result<T, KvError>) -> Answer<T> {
    result.map_err(|error| format!("{error:?}"))
}

/// What came of a step.
#[derive(Debug)]
pub struct Report {
    /// The answer to its begin. If it was refused there is nothing else, but maybe the array.
    pub begun: Answer<StepPlan>,
    /// StepMeta of the group afterwards, if it can be read.
    pub array: Option<Vec<i32>>,
    /// The device's block table while it was open, if there is a device.
    pub table: Option<Vec<i32>>,
    /// Blocks that were free while it was open, if that can be asked.
    pub free: Option<u32>,
    /// The answers to a release of each of its requests while it was open, if that can be tried.
    pub releases: Vec<Answer<()>>,
    /// The step of the other group that ran while it was open.
    pub meanwhile: Option<Box<Report>>,
    /// The answers to the commits that were tried.
    pub commits: Vec<Answer<()>>,
}

impl Report {
    /// Of a step that was not begun.
    #[must_use]
    pub fn refused(error: &KvError, array: Option<Vec<i32>>) -> Self {
        Self { array, ..Self::begun(Err(format!("{error:?}"))) }
    }

    /// Of a step that was begun, and nothing more so far.
    #[must_use]
    pub fn begun(begun: Answer<StepPlan>) -> Self {
        Self {
            begun,
            array: None,
            table: None,
            free: None,
            releases: Vec::new(),
            meanwhile: None,
            commits: Vec::new(),
        }
    }
}

/// What a ledger counts, between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Blocks that nobody has.
    pub free: u32,
    /// Blocks of the prefix tree.
    pub tree: u32,
    /// Those of them that nobody refers to.
    pub evictable: u32,
    /// Checkpoints that nobody has.
    pub free_checkpoints: u32,
    /// Checkpoints of the prefix tree.
    pub tree_checkpoints: u32,
    /// Checkpoints of answers that requests have aside.
    pub outputs: u32,
    /// Blocks that were evicted so far.
    pub evicted: u64,
}

/// A lease as its holder sees it: tokens and bytes.
pub type Pinned = (u32, u64);

/// Token ids for commits to tell.
pub const TOKEN_IDS: [u32; 1024] = [7; 1024];
