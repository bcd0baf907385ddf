//! The blocks that exist according to the events of a cache.

use std::collections::{BTreeMap, BTreeSet};

use dsv4_kv::events::{Event, EventBatch, Serial};

use super::text::Prefix;

/// By serial number, the blocks that exist according to the events; each as the prefix that it ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Index(BTreeMap<Serial, Prefix>);

impl Index {
    /// The blocks of a snapshot.
    ///
    /// # Errors
    /// As [`Self::apply`].
    pub fn of(snapshot: &EventBatch) -> Result<Self, String> {
        let mut index = Self::default();
        index.apply(snapshot).map(|()| index)
    }

    /// Applies further events.
    ///
    /// # Errors
    /// An inconsistent event: a block whose parent does not exist, a block that exists already, or the removal of a
    /// block that does not exist.
    pub fn apply(&mut self, batch: &EventBatch) -> Result<(), String> {
        for event in batch.iter() {
            match event {
                Event::Stored(run) => {
                    let &[salt] = run.root.salt() else {
                        return Err(format!("blocks under {:?}, which nobody has", run.root));
                    };
                    let mut path = match run.parent {
                        None => Prefix::of(salt, &[]),
                        Some(parent) => self.0.get(&parent).cloned().ok_or_else(|| {
                            format!("blocks below {parent:?}, which is not there")
                        })?,
                    };
                    for (&serial, tokens) in run.serials.iter().zip(run.tokens) {
                        path.go_on(tokens);
                        if self.0.insert(serial, path.clone()).is_some() {
                            return Err(format!("{serial:?} was stored twice"));
                        }
                    }
                }
                Event::Removed(serials) => {
                    if let Some(serial) =
                        serials.iter().find(|serial| self.0.remove(serial).is_none())
                    {
                        return Err(format!("{serial:?} is removed and was not there"));
                    }
                }
            }
        }
        Ok(())
    }

    /// The prefixes that exist.
    #[must_use]
    pub fn prefixes(&self) -> BTreeSet<&Prefix> {
        self.0.values().collect()
    }
}
