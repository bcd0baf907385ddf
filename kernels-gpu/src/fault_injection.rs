//! Mistakes that tests make on purpose, to see that they are found. They need the feature `mistakes`, which only those
//! tests turn on. The kernels and the host call a function for each mistake; without the feature it returns its
//! argument and compiles to nothing.

/// A mistake that other caches have been released with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Mistake {
    /// No mistake.
    Nothing,
    /// A query sees one entry more than its position allows.
    Visibility,
    /// The window's reader takes positions modulo a ring that is one row shorter than the writer's.
    RingModulus,
    /// The two halves of a row's rotary channels are swapped.
    SwappedHalves,
    /// New blocks are not entered into the device's block table.
    StaleTable,
}

#[cfg(feature = "mistakes")]
static MADE: core::sync::atomic::AtomicU32 = core::sync::atomic::AtomicU32::new(0);

/// Makes `mistake` from now on, in the whole process.
#[cfg(feature = "mistakes")]
pub fn make(mistake: Mistake) {
    MADE.store(mistake as u32, core::sync::atomic::Ordering::SeqCst);
}

#[cfg(feature = "mistakes")]
fn made(mistake: Mistake) -> bool {
    MADE.load(core::sync::atomic::Ordering::SeqCst) == mistake as u32
}

#[cfg(not(feature = "mistakes"))]
#[inline(always)]
const fn made(_mistake: Mistake) -> bool {
    false
}

/// The number of entries that a query sees; see [`Mistake::Visibility`].
#[inline(always)]
#[must_use]
pub fn visible(entries: u32) -> u32 {
    entries + u32::from(made(Mistake::Visibility))
}

/// The number of rows by which the reader of a ring takes positions; see [`Mistake::RingModulus`].
#[inline(always)]
#[must_use]
pub fn ring_rows(rows: u32) -> u32 {
    rows - u32::from(made(Mistake::RingModulus))
}

/// The eighth of a row's rotary channels that is stored at place `eighth`; see [`Mistake::SwappedHalves`].
#[inline(always)]
#[must_use]
pub fn rotary_eighth(eighth: u32) -> u32 {
    eighth ^ (4 * u32::from(made(Mistake::SwappedHalves)))
}

/// The number of a step's new blocks that are entered into the block table; see [`Mistake::StaleTable`].
#[inline(always)]
#[must_use]
pub fn entered_blocks(new_blocks: u32) -> u32 {
    if made(Mistake::StaleTable) { 0 } else { new_blocks }
}
