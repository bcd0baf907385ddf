//! `dsv4-kv replay`: a load of requests through the cache, with or without its kernels.
//!
//! | module | what it holds |
//! |---|---|
//! | [`args`], [`place`], [`setup`] | options, where it runs, all that follows from both |
//! | [`clock`], [`scheduler`] | virtual time, continuous batching |
//! | [`execute`], [`full`] | a step: bookkeeping alone, or with kernels |
//! | [`source`], [`select`] | the kernels' input: random values, and which queries gather entries |
//! | [`history`], [`watch`], [`kept`] | sampled requests: their tokens, and what is kept of their steps |
//! | [`verify`], [`entries`], [`lists`], [`explain`] | their comparison with the reference |
//! | [`drive`] | the loop |
//! | [`summary`], [`report`] | the result: table and JSON, and the HTML page |

mod args;
mod clock;
mod drive;
mod entries;
mod execute;
mod explain;
mod full;
mod history;
mod kept;
mod lists;
mod load;
mod place;
mod report;
mod scheduler;
mod select;
mod setup;
mod source;
mod summary;
mod verify;
mod watch;

use std::time::Instant;

use anyhow::Result;
use bytesize::ByteSize;
use dsv4_kv::KvError;
use dsv4_kv::device::{Device, DeviceError, EmuDevice, EmuOptions};
use indicatif::{ProgressBar, ProgressStyle};

pub use args::ReplayArgs;

use crate::Verdict;
use crate::error::InputError;
use drive::{Replayed, drive};
use dsv4_kv_cli::trace::Arrival;
use execute::Bookkeeping;
use full::Full;
use place::Place;
use setup::Setup;
use summary::Summary;

/// Runs the command and prints its result.
pub fn run(args: &ReplayArgs) -> Result<Verdict> {
    let place = Place::choose(args)?;
    let setup = Setup::new(args, &place)?;
    let name = place.name();
    let began = Instant::now();
    let replayed = match place {
        Place::Ledger => replay_ledger(&setup),
        Place::Cpu => {
            let options = EmuOptions { memory: setup.memory, ..EmuOptions::default() };
            replay_on(EmuDevice::new(options), &setup)
        }
        Place::Cuda(device) => replay_on(device, &setup),
    }?;
    let summary = Summary::new(&setup.config, name, &replayed, began.elapsed());
    if let Some(path) = &args.report {
        let page = report::page(&summary, &replayed.samples)?;
        std::fs::write(path, page)
            .map_err(|source| InputError::Report { path: path.clone(), source })?;
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&summary)?);
    } else {
        println!("{}", summary.table());
    }
    for example in &summary.mismatch_examples {
        eprintln!("mismatch: {example}");
    }
    Ok(if summary.mismatches == 0 { Verdict::Passed } else { Verdict::Failed })
}

/// The replay without a device.
fn replay_ledger(setup: &Setup) -> Result<Replayed> {
    let cache = Bookkeeping::new(&setup.config)?;
    drive(cache, &setup.load, setup.limits(), setup.clock, &progress(&setup.load))
}

/// The replay with its kernels on `device`.
fn replay_on<D: Device>(device: D, setup: &Setup) -> Result<Replayed> {
    let (config, indexer) = (setup.config.clone(), setup.indexer.as_ref());
    let cache = Full::new(device, config, indexer, setup.seed, setup.sample.clone(), setup.queries);
    let cache = cache.map_err(|error| match error {
        KvError::Device(DeviceError::OutOfMemory { .. }) => InputError::Cache {
            model: setup.config.model.name.clone(),
            memory: ByteSize(setup.memory),
            left: ByteSize(setup.memory),
            source: error,
        }
        .into(),
        error => anyhow::Error::from(error),
    })?;
    drive(cache, &setup.load, setup.limits(), setup.clock, &progress(&setup.load))
}

/// A bar on the terminal's error stream, in tokens; nothing where that is no terminal.
fn progress(load: &[Arrival]) -> ProgressBar {
    let tokens = load.iter().map(|arrival| u64::from(arrival.cached_tokens())).sum();
    let style = ProgressStyle::with_template("{bar:40} {percent:>3} % of {len} tokens, {eta} left")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(tokens).with_style(style)
}
