//! Rotary embedding compared with transformers: frequencies bit for bit, the oracle's cosines and sines to one unit in
//! the last place. (`compressor.rs` has rotated vectors.)

use anyhow::Result;
use dsv4_kv::kv_layout::config::CompressRope;
use dsv4_kv_oracle::rope::{PAIRS, Table, angle, cos_sin};
use dsv4_kv_tests::golden;

fn name(table: Table) -> &'static str {
    match table {
        Table::Main => "main",
        Table::Compress => "compress",
    }
}

#[test]
fn frequencies_are_equal() -> Result<()> {
    for table in Table::ALL {
        let expected = golden::load::<f32>(&format!("rope_inv_freq_{}", name(table)))?;
        assert_eq!(expected.shape, [PAIRS]);
        assert_eq!(table.frequencies()[..], expected.data, "{table:?}");
    }
    Ok(())
}

/// The frequencies that the kernels use.
#[test]
fn frequencies_on_the_device_are_equal() -> Result<()> {
    let expected = golden::load::<f32>("rope_inv_freq_compress")?;
    assert_eq!(dsv4_kv::rope::compress_frequencies(&CompressRope::RELEASED)[..], expected.data);
    Ok(())
}

/// The oracle's are f64 functions rounded once, the golden ones f32 functions. The largest allowed difference is a
/// neighbouring f32; it occurs in 53 of 1,280 values.
#[test]
fn cosines_and_sines_are_within_one_ulp() -> Result<()> {
    let positions = golden::load::<i64>("rope_positions")?.data;
    assert_eq!((positions.len(), positions.last()), (10, Some(&1_048_575)));
    for table in Table::ALL {
        let cosines = golden::load::<f32>(&format!("rope_cos_{}", name(table)))?;
        let sines = golden::load::<f32>(&format!("rope_sin_{}", name(table)))?;
        assert_eq!((&cosines.shape[..], &sines.shape[..]), (&[10, PAIRS][..], &[10, PAIRS][..]));
        for (j, frequency) in table.frequencies().into_iter().enumerate() {
            for (i, &position) in positions.iter().enumerate() {
                let (cos, sin) = cos_sin(position as usize, frequency);
                for (found, expected) in
                    [(cos, cosines.data[i * PAIRS + j]), (sin, sines.data[i * PAIRS + j])]
                {
                    let near = expected.next_down()..=expected.next_up();
                    assert!(near.contains(&found), "{table:?} pair {j} at {position}: {found:e}");
                }
            }
        }
    }
    Ok(())
}

/// This is why the rounding of frequencies and angles is part of the model: without it, some pair has another angle at
/// the end of the longest context.
#[test]
fn exact_arithmetic_would_be_another_rotation() {
    const LAST: usize = (1 << 20) - 1;
    let rounded = Table::Main.frequencies();
    let differ = |angles: &dyn Fn(usize) -> (f64, f64)| {
        (0..PAIRS).map(|j| angles(j).0 - angles(j).1).fold(0.0, |most: f64, x| most.max(x.abs()))
    };
    let by_frequency = differ(&|j| {
        let once = 10_000f64.powf(-(j as f64) / PAIRS as f64) as f32;
        (angle(LAST, rounded[j]).into(), angle(LAST, once).into())
    });
    let by_product =
        differ(&|j| (angle(LAST, rounded[j]).into(), LAST as f64 * f64::from(rounded[j])));
    assert!(by_frequency > 0.01, "{by_frequency}");
    assert!(by_product > 0.01, "{by_product}");
}

/// Pair 0 has frequency 1 in both tables. It lies at the start of the last 64 channels.
#[test]
fn a_pair_turns_from_even_to_odd() {
    let mut x = vec![0.0; 128];
    x[0] = 7.0;
    x[64] = 1.0;
    for table in Table::ALL {
        let turned = table.rotate(&x, 4);
        assert_eq!((turned[0], turned[1]), (7.0, 0.0));
        assert!((turned[64] - 4f64.cos()).abs() < 1e-7, "{}", turned[64]);
        assert!((turned[65] - 4f64.sin()).abs() < 1e-7, "{}", turned[65]);
        assert!(turned[66..].iter().all(|&x| x == 0.0));
    }
}

#[test]
fn turning_back_restores_the_vector() {
    let x: Vec<f64> = (0..512).map(|channel| f64::from(channel) - 100.25).collect();
    for table in Table::ALL {
        for position in [0, 1, 4, 127, 65_536, 1_048_575] {
            let turned = table.rotate(&x, position);
            assert_eq!(turned == x, position == 0, "{position}");
            let back = table.rotate_back(&turned, position);
            // cos^2 + sin^2 of the rounded functions is 1 to within 2^-23.
            for (found, expected) in back.iter().zip(&x) {
                assert!((found - expected).abs() < 1e-4, "{position}: {found} for {expected}");
            }
        }
    }
}

/// The formula of YaRN in f64, for constants that no released model has.
#[test]
fn frequencies_of_other_constants_follow_the_formula() {
    let released = CompressRope::RELEASED;
    for rope in [
        released,
        CompressRope { theta: 1e4, ..released },
        CompressRope { theta: 5e6, factor: 40.0, ..released },
        CompressRope { beta_fast: 2.0, beta_slow: 0.25, ..released },
        // Bounds beyond the first and the last pair, and bounds that coincide.
        CompressRope { trained_context: 8.0, ..released },
        CompressRope { theta: 10.0, ..released },
    ] {
        let bound = |turns: f64| {
            32.0 * (rope.trained_context / (turns * std::f64::consts::TAU)).ln() / rope.theta.ln()
        };
        let low = bound(rope.beta_fast).floor().max(0.0);
        let high = bound(rope.beta_slow).ceil().min(63.0);
        let found = dsv4_kv::rope::compress_frequencies(&rope);
        for (pair, found) in found.into_iter().enumerate() {
            let plain = rope.theta.powf(-(pair as f64) / 32.0);
            let at = pair as f64 - low;
            let slowed =
                if high == low { f64::from(at > 0.0) } else { (at / (high - low)).clamp(0.0, 1.0) };
            let want = plain / rope.factor * slowed + plain * (1.0 - slowed);
            assert!(
                (f64::from(found) - want).abs() <= 1e-6 * want,
                "{rope:?} {pair}: {found} {want}"
            );
        }
        let plain = dsv4_kv::rope::plain_frequencies(rope.theta);
        let want = |pair: usize| rope.theta.powf(-(pair as f64) / 32.0);
        let near = |(pair, &found): (usize, &f32)| {
            (f64::from(found) - want(pair)).abs() <= 1e-7 * want(pair)
        };
        assert!(plain.iter().enumerate().all(near), "{plain:?}");
    }
}
