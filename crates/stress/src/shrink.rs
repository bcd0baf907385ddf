//! Makes a failing script short: takes out what it fails without.

use std::time::{Duration, Instant};

use super::drive::Divergence;
use super::op::{Op, Part, Script};

/// The shortest script found within `budget` that still fails, and how. `fails` runs a script.
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

/// Takes out every run of `size` operations that is not needed, the last first.
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

/// Takes parts out of steps, and makes those that stay short.
fn simpler_steps(
    script: &mut Script,
    divergence: &mut Divergence,
    end: Instant,
    fails: &impl Fn(&Script) -> Option<Divergence>,
) {
    let mut at = 0;
    while at < script.ops.len() && Instant::now() < end {
        let mut part = 0;
        while let Some(found) = part_of(&script.ops, at, part) {
            let mut without = script.ops.clone();
            if let Op::Prepare(parts) = &mut without[at] {
                parts.remove(part);
            }
            if keep_if_failing(script, divergence, without, fails) {
                continue;
            }
            for tokens in [1, found.tokens / 2, found.tokens.saturating_sub(1)] {
                if tokens == 0 || tokens >= found.tokens {
                    continue;
                }
                let mut shorter = script.ops.clone();
                if let Op::Prepare(parts) = &mut shorter[at] {
                    let genuine = found.genuine.min(tokens);
                    parts[part] = Part { tokens, genuine, ..found.clone() };
                }
                if keep_if_failing(script, divergence, shorter, fails) {
                    break;
                }
            }
            part += 1;
        }
        at += 1;
    }
}

fn part_of(ops: &[Op], at: usize, part: usize) -> Option<Part> {
    match ops.get(at)? {
        Op::Prepare(parts) => parts.get(part).cloned(),
        _ => None,
    }
}

/// Replaces the script's operations if it fails with the new ones, too.
fn keep_if_failing(
    script: &mut Script,
    divergence: &mut Divergence,
    ops: Vec<Op>,
    fails: &impl Fn(&Script) -> Option<Divergence>,
) -> bool {
    let mut tried = Script { config: script.config.clone(), ops };
    let Some(found) = fails(&tried) else { return false };
    tried.ops.truncate(found.op as usize + 1);
    (*script, *divergence) = (tried, found);
    true
}
