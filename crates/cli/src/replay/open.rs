//! The cache of a replay with kernels, and its progress bar.

use anyhow::Result;
use bytesize::ByteSize;
use dsv4_kv::device::{Backend, Device, DeviceError};
use dsv4_kv::{CacheConfig, KvError};
use indicatif::ProgressBar;

use super::full::Full;
use super::load::{self, Request};
use super::setup::Setup;
use crate::error::InputError;
use crate::progress;

/// Creates a cache with kernels on `device`.
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

/// A bar in tokens of the load.
pub fn progress(load: &[Request]) -> ProgressBar {
    progress::tokens(load::tokens(load))
}
