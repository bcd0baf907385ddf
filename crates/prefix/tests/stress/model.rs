//! The model: a map of prefixes for each root, slow and plain.

use std::collections::BTreeMap;

use dsv4_kv_prefix::{Freed, Lookup};

/// Tokens of a block.
pub const T: usize = 4;

/// A block that a pool has given out. Its holder owns it.
#[derive(Debug, PartialEq, Eq)]
pub struct Block(pub u32);

/// A checkpoint: its number, its root and its tokens.
#[derive(Debug, PartialEq, Eq)]
pub struct Checkpoint(pub u32, pub usize, pub Vec<u32>);

/// One block of a prefix. Its key are all tokens up to its end.
#[derive(Debug)]
struct Entry {
    block: u32,
    checkpoint: Option<u32>,
}

/// A path: a root and tokens.
pub type Path = (usize, Vec<u32>);

/// The expected contents of the tree.
#[derive(Debug, Default)]
pub struct Model {
    entries: BTreeMap<Path, Entry>,
}

fn prefixes(tokens: &[u32]) -> impl Iterator<Item = &[u32]> {
    (1..=tokens.len() / T).map(|blocks| &tokens[..blocks * T])
}

impl Model {
    /// The part of a prompt that it has.
    pub fn lookup(&self, root: usize, prompt: &[u32]) -> Lookup {
        let most = &prompt[..prompt.len().saturating_sub(1)];
        let mut found = Lookup::default();
        for prefix in prefixes(most) {
            let Some(entry) = self.entries.get(&(root, prefix.to_vec())) else { break };
            found.matched = prefix.len() as u32;
            if entry.checkpoint.is_some() {
                found.reusable = found.matched;
            }
        }
        found
    }

    /// The paths of all blocks, in order.
    pub fn paths(&self) -> Vec<&Path> {
        self.entries.keys().collect()
    }

    /// The last block of a prefix, which consists of whole blocks.
    pub fn block(&self, root: usize, prefix: &[u32]) -> Option<u32> {
        self.entries.get(&(root, prefix.to_vec())).map(|entry| entry.block)
    }

    /// The checkpoint of a prefix.
    pub fn checkpoint(&self, root: usize, prefix: &[u32]) -> Option<u32> {
        self.entries.get(&(root, prefix.to_vec()))?.checkpoint
    }

    /// Registers the last block of a new prefix.
    pub fn insert(&mut self, root: usize, prefix: &[u32], block: u32) -> Result<(), String> {
        let before = prefix.len() - T;
        if before > 0 && self.block(root, &prefix[..before]).is_none() {
            return Err(format!("block {block} hangs in the air"));
        }
        let entry = Entry { block, checkpoint: None };
        match self.entries.insert((root, prefix.to_vec()), entry) {
            Some(there) => Err(format!("block {block} was taken, though {there:?} was there")),
            None => Ok(()),
        }
    }

    /// Attaches a checkpoint to a prefix, if its block exists and has none yet. Returns whether it did.
    pub fn attach(&mut self, root: usize, prefix: &[u32], checkpoint: u32) -> bool {
        let entry = self.entries.get_mut(&(root, prefix.to_vec()));
        let place = entry.map(|entry| &mut entry.checkpoint).filter(|place| place.is_none());
        place.map(|place| *place = Some(checkpoint)).is_some()
    }

    /// Removes the blocks and checkpoints that the tree has freed. `held` has the referenced paths, which must stay.
    pub fn free(
        &mut self,
        freed: &[Freed<Block, Checkpoint>],
        held: &[Path],
    ) -> Result<(), String> {
        for freed in freed {
            match freed {
                Freed::Checkpoint(Checkpoint(id, root, prefix)) => {
                    let entry = self.entries.get_mut(&(*root, prefix.clone()));
                    let taken = entry.and_then(|entry| entry.checkpoint.take());
                    if taken != Some(*id) {
                        return Err(format!("checkpoint {id} of {prefix:?} was freed: {taken:?}"));
                    }
                    if held.iter().any(|(of, path)| of == root && path.starts_with(prefix)) {
                        return Err(format!("checkpoint {id} was freed above a reference"));
                    }
                }
                Freed::Block(Block(id)) => self.free_block(*id, held)?,
            }
        }
        Ok(())
    }

    fn free_block(&mut self, id: u32, held: &[Path]) -> Result<(), String> {
        let found = self.entries.iter().find(|(_, entry)| entry.block == id);
        let Some(((root, prefix), entry)) = found else {
            return Err(format!("block {id} was freed, and is not there"));
        };
        if entry.checkpoint.is_some() {
            return Err(format!("block {id} was freed before its checkpoint"));
        }
        if held.iter().any(|(of, path)| of == root && path.starts_with(prefix)) {
            return Err(format!("block {id} was freed while someone refers to it"));
        }
        let path = (*root, prefix.clone());
        let mut below = self.entries.range(path.clone()..).skip(1);
        if below.next().is_some_and(|((of, longer), _)| of == root && longer.starts_with(prefix)) {
            return Err(format!("block {id} was freed before what is below it"));
        }
        self.entries.remove(&path);
        Ok(())
    }

    /// Numbers of blocks and checkpoints.
    pub fn counts(&self) -> (u32, u32) {
        let checkpoints = self.entries.values().filter(|entry| entry.checkpoint.is_some());
        (self.entries.len() as u32, checkpoints.count() as u32)
    }

    /// Numbers of blocks and checkpoints that are on no held path.
    pub fn evictable(&self, held: &[Path]) -> (u32, u32) {
        let free = self.entries.iter().filter(|((root, prefix), _)| {
            !held.iter().any(|(of, path)| of == root && path.starts_with(prefix))
        });
        free.fold((0, 0), |(blocks, checkpoints), (_, entry)| {
            (blocks + 1, checkpoints + u32::from(entry.checkpoint.is_some()))
        })
    }

    /// A useless block: on no held path, and without a checkpoint at or below it.
    pub fn dead(&self, held: &[Path]) -> Option<&Path> {
        self.entries.keys().find(|path| {
            let (root, prefix) = path;
            let below = self.entries.range((*path).clone()..);
            let mut below = below.take_while(|((of, p), _)| of == root && p.starts_with(prefix));
            let held = held.iter().any(|(of, path)| of == root && path.starts_with(prefix));
            !held && below.all(|(_, entry)| entry.checkpoint.is_none())
        })
    }

    /// All block numbers.
    pub fn blocks(&self) -> impl Iterator<Item = u32> {
        self.entries.values().map(|entry| entry.block)
    }

    /// All checkpoint numbers.
    pub fn checkpoints(&self) -> impl Iterator<Item = u32> {
        self.entries.values().filter_map(|entry| entry.checkpoint)
    }
}
