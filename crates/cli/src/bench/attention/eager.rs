//! Launches that are no nodes of a graph: in a row, so that code and data are in the caches, and behind other work, so that
//! neither is.

use anyhow::Result;
use dsv4_kv::device::{Backend, Device};
use dsv4_kv::kv_layout::geometry::LayerKind;
use dsv4_kv::kv_layout::main_row::MainFormat;
use dsv4_kv::ops::MULTIPROCESSORS;

use super::super::timing::{ColdTimer, SMALL, median};
use super::case::Case;
use super::layers::Layers;

/// Launches in a row, and runs of them.
const IN_A_ROW: u32 = if SMALL { 2 } else { 50 };
const RUNS: u32 = if SMALL { 1 } else { 5 };
/// Launches behind others of which the mean is taken, and how often.
const BEHIND: u32 = if SMALL { 1 } else { 5 };
const MEANS: u32 = if SMALL { 1 } else { 7 };
/// Blocks of the launch before: one on each multiprocessor.
const BLOCKS_BEFORE: u32 = if SMALL { 1 } else { MULTIPROCESSORS };

/// Microseconds of a launch.
pub struct Times {
    /// Of many in a row, over the same memory: the best run.
    pub in_a_row: f64,
    /// Of one behind a fill that is larger than the L2 cache, and behind a launch of another kernel with a block on each
    /// multiprocessor: the median of means.
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

/// What runs before: windows of rows in the other format, so that the kernel is another.
fn other(case: &Case) -> Case {
    let windows = Case::new(64, LayerKind::Swa, 0, BLOCKS_BEFORE);
    match case.format {
        MainFormat::Ue8m0 => windows.with_f32_scales(),
        MainFormat::F32 => windows,
    }
}
