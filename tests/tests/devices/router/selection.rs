//! The selection kernels of the router compared with the oracle: ids are exact, weights to 1e-6, and both devices give
//! equal bits.

use dsv4_kv::device::{Backend, Device, DeviceError, Stream};
use dsv4_kv_oracle::router as oracle;
use dsv4_kv_router::ops::{self, ExpertSelection, HashTable, Routing};
use dsv4_kv_router::{RouterError, Selection};
use dsv4_kv_tests::golden;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use dsv4_kv_tests::inputs::{assert_same, download, upload};

const SCALING: f32 = 1.5;
/// Numbers of experts: the most and the least of each kernel, and some between.
const EXPERTS: [u32; 7] = [32, 64, 256, 288, 384, 416, 512];
/// Fills outputs before a launch.
const CANARY: i32 = 0x5A5A;

/// The results of a launch: experts and weights of every token.
#[derive(Clone, PartialEq, Debug)]
pub struct Answer {
    pub ids: Vec<i32>,
    pub weights: Vec<f32>,
    pub faults: u32,
}

impl Answer {
    /// Runs `launch` for these token ids. The outputs have room for one more token, whose row must stay as it is.
    pub fn of<B: Backend>(
        stream: &Stream<B>,
        selection: Selection,
        choice: &ExpertSelection<B>,
        token: &[i32],
        launch: impl FnOnce(&Routing<'_, B>) -> Result<(), RouterError>,
    ) -> Self {
        let (tokens, selected) = (token.len(), selection.selected() as usize);
        let room = (tokens + 1) * selected;
        let ids = &upload(stream, &vec![CANARY; room]);
        let weights = &upload(stream, &vec![CANARY as f32; room]);
        let faults = &upload(stream, &[0]);
        let (tokens, token) = (tokens as u32, &upload(stream, token));
        let routing = Routing { selection, choice, tokens, token, ids, weights, faults };
        launch(&routing).unwrap();
        let (mut ids, mut weights) = (download(stream, ids), download(stream, weights));
        let used = token.len() as usize * selected;
        assert!(ids.split_off(used).iter().all(|&id| id == CANARY));
        assert!(weights.split_off(used).iter().all(|&weight| weight == CANARY as f32));
        Self { ids, weights, faults: download(stream, faults)[0] }
    }
}

/// The input of the choice: the table (`[vocabulary, selected]`) if `hash`, else the bias.
pub fn choice<B: Backend>(
    stream: &Stream<B>,
    selection: Selection,
    hash: bool,
    (bias, table): (&[f32], &[i32]),
) -> ExpertSelection<B> {
    if hash {
        let vocabulary = table.len() as u32 / selection.selected();
        ExpertSelection::Table(HashTable { table: upload(stream, table).into(), vocabulary })
    } else {
        ExpertSelection::Bias(upload(stream, bias).into())
    }
}

/// The inputs of a batch of tokens, and the number of experts per token.
#[derive(Clone)]
struct Case {
    experts: u32,
    selected: u32,
    /// `[tokens]`
    token: Vec<i32>,
    /// `[tokens, experts]`
    logits: Vec<f32>,
    /// `[experts]`
    bias: Vec<f32>,
    /// `[vocabulary, selected]`
    table: Vec<i32>,
}

impl Case {
    /// Random logits of several magnitudes, and a table of random experts.
    fn random(experts: u32, selected: u32, tokens: usize, seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let mut logits = Vec::new();
        for _ in 0..tokens {
            let size = 2f32.powi(random.random_range(-3..7));
            logits.extend((0..experts).map(|_| random.random_range(-size..size)));
        }
        let bias = (0..experts).map(|_| random.random_range(-0.5..0.5)).collect();
        let vocabulary = 50;
        let table = (0..vocabulary * selected).map(|_| random.random_range(0..experts as i32));
        let table = table.collect();
        let token = (0..tokens).map(|_| random.random_range(0..vocabulary as i32)).collect();
        Self { experts, selected, token, logits, bias, table }
    }

    fn row(&self, token: usize) -> Vec<f64> {
        let experts = self.experts as usize;
        self.logits[token * experts..][..experts].iter().map(|&x| f64::from(x)).collect()
    }

