//! Every suite's calls on the CPU, at small sizes: what a GPU is to run must have run before.

use dsv4_kv::device::{EmuDevice, EmuOptions};
use dsv4_kv::kv_layout::index_row::IndexFormat;
use dsv4_kv::kv_layout::main_row::MainFormat;

use super::arena::{Arena, Kernel};
use super::indexer::Node;
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
