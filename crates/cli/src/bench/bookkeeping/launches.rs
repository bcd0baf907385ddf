//! The host's cost of the launches of an eager decode step, without the driver: everything from the layer's handle on,
//! such as checks of extents and overlap, locks, and arguments.

use anyhow::Result;
use dsv4_kv::device::{Null, NullDevice};
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::{KvError, Launches, LayerId, Step};

use super::inputs::Inputs;
use super::row::Row;
use super::samples::{Clock, Samples, WARM_UP};
use super::setup::STEPS;
use super::steps::{CacheBench, Case};

/// Requests of the step.
const REQUESTS: u32 = 32;

/// Queues one kind of launch in a layer.
type Queue = fn(&Inputs, &mut Step<'_, Null>, LayerId) -> Result<(), KvError>;

/// The kinds of launches, in an order in which a step can queue them.
const KINDS: [(&str, LayerKind, Queue); 10] = [
    ("append (a layer with a window alone)", LayerKind::Swa, |inputs, step, layer| {
        inputs.update_swa(step.swa(layer)?)?.append()
    }),
    ("decode_csa", LayerKind::Csa, |inputs, step, layer| {
        inputs.update_csa(step.csa(layer)?).map(drop)
    }),
    ("decode_hca", LayerKind::Hca, |inputs, step, layer| {
        inputs.update_hca(step.hca(layer)?).map(drop)
    }),
    ("gather_window", LayerKind::Csa, |inputs, step, layer| {
        inputs.gather_window(&step.csa(layer)?.already_updated(inputs.rows())?, REQUESTS)
    }),
    ("gather_window", LayerKind::Hca, |inputs, step, layer| {
        inputs.gather_window(&step.hca(layer)?.already_updated(inputs.rows())?, REQUESTS)
    }),
    ("select", LayerKind::Csa, |inputs, step, layer| {
        inputs.select(&step.csa(layer)?.already_updated(inputs.rows())?, REQUESTS)
    }),
    ("gather_entries", LayerKind::Csa, |inputs, step, layer| {
        inputs.gather_entries(&step.csa(layer)?.already_updated(inputs.rows())?, REQUESTS)
    }),
    ("gather_all", LayerKind::Hca, |inputs, step, layer| {
        inputs.gather_all(&step.hca(layer)?.already_updated(inputs.rows())?, REQUESTS)
    }),
    ("attend", LayerKind::Csa, |inputs, step, layer| {
        inputs.attend_listed(&step.csa(layer)?.already_updated(inputs.rows())?, REQUESTS)
    }),
    ("attend", LayerKind::Hca, |inputs, step, layer| {
        step.hca(layer)?.already_updated(inputs.rows())?.attend(0..REQUESTS, &inputs.heads())
    }),
];

/// Measures all rows: microseconds of one launch, averaged over the layers of a step.
///
/// # Errors
/// If a step is refused.
pub(super) fn measure() -> Result<Vec<Row>> {
    let case = Case { requests: REQUESTS, tokens: 1, accepted: 1 };
    let CacheBench { mut cache, stream, inputs } = CacheBench::new(case.requests)?;
    let mut batch = CacheBench::filled(&mut cache, &stream, &inputs, case)?;
    let (clock, device) = (Clock::new(), cache.device().clone());
    let kinds = &cache.config().model.layers;
    let trunk = kinds.len() as u32 - cache.config().model.mtp_layers;
    let layers = KINDS.map(|(_, kind, _)| -> Vec<LayerId> {
        (0..trunk).filter(|&layer| kinds[layer as usize] == kind).map(LayerId).collect()
    });
    let mut samples = [(); KINDS.len()].map(|()| Samples::default());
    let mut launched = [0; KINDS.len()];
    for _ in 0..WARM_UP + STEPS {
        let mut step = cache.begin_step(&stream, Launches::Eager, &batch.parts)?;
        for (at, (_, _, queue)) in KINDS.into_iter().enumerate() {
            let before = launches(&device);
            samples[at].time(clock, || {
                layers[at].iter().try_for_each(|&layer| queue(&inputs, &mut step, layer))
            })?;
            launched[at] = launches(&device) - before;
        }
        step.commit(&batch.accepted)?;
        batch.advance();
    }
    let rows = KINDS.into_iter().zip(launched).zip(&samples);
    Ok(rows
        .map(|(((name, kind, _), launched), samples)| {
            let size = format!("{kind:?} layer, {REQUESTS} x 1 tokens, a launch");
            Row::new(format!("launch checks: {name}"), size, samples, launched)
        })
        .collect())
}

/// Number of launches so far.
fn launches(device: &NullDevice) -> u64 {
    device.backend().calls().launches
}
