//! Launch pointers: the arguments that kernels take for buffers.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;

use crate::backend::Backend;
use crate::device::Device;
use crate::span::Span;

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

            /// The range that the kernel may use through it.
            #[must_use]
            pub const fn span(&self) -> Span {
                self.span
            }

            /// The address.
            #[must_use]
            pub const fn address(&self) -> u64 {
                self.span.address
            }

            /// The element of `cuLaunchKernel`'s argument list: a pointer to the 64-bit address.
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
