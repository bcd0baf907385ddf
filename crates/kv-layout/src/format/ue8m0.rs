//! UE8M0: an unsigned power of two, byte `b` = 2^(b-127).

use bytemuck::{Pod, Zeroable};

/// A power-of-two scale. `0xFF` is NaN in the OCP format; it is never produced here, and decodes to
/// infinity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(transparent)]
pub struct Ue8m0(pub u8);

impl Ue8m0 {
    /// The least power of two that is not below `scale` (positive, finite): "exponent round-up".
    ///
    /// Scales below 2^-126 become 2^-126; above 2^127, 2^127 (docs/specification.md, section 3).
    #[must_use]
    pub const fn round_up(scale: f32) -> Self {
        let bits = scale.to_bits();
        let exponent = (bits >> 23) & 0xFF;
        let up = exponent + (bits & 0x007F_FFFF != 0) as u32;
        Self(if up < 1 {
            1
        } else if up > 254 {
            254
        } else {
            up as u8
        })
    }

    /// The scale as a number, to multiply by when dequantising. Exact for bytes 0 to 254.
    ///
    /// Without a branch: byte 0 is 2^-127, a subnormal, whose one bit is below the exponent field.
    #[must_use]
    pub const fn to_f32(self) -> f32 {
        let byte = self.0 as u32;
        f32::from_bits(byte << 23 | ((byte == 0) as u32) << 22)
    }

    /// 1 / scale, to multiply by when quantising. Exact: both are powers of two.
    #[must_use]
    pub const fn inverse(self) -> f32 {
        f32::from_bits(if self.0 >= 254 { 0x0040_0000 } else { (254 - self.0 as u32) << 23 })
    }
}
