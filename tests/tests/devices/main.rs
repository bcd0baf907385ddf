//! One suite, run on every device: the CPU always, a GPU wherever one is found.
//!
//! Tests are grouped as the kernels are: one folder a group, one file an operation. A test is called
//! `DEVICE::GROUP::FILE::TEST`, as in `cpu::window::swa::append_writes_the_golden_rows`.
//!
//! Without a GPU the CUDA half is listed as ignored, with the reason; `DSV4_REQUIRE_GPU=1` makes
//! that a failure.

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

use dsv4_kv::device::{
    Cuda, CudaDevice, CudaOptions, DeviceError, EmuDevice, EmuOptions, Emulator,
};
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

/// A test on the CPU, with a device of its own: tests run side by side.
fn cpu_trial((test, run): Case<Emulator>) -> Trial {
    Trial::test(format!("cpu::{test}"), move || {
        run(&emulated());
        Ok(())
    })
}

/// The same test, left out unless it is asked for.
fn left_out(trial: Trial) -> Trial {
    trial.with_ignored_flag(true).with_kind("long")
}

/// The suite on the GPU, one test at a time: a capture forbids other threads to allocate.
fn cuda_trials(device: &CudaDevice) -> Vec<Trial> {
    let turn = Arc::new(Mutex::new(()));
    let alone = |name: String, run: Box<dyn Fn() + Send>| {
        let turn = Arc::clone(&turn);
        Trial::test(name, move || {
            let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
            run();
            Ok(())
        })
    };
    let trial = |(test, run): Case<Cuda>| {
        let device = device.clone();
        alone(format!("cuda::{test}"), Box::new(move || run(&device)))
    };
    let mut trials: Vec<_> = suite().into_iter().chain(large()).map(trial).collect();
    trials.extend(by_hand().into_iter().chain(long()).map(trial).map(left_out));
    let both: [Comparison; 2] = [
        (
            "cuda::window::swa::both_devices_give_equal_bytes",
            window::swa::both_devices_give_equal_bytes,
        ),
        (
            "cuda::router::selection::both_devices_give_equal_bytes",
            router::selection::both_devices_give_equal_bytes,
        ),
    ];
    for (test, run) in both {
        let device = device.clone();
        trials.push(alone(test.into(), Box::new(move || run(&device, &emulated()))));
    }
    for (test, run) in pairs() {
        let device = device.clone();
        let second = || dsv4_kv::open_cuda(CudaOptions::default()).expect("it was opened once");
        trials.push(alone(format!("cuda::{test}"), Box::new(move || run(&device, &second()))));
    }
    let stream = Box::new(device::embedder::its_context_and_stream_are_used);
    trials.push(alone("cuda::device::embedder::its_context_and_stream_are_used".into(), stream));
    let memory = Box::new(device::embedder::its_memory_is_used_where_it_lies);
    trials.push(alone("cuda::device::embedder::its_memory_is_used_where_it_lies".into(), memory));
    trials
}

/// What stands for the CUDA half where there is no usable GPU.
fn no_cuda_trials(error: &DeviceError) -> Vec<Trial> {
    let reason = error.to_string();
    if std::env::var_os("DSV4_REQUIRE_GPU").is_some_and(|value| value == "1") {
        let failed = move || Err(format!("DSV4_REQUIRE_GPU=1, but: {reason}").into());
        return vec![Trial::test("cuda::device", failed)];
    }
    eprintln!("The CUDA half of this suite is ignored: {reason}");
    suite::<Cuda>()
        .into_iter()
        .chain(large())
        .map(|(test, _)| {
            Trial::test(format!("cuda::{test}"), || Err("there is no GPU".into()))
                .with_ignored_flag(true)
                .with_kind("no GPU")
        })
        .collect()
}
