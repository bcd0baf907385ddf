//! Counts of the rows that kernels refuse, and of poison that they read. Each is reported once.

use dsv4_kv::device::EmuOptions;
use dsv4_kv::step_meta::{Section, StepLayout};
use dsv4_kv::{Accepted, CacheConfig, KvError, LayerGroup, bf16};
use dsv4_kv_tests::failing::Failing;
use dsv4_kv_tests::fed::{Fed, Padding, Part, Updated, begin};
use dsv4_kv_tests::stories::{Story, config};
use kv_layout::geometry::LayerKind::Swa;
use kv_layout::index_row::IndexFormat;
use kv_layout::main_row::MainFormat;

/// A kernel in another stream counts a refused row while a check reads the counts: this check reports it, or the next one.
#[test]
fn a_check_loses_no_count_of_another_stream() {
    let story = Story::random(&[Swa], 2, 3);
    for call in 0.. {
        let device = Failing::late(EmuOptions::default());
        let formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
        let mut fed = Fed::new(&device, config(&[Swa], formats, 1));
        let streams = [fed.stream.clone(), device.stream().unwrap()];
        let id = fed.manager.admit().unwrap();
        let step_meta = fed.manager.writable_step_meta(LayerGroup::Trunk).unwrap();
        let row = StepLayout::new(1, 0).range(Section::RingRow).start as u64;
        for (token, stream) in streams.iter().enumerate() {
            let parts = [Part::new(id, &story, token..token + 1)];
            let Fed { manager, inputs, .. } = &mut fed;
            inputs.load(stream, &parts, 1);
            let mut step = begin(manager, stream, &parts, Padding::None).unwrap().remove(0);
            // A row that the ring does not have, as a wrong step planner would write it.
            stream.upload(&[i32::MAX], &step_meta, row).unwrap();
            inputs.run(&mut step, &mut |_, _| Ok(())).unwrap();
            step.commit(&[Accepted::count(id, 1)]).unwrap();
        }
        let [first, second] = &streams;
        first.synchronize().unwrap();
        // The work of the other stream has not run yet. It runs inside the check.
        let late = second.clone();
        device.backend().run_before(call, move || late.synchronize().unwrap());
        let mut count = 0;
        for stream in [first, second] {
            match fed.manager.check_faults(stream) {
                Ok(()) => {}
                Err(KvError::KernelRefused { refusals }) => {
                    count += refusals.iter().map(|refusal| refusal.count).sum::<u32>();
                }
                Err(other) => panic!("{other}"),
            }
        }
        assert_eq!(count, 2, "before call {call}");
        fed.manager.check_faults(second).unwrap();
        if !device.backend().has_run() {
            assert!(call > 1, "it has run before and after a read");
            break;
        }
    }
}

/// The same of a row that nobody wrote.
#[test]
fn a_check_loses_no_poison_of_another_stream() {
    let story = Story::random(&[Swa], 3, 4);
    for call in 0.. {
        let device = Failing::late(EmuOptions::default());
        let formats = (MainFormat::Ue8m0, IndexFormat::Mxfp4);
        let config = CacheConfig { poison: true, ..config(&[Swa], formats, 1) };
        let mut fed = Fed::new(&device, config);
        let streams = [fed.stream.clone(), device.stream().unwrap()];
        let tile = device.allocate::<bf16>("tile", 128 * 512).unwrap();
        let lengths = device.allocate::<i32>("lengths", 1).unwrap();
        let id = fed.manager.admit().unwrap();
        fed.lose(&[Part::new(id, &story, 0..1)]);
        for (token, stream) in (1..).zip(&streams) {
            let parts = [Part::new(id, &story, token..token + 1)];
            let Fed { manager, inputs, .. } = &mut fed;
            inputs.load(stream, &parts, 1);
            let mut step = begin(manager, stream, &parts, Padding::None).unwrap().remove(0);
            let gather =
                &mut |_, layer: &Updated<'_, _>| layer.gather_window(0..1, &tile, &lengths);
            inputs.run(&mut step, gather).unwrap();
            step.commit(&[Accepted::count(id, 1)]).unwrap();
        }
        let [first, second] = &streams;
        first.synchronize().unwrap();
        // The work of the other stream has not run yet. It runs inside the check.
        let late = second.clone();
        device.backend().run_before(call, move || late.synchronize().unwrap());
        let mut found = Vec::new();
        for stream in [first, second] {
            match fed.manager.check_poison(stream) {
                Ok(()) => {}
                Err(KvError::PoisonRead { count, rows }) => {
                    assert_eq!(count as usize, rows.len(), "before call {call}");
                    found.extend(rows.iter().map(|row| row.position));
                }
                Err(other) => panic!("{other}"),
            }
        }
        assert_eq!(found, [1, 2], "before call {call}");
        fed.manager.check_poison(second).unwrap();
        if !device.backend().has_run() {
            assert!(call > 1, "it has run before and after a read");
            break;
        }
    }
}
