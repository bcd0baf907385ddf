//! Answers of a cache, in a form that can be stored and compared.

use dsv4_kv::{KvError, StepPlan};

/// An answer. An error is kept as its `Debug` text.
pub type Answer<T> = Result<T, String>;

/// Converts a result of the cache to an `Answer`.
///
/// # Errors
/// The text of the cache's error.
pub fn answer<T>(result: Result<T, KvError>) -> Answer<T> {
    result.map_err(|error| format!("{error:?}"))
}

/// The outcome of a step.
#[derive(Debug)]
pub struct Report {
    /// The answer to `begin_step`. If it was refused, only `array` may also be present.
    pub begun: Answer<StepPlan>,
    /// StepMeta of the group after `begin_step`, if the subject can read it.
    pub array: Option<Vec<i32>>,
    /// The device's block table while the step was open, if there is a device.
    pub table: Option<Vec<i32>>,
    /// Number of free blocks while the step was open, if the subject can tell.
    pub free: Option<u32>,
    /// The answers to a release of each request of the step while it was open, if the subject can try that.
    pub releases: Vec<Answer<()>>,
    /// The outcome of the other group's step that ran while this one was open.
    pub meanwhile: Option<Box<Report>>,
    /// The answers to the commits that were tried.
    pub commits: Vec<Answer<()>>,
}

impl Report {
    /// The report of a step that was refused.
    #[must_use]
    pub fn refused(error: &KvError, array: Option<Vec<i32>>) -> Self {
        Self { array, ..Self::begun(Err(format!("{error:?}"))) }
    }

    /// The report of a step that has begun, with nothing else so far.
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

/// The counts of a ledger between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Free blocks.
    pub free: u32,
    /// Blocks of the prefix tree.
    pub tree: u32,
    /// Blocks of the prefix tree that no reference holds.
    pub evictable: u32,
    /// Free checkpoints.
    pub free_checkpoints: u32,
    /// Checkpoints of the prefix tree.
    pub tree_checkpoints: u32,
    /// Checkpoints of answers that are kept aside while their requests run.
    pub outputs: u32,
    /// Blocks that were evicted so far.
    pub evicted: u64,
}

/// A lease as its holder sees it: number of tokens, and bytes.
pub type Pinned = (u32, u64);

/// Token ids that are passed to commits of requests whose ids do not matter.
pub const TOKEN_IDS: [u32; 1024] = [7; 1024];
