//! Names of checkpoints, which protect nothing; and the contents of a path.

use crate::node::NodeKey;
use crate::policy::{Origin, Policy};
use crate::reference::{Foreign, Reference};
use crate::root::RootKey;
use crate::tree::{PrefixTree, TreeId};

/// Names a checkpoint of a tree. It protects nothing: the checkpoint may be evicted before it is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WeakCheckpoint {
    pub(crate) tree: TreeId,
    pub(crate) node: NodeKey,
}

/// Root and origin of a path, from its root down to a reference.
#[derive(Clone, Copy, Debug)]
pub struct Path<'t> {
    /// Key of its root.
    pub root: &'t RootKey,
    /// Why the checkpoint at its end was taken.
    pub origin: Origin,
}

impl<B, C, P: Policy, const T: usize> PrefixTree<B, C, P, T> {
    /// A reference to a checkpoint, if it is still there.
    pub fn lock_checkpoint(&mut self, weak: WeakCheckpoint) -> Option<Reference> {
        let node = self.nodes.get(weak.node).filter(|_| weak.tree == self.id)?;
        let (depth, last) = node.checkpoint.is_some().then(|| (node.end(), node.last()))?;
        Some(self.lock_at(weak.node, depth, last))
    }

    /// Names the checkpoint at a reference; `None` if there is none.
    #[must_use]
    pub fn weak_checkpoint(&self, at: &Reference) -> Option<WeakCheckpoint> {
        let node = self.segment_of(at, at.depth).ok()?;
        let has_it = self.nodes[node].checkpoint.is_some() && self.nodes[node].end() == at.depth;
        has_it.then_some(WeakCheckpoint { tree: self.id, node })
    }

    /// A reference to the end of the part of `blocks` that the tree has, with or without a checkpoint. This does
    /// not count as a use.
    pub fn lock_blocks(&mut self, root: &RootKey, blocks: &[[u32; T]]) -> Reference {
        let root = self.root_or_new(root);
        let walk = self.walk(root, blocks);
        self.lock_at(walk.node, walk.depth, walk.cell)
    }

    /// A reference to the deepest checkpoint that the tree has of `blocks`; `None` without one. This does not count as
    /// a use.
    pub fn lock_deepest_checkpoint(
        &mut self,
        root: &RootKey,
        blocks: &[[u32; T]],
    ) -> Option<Reference> {
        let walk = self.walk(self.root(root)?, blocks);
        (walk.hit_depth > 0).then(|| self.lock_at(walk.hit, walk.hit_depth, walk.hit_cell))
    }

    /// Root and origin of the path down to a reference.
    ///
    /// # Errors
    /// [`Foreign`].
    pub fn path(&self, at: &Reference) -> Result<Path<'_>, Foreign> {
        let segment = self.segment_of(at, at.depth)?;
        let up = |&key: &NodeKey| self.nodes[key].parent;
        let top = std::iter::successors(Some(segment), up).last();
        let root = top.and_then(|key| self.nodes[key].root.as_ref()).ok_or(Foreign)?;
        Ok(Path { root: &root.key, origin: self.nodes[segment].usage.origin })
    }

    /// The tokens of the blocks from the root down to a reference, those of the deepest first.
    ///
    /// # Errors
    /// [`Foreign`].
    pub fn tokens(&self, at: &Reference) -> Result<impl Iterator<Item = &[u32; T]>, Foreign> {
        self.check(at)?;
        Ok(self.cells.upward(at.cell).map(|key| self.cells.tokens(key)))
    }
}
