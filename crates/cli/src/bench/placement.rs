//! Where the blocks or slots of a layer lie: one after the other, or as far apart as all layers' together.

use dsv4_kv::device::{Backend, Buffer};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::timing::nodes_for;

/// Where the units (blocks, or slots) of the layers lie in a plane of their pool.
#[derive(Clone, Copy, Debug)]
pub struct Placement {
    /// Units of a layer.
    pub units: u64,
    /// Layers that share the plane: at least the nodes of a graph.
    pub layers: u64,
    /// Units from one of a layer to its next: 1 where a layer's units lie together. Else the units of all
    /// layers that have the same number do, the first layer's first.
    pub apart: u64,
}

impl Placement {
    /// Each of `layers` layers has `units` units, together.
    pub fn packed(units: u64, layers: u64) -> Self {
        Self { units, layers, apart: 1 }
    }

    /// Units of the plane.
    pub fn len(self) -> u64 {
        self.units * self.layers.max(self.apart)
    }

    /// Units from a layer's first to its last, both included.
    pub fn span(self) -> u64 {
        (self.units - 1) * self.apart + 1
    }

    /// What of `plane`, all layers', is the `layer`-th layer's: [`Self::span`] units.
    pub fn part<B: Backend>(self, plane: &Buffer<B, u8>, layer: u64) -> Buffer<B, u8> {
        let unit = plane.len() / self.len();
        let first = if self.apart == 1 { layer * self.units } else { layer };
        plane.slice(first * unit, self.span() * unit).expect("a part for every layer")
    }

    /// `count` units of a layer in random order, as a launch numbers them. None occurs twice before all
    /// have occurred.
    pub fn random(self, count: u64) -> Vec<i32> {
        let mut random = SmallRng::seed_from_u64(2);
        let mut left: Vec<u64> = Vec::new();
        let mut unit = || {
            if left.is_empty() {
                left.extend(0..self.units);
            }
            let chosen = random.random_range(0..left.len());
            (left.swap_remove(chosen) * self.apart) as i32
        };
        (0..count).map(|_| unit()).collect()
    }
}

/// Nodes of a graph whose launches move `bytes` each, at most one for each layer of `placement`.
pub fn nodes(bytes: u64, placement: Option<Placement>) -> u64 {
    placement.map_or(nodes_for(bytes), |placement| nodes_for(bytes).min(placement.layers))
}
