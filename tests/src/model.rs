//! A compressor on a device, fed with a token history by the single operations: no manager, no
//! handles.

use dsv4_kv::SlotId;
use dsv4_kv::device::{Backend, Buffer, Device, Stream, bf16};
use dsv4_kv::ops::{
    self, CompressorWeights, HcaScratch, StateRing, StepProjections, StepTokens, WorkList,
};
use dsv4_kv::step_meta::{self, Chunk, Section, StepLayout};
use dsv4_kv_oracle::compressor::{Compressor, Shape};
use dsv4_kv_oracle::number::{bf16_nearest, bf16_value};
use dsv4_kv_oracle::rope::Table;
use kv_layout::geometry::{CompressorKind, CsaCompressor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::golden;
use crate::inputs::{download, download_bits, upload};

/// Its shape in the oracle.
pub fn shape(stream: CompressorKind) -> Shape {
    match stream {
        CompressorKind::CsaMain => Shape::CSA,
        CompressorKind::CsaIndex => Shape::INDEX,
        CompressorKind::Hca => Shape::HCA,
    }
}

/// What a compressor reads: a token history from position 0, and weights.
#[derive(Clone)]
pub struct History {
    /// Which compressor reads it.
    pub stream: CompressorKind,
    /// `[tokens, columns]`: keys.
    pub kv: Vec<f32>,
    /// `[tokens, columns]`: gates.
    pub gate: Vec<f32>,
    /// `[ratio, columns]`: the position bias.
    pub ape: Vec<f32>,
    /// `[channels]`: weights of the norm.
    pub norm: Vec<f32>,
}

impl History {
    /// The history of the golden vectors.
    ///
    /// # Panics
    /// If they cannot be read.
    #[must_use]
    pub fn golden(stream: CompressorKind) -> Self {
        let name = match stream {
            CompressorKind::CsaMain => "csa",
            CompressorKind::CsaIndex => "idx",
            CompressorKind::Hca => "hca",
        };
        let load = |what: &str| golden::load::<f32>(&format!("{name}_{what}")).unwrap().data;
        let (kv, gate) = (load("kv"), load("gate"));
        Self { stream, kv, gate, ape: load("ape"), norm: load("norm_w") }
    }

    /// Random projections and weights.
    pub fn random(stream: CompressorKind, tokens: usize, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let Shape { ratio, channels, .. } = shape(stream);
        let columns = shape(stream).columns();
        let mut values = |count, size: f32| -> Vec<f32> {
            (0..count).map(|_| random.random_range(-size..size)).collect()
        };
        Self {
            stream,
            kv: values(tokens * columns, 4.0),
            gate: values(tokens * columns, 6.0),
            ape: values(ratio * columns, 1.0),
            norm: values(channels, 2.0),
        }
    }

    /// Tokens of the history.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.kv.len() / shape(self.stream).columns()
    }

    /// The same for the oracle.
    #[must_use]
    pub fn oracle(&self) -> Compressor<'_> {
        let Self { stream, kv, gate, ape, norm } = self;
        Compressor { shape: shape(*stream), kv, gate, ape, norm_w: norm }
    }

    /// Projections of the tokens `range`.
    pub fn projections(&self, range: std::ops::Range<usize>) -> (Vec<f32>, Vec<f32>) {
        let columns = shape(self.stream).columns();
        let cut = range.start * columns..range.end * columns;
        (self.kv[cut.clone()].to_vec(), self.gate[cut].to_vec())
    }
}

/// A step on the device with its work lists.
pub struct Step<B: Backend> {
    sections: [Buffer<B, i32>; 4],
    /// The work lists of ratio 4 and 128.
    pub plans: [Buffer<B, i32>; 2],
    /// Tokens, padding included.
    pub count: u32,
}

impl<B: Backend> Step<B> {
    /// The step of `chunks`, then `padding` rows of no request.
    ///
    /// # Panics
    /// If the device refuses.
    pub fn new(stream: &Stream<B>, padding: u32, chunks: &[Chunk]) -> Self {
        let tokens: u32 = chunks.iter().map(|chunk| chunk.end - chunk.start).sum();
        let layout = StepLayout::new(tokens + padding, chunks.len() as u32);
        let mut array = vec![0; layout.elements()];
        step_meta::fill(&mut array, layout, 128, chunks.iter().copied());
        let section = |section| &array[layout.range(section)];
        let sections = [Section::Position, Section::Slot, Section::Index, Section::Remaining]
            .map(|name| upload(stream, section(name)));
        let count = tokens + padding;
        let plans = [4, 128].map(|ratio| {
            let capacity = ops::plan_capacity(count, chunks.len() as u32, ratio);
            upload(stream, &vec![77; capacity as usize])
        });
        let step = Self { sections, plans, count };
        let [csa, hca] = [0, 1].map(|list| step.plan(list));
        ops::list_closing_tokens(
            stream,
            &ops::WorkLists { tokens: &step.tokens(), csa: &csa, hca: &hca },
        )
        .unwrap();
        step
    }

