//! The oracle's compressor compared with transformers and numpy: pooled windows, entries and indexer keys from the
//! stored projections; and variants with which it must not agree.

use anyhow::Result;
use dsv4_kv_oracle::compressor::{Compressor, Shape};
use dsv4_kv_oracle::hadamard::hadamard;
use dsv4_kv_oracle::number::{bf16_nearest, bf16_nearest_f64, bf16_value};
use dsv4_kv_oracle::rope::Table;
use dsv4_kv_tests::golden::{self, Array};
use dsv4_kv_tests::hca;
use dsv4_kv_tests::history::History;
use kv_layout::geometry::CompressorKind;

/// As a part of the largest magnitude in the array. The golden values are f32 sums of 8 terms.
const TOLERANCE: f64 = 2e-6;
/// The same for sums of 128 terms.
const HCA_TOLERANCE: f64 = 5e-6;

/// The stored inputs of one compressor.
struct Inputs {
    shape: Shape,
    kv: Array<f32>,
    gate: Array<f32>,
    ape: Array<f32>,
    norm_w: Array<f32>,
}

impl Inputs {
    fn load(name: &str, shape: Shape, tokens: usize) -> Result<Self> {
        let load = |array| golden::load::<f32>(&format!("{name}_{array}"));
        let inputs = Self {
            shape,
            kv: load("kv")?,
            gate: load("gate")?,
            ape: load("ape")?,
            norm_w: load("norm_w")?,
        };
        assert_eq!(inputs.kv.shape, [tokens, shape.columns()]);
        assert_eq!(inputs.gate.shape, inputs.kv.shape);
        assert_eq!(inputs.ape.shape, [shape.ratio, shape.columns()]);
        assert_eq!(inputs.norm_w.shape, [shape.channels]);
        Ok(inputs)
    }

    fn csa() -> Result<Self> {
        Self::load("csa", Shape::CSA, 27)
    }

    fn index() -> Result<Self> {
        Self::load("idx", Shape::INDEX, 27)
    }

    fn hca() -> Result<Self> {
        Self::load("hca", Shape::HCA, 300)
    }

    fn compressor(&self) -> Compressor<'_> {
        Compressor {
            shape: self.shape,
            kv: &self.kv.data,
            gate: &self.gate.data,
            ape: &self.ape.data,
            norm_w: &self.norm_w.data,
        }
    }
}

/// The largest difference, as a part of the largest magnitude in `expected`.
fn difference(found: &[f64], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let most = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, f64::max);
    let pairs = found.iter().zip(expected.iter().map(|&x| f64::from(x)));
    assert!(found.iter().all(|x| x.is_finite()));
    most(&mut pairs.map(|(x, y)| (x - y).abs()))
        / most(&mut expected.iter().map(|&x| f64::from(x.abs())))
}

/// Compares `entry(0)`, `entry(1)`, .. with the rows of the golden array.
#[track_caller]
fn assert_entries(array: &str, tolerance: f64, entry: impl Fn(usize) -> Vec<f64>) -> Result<()> {
    let expected = golden::load::<f32>(array)?;
    let found: Vec<f64> = (0..expected.shape[0]).flat_map(entry).collect();
    let difference = difference(&found, &expected.data);
    assert!(difference <= tolerance, "{array}: {difference:e}");
    Ok(())
}

#[test]
fn csa_entries() -> Result<()> {
    let inputs = Inputs::csa()?;
    let csa = inputs.compressor();
    assert_entries("csa_pooled", TOLERANCE, |i| csa.pooled(i))?;
    assert_entries("csa_entry_fp32", TOLERANCE, |i| csa.entry(i))
}

#[test]
fn hca_entries() -> Result<()> {
    let inputs = Inputs::hca()?;
    let hca = inputs.compressor();
    assert_entries("hca_pooled", HCA_TOLERANCE, |i| hca.pooled(i))?;
    assert_entries("hca_entry_fp32", HCA_TOLERANCE, |i| hca.entry(i))
}

