//! The oracle's indexer compared with transformers: scores, the selected entries, and variants with which it must not
//! agree. Queries and keys of these vectors are f32; nothing is quantised here.

use anyhow::Result;
use dsv4_kv_oracle::compressor::visible;
use dsv4_kv_oracle::indexer::{score, top_k, weight_scale};
use dsv4_kv_tests::golden;

const CHANNELS: usize = 128;
/// As a part of the sum of magnitudes. The golden scores are sums in f32.
const TOLERANCE: f64 = 2e-6;

/// Queries `[heads, 128]`, weights `[heads]` without the constants, and keys `[entries, 128]`.
struct Case {
    queries: Vec<Vec<f64>>,
    weights: Vec<f64>,
    keys: Vec<Vec<f64>>,
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

fn vectors(values: &[f32]) -> Vec<Vec<f64>> {
    values.chunks_exact(CHANNELS).map(wide).collect()
}

impl Case {
    fn scores(&self) -> Vec<dsv4_kv_oracle::indexer::Score> {
        let scale = weight_scale(self.weights.len());
        let weights: Vec<f64> = self.weights.iter().map(|weight| weight * scale).collect();
        self.keys.iter().map(|key| score(&self.queries, &weights, key)).collect()
    }

    /// The scores in f32. Asserts that each is within the tolerance of `golden`.
    fn check(&self, golden: &[f32]) -> Vec<f32> {
        let scores = self.scores();
        assert_eq!(scores.len(), golden.len());
        for (entry, (score, &golden)) in scores.iter().zip(golden).enumerate() {
            let error = (score.value - f64::from(golden)).abs();
            assert!(error <= TOLERANCE * score.magnitude, "entry {entry}: {score:?}, not {golden}");
        }
        scores.iter().map(|score| score.value as f32).collect()
    }
}

/// The short case: 27 queries of 8 heads over 6 entries. `queries` and `keys` name the vectors, with
/// the Hadamard transform on both sides or on neither.
fn short(queries: &str, keys: &str) -> Result<()> {
    let (queries, weights) =
        (golden::load::<f32>(queries)?, golden::load::<f32>("idx_weights_raw")?);
    let keys = vectors(&golden::load::<f32>(keys)?.data);
    let (scores, lists) =
        (golden::load::<f32>("idx_score_fp32")?, golden::load::<i32>("idx_topk")?);
    let heads = weights.shape[1];
    for (token, query) in queries.data.chunks_exact(heads * CHANNELS).enumerate() {
        let case = Case {
            queries: vectors(query),
            weights: wide(&weights.data[token * heads..][..heads]),
            keys: keys.clone(),
        };
        let golden = &scores.data[token * keys.len()..][..keys.len()];
        let found = case.check(golden);
        let k = lists.shape[1];
        let wanted = &lists.data[token * k..][..k];
        assert_eq!(top_k(&found[..visible(token, 4)], k), wanted, "query {token}");
    }
    Ok(())
}

#[test]
fn scores_and_lists_equal_transformers() -> Result<()> {
    short("idx_q_rope", "idx_key_fp32")?;
    short("idx_q_hadamard", "idx_key_hadamard")
}

/// The entries that the mask of transformers' compressor leaves to each query are those with the best scores.
#[test]
fn masks_are_those_of_the_lists() -> Result<()> {
    let masks = golden::load::<u8>("csa_topk_mask")?;
    let scores = golden::load::<f32>("idx_score_fp32")?;
    let k = golden::load::<i32>("idx_topk")?.shape[1];
    assert_eq!((masks.shape[0], scores.shape[0]), (27, 27));
    for (query, (mask, scores)) in masks.rows().zip(scores.rows()).enumerate() {
        let attended = (0..).zip(mask).filter(|&(_, &bit)| bit == 1).map(|(entry, _)| entry);
        let mut listed = top_k(&scores[..visible(query, 4)], k);
        listed.retain(|&entry| entry >= 0);
        listed.sort_unstable();
        assert_eq!(attended.collect::<Vec<i32>>(), listed, "query {query}");
    }
    Ok(())
}

#[test]
fn a_long_list_equals_numpy() -> Result<()> {
    let load = golden::load::<f32>;
    let case = Case {
        queries: vectors(&load("idxlong_q")?.data),
        weights: wide(&load("idxlong_w")?.data),
        keys: vectors(&load("idxlong_key")?.data),
    };
    let found = case.check(&load("idxlong_score")?.data);
    let wanted = golden::load::<i32>("idxlong_topk")?.data;
    assert_eq!(top_k(&found, wanted.len()), wanted);
    Ok(())
}

#[test]
fn negative_products_do_not_count_and_weights_may_be_negative() {
    // Two heads, products +2 and -2, weights 1 and -5: 2 with the relu, 12 without.
    let unit = |value: f64| [vec![value], vec![0.0; CHANNELS - 1]].concat();
    let queries = [unit(2.0), unit(-2.0)];
    assert_eq!(score(&queries, &[1.0, -5.0], &unit(1.0)).value, 2.0);
    assert_eq!(score(&queries, &[-1.0, 5.0], &unit(1.0)).value, -2.0);
    assert_eq!(score(&queries, &[1.0, -5.0], &unit(1.0)).magnitude, 12.0);
}

#[test]
fn ties_go_to_the_lower_index_and_nan_comes_last() {
    let (nan, infinity) = (f32::NAN, f32::INFINITY);
    let scores = [0.0, nan, 1.0, -0.0, -infinity, 1.0, infinity, -nan];
    assert_eq!(top_k(&scores, 9), [6, 2, 5, 0, 3, 4, 1, 7, -1]);
    assert_eq!(top_k(&scores, 2), [6, 2]);
    assert_eq!(top_k(&[], 3), [-1; 3]);
}
