//! The compressors, compared with golden vectors and the oracle.

use std::collections::BTreeMap;

use dsv4_kv::SlotId;
use dsv4_kv::device::{Backend, Device};
use dsv4_kv::state::RunningSums;
use dsv4_kv::step_meta::Chunk;
use dsv4_kv_oracle::compressor;
use dsv4_kv_oracle::number::bf16_value;
use dsv4_kv_tests::golden;
use kv_layout::geometry::CompressorKind;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::hca;
use crate::history::{History, shape};
use crate::inputs::{assert_same, download};
use crate::model::{OnDevice, Step, assert_rounds, ring};

/// The three compressors.
const STREAMS: [CompressorKind; 3] =
    [CompressorKind::CsaMain, CompressorKind::CsaIndex, CompressorKind::Hca];

/// The work lists have the tokens that close a CSA window, and the tokens that close an HCA window or are the last of
/// their request in the step.
pub fn work_lists_name_every_closing_token<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let mut random = StdRng::seed_from_u64(1);
    for padding in [0, 3, 1500] {
        let chunks: Vec<Chunk> = (0..40)
            .map(|slot| {
                let start = random.random_range(0..300);
                let tokens = if slot % 3 == 0 { 1 } else { random.random_range(1..200) };
                Chunk { slot: SlotId(slot), start, end: start + tokens }
            })
            .collect();
        let step = Step::new(&stream, padding, &chunks);
        for (list, ratio) in [4, 128].into_iter().enumerate() {
            let listed = chunks.iter().flat_map(|chunk| {
                let ends = move |p: &u32| list == 1 && p + 1 == chunk.end;
                (chunk.start..chunk.end).map(move |p| (p + 1) % ratio == 0 || ends(&p))
            });
            let listed = listed.enumerate().filter(|&(_, listed)| listed);
            let mut want: Vec<i32> = listed.map(|(token, _)| token as i32).collect();
            let got = download(&stream, &step.plans[list]);
            assert!(want.len() <= got.len(), "the capacity holds every token that is listed");
            want.resize(got.len(), -1);
            assert_eq!(got, want, "ratio {ratio}, padding {padding}");
        }
    }
}

pub fn entries_equal_transformers<B: Backend>(device: &Device<B>) {
    for (stream, golden_name, tolerance) in [
        (CompressorKind::CsaMain, "csa_entry_fp32", 2e-6),
        (CompressorKind::CsaIndex, "idx_key_fp32", 2e-6),
        (CompressorKind::Hca, "hca_entry_fp32", 5e-6),
    ] {
        let history = History::golden(stream);
        let want = golden::load::<f32>(golden_name).unwrap();
        for cut in [history.tokens(), 1, 5] {
            let compressor = OnDevice::new(device, &history, 1, ring(stream, 1));
            let entries = compressor.feed(&history, std::iter::repeat(cut));
            assert_eq!(entries.len(), want.shape[0], "{golden_name}");
            for (i, (got, want)) in entries.iter().zip(want.rows()).enumerate() {
                assert_rounds(got, want, tolerance, &format!("{golden_name} {i}, cut {cut}"));
            }
        }
    }
}

/// The control: entries pooled with the original design's rotation of state do not pass.
pub fn the_wrong_rotation_does_not_pass<B: Backend>(device: &Device<B>) {
    let history = History::golden(CompressorKind::CsaMain);
    let wrong = golden::load::<f32>("csa_pooled_seed_rotation_WRONG").unwrap();
    let compressor = OnDevice::new(device, &history, 1, 8);
    let entries = compressor.feed(&history, [27]);
    let oracle = history.oracle();
    for (i, (got, wrong)) in entries.iter().zip(wrong.rows()).enumerate().skip(1) {
        let pooled: Vec<f64> = wrong.iter().map(|&x| f64::from(x)).collect();
        let wrong = oracle.norm_and_rotate(&pooled, i);
        let far = got.iter().zip(&wrong).filter(|(got, wrong)| {
            (bf16_value(**got) - **wrong).abs() > 0.1 * wrong.abs().max(0.1)
        });
        assert!(far.count() > 256, "entry {i} looks like the wrong rotation");
    }
}

