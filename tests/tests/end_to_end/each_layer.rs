//! Each layer by itself, with the output of the reference's layer before it as input.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use dsv4_kv::device::{Backend, Device};
use dsv4_kv_oracle::explain::Codec;
use dsv4_kv_oracle::index::KeyFormat;
use dsv4_kv_oracle::row::RowFormat;
use kv_layout::geometry::LayerKind;
use libtest_mimic::Failed;
use ndarray::{ArrayView1, s};

use crate::layers::LayerReference;
use crate::reference::Reference;
use crate::run::{Cut, Recorder, Run, Seen};
use crate::stored;

/// Maximum error of an entry or key, as a part of the tensor's largest value.
const CSA_ENTRY: f64 = 2e-6;
const HCA_ENTRY: f64 = 5e-6;
/// A list may differ only if its margin in the reference is below `MARGIN`. Of the lists with a finite margin at most
/// this part may differ.
const MARGIN: f32 = 5e-4;
const LISTS: f64 = 0.02;
/// The same for the experts of tokens whose lists agree.
const GAP: f32 = 1e-3;
const CHOICES: f64 = 0.003;
/// Maximum and median error of the weights of experts, for tokens whose lists and experts agree.
const WEIGHT: [f32; 2] = [1.5e-3, 2e-5];
/// Maximum and median error of the streams of the same tokens, as a part of the tensor's largest value.
const HIDDEN: [f32; 2] = [4e-3, 1e-5];

/// All requests in one step.
pub fn prefilled_whole<B: Backend>(
    device: &Device<B>,
    reference: &Reference,
) -> Result<(), Failed> {
    Ok(check(device, reference, Cut::Whole)?)
}

/// Prompts in chunks of irregular sizes, which differ between the requests.
pub fn prefilled_in_odd_chunks<B: Backend>(
    device: &Device<B>,
    reference: &Reference,
) -> Result<(), Failed> {
    Ok(check(device, reference, Cut::Odd)?)
}

/// One token per step, for the tokens of `Cut::Single`.
pub fn token_by_token<B: Backend>(device: &Device<B>, reference: &Reference) -> Result<(), Failed> {
    Ok(check(device, reference, Cut::Single)?)
}

/// The differences between a run and the reference, over all layers.
#[derive(Default)]
struct Found {
    lists: Choices,
    experts: Choices,
    weights: Vec<f32>,
    hidden: Vec<f32>,
}

/// Number of choices that differ, and of all choices.
#[derive(Default)]
struct Choices {
    differ: usize,
    of: usize,
}

impl Choices {
    fn check(&self, what: &str, most: f64) -> Result<()> {
        let Self { differ, of } = self;
        ensure!(*differ <= (*of as f64 * most).ceil() as usize, "{differ} of {of} {what} differ");
        Ok(())
    }
}

/// Runs the reference's tokens through a model whose layers get the reference's inputs, and compares the results.
pub fn check<B: Backend>(device: &Device<B>, reference: &Reference, cut: Cut) -> Result<()> {
    let layers = LayerReference::all(reference)?;
    let requests: Vec<_> =
        (0..reference.requests()).map(|index| reference.request(index)).collect();
    let mut run = Run::new(device, reference, requests.len(), requests[0].len())?;
    let mut recorder = Recorder::new(Some((reference, &layers)));
    run.feed(&requests, cut, &mut recorder)?;
    let mut found = Found::default();
    for (index, layer) in layers.iter().enumerate() {
        check_stored(&run, index, layer)?;
        for (request, tokens) in requests.iter().enumerate() {
            for position in 0..tokens.len() {
                let seen = &recorder.seen[&(index, (request, position))];
                let at = reference.positions.iter().position(|&stored| stored == position);
                compare(&mut found, layer, (request, position, at), seen)?;
            }
        }
    }
    found.lists.check("lists", LISTS)?;
    found.experts.check("choices of experts", CHOICES)?;
    within("weights", &mut found.weights, WEIGHT)?;
    within("streams", &mut found.hidden, HIDDEN)
}

/// Asserts that the entries and keys in the cache are possible roundings of the reference's values.
fn check_stored<B: Backend>(run: &Run<B>, index: usize, layer: &LayerReference) -> Result<()> {
    let kind = run.engine.cache().config().model.layers[index];
    let tolerance = if kind == LayerKind::Hca { HCA_ENTRY } else { CSA_ENTRY };
    for (request, &id) in run.ids.iter().enumerate() {
        if let Some(expected) = &layer.entries {
            let got = stored::entries(&run.engine, index, id)?;
            check_rows(Codec::Row(RowFormat::Ue8m0), tolerance, &got, expected, request)?;
        }
        if let Some(expected) = &layer.keys {
            let got = stored::keys(&run.engine, index, id)?;
            check_rows(Codec::Key(KeyFormat::Mxfp4), tolerance, &got, expected, request)?;
        }
    }
    Ok(())
}

