//! `KvCacheManager`: the ledger and the device memory it speaks of.

use kernels_gpu::fault_injection;
use kernels_gpu::table::KERNELS;

use crate::config::CacheConfig;
use crate::device::{Backend, Buffer, Device, DevicePtr, Memory, Staged, Stream};
use crate::error::KvError;
use crate::handle::LayerCacheHandle;
use crate::ids::{BlockId, LayerId, RequestId};
use crate::ledger::{Ledger, StepPlan, StepRequest};
use crate::ops;
use crate::plan::Section;
use crate::poison::{Freed, POISON};
use crate::schema::{LayerCacheSchema, Pool, PoolKind, Schema};
use crate::workspace::Workspace;

/// The KV cache of one model on one device.
///
/// Between steps: [`Self::admit`], [`Self::prepare_forward`], [`Self::commit`], [`Self::release`].
/// Inside a step: [`Self::layer`], whose handle queues the layer's kernels and allocates nothing.
pub struct KvCacheManager<B: Backend> {
    device: Device<B>,
    config: CacheConfig,
    schema: Schema,
    ledger: Ledger,
    layers: Vec<LayerPools<B>>,
    /// StepMeta.
    step: Staged<B, i32>,
    workspace: Workspace<B>,
    /// Tokens of the step in `step`.
    tokens: u32,
    /// What is to be poisoned before the next step; empty unless the cache is.
    freed: Freed,
}

/// The device memory of one layer, a buffer per pool of its schema.
pub(crate) struct LayerPools<B: Backend> {
    buffers: Vec<(PoolKind, Buffer<B, u8>)>,
}

impl<B: Backend> LayerPools<B> {
    fn allocate(
        device: &Device<B>,
        schema: &LayerCacheSchema,
        config: &CacheConfig,
    ) -> Result<Self, KvError> {
        let allocate = |pool: &Pool| {
            let buffer = device.allocate(label(pool.kind), pool_bytes(pool, config))?;
            Ok((pool.kind, buffer))
        };
        let buffers = schema.pools.iter().map(allocate).collect::<Result<_, KvError>>()?;
        Ok(Self { buffers })
    }

    /// The buffer of a pool that every layer has, or that the layer's kind has.
    pub fn get(&self, kind: PoolKind) -> Option<&Buffer<B, u8>> {
        self.buffers.iter().find(|(found, _)| *found == kind).map(|(_, buffer)| buffer)
    }
}

fn pool_bytes(pool: &Pool, config: &CacheConfig) -> u64 {
    u64::from(config.units(pool.unit)) * pool.unit_bytes()
}

fn label(kind: PoolKind) -> &'static str {
    match kind {
        PoolKind::SwaData => "sliding-window rows",
        PoolKind::SwaScale => "sliding-window scales",
        PoolKind::EntryData => "compressed entries",
        PoolKind::EntryScale => "compressed-entry scales",
        PoolKind::IndexCode => "indexer keys",
        PoolKind::IndexScale => "indexer-key scales",
        PoolKind::MainState => "compressor state",
        PoolKind::IndexState => "indexer compressor state",
    }
}

impl<B: Backend> KvCacheManager<B> {
    /// Allocates every pool. Nothing is allocated on the device after this.
    ///
    /// # Errors
    /// [`KvError::Config`]; [`KvError::Device`] with the pool that did not fit.
    pub fn new(device: Device<B>, config: CacheConfig) -> Result<Self, KvError> {
        let ledger = Ledger::new(&config)?;
        let schema = Schema::new(&config);
        let layers = schema.layers.iter();
        let layers: Vec<_> = layers
            .map(|layer| LayerPools::allocate(&device, layer, &config))
            .collect::<Result<_, KvError>>()?;
        if config.poison {
            let stream = device.stream()?;
            let mut pools = layers.iter().flat_map(|layer| &layer.buffers);
            pools.try_for_each(|(_, pool)| stream.fill(pool, POISON))?;
            stream.synchronize()?;
        }
        Ok(Self {
            freed: Freed::default(),
            step: Staged::new(&device, "step metadata", ledger.layout().elements())?,
            workspace: Workspace::new(&device, &config)?,
            tokens: 0,
            device,
            config,
            schema,
            ledger,
            layers,
        })
    }

