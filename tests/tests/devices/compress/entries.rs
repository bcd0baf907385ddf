//! The compressors and the flush, against golden vectors and the oracle.

use std::collections::BTreeMap;

use dsv4_kv::SlotId;
use dsv4_kv::device::{Backend, Buffer, Device, Stream};
use dsv4_kv::ops::{self, BlockTable, Entries, IndexKeys};
use dsv4_kv::state::RunningSums;
use dsv4_kv::step_meta::Chunk;
use dsv4_kv_oracle::compressor;
use dsv4_kv_oracle::hadamard::hadamard;
use dsv4_kv_oracle::index::KeyFormat;
use dsv4_kv_oracle::number::{bf16_nearest_f64, bf16_value};
use dsv4_kv_oracle::rope::Table;
use dsv4_kv_oracle::row::EncodedRow;
use dsv4_kv_tests::golden;
use kv_layout::geometry::CompressorKind;
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::{DATA_BYTES, MainFormat};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::hca;
use crate::inputs::{assert_same, download, oracle, plane_row, rows, upload, upload_bf16};
use crate::model::{History, OnDevice, Step, assert_rounds, ring, shape};

/// The three compressors.
const STREAMS: [CompressorKind; 3] =
    [CompressorKind::CsaMain, CompressorKind::CsaIndex, CompressorKind::Hca];

/// Tokens that close a CSA window; those that close an HCA window or are their request's last.
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

/// The control: what the original design's rotation of state would have pooled does not pass for an
/// entry.
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

/// What a state row is to hold after the first `tokens` of a history, a row for each position that a later step
/// may need: (row, floats).
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

/// A chunk of any length writes the state rows that a later step may go on from, and no other: not those of
/// earlier tokens, whose rows are the last ones' too, nor of tokens that close a window.
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

/// NaN of any bits.
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

/// Steps of up to four tokens of which only the first few or none are accepted, as a draft is
/// verified: the entries that stay are those of never having drafted.
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

/// Paged planes of one layer with a fragmented block table: request 0 of two owns blocks 5, 2, 7.
struct Paged<B: Backend> {
    data: Buffer<B, u8>,
    scale: Buffer<B, u8>,
    code: Buffer<B, u8>,
    index_scale: Buffer<B, u8>,
    table: Buffer<B, i32>,
    faults: Buffer<B, u32>,
    formats: (MainFormat, IndexFormat),
    per_block: u32,
}

impl<B: Backend> Paged<B> {
    const BLOCKS: u32 = 8;
    const TABLE: [i32; 8] = [-1, -1, -1, -1, 5, 2, 7, -1];

    fn new(stream: &Stream<B>, formats: (MainFormat, IndexFormat), per_block: u32) -> Self {
        let rows = u64::from(Self::BLOCKS * per_block);
        let plane = |row_bytes| stream.device().allocate("plane", rows * row_bytes).unwrap();
        Self {
            data: plane(DATA_BYTES),
            scale: plane(formats.0.scale_bytes()),
            code: plane(formats.1.code_bytes()),
            index_scale: plane(formats.1.scale_bytes()),
            table: upload(stream, &Self::TABLE),
            faults: stream.device().allocate("fault word", 1).unwrap(),
            formats,
            per_block,
        }
    }

    fn entries(&self) -> Entries<'_, B> {
        Entries {
            data: &self.data,
            scale: &self.scale,
            format: self.formats.0,
            entries_per_block: self.per_block,
            num_blocks: Self::BLOCKS,
        }
    }

    fn table(&self) -> BlockTable<'_, B> {
        BlockTable { table: &self.table, slots: 2, max_blocks: 4 }
    }

    fn keys(&self, rotate: bool) -> IndexKeys<'_, B> {
        let (code, scale, format) = (&self.code, &self.index_scale, self.formats.1);
        IndexKeys { code, scale, format, rotate, num_blocks: Self::BLOCKS }
    }

    /// Plane row of entry `i` of the request in slot 1.
    fn row(&self, entry: usize) -> usize {
        let per_block = self.per_block as usize;
        Self::TABLE[4 + entry / per_block] as usize * per_block + entry % per_block
    }
}

