//! Runs a step through all layers, to logits.

use dsv4_kv::{Accepted, KvError, Launches, RequestId, Step, StepRequest};
use dsv4_kv_device::Backend;
use ndarray::{Array2, ArrayView2, s};

use super::Engine;
use super::attention::{LayerRun, attend};
use crate::error::ModelError;
use crate::probe::Probe;

/// Tokens of one request in a step.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'t> {
    /// The request.
    pub id: RequestId,
    /// Its next tokens: a chunk of the prompt, or the last generated token and drafts after it.
    pub tokens: &'t [u32],
    /// The tokens for which logits are computed.
    pub logits: Logits,
}

/// The tokens of a chunk for which logits are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None, when another chunk of the prompt follows.
    None,
    /// The last token.
    Last,
    /// Every token.
    All,
}

impl Logits {
    /// Number of these tokens in a chunk of `tokens` tokens.
    fn count(self, tokens: usize) -> usize {
        match self {
            Self::None => 0,
            Self::Last => tokens.min(1),
            Self::All => tokens,
        }
    }
}

/// A step that has run, with its logits. [`Self::commit`] makes its tokens final. Dropping it rejects the step: the
/// requests then have the same tokens as before.
pub struct Forward<'e, B: Backend> {
    step: Step<'e, B>,
    /// The request and the number of tokens of each chunk.
    chunks: Vec<(RequestId, u32)>,
    /// Tokens of all chunks.
    tokens: Vec<u32>,
    logits: Array2<f32>,
    /// The first row of each chunk in `logits`, and the end of the last one.
    offsets: Vec<usize>,
}

