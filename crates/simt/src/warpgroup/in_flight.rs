//! Products that have been started and not been waited for.

use core::marker::PhantomData;

use super::layout::{Fragments, FragmentsN256, Panels, Rows};

/// The number of no product.
#[cfg(not(target_feature = "sm_90a"))]
pub const NO_PRODUCT: u32 = u32::MAX;

/// A product in flight: its fragments cannot be read, nor be added to but by a further product, until
/// [`wait`](InFlight::wait).
#[must_use = "a product has a result once it is waited for"]
pub struct InFlight<T, Operands> {
    pub(crate) fragments: T,
    /// How many products its thread had started before.
    #[cfg(not(target_feature = "sm_90a"))]
    pub(super) number: u32,
    pub(super) operands: PhantomData<Operands>,
}

/// A product of 64 columns in flight, both operands of which are [`Panels`].
pub type FragmentsInFlight<const N: usize> = InFlight<Fragments, (Panels<N>, Panels<N>)>;

/// A product of 256 columns in flight.
pub type InFlightN256<const N: usize> = InFlight<FragmentsN256, (Rows<N>, Panels<N>)>;

impl<T, Operands> InFlight<T, Operands> {
    /// Fragments that no product is writing.
    #[inline(always)]
    pub const fn idle(fragments: T) -> Self {
        Self {
            fragments,
            #[cfg(not(target_feature = "sm_90a"))]
            number: NO_PRODUCT,
            operands: PhantomData,
        }
    }
}
