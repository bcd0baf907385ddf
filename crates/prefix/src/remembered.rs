//! A bounded table of hashes of blocks, only for statistics.

/// A direct-mapped table: the low bits of a hash give its only place, where a later one replaces an earlier one.
#[derive(Debug)]
pub(crate) struct Remembered<V> {
    /// The places: a power of two, or none.
    places: Vec<Option<(u64, V)>>,
}

impl<V: Copy> Remembered<V> {
    /// At least `places` places.
    pub fn new(places: u32) -> Self {
        let places = if places == 0 { 0 } else { (places as usize).next_power_of_two() };
        Self { places: vec![None; places] }
    }

    fn place(&mut self, hash: u64) -> Option<&mut Option<(u64, V)>> {
        let last = self.places.len().checked_sub(1)?;
        self.places.get_mut(hash as usize & last)
    }

    /// Remembers `value`.
    pub fn insert(&mut self, hash: u64, value: V) {
        if let Some(place) = self.place(hash) {
            *place = Some((hash, value));
        }
    }

    /// The value remembered for a hash.
    pub fn get(&self, hash: u64) -> Option<V> {
        let last = self.places.len().checked_sub(1)?;
        let (found, value) = self.places[hash as usize & last]?;
        (found == hash).then_some(value)
    }

    /// Forgets a hash.
    pub fn remove(&mut self, hash: u64) {
        if let Some(place) = self.place(hash) {
            place.take_if(|(found, _)| *found == hash);
        }
    }
}