pub fn flush_writes_the_golden_rows<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let entries = golden::load::<u16>("row_in_bf16").unwrap();
    let keys = golden::load::<u16>("fp4_in_bf16").unwrap();
    let chunk = Chunk { slot: SlotId(1), start: 4 * 24, end: 4 * 40 };
    for format in IndexFormat::ALL {
        let formats = (MainFormat::Ue8m0, format);
        let step = Step::new(&stream, 0, &[chunk]);
        let paged = Paged::new(&stream, formats, 32);
        let pad = |rows: &[u16], width| {
            let mut rows = rows.to_vec();
            rows.resize(step.plans[0].len() as usize * width, 0);
            upload_bf16(&stream, &rows)
        };
        let (entries_in, keys_in) = (pad(&entries.data, 512), pad(&keys.data, 128));
        let (tokens, plan) = (step.tokens(), step.plan(0));
        let (table, to, index) = (paged.table(), paged.entries(), paged.keys(false));
        ops::flush_csa(
            &stream,
            &ops::Flush {
                tokens: &tokens,
                closing: &plan,
                entries: &entries_in,
                table: &table,
                to: &to,
                faults: &paged.faults,
            },
            &ops::KeyFlush { keys: &keys_in, to: &index },
        )
        .unwrap();
        let (name, scale_name) = match format {
            IndexFormat::Nvfp4 => ("nvfp4_packed", "nvfp4_scale"),
            IndexFormat::Mxfp4 => ("mxfp4_packed", "mxfp4_scale"),
            IndexFormat::Fp8 => ("idxfp8_codes", "idxfp8_scale"),
        };
        let codes = golden::load::<u8>(name).unwrap();
        let scales: Vec<Vec<u8>> = if format == IndexFormat::Fp8 {
            let scale = golden::load::<f32>(scale_name).unwrap();
            scale.data.iter().map(|scale| scale.to_le_bytes().to_vec()).collect()
        } else {
            golden::load::<u8>(scale_name).unwrap().rows().map(<[u8]>::to_vec).collect()
        };
        let (data, row_scale) = (
            golden::load::<u8>("row_v4_data").unwrap(),
            golden::load::<u8>("row_v4_scale").unwrap(),
        );
        let planes = [&paged.data, &paged.scale, &paged.code, &paged.index_scale]
            .map(|plane| download(&stream, plane));
        let rows = data.rows().zip(row_scale.rows()).zip(codes.rows().zip(&scales));
        for (i, ((data, row_scale), (code, scale))) in rows.enumerate() {
            let row = paged.row(24 + i);
            let want: [&[u8]; 4] = [data, row_scale, code, scale];
            let widths = [DATA_BYTES, 8, format.code_bytes(), format.scale_bytes()];
            for (plane, (want, width)) in planes.iter().zip(want.into_iter().zip(widths)) {
                assert_same(plane_row(plane, row, width), want, &format!("{format:?} entry {i}"));
            }
        }
        assert_eq!(download(&stream, &paged.faults), [0]);
    }
}

pub fn flush_equals_the_oracle_in_every_format<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    // Entries 30 to 95: the end of a block, a whole one, most of the next.
    let chunk = Chunk { slot: SlotId(1), start: 121, end: 382 };
    let closed = compressor::closed_entries(121, 261, 4);
    let step = Step::new(&stream, 0, &[chunk]);
    let capacity = step.plans[0].len() as usize;
    let entries = rows(capacity, 11);
    let keys: Vec<Vec<u16>> = rows(capacity, 12).iter().map(|row| row[..128].to_vec()).collect();
    let inputs = (upload_bf16(&stream, &entries.concat()), upload_bf16(&stream, &keys.concat()));
    for main in MainFormat::ALL {
        for index in IndexFormat::ALL {
            let paged = Paged::new(&stream, (main, index), 32);
            let (tokens, plan) = (step.tokens(), step.plan(0));
            let (table, to, key_planes) = (paged.table(), paged.entries(), paged.keys(true));
            let faults = &paged.faults;
            ops::flush_csa(
                &stream,
                &ops::Flush {
                    tokens: &tokens,
                    closing: &plan,
                    entries: &inputs.0,
                    table: &table,
                    to: &to,
                    faults,
                },
                &ops::KeyFlush { keys: &inputs.1, to: &key_planes },
            )
            .unwrap();
            let planes = [&paged.data, &paged.scale, &paged.code, &paged.index_scale]
                .map(|plane| download(&stream, plane));
            for (record, entry) in closed.clone().enumerate() {
                let row = paged.row(entry);
                let EncodedRow { data, scale } = oracle(main).encode(&entries[record]);
                let key: Vec<f64> = keys[record].iter().map(|&bits| bf16_value(bits)).collect();
                let rotated: Vec<u16> = hadamard(&key).into_iter().map(bf16_nearest_f64).collect();
                let key = KeyFormat::from_name(index.name()).unwrap().encode(&rotated);
                let widths =
                    [DATA_BYTES, main.scale_bytes(), index.code_bytes(), index.scale_bytes()];
                let want = [&data, &scale, &key.codes, &key.scale];
                for (plane, (want, width)) in planes.iter().zip(want.into_iter().zip(widths)) {
                    let what = format!("{main:?} {index:?} entry {entry}");
                    assert_same(plane_row(plane, row, width), want, &what);
                }
            }
        }
    }
}

