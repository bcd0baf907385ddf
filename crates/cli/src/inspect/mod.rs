//! `dsv4-kv inspect`: shows a map of what the cache holds for a request.
//!
//! | module | what it holds |
//! |---|---|
//! | [`args`] | options |
//! | [`read`] | blocks, rings and rows of a request, read from the device |
//! | [`rows`] | a stored row beside the values from which it was made |
//! | [`report`] | the result: a map and JSON |

mod args;
mod read;
mod report;
mod rows;

use anyhow::Result;
use dsv4_kv::device::{EmuDevice, EmuOptions, Emulator};

pub use args::InspectArgs;
pub use report::Report;

use crate::error::InputError;
use crate::outcome::Outcome;
use crate::output;
use crate::replay::drive::Drive;
use crate::replay::full::Full;
use crate::replay::load::Request;
use crate::replay::place::Place;
use crate::replay::setup::Setup;

/// Runs the command and prints its result.
pub fn run(args: &InspectArgs) -> Result<Outcome> {
    let report = inspect(args)?;
    if args.json {
        output::print(serde_json::to_string_pretty(&report)?)?;
    } else {
        output::print(&report)?;
    }
    Ok(Outcome::Passed)
}

/// Runs the load until the request has computed its prompt, and reads what the cache holds for it.
fn inspect(args: &InspectArgs) -> Result<Report> {
    let setup = Setup::new(&args.replay(), &Place::Cpu)?;
    let load = (&setup.load[..], setup.texts);
    let index = chosen(args, &setup)?;
    let input = setup.load[index].arrival.input;
    let (layer, layers) = (args.layer.unwrap_or(0), setup.config.model.layers.len());
    if layer as usize >= layers {
        return Err(InputError::NoSuchLayer { layer, layers }.into());
    }
    let options = EmuOptions { memory: setup.memory, ..EmuOptions::default() };
    let (config, indexer) = (setup.config.clone(), setup.indexer.as_ref());
    let cache =
        Full::new(EmuDevice::new(options), config, indexer, setup.seed, vec![], setup.queries)?;
    let mut drive = Drive::new(cache, load, setup.limits(), setup.clock);
    let (mut steps, mut reused) = (0, 0);
    loop {
        let before = drive.id_of(index);
        drive.admit()?;
        // More than once if it is preempted.
        if drive.id_of(index) != before {
            reused = tokens_of(&drive, index);
        }
        if drive.step()?.is_none() {
            return Err(InputError::EndedAtOnce { request: index }.into());
        }
        steps += 1;
        if tokens_of(&drive, index) >= input {
            break;
        }
    }
    read::report(args, &drive, (index, reused), steps)
}

/// The request to inspect: the one that was chosen, or the last that is still running when its prompt is computed.
fn chosen(args: &InspectArgs, setup: &Setup) -> Result<usize, InputError> {
    let most = setup.limits().most_tokens();
    let Some(request) = args.request else {
        let runs = |of: &Request| of.arrival.output > 1 && of.arrival.context_tokens() <= most;
        return setup.load.iter().rposition(runs).ok_or(InputError::NothingToInspect);
    };
    let (request, requests) = (request as usize, setup.load.len());
    let refused = InputError::NoSuchRequest { request, requests };
    let tokens = setup.load.get(request).ok_or(refused)?.arrival.context_tokens();
    if tokens > most {
        return Err(InputError::NeverFits { request, tokens, most });
    }
    Ok(request)
}

/// The tokens that a request has; 0 if it does not run.
fn tokens_of(drive: &Drive<'_, Full<Emulator>>, index: usize) -> u32 {
    drive.progress().find(|(of, _)| *of == index).map_or(0, |(_, tokens)| tokens)
}
