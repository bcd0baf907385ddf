//! The event log of a tree: writing and reading.

use crate::cell::CellKey;
use crate::event::{Drained, EventBatch, EventLog, EventSource, Run};
use crate::mistake::{Mistake, made};
use crate::node::{Node, NodeKey};
use crate::policy::Policy;
use crate::tree::PrefixTree;

impl<B, C, P: Policy, const T: usize> PrefixTree<B, C, P, T> {
    /// Starts to log events, of up to `capacity` blocks, stored or removed, between two drains; 0 stops logging. Blocks
    /// that the tree already has are not logged; a snapshot has them.
    pub fn log_events(&mut self, capacity: u32) {
        self.events = (capacity > 0).then(|| EventLog::new(capacity));
    }

    /// All blocks of the tree, as a snapshot has them, but the log stays unchanged.
    #[must_use]
    pub fn resident_events(&self) -> EventBatch<T> {
        let mut batch = EventBatch::with_capacity(self.counts.blocks);
        let mut nodes: Vec<_> = self.nodes.iter().collect();
        // Parents before children: a segment starts deeper than the segments above it.
        nodes.sort_unstable_by_key(|(_, node)| node.start);
        let runs =
            nodes.iter().filter_map(|(key, node)| self.stored(*key, node.first()?, node.len));
        runs.for_each(|run| batch.stored(&run));
        batch
    }

    /// Logs the last `blocks` blocks of a segment, from `first` on, as stored.
    pub(crate) fn log_stored(&mut self, key: NodeKey, first: CellKey, blocks: u32) {
        let Some(mut log) = self.events.take() else { return };
        if let Some(stored) = self.stored(key, first, blocks) {
            log.stored(&stored);
        }
        self.events = Some(log);
    }

    /// Logs the blocks of a segment as removed, the last one first.
    pub(crate) fn log_removed(&mut self, node: &Node<C>) {
        let Self { events: Some(log), cells, .. } = self else { return };
        let last_first = cells.upward(node.last()).map(|key| cells[key].serial);
        log.removed(last_first.take(node.len as usize), node.len);
    }

    /// The last `blocks` blocks of a segment, from `first` on.
    fn stored(&self, key: NodeKey, first: CellKey, blocks: u32) -> Option<Run<'_, B, T>> {
        let is_whole = self.nodes[key].len == blocks;
        let above = self.cells[first].above.map(|above| self.cells[above].serial);
        let parent = above.filter(|_| !(is_whole && made(Mistake::ParentForgotten)));
        let up = |&key: &NodeKey| self.nodes[key].parent;
        let root = std::iter::successors(Some(key), up).last()?;
        let root = &self.nodes[root].root.as_ref()?.key;
        Some(Run { root, parent, cells: &self.cells, first, blocks })
    }
}

impl<B, C, P: Policy, const T: usize> EventSource<T> for PrefixTree<B, C, P, T> {
    fn event_capacity(&self) -> u32 {
        self.events.as_ref().map_or(0, |log| log.capacity)
    }

    fn drain_events(&mut self, batch: &mut EventBatch<T>) -> Drained {
        if let Some(log) = &mut self.events {
            return log.drain(batch);
        }
        batch.clear();
        Drained::Off
    }

    fn snapshot_events(&mut self) -> EventBatch<T> {
        let mut batch = self.resident_events();
        if let Some(log) = &mut self.events {
            log.restart(&mut batch);
        }
        batch
    }
}
