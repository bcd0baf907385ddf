//! Reads for launches that overlap: prefetches and speculative reads.

use simt::emu::{FaultKind, Launch, launch};
use simt::grid::peek;
use simt::thread::{block_idx_x, thread_idx_x};

use crate::device::{Tensor, block_of, fault_kind, run};

#[test]
fn a_prefetch_is_in_bounds() {
    let tensor = Tensor::zeros(128);
    let words = tensor.input::<u32>();
    // SAFETY: the whole tensor.
    run(32, || unsafe { words.prefetch_l2(0, 512) });
    // SAFETY: broken on purpose.
    let kind = fault_kind(32, || unsafe { words.prefetch_l2(4, 512) });
    assert!(matches!(kind, FaultKind::OutOfBounds { .. }), "{kind}");
}

/// About half of the blocks read the true values, and the others read wrong values most of the time.
#[test]
fn a_peek_is_true_or_not() {
    const BLOCKS: u32 = 200;
    let words: Vec<u32> = (1000..1032).collect();
    let (tensor, peeked) = (Tensor::new(&words), Tensor::zeros(BLOCKS as usize * 32));
    let (input, output) = (tensor.input::<u32>(), peeked.output::<u32>());
    let body = || {
        let thread = u64::from(thread_idx_x());
        // SAFETY: an element a thread.
        unsafe { output.store(u64::from(block_idx_x()) * 32 + thread, peek(input, thread)) };
    };
    launch(&Launch { grid: (BLOCKS, 1), ..block_of(32) }, body).expect("in bounds");
    let peeked = peeked.words();
    let blocks = peeked.chunks_exact(32);
    let honest = blocks.clone().filter(|block| *block == words).count();
    assert!((60..140).contains(&honest), "{honest} of {BLOCKS}");
    let lies = |block: &[u32]| block.iter().zip(&words).filter(|(peek, word)| peek != word).count();
    assert!(blocks.filter(|block| *block != words).all(|block| (8..32).contains(&lies(block))));
    // SAFETY: broken on purpose.
    let kind = fault_kind(32, || _ = unsafe { peek(input, 32) });
    assert!(matches!(kind, FaultKind::OutOfBounds { index: 32, .. }), "{kind}");
}
