//! `append_swa` and `gather_swa` against the oracle, byte for byte, in both row formats.

use dsv4_kv::SlotId;
use dsv4_kv::device::{
    Backend, Buffer, CudaDevice, Device, DeviceError, EmuDevice, Memory, Stream,
};
use dsv4_kv::ops::{self, StepQueries, SwaRing};
use dsv4_kv::step_meta::{self, Chunk, NONE, Section, StepLayout};
use dsv4_kv_oracle::row::{EncodedRow, QUANTISED};
use dsv4_kv_oracle::swa;
use dsv4_kv_tests::golden;
use half::bf16;
use kv_layout::format::E4m3;
use kv_layout::geometry::{HEAD_DIM, WINDOW};
use kv_layout::main_row::{DATA_BYTES, MainFormat};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::inputs::{
    CANARY, CANARY_BF16, assert_same, download, download_bits, oracle, rows, special_rows, upload,
    upload_bf16,
};

/// The ring planes of one layer, filled with canaries.
pub struct Rings<B: Backend> {
    device: Device<B>,
    data: Buffer<B, u8>,
    scale: Buffer<B, u8>,
    faults: Buffer<B, u32>,
    format: MainFormat,
    ring: u32,
    slots: u32,
}

impl<B: Backend> Rings<B> {
    pub fn new(device: &Device<B>, format: MainFormat, slots: u32, ring: u32) -> Self {
        let rows = u64::from(slots * ring);
        let stream = device.stream().unwrap();
        let rings = Self {
            device: device.clone(),
            data: device.allocate("ring data", rows * DATA_BYTES).unwrap(),
            scale: device.allocate("ring scales", rows * format.scale_bytes()).unwrap(),
            faults: device.allocate("fault word", 1).unwrap(),
            format,
            ring,
            slots,
        };
        stream.fill(&rings.data, CANARY).unwrap();
        stream.fill(&rings.scale, CANARY).unwrap();
        stream.synchronize().unwrap();
        rings
    }

    pub fn memory(&self) -> Vec<Memory<B>> {
        vec![self.data.memory(), self.scale.memory(), self.faults.memory()]
    }

    fn view(&self) -> SwaRing<'_, B> {
        let Self { data, scale, format, ring, slots, .. } = self;
        SwaRing { data, scale, format: *format, ring: *ring, slots: *slots }
    }

    pub fn append(
        &self,
        stream: &Stream<B>,
        kv: &Buffer<B, bf16>,
        row: &Buffer<B, i32>,
        tokens: u32,
    ) -> Result<(), DeviceError> {
        ops::append_swa(
            stream,
            &ops::WindowAppend { kv, row, ring: &self.view(), faults: &self.faults, tokens },
        )
    }

    /// Appends the first rows of `values` to the ring rows `rows`.
    pub fn append_rows(&self, stream: &Stream<B>, values: &[Vec<u16>], rows: &[i32]) {
        let kv = upload_bf16(stream, &values.concat());
        let row = upload(stream, rows);
        self.append(stream, &kv, &row, rows.len() as u32).unwrap();
    }

    /// Both planes, by row.
    pub fn contents(&self, stream: &Stream<B>) -> Vec<EncodedRow> {
        let data = download(stream, &self.data);
        let scale = download(stream, &self.scale);
        let scales = scale.chunks_exact(self.format.scale_bytes() as usize);
        let datas = data.chunks_exact(DATA_BYTES as usize);
        datas
            .zip(scales)
            .map(|(data, scale)| EncodedRow { data: data.to_vec(), scale: scale.to_vec() })
            .collect()
    }

    fn canary(&self) -> EncodedRow {
        EncodedRow {
            data: vec![CANARY; DATA_BYTES as usize],
            scale: vec![CANARY; self.format.scale_bytes() as usize],
        }
    }

    fn fault_count(&self, stream: &Stream<B>) -> u32 {
        download(stream, &self.faults)[0]
    }
}

/// The arrays of a step on the device, and the gather of its queries.
struct Step<B: Backend> {
    sections: [Buffer<B, i32>; 3],
    rows: Vec<i32>,
    tokens: u32,
}

