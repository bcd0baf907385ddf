//! Digests of sections of a payload.

use kernels_gpu::launch::DigestSections;
use kernels_gpu::params::DigestParams;
use kv_layout::xxh3;

use super::check_most;
use crate::device::{Backend, Buffer, DeviceError, Stream, View};

/// 32-bit words of the record of a section.
pub const DIGEST_RECORD: u32 = DigestParams::RECORD;

/// Sections of a payload, and where their records go.
pub struct SectionRecords<'a, B: Backend> {
    /// The payload. Bytes after its last whole word of 8 bytes are in no section.
    pub payload: &'a Buffer<B, u8>,
    /// `[count, 2]` u32: first word of 8 bytes of each section, and how many words it has.
    pub sections: &'a View<B, u32>,
    /// `[48]` u32: [`digest_secret`].
    pub secret: &'a View<B, u32>,
    /// Sections.
    pub count: u32,
    /// `[count, 64]` u32: their records, which [`digest`] reads.
    pub records: &'a Buffer<B, u32>,
    /// `[1]` count of sections refused: beyond the payload.
    pub faults: &'a Buffer<B, u32>,
}

/// The secret of XXH3, as words for the kernel.
#[must_use]
pub fn digest_secret() -> [u32; 48] {
    kernels_gpu::digest::secret_words()
}

/// Queues `digest_sections`: the accumulators of XXH3 of each section, or the bytes of one of at most 240.
///
/// # Errors
/// [`DeviceError::Argument`] for a payload of more than 32 GiB; [`DeviceError::TooShort`] for a buffer shorter than its shape;
/// as [`Stream::launch`].
pub fn digest_sections<B: Backend>(
    stream: &Stream<B>,
    sections: &SectionRecords<'_, B>,
) -> Result<(), DeviceError> {
    let SectionRecords { payload, sections, secret, count, records, faults } = *sections;
    if count == 0 {
        return Ok(());
    }
    let words = payload.len() / 8;
    check_most("words of a payload", words, u32::MAX)?;
    let operation = DigestSections {
        payload: payload.ptr(),
        sections: sections.ptr(),
        secret: secret.ptr(),
        records: records.ptr_mut(),
        faults: faults.ptr_mut(),
        params: DigestParams { sections: count, words: words as u32 },
    };
    // SAFETY: the launch checks every buffer; the kernel refuses sections beyond the payload; work of one stream runs in
    // order.
    unsafe { stream.launch((), &operation) }
}

/// The digest of a section of `bytes` bytes from its record: 128-bit XXH3 for sections of more than 240 bytes. `None`
/// for a shorter section: its record has the bytes themselves, as little-endian words.
#[must_use]
pub fn digest(record: &[u32; DIGEST_RECORD as usize], bytes: u64) -> Option<u128> {
    let accumulator = |i: usize| u64::from(record[2 * i + 1]) << 32 | u64::from(record[2 * i]);
    (bytes > xxh3::SHORT).then(|| xxh3::finish(std::array::from_fn(accumulator), bytes))
}
