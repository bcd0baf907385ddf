//! `dsv4-kv replay`: runs a load of requests through the cache, with or without its kernels.
//!
//! | module | what it holds |
//! |---|---|
//! | [`args`], [`place`], [`setup`], [`open`] | options, the device, everything derived from both, the cache |
//! | [`load`] | arrivals and lengths of requests, from a trace or synthetic |
//! | [`clock`], [`scheduler`] | virtual time, continuous batching |
//! | [`execute`], [`full`] | a step: bookkeeping alone, or with kernels |
//! | [`tensors`] | inputs and outputs of the kernels in a step, and the launches of a layer |
//! | [`source`], [`inputs`], [`select`] | the kernels' inputs: random values by token, and which queries gather entries |
//! | [`attend`] | attention in place for the queries that gather |
//! | [`history`], [`watch`], [`kept`] | sampled requests: their tokens, and the rows that are kept of their steps |
//! | [`verify`], [`entries`], [`lists`], [`verification`] | their comparison with the reference, and its result |
//! | [`mod@drive`], [`changes`], [`timeline`] | the loop, the changes that [`crate::soak`] makes between steps, and the record of the steps |
//! | `peers` | prompts in one process, answers in others; feature `peers` |
//! | [`moves`] | the outcome of requests that moved |
//! | [`latency`], [`limit`], [`service`], [`quantiles`] | the waiting times of requests, and their causes |
//! | [`summary`], [`reuse`], [`report`], [`histogram`] | the result: table and JSON, and the HTML page |

pub mod args;
mod attend;
pub mod changes;
pub mod clock;
pub mod drive;
pub mod entries;
pub mod execute;
pub mod full;
mod histogram;
pub mod history;
mod inputs;
mod kept;
mod latency;
mod limit;
mod lists;
pub mod load;
mod moves;
mod open;
#[cfg(feature = "peers")]
mod peers;
pub mod place;
mod quantiles;
mod report;
mod reuse;
pub mod scheduler;
mod select;
mod service;
pub mod setup;
pub mod source;
mod summary;
mod tensors;
mod timeline;
mod verification;
mod verify;
mod watch;

use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use dsv4_kv::device::{Backend, Device, EmuDevice, EmuOptions};
use dsv4_kv::kv_layout::config::ModelConfig;

pub use args::ReplayArgs;

use crate::interrupt::Interrupt;
use crate::outcome::Outcome;
use crate::output::{self, ReportFile};
use drive::{Replayed, drive};
use execute::{Bookkeeping, Execute};
use load::Request;
use open::{full_on, progress};
use place::Place;
use setup::Setup;
pub use summary::Summary;

/// Runs the command and prints its result.
///
/// The report's file is opened first and written last, so that no result is lost because the file cannot be opened.
pub fn run(args: &ReplayArgs) -> Result<Outcome> {
    if args.peer.is_some() {
        let place = Place::choose(args)?;
        let setup = Setup::new(args, &place)?;
        decode_for(place, &setup, &Interrupt::listen()?)?;
        return Ok(Outcome::Passed);
    }
    let trace = args.trace.as_deref().map(|path| ("--trace", path));
    let file = args.model.as_deref().filter(|name| ModelConfig::preset(name).is_none());
    let model = file.map(|name| ("--model", Path::new(name)));
    let inputs: Vec<_> = trace.into_iter().chain(model).collect();
    let report = args.report.as_deref().map(|path| ReportFile::open(path, &inputs)).transpose()?;
    let place = Place::choose(args)?;
    let setup = Setup::new(args, &place)?;
    note_unknown_prompts(args, &setup.load);
    let name = place.name();
    let interrupt = Interrupt::listen()?;
    let began = Instant::now();
    let replayed = match place {
        place if args.peers.is_some() => {
            replay_with(args.peers.unwrap_or(2), place, &setup, &interrupt)
        }
        Place::Ledger => replay_ledger(&setup, &interrupt),
        Place::Cpu => {
            let options = EmuOptions { memory: setup.memory, ..EmuOptions::default() };
            replay_on(EmuDevice::new(options), &setup, &interrupt)
        }
        Place::Cuda(device) => replay_on(device, &setup, &interrupt),
    }?;
    let summary = Summary::new(&setup, name, &replayed, began.elapsed());
    // If one of the two outputs cannot be written, the other still is.
    let printed = if args.json {
        output::print(serde_json::to_string_pretty(&summary)?)
    } else {
        output::print(summary.table().trim_fmt())
    };
    let reported = report.map_or(Ok(()), |file| write_report(file, &summary, &replayed));
    for example in &summary.mismatch_examples {
        output::note(format_args!("mismatch: {example}"));
    }
    let nothing = summary.nothing_shown(setup.sample.len());
    if let Some(why) = &nothing {
        output::note(why);
    }
    printed?;
    reported?;
    Ok(match (summary.mismatches, replayed.interrupted) {
        (1.., _) => Outcome::Mismatch,
        (0, true) => Outcome::Interrupted,
        (0, false) if nothing.is_some() => Outcome::Mismatch,
        (0, false) => Outcome::Passed,
    })
}

/// Says how many requests share no prefix because their lines in the trace have no `hash_ids`.
fn note_unknown_prompts(args: &ReplayArgs, load: &[Request]) {
    let unknown = load.iter().filter(|request| request.prompt.is_none()).count();
    let shares = !args.no_reuse && args.checkpoints != Some(0);
    if unknown > 0 && shares {
        output::note(format_args!(
            "note: {unknown} of {} requests have no hash_ids, which say what prompts have in common: they share no prefixes (--no-reuse if that is meant)",
            load.len()
        ));
    }
}

#[cfg(feature = "peers")]
use peers::{decode as decode_for, replay as replay_with};

/// Needs the feature `peers`.
#[cfg(not(feature = "peers"))]
fn decode_for(_: Place, _: &Setup, _: &Interrupt) -> Result<()> {
    Err(crate::error::InputError::NoPeers.into())
}

/// Needs the feature `peers`.
#[cfg(not(feature = "peers"))]
fn replay_with(_: u32, _: Place, _: &Setup, _: &Interrupt) -> Result<Replayed> {
    Err(crate::error::InputError::NoPeers.into())
}

fn write_report(file: ReportFile, summary: &Summary, replayed: &Replayed) -> Result<()> {
    Ok(file.write(&report::page(summary, &replayed.timeline, &replayed.latency)?)?)
}

/// Replays the bookkeeping alone, without a device.
fn replay_ledger(setup: &Setup, interrupt: &Interrupt) -> Result<Replayed> {
    replay_through(Bookkeeping::new(&setup.config)?, setup, interrupt)
}

/// Replays with kernels on `device`.
fn replay_on<B: Backend>(
    device: Device<B>,
    setup: &Setup,
    interrupt: &Interrupt,
) -> Result<Replayed> {
    replay_through(full_on(device, setup, setup.config.clone())?, setup, interrupt)
}

fn replay_through(cache: impl Execute, setup: &Setup, interrupt: &Interrupt) -> Result<Replayed> {
    let (load, progress) = ((&setup.load[..], setup.texts), progress(&setup.load));
    drive(cache, load, setup.limits(), setup.clock, &progress, interrupt)
}
