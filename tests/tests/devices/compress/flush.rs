//! The flush of pooled windows into their blocks, compared with golden vectors and the oracle.

use dsv4_kv::SlotId;
use dsv4_kv::device::{Backend, Buffer, Device, Stream};
use dsv4_kv::ops::{self, BlockTable, Entries, IndexKeys};
use dsv4_kv::step_meta::Chunk;
use dsv4_kv_oracle::compressor;
use dsv4_kv_oracle::hadamard::hadamard;
use dsv4_kv_oracle::index::KeyFormat;
use dsv4_kv_oracle::number::{bf16_nearest, bf16_nearest_f64, bf16_value};
use dsv4_kv_oracle::rope::Table;
use dsv4_kv_oracle::row::EncodedRow;
use dsv4_kv_tests::golden;
use kv_layout::geometry::CompressorKind;
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::{DATA_BYTES, MainFormat};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::hca;
use crate::history::History;
use crate::inputs::{assert_same, download, oracle, plane_row, rows, upload, upload_bf16};
use crate::model::{Step, assert_rounds};

/// Paged planes of one layer with a scattered block table: of two requests, the one in slot 1 owns blocks 5, 2, 7.
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

    fn keys(&self, hadamard: bool) -> IndexKeys<'_, B> {
        let (code, scale, format) = (&self.code, &self.index_scale, self.formats.1);
        IndexKeys { code, scale, format, hadamard, num_blocks: Self::BLOCKS }
    }

    /// Plane row of entry `entry` of the request in slot 1.
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
                state_slots: table.slots,
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
    // Entries 30 to 94: the end of a block, a whole block, and most of the next.
    let chunk = Chunk { slot: SlotId(1), start: 121, end: 382 };
    let closed = compressor::closed_entries(121, 261, 4);
    let step = Step::new(&stream, 0, &[chunk]);
    let capacity = step.plans[0].len() as usize;
    let entries = rows(capacity, 11);
    let mut keys: Vec<Vec<u16>> =
        rows(capacity, 12).iter().map(|row| row[..128].to_vec()).collect();
    // Its largest sum, 309181, times 1 / sqrt(128) is just below a value half-way between two BF16 values: a factor that
    // is one unit too large in its last place rounds up.
    keys[0] = [262_144.0, 46_848.0, 189.0].map(bf16_nearest).to_vec();
    keys[0].resize(128, 0);
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
                    state_slots: table.slots,
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

/// Pooled windows become rows of entries: those of runs that close a window, in a list where other runs do not.
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
            state_slots: paged.table().slots,
            to: &paged.entries(),
            faults: &paged.faults,
        };
        // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them again.
        unsafe { ops::flush_hca(&stream, &flush) }.unwrap();
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

/// Windows for whose block the table has no entry are skipped and counted; nothing else is touched.
pub fn flush_counts_windows_without_a_block<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    // Slot 0 owns no block; the last window of slot 1 lies after its three blocks.
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
            state_slots: table.slots,
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

/// A record whose token has fewer tokens before or after it in the step than it says: nothing was pooled for it, so nothing is
/// stored, and it is counted.
pub fn flush_counts_windows_without_their_tokens<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let written = |paged: &Paged<B>| {
        let data = download(&stream, &paged.data);
        let rows = data.chunks_exact(DATA_BYTES as usize).enumerate();
        let rows = rows.filter(|(_, row)| row.iter().any(|&byte| byte != 0));
        (rows.map(|(row, _)| row).collect::<Vec<_>>(), download(&stream, &paged.faults)[0])
    };
    let step = Step::new(&stream, 0, &[Chunk { slot: SlotId(1), start: 0, end: 8 }]);
    let index = upload(&stream, &[0, 1, 2, 4, 4, 5, 6, 7]);
    let tokens = ops::StepTokens { index: &index, ..step.tokens() };
    let capacity = step.plans[0].len() as usize;
    let entries = upload_bf16(&stream, &rows(capacity, 15).concat());
    let keys = upload_bf16(&stream, &rows(capacity, 16).concat());
    let paged = Paged::new(&stream, (MainFormat::Ue8m0, IndexFormat::Mxfp4), 32);
    let (table, to, index) = (paged.table(), paged.entries(), paged.keys(true));
    let (closing, faults, entries) = (&step.plan(0), &paged.faults, &entries);
    let (state_slots, tokens) = (table.slots, &tokens);
    let flush =
        ops::Flush { tokens, closing, entries, table: &table, state_slots, to: &to, faults };
    ops::flush_csa(&stream, &flush, &ops::KeyFlush { keys: &keys, to: &index }).unwrap();
    assert_eq!(written(&paged), (vec![paged.row(1)], 1));

    // A state without the slot: nothing was pooled.
    let paged = Paged::new(&stream, (MainFormat::Ue8m0, IndexFormat::Mxfp4), 32);
    let (to, index, faults) = (paged.entries(), paged.keys(true), &paged.faults);
    let flush = ops::Flush { tokens: &step.tokens(), state_slots: 1, to: &to, faults, ..flush };
    ops::flush_csa(&stream, &flush, &ops::KeyFlush { keys: &keys, to: &index }).unwrap();
    assert_eq!(written(&paged), (Vec::new(), 2));

    let step = Step::new(&stream, 0, &[Chunk { slot: SlotId(1), start: 0, end: 256 }]);
    let frequencies = upload(&stream, &Table::Compress.frequencies());
    let norm = upload(&stream, &[1_f32; 512]);
    let pooled = upload(&stream, &vec![1_f32; step.plans[1].len() as usize * 512]);
    let counts = |damaged: i32| {
        let counts: Vec<i32> = (0..256).map(|i| if i == 127 { damaged } else { 0 }).collect();
        upload(&stream, &counts)
    };
    let (index, remaining) = (counts(128), counts(129));
    for tokens in [
        ops::StepTokens { index: &index, ..step.tokens() },
        ops::StepTokens { remaining: &remaining, ..step.tokens() },
    ] {
        let paged = Paged::new(&stream, (MainFormat::Ue8m0, IndexFormat::Mxfp4), 1);
        let flush = ops::HcaFlush {
            tokens: &tokens,
            runs: &step.plan(1),
            pooled: &pooled,
            norm: &norm,
            frequencies: &frequencies,
            table: &paged.table(),
            state_slots: paged.table().slots,
            to: &paged.entries(),
            faults: &paged.faults,
        };
        // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them again.
        unsafe { ops::flush_hca(&stream, &flush) }.unwrap();
        assert_eq!(written(&paged), (vec![paged.row(1)], 1));
    }
}
