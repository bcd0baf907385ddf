//! What steps need on the device besides the pools: the block table, the work lists, and entries on
//! their way from a compressor to the flush. Allocated once; handles allocate nothing.

use kernels_gpu::table::KERNELS;
use kv_layout::geometry::{CSA_RATIO, HCA_RATIO, HEAD_DIM, INDEX_DIM};

use crate::config::CacheConfig;
use crate::device::{Backend, Buffer, Device, DeviceError, Memory};
use crate::ops::{BlockTable, HcaScratch, Plan, plan_capacity};
use crate::plan::StepLayout;
use crate::{poison, rope};

/// The workspace of one cache.
pub(crate) struct Workspace<B: Backend> {
    /// `[max_requests, max_blocks]`.
    table: Buffer<B, i32>,
    slots: u32,
    max_blocks: u32,
    /// Rows of the step's tokens that close a CSA window, then -1.
    csa_plan: Buffer<B, i32>,
    /// As `csa_plan`, for HCA windows.
    hca_plan: Buffer<B, i32>,
    /// `[capacity, 512]` BF16: entries of the layer at work.
    pub entries: Buffer<B, u16>,
    /// `[capacity, 128]` BF16: indexer keys of the layer at work.
    pub keys: Buffer<B, u16>,
    /// Where the blocks of an HCA window meet.
    pub hca_scratch: HcaScratch<B>,
    /// `[32]`, of compressed layers.
    pub frequencies: Buffer<B, f32>,
    /// One word per kernel of the table: what it refused.
    pub faults: Buffer<B, u32>,
    /// What the search for poison found, in a cache that is poisoned.
    pub poison: Option<Buffer<B, u32>>,
}

/// Elements of each buffer, in the order of the fields.
struct Sizes {
    table: u64,
    csa: u64,
    hca: u64,
}

impl Sizes {
    fn of(config: &CacheConfig) -> Self {
        let (tokens, requests) = (config.max_step_tokens, config.max_requests);
        Self {
            table: u64::from(requests) * u64::from(config.max_blocks_per_request()),
            csa: plan_capacity(tokens, requests, CSA_RATIO).into(),
            hca: plan_capacity(tokens, requests, HCA_RATIO).into(),
        }
    }
}

/// Buffers of the workspace, and the one of StepMeta.
pub(crate) fn working_buffers(config: &CacheConfig) -> u32 {
    9 + u32::from(config.poison)
}

/// Bytes of device memory that a cache takes besides its pools.
pub(crate) fn working_bytes(config: &CacheConfig) -> u64 {
    let step = StepLayout::new(config.max_step_tokens, config.max_requests);
    let Sizes { table, csa, hca } = Sizes::of(config);
    let per_csa = 4 + 2 * u64::from(HEAD_DIM) + 2 * u64::from(INDEX_DIM);
    let per_hca = 4 + 4 * u64::from(HEAD_DIM);
    let poison = if config.poison { poison::WORDS } else { 0 };
    let words = (step.elements() + rope::PAIRS + KERNELS.len()) as u64 + poison;
    4 * table + per_csa * csa + per_hca * hca + 4 * words
}

impl<B: Backend> Workspace<B> {
    pub fn new(device: &Device<B>, config: &CacheConfig) -> Result<Self, DeviceError> {
        let Sizes { table, csa, hca } = Sizes::of(config);
        let stream = device.stream()?;
        let workspace = Self {
            table: device.allocate("block table", table)?,
            slots: config.max_requests,
            max_blocks: config.max_blocks_per_request(),
            csa_plan: device.allocate("CSA work list", csa)?,
            hca_plan: device.allocate("HCA work list", hca)?,
            entries: device.allocate("entries", csa * u64::from(HEAD_DIM))?,
            keys: device.allocate("indexer keys", csa * u64::from(INDEX_DIM))?,
            hca_scratch: HcaScratch::new(&stream, hca)?,
            frequencies: device.allocate("rotary frequencies", rope::PAIRS as u64)?,
            faults: device.allocate("fault words", KERNELS.len() as u64)?,
            poison: config
                .poison
                .then(|| device.allocate("poison records", poison::WORDS))
                .transpose()?,
        };
        stream.fill(&workspace.table, 0xFF)?;
        stream.upload(&rope::compress_frequencies(), &workspace.frequencies, 0)?;
        Ok(workspace)
    }

    /// The block table.
    pub fn table(&self) -> BlockTable<'_, B> {
        BlockTable { table: &self.table, slots: self.slots, max_blocks: self.max_blocks }
    }

    /// The work list of CSA layers, for a step of `tokens` tokens.
    pub fn csa_plan(&self, tokens: u32) -> Plan<'_, B> {
        Plan { records: &self.csa_plan, capacity: plan_capacity(tokens, self.slots, CSA_RATIO) }
    }

    /// The work list of HCA layers, for a step of `tokens` tokens.
    pub fn hca_plan(&self, tokens: u32) -> Plan<'_, B> {
        Plan { records: &self.hca_plan, capacity: plan_capacity(tokens, self.slots, HCA_RATIO) }
    }

    /// All of it, for a graph to retain.
    pub fn memory(&self) -> Vec<Memory<B>> {
        let mut memory = vec![
            self.table.memory(),
            self.csa_plan.memory(),
            self.hca_plan.memory(),
            self.entries.memory(),
            self.keys.memory(),
            self.hca_scratch.pooled().memory(),
            self.frequencies.memory(),
            self.faults.memory(),
        ];
        memory.extend(self.poison.iter().map(|found| found.memory()));
        memory
    }
}
