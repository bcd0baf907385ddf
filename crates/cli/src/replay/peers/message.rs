//! The messages between the processes: MessagePack, one message after the other, over pipes.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::super::moves::Decoded;

/// The transport of payloads between processes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Way {
    /// By NIXL.
    #[cfg(feature = "nixl")]
    Nixl,
    /// Through files in this directory.
    Files(PathBuf),
    /// None: only positions are sent.
    Counts,
}

impl Way {
    /// NIXL if `DSV4_NIXL` names it and it is built in, else files in `directory`.
    pub fn choose(directory: &Path) -> Self {
        let is_named = std::env::var_os("DSV4_NIXL").is_some();
        #[cfg(feature = "nixl")]
        if is_named {
            return Self::Nixl;
        }
        #[cfg(not(feature = "nixl"))]
        if is_named {
            crate::output::note(
                "note: DSV4_NIXL is set, but this program is built without the feature `nixl`: requests move through files",
            );
        }
        Self::Files(directory.to_owned())
    }

    /// Its name in results.
    pub fn name(&self) -> &'static str {
        match self {
            #[cfg(feature = "nixl")]
            Self::Nixl => "NIXL",
            Self::Files(directory) if directory.starts_with("/dev/shm") => "files in memory",
            Self::Files(_) => "files",
            Self::Counts => "none (bookkeeping)",
        }
    }
}

/// A message to a decode process.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToDecode {
    /// The first message: the transport.
    Begin(Way),
    /// A prompt will be computed.
    Open {
        /// Its index in the load.
        index: usize,
        /// Number of tokens that it reuses.
        reused: u32,
        /// Manifest of the opening.
        manifest: Vec<u8>,
        /// Payload descriptor of the opening.
        payload: Vec<u8>,
    },
    /// A part of the request can be read.
    Ready {
        /// Its index in the load.
        index: usize,
        /// Epoch of the source.
        epoch: u64,
        /// Lease of the source.
        lease: u64,
        /// Number of bytes that can be read.
        bytes: u64,
    },
    /// All of the request can be read.
    Offer {
        /// Its index in the load.
        index: usize,
        /// Manifest of the offer.
        manifest: Vec<u8>,
        /// Payload descriptor of the offer.
        payload: Vec<u8>,
        /// Time of the offer, by the machine's clock.
        at_ms: f64,
    },
    /// In bookkeeping: the whole request would have moved.
    Counted {
        /// Its index in the load.
        index: usize,
        /// Tokens of its prompt.
        tokens: u32,
        /// Bytes that would move.
        bytes: u64,
        /// Time of the message, by the machine's clock.
        at_ms: f64,
    },
    /// The request will not be offered; its prompt will be computed again.
    Forget {
        /// Its index in the load.
        index: usize,
    },
    /// The answer to a claim.
    Claimed(bool),
    /// No more requests come.
    End,
    /// The replay was interrupted.
    Stop,
}

/// A message to the prefill process.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToPrefill {
    /// Asks whether the decode process may enter the request that it has read.
    Claim {
        /// Epoch of the source.
        epoch: u64,
        /// Lease of the source.
        lease: u64,
    },
    /// All requests have ended.
    Done(Box<Decoded>),
}

/// Sends a message.
pub fn send(to: &mut impl Write, message: &impl Serialize) -> Result<()> {
    rmp_serde::encode::write(to, message).context("the other process does not listen")?;
    to.flush().context("the other process does not listen")
}

/// Reads the next message; `None` at the end.
pub fn receive<M: DeserializeOwned>(from: &mut impl Read) -> Result<Option<M>> {
    match rmp_serde::from_read(from) {
        Ok(message) => Ok(Some(message)),
        Err(rmp_serde::decode::Error::InvalidMarkerRead(error))
            if error.kind() == io::ErrorKind::UnexpectedEof =>
        {
            Ok(None)
        }
        Err(error) => Err(error).context("the other process says something else than messages"),
    }
}

/// Milliseconds of a clock that all processes of a machine share.
pub fn now_ms() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_in_order_and_what_is_cut_is_an_error() {
        let mut bytes = Vec::new();
        let open = |index| ToDecode::Open {
            index,
            reused: 3,
            manifest: vec![1, 200],
            payload: Vec::new(),
        };
        (0..2).for_each(|index| send(&mut bytes, &open(index)).expect("memory takes it"));
        let mut from = &bytes[..];
        for wanted in 0..2 {
            let message = receive(&mut from).expect("it is whole");
            assert!(
                matches!(message, Some(ToDecode::Open { index, reused: 3, .. }) if index == wanted)
            );
        }
        assert!(receive::<ToDecode>(&mut from).expect("the end").is_none());
        assert!(receive::<ToDecode>(&mut &bytes[..5]).is_err());
        assert!(receive::<ToDecode>(&mut &[0xC1][..]).is_err());
    }
}
