//! Digests of payloads in device memory, by the kernel `digest_sections`.

use std::ops::Range;

use dsv4_kv::device::{Backend, Buffer, DeviceError, Stream};
use dsv4_kv::ops::{self, DIGEST_RECORD, SectionRecords};
use twox_hash::XxHash3_128;

/// Most sections of one launch.
const SECTIONS: usize = 1024;
/// Bytes of a word. The kernel's sections begin and end at multiples of it.
const WORD: usize = 8;

/// The buffers of the kernel, besides the payload.
pub(super) struct Digester<B: Backend> {
    stream: Stream<B>,
    /// `[48]` u32.
    secret: Buffer<B, u32>,
    /// `[SECTIONS, 2]` u32.
    sections: Buffer<B, u32>,
    /// `[SECTIONS, 64]` u32.
    records: Buffer<B, u32>,
    /// `[1]` u32.
    faults: Buffer<B, u32>,
}

impl<B: Backend> Digester<B> {
    pub fn new(stream: &Stream<B>) -> Result<Self, DeviceError> {
        let secret = ops::digest_secret();
        let allocate = |label, elements: usize| stream.device().allocate(label, elements as u64);
        let digester = Self {
            stream: stream.clone(),
            secret: allocate("secret of digests", secret.len())?,
            sections: allocate("sections of payloads", 2 * SECTIONS)?,
            records: allocate("digests", SECTIONS * DIGEST_RECORD as usize)?,
            faults: allocate("refused sections", 1)?,
        };
        stream.upload(&secret, &digester.secret, 0)?;
        Ok(digester)
    }

    /// Whether the kernel can digest this section: it begins and ends at whole words, whose indices fit in 32 bits.
    pub fn takes(section: &Range<usize>) -> bool {
        let is_word = |at: usize| at.is_multiple_of(WORD) && u32::try_from(at / WORD).is_ok();
        is_word(section.start) && is_word(section.end)
    }

    /// xxh3-128 of each section of a payload; sections are byte ranges. Waits for the device.
    pub fn digests(
        &mut self,
        payload: &Buffer<B, u8>,
        sections: &[Range<usize>],
    ) -> Result<Vec<u128>, DeviceError> {
        let words = payload.len() / WORD as u64 * WORD as u64;
        if let Some(beyond) = sections.iter().find(|of| of.end as u64 > words) {
            let what = "bytes of a payload";
            return Err(DeviceError::Length { what, found: words, needed: beyond.end as u64 });
        }
        let mut digests = Vec::with_capacity(sections.len());
        for sections in sections.chunks(SECTIONS) {
            self.launch(payload, sections)?;
            let mut records = vec![[0_u32; DIGEST_RECORD as usize]; sections.len()];
            self.stream.download(&self.records, 0, records.as_flattened_mut())?;
            digests.extend(records.iter().zip(sections).map(|(record, of)| {
                ops::digest(record, of.len() as u64).unwrap_or_else(|| {
                    let bytes: Vec<_> = record.iter().flat_map(|word| word.to_le_bytes()).collect();
                    XxHash3_128::oneshot(&bytes[..of.len()])
                })
            }));
        }
        Ok(digests)
    }

    fn launch(
        &self,
        payload: &Buffer<B, u8>,
        sections: &[Range<usize>],
    ) -> Result<(), DeviceError> {
        let words: Vec<_> = sections
            .iter()
            .flat_map(|of| [of.start, of.len()].map(|bytes| (bytes / WORD) as u32))
            .collect();
        self.stream.upload(&words, &self.sections, 0)?;
        ops::digest_sections(
            &self.stream,
            &SectionRecords {
                payload,
                sections: &self.sections.view(),
                secret: &self.secret.view(),
                count: sections.len() as u32,
                records: &self.records,
                faults: &self.faults,
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use dsv4_kv::device::Emulator;

    use super::*;

    /// The kernel must not get a section that ends beyond 32 GiB: its word index would be truncated to 32 bits.
    #[test]
    fn a_section_that_the_kernel_cannot_name_is_not_its() {
        let takes = |of: Range<usize>| Digester::<Emulator>::takes(&of);
        let most = (u32::MAX as usize) * WORD;
        assert!(takes(0..16) && takes(most - 8..most));
        assert!(!takes(0..most + 8) && !takes(most + 8..most + 16) && !takes(0..9));
    }
}
