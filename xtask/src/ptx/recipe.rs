//! The targets and the flags with which the kernels are compiled.

use simt::kernel::KernelInfo;

/// A GPU for which the kernels are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its name, as in `-Ctarget-cpu` and `ptxas -arch`.
    pub cpu: &'static str,
    /// Its compute capability times ten.
    pub sm: u32,
}

/// H100 and H200; a base target, whose PTX all newer GPUs accept too; B200. PTX of a target with an `a` runs on no
/// other GPU, and may use instructions of that target: matrix products of a warpgroup (four warps), conversion to E2M1.
pub const TARGETS: [Target; 3] = [
    Target { cpu: "sm_90a", sm: 90 },
    Target { cpu: "sm_100", sm: 100 },
    Target { cpu: "sm_100a", sm: 100 },
];

impl Target {
    /// Whether `cargo xtask test` rebuilds its PTX. The other targets take minutes more; for them it only compares the
    /// hashes of sources and PTX with the manifest, which `cargo xtask build-ptx` writes when it rebuilds all.
    pub fn is_rebuilt_by_tests(self) -> bool {
        self.cpu == "sm_90a"
    }

    /// The target called `cpu`.
    pub fn named(cpu: &str) -> Option<Self> {
        TARGETS.into_iter().find(|target| target.cpu == cpu)
    }

    /// The kernels of `table` that it can run.
    pub fn kernels(self, table: &[KernelInfo]) -> Vec<KernelInfo> {
        table.iter().copied().filter(|kernel| kernel.min_sm <= self.sm).collect()
    }

    /// Its PTX file in `host/ptx/`, compressed.
    pub fn file(self) -> String {
        format!("{}.ptx.zst", self.cpu)
    }
}

/// Compiler flags of every target; `-Ctarget-cpu` and path remapping are added.
///
/// Jump threading is off because it copies barriers and shuffles into branches. Panics trap. The linker is `true`
/// because the PTX is the assembly output of the single module of fat LTO.
pub const FLAGS: [&str; 4] = [
    "-Clinker=true",
    "-Zmir-enable-passes=-JumpThreading",
    "-Zunstable-options",
    "-Cpanic=immediate-abort",
];

/// The release profile of the device build, independent of that of the workspace.
pub const PROFILE: [(&str, &str); 6] = [
    ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3"),
    ("CARGO_PROFILE_RELEASE_LTO", "fat"),
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1"),
    ("CARGO_PROFILE_RELEASE_PANIC", "abort"),
    ("CARGO_PROFILE_RELEASE_DEBUG", "0"),
    ("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "false"),
];

/// Arguments of `cargo rustc`; the target folder is added.
pub const ARGUMENTS: [&str; 11] = [
    "--locked",
    "--package",
    "kernels-gpu",
    "--release",
    "--crate-type",
    "cdylib",
    "-Zbuild-std=core",
    "--target",
    "nvptx64-nvidia-cuda",
    "--",
    "--emit=asm",
];

/// The profile and the arguments, as the manifest records them.
pub fn cargo() -> Vec<String> {
    let profile = PROFILE.map(|(name, value)| format!("{name}={value}"));
    profile.into_iter().chain(ARGUMENTS.map(ToOwned::to_owned)).collect()
}

/// The finished PTX of one target.
pub struct Built {
    /// The target.
    pub target: Target,
    /// Its PTX, with launch bounds.
    pub ptx: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_takes_the_kernels_it_can_run() {
        let kernel = KernelInfo { min_sm: 100, ..KernelInfo::new("k") };
        let names = |target: Target| target.kernels(&[kernel]).len();
        assert_eq!(TARGETS.map(names), [0, 1, 1]);
    }
}
