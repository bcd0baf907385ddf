//! The model compared with the results of transformers for the same checkpoint.
//!
//! `DSV4_E2E_DIR=DIR` selects a folder made by the generator of docs/end-to-end.md, or a folder of such folders,
//! instead of the two small ones in `tests/e2e`. Every test runs on the CPU, and on a GPU if one is found; with
//! `DSV4_REQUIRE_GPU=1` a missing GPU is a failure. The name of a test is `DEVICE::FOLDER::TEST`.
//!
//! | file | what it compares or holds |
//! |---|---|
//! | `whole_model.rs` | logits, end to end, for models that choose nothing by score |
//! | `each_layer.rs` | each layer, with the input of the reference: entries, keys, lists, experts, streams |
//! | `same_bits.rs` | batches, chunks, drafts and graphs: the same bits; and logits for the reference's tokens |
//! | `in_place.rs` | `whole_model` and `same_bits` with attention on the device |
//! | `released.rs` | `whole_model` with released names and configuration |
//! | `quantised.rs` | weights in the types of released checkpoints, compared with the same values in BF16 |
//! | `nvfp4.rs` | indexers with weights in NVFP4, compared with the same values in BF16 |
//! | `mutations.rs` | models with one part broken: `whole_model` or `each_layer` must fail |
//! | `bits.rs`, `stored.rs` | results that must be equal, bit for bit; entries and keys in the cache |
//! | `reference.rs`, `layers.rs` | a folder of reference vectors |
//! | `run.rs` | a run of a model over the reference's tokens, and a recorder of its results |

mod bits;
mod each_layer;
mod in_place;
mod layers;
mod mutations;
mod nvfp4;
mod quantised;
mod reference;
mod released;
mod run;
mod same_bits;
mod stored;
mod whole_model;

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use dsv4_kv::device::{Backend, CudaOptions, Device, EmuDevice, EmuOptions};
use dsv4_kv_tests::environment::flag;
use libtest_mimic::{Arguments, Failed, Trial};

use reference::Reference;

/// A test that runs on one folder.
type Test<B> = fn(&Device<B>, &Reference) -> Result<(), Failed>;

/// Tests that take long on the emulator, where they run only by hand.
const LONG: [&str; 7] = [
    "in_place::decodes_the_same_tokens",
    "in_place::logits_with_the_tokens_of_the_reference",
    "in_place::a_batch_and_its_chunks_give_the_bits_of_a_request_alone",
    "in_place::drafts_that_are_rejected_leave_no_trace",
    "in_place::graphs_give_the_bits_of_single_launches",
    "in_place::prompt_lookup_changes_no_token",
    "same_bits::prompt_lookup_changes_no_token",
];

/// Tests that are left out on the emulator for one folder; they run there for the other folder.
const LONG_OF: [(&str, &str); 3] = [
    ("hash", "same_bits::a_batch_and_its_chunks_give_the_bits_of_a_request_alone"),
    ("hash", "same_bits::graphs_give_the_bits_of_single_launches"),
    ("scored", "same_bits::drafts_that_are_rejected_leave_no_trace"),
];

