//! The same bits in every batch and every cut into chunks, with drafts, and by graphs; and logits for the reference's
//! tokens.

use anyhow::Result;
use dsv4_kv::device::{Backend, Device};
use dsv4_kv_model::sample::{GREEDY, Sampling};
use dsv4_kv_model::sequence::Continuation;
use libtest_mimic::Failed;
use ndarray::s;

use crate::bits::Bits;
use crate::reference::{Reference, three};
use crate::run::{Cut, MAX_DRAFT, Recorder, Run, Silent};
use crate::whole_model;

/// Maximum of the median over positions of the largest error of a logit. In models with five layers that choose by
/// score, another valid order of sums gives up to 0.02 over all positions, and more over the last ones. The smallest
/// error that a missing part caused was 0.06.
const MEDIAN: f32 = 0.04;
/// The part of positions at which the most likely token may differ.
const OTHER_TOKENS: f64 = 0.02;

/// For the reference's tokens, logits equal those of the reference, except where lists or experts are nearly tied.
pub fn reference_tokens<B: Backend>(
    device: &Device<B>,
    reference: &Reference,
) -> Result<(), Failed> {
    let requests = requests(reference, 0);
    let mut run = Run::new(device, reference, requests.len(), requests[0].len())?;
    run.feed(&requests, Cut::Odd, &mut Recorder::new(None))?;
    let off = whole_model::largest_differences(&run, reference)?;
    let median = off[off.len() / 2];
    let logits = reference.floats("logits")?;
    let logits = three(&logits)?;
    let best =
        |row: &[f32]| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b]).then(b.cmp(&a)));
    let (mut other, mut of) = (0, 0);
    for request in 0..requests.len() {
        for (at, &position) in reference.positions.iter().enumerate() {
            let expected = logits.slice(s![request, at, ..]).to_vec();
            of += 1;
            other +=
                usize::from(best(&run.logits[&(request, position)].to_vec()) != best(&expected));
        }
    }
    println!("{}: median {median}, {other} of {of} tokens differ", reference.name);
    let most = (f64::from(of) * OTHER_TOKENS).ceil() as usize;
    if median > MEDIAN || other > most {
        return Err(format!("median {median}, {other} of {of} tokens differ").into());
    }
    Ok(())
}

/// Requests of a batch, and tokens at the end that are decoded: fewer where an emulator computes them.
fn batch<B: Backend>(device: &Device<B>) -> (usize, usize) {
    if device.info().sm.is_some() { (3, 24) } else { (2, 12) }
}

/// The reference's requests, and rotations of the first one until there are at least `least`.
fn requests(reference: &Reference, least: usize) -> Vec<Vec<u32>> {
    let mut requests: Vec<_> =
        (0..reference.requests()).map(|index| reference.request(index)).collect();
    while requests.len() < least {
        let mut other = requests[0].clone();
        let by = 17 * requests.len() % other.len();
        other.rotate_left(by);
        requests.push(other);
    }
    requests
}

/// Compares each request of a run with the same request that runs alone, in one step.
fn check_all<B: Backend>(
    device: &Device<B>,
    reference: &Reference,
    requests: &[Vec<u32>],
    run: &Run<B>,
    seen: &Recorder<'_>,
) -> Result<()> {
    for (index, request) in requests.iter().enumerate() {
        let key = (device.info().name.clone(), reference.name.clone(), request.clone());
        let alone = Bits::once(key, || {
            let mut run = Run::new(device, reference, 1, request.len())?;
            let mut seen = Recorder::new(None);
            run.feed(std::slice::from_ref(request), Cut::Whole, &mut seen)?;
            Bits::of(&run, &seen, 0, request.len())
        })?;
        alone.check_equal(&Bits::of(run, seen, index, request.len())?, index)?;
    }
    Ok(())
}

/// All requests together, in chunks of several sizes and token by token.
pub fn batches<B: Backend>(device: &Device<B>, reference: &Reference) -> Result<(), Failed> {
    let requests = requests(reference, batch(device).0);
    let tokens = requests[0].len();
    for cut in [Cut::Odd, Cut::Single] {
        let mut together = Run::new(device, reference, requests.len(), tokens)?;
        let mut seen = Recorder::new(None);
        together.feed(&requests, cut, &mut seen)?;
        check_all(device, reference, &requests, &together, &seen)?;
    }
    Ok(())
}

