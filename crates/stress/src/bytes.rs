//! Reads back the bytes of one request in one layer and compares them with the expected ones.

use dsv4_kv::device::Backend;
use dsv4_kv::state::{StateRow, StateView};
use dsv4_kv::{LayerGroup, LayerId, PoolKind, RequestId};
use kv_layout::geometry::{CompressorKind, LayerKind};

use super::cache::Cache;
use super::library::{LayerBytes, Told};
use super::model::{Progress, Request};
use dsv4_kv_tests::fed::Fed;
use dsv4_kv_tests::history::{History, shape};
use dsv4_kv_tests::inputs::download;
use dsv4_kv_tests::rings::pool;

impl<B: Backend> Cache<B> {
    /// Compares the window, entries, indexer keys and compressor states of a request in `layer`, if its tokens are
    /// known.
    pub(super) fn check_request(
        &self,
        id: RequestId,
        request: &Request,
        layer: LayerId,
    ) -> Result<(), String> {
        let config = self.fed.manager.config();
        let is_draft = config.group_layers(LayerGroup::Draft).contains(&layer.0);
        let group = if is_draft { LayerGroup::Draft } else { LayerGroup::Trunk };
        let progress @ Progress { tokens, .. } = request.group(group);
        if !progress.is_known() {
            return Ok(());
        }
        let what = format!("{layer:?} of request {} at {tokens} tokens", request.name);
        let told = self.library.of(&request.says);
        self.check_entries(request, tokens, layer, told.layer(layer), &what)?;
        // A long step that was rejected has overwritten rows of earlier tokens.
        if !progress.is_whole_at(tokens, config.max_draft + 1) {
            return Ok(());
        }
        self.check_window(id, progress, layer, told.layer(layer), &what)?;
        told.story
            .histories(layer)
            .iter()
            .try_for_each(|history| self.check_state(id, layer, &told, (history, tokens), &what))
    }

    /// The ring must hold the rows of the last 127 tokens, which the next query sees, each in the ring row of its
    /// position.
    fn check_window(
        &self,
        id: RequestId,
        Progress { tokens, from, .. }: Progress,
        layer: LayerId,
        told: &LayerBytes,
        what: &str,
    ) -> Result<(), String> {
        let data = self.rows(layer, PoolKind::SwaData, id.slot().0);
        let scale = self.rows(layer, PoolKind::SwaScale, id.slot().0);
        let (tokens, from) = (tokens as usize, from as usize);
        let needed = tokens.saturating_sub(127).max(from);
        for (position, want) in told.rows.iter().enumerate().take(tokens).skip(needed) {
            let row = position % data.len();
            if data[row] != want.data || scale[row] != want.scale {
                return Err(format!("{what}: the window row of position {position} differs"));
            }
        }
        Ok(())
    }

    /// Every closed entry must be in the block that the block table names.
    fn check_entries(
        &self,
        request: &Request,
        tokens: u32,
        layer: LayerId,
        told: &LayerBytes,
        what: &str,
    ) -> Result<(), String> {
        let kind = self.fed.kind(layer);
        let Some(ratio) = kind.ratio() else { return Ok(()) };
        let (per_block, closed) = (kind.entries_per_block() as usize, (tokens / ratio) as usize);
        for (at, block) in request.blocks.iter().enumerate() {
            let own = at * per_block..closed.min((at + 1) * per_block);
            let rows = |kind| self.rows(layer, kind, block.0);
            let (data, scale) = (rows(PoolKind::EntryData), rows(PoolKind::EntryScale));
            for (i, want) in
                own.clone().zip(told.stored.entries.get(own.clone()).unwrap_or_default())
            {
                let row = i % per_block;
                if data[row] != want.data || scale[row] != want.scale {
                    return Err(format!("{what}: entry {i} differs"));
                }
            }
            if kind != LayerKind::Csa {
                continue;
            }
            let (code, scale) = (rows(PoolKind::IndexCode), rows(PoolKind::IndexScale));
            for (i, want) in own.clone().zip(told.stored.keys.get(own).unwrap_or_default()) {
                let row = i % per_block;
                if code[row] != want.codes || scale[row] != want.scale {
                    return Err(format!("{what}: indexer key {i} differs"));
                }
            }
        }
        Ok(())
    }

    /// The compressor's state must hold the inputs of the next entry, bit for bit: rows of tokens (CSA), or running
    /// sums (HCA).
    fn check_state(
        &self,
        id: RequestId,
        layer: LayerId,
        told: &Told,
        (history, tokens): (&History, u32),
        what: &str,
    ) -> Result<(), String> {
        let pool = match history.stream {
            CompressorKind::CsaIndex => PoolKind::IndexState,
            CompressorKind::CsaMain | CompressorKind::Hca => PoolKind::MainState,
        };
        let view = self.fed.manager.state_view(&self.fed.stream, layer, id, pool);
        let (open_window, previous_window) = match view.map_err(|error| error.to_string())? {
            StateView::Csa { open_window, previous_window } => (open_window, previous_window),
            StateView::Hca(sums) if sums.as_ref() == told.sums(layer, tokens) => return Ok(()),
            StateView::Hca(_) => return Err(format!("{what}: the running sums differ")),
        };
        let shape = shape(history.stream);
        let own = shape.columns() - shape.channels;
        for (rows, column) in [(&open_window, own), (&previous_window, 0)] {
            for StateRow { position, keys, scores } in rows {
                let token = *position as usize;
                let at = token * shape.columns() + column;
                let ape = token % shape.ratio * shape.columns() + column;
                let range = |start: usize| start..start + shape.channels;
                let want = history.gate[range(at)].iter().zip(&history.ape[range(ape)]);
                let right = bits(keys).eq(bits(&history.kv[range(at)]))
                    && bits(scores).eq(want.map(|(gate, ape)| (gate + ape).to_bits()));
                if !right {
                    return Err(format!("{what}: the {pool:?} of position {position} differs"));
                }
            }
        }
        Ok(())
    }

    /// The rows of one slot or block in a pool.
    fn rows(&self, layer: LayerId, kind: PoolKind, unit: u32) -> Vec<Vec<u8>> {
        let Fed { manager, stream, .. } = &self.fed;
        let schema = manager.schema().layers[layer.0 as usize].pool(kind);
        let schema = schema.expect("layers of this kind have the pool");
        let bytes = schema.unit_bytes();
        let range = pool(manager, layer, kind).slice(u64::from(unit) * bytes, bytes);
        let read = download(stream, &range.expect("the pool has every unit"));
        read.chunks_exact(schema.row_bytes as usize).map(<[u8]>::to_vec).collect()
    }
}

fn bits(values: &[f32]) -> impl Iterator<Item = u32> {
    values.iter().map(|value| value.to_bits())
}
