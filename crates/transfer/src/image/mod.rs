//! The image of a request or of a prefix. It has a manifest, which describes everything, and a payload of plain bytes.
//!
//! All numbers are little-endian. A **manifest**:
//!
//! | bytes | |
//! |---|---|
//! | 0 | `DSV4MOVE` |
//! | 8 | version, u32 |
//! | 12 | flags, u16: 1 for an opening, whose digests are 0, else 0 |
//! | 14 | kind, u16: 0 for a request, 1 for a prefix ([`ImageKind`]) |
//! | 16, 48, 80 | [`Fingerprint`]: shape, weights, owner, 32 bytes each |
//! | 112, 116 | [`Positions`]: final tokens in trunk and draft layers, u32; for a prefix, its end |
//! | 120, 124 | number of sections, and of tokens, u32 |
//! | 128, 136 | the source's epoch and lease, u64 ([`Source`]) |
//! | 144 | bytes of the payload, u64 |
//! | 152 | the table; for each section: kind, unit, first row, rows (u32 each), bytes (u64), xxh3-128 |
//! | | all tokens of the request or prefix, u32 |
//! | | BLAKE3 of everything before |
//!
//! The **payload** has the sections in the order of the table, without gaps. As a file, an image is the manifest
//! followed by the payload. Between machines the manifest goes over the control channel and the payload over a
//! [transport](crate::transport), so that the digests do not take the same way as the bytes that they check.
//!
//! BLAKE3 protects the manifest; xxh3 finds payload bytes that were damaged, overwritten or never written. Neither is a
//! signature: any writer to the control channel is trusted.

mod check;
mod codec;
mod error;
mod fingerprint;

pub(crate) use check::Digests;
pub use check::{Expected, Image, verify};
pub(crate) use codec::check_end;
pub use codec::{decode_manifest, decode_opening};
pub use error::{Fact, ImageError, VERSION};
pub use fingerprint::Fingerprint;

use std::num::NonZero;
use std::ops::Range;
use std::sync::LazyLock;
use std::thread::available_parallelism;

use dsv4_kv::transfer::{Part, PartLayout, Positions};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use twox_hash::XxHash3_128;

/// Identifies a payload at its source, as the source named it in its offer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Source {
    /// A random number of the sender. Another sender, or the same program after a restart, has another number.
    pub epoch: u64,
    /// The sender's number for this payload. Senders count it up.
    pub lease: u64,
}

/// The kind of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageKind {
    /// A request: its blocks and the contents of its slot. It moves: only one cache has it.
    Request,
    /// A prefix: whole blocks, and the checkpoint at its end. It is copied: both caches have it.
    Prefix,
}

impl ImageKind {
    /// All kinds, indexed by their number in the manifest.
    pub const ALL: [Self; 2] = [Self::Request, Self::Prefix];

    /// The parts of an image of this kind, in order.
    #[must_use]
    pub fn parts(self, layout: &PartLayout, at: Positions) -> Vec<Part> {
        match self {
            Self::Request => layout.parts(at),
            Self::Prefix => layout.prefix_parts(at),
        }
    }
}

/// A part of an image, and the digest of its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Section {
    /// The part.
    pub part: Part,
    /// xxh3-128 of its bytes.
    pub digest: u128,
}

impl Section {
    /// The section of `part`, with the digest of `bytes`.
    #[must_use]
    pub fn of(part: Part, bytes: &[u8]) -> Self {
        Self { part, digest: XxHash3_128::oneshot(bytes) }
    }
}

/// The byte ranges of consecutive sections in a payload, from byte `first`. Sections whose end overflows `usize`, and
/// all after them, are left out.
pub(crate) fn places(sections: &[Section], first: usize) -> impl Iterator<Item = Range<usize>> {
    let mut end = Some(first);
    sections.iter().map_while(move |section| {
        let start = end?;
        end = usize::try_from(section.part.bytes).ok().and_then(|bytes| start.checked_add(bytes));
        Some(start..end?)
    })
}

/// The threads that hash large inputs, `None` if the system starts none. They are not the program's own: a worker of
/// rayon that waits runs other jobs of its pool, and such a job could wait for a lock that its own thread holds.
static HASHERS: LazyLock<Option<ThreadPool>> = LazyLock::new(|| {
    // More would wait for memory.
    const MAX_THREADS: usize = 16;
    let threads = available_parallelism().map_or(1, NonZero::get).min(MAX_THREADS);
    let name = |thread| format!("digests {thread}");
    ThreadPoolBuilder::new().num_threads(threads).thread_name(name).build().ok()
});

/// xxh3-128 of ranges of bytes. On four or more cores, large inputs are hashed in parallel; on two cores sharing the
/// work takes as long as doing it. A worker of rayon hashes alone, since it would run other jobs while it waits.
pub(crate) fn digests(bytes: &[u8], places: &[Range<usize>]) -> Vec<u128> {
    // Fewer bytes are hashed before other threads have started.
    const MANY: usize = 1 << 20;
    const CORES: usize = 4;
    let digest = |place: &Range<usize>| XxHash3_128::oneshot(&bytes[place.clone()]);
    let many = places.iter().map(Range::len).sum::<usize>() >= MANY;
    let hashers = (many && rayon::current_thread_index().is_none()).then_some(HASHERS.as_ref());
    match hashers.flatten().filter(|hashers| hashers.current_num_threads() >= CORES) {
        Some(hashers) => hashers.install(|| places.par_iter().map(digest).collect()),
        None => places.iter().map(digest).collect(),
    }
}

/// The description of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// The kind of the image.
    pub kind: ImageKind,
    /// Digests of model and formats, weights, and owner.
    pub fingerprint: Fingerprint,
    /// The positions of the request. For a prefix, where it ends; 0 in the draft layers if its checkpoint has no draft
    /// windows.
    pub at: Positions,
    /// The source of the payload.
    pub source: Source,
    /// The token ids, one for each final position of the trunk.
    pub tokens: Vec<u32>,
    /// The parts, in the order of the payload.
    pub sections: Vec<Section>,
}

impl Manifest {
    /// A copy whose digests are all 0, as in an opening.
    #[must_use]
    pub fn without_digests(&self) -> Self {
        let mut manifest = self.clone();
        manifest.sections.iter_mut().for_each(|section| section.digest = 0);
        manifest
    }

    /// Bytes of the payload; `u64::MAX` if the sum overflows.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        self.sections.iter().fold(0, |sum, section| section.part.bytes.saturating_add(sum))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, mpsc};
    use std::time::Duration;

    use super::*;

    /// Jobs of one pool that hash while they hold a lock, as senders of one fabric do.
    #[test]
    fn jobs_that_hold_a_lock_do_not_wait_for_themselves() {
        const PLACES: usize = 64;
        let (done, all) = mpsc::channel();
        std::thread::spawn(move || {
            let pool = ThreadPoolBuilder::new().num_threads(8).build().expect("threads");
            let (lock, bytes) = (Mutex::new(()), vec![7; 1 << 21]);
            let places: Vec<_> = (0..PLACES).map(|place| place << 15..(place + 1) << 15).collect();
            pool.in_place_scope(|jobs| {
                for _ in 0..100 {
                    jobs.spawn(|_| {
                        let _held = lock.lock().expect("no panic");
                        assert_eq!(digests(&bytes, &places).len(), PLACES);
                    });
                }
            });
            let _ = done.send(digests(&bytes, &places));
        });
        let digests = all.recv_timeout(Duration::from_secs(60)).expect("no deadlock");
        assert_eq!(digests, [XxHash3_128::oneshot(&[7; 1 << 15]); PLACES]);
    }
}