/// Pooled windows become the rows of their entries: of runs that close one, in the middle of a list where
/// others do not.
pub fn flush_of_hca_entries_equals_the_oracle<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let chunks = [
        Chunk { slot: SlotId(0), start: 3, end: 9 },
        Chunk { slot: SlotId(1), start: 100, end: 300 },
        Chunk { slot: SlotId(1), start: 300, end: 384 },
    ];
    let step = Step::new(&stream, 7, &chunks);
    let mut random = StdRng::seed_from_u64(13);
    let mut values = |count: usize, size: f32| -> Vec<f32> {
        (0..count).map(|_| random.random_range(-size..size)).collect()
    };
    let (norm, pooled) = (values(512, 2.0), values(step.plans[1].len() as usize * 512, 3.0));
    let (norm_in, pooled_in) = (upload(&stream, &norm), upload(&stream, &pooled));
    let frequencies = upload(&stream, &Table::Compress.frequencies());
    for main in MainFormat::ALL {
        let paged = Paged::new(&stream, (main, IndexFormat::Fp8), 1);
        let flush = ops::HcaFlush {
            tokens: &step.tokens(),
            runs: &step.plan(1),
            pooled: &pooled_in,
            norm: &norm_in,
            frequencies: &frequencies,
            table: &paged.table(),
            to: &paged.entries(),
            faults: &paged.faults,
        };
        ops::flush_hca(&stream, &flush).unwrap();
        assert_eq!(download(&stream, &paged.faults), [0]);
        let (data, scale) = (download(&stream, &paged.data), download(&stream, &paged.scale));
        // Runs: the first request's; then those that end at 127, 255, 299 and 383.
        for (entry, record) in [1, 2, 4].into_iter().enumerate() {
            let pooled = &pooled[record * 512..][..512];
            let finished = hca::finish(pooled, &norm, entry);
            let exact: Vec<f64> = pooled.iter().map(|&x| x.into()).collect();
            let history = History::random(CompressorKind::Hca, 1, 1);
            let exact =
                History { norm: norm.clone(), ..history }.oracle().norm_and_rotate(&exact, entry);
            let exact: Vec<f32> = exact.iter().map(|&x| x as f32).collect();
            assert_rounds(&finished, &exact, 2e-6, &format!("entry {entry}"));
            let (want, row) = (oracle(main).encode(&finished), paged.row(entry));
            assert_same(plane_row(&data, row, DATA_BYTES), &want.data, "data");
            assert_same(plane_row(&scale, row, main.scale_bytes()), &want.scale, "scale");
        }
    }
}

/// Windows whose block the table does not have are left out and counted; nothing else is touched.
pub fn flush_counts_windows_without_a_block<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    // Slot 0 owns no block; the last window of slot 1 is past its three.
    let chunks = [
        Chunk { slot: SlotId(0), start: 0, end: 8 },
        Chunk { slot: SlotId(1), start: 380, end: 388 },
    ];
    let step = Step::new(&stream, 0, &chunks);
    let capacity = step.plans[0].len() as usize;
    let entries = upload_bf16(&stream, &rows(capacity, 14).concat());
    let keys = upload_bf16(&stream, &vec![0; capacity * 128]);
    let paged = Paged::new(&stream, (MainFormat::Ue8m0, IndexFormat::Mxfp4), 32);
    let (tokens, plan) = (step.tokens(), step.plan(0));
    let (table, to, index) = (paged.table(), paged.entries(), paged.keys(true));
    let faults = &paged.faults;
    ops::flush_csa(
        &stream,
        &ops::Flush {
            tokens: &tokens,
            closing: &plan,
            entries: &entries,
            table: &table,
            to: &to,
            faults,
        },
        &ops::KeyFlush { keys: &keys, to: &index },
    )
    .unwrap();
    assert_eq!(download(&stream, &paged.faults), [3]);
    let data = download(&stream, &paged.data);
    let written = data.chunks_exact(DATA_BYTES as usize).enumerate();
    let written: Vec<usize> =
        written.filter(|(_, row)| row.iter().any(|&byte| byte != 0)).map(|(row, _)| row).collect();
    assert_eq!(written, [paged.row(95)], "entry 95 alone has a block");
}
