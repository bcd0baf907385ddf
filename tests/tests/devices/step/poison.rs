//! Poisoned caches: rows that no kernel wrote are found when attention reads them, and are reported by name.

use dsv4_kv::device::{Backend, Buffer, Device, bf16};
use dsv4_kv::poison::{POISON, PoisonRead, PoisonedRow};
use dsv4_kv::schema::PoolUnit;
use dsv4_kv::step::EntryLists;
use dsv4_kv::{CacheConfig, KvError, LayerId};
use kv_layout::geometry::LayerKind;
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

use crate::fed::{Fed, Padding, Part, Updated};
use crate::inputs::{download_bits, filled, upload};
use crate::stories::{Formats, Story, config, tiny};

const BOTH: [Formats; 2] =
    [(MainFormat::Ue8m0, IndexFormat::Mxfp4), (MainFormat::F32, IndexFormat::Nvfp4)];
/// Length of a list.
const LIST: u32 = 3;
/// Rows of a tile for all entries of a query.
const ALL: u32 = 40;

fn poisoned<B: Backend>(device: &Device<B>, formats: Formats, requests: u32) -> Fed<B> {
    Fed::new(device, CacheConfig { poison: true, ..config(&tiny(), formats, requests) })
}

/// Gathers the window, the list `selected` and all entries of every query of a layer.
fn gather<B: Backend>(
    layer: &Updated<'_, B>,
    tokens: u32,
    selected: &Buffer<B, i32>,
) -> Result<(), KvError> {
    let stream = layer.stream();
    let tile = |rows: u32| filled::<B, bf16>(stream, (tokens * rows * 512) as usize);
    let lengths = filled::<B, i32>(stream, tokens as usize);
    layer.gather_window(0..tokens, &tile(128), &lengths)?;
    let lists = EntryLists { queries: 0..tokens, k: LIST, indices: selected };
    layer.gather_entries(0..tokens, &lists, &tile(LIST))?;
    layer.gather_all(0..tokens, ALL, &tile(ALL), &lengths)
}

fn rows_found(error: &KvError) -> (u32, Vec<PoisonRead>) {
    let KvError::PoisonRead { count, rows } = error else { panic!("not poison: {error}") };
    (*count, rows.clone())
}

/// With every token written nothing is found. Then the kernels of one token do not run: its window row, and the entry
/// that it should have closed, are found in every layer that has them, and nothing else.
pub fn what_nobody_wrote_is_named<B: Backend>(device: &Device<B>) {
    for formats in BOTH {
        let story = Story::random(&tiny(), 132, 51);
        let mut fed = poisoned(device, formats, 2);
        let id = fed.manager.admit().unwrap();
        let stream = fed.stream.clone();
        let list = |entries: [i32; LIST as usize]| upload(&stream, &entries);
        let (before, after) = (list([-1, 29, 30]), list([30, -1, 31]));
        fed.step(&[Part::new(id, &story, 0..126)], Padding::None);
        let part = [Part::new(id, &story, 126..127)];
        fed.run(&part, Padding::None, &[1], &mut |_, layer| gather(layer, 1, &before));
        fed.manager.check_poison(&fed.stream).unwrap();

        // Token 127 closes an entry in every compressed layer, and is not written. The query at 128 reads the missing
        // rows.
        fed.lose(&[Part::new(id, &story, 127..128)]);
        let none = list([-1; LIST as usize]);
        let mut want = Vec::new();
        let part = [Part::new(id, &story, 128..129)];
        fed.run(&part, Padding::None, &[1], &mut |layer, updated| {
            let (slot, request) = (id.slot(), Some(id));
            let read = |row| PoisonRead { layer, slot, request, position: 128, row };
            want.push(read(PoisonedRow::Window(127)));
            match updated.schema().kind {
                LayerKind::Swa => {}
                // Found in the list, and among all entries.
                LayerKind::Csa => want.extend([read(PoisonedRow::Entry(31)); 2]),
                LayerKind::Hca => want.push(read(PoisonedRow::Entry(0))),
            }
            let csa = updated.schema().kind == LayerKind::Csa;
            gather(updated, 1, if csa { &after } else { &none })
        });
        let error = fed.manager.check_poison(&fed.stream).unwrap_err();
        assert_eq!(rows_found(&error), (want.len() as u32, want), "{error}");
        fed.manager.check_poison(&fed.stream).unwrap();
    }
}

