//! Random caches: no setting decides another one.

use dsv4_kv::CacheConfig;
use dsv4_kv_stress::generate::kernel_config;
use dsv4_kv_stress::generate::reuse::kernel_reuse_config;
use kv_layout::config::ModelConfig;
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

/// The caches of 1,000 seeds, all of them valid.
fn all(config: impl Fn(u64) -> CacheConfig) -> Vec<CacheConfig> {
    let configs: Vec<_> = (0..1000).map(config).collect();
    configs.iter().for_each(|config| config.validate().expect("a valid configuration"));
    configs
}

#[test]
fn caches_with_kernels_have_all_pairs_of_formats_and_drafts() {
    let configs = all(kernel_config);
    for (main, drafts) in MainFormat::ALL.into_iter().flat_map(|of| [0, 1, 3, 8].map(|n| (of, n))) {
        let is_pair = |of: &CacheConfig| (of.main_format, of.max_draft) == (main, drafts);
        assert!(configs.iter().any(is_pair), "{main:?} with {drafts} drafts");
    }
}

#[test]
fn caches_with_kernels_have_long_contexts_of_every_model() {
    let configs = all(kernel_config);
    let mut models: Vec<&ModelConfig> = Vec::new();
    for CacheConfig { model, .. } in &configs {
        if !models.contains(&model) {
            models.push(model);
        }
    }
    assert_eq!(models.len(), 4);
    for model in models {
        let is_long = |of: &CacheConfig| of.model == *model && of.max_context > 256;
        assert!(configs.iter().any(is_long), "{model:?}");
    }
}

#[test]
fn caches_with_kernels_that_share_prefixes_have_all_formats_in_small_and_large_pools() {
    let configs = all(kernel_reuse_config);
    for main in MainFormat::ALL {
        for index in IndexFormat::ALL {
            let is_pair = |of: &&CacheConfig| (of.main_format, of.index_format) == (main, index);
            let of_pair: Vec<_> = configs.iter().filter(is_pair).collect();
            let some = |is: fn(&CacheConfig) -> bool| of_pair.iter().any(|&of| is(of));
            assert!(some(|of| of.num_blocks < 6) && some(|of| of.num_blocks > 9), "{main:?}");
            assert!(
                some(|of| of.max_context < 300) && some(|of| of.max_context > 360),
                "{index:?}"
            );
        }
    }
}
