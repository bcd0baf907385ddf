//! The operands of a warp's products in shared memory. A product reads its operands from its start until the last lane
//! of the warp has waited for it. Operands are recorded in granules of 16 bytes, so that each granule is checked once
//! per warp, and not once for each word and lane.

use std::collections::VecDeque;

use super::fault::Site;
use super::in_flight::{GRANULE_BYTES, InFlight};
use crate::limits::WARP_SIZE;

/// The operands of the products that a warp has in flight.
#[derive(Debug, Default)]
pub struct Operands {
    /// The number of the oldest product.
    oldest: u32,
    products: VecDeque<OfProduct>,
}

/// The operands of one product.
#[derive(Debug)]
pub struct OfProduct {
    /// The product, as started by the first of its lanes.
    pub product: InFlight,
    /// One bit for each granule of the block's shared memory.
    granules: Vec<u64>,
    /// Number of lanes that have waited.
    waited: u32,
}

impl Operands {
    /// A lane starts product `number`, in a block with `bytes` bytes of shared memory.
    pub fn start(&mut self, number: u32, product: InFlight, bytes: u32) {
        if self.of(number).is_none() {
            let words = bytes.div_ceil(GRANULE_BYTES * u64::BITS) as usize;
            self.products.push_back(OfProduct { product, granules: vec![0; words], waited: 0 });
        }
    }

    /// Records that product `number`, which was started, reads the word at byte `offset`. If no lane has read from the
    /// word's granule before, returns the place where the product was started: then the caller has to check the
    /// granule.
    pub fn read(&mut self, number: u32, offset: u32) -> Option<Site> {
        let of = self.of(number).expect("it was started");
        let granule = offset / GRANULE_BYTES;
        let (word, bit) = ((granule / u64::BITS) as usize, 1 << (granule % u64::BITS));
        let is_new = of.granules[word] & bit == 0;
        of.granules[word] |= bit;
        is_new.then_some(of.product.location)
    }

    /// A lane has waited for product `number`, its oldest in flight. Returns the product if this is the last lane of
    /// the warp.
    pub fn wait(&mut self, number: u32) -> Option<OfProduct> {
        let of = self.of(number).expect("it was started");
        of.waited += 1;
        if of.waited < WARP_SIZE {
            return None;
        }
        // Each lane waits in the order of the numbers, so that this is the oldest.
        self.oldest += 1;
        self.products.pop_front()
    }

    fn of(&mut self, number: u32) -> Option<&mut OfProduct> {
        self.products.get_mut((number - self.oldest) as usize)
    }
}

impl OfProduct {
    /// Byte offsets of the granules.
    pub fn granules(&self) -> impl Iterator<Item = u32> {
        let words = (0..).zip(&self.granules).filter(|(_, bits)| **bits != 0);
        words.flat_map(|(word, &bits)| {
            let set = (0..u64::BITS).filter(move |bit| bits >> bit & 1 != 0);
            set.map(move |bit| (word * u64::BITS + bit) * GRANULE_BYTES)
        })
    }
}
