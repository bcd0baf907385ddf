//! Which kernels may still be running: the suspects when a wait fails.

use std::sync::{Mutex, PoisonError};

use kernels_gpu::table::KERNELS;

const WORDS: usize = KERNELS.len().div_ceil(u64::BITS as usize);

/// A set of kernels of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelSet([u64; WORDS]);

impl KernelSet {
    /// The kernel at `index` of the table alone.
    pub fn of(index: usize) -> Self {
        let mut set = Self::default();
        set.0[index / 64] = 1 << (index % 64);
        set
    }

    fn add(&mut self, other: Self) {
        for (word, more) in self.0.iter_mut().zip(other.0) {
            *word |= more;
        }
    }

    /// Their names, in the table's order.
    pub fn names(self) -> String {
        let held =
            KERNELS.iter().enumerate().filter(|(at, _)| self.0[at / 64] >> (at % 64) & 1 == 1);
        held.map(|(_, kernel)| kernel.name).collect::<Vec<_>>().join(", ")
    }
}

/// The kernels launched on each stream since that stream was last waited for.
///
/// A fault ends the whole context, and any stream's wait reports it: the suspects are those of all
/// streams. A wait that succeeds clears its own stream only.
#[derive(Debug, Default)]
pub struct Launched(Mutex<Vec<(usize, KernelSet)>>);

impl Launched {
    /// Notes that `kernels` were launched on `stream`.
    pub fn add(&self, stream: usize, kernels: KernelSet) {
        let mut streams = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match streams.iter_mut().find(|(id, _)| *id == stream) {
            Some((_, set)) => set.add(kernels),
            None => streams.push((stream, kernels)),
        }
    }

    /// Forgets what ran on `stream`, and returns it.
    pub fn take(&self, stream: usize) -> KernelSet {
        let mut streams = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = streams.iter().position(|(id, _)| *id == stream);
        at.map(|at| streams.swap_remove(at).1).unwrap_or_default()
    }

    /// The kernels of all streams.
    pub fn suspects(&self) -> KernelSet {
        let mut all = KernelSet::default();
        for (_, set) in self.0.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            all.add(*set);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_clears_the_suspects_of_its_own_stream_only() {
        let (first, last) = (0, KERNELS.len() - 1);
        let launched = Launched::default();
        launched.add(1, KernelSet::of(first));
        launched.add(2, KernelSet::of(last));
        let both = format!("{}, {}", KERNELS[first].name, KERNELS[last].name);
        assert_eq!(launched.suspects().names(), both);
        assert_eq!(launched.take(1), KernelSet::of(first));
        assert_eq!(launched.suspects().names(), KERNELS[last].name);
        assert_eq!(launched.take(1), KernelSet::default());
    }
}
