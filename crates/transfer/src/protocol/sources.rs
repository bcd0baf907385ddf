//! Which sources a target reads, and which it has asked or given up. So an offer that arrives twice is taken once.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::error::{REMEMBERED, TransferError};
use crate::image::Source;
use crate::mistake::{Mistake, made};

/// What a receiver and its payloads know about sources. The payloads share it with the receiver.
#[derive(Clone, Debug, Default)]
pub(super) struct Sources(Arc<Mutex<Known>>);

#[derive(Debug, Default)]
struct Known {
    /// Sources that are being read, and those whose payload was verified and not yet dropped.
    here: HashSet<Source>,
    asked: Asked,
}

/// Sources that were asked or given up. None of them is asked again, because a control channel may keep an old answer
/// and return it to the next question about the same source. The last [`REMEMBERED`] sources are known one by one. Of
/// older ones only the highest lease of each sender is kept: a sender counts its leases up, so an offer with that lease
/// or a lower one may have been asked for, and is refused.
#[derive(Debug, Default)]
struct Asked {
    all: HashSet<Source>,
    /// The sources of `all`, in the order in which they were added.
    order: VecDeque<Source>,
    /// By epoch: the highest lease that is no longer in `all`.
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

/// A source that is being read, or whose payload was verified. No other transfer can take it until this is dropped; if
/// it was asked or given up, none can afterwards either.
#[derive(Debug)]
pub(super) struct Taken {
    source: Source,
    was_asked: AtomicBool,
    sources: Sources,
}

impl Sources {
    fn known(&self) -> MutexGuard<'_, Known> {
        // The sets are consistent even if another thread has panicked.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a source to read it. Errors: [`TransferError::AskedBefore`], [`TransferError::TakenBefore`].
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
    /// Notes that the source is given up. It is not read again, since its memory may be reused for another payload.
    pub fn given_up(&self) {
        self.sources.known().asked.add(self.source, REMEMBERED);
    }

    /// Returns whether the source was asked for this payload before, and marks it as asked.
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

    /// Sources that were asked stay refused, whether remembered one by one or not; newer ones are accepted.
    #[test]
    fn what_was_asked_stays_so() {
        let (mut asked, most) = (Asked::default(), 4);
        // The leases of each sender, in an order that differs from the order of the offers.
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
        // It is not known whether these were asked; later leases were not.
        assert!([5, 7].iter().all(|&lease| asked.has(of(7)(lease))));
        assert!([11, 13].iter().all(|&lease| !asked.has(of(7)(lease))));
        assert!(!asked.has(of(5)(1)), "another sender");
    }
}