pub fn entries_equal_the_oracle_and_no_cut_matters<B: Backend>(device: &Device<B>) {
    let mut random = StdRng::seed_from_u64(2);
    for stream in STREAMS {
        let history = History::random(stream, 290, 3);
        let whole = OnDevice::new(device, &history, 1, ring(stream, 1)).feed(&history, [290]);
        for (i, got) in whole.iter().enumerate() {
            let want: Vec<f32> = history.oracle().entry(i).iter().map(|&x| x as f32).collect();
            assert_rounds(got, &want, 5e-6, &format!("{stream:?} entry {i}"));
        }
        for most in [4, 9, 140] {
            let cuts: Vec<usize> = (0..290).map(|_| random.random_range(1..=most)).collect();
            let cut = OnDevice::new(device, &history, 1, ring(stream, 1)).feed(&history, cuts);
            assert_same(&cut, &whole, &format!("{stream:?} in chunks of up to {most}"));
        }
    }
}

/// The contents of the state rows after the first `tokens` tokens of a history, for each position that a later step may
/// need: (row, floats).
fn kept_rows(history: &History, tokens: usize, ring: usize) -> Vec<(usize, Vec<f32>)> {
    let last = |rows: usize| tokens.saturating_sub(rows)..tokens;
    if history.stream == CompressorKind::Hca {
        let sums = hca::running_sums(history);
        let rows = last(ring).filter_map(|position| {
            let RunningSums { maximum, sum, weighted, .. } = sums[position + 1].clone()?;
            Some((position % ring, [maximum, sum, weighted].concat()))
        });
        return rows.collect();
    }
    let (columns, channels) = (shape(history.stream).columns(), shape(history.stream).channels);
    let half = |position: usize, first: usize| {
        let at = position * columns + first..position * columns + first + channels;
        let bias = &history.ape[position % 4 * columns + first..];
        let scores = history.gate[at.clone()].iter().zip(bias).map(|(gate, bias)| gate + bias);
        history.kv[at].iter().copied().chain(scores).collect::<Vec<f32>>()
    };
    let own = last(ring).filter(|position| position % 4 != 3);
    let own = own.map(|position| (position % ring, half(position, channels)));
    let previous = last(ring + 4).map(|position| (ring + position % (ring + 4), half(position, 0)));
    own.chain(previous).collect()
}

/// A chunk of any length writes the state rows from which a later step may continue, and no others: neither rows of
/// earlier tokens, which share ring rows with the last tokens, nor rows of tokens that close a window.
pub fn a_chunk_writes_the_rows_that_steps_need<B: Backend>(device: &Device<B>) {
    for (stream, step_tokens) in STREAMS.into_iter().flat_map(|stream| [(stream, 1), (stream, 5)]) {
        let history = History::random(stream, 300, 15);
        for tokens in [1, 2, 3, 4, 5, 8, 9, 126, 127, 128, 129, 130, 133, 256, 258, 300] {
            let ring = ring(stream, step_tokens);
            let compressor = OnDevice::new(device, &history, 1, ring);
            let end = tokens as u32;
            let step =
                Step::new(&compressor.stream, 0, &[Chunk { slot: SlotId(0), start: 0, end }]);
            let (kv, gate) = history.projections(0..tokens);
            compressor.run(&step, &kv, &gate);
            let rows = compressor.state_rows();
            let mut want = vec![vec![f32::from_bits(u32::MAX); rows[0].len()]; rows.len()];
            for (row, floats) in kept_rows(&history, tokens, ring as usize) {
                want[row] = floats;
            }
            let bits = |rows: Vec<Vec<f32>>| -> Vec<u32> {
                rows.concat().into_iter().map(f32::to_bits).collect()
            };
            assert_same(&bits(rows), &bits(want), &format!("{stream:?} of {tokens}, ring {ring}"));
        }
    }
}