    /// What kernels know of its tokens.
    #[must_use]
    pub fn tokens(&self) -> StepTokens<B> {
        let [position, slot, index, remaining] = self.sections.clone().map(Into::into);
        StepTokens { position, slot, index, remaining, count: self.count }
    }

    /// The work list of ratio 4 (0) or 128 (1).
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
    /// The compressor with the weights of `history`, and a state ring of NaN.
    ///
    /// # Panics
    /// If the device refuses.
    pub fn new(device: &Device<B>, history: &History, slots: u32, ring: u32) -> Self {
        let stream = device.stream().unwrap();
        let columns = 2 * shape(history.stream).columns() as u64;
        let frequencies = upload(&stream, &Table::Compress.frequencies());
        let state = device.allocate("state", u64::from(slots * ring) * columns).unwrap();
        // NaN wherever nobody wrote: a stale or absent row cannot go unnoticed.
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

    /// Compresses the windows that the step closes, then writes its tokens to the ring; the entries
    /// in the order of the work list.
    pub fn run(&self, step: &Step<B>, kv: &[f32], gate: &[f32]) -> Vec<Vec<u16>> {
        let Self { stream, ring, slots, .. } = self;
        let (kv, gate) = (upload(stream, kv), upload(stream, gate));
        let projections = StepProjections { kv: &kv, gate: &gate };
        let weights =
            CompressorWeights { ape: &self.ape, norm: &self.norm, frequencies: &self.frequencies };
        let state = StateRing { rows: self.state.clone(), ring: *ring, slots: *slots };
        let plan = step.plan(usize::from(self.which == CompressorKind::Hca));
        let channels = shape(self.which).channels;
        let capacity = u64::from(plan.capacity);
        let entries =
            stream.device().allocate::<bf16>("entries", capacity * channels as u64).unwrap();
        let tokens = step.tokens();
        if let Some(csa) = match self.which {
            CompressorKind::CsaMain => Some(CsaCompressor::Main),
            CompressorKind::CsaIndex => Some(CsaCompressor::Index),
            CompressorKind::Hca => None,
        } {
            ops::compress(
                stream,
                csa,
                &ops::Compression {
                    tokens: &tokens,
                    projections: &projections,
                    weights: &weights,
                    state: &state,
                    closing: &plan,
                    entries: &entries,
                },
            )
            .unwrap();
        } else {
            let scratch = HcaScratch::new(stream, capacity).unwrap();
            ops::compress_hca(
                stream,
                &scratch,
                &ops::Compression {
                    tokens: &tokens,
                    projections: &projections,
                    weights: &weights,
                    state: &state,
                    closing: &plan,
                    entries: &entries,
                },
            )
            .unwrap();
            assert!(download(stream, scratch.pooled()).iter().all(|&word| word == u32::MAX));
        }
        let (which, ape) = (self.which, &self.ape);
        ops::write_state(
            stream,
            which,
            &ops::StateUpdate { tokens: &tokens, projections: &projections, ape, state: &state },
        )
        .unwrap();
        let listed = download(stream, plan.records);
        let entries = download_bits(stream, &entries);
        let live = listed.iter().take_while(|&&token| token >= 0).count();
        entries.chunks_exact(channels).take(live).map(<[u16]>::to_vec).collect()
    }

    /// Feeds one request's whole history in chunks of the given sizes; the entries in order.
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

/// Rows of the least ring, without speculation.
pub fn window(stream: CompressorKind) -> u32 {
    if stream == CompressorKind::Hca { 128 } else { 8 }
}

/// `got` is the rounding of some vector within `tolerance * max|want|` of `want`.
pub fn assert_rounds(got: &[u16], want: &[f32], tolerance: f32, what: &str) {
    let slack = tolerance * want.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
    for (channel, (&got, &want)) in got.iter().zip(want).enumerate() {
        let value = |bits| bf16_value(bits);
        let (least, most) = (bf16_nearest(want - slack), bf16_nearest(want + slack));
        let inside = (value(least)..=value(most)).contains(&value(got));
        assert!(inside, "{what}, channel {channel}: {} is not {want}", value(got));
    }
}