impl<B: Backend> Engine<B> {
    /// Runs the model over the next tokens of some requests, all in one step. The bits of a token's logits depend
    /// neither on the batch nor on how a prompt is cut into chunks.
    ///
    /// # Errors
    /// [`ModelError::EmptyStep`]; [`ModelError::TokenOutOfVocabulary`]; [`ModelError::Cache`], as
    /// [`dsv4_kv::KvCacheManager::begin_step`]: among them [`KvError::OutOfBlocks`], after which nothing has
    /// changed. The step is rejected on every error.
    pub fn forward(&mut self, chunks: &[Chunk<'_>]) -> Result<Forward<'_, B>, ModelError> {
        self.forward_with(chunks, &mut ())
    }

    /// As [`Self::forward`], and lets `probe` observe and replace activations.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn forward_with(
        &mut self,
        chunks: &[Chunk<'_>],
        probe: &mut impl Probe,
    ) -> Result<Forward<'_, B>, ModelError> {
        let tokens: Vec<u32> = chunks.iter().flat_map(|chunk| chunk.tokens).copied().collect();
        if tokens.is_empty() {
            return Err(ModelError::EmptyStep);
        }
        self.check_tokens(&tokens)?;
        let requests = self.requests(chunks)?;
        let positions: Vec<u32> =
            requests.iter().flat_map(|r| r.start..r.start + r.tokens).collect();
        let Self { model, cache, stream, layers, buffers, captured, replayed_steps } = self;
        // Saves checkpoints of boundaries that the last step has passed but could not save itself.
        cache.save_wanted(stream)?;
        let graphs = captured.as_ref().filter(|captured| captured.serves(&requests));
        let launches = graphs.map_or(Launches::Eager, |graphs| Launches::Bucket(graphs.bucket()));
        let mut step = cache.begin_step(stream, launches, &requests)?;
        let mut streams = model.embed(&tokens);
        for (id, _) in step.layer_kinds() {
            let index = id.0 as usize;
            let (weights, device) = (&model.layers[index], &mut layers[index]);
            probe.layer_input(index, &mut streams);
            let (collapsed, mixing) = weights.attention_streams.collapse(&streams);
            let mut x = weights.attention_norm.apply(collapsed);
            probe.attention_input(index, &mut x);
            let graph = graphs.map(|graphs| graphs.layer(index));
            let run = LayerRun { id, weights, device, buffers, graph };
            let attended = attend(&mut step, &run, x.view(), &positions, probe)?;
            streams = mixing.expand(attended.view(), &streams);
            let (collapsed, mixing) = weights.experts_streams.collapse(&streams);
            let x = weights.experts_norm.apply(collapsed);
            let choice = device.route(stream, x.view(), &tokens)?;
            probe.routed(index, &choice);
            let result = weights.experts.apply(x.view(), &choice);
            streams = mixing.expand(result.view(), &streams);
            probe.layer_output(index, &streams);
        }
        step.check_faults()?;
        *replayed_steps += u64::from(graphs.is_some());
        let (rows, offsets) = wanted_rows(chunks);
        let logits = model.logits(&streams, &rows);
        if logits.iter().any(|logit| logit.is_nan()) {
            return Err(ModelError::NotANumber);
        }
        let chunks = requests.iter().map(|request| (request.id, request.tokens)).collect();
        Ok(Forward { step, chunks, tokens, logits, offsets })
    }

    fn check_tokens(&self, tokens: &[u32]) -> Result<(), ModelError> {
        let vocabulary = self.model.config.vocab_size;
        match tokens.iter().find(|&&token| token >= vocabulary) {
            Some(&token) => Err(ModelError::TokenOutOfVocabulary { token, vocabulary }),
            None => Ok(()),
        }
    }

    /// The chunks in the form that the cache takes. Each starts at the number of final tokens of its request.
    fn requests(&self, chunks: &[Chunk<'_>]) -> Result<Vec<StepRequest>, KvError> {
        let ledger = self.cache.ledger();
        let request = |chunk: &Chunk<'_>| {
            let (id, tokens) = (chunk.id, chunk.tokens.len() as u32);
            Ok(StepRequest { id, start: ledger.committed(id)?, tokens })
        };
        chunks.iter().map(request).collect()
    }
}

impl<B: Backend> Forward<'_, B> {
    /// The logits of chunk `index`, `[tokens asked for, vocabulary]`.
    ///
    /// # Panics
    /// If the step has no such chunk.
    #[must_use]
    pub fn logits(&self, index: usize) -> ArrayView2<'_, f32> {
        self.logits.slice(s![self.offsets[index]..self.offsets[index + 1], ..])
    }

    /// Makes all tokens of the step final.
    ///
    /// # Errors
    /// As [`Step::commit`].
    pub fn commit(self) -> Result<(), ModelError> {
        let all: Vec<u32> = self.chunks.iter().map(|&(_, tokens)| tokens).collect();
        self.commit_some(&all)
    }

    /// Makes the first `accepted` tokens of each chunk final, and rejects the others.
    ///
    /// # Errors
    /// [`KvError::CommitMismatch`] unless there is a count for each chunk; as [`Step::commit`].
    pub fn commit_some(self, accepted: &[u32]) -> Result<(), ModelError> {
        let mut rest = self.tokens.as_slice();
        let told = |(&(id, count), &accepted): (&(RequestId, u32), &u32)| {
            let (chunk, behind) = rest.split_at(count as usize);
            rest = behind;
            // If `accepted` is larger than the chunk, the cache refuses the commit.
            Accepted { id, accepted, tokens: chunk.get(..accepted as usize).unwrap_or_default() }
        };
        let accepted: Vec<_> = self.chunks.iter().zip(accepted).map(told).collect();
        Ok(self.step.commit(&accepted)?)
    }
}

/// Rows of the step for which logits are computed, and the offsets of the chunks among these rows.
fn wanted_rows(chunks: &[Chunk<'_>]) -> (Vec<usize>, Vec<usize>) {
    let (mut rows, mut offsets, mut end) = (Vec::new(), vec![0], 0);
    for chunk in chunks {
        end += chunk.tokens.len();
        rows.extend(end - chunk.logits.count(chunk.tokens.len())..end);
        offsets.push(rows.len());
    }
    (rows, offsets)
}
