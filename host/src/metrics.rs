//! Gauges and counters of a cache, through the `metrics` facade (feature `metrics`).
//!
//! ```
//! # use dsv4_kv::device::{EmuDevice, EmuOptions};
//! # use dsv4_kv::kv_layout::config::ModelConfig;
//! # use dsv4_kv::metrics::CacheMetrics;
//! # use dsv4_kv::{CacheConfig, KvCacheManager, KvError};
//! # let config = CacheConfig::new(ModelConfig::preset("tiny").expect("a preset"));
//! # let mut cache = KvCacheManager::new(EmuDevice::new(EmuOptions::default()), config)?;
//! // Once, after the program has installed its recorder:
//! let metrics = CacheMetrics::new(&[]);
//! // After every step, or before every scrape:
//! metrics.record(&cache);
//! # Ok::<(), KvError>(())
//! ```

use ::metrics::{Counter, Gauge, Label, Unit, counter, describe_counter, describe_gauge, gauge};

use crate::device::Backend;
use crate::manager::KvCacheManager;

/// A metric: its name, its unit, its description.
type Described = (&'static str, Unit, &'static str);

const BLOCKS: [Described; 3] = [
    ("dsv4_kv_blocks_used", Unit::Count, "Blocks of 128 tokens that requests hold"),
    (
        "dsv4_kv_blocks_cached",
        Unit::Count,
        "Blocks that no request holds and that are kept for later prompts",
    ),
    ("dsv4_kv_blocks_capacity", Unit::Count, "Blocks of the pool"),
];
const SLOTS: [Described; 2] = [
    ("dsv4_kv_slots_used", Unit::Count, "Request slots that requests hold"),
    ("dsv4_kv_slots_capacity", Unit::Count, "Request slots of the cache"),
];
const CHECKPOINTS: [Described; 3] = [
    (
        "dsv4_kv_checkpoints_used",
        Unit::Count,
        "Checkpoints that are taken and cannot be evicted now",
    ),
    (
        "dsv4_kv_checkpoints_cached",
        Unit::Count,
        "Checkpoints that can be evicted and that are kept for later prompts",
    ),
    ("dsv4_kv_checkpoints_capacity", Unit::Count, "Checkpoints of the pool"),
];
const HOST: [Described; 2] = [
    ("dsv4_kv_host_used_bytes", Unit::Bytes, "Pinned host memory with prefixes"),
    ("dsv4_kv_host_capacity_bytes", Unit::Bytes, "Pinned host memory for prefixes"),
];
const COUNTERS: [Described; 7] = [
    ("dsv4_kv_prefix_cache_queries_total", Unit::Count, "Tokens of prompts that were looked up"),
    (
        "dsv4_kv_prefix_cache_hits_total",
        Unit::Count,
        "Tokens of prompts that need not be computed again",
    ),
    ("dsv4_kv_blocks_evicted_total", Unit::Count, "Blocks that the device has evicted"),
    ("dsv4_kv_checkpoints_evicted_total", Unit::Count, "Checkpoints that the device has evicted"),
    ("dsv4_kv_host_stored_bytes_total", Unit::Bytes, "Bytes that were copied to host memory"),
    (
        "dsv4_kv_host_restored_bytes_total",
        Unit::Bytes,
        "Bytes that were copied back from host memory",
    ),
    (
        "dsv4_kv_host_restored_tokens_total",
        Unit::Count,
        "Tokens of prefixes that came back from host memory and can be reused",
    ),
];

/// The metrics of one cache, in the recorder that is installed when they are created.
#[derive(Clone, Debug)]
pub struct CacheMetrics {
    blocks: [Gauge; 3],
    slots: [Gauge; 2],
    checkpoints: [Gauge; 3],
    host: [Gauge; 2],
    counters: [Counter; 7],
}

impl CacheMetrics {
    /// Registers the metrics. `labels` distinguish several caches of a program.
    #[must_use]
    pub fn new(labels: &[Label]) -> Self {
        Self {
            blocks: gauges(BLOCKS, labels),
            slots: gauges(SLOTS, labels),
            checkpoints: gauges(CHECKPOINTS, labels),
            host: gauges(HOST, labels),
            counters: COUNTERS.map(|(name, unit, what)| {
                describe_counter!(name, unit, what);
                counter!(name, labels.to_vec())
            }),
        }
    }

    /// Sets the metrics to the current values. Locks the ledger briefly, and allocates nothing.
    pub fn record<B: Backend>(&self, cache: &KvCacheManager<B>) {
        let config = cache.config();
        let ledger = cache.ledger();
        let (tree, slots) = (ledger.tree_counts(), config.max_requests);
        let held = |[total, free, cached]: [u32; 3]| [total - free - cached, cached, total];
        let blocks = [ledger.total_blocks(), ledger.free_blocks(), tree.evictable_blocks];
        set(&self.blocks, held(blocks));
        set(&self.slots, [ledger.live_requests(), slots]);
        let (total, free) = (ledger.total_checkpoints(), ledger.free_checkpoints());
        set(&self.checkpoints, held([total, free, tree.evictable_checkpoints]));
        let reused = ledger.reuse_stats();
        drop(ledger);
        let unit = cache.host_image_bytes().map_or(0.0, |(block, _)| block as f64);
        let (free, units) = cache.host_units();
        for (gauge, units) in self.host.iter().zip([units - free, units]) {
            gauge.set(f64::from(units) * unit);
        }
        let tier = cache.tier_stats();
        let counts = [
            reused.prompt_tokens,
            reused.reused,
            reused.evicted_blocks,
            reused.evicted_checkpoints,
            tier.bytes_to_host,
            tier.bytes_from_host,
            tier.restored_tokens,
        ];
        for (counter, count) in self.counters.iter().zip(counts) {
            counter.absolute(count);
        }
    }
}

fn gauges<const N: usize>(described: [Described; N], labels: &[Label]) -> [Gauge; N] {
    described.map(|(name, unit, what)| {
        describe_gauge!(name, unit, what);
        gauge!(name, labels.to_vec())
    })
}

fn set<const N: usize>(gauges: &[Gauge; N], values: [u32; N]) {
    for (gauge, value) in gauges.iter().zip(values) {
        gauge.set(value);
    }
}