impl<B: Backend> Step<B> {
    fn new(stream: &Stream<B>, ring: u32, padding: u32, chunks: &[Chunk]) -> Self {
        let tokens: u32 = chunks.iter().map(|chunk| chunk.end - chunk.start).sum();
        let layout = StepLayout::new(tokens + padding, chunks.len() as u32);
        let mut array = vec![0; layout.elements()];
        step_meta::fill(&mut array, layout, ring, chunks.iter().copied());
        let section = |section| &array[layout.range(section)];
        let sections = [Section::Position, Section::Slot, Section::Index]
            .map(|name| upload(stream, section(name)));
        Self { sections, rows: section(Section::RingRow).to_vec(), tokens: tokens + padding }
    }

    /// Tiles and lengths of queries `first..first + count`.
    fn gather(
        &self,
        rings: &Rings<B>,
        stream: &Stream<B>,
        kv: &Buffer<B, bf16>,
        (first, count): (u32, u32),
    ) -> (Vec<u16>, Vec<i32>) {
        let device = &rings.device;
        let tile = device.allocate::<bf16>("tile", u64::from(count * WINDOW * HEAD_DIM)).unwrap();
        let lengths = device.allocate::<i32>("lengths", u64::from(count)).unwrap();
        stream.fill(&tile, CANARY).unwrap();
        stream.fill(&lengths, CANARY).unwrap();
        let [position, slot, index] = &self.sections;
        let queries = StepQueries { position, slot, index, first, count };
        let (ring, faults) = (rings.view(), &rings.faults);
        ops::gather_swa(
            stream,
            &ops::WindowGather {
                kv,
                queries: &queries,
                ring: &ring,
                tile: &tile,
                lengths: &lengths,
                faults,
            },
        )
        .unwrap();
        (download_bits(stream, &tile), download(stream, &lengths))
    }
}

/// Runs `test` for each row format.
fn each_format(test: impl Fn(MainFormat)) {
    MainFormat::ALL.into_iter().for_each(test);
}

pub fn append_writes_the_golden_rows<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let input = golden::load::<u16>("row_in_bf16").unwrap();
    let values: Vec<Vec<u16>> = input.rows().map(<[u16]>::to_vec).collect();
    let rows: Vec<i32> = (0..values.len() as i32).collect();
    let append = |format| {
        let rings = Rings::new(device, format, 1, 128);
        rings.append_rows(&stream, &values, &rows);
        rings.contents(&stream)
    };
    let data = golden::load::<u8>("row_v4_data").unwrap();
    let scale = golden::load::<u8>("row_v4_scale").unwrap();
    let got = append(MainFormat::Ue8m0);
    for (row, (data, scale)) in data.rows().zip(scale.rows()).enumerate() {
        assert_same(&got[row].data, data, &format!("ue8m0 row {row}"));
        assert_same(&got[row].scale, scale, &format!("ue8m0 scales of row {row}"));
    }
    let codes = golden::load::<u8>("row_seed_fp8").unwrap();
    let scale = golden::load::<f32>("row_seed_scale").unwrap();
    let got = append(MainFormat::F32);
    for (row, codes) in codes.rows().enumerate() {
        assert_same(&got[row].data[..QUANTISED], codes, &format!("f32 row {row}"));
        let rotary: Vec<u8> =
            values[row][QUANTISED..].iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_same(&got[row].data[QUANTISED..], &rotary, &format!("rotary part of row {row}"));
        assert_eq!(got[row].scale, scale.data[row].to_le_bytes(), "f32 scale of row {row}");
    }
}

pub fn append_equals_the_oracle_on_random_and_special_rows<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    each_format(|format| {
        let values = [rows(200, 11), special_rows(12)].concat();
        let rings = Rings::new(device, format, 2, 128);
        let rows: Vec<i32> = (0..values.len() as i32).collect();
        rings.append_rows(&stream, &values, &rows);
        for (row, (got, value)) in rings.contents(&stream).iter().zip(&values).enumerate() {
            let want = oracle(format).encode(value);
            assert_same(&got.data, &want.data, &format!("{format:?} row {row}"));
            assert_same(&got.scale, &want.scale, &format!("{format:?} scale of row {row}"));
        }
    });
}

