//! Checks StepMeta, the blocks in it, and the block table on the device.

use dsv4_kv::step_meta::{NONE, Section, StepLayout};
use dsv4_kv::{BlockId, LayerGroup, StepRequest};

use super::Model;
use crate::answer::Report;

impl Model {
    /// A refused step must leave StepMeta unchanged.
    pub(super) fn check_untouched(&self, group: LayerGroup, report: &Report) -> Result<(), String> {
        let Some(array) = &report.array else { return Ok(()) };
        differs(array, &self.arrays[group.index()], "StepMeta after a refusal")
    }

    /// StepMeta must have the values of each token that follow from the histories, and padding elsewhere.
    pub(super) fn check_step_meta(
        &self,
        step: &[StepRequest],
        layout: StepLayout,
        array: &[i32],
    ) -> Result<(), String> {
        if array.len() < layout.elements() {
            return Err(format!(
                "StepMeta has {} words, should have {}",
                array.len(),
                layout.elements()
            ));
        }
        let mut tokens = Vec::new();
        for &StepRequest { id, start, tokens: count } in step {
            let slot = id.slot().0;
            for index in 0..count {
                let (position, after) = (start + index, count - 1 - index);
                // If there are more tokens than ring rows, the last ones stay.
                let row = slot * self.ring + position % self.ring;
                let row = if after < self.ring { row as i32 } else { NONE };
                tokens.push([position as i32, slot as i32, index as i32, after as i32, row]);
            }
        }
        let sections = [
            Section::Position,
            Section::Slot,
            Section::Index,
            Section::Remaining,
            Section::RingRow,
        ];
        tokens.resize(layout.capacity(Section::Slot) as usize, [0, NONE, 0, 0, NONE]);
        for (at, section) in sections.into_iter().enumerate() {
            let want: Vec<_> = tokens.iter().map(|token| token[at]).collect();
            differs(&array[layout.range(section)], &want, &format!("StepMeta, {section:?}"))?;
        }
        Ok(())
    }

    /// StepMeta must name as many blocks as the step needs, in the order of its requests. Each must have been free;
    /// from now on the requests own them.
    pub(super) fn take_blocks(
        &mut self,
        group: LayerGroup,
        step: &[StepRequest],
        layout: StepLayout,
        array: &[i32],
    ) -> Result<(), String> {
        let width = self.config.max_context.div_ceil(128);
        let updates = |section| array[layout.range(section)].iter().copied();
        let mut updates = updates(Section::TableIndex).zip(updates(Section::TableBlock));
        for part in step {
            let held = self.live.get(&part.id).map_or(0, |request| request.blocks.len() as u32);
            for logical in held..self.blocks_of(group, part.start + part.tokens) {
                let (id, index) = (part.id, part.id.slot().0 * width + logical);
                let (at, block) = updates.next().ok_or("StepMeta has too few blocks")?;
                if at != index as i32 {
                    return Err(format!("{id}: a block for element {at}, should be {index}"));
                }
                let taken = BlockId(block as u32);
                self.take_new(id, taken)?;
                self.table[index as usize] = block;
                if let Some(request) = self.live.get_mut(&id) {
                    request.blocks.push(taken);
                }
            }
        }
        if updates.any(|update| update != (NONE, NONE)) {
            return Err("StepMeta has too many blocks".into());
        }
        Ok(())
    }

    /// The table on the device must have every block that was ever entered.
    pub(super) fn check_table(&self, table: Option<&[i32]>) -> Result<(), String> {
        table.map_or(Ok(()), |table| differs(table, &self.table, "the device's block table"))
    }
}

/// Checks that both are the same.
fn differs(got: &[i32], want: &[i32], what: &str) -> Result<(), String> {
    let at = (0..got.len().max(want.len())).find(|&at| got.get(at) != want.get(at));
    at.map_or(Ok(()), |at| {
        let (got, want) = (got.get(at), want.get(at));
        Err(format!("{what}: element {at} is {got:?}, should be {want:?}"))
    })
}
