//! Results that must have the same bits in every batch and every cut into chunks, with drafts, and by graphs.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use anyhow::{Result, ensure};
use dsv4_kv::device::Backend;
use dsv4_kv_oracle::explain::Stored;
use kv_layout::geometry::LayerKind;

use crate::run::{Recorder, Run, Seen};
use crate::stored;

/// A device's name, a reference's name, and tokens.
pub type Key = (String, String, Vec<u32>);

/// The results of one request that must have the same bits.
#[derive(PartialEq)]
pub struct Bits {
    /// For each token, its logits and the record of each layer.
    tokens: Vec<(Vec<u32>, Vec<Seen>)>,
    /// For each layer, the entries and keys in the cache.
    stored: Vec<[Vec<Stored>; 2]>,
}

impl Bits {
    /// The results of request `request` of a run.
    pub fn of<B: Backend>(
        run: &Run<B>,
        seen: &Recorder<'_>,
        request: usize,
        tokens: usize,
    ) -> Result<Self> {
        let kinds = &run.engine.cache().config().model.layers;
        let token = |position: usize| {
            let logits = run.logits[&(request, position)].iter().map(|logit| logit.to_bits());
            let seen =
                (0..kinds.len()).map(|layer| seen.seen[&(layer, (request, position))].clone());
            (logits.collect(), seen.collect())
        };
        let stored = |(layer, &kind): (usize, &LayerKind)| -> Result<_> {
            let (engine, id) = (&run.engine, run.ids[request]);
            let has_keys = kind == LayerKind::Csa;
            let keys = if has_keys { stored::keys(engine, layer, id)? } else { Vec::new() };
            Ok([stored::entries(engine, layer, id)?, keys])
        };
        Ok(Self {
            tokens: (0..tokens).map(token).collect(),
            stored: kinds.iter().enumerate().map(stored).collect::<Result<_>>()?,
        })
    }

    /// Fails if `other` has other bits.
    pub fn check_equal(&self, other: &Self, request: usize) -> Result<()> {
        for (position, (one, two)) in self.tokens.iter().zip(&other.tokens).enumerate() {
            for (layer, (one, two)) in one.1.iter().zip(&two.1).enumerate() {
                ensure!(
                    one == two,
                    "layer {layer}, position {position} of request {request} differs"
                );
            }
            ensure!(one.0 == two.0, "logits at {position} of request {request} differ");
        }
        let layers = self.stored.iter().zip(&other.stored);
        for (layer, (one, two)) in layers.enumerate() {
            ensure!(one == two, "layer {layer} of request {request}: bytes in the cache differ");
        }
        ensure!(self == other, "request {request} differs");
        Ok(())
    }

    /// The results of a request that runs alone. They are computed once for each device, reference and tokens.
    pub fn once(key: Key, compute: impl FnOnce() -> Result<Self>) -> Result<Arc<Self>> {
        static ALONE: LazyLock<Mutex<HashMap<Key, Arc<Bits>>>> = LazyLock::new(Mutex::default);
        let mut alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bits) = alone.get(&key) {
            return Ok(Arc::clone(bits));
        }
        let bits = Arc::new(compute()?);
        alone.insert(key, Arc::clone(&bits));
        Ok(bits)
    }
}
