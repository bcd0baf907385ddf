//! Places: where something of the tree is, without keeping it there; and what a whole path holds.

use crate::node::NodeKey;
use crate::policy::{Origin, Policy};
use crate::reference::{Foreign, Reference};
use crate::root::RootKey;
use crate::tree::{PrefixTree, TreeId};

/// Where a checkpoint is. It holds nothing: the checkpoint may be gone when the place is looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub(crate) tree: TreeId,
    pub(crate) node: NodeKey,
}

/// What is known of a path, from its root down to a reference.
#[derive(Debug)]
pub struct Path<'t, const T: usize> {
    /// Whose it is.
    pub root: &'t RootKey,
    /// Tokens of its blocks, in order.
    pub tokens: Vec<[u32; T]>,
    /// Why the checkpoint at its end was taken.
    pub origin: Origin,
}

impl<B, C, P: Policy, const T: usize> PrefixTree<B, C, P, T> {
    /// A reference to a place, if its checkpoint is there still.
    pub fn refer_to_place(&mut self, place: Place) -> Option<Reference> {
        let node = self.nodes.get(place.node).filter(|_| place.tree == self.id)?;
        let depth = node.checkpoint.is_some().then(|| node.end())?;
        Some(self.reference(place.node, depth))
    }

    /// Where the checkpoint at a reference is; `None` if there is none.
    #[must_use]
    pub fn place_at(&self, at: &Reference) -> Option<Place> {
        let node = self.place_of(at, at.depth).ok()?;
        let has_it = self.nodes[node].checkpoint.is_some() && self.nodes[node].end() == at.depth;
        has_it.then_some(Place { tree: self.id, node })
    }

    /// A reference to the end of what is there of some blocks of tokens, with or without a checkpoint. Nothing is
    /// counted as used.
    pub fn refer_to_match(&mut self, root: &RootKey, blocks: &[[u32; T]]) -> Reference {
        let root = self.root_or_new(root);
        let walk = self.walk(root, blocks);
        self.reference(walk.node, walk.depth)
    }

    /// What is known of the path down to a reference.
    ///
    /// # Errors
    /// [`Foreign`].
    pub fn path(&self, at: &Reference) -> Result<Path<'_, T>, Foreign> {
        let place = self.place_of(at, at.depth)?;
        let up = |&key: &NodeKey| self.nodes[key].parent;
        let nodes: Vec<_> = std::iter::successors(Some(place), up).collect();
        let root = nodes.last().and_then(|&key| self.nodes[key].root.as_ref()).ok_or(Foreign)?;
        let nodes = nodes.iter().rev().map(|&key| &self.nodes[key]);
        let of_node = |tokens: &mut Vec<_>, node: &crate::node::Node<B, C, T>| {
            let blocks = (at.depth.min(node.end()) - node.start) as usize;
            tokens.extend_from_slice(&node.tokens[..blocks]);
        };
        let mut tokens = Vec::with_capacity(at.depth as usize);
        nodes.for_each(|node| of_node(&mut tokens, node));
        Ok(Path { root, tokens, origin: self.nodes[place].usage.origin })
    }
}
