//! `KvCacheManager` and its steps: chunking, rollback, isolation, accounting, faults.

use dsv4_kv::device::{Backend, Device, DeviceError, Stream, bf16};
use dsv4_kv::error::Refusal;
use dsv4_kv::kv_layout::config::ModelConfig;
use dsv4_kv::step_meta::{Section, StepLayout};
use dsv4_kv::{
    Accepted, CacheConfig, KvCacheManager, KvError, Launches, LayerGroup, LayerId, RequestId,
    StepRequest,
};
use kv_layout::geometry::LayerKind;
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::fed::{Fed, Padding, Part, begin};
use crate::inputs::{assert_same, rows, upload_bf16};
use crate::rings::assert_ring;
use crate::stories::{Story, config, tiny};

const LAYER: LayerId = LayerId(0);

/// A cache of one layer with a sliding window alone.
fn manager<B: Backend>(
    device: &Device<B>,
    format: MainFormat,
    max_draft: u32,
) -> KvCacheManager<B> {
    let tiny = ModelConfig::preset("tiny").unwrap();
    let model = ModelConfig { layers: vec![LayerKind::Swa], mtp_layers: 0, ..tiny };
    let config = CacheConfig {
        main_format: format,
        max_draft,
        num_blocks: 32,
        max_step_tokens: 512,
        ..CacheConfig::for_memory(model, 1 << 30, 4).unwrap()
    };
    KvCacheManager::new(device.clone(), config).unwrap()
}

/// Runs a step of the layer, and commits the first `accepted` tokens of each request.
fn run<B: Backend>(
    manager: &mut KvCacheManager<B>,
    stream: &Stream<B>,
    step: &[StepRequest],
    kv: &[u16],
    accepted: &[u32],
) {
    let kv = upload_bf16(stream, kv);
    let parts = step.iter().zip(accepted);
    let accepted: Vec<_> = parts.map(|(part, &count)| Accepted::count(part.id, count)).collect();
    let mut step = manager.begin_step(stream, Launches::Eager, step).unwrap();
    step.swa(LAYER).unwrap().update(&kv).unwrap().append().unwrap();
    step.commit(&accepted).unwrap();
}

/// Feeds `values` to the request as a step of its own, and accepts the first `accepted` tokens.
fn feed<B: Backend>(
    manager: &mut KvCacheManager<B>,
    stream: &Stream<B>,
    id: RequestId,
    values: &[Vec<u16>],
    accepted: usize,
) {
    let start = manager.ledger().committed(id).unwrap();
    let step = [StepRequest { id, start, tokens: values.len() as u32 }];
    run(manager, stream, &step, &values.concat(), &[accepted as u32]);
}

pub fn any_chunking_gives_the_same_rows<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let history = rows(400, 1);
    for (format, cuts) in [
        (MainFormat::Ue8m0, vec![400]),
        (MainFormat::F32, vec![400]),
        (MainFormat::Ue8m0, vec![127, 1, 130, 3, 4, 5, 128, 2]),
        (MainFormat::F32, vec![1, 2, 3, 129, 265]),
        (MainFormat::Ue8m0, vec![1; 140]),
    ] {
        let mut manager = manager(device, format, 0);
        let id = manager.admit().unwrap();
        let mut fed = 0;
        for cut in cuts {
            feed(&mut manager, &stream, id, &history[fed..fed + cut], cut);
            fed += cut;
        }
        assert_ring(&manager, &stream, LAYER, id, &history[..fed]);
    }
}

/// Verify steps of up to eight drafts, with any number accepted, leave the window of a request without drafts.
pub fn rejected_drafts_leave_no_trace<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let mut random = StdRng::seed_from_u64(2);
    let mut manager = manager(device, MainFormat::Ue8m0, 8);
    let id = manager.admit().unwrap();
    let mut history = rows(120, 3);
    feed(&mut manager, &stream, id, &history, 120);
    for round in 0..40 {
        let drafts = random.random_range(0..=8_usize);
        let accepted = random.random_range(1..=drafts + 1);
        let values = rows(drafts + 1, 100 + round);
        feed(&mut manager, &stream, id, &values, accepted);
        history.extend_from_slice(&values[..accepted]);
        assert_ring(&manager, &stream, LAYER, id, &history);
    }
    assert!(history.len() > 140, "the ring went round");
}

