//! Products that have been started and not been waited for.

use super::layout::{Fragments, Panels, Rows, TallFragments};

/// A product in flight: its fragments cannot be read, nor be added to but by a further product, until
/// [`wait`](InFlight::wait).
#[must_use = "a product has a result once it is waited for"]
pub struct InFlight<T, Operands> {
    pub(crate) fragments: T,
    /// What is still to be multiplied: without `wgmma` that is done when the product is waited for, so that a thread that
    /// writes an operand too early is found.
    #[cfg(not(target_feature = "sm_90a"))]
    pub(super) operands: Option<Operands>,
    /// How many products its thread had started before.
    #[cfg(not(target_feature = "sm_90a"))]
    pub(super) number: u32,
    #[cfg(target_feature = "sm_90a")]
    operands: core::marker::PhantomData<Operands>,
}

/// A product of 64 columns in flight, both operands of which are [`Panels`].
pub type FragmentsInFlight<const N: usize> = InFlight<Fragments, (Panels<N>, Panels<N>)>;

/// A product of 256 columns in flight.
pub type TallInFlight<const N: usize> = InFlight<TallFragments, (Rows<N>, Panels<N>)>;

impl<T, Operands> InFlight<T, Operands> {
    /// Fragments that no product is writing.
    #[inline(always)]
    pub const fn idle(fragments: T) -> Self {
        Self {
            fragments,
            #[cfg(not(target_feature = "sm_90a"))]
            operands: None,
            #[cfg(not(target_feature = "sm_90a"))]
            number: u32::MAX,
            #[cfg(target_feature = "sm_90a")]
            operands: core::marker::PhantomData,
        }
    }
}
