//! The contents of a cache depend only on each request's own accepted tokens: not on other requests, on drafts, or on
//! how often a step was replayed.

use std::sync::Arc;

use dsv4_kv::device::{Backend, Device};
use dsv4_kv::{Bucket, CacheConfig, LayerGroup};
use dsv4_kv_stress::cache::{Cache, buckets};
use dsv4_kv_stress::drive::Run;
use dsv4_kv_stress::library::Library;
use dsv4_kv_stress::model::Model;
use dsv4_kv_stress::op::{Accept, Launches as Launched, Layers, Name, Op, Part as Written, Step};
use kv_layout::geometry::LayerKind::{self, Csa, Hca, Swa};
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::stories::config;

/// One layer of each kind.
const LAYERS: [LayerKind; 3] = [Swa, Csa, Hca];
/// Maximum drafts of a step.
const DRAFTS: u32 = 8;

fn start<B: Backend>(device: &Device<B>, requests: u32) -> Run<Cache<B>> {
    let formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
    let config = CacheConfig {
        max_draft: DRAFTS,
        max_context: 300,
        num_blocks: 3 * requests,
        poison: true,
        ..config(&LAYERS, formats, requests)
    };
    let library = Arc::new(Library::new(&config));
    Run::new(Cache::new(device, &config, &library, 1), Model::new(&config))
}

fn apply<B: Backend>(run: &mut Run<Cache<B>>, op: &Op) {
    run.apply(op).unwrap_or_else(|divergence| panic!("{op:?}: {}", divergence.what));
}

/// Runs a step of (request, tokens, accepted tokens). If `by_graph`, it is replayed, provided that a graph serves it.
fn verify<B: Backend>(run: &mut Run<Cache<B>>, step: &[(Name, u32, u32)], by_graph: bool) {
    let part = |&(request, tokens, right): &(Name, u32, u32)| Written {
        request,
        ahead: 0,
        tokens,
        genuine: right,
    };
    let accept = |&(request, _, accepted): &(Name, u32, u32)| Accept { request, accepted, told: 0 };
    let tokens: u32 = step.iter().map(|part| part.1).sum();
    let most = step.iter().map(|part| part.1).max().unwrap_or(0);
    let serves = |bucket: &Bucket| {
        tokens <= bucket.tokens
            && most <= bucket.tokens_per_request
            && step.len() <= bucket.requests as usize
    };
    let bucket = buckets(run.model().config()).into_iter().find(serves);
    apply(
        run,
        &Op::Step(Step {
            group: LayerGroup::Trunk,
            launches: bucket.filter(|_| by_graph).map_or(Launched::Eager, Launched::Replay),
            parts: step.iter().map(part).collect(),
            layers: Layers::All,
            meanwhile: None,
            commits: vec![step.iter().map(accept).collect()],
        }),
    );
}

/// For each (drafts, accepted drafts): verify steps from each of `positions` positions after the first block. After
/// each step every byte is that of the accepted tokens alone.
fn check_rollbacks<B: Backend>(
    device: &Device<B>,
    pairs: impl IntoIterator<Item = [u32; 2]>,
    positions: u32,
) {
    let mut run = start(device, DRAFTS + 1);
    let mut name = 0;
    for [drafts, accepted] in pairs {
        // A request advances by `stride` tokens per step. So `stride` requests, each one token ahead of the one before,
        // together start steps at every position.
        let stride = accepted + 1;
        let names: Vec<_> = (name + 1..=name + stride).collect();
        name += stride;
        for (ahead, &request) in (0..).zip(&names) {
            apply(&mut run, &Op::Admit(request));
            verify(&mut run, &[(request, 128 + ahead, 128 + ahead)], false);
        }
        let step: Vec<_> = names.iter().map(|&request| (request, drafts + 1, stride)).collect();
        for round in 0..positions.div_ceil(stride) {
            verify(&mut run, &step, round % 2 == 0);
            run.subject().check_all(run.model()).unwrap_or_else(|what| {
                panic!("{accepted} of {drafts} drafts accepted: {what}");
            });
        }
        names.iter().for_each(|&request| apply(&mut run, &Op::Release(request)));
    }
}

/// A sample of [`every_rollback_leaves_no_trace`].
pub fn some_rollbacks_leave_no_trace<B: Backend>(device: &Device<B>) {
    check_rollbacks(device, [[0, 0], [8, 0], [8, 8], [5, 2]], 12);
}

/// Every position in a block, up to eight drafts, and every number of accepted drafts.
pub fn every_rollback_leaves_no_trace<B: Backend>(device: &Device<B>) {
    let pairs =
        (0..=DRAFTS).flat_map(|drafts| (0..=drafts).map(move |accepted| [drafts, accepted]));
    check_rollbacks(device, pairs, 128);
}

/// Requests of random lengths in steps with random requests and sizes, in slots and blocks that others have used. Each
/// holds the bytes that it holds alone.
fn check_interleavings<B: Backend>(device: &Device<B>, count: u32, seed: u64) {
    const REQUESTS: u32 = 3;
    let mut random = StdRng::seed_from_u64(seed);
    let mut run = start(device, REQUESTS);
    for round in 0..count {
        let names: Vec<_> = (0..REQUESTS).map(|request| REQUESTS * round + request + 1).collect();
        let mut left: Vec<_> = names
            .iter()
            .map(|&name| {
                let long = random.random_ratio(1, 25);
                (name, random.random_range(1..if long { 150 } else { 18 }))
            })
            .collect();
        names.iter().for_each(|&request| apply(&mut run, &Op::Admit(request)));
        while !left.is_empty() {
            let mut step = Vec::new();
            for (name, left) in &mut left {
                if random.random_bool(0.6) {
                    let most = if random.random() { 4 } else { *left };
                    let tokens = random.random_range(1..=most.min(*left));
                    step.push((*name, tokens, tokens));
                    *left -= tokens;
                }
            }
            verify(&mut run, &step, random.random());
            left.retain(|&(_, left)| left > 0);
        }
        run.subject().check_all(run.model()).unwrap_or_else(|what| panic!("round {round}: {what}"));
        names.iter().for_each(|&request| apply(&mut run, &Op::Release(request)));
    }
}

/// A sample of [`ten_thousand_interleavings_do_not_mix`].
pub fn some_interleavings_do_not_mix<B: Backend>(device: &Device<B>) {
    check_interleavings(device, 30, 61);
}

/// Ten thousand interleavings; takes minutes.
pub fn ten_thousand_interleavings_do_not_mix<B: Backend>(device: &Device<B>) {
    check_interleavings(device, 10_000, 62);
}
