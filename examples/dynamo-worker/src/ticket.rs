//! The ticket by which a decode worker takes a request from a prefill worker. It travels in `disaggregated_params`,
//! which Dynamo does not interpret.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc;

use anyhow::{Context, Result};
use dsv4_kv_transfer::transport::Descriptor;
use dsv4_kv_transfer::{Control, Offer, Source};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::questions::{ANSWER_TIMEOUT, Question};

/// The version of tickets that this worker writes, and the only one that it reads.
const VERSION: u64 = 1;

/// An offer, and the address of the prefill worker that made it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    version: u64,
    /// The address at which to claim the request.
    pub control: SocketAddr,
    /// The manifest in hexadecimal.
    manifest: String,
    /// The descriptor of the payload in hexadecimal.
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
        Self { version: VERSION, control, manifest, payload }
    }

    /// The ticket of a value that has travelled; `None` for one that says that there is nothing to move.
    ///
    /// # Errors
    /// A ticket of another version, or a value that is no ticket.
    pub fn from_json(value: &Value) -> Result<Option<Self>> {
        if value.is_null() || value.as_object().is_some_and(Map::is_empty) {
            return Ok(None);
        }
        // Before the other fields, which another version may not have.
        let found = &value["version"];
        anyhow::ensure!(
            *found == VERSION,
            "a ticket has version {found}, and version {VERSION} is read; run prefill and decode workers of one version"
        );
        Ok(Some(Self::deserialize(value).context("a ticket has not the fields of its version")?))
    }

    /// The offer; `None` if the ticket is not valid hexadecimal.
    #[must_use]
    pub fn offer(&self) -> Option<Offer> {
        let payload = Descriptor(from_hex(&self.payload)?);
        Some(Offer { manifest: from_hex(&self.manifest)?, payload })
    }
}

/// The kind of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asks {
    /// Asks whether the decode worker may take the request.
    Claim = 0,
    /// Tells that the decode worker does not want the request.
    GivesUp = 1,
}

/// The kind of a question and its source; `None` if the kind is unknown.
#[must_use]
pub fn asked(question: Question) -> Option<(Asks, Source)> {
    let [epoch, lease] = [1, 9].map(|at| {
        let mut number = [0; 8];
        number.copy_from_slice(&question[at..at + 8]);
        u64::from_le_bytes(number)
    });
    let asks = match question[0] {
        0 => Asks::Claim,
        1 => Asks::GivesUp,
        _ => return None,
    };
    Some((asks, Source { epoch, lease }))
}

/// The control channel of a decode worker to a prefill worker. Each question is sent by a thread of its own, since an
/// answer may never arrive.
pub struct Remote {
    control: SocketAddr,
    answer: Option<mpsc::Receiver<Result<bool, String>>>,
}

impl Remote {
    /// The channel to the worker that listens at `control`.
    #[must_use]
    pub fn new(control: SocketAddr) -> Self {
        Self { control, answer: None }
    }

    fn send(
        &self,
        asks: Asks,
        source: Source,
    ) -> Result<mpsc::Receiver<Result<bool, String>>, String> {
        let (tell, told) = mpsc::channel();
        let control = self.control;
        let ask = move || {
            let answer = exchange(control, asks, source);
            // Sending fails if the answer comes too late.
            let _ = tell.send(answer.map_err(|error| format!("{control}: {error}")));
        };
        let thread = std::thread::Builder::new().name("asks".into()).spawn(ask);
        thread.map(|_| told).map_err(|error| error.to_string())
    }
}

fn exchange(control: SocketAddr, asks: Asks, source: Source) -> std::io::Result<bool> {
    let mut stream = TcpStream::connect_timeout(&control, ANSWER_TIMEOUT)?;
    stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
    let mut question: Question = [asks as u8; 17];
    question[1..9].copy_from_slice(&source.epoch.to_le_bytes());
    question[9..].copy_from_slice(&source.lease.to_le_bytes());
    stream.write_all(&question)?;
    let mut answer = [0];
    stream.read_exact(&mut answer)?;
    Ok(answer == [1])
}

