//! Every suite's calls on the CPU, at small sizes: what a GPU is to run must have run before.

use dsv4_kv::device::{EmuDevice, EmuOptions};
use dsv4_kv::kv_layout::index_row::IndexFormat;
use dsv4_kv::kv_layout::main_row::MainFormat;

use super::arena::{Arena, Kernel};
use super::indexer::Node;
use super::load::Weight;
use super::step::{self, Case, Row};
use super::timing::Measurement;
use super::{gather, indexer, swa};

fn check(measured: &Measurement) {
    assert!(measured.microseconds > 0.0 && measured.copy_microseconds > 0.0, "{measured:?}");
    assert!(measured.bytes > 0 && measured.nodes > 0, "{measured:?}");
}

#[test]
fn kernels_of_one_layer_run() {
    let device = EmuDevice::new(EmuOptions::default());
    for format in MainFormat::ALL {
        check(&gather::gather_kv(&device, format, (16, 2), None).unwrap());
        check(&gather::gather_all(&device, format, (5, 2), None).unwrap());
        check(&swa::append(&device, format, (2, 3), None).unwrap());
        check(&swa::gather(&device, format, 2, None).unwrap());
    }
    for node in [Node::Scores, Node::Two(16), Node::One(16)] {
        check(&indexer::scores(&device, IndexFormat::Mxfp4, (64, 2), node, None).unwrap());
    }
}

#[test]
fn arenas_are_measured_packed_and_apart() {
    let device = EmuDevice::new(EmuOptions::default());
    let arena = Arena::new("tiny", 400_000, 3).unwrap();
    let kernels = [
        Kernel::GatherList(8, 2),
        Kernel::GatherAll(2, 2),
        Kernel::Scores(64, 2),
        Kernel::Append(2),
        Kernel::GatherWindow(2),
    ];
    for kernel in kernels {
        let [packed, apart] = arena.measure(&device, kernel).unwrap();
        check(&packed);
        check(&apart);
        assert!(packed.size.contains("packed") && apart.size.contains(" apart"), "{}", apart.size);
    }
}

fn measure_step(case: &Case) -> Vec<Row> {
    let device = EmuDevice::new(EmuOptions { memory: 1 << 30, seed: 0 });
    step::measure_case(&device, case).unwrap()
}

fn tiny(weight: Weight) -> Case {
    Case { model: "tiny".into(), context: 256, max_context: 256, requests: 2, weight }
}

#[test]
fn steps_are_measured_by_kind() {
    for weight in [Weight::Bf16, Weight::Nvfp4] {
        let rows = measure_step(&tiny(weight));
        assert_eq!(rows.len(), 2);
        for row in &rows {
            let measured = row.measured.as_ref().unwrap();
            // The trunk is swa, csa, hca, csa: a launch a layer, and one or two more for each gather and list.
            assert_eq!(measured.updates.nodes, 4);
            let nodes = |name: &str| {
                let kind = measured.kinds.iter().find(|kind| kind.name == name).unwrap();
                assert!(kind.timed.microseconds.is_finite());
                kind.timed.nodes
            };
            let reads = ["queries", "scores + lists", "windows", "csa gather", "hca gather"];
            let reads: u64 = reads.into_iter().map(nodes).sum();
            assert_eq!(measured.step.nodes, measured.updates.nodes + reads);
            assert_eq!(measured.routed.nodes, measured.step.nodes + nodes("router"));
            assert!(measured.step.microseconds > 0.0 && measured.host.microseconds > 0.0);
        }
        let table = step::table(&rows).to_string();
        assert!(table.contains("mid-window") && table.contains("boundary"), "{table}");
    }
}

#[test]
fn a_load_that_does_not_fit_is_a_row() {
    let case = Case { requests: 1 << 14, ..tiny(Weight::Bf16) };
    let rows = measure_step(&case);
    assert!(rows[0].measured.as_ref().unwrap_err().starts_with("does not fit"), "{rows:?}");
    assert!(step::table(&rows).to_string().contains("does not fit"));
}
