//! Segments by rank: a heap that knows the place of each segment, so that any can be removed. A `BTreeSet` would
//! allocate when it grows, and its number of nodes depends on the order of insertions, so that memory could not be
//! reserved.

use slotmap::SecondaryMap;

use crate::node::NodeKey;

/// Children of an entry. Four keep the heap flat, and the children of one entry are adjacent in memory.
const WAYS: usize = 4;

/// Segments by rank; of equal ranks the lower key is the first.
#[derive(Debug)]
pub(crate) struct Order {
    /// Each entry ranks before its children, which start at `WAYS * index + 1`.
    heap: Vec<(i64, NodeKey)>,
    /// Index of each segment in `heap`.
    places: SecondaryMap<NodeKey, u32>,
}

impl Order {
    /// An empty heap, with memory for `reserved` segments among as many roots, if it can be reserved.
    pub fn new(reserved: usize) -> Self {
        let (mut heap, mut places) = (Vec::new(), SecondaryMap::new());
        // If the reservation fails, they grow on demand.
        let _ = heap.try_reserve_exact(reserved).is_ok()
            && places.try_set_capacity(2 * reserved).is_ok();
        Self { heap, places }
    }

    /// The entry of the lowest rank.
    pub fn first(&self) -> Option<(i64, NodeKey)> {
        self.heap.first().copied()
    }

    /// Number of segments.
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// Whether a segment is in the heap.
    pub fn contains(&self, key: NodeKey) -> bool {
        self.places.contains_key(key)
    }

    /// Adds a segment, which must not be in the heap.
    pub fn insert(&mut self, rank: i64, key: NodeKey) {
        self.heap.push((rank, key));
        self.rise(self.heap.len() - 1);
    }

    /// Removes the segment of the lowest rank.
    pub fn pop_first(&mut self) -> Option<NodeKey> {
        let (_, key) = self.first()?;
        self.remove(key);
        Some(key)
    }

    /// Removes a segment; `false` if it is not in the heap.
    pub fn remove(&mut self, key: NodeKey) -> bool {
        let Some(at) = self.places.remove(key) else { return false };
        let at = at as usize;
        self.heap.swap_remove(at);
        if at < self.heap.len() {
            self.sink(at);
        }
        true
    }

    /// Moves an entry up to where it belongs.
    fn rise(&mut self, mut at: usize) {
        let entry = self.heap[at];
        while at > 0 && entry < self.heap[(at - 1) / WAYS] {
            self.put(at, self.heap[(at - 1) / WAYS]);
            at = (at - 1) / WAYS;
        }
        self.put(at, entry);
    }

    /// Moves an entry down to where it belongs, or up.
    fn sink(&mut self, mut at: usize) {
        let entry = self.heap[at];
        loop {
            let first = WAYS * at + 1;
            let children = first..self.heap.len().min(first + WAYS);
            let least = children.min_by_key(|&child| self.heap[child]);
            let Some(child) = least.filter(|&child| self.heap[child] < entry) else { break };
            self.put(at, self.heap[child]);
            at = child;
        }
        self.heap[at] = entry;
        self.rise(at);
    }

    fn put(&mut self, at: usize, entry: (i64, NodeKey)) {
        self.heap[at] = entry;
        self.places.insert(entry.1, at as u32);
    }

    /// Whether every entry is where it should be.
    pub fn is_sound(&self) -> bool {
        let is_at = |(at, entry): (usize, &(i64, NodeKey))| {
            self.places.get(entry.1) == Some(&(at as u32))
                && (at == 0 || self.heap[(at - 1) / WAYS] < *entry)
        };
        self.places.len() == self.heap.len() && self.heap.iter().enumerate().all(is_at)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};
    use slotmap::SlotMap;

    use super::*;

    #[test]
    fn it_is_a_sorted_set() {
        let mut keys = SlotMap::<NodeKey, i64>::with_key();
        let (mut order, mut sorted) = (Order::new(0), BTreeSet::new());
        let mut random = SmallRng::seed_from_u64(1);
        for turn in 0..20_000 {
            // The heap grows, and shrinks to nothing again.
            let grows = random.random_range(0..10_000) > turn % 10_000;
            if grows {
                let rank = random.random_range(0..100);
                let key = keys.insert(rank);
                order.insert(rank, key);
                sorted.insert((rank, key));
            } else if random.random() {
                let first = sorted.pop_first().map(|(_, key)| key);
                assert_eq!(order.pop_first(), first);
                first.map(|key| keys.remove(key));
            } else if let Some((key, rank)) = keys.iter().nth(random.random_range(0..=keys.len())) {
                assert!(sorted.remove(&(*rank, key)) && order.remove(key) && !order.remove(key));
                keys.remove(key);
            }
            assert_eq!((order.first(), order.len()), (sorted.first().copied(), sorted.len()));
            assert!(turn % 100 > 0 || order.is_sound());
        }
    }
}
