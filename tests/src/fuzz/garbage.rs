//! The numbers and the garbage of a case of the target `kernels`.

use bytemuck::Pod;
use dsv4_kv::device::bf16;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

/// Bytes that decide a case; after their end, random numbers of which they are the seed.
pub(super) struct Choices<'a> {
    bytes: &'a [u8],
    /// The random numbers after the end.
    pub random: SmallRng,
}

impl<'a> Choices<'a> {
    /// The choices that these bytes make.
    pub fn new(bytes: &'a [u8]) -> Self {
        let seed = bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, &byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        Self { bytes, random: SmallRng::seed_from_u64(seed) }
    }

    /// Any byte.
    pub fn byte(&mut self) -> u8 {
        match self.bytes.split_first() {
            Some((&first, rest)) => {
                self.bytes = rest;
                first
            }
            None => self.random.random(),
        }
    }

    /// A number from `least` to `most`.
    pub fn range(&mut self, least: u32, most: u32) -> u32 {
        let count = most - least + 1;
        // A byte alone would reach only the least 256 numbers.
        let high = if count > 256 { self.byte() } else { 0 };
        least + u32::from(u16::from_be_bytes([high, self.byte()])) % count
    }

    /// One of `values`.
    pub fn one_of<T: Copy>(&mut self, values: &[T]) -> T {
        values[usize::from(self.byte()) % values.len()]
    }
}

/// Elements that an array of garbage may have.
pub(super) trait Garbage: Pod {
    /// Any value.
    fn garbage(random: &mut SmallRng) -> Self;

    /// A value that is valid in most places.
    fn valid(random: &mut SmallRng) -> Self {
        Self::garbage(random)
    }
}

impl Garbage for u8 {
    fn garbage(random: &mut SmallRng) -> Self {
        random.random()
    }
}

impl Garbage for bf16 {
    fn garbage(random: &mut SmallRng) -> Self {
        Self::from_bits(random.random())
    }
}

/// Places and lengths: mostly below the extents of the arrays that they are of, and arbitrary ones.
impl Garbage for u32 {
    fn garbage(random: &mut SmallRng) -> Self {
        match random.random_range(0..8) {
            0..4 => random.random_range(0..4),
            4..6 => random.random_range(0..5000),
            6 => Self::MAX,
            _ => random.random(),
        }
    }

    fn valid(random: &mut SmallRng) -> Self {
        random.random_range(0..4)
    }
}

/// Indices, positions and lengths: near valid ones, at ends of windows, and arbitrary ones.
impl Garbage for i32 {
    fn garbage(random: &mut SmallRng) -> Self {
        const EDGES: [i32; 16] = [
            -1,
            -2,
            3,
            7,
            11,
            31,
            32,
            127,
            128,
            255,
            383,
            1 << 20,
            i32::MAX,
            i32::MIN,
            2_147_483_619,
            -128,
        ];
        match random.random_range(0..16) {
            0..8 => random.random_range(0..4),
            8..10 => random.random_range(0..300),
            10..15 => *EDGES.choose(random).expect("some"),
            _ => random.random(),
        }
    }

    fn valid(random: &mut SmallRng) -> Self {
        random.random_range(0..4)
    }
}

impl Garbage for f32 {
    fn garbage(random: &mut SmallRng) -> Self {
        match random.random_range(0..8) {
            0 => Self::from_bits(random.random()),
            1 => Self::NAN,
            2 => Self::INFINITY,
            _ => random.random_range(-4.0..4.0),
        }
    }
}
