//! The parts of a step, which are queued alone or together.

use anyhow::{Context, Result};
use dsv4_kv::device::Backend;
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::ops::{self, IndexQueries, QueryQuantisation, StepQueries};
use dsv4_kv::step::{AttentionTensors, CsaInputs, HcaInputs, UpdatedLayer};
use dsv4_kv::step_meta::Section;
use dsv4_kv::{KvError, LayerId, Layers};

use super::super::projections::LayerProjections;
use super::tensors::Tensors;

/// A part of a step, over all layers that have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The update of the layers of a kind. In a decode step it includes the append.
    Update(LayerKind),
    /// The append, if the update does not include it.
    Append(LayerKind),
    /// The gather of the windows.
    Windows,
    /// The indexer, from activations to lists.
    Select,
    /// The indexer, from projections to lists.
    SelectProjected,
    /// The indexer's queries, from projections to the form that the scores read.
    Quantise,
    /// The gather of the listed entries.
    Entries,
    /// The gather of all entries of HCA layers.
    All,
    /// Attention in place of the layers of a kind.
    Attend(LayerKind),
}

/// Whether any of `parts` applies to layers of this kind.
fn concern(parts: &[Part], kind: LayerKind) -> bool {
    parts.iter().any(|part| match part {
        Part::Update(of) | Part::Append(of) | Part::Attend(of) => *of == kind,
        Part::Windows => true,
        Part::Select | Part::SelectProjected | Part::Quantise | Part::Entries => {
            kind == LayerKind::Csa
        }
        Part::All => kind == LayerKind::Hca,
    })
}

/// Queues those of `parts` that a layer has. If the update is not among them, the step must have updated the layer
/// before.
pub fn queue_layer<B: Backend>(
    tensors: &Tensors<B>,
    layers: &mut Layers<'_, B>,
    (layer, kind): (LayerId, LayerKind),
    parts: &[Part],
) -> Result<()> {
    if !concern(parts, kind) {
        return Ok(());
    }
    match kind {
        LayerKind::Swa => queue_swa(tensors, layers, layer, parts),
        LayerKind::Csa if parts.contains(&Part::Quantise) => quantise(tensors, layers),
        LayerKind::Csa => queue_csa(tensors, layers, layer, parts),
        LayerKind::Hca => queue_hca(tensors, layers, layer, parts),
    }
}

fn queue_swa<B: Backend>(
    tensors: &Tensors<B>,
    layers: &mut Layers<'_, B>,
    layer: LayerId,
    parts: &[Part],
) -> Result<()> {
    let kv = &tensors.layer(layer).projections.kv;
    let layer = layers.swa(layer)?;
    let update = parts.contains(&Part::Update(LayerKind::Swa));
    let updated = if update { layer.update(kv)? } else { layer.already_updated(kv)? };
    attend(tensors, parts, LayerKind::Swa, |heads| updated.attend(0..tensors.tokens, heads))?;
    finish(tensors, updated, parts)
}

fn queue_csa<B: Backend>(
    tensors: &Tensors<B>,
    layers: &mut Layers<'_, B>,
    layer: LayerId,
    parts: &[Part],
) -> Result<()> {
    let has = |part| parts.contains(&part);
    let of = tensors.layer(layer);
    let LayerProjections { kv, main, index } = &of.projections;
    let indexer = of.indexer.as_ref().context("an indexer for every CSA layer")?;
    let layer = layers.csa(layer)?;
    let updated = if has(Part::Update(LayerKind::Csa)) {
        layer.update(&CsaInputs { kv, main: main.inputs(), index: index.inputs() })?
    } else {
        layer.already_updated(kv)?
    };
    let lists = tensors.lists();
    if has(Part::Select) {
        updated.select(indexer, &of.activations(), &tensors.workspace, &lists)?;
    }
    if has(Part::SelectProjected) {
        updated.select_projected(&tensors.projected(), &tensors.workspace, &lists)?;
    }
    let Tensors { tokens, entries, .. } = tensors;
    if has(Part::Entries) {
        updated.gather_entries(0..*tokens, &lists, entries)?;
    }
    attend(tensors, parts, LayerKind::Csa, |heads| updated.attend(0..*tokens, &lists, heads))?;
    finish(tensors, updated, parts)
}

fn queue_hca<B: Backend>(
    tensors: &Tensors<B>,
    layers: &mut Layers<'_, B>,
    layer: LayerId,
    parts: &[Part],
) -> Result<()> {
    let has = |part| parts.contains(&part);
    let LayerProjections { kv, main, .. } = &tensors.layer(layer).projections;
    let layer = layers.hca(layer)?;
    let updated = if has(Part::Update(LayerKind::Hca)) {
        layer.update(&HcaInputs { kv, main: main.inputs() })?
    } else {
        layer.already_updated(kv)?
    };
    let Tensors { tokens, all, entries, entry_lengths, .. } = tensors;
    if has(Part::All) {
        updated.gather_all(0..*tokens, *all, entries, entry_lengths)?;
    }
    attend(tensors, parts, LayerKind::Hca, |heads| updated.attend(0..*tokens, heads))?;
    finish(tensors, updated, parts)
}

/// Queues attention in place in a layer of a kind.
fn attend<B: Backend>(
    tensors: &Tensors<B>,
    parts: &[Part],
    kind: LayerKind,
    attend: impl FnOnce(&AttentionTensors<'_, B>) -> Result<(), KvError>,
) -> Result<()> {
    if parts.contains(&Part::Attend(kind)) {
        tensors.attention()?.with(attend)?;
    }
    Ok(())
}

/// Queues the gather of a layer's windows, and its append.
fn finish<B: Backend, K>(
    tensors: &Tensors<B>,
    updated: UpdatedLayer<'_, B, K>,
    parts: &[Part],
) -> Result<()> {
    if parts.contains(&Part::Windows) {
        let Tensors { tokens, window, window_lengths, .. } = tensors;
        updated.gather_window(0..*tokens, window, window_lengths)?;
    }
    if parts.contains(&Part::Append(updated.schema().kind)) {
        updated.append()?;
    }
    Ok(())
}

/// Queues the queries of a CSA layer, from projections to the form that the scores read.
fn quantise<B: Backend>(tensors: &Tensors<B>, layers: &Layers<'_, B>) -> Result<()> {
    let [position, slot, index] =
        [Section::Position, Section::Slot, Section::Index].map(|which| layers.section(which));
    let (position, slot, index) = (&position, &slot, &index);
    let queries = StepQueries { position, slot, index, first: 0, count: tensors.tokens };
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

/// Queues `parts` of all layers.
pub fn queue<B: Backend>(
    tensors: &Tensors<B>,
    layers: &mut Layers<'_, B>,
    parts: &[Part],
) -> Result<()> {
    layers.layer_kinds().try_for_each(|layer| queue_layer(tensors, layers, layer, parts))
}
