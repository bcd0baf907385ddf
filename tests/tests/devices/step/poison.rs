//! Poisoned caches: what nobody wrote is found in what attention reads, and named.

use dsv4_kv::device::{Backend, Buffer, Device};
use dsv4_kv::poison::{POISON, PoisonRead, PoisonedRow};
use dsv4_kv::schema::PoolUnit;
use dsv4_kv::{CacheConfig, KvError, LayerId};
use kv_layout::geometry::LayerKind;
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

use crate::inputs::{download, filled, upload};
use crate::stories::{Fed, Formats, Part, Story, config, tiny};

const BOTH: [Formats; 2] =
    [(MainFormat::Ue8m0, IndexFormat::Mxfp4), (MainFormat::F32, IndexFormat::Nvfp4)];
/// Entries of a list.
const LIST: u32 = 3;
/// Rows for all entries that a query sees.
const ALL: u32 = 40;

fn poisoned<B: Backend>(device: &Device<B>, formats: Formats, requests: u32) -> Fed<B> {
    Fed::new(device, CacheConfig { poison: true, ..config(&tiny(), formats, requests) })
}

/// Gathers window, the list `selected` and all entries of every query in `layer`.
fn gather<B: Backend>(fed: &Fed<B>, layer: LayerId, tokens: u32, selected: &Buffer<B, i32>) {
    let stream = &fed.stream;
    let tile = |rows: u32| filled::<B, u16>(stream, (tokens * rows * 512) as usize);
    let lengths = filled::<B, i32>(stream, tokens as usize);
    let handle = fed.manager.layer(layer).unwrap();
    handle.gather_swa(stream, fed.rows(layer), 0..tokens, &tile(128), &lengths).unwrap();
    if handle.schema().kind != LayerKind::Swa {
        handle.gather_kv(stream, 0..tokens, selected, LIST, &tile(LIST)).unwrap();
        handle.gather_all(stream, 0..tokens, ALL, &tile(ALL), &lengths).unwrap();
    }
}

fn rows_found(error: &KvError) -> (u32, Vec<PoisonRead>) {
    let KvError::PoisonRead { count, rows } = error else { panic!("not poison: {error}") };
    (*count, rows.clone())
}

/// Every token written: nothing is found. Then a token that no kernel writes: the window row, and the
/// entry that it should have closed, are found in every layer that has them, and nothing else.
pub fn what_nobody_wrote_is_named<B: Backend>(device: &Device<B>) {
    for formats in BOTH {
        let story = Story::random(&tiny(), 132, 51);
        let mut fed = poisoned(device, formats, 2);
        let id = fed.manager.admit().unwrap();
        let list = |entries: [i32; LIST as usize]| upload(&fed.stream, &entries);
        let (before, after) = (list([-1, 29, 30]), list([30, -1, 31]));
        fed.step(&[Part::new(id, &story, 0..126)], 126);
        fed.step(&[Part::new(id, &story, 126..127)], 1);
        fed.layer_ids().for_each(|layer| gather(&fed, layer, 1, &before));
        fed.manager.check_poison(&fed.stream).unwrap();

        // Token 127 closes an entry in every compressed layer, and is lost; 128 sees the loss.
        fed.prepare(&[Part::new(id, &story, 127..128)], 1);
        fed.manager.commit(id, 1).unwrap();
        fed.step(&[Part::new(id, &story, 128..129)], 1);
        let mut want = Vec::new();
        for (layer, kind) in fed.layer_ids().zip(tiny()) {
            let read =
                |row| PoisonRead { layer, slot: id.slot, request: Some(id), position: 128, row };
            want.push(read(PoisonedRow::Window(127)));
            match kind {
                LayerKind::Swa => {}
                // In the list, and among all.
                LayerKind::Csa => want.extend([read(PoisonedRow::Entry(31)); 2]),
                LayerKind::Hca => want.push(read(PoisonedRow::Entry(0))),
            }
            let none = upload(&fed.stream, &[-1; LIST as usize]);
            let csa = kind == LayerKind::Csa;
            gather(&fed, layer, 1, if csa { &after } else { &none });
        }
        let error = fed.manager.check_poison(&fed.stream).unwrap_err();
        assert_eq!(rows_found(&error), (want.len() as u32, want), "{error}");
        fed.manager.check_poison(&fed.stream).unwrap();
    }
}

/// What a request held is poison when the next one gets it, and nothing else is.
pub fn what_is_freed_becomes_poison<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), 133, 52);
    let mut fed = poisoned(device, BOTH[0], 2);
    let [first, other] = [0, 1].map(|_| fed.manager.admit().unwrap());
    fed.step(&[Part::new(first, &story, 0..132), Part::new(other, &story, 0..132)], 264);
    let blocks: Vec<_> = fed.manager.block_table(first).unwrap().collect();
    let before = fed.pool_bytes();
    fed.manager.release(first).unwrap();
    assert_eq!(fed.pool_bytes(), before, "nothing happens outside a stream");

    let next = fed.manager.admit().unwrap();
    assert_eq!(next.slot, first.slot);
    fed.prepare(&[Part::new(next, &story, 0..132)], 132);
    assert!(fed.manager.block_table(next).unwrap().eq(blocks.iter().copied()));
    let pools = fed.manager.schema().layers.iter().flat_map(|layer| layer.pools.clone());
    for (((name, now), (_, before)), pool) in fed.pool_bytes().iter().zip(&before).zip(pools) {
        let bytes = pool.unit_bytes() as usize;
        for (unit, (now, before)) in now.chunks(bytes).zip(before.chunks(bytes)).enumerate() {
            let freed = match pool.unit {
                PoolUnit::Slot => unit as u32 == first.slot.0,
                PoolUnit::Block => blocks.iter().any(|block| block.0 as usize == unit),
            };
            if freed {
                assert!(now.iter().all(|&byte| byte == POISON), "{name}, unit {unit}");
            } else {
                assert!(now == before, "{name}, unit {unit}");
            }
        }
    }

    // No kernel runs for the new request: it reads its predecessor's window.
    fed.manager.commit(next, 132).unwrap();
    fed.prepare(&[Part::new(next, &story, 132..133)], 1);
    let none = upload(&fed.stream, &[-1; LIST as usize]);
    gather(&fed, LayerId(0), 1, &none);
    let error = fed.manager.check_poison(&fed.stream).unwrap_err();
    let (count, rows) = rows_found(&error);
    assert_eq!((count, rows.len()), (127, 64), "more are counted than recorded: {error}");
    assert!(rows.iter().all(|row| row.request == Some(next) && row.layer == LayerId(0)));
}

/// A cache that is not poisoned looks at nothing.
pub fn without_poison_nothing_is_looked_at<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), 5, 53);
    let mut fed = Fed::new(device, config(&tiny(), BOTH[0], 1));
    let id = fed.manager.admit().unwrap();
    fed.prepare(&[Part::new(id, &story, 0..4)], 4);
    fed.manager.commit(id, 4).unwrap();
    let tile = filled::<B, u16>(&fed.stream, 128 * 512);
    let lengths = filled::<B, i32>(&fed.stream, 1);
    fed.prepare(&[Part::new(id, &story, 4..5)], 1);
    let handle = fed.manager.layer(LayerId(0)).unwrap();
    handle.gather_swa(&fed.stream, fed.rows(LayerId(0)), 0..1, &tile, &lengths).unwrap();
    assert!(download(&fed.stream, &tile)[448..512].iter().all(|&bits| bits == 0xFFFF));
    fed.manager.check_poison(&fed.stream).unwrap();
}
