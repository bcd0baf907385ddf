//! A router in several streams, on a device that defers its work and fails on demand.

use std::borrow::Cow;

use dsv4_kv::device::{Backend, Buffer, EmuOptions, Memory, Stream};
use dsv4_kv_router::{
    Batch, ChoiceWeights, Router, RouterConfig, RouterError, RouterWeights, Routing,
};
use dsv4_kv_tests::failing::{Failing, Failure};
use dsv4_kv_tests::inputs::{download, upload};
use half::bf16;

use crate::cache::recorded::{Capture, beside_a_capture};

const OPTIONS: EmuOptions = EmuOptions { memory: 1 << 20, seed: 1 };
/// So many tokens that a batch takes two launches.
const TOKENS: u32 = 70;
const EXPERTS: u32 = 32;

/// Rows of zeros, except a 1 at place `at(i)` of row `i`.
fn one_hot(rows: u32, at: impl Fn(u32) -> u32) -> Vec<bf16> {
    let mut values = vec![bf16::ZERO; (rows * EXPERTS) as usize];
    (0..rows).for_each(|row| values[(row * EXPERTS + at(row)) as usize] = bf16::ONE);
    values
}

/// A router whose gate is the identity: the expert of a token is the place of its 1.
fn router<B: Backend>(stream: &Stream<B>) -> Router<B> {
    let config = RouterConfig {
        hidden_size: EXPERTS,
        experts: EXPERTS,
        selected: 1,
        scaling: 1.0,
        vocabulary: 1,
        routing: vec![Routing::Learned],
    };
    let weights = RouterWeights {
        gate: Cow::Owned(one_hot(EXPERTS, |expert| expert)),
        choice: ChoiceWeights::Bias(Cow::Owned(vec![0.0; EXPERTS as usize])),
    };
    Router::new(stream, &config, &weights, TOKENS).unwrap()
}

/// A batch whose tokens go to the experts `first`, `first + 1`, ..
struct Tensors<B: Backend> {
    first: u32,
    x: Buffer<B, bf16>,
    token: Buffer<B, i32>,
    ids: Buffer<B, i32>,
    weights: Buffer<B, f32>,
}

impl<B: Backend> Tensors<B> {
    fn new(stream: &Stream<B>, first: u32) -> Self {
        let tokens = TOKENS as usize;
        Self {
            first,
            x: upload(stream, &one_hot(TOKENS, |token| (first + token) % EXPERTS)),
            token: upload(stream, &vec![0; tokens]),
            ids: upload(stream, &vec![-2; tokens]),
            weights: upload(stream, &vec![0.0; tokens]),
        }
    }

    fn memory(&self) -> [Memory<B>; 4] {
        let Self { x, token, ids, weights, .. } = self;
        [x.memory(), token.memory(), ids.memory(), weights.memory()]
    }

    fn route(&self, router: &mut Router<B>, stream: &Stream<B>) -> Result<(), RouterError> {
        let Self { x, token, ids, weights, .. } = self;
        router.route(stream, x, &Batch { tokens: TOKENS, token, ids, weights })
    }

    /// Whether the results of the batch have arrived, as read by a stream that waits for no other.
    fn is_routed(&self, aside: &Stream<B>) -> bool {
        let expert = |token| ((self.first + token) % EXPERTS) as i32;
        download(aside, &self.ids).into_iter().eq((0..TOKENS).map(expert))
    }
}

#[test]
fn a_call_in_another_stream_waits_for_the_last() {
    let device = Failing::late(OPTIONS);
    let [one, other, aside] = [(); 3].map(|()| device.stream().unwrap());
    let mut router = router(&one);
    let [first, second, third] = [3, 8, 5].map(|first| Tensors::new(&aside, first));
    first.route(&mut router, &one).unwrap();
    second.route(&mut router, &other).unwrap();
    assert!(!first.is_routed(&aside) && !second.is_routed(&aside), "nobody waited for them");
    other.synchronize().unwrap();
    assert!(first.is_routed(&aside), "the second call waits for the first");
    assert!(second.is_routed(&aside));
    third.route(&mut router, &other).unwrap();
    assert!(!third.is_routed(&aside), "nobody waited for it");
    router.check_faults(&one).unwrap();
    assert!(third.is_routed(&aside), "the check waits for the last call, in whatever stream");
}

/// Whatever device call fails in a router, the next batch is routed.
#[test]
fn a_router_goes_on_after_every_failure() {
    let device = Failing::late(OPTIONS);
    let [one, other, aside] = [(); 3].map(|()| device.stream().unwrap());
    let mut failed = Vec::new();
    for how in [Failure::Instead, Failure::After] {
        for call in 0.. {
            let mut router = router(&one);
            let [first, second] = [3, 8].map(|first| Tensors::new(&aside, first));
            device.backend().fail(call, how);
            let answer = first.route(&mut router, &other);
            let name = device.backend().failed();
            device.backend().fail_nothing();
            assert_eq!(answer.is_err(), name.is_some(), "{name:?}");
            second.route(&mut router, &one).unwrap();
            router.check_faults(&other).unwrap();
            assert!(second.is_routed(&aside), "after a failure of {name:?}");
            let Some(name) = name else { break };
            failed.push(name);
        }
    }
    for name in ["record", "wait in stream", "launch"] {
        assert!(failed.contains(&name), "{name} is not in {failed:?}");
    }
}

/// A capture that another thread begins while a batch is routed has all of its launches, or none.
#[test]
fn a_capture_has_a_whole_routing_or_nothing() {
    let device = Failing::emulated(OPTIONS);
    let (stream, aside) = (device.stream().unwrap(), device.stream().unwrap());
    let mut router = router(&stream);
    let (mut whole, mut refused) = (0, 0);
    for question in 0.. {
        let batch = Tensors::new(&stream, 5);
        let retained = [&router.memory()[..], &batch.memory()[..]].concat();
        let route = || batch.route(&mut router, &stream);
        let (result, capture) = beside_a_capture(&stream, &retained, question, route);
        match (&result, &capture) {
            (Ok(()), Some(Capture::Ended(2))) => whole += 1,
            (Ok(()), Some(Capture::Refused)) => refused += 1,
            (Ok(()), None | Some(Capture::Ended(0))) | (Err(_), Some(Capture::Ended(0))) => {}
            _ => panic!("{result:?}, {capture:?}"),
        }
        if result.is_err() || matches!(capture, Some(Capture::Ended(2))) {
            batch.route(&mut router, &stream).unwrap();
        }
        stream.synchronize().unwrap();
        assert!(batch.is_routed(&aside), "{question}: {capture:?}");
        if capture.is_none() {
            break;
        }
    }
    assert!(whole > 0 && refused > 0, "{whole} whole, {refused} refused");
}
