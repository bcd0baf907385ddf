//! A prompt may be cut into steps anywhere: the bytes are the same.

use dsv4_kv::CacheConfig;
use dsv4_kv::device::{Backend, Device};
use kv_layout::geometry::LayerKind::{self, Csa, Hca};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::fed::{Fed, Padding, Part};
use crate::stories::{Formats, Story, config};

const FORMATS: Formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);

/// Feeds the first tokens of a story in equal chunks, for each (tokens, chunk), on poisoned pools: with the shortest
/// rings, and with rings for four drafts, where short chunks take one launch per layer.
fn check_cuts<B: Backend>(
    device: &Device<B>,
    most: usize,
    cases: impl IntoIterator<Item = [usize; 2]>,
) {
    const LAYERS: [LayerKind; 2] = [Csa, Hca];
    let story = Story::random(&LAYERS, most, 31);
    let stored = story.stored(device, FORMATS);
    let mut caches = [0, 4].map(|max_draft| {
        Fed::new(device, CacheConfig { max_draft, ..config(&LAYERS, FORMATS, 1) })
    });
    for [tokens, chunk] in cases {
        for fed in &mut caches {
            fed.poison();
            let id = fed.manager.admit().unwrap();
            for start in (0..tokens).step_by(chunk) {
                let end = (start + chunk).min(tokens);
                fed.step(&[Part::new(id, &story, start..end)], Padding::None);
            }
            fed.assert_holds(id, &story, &stored, tokens);
            fed.manager.release(id).unwrap();
        }
    }
    for fed in caches {
        fed.manager.check_faults(&fed.stream).unwrap();
    }
}

/// A sample of [`every_length`].
pub fn some_lengths<B: Backend>(device: &Device<B>) {
    let mut random = StdRng::seed_from_u64(32);
    let chunks = [1, 2, 3, 4, 5, 127, 128, 129, 257];
    check_cuts(device, 300, chunks.map(|chunk| [random.random_range(1..=300), chunk]));
}

/// Every fourth length up to 520 tokens, more than four blocks, from `1 + QUARTER` on, in chunks of `CHUNK` tokens.
pub fn every_length<B: Backend, const CHUNK: usize, const QUARTER: usize>(device: &Device<B>) {
    check_cuts(device, 520, (1 + QUARTER..=520).step_by(4).map(|tokens| [tokens, CHUNK]));
}