    fn run<B: Backend>(&self, device: &Device<B>, hash: bool) -> Answer {
        let stream = &device.stream().unwrap();
        let selection = Selection::new(self.experts, self.selected, SCALING).unwrap();
        let choice = choice(stream, selection, hash, (&self.bias, &self.table));
        let logits = upload(stream, &self.logits);
        Answer::of(stream, selection, &choice, &self.token, |routing| {
            ops::route_logits(stream, routing, &logits)
        })
    }

    /// The oracle's result for a token that is not padding.
    fn selected_by_oracle(&self, token: usize) -> oracle::Routed {
        let bias: Vec<f64> = self.bias.iter().map(|&bias| f64::from(bias)).collect();
        oracle::select(&self.row(token), &bias, self.selected as usize, SCALING.into())
    }

    /// Runs `activation_topk` and compares every token whose selection is clear enough for f32. Returns their number.
    fn check_selection<B: Backend>(&self, device: &Device<B>, least_gap: f64) -> usize {
        let answer = self.run(device, false);
        let selected = self.selected as usize;
        let mut checked = 0;
        for token in 0..self.token.len() {
            let want = self.selected_by_oracle(token);
            if want.gap >= least_gap {
                let at = token * selected..(token + 1) * selected;
                assert_ids(&answer.ids[at.clone()], &want, &self.row(token), &self.bias);
                assert_weights(
                    &answer.weights[at.clone()],
                    &oracle::weights(&self.row(token), &answer.ids[at], SCALING.into()),
                );
                checked += 1;
            }
        }
        assert_eq!(answer.faults, 0);
        checked
    }
}

/// Asserts the same experts in the same order, except that two experts may have changed places if f32 cannot tell their
/// scores apart.
fn assert_ids(got: &[i32], want: &oracle::Routed, logits: &[f64], bias: &[f32]) {
    let score = |id: i32| oracle::activation(logits[id as usize]) + f64::from(bias[id as usize]);
    for (&got_id, &want_id) in got.iter().zip(&want.ids) {
        let (a, b) = (score(got_id), score(want_id));
        let near = (a - b).abs() <= 1e-6 * a.abs().max(b.abs());
        assert!(got_id == want_id || near, "{got:?} for {:?}", want.ids);
    }
    assert_same_set(got, &want.ids);
}

/// Asserts the same experts in any order.
pub fn assert_same_set(got: &[i32], want: &[i32]) {
    let sorted = |ids: &[i32]| {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids
    };
    assert_eq!(sorted(got), sorted(want));
}

fn assert_weights(got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (&got, &want) in got.iter().zip(want) {
        let got = f64::from(got);
        assert!((got - want).abs() <= 1e-6 * want.abs() + 1e-20, "{got} for {want}");
    }
}

/// The golden rows: the shape of V4-Flash, with edge rows of zeros, ties, and large and small logits.
fn golden_case() -> (Case, golden::Array<i32>) {
    let load = |name| golden::load::<f32>(name).unwrap().data;
    let tokens = golden::load::<i64>("hash_input_ids").unwrap().data;
    let case = Case {
        experts: 256,
        selected: 6,
        token: tokens.iter().map(|&token| token as i32).collect(),
        logits: load("router_logits"),
        bias: load("router_bias"),
        table: golden::load("hash_tid2eid").unwrap().data,
    };
    (case, golden::load("router_topk_idx").unwrap())
}

pub fn selection_equals_the_golden_rows<B: Backend>(device: &Device<B>) {
    let (case, ids) = golden_case();
    let answer = case.run(device, false);
    assert_same(&answer.ids, &ids.data, "ids");
    let want: Vec<f32> = golden::load("router_topk_w").unwrap().data;
    assert_weights(&answer.weights, &want.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
    assert_eq!(answer.faults, 0);
}

pub fn hash_equals_the_golden_rows<B: Backend>(device: &Device<B>) {
    let (case, _) = golden_case();
    let answer = case.run(device, true);
    let listed = |&token: &i32| &case.table[token as usize * 6..][..6];
    let want: Vec<i32> = case.token.iter().flat_map(listed).copied().collect();
    assert_same(&answer.ids, &want, "ids");
    let want: Vec<f32> = golden::load("hash_topk_w").unwrap().data;
    assert_weights(&answer.weights, &want.iter().map(|&x| f64::from(x)).collect::<Vec<_>>());
    assert_eq!(answer.faults, 0);
}

pub fn selection_equals_the_oracle<B: Backend>(device: &Device<B>) {
    for experts in EXPERTS {
        for selected in 1..=8 {
            let case = Case::random(experts, selected, 13, u64::from(8 * experts + selected));
            let checked = case.check_selection(device, 1e-5);
            assert!(checked >= 10, "{checked} of 13 rows are decided at {experts} experts");
        }
    }
}

pub fn hash_equals_the_oracle<B: Backend>(device: &Device<B>) {
    for experts in EXPERTS {
        for selected in [1, 6, 8] {
            let case = Case::random(experts, selected, 37, u64::from(8 * experts + selected));
            let answer = case.run(device, true);
            let selected = selected as usize;
            let rows = answer.ids.chunks(selected).zip(answer.weights.chunks(selected));
            for (token, (ids, weights)) in rows.enumerate() {
                let listed = &case.table[case.token[token] as usize * selected..][..selected];
                assert_eq!(ids, listed);
                assert_weights(weights, &oracle::weights(&case.row(token), ids, SCALING.into()));
            }
            assert_eq!(answer.faults, 0);
        }
    }
}

/// Few different logits and no bias, so that nearly all scores are equal to others. Equal bits are equal scores, so the
/// order is exact.
pub fn equal_scores_go_to_the_lower_expert<B: Backend>(device: &Device<B>) {
    for experts in EXPERTS {
        for values in [1, 2, 5] {
            let mut case = Case::random(experts, 8, 9, 1);
            let mut random = StdRng::seed_from_u64(u64::from(experts + values));
            case.logits.fill_with(|| random.random_range(0..values) as f32 - 2.0);
            case.bias.fill(-0.0);
            let answer = case.run(device, false);
            for (token, ids) in answer.ids.chunks(8).enumerate() {
                assert_eq!(ids, case.selected_by_oracle(token).ids);
            }
        }
    }
}

pub fn what_is_no_number_ranks_last_and_is_counted<B: Backend>(device: &Device<B>) {
    for experts in EXPERTS {
        let mut case = Case::random(experts, 6, 5, 3);
        let row = |token: usize| token * experts as usize;
        let all = experts as usize;
        // By token: a NaN on the best expert; NaN on all experts but three; NaN on all; an infinity of each sign. And a
        // NaN bias.
        let best = case.selected_by_oracle(0).ids[0] as usize;
        case.logits[row(0) + best] = f32::NAN;
        case.logits[row(1)..row(2)].fill(-f32::NAN);
        for expert in [all - 1, 17, 5] {
            case.logits[row(1) + expert] = expert as f32 - 20.0;
        }
        case.logits[row(2)..row(3)].fill(f32::NAN);
        case.logits[row(3) + 9] = f32::INFINITY;
        case.logits[row(3) + 8] = f32::NEG_INFINITY;
        case.bias[30] = f32::NAN;
        let answer = case.run(device, false);
        // The NaN bias counts in five rows, less those in which the logit of the same expert is NaN too.
        let counted = 1 + (all - 3) + all + 5 - if best == 30 { 1 } else { 0 } - 2;
        assert_eq!(answer.faults as usize, counted, "{experts} experts");
        let ids: Vec<&[i32]> = answer.ids.chunks(6).collect();
        let weights: Vec<&[f32]> = answer.weights.chunks(6).collect();
        assert!(!ids[0].contains(&(best as i32)) && !ids[0].contains(&30));
        let by_score: Vec<i32> = case.selected_by_oracle(1).ids;
        assert_eq!(ids[1], by_score);
        assert!(weights[1][3..].iter().all(|&weight| weight == 0.0), "{:?}", weights[1]);
        assert!((weights[1].iter().sum::<f32>() - SCALING).abs() < 1e-5);
        assert_eq!((ids[2], weights[2]), (&[0, 1, 2, 3, 4, 5][..], &[0.0; 6][..]));
        assert_eq!((ids[3][0], weights[3][0]), (9, SCALING));
        assert!(weights[3][1..].iter().all(|&weight| weight < 1e-15), "{:?}", weights[3]);
    }
}

/// Padding has no experts, whatever its logits are. Hash routing refuses token ids that do not exist.
pub fn padding_and_unknown_tokens_get_no_expert<B: Backend>(device: &Device<B>) {
    for hash in [false, true] {
        let mut case = Case::random(256, 6, 21, 4);
        let whole = case.run(device, hash);
        for token in [0, 7, 8, 20] {
            case.token[token] = -1;
            case.logits[token * 256..][..256].fill(f32::NAN);
        }
        let answer = case.run(device, hash);
        assert_eq!(answer.faults, 0);
        for token in 0..21 {
            let at = token * 6..token * 6 + 6;
            let (ids, weights) = (&answer.ids[at.clone()], &answer.weights[at.clone()]);
            if case.token[token] == -1 {
                assert_eq!((ids, weights), (&[-1; 6][..], &[0.0; 6][..]));
            } else {
                assert_eq!((ids, weights), (&whole.ids[at.clone()], &whole.weights[at]));
            }
        }
    }
    let mut case = Case::random(256, 6, 4, 5);
    case.token = vec![50, i32::MIN, 2, 3];
    case.table[2 * 6..][..6].copy_from_slice(&[256, 0, -1, i32::MIN, 1, i32::MAX]);
    case.logits[2 * 256] = f32::NAN;
    let answer = case.run(device, true);
    assert_eq!(answer.faults, 2 + 4 + 1);
    assert_eq!(&answer.ids[..12], [-1; 12]);
    assert_eq!(&answer.weights[..12], [0.0; 12]);
    assert_eq!(&answer.ids[12..18], [-1, 0, -1, -1, 1, -1]);
    assert_eq!(&answer.weights[12..18], [0.0, 0.0, 0.0, 0.0, SCALING, 0.0]);
}

pub fn wrong_shapes_are_refused<B: Backend>(device: &Device<B>) {
    for (experts, selected) in [(0, 6), (31, 6), (48, 6), (544, 6), (256, 0), (256, 9)] {
        let error = Selection::new(experts, selected, SCALING).unwrap_err();
        let wrong = if selected == 6 { experts } else { selected };
        let named = matches!(error, RouterError::Selection { value, .. } if value == wrong);
        assert!(named, "{error}");
    }
    for scaling in [f32::NAN, f32::INFINITY, -1.0, 0.0, 1e-40, 1.1e6] {
        let error = Selection::new(64, 6, scaling).unwrap_err();
        assert!(matches!(error, RouterError::Config { setting: "scaling", .. }), "{error}");
    }
    let stream = device.stream().unwrap();
    let selection = Selection::new(64, 6, SCALING).unwrap();
    let buffer = |len| device.allocate::<u32>("a shape", len).unwrap();
    // Lengths of [logits, bias or table, token, ids, weights, faults]; each buffer is too short in turn.
    for hash in [false, true] {
        let second = if hash { 10 * 6 } else { 64 };
        let needed = [3 * 64, second, 3, 18, 18, 1];
        for short in 0..=needed.len() {
            let sizes = core::array::from_fn(|i| needed[i] - u64::from(i == short));
            let [logits, extra, token, ids, weights, faults] = sizes.map(buffer);
            let (ids, weights) = (ids.cast().unwrap(), weights.cast().unwrap());
            let (logits, token) = (logits.cast().unwrap(), token.cast().unwrap());
            let choice = if hash {
                let table = extra.cast().unwrap().into();
                ExpertSelection::Table(HashTable { table, vocabulary: 10 })
            } else {
                ExpertSelection::Bias(extra.cast().unwrap().into())
            };
            let result = ops::route_logits(
                &stream,
                &Routing {
                    selection,
                    choice: &choice,
                    tokens: 3,
                    token: &token,
                    ids: &ids,
                    weights: &weights,
                    faults: &faults,
                },
                &logits,
            );
            match result {
                Ok(()) => assert_eq!(short, needed.len()),
                Err(RouterError::Device(DeviceError::TooShort {
                    found, needed: wanted, ..
                })) => {
                    assert_eq!((found + 4, wanted), (wanted, 4 * needed[short]));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// The results of the selection have the same bits on both devices.
pub fn both_devices_give_equal_bytes<A: Backend, B: Backend>(one: &Device<A>, other: &Device<B>) {
    for experts in EXPERTS {
        for hash in [false, true] {
            let case = Case::random(experts, 6, 200, u64::from(experts));
            assert_eq!(case.run(one, hash), case.run(other, hash), "{experts} experts");
        }
    }
    let (case, _) = golden_case();
    assert_eq!(case.run(one, false), case.run(other, false));
}
