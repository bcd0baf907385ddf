//! Ranges of device memory.

use crate::identity::DeviceId;

/// A range of a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) device: DeviceId,
}

impl Span {
    /// Address of its first byte.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Its size in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The device whose memory it is in.
    #[must_use]
    pub const fn device(&self) -> DeviceId {
        self.device
    }

    /// Whether a byte is in both.
    #[must_use]
    pub const fn overlaps(&self, other: &Self) -> bool {
        // Without a branch: launches compare many pairs, of which hardly any overlaps.
        (self.bytes > 0)
            & (other.bytes > 0)
            & (self.address < other.end())
            & (other.address < self.end())
    }

    /// The address after its last byte.
    pub(crate) const fn end(&self) -> u64 {
        self.address.saturating_add(self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_overlap_where_they_share_a_byte() {
        let device = DeviceId::new();
        let span = |address, bytes| Span { address, bytes, device };
        assert!(span(16, 4).overlaps(&span(19, 1)) && span(19, 1).overlaps(&span(16, 4)));
        assert!(!span(16, 4).overlaps(&span(20, 4)) && !span(20, 4).overlaps(&span(16, 4)));
        assert!(!span(16, 4).overlaps(&span(17, 0)), "no bytes, no overlap");
        assert!(span(u64::MAX - 1, 1).overlaps(&span(0, u64::MAX)));
    }
}
