//! Prompts that are to arrive from host memory, and what is known of it.

use std::collections::{BTreeSet, VecDeque};

use crate::op::Name;
use crate::text::{Prefix, Text};

/// A host tier, as far as the model knows.
#[derive(Debug, Default)]
pub(in crate::model) struct Tier {
    /// Prompts that are to arrive, in order.
    pub waiting: VecDeque<Wanted>,
    /// What is wanted before them all: the host waits for it.
    pub next: Option<Wanted>,
    pub arriving: Option<Arriving>,
    /// Where there ever was a checkpoint: host memory may have it.
    pub ever: BTreeSet<Prefix>,
    /// How many tokens those have.
    pub lengths: BTreeSet<u32>,
    /// Host memory had it, and has evicted no checkpoint since.
    pub kept: BTreeSet<Prefix>,
    pub evicted: u64,
    /// The device has done all that is to be done for what arrives.
    pub has_caught_up: bool,
    /// What the last operation must have led to.
    pub after: After,
}

/// What must be so after an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::model) enum After {
    #[default]
    Anything,
    /// If something waits for its turn, it is another's.
    NoneIdle,
    /// Nothing is on its way.
    AllDone,
}

/// A prompt that is to arrive.
#[derive(Clone, Debug)]
pub(in crate::model) struct Wanted {
    pub text: Text,
    /// Its tokens, as far as a request can have them.
    pub tokens: Prefix,
    /// Who wants it.
    pub names: Vec<Name>,
}

/// What is on its way to the device.
#[derive(Debug)]
pub(in crate::model) struct Arriving {
    pub wanted: Wanted,
    /// Blocks that are written, if that is known.
    pub blocks: Option<u32>,
}

impl Tier {
    /// The prompt whose turn it is begins to arrive.
    pub fn begin(&mut self) -> Result<Arriving, String> {
        let is_next = |wanted: &Wanted| self.next.as_ref().is_some_and(|next| next.is(wanted));
        let at = self.waiting.iter().position(is_next);
        let mut wanted = match (&self.next, at) {
            (None, _) => self.waiting.pop_front().ok_or("nothing was to arrive")?,
            (Some(next), None) => next.clone(),
            (Some(_), Some(at)) => self.waiting.remove(at).ok_or("it waits")?,
        };
        wanted.names.extend(self.next.iter().flat_map(|next| next.names.clone()));
        self.has_caught_up = false;
        Ok(Arriving { wanted, blocks: None })
    }

    /// A prompt is wanted, by somebody more if it was already.
    pub fn want(&mut self, wanted: Wanted) {
        let arriving = self.arriving.as_mut().map(|arriving| &mut arriving.wanted);
        let arriving = arriving.filter(|arriving| !arriving.names.is_empty());
        let mut all = self.waiting.iter_mut().chain(arriving);
        match all.find(|found| found.is(&wanted)) {
            Some(found) => found.names.extend(wanted.names),
            None => self.waiting.push_back(wanted),
        }
    }

    /// Somebody does not want a prompt any more: whether it waited, and nobody else wants it; `None` if it was not wanted.
    pub fn withdraw(&mut self, name: Name) -> Option<bool> {
        let arriving = self.arriving.as_mut().map(|arriving| &mut arriving.wanted);
        let mut all = self.waiting.iter_mut().chain(arriving);
        let names = &mut all.find(|wanted| wanted.names.contains(&name))?.names;
        names.retain(|&of| of != name);
        let before = self.waiting.len();
        self.waiting.retain(|wanted| !wanted.names.is_empty());
        Some(self.waiting.len() < before)
    }

    /// Checkpoints may be there now.
    pub fn saved(&mut self, prefixes: &[Prefix]) {
        self.lengths.extend(prefixes.iter().map(Prefix::tokens));
        self.ever.extend(prefixes.iter().cloned());
    }

    pub fn names(&self) -> BTreeSet<Name> {
        let arriving = self.arriving.as_ref().map(|arriving| &arriving.wanted);
        self.waiting.iter().chain(arriving).flat_map(|wanted| wanted.names.clone()).collect()
    }
}

impl Wanted {
    /// Whether the other is the same prompt.
    pub fn is(&self, other: &Self) -> bool {
        self.tokens == other.tokens
    }
}
