//! No step allocates on the host. Allocations are counted on a device that does nothing, so that every one would be
//! this library's.

use allocation_counter::measure;
use dsv4_kv::device::Null;
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::{Accepted, Bucket, KvError, Launches, LayerGroup, Layers, Ledger};

use super::inputs::Inputs;
use super::setup::config;
use super::steps::{CacheBench, Case, filled_ledger};

/// Requests of a step.
const REQUESTS: u32 = 8;
/// Number of counted steps. In these steps every request crosses ends of windows and of a block.
const STEPS: usize = 140;

/// Number of allocations of this thread while `step` runs `STEPS` times, after one run for warm-up.
fn allocations(mut step: impl FnMut() -> Result<(), KvError>) -> u64 {
    step().expect("the first step is accepted");
    let all = || (0..STEPS).try_for_each(|_| step()).expect("every step is accepted");
    measure(all).count_total
}

fn decode(tokens: u32, accepted: u32) -> Case {
    Case { requests: REQUESTS, tokens, accepted }
}

/// Runs everything that an eager step does in each layer: its update, all reads of its kind, its append.
pub(super) fn run(inputs: &Inputs, layers: &mut Layers<'_, Null>) -> Result<(), KvError> {
    let queries = layers.tokens().min(REQUESTS);
    for (layer, kind) in layers.layer_kinds() {
        match kind {
            LayerKind::Swa => {
                let layer = inputs.update_swa(layers.swa(layer)?)?;
                inputs.gather_window(&layer, queries)?;
                layer.attend(0..queries, &inputs.heads())?;
                layer.append()?;
            }
            LayerKind::Csa => {
                let layer = inputs.update_csa(layers.csa(layer)?)?;
                inputs.gather_window(&layer, queries)?;
                inputs.select(&layer, queries)?;
                inputs.gather_entries(&layer, queries)?;
                inputs.attend_listed(&layer, queries)?;
                layer.append()?;
            }
            LayerKind::Hca => {
                let layer = inputs.update_hca(layers.hca(layer)?)?;
                inputs.gather_window(&layer, queries)?;
                inputs.gather_all(&layer, queries)?;
                layer.attend(0..queries, &inputs.heads())?;
                layer.append()?;
            }
        }
    }
    Ok(())
}

#[test]
fn the_counter_counts() {
    assert_eq!(measure(|| drop(std::hint::black_box(Box::new(1)))).count_total, 1);
}

/// One token per request; drafts of which some are rejected; and chunks. The requests take new blocks during these
/// steps.
#[test]
fn an_eager_step_allocates_nothing() {
    for case in [decode(1, 1), decode(5, 3), decode(40, 40)] {
        let CacheBench { mut cache, stream, inputs } = CacheBench::new(REQUESTS).unwrap();
        let mut batch = CacheBench::filled(&mut cache, &stream, &inputs, case).unwrap();
        let free = cache.ledger().free_blocks();
        let count = allocations(|| {
            let mut step = cache.begin_step(&stream, Launches::Eager, &batch.parts)?;
            run(&inputs, &mut step)?;
            step.commit(&batch.accepted)?;
            batch.advance();
            Ok(())
        });
        assert_eq!(count, 0, "{}", case.name());
        assert!(cache.ledger().free_blocks() < free, "some steps took blocks");
    }
}

/// Dropped steps: one that took blocks and is dropped before its first launch, and one with drafts, dropped after its
/// last launch.
#[test]
fn a_rejected_step_allocates_nothing() {
    let CacheBench { mut cache, stream, inputs } = CacheBench::new(REQUESTS).unwrap();
    let drafts = CacheBench::filled(&mut cache, &stream, &inputs, decode(5, 0)).unwrap();
    let mut chunks = drafts.clone();
    chunks.parts.iter_mut().for_each(|part| part.tokens = 100);
    let count = allocations(|| {
        let step = cache.begin_step(&stream, Launches::Eager, &chunks.parts)?;
        assert!(step.plan().new_blocks > 0);
        drop(step);
        let mut step = cache.begin_step(&stream, Launches::Eager, &drafts.parts)?;
        run(&inputs, &mut step)
    });
    assert_eq!(count, 0);
}

/// Open steps of both layer groups at the same time.
#[test]
fn steps_of_two_groups_allocate_nothing() {
    let CacheBench { mut cache, stream, inputs } = CacheBench::new(REQUESTS).unwrap();
    let case = decode(5, 3);
    let mut batch = CacheBench::filled(&mut cache, &stream, &inputs, case).unwrap();
    let mut drafts = batch.clone();
    drafts.parts.iter_mut().for_each(|part| part.start = 0);
    let count = allocations(|| {
        let groups = cache.groups();
        let mut draft = groups.draft.expect("the model has draft layers");
        let mut trunk = groups.trunk;
        let mut steps = [
            trunk.begin_step(&stream, Launches::Eager, &batch.parts)?,
            draft.begin_step(&stream, Launches::Eager, &drafts.parts)?,
        ];
        steps.iter_mut().try_for_each(|step| run(&inputs, step))?;
        let [trunk, draft] = steps;
        trunk.commit(&batch.accepted)?;
        draft.commit(&drafts.accepted)?;
        batch.advance();
        drafts.advance();
        Ok(())
    });
    assert_eq!(count, 0);
}

/// A step in a bucket, replayed from a graph.
#[test]
fn a_replayed_step_allocates_nothing() {
    for case in [decode(1, 1), decode(5, 3)] {
        let CacheBench { mut cache, stream, inputs } = CacheBench::new(REQUESTS).unwrap();
        let context = cache.config().max_context;
        let (requests, tokens_per_request) = (REQUESTS, case.tokens);
        let tokens = requests * tokens_per_request;
        let bucket = Bucket { tokens, tokens_per_request, requests, context };
        let retained = inputs.memory();
        let graph =
            cache.capture(&stream, &bucket, retained, |layers| run(&inputs, layers)).unwrap();
        let mut batch = CacheBench::filled(&mut cache, &stream, &inputs, case).unwrap();
        let count = allocations(|| {
            let launches = Launches::Bucket(&bucket);
            let mut step = cache.begin_step(&stream, launches, &batch.parts)?;
            step.replay(&graph)?;
            step.commit(&batch.accepted)?;
            batch.advance();
            Ok(())
        });
        assert_eq!(count, 0, "{}", case.name());
    }
}

/// The ledger alone, including refused calls.
#[test]
fn a_step_in_the_ledger_allocates_nothing() {
    let mut ledger = Ledger::new(&config(REQUESTS).unwrap()).unwrap();
    let mut array = vec![0; ledger.largest_layout().elements()];
    let mut batch = filled_ledger(&mut ledger, &mut array, decode(5, 3)).unwrap();
    let group = LayerGroup::Trunk;
    let count = allocations(|| {
        ledger.begin_step(group, &batch.parts, &mut array)?;
        let twice = [Accepted::count(batch.parts[0].id, 1); REQUESTS as usize];
        assert!(ledger.commit_step(group, &twice).is_err());
        ledger.commit_step(group, &batch.accepted)?;
        assert!(ledger.begin_step(group, &batch.parts, &mut array).is_err());
        batch.advance();
        Ok(())
    });
    assert_eq!(count, 0);
}
