//! The experts and weights of a token have the same bits in every batch: every kernel adds the products of a logit in
//! one order (`kernels_gpu::router::order`).

use dsv4_kv::device::{Backend, Buffer, Device, Stream};
use dsv4_kv_router::Selection;
use dsv4_kv_router::ops::{self, DecodeScratch, ExpertSelection, GateProduct, Routing};
use dsv4_kv_tests::inputs::{download, upload_bf16};
use half::bf16;

use crate::router::decode::Case;
use crate::router::selection::{Answer, choice};

const SCALING: f32 = 1.5;
const SELECTED: u32 = 6;
/// Maximum tokens of a decode launch.
const DECODE: u32 = 64;

/// A layer on a device, and tokens from which batches are made.
struct Layer<B: Backend> {
    stream: Stream<B>,
    case: Case,
    selection: Selection,
    choice: ExpertSelection<B>,
    x: Buffer<B, bf16>,
    gate: Buffer<B, bf16>,
    scratch: DecodeScratch<B>,
    logits: Buffer<B, f32>,
}

impl<B: Backend> Layer<B> {
    fn new(device: &Device<B>, (hidden, experts): (u32, u32), tokens: u32, hash: bool) -> Self {
        let stream = device.stream().unwrap();
        let case = Case::random(hidden, experts, SELECTED, tokens, (hidden + experts).into());
        let selection = Selection::new(experts, SELECTED, SCALING).unwrap();
        let choice = choice(&stream, selection, hash, (&case.bias, &case.table));
        let room = |rows: u32| u64::from(rows) * u64::from(experts);
        Self {
            selection,
            choice,
            x: upload_bf16(&stream, &case.x),
            gate: upload_bf16(&stream, &case.gate),
            scratch: DecodeScratch {
                activations: device.allocate("activations", room(DECODE)).unwrap(),
                arrivals: device.allocate("arrivals", 8).unwrap(),
            },
            logits: device.allocate("logits", room(tokens)).unwrap(),
            stream,
            case,
        }
    }

    /// The results of the tokens `first..first + count` as a batch: by the decode launch, with the bits of their
    /// activations, or, if `tiled`, by the tiled product, with the bits of their logits.
    fn batch(&self, first: u32, count: u32, tiled: bool) -> (Answer, Vec<u32>) {
        let Self { stream, case, selection, choice, logits, scratch, .. } = self;
        let hidden = case.hidden;
        let of = |tokens: u32| u64::from(tokens) * u64::from(hidden);
        let x = self.x.slice(of(first), of(count)).unwrap();
        let product = GateProduct { x: &x, gate: &self.gate, hidden };
        let token = &case.token[first as usize..][..count as usize];
        let launch = |routing: &Routing<'_, B>| {
            if !tiled {
                return ops::route_decode(stream, routing, &product, scratch);
            }
            ops::gate_logits(stream, *selection, count, &product, logits)?;
            ops::route_logits(stream, routing, logits)
        };
        let answer = Answer::of(stream, *selection, choice, token, launch);
        assert_eq!(answer.faults, 0);
        let kept = if tiled { logits } else { &scratch.activations };
        let used = (count * selection.experts()) as usize;
        (answer, download(stream, kept)[..used].iter().map(|value| value.to_bits()).collect())
    }

    /// Compares batches of each of these sizes, which begin at several tokens, with one batch of all tokens and with
    /// each other.
    fn check(&self, sizes: &[u32]) {
        let tokens = self.case.tokens();
        let experts = self.selection.experts() as usize;
        let (whole, logits) = self.batch(0, tokens, true);
        // For each token, its activations in the first decode launch that had it.
        let mut activations: Vec<Option<Vec<u32>>> = vec![None; tokens as usize];
        for &size in sizes {
            for first in [0, 5.min(tokens - size), tokens - size] {
                for tiled in [size > DECODE, true] {
                    let (answer, sums) = self.batch(first, size, tiled);
                    self.assert_same(&answer, &whole, first);
                    for (token, sums) in (first as usize..).zip(sums.chunks(experts)) {
                        if tiled {
                            assert_eq!(
                                sums,
                                &logits[token * experts..][..experts],
                                "{}",
                                self.at(token)
                            );
                        } else {
                            let seen = activations[token].get_or_insert_with(|| sums.to_vec());
                            assert_eq!(sums, seen, "{}", self.at(token));
                        }
                    }
                }
            }
        }
    }

    /// Compares the results of a batch, whose first token is `first`, with those of the same tokens in `whole`.
    fn assert_same(&self, answer: &Answer, whole: &Answer, first: u32) {
        let selected = SELECTED as usize;
        for (i, (ids, weights)) in
            answer.ids.chunks(selected).zip(answer.weights.chunks(selected)).enumerate()
        {
            let token = first as usize + i;
            let all = token * selected..(token + 1) * selected;
            assert_eq!(ids, &whole.ids[all.clone()], "{}", self.at(token));
            let bits = |weights: &[f32]| weights.iter().map(|w| w.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(weights), bits(&whole.weights[all]), "{}", self.at(token));
        }
    }

    fn at(&self, token: usize) -> String {
        format!("token {token}, {} x {}", self.case.hidden, self.case.experts)
    }
}

/// Sizes on both sides of every limit at which another kernel, or another form of a kernel, takes over.
const SIZES: [u32; 11] = [1, 2, 31, 32, 33, 63, 64, 65, 200, 513, 700];
/// Number of tokens with which two blocks share a tile, for any number of experts.
const MANY: u32 = 6200;

fn check<B: Backend>(device: &Device<B>, shapes: &[(u32, u32)], hash: bool, sizes: &[u32]) {
    let tokens = *sizes.iter().max().expect("some");
    for &shape in shapes {
        Layer::new(device, shape, tokens, hash).check(sizes);
    }
}

/// So few chunks of the hidden state that some slices and parts have none, and so many that a part has several.
pub fn a_token_has_the_same_bits_in_every_batch<B: Backend>(device: &Device<B>) {
    check(device, &[(64, 32)], true, &SIZES);
    check(device, &[(96, 64)], false, &[1, 31, 64, 513]);
    check(device, &[(160, 288), (1120, 32)], false, &[1, 32, 33, 65]);
    check(device, &[(4096, 32)], false, &[2, 33]);
    // So many tiles that two blocks share one (`LogitsSplit`). With 65 tokens there are eight tiles.
    check(device, &[(160, 512)], false, &[33, 65, 1536]);
}

/// As above, with all sizes and the shapes of released models.
pub fn every_shape_has_the_same_bits_in_every_batch<B: Backend>(device: &Device<B>) {
    let of = |hidden: u32| [32, 256, 384].map(|experts| (hidden, experts));
    let shapes = [64, 96, 160, 4096, 7168].map(of).concat();
    for hash in [false, true] {
        check(device, &shapes, hash, &SIZES);
        check(device, &shapes, hash, &[64, 65, MANY]);
    }
}
