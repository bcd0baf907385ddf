//! What the tree remembers of blocks that it does not have: bounded, and only for statistics.

/// A table of fingerprints, each in the one place that its bits name: a later one takes the place of an earlier one.
#[derive(Debug)]
pub(crate) struct Remembered<V> {
    /// A power of two of places, or none.
    places: Vec<Option<(u64, V)>>,
}

impl<V: Copy> Remembered<V> {
    /// At least `places` places.
    pub fn new(places: u32) -> Self {
        let places = if places == 0 { 0 } else { (places as usize).next_power_of_two() };
        Self { places: vec![None; places] }
    }

    fn place(&mut self, fingerprint: u64) -> Option<&mut Option<(u64, V)>> {
        let last = self.places.len().checked_sub(1)?;
        self.places.get_mut(fingerprint as usize & last)
    }

    /// Remembers `value`.
    pub fn insert(&mut self, fingerprint: u64, value: V) {
        if let Some(place) = self.place(fingerprint) {
            *place = Some((fingerprint, value));
        }
    }

    /// What was remembered.
    pub fn get(&self, fingerprint: u64) -> Option<V> {
        let last = self.places.len().checked_sub(1)?;
        let (found, value) = self.places[fingerprint as usize & last]?;
        (found == fingerprint).then_some(value)
    }

    /// Forgets it.
    pub fn remove(&mut self, fingerprint: u64) {
        if let Some(place) = self.place(fingerprint) {
            place.take_if(|(found, _)| *found == fingerprint);
        }
    }
}
