//! Scratch memory of a router, which one launch at a time uses.

use dsv4_kv_device::{Backend, Buffer, Event, Memory, Stream};
use kv_layout::router::{DECODE_SLICES, DECODE_TOKENS};

use crate::error::RouterError;
use crate::ops::DecodeScratch;
use crate::selection::Selection;

/// Scratch memory of a router, and the stream of its last use. A use takes `&mut self`, and is ordered after the last
/// one if that was in another stream.
pub(crate) struct Scratch<B: Backend> {
    decode: DecodeScratch<B>,
    /// `[max_tokens, experts]` f32: logits, for batches of more than 64 tokens.
    logits: Buffer<B, f32>,
    /// The stream of the last use, and an event by which another stream waits for that use.
    last: Stream<B>,
    ended: Event<B>,
    /// Whether the counters must be zeroed before the next use.
    unclean: bool,
}

impl<B: Backend> Scratch<B> {
    /// Allocates scratch memory, with room for the logits of `logits` tokens.
    pub fn new(stream: &Stream<B>, selection: Selection, logits: u32) -> Result<Self, RouterError> {
        let device = stream.device();
        Ok(Self {
            decode: DecodeScratch {
                activations: device
                    .allocate("router activations", selection.of_experts(DECODE_TOKENS))?,
                arrivals: device.allocate("router arrivals", DECODE_SLICES.into())?,
            },
            logits: device.allocate("router logits", selection.of_experts(logits))?,
            last: stream.clone(),
            ended: device.event()?,
            unclean: false,
        })
    }

    /// Where the thread blocks of a decode launch exchange results.
    pub fn decode(&self) -> &DecodeScratch<B> {
        &self.decode
    }

    /// The logits, `[max_tokens, experts]` f32.
    pub fn logits(&self) -> &Buffer<B, f32> {
        &self.logits
    }

    /// All scratch memory, for a graph to retain.
    pub fn memory(&self) -> [Memory<B>; 3] {
        let DecodeScratch { activations, arrivals } = &self.decode;
        [activations.memory(), arrivals.memory(), self.logits.memory()]
    }

    /// Orders later work in `stream` after the last use, if that was in another stream, and zeroes counters that a failed
    /// use may have left.
    pub fn follow(&mut self, stream: &Stream<B>) -> Result<(), RouterError> {
        if self.last.id() != stream.id() {
            self.last.record(&self.ended)?;
            stream.wait_for(&self.ended)?;
            self.last = stream.clone();
        }
        if self.unclean {
            self.clean(stream)?;
            self.unclean = false;
        }
        Ok(())
    }

    /// Queues `launches`, which may use all scratch memory. While `stream` is captured, also by the program that owns it,
    /// nothing runs, so nothing is ordered.
    pub fn queue(
        &mut self,
        stream: &Stream<B>,
        launches: impl FnOnce(&Self) -> Result<(), RouterError>,
    ) -> Result<(), RouterError> {
        if stream.is_recorded()? {
            return launches(self);
        }
        // No other thread begins a capture between the launches, which would record some of them only.
        let _running = stream.running("routing a batch")?;
        self.follow(stream)?;
        let queued = launches(self);
        // A launch that did not end leaves counters that are not zero.
        self.unclean = queued.is_err() && self.clean(stream).is_err();
        queued
    }

    /// Waits for `stream`, and checks that every launch has reset its counters. If not, zeroes them and returns
    /// [`RouterError::Unfinished`].
    pub fn check(&mut self, stream: &Stream<B>) -> Result<(), RouterError> {
        let mut counts = [0; DECODE_SLICES as usize];
        stream.download(&self.decode.arrivals, 0, &mut counts)?;
        if counts == [0; DECODE_SLICES as usize] {
            return Ok(());
        }
        self.clean(stream)?;
        Err(RouterError::Unfinished { counts })
    }

    fn clean(&self, stream: &Stream<B>) -> Result<(), RouterError> {
        Ok(stream.fill(&self.decode.arrivals, 0)?)
    }
}

