//! `StateView`: a compressor's state as open and previous window, for inspection and tests.
//!
//! Nothing is stored that way (decision D3): rows lie in a ring by position, and become the previous
//! window when their window closes, without being moved.

use kv_layout::geometry::{CSA_RATIO, HCA_RATIO, HEAD_DIM, INDEX_DIM, LayerKind};

use crate::device::{Backend, Stream};
use crate::error::KvError;
use crate::ids::{LayerId, RequestId};
use crate::manager::KvCacheManager;
use crate::pool_kind::PoolKind;

/// What one token left in a compressor's state, of the half that a tail is about.
#[derive(Clone, Debug, PartialEq)]
pub struct StateRow {
    /// The token's position.
    pub position: u32,
    /// `[channels]` keys.
    pub keys: Vec<f32>,
    /// `[channels]` scores: gates with the position bias added.
    pub scores: Vec<f32>,
}

/// The state of one compressor of one request.
#[derive(Clone, Debug, PartialEq)]
pub struct StateView {
    /// Tokens of the open window.
    pub tail_len: u32,
    /// The open window's tokens: the half that their own window pools.
    pub tail_a: Vec<StateRow>,
    /// The last closed window's tokens: the half that the next window pools. Empty where windows do
    /// not overlap, and before the first has closed.
    pub tail_b: Vec<StateRow>,
}

impl<B: Backend> KvCacheManager<B> {
    /// The state of a request's compressor in `layer`: `pool` is [`PoolKind::MainState`] or, in a CSA
    /// layer, [`PoolKind::IndexState`]. Waits for the device.
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
        let channels = if pool == PoolKind::IndexState { INDEX_DIM } else { HEAD_DIM };
        let overlaps = pools.schema.kind == LayerKind::Csa;
        let (ratio, columns) =
            if overlaps { (CSA_RATIO, 2 * channels) } else { (HCA_RATIO, channels) };
        let ring = u64::from(state.ring);
        let row = |position: u32, column: u32| {
            let row = u64::from(id.slot().0) * ring + u64::from(position) % ring;
            let part = |column: u32| {
                let mut values = vec![0.0; channels as usize];
                let at = row * u64::from(2 * columns) + u64::from(column);
                stream.download(&state.rows, at, &mut values)?;
                Ok::<_, KvError>(values)
            };
            Ok(StateRow { position, keys: part(column)?, scores: part(columns + column)? })
        };
        let open = end - end % ratio;
        let own = columns - channels;
        let previous = if overlaps { open.saturating_sub(ratio)..open } else { 0..0 };
        Ok(StateView {
            tail_len: end - open,
            tail_a: (open..end)
                .map(|position| row(position, own))
                .collect::<Result<_, KvError>>()?,
            tail_b: previous.map(|position| row(position, 0)).collect::<Result<_, KvError>>()?,
        })
    }
}
