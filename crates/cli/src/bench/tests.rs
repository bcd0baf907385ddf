//! The calls of every suite, on the CPU and at small sizes, so that code that a GPU will run has run before.

use clap::Parser;
use dsv4_kv::device::{EmuDevice, EmuOptions};
use dsv4_kv::kv_layout::attention::KeyCluster;
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::kv_layout::index_row::IndexFormat;
use dsv4_kv::kv_layout::main_row::MainFormat;
use dsv4_kv::ops::CopyDirection;

use super::decode::Phase;
use super::indexer::Node;
use super::load::{LoadArgs, Weight};
use super::prefill::{self, Chunk};
use super::projections::LayerProjections;
use super::step::{self, Case, Row};
use super::timing::Measurement;
use super::{attention, checkpoints, decode, gather, indexer, linear, router, state, swa, tier};
use crate::options::ClusterChoice;

fn check(measured: &Measurement) {
    assert!(measured.microseconds > 0.0 && measured.copy_microseconds > 0.0, "{measured:?}");
    assert!(measured.bytes > 0 && measured.nodes > 0, "{measured:?}");
}

#[test]
fn kernels_of_one_layer_run() {
    let device = EmuDevice::new(EmuOptions::default());
    for format in MainFormat::ALL {
        check(&gather::gather_entries(&device, format, 16, 2).unwrap());
        check(&gather::gather_all(&device, format, 5, 2).unwrap());
        check(&swa::append(&device, format, 2, 3).unwrap());
        check(&swa::gather(&device, format, 2).unwrap());
    }
    for node in [Node::Scores, Node::Chunk, Node::Two(16), Node::One(16)] {
        check(&indexer::scores(&device, IndexFormat::Mxfp4, (64, 2, 3), node).unwrap());
    }
    check(&indexer::selection(&device, (64, 2), 16, true).unwrap());
    for kernel in linear::Kernel::ALL {
        for columns in [128, 320] {
            let case = linear::Case { kernel, columns, inner: 128, tokens: 2 };
            check(&case.measure(&device, &mut Vec::new()).unwrap());
        }
    }
    for (hash, hidden, tokens) in [(false, 0, 2), (true, 0, 2), (false, 256, 2), (false, 256, 65)] {
        let case = router::Case { hash, hidden, experts: 64, tokens };
        check(&case.measure(&device).unwrap());
    }
}

#[test]
fn attention_is_measured() {
    use attention::{Case, Queries};
    let device = EmuDevice::new(EmuOptions { memory: 1 << 30, seed: 0 });
    let csa = Case::new(4, LayerKind::Csa, 16, 1);
    let cases = [
        // Four rows per node, so that the size of their scales is a multiple of 8 bytes.
        Case { queries: Queries::Chunk(4), ..csa.clone() }.with_f32_scales(),
        Case { queries: Queries::Decode(2), ..csa }.in_graph(2, 0),
        Case::new(4, LayerKind::Hca, 5, 1).in_graph(1, 2048),
        Case::new(4, LayerKind::Swa, 0, 1).peer(1.0),
    ];
    let rows = cases.map(|case| attention::measure_case(&device, &case).unwrap());
    for row in &rows {
        check(&row.measured);
        assert!(row.teraflops > 0.0 && row.products_microseconds > 0.0, "{row:?}");
        assert!(row.in_a_row_microseconds > Some(0.0), "{row:?}");
        assert!(row.behind_others_microseconds > Some(0.0), "{row:?}");
    }
    let peers = rows.iter().filter(|row| row.peer_microseconds.is_some()).count();
    assert_eq!((peers, &*rows[0].measured.kernel), (1, "attend_f32"));
    assert_eq!(attention::table(&rows).row_iter().count(), 4);
}

#[test]
fn copies_of_state_are_measured() {
    let device = EmuDevice::new(EmuOptions { memory: 1 << 30, seed: 0 });
    for direction in [CopyDirection::Pack, CopyDirection::Unpack, CopyDirection::Copy] {
        check(&state::copy(&device, "tiny", direction, 2).unwrap());
    }
    // Rows of 512 BF16 values, stored as 584 bytes: 128 for the ring, and as many for each of two checkpoints, of which
    // the last has those of the ring. Of every token the number of its row, and with checkpoints of its row there.
    let ring = 4 * 512 + 128 * (1024 + 584);
    let saved = 8 * 512 + 256 * 1024 + 384 * 584;
    for (saves, bytes) in [(false, ring), (true, saved)] {
        let measured = state::append(&device, (512, 256), saves).unwrap();
        check(&measured);
        assert_eq!(measured.bytes, bytes);
    }
}

