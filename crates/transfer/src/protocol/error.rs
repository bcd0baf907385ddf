//! Reasons why a transfer failed.

use std::time::Duration;

use dsv4_kv::RequestId;
use dsv4_kv::transfer::{MoveError, Positions};

use super::claim::Claim;
use super::transfer_id::TransferId;
use crate::image::{ImageError, ImageKind, Source};
use crate::transport::TransportError;

/// Most sources that were asked and that a receiver remembers one by one.
pub(super) const REMEMBERED: usize = 1 << 16;

/// Why a transfer failed. The target has admitted nothing; it has lost only time.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The offer or the payload is not what it should be.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The transport failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// A cache refused the request, or its device failed.
    #[error(transparent)]
    Cache(#[from] MoveError),
    /// The read did not end in time. Its memory is quarantined until it ends with bytes that match their digests, or
    /// until the transport is fenced.
    #[error(
        "the read of {source_of:?} has not ended after {after:?}, with {done} of {needed} bytes there; its memory is quarantined; compute the request again, or let its source offer it anew"
    )]
    Deadline {
        /// The source of the payload.
        source_of: Source,
        /// How long it had.
        after: Duration,
        /// Bytes whose reads have ended.
        done: u64,
        /// Bytes of the payload.
        needed: u64,
    },
    /// The transport was closed because of reads that did not end, and cannot be reopened.
    /// [`Receiver::poll`](super::Receiver::poll) tries again.
    #[error(
        "the transport was ended and could not be made again, {tries} times: {why}; poll, and try again later"
    )]
    NoTransport {
        /// Number of attempts.
        tries: u32,
        /// The error of the last attempt.
        why: String,
    },
    /// The source no longer holds what it offered, or has given it to another target.
    #[error("the source does not hold {source_of:?} any more")]
    NotHeld {
        /// The source of the offer.
        source_of: Source,
    },
    /// The source was already asked for this payload, or was told that this target does not need it; or the offer is so
    /// old that neither is known. The answer to the first question may arrive late and could be taken for the answer to
    /// a second one, and the source's memory may hold another payload by now. If a claim from the first copy of the
    /// offer is still open, the source belongs to that claim: do not give the source up
    /// ([`Control::give_up`](super::Control::give_up)).
    #[error(
        "{source_of:?} was asked for or given up before, or {REMEMBERED} others since it was offered; drop this copy of its offer, or let its source offer the request anew"
    )]
    AskedBefore {
        /// The source of the offer.
        source_of: Source,
    },
    /// The same offer or opening arrived before: its source is being read, or its payload was verified and not yet
    /// dropped. The source belongs to that transfer: do not give it up ([`Control::give_up`](super::Control::give_up)).
    #[error(
        "{source_of:?} is read already, or was verified; drop this copy of its offer, and do not give its source up"
    )]
    TakenBefore {
        /// The source of the offer.
        source_of: Source,
    },
    /// The source has not answered the claim in time. It may have said yes and released the request.
    #[error(
        "the source has not said until {until:?} whether it holds {source_of:?}; compute the request again"
    )]
    NotAnswered {
        /// The source of the offer.
        source_of: Source,
        /// How long it had.
        until: Duration,
    },
    /// A claim of another cache, which is returned: only that cache can enter its request. The source's answer was not
    /// taken.
    #[error("the claim is of another cache; settle it there, or give it up there")]
    ForeignClaim(Box<Claim>),
    /// The source cannot be asked whether it still holds what it offered.
    #[error("the source cannot be asked whether it holds what it offered: {why}")]
    Unreachable {
        /// Why.
        why: String,
    },
    /// All memory for reads is taken, by payloads or by quarantine.
    #[error(
        "a payload of {needed} bytes does not fit: {taken} of {budget} bytes are taken, {quarantined} of them quarantined; drop verified payloads, call `Receiver::clear_quarantine`, or give the receiver more"
    )]
    NoMemory {
        /// Bytes wanted.
        needed: u64,
        /// Bytes of reads, of verified payloads that were not dropped, and of quarantine.
        taken: u64,
        /// Bytes of quarantine.
        quarantined: u64,
        /// Most bytes.
        budget: u64,
    },
    /// All memory of a sender is taken: by open transfers, by offers that were not claimed, and by memory that is kept after
    /// them ([`Sender::with_linger`](super::Sender::with_linger)).
    #[error(
        "a payload of {needed} bytes does not fit: open transfers, offers, and memory that is kept after them hold {held} of {limit} bytes; wait until some are claimed, and call `Sender::expire` regularly"
    )]
    SenderFull {
        /// Bytes wanted.
        needed: u64,
        /// Bytes of open transfers and offers, of memory that is kept after them, and of memory that the transport could not
        /// give back.
        held: u64,
        /// Most bytes.
        limit: u64,
    },
    /// The image is of a prefix where a request is needed, or of a request where a prefix is needed.
    #[error("this is the image of a {found:?}, and that of a {needed:?} is admitted here")]
    OtherKind {
        /// The kind that is needed.
        needed: ImageKind,
        /// The kind of the image.
        found: ImageKind,
    },
    /// The reservation is for other positions than those of the request.
    #[error("the reservation is for {reserved:?}, and the request is at {request:?}")]
    OtherReservation {
        /// The positions of the reservation.
        reserved: Positions,
        /// Where the request is.
        request: Positions,
    },
    /// The transfer belongs to another request.
    #[error("the transfer is of {opened}, not of {found}; take the parts of that one")]
    OtherRequest {
        /// The request of the transfer.
        opened: RequestId,
        /// The request whose parts were given.
        found: RequestId,
    },
    /// The request has advanced past the positions of the transfer.
    #[error(
        "the transfer is of a request at {opened:?}, which has moved on to {found:?}; make another"
    )]
    MovedOn {
        /// The positions of the transfer.
        opened: Positions,
        /// Where the request is.
        found: Positions,
    },
    /// Parts of the request were not copied yet.
    #[error(
        "{there} of {needed} parts are there; take the others when the request is as far as the transfer"
    )]
    NotWhole {
        /// Number of parts that were copied.
        there: usize,
        /// Number of parts of the request.
        needed: usize,
    },
    /// The transfer has ended, or never began.
    #[error("{id:?} has ended, or is another receiver's")]
    NoSuchTransfer {
        /// Which.
        id: TransferId,
    },
    /// A message names another source than that of the transfer.
    #[error("the transfer is of {asked:?}, and this is of {source_of:?}")]
    OtherSource {
        /// The source of the transfer.
        asked: Source,
        /// The source that the message names.
        source_of: Source,
    },
    /// The source of an opened request has fallen silent.
    #[error(
        "{source_of:?} has said nothing for {after:?}, with {done} of {needed} bytes there; compute its request again"
    )]
    Quiet {
        /// The source of the payload.
        source_of: Source,
        /// How long it was silent.
        after: Duration,
        /// Bytes that were read.
        done: u64,
        /// Bytes of the payload.
        needed: u64,
    },
}
