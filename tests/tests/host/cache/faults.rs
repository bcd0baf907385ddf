//! Counts of the rows that kernels refuse, and of poison that they read. Each is reported once.

use dsv4_kv::device::{Buffer, EmuOptions, Emulator, Stream};
use dsv4_kv::step::Layers;
use dsv4_kv::step_meta::{Section, StepLayout};
use dsv4_kv::{Accepted, CacheConfig, KvCacheManager, KvError, LayerGroup, bf16};
use dsv4_kv_tests::failing::{Failing, Failure};
use dsv4_kv_tests::fed::{Fed, Inputs, Padding, Part, Updated, begin};
use dsv4_kv_tests::lazy::Lazy;
use dsv4_kv_tests::stories::{Story, config, tiny};
use kv_layout::geometry::LayerKind::Swa;
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

type Late = Failing<Lazy<Emulator>>;

/// Memory of a step of one token.
struct Tensors {
    step_meta: Buffer<Late, i32>,
    tile: Buffer<Late, bf16>,
    lengths: Buffer<Late, i32>,
}

/// Runs two steps of a token each in two streams, by `run`, and then `check` for each stream. The work of the second stream runs
/// inside the checks: before each of their device calls in turn. The checks together find `want`, and nothing afterwards.
fn check_beside_another_stream(
    run: impl Fn(&Inputs<Late>, &mut Layers<'_, Late>, &Stream<Late>, &Tensors),
    check: impl Fn(&KvCacheManager<Late>, &Stream<Late>) -> Vec<u32>,
    want: &[u32],
) {
    let story = Story::random(&[Swa], 3, 3);
    for call in 0.. {
        let device = Failing::late(EmuOptions::default());
        let formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
        let config = CacheConfig { poison: true, ..config(&[Swa], formats, 1) };
        let mut fed = Fed::new(&device, config);
        let streams = [fed.stream.clone(), device.stream().unwrap()];
        let tensors = Tensors {
            step_meta: fed.manager.writable_step_meta(LayerGroup::Trunk).unwrap(),
            tile: device.allocate("tile", 128 * 512).unwrap(),
            lengths: device.allocate("lengths", 1).unwrap(),
        };
        let id = fed.manager.admit().unwrap();
        fed.lose(&[Part::new(id, &story, 0..1)]);
        for (token, stream) in (1..).zip(&streams) {
            let parts = [Part::new(id, &story, token..token + 1)];
            let Fed { manager, inputs, .. } = &mut fed;
            inputs.load(stream, &parts, 1);
            let mut step = begin(manager, stream, &parts, Padding::None).unwrap().remove(0);
            run(inputs, &mut step, stream, &tensors);
            step.commit(&[Accepted::count(id, 1)]).unwrap();
        }
        let [first, second] = &streams;
        first.synchronize().unwrap();
        // The work of the other stream has not run yet.
        let late = second.clone();
        device.backend().run_before(call, move || late.synchronize().unwrap());
        let found = [first, second].map(|stream| check(&fed.manager, stream)).concat();
        assert_eq!(found, want, "before call {call}");
        assert_eq!(check(&fed.manager, second), [0_u32; 0], "before call {call}");
        if !device.backend().has_run() {
            assert!(call > 1, "it has run before and after a read");
            break;
        }
    }
}

/// A kernel in another stream counts a refused row while a check reads the counts: this check reports it, or the next one.
#[test]
fn a_check_loses_no_count_of_another_stream() {
    let row = StepLayout::new(1, 0).range(Section::RingRow).start as u64;
    check_beside_another_stream(
        |inputs, step, stream, tensors| {
            // A row that the ring does not have, as a wrong step planner would write it.
            stream.upload(&[i32::MAX], &tensors.step_meta, row).unwrap();
            inputs.run(step, &mut |_, _| Ok(())).unwrap();
        },
        |cache, stream| match cache.check_faults(stream) {
            Ok(()) => Vec::new(),
            Err(KvError::KernelRefused { refusals }) => {
                refusals.iter().flat_map(|refusal| vec![1; refusal.count as usize]).collect()
            }
            Err(other) => panic!("{other}"),
        },
        &[1, 1],
    );
}

/// The same of a row that nobody wrote: the queries that read it are named.
#[test]
fn a_check_loses_no_poison_of_another_stream() {
    check_beside_another_stream(
        |inputs, step, _, Tensors { tile, lengths, .. }| {
            let gather = &mut |_, layer: &Updated<'_, _>| layer.gather_window(0..1, tile, lengths);
            inputs.run(step, gather).unwrap();
        },
        |cache, stream| match cache.check_poison(stream) {
            Ok(()) => Vec::new(),
            Err(KvError::PoisonRead { count, rows }) => {
                assert_eq!(count as usize, rows.len());
                rows.iter().map(|row| row.position).collect()
            }
            Err(other) => panic!("{other}"),
        },
        &[1, 2],
    );
}

/// A check in which a call of the device fails loses no row that was found, of either layer group: the next one reports
/// it.
#[test]
fn a_check_that_fails_loses_no_poison() {
    let story = Story::random(&tiny(), 2, 3);
    let formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
    for call in 0.. {
        let device = Failing::emulated(EmuOptions::default());
        let mut fed =
            Fed::new(&device, CacheConfig { poison: true, ..config(&tiny(), formats, 1) });
        let tile = device.allocate("tile", 128 * 512).unwrap();
        let lengths = device.allocate("lengths", 1).unwrap();
        let id = fed.manager.admit().unwrap();
        fed.lose(&[Part::new(id, &story, 0..1)]);
        let mut want = Vec::new();
        fed.run(&[Part::new(id, &story, 1..2)], Padding::None, &[1], &mut |layer, updated| {
            want.push(layer);
            updated.gather_window(0..1, &tile, &lengths)
        });
        device.backend().fail(call, Failure::Instead);
        let checks = [0, 1].map(|_| fed.manager.check_poison(&fed.stream));
        let is_last = device.backend().failed().is_none();
        let mut found = Vec::new();
        for check in checks {
            match check {
                Err(KvError::PoisonRead { rows, .. }) => {
                    found.extend(rows.iter().map(|row| row.layer))
                }
                Err(KvError::Device(_)) | Ok(()) => {}
                Err(other) => panic!("{other}"),
            }
        }
        // A row whose report could not be marked may be reported twice.
        found.sort_unstable();
        found.dedup();
        assert_eq!(found, want, "call {call} fails");
        if is_last {
            assert!(call > 1, "both groups were read");
            break;
        }
    }
}
