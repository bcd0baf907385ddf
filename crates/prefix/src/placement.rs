//! Where a request takes checkpoints of its prompt.

use crate::policy::Origin;

/// Where checkpoints of a prompt are taken: at its last boundary, and as this says. Positions are tokens, and all
/// are multiples of the tokens of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Whether one is taken where the prompt leaves what is in the tree.
    pub junctions: bool,
    /// One at each multiple of so many tokens; a multiple of `block_tokens`, or `None`.
    pub interval: Option<u32>,
}

/// The checkpoints of one prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checkpoints {
    placement: Placement,
    /// Its last boundary that leaves a token to compute.
    end: u32,
    junction: Option<u32>,
}

impl Placement {
    /// The checkpoints of a prompt of `tokens` tokens, of which `matched` tokens are in the tree.
    #[must_use]
    pub fn checkpoints(self, tokens: u32, matched: u32) -> Checkpoints {
        let end = tokens.saturating_sub(1) / self.block_tokens * self.block_tokens;
        let junction = (self.junctions && matched > 0).then_some(matched);
        Checkpoints { placement: self, end, junction }
    }
}

impl Checkpoints {
    /// Tokens down to the last boundary of the prompt that leaves a token to compute. What comes behind is its answer.
    #[must_use]
    pub const fn end(&self) -> u32 {
        self.end
    }

    /// The first one behind `tokens` tokens: how many tokens it covers, and why it is there.
    #[must_use]
    pub fn after(&self, tokens: u32) -> Option<(u32, Origin)> {
        let behind = |at: &u32| (tokens + 1..=self.end).contains(at);
        let interval = self.placement.interval.map(|every| (tokens / every + 1) * every);
        let interval = interval.filter(behind).map(|at| (at, Origin::Interval));
        let junction = self.junction.filter(behind).map(|at| (at, Origin::Junction));
        let end = Some(self.end).filter(behind).map(|at| (at, Origin::Prompt));
        // Of two at the same place the first named gives the origin.
        [end, junction, interval].into_iter().flatten().min_by_key(|&(at, _)| at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(placement: Placement, tokens: u32, matched: u32, from: u32) -> Vec<(u32, Origin)> {
        let checkpoints = placement.checkpoints(tokens, matched);
        let next = |&(at, _): &(u32, Origin)| checkpoints.after(at);
        std::iter::successors(checkpoints.after(from), next).collect()
    }

    #[test]
    fn checkpoints_come_in_order_and_once() {
        use Origin::{Interval, Junction, Prompt};
        let placement = Placement { block_tokens: 128, junctions: true, interval: Some(2048) };
        let want = [(2048, Interval), (3072, Junction), (4096, Interval), (4992, Prompt)];
        assert_eq!(all(placement, 5000, 3072, 0), want);
        assert_eq!(all(placement, 5000, 3072, 3072), want[2..]);
        assert_eq!(all(placement, 5000, 2048, 0)[0], (2048, Junction));
        // An exact repeat, and prompts that close no block, or none before their last token.
        assert_eq!(all(placement, 5000, 4992, 4992), []);
        assert_eq!(all(placement, 128, 0, 0), []);
        assert_eq!(all(placement, 129, 0, 0), [(128, Prompt)]);
        assert_eq!(all(placement, 0, 0, 0), []);
        let end = Placement { junctions: false, interval: None, ..placement };
        assert_eq!(all(end, 5000, 3072, 0), [(4992, Prompt)]);
    }
}
