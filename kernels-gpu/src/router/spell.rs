//! Short arrays without loops: one that is not unrolled early leaves its array in local memory.

/// `[value(0), value(1), ..]`, for `N` up to 4.
#[inline(always)]
pub fn spell<T: Copy + Default, const N: usize>(value: impl Fn(usize) -> T) -> [T; N] {
    const { assert!(N <= 4) };
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
    all
}
