//! An HCA layer has no indexer.

use dsv4_kv::indexer::{IndexerWorkspace, ProjectedQueries};
use dsv4_kv::device::Emulator;
use dsv4_kv::step::{EntryLists, HcaInputs, Layers};
use dsv4_kv::{KvError, LayerId};

fn layer(
    layers: &mut Layers<'_, Emulator>,
    inputs: &HcaInputs<'_, Emulator>,
    projected: &ProjectedQueries<'_, Emulator>,
    workspace: &IndexerWorkspace<Emulator>,
    lists: &EntryLists<'_, Emulator>,
) -> Result<(), KvError> {
    let layer = layers.hca(LayerId(0))?.update(inputs)?;
    layer.select_projected(projected, workspace, lists)?; //~ E0599
    layer.append()
}

fn main() {}
