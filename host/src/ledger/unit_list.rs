//! A list of slots or blocks, by number, each at most once.

/// A list of units: slots or blocks. Adding and removing are O(1) and allocate nothing.
#[derive(Debug, Default)]
pub(crate) struct UnitList {
    units: Vec<u32>,
    /// By unit: whether it is in `units`.
    is_listed: Vec<bool>,
}

impl UnitList {
    /// An empty list for units `0..units`; others are never listed.
    pub fn new(units: u32) -> Self {
        let room = units as usize;
        Self { units: Vec::with_capacity(room), is_listed: vec![false; room] }
    }

    /// Adds a unit, unless it is listed.
    pub fn add(&mut self, unit: u32) {
        if let Some(is_listed) = self.is_listed.get_mut(unit as usize).filter(|listed| !**listed) {
            *is_listed = true;
            self.units.push(unit);
        }
    }

    /// The units, in the order in which they were added.
    pub fn units(&self) -> &[u32] {
        &self.units
    }

    /// Removes the unit that was added last.
    pub fn pop(&mut self) -> Option<u32> {
        let unit = self.units.pop()?;
        self.is_listed[unit as usize] = false;
        Some(unit)
    }

    /// Removes all units.
    pub fn clear(&mut self) {
        while self.pop().is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use super::UnitList;

    #[test]
    fn a_unit_is_listed_once_until_it_is_removed() {
        let mut list = UnitList::new(2);
        for _ in 0..2 {
            [1, 0, 1, 2, 0].into_iter().for_each(|unit| list.add(unit));
            assert_eq!(list.units(), [1, 0]);
            list.clear();
            assert!(list.units().is_empty());
        }
        [0, 1].into_iter().for_each(|unit| list.add(unit));
        assert_eq!([list.pop(), list.pop(), list.pop()], [Some(1), Some(0), None]);
        let mut none = UnitList::new(0);
        none.add(0);
        assert!(none.units().is_empty());
    }
}
