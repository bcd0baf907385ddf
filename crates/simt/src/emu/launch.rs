//! A launch's shape, and its blocks over OS threads.

use rayon::iter::{IntoParallelIterator, ParallelIterator};

use super::block::try_current;
use super::fault::{Fault, FaultKind};
use super::{panic, schedule};
use crate::warp::WARP_SIZE;

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

    /// Whether a device would take this shape (CUDA C++ programming guide, compute capabilities).
    fn is_valid(&self) -> bool {
        let (x, y) = self.grid;
        (1..1 << 31).contains(&x)
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
    let fault =
        |block, kind| Err(Fault { kernel: Some(launch.kernel), block, kind: Box::new(kind) });
    if !launch.is_valid() {
        let kind = FaultKind::InvalidLaunch { grid: launch.grid, block: launch.block };
        return fault(None, kind);
    }
    assert!(try_current(|_| ()).is_none(), "a kernel body cannot launch a kernel");
    panic::install_hook();
    let (columns, rows) = (u64::from(launch.grid.0), u64::from(launch.grid.1));
    let run = |block: u64| {
        let index = ((block % columns) as u32, (block / columns) as u32);
        schedule::run_block(launch, block, index, &body).err().map(|kind| (index, kind))
    };
    let first = match columns * rows {
        1 => run(0),
        blocks => (0..blocks).into_par_iter().find_map_first(run),
    };
    match first {
        None => Ok(()),
        Some((index, kind)) => fault(Some(index), kind),
    }
}
