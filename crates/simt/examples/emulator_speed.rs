//! How long the emulator takes for a 128-thread block, on one OS thread's share of the machine.
//!
//! `cargo run --release -p simt --example emulator_speed`

use std::hint::black_box;
use std::time::Instant;

use simt::emu::{Launch, launch};
use simt::shared::Shared;
use simt::thread::{sync_threads, thread_idx_x};
use simt::warp::shuffle_xor_f32;

const BLOCKS: u32 = 5000;

fn main() {
    let shape = Launch { kernel: "speed", grid: (1, 1), block: 128, shared_bytes: 512, seed: 0 };
    time("empty body", &shape, || {
        black_box(());
    });
    time("5 shuffles, 1 barrier", &shape, || {
        let mut value = thread_idx_x() as f32;
        for step in 0..5 {
            // SAFETY: all lanes shuffle together.
            value += unsafe { shuffle_xor_f32(value, 1 << step) };
        }
        // SAFETY: all threads come.
        unsafe { sync_threads() };
        black_box(value);
    });
    time("1 barrier, 2 shared accesses", &shape, || {
        let t = thread_idx_x();
        // SAFETY: one word a thread, a barrier before reading another's.
        unsafe {
            let words = Shared::<u32, 128>::at(0);
            words.store(t, t);
            sync_threads();
            black_box(words.load(127 - t));
        }
    });
}

/// Launches one block at a time, so that no other OS thread takes part.
fn time(what: &str, shape: &Launch, body: impl Fn() + Sync) {
    let run = || launch(shape, &body).expect("the body breaks no rule");
    run();
    let start = Instant::now();
    for _ in 0..BLOCKS {
        run();
    }
    println!("{what}: {:.2} us a block", start.elapsed().as_secs_f64() * 1e6 / f64::from(BLOCKS));
}