/// [`Updated::read_windows`] of a chunk finds an unwritten row, whichever of the 127 rows before the chunk it is.
pub fn a_chunk_reads_every_row_of_its_windows<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), 300, 53);
    for lost in [0, 1, 63, 126] {
        let mut fed = poisoned(device, BOTH[0], 1);
        let id = fed.manager.admit().unwrap();
        for (tokens, is_lost) in [(0..lost, false), (lost..lost + 1, true), (lost + 1..127, false)]
        {
            match [Part::new(id, &story, tokens.clone())] {
                _ if tokens.is_empty() => {}
                part if is_lost => fed.lose(&part),
                part => fed.step(&part, Padding::None),
            }
        }
        let part = [Part::new(id, &story, 127..300)];
        fed.run(&part, Padding::None, &[173], &mut |_, layer| layer.read_windows(173));
        let error = fed.manager.check_poison(&fed.stream).unwrap_err();
        let (_, rows) = rows_found(&error);
        let found =
            |read: &PoisonRead| matches!(read.row, PoisonedRow::Window(at) if at == lost as u32);
        assert!(rows.iter().any(found), "{lost}: {error}");
    }
}

/// The slot and blocks of a released request become poison when the next request gets them, and nothing else does.
pub fn what_is_freed_becomes_poison<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), 133, 52);
    let mut fed = poisoned(device, BOTH[0], 2);
    let [first, other] = [0, 1].map(|_| fed.manager.admit().unwrap());
    fed.step(&[Part::new(first, &story, 0..132), Part::new(other, &story, 0..132)], Padding::None);
    let blocks = fed.manager.block_table(first).unwrap();
    let before = fed.pool_bytes();
    fed.manager.release(first).unwrap();
    assert_eq!(fed.pool_bytes(), before, "nothing happens outside a stream");

    let next = fed.manager.admit().unwrap();
    assert_eq!(next.slot(), first.slot());
    fed.lose(&[Part::new(next, &story, 0..132)]);
    assert_eq!(fed.manager.block_table(next).unwrap(), blocks);
    let pools = fed.manager.schema().layers.iter().flat_map(|layer| layer.pools.clone());
    for (((name, now), (_, before)), pool) in fed.pool_bytes().iter().zip(&before).zip(pools) {
        let bytes = pool.unit_bytes() as usize;
        for (unit, (now, before)) in now.chunks(bytes).zip(before.chunks(bytes)).enumerate() {
            let freed = match pool.unit {
                PoolUnit::Slot => unit as u32 == first.slot().0,
                PoolUnit::Block => blocks.iter().any(|block| block.0 as usize == unit),
            };
            if freed {
                assert!(now.iter().all(|&byte| byte == POISON), "{name}, unit {unit}");
            } else {
                assert!(now == before, "{name}, unit {unit}");
            }
        }
    }

    // No kernel ran for the new request, so it reads the window of its predecessor.
    let none = upload(&fed.stream, &[-1; LIST as usize]);
    let part = [Part::new(next, &story, 132..133)];
    fed.run(&part, Padding::None, &[1], &mut |layer, updated| match layer {
        LayerId(0) => gather(updated, 1, &none),
        _ => Ok(()),
    });
    let error = fed.manager.check_poison(&fed.stream).unwrap_err();
    let (count, rows) = rows_found(&error);
    assert_eq!((count, rows.len()), (127, 64), "more are counted than recorded: {error}");
    assert!(rows.iter().all(|row| row.request == Some(next) && row.layer == LayerId(0)));
}

/// A cache without poison checks nothing.
pub fn without_poison_nothing_is_looked_at<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), 5, 53);
    let mut fed = Fed::new(device, config(&tiny(), BOTH[0], 1));
    let id = fed.manager.admit().unwrap();
    fed.lose(&[Part::new(id, &story, 0..4)]);
    let tile = filled::<B, bf16>(&fed.stream, 128 * 512);
    let lengths = filled::<B, i32>(&fed.stream, 1);
    let part = [Part::new(id, &story, 4..5)];
    fed.run(&part, Padding::None, &[1], &mut |layer, updated| match layer {
        LayerId(0) => updated.gather_window(0..1, &tile, &lengths),
        _ => Ok(()),
    });
    assert!(download_bits(&fed.stream, &tile)[448..512].iter().all(|&bits| bits == 0xFFFF));
    fed.manager.check_poison(&fed.stream).unwrap();
}