#[test]
fn a_layers_decode_is_measured() {
    let device = EmuDevice::new(EmuOptions { memory: 1 << 30, seed: 0 });
    for (kind, phase, drafts) in [
        (LayerKind::Csa, Phase::Boundary, 0),
        (LayerKind::Csa, Phase::Middle, 2),
        (LayerKind::Hca, Phase::Random, 0),
    ] {
        check(&decode::Case { kind, phase, drafts, requests: 2 }.measure(&device).unwrap());
    }
    // A window row, and both halves of both compressors from the projections and to the state; and one row of the
    // position bias, which both requests read.
    let case = decode::Case { kind: LayerKind::Csa, phase: Phase::Middle, drafts: 0, requests: 2 };
    let request = 2 * 512 + 584 + 2 * 2 * 8 * (512 + 128);
    assert_eq!(case.measure(&device).unwrap().bytes, 2 * request + 2 * 4 * (512 + 128));
}

/// No node of a graph finds inputs of another in the L2 cache, nor those of one compressor for the other.
#[test]
fn nodes_of_a_decode_have_inputs_of_their_own() {
    let device = EmuDevice::new(EmuOptions { memory: 1 << 30, seed: 0 });
    let stream = device.stream().unwrap();
    let case = decode::Case { kind: LayerKind::Csa, phase: Phase::Middle, drafts: 2, requests: 2 };
    let projections = case.projections(&stream, 3).unwrap();
    let mut spans = Vec::new();
    for node in 0..3 {
        let LayerProjections { kv, main, index } = projections.layer(node, case.step_tokens());
        spans.push((kv.span().address(), kv.bytes()));
        let inputs = main.0.iter().chain(&index.0);
        spans.extend(inputs.map(|input| (input.span().address(), input.bytes())));
    }
    spans.sort_unstable();
    assert_eq!(spans.len(), 3 * 9);
    for pair in spans.windows(2) {
        let [(start, bytes), (next, _)] = pair else { unreachable!("windows of two") };
        assert!(*bytes > 0 && start + bytes <= *next, "{spans:?}");
    }
}

fn measure_step(requests: u32, attention: Option<ClusterChoice>) -> Vec<Row> {
    let device = EmuDevice::new(EmuOptions { memory: 1 << 30, seed: 0 });
    let (model, context, weight) = ("tiny".into(), 256, Weight::Bf16);
    let (attention, attention_cluster) = (attention.is_some(), attention.unwrap_or_default());
    let max_context = context;
    let case = Case { model, context, max_context, requests, weight, attention, attention_cluster };
    step::measure_case(&device, &case).unwrap()
}

#[test]
fn steps_are_measured_by_kind() {
    let rows = measure_step(2, None);
    assert_eq!(rows.len(), 2);
    for row in &rows {
        let measured = row.measured.as_ref().unwrap();
        // The trunk is swa, csa, hca, csa, with one launch per layer.
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
        assert!(measured.step.microseconds > 0.0 && measured.host.own.microseconds > 0.0);
    }
    let table = step::table(&rows).to_string();
    assert!(table.contains("mid-window") && table.contains("boundary"), "{table}");
}

#[test]
fn steps_with_attention_in_place_are_measured() {
    let [rows, one_block] = [ClusterChoice::TwoBlocks, ClusterChoice::OneBlock]
        .map(|cluster| measure_step(1, Some(cluster)));
    for row in rows.iter().chain(&one_block) {
        let measured = row.measured.as_ref().unwrap();
        let nodes = |name: &&str| {
            let kind = measured.kinds.iter().find(|kind| kind.name == *name).unwrap();
            assert!(kind.timed.microseconds > 0.0);
            kind.timed.nodes
        };
        let attended = measured.attended.unwrap();
        // The trunk is swa, csa, hca, csa.
        assert_eq!(["swa attend", "csa attend", "hca attend"].each_ref().map(nodes), [1, 2, 1]);
        let gathers = ["windows", "csa gather", "hca gather"].iter().map(nodes).sum::<u64>();
        assert_eq!(attended.nodes, measured.step.nodes - gathers + 4);
    }
    let [table, table_of_one_block] = [&rows, &one_block].map(|rows| step::table(rows).to_string());
    assert!(table.contains("in place") && !table.contains("one block"), "{table}");
    assert!(table_of_one_block.contains("tiny, one block"), "{table_of_one_block}");
}

