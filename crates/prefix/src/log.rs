//! The log of a tree: what it writes, and what is read of it.

use crate::event::{Drained, EventBatch, EventLog, EventSource, Serial, Stored};
use crate::mistake::{Mistake, made};
use crate::node::NodeKey;
use crate::policy::Policy;
use crate::tree::PrefixTree;

impl<B, C, P: Policy, const T: usize> PrefixTree<B, C, P, T> {
    /// Logs events from now on: of up to `capacity` blocks, stored or removed, between two drains. 0: not any more. What
    /// the tree has already is not told; a snapshot has it.
    pub fn log_events(&mut self, capacity: u32) {
        self.events = (capacity > 0).then(|| EventLog::new(capacity));
    }

    /// Serials of so many blocks that are registered now.
    pub(crate) fn new_serials(
        &mut self,
        blocks: usize,
    ) -> impl Iterator<Item = Serial> + use<B, C, P, T> {
        Serial::take(&mut self.next_serial, blocks)
    }

    /// Logs the last `blocks` blocks of a segment, which were stored.
    pub(crate) fn log_stored(&mut self, key: NodeKey, blocks: usize) {
        let Some(mut log) = self.events.take() else { return };
        if let Some(stored) = self.stored(key, blocks) {
            log.stored(stored);
        }
        self.events = Some(log);
    }

    /// Logs that the blocks of a segment are gone.
    pub(crate) fn log_removed(&mut self, serials: &[Serial]) {
        if let Some(log) = &mut self.events {
            log.removed(serials);
        }
    }

    /// The last `blocks` blocks of a segment.
    fn stored(&self, key: NodeKey, blocks: usize) -> Option<Stored<'_, T>> {
        let node = &self.nodes[key];
        let at = node.serials.len() - blocks;
        let parent = node.parent.filter(|_| !made(Mistake::ParentForgotten));
        let above = || parent.and_then(|parent| self.nodes[parent].serials.last());
        let parent = node.serials[..at].last().or_else(above).copied();
        let up = |&key: &NodeKey| self.nodes[key].parent;
        let root = std::iter::successors(Some(key), up).last()?;
        let root = self.nodes[root].root.as_ref()?;
        Some(Stored { root, parent, serials: &node.serials[at..], tokens: &node.tokens[at..] })
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
        let mut batch = EventBatch::with_capacity(self.counts.blocks);
        let nodes = self.nodes.iter().filter(|(_, node)| !node.blocks.is_empty());
        let mut nodes: Vec<_> = nodes.collect();
        // What is above a segment begins before it.
        nodes.sort_unstable_by_key(|(_, node)| node.start);
        let runs = nodes.iter().filter_map(|(key, node)| self.stored(*key, node.blocks.len()));
        runs.for_each(|run| batch.stored(run));
        if let Some(log) = &mut self.events {
            log.restart();
        }
        batch
    }
}
