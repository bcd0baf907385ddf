//! A compressor on a device, fed with a token history by single operations, without `KvCacheManager` and its layer
//! handles.

use dsv4_kv::SlotId;
use dsv4_kv::device::{Backend, Buffer, Device, Stream, bf16};
use dsv4_kv::ops::{self, PoolingWeights, StateRing, StepProjections, StepTokens, WorkList};
use dsv4_kv::step_meta::{self, Chunk, Section, StepLayout};
use dsv4_kv_oracle::number::{bf16_nearest, bf16_value};
use dsv4_kv_oracle::rope::Table;
use kv_layout::geometry::{
    CompressorKind, CsaCompressor, csa_own_rows, csa_state_rows, hca_state_rows,
};

use crate::hca;
use crate::history::{History, shape};
use crate::inputs::{download, download_bits, upload};

/// The arrays of a step on the device, with its work lists.
pub struct Step<B: Backend> {
    sections: [Buffer<B, i32>; 4],
    /// The work lists: tokens that close a CSA window, and tokens that end an HCA run.
    pub plans: [Buffer<B, i32>; 2],
    /// Number of tokens, padding included.
    pub count: u32,
}

impl<B: Backend> Step<B> {
    /// The step of `chunks`, followed by `padding` tokens of no request.
    ///
    /// # Panics
    /// If the device refuses a call.
    pub fn new(stream: &Stream<B>, padding: u32, chunks: &[Chunk]) -> Self {
        let tokens: u32 = chunks.iter().map(|chunk| chunk.end - chunk.start).sum();
        let layout = StepLayout::new(tokens + padding, chunks.len() as u32);
        let mut array = vec![0; layout.elements()];
        step_meta::fill(&mut array, layout, 128, chunks.iter().copied());
        let section = |section| &array[layout.range(section)];
        let sections = [Section::Position, Section::Slot, Section::Index, Section::Remaining]
            .map(|name| upload(stream, section(name)));
        let count = tokens + padding;
        let requests = chunks.len() as u32;
        let capacities =
            [ops::window_capacity(count, requests, 4), ops::run_capacity(count, requests)];
        let plans = capacities.map(|capacity| upload(stream, &vec![77; capacity as usize]));
        let step = Self { sections, plans, count };
        let [csa, hca] = [0, 1].map(|list| step.plan(list));
        ops::list_closing_tokens(
            stream,
            &ops::WorkLists { tokens: &step.tokens(), csa: &csa, hca: &hca },
        )
        .unwrap();
        step
    }

    /// The arrays as kernels take them.
    #[must_use]
    pub fn tokens(&self) -> StepTokens<'_, B> {
        let [position, slot, index, remaining] = &self.sections;
        StepTokens { position, slot, index, remaining, count: self.count }
    }

    /// The work list of CSA (`list` = 0) or HCA (`list` = 1).
    #[must_use]
    pub fn plan(&self, list: usize) -> WorkList<'_, B> {
        let records = &self.plans[list];
        WorkList { records, capacity: records.len() as u32 }
    }
}

/// A compressor on a device: weights, state ring, scratch.
pub struct OnDevice<B: Backend> {
    /// The stream it works in.
    pub stream: Stream<B>,
    which: CompressorKind,
    ape: Buffer<B, f32>,
    norm: Buffer<B, f32>,
    frequencies: Buffer<B, f32>,
    state: Buffer<B, f32>,
    ring: u32,
    slots: u32,
}

impl<B: Backend> OnDevice<B> {
    /// The compressor with the weights of `history`; its state ring is filled with NaN.
    ///
    /// # Panics
    /// If the device refuses a call.
    pub fn new(device: &Device<B>, history: &History, slots: u32, ring: u32) -> Self {
        let stream = device.stream().unwrap();
        let frequencies = upload(&stream, &Table::Compress.frequencies());
        let rows = match history.stream {
            CompressorKind::Hca => ring,
            _ => csa_state_rows(ring),
        };
        let elements = u64::from(slots * rows) * u64::from(history.stream.row_floats());
        let state = device.allocate("state", elements).unwrap();
        // NaN marks every row that no kernel has written, so that a read of a stale or absent row shows in the result.
        stream.fill(&state, 0xFF).unwrap();
        Self {
            ape: upload(&stream, &history.ape),
            norm: upload(&stream, &history.norm),
            which: history.stream,
            stream,
            frequencies,
            state,
            ring,
            slots,
        }
    }

    /// Feeds the step's tokens to the compressor. Returns the entries of the windows that they close, in the order of
    /// the tokens.
    pub fn run(&self, step: &Step<B>, kv: &[f32], gate: &[f32]) -> Vec<Vec<u16>> {
        let (kv, gate) = (upload(&self.stream, kv), upload(&self.stream, gate));
        let projections = StepProjections { kv: &kv, gate: &gate };
        match self.which {
            CompressorKind::CsaMain => self.run_csa(CsaCompressor::Main, step, &projections),
            CompressorKind::CsaIndex => self.run_csa(CsaCompressor::Index, step, &projections),
            CompressorKind::Hca => self.run_hca(step, &projections),
        }
    }

