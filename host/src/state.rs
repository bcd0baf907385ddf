//! `StateView`: a compressor's state, for inspection and tests.
//!
//! The state of a CSA compressor is shown as two compression windows: the tokens of the open one, and those of the
//! last closed one.
//! Nothing is stored that way (decision D3): rows lie in rings by position. An HCA compressor has running sums only.

use kv_layout::geometry::{
    CSA_RATIO, CompressorKind, HCA_RATIO, HEAD_DIM, LayerKind, csa_previous_rows, csa_state_rows,
};

use crate::device::{Backend, Stream};
use crate::error::KvError;
use crate::ids::{LayerId, RequestId, SlotId};
use crate::manager::KvCacheManager;
use crate::ops::StateRing;
use crate::pool_kind::PoolKind;

/// The row of one token in a CSA compressor's state, of the half from which its window is pooled.
#[derive(Clone, Debug, PartialEq)]
pub struct StateRow {
    /// The token's position.
    pub position: u32,
    /// `[channels]` keys.
    pub keys: Vec<f32>,
    /// `[channels]` scores: gates with the position bias added.
    pub scores: Vec<f32>,
}

/// The running sums of an open HCA window, per channel.
#[derive(Clone, Debug, PartialEq)]
pub struct RunningSums {
    /// Position of the last token of the window so far.
    pub position: u32,
    /// `[512]` the largest score: gate with the position bias added.
    pub maximum: Vec<f32>,
    /// `[512]` the sum of the weights, `exp(score - maximum)`.
    pub sum: Vec<f32>,
    /// `[512]` the sum of the weighted keys.
    pub weighted: Vec<f32>,
}

/// The state of one compressor of one request.
#[derive(Clone, Debug, PartialEq)]
pub enum StateView {
    /// Of a CSA compressor.
    Csa {
        /// The open window's tokens: the half that their own window pools.
        open_window: Vec<StateRow>,
        /// The last closed window's tokens: the half that the next window pools. Empty before the first
        /// has closed.
        previous_window: Vec<StateRow>,
    },
    /// Of an HCA compressor; `None` if its open window has no token.
    Hca(Option<RunningSums>),
}

impl<B: Backend> KvCacheManager<B> {
    /// The state of a request's compressor in `layer`: `pool` is [`PoolKind::MainState`] or, in a CSA
    /// layer, [`PoolKind::IndexState`]. Waits for `stream`, the one of the request's last step.
    ///
    /// # Errors
    /// [`KvError::UnknownRequest`], [`KvError::ForeignRequest`], [`KvError::NoSuchLayer`],
    /// [`KvError::NoSuchPool`], [`KvError::Device`].
    pub fn state_view(
        &self,
        stream: &Stream<B>,
        layer: LayerId,
        id: RequestId,
        pool: PoolKind,
    ) -> Result<StateView, KvError> {
        let end = self.ledger().committed(id)?;
        let pools = self.core().memory.pools.layer(layer)?;
        let state = pools.state(pool, self.config())?;
        let which = match (pools.schema.kind, pool) {
            (LayerKind::Hca, _) => CompressorKind::Hca,
            (_, PoolKind::IndexState) => CompressorKind::CsaIndex,
            _ => CompressorKind::CsaMain,
        };
        let rows = Rows { stream, state, slot: id.slot(), which };
        if which == CompressorKind::Hca {
            let is_open = !end.is_multiple_of(HCA_RATIO);
            return Ok(StateView::Hca(is_open.then(|| rows.sums(end - 1)).transpose()?));
        }
        let open = end - end % CSA_RATIO;
        let (own, previous) = (open..end, open.saturating_sub(CSA_RATIO)..open);
        Ok(StateView::Csa {
            open_window: own.map(|position| rows.own(position)).collect::<Result<_, _>>()?,
            previous_window: previous
                .map(|position| rows.previous(position))
                .collect::<Result<_, _>>()?,
        })
    }
}

/// The state rows of one request.
struct Rows<'s, B: Backend> {
    stream: &'s Stream<B>,
    state: StateRing<'s, B>,
    slot: SlotId,
    which: CompressorKind,
}

impl<B: Backend> Rows<'_, B> {
    /// Row `row` of the slot, which has `rows` of them.
    fn row(&self, rows: u32, row: u32) -> Result<Vec<f32>, KvError> {
        let floats = self.which.row_floats();
        let row = u64::from(self.slot.0) * u64::from(rows) + u64::from(row);
        let mut values = vec![0.0; floats as usize];
        self.stream.download(self.state.rows, row * u64::from(floats), &mut values)?;
        Ok(values)
    }

    fn own(&self, position: u32) -> Result<StateRow, KvError> {
        self.half(position, position % self.state.ring)
    }

    fn previous(&self, position: u32) -> Result<StateRow, KvError> {
        let ring = self.state.ring;
        self.half(position, ring + position % csa_previous_rows(ring))
    }

    fn half(&self, position: u32, row: u32) -> Result<StateRow, KvError> {
        let mut keys = self.row(csa_state_rows(self.state.ring), row)?;
        let scores = keys.split_off(keys.len() / 2);
        Ok(StateRow { position, keys, scores })
    }

    fn sums(&self, position: u32) -> Result<RunningSums, KvError> {
        let ring = self.state.ring;
        let mut maximum = self.row(ring, position % ring)?;
        let mut sum = maximum.split_off(HEAD_DIM as usize);
        let weighted = sum.split_off(HEAD_DIM as usize);
        Ok(RunningSums { position, maximum, sum, weighted })
    }
}