/// Several requests in one step, and reused slots: each ring holds the rows of its own request.
pub fn interleaved_requests_do_not_mix<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let mut random = StdRng::seed_from_u64(4);
    let mut manager = manager(device, MainFormat::F32, 0);
    let mut live: Vec<(RequestId, Vec<Vec<u16>>)> = Vec::new();
    for round in 0..60_u64 {
        if live.len() < 4 && random.random_bool(0.5) {
            live.push((manager.admit().unwrap(), Vec::new()));
        }
        let (mut step, mut kv) = (Vec::new(), Vec::new());
        for (request, (id, history)) in live.iter_mut().enumerate() {
            let tokens = random.random_range(1..60);
            let values = rows(tokens, round * 10 + request as u64);
            let start = history.len() as u32;
            step.push(StepRequest { id: *id, start, tokens: tokens as u32 });
            kv.extend(values.concat());
            history.extend(values);
        }
        if step.is_empty() {
            continue;
        }
        let all: Vec<_> = step.iter().map(|part| part.tokens).collect();
        run(&mut manager, &stream, &step, &kv, &all);
        live.iter().for_each(|(id, history)| assert_ring(&manager, &stream, LAYER, *id, history));
        if random.random_bool(0.3) {
            let (id, _) = live.swap_remove(random.random_range(0..live.len()));
            manager.release(id).unwrap();
        }
    }
    manager.check_faults(&stream).unwrap();
}

pub fn memory_is_what_the_schema_says<B: Backend>(device: &Device<B>) {
    let manager = manager(device, MainFormat::Ue8m0, 3);
    let (config, schema) = (manager.config(), manager.schema());
    let allocated: u64 = manager.pool_bytes().iter().map(|(_, bytes)| bytes).sum();
    let planned = u64::from(config.max_requests) * schema.slot_bytes()
        + u64::from(config.num_blocks) * schema.block_bytes();
    assert_eq!(allocated, planned);
}

/// Two kernels get rows that the ring does not have, as a wrong step planner would write them. The first check reports
/// both kernels, the second neither.
pub fn faults_name_every_kernel<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let mut small = manager(device, MainFormat::Ue8m0, 0);
    let id = small.admit().unwrap();
    let kv = upload_bf16(&stream, &rows(1, 5).concat());
    small.check_faults(&stream).unwrap();
    let step_meta = small.writable_step_meta(LayerGroup::Trunk).unwrap();
    let layout = StepLayout::new(1, 0);
    let damage = |section, value| {
        let section = layout.range(section).start as u64;
        stream.upload(&[value], &step_meta, section).unwrap();
    };
    let tile = device.allocate::<bf16>("tile", 128 * 512).unwrap();
    let lengths = device.allocate::<i32>("lengths", 1).unwrap();
    let step = [StepRequest { id, start: 0, tokens: 1 }];
    let mut step = small.begin_step(&stream, Launches::Eager, &step).unwrap();
    damage(Section::RingRow, i32::MAX);
    damage(Section::Slot, 77);
    let layer = step.swa(LAYER).unwrap().update(&kv).unwrap();
    layer.gather_window(0..1, &tile, &lengths).unwrap();
    layer.append().unwrap();
    step.commit(&[Accepted::count(id, 1)]).unwrap();
    let error = small.check_faults(&stream).unwrap_err();
    let KvError::KernelRefused { refusals } = error else { panic!("{error}") };
    let want = ["append_swa_ue8m0", "gather_swa_ue8m0"];
    assert!(refusals.iter().map(|refusal| refusal.kernel).eq(want), "{refusals:?}");
    assert!(refusals.iter().all(|refusal| refusal.count > 0), "{refusals:?}");
    assert!(refusals.iter().map(|refusal| refusal.writes).eq([true, false]), "{refusals:?}");
    small.check_faults(&stream).unwrap();
}

