//! The parts of a step, queued alone or together.

use anyhow::{Context, Result};
use dsv4_kv::device::{Backend, Buffer, Memory, Stream};
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::ops::{self, GatherQueries, IndexQueries, QueryQuantisation};
use dsv4_kv::step::{CsaInputs, HcaInputs, UpdatedLayer};
use dsv4_kv::step_meta::Section;
use dsv4_kv::{LayerId, Layers};
use dsv4_kv_router::{Batch, ChoiceWeights, Router, RouterConfig, RouterWeights};
use half::bf16;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::super::inputs::upload;
use super::super::projections::LayerProjections;
use super::tensors::Tensors;

/// A part of a step, over all layers that have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The update and the append of the layers of a kind.
    Update(LayerKind),
    /// The gather of the windows.
    Windows,
    /// The indexer, from activations to lists.
    Select,
    /// The indexer, from projections to lists.
    SelectProjected,
    /// The indexer's queries, from projections to what scores take.
    Quantise,
    /// The gather of the lists' entries.
    Entries,
    /// The gather of all entries of HCA layers.
    All,
}

/// Everything but the router, in the order of a layer.
pub const STEP: &[Part] = &[
    Part::Update(LayerKind::Swa),
    Part::Update(LayerKind::Csa),
    Part::Update(LayerKind::Hca),
    Part::Windows,
    Part::Select,
    Part::Entries,
    Part::All,
];

/// Whether any of `parts` is of a layer of this kind.
fn concern(parts: &[Part], kind: LayerKind) -> bool {
    parts.iter().any(|part| match part {
        Part::Update(of) => *of == kind,
        Part::Windows => true,
        Part::Select | Part::SelectProjected | Part::Quantise | Part::Entries => {
            kind == LayerKind::Csa
        }
        Part::All => kind == LayerKind::Hca,
    })
}

/// Queues those of `parts` that a layer has. Without its update the step must have updated it before.
pub fn queue_layer<B: Backend>(
    tensors: &Tensors<B>,
    layers: &mut Layers<'_, B>,
    (layer, kind): (LayerId, LayerKind),
    parts: &[Part],
) -> Result<()> {
    if !concern(parts, kind) {
        return Ok(());
    }
    let has = |part| parts.contains(&part);
    let update = has(Part::Update(kind));
    let of = tensors.layer(layer);
    let LayerProjections { kv, main, index } = &of.projections;
    let (main, index) = (main.inputs(), index.inputs());
    let queries = || 0..tensors.tokens;
    match kind {
        LayerKind::Swa => {
            let layer = layers.swa(layer)?;
            let updated = if update { layer.update(kv)? } else { layer.resume(kv)? };
            finish(tensors, updated, parts, update)
        }
        LayerKind::Csa => {
            if has(Part::Quantise) {
                quantise(tensors, layers)?;
                return Ok(());
            }
            let indexer = of.indexer.as_ref().context("an indexer for every CSA layer")?;
            let layer = layers.csa(layer)?;
            let updated = if update {
                layer.update(&CsaInputs { kv, main, index })?
            } else {
                layer.resume(kv)?
            };
            if has(Part::Select) {
                updated.select(indexer, &of.activations(), &tensors.selection())?;
            }
            if has(Part::SelectProjected) {
                updated.select_projected(&tensors.projected(), &tensors.selection())?;
            }
            if has(Part::Entries) {
                let Tensors { lists, k, entries, .. } = tensors;
                updated.gather_entries(queries(), lists, *k, entries)?;
            }
            finish(tensors, updated, parts, update)
        }
        LayerKind::Hca => {
            let layer = layers.hca(layer)?;
            let updated =
                if update { layer.update(&HcaInputs { kv, main })? } else { layer.resume(kv)? };
            if has(Part::All) {
                let Tensors { all, entries, entry_lengths, .. } = tensors;
                updated.gather_all(queries(), *all, entries, entry_lengths)?;
            }
            finish(tensors, updated, parts, update)
        }
    }
}

