//! The rotary embedding of entries follows the model's constants.

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::rope::compress_frequencies;
use dsv4_kv::{CacheConfig, LayerId};
use half::bf16;
use kv_layout::config::CompressRope;
use kv_layout::geometry::{HEAD_DIM, NOPE_DIM};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

use crate::fed::{Fed, Padding, Part};
use crate::inputs::download;
use crate::stories::{Story, config, tiny};

const TOKENS: usize = 300;
/// A CSA layer of the preset `tiny`, and its number of entries for `TOKENS` tokens.
const LAYER: LayerId = LayerId(1);
const ENTRIES: u32 = TOKENS as u32 / 4;
const CHANNELS: usize = HEAD_DIM as usize;

/// The entries that a cache of a model with this `rope` gathers, `[entries, 512]`.
fn entries<B: Backend>(device: &Device<B>, rope: CompressRope) -> Vec<bf16> {
    let formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
    let story = Story::random(&tiny(), TOKENS, 5);
    let mut config: CacheConfig = config(&tiny(), formats, 1);
    config.model.compress_rope = rope;
    let mut fed = Fed::new(device, config);
    let id = fed.manager.admit().unwrap();
    let tile = device.allocate("entries", u64::from(ENTRIES * HEAD_DIM)).unwrap();
    let lengths = device.allocate("lengths", 1).unwrap();
    let last = TOKENS as u32 - 1;
    let parts = [Part::new(id, &story, 0..TOKENS)];
    fed.run(&parts, Padding::None, &[TOKENS as u32], &mut |layer, updated| match layer {
        LAYER => updated.gather_all(last..last + 1, ENTRIES, &tile, &lengths),
        _ => Ok(()),
    });
    download(&fed.stream, &tile)
}

/// The rotary pairs of an entry, rotated back.
fn turned_back(entry: &[bf16], position: usize, rope: &CompressRope) -> Vec<(f64, f64)> {
    let pairs = entry[NOPE_DIM as usize..].chunks_exact(2).zip(compress_frequencies(rope));
    let turn = |(pair, frequency): (&[bf16], f32)| {
        let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
        let (even, odd) = (pair[0].to_f64(), pair[1].to_f64());
        (even * cos + odd * sin, odd * cos - even * sin)
    };
    pairs.map(turn).collect()
}

/// Rotated back by the frequencies of its model, an entry does not depend on the constants; and the constants are used.
pub fn entries_turn_by_the_models_frequencies<B: Backend>(device: &Device<B>) {
    let released = CompressRope::RELEASED;
    let found = entries(device, released);
    for other in [
        CompressRope { theta: 1e4, ..released },
        CompressRope { factor: 4.0, ..released },
        CompressRope { beta_fast: 2.0, ..released },
        CompressRope { beta_slow: 8.0, ..released },
        CompressRope { trained_context: 512.0, ..released },
    ] {
        let others = entries(device, other);
        assert_ne!(found, others, "{other:?}");
        for (i, (one, two)) in found.chunks(CHANNELS).zip(others.chunks(CHANNELS)).enumerate() {
            let nope = ..NOPE_DIM as usize;
            assert_eq!(one[nope], two[nope], "entry {i}");
            let pairs = turned_back(one, 4 * i, &released).into_iter();
            for ((a, b), (c, d)) in pairs.zip(turned_back(two, 4 * i, &other)) {
                // Both were rounded to BF16: each by at most 2^-9 of its value.
                let bound = a.hypot(b) * 2_f64.powi(-7);
                assert!((a - c).hypot(b - d) <= bound, "entry {i}: {:?} {:?}", (a, b), (c, d));
            }
        }
    }
}
