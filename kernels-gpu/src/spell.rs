//! Short arrays without loops: one that is not unrolled early leaves its array in local memory.

/// `[value(0), value(1), ..]`, for `N` up to 16.
#[inline(always)]
pub fn spell<T: Copy + Default, const N: usize>(mut value: impl FnMut(usize) -> T) -> [T; N] {
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
