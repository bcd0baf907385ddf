//! XXH3 with 128 bits, without a seed, for inputs of more than 240 bytes: the constants for the kernel that computes
//! digests, and the last step, which the host takes. Source: the
//! [specification](https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md#xxh3-algorithm-overview), "XXH3 for
//! long inputs".
//!
//! Input is read in stripes of 64 bytes, each of eight words, which are added to eight accumulators. Sixteen stripes
//! are a block, after which the accumulators are scrambled.

/// Inputs of at most this many bytes are hashed in other ways.
pub const SHORT: u64 = 240;
/// Number of accumulators, and of words of a stripe.
pub const LANES: u32 = 8;
/// Stripes of a block.
pub const STRIPES: u32 = 16;
/// The factor by which accumulators are multiplied after each block.
pub const SCRAMBLE: u64 = 0x9E37_79B1;

const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;
const PRIME64_2: u64 = 0xC2B2_AE3D_27D4_EB4F;

/// The accumulators before any input.
pub const START: [u64; LANES as usize] = [
    0xC2B2_AE3D,
    PRIME64_1,
    PRIME64_2,
    0x1656_67B1_9E37_79F9,
    0x85EB_CA77_C2B2_AE63,
    0x85EB_CA77,
    0x27D4_EB2F_1656_67C5,
    0x9E37_79B1,
];

/// The default secret, as little-endian words. Stripe `s` of a block uses the eight words from `s` on, the scramble
/// those from [`STRIPES`] on.
#[rustfmt::skip]
pub const SECRET: [u64; 24] = [
    0xBE4B_A423_396C_FEB8, 0x1CAD_21F7_2C81_017C, 0xDB97_9083_E96D_D4DE, 0x1F67_B3B7_A4A4_4072,
    0x78E5_C0CC_4EE6_79CB, 0x2172_FFCC_7DD0_5A82, 0x8E24_43F7_7446_08B8, 0x4C26_3A81_E690_35E0,
    0xCB00_C391_BB52_283C, 0xA32E_531B_8B65_D088, 0x4EF9_0DA2_9748_6471, 0xD8AC_DEA9_46EF_1938,
    0x3F34_9CE3_3F76_FAA8, 0x1D4F_0BC7_C7BB_DCF9, 0x3159_B4CD_4BE0_518A, 0x6473_78D9_C97E_9FC8,
    0xC3EB_D334_83AC_C5EA, 0xEB63_13FA_FFA0_81C5, 0x49DA_F0B7_51DD_0D17, 0x9E68_D429_2655_16D3,
    0xFCA1_477D_58BE_162B, 0xCE31_D07A_D1B8_F88F, 0x2804_1695_8F3A_CB45, 0x7E40_4BBB_CAFB_D7AF,
];

/// Byte of the secret at which the secret of the last stripe starts.
pub const LAST_STRIPE: u32 = 121;

/// Eight bytes of the secret, from byte `byte` on.
fn secret(byte: usize) -> u64 {
    let (word, shift) = (byte / 8, 8 * (byte % 8));
    match shift {
        0 => SECRET[word],
        _ => SECRET[word] >> shift | SECRET[word + 1] << (64 - shift),
    }
}

/// The digest of an input of `bytes` bytes, more than [`SHORT`], from its accumulators after the last stripe.
#[must_use]
pub fn finish(accumulators: [u64; LANES as usize], bytes: u64) -> u128 {
    let merge = |start: u64, first: usize| {
        let pairs = accumulators.as_chunks::<2>().0.iter().zip((first..).step_by(16));
        let product = |(&[low, high], at): (&[u64; 2], usize)| {
            let product = u128::from(low ^ secret(at)) * u128::from(high ^ secret(at + 8));
            product as u64 ^ (product >> 64) as u64
        };
        avalanche(pairs.map(product).fold(start, u64::wrapping_add))
    };
    let low = merge(bytes.wrapping_mul(PRIME64_1), 11);
    let high = merge(!bytes.wrapping_mul(PRIME64_2), 117);
    u128::from(high) << 64 | u128::from(low)
}

fn avalanche(hash: u64) -> u64 {
    let hash = (hash ^ hash >> 37).wrapping_mul(0x1656_6791_9E37_79F9);
    hash ^ hash >> 32
}
