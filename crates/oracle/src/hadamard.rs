//! The Hadamard transform of indexer keys and queries.

/// `H x / sqrt(n)`, where the number of channels `n` is a power of two, in natural (Sylvester) order: row `r` of `H`
/// has -1 in column `c` where `r & c` has an odd number of ones. The transform is its own inverse.
///
/// # Panics
/// If the number of channels is not a power of two.
#[must_use]
pub fn hadamard(x: &[f64]) -> Vec<f64> {
    assert!(x.len().is_power_of_two());
    let norm = (x.len() as f64).sqrt();
    let signed = |r: usize, c: usize| if (r & c).count_ones() % 2 == 1 { -x[c] } else { x[c] };
    (0..x.len()).map(|r| (0..x.len()).map(|c| signed(r, c)).sum::<f64>() / norm).collect()
}
