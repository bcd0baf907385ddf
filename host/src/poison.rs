//! Poison: unowned memory is filled with NaN, and reads of it are reported by request.
//!
//! With [`crate::CacheConfig::poison`] every pool starts as NaN, and the memory of a released
//! request becomes NaN again before the next step can write it. A search over the rows follows each
//! gather, and one over the scored keys each run of the indexer. It records rows and keys that no
//! kernel has written since, with request, layer and entry.

use kernels_gpu::params::{FindPoisonParams, FindPoisonedKeysParams};

use crate::device::{Backend, Buffer, Stream};
use crate::error::KvError;
pub use crate::error::poison_read::{PoisonRead, PoisonedRow};
use crate::ids::{BlockId, LayerId, SlotId};
use crate::ledger::Ledger;
use crate::ledger::unit_list::UnitList;
use crate::pool_kind::PoolUnit;
use crate::schema::Pool;

/// Every byte of poisoned memory: NaN as E4M3, BF16, UE8M0 and f32.
pub const POISON: u8 = 0xFF;

/// Most rows that are recorded between two checks; further rows are only counted. A power of two, so that places follow each
/// other where the number of rows wraps around.
const CAPACITY: u64 = 64;
/// Words of a record.
const RECORD: usize = FindPoisonParams::RECORD as usize;

/// Words of the memory that [`crate::ops::find_poison`] and [`crate::ops::find_poisoned_keys`] write.
pub(crate) const WORDS: u64 = FindPoisonParams::HEAD as u64 + CAPACITY * RECORD as u64;

/// Slots and blocks that were freed since the last step and must be poisoned before the next one.
/// Each is listed once, however often it was freed.
#[derive(Debug, Default)]
pub(crate) struct ToPoison {
    slots: UnitList,
    blocks: UnitList,
}

impl ToPoison {
    /// Empty lists for `slots` slots and `blocks` blocks.
    pub fn new(slots: u32, blocks: u32) -> Self {
        Self { slots: UnitList::new(slots), blocks: UnitList::new(blocks) }
    }

    /// Lists a slot that was freed.
    pub fn add_slot(&mut self, slot: SlotId) {
        self.slots.add(slot.0);
    }

    /// Lists a block that was freed.
    pub fn add_block(&mut self, block: BlockId) {
        self.blocks.add(block.0);
    }

    /// Queues the poisoning of all listed slots and blocks in `pools`. They stay listed until [`Self::clear`].
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

    /// Empties the lists.
    pub fn clear(&mut self) {
        self.slots.clear();
        self.blocks.clear();
    }
}

/// What the searches of a layer group have found, as it is on the device.
pub(crate) type Found = [u32; WORDS as usize];

/// Reads what the searches of a layer group have found.
pub(crate) fn read<B: Backend>(
    stream: &Stream<B>,
    found: &Buffer<B, u32>,
) -> Result<Found, KvError> {
    let mut words = [0; WORDS as usize];
    stream.download(&found.view(), 0, &mut words)?;
    Ok(words)
}

/// Adds the rows that were recorded in `words`, read from `found`, and not reported yet to `rows`, and marks them as
/// reported. Returns how many were found. The number on the device only grows: setting it to 0 would lose what kernels
/// in other streams count meanwhile.
pub(crate) fn report<B: Backend>(
    stream: &Stream<B>,
    found: &Buffer<B, u32>,
    words: &Found,
    ledger: &Ledger,
    rows: &mut Vec<PoisonRead>,
) -> u32 {
    let [count, read, records @ ..] = words;
    let new = count.wrapping_sub(*read);
    if new > 0 {
        // If this fails, the next call reports the rows again.
        let _ = stream.upload(&[*count], found, 1);
        let (records, _) = records.as_chunks::<RECORD>();
        for index in (0..new.min(CAPACITY as u32)).map(|i| read.wrapping_add(i)) {
            let record = &records[(index % CAPACITY as u32) as usize];
            // It may not be there yet, or never, of a row that was found while more rows than there is room for were read.
            if record[RECORD - 1] == index.wrapping_add(1) {
                rows.push(read_record(ledger, record));
            }
        }
    }
    new
}

fn read_record(ledger: &Ledger, &[place, slot, position, what, _]: &[u32; RECORD]) -> PoisonRead {
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
