//! A run of a model over known tokens, and a record of its results.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::Result;
use dsv4_kv::RequestId;
use dsv4_kv::device::{Backend, Device};
use dsv4_kv::kv_layout::attention::KeyCluster;
use dsv4_kv_model::experts::Choice;
use dsv4_kv_model::generate::Observer;
use dsv4_kv_model::hyper::Streams;
use dsv4_kv_model::probe::Probe;
use dsv4_kv_model::sequence::Generated;
use dsv4_kv_model::{Chunk, Engine, EngineLimits, Logits};
use ndarray::{Array1, Array2, Axis, s};

use crate::layers::LayerReference;
use crate::reference::Reference;

/// A token: its request and its position.
pub type Place = (usize, usize);

/// How the tokens of each request are cut into steps.
#[derive(Clone, Copy, Debug)]
pub enum Cut {
    /// All tokens in one step.
    Whole,
    /// Steps of irregular sizes, which differ between the requests.
    Odd,
    /// One step for each of the first tokens, of the tokens around the last multiple of 128, where an HCA window
    /// closes, and of the last tokens. The tokens between these take one step.
    Single,
}

/// Number of tokens at each such place that [`Cut::Single`] runs one by one.
const SINGLE: usize = 6;

impl Cut {
    /// Number of tokens in a request's next chunk, in step `step`, if `done` of `all` tokens have run.
    fn chunk(self, request: usize, step: usize, done: usize, all: usize) -> usize {
        const ODD: [usize; 7] = [37, 1, 129, 5, 3, 61, 2];
        let left = all - done;
        match self {
            Self::Whole => left,
            Self::Odd => ODD[(step + 3 * request) % ODD.len()].min(left),
            Self::Single => {
                let window = all / 128 * 128;
                let ranges = [
                    0..SINGLE,
                    window.saturating_sub(SINGLE)..window + 2,
                    all.saturating_sub(SINGLE)..all,
                ];
                if ranges.iter().any(|range| range.contains(&done)) {
                    return 1.min(left);
                }
                let next =
                    ranges.iter().map(|range| range.start).filter(|&start| start > done).min();
                next.map_or(left, |next| next - done)
            }
        }
    }
}

/// The record of one token in one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    /// The entries that the indexer selected, best first; empty in layers without an indexer.
    pub selected: Vec<i32>,
    /// The experts and their weights.
    pub experts: Vec<(i32, f32)>,
    /// The streams after the layer, one after another.
    pub streams: Vec<f32>,
}

/// Records every layer. With a reference, it also replaces the inputs of each layer by those of the reference.
pub struct Recorder<'r> {
    feed: Option<(&'r Reference, &'r [LayerReference])>,
    /// The tokens of the step.
    places: Vec<Place>,
    /// Number of queries of the step whose lists have been recorded in the current layer.
    listed: usize,
    /// Records by layer and token.
    pub seen: HashMap<(usize, Place), Seen>,
}

impl<'r> Recorder<'r> {
    /// An empty recorder.
    pub fn new(feed: Option<(&'r Reference, &'r [LayerReference])>) -> Self {
        Self { feed, places: Vec::new(), listed: 0, seen: HashMap::new() }
    }

    fn seen(&mut self, layer: usize, row: usize) -> &mut Seen {
        self.seen.entry((layer, self.places[row])).or_default()
    }
}

impl Probe for Recorder<'_> {
    fn layer_input(&mut self, layer: usize, streams: &mut Streams) {
        self.listed = 0;
        let Some((reference, layers)) = self.feed.filter(|_| layer > 0) else { return };
        for (&(request, position), mut row) in self.places.iter().zip(streams.outer_iter_mut()) {
            if let Some(at) = reference.positions.iter().position(|&stored| stored == position) {
                row.assign(&layers[layer - 1].hidden.slice(s![request, at, .., ..]));
            }
        }
    }

    fn attention_input(&mut self, layer: usize, x: &mut Array2<f32>) {
        let Some(fed) = self.feed.and_then(|(_, layers)| layers[layer].x.as_ref()) else { return };
        for (&(request, position), mut row) in self.places.iter().zip(x.outer_iter_mut()) {
            row.assign(&fed.slice(s![request, position, ..]));
        }
    }

    fn selected(&mut self, layer: usize, lists: &Array2<i32>) {
        for list in lists.outer_iter() {
            let row = self.listed;
            self.seen(layer, row).selected = list.iter().copied().filter(|&e| e >= 0).collect();
            self.listed += 1;
        }
    }

    fn routed(&mut self, layer: usize, choice: &Choice) {
        let rows = choice.experts.outer_iter().zip(choice.weights.outer_iter());
        for (row, (experts, weights)) in rows.enumerate() {
            let experts = experts.iter().copied().zip(weights.iter().copied()).collect();
            self.seen(layer, row).experts = experts;
        }
    }

    fn layer_output(&mut self, layer: usize, streams: &Streams) {
        for (row, streams) in streams.outer_iter().enumerate() {
            self.seen(layer, row).streams = streams.iter().copied().collect();
        }
    }
}

