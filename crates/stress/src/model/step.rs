//! The model of a step, from its begin to its end.

use dsv4_kv::step_meta::StepLayout;
use dsv4_kv::{KvError, LayerGroup, RequestId, StepPlan, StepRequest};

use super::{Model, OpenPart, same};
use crate::answer::{Report, answer};
use crate::op::{Accept, Step};

impl Model {
    /// Judges the report of a step. `has_layers` is whether the subject runs layers.
    ///
    /// # Errors
    /// The fault of the report.
    pub fn stepped(
        &mut self,
        step: &Step,
        report: &Report,
        has_layers: bool,
    ) -> Result<(), String> {
        let (group, requests) = (step.group, self.requests_of(step));
        let refusal = self.begin_refusal(step, &requests, has_layers);
        let want = match refusal {
            None => {
                let ring_copies = self.ring_copies_of(step, &requests, report, has_layers)?;
                Ok(StepPlan { ring_copies, ..self.plan_of(group, &requests) })
            }
            Some(refusal) => Err(refusal),
        };
        let want = answer(want);
        same(&report.begun, &want)?;
        let Ok(plan) = want else { return self.check_untouched(group, report) };
        let bucket = step.launches.bucket().filter(|_| has_layers);
        let tokens = bucket.map_or(plan.tokens, |bucket| bucket.tokens);
        let layout = StepLayout::new(tokens, plan.new_blocks);
        let layout = plan.ring_copies.map_or(layout, |copies| layout.saving(copies));
        self.begun(step, &requests, layout, report)?;
        if let Some(other) = step.meanwhile() {
            let report =
                report.meanwhile.as_deref().ok_or("the other group's step was left out")?;
            self.stepped(other, report, has_layers)?;
        }
        self.ended(step, plan, report, has_layers)
    }

    /// The number of checkpoints for which the step copies rings according to its plan, if that is possible.
    fn ring_copies_of(
        &self,
        step: &Step,
        requests: &[StepRequest],
        report: &Report,
        has_layers: bool,
    ) -> Result<Option<u32>, String> {
        let Ok(StepPlan { ring_copies: got, .. }) = report.begun else { return Ok(None) };
        let may_save = step.group == LayerGroup::Trunk && self.config.num_checkpoints > 0;
        let bucket = step.launches.bucket().filter(|_| has_layers);
        let tokens = requests.iter().map(|part| part.tokens).max().unwrap_or(0);
        let tokens = bucket.map_or(tokens, |bucket| bucket.tokens_per_request);
        let most = may_save.then(|| self.most_copies(requests, tokens));
        if got.is_some() == may_save && got <= most {
            return Ok(got);
        }
        Err(format!("the step copies {got:?} checkpoints, should be at most {most:?}"))
    }

    /// Checks a step that has begun: its blocks were free, its StepMeta is right, and its requests cannot be released.
    fn begun(
        &mut self,
        step: &Step,
        requests: &[StepRequest],
        layout: StepLayout,
        report: &Report,
    ) -> Result<(), String> {
        let taken = |part: &StepRequest| {
            let held = self.live.get(&part.id).map_or(0, |request| request.blocks.len());
            let needed = self.blocks_of(step.group, part.start + part.tokens) as usize;
            needed.saturating_sub(held)
        };
        let parts = step.parts.iter().zip(requests).map(|(part, request)| OpenPart {
            id: request.id,
            tokens: part.tokens,
            genuine: part.genuine.min(part.tokens),
            taken: taken(request),
        });
        let parts = parts.collect();
        let array = report.array.as_deref().ok_or("StepMeta cannot be read")?;
        self.check_step_meta(requests, layout, array)?;
        self.take_blocks(step.group, requests, layout, array)?;
        self.arrays[step.group.index()].clear();
        self.arrays[step.group.index()].extend_from_slice(array);
        self.check_table(report.table.as_deref())?;
        let free = report.free.filter(|_| !self.shares());
        if let Some(free) = free.filter(|&free| free != self.free_blocks()) {
            let should = self.free_blocks();
            return Err(format!("{free} blocks are free while a step is open, should be {should}"));
        }
        self.open[step.group.index()] = Some(parts);
        for (part, released) in requests.iter().zip(&report.releases) {
            let group = self.step_with(part.id);
            let want = KvError::RequestInStep { request: part.id, group };
            same(released, &answer(Err(want)))?;
        }
        Ok(())
    }

    /// The first group with an open step that includes the request.
    fn step_with(&self, id: RequestId) -> LayerGroup {
        let takes_part = |group: &LayerGroup| {
            let open = self.open[group.index()].as_ref();
            open.is_some_and(|open| open.iter().any(|part| part.id == id))
        };
        LayerGroup::ALL.into_iter().find(takes_part).unwrap_or(LayerGroup::Draft)
    }

    /// Checks the answer to every commit. The first valid commit is accepted; without one the step is dropped.
    fn ended(
        &mut self,
        step: &Step,
        plan: StepPlan,
        report: &Report,
        has_layers: bool,
    ) -> Result<(), String> {
        let mut answers = report.commits.iter();
        for tried in step.commits.iter().enumerate() {
            let (turn, commit) = tried;
            let refusal = self.commit_refusal(step, (turn, commit), has_layers);
            let got = answers.next().ok_or("a commit was left out")?;
            if same(got, &answer(refusal.map_or(Ok(()), Err)))? {
                self.commit(step.group, commit);
                if step.group == LayerGroup::Trunk && self.shares() {
                    // A subject with kernels saves after the step what the step's kernels could not save.
                    self.tell(
                        commit,
                        has_layers || plan.tokens_per_request > self.max_decode_tokens(),
                    );
                }
                return if answers.next().is_none() { Ok(()) } else { Err("a commit more".into()) };
            }
        }
        let touched = self.touches(step);
        self.reject(step.group, touched);
        Ok(())
    }

    fn commit(&mut self, group: LayerGroup, commit: &[Accept]) {
        for part in self.open[group.index()].take().into_iter().flatten() {
            let named = commit.iter().find(|accept| self.handle(accept.request) == part.id);
            let accepted = named.map_or(0, |accept| accept.accepted);
            let Some(request) = self.live.get_mut(&part.id) else { continue };
            let progress = &mut request.groups[group.index()];
            if progress.is_known() {
                progress.genuine = progress.tokens + accepted.min(part.genuine);
            }
            progress.written_to = progress.written_to.max(progress.tokens + part.tokens);
            progress.tokens += accepted;
        }
    }

    fn reject(&mut self, group: LayerGroup, touched: bool) {
        for part in self.open[group.index()].take().into_iter().flatten() {
            let Some(request) = self.live.get_mut(&part.id) else { continue };
            request.blocks.truncate(request.blocks.len() - part.taken);
            let progress = &mut request.groups[group.index()];
            if touched {
                progress.written_to = progress.written_to.max(progress.tokens + part.tokens);
            }
        }
    }
}
