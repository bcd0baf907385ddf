//! What fuzzers do with bytes: each function must end, whatever it is given, and panics only where
//! something is wrong. `cargo xtask fuzz` hands them to libFuzzer; the test `fuzz` runs them on the
//! committed corpus and on mutations of it.

mod arguments;
mod formats;
#[expect(unsafe_code, reason = "kernels are launched without the safe operations around them")]
mod kernels;
mod misplaced;
mod texts;

pub use arguments::arguments;
pub use formats::formats;
pub use kernels::{kernel_counts, kernels, launches};
pub use misplaced::refuses_misplaced_arguments;
pub use texts::{config, manifest, trace};

/// A name, and what is done with bytes.
pub type Target = (&'static str, fn(&[u8]));

/// The functions by name; `tests/corpus/<name>` has examples of what they read.
pub const TARGETS: [Target; 6] = [
    ("config", config),
    ("trace", trace),
    ("manifest", manifest),
    ("arguments", arguments),
    ("kernels", kernels),
    ("formats", formats),
];
