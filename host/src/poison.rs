//! Poison: memory that nobody owns is made unusable, and whoever reads it is named.
//!
//! With [`crate::CacheConfig::poison`] every pool starts as NaN, and what a released request held
//! becomes NaN again before the next step can write it. A search follows each gather, over the rows
//! that it gathered, and each run of the indexer, over the keys that it scored: a row or a key that
//! nobody wrote since is counted, with request, layer and entry.

use kernels_gpu::params::{FindPoisonParams, FindPoisonedKeysParams};

use crate::device::{Backend, Buffer, Stream};
use crate::error::KvError;
pub use crate::error::poison_read::{PoisonRead, PoisonedRow};
use crate::ids::{BlockId, LayerId, SlotId};
use crate::ledger::Ledger;
use crate::ledger::unit_list::UnitList;
use crate::pool_kind::PoolUnit;
use crate::schema::Pool;

/// What every byte of poisoned memory is: NaN as E4M3, BF16, UE8M0 and f32.
pub const POISON: u8 = 0xFF;

/// Rows that are recorded between two checks; more are only counted.
const CAPACITY: u64 = 64;
/// Words of a record.
const RECORD: usize = FindPoisonParams::RECORD as usize;

/// Words of the memory that [`crate::ops::find_poison`] and [`crate::ops::find_poisoned_keys`] write.
pub(crate) const WORDS: u64 = 1 + CAPACITY * RECORD as u64;

/// What was given back since the last step, and must be poisoned before the next: each slot and
/// block once, however often it changed hands.
#[derive(Debug, Default)]
pub(crate) struct Freed {
    slots: UnitList,
    blocks: UnitList,
}

impl Freed {
    /// Nothing freed, of so many slots and blocks. With none of either nothing is ever listed.
    pub fn new(slots: u32, blocks: u32) -> Self {
        Self { slots: UnitList::new(slots), blocks: UnitList::new(blocks) }
    }

    /// The slot has no owner any more.
    pub fn add_slot(&mut self, slot: SlotId) {
        self.slots.add(slot.0);
    }

    /// The block has no owner any more.
    pub fn add_block(&mut self, block: BlockId) {
        self.blocks.add(block.0);
    }

    /// Queues the poisoning of everything in it in `pools`. It stays listed until [`Self::clear`].
    pub fn poison<'p, B: Backend>(
        &self,
        stream: &Stream<B>,
        pools: impl Iterator<Item = (&'p Pool, &'p Buffer<B, u8>)>,
    ) -> Result<(), KvError> {
        if self.slots.units().is_empty() && self.blocks.units().is_empty() {
            return Ok(());
        }
        for (pool, buffer) in pools {
            let (freed, bytes) = match pool.unit {
                PoolUnit::Slot => (&self.slots, pool.unit_bytes()),
                PoolUnit::Block => (&self.blocks, pool.unit_bytes()),
            };
            for &unit in freed.units() {
                let unit = buffer.slice(u64::from(unit) * bytes, bytes);
                stream.fill(&unit.expect("the pool has every unit"), POISON)?;
            }
        }
        Ok(())
    }

    /// Forgets what was poisoned.
    pub fn clear(&mut self) {
        self.slots.clear();
        self.blocks.clear();
    }
}

/// Reads what the searches found since the last read; nothing found is `Ok`.
pub(crate) fn read<B: Backend>(
    stream: &Stream<B>,
    found: &Buffer<B, u32>,
    ledger: &Ledger,
) -> Result<(), KvError> {
    let mut words = [0_u32; WORDS as usize];
    stream.download(&found.view(), 0, &mut words)?;
    let [count, records @ ..] = &words;
    if *count == 0 {
        return Ok(());
    }
    // If the count cannot be cleared, the next read reports the rows again.
    let _ = stream.upload(&[0], found, 0);
    let records = records.chunks_exact(RECORD).take(*count as usize);
    let mut rows: Vec<_> = records.map(|record| read_record(ledger, record)).collect();
    rows.sort_unstable();
    Err(KvError::PoisonRead { count: *count, rows })
}

fn read_record(ledger: &Ledger, record: &[u32]) -> PoisonRead {
    let [place, slot, position, what] = [record[0], record[1], record[2], record[3]];
    let source = place % FindPoisonParams::LAYER;
    PoisonRead {
        layer: LayerId(place / FindPoisonParams::LAYER),
        slot: SlotId(slot),
        request: ledger.request_in(SlotId(slot)),
        position,
        row: match source {
            FindPoisonParams::WINDOW => PoisonedRow::Window(what),
            FindPoisonedKeysParams::KEY => PoisonedRow::Key(what),
            _ => PoisonedRow::Entry(what),
        },
    }
}