/// In decode steps, layers of each kind count a live token's ring row that does not exist.
pub fn fused_layers_count_ring_rows_out_of_range<B: Backend>(device: &Device<B>) {
    let story = Story::random(&tiny(), 8, 6);
    for row in [i32::MAX, -1] {
        let formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
        let mut fed = Fed::new(device, config(&tiny(), formats, 2));
        let (stream, id) = (fed.stream.clone(), fed.manager.admit().unwrap());
        let parts = [Part::new(id, &story, 0..1)];
        fed.inputs.load(&stream, &parts, 1);
        let step_meta = fed.manager.writable_step_meta(LayerGroup::Trunk).unwrap();
        let at = StepLayout::new(1, 1).range(Section::RingRow).start as u64;
        let mut steps = begin(&mut fed.manager, &stream, &parts, Padding::None).unwrap();
        stream.upload(&[row], &step_meta, at).unwrap();
        fed.inputs.run(&mut steps[0], &mut |_, _| Ok(())).unwrap();
        let error = steps[0].check_faults().unwrap_err();
        let KvError::KernelRefused { refusals } = error else { panic!("{error}") };
        for kernel in ["decode_csa_", "decode_hca_"] {
            let of_kernel = |refusal: &&Refusal| refusal.kernel.starts_with(kernel);
            let refusal =
                refusals.iter().find(of_kernel).unwrap_or_else(|| panic!("{kernel}: {row}"));
            assert!(refusal.count > 0 && refusal.writes, "{refusal:?}");
        }
    }
}

/// The part of the StepMeta buffer after the sections of a step, left by earlier steps or never written, is not read.
/// Eagerly and in a bucket, pools end with the same bytes as over a buffer of zeros.
pub fn nothing_behind_a_steps_sections_is_read<B: Backend>(device: &Device<B>) {
    let formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
    let stories = [1, 2].map(|seed| Story::random(&tiny(), 300, seed));
    let pools = |garbage: u8| {
        let mut fed = Fed::new(device, CacheConfig { max_draft: 2, ..config(&tiny(), formats, 2) });
        let ids = [(); 2].map(|()| fed.manager.admit().unwrap());
        for group in LayerGroup::ALL {
            let step_meta = fed.manager.writable_step_meta(group).unwrap();
            fed.stream.fill(&step_meta, garbage).unwrap();
        }
        let bucket = fed.bucket(6, 3);
        let mut starts = [0, 0];
        // Chunks, tokens at the ends of windows and blocks, drafts, and a request that is left out.
        for (tokens, padding) in [
            ([130, 126], Padding::None),
            ([1, 1], Padding::None),
            ([3, 1], bucket),
            ([0, 3], bucket),
            ([5, 0], Padding::None),
            ([2, 3], Padding::None),
        ] {
            let parts = (0..2).filter(|&at| tokens[at] > 0);
            let range = |at: usize| starts[at]..starts[at] + tokens[at];
            let parts: Vec<_> =
                parts.map(|at| Part::new(ids[at], &stories[at], range(at))).collect();
            fed.step(&parts, padding);
            (0..2).for_each(|at| starts[at] += tokens[at]);
        }
        fed.manager.check_faults(&fed.stream).unwrap();
        fed.pool_bytes()
    };
    let (zeros, ones) = (pools(0), pools(1));
    for ((name, zeros), (_, ones)) in zeros.iter().zip(&ones) {
        assert_same(ones, zeros, name);
    }
}

pub fn a_step_out_of_range_is_refused<B: Backend>(device: &Device<B>) {
    let stream = device.stream().unwrap();
    let mut manager = manager(device, MainFormat::Ue8m0, 0);
    let id = manager.admit().unwrap();
    let kv = upload_bf16(&stream, &rows(2, 6).concat());
    let tile = device.allocate::<bf16>("tile", 2 * 128 * 512).unwrap();
    let lengths = device.allocate::<i32>("lengths", 1).unwrap();
    let step = [StepRequest { id, start: 0, tokens: 2 }];
    let mut step = manager.begin_step(&stream, Launches::Eager, &step).unwrap();
    let layer = step.swa(LAYER).unwrap().update(&kv).unwrap();
    for (first, end) in [(0, 3), (2, 1)] {
        let error = layer.gather_window(first..end, &tile, &lengths).unwrap_err();
        assert!(matches!(error, KvError::NoSuchQueries { tokens: 2, .. }), "{error}");
    }
    let error = layer.gather_window(0..2, &tile, &lengths).unwrap_err();
    let KvError::Device(DeviceError::TooShort { argument: "lengths", found: 4, needed: 8, .. }) =
        error
    else {
        panic!("the short tensor is named: {error}")
    };
    layer.gather_window(1..2, &tile, &lengths).unwrap();
    layer.gather_window(1..1, &tile, &lengths).unwrap();
}
