//! End to end, for models that choose nothing by score, so that every difference comes from arithmetic.

use anyhow::{Result, ensure};
use dsv4_kv::device::{Backend, Device};
use dsv4_kv_model::AttentionPlace;
use dsv4_kv_model::sample::GREEDY;
use dsv4_kv_model::sequence::Continuation;
use libtest_mimic::Failed;

use crate::reference::{Reference, three};
use crate::run::{Cut, Recorder, Run, Silent};

/// Maximum error of a logit, and the median over positions of the largest error.
const HOST: [f32; 2] = [0.02, 0.004];
/// The same if queries and results of attention are BF16, as on the device. For a model whose errors are otherwise
/// 0.0017 and 5e-6, 0.0255 and 0.0066 were measured on the host with both rounded, and 0.0226 and 0.0069 in place on
/// the CPU.
const DEVICE: [f32; 2] = [0.05, 0.015];

/// Greedy decoding gives the reference's tokens.
pub fn decodes_the_same_tokens<B: Backend>(
    device: &Device<B>,
    reference: &Reference,
) -> Result<(), Failed> {
    for index in 0..reference.requests() {
        let tokens = reference.request(index);
        let (prompt, expected) = tokens.split_at(reference.prompt);
        let mut run = Run::new(device, reference, 1, tokens.len())?;
        run.engine.release(run.ids[0])?;
        let continuation = Continuation {
            sampling: GREEDY,
            max_tokens: expected.len(),
            end: Vec::new(),
            drafts: 0,
            top_logprobs: 0,
            prompt_logits: false,
        };
        let summary = run.engine.generate(prompt, continuation, 100, &mut Silent)?;
        if summary.tokens != expected {
            return Err(format!("{:?} instead of {expected:?}", summary.tokens).into());
        }
    }
    Ok(())
}

/// Logits are within the bounds.
pub fn logits<B: Backend>(device: &Device<B>, reference: &Reference) -> Result<(), Failed> {
    check(device, reference)?;
    Ok(())
}

/// As [`logits`], for the tests of mutations.
pub fn check<B: Backend>(device: &Device<B>, reference: &Reference) -> Result<()> {
    let requests: Vec<_> =
        (0..reference.requests()).map(|index| reference.request(index)).collect();
    let mut run = Run::new(device, reference, requests.len(), requests[0].len())?;
    run.feed(&requests, Cut::Odd, &mut Recorder::new(None))?;
    let off = largest_differences(&run, reference)?;
    let most = off.last().copied().unwrap_or_default();
    let median = off[off.len() / 2];
    println!("{}: logits off by at most {most}, median {median}", reference.name);
    let bounds = match reference.place {
        AttentionPlace::Host => HOST,
        AttentionPlace::Device => DEVICE,
    };
    ensure!(most <= bounds[0] && median <= bounds[1], "logits off by {most}, median {median}");
    Ok(())
}

/// The largest error of a logit at each stored position, in ascending order.
pub fn largest_differences<B: Backend>(run: &Run<B>, reference: &Reference) -> Result<Vec<f32>> {
    let expected = reference.floats("logits")?;
    let expected = three(&expected)?;
    let mut off = Vec::new();
    for request in 0..reference.requests() {
        for (at, &position) in reference.positions.iter().enumerate() {
            let got = &run.logits[&(request, position)];
            let expected = expected.slice(ndarray::s![request, at, ..]);
            let largest = got.iter().zip(expected).map(|(got, want)| (got - want).abs());
            // NaN counts as larger than all numbers.
            off.push(
                largest.fold(0.0, |most: f32, x| if most.is_nan() || x <= most { most } else { x }),
            );
        }
    }
    off.sort_by(f32::total_cmp);
    Ok(off)
}
