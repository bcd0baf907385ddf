//! HCA decode prefetches according to StepMeta before the previous launch has ended. Only the final StepMeta, as that
//! launch leaves it, may decide the results.

use dsv4_kv::device::{Backend, Buffer, Device, Stream, bf16};
use dsv4_kv::ops::{
    self, BlockTable, DecodeCompressor, DecodeStep, Entries, PoolingWeights, StateRing,
    StepProjections, StepTokens, SwaRing,
};
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::inputs::{assert_same, download, rows, upload, upload_bf16};

/// Rows per state ring of a request.
const STATE_RING: u32 = 5;
/// Rows per window ring of a request.
const WINDOW_RING: u32 = 128;
/// Blocks per request.
const MAX_BLOCKS: u32 = 4;

/// The StepMeta of all tokens: positions, slots, and how many tokens of its request precede each in the step.
type Meta = [Vec<i32>; 3];

/// A step with one token per request, most of which close a window. The slots of the requests are shuffled.
fn step(tokens: usize, random: &mut StdRng) -> Meta {
    let position = |_| match random.random_range(0..4) {
        0 => random.random_range(0..500),
        _ => 128 * random.random_range(1..4) - 1,
    };
    let positions = (0..tokens).map(position).collect();
    let mut slots: Vec<i32> = (0..tokens as i32).collect();
    (1..tokens).for_each(|i| slots.swap(i, random.random_range(0..=i)));
    [positions, slots, vec![0; tokens]]
}

/// The same step as a launch may see it too early: some words are those of another step, padding, or arbitrary.
fn before(meta: &Meta, random: &mut StdRng) -> Meta {
    let [other, tokens] = [step(meta[0].len(), random), meta.clone()];
    let mut word = |(is, was): (&i32, &i32)| match random.random_range(0..6) {
        0 => -1,
        1 => random.random(),
        2 => 127,
        3 => *was,
        _ => *is,
    };
    let mut part = |i: usize| tokens[i].iter().zip(&other[i]).map(&mut word).collect();
    [part(0), part(1), part(2)]
}

/// The inputs of a step.
struct Layer<B: Backend> {
    stream: Stream<B>,
    tokens: usize,
    window_kv: Buffer<B, bf16>,
    values: Buffer<B, f32>,
    weights: Buffer<B, f32>,
    table: Buffer<B, i32>,
}

impl<B: Backend> Layer<B> {
    fn new(device: &Device<B>, tokens: usize, random: &mut StdRng) -> Self {
        let stream = device.stream().unwrap();
        let mut values = |count: usize| -> Vec<f32> {
            (0..count).map(|_| random.random_range(-2.0..2.0)).collect()
        };
        let all = (tokens * STATE_RING as usize * 1536).max((tokens + 1) * 512);
        let blocks: Vec<i32> = (0..(tokens as u32 * MAX_BLOCKS) as i32).collect();
        Self {
            tokens,
            window_kv: upload_bf16(&stream, &rows(tokens, 1).concat()),
            values: upload(&stream, &values(all)),
            weights: upload(&stream, &values(128 * 512 + 512 + 32)),
            table: upload(&stream, &blocks),
            stream,
        }
    }

