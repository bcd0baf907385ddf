//! Places in the source, by number.

use std::collections::HashMap;
use std::ptr;

use super::fault::Site;

/// Places that are found without hashing.
const RECENT: usize = 256;

/// The places from which a worker's threads have accessed shared memory.
pub struct Sites {
    all: Vec<Site>,
    /// The number of each, by its address.
    numbers: HashMap<usize, u16>,
    /// Some of those, by the lowest bits of the address.
    recent: [(usize, u16); RECENT],
}

impl Sites {
    /// None.
    pub fn new() -> Self {
        Self { all: Vec::new(), numbers: HashMap::new(), recent: [(0, 0); RECENT] }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// The number of a place, a new one if it has none.
    ///
    /// # Panics
    /// There are 65,536 others.
    pub fn number(&mut self, site: Site) -> u16 {
        let address = ptr::from_ref(site).addr();
        let slot = address / align_of_val(site) % RECENT;
        let (of, number) = self.recent[slot];
        if of == address {
            return number;
        }
        let Self { all, numbers, .. } = self;
        let number = *numbers.entry(address).or_insert_with(|| {
            all.push(site);
            u16::try_from(all.len() - 1).expect("places are forgotten before")
        });
        self.recent[slot] = (address, number);
        number
    }

    /// The place of a number that [`number`](Self::number) gave.
    pub fn at(&self, number: u16) -> Site {
        self.all[usize::from(number)]
    }
}
