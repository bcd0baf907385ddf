//! The control flow of an entry: what may execute before the wait for earlier launches.

use std::collections::BTreeMap;

/// The statements of an entry that decide this, in the order of the text.
#[derive(Debug, Default)]
pub struct Paths(Vec<Step>);

#[derive(Debug)]
enum Step {
    Label(String),
    Branch {
        to: String,
        is_predicated: bool,
    },
    Wait,
    /// An instruction that has to come after the wait. `ends`: the path does not go on behind it.
    Late {
        opcode: String,
        ends: bool,
    },
    Trap,
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

    /// The wait for the earlier launches.
    pub fn wait(&mut self) {
        self.0.push(Step::Wait);
    }

    /// An access of global memory.
    pub fn access(&mut self, opcode: &str) {
        self.0.push(Step::Late { opcode: opcode.to_owned(), ends: false });
    }

    /// The end of the block's work, or a branch to one of several labels. The labels of such a branch are not read: if
    /// the path has waited before it, they do not matter.
    pub fn leave(&mut self, opcode: &str, is_predicated: bool) {
        self.0.push(Step::Late { opcode: opcode.to_owned(), ends: !is_predicated });
    }

    /// The failure of the launch, which needs no wait.
    pub fn trap(&mut self) {
        self.0.push(Step::Trap);
    }

    /// The instructions that have to come after the wait, and that a path reaches without it, in the order of the text.
    pub fn early(&self) -> Vec<&str> {
        // Whether every path to a label has waited. Branches lead forward and back, so the text is read until nothing changes.
        let mut labels = BTreeMap::new();
        loop {
            let (early, is_final) = self.read(&mut labels);
            if is_final {
                return early;
            }
        }
    }

    /// Reads the text once: the early instructions as far as is known, and whether it added nothing to `labels`.
    fn read<'p>(&'p self, labels: &mut BTreeMap<&'p str, bool>) -> (Vec<&'p str>, bool) {
        let (mut early, mut is_final) = (Vec::new(), true);
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
                Step::Wait => waited = waited.map(|_| true),
                Step::Late { opcode, ends } => {
                    if waited == Some(false) {
                        early.push(opcode.as_str());
                    }
                    waited = waited.filter(|_| !ends);
                }
                Step::Trap => waited = None,
            }
        }
        if waited == Some(false) {
            early.push("the end of the text");
        }
        (early, is_final)
    }
}
