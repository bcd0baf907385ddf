//! The operations at which threads stop, and their results.

use std::fmt;

use crate::limits::WARP_SIZE;

/// An operation at which a thread stops until others arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// [`crate::thread::sync_threads`].
    SyncThreads,
    /// [`crate::thread::NamedBarrier::sync`].
    BarrierSync,
    /// [`crate::thread::NamedBarrier::arrive`].
    BarrierArrive,
    /// [`crate::cluster::sync_cluster`] and [`crate::cluster::cluster_wait`].
    SyncCluster,
    /// [`crate::cluster::cluster_arrive`] and [`crate::cluster::cluster_arrive_release`].
    ClusterArrive,
    /// [`crate::warp::sync_warp`].
    SyncWarp,
    /// [`crate::warp::shuffle_xor_u32`] and its `f32` form.
    ShuffleXor,
    /// [`crate::warp::shuffle_idx_u32`] and its `f32` form.
    ShuffleIdx,
    /// [`crate::warp::shuffle_up_found_u32`].
    ShuffleUp,
    /// [`crate::warp::ballot`].
    Ballot,
    /// [`crate::warp::all`].
    All,
    /// [`crate::warp::any`].
    Any,
    /// [`crate::warp::reduce_add_u32`].
    ReduceAdd,
    /// [`crate::warp::reduce_max_u32`].
    ReduceMax,
    /// [`crate::warp::reduce_min_u32`].
    ReduceMin,
    /// [`crate::mma::bf16_m16n8k16`].
    MmaBf16,
    /// [`crate::mma::s8_m16n8k32`].
    MmaS8,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SyncThreads => "sync_threads",
            Self::BarrierSync => "NamedBarrier::sync",
            Self::BarrierArrive => "NamedBarrier::arrive",
            Self::SyncCluster => "sync_cluster",
            Self::ClusterArrive => "cluster_arrive",
            Self::SyncWarp => "sync_warp",
            Self::ShuffleXor => "shuffle_xor",
            Self::ShuffleIdx => "shuffle_idx",
            Self::ShuffleUp => "shuffle_up",
            Self::Ballot => "ballot",
            Self::All => "all",
            Self::Any => "any",
            Self::ReduceAdd => "reduce_add",
            Self::ReduceMax => "reduce_max",
            Self::ReduceMin => "reduce_min",
            Self::MmaBf16 => "mma of BF16",
            Self::MmaS8 => "mma of integers",
        })
    }
}

/// The second operand of [`Operation::ClusterArrive`] if the arrival releases earlier accesses; otherwise it is 0.
pub const RELEASES: u32 = 1;

/// One value per lane.
pub type Lanes = [u32; WARP_SIZE as usize];

/// The result of each lane from `operation`, given each lane's value and second operand (the lane mask,
/// source lane or delta of a shuffle). Predicates are 0 or 1. Barriers and matrix products return the lane's
/// own value: the fragments of a product are in `Thread::fragments`.
pub fn results(operation: Operation, values: &Lanes, operands: &Lanes) -> Lanes {
    let shuffle = |source: fn(u32, u32) -> u32| {
        std::array::from_fn(|lane| {
            let source = source(lane as u32, operands[lane] % WARP_SIZE);
            // A source outside the warp gives the lane's own value.
            values.get(source as usize).copied().unwrap_or(values[lane])
        })
    };
    let same = |value: u32| [value; WARP_SIZE as usize];
    match operation {
        Operation::SyncThreads
        | Operation::BarrierSync
        | Operation::BarrierArrive
        | Operation::SyncCluster
        | Operation::ClusterArrive
        | Operation::SyncWarp
        | Operation::MmaBf16
        | Operation::MmaS8 => *values,
        Operation::ShuffleXor => shuffle(|lane, mask| lane ^ mask),
        Operation::ShuffleIdx => shuffle(|_, source| source),
        Operation::ShuffleUp => shuffle(|lane, delta| lane.wrapping_sub(delta)),
        Operation::Ballot => {
            same(values.iter().rev().fold(0, |bits, &predicate| bits << 1 | predicate))
        }
        Operation::All => same(values.iter().fold(1, |all, &predicate| all & predicate)),
        Operation::Any => same(values.iter().fold(0, |any, &predicate| any | predicate)),
        Operation::ReduceAdd => same(values.iter().fold(0, |sum, &value| sum.wrapping_add(value))),
        Operation::ReduceMax => same(values.iter().fold(0, |maximum, &value| maximum.max(value))),
        Operation::ReduceMin => same(values.iter().fold(u32::MAX, |minimum, &v| minimum.min(v))),
    }
}
