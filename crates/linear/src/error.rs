//! Errors of this crate. A refused call changes nothing.

use dsv4_kv_device::DeviceError;

/// Why a weight or a product was refused.
#[derive(Debug, thiserror::Error)]
pub enum LinearError {
    /// A weight without columns, or with rows of a length that no kernel supports.
    #[error(
        "a weight of {columns} columns of {inner} values; there must be at least one column, of a multiple of {multiple} values"
    )]
    Shape {
        /// Columns of the product, rows of the weight.
        columns: u32,
        /// Values of a row.
        inner: u32,
        /// `inner` must be a multiple of this, which is also its least allowed value.
        multiple: u32,
    },
    /// A tensor whose length does not match the weight's shape.
    #[error("{what}: {found}; the weight's shape says {expected}")]
    Length {
        /// The tensor.
        what: &'static str,
        /// Its elements.
        found: u64,
        /// The number of elements that it must have.
        expected: u64,
    },
    /// A value that is not finite, so that no scale can represent it.
    #[error("value {index} of the weight is {value}; only finite values can be quantised")]
    NotFinite {
        /// Its index.
        index: usize,
        /// The value.
        value: f32,
    },
    /// A scale of a group that is NaN.
    #[error("scale {index} of the weight is a NaN of E4M3 ({byte:#04x})")]
    ScaleIsNan {
        /// Its index.
        index: usize,
        /// Its byte.
        byte: u8,
    },
    /// A scale of the whole weight that is not finite.
    #[error("the weight's scale is {scale}; it must be finite")]
    WeightScale {
        /// The scale.
        scale: f32,
    },
    /// The device refused or failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