impl Control for Remote {
    fn ask(&mut self, source: Source) -> Result<(), String> {
        self.answer = Some(self.send(Asks::Claim, source)?);
        Ok(())
    }

    fn answer(&mut self, _source: Source) -> Result<Option<bool>, String> {
        let Some(answer) = &self.answer else { return Ok(None) };
        match answer.try_recv() {
            Ok(answer) => answer.map(Some),
            Err(mpsc::TryRecvError::Empty) => Ok(None),
            Err(mpsc::TryRecvError::Disconnected) => Err("the thread that asked has ended".into()),
        }
    }

    fn give_up(&mut self, source: Source) {
        // If this message is lost, the lease expires.
        let _ = self.send(Asks::GivesUp, source);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Questions arrive as they were sent, and the sender does not wait for the answer.
    #[test]
    fn questions_are_read_as_they_were_asked() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut remote = Remote::new(listener.local_addr().unwrap());
        let source = Source { epoch: u64::MAX - 3, lease: 7 };
        remote.ask(source).unwrap();
        assert_eq!(remote.answer(source).unwrap(), None, "nobody has answered");
        let (mut asks, _) = listener.accept().unwrap();
        let mut question: Question = [9; 17];
        assert_eq!(asked(question), None);
        asks.read_exact(&mut question).unwrap();
        assert_eq!(asked(question), Some((Asks::Claim, source)));
        asks.write_all(&[1]).unwrap();
        let answer = std::iter::repeat_with(|| remote.answer(source).unwrap()).find_map(|it| it);
        assert_eq!(answer, Some(true));
        remote.give_up(source);
        let (mut told, _) = listener.accept().unwrap();
        told.read_exact(&mut question).unwrap();
        assert_eq!(asked(question), Some((Asks::GivesUp, source)));
    }

    #[test]
    fn a_ticket_is_the_offer_again() {
        let payload = Descriptor(b"a-1.payload".to_vec());
        let offer = Offer { manifest: (0..=255).collect(), payload };
        let ticket = Ticket::new("127.0.0.1:7".parse().unwrap(), &offer);
        let json = serde_json::to_value(&ticket).unwrap();
        let read = Ticket::from_json(&json).unwrap().expect("a ticket");
        assert_eq!(read.offer(), Some(offer));
        for wrong in ["0", "zz", "+1", "é"] {
            assert_eq!(
                Ticket { manifest: wrong.into(), ..ticket.clone() }.offer(),
                None,
                "{wrong}"
            );
        }
    }

    /// Nothing to move is no error. A ticket of another version is one that says so, whatever its fields are.
    #[test]
    fn a_ticket_is_of_one_version() {
        for nothing in [Value::Null, json!({})] {
            assert_eq!(Ticket::from_json(&nothing).unwrap(), None);
        }
        let payload = Descriptor(b"a-1.payload".to_vec());
        let ticket =
            Ticket::new("127.0.0.1:7".parse().unwrap(), &Offer { manifest: vec![1], payload });
        let mut newer = serde_json::to_value(&ticket).unwrap();
        newer["version"] = json!(2);
        let mut short = serde_json::to_value(&ticket).unwrap();
        short.as_object_mut().unwrap().remove("payload");
        for (wrong, why) in [
            (newer, "version 2, and version 1 is read"),
            (json!({ "version": 3 }), "version 3, and version 1 is read"),
            (json!({ "control": "127.0.0.1:7" }), "version null, and version 1 is read"),
            (json!("ticket"), "version null"),
            (short, "payload"),
        ] {
            let error = format!("{:#}", Ticket::from_json(&wrong).unwrap_err());
            assert!(error.contains(why), "{error}");
        }
    }
}
