//! The device layout of a weight in NVFP4: the tiles of [`kv_layout::linear`].

use kv_layout::linear::{
    GROUP, TILE_CODES, TILE_COLUMNS, TILE_INNER, TILE_SCALES, device_word, tile_scale, tile_word,
};

use crate::matrix::Nvfp4Matrix;

/// Codes, `[columns / 64, inner / 128, 4096]` u8, and scales, `[columns / 64, inner / 128, 512]` u8; quotients rounded
/// up.
pub(crate) fn tiles(weight: &Nvfp4Matrix) -> (Vec<u8>, Vec<u8>) {
    let [columns, inner] = [weight.columns(), weight.inner()];
    let row_tiles = inner.div_ceil(TILE_INNER);
    let count = (columns.div_ceil(TILE_COLUMNS) * row_tiles) as usize;
    let mut codes = vec![0; count * TILE_CODES as usize];
    let mut scales = vec![0; count * TILE_SCALES as usize];
    let words = weight.codes().as_chunks().0.chunks_exact((inner / 8) as usize);
    let rows = words.zip(weight.scales().chunks_exact((inner / GROUP) as usize));
    for (column, (words, row_scales)) in (0..).zip(rows) {
        let tile = |k: u32| (column / TILE_COLUMNS * row_tiles + k / TILE_INNER) as usize;
        let column = column % TILE_COLUMNS;
        for (k, &word) in (0..).step_by(8).zip(words) {
            let at =
                tile(k) * TILE_CODES as usize + 4 * tile_word(column, k % TILE_INNER / 8) as usize;
            codes[at..at + 4].copy_from_slice(&device_word(u32::from_le_bytes(word)).to_le_bytes());
        }
        for (k, &scale) in (0..).step_by(GROUP as usize).zip(row_scales) {
            let at = tile_scale(column, k % TILE_INNER / GROUP) as usize;
            scales[tile(k) * TILE_SCALES as usize + at] = scale;
        }
    }
    (codes, scales)
}
