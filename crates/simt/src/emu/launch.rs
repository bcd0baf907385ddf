//! A launch's shape, and its blocks over OS threads.

use rayon::iter::{IntoParallelIterator, ParallelIterator};

use super::block::try_current;
use super::fault::{Fault, FaultKind};
use super::{panic, schedule};
use crate::warp::WARP_SIZE;

/// The largest cluster that every device with clusters takes, in blocks.
const MAX_CLUSTER_BLOCKS: u32 = 8;

/// What is launched: names, shape, and the seed of the order that threads run in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// The kernel's name, for faults.
    pub kernel: &'static str,
    /// Blocks, as (x, y). As on a device, x is below 2^31 and y below 2^16; neither is 0.
    pub grid: (u32, u32),
    /// Threads of a block: a multiple of 32, at most 1024.
    pub block: u32,
    /// Bytes of shared memory of a block.
    pub shared_bytes: u32,
    /// What the order of lanes and warps is drawn from.
    pub seed: u64,
}

impl Launch {
    /// No launch at all.
    pub(super) const NONE: Self =
        Self { kernel: "", grid: (0, 0), block: 0, shared_bytes: 0, seed: 0 };

    /// Whether a device would take this shape in clusters of `size` blocks (CUDA C++ programming guide,
    /// compute capabilities).
    fn is_valid(&self, size: u32) -> bool {
        let (x, y) = self.grid;
        let clusters = (1..=MAX_CLUSTER_BLOCKS).contains(&size) && x.is_multiple_of(size);
        clusters
            && (1..1 << 31).contains(&x)
            && (1..1 << 16).contains(&y)
            && (1..=1024).contains(&self.block)
            && self.block.is_multiple_of(WARP_SIZE)
    }
}

/// Runs `body` once for every thread of the grid. Blocks run in parallel on rayon's threads, in no
/// order.
///
/// # Errors
/// The fault of the first block, by index, that has one. Blocks after it may or may not have run.
///
/// # Panics
/// When called from a kernel body.
pub fn launch(launch: &Launch, body: impl Fn() + Sync) -> Result<(), Fault> {
    launch_clusters(launch, 1, body)
}

/// As [`launch()`], with clusters of `size` consecutive blocks of a row of the grid. The blocks of one run one
/// after the other, each to its next barrier of the cluster or to its end.
///
/// # Errors
/// The fault of the first cluster that has one; a grid whose rows are no whole number of clusters.
///
/// # Panics
/// When called from a kernel body.
pub fn launch_clusters(launch: &Launch, size: u32, body: impl Fn() + Sync) -> Result<(), Fault> {
    let fault =
        |block, kind| Err(Fault { kernel: Some(launch.kernel), block, kind: Box::new(kind) });
    if !launch.is_valid(size) {
        let kind = FaultKind::InvalidLaunch { grid: launch.grid, block: launch.block };
        return fault(None, kind);
    }
    assert!(try_current(|_| ()).is_none(), "a kernel body cannot launch a kernel");
    panic::install_hook();
    let (columns, rows) = (u64::from(launch.grid.0), u64::from(launch.grid.1));
    let size = u64::from(size);
    let run = |cluster: u64| {
        let number = cluster * size;
        let index = ((number % columns) as u32, (number / columns) as u32);
        schedule::run_cluster(launch, size as u32, number, index, &body)
            .err()
            .map(|(rank, kind)| ((index.0 + rank, index.1), kind))
    };
    let first = match columns * rows / size {
        1 => run(0),
        clusters => (0..clusters).into_par_iter().find_map_first(run),
    };
    match first {
        None => Ok(()),
        Some((index, kind)) => fault(Some(index), kind),
    }
}