#[test]
fn a_step_has_the_cluster_that_is_asked_for() {
    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        load: LoadArgs,
    }
    for (options, cluster) in [
        (["step", "--attention"].as_slice(), KeyCluster::default()),
        (&["step", "--attention", "--attention-cluster", "two-blocks"], KeyCluster::TwoBlocks),
        (&["step", "--attention", "--attention-cluster", "one-block"], KeyCluster::OneBlock),
    ] {
        let cases = step::cases(&Line::try_parse_from(options).unwrap().load);
        assert!(!cases.is_empty());
        for case in cases {
            assert_eq!(case.config().unwrap().attention_cluster, cluster, "{options:?}");
        }
    }
    assert!(Line::try_parse_from(["step", "--attention-cluster", "one-block"]).is_err());
}

#[test]
fn a_load_that_does_not_fit_is_a_row() {
    let rows = measure_step(1 << 14, None);
    assert!(rows[0].measured.as_ref().unwrap_err().starts_with("does not fit"), "{rows:?}");
    assert!(step::table(&rows).to_string().contains("does not fit"));
}

#[test]
fn chunks_are_measured_by_kernel() {
    let device = EmuDevice::new(EmuOptions { memory: 1 << 30, seed: 0 });
    // Both kinds of windows close in this chunk.
    let chunk = Chunk { tokens: 12, past: 120 };
    let kernels = 7;
    for weight in [Weight::Bf16, Weight::Nvfp4] {
        let case = prefill::Case { model: "tiny".into(), chunk, weight };
        let rows = prefill::measure_chunk(&device, &case).unwrap();
        assert_eq!(rows.len(), kernels);
        for row in &rows {
            assert!(row.microseconds.is_finite() && row.floor_microseconds > 0.0, "{row:?}");
        }
        // The trunk of four layers has two CSA layers and one HCA layer.
        let layers: Vec<u32> = rows.iter().map(|row| row.layers).collect();
        assert_eq!((layers[0], layers[1], layers[kernels - 1]), (2, 1, 4));
        assert_eq!(prefill::table(&rows).row_iter().count(), kernels);
        assert_eq!(prefill::summary(&rows).row_iter().count(), 1);
    }
}

#[test]
fn a_chunk_saves_checkpoints() {
    let device = EmuDevice::new(EmuOptions { memory: 1 << 30, seed: 0 });
    let case = checkpoints::Case { model: "tiny".into(), tokens: 129, past: 0 };
    let rows = checkpoints::measure_case(&device, &case).unwrap();
    let [checkpoints::Row { checkpoints: 1, microseconds, saving_microseconds, .. }] = rows[..]
    else {
        panic!("{rows:?}");
    };
    assert!(microseconds > 0.0 && saving_microseconds > 0.0, "{rows:?}");
    assert_eq!(checkpoints::table(&rows).row_iter().count(), 1);
}

#[test]
fn a_prefix_goes_to_host_memory_and_back() {
    let device = EmuDevice::new(EmuOptions { memory: 1 << 30, seed: 0 });
    let case = tier::Case { model: "tiny".into(), prefix: 128, decode: (1, 128), step_tokens: 256 };
    let rows = tier::measure_case(&device, &case).unwrap();
    let directions: Vec<_> = rows.iter().map(|row| &*row.direction).collect();
    assert_eq!(directions, ["to host", "from host"]);
    for row in &rows {
        assert!(row.bytes > 2 * 128 && row.microseconds > 0.0 && row.copy_microseconds > 0.0);
        assert!(row.step_microseconds > 0.0 && row.beside_microseconds > 0.0, "{row:?}");
        assert!(row.steps > 0, "{row:?}");
    }
    assert_eq!(tier::table(&rows).row_iter().count(), 2);
}