#[cfg(test)]
mod tests {
    use dsv4_kv_device::{DeviceError, EmuDevice, EmuOptions, Emulator};

    use super::*;

    type Emulated = (Stream<Emulator>, Scratch<Emulator>);

    fn scratch() -> Emulated {
        let stream = EmuDevice::new(EmuOptions::default()).stream().unwrap();
        let scratch = Scratch::new(&stream, Selection::new(64, 6, 1.0).unwrap(), 0).unwrap();
        (stream, scratch)
    }

    fn counts((stream, scratch): &Emulated) -> [u32; 8] {
        let mut counts = [0; 8];
        stream.download(&scratch.decode.arrivals, 0, &mut counts).unwrap();
        counts
    }

    /// Acts as a launch that has counted some of its thread blocks and then failed.
    fn fail(stream: &Stream<Emulator>, scratch: &Scratch<Emulator>) -> Result<(), RouterError> {
        stream.upload(&[3, 1], &scratch.decode.arrivals, 2)?;
        Err(DeviceError::NestedCapture.into())
    }

    #[test]
    fn a_launch_that_failed_leaves_counters_at_zero() {
        let (stream, mut scratch) = scratch();
        let error = scratch.queue(&stream, |scratch| fail(&stream, scratch)).unwrap_err();
        assert!(matches!(error, RouterError::Device(DeviceError::NestedCapture)), "{error}");
        assert!(!scratch.unclean);
        assert_eq!(counts(&(stream, scratch)), [0; 8]);
    }

    #[test]
    fn counters_that_could_not_be_zeroed_are_before_the_next_use() {
        let (stream, mut scratch) = scratch();
        fail(&stream, &scratch).unwrap_err();
        scratch.unclean = true;
        scratch
            .queue(&stream, |scratch| {
                let mut counts = [1; 8];
                stream.download(&scratch.decode.arrivals, 0, &mut counts)?;
                assert_eq!(counts, [0; 8]);
                Ok(())
            })
            .unwrap();
        assert!(!scratch.unclean);
    }

    #[test]
    fn counters_that_could_not_be_zeroed_are_before_a_replay() {
        let (stream, mut scratch) = scratch();
        fail(&stream, &scratch).unwrap_err();
        scratch.unclean = true;
        scratch.follow(&stream).unwrap();
        assert!(!scratch.unclean);
        assert_eq!(counts(&(stream, scratch)), [0; 8]);
    }

    #[test]
    fn counts_left_behind_are_reported_once() {
        let (stream, mut scratch) = scratch();
        scratch.check(&stream).unwrap();
        fail(&stream, &scratch).unwrap_err();
        let error = scratch.check(&stream).unwrap_err();
        let counted = matches!(error, RouterError::Unfinished { counts: [0, 0, 3, 1, 0, 0, 0, 0] });
        assert!(counted, "{error}");
        scratch.check(&stream).unwrap();
    }

    #[test]
    fn a_stream_of_another_device_changes_nothing() {
        let (stream, mut scratch) = scratch();
        let (other, _) = self::scratch();
        let error = scratch.queue(&other, |_| Ok(())).unwrap_err();
        assert!(matches!(error, RouterError::Device(DeviceError::ForeignDevice { .. })), "{error}");
        scratch.queue(&stream, |_| Ok(())).unwrap();
    }

    /// A use during capture is not ordered, and does not count as the last use.
    #[test]
    fn a_capture_does_not_wait_for_the_last_use() {
        let (stream, mut scratch) = scratch();
        let other = stream.device().stream().unwrap();
        let captured = other.capture(scratch.memory().to_vec(), || {
            let decode = scratch.decode.activations.clone();
            scratch.queue(&other, |_| Ok(other.fill(&decode, 1)?))
        });
        captured.unwrap();
        assert_eq!(scratch.last.id(), stream.id());
        scratch.queue(&other, |_| Ok(())).unwrap();
        assert_eq!(scratch.last.id(), other.id());
    }
}
