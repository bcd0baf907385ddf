//! Copies of a transfer, from the first device call until the host has waited for them.

use super::copy_streams::CopyStreams;
use crate::device::{Backend, HostCopies, HostUnit, Stream, Unsettled};
use crate::error::KvError;

/// The copies of a transfer.
pub(super) struct InFlightCopies<B: Backend> {
    copies: Option<HostCopies<B>>,
    /// The stream in which kernels may still run after the copies.
    kernels: Option<Stream<B>>,
    /// Whether all copies were queued. If not, the device failed, and none of the copied data is entered.
    is_whole: bool,
}

/// State of the copies of a transfer.
pub(super) enum CopyStatus<B: Backend> {
    /// They are under way.
    Running,
    /// They are done: the units that were written, and the bytes of all copies.
    Done(Vec<HostUnit<B>>, u64),
    /// Not all were queued.
    Lost,
}

impl<B: Backend> InFlightCopies<B> {
    /// No copies yet.
    pub fn new() -> Self {
        Self { copies: None, kernels: None, is_whole: false }
    }

    /// Queues them in the streams of a direction.
    pub fn queue(
        &mut self,
        streams: &mut CopyStreams<B>,
        queue: impl FnOnce(&mut CopyStreams<B>, &mut HostCopies<B>) -> Result<(), KvError>,
    ) -> Result<(), KvError> {
        let copies = self.copies.insert(HostCopies::new(&streams.copies)?);
        self.kernels = Some(streams.kernels.clone());
        queue(streams, copies)?;
        copies.end()?;
        // The stream of the copies waits for the last kernel.
        self.kernels = None;
        self.is_whole = true;
        Ok(())
    }

    /// The state of the copies. Waits for them with `waited`, or if not all were queued. On an error the state is
    /// unknown, and everything stays held until a later call succeeds.
    pub fn finish(&mut self, waited: bool) -> Result<CopyStatus<B>, KvError> {
        let Some(copies) = &self.copies else { return Ok(CopyStatus::Lost) };
        if self.is_whole && !waited && !copies.is_done()? {
            return Ok(CopyStatus::Running);
        }
        if let Some(kernels) = &self.kernels {
            kernels.synchronize()?;
        }
        let Some(copies) = self.copies.take() else { return Ok(CopyStatus::Lost) };
        let bytes = copies.bytes();
        match copies.settle() {
            Ok(units) if self.is_whole => Ok(CopyStatus::Done(units, bytes)),
            Ok(_) => Ok(CopyStatus::Lost),
            Err(unsettled) => {
                let Unsettled { copies, error } = *unsettled;
                self.copies = Some(copies);
                Err(error.into())
            }
        }
    }
}
