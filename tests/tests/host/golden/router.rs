//! The oracle's router compared with the golden vectors: activations and weights of transformers, and ids in stable
//! order, edge rows included.

use anyhow::Result;
use dsv4_kv_oracle::router::{activation, select, weights};
use dsv4_kv_tests::golden;

const SCALING: f64 = 1.5;

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}

fn assert_close(got: &[f64], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len());
    for (&got, &want) in got.iter().zip(want) {
        let want = f64::from(want);
        assert!((got - want).abs() <= 1e-6 * want.abs() + 1e-20, "{what}: {got} for {want}");
    }
}

#[test]
fn activations_are_equal() -> Result<()> {
    let logits = golden::load::<f32>("router_logits")?;
    let want = golden::load::<f32>("router_act")?;
    for (logit, want) in logits.data.iter().zip(&want.data) {
        assert_close(&[activation(f64::from(*logit))], &[*want], "activation");
    }
    Ok(())
}

#[test]
fn experts_and_weights_are_equal() -> Result<()> {
    let logits = golden::load::<f32>("router_logits")?;
    let bias = wide(&golden::load::<f32>("router_bias")?.data);
    let ids = golden::load::<i32>("router_topk_idx")?;
    let want = golden::load::<f32>("router_topk_w")?;
    assert_eq!((&logits.shape[..], &ids.shape[..]), (&[48, 256][..], &[48, 6][..]));
    for (row, logits) in logits.rows().enumerate() {
        let routed = select(&wide(logits), &bias, 6, SCALING);
        assert_eq!(routed.ids, ids.rows().nth(row).unwrap(), "row {row}");
        assert_close(&routed.weights, want.rows().nth(row).unwrap(), &format!("row {row}"));
    }
    Ok(())
}

#[test]
fn weights_of_hashed_experts_are_equal() -> Result<()> {
    let logits = golden::load::<f32>("router_logits")?;
    let table = golden::load::<i32>("hash_tid2eid")?;
    let tokens = golden::load::<i64>("hash_input_ids")?;
    let want = golden::load::<f32>("hash_topk_w")?;
    let mut uniform = 0;
    for (row, (logits, &token)) in logits.rows().zip(&tokens.data).enumerate() {
        let ids = table.rows().nth(token as usize).unwrap();
        let got = weights(&wide(logits), ids, SCALING);
        assert_close(&got, want.rows().nth(row).unwrap(), &format!("row {row}"));
        uniform += usize::from(got.iter().all(|weight| (weight - SCALING / 6.0).abs() < 1e-6));
    }
    assert!(uniform < 10, "equal weights for every expert are the original design's mistake");
    Ok(())
}

/// Numbers that can be checked by hand.
#[test]
fn bias_selects_and_does_not_weigh() {
    let (logits, mut bias) = (vec![0.0; 256], vec![0.0; 256]);
    let routed = select(&logits, &bias, 6, SCALING);
    assert_eq!(routed.ids, [0, 1, 2, 3, 4, 5]);
    assert_eq!(routed.weights, [0.25; 6]);
    assert_eq!(routed.gap, 0.0);
    bias[200] = 10.0;
    let routed = select(&logits, &bias, 6, SCALING);
    assert_eq!(routed.ids, [200, 0, 1, 2, 3, 4]);
    assert_eq!(routed.weights, [0.25; 6]);
}
