//! Everything counted again, for tests.

use std::hash::BuildHasher;

use crate::node::{Node, NodeKey};
use crate::order::Order;
use crate::policy::Policy;
use crate::tree::{Counts, PrefixTree};

impl<B, C, P: Policy, const T: usize> PrefixTree<B, C, P, T> {
    /// Counts everything again, and compares it with the stored counts. Takes time quadratic in the number of segments.
    ///
    /// # Errors
    /// Describes the first inconsistency.
    pub fn audit(&self) -> Result<(), String> {
        let mut counts = Counts::default();
        for (key, node) in &self.nodes {
            self.audit_node(key, node)?;
            let (blocks, checkpoints) = (node.len, u32::from(node.checkpoint.is_some()));
            let free = u32::from(node.lock_ref == 0);
            counts.blocks += blocks;
            counts.checkpoints += checkpoints;
            counts.evictable_blocks += free * blocks;
            counts.evictable_checkpoints += free * checkpoints;
            counts.segments += u32::from(node.root.is_none());
        }
        let leased: u64 = self.leases.values().map(|lease| lease.bytes).sum();
        let in_order = self.nodes.values().filter(|node| node.is_listed).count();
        let orders = [&self.leaves, &self.expendable];
        let faults = [
            (counts != self.counts, format!("counted {counts:?}, kept {:?}", self.counts)),
            (leased != self.leased_bytes, format!("leases of {leased} bytes")),
            (
                in_order != self.leaves.len() + self.expendable.len(),
                format!("{in_order} nodes have a rank"),
            ),
            (!orders.into_iter().all(Order::is_sound), "the order of eviction".to_owned()),
            (self.cells.len() as u32 != counts.blocks, "blocks of no segment".to_owned()),
            (self.children.len() as u32 != counts.segments, "segments listed".to_owned()),
        ];
        faults.into_iter().find(|(found, _)| *found).map_or(Ok(()), |(_, wrong)| Err(wrong))
    }

    /// Checks the counts of a node, and where it is listed, against the other nodes.
    fn audit_node(&self, key: NodeKey, node: &Node<C>) -> Result<(), String> {
        let what = |wrong: &str| format!("{key:?}: {wrong}: {}", describe(node));
        let below = || self.nodes.iter().filter(|(_, child)| child.parent == Some(key));
        let held = below().filter(|(_, child)| child.lock_ref > 0).count() as u32;
        let children = below().count() as u32;
        let is_leaf = children == 0 && node.lock_ref == 0;
        let above = node.parent.map_or(0, |parent| self.nodes[parent].end());
        let inner = node.lock_ref == 0
            && children > 0
            && node.checkpoint.is_some()
            && self.policy.is_expendable(&node.usage);
        let (leaf, expendable) = (self.leaves.contains(key), self.expendable.contains(key));
        let faults = [
            (!self.is_linked(node), "blocks that are not linked as they lie"),
            ((node.len == 0) != node.root.is_some(), "blocks of a root, or none"),
            (node.root.is_some() == node.parent.is_some(), "a root with a parent, or none"),
            (node.children != children, "children"),
            (node.lock_ref != node.references + held, "lock_ref"),
            (node.start != above, "start"),
            (node.is_listed != (leaf || expendable), "listed, or not"),
            (leaf != (is_leaf && node.root.is_none()), "a leaf that is not listed"),
            (expendable != inner, "an expendable checkpoint that is not listed"),
            (is_leaf && node.checkpoint.is_none(), "a leaf without a checkpoint"),
        ];
        if let Some((_, wrong)) = faults.into_iter().find(|&(found, _)| found) {
            return Err(what(wrong));
        }
        let first = node.parent.zip(node.first());
        let listed = first.map(|(parent, at)| self.child(parent, self.cells.tokens(at)));
        if listed.is_some_and(|listed| listed != Some(key)) {
            return Err(what("not found by its parent"));
        }
        Ok(())
    }

    /// Whether a segment's blocks are linked to each other and to the one above, and have the right prefix hashes.
    fn is_linked(&self, node: &Node<C>) -> bool {
        let above = |key: NodeKey| (self.nodes[key].last(), key);
        let Some((mut last, parent)) = node.parent.map(above) else { return node.ends.is_none() };
        let (mut next, mut count) = (node.first(), 0);
        let mut prefix_hash = self.prefix_hash_at(parent, last);
        while let Some((key, cell)) = next.and_then(|key| Some((key, self.cells.get(key)?))) {
            prefix_hash = self.hasher.hash_one((prefix_hash, self.cells.tokens(key)));
            if (cell.above, cell.prefix_hash) != (last, prefix_hash) {
                return false;
            }
            (last, next, count) = (next, cell.below, count + 1);
        }
        (last, count) == (node.last(), node.len)
    }
}

fn describe<C>(node: &Node<C>) -> String {
    format!(
        "blocks {}..{}, parent {:?}, {} children, {} references, lock_ref {}, listed {}, checkpoint {}, usage {:?}",
        node.start,
        node.end(),
        node.parent,
        node.children,
        node.references,
        node.lock_ref,
        node.is_listed,
        node.checkpoint.is_some(),
        node.usage,
    )
}
