//! The device memory of the layers: a buffer for each pool of the schema, all in one allocation: the pools of slots,
//! layer after layer, then those of blocks, then the tables of the kernel that copies slots.

use std::num::NonZeroU32;
use std::ops::Range;

use kv_layout::geometry::{LayerKind, csa_own_rows, hca_state_rows, swa_ring_rows};

use crate::config::CacheConfig;
use crate::device::{Backend, Buffer, Device, DeviceError, Memory, View};
use crate::error::KvError;
use crate::ids::LayerId;
use crate::ops::{Entries, IndexKeys, StateRing, SwaRing};
use crate::schema::{LayerCacheSchema, Pool, PoolKind, PoolUnit, Schema};

/// The pools of one layer.
pub(crate) struct LayerPools<B: Backend> {
    pub schema: LayerCacheSchema,
    buffers: Vec<Buffer<B, u8>>,
    /// Where in `buffers` the pool of each kind is, in the order of [`PoolKind::ALL`].
    places: [Option<u8>; PoolKind::ALL.len()],
    /// The pools with compressor state, as `f32`.
    states: Vec<(PoolKind, Buffer<B, f32>)>,
}

/// The pools of every layer.
pub(crate) struct Pools<B: Backend> {
    layers: Vec<LayerPools<B>>,
    /// The memory from the start of the allocation to the end of the pools of slots.
    slots: Buffer<B, u8>,
    /// All pools.
    all: Buffer<B, u8>,
    /// Memory for the tables of the kernel that copies slots.
    tables: Buffer<B, u8>,
}

/// By layer and pool: the index of the pool's buffer in the arena. Pools of slots come first.
fn places(schema: &Schema) -> Vec<Vec<usize>> {
    let pools = || schema.layers.iter().flat_map(|layer| &layer.pools);
    let slots = pools().filter(|pool| pool.unit == PoolUnit::Slot).count();
    let (mut slot, mut block) = (0..slots, slots..);
    let mut place = |pool: &Pool| match pool.unit {
        PoolUnit::Slot => slot.next(),
        PoolUnit::Block => block.next(),
    };
    let mut of_layer = |layer: &LayerCacheSchema| layer.pools.iter().flat_map(&mut place).collect();
    schema.layers.iter().map(&mut of_layer).collect()
}

impl<B: Backend> Pools<B> {
    /// Allocates every pool of `schema`, and `tables` bytes for tables. All of it is zero.
    pub fn new(
        device: &Device<B>,
        schema: &Schema,
        config: &CacheConfig,
        tables: u64,
    ) -> Result<Self, KvError> {
        let places = places(schema);
        let mut bytes = vec![0; places.iter().map(Vec::len).sum()];
        for (layer, places) in schema.layers.iter().zip(&places) {
            for (pool, &place) in layer.pools.iter().zip(places) {
                bytes[place] = u64::from(config.units(pool.unit)) * pool.unit_bytes();
            }
        }
        bytes.push(tables);
        let arena = device.allocate_arena("the pools of the layers", &bytes)?;
        let layer = |(schema, places): (&LayerCacheSchema, &Vec<usize>)| {
            let buffers = places.iter().map(|&place| arena.buffers[place].clone()).collect();
            LayerPools::new(schema.clone(), buffers)
        };
        let layers = schema.layers.iter().zip(&places).map(layer);
        let slots = schema.layers.iter().flat_map(|layer| &layer.pools);
        let slots = slots.filter(|pool| pool.unit == PoolUnit::Slot).count();
        let end = arena.offset(&arena.buffers[slots]);
        let tables = arena.buffers.last().expect("the tables").clone();
        let all = arena.whole.slice(0, arena.offset(&tables));
        Ok(Self {
            layers: layers.collect::<Result<_, KvError>>()?,
            slots: arena.whole.slice(0, end).expect("slots end before the next buffer"),
            all: all.expect("the tables come last"),
            tables,
        })
    }

    /// The memory in which the pools of slots lie, in granules of 256 bytes.
    pub fn slots(&self) -> &Buffer<B, u8> {
        &self.slots
    }

    /// The memory in which all pools lie: that of [`Self::slots`], then the pools of blocks.
    pub fn whole(&self) -> &Buffer<B, u8> {
        &self.all
    }

    /// Memory for the tables of the kernel that copies slots.
    pub fn tables(&self) -> &Buffer<B, u8> {
        &self.tables
    }

    /// First byte of a pool in [`Self::whole`].
    pub fn offset(&self, layer: LayerId, kind: PoolKind) -> Result<u64, KvError> {
        let pool = self.layer(layer)?.get(kind)?;
        Ok(pool.span().address() - self.slots.span().address())
    }

