//! UE8M0: an unsigned power of two, byte `b` = 2^(b-127).

use bytemuck::{Pod, Zeroable};

/// A power-of-two scale. `0xFF` is NaN and never produced here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(transparent)]
pub struct Ue8m0(pub u8);

impl Ue8m0 {
    /// The least power of two that is not below `scale` (positive, finite): "exponent round-up".
    ///
    /// Source: spec section 4.2. Scales below 2^-126 become 2^-126; above 2^127, 2^127.
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

    /// The scale as a number, to multiply by when dequantising. Exact.
    #[must_use]
    pub const fn to_f32(self) -> f32 {
        match self.0 {
            // 2^-127 is a subnormal, whose bits are not those of an exponent field.
            0 => f32::from_bits(0x0040_0000),
            0xFF => f32::NAN,
            byte => f32::from_bits((byte as u32) << 23),
        }
    }

    /// 1 / scale, to multiply by when quantising. Exact: both are powers of two.
    #[must_use]
    pub const fn inverse(self) -> f32 {
        f32::from_bits(if self.0 >= 254 { 0x0040_0000 } else { (254 - self.0 as u32) << 23 })
    }
}
