//! One suite for every device: it runs on the CPU always, and on a GPU if one is found.
//!
//! Tests are grouped as the kernels are: one folder per group, one file per operation. The name of a test is
//! `DEVICE::GROUP::FILE::TEST`, for example `cpu::window::swa::append_writes_the_golden_rows`.
//!
//! Without a GPU the CUDA half is listed as ignored, with the reason. With `DSV4_REQUIRE_GPU=1` it fails instead.

mod attention;
mod compress;
mod decode;
mod device;
mod gather;
mod indexer;
mod linear;
mod router;
mod step;
mod suite;
mod window;

use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use dsv4_kv::device::{CudaDevice, CudaOptions, DeviceError, EmuDevice, EmuOptions, Emulator};
use dsv4_kv_tests::environment::flag;
use dsv4_kv_tests::{fed, hca, history, inputs, model, refused, rings, stories};
use libtest_mimic::{Arguments, Trial};

use crate::suite::{Case, by_hand, large, long, pairs, suite};

/// A test that compares the two devices.
type Comparison = (&'static str, fn(&CudaDevice, &EmuDevice));

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let mut trials: Vec<_> = suite().into_iter().map(cpu_trial).collect();
    let by_hand = by_hand().into_iter().chain(long()).chain(large());
    trials.extend(by_hand.map(cpu_trial).map(left_out));
    trials.extend(pairs().into_iter().map(|(test, run)| {
        Trial::test(format!("cpu::{test}"), move || {
            run(&emulated(), &emulated());
            Ok(())
        })
    }));
    match dsv4_kv::open_cuda(CudaOptions::default()) {
        Ok(device) => trials.extend(cuda_trials(&device)),
        Err(error) => trials.extend(no_cuda_trials(&error)),
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn emulated() -> EmuDevice {
    EmuDevice::new(EmuOptions { memory: 8 << 30, seed: 1 })
}

/// A test on the CPU. It opens a device of its own, since tests run in parallel.
fn cpu_trial((test, run): Case<Emulator>) -> Trial {
    Trial::test(format!("cpu::{test}"), move || {
        run(&emulated());
        Ok(())
    })
}

/// The same test, marked as ignored: it runs only on request (`--ignored`).
fn left_out(trial: Trial) -> Trial {
    trial.with_ignored_flag(true).with_kind("long")
}

/// A test of the CUDA half.
struct CudaCase {
    /// Its name, as in the lists of the suite.
    test: &'static str,
    run: Box<dyn Fn(&CudaDevice) + Send>,
    /// Whether it runs only on request.
    is_left_out: bool,
}

/// The tests of the CUDA half: the suite, and tests that need a GPU. The list does not depend on whether there is one.
fn cuda_cases() -> Vec<CudaCase> {
    fn case(test: &'static str, run: impl Fn(&CudaDevice) + Send + 'static) -> CudaCase {
        CudaCase { test, run: Box::new(run), is_left_out: false }
    }
    let suite = suite().into_iter().chain(large()).map(|(test, run)| case(test, run));
    let left_out = by_hand().into_iter().chain(long());
    let left_out = left_out.map(|(test, run)| CudaCase { is_left_out: true, ..case(test, run) });
    let both: [Comparison; 2] = [
        ("window::swa::both_devices_give_equal_bytes", window::swa::both_devices_give_equal_bytes),
        (
            "router::selection::both_devices_give_equal_bytes",
            router::selection::both_devices_give_equal_bytes,
        ),
    ];
    let both = both.map(|(test, run)| case(test, move |device| run(device, &emulated())));
    let pairs = pairs().into_iter().map(|(test, run)| {
        let second = || dsv4_kv::open_cuda(CudaOptions::default()).expect("it was opened once");
        case(test, move |device| run(device, &second()))
    });
    let embedders = [
        case("device::embedder::its_context_and_stream_are_used", |_| {
            device::embedder::its_context_and_stream_are_used();
        }),
        case("device::embedder::its_memory_is_used_where_it_lies", |_| {
            device::embedder::its_memory_is_used_where_it_lies();
        }),
        case("device::embedder::a_capture_binds_its_thread_in_other_contexts", |_| {
            device::embedder::a_capture_binds_its_thread_in_other_contexts();
        }),
        case("device::embedder::a_capture_of_the_stream_by_its_owner_refuses_steps", |_| {
            device::embedder::a_capture_of_the_stream_by_its_owner_refuses_steps();
        }),
        case("device::embedder::the_context_of_the_caller_stays_current", |_| {
            device::embedder::the_context_of_the_caller_stays_current();
        }),
        case("device::embedder::only_contexts_that_live_stay_current", |_| {
            device::embedder::only_contexts_that_live_stay_current();
        }),
        case("device::embedder::a_refused_gpu_leaves_no_context", |_| {
            device::embedder::a_refused_gpu_leaves_no_context();
        }),
    ];
    suite.chain(left_out).chain(both).chain(pairs).chain(embedders).collect()
}

/// The CUDA half. Tests take turns, since a capture forbids other threads to allocate.
fn cuda_trials(device: &CudaDevice) -> Vec<Trial> {
    let turn = Arc::new(Mutex::new(()));
    let trial = |CudaCase { test, run, is_left_out }| {
        let (turn, device) = (Arc::clone(&turn), device.clone());
        let trial = Trial::test(format!("cuda::{test}"), move || {
            let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
            run(&device);
            Ok(())
        });
        if is_left_out { left_out(trial) } else { trial }
    };
    cuda_cases().into_iter().map(trial).collect()
}

/// Entries that replace the CUDA half where no GPU can be used.
fn no_cuda_trials(error: &DeviceError) -> Vec<Trial> {
    let reason = error.to_string();
    if flag("DSV4_REQUIRE_GPU") {
        let failed = move || Err(format!("DSV4_REQUIRE_GPU=1, but: {reason}").into());
        return vec![Trial::test("cuda::device", failed)];
    }
    eprintln!("The CUDA half of this suite is ignored: {reason}");
    let trial = |CudaCase { test, .. }| {
        Trial::test(format!("cuda::{test}"), || Err("there is no GPU".into()))
            .with_ignored_flag(true)
            .with_kind("no GPU")
    };
    cuda_cases().into_iter().filter(|case| !case.is_left_out).map(trial).collect()
}
