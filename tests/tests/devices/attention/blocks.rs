//! The blocks that share a query.

use kv_layout::attention::KeySplit;

/// Among how many blocks the keys of a query are split, and the channels of its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    pub split: KeySplit,
    /// What the launch takes for the multiprocessors of the GPU.
    pub multiprocessors: u32,
    /// Whether the launch has memory by which eight blocks tell each other a query's weights.
    pub exchanges: bool,
}

impl Blocks {
    /// Blocks with all channels.
    pub const fn whole(split: KeySplit) -> Self {
        Self { split, multiprocessors: 0, exchanges: false }
    }

    /// Two for each of those, with half of the channels.
    pub const fn halves(split: KeySplit) -> Self {
        Self { split, multiprocessors: u32::MAX, exchanges: false }
    }

    /// Eight for each query; those of [`Self::halves`] where that is not possible.
    pub const fn spread(split: KeySplit) -> Self {
        Self { exchanges: true, ..Self::halves(split) }
    }
}
