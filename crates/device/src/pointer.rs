//! Launch pointers: what a kernel takes of a buffer.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;

use crate::{Backend, Device, DeviceId};

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

    /// Its bytes.
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
        self.bytes > 0
            && other.bytes > 0
            && self.address < other.address.saturating_add(other.bytes)
            && other.address < self.address.saturating_add(self.bytes)
    }
}

macro_rules! launch_pointer {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        pub struct $name<T> {
            span: Span,
            element: PhantomData<fn() -> T>,
        }

        impl<T> $name<T> {
            pub(crate) const fn new(span: Span) -> Self {
                Self { span, element: PhantomData }
            }

            /// The pointer to `bytes` bytes at `address`, for memory that is in no buffer.
            ///
            /// # Safety
            /// The range is memory of `device`, valid as long as work that takes the pointer may run.
            pub unsafe fn from_raw_parts<B: Backend>(
                device: &Device<B>,
                address: u64,
                bytes: u64,
            ) -> Self {
                Self::new(Span { address, bytes, device: device.id() })
            }

            /// The range it may be used for.
            #[must_use]
            pub const fn span(&self) -> Span {
                self.span
            }

            /// The address.
            #[must_use]
            pub const fn address(&self) -> u64 {
                self.span.address
            }

            /// What `cuLaunchKernel` takes for this argument: where the 64-bit address is.
            #[must_use]
            pub const fn argument(&self) -> *mut c_void {
                (&raw const self.span.address).cast_mut().cast()
            }
        }

        impl<T> Clone for $name<T> {
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<T> Copy for $name<T> {}

        impl<T> PartialEq for $name<T> {
            fn eq(&self, other: &Self) -> bool {
                self.span == other.span
            }
        }

        impl<T> Eq for $name<T> {}

        impl<T> fmt::Debug for $name<T> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x} ({} bytes)", self.span.address, self.span.bytes)
            }
        }
    };
}

launch_pointer! {
    /// Elements of `T` on a device that a kernel reads: a `const` argument of the kernel table.
    ///
    /// Made by [`View::ptr`](crate::View::ptr); carries address, length and device. Not dereferenceable on the
    /// host.
    DevicePtr
}

launch_pointer! {
    /// Elements of `T` on a device that a kernel writes: a `mut` argument of the kernel table.
    ///
    /// Made by [`Buffer::ptr_mut`](crate::Buffer::ptr_mut); otherwise as [`DevicePtr`].
    DevicePtrMut
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
