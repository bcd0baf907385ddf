//! The control flow of an entry: which accesses of global memory may execute before the wait for earlier launches.

use std::collections::BTreeMap;

/// The statements of an entry that decide this, in the order of the text.
#[derive(Debug, Default)]
pub struct Paths(Vec<Step>);

#[derive(Debug)]
enum Step {
    Label(String),
    Branch { to: String, is_predicated: bool },
    End,
    Wait,
    Access,
}

impl Paths {
    /// A label.
    pub fn label(&mut self, label: &str) {
        self.0.push(Step::Label(label.to_owned()));
    }

    /// A branch.
    pub fn branch(&mut self, to: &str, is_predicated: bool) {
        self.0.push(Step::Branch { to: to.trim_end_matches(';').to_owned(), is_predicated });
    }

    /// The end of the path.
    pub fn end(&mut self) {
        self.0.push(Step::End);
    }

    /// The wait for the earlier launches.
    pub fn wait(&mut self) {
        self.0.push(Step::Wait);
    }

    /// An access of global memory.
    pub fn access(&mut self) {
        self.0.push(Step::Access);
    }

    /// Number of accesses that a path reaches without a wait before them.
    pub fn early_accesses(&self) -> u32 {
        // Whether every path to a label has waited. Branches lead forward and back, so the text is read until nothing changes.
        let mut labels = BTreeMap::new();
        loop {
            let (early, is_final) = self.read(&mut labels);
            if is_final {
                return early;
            }
        }
    }

    /// Reads the text once: the number of early accesses as far as is known, and whether it added nothing to `labels`.
    fn read<'p>(&'p self, labels: &mut BTreeMap<&'p str, bool>) -> (u32, bool) {
        let (mut early, mut is_final) = (0, true);
        let mut reach = |label: &'p str, waited: Option<bool>| {
            let known = labels.get(label).copied();
            let both = match (known, waited) {
                (Some(one), Some(other)) => Some(one && other),
                (one, other) => one.or(other),
            };
            if let Some(waited) = both.filter(|_| both != known) {
                labels.insert(label, waited);
                is_final = false;
            }
            both
        };
        // Whether the path to here has waited; `None` where no path leads, as far as is known.
        let mut waited = Some(false);
        for step in &self.0 {
            match step {
                Step::Label(label) => waited = reach(label, waited),
                Step::Branch { to, is_predicated } => {
                    if waited.is_some() {
                        reach(to, waited);
                    }
                    waited = waited.filter(|_| *is_predicated);
                }
                Step::End => waited = None,
                Step::Wait => waited = waited.map(|_| true),
                Step::Access => early += u32::from(waited == Some(false)),
            }
        }
        (early, is_final)
    }
}
