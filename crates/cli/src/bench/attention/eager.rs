//! Launches outside a graph: many in a row, so that code and data are in the caches, and single ones after other work,
//! so that neither is.

use anyhow::Result;
use dsv4_kv::device::{Backend, Device};
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::kv_layout::main_row::MainFormat;
use dsv4_kv::ops::MULTIPROCESSORS;

use super::super::timing::{ColdTimer, SMALL, median};
use super::case::Case;
use super::layers::Layers;

/// Launches in a row, and number of such runs.
const IN_A_ROW: u32 = if SMALL { 2 } else { 50 };
const RUNS: u32 = if SMALL { 1 } else { 5 };
/// Launches after other work whose mean is taken, and number of such means.
const BEHIND: u32 = if SMALL { 1 } else { 5 };
const MEANS: u32 = if SMALL { 1 } else { 7 };
/// Blocks of the preceding launch: one per multiprocessor.
const BLOCKS_BEFORE: u32 = if SMALL { 1 } else { MULTIPROCESSORS };

/// Microseconds of a launch.
pub struct Times {
    /// Time of one of many launches in a row over the same memory: the best run.
    pub in_a_row: f64,
    /// Time of a launch after a fill that is larger than the L2 cache and after a launch of another kernel with one
    /// block per multiprocessor: the median of the means.
    pub behind_others: f64,
}

/// Times the launch of the first of `layers`.
pub fn times<B: Backend>(device: &Device<B>, case: &Case, layers: &Layers<B>) -> Result<Times> {
    let (stream, timer) = (layers.stream(), ColdTimer::new(device)?);
    let other = Layers::one(device, other(case))?;
    other.stream().synchronize()?;
    let launch = || Ok(layers.launch(stream, 0)?);
    let run = |_| {
        let launches = || (0..IN_A_ROW).try_for_each(|_| launch());
        Ok(timer.time_behind(stream, launch, launches)? / f64::from(IN_A_ROW))
    };
    let behind = |_| {
        let time = |_| timer.time_behind(stream, || Ok(other.launch(stream, 0)?), launch);
        let times = (0..BEHIND).map(time).collect::<Result<Vec<f64>>>()?;
        Ok(times.iter().sum::<f64>() / f64::from(BEHIND))
    };
    let runs = (0..RUNS).map(run).collect::<Result<Vec<f64>>>()?;
    let means = (0..MEANS).map(behind).collect::<Result<Vec<f64>>>()?;
    layers.ensure_none_refused()?;
    other.ensure_none_refused()?;
    Ok(Times {
        in_a_row: runs.into_iter().fold(f64::INFINITY, f64::min),
        behind_others: median(means),
    })
}

/// The preceding launch: windows of rows in the other format, so that it is another kernel.
fn other(case: &Case) -> Case {
    let windows = Case::new(64, LayerKind::Swa, 0, BLOCKS_BEFORE);
    match case.format {
        MainFormat::Ue8m0 => windows.with_f32_scales(),
        MainFormat::F32 => windows,
    }
}