/// NaN with different bits.
pub fn a_nan_spoils_its_window_alone<B: Backend>(device: &Device<B>) {
    let clean = History::random(CompressorKind::Hca, 256, 9);
    let entries = |history: &History| {
        OnDevice::new(device, history, 1, ring(CompressorKind::Hca, 1)).feed(history, [256])
    };
    let want = entries(&clean);
    for nan in [f32::from_bits(u32::MAX), f32::NAN] {
        let (mut keys, mut gates) = (clean.clone(), clean.clone());
        keys.kv[5 * 512 + 7] = nan;
        gates.gate[5 * 512 + 7] = nan;
        for got in [keys, gates].map(|history| entries(&history)) {
            assert!(got[0].iter().all(|&channel| bf16_value(channel).is_nan()));
            assert_same(&got[1], &want[1], "the window behind it");
        }
    }
}

/// Steps of up to four tokens, of which only the first few or none are accepted, as when drafts are verified. The
/// entries equal those of a request without drafts.
pub fn rejected_tokens_change_no_entry<B: Backend>(device: &Device<B>) {
    const STEP: u32 = 4;
    let mut random = StdRng::seed_from_u64(4);
    for stream in STREAMS {
        let history = History::random(stream, 270, 5);
        let drafts = History::random(stream, 400, 6);
        let whole = OnDevice::new(device, &history, 1, ring(stream, 1)).feed(&history, [270]);
        let compressor = OnDevice::new(device, &history, 1, ring(stream, STEP));
        let ratio = shape(stream).ratio;
        let mut entries = BTreeMap::new();
        let mut start = 0;
        while start < history.tokens() {
            let tokens = random.random_range(1..=STEP as usize).min(history.tokens() - start);
            let accepted = random.random_range(0..=tokens);
            let (mut kv, mut gate) = history.projections(start..start + accepted);
            let (draft_kv, draft_gate) = drafts.projections(start..start + tokens - accepted);
            kv.extend(draft_kv);
            gate.extend(draft_gate);
            let end = (start + tokens) as u32;
            let chunk = Chunk { slot: SlotId(0), start: start as u32, end };
            let step = Step::new(&compressor.stream, 0, &[chunk]);
            let closed = compressor::closed_entries(start, tokens, ratio);
            entries.extend(closed.zip(compressor.run(&step, &kv, &gate)));
            start += accepted;
        }
        let kept: Vec<_> = entries.into_values().take(whole.len()).collect();
        assert_same(&kept, &whole, &format!("{stream:?}"));
    }
}

/// Several requests at different positions in one step, with padding: each as if it were alone.
pub fn requests_in_one_step_do_not_mix<B: Backend>(device: &Device<B>) {
    for stream in STREAMS {
        let histories: Vec<History> = (0..3)
            .map(|request| {
                let History { ape, norm, .. } = History::random(stream, 1, 7);
                let own = History::random(stream, 140 + 30 * request as usize, 8 + request);
                History { ape, norm, ..own }
            })
            .collect();
        let compressor = OnDevice::new(device, &histories[0], 3, ring(stream, 1));
        let mut entries = vec![Vec::new(); 3];
        let mut done = [0; 3];
        while (0..3).any(|r| done[r] < histories[r].tokens()) {
            let (mut chunks, mut kv, mut gate) = (Vec::new(), Vec::new(), Vec::new());
            let mut closed = Vec::new();
            for (request, history) in histories.iter().enumerate() {
                let (start, end) = (done[request], (done[request] + 37).min(history.tokens()));
                if start < end {
                    let slot = SlotId(2 - request as u32);
                    chunks.push(Chunk { slot, start: start as u32, end: end as u32 });
                    let (k, g) = history.projections(start..end);
                    kv.extend(k);
                    gate.extend(g);
                    let range = compressor::closed_entries(start, end - start, shape(stream).ratio);
                    closed.extend(range.map(|_| request));
                    done[request] = end;
                }
            }
            let step = Step::new(&compressor.stream, 5, &chunks);
            let columns = shape(stream).columns();
            kv.resize(step.count as usize * columns, f32::NAN);
            gate.resize(step.count as usize * columns, f32::NAN);
            for (request, entry) in closed.into_iter().zip(compressor.run(&step, &kv, &gate)) {
                entries[request].push(entry);
            }
        }
        for (history, entries) in histories.iter().zip(entries) {
            let alone = OnDevice::new(device, history, 1, ring(stream, 1));
            let alone = alone.feed(history, [history.tokens()]);
            assert_same(&entries, &alone, &format!("{stream:?}"));
        }
    }
}
