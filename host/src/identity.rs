//! What is the same in all caches whose bytes mean the same.

use kv_layout::config::ModelConfig;
use kv_layout::geometry::LayerKind;

use crate::config::CacheConfig;
use crate::memory::state_layout::LAYOUT_VERSION;
use crate::schema::Schema;

impl CacheConfig {
    /// What is the same in all caches whose bytes are the same for the same weights and tokens: the model but for its name,
    /// the formats, how attention splits keys, and how rows lie in a block, slot or checkpoint. Neither how large the cache is
    /// nor `max_draft`.
    #[must_use]
    pub fn identity(&self) -> Vec<u8> {
        let Self { model, main_format, index_format, attention_split, .. } = self;
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
             {attention_split:?} {schema:?}"
        )
        .into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use kv_layout::attention::KeySplit;
    use kv_layout::config::ModelConfig;
    use kv_layout::index_row::IndexFormat;
    use kv_layout::main_row::MainFormat;

    use crate::config::CacheConfig;

    /// What changes the bytes of the same tokens, and what does not.
    #[test]
    fn other_bytes_have_another_identity() {
        let of = CacheConfig::new(ModelConfig::preset("tiny").expect("a preset"));
        let same = CacheConfig { num_blocks: 9, max_requests: 3, max_draft: 2, ..of.clone() };
        assert_eq!(same.identity(), of.identity());
        let mut all: Vec<_> = [
            of.clone(),
            CacheConfig { attention_split: KeySplit::OneBlock, ..of.clone() },
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
