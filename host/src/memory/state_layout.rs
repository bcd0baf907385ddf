//! Layout of checkpoints and of images of slots and blocks: the rows of each pool that a checkpoint keeps,
//! their places in it, and the piece tables of the copy kernel.

use kernels_gpu::params::CopyStateParams;
use kv_layout::geometry::{CSA_RATIO, LayerKind, WINDOW, csa_previous_rows, csa_state_rows};

use crate::ids::LayerId;
use crate::ops::{COPY_GRANULE, LayerImage};
use crate::pool_kind::{PoolKind, PoolUnit};
use crate::schema::{LayerCacheSchema, Pool, Schema};

/// The numbers of a piece, as the kernel reads them.
pub(crate) type Piece = [u32; CopyStateParams::PIECE as usize];

/// The rows of one pool that a checkpoint keeps: those of the last positions before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct KeptRows {
    pub layer: LayerId,
    pub pool: Pool,
    /// Number of rows of the slot before the ring that has the kept rows.
    first: u32,
    /// Rows of the ring.
    ring: u32,
    /// Number of kept rows.
    rows: u32,
}

impl KeptRows {
    /// Bytes of a checkpoint that they take.
    pub fn bytes(&self) -> u64 {
        u64::from(self.rows) * self.pool.row_bytes
    }
}

/// The rows of a pool that a checkpoint keeps; `None` if it keeps none.
fn kept(layer: &LayerCacheSchema, pool: Pool) -> Option<KeptRows> {
    let rows = |first, ring, rows| Some(KeptRows { layer: layer.layer, pool, first, ring, rows });
    match (pool.kind, layer.kind) {
        (PoolKind::SwaData | PoolKind::SwaScale, _) => rows(0, pool.rows, WINDOW),
        (PoolKind::MainState | PoolKind::IndexState, LayerKind::Csa) => {
            let own = (pool.rows - CSA_RATIO) / 2;
            debug_assert_eq!(csa_state_rows(own), pool.rows, "a ring of each half");
            rows(own, csa_previous_rows(own), CSA_RATIO)
        }
        _ => None,
    }
}

/// All rows that a checkpoint keeps, in the order in which they lie in it.
fn kept_rows(schema: &Schema) -> impl Iterator<Item = KeptRows> {
    let of_layer = |layer: &LayerCacheSchema| {
        let kept = |&pool| kept(layer, pool);
        layer.pools.iter().filter_map(kept).collect::<Vec<_>>()
    };
    schema.layers.iter().flat_map(of_layer)
}

/// Bytes of a checkpoint over all layers.
pub(crate) fn checkpoint_bytes(schema: &Schema) -> u64 {
    kept_rows(schema).map(|rows| rows.bytes()).sum()
}

/// Where the rows of each layer lie in a checkpoint.
pub(crate) fn images(schema: &Schema) -> Vec<LayerImage> {
    let mut images = vec![LayerImage::default(); schema.layers.len()];
    let mut next = 0;
    for rows in kept_rows(schema) {
        let LayerImage { window, halves } = &mut images[rows.layer.0 as usize];
        let place = match rows.pool.kind {
            PoolKind::SwaScale => &mut window[1],
            PoolKind::MainState => &mut halves[0],
            PoolKind::IndexState => &mut halves[1],
            _ => &mut window[0],
        };
        *place = next;
        next += rows.bytes();
    }
    images
}

/// The pieces of checkpoints. `offset` gives the byte offset of a layer's pool in the memory of the slots.
pub(crate) fn checkpoint_pieces(
    schema: &Schema,
    offset: impl Fn(LayerId, PoolKind) -> u64,
) -> Vec<Piece> {
    let (mut pieces, mut image) = (Vec::new(), 0);
    for kept in kept_rows(schema) {
        let KeptRows { layer, pool, first, ring, rows } = kept;
        let run = Run {
            base: offset(layer, pool.kind),
            start: u64::from(first) * pool.row_bytes,
            unit_bytes: pool.unit_bytes(),
            row: pool.row_bytes,
            ring,
            rows,
            image,
        };
        run.cut(&mut pieces);
        image += kept.bytes();
    }
    pieces
}

/// Version of the byte layout: caches of different versions refuse each other's bytes. Increase it when
/// [`unit_places`], the rings of a slot ([`crate::transfer`]) or the contents of a row change.
pub(crate) const LAYOUT_VERSION: u32 = 2;

/// Alignment, in bytes, of each pool's part in the image of a slot or block.
const IMAGE_ALIGN: u64 = 16;

/// A pool of slots or of blocks; `image` is the byte offset of its part in the image of one slot or block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnitPlace {
    pub layer: LayerId,
    pub kind: LayerKind,
    pub pool: Pool,
    pub image: u64,
}