    /// Admits a request with no tokens.
    ///
    /// # Errors
    /// [`KvError::NoFreeSlot`].
    pub fn admit(&mut self) -> Result<RequestId, KvError> {
        self.ledger.admit()
    }

    /// Ends a request and frees what it held.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`].
    pub fn release(&mut self, id: RequestId) -> Result<(), KvError> {
        if self.config.poison {
            self.freed.blocks.extend(self.ledger.block_table(id)?);
            self.freed.slots.push(id.slot);
        }
        self.ledger.release(id)
    }

    /// Allocates for the whole step and queues one copy of its StepMeta; runs between graphs.
    ///
    /// All or nothing: on a refusal no block is taken and no request changes.
    ///
    /// # Errors
    /// As [`Ledger::prepare_forward`]; [`KvError::Device`].
    pub fn prepare_forward(
        &mut self,
        stream: &Stream<B>,
        step: &[StepRequest],
    ) -> Result<StepPlan, KvError> {
        let Self { ledger, step: meta, workspace, freed, schema, layers, .. } = self;
        let plan = meta.update(stream, |array| ledger.prepare_forward(step, array))?;
        freed.poison(stream, schema, |layer, pool| layers[layer].buffers[pool].1.clone())?;
        let [index, block] =
            [Section::TableIndex, Section::TableBlock].map(|s| section(meta.buffer(), ledger, s));
        let entered = fault_injection::entered_blocks(plan.new_blocks);
        ops::update_table(stream, &index, &block, &workspace.table(), entered)?;
        self.tokens = plan.tokens;
        Ok(plan)
    }

    /// Queues the work lists of the step that was prepared last: which tokens close a window. Once a
    /// step, before the first layer's compressor.
    ///
    /// # Errors
    /// [`KvError::Device`].
    pub fn build_plan(&self, stream: &Stream<B>) -> Result<(), KvError> {
        self.build_plan_for(stream, self.tokens)
    }

    /// As [`Self::build_plan`], for launches that cover `tokens` tokens: a bucket being captured.
    ///
    /// # Errors
    /// [`KvError::StepTooLong`] if no step can have that many tokens; [`KvError::Device`].
    pub fn build_plan_for(&self, stream: &Stream<B>, tokens: u32) -> Result<(), KvError> {
        let handle = self.layer_for(LayerId(0), tokens)?;
        if tokens > 0 {
            let (csa, hca) = (self.workspace.csa_plan(tokens), self.workspace.hca_plan(tokens));
            ops::build_plan(stream, &handle.step_tokens(), &csa, &hca)?;
        }
        Ok(())
    }

    /// Makes the first `accepted` tokens of the last step final; the others never were.
    ///
    /// # Errors
    /// As [`Ledger::commit`].
    pub fn commit(&mut self, id: RequestId, accepted: u32) -> Result<(), KvError> {
        self.ledger.commit(id, accepted)
    }

