//! Runs a step of a cache as a server does: begin, layers or a graph, commit or drop.

use std::sync::Arc;

use dsv4_kv::device::{Backend, Stream, View};
use dsv4_kv::layer_progress::LayerProgress;
use dsv4_kv::step::Group;
use dsv4_kv::step_meta::Section;
use dsv4_kv::{CapturedStep, KvError, Launches, LayerGroup, Step};
use rand::rngs::SmallRng;

use super::answer::Report;
use super::gathered::{Gathered, Watch};
use super::library::{Library, Told};
use super::model::Model;
use super::op::{self, Layers};
use super::subject::{accepted, token_ids};
use dsv4_kv_tests::fed::{Inputs, Part};
use dsv4_kv_tests::inputs::download;

/// Whether the kernels of a cache run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernels {
    /// They run, and bytes are compared.
    Run,
    /// The device skips them; only the work of the host is compared.
    Skipped,
}

/// Everything that running a step needs.
pub(super) struct Runner<'r, B: Backend> {
    pub stream: &'r Stream<B>,
    pub inputs: &'r Inputs<B>,
    pub library: &'r Library,
    pub kernels: Kernels,
    pub looks: bool,
    pub graphs: &'r [(LayerGroup, CapturedStep<B>)],
    pub random: &'r mut SmallRng,
    /// The block table on the device.
    pub table: View<B, i32>,
    /// The model before the step.
    pub model: &'r Model,
}

impl<B: Backend> Runner<'_, B> {
    /// Runs a step, and that of the other group while it is open. Returns the report, and the first fault in the rows
    /// that kernels wrote.
    pub fn step(
        &mut self,
        groups: &mut [Option<Group<'_, B>>; 2],
        step: &op::Step,
    ) -> (Report, Result<(), String>) {
        let group = step.group;
        let Some(mut layers) = groups[group.index()].take() else {
            return (Report::refused(&KvError::NoSuchGroup { group }, None), Ok(()));
        };
        let launches = step.launches.bucket().map_or(Launches::Eager, Launches::Bucket);
        let begun = layers.begin_step(self.stream, launches, &self.model.requests_of(step));
        let mut open = match begun {
            Ok(open) => open,
            Err(error) => return (Report::refused(&error, None), Ok(())),
        };
        let mut report = Report {
            array: Some(self.array(&open)),
            table: self.has_kernels().then(|| download(self.stream, &self.table)),
            ..Report::begun(Ok(open.plan()))
        };
        let mut trouble = Ok(());
        if let Some(other) = step.meanwhile() {
            let (inner, result) = self.step(groups, other);
            report.meanwhile = Some(Box::new(inner));
            trouble = result;
        }
        trouble = trouble.and(self.run(&mut open, step));
        for (turn, commit) in step.commits.iter().enumerate() {
            if turn == 1 {
                trouble = trouble.and(self.finish(&mut open));
            }
            let ids = token_ids(self.model, commit);
            match open.try_commit(&accepted(self.model, commit, &ids)) {
                Ok(()) => {
                    report.commits.push(Ok(()));
                    return (report, trouble);
                }
                Err(refused) => {
                    report.commits.push(Err(format!("{:?}", refused.error())));
                    open = refused.into_step();
                }
            }
        }
        (report, trouble)
    }

    /// Runs the layers of the step that come before its first commit, and compares the gathered rows of one layer.
    fn run(&mut self, open: &mut Step<'_, B>, step: &op::Step) -> Result<(), String> {
        let (_, layers) = self.model.layers_of(step);
        if self.has_kernels() {
            self.load(open, step);
        }
        let watch = match self.has_kernels() && self.looks {
            true => Watch::random(self.random, &layers, open.plan().tokens),
            false => Watch::default(),
        };
        let gathered = self.queue(open, step, &watch).map_err(text)?;
        gathered.map_or(Ok(()), |gathered| gathered.check(self.stream, self.library, self.model))
    }

    /// Queues those layers, one by one or as a graph.
    fn queue(
        &self,
        open: &mut Step<'_, B>,
        step: &op::Step,
        watch: &Watch,
    ) -> Result<Option<Gathered<B>>, KvError> {
        let (model, inputs) = (self.model, self.inputs);
        let mut gathered = None;
        if let Some(graph) = self.graph(step) {
            open.replay(graph)?;
            if let Some(layer) = watch.layer {
                let updated = inputs.resume(open, layer)?;
                // Rows that a long chunk has overwritten cannot be gathered any more.
                let whole = graph.bucket().tokens_per_request <= model.max_decode_tokens();
                gathered = Some(Gathered::new(watch, model, step, &updated, whole)?);
            }
            return Ok(gathered);
        }
        let (left, layers) = model.layers_of(step);
        for layer in layers {
            let updated = inputs.update(open, layer)?;
            if watch.layer == Some(layer) {
                gathered = Some(Gathered::new(watch, model, step, &updated, true)?);
            }
            updated.append()?;
        }
        if let (Layers::Unappended(_), Some(left)) = (step.layers, left) {
            inputs.update(open, left)?;
        }
        Ok(gathered)
    }

    /// Runs the remaining layers.
    fn finish(&self, open: &mut Step<'_, B>) -> Result<(), String> {
        for (layer, _) in open.layer_kinds() {
            let updated = match open.progress(layer).map_err(text)? {
                LayerProgress::NotStarted => self.inputs.update(open, layer),
                _ => self.inputs.resume(open, layer),
            };
            updated.and_then(|updated| updated.append()).map_err(text)?;
        }
        Ok(())
    }

    fn has_kernels(&self) -> bool {
        self.kernels == Kernels::Run
    }

    /// The graph that replays the step, if there is one.
    fn graph(&self, step: &op::Step) -> Option<&CapturedStep<B>> {
        let op::Launches::Replay(bucket) = step.launches else { return None };
        let serves = |(group, graph): &&(LayerGroup, CapturedStep<B>)| {
            *group == step.group && graph.bucket() == bucket
        };
        let found = self.graphs.iter().find(serves).filter(|_| step.layers == Layers::All);
        found.map(|(_, graph)| graph)
    }

    /// Copies the step's inputs to the device.
    fn load(&self, open: &Step<'_, B>, step: &op::Step) {
        let request = |part: &op::Part| self.model.named(part.request).expect("it is in a step");
        let told: Vec<_> =
            step.parts.iter().map(|part| self.library.of(&request(part).says)).collect();
        let part = |(part, told): (&op::Part, _)| {
            let told: &Arc<Told> = told;
            let start = request(part).group(step.group).tokens as usize;
            let right = start + part.genuine.min(part.tokens) as usize;
            let own = (&told.story, start..right);
            let drafts = (self.library.drafts(), right..start + part.tokens as usize);
            Part { id: self.model.handle(part.request), pieces: vec![own, drafts] }
        };
        let parts: Vec<_> = step.parts.iter().zip(&told).map(part).collect();
        self.inputs.load(self.stream, &parts, open.tokens());
    }

    /// StepMeta on the device: its sections, one after the other.
    fn array(&self, open: &Step<'_, B>) -> Vec<i32> {
        let section = |section| download(self.stream, &open.section(section));
        Section::ALL.into_iter().flat_map(section).collect()
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for `map_err`")]
fn text(error: KvError) -> String {
    error.to_string()
}
