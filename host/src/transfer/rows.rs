//! Conversion between the image of a slot, whose rows lie in rings, and parts, whose rows lie in order of position.

use std::ops::Range;

use super::parts::{Part, PartKind, rings};
use crate::ids::LayerId;
use crate::memory::state_layout::{UnitPlace, unit_places};
use crate::pool_kind::{PoolKind, PoolUnit};
use crate::schema::{Pool, Schema};

/// Where a ring lies in the image of a slot.
#[derive(Clone, Copy, Debug)]
struct RingPlace {
    layer: LayerId,
    kind: PartKind,
    /// Its first byte.
    at: usize,
    /// Its rows.
    rows: usize,
    row_bytes: usize,
}

/// Where everything lies in the images of slots and blocks of one cache.
#[derive(Debug)]
pub(super) struct Rows {
    rings: Vec<RingPlace>,
    blocks: Vec<UnitPlace>,
}

/// Bytes of the rows of a pool that the first `tokens` tokens of a block have closed.
fn closed(pool: &Pool, tokens: u32) -> usize {
    (tokens * pool.rows / kv_layout::geometry::BLOCK_TOKENS) as usize * pool.row_bytes as usize
}

impl Rows {
    pub fn new(schema: &Schema) -> Self {
        let of_pool = |place: UnitPlace| {
            let UnitPlace { layer, kind, pool, image } = place;
            let row_bytes = pool.row_bytes as usize;
            rings(kind, &pool).into_iter().map(move |ring| RingPlace {
                layer,
                kind: ring.kind,
                at: image as usize + ring.first as usize * row_bytes,
                rows: ring.rows as usize,
                row_bytes,
            })
        };
        Self {
            rings: unit_places(schema, PoolUnit::Slot).flat_map(of_pool).collect(),
            blocks: unit_places(schema, PoolUnit::Block).collect(),
        }
    }

    /// Where the rows of a part lie in the image of a slot, in order of position: one range, or two where the ring ends
    /// between them.
    pub fn runs(&self, part: &Part) -> impl Iterator<Item = Range<usize>> + use<> {
        let is_its = |ring: &&RingPlace| ring.layer.0 == part.unit && ring.kind == part.kind;
        let ring = self.rings.iter().find(is_its).copied();
        let (mut position, mut left) = (part.first as usize, part.entries as usize);
        std::iter::from_fn(move || {
            let RingPlace { at, rows, row_bytes, .. } = ring.filter(|_| left > 0)?;
            let row = position % rows;
            let run = left.min(rows - row);
            (position, left) = (position + run, left - run);
            Some(at + row * row_bytes..at + (row + run) * row_bytes)
        })
    }

    /// Copies the rows of a part out of the image of a slot.
    pub fn take(&self, part: &Part, slot: &[u8], to: &mut [u8]) {
        let mut rest = to;
        for from in self.runs(part) {
            let rows = rest.split_off_mut(..from.len()).expect("a part has the bytes of its rows");
            rows.copy_from_slice(&slot[from]);
        }
    }

    /// Copies the rows of a part to the image of a slot.
    pub fn put(&self, part: &Part, from: &[u8], slot: &mut [u8]) {
        let mut rest = from;
        for to in self.runs(part) {
            let rows = rest.split_off(..to.len()).expect("a part has the bytes of its rows");
            slot[to].copy_from_slice(rows);
        }
    }

    /// The ranges of a block's image of `bytes` bytes outside the rows that the first `tokens` tokens of
    /// the block have closed.
    pub fn holes(&self, tokens: u32, bytes: usize) -> Vec<Range<usize>> {
        let (mut end, mut holes) = (0, Vec::new());
        for UnitPlace { pool, image, .. } in &self.blocks {
            debug_assert!(pool.kind != PoolKind::SwaData, "blocks hold entries and keys");
            let from = *image as usize;
            holes.push(end..from);
            end = from + closed(pool, tokens);
        }
        holes.push(end..bytes);
        holes.retain(|hole| !hole.is_empty());
        holes
    }
}
