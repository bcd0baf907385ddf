//! Why a request did not come.

use std::time::Duration;

use dsv4_kv::RequestId;
use dsv4_kv::transfer::{MoveError, Positions};

use super::transfer_id::TransferId;
use crate::image::{ImageError, ImageKind, Source};
use crate::transport::TransportError;

/// Sources that were asked and are remembered one by one, at most.
pub(super) const REMEMBERED: usize = 1 << 16;

/// Why a request did not come. The target has not admitted it, and has lost nothing but the time.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// What was offered, or what came, is not what it should be.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The transport failed.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// A cache refused, or its device failed.
    #[error(transparent)]
    Cache(#[from] MoveError),
    /// The read did not end in time. Its memory is quarantined until it does, or the transport is fenced.
    #[error("the read has not ended after {after:?}; its memory is quarantined")]
    Deadline {
        /// How long it had.
        after: Duration,
    },
    /// The transport was ended because of reads that did not end, and cannot be made again. It is tried again by
    /// [`Receiver::poll`](super::Receiver::poll).
    #[error(
        "the transport was ended and could not be made again, {tries} times: {why}; poll, and try again later"
    )]
    NoTransport {
        /// How often it was tried.
        tries: u32,
        /// Why it failed the last time.
        why: String,
    },
    /// The source does not hold what it offered any more, or has given it to someone else.
    #[error("the source does not hold {source_of:?} any more")]
    NotHeld {
        /// What it had offered.
        source_of: Source,
    },
    /// The source was asked for this payload before, or was told that nobody needs it, or it is so old that nobody knows. Its answer may
    /// come late, and nothing tells it from another; and its memory may have another payload. If the first copy of the offer is a claim still, the source is that claim's: it is not to be given
    /// up ([`Control::give_up`](super::Control::give_up)).
    #[error(
        "{source_of:?} was asked for or given up before, or {REMEMBERED} others since it was offered; drop this copy of its offer, or let its source offer the request anew"
    )]
    AskedBefore {
        /// What it had offered.
        source_of: Source,
    },
    /// The offer or opening came before: its source is read, or its payload was verified and is not dropped. The source is that
    /// transfer's: it is not to be given up ([`Control::give_up`](super::Control::give_up)).
    #[error(
        "{source_of:?} is read already, or was verified; drop this copy of its offer, and do not give its source up"
    )]
    TakenBefore {
        /// What was offered.
        source_of: Source,
    },
    /// The source has not said in its time whether it still holds what it offered. It may have given the request up.
    #[error(
        "the source has not said until {until:?} whether it holds {source_of:?}; compute the request again"
    )]
    NotAnswered {
        /// What it had offered.
        source_of: Source,
        /// How long it had.
        until: Duration,
    },
    /// The source cannot be asked whether it still holds what it offered.
    #[error("the source cannot be asked whether it holds what it offered: {why}")]
    Unreachable {
        /// Why.
        why: String,
    },
    /// All memory for reads is taken, by reads that go on or by quarantine.
    #[error(
        "a payload of {needed} bytes does not fit: {taken} of {budget} bytes are taken, {quarantined} of them quarantined"
    )]
    NoMemory {
        /// Bytes wanted.
        needed: u64,
        /// Bytes of all reads, those of payloads that were not admitted yet included, and of quarantine.
        taken: u64,
        /// Bytes of quarantine.
        quarantined: u64,
        /// Most bytes.
        budget: u64,
    },
    /// All memory of a sender is taken, by drafts and by offers that nobody has claimed.
    #[error(
        "a payload of {needed} bytes does not fit: drafts and offers hold {held} of {limit} bytes; wait until some are claimed, or end those whose time is over"
    )]
    SenderFull {
        /// Bytes wanted.
        needed: u64,
        /// Bytes of drafts and offers, and of memory that the transport could not give back.
        held: u64,
        /// Most bytes.
        limit: u64,
    },
    /// The image of a prefix where that of a request is due, or the other way round.
    #[error("this is the image of a {found:?}, and that of a {needed:?} is admitted here")]
    OtherKind {
        /// What is due.
        needed: ImageKind,
        /// What it is.
        found: ImageKind,
    },
    /// The room is for a request that is elsewhere.
    #[error("room was reserved for {room:?}, and the request is at {request:?}")]
    OtherRoom {
        /// What was reserved for.
        room: Positions,
        /// Where the request is.
        request: Positions,
    },
    /// The draft is of another request.
    #[error("the draft is of {drafted}, not of {found}; take the parts of that one")]
    OtherRequest {
        /// Whose it is.
        drafted: RequestId,
        /// Whose parts there were.
        found: RequestId,
    },
    /// The request has gone past what was drafted.
    #[error(
        "the draft is of a request at {drafted:?}, which has moved on to {found:?}; make another"
    )]
    MovedOn {
        /// What it was made for.
        drafted: Positions,
        /// Where the request is.
        found: Positions,
    },
    /// Parts of the request are missing.
    #[error(
        "{there} of {needed} parts are there; take the others when the request is as far as the draft"
    )]
    NotWhole {
        /// Parts that are there.
        there: usize,
        /// Parts that it has.
        needed: usize,
    },
    /// The transfer has ended, or never began.
    #[error("{id:?} has ended, or is another receiver's")]
    NoSuchTransfer {
        /// Which.
        id: TransferId,
    },
    /// What was said is of another request than the transfer.
    #[error("the transfer is of {asked:?}, and this is of {source_of:?}")]
    OtherSource {
        /// What was opened.
        asked: Source,
        /// What this is of.
        source_of: Source,
    },
    /// The source of a request that was opened said nothing any more.
    #[error("the source has said nothing for {after:?}")]
    Quiet {
        /// How long.
        after: Duration,
    },
}
