//! What the kernels are compiled for, and with which flags.

use simt::kernel::KernelInfo;

/// A GPU the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its name, as in `-Ctarget-cpu` and `ptxas -arch`.
    pub cpu: &'static str,
    /// Its compute capability times ten.
    pub sm: u32,
}

/// H100 and H200; a base target, which all newer GPUs take too; B200. A target with an `a` runs on nothing
/// else and has instructions of its own: products of four warps, conversion to E2M1.
pub const TARGETS: [Target; 3] = [
    Target { cpu: "sm_90a", sm: 90 },
    Target { cpu: "sm_100", sm: 100 },
    Target { cpu: "sm_100a", sm: 100 },
];

impl Target {
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

/// Compiler flags for every target; `-Ctarget-cpu` and path remapping come on top.
///
/// Jump threading is off because it copies barriers and shuffles into branches; panics trap; the
/// linker is `true` because the assembly of the one fat-LTO module is the PTX.
pub const FLAGS: [&str; 4] = [
    "-Clinker=true",
    "-Zmir-enable-passes=-JumpThreading",
    "-Zunstable-options",
    "-Cpanic=immediate-abort",
];

/// The release profile of the device build, whatever the workspace's own says.
pub const PROFILE: [(&str, &str); 6] = [
    ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3"),
    ("CARGO_PROFILE_RELEASE_LTO", "fat"),
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1"),
    ("CARGO_PROFILE_RELEASE_PANIC", "abort"),
    ("CARGO_PROFILE_RELEASE_DEBUG", "0"),
    ("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "false"),
];

/// One target's finished PTX.
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
