//! The model of the host tier: the prefixes that it keeps, and its transfers.
//!
//! The model does not know when prefixes leave for host memory, or which are evicted there. It knows whether host
//! memory can have a checkpoint, and whether it must: the checkpoint was there, and none was evicted since. Requested
//! prompts arrive in order, one at a time, and each once, however many requests want it. From the start of its transfer
//! until it is entered or given up, its blocks and its checkpoint have no other owner.

use dsv4_kv::{KvError, TierEvent, TierMiss};

use super::sharing::Sharing;
use super::wanted::{After, Arriving, Tier, Wanted};
use super::{Model, same};
use crate::answer::{Counts, answer};
use crate::op::Name;
use crate::text::{BLOCK, Prefix, Text};
use crate::tier::Seen;

/// The event if the device has no room.
const NO_ROOM: TierEvent = TierEvent::Missed { miss: TierMiss::NoRoomOnDevice };

impl Model {
    /// Whether the cache has a host tier.
    #[must_use]
    pub fn has_tier(&self) -> bool {
        self.shares() && self.config.host_bytes > 0
    }

    /// The names of prefetches whose prompts have not arrived yet.
    pub fn wanted(&self) -> impl Iterator<Item = Name> {
        self.sharing.tier.names().into_iter()
    }

    /// Whole blocks of a prompt from which a request can continue, with at least one token left to compute.
    pub(super) fn whole_blocks(&self, text: &Text) -> u32 {
        let tokens = text.prompt_tokens().min(self.config.max_context);
        tokens.saturating_sub(1) / BLOCK
    }

    /// Judges the tier's `events`, in order. `enters` is whether finished transfers had to be entered.
    ///
    /// # Errors
    /// The fault.
    pub fn moved(&mut self, events: &[TierEvent], enters: bool) -> Result<(), String> {
        let tier = &self.sharing.tier;
        let due = tier.arriving.as_ref().filter(|_| tier.has_caught_up && enters);
        let due = due.map(|arriving| arriving.wanted.tokens.clone());
        for event in events {
            match *event {
                TierEvent::Restored { tokens, blocks, .. } => self.arrived(tokens, blocks)?,
                TierEvent::Stored { tokens, blocks, .. } => self.stored(tokens, blocks)?,
                TierEvent::Missed { miss } => self.missed(miss)?,
            }
        }
        let Tier { arriving, has_caught_up, .. } = &self.sharing.tier;
        match due.filter(|_| *has_caught_up && arriving.is_some()) {
            Some(prompt) => Err(format!("{prompt:?} has arrived and was not entered")),
            None => Ok(()),
        }
    }

    /// A prompt has arrived: its blocks and the checkpoint after them are in the tree.
    fn arrived(&mut self, tokens: u32, blocks: u32) -> Result<(), String> {
        let tier = &mut self.sharing.tier;
        let arrived = tier.arriving.take().map_or_else(|| tier.begin(), Ok)?;
        let text = &arrived.wanted.text;
        let prefix = text.prefix(tokens);
        let (whole, deep) = (self.whole_blocks(text), tokens / BLOCK);
        let what = format!("{tokens} tokens of {arrived:?} arrived");
        if arrived.wanted.names.is_empty() {
            return Err(format!("{what}, which nobody wants"));
        }
        let fits = tokens.is_multiple_of(BLOCK) && (1..=whole).contains(&deep) && blocks <= deep;
        if !fits || !self.sharing.tier.ever.contains(&prefix) {
            return Err(format!("{what}, which host memory cannot have"));
        }
        // The tree takes no block that it got from elsewhere in the meantime.
        if arrived.blocks.is_some_and(|before| before < blocks) {
            return Err(format!("{what}, with {blocks} blocks"));
        }
        for at in 1..=deep {
            let prefix = text.blocks(at);
            if !self.is_referred_to(&prefix) {
                self.sharing.restored(prefix);
            }
        }
        self.sharing.checkpoints.insert(prefix.clone());
        self.sharing.tier.kept.insert(prefix);
        Ok(())
    }

    /// A checkpoint of some request has arrived in host memory.
    fn stored(&mut self, tokens: u32, blocks: u32) -> Result<(), String> {
        let whole = tokens.is_multiple_of(BLOCK) && blocks <= tokens / BLOCK;
        if whole && self.sharing.tier.lengths.contains(&tokens) {
            return Ok(());
        }
        Err(format!("a checkpoint of {tokens} tokens and {blocks} blocks was stored"))
    }

