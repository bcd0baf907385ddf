//! Launches that overlap, and blocks that wait for earlier ones.

use simt::atomic::DeviceAtomicU32;
use simt::emu::{FaultKind, Launch, launch, launch_clusters};
use simt::grid::{peek, wait_for_earlier_blocks};
use simt::thread::{block_idx_x, thread_idx_x};

use crate::device::{Tensor, block_of, fault_kind, run};

const BLOCKS: u32 = 8;

/// Every block leaves four words a thread, and block `waits` adds up those of block `left`.
fn meet(waits: u32, left: u32) -> Result<Vec<u32>, FaultKind> {
    const WORDS: u32 = 4 * 32;
    let meeting = Tensor::zeros((3 * BLOCKS * WORDS) as usize);
    let sums = Tensor::zeros((3 * 32) as usize);
    let (words, output) = (meeting.output::<u32>(), sums.output::<u32>());
    let body = || {
        let (group, block) = (block_idx_x() / BLOCKS, block_idx_x() % BLOCKS);
        let at = |block| u64::from((group * BLOCKS + block) * WORDS + 4 * thread_idx_x());
        // SAFETY: four words a thread, accessed atomically; an element a thread of one block a group.
        unsafe {
            for i in 0..4 {
                DeviceAtomicU32::new(words, at(block) + i).store(1 + i as u32);
            }
            if block == waits {
                let sum = wait_for_earlier_blocks(|| {
                    let words = DeviceAtomicU32::load_x4(words, at(left));
                    words.iter().all(|&word| word != 0).then(|| words.iter().sum())
                });
                output.store(u64::from(group * 32 + thread_idx_x()), sum);
            }
        }
    };
    let shape = Launch { grid: (3 * BLOCKS, 1), ..block_of(32) };
    launch_clusters(&shape, BLOCKS, body).map_err(|fault| *fault.kind)?;
    Ok(sums.words())
}

#[test]
fn a_block_finds_what_earlier_ones_left() {
    assert_eq!(meet(7, 0).unwrap(), [10; 96]);
    assert_eq!(meet(7, 6).unwrap(), [10; 96]);
}

#[test]
fn a_block_that_waits_for_a_later_one_waits_for_ever() {
    let kind = meet(6, 7).unwrap_err();
    let FaultKind::Panic { message, .. } = &kind else { panic!("{kind}") };
    assert!(message.contains("waits for ever"), "{message}");
}

#[test]
fn four_words_are_in_bounds_and_aligned() {
    let tensor = Tensor::zeros(8);
    let words = tensor.output::<u32>();
    // SAFETY: broken on purpose.
    let kind = |at| fault_kind(32, || _ = unsafe { DeviceAtomicU32::load_x4(words, at) });
    assert!(matches!(kind(8), FaultKind::OutOfBounds { index: 8, .. }));
    assert!(matches!(kind(2), FaultKind::Misaligned { align: 16, .. }));
}

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

/// About half of the blocks are told what is there, the others now and then.
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