/// The order in which the kernels fold a window in f32 is as exact as sums of 128 terms in any order. It is compared
/// with the golden windows, and with f64 for gates that rise, fall, and jump.
#[test]
fn hca_windows_folded_token_by_token() -> Result<()> {
    let golden = golden::load::<f32>("hca_pooled")?;
    let history = History::golden(CompressorKind::Hca);
    for (entry, want) in golden.rows().enumerate() {
        let folded: Vec<f64> = hca::pooled(&history, entry).iter().map(|&x| x.into()).collect();
        let difference = difference(&folded, want);
        assert!(difference <= 1e-6, "golden window {entry}: {difference:e}");
    }
    let random = History::random(CompressorKind::Hca, 128, 21);
    let sorted = |rises: bool| {
        let mut history = random.clone();
        for channel in 0..512 {
            let mut gates: Vec<f32> = (0..128).map(|p| history.gate[p * 512 + channel]).collect();
            gates.sort_by(|a, b| if rises { a.total_cmp(b) } else { b.total_cmp(a) });
            gates.into_iter().enumerate().for_each(|(p, gate)| {
                history.gate[p * 512 + channel] = gate;
            });
        }
        history
    };
    let far = {
        let mut history = random.clone();
        history.gate.iter_mut().for_each(|gate| *gate *= 40.0);
        // Without a bias, since the rounding of gate plus bias would exceed the error of the fold.
        history.ape.fill(0.0);
        history
    };
    for (name, history) in [
        ("random", random.clone()),
        ("rising", sorted(true)),
        ("falling", sorted(false)),
        ("far", far),
    ] {
        let exact: Vec<f32> = history.oracle().pooled(0).iter().map(|&x| x as f32).collect();
        let folded: Vec<f64> = hca::pooled(&history, 0).iter().map(|&x| x.into()).collect();
        let difference = difference(&folded, &exact);
        assert!(difference <= 2e-6, "{name}: {difference:e}");
    }
    Ok(())
}

#[test]
fn index_keys() -> Result<()> {
    let inputs = Inputs::index()?;
    let index = inputs.compressor();
    assert_entries("idx_key_fp32", TOLERANCE, |i| index.entry(i))?;
    assert_entries("idx_key_hadamard", TOLERANCE, |i| hadamard(&index.entry(i)))
}

/// Indexer queries get the same rotation, at their own positions, and the same transform.
#[test]
fn index_queries() -> Result<()> {
    let queries = golden::load::<f32>("idx_q")?;
    assert_eq!(queries.shape, [27, 8, 128]);
    let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let rotated = |position: usize| {
        let heads = queries.rows().skip(8 * position).take(8);
        heads.map(|q| Table::Compress.rotate(&wide(q), position)).collect::<Vec<_>>()
    };
    assert_entries("idx_q_rope", TOLERANCE, |p| rotated(p).concat())?;
    assert_entries("idx_q_hadamard", TOLERANCE, |p| {
        rotated(p).iter().flat_map(|q| hadamard(q)).collect()
    })
}

/// An entry with all values 10^-3 has a mean square equal to the epsilon of the norm.
#[test]
fn the_norm_adds_its_epsilon() -> Result<()> {
    let inputs = Inputs::csa()?;
    let entry = inputs.compressor().norm_and_rotate(&[1e-3; 512], 0);
    for (x, &w) in entry.iter().zip(&inputs.norm_w.data) {
        assert!((x - f64::from(w) / 2f64.sqrt()).abs() < 1e-12, "{x} with weight {w}");
    }
    Ok(())
}

/// Whether each BF16 value could be the rounding of the golden f32: at most half a step away, which is at most 2^-8 of
/// its value.
fn rounded_once(found: &[u16], expected: &[f32]) -> bool {
    assert_eq!(found.len(), expected.len());
    let most = expected.iter().fold(0f64, |most, x| most.max(x.abs().into()));
    found.iter().zip(expected).all(|(&bits, &x)| {
        let bound = f64::from(x.abs()) / 256.0 + HCA_TOLERANCE * most;
        (bf16_value(bits) - f64::from(x)).abs() <= bound
    })
}

