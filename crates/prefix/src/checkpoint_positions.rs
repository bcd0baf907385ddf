//! Where a request takes checkpoints of its prompt.

use crate::policy::Origin;

/// Where checkpoints of a prompt are taken: always at its last boundary, and at the positions configured here.
/// Positions are tokens, and all are multiples of the tokens of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Tokens of a block; with 0 there are no checkpoints.
    pub block_tokens: u32,
    /// Whether a checkpoint is taken where the prompt leaves the tree: the branch point.
    pub branch_points: bool,
    /// A checkpoint is taken at each multiple of this number of tokens, a multiple of
    /// `block_tokens`. With `None` or 0, none is.
    pub interval: Option<u32>,
}

/// The checkpoints of one prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checkpoints {
    placement: Placement,
    /// Its last boundary that leaves a token to compute.
    end: u32,
    branch: Option<u32>,
}

impl Placement {
    /// The checkpoints of a prompt of `tokens` tokens, of which `matched` tokens are in the tree.
    #[must_use]
    pub fn checkpoints(self, tokens: u32, matched: u32) -> Checkpoints {
        let blocks = tokens.saturating_sub(1).checked_div(self.block_tokens).unwrap_or(0);
        let end = blocks * self.block_tokens;
        let branch = (self.branch_points && matched > 0).then_some(matched);
        Checkpoints { placement: self, end, branch }
    }
}

impl Checkpoints {
    /// Tokens down to the last boundary of the prompt that leaves a token to compute. Later boundaries belong to its
    /// output.
    #[must_use]
    pub const fn end(&self) -> u32 {
        self.end
    }

    /// The first checkpoint after `tokens` tokens: the number of tokens that it covers, and its origin.
    #[must_use]
    pub fn after(&self, tokens: u32) -> Option<(u32, Origin)> {
        let behind = |&at: &u32| tokens < at && at <= self.end;
        let next = |every| tokens.checked_div(every)?.checked_add(1)?.checked_mul(every);
        let interval = self.placement.interval.and_then(next);
        let interval = interval.filter(behind).map(|at| (at, Origin::Interval));
        let branch = self.branch.filter(behind).map(|at| (at, Origin::Branch));
        let end = Some(self.end).filter(behind).map(|at| (at, Origin::Prompt));
        // At equal positions the first one in this array gives the origin.
        [end, branch, interval].into_iter().flatten().min_by_key(|&(at, _)| at)
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
        use Origin::{Branch, Interval, Prompt};
        let placement = Placement { block_tokens: 128, branch_points: true, interval: Some(2048) };
        let want = [(2048, Interval), (3072, Branch), (4096, Interval), (4992, Prompt)];
        assert_eq!(all(placement, 5000, 3072, 0), want);
        assert_eq!(all(placement, 5000, 3072, 3072), want[2..]);
        assert_eq!(all(placement, 5000, 2048, 0)[0], (2048, Branch));
        // An exact repeat, and prompts that close no block, or none before their last token.
        assert_eq!(all(placement, 5000, 4992, 4992), []);
        assert_eq!(all(placement, 128, 0, 0), []);
        assert_eq!(all(placement, 129, 0, 0), [(128, Prompt)]);
        assert_eq!(all(placement, 0, 0, 0), []);
        // At both ends of the number range.
        let last = u32::MAX / 128 * 128;
        assert_eq!(all(placement, u32::MAX, 0, u32::MAX - 200), [(last, Prompt)]);
        assert_eq!(all(placement, u32::MAX, 0, u32::MAX), []);
        assert_eq!(all(Placement { interval: Some(0), ..placement }, 500, 0, 0), [(384, Prompt)]);
        assert_eq!(all(Placement { block_tokens: 0, ..placement }, 500, 0, 0), []);
        let end = Placement { branch_points: false, interval: None, ..placement };
        assert_eq!(all(end, 5000, 3072, 0), [(4992, Prompt)]);
    }
}