/// The image of a slot, or block: its rows of all pools, one pool after the other.
pub(crate) fn unit_places(schema: &Schema, unit: PoolUnit) -> impl Iterator<Item = UnitPlace> {
    let mut next = 0;
    let pools = schema.layers.iter().flat_map(move |layer| {
        let of_unit = layer.pools.iter().filter(move |pool| pool.unit == unit);
        of_unit.map(move |&pool| (layer.layer, layer.kind, pool))
    });
    pools.map(move |(layer, kind, pool)| {
        let image = next;
        next += pool.unit_bytes().next_multiple_of(IMAGE_ALIGN);
        UnitPlace { layer, kind, pool, image }
    })
}

/// Bytes of the image of a slot, or block.
pub(crate) fn unit_image_bytes(schema: &Schema, unit: PoolUnit) -> u64 {
    let last = unit_places(schema, unit).last();
    last.map_or(0, |last| (last.image + last.pool.unit_bytes()).next_multiple_of(COPY_GRANULE))
}

/// The pieces of whole slots, or blocks: each pool of one is one row.
pub(crate) fn unit_pieces(
    schema: &Schema,
    unit: PoolUnit,
    offset: impl Fn(LayerId, PoolKind) -> u64,
) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for UnitPlace { layer, pool, image, .. } in unit_places(schema, unit) {
        let (base, unit_bytes) = (offset(layer, pool.kind), pool.unit_bytes());
        let row = unit_bytes;
        let run = Run { base, start: 0, unit_bytes, row, ring: 1, rows: 1, image };
        run.cut(&mut pieces);
    }
    pieces
}

/// Rows of a pool, in bytes; see `kernels_gpu::state_copy`.
struct Run {
    base: u64,
    start: u64,
    unit_bytes: u64,
    row: u64,
    ring: u32,
    rows: u32,
    image: u64,
}

impl Run {
    /// Cuts the run into pieces and adds them to `pieces`.
    fn cut(&self, pieces: &mut Vec<Piece>) {
        let Self { base, start, unit_bytes, row, ring, rows, image } = *self;
        let is_wide = [start, unit_bytes, row, image].iter().all(|bytes| bytes.is_multiple_of(16));
        let (word, narrow) = if is_wide { (16, 0) } else { (4, CopyStateParams::NARROW) };
        debug_assert!(base.is_multiple_of(COPY_GRANULE), "an arena aligns its buffers");
        let words = |bytes: u64| (bytes / word) as u32;
        let all = words(row) * rows;
        for first in (0..all).step_by(CopyStateParams::BLOCK_WORDS as usize) {
            let place = [(base / COPY_GRANULE) as u32, words(start), words(unit_bytes), words(row)];
            let [base, start, unit, row] = place;
            pieces.push([base, start, unit, row, ring, rows, words(image), first | narrow]);
        }
    }
}

#[cfg(test)]
mod tests {
    use kv_layout::config::ModelConfig;

    use super::*;
    use crate::config::CacheConfig;

    fn schema(model: &str, max_draft: u32) -> Schema {
        let model = ModelConfig::preset(model).expect("a preset");
        Schema::new(&CacheConfig { max_draft, ..CacheConfig::new(model) })
    }

    /// A checkpoint has the windows of all layers, and four halves of both compressors of each CSA layer, for any
    /// `max_draft`.
    #[test]
    fn a_checkpoint_has_the_bytes_of_its_rows() {
        for (model, layers, csa, bytes) in
            [("flash", 44, 21, 3_719_168), ("pro", 62, 30, 5_249_024)]
        {
            for max_draft in [0, 3] {
                let schema = schema(model, max_draft);
                assert_eq!(checkpoint_bytes(&schema), bytes, "{model}");
                assert_eq!(bytes, layers * 128 * (576 + 8) + csa * 4 * (4096 + 1024), "{model}");
                assert!(bytes.is_multiple_of(COPY_GRANULE), "checkpoints are counted in granules");
            }
        }
    }

    /// Pieces cover each byte of a checkpoint, and of a slot, once.
    #[test]
    fn pieces_cover_everything_once() {
        for max_draft in [0, 1, 2] {
            let schema = schema("flash", max_draft);
            let bytes = |pieces: &[Piece]| {
                let of_piece = |&[_, _, _, row, _, rows, _, first]: &Piece| {
                    let word = if first & CopyStateParams::NARROW == 0 { 16 } else { 4 };
                    let first = first & !CopyStateParams::NARROW;
                    assert!(first < row * rows, "a piece of nothing");
                    u64::from((row * rows - first).min(CopyStateParams::BLOCK_WORDS)) * word
                };
                pieces.iter().map(of_piece).sum::<u64>()
            };
            let checkpoint = checkpoint_pieces(&schema, |layer, _| 256 * u64::from(layer.0));
            assert_eq!(bytes(&checkpoint), checkpoint_bytes(&schema));
            for (unit, all) in
                [(PoolUnit::Slot, schema.slot_bytes()), (PoolUnit::Block, schema.block_bytes())]
            {
                let pieces = unit_pieces(&schema, unit, |layer, _| 256 * u64::from(layer.0));
                assert_eq!(bytes(&pieces), all);
            }
            // At most one wave of blocks on an H200.
            assert!(checkpoint.len() <= 8 * 132, "{} blocks", checkpoint.len());
        }
    }
}
