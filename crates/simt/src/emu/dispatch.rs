//! Runs the blocks of a launch on OS threads.

use std::sync::Arc;

use rayon::iter::{IntoParallelIterator, ParallelIterator};

use super::block::try_current;
use super::fault::{Fault, FaultKind};
use super::global_memory::GlobalMemory;
use super::launch::Launch;
use super::stacks::Stacks;
use super::{panic, pool, schedule};

/// Runs `body` once for every thread of the grid. Blocks run in parallel, in no order, in a thread pool of the
/// emulator's own, with as many threads as rayon has. A single block (or cluster) runs on the calling thread. The
/// calling thread waits, and runs no other job of rayon meanwhile, so that it may hold a lock that such a job takes.
///
/// # Errors
/// The fault of the first block, by index, that has one. Blocks after it may or may not have run.
///
/// # Panics
/// If a kernel body calls it.
pub fn launch(launch: &Launch, body: impl Fn() + Sync) -> Result<(), Fault> {
    launch_clusters(launch, 1, body)
}

/// [`launch()`] with clusters of `size` consecutive blocks of a row of the grid. The blocks of a cluster run
/// one after the other, each to its next cluster barrier or to its end.
///
/// # Errors
/// The fault of the first cluster that has one; `InvalidLaunch` also if the rows of the grid are no multiple of the
/// cluster.
///
/// # Panics
/// If a kernel body calls it.
pub fn launch_clusters(launch: &Launch, size: u32, body: impl Fn() + Sync) -> Result<(), Fault> {
    dispatch(Stacks::of_process(), launch, size, &body)
}

/// As [`launch_clusters`], with the given stacks. Not generic, so that it is compiled once and not for every kernel.
pub(super) fn dispatch(
    stacks: &Stacks,
    launch: &Launch,
    size: u32,
    body: &(dyn Fn() + Sync),
) -> Result<(), Fault> {
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
    let global_memory = Arc::new(GlobalMemory::new(launch.grid.0));
    let run = |cluster: u64| {
        let number = cluster * size;
        let index = ((number % columns) as u32, (number / columns) as u32);
        let launch = (launch, &global_memory);
        schedule::run_cluster(stacks, launch, size as u32, (number, index), body)
            .err()
            .map(|(rank, kind)| ((index.0 + rank, index.1), kind))
    };
    let first = match columns * rows / size {
        1 => Ok(run(0)),
        clusters => pool::run(|| (0..clusters).into_par_iter().find_map_first(run)),
    };
    match first {
        Ok(None) => Ok(()),
        Ok(Some((index, kind))) => fault(Some(index), kind),
        Err(kind) => fault(None, kind),
    }
}