/// Batches with drafts, of which none, some or all are right.
pub fn drafts<B: Backend>(device: &Device<B>, reference: &Reference) -> Result<(), Failed> {
    let requests = requests(reference, 2);
    let tokens = requests[0].len();
    let mut run = Run::new(device, reference, requests.len(), tokens)?;
    let mut seen = Recorder::new(None);
    let prompt = tokens - 40.min(tokens / 2);
    let first: Vec<(usize, &[u32])> =
        requests.iter().enumerate().map(|(index, r)| (index, &r[..prompt])).collect();
    run.step(&first, &vec![0; requests.len()], &vec![prompt as u32; requests.len()], &mut seen)?;
    let mut done = vec![prompt; requests.len()];
    let vocabulary = reference.model.config.vocab_size;
    for step in 0.. {
        let mut parts = Vec::new();
        for (index, request) in requests.iter().enumerate() {
            let right = (step + index) % (MAX_DRAFT as usize + 1);
            let accepted = (right + 1).min(request.len() - done[index]);
            if accepted == 0 {
                continue;
            }
            // The next tokens, followed by wrong ones.
            let wrong = |place: usize| (request[place % tokens] + 1) % vocabulary;
            let drafted: Vec<u32> = (0..=MAX_DRAFT as usize)
                .map(|place| (done[index] + place, place))
                .map(|(at, place)| if place < accepted { request[at] } else { wrong(at) })
                .collect();
            parts.push((index, drafted, done[index], accepted as u32));
            done[index] += accepted;
        }
        if parts.is_empty() {
            break;
        }
        let step: Vec<(usize, &[u32])> =
            parts.iter().map(|(i, t, ..)| (*i, t.as_slice())).collect();
        let starts: Vec<usize> = parts.iter().map(|part| part.2).collect();
        let accepted: Vec<u32> = parts.iter().map(|part| part.3).collect();
        // The record of a rejected token is overwritten when the right token runs.
        run.step(&step, &starts, &accepted, &mut seen)?;
    }
    Ok(check_all(device, reference, &requests, &run, &seen)?)
}

/// Drafts by prompt lookup change no token, greedy or sampled.
pub fn prompt_lookup<B: Backend>(device: &Device<B>, reference: &Reference) -> Result<(), Failed> {
    let request = reference.request(0);
    let prompt = &request[..reference.prompt];
    let mut proposed = 0;
    for sampling in [GREEDY, Sampling { temperature: 0.8, top_p: 0.95, seed: 5 }] {
        let mut tokens = Vec::new();
        for drafts in [0, MAX_DRAFT as usize] {
            let mut run = Run::new(device, reference, 1, request.len())?;
            run.engine.release(run.ids[0])?;
            let continuation = Continuation {
                sampling,
                max_tokens: request.len() - prompt.len(),
                end: Vec::new(),
                drafts,
                top_logprobs: 0,
                prompt_logits: false,
            };
            let summary = run.engine.generate(prompt, continuation, 64, &mut Silent)?;
            proposed += summary.drafts;
            tokens.push(summary.tokens);
        }
        if tokens.iter().any(|other| *other != tokens[0]) {
            return Err(format!("drafts change the tokens: {tokens:?}").into());
        }
    }
    // The stored sets repeat tokens; those of `DSV4_E2E_DIR` have to as well.
    if proposed == 0 {
        Err("no draft was proposed: the text repeats nothing".into())
    } else {
        Ok(())
    }
}

/// Decoding by one graph per layer, with and without drafts.
pub fn graphs<B: Backend>(device: &Device<B>, reference: &Reference) -> Result<(), Failed> {
    let (count, decoded) = batch(device);
    let requests = requests(reference, count);
    let tokens = requests[0].len();
    for per_request in [1, MAX_DRAFT as usize + 1] {
        let mut run = Run::new(device, reference, requests.len(), tokens)?;
        run.engine.capture(requests.len() as u32, per_request as u32)?;
        let mut seen = Recorder::new(None);
        let prompt = tokens - decoded.min(tokens / 2);
        let first: Vec<(usize, &[u32])> =
            requests.iter().enumerate().map(|(index, r)| (index, &r[..prompt])).collect();
        run.step(
            &first,
            &vec![0; requests.len()],
            &vec![prompt as u32; requests.len()],
            &mut seen,
        )?;
        let (mut done, mut steps) = (prompt, 0);
        while done < tokens {
            let count = per_request.min(tokens - done);
            let step: Vec<(usize, &[u32])> =
                requests.iter().enumerate().map(|(i, r)| (i, &r[done..done + count])).collect();
            let starts = vec![done; requests.len()];
            run.step(&step, &starts, &vec![count as u32; requests.len()], &mut seen)?;
            done += count;
            steps += 1;
        }
        let replayed = run.engine.replayed_steps();
        if replayed != steps {
            return Err(format!("{replayed} of {steps} steps were replayed").into());
        }
        check_all(device, reference, &requests, &run, &seen)?;
    }
    Ok(())
}