    /// The pools of a layer.
    pub fn layer(&self, layer: LayerId) -> Result<&LayerPools<B>, KvError> {
        let layers = self.layers.len() as u32;
        let found = self.layers.get(layer.0 as usize);
        found.ok_or(KvError::NoSuchLayer { layer, layers })
    }

    /// Every pool of every layer.
    pub fn all(&self) -> impl Iterator<Item = (&Pool, &Buffer<B, u8>)> {
        self.layers.iter().flat_map(|layer| layer.schema.pools.iter().zip(&layer.buffers))
    }

    /// The pools of some layers.
    pub fn of_layers(&self, layers: Range<u32>) -> impl Iterator<Item = (&Pool, &Buffer<B, u8>)> {
        let layers = layers.start as usize..layers.end as usize;
        let layers = self.layers.get(layers).unwrap_or_default().iter();
        layers.flat_map(|layer| layer.schema.pools.iter().zip(&layer.buffers))
    }

    /// All of the memory, for a graph to retain.
    pub fn memory(&self) -> impl Iterator<Item = Memory<B>> {
        self.all().map(|(_, buffer)| buffer.memory())
    }
}

impl<B: Backend> LayerPools<B> {
    fn new(schema: LayerCacheSchema, buffers: Vec<Buffer<B, u8>>) -> Result<Self, KvError> {
        let pools = schema.pools.iter().zip(&buffers);
        let states = pools.filter(|(pool, _)| pool.kind.is_state());
        let states = states.map(|(pool, buffer)| Ok((pool.kind, buffer.cast()?)));
        let states = states.collect::<Result<_, DeviceError>>()?;
        let place = |kind| schema.pools.iter().position(|pool| pool.kind == kind);
        let places = PoolKind::ALL.map(|kind| place(kind).map(|place| place as u8));
        Ok(Self { schema, buffers, places, states })
    }

    /// The pool of a kind.
    ///
    /// # Errors
    /// [`KvError::NoSuchPool`] if layers of this kind have none.
    pub fn get(&self, kind: PoolKind) -> Result<&Buffer<B, u8>, KvError> {
        let found = self.places[kind as usize].and_then(|place| self.buffers.get(place as usize));
        found.ok_or_else(|| self.no_such_pool(kind))
    }

    /// The sliding-window ring.
    pub fn window(&self, config: &CacheConfig) -> Result<SwaRing<'_, B>, KvError> {
        Ok(SwaRing {
            data: self.get(PoolKind::SwaData)?,
            scale: self.get(PoolKind::SwaScale)?,
            format: config.main_format,
            ring: swa_ring_rows(config.max_decode_tokens()),
            slots: config.max_requests,
        })
    }

    /// The compressed entries.
    pub fn entries(&self, config: &CacheConfig) -> Result<Entries<'_, B>, KvError> {
        Ok(Entries {
            data: self.get(PoolKind::EntryData)?,
            scale: self.get(PoolKind::EntryScale)?,
            format: config.main_format,
            entries_per_block: self.schema.kind.entries_per_block(),
            num_blocks: config.num_blocks,
        })
    }

    /// The indexer keys.
    pub fn index_keys(&self, config: &CacheConfig) -> Result<IndexKeys<'_, B>, KvError> {
        Ok(IndexKeys {
            code: self.get(PoolKind::IndexCode)?,
            scale: self.get(PoolKind::IndexScale)?,
            format: config.index_format,
            hadamard: true,
            num_blocks: config.num_blocks,
        })
    }

    /// The state of a compressor: `pool` is `MainState` or `IndexState`.
    pub fn state(&self, pool: PoolKind, config: &CacheConfig) -> Result<StateRing<'_, B>, KvError> {
        let step = config.max_decode_tokens();
        let ring = match self.schema.kind {
            LayerKind::Hca => hca_state_rows(step),
            _ => csa_own_rows(step),
        };
        let found = self.states.iter().find(|(kind, _)| *kind == pool);
        let (_, rows) = found.ok_or_else(|| self.no_such_pool(pool))?;
        Ok(StateRing { rows, ring, slots: config.max_requests })
    }

    /// Tokens of one compressed entry.
    pub fn ratio(&self) -> Result<NonZeroU32, KvError> {
        let ratio = self.schema.kind.ratio().and_then(NonZeroU32::new);
        ratio.ok_or_else(|| self.no_such_pool(PoolKind::EntryData))
    }

    #[cold]
    fn no_such_pool(&self, pool: PoolKind) -> KvError {
        KvError::NoSuchPool { layer: self.schema.layer, pool }
    }

    /// Every pool, read-only.
    pub fn views(&self) -> impl Iterator<Item = (PoolKind, View<B, u8>)> {
        self.schema.pools.iter().zip(&self.buffers).map(|(pool, buffer)| (pool.kind, buffer.view()))
    }
}
