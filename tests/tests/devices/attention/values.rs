//! NaN, infinities and scales of every magnitude in the rows and queries that `attend` reads.

use dsv4_kv::device::{Backend, Device, bf16};
use dsv4_kv_oracle::row::EncodedRow;
use kv_layout::attention::KeyCluster;
use kv_layout::geometry::HEAD_DIM;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::blocks::Blocks;
use super::decode::{SHAPE, query, query_of, shape_of};
use super::layer::{Layer, Query, Shape, TILE, Which, random_row};

/// NaN and infinities of one request, in its keys or its query, never reach the result of another. Rows that no valid
/// query attends to may hold anything: NaN codes and scales in both formats, and the largest code with an infinite
/// scale.
pub fn no_number_reaches_another_request<B: Backend>(device: &Device<B>) {
    const NAN: [u8; 4] = [0xFF; 4];
    for (format, code, scale) in [
        (MainFormat::Ue8m0, 0x7F, NAN),
        (MainFormat::F32, 0x7F, NAN),
        (MainFormat::F32, 0x7E, f32::INFINITY.to_le_bytes()),
    ] {
        let shape = Shape { format, heads: 2, slots: 2, ..SHAPE };
        let mut layer = Layer::random(device, shape, 12);
        let listed = |slot, position| Query { list: vec![0, -1, 3, 2], ..query(slot, position) };
        let queries = [listed(0, 100), listed(1, 17)];
        let mut heads = layer.random_heads(2, 13);
        let in_both = |layer: &mut Layer<B>, heads: &[Vec<u16>]| {
            Which::List.blocks_to_check().map(|blocks| {
                layer.blocks = blocks;
                layer.attend(&queries, Which::List, heads)
            })
        };
        let clean = in_both(&mut layer, &heads);
        // All rows of the other request, all entries that are not listed, and the window rows that no query sees.
        let seen: Vec<_> = layer.keys((1, &queries[1]), Which::List).into_iter().cloned().collect();
        spoil_all_but(&mut layer, &seen, (code, scale));
        heads[0].fill(0x7FC0);
        heads[1].fill(0x7F80);
        for (spoilt, clean) in in_both(&mut layer, &heads).iter().zip(&clean) {
            assert_eq!(spoilt.out[1024..], clean.out[1024..], "the other request");
            assert_eq!(spoilt.lse[2..], clean.lse[2..], "the other request");
            let is_nan = |&bits: &u16| bits & 0x7FFF > 0x7F80;
            assert!(spoilt.out[..1024].iter().all(is_nan), "NaN is not hidden");
            assert!(spoilt.lse[..2].iter().all(|&bits| f32::from_bits(bits).is_nan()), "nor here");
        }
    }
}

/// Gives every row that is not in `kept` this code in all channels, and this scale.
fn spoil_all_but<B: Backend>(
    layer: &mut Layer<B>,
    kept: &[EncodedRow],
    (code, scale): (u8, [u8; 4]),
) {
    for row in layer.window.iter_mut().chain(&mut layer.entries) {
        if !kept.contains(row) {
            row.data.fill(code);
            let scale = scale.into_iter().cycle();
            row.scale.iter_mut().zip(scale).for_each(|(to, byte)| *to = byte);
        }
    }
}

/// A NaN code in a key makes the results of its request NaN, in both formats: it is never read as a number.
pub fn a_nan_code_is_a_nan<B: Backend>(device: &Device<B>) {
    for format in MainFormat::ALL {
        for channel in [0, 63, 200, 447] {
            let shape = Shape { format, heads: 1, slots: 1, ..SHAPE };
            let mut layer = Layer::random(device, shape, 14);
            layer.window[5].data[channel] = 0x7F + 0x80 * (channel as u8 % 2);
            let heads = layer.random_heads(1, 15);
            for blocks in Which::Nothing.blocks_to_check() {
                layer.blocks = blocks;
                let written = layer.attend(&[query(0, 9)], Which::Nothing, &heads);
                let is_nan = |&bits: &u16| bits & 0x7FFF > 0x7F80;
                assert!(
                    written.out.iter().all(is_nan),
                    "{format:?}, channel {channel}, {blocks:?}"
                );
            }
        }
    }
}

