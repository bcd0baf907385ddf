//! Poison: memory that nobody owns is made unusable, and whoever reads it is named.
//!
//! With [`crate::CacheConfig::poison`] every pool starts as NaN, and what a released request held
//! becomes NaN again before the next step can write it. Each gather is followed by a look at what it
//! gathered, and the indexer's scores by a look at the keys that they took: a row or a key that nobody
//! wrote since is counted, with request, layer and entry.

use kernels_gpu::params::{FindPoisonParams, FindPoisonedKeysParams};

use crate::device::{Backend, Buffer, DeviceError, Stream};
use crate::error::KvError;
use crate::ids::{BlockId, LayerId, RequestId, SlotId};
use crate::manager::KvCacheManager;
use crate::schema::{PoolUnit, Schema};

/// What every byte of poisoned memory is: NaN as E4M3, BF16, UE8M0 and f32.
pub const POISON: u8 = 0xFF;

/// Rows that are recorded between two checks; more are only counted.
const CAPACITY: u64 = 64;
/// Words of a record.
const RECORD: usize = FindPoisonParams::RECORD as usize;

/// Words of the memory that [`crate::ops::find_poison`] and
/// [`crate::ops::find_poisoned_keys`] write to.
pub(crate) const WORDS: u64 = 1 + CAPACITY * RECORD as u64;

/// What a row that nobody wrote was gathered as, or that it was scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PoisonedRow {
    /// The sliding-window key of the token at this position.
    Window(u32),
    /// The compressed entry of this number, by a list or among all.
    Entry(u32),
    /// The indexer key of this entry, for its score.
    Key(u32),
}

/// A row that nobody wrote, and who was given it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PoisonRead {
    /// The layer.
    pub layer: LayerId,
    /// The slot of the query's request.
    pub slot: SlotId,
    /// The request, unless it was released since.
    pub request: Option<RequestId>,
    /// Position of the query.
    pub position: u32,
    /// The row.
    pub row: PoisonedRow,
}

/// What was given back since the last step and must be poisoned before the next.
#[derive(Debug, Default)]
pub(crate) struct Freed {
    pub slots: Vec<SlotId>,
    pub blocks: Vec<BlockId>,
}

impl Freed {
    /// Queues the poisoning of everything in it, in every layer.
    pub fn poison<B: Backend>(
        &mut self,
        stream: &Stream<B>,
        schema: &Schema,
        pool: impl Fn(usize, usize) -> Buffer<B, u8>,
    ) -> Result<(), DeviceError> {
        let slots: Vec<_> = self.slots.drain(..).map(|slot| slot.0).collect();
        let blocks: Vec<_> = self.blocks.drain(..).map(|block| block.0).collect();
        for (layer, of_layer) in schema.layers.iter().enumerate() {
            for (at, kind) in of_layer.pools.iter().enumerate() {
                let units = match kind.unit {
                    PoolUnit::Slot => &slots,
                    PoolUnit::Block => &blocks,
                };
                let (buffer, bytes) = (pool(layer, at), kind.unit_bytes());
                for &unit in units {
                    let unit = buffer.slice(u64::from(unit) * bytes, bytes);
                    stream.fill(&unit.expect("the pool has every unit"), POISON)?;
                }
            }
        }
        Ok(())
    }
}

impl<B: Backend> KvCacheManager<B> {
    /// Waits for `stream` and reports gathered rows, and scored keys, that nobody had written, since the
    /// last check.
    /// Without [`crate::CacheConfig::poison`] there is nothing to report.
    ///
    /// # Errors
    /// [`KvError::PoisonRead`]; [`KvError::Device`].
    pub fn check_poison(&self, stream: &Stream<B>) -> Result<(), KvError> {
        let Some(found) = self.poison_records() else { return Ok(()) };
        let mut words = [0_u32; WORDS as usize];
        stream.download(found, 0, &mut words)?;
        let [count, records @ ..] = &words;
        if *count == 0 {
            return Ok(());
        }
        stream.upload(&[0], found, 0)?;
        let records = records.chunks_exact(RECORD).take(*count as usize);
        let mut rows: Vec<_> = records.map(|record| self.read_record(record)).collect();
        rows.sort_unstable();
        Err(KvError::PoisonRead { count: *count, rows })
    }

    fn read_record(&self, record: &[u32]) -> PoisonRead {
        let [place, slot, position, what] = [record[0], record[1], record[2], record[3]];
        let source = place % FindPoisonParams::LAYER;
        PoisonRead {
            layer: LayerId(place / FindPoisonParams::LAYER),
            slot: SlotId(slot),
            request: self.ledger().request_in(SlotId(slot)),
            position,
            row: match source {
                FindPoisonParams::WINDOW => PoisonedRow::Window(what),
                FindPoisonedKeysParams::KEY => PoisonedRow::Key(what),
                _ => PoisonedRow::Entry(what),
            },
        }
    }
}
