//! The workspace of a launch of attention: garbage before the launch, and counters that are 0 after it.

use dsv4_kv::device::{Backend, Device, Stream};
use dsv4_kv::ops::{AttentionExchange, SplitWorkspace};

use crate::inputs::download;

/// A byte of which BF16 and f32 elements are NaN.
const GARBAGE: u8 = 0xFF;

/// Memory that a launch may use besides its arguments.
pub struct Workspace<B: Backend> {
    pub splits: Option<SplitWorkspace<B>>,
    pub exchange: Option<AttentionExchange<B>>,
}

impl<B: Backend> Workspace<B> {
    /// For `splits` splits of keys, if there are any, and for `spread` clusters of spread queries, if more than 0.
    pub fn new(device: &Device<B>, stream: &Stream<B>, splits: Option<u32>, spread: u32) -> Self {
        let splits = splits.map(|clusters| SplitWorkspace::new(device, clusters).unwrap());
        let exchange = (spread > 0).then(|| AttentionExchange::new(device, spread).unwrap());
        if let Some(of) = &splits {
            of.partial_outputs().into_iter().for_each(|plane| stream.fill(plane, GARBAGE).unwrap());
        }
        if let Some(of) = &exchange {
            of.partial_outputs().into_iter().for_each(|plane| stream.fill(plane, GARBAGE).unwrap());
            stream.fill(of.softmax_weights(), GARBAGE).unwrap();
        }
        Self { splits, exchange }
    }

    /// Asserts that each counter is 0 again, as the next launch requires.
    pub fn assert_ready(&self, stream: &Stream<B>) {
        let Self { splits, exchange } = self;
        let of_splits = splits.iter().map(SplitWorkspace::counters);
        for counters in of_splits.chain(exchange.iter().map(AttentionExchange::counters)) {
            assert!(download(stream, counters).iter().all(|&count: &u32| count == 0), "counters");
        }
    }
}
