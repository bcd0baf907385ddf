//! The bodies of the fuzz targets. Each function must end on any bytes, and panics only if it finds a mistake. `cargo
//! xtask fuzz` runs them by libFuzzer; the test `fuzz` runs them on the committed corpus and on mutations of it.

mod arguments;
mod formats;
mod garbage;
#[expect(unsafe_code, reason = "kernels are launched without the safe operations around them")]
mod kernels;
mod misplaced;
mod texts;

pub use arguments::{arguments, ran};
pub use formats::formats;
pub use kernels::{Array, kernel_names, kernels, launch};
pub use misplaced::refuses_misplaced_arguments;
pub use texts::{config, manifest, readings, trace};

/// The name of a target, and its function.
pub type Target = (&'static str, fn(&[u8]));

/// All targets. The folder `tests/corpus/<name>` has examples of their input.
pub const TARGETS: [Target; 6] = [
    ("config", config),
    ("trace", trace),
    ("manifest", manifest),
    ("arguments", arguments),
    ("kernels", kernels),
    ("formats", formats),
];
