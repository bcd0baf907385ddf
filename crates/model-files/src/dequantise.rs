//! Decodes weights of all stored formats to numbers.
//!
//! | type in the file | scales | value |
//! |---|---|---|
//! | BF16, F32 | none | the element |
//! | E4M3 `[r, c]` | UE8M0 or F32 `[r / 128, c / 128]` (rounded up), `.scale` | code * scale |
//! | E2M1 `[r, c / 2]`, two codes per byte (MXFP4) | UE8M0 `[r, c / 32]`, `.scale` | code * scale |
//! | the same (NVFP4) | E4M3 `[r, c / 16]`, `.weight_scale`; F32, one, `.weight_scale_2` | code * scale * scale |
//! | the same | E4M3 `[r, c / 16]`, `.weight_scale`; F32, one, `.weight_global_scale` | code * scale * f32(1 / scale) |
//!
//! Base models have F32 scales, which are powers of two.

use half::bf16;
use kv_layout::format::{E2m1, E4m3, Ue8m0};

use crate::error::ModelFileError;

/// Rows and columns of a block of E4M3 weights that share a scale.
pub(crate) const E4M3_BLOCK: u64 = 128;
/// Consecutive columns of MXFP4 weights that share a scale.
pub(crate) const MXFP4_GROUP: u64 = 32;
/// Consecutive columns of NVFP4 weights that share a scale.
pub(crate) const NVFP4_GROUP: u64 = 16;

/// The bytes of a weight and of its scales; their lengths were checked.
pub(crate) enum Weight<'a> {
    /// Little-endian BF16.
    Bf16(&'a [u8]),
    /// Little-endian f32.
    F32(&'a [u8]),
    /// Codes with scales.
    Scaled(Scaled<'a>),
}

/// A matrix of codes with scales.
pub(crate) struct Scaled<'a> {
    pub(crate) codes: Codes<'a>,
    /// Columns of a row, in elements.
    pub(crate) columns: usize,
    /// Rows that share a row of scales.
    pub(crate) group_rows: usize,
    /// Columns that share a scale.
    pub(crate) group_columns: usize,
    /// `[rows / group_rows, columns / group_columns]`, rounded up; finite, exact.
    pub(crate) scales: Vec<f64>,
    /// Whether a value may need more bits than f32 has, because a scale, or a factor of it, is any f32.
    pub(crate) rounds: bool,
}

/// Codes, row by row.
#[derive(Clone, Copy)]
pub(crate) enum Codes<'a> {
    /// One code per byte.
    E4m3(&'a [u8]),
    /// Two codes per byte, the even column in the low bits.
    E2m1(&'a [u8]),
}

impl Weight<'_> {
    /// All values as f32. Only with F32 scales, of blocks (E4M3) or of the whole tensor (NVFP4), may values be rounded.
    pub(crate) fn to_f32(&self, name: &str) -> Result<Vec<f32>, ModelFileError> {
        match self {
            Self::Bf16(bytes) => Ok(elements(bytes, |b| bf16::from_le_bytes(b).to_f32())),
            Self::F32(bytes) => Ok(elements(bytes, f32::from_le_bytes)),
            Self::Scaled(scaled) => scaled.map(|index, value| {
                let found = value as f32;
                let kept = f64::from(found) == value || value.is_nan();
                if kept || scaled.rounds && found.is_finite() {
                    return Ok(found);
                }
                Err(would_round(name, index, value, "f32"))
            }),
        }
    }

    /// All values as BF16; an error for the first value that BF16 cannot represent.
    pub(crate) fn to_bf16(&self, name: &str) -> Result<Vec<bf16>, ModelFileError> {
        let exact = |index, value: f64| {
            let found = bf16::from_f32(value as f32);
            if f64::from(found.to_f32()) == value || value.is_nan() {
                return Ok(found);
            }
            Err(would_round(name, index, value, "bf16"))
        };
        match self {
            Self::Bf16(bytes) => Ok(elements(bytes, bf16::from_le_bytes)),
            Self::F32(bytes) => {
                let values = elements(bytes, f32::from_le_bytes).into_iter().map(f64::from);
                values.enumerate().map(|(index, value)| exact(index, value)).collect()
            }
            Self::Scaled(scaled) => scaled.map(exact),
        }
    }
}

impl Scaled<'_> {
    /// Calls `to` with the index and the exact value of each element, row by row.
    fn map<T>(
        &self,
        to: impl Fn(usize, f64) -> Result<T, ModelFileError>,
    ) -> Result<Vec<T>, ModelFileError> {
        let table = self.codes.table();
        let row_scales = self.columns.div_ceil(self.group_columns);
        let mut values = Vec::with_capacity(self.codes.len());
        for index in 0..self.codes.len() {
            let (row, column) = (index / self.columns, index % self.columns);
            let scale =
                self.scales[row / self.group_rows * row_scales + column / self.group_columns];
            values.push(to(index, table[usize::from(self.codes.code(index))] * scale)?);
        }
        Ok(values)
    }
}

impl Codes<'_> {
    fn len(self) -> usize {
        match self {
            Self::E4m3(bytes) => bytes.len(),
            Self::E2m1(bytes) => 2 * bytes.len(),
        }
    }

    fn code(self, index: usize) -> u8 {
        match self {
            Self::E4m3(bytes) => bytes[index],
            Self::E2m1(bytes) => bytes[index / 2] >> (4 * (index % 2)) & 0xF,
        }
    }

    /// The value of each code.
    fn table(self) -> [f64; 256] {
        std::array::from_fn(|code| {
            f64::from(match self {
                Self::E4m3(_) => E4m3(code as u8).to_f32(),
                Self::E2m1(_) => E2m1(code as u8).to_f32(),
            })
        })
    }
}

/// UE8M0 scales as numbers.
pub(crate) fn ue8m0_scales(name: &str, bytes: &[u8]) -> Result<Vec<f64>, ModelFileError> {
    scales(
        name,
        bytes.iter().map(|&byte| if byte == 0xFF { f32::NAN } else { Ue8m0(byte).to_f32() }),
    )
}

/// F32 scales as numbers. 0 and less are refused: they would erase a block, or turn its signs.
pub(crate) fn f32_scales(name: &str, bytes: &[u8]) -> Result<Vec<f64>, ModelFileError> {
    let values = elements(bytes, f32::from_le_bytes).into_iter();
    scales(name, values.map(|value| if value > 0.0 { value } else { f32::NAN }))
}

/// E4M3 scales as numbers.
pub(crate) fn e4m3_scales(name: &str, bytes: &[u8]) -> Result<Vec<f64>, ModelFileError> {
    scales(name, bytes.iter().map(|&byte| E4m3(byte).to_f32()))
}

fn scales(name: &str, values: impl Iterator<Item = f32>) -> Result<Vec<f64>, ModelFileError> {
    let check = |(index, value): (usize, f32)| {
        if value.is_finite() {
            return Ok(f64::from(value));
        }
        Err(ModelFileError::BadScale { name: name.to_owned(), index })
    };
    values.enumerate().map(check).collect()
}

/// Little-endian elements.
pub(crate) fn elements<T, const BYTES: usize>(
    bytes: &[u8],
    decode: impl Fn([u8; BYTES]) -> T,
) -> Vec<T> {
    bytes.as_chunks().0.iter().map(|&element| decode(element)).collect()
}

fn would_round(name: &str, index: usize, value: f64, to: &'static str) -> ModelFileError {
    ModelFileError::WouldRound { name: name.to_owned(), index, value, to }
}
