//! `--peers N`: this process computes the prompts, N - 1 others compute the answers. Requests move to them.
//!
//! | file | what it holds |
//! |---|---|
//! | `message.rs` | the messages between the processes |
//! | `link.rs` | a decode process, as seen from this process |
//! | `leave.rs` | the cache in which prompts are computed, and from which requests leave |
//! | `sends.rs`, `takes.rs` | bytes of requests that leave and that arrive |
//! | `counts.rs` | the same for bookkeeping, without bytes |
//! | `answers.rs`, `decode.rs` | a decode process, and its loop |
//! | `sum.rs` | the results of all processes, together with `moves.rs` of the replay |

mod answers;
mod counts;
mod decode;
mod leave;
mod link;
mod message;
mod sends;
mod sum;
mod takes;

pub use answers::run as decode;

use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use dsv4_kv::device::{Backend, Device, EmuDevice, EmuOptions};
use dsv4_kv_transfer::Transport;
use dsv4_kv_transfer::transport::Files;

use super::drive::{Replayed, drive};
use super::execute::{Bookkeeping, Execute};
use super::load::Request;
use super::open::{full_on, progress};
use super::place::Place;
use super::setup::Setup;
use crate::interrupt::Interrupt;
use counts::CountsOut;
use leave::{Leaving, Mover};
use link::Link;
use message::Way;
use sends::BytesOut;

/// Replays with the prompts in this process and the answers in `peers - 1` others.
pub fn replay(peers: u32, place: Place, setup: &Setup, interrupt: &Interrupt) -> Result<Replayed> {
    let way = match place {
        Place::Ledger => Way::Counts,
        _ => Way::choose(&exchange()?),
    };
    match place {
        Place::Ledger => {
            let cache = Bookkeeping::new(&setup.config)?;
            let mover = CountsOut::new(&setup.config);
            let links = links((peers, setup), &way, |_| false)?;
            through(Leaving::new(cache, mover, links, setup, interrupt), &way, setup, interrupt)
        }
        Place::Cpu => {
            let options = EmuOptions { memory: setup.memory, ..EmuOptions::default() };
            on(EmuDevice::new(options), (peers, &way), setup, interrupt)
        }
        Place::Cuda(device) => on(device, (peers, &way), setup, interrupt),
    }
}

/// The directory of the files through which requests move. All replays of a user have the same one, so that each
/// removes what killed ones have left in it ([`Files::new`]). The directory itself stays.
fn exchange() -> Result<PathBuf> {
    let memory = memory_directory();
    // `Files` refuses a directory of another user than the one who owns the process's new files.
    let user = tempfile::tempfile_in(&memory)?.metadata()?.uid();
    Ok(exchange_of(user, &memory))
}

/// The directory of `user` in `memory`. If its name is taken, by another user or by a link, one of another name.
fn exchange_of(user: u32, memory: &Path) -> PathBuf {
    let path = memory.join(format!("dsv4-kv-replay-{user}"));
    let is_own = match fs::symlink_metadata(&path) {
        Ok(found) => found.is_dir() && found.uid() == user,
        Err(error) => error.kind() == ErrorKind::NotFound,
    };
    if is_own {
        path
    } else {
        memory.join(format!("dsv4-kv-replay-{user}-{:016x}", RandomState::new().hash_one(user)))
    }
}

/// A directory whose files are in memory, if there is one.
fn memory_directory() -> PathBuf {
    let shared = PathBuf::from("/dev/shm");
    if shared.is_dir() { shared } else { std::env::temp_dir() }
}

fn on<B: Backend>(
    device: Device<B>,
    (peers, way): (u32, &Way),
    setup: &Setup,
    interrupt: &Interrupt,
) -> Result<Replayed> {
    match way {
        #[cfg(feature = "nixl")]
        Way::Nixl => {
            let nixl = dsv4_kv_transfer::transport::Nixl::open(&Default::default())?;
            over(device, nixl, (peers, way), setup, interrupt)
        }
        Way::Files(directory) => {
            over(device, Files::new(directory)?, (peers, way), setup, interrupt)
        }
        other => anyhow::bail!("{other:?} moves no bytes"),
    }
}

fn over<B: Backend, T: Transport + Send + 'static>(
    device: Device<B>,
    transport: T,
    (peers, way): (u32, &Way),
    setup: &Setup,
    interrupt: &Interrupt,
) -> Result<Replayed> {
    let cache = full_on(device, setup, setup.config.clone())?;
    let mover = BytesOut::new(&cache, transport, setup)?;
    let sender = mover.sender();
    let claims = move |source| sends::lock(&sender).claim(source);
    let links = links((peers, setup), way, claims)?;
    through(Leaving::new(cache, mover, links, setup, interrupt), way, setup, interrupt)
}

/// Starts the decode processes.
fn links(
    (peers, setup): (u32, &Setup),
    way: &Way,
    claims: impl Fn(dsv4_kv_transfer::Source) -> bool + Clone + Send + 'static,
) -> Result<Vec<Link>> {
    (1..peers).map(|number| Link::start((number, setup.memory), way, claims.clone())).collect()
}

/// Computes the prompts, and waits for all answers.
fn through<E: Execute, M: Mover<E>>(
    cache: Leaving<E, M>,
    way: &Way,
    setup: &Setup,
    interrupt: &Interrupt,
) -> Result<Replayed> {
    let load = prompts(setup);
    let progress = progress(&load);
    let load = (&load[..], setup.texts);
    let mut replayed = drive(cache, load, setup.limits(), setup.clock, &progress, interrupt)?;
    let moved = replayed.work.moved.as_mut().context("requests moved")?;
    moved.moves.transport = way.name().to_owned();
    replayed.finished = replayed.finished.saturating_sub(moved.sent) + moved.finished;
    replayed.latency.per_token.extend(std::mem::take(&mut moved.per_token));
    Ok(replayed)
}

/// The load without answers. A request whose full length does not fit keeps its answer, and is rejected.
fn prompts(setup: &Setup) -> Vec<Request> {
    let limits = setup.limits();
    let prompt = |request: &Request| {
        let fits = request.arrival.context_tokens() <= limits.most_tokens();
        let mut request = request.clone();
        request.arrival.output = if fits { 1 } else { request.arrival.output };
        request
    };
    setup.load.iter().map(prompt).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_taken_is_not_used() {
        let memory = tempfile::tempdir().expect("a directory");
        let user = memory.path().metadata().expect("it is there").uid();
        let own = exchange_of(user, memory.path());
        fs::create_dir(&own).expect("room for it");
        assert_eq!(exchange_of(user, memory.path()), own);
        let other = exchange_of(user + 1, memory.path());
        fs::create_dir(&other).expect("room for it");
        let instead = exchange_of(user + 1, memory.path());
        assert!(instead != other && !instead.exists(), "it belongs to another user");
        fs::remove_dir(&own).expect("it is empty");
        std::os::unix::fs::symlink(memory.path(), &own).expect("room for it");
        assert_ne!(exchange_of(user, memory.path()), own, "it is a link");
    }
}
