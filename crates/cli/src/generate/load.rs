//! Loads a model, with a progress bar; and what is refused when it is set up.

use std::path::Path;

use anyhow::Result;
use dsv4_kv::KvError;
use dsv4_kv::device::DeviceError;
use dsv4_kv_model::{Model, ModelError};
use dsv4_kv_model_files::ModelFiles;

use crate::error::InputError;
use crate::progress;

/// Reads a model's files, with a bar of its bytes.
///
/// # Errors
/// [`InputError::Model`].
pub fn load(folder: &Path) -> Result<Model> {
    let bar = progress::bar(0, "{wide_bar} {bytes}/{total_bytes} of weights, {left}");
    let shown = bar.clone();
    let show = move |done, total| {
        shown.set_length(total);
        shown.set_position(done);
    };
    let model = ModelFiles::open_with(folder, show)
        .map_err(ModelError::from)
        .and_then(|model_files| Model::load(&model_files, |_| {}))
        .map_err(InputError::Model)?;
    bar.finish_and_clear();
    Ok(model)
}

/// Limits that the cache or the device refuses come from options, so the input is refused. Anything else is a failure.
pub fn refused_engine(error: ModelError) -> anyhow::Error {
    match error {
        ModelError::Cache(KvError::Config { .. } | KvError::MemoryTooSmall { .. })
        | ModelError::Device(DeviceError::Argument { .. }) => InputError::Engine(error).into(),
        error => error.into(),
    }
}
