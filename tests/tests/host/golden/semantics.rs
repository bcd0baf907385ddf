//! The meaning of positions: the oracle compared with `golden/index_semantics.json`. Entries visible to a query, window
//! and ring row of a query, entries that a step closes, state that must be kept.

use std::collections::BTreeMap;

use anyhow::Result;
use dsv4_kv_oracle::compressor::{Shape, closed_entries, visible};
use dsv4_kv_oracle::swa::{Ring, WINDOW, window};
use dsv4_kv_tests::golden;
use kv_layout::geometry::{CSA_RATIO, HCA_RATIO};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Semantics {
    visible_entries: BTreeMap<usize, Visible>,
    swa: BTreeMap<usize, WindowOfQuery>,
    flushes: Vec<Flush>,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Visible {
    csa: usize,
    hca: usize,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct WindowOfQuery {
    slot: usize,
    n: usize,
    first_slot: usize,
    last_slot: usize,
}

/// A step of `n` tokens from `start` on.
#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Flush {
    start: usize,
    n: usize,
    csa_entries: Vec<usize>,
    hca_entries: Vec<usize>,
    csa_rope_pos: Vec<usize>,
    csa_state_keep: [usize; 2],
}

fn semantics() -> Result<Semantics> {
    Ok(serde_json::from_str(&golden::text("index_semantics.json")?)?)
}

#[test]
fn ratios_are_those_of_the_layout() {
    let ratios = [Shape::CSA, Shape::INDEX, Shape::HCA].map(|shape| shape.ratio as u32);
    assert_eq!(ratios, [CSA_RATIO, CSA_RATIO, HCA_RATIO]);
}

#[test]
fn visible_entries() -> Result<()> {
    let expected = semantics()?.visible_entries;
    assert_eq!(expected.len(), 12);
    for (&position, expected) in &expected {
        let [csa, hca] = [Shape::CSA, Shape::HCA].map(|shape| visible(position, shape.ratio));
        assert_eq!(&Visible { csa, hca }, expected, "{position}");
    }
    Ok(())
}

#[test]
fn windows() -> Result<()> {
    let expected = semantics()?.swa;
    assert_eq!(expected.len(), 8);
    for (&position, expected) in &expected {
        let mut ring = Ring::new(WINDOW);
        ring.write(0..position + 1);
        let keys = window(position);
        assert!(keys.clone().all(|key| ring.holds(key)), "{position}");
        assert_eq!(ring.slots().iter().flatten().count(), keys.len(), "{position}");
        let found = WindowOfQuery {
            slot: ring.slot(position),
            n: keys.len(),
            first_slot: ring.slot(keys.start),
            last_slot: ring.slot(keys.end - 1),
        };
        assert_eq!(&found, expected, "{position}");
    }
    Ok(())
}

#[test]
fn closed_entries_and_state() -> Result<()> {
    let expected = semantics()?.flushes;
    assert_eq!(expected.len(), 8);
    for expected in expected {
        let (start, n) = (expected.start, expected.n);
        let csa = closed_entries(start, n, Shape::CSA.ratio);
        let keep = Shape::CSA.state_keep(start + n);
        let found = Flush {
            start,
            n,
            csa_entries: csa.clone().collect(),
            hca_entries: closed_entries(start, n, Shape::HCA.ratio).collect(),
            csa_rope_pos: csa.map(|entry| Shape::CSA.rope_position(entry)).collect(),
            csa_state_keep: [keep.start, keep.end],
        };
        assert_eq!(found, expected);
    }
    Ok(())
}

/// Whatever the steps are, each entry closes in exactly one of them, and is visible from then on.
#[test]
fn every_entry_closes_once() {
    for shape in [Shape::CSA, Shape::HCA] {
        for step in [1, 3, 4, 5, 127, 128, 300] {
            let mut closed = 0;
            for start in (0..1200).step_by(step) {
                let entries = closed_entries(start, step, shape.ratio);
                assert_eq!(entries.start, closed, "from {start}, {step} tokens");
                closed = entries.end;
                assert_eq!(visible(start + step - 1, shape.ratio), closed);
            }
        }
    }
}
