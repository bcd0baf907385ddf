//! A decode process, from its first message to its last.

use std::io::{BufReader, Stdin};
use std::sync::mpsc;

use anyhow::Result;
use dsv4_kv::CacheConfig;
use dsv4_kv::device::{Backend, Device, EmuDevice, EmuOptions};
use dsv4_kv_transfer::Transport;
use dsv4_kv_transfer::transport::Files;

use super::super::execute::Bookkeeping;
use super::super::moves::Decoded;
use super::super::open::full_on;
use super::super::place::Place;
use super::super::setup::Setup;
use super::counts::CountsIn;
use super::decode::Decode;
use super::message::{ToDecode, ToPrefill, Way, receive, send};
use super::takes::BytesIn;
use crate::interrupt::Interrupt;

/// Runs a decode process. Messages arrive on standard input, and are sent to standard output.
pub fn run(place: Place, setup: &Setup, interrupt: &Interrupt) -> Result<()> {
    let mut from = BufReader::new(std::io::stdin());
    let Some(ToDecode::Begin(way)) = receive(&mut from)? else {
        anyhow::bail!("--peer is for processes that `--peers` starts");
    };
    // It shares no prefixes: requests that arrive have their own blocks.
    let config = CacheConfig { num_checkpoints: 0, host_bytes: 0, ..setup.config.clone() };
    let decoded = match place {
        Place::Ledger => {
            let (inbox, _) = listen(from);
            let takes = CountsIn::new(&config);
            Decode::new(Bookkeeping::new(&config)?, takes, setup).run(&inbox, interrupt)
        }
        Place::Cpu => {
            let options = EmuOptions { memory: setup.memory, ..EmuOptions::default() };
            on(EmuDevice::new(options), (way, config), from, setup, interrupt)
        }
        Place::Cuda(device) => on(device, (way, config), from, setup, interrupt),
    }?;
    send(&mut std::io::stdout(), &ToPrefill::Done(Box::new(decoded)))
}

fn on<B: Backend>(
    device: Device<B>,
    (way, config): (Way, CacheConfig),
    from: BufReader<Stdin>,
    setup: &Setup,
    interrupt: &Interrupt,
) -> Result<Decoded> {
    match way {
        #[cfg(feature = "nixl")]
        Way::Nixl => {
            let nixl = dsv4_kv_transfer::transport::Nixl::open(&Default::default())?;
            over(device, (nixl, config), from, setup, interrupt)
        }
        Way::Files(directory) => {
            over(device, (Files::new(directory)?, config), from, setup, interrupt)
        }
        Way::Counts => anyhow::bail!("{way:?} moves no bytes"),
    }
}

fn over<B: Backend, T: Transport>(
    device: Device<B>,
    (transport, config): (T, CacheConfig),
    from: BufReader<Stdin>,
    setup: &Setup,
    interrupt: &Interrupt,
) -> Result<Decoded> {
    let cache = full_on(device, setup, config)?;
    let (inbox, answers) = listen(from);
    let takes = BytesIn::new(&cache, transport, setup, answers)?;
    Decode::new(cache, takes, setup).run(&inbox, interrupt)
}

/// Reads the pipe in a thread, and separates messages from answers to claims.
fn listen(mut from: BufReader<Stdin>) -> (mpsc::Receiver<ToDecode>, mpsc::Receiver<bool>) {
    let (messages, inbox) = mpsc::channel();
    let (answered, answers) = mpsc::channel();
    std::thread::spawn(move || {
        // At the end of the input, or after an invalid message, both channels close.
        while let Ok(Some(message)) = receive(&mut from) {
            let kept = match message {
                ToDecode::Claimed(held) => answered.send(held).is_ok(),
                message => messages.send(message).is_ok(),
            };
            if !kept {
                return;
            }
        }
    });
    (inbox, answers)
}
