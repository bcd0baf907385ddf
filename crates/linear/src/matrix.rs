//! A weight in NVFP4 on the host.

use kv_layout::format::{E2m1, E4m3};
use kv_layout::linear::{GROUP, INNER_STEP};

use crate::error::LinearError;
use crate::quantise;

/// A weight `[columns, inner]` in NVFP4. Each value is `code * group scale * scale`; a group is 16 consecutive values
/// of a row.
#[derive(Clone, Debug, PartialEq)]
pub struct Nvfp4Matrix {
    columns: u32,
    inner: u32,
    codes: Vec<u8>,
    scales: Vec<u8>,
    scale: f32,
}

impl Nvfp4Matrix {
    /// Quantises `values`, `[columns, inner]` f32 or BF16, at two levels. `scale` is the largest magnitude divided by 6
    /// times 448. A group's scale is the group's largest magnitude divided by 6 and by `scale`, in E4M3. A code is the
    /// value divided by both scales, in E2M1. Codes and group scales are rounded to nearest even. A group whose scale
    /// is 0 becomes 0.
    ///
    /// # Errors
    /// [`LinearError::Shape`]; [`LinearError::Length`]; [`LinearError::NotFinite`].
    pub fn quantise<T: Copy + Into<f32>>(
        values: &[T],
        columns: u32,
        inner: u32,
    ) -> Result<Self, LinearError> {
        check_shape(columns, inner)?;
        check_length("values", values.len(), columns, inner, 1)?;
        let scale = quantise::weight_scale(quantise::largest(values)?);
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for group in values.chunks_exact(GROUP as usize) {
            let amax = group.iter().fold(0.0, |amax: f32, &value| amax.max(value.into().abs()));
            let group_scale = quantise::group_scale(amax, scale);
            let code = |value: T| quantise::code(value.into(), group_scale, scale);
            let pairs = group.as_chunks().0.iter();
            codes.extend(pairs.map(|&[low, high]| E2m1::pack(code(low), code(high))));
            scales.push(group_scale.0);
        }
        Ok(Self { columns, inner, codes, scales, scale })
    }

    /// The weight with these codes (`[columns, inner / 2]`, two per byte, the even value in the low four bits), E4M3
    /// scales (`[columns, inner / 16]`) and scale, as stored in a model's files.
    ///
    /// # Errors
    /// [`LinearError::Shape`]; [`LinearError::Length`]; [`LinearError::ScaleIsNan`];
    /// [`LinearError::WeightScale`].
    pub fn from_parts(
        columns: u32,
        inner: u32,
        codes: Vec<u8>,
        scales: Vec<u8>,
        scale: f32,
    ) -> Result<Self, LinearError> {
        check_shape(columns, inner)?;
        check_length("bytes of codes", codes.len(), columns, inner, 2)?;
        check_length("scales", scales.len(), columns, inner, GROUP)?;
        if let Some(index) = scales.iter().position(|byte| byte & 0x7F == 0x7F) {
            return Err(LinearError::ScaleIsNan { index, byte: scales[index] });
        }
        if !scale.is_finite() {
            return Err(LinearError::WeightScale { scale });
        }
        Ok(Self { columns, inner, codes, scales, scale })
    }

    /// Columns of the product: rows of the weight.
    #[must_use]
    pub fn columns(&self) -> u32 {
        self.columns
    }

    /// Values of a row.
    #[must_use]
    pub fn inner(&self) -> u32 {
        self.inner
    }

    /// `[columns, inner / 2]` u8: E2M1 codes, the even value in the low four bits.
    #[must_use]
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// `[columns, inner / 16]` u8: E4M3 scales.
    #[must_use]
    pub fn scales(&self) -> &[u8] {
        &self.scales
    }

    /// The scale of the whole weight, by which every value is multiplied.
    #[must_use]
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// The values, `[columns, inner]`, exact except for the multiplication by [`Self::scale`], which is rounded to
    /// nearest even.
    #[must_use]
    pub fn decode(&self) -> Vec<f32> {
        let codes = self.codes.iter().flat_map(|&byte| {
            let (low, high) = E2m1::unpack(byte);
            [low, high]
        });
        let of_group = |index: usize| E4m3(self.scales[index / GROUP as usize]).to_f32();
        let value = |(index, code): (usize, E2m1)| code.to_f32() * of_group(index) * self.scale;
        codes.enumerate().map(value).collect()
    }
}

fn check_shape(columns: u32, inner: u32) -> Result<(), LinearError> {
    if columns == 0 || inner == 0 || !inner.is_multiple_of(INNER_STEP) {
        return Err(LinearError::Shape { columns, inner, multiple: INNER_STEP });
    }
    Ok(())
}

/// Refuses a tensor that does not have one element per `values` values of the weight.
fn check_length(
    what: &'static str,
    found: usize,
    columns: u32,
    inner: u32,
    values: u32,
) -> Result<(), LinearError> {
    let (found, expected) = (found as u64, u64::from(columns) * u64::from(inner / values));
    if found == expected { Ok(()) } else { Err(LinearError::Length { what, found, expected }) }
}
