//! Launches in a process of their own, with as many threads as on a larger machine. A process that hangs is killed.

use std::io::read_to_string;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rayon::iter::{IntoParallelIterator, ParallelIterator};
use simt::cluster::sync_cluster;
use simt::emu::{Launch, launch, launch_clusters};
use simt::thread::{block_idx_x, sync_threads, thread_idx_x};

use crate::device::block_of;

/// Time limit of a process. It takes a few seconds, and several times as long beside other load.
const TIMEOUT: Duration = Duration::from_secs(100);

/// Runs the ignored test `name` of this module in a process of its own, whose pools have `threads` threads.
fn run(name: &str, threads: u32) {
    let program = std::env::current_exe().expect("the system tells");
    let mut child = Command::new(program)
        .args(["--exact", &format!("process::{name}"), "--ignored", "--nocapture"])
        .env("RAYON_NUM_THREADS", threads.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("this program starts");
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("it is a child of this process") {
            break status;
        }
        if start.elapsed() > TIMEOUT {
            child.kill().expect("it runs");
            child.wait().expect("it was killed");
            panic!("{name} hangs with {threads} threads");
        }
        sleep(Duration::from_millis(10));
    };
    // The output is a few lines, which fit into the pipe.
    let told = read_to_string(child.stdout.take().expect("it is piped")).expect("it is UTF-8");
    assert!(status.success(), "{name} fails with {threads} threads: {status}\n{told}");
    // The test program also succeeds if it runs no test.
    assert!(told.contains(" 1 passed;"), "{name} did not run:\n{told}");
}

#[test]
fn sixteen_threads_have_stacks_for_large_clusters() {
    run("large_clusters", 16);
}

/// More fibers, both at once and in total, than a process has room for if each OS thread keeps stacks of its own.
#[test]
#[ignore = "run in a process of its own"]
fn large_clusters() {
    let shape = Launch { grid: (64, 1), ..block_of(512) };
    for _ in 0..20 {
        // SAFETY: all threads come.
        let launched = launch_clusters(&shape, 8, || unsafe { sync_cluster() });
        launched.unwrap_or_else(|fault| panic!("{fault}"));
    }
    #[cfg(target_os = "linux")]
    {
        let read = |path| std::fs::read_to_string(path).expect("Linux has it");
        let mappings = read("/proc/self/maps").lines().count();
        let most: usize = read("/proc/sys/vm/max_map_count").trim().parse().expect("a number");
        println!("{mappings} mappings of {most}");
        assert!(mappings < most / 20 * 19, "{mappings} mappings of {most}");
    }
}

#[test]
fn jobs_of_rayon_take_turns_at_a_device() {
    run("turns", 8);
}

/// Jobs that hold a lock while they launch, as the jobs of one device do. All jobs but the first are started while the
/// first one's thread waits for three blocks that other threads run. If that thread ran one of the jobs meanwhile, it
/// would deadlock on the lock that it holds.
#[test]
#[ignore = "run in a process of its own"]
fn turns() {
    let device = Mutex::new(());
    let job = |time: Duration| {
        let _turn = device.lock().unwrap_or_else(PoisonError::into_inner);
        let launched = launch(&Launch { grid: (4, 1), ..block_of(64) }, || {
            if block_idx_x() > 0 && thread_idx_x() == 0 {
                sleep(time);
            }
            // SAFETY: all threads come.
            unsafe { sync_threads() };
        });
        launched.unwrap_or_else(|fault| panic!("{fault}"));
    };
    rayon::scope(|scope| {
        scope.spawn(|_| job(Duration::from_millis(300)));
        sleep(Duration::from_millis(100));
        (0..400).into_par_iter().for_each(|_| job(Duration::ZERO));
    });
}
