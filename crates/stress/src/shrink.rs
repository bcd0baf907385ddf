//! Makes a failing script short: removes everything that is not needed for the failure.

use std::time::{Duration, Instant};

use super::drive::Divergence;
use super::op::{Launches, Layers, Op, Part, Script, Step};

/// The shortest failing script found within `budget`, and its failure. `fails` runs a script.
pub fn shrink(
    mut script: Script,
    mut divergence: Divergence,
    budget: Duration,
    fails: impl Fn(&Script) -> Option<Divergence>,
) -> (Script, Divergence) {
    let end = Instant::now() + budget;
    script.ops.truncate(divergence.op as usize + 1);
    loop {
        let before = script.clone();
        let mut size = script.ops.len().div_ceil(2);
        while size > 0 && Instant::now() < end {
            without_runs(&mut script, &mut divergence, size, end, &fails);
            size /= 2;
        }
        simpler_steps(&mut script, &mut divergence, end, &fails);
        if script == before || Instant::now() >= end {
            return (script, divergence);
        }
    }
}

/// Removes every run of `size` operations that is not needed, from the end to the start.
fn without_runs(
    script: &mut Script,
    divergence: &mut Divergence,
    size: usize,
    end: Instant,
    fails: &impl Fn(&Script) -> Option<Divergence>,
) {
    let mut at = script.ops.len();
    while at > 0 && Instant::now() < end {
        let start = at.saturating_sub(size);
        let mut ops = script.ops.clone();
        ops.drain(start..at.min(ops.len()));
        keep_if_failing(script, divergence, ops, fails);
        at = start.min(script.ops.len());
    }
}

/// Makes steps simpler where the script still fails.
fn simpler_steps(
    script: &mut Script,
    divergence: &mut Divergence,
    end: Instant,
    fails: &impl Fn(&Script) -> Option<Divergence>,
) {
    let mut at = 0;
    while at < script.ops.len() && Instant::now() < end {
        let mut turn = 0;
        // Tries the simplifications of this step in order, and starts again after each that helps.
        while let Some(Op::Step(step)) = script.ops.get(at) {
            let Some(simpler) = simpler(step).into_iter().nth(turn) else { break };
            let mut ops = script.ops.clone();
            ops[at] = Op::Step(simpler);
            let kept = keep_if_failing(script, divergence, ops, fails);
            turn = if kept { 0 } else { turn + 1 };
        }
        at += 1;
    }
}

/// All ways to make a step a little simpler.
fn simpler(step: &Step) -> Vec<Step> {
    let mut all = Vec::new();
    if let Some(other) = &step.meanwhile {
        all.push(Step { meanwhile: None, ..step.clone() });
        let with = |other| Step { meanwhile: Some(Box::new(other)), ..step.clone() };
        all.extend(simpler(other).into_iter().map(with));
    }
    for commit in 0..step.commits.len() {
        let mut fewer = step.clone();
        fewer.commits.remove(commit);
        all.push(fewer);
    }
    for part in 0..step.parts.len() {
        all.push(without_part(step, part));
        let tokens = step.parts[part].tokens;
        for shorter in [1, tokens / 2, tokens.saturating_sub(1)] {
            if (1..tokens).contains(&shorter) {
                all.push(shorter_part(step, part, shorter));
            }
        }
    }
    if step.layers != Layers::All {
        all.push(Step { layers: Layers::All, ..step.clone() });
    }
    if step.launches != Launches::Eager {
        all.push(Step { launches: Launches::Eager, ..step.clone() });
    }
    all
}

/// The step without one of its parts.
fn without_part(step: &Step, part: usize) -> Step {
    let mut fewer = step.clone();
    let Part { request, .. } = fewer.parts.remove(part);
    for commit in &mut fewer.commits {
        commit.retain(|accept| accept.request != request);
    }
    fewer
}

/// The step with fewer tokens of one of its parts.
fn shorter_part(step: &Step, part: usize, tokens: u32) -> Step {
    let mut shorter = step.clone();
    let Part { request, tokens: before, genuine, .. } = step.parts[part].clone();
    let (part, less) = (&mut shorter.parts[part], before - tokens);
    (part.tokens, part.genuine) = (tokens, genuine.min(tokens));
    let accepts = shorter.commits.iter_mut().flatten();
    for accept in accepts.filter(|accept| accept.request == request) {
        accept.accepted = accept.accepted.saturating_sub(less);
    }
    shorter
}

/// Replaces the operations of the script, if it still fails with the new ones.
fn keep_if_failing(
    script: &mut Script,
    divergence: &mut Divergence,
    ops: Vec<Op>,
    fails: &impl Fn(&Script) -> Option<Divergence>,
) -> bool {
    let mut tried = Script { config: script.config.clone(), seed: script.seed, ops };
    let Some(found) = fails(&tried) else { return false };
    tried.ops.truncate(found.op as usize + 1);
    (*script, *divergence) = (tried, found);
    true
}
