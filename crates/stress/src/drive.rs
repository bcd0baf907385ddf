//! Does what a script says to a subject and to the model, and compares them after every operation.

use std::collections::BTreeMap;

use serde::Serialize;

use super::model::Model;
use super::op::Op;
use super::subject::Subject;

/// Where a subject and the model part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Divergence {
    /// The operation, counted from 0.
    pub op: u64,
    /// What differs.
    pub what: String,
}

/// What happened, by name: answers of each kind, tokens, rejected tokens.
pub type Counts = BTreeMap<String, u64>;

/// A subject and its model, side by side.
pub struct Run<S> {
    subject: S,
    model: Model,
    /// What happened so far.
    pub counts: Counts,
    ops: u64,
}

impl<S: Subject> Run<S> {
    /// An empty cache and its model.
    pub fn new(subject: S, model: Model) -> Self {
        Self { subject, model, counts: Counts::new(), ops: 0 }
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// What is put to the test.
    pub fn subject(&self) -> &S {
        &self.subject
    }

    /// Operations so far.
    pub fn ops(&self) -> u64 {
        self.ops
    }

    /// Does one operation and compares everything.
    ///
    /// # Errors
    /// [`Divergence`].
    pub fn apply(&mut self, op: &Op) -> Result<(), Divergence> {
        let turn = self.ops;
        self.ops += 1;
        let result = self
            .judge(op)
            .and_then(|()| self.conserve())
            .and_then(|()| self.subject.check_bytes(&self.model, turn));
        result.map_err(|what| Divergence { op: turn, what })
    }

    /// Releases every request: an idle cache is an empty one.
    ///
    /// # Errors
    /// [`Divergence`].
    pub fn drain(&mut self) -> Result<(), Divergence> {
        let names: Vec<_> = self.model.live().map(|(_, request)| request.name).collect();
        names.into_iter().try_for_each(|name| self.apply(&Op::Release(name)))?;
        let (idle, total) = (self.subject.counts(), self.model.config().num_blocks);
        if idle == (total, 0) {
            return Ok(());
        }
        let what = format!("an idle cache counts {idle:?} free blocks and requests of {total}");
        Err(Divergence { op: self.ops, what })
    }

    fn judge(&mut self, op: &Op) -> Result<(), String> {
        match op {
            Op::Admit(name) => {
                let got = self.subject.admit();
                self.count("admit", &got);
                self.model.admitted(*name, got)
            }
            Op::Release(name) => {
                let got = self.subject.release(self.model.handle(*name));
                self.count("release", &got);
                self.model.released(*name, got)
            }
            Op::Commit { request, accepted } => {
                let written = self.model.named(*request).map_or(0, |request| request.written);
                let got = self.subject.commit(self.model.handle(*request), *accepted);
                self.count("commit", &got);
                if got.is_ok() {
                    self.add("tokens accepted", (*accepted).into());
                    self.add("tokens rejected", (written - accepted).into());
                }
                self.model.committed(*request, *accepted, got)
            }
            Op::Prepare(parts) => {
                let step = self.model.requests_of(parts);
                let got = self.subject.prepare(&self.model, parts, &step);
                self.count("prepare", &got);
                let array = self.subject.array();
                let Self { subject, model, .. } = self;
                model.prepared(parts, got, &array, |id| subject.blocks(id))
            }
        }
    }

    /// No block is lost, none has two owners, and every request is as long as its history.
    fn conserve(&self) -> Result<(), String> {
        let (free, live) = self.subject.counts();
        if live as usize != self.model.live().len() {
            return Err(format!("{live} requests are live, should be {}", self.model.live().len()));
        }
        let total = self.model.config().num_blocks;
        let mut owned = vec![false; total as usize];
        let mut held = 0;
        for (id, request) in self.model.live() {
            let blocks = self.subject.blocks(id).ok_or_else(|| format!("{id} has no table"))?;
            if blocks != request.blocks {
                return Err(format!("{id} holds {blocks:?}, should hold {:?}", request.blocks));
            }
            if self.subject.tokens(id) != Some(request.tokens) {
                return Err(format!("{id} does not have {} tokens", request.tokens));
            }
            for block in blocks {
                if std::mem::replace(&mut owned[block.0 as usize], true) {
                    return Err(format!("{block:?} has two owners"));
                }
                held += 1;
            }
        }
        if free + held == total {
            Ok(())
        } else {
            Err(format!("{free} blocks are free and {held} held of {total}"))
        }
    }

    fn count<T: std::fmt::Debug, E: std::fmt::Debug>(&mut self, op: &str, got: &Result<T, E>) {
        let kind = match got {
            Ok(_) => op.to_owned(),
            Err(error) => {
                let error = format!("{error:?}");
                let name = error.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
                format!("{op} refused: {name}")
            }
        };
        self.add(&kind, 1);
    }

    fn add(&mut self, what: &str, count: u64) {
        match self.counts.get_mut(what) {
            Some(total) => *total += count,
            None => {
                self.counts.insert(what.to_owned(), count);
            }
        }
    }
}
