//! The device memory of a cache that all its steps share: pools, block table, rotary frequencies,
//! fault words.

use kernels_gpu::launch::CopyState;
use kernels_gpu::table::KERNELS;

use crate::config::CacheConfig;
use crate::device::{Backend, Buffer, Device, Memory, Operation, Stream, arena_bytes};
use crate::error::KvError;
use crate::ids::LayerGroup;
use crate::memory::buffer_spec::{Allocator, BufferSpec};
use crate::memory::pools::Pools;
use crate::memory::state_memory::{self, StateMemory};
use crate::ops::BlockTable;
use crate::poison::{self, POISON};
use crate::rope;
use crate::schema::Schema;

/// The buffers besides the pools, each once.
struct Specs {
    table: BufferSpec<i32>,
    frequencies: BufferSpec<f32>,
    faults: BufferSpec<u32>,
    poison: Option<BufferSpec<u32>>,
}

impl Specs {
    fn of(config: &CacheConfig) -> Self {
        let blocks = u64::from(config.max_requests) * u64::from(config.max_blocks_per_request());
        let poison = BufferSpec::new("poison records", 2 * poison::WORDS);
        Self {
            table: BufferSpec::new("block table", blocks),
            frequencies: BufferSpec::new("rotary frequencies", 2 * rope::PAIRS as u64),
            faults: BufferSpec::new("fault words", 2 * KERNELS.len() as u64),
            poison: config.poison.then_some(poison),
        }
    }

    /// Bytes of each buffer.
    fn bytes(&self) -> impl Iterator<Item = u64> {
        let always = [self.table.bytes(), self.frequencies.bytes(), self.faults.bytes()];
        always.into_iter().chain(self.poison.map(|poison| poison.bytes()))
    }
}

/// Number of device allocations without those of steps: one for all pools, one for all checkpoints, and one for each
/// other buffer.
pub(crate) fn allocations(config: &CacheConfig) -> u32 {
    let checkpoints = u32::from(config.num_checkpoints > 0);
    1 + checkpoints + Specs::of(config).bytes().count() as u32
}

/// Bytes of the allocations that [`allocations`] counts, without the pools and checkpoints themselves.
pub(crate) fn bytes(config: &CacheConfig, schema: &Schema) -> u64 {
    let pools: u64 = schema.layers.iter().map(|layer| layer.pools.len() as u64).sum();
    let tables = state_memory::table_bytes(config, schema);
    Specs::of(config).bytes().sum::<u64>() + arena_bytes(pools + 1, tables)
}

/// Device memory that all steps of a cache share.
pub(crate) struct CacheMemory<B: Backend> {
    pub pools: Pools<B>,
    /// Checkpoints, and the tables for copies of request state.
    pub state: StateMemory<B>,
    /// `[max_requests, max_blocks]`.
    table: Buffer<B, i32>,
    slots: u32,
    max_blocks: u32,
    /// `[32]`, rotary frequencies of layers with compressed entries.
    pub frequencies: Buffer<B, f32>,
    /// `[32]`, rotary frequencies of layers with only a window.
    pub window_frequencies: Buffer<B, f32>,
    /// By [`LayerGroup::index`]: counts of what kernels refused in steps of the group. Each group has its own,
    /// since steps of both groups may run at the same time.
    pub faults: [FaultWords<B>; 2],
    /// Poison that kernels read, by [`LayerGroup::index`]; only in a poisoned cache.
    pub poison: Option<[Buffer<B, u32>; 2]>,
    memory: Vec<Memory<B>>,
}

/// The words in which the kernels of a group's steps count what they refuse.
pub(crate) struct FaultWords<B: Backend> {
    /// One word per kernel of the table.
    pub all: Buffer<B, u32>,
    /// Each word as a buffer of its own.
    words: Vec<Buffer<B, u32>>,
}