/// Scales of every magnitude, also those that one BF16 multiplication does not reach.
pub fn every_scale_equals_the_oracle<B: Backend>(device: &Device<B>) {
    for exponent in [-20, -1, 7, 8, 9, 30, 50] {
        let mut layer = Layer::random(device, Shape { heads: 1, slots: 1, ..SHAPE }, 16);
        let mut random = StdRng::seed_from_u64(17);
        for row in &mut layer.window {
            let values = random_row(&mut random, 448.0 * 2f32.powi(exponent));
            *row = crate::inputs::oracle(layer.shape.format).encode(&values);
        }
        let mut heads = layer.random_heads(1, 18);
        // The query shrinks by as much, so that scores stay in the range of a softmax.
        let shrink = 2f32.powi(-exponent - 9);
        heads[0].iter_mut().for_each(|bits| {
            *bits = bf16::from_f32(bf16::from_bits(*bits).to_f32() * shrink).to_bits();
        });
        assert_eq!(layer.check(&[query(0, 30)], Which::Nothing, &heads), 0);
    }
}

/// Scores that rise or fall by a number of powers of two from tile to tile: the running maximum of the softmax follows
/// them, so that no weight overflows f32.
pub fn scores_may_rise_by_any_power<B: Backend>(device: &Device<B>) {
    const ENTRIES: usize = 6 * TILE;
    /// Channels in which keys and queries lie; the other channels have values only.
    const ALONG: usize = 256;
    let shape = shape_of(Which::List, ENTRIES, Shape { heads: 2, slots: 1, ..SHAPE });
    let mut random = StdRng::seed_from_u64(34);
    let signs: Vec<f32> = (0..ALONG).map(|_| if random.random() { 1.0 } else { -1.0 }).collect();
    let head = |sign: f32| {
        let of = |channel: usize| signs.get(channel).map_or(0.0, |value| sign * value);
        (0..512).map(|channel| bf16::from_f32(of(channel)).to_bits()).collect::<Vec<u16>>()
    };
    for rise in [3.0_f32, 9.0, 60.0, 120.0, 123.0, 126.0, 200.0, 3000.0] {
        let mut layer = Layer::random(device, shape, 35);
        let step = rise * core::f32::consts::LN_2 * 512_f32.sqrt() / ALONG as f32;
        for entry in 0..ENTRIES {
            let size = step * (entry / TILE + 1) as f32;
            let mut values = random_row(&mut random, size);
            for (value, sign) in values.iter_mut().zip(&signs) {
                *value = bf16::from_f32(size * sign).to_bits();
            }
            let row = layer.entry_row(0, entry).expect("it has a block");
            layer.entries[row] = crate::inputs::oracle(layer.shape.format).encode(&values);
        }
        let mut query = query_of(Which::List, ENTRIES, 0, &mut random);
        query.list.sort_unstable();
        assert_eq!(layer.check(&[query], Which::List, &[head(1.0), head(-1.0)]), 0);
    }
}

/// A channel whose sum overflows stays alone. A rotation of the pair by an angle of 0 would make its neighbour NaN.
pub fn an_infinite_sum_stays_in_its_channel<B: Backend>(device: &Device<B>) {
    const CHANNEL: usize = 400;
    for format in MainFormat::ALL {
        let mut layer = Layer::random(device, Shape { slots: 1, heads: 2, format, ..SHAPE }, 53);
        let mut values = vec![0_u16; HEAD_DIM as usize];
        values[CHANNEL] = bf16::from_f32(1.5 * 2_f32.powi(127)).to_bits();
        layer.window.fill(crate::inputs::oracle(format).encode(&values));
        let heads = vec![vec![0; HEAD_DIM as usize]; 2];
        for blocks in [Blocks::whole, Blocks::halves, Blocks::spread] {
            layer.blocks = blocks(KeyCluster::OneBlock);
            let out = layer.attend(&[query(0, 200)], Which::Nothing, &heads).out;
            for (channel, &bits) in out.iter().enumerate().map(|(at, bits)| (at % 512, bits)) {
                let expected = if channel == CHANNEL { 0x7F80 } else { 0 };
                // Rotary channels may be -0.
                assert_eq!(bits & 0x7FFF, expected, "{format:?}, {:?}, {channel}", layer.blocks);
            }
        }
    }
}
