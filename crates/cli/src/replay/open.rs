//! The cache of a replay with its kernels, and the bar that shows how far it is.

use anyhow::Result;
use bytesize::ByteSize;
use dsv4_kv::device::{Backend, Device, DeviceError};
use dsv4_kv::{CacheConfig, KvError};
use indicatif::{ProgressBar, ProgressStyle};

use super::full::Full;
use super::load::Request;
use super::setup::Setup;
use crate::error::InputError;

/// A cache with its kernels on `device`.
pub fn full_on<B: Backend>(
    device: Device<B>,
    setup: &Setup,
    config: CacheConfig,
) -> Result<Full<B>> {
    let indexer = setup.indexer.as_ref();
    let cache = Full::new(device, config, indexer, setup.seed, setup.sample.clone(), setup.queries);
    cache.map_err(|error| match error {
        KvError::Device(DeviceError::OutOfMemory { .. }) => InputError::Cache {
            model: setup.config.model.name.clone(),
            memory: ByteSize(setup.memory),
            left: ByteSize(setup.memory),
            source: error,
        }
        .into(),
        error => anyhow::Error::from(error),
    })
}

/// A bar on the terminal's error stream, in tokens; nothing where that is no terminal.
pub fn progress(load: &[Request]) -> ProgressBar {
    let tokens = load.iter().map(|request| u64::from(request.arrival.cached_tokens())).sum();
    let style = ProgressStyle::with_template("{bar:40} {percent:>3} % of {len} tokens, {eta} left")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(tokens).with_style(style)
}
