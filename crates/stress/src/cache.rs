//! A whole cache as the subject: the manager, and the kernels of every step.

use std::collections::BTreeMap;
use std::sync::Arc;

use dsv4_kv::device::{Backend, Device, EmuOptions, Emulator};
use dsv4_kv::reuse::Lease;
use dsv4_kv::{
    BlockId, Bucket, CacheConfig, CapturedStep, KvError, LayerGroup, LayerId, PrefetchId,
    RequestId, Suspended,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::answer::Report;
use super::library::Library;
use super::model::{Model, Request};
use super::op::{Name, Step};
use super::reuse::Reuse;
use super::run::{Kernels, Runner};
use super::subject::Subject;
use super::tier::HostTier;
use dsv4_kv_tests::failing::Failing;
use dsv4_kv_tests::fed::Fed;
use dsv4_kv_tests::lazy::Lazy;

/// Most tokens of the captured steps.
const BUCKET: u32 = 8;

/// The buckets that a cache captures in each of its groups: one for one token per request, where each layer is one
/// launch, and one for verifying drafts.
#[must_use]
pub fn buckets(config: &CacheConfig) -> [Bucket; 2] {
    let CacheConfig { max_requests, max_step_tokens, max_context: context, .. } = *config;
    let few = BUCKET.min(max_step_tokens);
    let decode = Bucket::decode(config, few.min(max_requests));
    let tokens_per_request = (config.max_draft + 1).max(2).min(max_step_tokens);
    let tokens = few.min(max_requests * tokens_per_request);
    [decode, Bucket { tokens, tokens_per_request, requests: max_requests, context }]
}

/// An empty cache on the CPU, on a device that runs work late: transfers between the device and host memory should
/// finish late.
#[must_use]
pub fn late(config: &CacheConfig, library: &Arc<Library>, seed: u64) -> Cache<Lazy<Emulator>> {
    let device = Lazy::emulated(EmuOptions { seed, ..EmuOptions::default() });
    Cache::new(&device, config, library, seed)
}

/// A device that runs work late, and skips kernels.
pub type Skipping = Failing<Lazy<Emulator>>;

/// An empty cache on a `Skipping` device.
#[must_use]
pub fn skipping(config: &CacheConfig, library: &Arc<Library>, seed: u64) -> Cache<Skipping> {
    let device = Failing::late(EmuOptions { seed, ..EmuOptions::default() });
    device.backend().skip_launches(true);
    Cache { kernels: Kernels::Skipped, ..Cache::new(&device, config, library, seed) }
}

/// A cache with the stories that its requests process.
pub struct Cache<B: Backend> {
    pub(super) fed: Fed<B>,
    pub(super) library: Arc<Library>,
    kernels: Kernels,
    /// Whether bytes are compared after this operation. With a host tier this is false after some operations, because
    /// reading bytes waits for the device, which should stay late.
    looks: bool,
    graphs: Vec<(LayerGroup, CapturedStep<B>)>,
    random: SmallRng,
    /// The fault of the last step.
    trouble: Option<String>,
    /// Suspended requests.
    pub(super) suspended: BTreeMap<Name, Suspended>,
    /// Leases that were not ended by their holder; some may have expired.
    pub(super) leases: BTreeMap<Name, Lease>,
    /// Prompts that were requested from host memory; some may have arrived.
    pub(super) wanted: BTreeMap<Name, PrefetchId>,
    /// The prompt that was cancelled last.
    pub(super) cancelled: Option<PrefetchId>,
}

impl<B: Backend> Cache<B> {
    /// An empty cache whose memory is poisoned.
    ///
    /// # Panics
    /// If the device returns an error, or the configuration is out of range.
    #[must_use]
    pub fn new(
        device: &Device<B>,
        config: &CacheConfig,
        library: &Arc<Library>,
        seed: u64,
    ) -> Self {
        let mut fed = Fed::new(device, config.clone());
        let mut graphs = Vec::new();
        for group in LayerGroup::ALL {
            for bucket in buckets(config) {
                let Fed { manager, stream, inputs } = &mut fed;
                let Ok(mut layers) = manager.group(group) else { continue };
                let graph = layers.capture(stream, &bucket, inputs.memory(), |layers| {
                    inputs.run(layers, &mut |_, _| Ok(()))
                });
                graphs.push((group, graph.expect("a step can be captured")));
            }
        }
        let (random, library) = (SmallRng::seed_from_u64(seed), Arc::clone(library));
        Self {
            fed,
            library,
            kernels: Kernels::Run,
            looks: true,
            graphs,
            random,
            trouble: None,
            suspended: BTreeMap::new(),
            leases: BTreeMap::new(),
            wanted: BTreeMap::new(),
            cancelled: None,
        }
    }

    /// The cache, and the input tensors of its steps.
    #[must_use]
    pub fn fed(&self) -> &Fed<B> {
        &self.fed
    }

    /// Compares every byte of every request whose tokens are known, in all layers.
    ///
    /// # Errors
    /// Which bytes differ.
    pub fn check_all(&self, model: &Model) -> Result<(), String> {
        for (id, request) in model.live() {
            self.fed.layer_ids().try_for_each(|layer| self.check_request(id, request, layer))?;
        }
        Ok(())
    }
}

impl<B: Backend> Subject for Cache<B> {
    const HAS_LAYERS: bool = true;

    fn admit(&mut self) -> Result<RequestId, KvError> {
        self.fed.manager.admit()
    }

    fn release(&mut self, id: RequestId) -> Result<(), KvError> {
        self.fed.manager.release(id)
    }

    fn rewind_draft(&mut self, id: RequestId, committed: u32) -> Result<(), KvError> {
        self.fed.manager.rewind_draft(id, committed)
    }

    fn step(&mut self, model: &Model, step: &Step) -> Report {
        let Self { fed: Fed { manager, stream, inputs }, library, graphs, random, .. } = self;
        let (kernels, looks) = (self.kernels, self.looks);
        let table = manager.device_block_table();
        let groups = manager.groups();
        let mut groups = [Some(groups.trunk), groups.draft];
        let mut runner =
            Runner { stream, inputs, library, kernels, looks, graphs, random, table, model };
        let ran = runner.step(&mut groups, step);
        let (report, trouble) = match ran {
            (report, Ok(())) => (report, None),
            (report, Err(trouble)) => (report, Some(trouble)),
        };
        // Saves checkpoints after each committed step, as a server does.
        let saved = match report.commits.last() {
            Some(Ok(())) => manager.save_wanted(stream),
            _ => Ok(()),
        };
        let faults = saved.and_then(|()| match looks {
            true => manager.check_faults(stream).and_then(|()| manager.check_poison(stream)),
            false => Ok(()),
        });
        self.trouble = trouble.or(faults.err().map(|error| error.to_string()));
        report
    }

    fn blocks(&self, id: RequestId) -> Option<Vec<BlockId>> {
        self.fed.manager.block_table(id).ok()
    }

    fn tokens(&self, group: LayerGroup, id: RequestId) -> Option<u32> {
        self.fed.manager.ledger().committed_in(group, id).ok()
    }

    fn counts(&self) -> (u32, u32) {
        let ledger = self.fed.manager.ledger();
        (ledger.free_blocks(), ledger.live_requests())
    }

    fn reuse(&mut self) -> &mut dyn Reuse {
        self
    }

    fn tier(&mut self) -> Option<&mut dyn HostTier> {
        Some(self)
    }

    fn check_bytes(&mut self, model: &Model, turn: u64) -> Result<(), String> {
        if let Some(trouble) = self.trouble.take() {
            return Err(trouble);
        }
        let always = model.config().host_bytes == 0;
        let looks = std::mem::replace(&mut self.looks, always || self.random.random());
        if self.kernels == Kernels::Skipped || !looks {
            return Ok(());
        }
        let live: Vec<_> = model.live().collect();
        let Some(&(id, request)) = live.get(turn as usize % live.len().max(1)) else {
            return Ok(());
        };
        let request: &Request = request;
        let layers = self.fed.layer_ids().count() as u64;
        self.check_request(id, request, LayerId((turn / 7 % layers) as u32))
    }
}
