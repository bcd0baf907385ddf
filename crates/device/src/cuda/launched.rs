//! The kernels that may still be running: the suspects when a wait fails.

use std::sync::{Mutex, PoisonError};

use simt::kernel::KernelInfo;

/// A set of kernels, by their index in the list that the device was opened with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelSet(Vec<u64>);

impl KernelSet {
    fn insert(&mut self, index: usize) {
        self.reserve(index / 64 + 1);
        self.0[index / 64] |= 1 << (index % 64);
    }

    fn add(&mut self, other: &Self) {
        self.reserve(other.0.len());
        for (word, more) in self.0.iter_mut().zip(&other.0) {
            *word |= more;
        }
    }

    fn reserve(&mut self, words: usize) {
        if self.0.len() < words {
            self.0.resize(words, 0);
        }
    }

    fn contains(&self, index: usize) -> bool {
        self.0.get(index / 64).is_some_and(|word| word >> (index % 64) & 1 == 1)
    }
}

/// The kernels launched on each stream since that stream was last waited for.
///
/// A fault ends all use of the GPU by this process, and any call reports it: the suspects are those of all
/// streams. A wait that succeeds clears its own stream only.
#[derive(Debug)]
pub struct Launched {
    kernels: &'static [KernelInfo],
    streams: Mutex<Vec<(u64, KernelSet)>>,
}

impl Launched {
    /// No launches yet; `kernels` is the list of the device.
    pub fn new(kernels: &'static [KernelInfo]) -> Self {
        Self { kernels, streams: Mutex::default() }
    }

    /// Records that the kernel at `index` was launched on `stream`.
    pub fn insert(&self, stream: u64, index: usize) {
        self.with(stream, |set| set.insert(index));
    }

    /// Records that `kernels` were launched on `stream`.
    pub fn add(&self, stream: u64, kernels: &KernelSet) {
        self.with(stream, |set| set.add(kernels));
    }

    fn with(&self, stream: u64, change: impl FnOnce(&mut KernelSet)) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        match streams.iter_mut().find(|(id, _)| *id == stream) {
            Some((_, set)) => change(set),
            None => {
                let mut set = KernelSet::default();
                change(&mut set);
                streams.push((stream, set));
            }
        }
    }

    /// Removes all kernels of `stream`. Its entry stays, so that the next launch allocates nothing.
    pub fn clear(&self, stream: u64) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, set)) = streams.iter_mut().find(|(id, _)| *id == stream) {
            set.0.fill(0);
        }
    }

    /// Removes the entry of a stream that is gone, unless kernels ran on it that were not waited for.
    pub fn remove_clear(&self, stream: u64) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.retain(|(id, set)| *id != stream || set.0.iter().any(|&word| word != 0));
    }

    /// Removes and returns the kernels of `stream`.
    pub fn take(&self, stream: u64) -> KernelSet {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let at = streams.iter().position(|(id, _)| *id == stream);
        at.map(|at| streams.swap_remove(at).1).unwrap_or_default()
    }

    /// The names of the kernels of all streams, in the order of the list.
    pub fn suspects(&self) -> String {
        let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let launched = |at: usize| streams.iter().any(|(_, set)| set.contains(at));
        let suspects = self.kernels.iter().enumerate().filter(|(at, _)| launched(*at));
        suspects.map(|(_, kernel)| kernel.name).collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_clears_the_suspects_of_its_own_stream_only() {
        static KERNELS: [KernelInfo; 70] = {
            let mut kernels = [KernelInfo::new("between"); 70];
            kernels[0] = KernelInfo::new("first");
            kernels[69] = KernelInfo::new("last");
            kernels
        };
        let launched = Launched::new(&KERNELS);
        launched.insert(1, 0);
        launched.insert(2, 69);
        assert_eq!(launched.suspects(), "first, last");
        let first = launched.take(1);
        assert_eq!(launched.suspects(), "last");
        assert_eq!(launched.take(1), KernelSet::default());
        launched.add(2, &first);
        assert_eq!(launched.suspects(), "first, last");
        launched.remove_clear(2);
        assert_eq!(launched.suspects(), "first, last", "nobody waited for it");
        launched.clear(2);
        assert_eq!(launched.suspects(), "");
        launched.insert(2, 69);
        assert_eq!(launched.suspects(), "last");
        launched.clear(2);
        launched.remove_clear(2);
        assert_eq!(launched.streams.lock().unwrap().len(), 0);
    }
}
