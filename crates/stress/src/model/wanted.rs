//! Prompts that have to arrive from host memory, in the model.

use std::collections::{BTreeSet, VecDeque};

use crate::op::Name;
use crate::text::{Prefix, Text};

/// A host tier, as far as the model knows.
#[derive(Debug, Default)]
pub(in crate::model) struct Tier {
    /// Prompts that wait for their transfer, in order.
    pub waiting: VecDeque<Wanted>,
    /// A prompt that comes before all others, since the host waits for it.
    pub next: Option<Wanted>,
    pub arriving: Option<Arriving>,
    /// Prefixes that ever had a checkpoint: host memory may have them.
    pub ever: BTreeSet<Prefix>,
    /// The numbers of tokens of these prefixes.
    pub lengths: BTreeSet<u32>,
    /// Prefixes that host memory had, since when it has evicted no checkpoint.
    pub kept: BTreeSet<Prefix>,
    pub evicted: u64,
    /// Whether the device has finished its work for the arriving prompt.
    pub has_caught_up: bool,
    /// The state that the last operation must have led to.
    pub after: After,
}

/// The state that must hold after an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::model) enum After {
    #[default]
    Anything,
    /// If a prompt waits, another one is arriving.
    NoneIdle,
    /// No transfer is under way.
    AllDone,
}

/// A prompt that has to arrive.
#[derive(Clone, Debug)]
pub(in crate::model) struct Wanted {
    pub text: Text,
    /// Its tokens, up to the longest context of a request.
    pub tokens: Prefix,
    /// The requests for it, by name.
    pub names: Vec<Name>,
}

/// The prompt that is being transferred to the device.
#[derive(Debug)]
pub(in crate::model) struct Arriving {
    pub wanted: Wanted,
    /// Number of blocks that are written, if known.
    pub blocks: Option<u32>,
}

impl Tier {
    /// Starts the transfer of the next prompt.
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

    /// Adds a request for a prompt; an equal prompt is not added twice.
    pub fn want(&mut self, wanted: Wanted) {
        let arriving = self.arriving.as_mut().map(|arriving| &mut arriving.wanted);
        let arriving = arriving.filter(|arriving| !arriving.names.is_empty());
        let mut all = self.waiting.iter_mut().chain(arriving);
        match all.find(|found| found.is(&wanted)) {
            Some(found) => found.names.extend(wanted.names),
            None => self.waiting.push_back(wanted),
        }
    }

    /// Withdraws a request for a prompt. Returns whether the prompt was waiting and has no other request; `None` if
    /// there is no such request.
    pub fn withdraw(&mut self, name: Name) -> Option<bool> {
        let arriving = self.arriving.as_mut().map(|arriving| &mut arriving.wanted);
        let mut all = self.waiting.iter_mut().chain(arriving);
        let names = &mut all.find(|wanted| wanted.names.contains(&name))?.names;
        names.retain(|&of| of != name);
        let before = self.waiting.len();
        self.waiting.retain(|wanted| !wanted.names.is_empty());
        Some(self.waiting.len() < before)
    }

    /// Records prefixes that may have a checkpoint now.
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
    /// Whether both are the same prompt.
    pub fn is(&self, other: &Self) -> bool {
        self.tokens == other.tokens
    }
}