impl<B: Backend> FaultWords<B> {
    /// The words of one group, from the words of both.
    fn of(both: &Buffer<B, u32>, group: LayerGroup) -> Self {
        let kernels = KERNELS.len() as u64;
        let part = |buffer: &Buffer<B, u32>, first, words| {
            buffer.slice(first, words).expect("there is a word per group and kernel")
        };
        let all = part(both, group.index() as u64 * kernels, kernels);
        let words = (0..kernels).map(|kernel| part(&all, kernel, 1)).collect();
        Self { all, words }
    }

    /// The word of a kernel.
    pub fn word(&self, kernel: usize) -> &Buffer<B, u32> {
        &self.words[kernel]
    }
}

impl<B: Backend> CacheMemory<B> {
    /// Allocates all of it and waits until it is ready: pools are zero, or poison if the
    /// configuration says so; the block table is empty.
    pub fn new(device: &Device<B>, schema: &Schema, config: &CacheConfig) -> Result<Self, KvError> {
        let tables = state_memory::table_bytes(config, schema);
        let pools = Pools::new(device, schema, config, tables)?;
        let (specs, mut allocator) = (Specs::of(config), Allocator::new(device));
        let table = allocator.allocate(specs.table)?;
        let both = allocator.allocate(specs.frequencies)?;
        let faults = allocator.allocate(specs.faults)?;
        let poison = specs.poison.map(|spec| allocator.allocate(spec)).transpose()?;
        let of_group = |all: &Buffer<B, u32>, group: LayerGroup| {
            let part = all.slice(group.index() as u64 * poison::WORDS, poison::WORDS);
            part.expect("both groups have a part")
        };
        let poison = poison.map(|all| LayerGroup::ALL.map(|group| of_group(&all, group)));
        let stream = device.stream()?;
        let state = StateMemory::new(device, &stream, (schema, config), &pools)?;
        if config.poison {
            pools.all().try_for_each(|(_, pool)| stream.fill(pool, POISON))?;
            stream.fill(state.checkpoints(), POISON)?;
        }
        stream.fill(&table, 0xFF)?;
        let [frequencies, window_frequencies] = rotary_frequencies(&stream, &both, config)?;
        stream.synchronize()?;
        let mut memory = allocator.memory();
        memory.extend(pools.memory().chain(state.memory()));
        let (slots, max_blocks) = (config.max_requests, config.max_blocks_per_request());
        let faults = LayerGroup::ALL.map(|group| FaultWords::of(&faults, group));
        Ok(Self {
            pools,
            state,
            table,
            slots,
            max_blocks,
            frequencies,
            window_frequencies,
            faults,
            poison,
            memory,
        })
    }

    /// The block table.
    pub fn table(&self) -> BlockTable<'_, B> {
        BlockTable { table: &self.table, slots: self.slots, max_blocks: self.max_blocks }
    }

    /// The word in which copies of state count what they refuse.
    pub fn copy_faults(&self) -> &Buffer<B, u32> {
        self.faults[LayerGroup::Trunk.index()].word(CopyState::kernel(()))
    }

    /// All of this memory, for a graph to retain.
    pub fn memory(&self) -> &[Memory<B>] {
        &self.memory
    }
}

/// Uploads the frequencies of both kinds of layers into the halves of `both`: first those of layers with compressed
/// entries, then those of layers with only a window.
fn rotary_frequencies<B: Backend>(
    stream: &Stream<B>,
    both: &Buffer<B, f32>,
    config: &CacheConfig,
) -> Result<[Buffer<B, f32>; 2], KvError> {
    let (compressed, window) = (&config.model.compress_rope, config.model.rope_theta);
    stream.upload(&rope::compress_frequencies(compressed), both, 0)?;
    stream.upload(&rope::plain_frequencies(window), both, rope::PAIRS as u64)?;
    let half = |at: usize| both.slice((at * rope::PAIRS) as u64, rope::PAIRS as u64);
    Ok([0, 1].map(|at| half(at).expect("both halves are there")))
}
