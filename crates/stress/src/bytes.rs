//! The bytes of one request in one layer, read back and compared.

use dsv4_kv::device::{Backend, Buffer};
use dsv4_kv::schema::PoolKind;
use dsv4_kv::state::StateRow;
use dsv4_kv::{LayerId, RequestId};
use kv_layout::geometry::StateStream;
use kv_layout::main_row::DATA_BYTES;

use super::cache::Cache;
use super::library::LayerBytes;
use super::model::Request;
use dsv4_kv_tests::inputs::download;
use dsv4_kv_tests::model::{History, shape};

impl<B: Backend> Cache<B> {
    /// The window, entries, indexer keys and compressor states of a request in `layer`.
    pub(super) fn check_request(
        &self,
        id: RequestId,
        request: &Request,
        layer: LayerId,
    ) -> Result<(), String> {
        let what = format!("{layer:?} of request {} at {} tokens", request.name, request.tokens);
        let told = self.library.of(request.name);
        self.check_entries(request, layer, told.layer(layer), &what)?;
        // A long step that is not committed has overwritten what came before it.
        if request.written > self.fed.manager.config().max_draft + 1 {
            return Ok(());
        }
        self.check_window(id, request.tokens as usize, layer, told.layer(layer), &what)?;
        told.story
            .histories(layer)
            .iter()
            .try_for_each(|history| self.check_state(id, layer, history, &what))
    }

    /// What the next query sees of the past, the last 127 tokens, is in the ring, each token in the row
    /// of its position.
    fn check_window(
        &self,
        id: RequestId,
        tokens: usize,
        layer: LayerId,
        told: &LayerBytes,
        what: &str,
    ) -> Result<(), String> {
        let handle = self.fed.manager.layer(layer).map_err(|error| error.to_string())?;
        let swa = handle.swa();
        let ring = swa.ring as usize;
        let first = id.slot.0 as usize * ring;
        let data = self.rows(swa.data, first, ring, DATA_BYTES);
        let scale = self.rows(swa.scale, first, ring, swa.format.scale_bytes());
        for (position, want) in
            told.rows.iter().enumerate().take(tokens).skip(tokens.saturating_sub(127))
        {
            let row = position % ring;
            if data[row] != want.data || scale[row] != want.scale {
                return Err(format!("{what}: the window row of position {position} differs"));
            }
        }
        Ok(())
    }

    /// Every entry that closed is where the block table says.
    fn check_entries(
        &self,
        request: &Request,
        layer: LayerId,
        told: &LayerBytes,
        what: &str,
    ) -> Result<(), String> {
        let handle = self.fed.manager.layer(layer).map_err(|error| error.to_string())?;
        let kind = handle.schema().kind;
        let Some(ratio) = kind.ratio() else { return Ok(()) };
        let (per_block, closed) =
            (kind.entries_per_block() as usize, (request.tokens / ratio) as usize);
        let entries = handle.entries().map_err(|error| error.to_string())?;
        let keys = handle.index_keys().ok();
        for (at, block) in request.blocks.iter().enumerate() {
            let own = at * per_block..closed.min((at + 1) * per_block);
            let first = block.0 as usize * per_block;
            let rows = |plane, bytes| self.rows(plane, first, per_block, bytes);
            let data = rows(entries.data, DATA_BYTES);
            let scale = rows(entries.scale, entries.format.scale_bytes());
            for (i, want) in
                own.clone().zip(told.stored.entries.get(own.clone()).unwrap_or_default())
            {
                let row = i % per_block;
                if data[row] != want.data || scale[row] != want.scale {
                    return Err(format!("{what}: entry {i} differs"));
                }
            }
            let Some(keys) = &keys else { continue };
            let code = rows(keys.code, keys.format.code_bytes());
            let scale = rows(keys.scale, keys.format.scale_bytes());
            for (i, want) in own.clone().zip(told.stored.keys.get(own).unwrap_or_default()) {
                let row = i % per_block;
                if code[row] != want.codes || scale[row] != want.scale {
                    return Err(format!("{what}: indexer key {i} differs"));
                }
            }
        }
        Ok(())
    }

    /// The tokens that the next entry is made of are in the compressor's ring, bit for bit.
    fn check_state(
        &self,
        id: RequestId,
        layer: LayerId,
        history: &History,
        what: &str,
    ) -> Result<(), String> {
        let pool = match history.stream {
            StateStream::CsaIndex => PoolKind::IndexState,
            StateStream::CsaMain | StateStream::Hca => PoolKind::MainState,
        };
        let view = self.fed.manager.state_view(&self.fed.stream, layer, id, pool);
        let view = view.map_err(|error| error.to_string())?;
        let shape = shape(history.stream);
        let own = shape.columns() - shape.channels;
        for (rows, column) in [(&view.tail_a, own), (&view.tail_b, 0)] {
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

    /// `count` rows of a plane from row `first` on.
    fn rows(&self, plane: &Buffer<B, u8>, first: usize, count: usize, bytes: u64) -> Vec<Vec<u8>> {
        let range = plane.slice(first as u64 * bytes, count as u64 * bytes);
        let range = range.expect("the plane has every row");
        let bytes_read = download(&self.fed.stream, &range);
        bytes_read.chunks_exact(bytes as usize).map(<[u8]>::to_vec).collect()
    }
}

fn bits(values: &[f32]) -> impl Iterator<Item = u32> {
    values.iter().map(|value| value.to_bits())
}
