//! Which sources a target reads, and which it has asked or given up: an offer that comes twice is taken once.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::{REMEMBERED, TransferError};
use crate::image::Source;
use crate::mistake::{Mistake, made};

/// What a receiver and its payloads know of sources together.
#[derive(Clone, Debug, Default)]
pub(super) struct Sources(Arc<Mutex<Known>>);

#[derive(Debug, Default)]
struct Known {
    /// Those that are read, and those whose payload was verified and is not dropped.
    here: HashSet<Source>,
    asked: Asked,
}

/// Sources that were asked. A control channel may keep an answer for ever, and gives it to whoever asks for that source: so none
/// is ever asked again. Of those that are too many to remember, only the last lease of each sender is known: a sender counts its
/// leases up, so that an offer which is older may have been asked for, and is refused.
#[derive(Debug, Default)]
struct Asked {
    all: HashSet<Source>,
    /// The same, in the order in which they were asked.
    order: VecDeque<Source>,
    /// By epoch: the last lease that is not remembered.
    forgotten: HashMap<u64, u64>,
}

impl Asked {
    fn has(&self, source: Source) -> bool {
        let Source { epoch, lease } = source;
        self.all.contains(&source) || self.forgotten.get(&epoch).is_some_and(|&last| lease <= last)
    }

    fn add(&mut self, source: Source, most: usize) {
        if self.all.insert(source) {
            self.order.push_back(source);
        }
        while self.order.len() > most {
            let Some(oldest) = self.order.pop_front() else { break };
            self.all.remove(&oldest);
            let last = self.forgotten.entry(oldest.epoch).or_default();
            *last = oldest.lease.max(*last);
        }
    }
}

/// A source that is read, or whose payload was verified. Nobody else reads it until this is dropped, nor later if it was asked.
#[derive(Debug)]
pub(super) struct Taken {
    source: Source,
    was_asked: AtomicBool,
    sources: Sources,
}

impl Sources {
    fn known(&self) -> MutexGuard<'_, Known> {
        // Sets are whole whoever panicked.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a source to read it.
    pub fn take(&self, source: Source) -> Result<Taken, TransferError> {
        let mut known = self.known();
        let is_checked = !made(Mistake::OffersRepeat);
        if known.asked.has(source) && is_checked {
            return Err(TransferError::AskedBefore { source_of: source });
        }
        if !known.here.insert(source) && is_checked {
            return Err(TransferError::TakenBefore { source_of: source });
        }
        Ok(Taken { source, was_asked: AtomicBool::new(false), sources: self.clone() })
    }
}

impl Taken {
    /// The source is told that nobody here needs it any more: it is read no more, as its memory may be somebody else's.
    pub fn given_up(&self) {
        self.sources.known().asked.add(self.source, REMEMBERED);
    }

    /// Whether the source was asked for this payload before; from now on it was.
    pub fn was_asked(&self) -> bool {
        let before = self.was_asked.swap(true, Ordering::Relaxed);
        if !before {
            self.sources.known().asked.add(self.source, REMEMBERED);
        }
        before
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.sources.known().here.remove(&self.source);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What was asked is refused for ever, whether it is remembered or not; and what is newer is not.
    #[test]
    fn what_was_asked_stays_so() {
        let (mut asked, most) = (Asked::default(), 4);
        // Each sender's leases in another order than they were offered in.
        let leases = [1, 2, 4, 3, 8, 6, 10, 9, 12];
        let of = |epoch| move |lease| Source { epoch, lease };
        for (count, &lease) in leases.iter().enumerate() {
            for source in [7, 11].map(|epoch| of(epoch)(lease)) {
                assert!(!asked.has(source), "{source:?} was not asked");
                asked.add(source, most);
                asked.add(source, most);
            }
            for &before in &leases[..=count] {
                assert!(asked.has(of(7)(before)) && asked.has(of(11)(before)), "{before}");
            }
            assert!(asked.all.len() == asked.order.len() && asked.all.len() <= most);
        }
        assert_eq!(asked.forgotten, HashMap::from([(7, 10), (11, 10)]));
        // Nobody knows whether these were asked; those behind them were not.
        assert!([5, 7].iter().all(|&lease| asked.has(of(7)(lease))));
        assert!([11, 13].iter().all(|&lease| !asked.has(of(7)(lease))));
        assert!(!asked.has(of(5)(1)), "another sender");
    }
}
