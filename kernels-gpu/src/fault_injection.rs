//! Mistakes that tests make on purpose, to see that they are found. Only with the feature `mistakes`,
//! which nothing but those tests turns on. The kernels and the host call a function for each mistake;
//! without the feature it hands back what it was given and leaves no trace.

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

#[cfg(feature = "mistakes")]
fn made(mistake: Mistake) -> bool {
    MADE.load(core::sync::atomic::Ordering::SeqCst) == mistake as u32
}

#[cfg(not(feature = "mistakes"))]
#[inline(always)]
const fn made(_mistake: Mistake) -> bool {
    false
}

/// The entries that a query sees; see [`Mistake::Visibility`].
#[inline(always)]
#[must_use]
pub fn visible(entries: u32) -> u32 {
    entries + u32::from(made(Mistake::Visibility))
}

/// The rows of a ring, as its reader takes them; see [`Mistake::RingModulus`].
#[inline(always)]
#[must_use]
pub fn ring_rows(rows: u32) -> u32 {
    rows - u32::from(made(Mistake::RingModulus))
}

/// Which eighth of a row's rotary channels lies where the `eighth` does; see [`Mistake::SwappedHalves`].
#[inline(always)]
#[must_use]
pub fn rotary_eighth(eighth: u32) -> u32 {
    eighth ^ (4 * u32::from(made(Mistake::SwappedHalves)))
}

/// How many of a step's new blocks are entered into the block table; see [`Mistake::StaleTable`].
#[inline(always)]
#[must_use]
pub fn entered_blocks(new_blocks: u32) -> u32 {
    if made(Mistake::StaleTable) { 0 } else { new_blocks }
}
