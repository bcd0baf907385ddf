//! The arguments of kernel bodies: one struct an operation, with its pointers and scalars by name. Expanded from the
//! kernel table.

use simt::mem::{Global, GlobalMut};

/// The view of a pointer: read-only for `const`, writable for `mut`.
macro_rules! view_type {
    (const $element:ty) => {
        Global<$element>
    };
    (mut $element:ty) => {
        GlobalMut<$element>
    };
}

macro_rules! arguments {
    ($(
        $operation:ident<$variant:ty> |$p:ident, $f:ident|
        $doc:literal
        (
            $( $(#[$pointer_doc:meta])* $pointer:ident: $mutability:ident $element:ident
               $(align $align:literal)? [$($extent:tt)+] ),* ;
            $params:ident
        )
        $launch:tt
        bodies $bodies:tt
    )*) => {
        $(
            #[doc = $doc]
            #[derive(Clone, Copy)]
            pub struct $operation {
                $( $(#[$pointer_doc])* pub $pointer: view_type!($mutability $element), )*
                /// The scalars.
                pub params: crate::params::$params,
            }
        )*
    };
}

crate::for_each_operation!(arguments);