    /// A transfer did not take place.
    fn missed(&mut self, miss: TierMiss) -> Result<(), String> {
        let tier = &mut self.sharing.tier;
        let arriving = tier.arriving.as_ref();
        match miss {
            TierMiss::NoRoomOnHost => Ok(()),
            TierMiss::Cancelled if arriving.is_some_and(|of| of.wanted.names.is_empty()) => {
                tier.arriving = None;
                Ok(())
            }
            TierMiss::NotThere | TierMiss::NoRoomOnDevice if arriving.is_none() => {
                tier.begin().map(drop)
            }
            _ => Err(format!("{miss:?} while {arriving:?} arrives")),
        }
    }

    /// Judges the number of tokens of a prompt that the device or host memory has.
    ///
    /// # Errors
    /// The fault.
    pub fn found(&mut self, text: &Text, there: u32) -> Result<(), String> {
        let (sharing, whole) = (&self.sharing, self.whole_blocks(text));
        let may = |prefix: &Prefix| sharing.tier.ever.contains(prefix);
        let must =
            |prefix: &Prefix| sharing.tier.kept.contains(prefix) || sharing.must_go_on_from(prefix);
        let most = Sharing::deepest(text, whole, may) * BLOCK;
        let least = Sharing::deepest(text, whole, must) * BLOCK;
        if (least..=most).contains(&there) && (there == 0 || may(&text.prefix(there))) {
            return Ok(());
        }
        Err(format!("{there} tokens are there, should be {least} to {most}"))
    }

    /// Judges the answer to a prefetch. `there` is the number of tokens that the device or host memory had, `events`
    /// are those of the tier.
    ///
    /// # Errors
    /// The fault.
    pub fn prefetched(
        &mut self,
        (name, text): (Name, &Text),
        there: u32,
        got: &Result<bool, KvError>,
        events: &[TierEvent],
    ) -> Result<(), String> {
        let whole = self.whole_blocks(text);
        // First, finished transfers are entered.
        let entered = |event: &TierEvent| match event {
            TierEvent::Missed { miss } => *miss == TierMiss::Cancelled,
            TierEvent::Restored { .. } | TierEvent::Stored { .. } => true,
        };
        let (before, behind) = events.split_at(events.partition_point(entered));
        self.moved(before, true)?;
        let is_wanted = match got {
            Ok(wanted) => *wanted,
            Err(KvError::OutOfCheckpoints { needed: 1, free: 0 }) => true,
            Err(KvError::OutOfBlocks { needed, free }) => free < needed && *needed <= whole,
            Err(_) => false,
        };
        if is_wanted {
            let wanted = self.wanted_by(name, text);
            self.sharing.tier.want(wanted);
        }
        self.moved(behind, false)?;
        let waits = self.sharing.tier.names().contains(&name);
        if waits != matches!(got, Ok(true)) {
            return Err(format!("{got:?} to a prefetch, and {:?}", self.sharing.tier));
        }
        let most = Sharing::deepest(text, whole, |prefix| self.sharing.may_go_on_from(prefix));
        if matches!(got, Ok(false)) && there > most * BLOCK {
            return Err(format!("{there} tokens are in host memory and do not come"));
        }
        Ok(())
    }

    fn wanted_by(&self, name: Name, text: &Text) -> Wanted {
        let tokens = text.prefix(text.prompt_tokens().min(self.config.max_context));
        Wanted { text: text.clone(), tokens, names: vec![name] }
    }

    /// Judges the cancellation of a prefetch; `events` are those of the tier.
    ///
    /// # Errors
    /// The fault.
    pub fn cancelled(&mut self, name: Name, got: bool, events: &[TierEvent]) -> Result<(), String> {
        let withdrawn = self.sharing.tier.withdraw(name);
        let missed = TierEvent::Missed { miss: TierMiss::Cancelled };
        let want = (withdrawn == Some(true)).then_some(missed);
        if got == withdrawn.is_some() && events.iter().eq(&want) {
            return Ok(());
        }
        Err(format!("cancelled: {got}, {events:?}, should be {withdrawn:?}"))
    }

