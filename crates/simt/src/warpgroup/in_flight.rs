//! Products in flight: started, and not yet waited for.

use core::marker::PhantomData;

use super::layout::{Fragments, FragmentsN256, Panels, Rows};

/// Stands for "no product" where a product's number is expected.
#[cfg(not(target_feature = "sm_90a"))]
pub const NO_PRODUCT: u32 = u32::MAX;

/// A product in flight. Until [`wait`](InFlight::wait) its fragments cannot be read, and only a further product can add
/// to them.
#[must_use = "a product has a result once it is waited for"]
pub struct InFlight<T, Operands> {
    pub(crate) fragments: T,
    /// Number of the product: how many products its thread had started before it.
    #[cfg(not(target_feature = "sm_90a"))]
    pub(super) number: u32,
    pub(super) operands: PhantomData<Operands>,
}

/// A product of 64 columns in flight, whose operands are both [`Panels`].
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
