//! The bytes that a step sends to the device depend only on its tokens and new blocks, not on the configured limits of
//! the cache.

use dsv4_kv::device::{Null, NullDevice};
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::step_meta::StepLayout;
use dsv4_kv::{
    Accepted, Bucket, CacheConfig, KvCacheManager, Launches, LayerGroup, RequestId, StepPlan,
    StepRequest,
};

/// Maximum tokens of a step.
const STEP_TOKENS: u32 = 8192;
/// Number of request slots.
const REQUESTS: u32 = 64;

/// A cache for long steps, of a model with draft layers, and its requests.
fn cache() -> (KvCacheManager<Null>, Vec<RequestId>) {
    let config = CacheConfig {
        max_requests: REQUESTS,
        num_blocks: 1024,
        max_draft: 4,
        max_context: 65_536,
        max_step_tokens: STEP_TOKENS,
        ..CacheConfig::new(ModelConfig::preset("tiny").unwrap())
    };
    let mut cache = KvCacheManager::new(NullDevice::null(1 << 40), config).unwrap();
    let ids = (0..REQUESTS).map(|_| cache.admit().unwrap()).collect();
    (cache, ids)
}

/// Runs a step of `tokens` tokens of each request, from `start` on. Returns its plan, and the bytes that it sent.
fn sent(
    cache: &mut KvCacheManager<Null>,
    group: LayerGroup,
    launches: Launches<'_>,
    ids: &[RequestId],
    (start, tokens): (u32, u32),
) -> (StepPlan, u64) {
    let device = cache.device().clone();
    let stream = device.stream().unwrap();
    let parts: Vec<_> = ids.iter().map(|&id| StepRequest { id, start, tokens }).collect();
    let before = device.backend().calls().uploaded;
    let mut group = cache.group(group).unwrap();
    let mut step = group.begin_step(&stream, launches, &parts).unwrap();
    let sent = device.backend().calls().uploaded - before;
    let plan = step.plan();
    step.skip_kernels();
    let all: Vec<_> = ids.iter().map(|&id| Accepted::count(id, tokens)).collect();
    step.commit(&all).unwrap();
    (plan, sent)
}

/// Bytes of `tokens` tokens and `blocks` new blocks: five words per token and two per block, in groups of four.
fn bytes(tokens: u32, blocks: u32) -> u64 {
    4 * u64::from(5 * tokens.next_multiple_of(4) + 2 * blocks.next_multiple_of(4))
}

#[test]
fn a_step_sends_what_its_tokens_need() {
    for group in LayerGroup::ALL {
        let (mut cache, ids) = cache();
        let mut start = 0;
        for tokens in [1, 5, 1, 120, 1, 1, 5, 3] {
            let step = sent(&mut cache, group, Launches::Eager, &ids[..32], (start, tokens));
            let (plan, sent) = step;
            assert_eq!(plan.tokens, 32 * tokens);
            assert_eq!(sent, bytes(plan.tokens, plan.new_blocks), "{group}, {plan:?}");
            assert_eq!(sent, 4 * plan.layout().elements() as u64);
            start += tokens;
        }
        let (plan, sent) = sent(&mut cache, group, Launches::Eager, &ids[32..33], (0, STEP_TOKENS));
        assert_eq!(plan.new_blocks, if group == LayerGroup::Trunk { 64 } else { 0 });
        assert_eq!(sent, bytes(STEP_TOKENS, plan.new_blocks), "the longest step");
        let none = self::sent(&mut cache, group, Launches::Eager, &[], (0, 1));
        assert_eq!(none.1, 0, "a step without tokens");
    }
}

#[test]
fn a_step_sends_what_the_tokens_of_its_bucket_need() {
    let (mut cache, ids) = cache();
    let bucket = Bucket { tokens: 64, tokens_per_request: 4, requests: 32, context: 4096 };
    let launches = Launches::Bucket(&bucket);
    let mut taken = 0;
    for (turn, requests) in (0..).zip([1, 16, 3, 16]) {
        let requests = &ids[16 * turn..16 * turn + requests];
        let (plan, sent) = sent(&mut cache, LayerGroup::Trunk, launches, requests, (0, 4));
        assert_eq!(sent, bytes(64, plan.new_blocks), "{plan:?}");
        taken += plan.new_blocks;
    }
    assert_eq!(taken, 36, "each request takes its first block");
}

/// StepMeta has room for the largest step that the cache allows.
#[test]
fn the_largest_layout_has_room_for_every_step() {
    let (mut cache, ids) = cache();
    let largest = cache.ledger().largest_layout();
    assert_eq!(largest, StepLayout::largest(STEP_TOKENS, REQUESTS));
    // Two blocks are the most that a request can need for 129 tokens.
    let ids = &ids[..STEP_TOKENS as usize / 129];
    sent(&mut cache, LayerGroup::Trunk, Launches::Eager, ids, (0, 3));
    let (plan, sent) = sent(&mut cache, LayerGroup::Trunk, Launches::Eager, ids, (3, 129));
    assert_eq!(plan.new_blocks, 2 * ids.len() as u32);
    assert!(sent <= 4 * largest.elements() as u64);
}