/// A probe that does nothing.
pub struct Silent;

impl Observer for Silent {
    fn token(&mut self, _token: &Generated) -> bool {
        true
    }
}

/// An engine, and requests that run over known tokens.
pub struct Run<B: Backend> {
    /// The engine.
    pub engine: Engine<B>,
    /// The requests.
    pub ids: Vec<RequestId>,
    /// Logits of each token.
    pub logits: HashMap<Place, Array1<f32>>,
}

/// Maximum drafts in the cache of a run.
pub const MAX_DRAFT: u32 = 3;

impl<B: Backend> Run<B> {
    /// A run for requests of up to `tokens` tokens, which have none yet.
    pub fn new(
        device: &Device<B>,
        reference: &Reference,
        requests: usize,
        tokens: usize,
    ) -> Result<Self> {
        let (requests, tokens) = (requests as u32, tokens as u32 + MAX_DRAFT);
        let limits = EngineLimits {
            requests,
            context: tokens,
            max_total_tokens: requests * tokens.next_multiple_of(128),
            max_step_tokens: requests * tokens,
            max_draft: MAX_DRAFT,
            checkpoints: 0,
            host_bytes: 0,
            event_capacity: 0,
            attention_cluster: KeyCluster::TwoBlocks,
        };
        let mut engine =
            Engine::with_attention(device, Arc::clone(&reference.model), limits, reference.place)?;
        let ids = (0..requests).map(|_| engine.admit()).collect::<Result<_, _>>()?;
        Ok(Self { engine, ids, logits: HashMap::new() })
    }

    /// Runs all tokens of all requests in steps as `cut` says, and keeps the logits of every token.
    pub fn feed(
        &mut self,
        requests: &[Vec<u32>],
        cut: Cut,
        recorder: &mut Recorder<'_>,
    ) -> Result<()> {
        let mut done = vec![0; requests.len()];
        for step in 0.. {
            let mut chunks = Vec::new();
            for (index, tokens) in requests.iter().enumerate() {
                let count = cut.chunk(index, step, done[index], tokens.len());
                if count > 0 {
                    chunks.push((index, done[index]..done[index] + count));
                    done[index] += count;
                }
            }
            if chunks.is_empty() {
                return Ok(());
            }
            let step: Vec<(usize, &[u32])> = chunks
                .iter()
                .map(|(index, range)| (*index, &requests[*index][range.clone()]))
                .collect();
            let starts: Vec<usize> = chunks.iter().map(|(_, range)| range.start).collect();
            let accepted: Vec<u32> = step.iter().map(|(_, tokens)| tokens.len() as u32).collect();
            self.step(&step, &starts, &accepted, recorder)?;
        }
        Ok(())
    }

    /// Runs one step with tokens of some requests, from `starts` on, of which the first `accepted` are committed.
    pub fn step(
        &mut self,
        requests: &[(usize, &[u32])],
        starts: &[usize],
        accepted: &[u32],
        recorder: &mut Recorder<'_>,
    ) -> Result<()> {
        let places = requests.iter().zip(starts);
        let places: Vec<Vec<Place>> = places
            .map(|(&(index, tokens), &start)| {
                (start..start + tokens.len()).map(|p| (index, p)).collect()
            })
            .collect();
        recorder.places = places.concat();
        let chunks: Vec<Chunk<'_>> = requests
            .iter()
            .map(|&(index, tokens)| Chunk { id: self.ids[index], tokens, logits: Logits::All })
            .collect();
        let forward = self.engine.forward_with(&chunks, recorder)?;
        for (chunk, (places, &accepted)) in places.iter().zip(accepted).enumerate() {
            let rows = forward.logits(chunk);
            for (place, row) in places.iter().zip(rows.axis_iter(Axis(0))).take(accepted as usize) {
                self.logits.insert(*place, row.to_owned());
            }
        }
        Ok(forward.commit_some(accepted)?)
    }
}
