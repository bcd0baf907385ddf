//! What is put to the test where host memory keeps what the device evicts.

use dsv4_kv::{Admission, KvError, TierEvent};

use super::op::Name;
use super::text::Text;

/// What a host tier shows of itself.
#[derive(Debug)]
pub struct Seen {
    /// What it did since it was last asked.
    pub events: Vec<TierEvent>,
    /// Prompts that are still to arrive.
    pub wanted: Vec<Name>,
    /// Whether something is on its way, in either direction.
    pub is_moving: bool,
    /// Checkpoints that host memory had no room for any more.
    pub evicted: u64,
}

/// Something that has a host tier like a cache. What is to arrive stays with it, by name.
pub trait HostTier {
    /// Asks for what host memory has of a prompt; `false` if that is no more than the device has.
    ///
    /// # Errors
    /// The cache's refusal.
    fn prefetch(&mut self, name: Name, text: &Text) -> Result<bool, KvError>;

    /// A prompt is wanted no more; `false` if it was not to arrive.
    fn cancel(&mut self, name: Name) -> bool;

    /// Admits a request with its prompt, and waits for what host memory has of it.
    ///
    /// # Errors
    /// The cache's refusal.
    fn admit_waiting(&mut self, text: &Text) -> Result<Admission, KvError>;

    /// Enters what has arrived, and begins what comes next.
    ///
    /// # Errors
    /// The cache's refusal.
    fn advance(&mut self) -> Result<(), KvError>;

    /// The same until nothing is left to do.
    ///
    /// # Errors
    /// The cache's refusal.
    fn settle(&mut self) -> Result<(), KvError>;

    /// The device does all that is queued.
    fn catch_up(&mut self);

    /// Tokens of a prompt down to the deepest checkpoint that the device or host memory has.
    fn there(&self, text: &Text) -> u32;

    /// What it shows of itself.
    fn seen(&mut self) -> Seen;

    /// Counts everything again.
    ///
    /// # Errors
    /// What is not as it must be.
    fn audit(&self) -> Result<(), String>;
}
