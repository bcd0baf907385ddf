//! What goes over the control channel.

use crate::image::Source;
use crate::transport::Descriptor;

/// What a source sends to a target before it has computed the request: what it will be, and how its payload can be read as
/// far as it is there ([`Ready`]). An [`Offer`] follows in the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opening {
    /// The manifest without digests, encoded.
    pub manifest: Vec<u8>,
    /// Where the payload is.
    pub payload: Descriptor,
}

/// How much of a payload is there, from its first byte on. It does not change any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// What was opened.
    pub source: Source,
    /// Bytes that can be read.
    pub bytes: u64,
}

/// What a source sends to a target: what the request is, and how its payload can be read. Over whatever connection the
/// two have already, for instance with the request itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The manifest, encoded.
    pub manifest: Vec<u8>,
    /// Where the payload is.
    pub payload: Descriptor,
}

/// The control channel, as a target sees it. No call waits for the source: the target's cache stands still meanwhile.
pub trait Control {
    /// Asks the source whether the target may admit what it offered, which is the target's from then on if so
    /// ([`Sender::claim`](super::Sender::claim)).
    ///
    /// # Errors
    /// Why the source cannot be asked.
    fn ask(&mut self, source: Source) -> Result<(), String>;

    /// What the source has answered; `None` as long as it has not. An answer that comes after [`Self::give_up`] is
    /// nobody's: it is thrown away.
    ///
    /// # Errors
    /// Why no answer will come. If the source may have said yes all the same, nobody knows whose the request is: it is
    /// computed again then.
    fn answer(&mut self, source: Source) -> Result<Option<bool>, String>;

    /// Tells the source, if it can be reached, that the target does not want what it offered, so that its memory is free
    /// before its time ([`Sender::give_up`](super::Sender::give_up)). A message that is lost does no harm.
    fn give_up(&mut self, source: Source);
}
