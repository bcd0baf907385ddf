//! Which leaf is evicted first.

/// Why a checkpoint was taken where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Origin {
    /// The last boundary before the end of a prompt.
    Prompt,
    /// A branch point: where two prompts diverge.
    Branch,
    /// A multiple of the interval.
    Interval,
    /// The last boundary before the end of an output.
    Output,
}

impl Origin {
    /// All origins, in the order of [`Self::index`].
    pub const ALL: [Self; 4] = [Self::Prompt, Self::Branch, Self::Interval, Self::Output];

    /// Its place in [`Self::ALL`].
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// The use of a segment, for the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Why its checkpoint was taken.
    pub origin: Origin,
    /// When it was last used or registered. The clock is the number of bytes that the tree has ever been given, and one
    /// more for each hit.
    pub last_use: u64,
    /// Number of prompts that continued from its checkpoint.
    pub hits: u32,
}

/// The order of eviction among unreferenced leaves.
pub trait Policy {
    /// The rank of a leaf: the lowest is evicted first. It is called when a segment becomes such a leaf, or
    /// expendable, and may depend only on `usage`.
    fn rank(&self, usage: &Usage) -> i64;

    /// Whether the checkpoint of a segment may be evicted, in the order of the same ranks, while the segments below it
    /// stay. Then only the checkpoint is freed.
    fn is_expendable(&self, _usage: &Usage) -> bool {
        false
    }
}

/// Least recently used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lru;

impl Policy for Lru {
    fn rank(&self, usage: &Usage) -> i64 {
        usage.last_use as i64
    }
}

/// Least recently used, with a bonus of a quarter of the capacity for each of the first three hits; the checkpoint of an
/// interval or of an output that was never hit counts as last used 1.25 capacities earlier, and is expendable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoredLru {
    /// Bytes of all blocks and checkpoints of the pools.
    pub capacity: u64,
}

impl Policy for ScoredLru {
    fn rank(&self, usage: &Usage) -> i64 {
        let quarter = (self.capacity / 4) as i64;
        let bonus = quarter.saturating_mul(usage.hits.min(3).into());
        let malus = if self.is_expendable(usage) { quarter.saturating_mul(5) } else { 0 };
        (usage.last_use as i64).saturating_add(bonus).saturating_sub(malus)
    }

    fn is_expendable(&self, usage: &Usage) -> bool {
        matches!(usage.origin, Origin::Interval | Origin::Output) && usage.hits == 0
    }
}
