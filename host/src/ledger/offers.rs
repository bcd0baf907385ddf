//! Checkpoints that are offered to a lower tier.

use std::collections::{HashSet, VecDeque};

use dsv4_kv_prefix::Place;

/// The latest checkpoints that the lower tier has not taken yet. An offer does not protect its checkpoint from
/// eviction: it may be gone when its turn comes.
#[derive(Debug, Default)]
pub(super) struct Offers {
    /// In the order in which they are taken.
    places: VecDeque<Place>,
    /// The same places, for lookup in constant time.
    known: HashSet<Place>,
    /// Most places that are kept; 0 without a lower tier.
    most: usize,
}

impl Offers {
    /// Keeps at most `most` offers from now on, and allocates memory for them.
    pub fn keep(&mut self, most: usize) {
        self.most = most;
        self.places.reserve(most + 1);
        // Twice as many, so that the set rehashes in place, without growing, after many removals.
        self.known.reserve(2 * (most + 1));
    }

    /// Offers a checkpoint, after the others. One that is already offered keeps its place.
    pub fn add(&mut self, place: Place) {
        if self.most == 0 || !self.known.insert(place) {
            return;
        }
        self.places.push_back(place);
        while self.places.len() > self.most {
            self.next();
        }
    }

    /// Offers a checkpoint again, before the others.
    pub fn add_first(&mut self, place: Place) {
        if self.known.insert(place) {
            self.places.push_front(place);
        }
    }

    /// Removes and returns the first offer.
    pub fn next(&mut self) -> Option<Place> {
        let place = self.places.pop_front()?;
        self.known.remove(&place);
        Some(place)
    }
}

#[cfg(test)]
mod tests {
    use dsv4_kv_prefix::{Limits, Origin, PrefixTree, RootKey, ScoredLru};

    use super::*;

    /// Places of `count` checkpoints.
    fn places(count: u32) -> Vec<Place> {
        let (lease_bytes, remembered) = (0, 0);
        let limits =
            Limits { block_bytes: 1, checkpoint_bytes: 1, lease_bytes, remembered, room: count };
        let mut tree = PrefixTree::<u32, u32, _, 128>::new(limits, ScoredLru { capacity: 1 });
        let root = RootKey::new(b"", b"", b"model");
        let mut place = |number| {
            let mut at = tree.adopt(&root, &[]).reference;
            tree.extend(&mut at, &[[number; 128]], |_| number, |_| ()).unwrap();
            let place = tree.attach(&at, 1, Origin::Prompt, number).unwrap();
            tree.release(at, |_| ()).unwrap();
            place
        };
        (0..count).map(&mut place).collect()
    }

    #[test]
    fn each_is_offered_once_and_the_latest_are_kept() {
        let places = places(5);
        let mut offers = Offers::default();
        offers.add(places[0]);
        assert_eq!(offers.next(), None, "without a lower tier");
        offers.keep(3);
        for place in [0, 1, 0, 2, 1] {
            offers.add(places[place]);
        }
        assert_eq!(offers.next(), Some(places[0]));
        offers.add_first(places[0]);
        offers.add_first(places[2]);
        offers.add(places[3]);
        let left: Vec<_> = std::iter::from_fn(|| offers.next()).collect();
        assert_eq!(left, [1, 2, 3].map(|place| places[place]));
        offers.add(places[1]);
        assert_eq!(offers.next(), Some(places[1]), "it may be offered again");
    }

    /// A million offers use only the memory that was allocated at first. With a linear search for duplicates
    /// this would take minutes.
    #[test]
    fn many_offers_take_no_more_memory() {
        let places = places(32 << 10);
        let mut offers = Offers::default();
        offers.keep(16 << 10);
        let room = offers.known.capacity();
        for _ in 0..40 {
            places.iter().for_each(|&place| offers.add(place));
        }
        // Removed elements count as used until the set rehashes, so its capacity may be lower.
        assert_eq!(offers.known.len(), 16 << 10);
        assert!(offers.known.capacity() <= room, "{} of {room}", offers.known.capacity());
    }
}