    /// Decodes a step whose StepMeta is `early` until the previous launch makes it `late`. Returns state, window and
    /// entries.
    fn run(&self, early: &Meta, late: &Meta) -> Vec<Vec<u8>> {
        let Self { stream, tokens, values, weights, .. } = self;
        let count = *tokens as u64;
        let meta = upload(stream, &early.concat());
        let (index, late_words) = (
            upload(stream, &(0..3 * *tokens as i32).collect::<Vec<i32>>()),
            upload(stream, &late.concat()),
        );
        let ring_rows = late[0]
            .iter()
            .zip(&late[1])
            .map(|(position, slot)| slot * WINDOW_RING as i32 + position % WINDOW_RING as i32);
        let ring_row = upload(stream, &ring_rows.collect::<Vec<i32>>());
        let bytes = |rows: u64, bytes: u64| {
            let plane = stream.device().allocate::<u8>("plane", rows * bytes).unwrap();
            stream.fill(&plane, 0).unwrap();
            plane
        };
        let scale_bytes = MainFormat::Ue8m0.scale_bytes();
        let window_rows = count * u64::from(WINDOW_RING);
        let blocks = count * u64::from(MAX_BLOCKS);
        let [ring_data, entry_data] = [window_rows, blocks].map(|rows| bytes(rows, 576));
        let [ring_scale, entry_scale] = [window_rows, blocks].map(|rows| bytes(rows, scale_bytes));
        let state =
            stream.device().allocate::<f32>("state", count * u64::from(STATE_RING) * 1536).unwrap();
        stream.copy(&values.slice(0, state.len()).unwrap(), &state).unwrap();
        let faults = upload(stream, &[0_u32]);
        let parts = [0, 1, 2].map(|i| meta.slice(i * count, count).unwrap());
        let step_tokens = StepTokens {
            position: &parts[0],
            slot: &parts[1],
            index: &parts[2],
            remaining: &parts[2],
            count: *tokens as u32,
        };
        let (kv, gate) =
            (values.slice(0, count * 512).unwrap(), values.slice(512, count * 512).unwrap());
        let (ape, norm) = (weights.slice(0, 65536).unwrap(), weights.slice(65536, 512).unwrap());
        let frequencies = weights.slice(65536 + 512, 32).unwrap();
        let step = DecodeStep {
            tokens: &step_tokens,
            ring_row: &ring_row,
            window_kv: &self.window_kv,
            window: SwaRing {
                data: &ring_data,
                scale: &ring_scale,
                format: MainFormat::Ue8m0,
                ring: WINDOW_RING,
                slots: *tokens as u32,
            },
            table: BlockTable { table: &self.table, slots: *tokens as u32, max_blocks: MAX_BLOCKS },
            entries: Entries {
                data: &entry_data,
                scale: &entry_scale,
                format: MainFormat::Ue8m0,
                entries_per_block: 1,
                num_blocks: blocks as u32,
            },
            faults: &faults,
        };
        let main = DecodeCompressor {
            projections: StepProjections { kv: &kv, gate: &gate },
            weights: PoolingWeights { ape: &ape, norm: &norm, frequencies: &frequencies },
            state: StateRing { rows: &state, ring: STATE_RING, slots: *tokens as u32 },
        };
        // The previous launch writes scattered words by a kernel. A copy would end before the next launch begins.
        let words = BlockTable { table: &meta, slots: 3, max_blocks: *tokens as u32 };
        let record = || {
            ops::update_table(
                stream,
                &ops::TableUpdate {
                    index: &index,
                    block: &late_words,
                    table: &words,
                    count: 3 * *tokens as u32,
                },
            )?;
            // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them again.
            unsafe { ops::decode_hca(stream, &ops::HcaDecode { step: &step, main: &main }) }
        };
        let mut retained = vec![meta.memory(), index.memory(), late_words.memory()];
        retained.extend([ring_row.memory(), self.window_kv.memory(), self.table.memory()]);
        retained.extend([values.memory(), weights.memory()]);
        retained.extend([state.memory(), faults.memory()]);
        retained.extend([&ring_data, &ring_scale, &entry_data, &entry_scale].map(Buffer::memory));
        let graph = stream.capture(retained, record).unwrap();
        stream.replay(&graph).unwrap();
        assert_eq!(download(stream, &faults), [0]);
        let state = download(stream, &state.cast::<u8>().unwrap());
        let planes = [&ring_data, &ring_scale, &entry_data, &entry_scale];
        let planes = planes.map(|plane| download(stream, plane));
        [state].into_iter().chain(planes).collect()
    }
}

/// Steps with few and with many blocks.
pub fn the_step_is_what_the_launch_before_leaves<B: Backend>(device: &Device<B>) {
    let mut random = StdRng::seed_from_u64(17);
    for tokens in [3, 24, 75] {
        let layer = Layer::new(device, tokens, &mut random);
        for _ in 0..4 {
            let late = step(tokens, &mut random);
            let early = before(&late, &mut random);
            let (got, want) = (layer.run(&early, &late), layer.run(&late, &late));
            for (what, (got, want)) in ["state", "window", "window scales", "entries", "scales"]
                .into_iter()
                .zip(got.iter().zip(&want))
            {
                assert_same(got, want, &format!("{tokens} tokens, {what}"));
            }
            assert!(want[3].iter().any(|&byte| byte != 0), "no entry");
        }
    }
}
