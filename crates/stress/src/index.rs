//! What the events of a cache say is there.

use std::collections::{BTreeMap, BTreeSet};

use dsv4_kv::events::{Event, EventBatch, Serial};

use super::text::Prefix;

/// The blocks that events say are there: all tokens down to the end of each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Index(BTreeMap<Serial, Prefix>);

impl Index {
    /// Of a snapshot.
    ///
    /// # Errors
    /// As of [`Self::apply`].
    pub fn of(snapshot: &EventBatch) -> Result<Self, String> {
        let mut index = Self::default();
        index.apply(snapshot).map(|()| index)
    }

    /// What is there after some events more.
    ///
    /// # Errors
    /// An event that cannot be: a block below one that is not there, one that is there already, the end of one that is not.
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

    /// What is there.
    #[must_use]
    pub fn prefixes(&self) -> BTreeSet<&Prefix> {
        self.0.values().collect()
    }
}
