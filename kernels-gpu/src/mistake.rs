//! Mistakes that tests make on purpose, to see that they are found. Only with the feature `mistakes`,
//! which nothing but those tests turns on; without it [`made`] is a constant and leaves no trace in
//! any kernel.

/// A mistake that other caches were shipped with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Mistake {
    /// None.
    Nothing,
    /// A query sees one entry more than its position allows.
    Visibility,
    /// The window's reader takes positions modulo a ring that is one row shorter than the writer's.
    RingModulus,
    /// The two halves of a row's rotary channels change places.
    SwappedHalves,
    /// New blocks are not entered into the device's block table.
    StaleTable,
}

#[cfg(feature = "mistakes")]
static MADE: core::sync::atomic::AtomicU32 = core::sync::atomic::AtomicU32::new(0);

/// From now on `mistake` is made, in this whole process.
#[cfg(feature = "mistakes")]
pub fn make(mistake: Mistake) {
    MADE.store(mistake as u32, core::sync::atomic::Ordering::SeqCst);
}

/// Whether `mistake` is being made.
#[cfg(feature = "mistakes")]
#[must_use]
pub fn made(mistake: Mistake) -> bool {
    MADE.load(core::sync::atomic::Ordering::SeqCst) == mistake as u32
}

/// Whether `mistake` is being made: never, without the feature.
#[cfg(not(feature = "mistakes"))]
#[must_use]
#[inline(always)]
pub const fn made(_mistake: Mistake) -> bool {
    false
}
