//! A list in shared memory, sorted by a bitonic network: work that depends on its length alone.

use simt::thread;

use super::candidates::List;
use crate::rank::ABSENT;

/// Sorts the first `count` elements: larger values first, the lower index first among equal ones. Ends
/// with a barrier.
///
/// # Safety
/// All threads of the block call it together, with a barrier after the list was written; it has room for
/// the next power of two from `count` on.
#[inline(always)]
pub unsafe fn sort(list: List, count: u32) {
    let (thread, threads) = (thread::thread_idx_x(), thread::block_dim_x());
    let size = count.next_power_of_two();
    // SAFETY: indices are below `size`; of each step a thread has pairs of its own, and a barrier stands
    // between steps. Loops are the block's.
    unsafe {
        let mut at = count + thread;
        while at < size {
            list.values.store(at, ABSENT);
            list.indices.store(at, u32::MAX);
            at += threads;
        }
        thread::sync_threads();
        let mut run = 2;
        while run <= size {
            let mut distance = run / 2;
            while distance > 0 {
                let mut pair = thread;
                while pair < size / 2 {
                    let low = 2 * pair - (pair & (distance - 1));
                    order(list, low, low + distance, low & run == 0);
                    pair += threads;
                }
                thread::sync_threads();
                distance /= 2;
            }
            run *= 2;
        }
    }
}

/// Brings two elements in order, or against it.
///
/// # Safety
/// Both are in the list, and no other thread touches them.
#[inline(always)]
unsafe fn order(list: List, a: u32, b: u32, forward: bool) {
    // SAFETY: by this function's own contract.
    unsafe {
        let (value_a, index_a) = (list.values.load(a), list.indices.load(a));
        let (value_b, index_b) = (list.values.load(b), list.indices.load(b));
        let ordered = value_a > value_b || (value_a == value_b && index_a <= index_b);
        if ordered != forward {
            list.values.store(a, value_b);
            list.indices.store(a, index_b);
            list.values.store(b, value_a);
            list.indices.store(b, index_a);
        }
    }
}
