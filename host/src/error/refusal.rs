//! What kernels refused.

/// Rows that one kernel refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The kernel.
    pub kernel: &'static str,
    /// Rows it refused since the last check.
    pub count: u32,
}

/// Refusals in words, as an error lists them.
pub fn list(refusals: &[Refusal]) -> String {
    let one = |refusal: &Refusal| format!("{} of {}", refusal.count, refusal.kernel);
    refusals.iter().map(one).collect::<Vec<_>>().join(", ")
}