fn check_rows(
    codec: Codec,
    tolerance: f64,
    got: &[dsv4_kv_oracle::explain::Stored],
    expected: &ndarray::Array3<f32>,
    request: usize,
) -> Result<()> {
    let largest = expected.fold(0.0f32, |most, x| most.max(x.abs()));
    let expected = expected.slice(s![request, .., ..]);
    ensure!(got.len() == expected.nrows(), "{} entries, not {}", got.len(), expected.nrows());
    for (entry, (got, expected)) in got.iter().zip(expected.outer_iter()).enumerate() {
        let expected: Vec<f64> = expected.iter().map(|&x| f64::from(x)).collect();
        // The bound is a part of the tensor's largest value; `explains_within` takes a part of the entry's largest
        // value.
        let own = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        let tolerance = tolerance * f64::from(largest) / own;
        ensure!(
            codec.explains_within(tolerance, got, &expected),
            "{codec:?} {entry} of request {request} is not what the reference's rounds to"
        );
    }
    Ok(())
}

/// Compares one token in one layer. `at` is its index among the stored positions.
fn compare(
    found: &mut Found,
    layer: &LayerReference,
    (request, position, at): (usize, usize, Option<usize>),
    seen: &Seen,
) -> Result<()> {
    if let Some((selected, margin)) = &layer.selected {
        let margin = margin[[request, position]];
        let expected = selected.slice(s![request, position, ..]);
        let same = set(seen.selected.iter()) == set(expected.iter().filter(|&&entry| entry >= 0));
        found.lists.of += usize::from(margin.is_finite());
        found.lists.differ += usize::from(!same);
        ensure!(
            same || margin < MARGIN,
            "a list differs at {position}, where its margin is {margin}"
        );
        if !same {
            return Ok(());
        }
    }
    let Some(at) = at else { return Ok(()) };
    let expected = layer.experts.slice(s![request, position, ..]);
    let same = set(seen.experts.iter().map(|(expert, _)| expert)) == set(expected.iter());
    let gap = layer.gap.as_ref().map_or(f32::INFINITY, |gap| gap[[request, position]]);
    found.experts.of += usize::from(gap.is_finite());
    found.experts.differ += usize::from(!same);
    ensure!(same || gap < GAP, "experts differ at {position}, where their gap is {gap}");
    if !same {
        return Ok(());
    }
    let weights = layer.weights.slice(s![request, position, ..]);
    found.weights.push(weights_off(&seen.experts, expected, weights));
    let hidden = layer.hidden.slice(s![request, at, .., ..]);
    let largest = layer.hidden.fold(0.0f32, |most, x| most.max(x.abs()));
    let off = seen.streams.iter().zip(&hidden).map(|(got, want)| (got - want).abs());
    found.hidden.push(off.fold(0.0, larger) / largest);
    Ok(())
}

/// The largest error of a weight, expert by expert.
fn weights_off(
    seen: &[(i32, f32)],
    experts: ArrayView1<'_, i32>,
    weights: ArrayView1<'_, f32>,
) -> f32 {
    let expected = |expert: i32| experts.iter().position(|&e| e == expert).map(|at| weights[at]);
    seen.iter()
        .map(|&(e, w)| expected(e).map_or(f32::INFINITY, |x| (x - w).abs()))
        .fold(0.0, larger)
}

/// The larger of two numbers; NaN counts as larger than all numbers.
fn larger(a: f32, b: f32) -> f32 {
    if a.is_nan() || b <= a { a } else { b }
}

fn set<'i>(items: impl Iterator<Item = &'i i32>) -> BTreeSet<i32> {
    items.copied().collect()
}

fn within(what: &str, off: &mut [f32], [most, median]: [f32; 2]) -> Result<()> {
    off.sort_by(f32::total_cmp);
    let (largest, middle) = (off[off.len() - 1], off[off.len() / 2]);
    println!("{what} off by at most {largest:.2e}, median {middle:.2e}");
    ensure!(
        largest <= most && middle <= median,
        "{what} off by {largest:.2e}, median {middle:.2e}; at most {most:.1e} and {median:.1e}"
    );
    Ok(())
}
