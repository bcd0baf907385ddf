//! Random layers, queries and garbage: all forms of a launch give the same bits.

use dsv4_kv::device::{Backend, Device, bf16};
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use super::blocks::Blocks;
use super::decode::{SHAPE, query_of, shape_of};
use super::layer::{Layer, Query, Shape, Which, Written};

/// Number of layers in [`random_layers_have_the_same_bits`].
const LAYERS: u64 = 400;

/// Lists and all entries, with up to two splits; rows with NaN, infinities and any scales; tables and lists with
/// arbitrary numbers; scores and sinks of any magnitude; results that round to 0.
pub fn random_layers_have_the_same_bits<B: Backend>(device: &Device<B>) {
    for seed in 0..LAYERS {
        let random = &mut StdRng::seed_from_u64(seed);
        let entries =
            *[1, 3, 64, 130, 300, 600, 641, 960, 1024, 1100, 1300].choose(random).unwrap();
        let which = *[Which::Nothing, Which::List, Which::List, Which::All(entries as u32)]
            .choose(random)
            .unwrap();
        let (format, heads) =
            (*MainFormat::ALL.choose(random).unwrap(), *[1, 2, 17].choose(random).unwrap());
        let shape = shape_of(which, entries, Shape { slots: 2, heads, format, ..SHAPE });
        let mut layer = Layer::random(device, shape, seed);
        spoil_rows(&mut layer, random);
        spoil_table(&mut layer.table, random);
        layer.sinks.iter_mut().for_each(|sink| *sink = some_sink(random));
        let mut queries =
            [entries, entries / 2, entries].map(|entries| query_of(which, entries, 0, random));
        (queries[1].slot, queries[2].slot) = (1, -1);
        let rows = if which == Which::List { entries } else { 0 };
        queries.iter_mut().for_each(|query| spoil_list(query, rows, random));
        let mut heads = layer.random_heads(queries.len(), seed + 1);
        let scale = 2_f32.powi(*[0, 0, 2, 5, -20, 20, 60].choose(random).unwrap());
        heads.iter_mut().for_each(|head| spoil_head(head, scale, random));
        for &cluster in which.clusters() {
            let mut attend = |blocks| {
                layer.blocks = blocks;
                comparable(layer.attend(&queries, which, &heads))
            };
            let whole = attend(Blocks::whole(cluster));
            for blocks in Blocks::others(cluster) {
                let what = format!("layer {seed}: {which:?}, {entries} entries, {blocks:?}");
                assert_same(&attend(blocks), &whole, &what);
            }
        }
    }
}

/// Asserts equality. Names the first result that differs, and the number of such results.
pub fn assert_same(got: &Comparable, whole: &Comparable, what: &str) {
    let differing = (0..whole.0.len()).filter(|&at| got.0[at] != whole.0[at]);
    if let Some(at) = differing.clone().next() {
        let (count, got, whole) = (differing.count(), got.0[at], whole.0[at]);
        panic!("{what}: {count} results differ, number {at} is {got:#06x}, not {whole:#06x}");
    }
    assert!(got.1 == whole.1, "{what}: other log-sum-exps");
    assert_eq!(got.2, whole.2, "{what}: faults");
}

/// The bits of the results and log-sum-exps, in which all NaN are equal, and the number of faults.
pub type Comparable = (Vec<u16>, Vec<u32>, u32);

pub fn comparable(written: Written) -> Comparable {
    let Written { mut out, mut lse, faults, .. } = written;
    out.iter_mut().filter(|bits| **bits & 0x7FFF > 0x7F80).for_each(|bits| *bits = 0x7FFF);
    let is_nan = |bits: &&mut u32| **bits & 0x7FFF_FFFF > 0x7F80_0000;
    lse.iter_mut().filter(is_nan).for_each(|bits| *bits = 0x7FFF_FFFF);
    (out, lse, faults)
}

/// Changes no row, a few, or all: NaN codes and scales, arbitrary scales, arbitrary bytes, infinite rotary channels. Or
/// gives all rows another magnitude.
pub fn spoil_rows<B: Backend>(layer: &mut Layer<B>, random: &mut StdRng) {
    let oracle = crate::inputs::oracle(layer.shape.format);
    let Layer { window, own, entries, .. } = layer;
    let mut rows: Vec<_> = window.iter_mut().chain(own).chain(entries).collect();
    if random.random_range(0..3) == 0 {
        let size = random.random_range(-40..30);
        for row in rows {
            let most = 2_f32.powi(size + random.random_range(-3..4));
            let value = |_| bf16::from_f32(most * random.random_range(-1.0..1.0)).to_bits();
            *row = oracle.encode(&(0..512).map(value).collect::<Vec<u16>>());
        }
        return;
    }
    for _ in 0..*[0, 1, 3, rows.len() / 20].choose(random).unwrap() {
        let at = random.random_range(0..rows.len());
        let row = &mut rows[at];
        let scale = random.random_range(0..row.scale.len());
        match random.random_range(0..5) {
            0 => row.data[random.random_range(0..448)] = 0x7F,
            1 => row.scale[scale] = 0xFF,
            2 => row.scale[scale] = random.random(),
            3 => row.data.iter_mut().for_each(|byte| *byte = random.random()),
            _ => {
                let channel = 448 + 2 * random.random_range(0..64);
                row.data[channel..channel + 2].copy_from_slice(&0x7F80_u16.to_le_bytes());
            }
        }
    }
}

/// Makes some blocks of the table missing, or gives them arbitrary numbers.
fn spoil_table(table: &mut [i32], random: &mut StdRng) {
    let (first, last) = (random.random_range(0..table.len()), random.random_range(0..table.len()));
    match random.random_range(0..4) {
        0 => table[first.min(last)..=first.max(last)].fill(-1),
        1 => table[first] = random.random(),
        _ => {}
    }
}

fn some_sink(random: &mut StdRng) -> f32 {
    match random.random_range(0..9) {
        0 => f32::NAN,
        1 => f32::INFINITY,
        2 => f32::NEG_INFINITY,
        3 => -1e4,
        4 => 1e4,
        5 => random.random_range(60.0..110.0),
        _ => random.random_range(-3.0..3.0),
    }
}

/// Makes a list of `rows` elements, some of which may be arbitrary numbers, or -1, or one entry many times.
pub fn spoil_list(query: &mut Query, rows: usize, random: &mut StdRng) {
    query.list.resize(rows, -1);
    if rows == 0 {
        return;
    }
    let (first, last) = (random.random_range(0..rows), random.random_range(0..rows));
    let some = first.min(last)..=first.max(last);
    match random.random_range(0..4) {
        0 => query.list[first] = random.random(),
        1 => query.list[some].fill(-1),
        2 => query.list[some].fill(0),
        _ => {}
    }
}

/// Multiplies a head by `scale`, or leaves it; rarely puts a NaN into it.
pub fn spoil_head(head: &mut [u16], scale: f32, random: &mut StdRng) {
    if random.random_range(0..5) > 0 {
        let scaled = |bits: u16| bf16::from_f32(bf16::from_bits(bits).to_f32() * scale).to_bits();
        head.iter_mut().for_each(|bits| *bits = scaled(*bits));
    }
    if random.random_range(0..20) == 0 {
        head[7] = 0x7FC0;
    }
}