/// The released model's script also rounds after pooling and after the norm; such values must not pass.
#[test]
fn entries_and_keys_are_rounded_once() -> Result<()> {
    for (inputs, array, rounded_thrice, is_key) in [
        (Inputs::csa()?, "csa_entry_fp32", "csa_entry_bf16_official", false),
        (Inputs::hca()?, "hca_entry_fp32", "hca_entry_bf16_official", false),
        (Inputs::index()?, "idx_key_hadamard", "idx_key_bf16_official", true),
    ] {
        let compressor = inputs.compressor();
        let rounded_thrice = golden::load::<u16>(rounded_thrice)?;
        for (i, expected) in golden::load::<f32>(array)?.rows().enumerate() {
            let found = if is_key { compressor.key_bf16(i) } else { compressor.entry_bf16(i) };
            assert!(rounded_once(&found, expected), "{array} {i}");
            assert!(!rounded_once(rounded_thrice.rows().nth(i).unwrap(), expected), "{array} {i}");
        }
    }
    Ok(())
}

#[test]
fn bf16_of_an_f64_is_not_rounded_twice() {
    // Just above the tie between 0x3F80 and 0x3F81; as an f32 it is the tie.
    let x = 1.0 + 2f64.powi(-8) + 2f64.powi(-40);
    assert_eq!((bf16_nearest_f64(x), bf16_nearest(x as f32)), (0x3F81, 0x3F80));
}

/// A cache that uses the own halves of a closed window as the previous halves of the next one is wrong in every entry
/// but the first, and the comparison shows it.
#[test]
fn the_rotation_of_halves_does_not_pass() -> Result<()> {
    let inputs = Inputs::csa()?;
    let csa = inputs.compressor();
    let wrong = golden::load::<f32>("csa_pooled_seed_rotation_WRONG")?;
    assert_eq!(wrong.shape, [6, 512]);
    for (i, wrong) in wrong.rows().enumerate() {
        let difference = difference(&csa.pooled(i), wrong);
        if i == 0 {
            assert!(difference <= TOLERANCE, "{difference:e}");
        } else {
            assert!(difference > 0.1, "entry {i}: {difference:e}");
        }
    }
    Ok(())
}

/// An entry rotated at the last token of its window, or with the other table, is wrong.
#[test]
fn another_rotation_does_not_pass() -> Result<()> {
    let inputs = Inputs::csa()?;
    let csa = inputs.compressor();
    let expected = golden::load::<f32>("csa_entry_fp32")?;
    for (i, expected) in expected.rows().enumerate() {
        let position = csa.shape.rope_position(i);
        let normed = Table::Compress.rotate_back(&csa.entry(i), position);
        let again = |table: Table, position| difference(&table.rotate(&normed, position), expected);
        assert!(again(Table::Compress, position) <= TOLERANCE);
        assert!(again(Table::Compress, position + 3) > 0.1, "entry {i}");
        assert!(i == 0 || again(Table::Main, position) > 0.1, "entry {i}");
    }
    Ok(())
}

#[test]
fn the_state_after_27_tokens() -> Result<()> {
    let keep: Vec<i32> = Shape::CSA.state_keep(27).map(|position| position as i32).collect();
    assert_eq!(keep, golden::load::<i32>("csa_state_positions")?.data);
    Ok(())
}

/// Whether the first entry to close after `end` tokens is right without the projections before `kept`, which are
/// replaced by NaN.
fn survives(inputs: &Inputs, end: usize, kept: usize) -> bool {
    let mut kv = inputs.kv.data.clone();
    kv[..kept * inputs.shape.columns()].fill(f32::NAN);
    let next = end / inputs.shape.ratio;
    let with_state_only = Compressor { kv: &kv, ..inputs.compressor() }.pooled(next);
    with_state_only == inputs.compressor().pooled(next)
}

#[test]
fn the_state_is_what_the_next_entry_needs() -> Result<()> {
    for (inputs, ends) in [(Inputs::csa()?, 0..24), (Inputs::hca()?, 126..131)] {
        for end in ends {
            let keep = inputs.shape.state_keep(end);
            assert_eq!(keep.end, end);
            assert!(survives(&inputs, end, keep.start), "{end}");
            assert!(!survives(&inputs, end, keep.start + 1), "{end}");
        }
    }
    Ok(())
}
