//! What the processes say to each other: MessagePack, one message behind the other, over pipes.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::super::moves::Decoded;

/// How payloads go from one process to the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Way {
    /// By NIXL.
    #[cfg(feature = "nixl")]
    Nixl,
    /// Through files in this directory.
    Files(PathBuf),
    /// They do not: nothing but positions goes over.
    Counts,
}

impl Way {
    /// NIXL where it is, else files in `directory`.
    pub fn choose(directory: &Path) -> Self {
        #[cfg(feature = "nixl")]
        if std::env::var_os("DSV4_NIXL").is_some() {
            return Self::Nixl;
        }
        Self::Files(directory.to_owned())
    }

    /// What it is called in results.
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

/// What a decode process is told.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToDecode {
    /// First of all.
    Begin(Way),
    /// A prompt is about to be computed.
    Open {
        /// Its place in the load.
        index: usize,
        /// Tokens that it reuses.
        reused: u32,
        /// Of the opening.
        manifest: Vec<u8>,
        /// Of the opening.
        payload: Vec<u8>,
    },
    /// So much of it is there.
    Ready {
        /// Its place in the load.
        index: usize,
        /// Of the source.
        epoch: u64,
        /// Of the source.
        lease: u64,
        /// Bytes.
        bytes: u64,
    },
    /// All of it is there.
    Offer {
        /// Its place in the load.
        index: usize,
        /// Of the offer.
        manifest: Vec<u8>,
        /// Of the offer.
        payload: Vec<u8>,
        /// When it was, by the clock of the machine.
        at_ms: f64,
    },
    /// In bookkeeping: all of it would be there.
    Counted {
        /// Its place in the load.
        index: usize,
        /// Tokens of its prompt.
        tokens: u32,
        /// Bytes that would move.
        bytes: u64,
        /// When it was.
        at_ms: f64,
    },
    /// It does not come: its prompt will be computed anew.
    Forget {
        /// Its place in the load.
        index: usize,
    },
    /// The answer to a claim.
    Claimed(bool),
    /// No more requests come.
    End,
    /// The replay was interrupted.
    Stop,
}

/// What a decode process says.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToPrefill {
    /// Whether it may go on with what it has read.
    Claim {
        /// Of the source.
        epoch: u64,
        /// Of the source.
        lease: u64,
    },
    /// All has ended.
    Done(Box<Decoded>),
}

/// Sends a message.
pub fn send(to: &mut impl Write, message: &impl Serialize) -> Result<()> {
    rmp_serde::encode::write(to, message).context("the other process does not listen")?;
    to.flush().context("the other process does not listen")
}

/// The next message; `None` at the end.
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
