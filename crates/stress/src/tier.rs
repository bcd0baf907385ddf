//! The subject where a host tier keeps the prefixes that the device evicts.

use dsv4_kv::{Admission, KvError, TierEvent};

use super::op::Name;
use super::text::Text;

/// The visible state of a host tier.
#[derive(Debug)]
pub struct Seen {
    /// Its events since the last call.
    pub events: Vec<TierEvent>,
    /// Prompts that have not arrived yet.
    pub wanted: Vec<Name>,
    /// Whether a transfer is under way, in either direction.
    pub is_moving: bool,
    /// Number of checkpoints that host memory has evicted.
    pub evicted: u64,
}

/// A subject with a host tier like that of a cache. It keeps the prompts that have not arrived, by name.
pub trait HostTier {
    /// Requests the prefix of a prompt that host memory has; `false` if the device has as much.
    ///
    /// # Errors
    /// The cache's refusal.
    fn prefetch(&mut self, name: Name, text: &Text) -> Result<bool, KvError>;

    /// Cancels a prefetch; `false` if the prompt was not being fetched.
    fn cancel(&mut self, name: Name) -> bool;

    /// Admits a request with its prompt, and waits for the prefix that host memory has.
    ///
    /// # Errors
    /// The cache's refusal.
    fn admit_waiting(&mut self, text: &Text) -> Result<Admission, KvError>;

    /// Enters finished transfers, and begins the next.
    ///
    /// # Errors
    /// The cache's refusal.
    fn advance(&mut self) -> Result<(), KvError>;

    /// Repeats `Self::advance` until no transfer is left.
    ///
    /// # Errors
    /// The cache's refusal.
    fn settle(&mut self) -> Result<(), KvError>;

    /// Lets the device finish all queued work.
    fn catch_up(&mut self);

    /// Number of tokens of a prompt down to the deepest checkpoint that the device or host memory has.
    fn there(&self, text: &Text) -> u32;

    /// Its visible state.
    fn seen(&mut self) -> Seen;

    /// Counts everything again, and compares.
    ///
    /// # Errors
    /// The first inconsistency.
    fn audit(&self) -> Result<(), String>;
}
