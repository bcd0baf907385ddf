//! Helpers: device tensors, one-line launches, faults with their line.

use std::sync::atomic::{AtomicU32, Ordering};

use simt::emu::{Allocation, Fault, FaultKind, Launch, Memory, Site, launch};
use simt::mem::{Element, Global, GlobalMut};

#[repr(align(16))]
struct Chunk([AtomicU32; 4]);

/// Words of an emulated device's memory, 16-byte aligned.
pub struct Tensor {
    chunks: Box<[Chunk]>,
    len: usize,
    memory: Memory,
    _allocation: Allocation,
}

impl Tensor {
    /// A tensor of these words, alone on its device.
    pub fn new(words: &[u32]) -> Self {
        let mut chunks: Vec<Chunk> = Vec::new();
        for words in words.chunks(4) {
            let word = |i| AtomicU32::new(words.get(i).copied().unwrap_or(0));
            chunks.push(Chunk(std::array::from_fn(word)));
        }
        let chunks = chunks.into_boxed_slice();
        let memory = Memory::new();
        let address = chunks.as_ptr().expose_provenance() as u64;
        let bytes = 4 * words.len() as u64;
        // SAFETY: the chunks live as long as the registration, and are read by the host between launches only.
        let _allocation = unsafe { memory.register(address, bytes, "tensor") };
        Self { chunks, len: words.len(), memory, _allocation }
    }

    /// A tensor of `len` zeros.
    pub fn zeros(len: usize) -> Self {
        Self::new(&vec![0; len])
    }

    /// A read-only view, as argument `input`.
    pub fn input<T: Element>(&self) -> Global<T> {
        Global::bind(&self.memory, self.address(), "input").expect("the tensor is live")
    }

    /// A view to write through, as argument `output`.
    pub fn output<T: Element>(&self) -> GlobalMut<T> {
        GlobalMut::bind(&self.memory, self.address(), "output").expect("the tensor is live")
    }

    pub fn address(&self) -> u64 {
        self.chunks.as_ptr().addr() as u64
    }

    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    pub fn words(&self) -> Vec<u32> {
        let words = self.chunks.iter().flat_map(|chunk| &chunk.0);
        words.take(self.len).map(|word| word.load(Ordering::Relaxed)).collect()
    }
}

/// A launch of one block with 1 KiB of shared memory.
pub const fn block_of(block: u32) -> Launch {
    Launch { kernel: "test", grid: (1, 1), block, shared_bytes: 1024, seed: 0 }
}

/// Runs one block of `threads` threads. Panics on a fault.
pub fn run(threads: u32, body: impl Fn() + Sync) {
    launch(&block_of(threads), body).unwrap_or_else(|fault| panic!("{fault}"));
}

/// Runs one block of `threads` threads under many seeds; returns the first fault. Panics unless every seed gives a
/// fault of the same kind.
pub fn fault(threads: u32, body: impl Fn() + Sync) -> Fault {
    let faults: Vec<Fault> = (0..20)
        .map(|seed| launch(&Launch { seed, ..block_of(threads) }, &body))
        .map(|result| result.expect_err("the body breaks a rule"))
        .collect();
    let kind = |fault: &Fault| std::mem::discriminant(&*fault.kind);
    for fault in &faults {
        assert_eq!(kind(fault), kind(&faults[0]), "{fault}");
    }
    faults[0].clone()
}

/// As [`fault`]; returns the kind of the fault.
pub fn fault_kind(threads: u32, body: impl Fn() + Sync) -> FaultKind {
    let fault = fault(threads, body);
    assert_eq!((fault.kernel, fault.block), (Some("test"), Some((0, 0))));
    *fault.kind
}

/// Asserts that `site` is line `line` of `file`.
#[track_caller]
pub fn assert_at(site: Site, file: &str, line: u32) {
    assert_eq!((site.file(), site.line()), (file, line));
}
