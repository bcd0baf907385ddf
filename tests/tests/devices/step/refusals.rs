//! What handles refuse, in layers of every kind.

use std::ops::Range;

use dsv4_kv::device::{Backend, Buffer, Device, DeviceError};
use dsv4_kv::handle::Projected;
use dsv4_kv::schema::PoolKind;
use dsv4_kv::{KvError, LayerId};
use kv_layout::geometry::LayerKind::{self, Csa, Hca, Swa};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

use crate::inputs::filled;
use crate::stories::{Fed, Formats, Part, STEP_TOKENS, Story, assert_pools, config, tiny};

const FORMATS: Formats = (MainFormat::F32, IndexFormat::Mxfp4);

/// What a handle cannot do is refused, with the value and the limit, and no pool changes.
pub fn bad_input_changes_no_pool<B: Backend>(device: &Device<B>) {
    const TOKENS: u32 = 8;
    let story = Story::random(&tiny(), 136, 41);
    let mut fed = Fed::new(device, config(&tiny(), FORMATS, 2));
    let id = fed.manager.admit().unwrap();
    fed.step(&[Part::new(id, &story, 0..128)], 128);
    fed.prepare(&[Part::new(id, &story, 128..136)], TOKENS);
    fed.manager.build_plan(&fed.stream).unwrap();
    let before = fed.pool_bytes();

    refuse_wrong_layers(&fed);
    refuse_short_projections(&fed);
    refuse_bad_gathers(&fed, TOKENS);
    assert_pools(&fed, &before, "after refusals");
    fed.manager.check_faults(&fed.stream).unwrap();

    fed.update(TOKENS).unwrap();
    fed.manager.commit(id, TOKENS).unwrap();
    fed.assert_holds(id, &story, &story.stored(device, FORMATS), 136);
}

fn refuse_wrong_layers<B: Backend>(fed: &Fed<B>) {
    let (main, hca) = (fed.projected(LayerId(1)), fed.projected(LayerId(2)));
    for (layer, kind) in fed.layer_ids().zip(tiny()) {
        let handle = fed.manager.layer(layer).unwrap();
        let wrong = |result: Result<(), KvError>, wanted: LayerKind| {
            let Err(KvError::WrongLayerKind { layer: at, found, needed }) = result else {
                panic!("{layer:?}, {kind:?}: {result:?}")
            };
            assert_eq!((at, found, needed), (layer.0, kind, wanted));
        };
        if kind != Csa {
            wrong(handle.update_csa(&fed.stream, &main[0], &main[1]), Csa);
            wrong(handle.decode_csa(&fed.stream, fed.rows(layer), &main[0], &main[1]), Csa);
            let error = handle.index_keys().err().expect("no keys");
            assert!(no_pool(&error, layer, PoolKind::IndexCode), "{error}");
        }
        if kind != Hca {
            wrong(handle.update_hca(&fed.stream, &hca[0]), Hca);
            wrong(handle.decode_hca(&fed.stream, fed.rows(layer), &hca[0]), Hca);
        }
        if kind == Swa {
            let (words, tile) = (canaries(fed, 8), canaries(fed, 8 * 512));
            let listed = handle.gather_kv(&fed.stream, 0..8, &words, 1, &tile);
            let all = handle.gather_all(&fed.stream, 0..8, 1, &tile, &words);
            for error in [listed.unwrap_err(), all.unwrap_err()] {
                assert!(no_pool(&error, layer, PoolKind::EntryData), "{error}");
            }
            let error = handle.state(PoolKind::MainState).err().expect("no state");
            assert!(no_pool(&error, layer, PoolKind::MainState), "{error}");
        }
    }
}

fn no_pool(error: &KvError, of: LayerId, kind: PoolKind) -> bool {
    matches!(error, KvError::NoSuchPool { layer, pool } if (*layer, *pool) == (of.0, kind))
}

/// Each tensor of each compressor one element short of a step of the most tokens.
fn refuse_short_projections<B: Backend>(fed: &Fed<B>) {
    for (layer, kind) in fed.layer_ids().zip(tiny()) {
        let whole = fed.projected(layer);
        for (which, Projected { kv, gate, ape, norm }) in whole.iter().enumerate() {
            let names = ["key projections", "gate projections", "position bias", "norm weights"];
            for (tensor, name) in names.into_iter().enumerate() {
                let mut tensors = [*kv, *gate, *ape, *norm];
                let needed = tensors[tensor].len();
                let short = tensors[tensor].slice(0, needed - 1).unwrap();
                tensors[tensor] = &short;
                let [kv, gate, ape, norm] = tensors;
                let bad = Projected { kv, gate, ape, norm };
                // The tensors have room for the longest step, so such a step needs all of them.
                let handle = fed.manager.layer_for(layer, STEP_TOKENS).unwrap();
                let result = match (kind, which) {
                    (Csa, 0) => handle.update_csa(&fed.stream, &bad, &whole[1]),
                    (Csa, _) => handle.update_csa(&fed.stream, &whole[0], &bad),
                    _ => handle.update_hca(&fed.stream, &bad),
                };
                assert_short(result, name, needed - 1, needed);
            }
        }
    }
}

fn assert_short(result: Result<(), KvError>, name: &str, had: u64, wanted: u64) {
    let Err(KvError::Device(DeviceError::Length { what, found, needed })) = result else {
        panic!("{name}: {result:?}")
    };
    assert_eq!((what, found, needed), (name, had, wanted));
}

fn canaries<B: Backend, T: bytemuck::Pod>(fed: &Fed<B>, elements: u32) -> Buffer<B, T> {
    filled(&fed.stream, elements as usize)
}

fn refuse_bad_gathers<B: Backend>(fed: &Fed<B>, count: u32) {
    const ROWS: u32 = 4;
    let stream = &fed.stream;
    let elements = count * ROWS;
    let (words, lengths) = (canaries(fed, elements), canaries(fed, count));
    let tile = canaries::<B, u16>(fed, elements * 512);
    for layer in [1, 2, 3].map(LayerId) {
        let handle = fed.manager.layer(layer).unwrap();
        let backwards = Range { start: 2, end: 1 };
        for queries in [0..count + 1, count..u32::MAX, backwards] {
            let kv = handle.gather_kv(stream, queries.clone(), &words, ROWS, &tile);
            let all = handle.gather_all(stream, queries.clone(), ROWS, &tile, &lengths);
            for result in [kv, all] {
                let Err(KvError::NoSuchQueries { first, end, tokens }) = result else {
                    panic!("{queries:?}: {result:?}")
                };
                assert_eq!((first..end, tokens), (queries.clone(), count));
            }
        }
        let (elements, count) = (u64::from(elements), u64::from(count));
        let short_tile = tile.slice(0, elements * 512 - 1).unwrap();
        let short_words = words.slice(0, elements - 1).unwrap();
        let short_lengths = lengths.slice(0, count - 1).unwrap();
        let queries = 0..count as u32;
        let kv = |words, tile| handle.gather_kv(stream, queries.clone(), words, ROWS, tile);
        let all = |tile, out| handle.gather_all(stream, queries.clone(), ROWS, tile, out);
        assert_short(kv(&words, &short_tile), "tile", elements * 512 - 1, elements * 512);
        assert_short(kv(&short_words, &tile), "selected entries", elements - 1, elements);
        assert_short(all(&short_tile, &lengths), "tile", elements * 512 - 1, elements * 512);
        assert_short(all(&tile, &short_lengths), "lengths", count - 1, count);
    }
}
