//! The sliding window: `kv_layout`'s ring compared with the oracle, chunks and rejected drafts included.
//! (`golden/semantics.rs` compares the oracle with the golden semantics.)

use dsv4_kv_oracle::row::{CHANNELS, RowFormat};
use dsv4_kv_oracle::swa::{Ring, WINDOW, gather, window};
use kv_layout::geometry::swa_ring_rows;
use kv_layout::main_row::ring_row;
use proptest::prelude::*;

#[test]
fn after_129_tokens_slot_0_holds_position_128() {
    let mut ring = Ring::new(WINDOW);
    ring.write(0..129);
    assert_eq!(ring.slots()[..2], [Some(128), Some(1)]);
    assert_eq!(window(128), 1..129);
}

#[test]
fn a_chunk_longer_than_the_ring_leaves_its_last_tokens() {
    let mut ring = Ring::new(WINDOW);
    ring.write(0..7);
    ring.write(7..300);
    let mut held: Vec<usize> = ring.slots().iter().copied().flatten().collect();
    held.sort_unstable();
    assert_eq!(held, (172..300).collect::<Vec<_>>());
}

#[test]
fn ring_rows_of_a_slot_are_its_own() {
    let rows = swa_ring_rows(4);
    assert_eq!(rows, 131);
    let ring = Ring::new(rows as usize);
    for position in [0, 1, 130, 131, 132, 1_048_575] {
        for slot in [0, 1, 77] {
            let expected = slot * 131 + ring.slot(position as usize) as u64;
            assert_eq!(ring_row(slot as u32, rows, position), expected);
        }
    }
}

/// Runs verify steps of `step_tokens` tokens on a ring of `rows` rows, and keeps `accepted` tokens of each. Returns
/// whether every query found its window. Rows of rejected drafts carry the number of their step, so that one that is
/// taken for an accepted row is noticed.
fn windows_survive(rows: usize, step_tokens: usize, accepted: &[usize]) -> bool {
    let mut ring = vec![None; rows];
    let mut truth: Vec<(usize, usize)> = Vec::new();
    for (step, &accepted) in accepted.iter().enumerate() {
        let start = truth.len();
        for position in start..start + step_tokens {
            truth.push((position, step));
            ring[position % rows] = Some((position, step));
        }
        for query in start..start + step_tokens {
            if window(query).any(|key| ring[key % rows] != Some(truth[key])) {
                return false;
            }
        }
        truth.truncate(start + accepted);
    }
    true
}

#[test]
fn a_ring_one_row_shorter_loses_a_key() {
    for step_tokens in 2..=8 {
        let rows = swa_ring_rows(step_tokens) as usize;
        let steps = vec![1; 2 * WINDOW];
        assert!(windows_survive(rows, step_tokens as usize, &steps));
        assert!(!windows_survive(rows - 1, step_tokens as usize, &steps), "{step_tokens}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    #[test]
    fn rejected_drafts_never_cost_a_key(
        (step_tokens, accepted) in (1usize..=8)
            .prop_flat_map(|d| (Just(d), prop::collection::vec(1..=d, 1..300)))
    ) {
        let rows = swa_ring_rows(step_tokens as u32) as usize;
        prop_assert!(windows_survive(rows, step_tokens, &accepted));
    }
}

#[test]
fn a_gathered_tile_is_the_window_oldest_first() {
    // Each position has values of its own in channels 0 and 460. Channel 460 is stored exactly. Channel 0 is quantised,
    // so each row of the tile is compared with the round trip of its own row.
    let history: Vec<Vec<u16>> = (0..130u16)
        .map(|position| {
            let mut row = vec![0; CHANNELS];
            row[0] = 0x3F80 + position;
            row[460] = 0x4000 + position;
            row
        })
        .collect();
    for format in RowFormat::ALL {
        for (position, first, length) in [(0, 0, 1), (126, 0, 127), (127, 0, 128), (129, 2, 128)] {
            let (tile, found) = gather(format, &history, position);
            assert_eq!((tile.len(), found), (128 * 512, length));
            for (j, row) in tile.chunks_exact(CHANNELS).enumerate() {
                if j < length {
                    assert_eq!(row[460], 0x4000 + (first + j) as u16, "{position}, row {j}");
                    assert_eq!(row, format.decode(&format.encode(&history[first + j])));
                } else {
                    assert!(row.iter().all(|&x| x == 0), "{position}, row {j}");
                }
            }
        }
    }
}
