//! Short loops, unrolled in the source. If a loop indexes an array before LLVM unrolls the loop, the array ends up in
//! local memory; with constant indices it stays in registers.

/// `[value(0), value(1), ..]`, as `core::array::from_fn`; `N` is at most 16.
#[inline(always)]
pub fn array_from_fn<T: Copy + Default, const N: usize>(
    mut value: impl FnMut(usize) -> T,
) -> [T; N] {
    const { assert!(N <= 16) };
    let mut all = [T::default(); N];
    let mut fill = |i: usize| {
        if i < N {
            all[i] = value(i);
        }
    };
    fill(0);
    fill(1);
    fill(2);
    fill(3);
    fill(4);
    fill(5);
    fill(6);
    fill(7);
    fill(8);
    fill(9);
    fill(10);
    fill(11);
    fill(12);
    fill(13);
    fill(14);
    fill(15);
    all
}

/// Calls `step` with 0, 1, .. `N - 1`; `N` is at most 16.
#[inline(always)]
pub fn unroll<const N: usize>(step: impl FnMut(usize)) {
    array_from_fn::<(), N>(step);
}