/// Every BF16 value up to 448 with a scale of exactly one, so that the rounding of each is tested by itself: all codes,
/// all ties, both signs, subnormals.
pub fn append_rounds_every_bf16_value_as_the_oracle<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let all = (0..=u16::MAX).filter(|&bits| bf16::from_bits(bits).to_f32().abs() <= 448.0);
    let all: Vec<u16> = all.collect();
    assert_eq!(all.len(), 2 * 0x43E1);
    each_format(|format| {
        let values: Vec<Vec<u16>> = all
            .chunks(63)
            .flat_map(|part| {
                // One 448 in each group of 64 makes the scale one.
                let mut group = vec![bf16::from_f32(448.0).to_bits()];
                group.extend(part);
                group.resize(64, 0);
                group
            })
            .collect::<Vec<_>>()
            .chunks(QUANTISED)
            .map(|channels| {
                let mut row = channels.to_vec();
                row.resize(512, 0x3F80);
                row[0] = bf16::from_f32(448.0).to_bits();
                row
            })
            .collect();
        let rings = Rings::new(device, format, 1, values.len() as u32);
        rings.append_rows(&stream, &values, &(0..values.len() as i32).collect::<Vec<_>>());
        for (row, (got, value)) in rings.contents(&stream).iter().zip(&values).enumerate() {
            let want = oracle(format).encode(value);
            assert_same(&got.data, &want.data, &format!("{format:?} row {row}"));
        }
    });
}

/// Chunks of several requests, one longer than the ring, with padding between and after them. Exactly the rows that the
/// token history names are written; every other byte is unchanged.
pub fn append_leaves_padding_and_other_rows_alone<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    each_format(|format| {
        for ring in [128, 131] {
            let rings = Rings::new(device, format, 4, ring);
            let chunks = [
                Chunk { slot: SlotId(3), start: 0, end: 300 },
                Chunk { slot: SlotId(0), start: 126, end: 130 },
                Chunk { slot: SlotId(2), start: 5, end: 6 },
            ];
            let step = Step::new(&stream, ring, 9, &chunks);
            let values = rows(step.rows.len(), 21);
            rings.append_rows(&stream, &values, &step.rows);
            let mut want = vec![rings.canary(); (4 * ring) as usize];
            let mut token = 0;
            for chunk in chunks {
                let mut slots = swa::Ring::new(ring as usize);
                slots.write(chunk.start as usize..chunk.end as usize);
                for (row, position) in slots.slots().iter().enumerate() {
                    if let Some(position) = position {
                        let value = &values[token + position - chunk.start as usize];
                        want[(chunk.slot.0 * ring) as usize + row] = oracle(format).encode(value);
                    }
                }
                token += (chunk.end - chunk.start) as usize;
            }
            assert_same(&rings.contents(&stream), &want, &format!("{format:?}, ring of {ring}"));
            assert_eq!(rings.fault_count(&stream), 0);
        }
    });
}

pub fn append_counts_rows_out_of_range<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    each_format(|format| {
        let rings = Rings::new(device, format, 1, 128);
        rings.append_rows(&stream, &rows(4, 31), &[128, NONE, i32::MAX, -7]);
        assert_eq!(rings.fault_count(&stream), 2, "negative rows mean none");
        assert!(rings.contents(&stream).iter().all(|row| *row == rings.canary()));
    });
}

/// Ring bytes written by hand: all 256 codes, with every scale that the encoder can produce.
pub fn gather_decodes_every_code_under_every_scale<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    each_format(|format| {
        let mut random = StdRng::seed_from_u64(41);
        let rings = Rings::new(device, format, 1, 128);
        let stored: Vec<EncodedRow> = (0..128_usize)
            .map(|row| {
                let mut data: Vec<u8> =
                    (0..448).map(|channel| (channel + row * 192) as u8).collect();
                data.extend((0..128).map(|_| random.random::<u8>()));
                let scale = match format {
                    MainFormat::Ue8m0 => {
                        let mut scale: Vec<u8> =
                            (0..7).map(|g| 1 + ((row * 7 + g) % 254) as u8).collect();
                        scale.push(0);
                        scale
                    }
                    MainFormat::F32 => random.random_range(1e-30_f32..1e4).to_le_bytes().to_vec(),
                };
                EncodedRow { data, scale }
            })
            .collect();
        let plane = |part: fn(&EncodedRow) -> &Vec<u8>| {
            stored.iter().flat_map(part).copied().collect::<Vec<_>>()
        };
        stream.upload(&plane(|row| &row.data), &rings.data, 0).unwrap();
        stream.upload(&plane(|row| &row.scale), &rings.scale, 0).unwrap();
        // The query's own row comes from the step, the other 127 rows from the ring.
        let chunk = Chunk { slot: SlotId(0), start: 127, end: 128 };
        let step = Step::new(&stream, 128, 0, &[chunk]);
        let kv = upload_bf16(&stream, &[0; 512]);
        let (tile, lengths) = step.gather(&rings, &stream, &kv, (0, 1));
        assert_eq!(lengths, [128]);
        for (row, stored) in stored.iter().enumerate().take(127) {
            let want = oracle(format).decode(stored);
            assert_same(&tile[row * 512..][..512], &want, &format!("{format:?} row {row}"));
        }
        let codes = stored.iter().take(127).flat_map(|row| &row.data[..448]);
        let mut seen = [false; 256];
        codes.for_each(|&code| seen[usize::from(code)] = true);
        assert!(seen.iter().all(|&seen| seen) && E4m3(0x7F).to_f32().is_nan());
    });
}