    /// Judges the tier's `events` during an admission that waited for a prompt. `there` is the number of tokens that
    /// the device or host memory had, `reused` the number that the request reuses (`None` if it was refused).
    ///
    /// # Errors
    /// The fault.
    pub fn waited(
        &mut self,
        (name, text): (Name, &Text),
        there: u32,
        reused: Option<u32>,
        events: &[TierEvent],
    ) -> Result<(), String> {
        self.sharing.tier.next = Some(self.wanted_by(name, text));
        // If there is no free slot, nothing is entered.
        let moved = self.moved(events, reused.is_some());
        self.sharing.tier.next = None;
        moved?;
        if reused.is_none() && !events.is_empty() {
            return Err(format!("a request that was refused moved {events:?}"));
        }
        match reused.filter(|&reused| reused < there && !events.contains(&NO_ROOM)) {
            Some(reused) => Err(format!("{reused} tokens are reused, and {there} were there")),
            None => Ok(()),
        }
    }

    /// Judges the answer to an advance. If it `settles`, the advance was repeated until no transfer was left.
    ///
    /// # Errors
    /// The fault.
    pub fn advanced(
        &mut self,
        got: Result<(), KvError>,
        events: &[TierEvent],
        settles: bool,
    ) -> Result<(), String> {
        same(&answer(got), &Ok(()))?;
        self.moved(events, true)?;
        self.sharing.tier.after = match settles {
            true => After::AllDone,
            // A prompt for which there was no room is given up, and the next one waits for the next advance.
            false if events.contains(&NO_ROOM) => After::Anything,
            false => After::NoneIdle,
        };
        Ok(())
    }

    /// The device has finished all queued work.
    pub fn caught_up(&mut self) {
        self.sharing.tier.has_caught_up = true;
    }

    /// Checks the room of the prompt that is arriving: its blocks and its checkpoint are neither free, nor in the tree,
    /// nor a request's.
    pub(super) fn check_arriving(&mut self, counts: Counts, own: u32) -> Result<(), String> {
        let blocks = counts.free + counts.tree + own;
        let checkpoints = counts.free_checkpoints + counts.tree_checkpoints + counts.outputs;
        let flying = self.config.num_blocks.checked_sub(blocks);
        let saved = self.config.num_checkpoints.checked_sub(checkpoints);
        let has_tier = self.has_tier();
        let tier = &mut self.sharing.tier;
        if (saved, tier.arriving.is_none(), has_tier) == (Some(1), true, true) {
            tier.arriving = Some(tier.begin()?);
        }
        let blocks = |arriving: &mut Arriving| *arriving.blocks.get_or_insert(flying.unwrap_or(0));
        let want = tier.arriving.as_mut().map(blocks);
        let most =
            tier.arriving.as_ref().map(|arriving| arriving.wanted.text.prompt_tokens() / BLOCK);
        let right = (flying, saved) == (Some(want.unwrap_or(0)), Some(want.map_or(0, |_| 1)));
        if right && want <= most {
            return Ok(());
        }
        let arriving = &tier.arriving;
        Err(format!("{counts:?} and {own} blocks of requests, while {arriving:?} arrives"))
    }

    /// After an operation: checks that the prompts still to arrive are those that were neither delivered nor given up.
    ///
    /// # Errors
    /// The fault.
    pub fn check_tier(&mut self, seen: &Seen) -> Result<(), String> {
        let tier = &mut self.sharing.tier;
        if !seen.events.is_empty() {
            return Err(format!("{:?} behind an operation that moves nothing", seen.events));
        }
        let names = tier.names();
        if !seen.wanted.iter().eq(&names) || (!names.is_empty() && !seen.is_moving) {
            return Err(format!("{:?} are to arrive, should be {names:?}", seen.wanted));
        }
        if seen.evicted > tier.evicted {
            tier.kept.clear();
        }
        tier.evicted = seen.evicted;
        let is_idle = tier.arriving.is_none() && !tier.waiting.is_empty();
        match std::mem::take(&mut tier.after) {
            After::AllDone if seen.is_moving => Err("not everything is done".into()),
            After::NoneIdle if is_idle => Err(format!("nothing arrives of {names:?}")),
            _ => Ok(()),
        }
    }
}
