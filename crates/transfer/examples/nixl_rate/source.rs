//! The source process. It prints its offer, and waits until its standard input is closed.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use dsv4_kv_transfer::Transport;
use dsv4_kv_transfer::protocol::Offer;
use dsv4_kv_transfer::transport::{Descriptor, Nixl, NixlOptions};

use crate::payload::{self, Payload};

/// The environment variable of the source process: the kind of its memory, and the number of tokens.
const SOURCE: &str = "DSV4_NIXL_RATE_SOURCE";
/// The prefix of its offer, since libraries may print too.
const ANSWER: &str = "offer ";

/// The value of the variable, if this process is the source.
pub fn kind() -> Option<String> {
    std::env::var(SOURCE).ok()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(hex: &str) -> Result<Vec<u8>> {
    ensure!(hex.len().is_multiple_of(2) && hex.is_ascii(), "{} hex digits", hex.len());
    let digits = (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16));
    Ok(digits.collect::<Result<_, _>>()?)
}

/// Runs the source.
pub fn run(kind: &str) -> Result<()> {
    let (kind, tokens) = kind.split_once(' ').context("a kind of memory and tokens")?;
    let payload = Payload::new(tokens.parse()?);
    let bytes = payload.pattern();
    let mut region = payload::storage(kind, 0)?.region(bytes.len())?;
    region.write(0, &bytes)?;
    let mut nixl = Nixl::open(&NixlOptions::default())?;
    let memory = nixl.register(region)?;
    let (manifest, from) = (payload.manifest(&bytes).encode(), nixl.publish(&memory)?);
    println!("{ANSWER}{} {}", hex(&manifest), hex(&from.0));
    // Wait until the other process has ended.
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// The source process, as the target sees it.
pub struct Peer {
    child: Child,
}

impl Peer {
    pub fn start(kind: &str, tokens: u32) -> Result<Self> {
        let child = Command::new(std::env::current_exe()?)
            .env(SOURCE, format!("{kind} {tokens}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        Ok(Self { child })
    }

    /// The offer of the source.
    pub fn offer(&mut self) -> Result<Offer> {
        let lines = BufReader::new(self.child.stdout.take().context("it is asked once")?).lines();
        for line in lines {
            let line = line?;
            if let Some((manifest, payload)) =
                line.strip_prefix(ANSWER).and_then(|answer| answer.split_once(' '))
            {
                let payload = Descriptor(unhex(payload)?);
                return Ok(Offer { manifest: unhex(manifest)?, payload });
            }
        }
        anyhow::bail!("the process with the payload has ended")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