/// Decode steps of requests at positions around the end of the first window, before and after the step's append.
pub fn gather_equals_the_oracle_in_decode<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    each_format(|format| {
        let positions = [0_u32, 1, 3, 126, 127, 128, 129, 200];
        let rings = Rings::new(device, format, positions.len() as u32, 128);
        let history: Vec<Vec<Vec<u16>>> =
            positions.iter().map(|&p| rows(p as usize + 1, 50 + u64::from(p))).collect();
        for (slot, past) in history.iter().enumerate() {
            let chunk = Chunk { slot: SlotId(slot as u32), start: 0, end: past.len() as u32 - 1 };
            if chunk.end > 0 {
                let step = Step::new(&stream, 128, 0, &[chunk]);
                rings.append_rows(&stream, &past[..past.len() - 1], &step.rows[..past.len() - 1]);
            }
        }
        let chunks: Vec<Chunk> = positions
            .iter()
            .enumerate()
            .map(|(slot, &p)| Chunk { slot: SlotId(slot as u32), start: p, end: p + 1 })
            .collect();
        let step = Step::new(&stream, 128, 3, &chunks);
        let mut own: Vec<Vec<u16>> =
            history.iter().map(|past| past[past.len() - 1].clone()).collect();
        own.extend(rows(3, 99));
        let kv = upload_bf16(&stream, &own.concat());
        for appended in [false, true] {
            if appended {
                rings.append_rows(&stream, &own, &step.rows[..own.len()]);
            }
            let (tile, lengths) = step.gather(&rings, &stream, &kv, (0, positions.len() as u32));
            for (query, past) in history.iter().enumerate() {
                let (want, length) = swa::gather(oracle(format), past, past.len() - 1);
                assert_eq!(lengths[query], length as i32);
                let got = &tile[query * want.len()..][..want.len()];
                assert_same(got, &want, &format!("{format:?} query {query}, appended {appended}"));
            }
        }
    });
}

/// A chunk longer than the window, after a prefix of 77 tokens, gathered in four parts before the append. The parts
/// have the first and last queries, and those around the first full window and the first window that lies inside the
/// chunk.
pub fn gather_equals_the_oracle_in_prefill<B: Backend>(device: &Device<B>) {
    check_prefill(device, &[(0, 8), (46, 10), (122, 12), (215, 8)]);
}

/// As [`gather_equals_the_oracle_in_prefill`] for every query; the emulator takes 20 s of CPU time.
pub fn gather_equals_the_oracle_for_every_query<B: Backend>(device: &Device<B>) {
    check_prefill(device, &[(0, 100), (100, 123)]);
}

/// Gathers for queries of a chunk of 223 tokens, in parts of (first query, number of queries).
fn check_prefill<B: Backend>(device: &Device<B>, parts: &[(u32, u32)]) {
    let stream = device.stream().unwrap();
    each_format(|format| {
        let rings = Rings::new(device, format, 2, 128);
        let history = rows(300, 61);
        let (prefix, chunk) = history.split_at(77);
        let first = Step::new(&stream, 128, 0, &[Chunk { slot: SlotId(1), start: 0, end: 77 }]);
        rings.append_rows(&stream, prefix, &first.rows[..77]);
        let chunks = [Chunk { slot: SlotId(1), start: 77, end: 300 }];
        let step = Step::new(&stream, 128, 0, &chunks);
        let kv = upload_bf16(&stream, &chunk.concat());
        for &(first, count) in parts {
            let (tile, lengths) = step.gather(&rings, &stream, &kv, (first, count));
            for query in 0..count as usize {
                let position = 77 + first as usize + query;
                let (want, length) = swa::gather(oracle(format), &history, position);
                assert_eq!(lengths[query], length as i32, "position {position}");
                let got = &tile[query * want.len()..][..want.len()];
                assert_same(got, &want, &format!("{format:?} position {position}"));
            }
        }
    });
}

