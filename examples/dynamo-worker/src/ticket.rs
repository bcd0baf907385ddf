//! What a decode worker needs to take a request from a prefill worker. It travels in `disaggregated_params`, which Dynamo
//! reads nothing of.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use dsv4_kv_transfer::transport::Descriptor;
use dsv4_kv_transfer::{Control, Offer, Source};
use serde::{Deserialize, Serialize};

/// How long the prefill worker may take to answer.
const ANSWER: Duration = Duration::from_secs(2);

/// An offer, and who made it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// Where to ask whether the request may be taken.
    pub control: SocketAddr,
    /// The manifest in hexadecimal.
    manifest: String,
    /// Where the payload is, in hexadecimal.
    payload: String,
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return None };
    let digit = |byte: u8| char::from(byte).to_digit(16);
    pairs.iter().map(|&[high, low]| Some((digit(high)? << 4 | digit(low)?) as u8)).collect()
}

impl Ticket {
    /// The ticket of an offer.
    #[must_use]
    pub fn new(control: SocketAddr, offer: &Offer) -> Self {
        let (manifest, payload) = (to_hex(&offer.manifest), to_hex(&offer.payload.0));
        Self { control, manifest, payload }
    }

    /// The offer; `None` if it is not one.
    #[must_use]
    pub fn offer(&self) -> Option<Offer> {
        let payload = Descriptor(from_hex(&self.payload)?);
        Some(Offer { manifest: from_hex(&self.manifest)?, payload })
    }
}

/// The prefill worker, as a decode worker reaches it.
pub struct Remote(pub SocketAddr);

/// A question: epoch and lease, little-endian. The answer is one byte.
pub type Question = [u8; 16];

/// The source that a question is about.
#[must_use]
pub fn source_of(question: Question) -> Source {
    let [epoch, lease] = [0, 8].map(|at| {
        let mut number = [0; 8];
        number.copy_from_slice(&question[at..at + 8]);
        u64::from_le_bytes(number)
    });
    Source { epoch, lease }
}

impl Control for Remote {
    fn claim(&mut self, source: Source) -> Result<bool, String> {
        let ask = || -> std::io::Result<bool> {
            let mut stream = TcpStream::connect_timeout(&self.0, ANSWER)?;
            stream.set_read_timeout(Some(ANSWER))?;
            stream.write_all(&source.epoch.to_le_bytes())?;
            stream.write_all(&source.lease.to_le_bytes())?;
            let mut answer = [0];
            stream.read_exact(&mut answer)?;
            Ok(answer == [1])
        };
        ask().map_err(|error| format!("{}: {error}", self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ticket_is_the_offer_again() {
        let payload = Descriptor(b"a-1.payload".to_vec());
        let offer = Offer { manifest: (0..=255).collect(), payload };
        let ticket = Ticket::new("127.0.0.1:7".parse().unwrap(), &offer);
        let json = serde_json::to_value(&ticket).unwrap();
        let read: Ticket = serde_json::from_value(json).unwrap();
        assert_eq!(read.offer(), Some(offer));
        for wrong in ["0", "zz", "+1", "é"] {
            assert_eq!(
                Ticket { manifest: wrong.into(), ..ticket.clone() }.offer(),
                None,
                "{wrong}"
            );
        }
    }
}
