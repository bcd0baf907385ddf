//! The checkpoint's model, with progress.

use std::path::Path;

use anyhow::Result;
use dsv4_kv_checkpoint::Checkpoint;
use dsv4_kv_model::{Model, ModelError};
use indicatif::{ProgressBar, ProgressStyle};

use crate::error::InputError;

/// Reads a checkpoint, with a bar of its bytes.
///
/// # Errors
/// [`InputError::Checkpoint`].
pub fn load(folder: &Path) -> Result<Model> {
    let style = "{wide_bar} {bytes}/{total_bytes} of weights";
    let bar = ProgressBar::new(0).with_style(ProgressStyle::with_template(style)?);
    let shown = bar.clone();
    let progress = move |done, total| {
        shown.set_length(total);
        shown.set_position(done);
    };
    let model = Checkpoint::open_with(folder, progress)
        .map_err(ModelError::from)
        .and_then(|checkpoint| Model::load(&checkpoint, |_| {}))
        .map_err(InputError::Checkpoint)?;
    bar.finish_and_clear();
    Ok(model)
}
