//! Chooses the events of requests, and the time of each event.

use std::cmp::Reverse;
use std::collections::HashMap;

use anyhow::Result;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use schemars::JsonSchema;
use serde::Serialize;

use crate::replay::changes::Aside;
use crate::replay::drive::Drive;
use crate::replay::execute::Disturb;
use crate::replay::load::Request;

/// Most steps for which a request is suspended.
const LONGEST: u32 = 64;

/// Shares of the requests, from 0 to 1.
#[derive(Clone, Copy, Debug)]
pub struct Shares {
    /// Requests that are aborted.
    pub aborts: f64,
    /// Requests that are forked.
    pub forks: f64,
    /// Requests that are suspended; the same share is preempted.
    pub preemptions: f64,
}

/// What was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Done {
    /// Requests that were aborted.
    pub aborted: u64,
    /// Copies that began.
    pub forked: u64,
    /// Requests that were suspended; all were resumed.
    pub suspended: u64,
    /// Requests that were preempted, those for which no blocks were left not counted.
    pub preempted: u64,
}

/// An event of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    Abort,
    Fork,
    Suspend,
    Preempt,
}

/// The events of a round.
pub struct Disturbances {
    rng: ChaCha8Rng,
    /// The events of each request by its index in the load, with the number of tokens at which each happens. The next
    /// event is last.
    events: HashMap<usize, Vec<(u32, Event)>>,
    /// Suspended requests, and for how many more steps.
    aside: Vec<(u32, Aside)>,
    /// Scratch memory.
    due: Vec<(usize, Event)>,
    pub done: Done,
}

impl Disturbances {
    /// Draws the events.
    pub fn new(seed: u64, shares: Shares, load: &[Request]) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let Shares { aborts, forks, preemptions } = shares;
        let kinds = [
            (Event::Abort, aborts),
            (Event::Fork, forks),
            (Event::Suspend, preemptions),
            (Event::Preempt, preemptions),
        ];
        let mut events = HashMap::<_, Vec<_>>::new();
        for (index, Request { arrival, .. }) in load.iter().enumerate() {
            for (event, share) in kinds {
                // A copy of half a prompt would not be a branch of a conversation.
                let first = if event == Event::Fork { arrival.input } else { 1 };
                // A request with all its tokens has ended. A request with a single generated token has no branch.
                let between = first..arrival.context_tokens();
                if rng.random_bool(share) && !between.is_empty() {
                    events.entry(index).or_default().push((rng.random_range(between), event));
                }
            }
        }
        let by_tokens = |&(at, _): &(u32, Event)| Reverse(at);
        events.values_mut().for_each(|events| events.sort_by_key(by_tokens));
        Self { rng, events, aside: Vec::new(), due: Vec::new(), done: Done::default() }
    }

    /// Applies the events that are due between two steps. Returns whether requests are suspended.
    pub fn between_steps<E: Disturb>(&mut self, drive: &mut Drive<'_, E>) -> Result<bool> {
        self.resume(drive)?;
        let Self { events, due, .. } = self;
        due.extend(drive.progress().filter_map(|(index, tokens)| {
            let &(at, event) = events.get(&index)?.last()?;
            (tokens >= at).then_some((index, event))
        }));
        for (index, event) in std::mem::take(&mut self.due) {
            // An event for which there is no room now happens later, unless the request has ended by then.
            if self.happens(drive, index, event)? {
                self.events.get_mut(&index).map(Vec::pop);
            }
        }
        Ok(!self.aside.is_empty())
    }

    /// Applies an event, if there is room for it. Returns whether there was.
    fn happens<E: Disturb>(
        &mut self,
        drive: &mut Drive<'_, E>,
        index: usize,
        event: Event,
    ) -> Result<bool> {
        let (happened, count) = match event {
            Event::Abort => (drive.abort(index)?, &mut self.done.aborted),
            Event::Fork => (drive.fork(index)?, &mut self.done.forked),
            Event::Preempt => (drive.preempt(index)?, &mut self.done.preempted),
            Event::Suspend => {
                let steps = self.rng.random_range(1..=LONGEST);
                let aside = drive.suspend(index)?.map(|aside| (steps, aside));
                let happened = aside.is_some();
                self.aside.extend(aside);
                (happened, &mut self.done.suspended)
            }
        };
        *count += u64::from(happened);
        Ok(happened)
    }

    /// Resumes requests whose time is over, while slots are free.
    fn resume<E: Disturb>(&mut self, drive: &mut Drive<'_, E>) -> Result<()> {
        for (steps, aside) in std::mem::take(&mut self.aside) {
            let left = match steps {
                0 => drive.resume(aside)?.map(|aside| (0, aside)),
                _ => Some((steps - 1, aside)),
            };
            self.aside.extend(left);
        }
        Ok(())
    }
}
