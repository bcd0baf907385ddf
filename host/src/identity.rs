//! The identity of a cache's byte layout: equal for caches that can exchange bytes.

use kv_layout::config::ModelConfig;
use kv_layout::geometry::LayerKind;

use crate::config::CacheConfig;
use crate::memory::state_layout::LAYOUT_VERSION;
use crate::schema::Schema;

impl CacheConfig {
    /// Equal for all caches that compute the same bytes from the same weights and tokens. It covers the model without
    /// its name, the formats, how many thread blocks share keys in attention, and the layout of rows in a block, slot
    /// or checkpoint, but neither the size of the cache nor `max_draft`.
    #[must_use]
    pub fn identity(&self) -> Vec<u8> {
        let Self { model, main_format, index_format, attention_cluster, .. } = self;
        let ModelConfig { name: _, layers, mtp_layers, hidden_size, q_lora_rank, .. } = model;
        let ModelConfig { index_heads, index_topk, max_context, .. } = model;
        let ModelConfig { rope_theta, compress_rope, .. } = model;
        // The pools of a layer follow from its kind.
        let kinds = vec![LayerKind::Swa, LayerKind::Csa, LayerKind::Hca];
        let of_kinds = ModelConfig { layers: kinds, mtp_layers: 0, ..model.clone() };
        let schema = Schema::new(&Self { model: of_kinds, max_draft: 0, ..self.clone() });
        format!(
            "{LAYOUT_VERSION} {layers:?} {mtp_layers} {hidden_size} {q_lora_rank} {index_heads} {index_topk} \
             {max_context} {rope_theta:?} {compress_rope:?} {main_format:?} {index_format:?} \
             {attention_cluster:?} {schema:?}"
        )
        .into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use kv_layout::attention::KeyCluster;
    use kv_layout::config::ModelConfig;
    use kv_layout::index_row::IndexFormat;
    use kv_layout::main_row::MainFormat;

    use crate::config::CacheConfig;

    /// Identities must keep their bytes: stored prefixes are found by them, and they say between which caches requests
    /// may move.
    // If this fails because a type, a field or a variant was renamed, keep the old spelling in `identity()`, because
    // stored prefixes are found by these bytes. If the bytes of a block, slot or checkpoint have changed, raise
    // `LAYOUT_VERSION`. Only then change the expected bytes here.
    #[test]
    fn an_identity_keeps_its_bytes() {
        let tiny = CacheConfig::new(ModelConfig::preset("tiny").expect("a preset"));
        let window = "Pool { kind: SwaData, unit: Slot, rows: 128, row_bytes: 576 }, \
                      Pool { kind: SwaScale, unit: Slot, rows: 128, row_bytes: 8 }";
        let expected = format!(
            "2 [Swa, Csa, Hca, Csa, Swa] 1 256 128 64 16 1048576 10000.0 \
             CompressRope {{ theta: 160000.0, factor: 16.0, beta_fast: 32.0, beta_slow: 1.0, trained_context: 65536.0 }} \
             Ue8m0 Mxfp4 TwoBlocks Schema {{ layers: [\
             LayerCacheSchema {{ layer: LayerId(0), kind: Swa, pools: [{window}] }}, \
             LayerCacheSchema {{ layer: LayerId(1), kind: Csa, pools: [{window}, \
             Pool {{ kind: EntryData, unit: Block, rows: 32, row_bytes: 576 }}, \
             Pool {{ kind: EntryScale, unit: Block, rows: 32, row_bytes: 8 }}, \
             Pool {{ kind: IndexCode, unit: Block, rows: 32, row_bytes: 64 }}, \
             Pool {{ kind: IndexScale, unit: Block, rows: 32, row_bytes: 4 }}, \
             Pool {{ kind: MainState, unit: Slot, rows: 12, row_bytes: 4096 }}, \
             Pool {{ kind: IndexState, unit: Slot, rows: 12, row_bytes: 1024 }}] }}, \
             LayerCacheSchema {{ layer: LayerId(2), kind: Hca, pools: [{window}, \
             Pool {{ kind: EntryData, unit: Block, rows: 1, row_bytes: 576 }}, \
             Pool {{ kind: EntryScale, unit: Block, rows: 1, row_bytes: 8 }}, \
             Pool {{ kind: MainState, unit: Slot, rows: 2, row_bytes: 6144 }}] }}] }}"
        );
        assert_eq!(String::from_utf8_lossy(&tiny.identity()), expected);
    }

    /// Settings that change the bytes of the same tokens change the identity; others do not.
    #[test]
    fn other_bytes_have_another_identity() {
        let of = CacheConfig::new(ModelConfig::preset("tiny").expect("a preset"));
        let same = CacheConfig { num_blocks: 9, max_requests: 3, max_draft: 2, ..of.clone() };
        assert_eq!(same.identity(), of.identity());
        let mut all: Vec<_> = [
            of.clone(),
            CacheConfig { attention_cluster: KeyCluster::OneBlock, ..of.clone() },
            CacheConfig { main_format: MainFormat::F32, ..of.clone() },
            CacheConfig { index_format: IndexFormat::Fp8, ..of },
        ]
        .iter()
        .map(CacheConfig::identity)
        .collect();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 4);
    }
}