pub fn gather_leaves_padding_alone<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    each_format(|format| {
        let rings = Rings::new(device, format, 1, 128);
        let step = Step::new(&stream, 128, 3, &[Chunk { slot: SlotId(0), start: 0, end: 1 }]);
        let kv = upload_bf16(&stream, &rows(4, 71).concat());
        let (tile, lengths) = step.gather(&rings, &stream, &kv, (0, 4));
        assert_eq!(lengths, [1, 0, 0, 0]);
        let canary = CANARY_BF16;
        let padding = &tile[(WINDOW * HEAD_DIM) as usize..];
        assert!(padding.iter().all(|&element| element == canary));
        assert!(tile[512..(WINDOW * HEAD_DIM) as usize].iter().all(|&element| element == 0));
    });
}

pub fn gather_counts_slots_out_of_range<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    each_format(|format| {
        let rings = Rings::new(device, format, 2, 128);
        let chunks = [
            Chunk { slot: SlotId(2), start: 9, end: 10 },
            Chunk { slot: SlotId(1), start: 0, end: 1 },
        ];
        let step = Step::new(&stream, 128, 0, &chunks);
        let kv = upload_bf16(&stream, &rows(2, 81).concat());
        let (_, lengths) = step.gather(&rings, &stream, &kv, (0, 2));
        assert_eq!(lengths, [0, 1], "a refused query has no keys");
        assert_eq!(rings.fault_count(&stream), 1, "counted once, not once a block");
    });
}

/// A query at a negative position has no window: no row is gathered, and it is counted.
pub fn gather_counts_negative_positions<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    each_format(|format| {
        let rings = Rings::new(device, format, 2, 128);
        let chunks = [0, 1].map(|slot| Chunk { slot: SlotId(slot), start: 9, end: 10 });
        let step = Step::new(&stream, 128, 0, &chunks);
        let kv = upload_bf16(&stream, &rows(2, 82).concat());
        for position in [-1, -2, i32::MIN] {
            let before = rings.fault_count(&stream);
            stream.upload(&[position], &step.sections[0], 0).unwrap();
            let (tiles, lengths) = step.gather(&rings, &stream, &kv, (0, 2));
            assert_eq!(lengths, [0, 10], "position {position}");
            let canary = u16::from_ne_bytes([CANARY; 2]);
            let untouched = tiles[..(WINDOW * HEAD_DIM) as usize].iter().all(|&x| x == canary);
            assert!(untouched, "position {position}");
            assert_eq!(rings.fault_count(&stream) - before, 1, "position {position}");
        }
    });
}

/// The same inputs on both devices give rings and tiles that are equal byte for byte.
pub fn both_devices_give_equal_bytes(cuda: &CudaDevice, emulated: &EmuDevice) {
    each_format(|format| {
        for seed in 0..4 {
            let (on_gpu, on_cpu) = (bytes(cuda, format, seed), bytes(emulated, format, seed));
            assert_same(&on_gpu.0, &on_cpu.0, &format!("{format:?} rings, seed {seed}"));
            assert_same(&on_gpu.1, &on_cpu.1, &format!("{format:?} tiles, seed {seed}"));
        }
    });
}

/// The contents of the rings, and the tiles, after a prefill and a gather of random and special rows.
fn bytes<B: Backend>(
    device: &Device<B>,
    format: MainFormat,
    seed: u64,
) -> (Vec<EncodedRow>, Vec<u16>) {
    let stream = device.stream().unwrap();
    let values = [rows(60, seed), special_rows(seed + 100), rows(90, seed + 200)].concat();
    let chunks = [
        Chunk { slot: SlotId(1), start: 0, end: 150 },
        Chunk { slot: SlotId(0), start: 0, end: values.len() as u32 - 150 },
    ];
    let rings = Rings::new(device, format, 2, 130);
    let step = Step::new(&stream, 130, 0, &chunks);
    let kv = upload_bf16(&stream, &values.concat());
    let (tile, _) = step.gather(&rings, &stream, &kv, (0, step.tokens));
    rings.append_rows(&stream, &values, &step.rows[..values.len()]);
    (rings.contents(&stream), tile)
}
