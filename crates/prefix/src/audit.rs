//! Everything counted again, for tests.

use std::collections::BTreeSet;

use crate::node::Node;
use crate::policy::Policy;
use crate::tree::{Counts, PrefixTree};

impl<B, C, P: Policy, const T: usize> PrefixTree<B, C, P, T> {
    /// Counts everything again, and compares it with what is kept. Takes as long as the tree is large.
    ///
    /// # Errors
    /// What is not as it must be.
    pub fn audit(&self) -> Result<(), String> {
        let mut counts = Counts::default();
        for (key, node) in &self.nodes {
            let what = |wrong: &str| format!("{key:?}: {wrong}: {}", describe(node));
            let below = || self.nodes.iter().filter(|(_, child)| child.parent == Some(key));
            let held = below().filter(|(_, child)| child.holds > 0).count() as u32;
            let children = below().count() as u32;
            let is_leaf = children == 0 && node.holds == 0;
            let above = node.parent.map_or(0, |parent| self.nodes[parent].end());
            let inner = node.holds == 0
                && children > 0
                && node.checkpoint.is_some()
                && self.policy.is_expendable(&node.usage);
            let listed =
                |order: &BTreeSet<_>| node.rank.is_some_and(|rank| order.contains(&(rank, key)));
            let (leaf, expendable) = (listed(&self.leaves), listed(&self.expendable));
            let faults = [
                (node.tokens.len() != node.blocks.len(), "tokens and blocks"),
                (node.serials.len() != node.blocks.len(), "serials and blocks"),
                (node.blocks.is_empty() != node.root.is_some(), "blocks of a root, or none"),
                (node.root.is_some() == node.parent.is_some(), "a root with a parent, or none"),
                (node.children != children, "children"),
                (node.holds != node.references + held, "holds"),
                (node.start != above, "start"),
                (node.rank.is_some() != (leaf || expendable), "rank"),
                (leaf != (is_leaf && node.root.is_none()), "a leaf that is not listed"),
                (expendable != inner, "an expendable checkpoint that is not listed"),
                (is_leaf && node.checkpoint.is_none(), "a leaf without a checkpoint"),
            ];
            if let Some((_, wrong)) = faults.into_iter().find(|&(found, _)| found) {
                return Err(what(wrong));
            }
            let listed = node.parent.map(|parent| self.child(parent, &node.tokens[0]));
            if listed.is_some_and(|listed| listed != Some(key)) {
                return Err(what("not found by its parent"));
            }
            let (blocks, checkpoints) =
                (node.blocks.len() as u32, u32::from(node.checkpoint.is_some()));
            let free = u32::from(node.holds == 0);
            counts.blocks += blocks;
            counts.checkpoints += checkpoints;
            counts.evictable_blocks += free * blocks;
            counts.evictable_checkpoints += free * checkpoints;
            counts.segments += u32::from(node.root.is_none());
        }
        let leased: u64 = self.leases.values().map(|lease| lease.bytes).sum();
        let in_order = self.nodes.values().filter(|node| node.rank.is_some()).count();
        let faults = [
            (counts != self.counts, format!("counted {counts:?}, kept {:?}", self.counts)),
            (leased != self.leased_bytes, format!("leases of {leased} bytes")),
            (
                in_order != self.leaves.len() + self.expendable.len(),
                format!("{in_order} nodes have a rank"),
            ),
            (self.children.len() as u32 != counts.segments, "segments listed".to_owned()),
        ];
        faults.into_iter().find(|(found, _)| *found).map_or(Ok(()), |(_, wrong)| Err(wrong))
    }
}

fn describe<B, C, const T: usize>(node: &Node<B, C, T>) -> String {
    format!(
        "blocks {}..{}, parent {:?}, {} children, {} references, {} holds, rank {:?}, checkpoint {}, usage {:?}",
        node.start,
        node.end(),
        node.parent,
        node.children,
        node.references,
        node.holds,
        node.rank,
        node.checkpoint.is_some(),
        node.usage,
    )
}
