//! Values by slot, in the order in which they were set.

use std::collections::VecDeque;

use crate::ids::SlotId;

/// At most one value a slot, the oldest first. Setting and taking values takes constant time on average, and allocates
/// nothing.
#[derive(Debug)]
pub(super) struct SlotQueue<T> {
    /// By slot: the number of the value, and the value.
    by_slot: Vec<Option<(u64, T)>>,
    /// Slots and numbers of values, the oldest first; those that the slot no longer has are stale.
    order: VecDeque<(SlotId, u64)>,
    len: usize,
    /// Number of values that were ever set.
    numbered: u64,
}

impl<T> SlotQueue<T> {
    /// An empty queue for slots below `slots`.
    pub fn new(slots: u32) -> Self {
        Self {
            by_slot: (0..slots).map(|_| None).collect(),
            order: VecDeque::with_capacity(2 * slots as usize),
            len: 0,
            numbered: 0,
        }
    }

    /// Number of values.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// The value of a slot.
    pub fn get(&self, slot: SlotId) -> Option<&T> {
        self.by_slot.get(slot.0 as usize)?.as_ref().map(|(_, value)| value)
    }

    /// The values, the oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        let value = |&(slot, number): &(SlotId, u64)| {
            is_current(&self.by_slot, slot, number).then(|| self.get(slot))
        };
        self.order.iter().filter_map(value).flatten()
    }

    /// Sets the value of a slot, which becomes the newest; returns the previous one. A slot past the last has no value:
    /// then it returns `value`.
    pub fn set(&mut self, slot: SlotId, value: T) -> Option<T> {
        let before = self.take(slot);
        let Some(place) = self.by_slot.get_mut(slot.0 as usize) else { return Some(value) };
        *place = Some((self.numbered, value));
        if self.order.len() == self.order.capacity() {
            let Self { order, by_slot, .. } = self;
            order.retain(|&(slot, number)| is_current(by_slot, slot, number));
        }
        self.order.push_back((slot, self.numbered));
        self.numbered += 1;
        self.len += 1;
        before
    }

    /// Removes the value of a slot.
    pub fn take(&mut self, slot: SlotId) -> Option<T> {
        let (_, value) = self.by_slot.get_mut(slot.0 as usize)?.take()?;
        self.len -= 1;
        Some(value)
    }

    /// Removes the oldest value.
    pub fn take_oldest(&mut self) -> Option<T> {
        while let Some((slot, number)) = self.order.pop_front() {
            if is_current(&self.by_slot, slot, number) {
                return self.take(slot);
            }
        }
        None
    }
}

/// Whether the slot still has the value of this number.
fn is_current<T>(by_slot: &[Option<(u64, T)>], slot: SlotId, number: u64) -> bool {
    by_slot[slot.0 as usize].as_ref().is_some_and(|&(current, _)| current == number)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compared with a list in which every operation searches.
    #[test]
    fn a_queue_equals_a_list() {
        use rand::rngs::StdRng;
        use rand::{Rng, SeedableRng};
        let mut random = StdRng::seed_from_u64(1);
        let (mut queue, mut list) = (SlotQueue::new(5), Vec::<(SlotId, u32)>::new());
        let capacity = queue.order.capacity();
        for value in 0..10_000_u32 {
            let slot = SlotId(random.random_range(0..5));
            let at = list.iter().position(|&(of, _)| of == slot);
            match random.random_range(0..4) {
                0 | 1 => {
                    assert_eq!(queue.set(slot, value), at.map(|at| list.remove(at).1));
                    list.push((slot, value));
                }
                2 => assert_eq!(queue.take(slot), at.map(|at| list.remove(at).1)),
                _ => {
                    let oldest = (!list.is_empty()).then(|| list.remove(0).1);
                    assert_eq!(queue.take_oldest(), oldest);
                }
            }
            assert_eq!(queue.len(), list.len());
            assert!(queue.iter().eq(list.iter().map(|(_, value)| value)));
            let of = |slot| list.iter().find(|&&(of, _)| of == slot).map(|(_, value)| value);
            (0..5).map(SlotId).for_each(|slot| assert_eq!(queue.get(slot), of(slot)));
        }
        assert_eq!(queue.order.capacity(), capacity, "nothing is allocated");
        assert_eq!(queue.set(SlotId(5), 7), Some(7), "no such slot");
    }
}