/// The tests of a reference. Mutations are included only if `mutate` is set: they take long on the emulator, where one
/// of the two small models is enough.
fn tests<B: Backend>(reference: &Reference, mutate: bool) -> Vec<(&'static str, Test<B>)> {
    let mut tests: Vec<(&'static str, Test<B>)> = vec![
        ("each_layer::prefilled_whole", each_layer::prefilled_whole),
        ("each_layer::prefilled_in_odd_chunks", each_layer::prefilled_in_odd_chunks),
        ("each_layer::token_by_token", each_layer::token_by_token),
        ("same_bits::logits_with_the_tokens_of_the_reference", same_bits::reference_tokens),
        ("same_bits::a_batch_and_its_chunks_give_the_bits_of_a_request_alone", same_bits::batches),
        ("same_bits::drafts_that_are_rejected_leave_no_trace", same_bits::drafts),
        ("same_bits::prompt_lookup_changes_no_token", same_bits::prompt_lookup),
        ("same_bits::graphs_give_the_bits_of_single_launches", same_bits::graphs),
        ("in_place::logits_with_the_tokens_of_the_reference", in_place::reference_tokens),
        ("in_place::a_batch_and_its_chunks_give_the_bits_of_a_request_alone", in_place::batches),
        ("in_place::drafts_that_are_rejected_leave_no_trace", in_place::drafts),
        ("in_place::prompt_lookup_changes_no_token", in_place::prompt_lookup),
        ("in_place::graphs_give_the_bits_of_single_launches", in_place::graphs),
    ];
    if reference.has_indexers() && !reference.chooses_nothing_by_score() {
        let test = nvfp4::decodes_as_its_values_in_bf16;
        tests.push(("nvfp4::decodes_as_its_values_in_bf16", test));
    }
    if mutate {
        tests.push(("mutations::each_is_seen", mutations::each_is_seen));
    }
    if reference.chooses_nothing_by_score() {
        tests.push(("whole_model::decodes_the_same_tokens", whole_model::decodes_the_same_tokens));
        tests.push(("whole_model::logits", whole_model::logits));
        tests.push(("in_place::decodes_the_same_tokens", in_place::decodes_the_same_tokens));
        tests.push(("in_place::logits", in_place::logits));
        let test = released::decodes_the_same_tokens;
        tests.push(("released::decodes_the_same_tokens", test));
        let test = quantised::gives_the_bits_of_its_values_in_bf16;
        tests.push(("quantised::gives_the_bits_of_its_values_in_bf16", test));
    }
    tests
}

/// The tests of a reference. Each gets its device from `open`.
fn trials_on<B: Backend>(
    kind: &str,
    reference: &Arc<Reference>,
    mutate: bool,
    open: impl Fn() -> Device<B> + Clone + Send + 'static,
) -> Vec<Trial> {
    // Tests on a GPU take turns: while one captures, no other may copy on its device.
    static GPU: Mutex<()> = Mutex::new(());
    let one_by_one = kind == "cuda";
    let trial = |(name, test): (&str, Test<B>)| {
        let (reference, open) = (Arc::clone(reference), open.clone());
        let of_folder = LONG_OF.contains(&(reference.name.as_str(), name));
        let takes_long = kind == "cpu" && (LONG.contains(&name) || of_folder);
        let name = format!("{kind}::{}::{name}", reference.name);
        let trial = Trial::test(name, move || {
            let turn = one_by_one.then(|| GPU.lock().unwrap_or_else(PoisonError::into_inner));
            let done = test(&open(), &reference);
            drop(turn);
            done
        });
        if takes_long { trial.with_ignored_flag(true).with_kind("long") } else { trial }
    };
    tests(reference, mutate).into_iter().map(trial).collect()
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let references = match Reference::all() {
        Ok(references) => references.into_iter().map(Arc::new).collect::<Vec<_>>(),
        Err(error) => {
            eprintln!("error: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    let given = std::env::var_os("DSV4_E2E_DIR").is_some();
    let mut trials = Vec::new();
    for (index, reference) in references.iter().enumerate() {
        let emulated = || EmuDevice::new(EmuOptions { memory: 8 << 30, seed: 1 });
        trials.extend(trials_on("cpu", reference, given || index == 0, emulated));
    }
    match dsv4_kv::open_cuda(CudaOptions::default()) {
        Ok(device) => {
            for reference in &references {
                let device = device.clone();
                trials.extend(trials_on("cuda", reference, true, move || device.clone()));
            }
        }
        Err(error) => {
            let required = flag("DSV4_REQUIRE_GPU");
            let reason = error.to_string();
            let trial = Trial::test("cuda", move || Err(Failed::from(reason)));
            trials.push(trial.with_ignored_flag(!required));
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}
