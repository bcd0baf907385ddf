//! Checkpoints that are offered to a lower tier.

use std::collections::{HashSet, VecDeque};

use dsv4_kv_prefix::{Origin, Policy, PrefixTree, Reference, WeakCheckpoint};

/// The latest checkpoints that the lower tier has not taken yet. An offer does not protect its checkpoint from
/// eviction: it may be gone when its turn comes.
#[derive(Debug, Default)]
pub(super) struct Offers {
    /// In the order in which they are taken.
    queue: VecDeque<WeakCheckpoint>,
    /// The same checkpoints, for lookup in constant time.
    known: HashSet<WeakCheckpoint>,
    /// Most checkpoints that are kept; 0 without a lower tier.
    most: usize,
}

impl Offers {
    /// Keeps at most `most` offers from now on, and allocates memory for them.
    pub fn keep(&mut self, most: usize) {
        self.most = most;
        self.queue.reserve(most + 1);
        // Twice as many, so that the set rehashes in place, without growing, after many removals.
        self.known.reserve(2 * (most + 1));
    }

    /// Attaches a checkpoint to a prefix tree and offers it to the lower tier. Returns the checkpoint if the tree does
    /// not take it.
    pub fn attach<B, C, P: Policy, const T: usize>(
        &mut self,
        tree: &mut PrefixTree<B, C, P, T>,
        (reference, blocks, origin): (&Reference, u32, Origin),
        saved: C,
    ) -> Option<C> {
        let attached = tree.attach(reference, blocks, origin, saved);
        attached.map(|checkpoint| self.add(checkpoint)).err().map(|not_taken| not_taken.0)
    }

    /// Offers a checkpoint, after the others. One that is already offered keeps its turn.
    pub fn add(&mut self, checkpoint: WeakCheckpoint) {
        if self.most == 0 || !self.known.insert(checkpoint) {
            return;
        }
        self.queue.push_back(checkpoint);
        while self.queue.len() > self.most {
            self.next();
        }
    }

    /// Offers a checkpoint again, before the others.
    pub fn add_first(&mut self, checkpoint: WeakCheckpoint) {
        if self.known.insert(checkpoint) {
            self.queue.push_front(checkpoint);
        }
    }

    /// Removes and returns the first offer.
    pub fn next(&mut self) -> Option<WeakCheckpoint> {
        let checkpoint = self.queue.pop_front()?;
        self.known.remove(&checkpoint);
        Some(checkpoint)
    }
}

#[cfg(test)]
mod tests {
    use dsv4_kv_prefix::{Limits, RootKey, ScoredLru};

    use super::*;

    /// `count` checkpoints of a tree.
    fn checkpoints(count: u32) -> Vec<WeakCheckpoint> {
        let (lease_bytes, remembered) = (0, 0);
        let limits = Limits {
            block_bytes: 1,
            checkpoint_bytes: 1,
            lease_bytes,
            remembered,
            reserved_blocks: count,
        };
        let mut tree = PrefixTree::<u32, u32, _, 128>::new(limits, ScoredLru { capacity: 1 });
        let root = RootKey::new(b"", b"", b"model");
        let mut checkpoint = |number| {
            let mut at = tree.match_and_lock(&root, &[]).reference;
            tree.extend(&mut at, &[[number; 128]], |_| number, |_| ()).unwrap();
            let checkpoint = tree.attach(&at, 1, Origin::Prompt, number).unwrap();
            tree.release(at, |_| ()).unwrap();
            checkpoint
        };
        (0..count).map(&mut checkpoint).collect()
    }

    #[test]
    fn each_is_offered_once_and_the_latest_are_kept() {
        let checkpoints = checkpoints(5);
        let mut offers = Offers::default();
        offers.add(checkpoints[0]);
        assert_eq!(offers.next(), None, "without a lower tier");
        offers.keep(3);
        for checkpoint in [0, 1, 0, 2, 1] {
            offers.add(checkpoints[checkpoint]);
        }
        assert_eq!(offers.next(), Some(checkpoints[0]));
        offers.add_first(checkpoints[0]);
        offers.add_first(checkpoints[2]);
        offers.add(checkpoints[3]);
        let left: Vec<_> = std::iter::from_fn(|| offers.next()).collect();
        assert_eq!(left, [1, 2, 3].map(|checkpoint| checkpoints[checkpoint]));
        offers.add(checkpoints[1]);
        assert_eq!(offers.next(), Some(checkpoints[1]), "it may be offered again");
    }

    /// A million offers use only the memory that was allocated at first. With a linear search for duplicates
    /// this would take minutes.
    #[test]
    fn many_offers_take_no_more_memory() {
        let checkpoints = checkpoints(32 << 10);
        let mut offers = Offers::default();
        offers.keep(16 << 10);
        let room = offers.known.capacity();
        for _ in 0..40 {
            checkpoints.iter().for_each(|&checkpoint| offers.add(checkpoint));
        }
        // Removed elements count as used until the set rehashes, so its capacity may be lower.
        assert_eq!(offers.known.len(), 16 << 10);
        assert!(offers.known.capacity() <= room, "{} of {room}", offers.known.capacity());
    }
}