    /// The cache of one layer, for the step that was prepared last. Allocates nothing.
    ///
    /// # Errors
    /// [`KvError::NoSuchLayer`].
    pub fn layer(&self, layer: LayerId) -> Result<LayerCacheHandle<'_, B>, KvError> {
        self.layer_for(layer, self.tokens)
    }

    /// The cache of one layer for launches that cover `tokens` tokens: a bucket being captured.
    ///
    /// # Errors
    /// [`KvError::NoSuchLayer`]; [`KvError::StepTooLong`] if no step can have that many tokens.
    pub fn layer_for(
        &self,
        layer: LayerId,
        tokens: u32,
    ) -> Result<LayerCacheHandle<'_, B>, KvError> {
        let layers = self.layers.len() as u32;
        let index = layer.0 as usize;
        if tokens > self.config.max_step_tokens {
            let most = self.config.max_step_tokens;
            return Err(KvError::StepTooLong { tokens: u64::from(tokens), most });
        }
        match (self.schema.layers.get(index), self.layers.get(index)) {
            (Some(schema), Some(pools)) => Ok(LayerCacheHandle {
                config: &self.config,
                schema,
                pools,
                step: self.step.buffer(),
                layout: self.ledger.layout(),
                workspace: &self.workspace,
                tokens,
            }),
            _ => Err(KvError::NoSuchLayer { layer: layer.0, layers }),
        }
    }

    /// Waits for `stream` and reports rows that kernels refused since the last check.
    ///
    /// # Errors
    /// [`KvError::KernelRefused`] for the first kernel with refusals; [`KvError::Device`].
    pub fn check_faults(&self, stream: &Stream<B>) -> Result<(), KvError> {
        let mut counts = [0; KERNELS.len()];
        stream.download(&self.workspace.faults, 0, &mut counts)?;
        let Some(index) = counts.iter().position(|&count| count > 0) else { return Ok(()) };
        stream.upload(&[0; KERNELS.len()], &self.workspace.faults, 0)?;
        Err(KvError::KernelRefused { kernel: KERNELS[index].name, count: counts[index] })
    }

    /// All device memory of the cache, for a graph to retain.
    pub(crate) fn memory(&self) -> Vec<Memory<B>> {
        let pools = self.layers.iter().flat_map(|layer| &layer.buffers);
        let mut memory: Vec<_> = pools.map(|(_, buffer)| buffer.memory()).collect();
        memory.push(self.step.buffer().memory());
        memory.extend(self.workspace.memory());
        memory
    }

    /// Where StepMeta is on the device: what a graph was captured over.
    pub(crate) fn step_address(&self) -> DevicePtr<i32> {
        self.step.buffer().ptr()
    }

    /// What the search for poison found, in a cache that is poisoned.
    pub(crate) fn poison_records(&self) -> Option<&Buffer<B, u32>> {
        self.workspace.poison.as_ref()
    }

    /// Tokens of the step that was prepared last.
    pub(crate) fn step_tokens(&self) -> u32 {
        self.tokens
    }

    /// Bytes on the device, per kind of pool, over all layers.
    #[must_use]
    pub fn memory_bytes(&self) -> Vec<(PoolKind, u64)> {
        let mut totals: Vec<(PoolKind, u64)> = Vec::new();
        for (kind, buffer) in self.layers.iter().flat_map(|layer| &layer.buffers) {
            match totals.iter_mut().find(|(found, _)| found == kind) {
                Some((_, bytes)) => *bytes += buffer.bytes(),
                None => totals.push((*kind, buffer.bytes())),
            }
        }
        totals
    }

    /// Blocks of a request, in the order of its tokens.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`].
    pub fn block_table(
        &self,
        id: RequestId,
    ) -> Result<impl ExactSizeIterator<Item = BlockId>, KvError> {
        self.ledger.block_table(id)
    }

    /// The device.
    pub fn device(&self) -> &Device<B> {
        &self.device
    }

    /// The configuration.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// The pools of every layer.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// Who holds what.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }
}

/// One section of StepMeta.
fn section<B: Backend>(meta: &Buffer<B, i32>, ledger: &Ledger, section: Section) -> Buffer<B, i32> {
    let range = ledger.layout().range(section);
    meta.slice(range.start as u64, range.len() as u64).expect("the array has all its sections")
}

#[cfg(test)]
mod tests {
    use kv_layout::config::ModelConfig;

    use super::*;
    use crate::Capacity;
    use crate::device::{EmuDevice, EmuOptions};

    #[test]
    fn every_buffer_is_counted() {
        for poison in [false, true] {
            let model = ModelConfig::preset("tiny").expect("a preset");
            let config = CacheConfig { poison, ..CacheConfig::smallest(model) };
            let device = EmuDevice::new(EmuOptions::default());
            let manager = KvCacheManager::new(device, config.clone()).expect("it is small");
            assert_eq!(manager.memory().len(), Capacity::new(&config).buffers as usize);
        }
    }
}
