//! Products with an NVFP4 weight, beside the same products with a BF16 weight, and products with narrow weights.
//!
//! Every node of a graph is a layer of its own, which shares no weight, activations or product with other nodes.

use anyhow::Result;
use dsv4_kv::device::{Backend, Buffer, Device, Memory, Stream};
use dsv4_kv::kv_layout::linear::MAX_NARROW_COLUMNS;
use dsv4_kv_linear::Nvfp4Linear;
use dsv4_kv_linear::ops::{self, Bf16Weight};
use half::bf16;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::inputs::{part, random_nvfp4, repeated};
use super::timing::{Measurement, measurement, nodes_for};
use super::work::Work;

/// Columns and values per row of a weight in V4-Flash and V4-Pro, with the weight formats to measure: the query
/// projection of the indexer, and its projection of the head weights.
const SHAPES: [(u32, u32, &[Kernel]); 4] = [
    (8192, 1024, &Kernel::ALL),
    (8192, 1536, &Kernel::ALL),
    (64, 4096, &[Kernel::Bf16]),
    (64, 7168, &[Kernel::Bf16]),
];
/// Tokens of a batch. The last two are chunks of a prompt, which are measured with BF16 weights only.
const TOKENS: [u32; 8] = [1, 4, 8, 16, 32, 64, 512, 2048];
/// Number of random values; all BF16 inputs are slices of repetitions of them.
const PATTERN: usize = 1 << 22;

/// The format of the weight.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Kernel {
    Nvfp4,
    Bf16,
}

impl Kernel {
    pub const ALL: [Self; 2] = [Self::Nvfp4, Self::Bf16];
}

pub(super) fn works<B: Backend>(device: &Device<B>) -> Vec<Work<'_, Measurement>> {
    let mut works = Vec::new();
    for (columns, inner, kernels) in SHAPES {
        for &kernel in kernels {
            let counts = if kernel == Kernel::Bf16 { TOKENS.len() } else { TOKENS.len() - 2 };
            let case = move |tokens| Case { kernel, columns, inner, tokens };
            // All cases of a weight are measured together, so that the weight is made once.
            works.push(Work::rows(format!("{} {columns} x {inner}", case(1).name()), move || {
                let mut weights = Vec::new();
                let tokens = TOKENS[..counts].iter();
                tokens.map(|&tokens| case(tokens).measure(device, &mut weights)).collect()
            }));
        }
    }
    works
}

/// One measurement.
#[derive(Clone, Copy)]
pub(super) struct Case {
    pub kernel: Kernel,
    pub columns: u32,
    pub inner: u32,
    pub tokens: u32,
}

impl Case {
    fn name(self) -> &'static str {
        match self.kernel {
            Kernel::Nvfp4 => "nvfp4_linear",
            Kernel::Bf16 if self.columns <= MAX_NARROW_COLUMNS => "bf16_narrow",
            Kernel::Bf16 => "bf16_linear",
        }
    }

    fn weight_bytes(self) -> u64 {
        let values = u64::from(self.columns) * u64::from(self.inner);
        if self.kernel == Kernel::Nvfp4 { values / 2 + values / 16 } else { 2 * values }
    }

    /// Bytes that one launch must move: weight, activations, product.
    fn bytes(self) -> u64 {
        let [columns, inner, tokens] = [self.columns, self.inner, self.tokens].map(u64::from);
        self.weight_bytes() + 2 * tokens * inner + 4 * tokens * columns
    }

    /// Measures the case with one NVFP4 weight per node. It uses `weights`, and adds those that are missing: making
    /// them takes the host longer than the measurement.
    pub fn measure<B: Backend>(
        self,
        device: &Device<B>,
        weights: &mut Vec<Nvfp4Linear<B>>,
    ) -> Result<Measurement> {
        let (bytes, nodes) = (self.bytes(), nodes_for(self.bytes()));
        let inputs = Inputs::new(device, self, nodes, weights)?;
        let record = || (0..nodes).try_for_each(|node| inputs.launch(self, node));
        let graph = inputs.stream.capture(inputs.memory(), record)?;
        let Self { columns, inner, tokens, .. } = self;
        let size = format!("{tokens} tokens, {columns} x {inner}");
        measurement(device, (self.name().to_owned(), size), (bytes, nodes), &graph)
    }
}

/// The inputs of the nodes of a graph.
struct Inputs<'a, B: Backend> {
    stream: Stream<B>,
    nodes: u64,
    x: Buffer<B, bf16>,
    nvfp4: &'a [Nvfp4Linear<B>],
    bf16: Buffer<B, bf16>,
    y: Buffer<B, f32>,
}

impl<'a, B: Backend> Inputs<'a, B> {
    fn new(
        device: &Device<B>,
        case: Case,
        nodes: u64,
        nvfp4: &'a mut Vec<Nvfp4Linear<B>>,
    ) -> Result<Self> {
        let Case { kernel, columns, inner, tokens } = case;
        let stream = device.stream()?;
        let mut random = SmallRng::seed_from_u64(1);
        let values: Vec<bf16> =
            (0..PATTERN).map(|_| bf16::from_f32(random.random_range(-1.0..1.0))).collect();
        let of = |rows: u32| nodes * u64::from(rows) * u64::from(inner);
        // A case does not read the inputs that it does not need, but every buffer must exist.
        let mut weights = nodes;
        if kernel == Kernel::Bf16 {
            weights = of(columns);
        } else if (nvfp4.len() as u64) < nodes {
            let matrix = random_nvfp4(columns, inner)?;
            let missing = nvfp4.len() as u64..nodes;
            let each = missing.map(|_| Nvfp4Linear::new(&stream, &matrix));
            nvfp4.extend(each.collect::<Result<Vec<_>, _>>()?);
        }
        Ok(Self {
            nodes,
            x: repeated(&stream, "activations", of(tokens), &values)?,
            nvfp4,
            bf16: repeated(&stream, "weights", weights, &values)?,
            y: device.allocate("products", nodes * u64::from(tokens) * u64::from(columns))?,
            stream,
        })
    }

    fn memory(&self) -> Vec<Memory<B>> {
        let weights = self.nvfp4.iter().flat_map(Nvfp4Linear::memory);
        weights.chain([self.x.memory(), self.bf16.memory(), self.y.memory()]).collect()
    }

    fn launch(&self, case: Case, node: u64) -> Result<()> {
        let Case { kernel, columns, inner, tokens } = case;
        let (stream, x, y) =
            (&self.stream, &part(&self.x, node, self.nodes), &part(&self.y, node, self.nodes));
        match kernel {
            Kernel::Nvfp4 => {
                self.nvfp4[node as usize].multiply(stream, x, tokens, y)?;
            }
            Kernel::Bf16 => {
                let values = &part(&self.bf16, node, self.nodes);
                let weight = Bf16Weight { values, columns, inner };
                ops::multiply_bf16(stream, weight, x, tokens, y)?;
            }
        }
        Ok(())
    }
}
