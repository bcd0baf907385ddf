//! Rows that kernels refused.

use kernels_gpu::table::KERNELS;

/// Rows that one kernel refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The kernel.
    pub kernel: &'static str,
    /// Rows that it refused since the last check.
    pub count: u32,
    /// Whether it writes the cache. If so, rows may be missing, and the bytes of all requests are suspect: release
    /// them.
    ///
    /// If not, it is a gather, attention, the indexer's scores, or a digest, and has changed no row of the cache. Its
    /// results for the refused queries are wrong, and so is everything computed from them, later layers included. The
    /// usual cause is a list that names an entry that its query does not see, or an output with fewer rows than the
    /// query sees entries. Reject the step, or release the requests that have committed it; other requests are sound.
    pub writes: bool,
}

impl Refusal {
    /// `count` rows of a kernel, by its index in the table.
    pub(crate) fn new(kernel: usize, count: u32) -> Self {
        let kernel = &KERNELS[kernel];
        let mut written = kernel.pointers.iter().filter(|pointer| pointer.mutable);
        let writes = written.any(|pointer| !RESULTS.contains(&pointer.name));
        Self { kernel: kernel.name, count, writes }
    }
}

/// Names of the pointers of the table through which kernels write something else than the cache. A mutable pointer that
/// is not listed here counts as one to the cache.
const RESULTS: [&str; 13] = [
    "arrivals",
    "exchange",
    "faults",
    "lengths",
    "lse",
    "maxima",
    "out",
    "records",
    "scores",
    "selected",
    "split_out",
    "split_softmax",
    "tile",
];

/// Refusals as the text of an error, with advice.
pub fn describe(refusals: &[Refusal]) -> String {
    let one = |refusal: &Refusal| format!("{} of {}", refusal.count, refusal.kernel);
    let list = refusals.iter().map(one).collect::<Vec<_>>().join(", ");
    let writing: Vec<_> =
        refusals.iter().filter(|refusal| refusal.writes).map(|refusal| refusal.kernel).collect();
    if writing.is_empty() {
        return format!(
            "{list}; they only read, and have changed no row of the cache, but what they returned is wrong. The likely cause: a \
             list names an entry that its query does not see, or an output has too few rows. Reject the step, or release \
             the requests that have committed it"
        );
    }
    let writing = writing.join(", ");
    format!(
        "{list}; {writing} write the cache, so that the bytes of all requests are suspect: release them"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Among the kernels that count refused rows, only those whose names begin as in `reads` leave the cache unchanged.
    #[test]
    fn kernels_that_write_the_cache_are_told_from_those_that_read() {
        let reads = ["attend_", "digest_", "gather_", "index_score"];
        let mut counts = [0, 0];
        for (index, kernel) in KERNELS.iter().enumerate() {
            if kernel.pointers.iter().all(|pointer| pointer.name != "faults") {
                continue;
            }
            let refusal = Refusal::new(index, 3);
            let only_reads = reads.iter().any(|name| kernel.name.starts_with(name));
            assert_eq!(refusal.writes, !only_reads, "{}", kernel.name);
            counts[usize::from(only_reads)] += 1;
            assert_eq!(describe(&[refusal]).contains("only read"), only_reads, "{}", kernel.name);
        }
        assert!(counts.iter().all(|&count| count >= 5), "{counts:?}");
    }

    #[test]
    fn one_that_writes_makes_all_bytes_suspect() {
        let read = Refusal { kernel: "gather_entries", count: 1, writes: false };
        let write = Refusal { kernel: "append_swa", count: 2, writes: true };
        let text = describe(&[read, write]);
        assert!(
            text.starts_with("1 of gather_entries, 2 of append_swa; append_swa write"),
            "{text}"
        );
        assert!(text.contains("suspect: release them"), "{text}");
    }
}
