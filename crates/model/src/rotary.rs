//! The rotary embedding of the last 64 channels of a vector, in pairs of adjacent channels.

use kv_layout::geometry::ROPE_DIM;

/// Pairs of channels that are rotated.
const PAIRS: usize = ROPE_DIM as usize / 2;

/// The frequencies of a layer: pair `j` is rotated by the angle `position * frequencies[j]`.
#[derive(Clone, Copy, Debug)]
pub struct Rotary {
    frequencies: [f32; PAIRS],
}

/// The direction of a rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// By the angle of its position.
    Forward,
    /// By the negative angle. Keys are values too, so the weighted sum of attention carries the rotations of the keys.
    /// Rotating it back at the query's position leaves only the distance to each key.
    Back,
}

impl Rotary {
    /// The embedding with these frequencies.
    #[must_use]
    pub fn new(frequencies: [f32; PAIRS]) -> Self {
        Self { frequencies }
    }

    /// Rotates the last 64 of `channels`.
    ///
    /// The angle is an f32 product, as in the released code: a more exact angle would give another model.
    pub fn turn(&self, channels: &mut [f32], position: u32, turn: Turn) {
        let (_, last) = channels.split_at_mut(channels.len() - ROPE_DIM as usize);
        for (pair, frequency) in last.as_chunks_mut::<2>().0.iter_mut().zip(self.frequencies) {
            let (mut sin, cos) = (position as f32 * frequency).sin_cos();
            if turn == Turn::Back {
                sin = -sin;
            }
            let [even, odd] = *pair;
            *pair = [even * cos - odd * sin, odd * cos + even * sin];
        }
    }
}
