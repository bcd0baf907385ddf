//! An index of what is cached, built from events alone.

use std::collections::BTreeMap;

use dsv4_kv_prefix::{Drained, Event, EventBatch, EventSource, RootKey, Serial};

use crate::model::{Path, T};

/// Capacity of the event log in blocks; some operations fill it.
pub const CAPACITY: u32 = 16;

/// The cached blocks, according to events.
pub struct Index {
    roots: Vec<RootKey>,
    blocks: BTreeMap<Serial, Path>,
    batch: EventBatch<T>,
    /// One more than the last serial that was stored.
    next: u64,
    pub drains: u32,
    pub overflows: u32,
}

impl Index {
    pub fn new(roots: Vec<RootKey>) -> Self {
        let batch = EventBatch::with_capacity(CAPACITY);
        Self { roots, blocks: BTreeMap::new(), batch, next: 0, drains: 0, overflows: 0 }
    }

    /// Takes the logged events, or a snapshot if the log has overflowed.
    pub fn drain(&mut self, source: &mut impl EventSource<T>) -> Result<(), String> {
        let mut batch = std::mem::take(&mut self.batch);
        let drained = source.drain_events(&mut batch);
        let applied = match drained {
            Drained::Events => batch.iter().try_for_each(|event| self.apply(event)),
            Drained::Overflowed => self.start_anew(source),
            Drained::Off => Err("events are off".to_owned()),
        };
        self.drains += 1;
        self.overflows += u32::from(drained == Drained::Overflowed);
        self.batch = batch;
        applied
    }

    /// Takes a snapshot.
    pub fn start_anew(&mut self, source: &mut impl EventSource<T>) -> Result<(), String> {
        self.blocks.clear();
        self.next = 0;
        let snapshot = source.snapshot_events();
        let mut stored: Vec<_> = snapshot.iter().collect();
        stored.iter().try_for_each(|&event| self.apply_any_order(event))?;
        stored.clear();
        self.next = self.blocks.last_key_value().map_or(0, |(last, _)| last.number() + 1);
        // No events followed the snapshot.
        let mut batch = EventBatch::with_capacity(CAPACITY);
        let quiet = source.drain_events(&mut batch) == Drained::Events && batch.is_empty();
        if quiet { Ok(()) } else { Err(format!("{batch:?} behind a snapshot")) }
    }

    /// The paths of all blocks, in order.
    pub fn paths(&self) -> Vec<&Path> {
        let mut paths: Vec<_> = self.blocks.values().collect();
        paths.sort_unstable();
        paths
    }

    fn apply(&mut self, event: Event<'_, T>) -> Result<(), String> {
        if let Event::Stored(stored) = event {
            let mut numbers = stored.serials.iter().map(|serial| serial.number());
            let ascending = numbers.clone().is_sorted_by(|a, b| a < b);
            if !ascending || numbers.clone().next().is_some_and(|first| first < self.next) {
                return Err(format!("{stored:?} was told, and {} was the next", self.next));
            }
            self.next = numbers.next_back().map_or(self.next, |last| last + 1);
        }
        self.apply_any_order(event)
    }

    fn apply_any_order(&mut self, event: Event<'_, T>) -> Result<(), String> {
        match event {
            Event::Stored(run) => {
                let above = run.parent.map(|parent| self.blocks.get(&parent).cloned());
                let root = self.roots.iter().position(|root| root == run.root);
                let root = root.ok_or_else(|| format!("{run:?} of an unknown root"))?;
                let none = || Some((root, Vec::new()));
                let Some((of, mut path)) =
                    above.unwrap_or_else(none).filter(|_| !run.serials.is_empty())
                else {
                    return Err(format!("{run:?} hangs in the air"));
                };
                for (&serial, tokens) in run.serials.iter().zip(run.tokens) {
                    path.extend_from_slice(tokens);
                    if of != root || self.blocks.insert(serial, (root, path.clone())).is_some() {
                        return Err(format!(
                            "{serial:?} is there, or its parent is another root's"
                        ));
                    }
                }
                let lists = run.serials.len() == run.tokens.len();
                if lists { Ok(()) } else { Err(format!("{run:?}")) }
            }
            Event::Removed(serials) => serials.iter().try_for_each(|serial| {
                let (root, path) =
                    self.blocks.remove(serial).ok_or(format!("{serial:?} is not there"))?;
                let is_above = |(of, longer): &Path| *of == root && longer.starts_with(&path);
                let orphan = self.blocks.values().find(|longer| is_above(longer));
                orphan.map_or(Ok(()), |left| Err(format!("{left:?} is left of {path:?}")))
            }),
        }
    }
}