/// Queues the gather of a layer's window, and its append if it was updated.
fn finish<B: Backend, K>(
    tensors: &Tensors<B>,
    updated: UpdatedLayer<'_, B, K>,
    parts: &[Part],
    append: bool,
) -> Result<()> {
    if parts.contains(&Part::Windows) {
        let Tensors { tokens, window, window_lengths, .. } = tensors;
        updated.gather_window(0..*tokens, window, window_lengths)?;
    }
    if append {
        updated.append()?;
    }
    Ok(())
}

/// Queues the queries of a CSA layer, from projections to what scores take.
fn quantise<B: Backend>(tensors: &Tensors<B>, layers: &Layers<'_, B>) -> Result<()> {
    let [position, slot, index] =
        [Section::Position, Section::Slot, Section::Index].map(|which| layers.section(which));
    let (position, slot, index) = (&position, &slot, &index);
    let queries = GatherQueries { position, slot, index, first: 0, count: tensors.tokens };
    let projected = tensors.projected();
    let to =
        IndexQueries { query: &tensors.query, weight: &tensors.query_weight, heads: tensors.heads };
    Ok(ops::index_query(
        layers.stream(),
        &QueryQuantisation {
            queries: &queries,
            projected: projected.queries,
            projected_weight: projected.weights,
            frequencies: &tensors.frequencies,
            format: tensors.format,
            to: &to,
        },
    )?)
}

/// The routers of a model's layers, all learned.
pub struct Routers<B: Backend> {
    routers: Vec<Router<B>>,
    token: Buffer<B, i32>,
    ids: Buffer<B, i32>,
    weights: Buffer<B, f32>,
}

impl<B: Backend> Routers<B> {
    /// One for each of `layers` layers of the model called `name`, with random gates.
    pub fn new(stream: &Stream<B>, name: &str, layers: usize, tokens: u32) -> Result<Self> {
        let config = RouterConfig::preset(name).context("a preset")?;
        let mut random = SmallRng::seed_from_u64(5);
        let values = config.experts as usize * config.hidden_size as usize;
        let gate: Vec<bf16> =
            (0..values).map(|_| bf16::from_f32(random.random_range(-0.1..0.1))).collect();
        let bias: Vec<f32> = (0..config.experts).map(|_| random.random_range(0.0..1.0)).collect();
        let choice = ChoiceWeights::Bias(bias.into());
        let weights = RouterWeights { gate: gate.into(), choice };
        let router = |_| Router::new(stream, &config, &weights, tokens);
        let selected = u64::from(tokens) * u64::from(config.selected);
        let device = stream.device();
        Ok(Self {
            routers: (0..layers).map(router).collect::<Result<_, _>>()?,
            token: upload(stream, "tokens", &vec![1; tokens as usize])?,
            ids: device.allocate("experts", selected)?,
            weights: device.allocate("weights of experts", selected)?,
        })
    }

    /// Queues a layer's, of the step's tokens.
    pub fn queue(
        &mut self,
        stream: &Stream<B>,
        tensors: &Tensors<B>,
        layer: LayerId,
    ) -> Result<()> {
        let Self { routers, token, ids, weights } = self;
        let batch = Batch { tokens: tensors.tokens, token, ids, weights };
        let [_, hidden] = &tensors.layer(layer).activations;
        Ok(routers[layer.0 as usize].route(stream, hidden, &batch)?)
    }

    /// Reports what kernels refused.
    pub fn check(&mut self, stream: &Stream<B>) -> Result<()> {
        Ok(self.routers.iter_mut().try_for_each(|router| router.check_faults(stream))?)
    }

    /// All of them, for a graph to retain.
    pub fn memory(&self) -> Vec<Memory<B>> {
        let routers = self.routers.iter().flat_map(Router::memory);
        let answers = [self.token.memory(), self.ids.memory(), self.weights.memory()];
        routers.chain(answers).collect()
    }
}

/// Queues `parts` of all layers, and the router of each behind it if there are `routers`.
pub fn queue<B: Backend>(
    tensors: &Tensors<B>,
    layers: &mut Layers<'_, B>,
    parts: &[Part],
    mut routers: Option<&mut Routers<B>>,
) -> Result<()> {
    for (layer, kind) in layers.ids() {
        queue_layer(tensors, layers, (layer, kind), parts)?;
        if let Some(routers) = routers.as_deref_mut() {
            routers.queue(layers.stream(), tensors, layer)?;
        }
    }
    Ok(())
}
