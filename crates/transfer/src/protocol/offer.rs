//! The messages of the control channel.

use crate::image::Source;
use crate::transport::Descriptor;

/// A source sends this to a target before it has computed the request: what the request will be, and where its payload
/// will lie. The target reads as far as [`Ready`] says. An [`Offer`] follows at the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The manifest without digests, encoded.
    pub manifest: Vec<u8>,
    /// Where the payload is.
    pub payload: Descriptor,
}

/// How many bytes of a payload are ready, counted from its first byte. Ready bytes do not change any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The source that was opened.
    pub source: Source,
    /// Bytes that can be read.
    pub bytes: u64,
}

/// A source sends this to a target: what the request is, and where its payload can be read. It may travel over any
/// connection that the two have, for instance with the request itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The manifest, encoded.
    pub manifest: Vec<u8>,
    /// Where the payload is.
    pub payload: Descriptor,
}

/// The control channel, as a target sees it. No call may wait for the source, because the target's cache stands still
/// meanwhile.
pub trait Control {
    /// Asks the source whether the target may admit what it offered ([`Sender::claim`](super::Sender::claim)). If the
    /// source says yes, the request belongs to the target.
    ///
    /// # Errors
    /// The reason why the source cannot be asked.
    fn ask(&mut self, source: Source) -> Result<(), String>;

    /// The answer of the source; `None` until it arrives. An answer that arrives after [`Self::give_up`] is discarded.
    ///
    /// # Errors
    /// The reason why no answer will arrive. The source may have said yes all the same, so it is not known which side
    /// has the request; the request is then computed again.
    fn answer(&mut self, source: Source) -> Result<Option<bool>, String>;

    /// Tells the source, if it can be reached, that the target does not want what it offered, so that the source frees
    /// its memory before the lease expires ([`Sender::give_up`](super::Sender::give_up)). Losing this message does no
    /// harm.
    fn give_up(&mut self, source: Source);
}