    /// All state rows of all slots.
    #[must_use]
    pub fn state_rows(&self) -> Vec<Vec<f32>> {
        let rows = download(&self.stream, &self.state);
        rows.chunks_exact(self.which.row_floats() as usize).map(<[f32]>::to_vec).collect()
    }

    fn state(&self) -> StateRing<'_, B> {
        StateRing { rows: &self.state, ring: self.ring, slots: self.slots }
    }

    fn run_csa(
        &self,
        csa: CsaCompressor,
        step: &Step<B>,
        projections: &StepProjections<'_, B>,
    ) -> Vec<Vec<u16>> {
        let Self { stream, ape, norm, frequencies, .. } = self;
        let (plan, channels) = (step.plan(0), shape(self.which).channels);
        let len = u64::from(plan.capacity) * channels as u64;
        let entries = stream.device().allocate::<bf16>("entries", len).unwrap();
        let (tokens, state) = (step.tokens(), self.state());
        let windows = ops::Compression {
            tokens: &tokens,
            projections,
            weights: &PoolingWeights { ape, norm, frequencies },
            state: &state,
            closing: &plan,
            entries: &entries,
        };
        // SAFETY: the arrays were uploaded before, in this stream, and nothing writes them meanwhile.
        unsafe { ops::compress(stream, csa, &windows) }.unwrap();
        let update = ops::StateUpdate { tokens: &tokens, projections, ape, state: &state };
        ops::write_state(stream, csa, &update).unwrap();
        let listed = download(stream, plan.records);
        let entries = download_bits(stream, &entries);
        let live = listed.iter().take_while(|&&token| token >= 0).count();
        entries.chunks_exact(channels).take(live).map(<[u16]>::to_vec).collect()
    }

    fn run_hca(&self, step: &Step<B>, projections: &StepProjections<'_, B>) -> Vec<Vec<u16>> {
        let Self { stream, ape, norm, .. } = self;
        let (runs, tokens) = (step.plan(1), step.tokens());
        let len = u64::from(runs.capacity) * 512;
        let pooled = stream.device().allocate::<f32>("pooled", len).unwrap();
        let windows = ops::HcaCompression {
            tokens: &tokens,
            projections,
            ape,
            state: &self.state(),
            runs: &runs,
            pooled: &pooled,
        };
        ops::compress_hca(stream, &windows).unwrap();
        let position = download(stream, tokens.position);
        let norm = download(stream, norm);
        let pooled = download(stream, &pooled);
        let listed = download(stream, runs.records).into_iter().take_while(|&token| token >= 0);
        let closing = listed.zip(pooled.chunks_exact(512)).filter_map(|(token, pooled)| {
            let next = position[token as usize] as usize + 1;
            next.is_multiple_of(128).then(|| hca::finish(pooled, &norm, next / 128 - 1))
        });
        closing.collect()
    }

    /// Feeds the whole history of one request in chunks of sizes `cuts`. Returns the entries in order.
    pub fn feed(&self, history: &History, cuts: impl IntoIterator<Item = usize>) -> Vec<Vec<u16>> {
        let mut entries = Vec::new();
        let mut start = 0;
        for cut in cuts {
            let end = (start + cut).min(history.tokens());
            let chunk = Chunk { slot: SlotId(0), start: start as u32, end: end as u32 };
            let step = Step::new(&self.stream, 0, &[chunk]);
            let (kv, gate) = history.projections(start..end);
            entries.extend(self.run(&step, &kv, &gate));
            start = end;
            if start == history.tokens() {
                break;
            }
        }
        assert_eq!(start, history.tokens());
        entries
    }
}

/// Number of rows of a state ring (`StateRing::ring`) for steps of up to `step_tokens` tokens that may be rejected.
#[must_use]
pub fn ring(stream: CompressorKind, step_tokens: u32) -> u32 {
    match stream {
        CompressorKind::CsaMain | CompressorKind::CsaIndex => csa_own_rows(step_tokens),
        CompressorKind::Hca => hca_state_rows(step_tokens),
    }
}

/// Asserts that `got` is the BF16 rounding of some vector within `tolerance * max|want|` of `want`.
pub fn assert_rounds(got: &[u16], want: &[f32], tolerance: f32, what: &str) {
    let slack = tolerance * want.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
    for (channel, (&got, &want)) in got.iter().zip(want).enumerate() {
        let value = |bits| bf16_value(bits);
        let (least, most) = (bf16_nearest(want - slack), bf16_nearest(want + slack));
        let inside = (value(least)..=value(most)).contains(&value(got));
        assert!(inside, "{what}, channel {channel}: {} is not {want}", value(got));
    }
}
