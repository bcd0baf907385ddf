//! Programs that a test has started: their progress, as the kernel reports it.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Longest time that a program may take to reach a state on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Waits until process `id` handles SIGINT. Before that, an interrupt ends it as any other program.
pub fn wait_for_handler(id: u32) {
    let status = format!("/proc/{id}/status");
    // The kernel lists the signals that a process handles; bit 1 is SIGINT.
    let handles_sigint = || {
        let status = fs::read_to_string(&status).expect("it runs");
        let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:\t"));
        u64::from_str_radix(mask.expect("a mask"), 16).expect("hexadecimal") >> 1 & 1 == 1
    };
    wait_until(handles_sigint, "SIGINT is never handled");
}

/// Waits until process `id` has used 300 ms of CPU time from now on, however long that takes.
pub fn wait_for_work(id: u32) {
    const TICKS: u64 = 30;
    let stat = format!("/proc/{id}/stat");
    let ticks = || -> u64 {
        let stat = fs::read_to_string(&stat).expect("it runs");
        // After the name in parentheses, fields 14 and 15 are the times in user and system mode, in ticks of 10 ms.
        let (_, fields) = stat.rsplit_once(") ").expect("a name");
        fields
            .split(' ')
            .skip(11)
            .take(2)
            .map(|ticks| ticks.parse::<u64>().expect("a number"))
            .sum()
    };
    let before = ticks();
    wait_until(|| ticks() >= before + TICKS, "it does not work");
}

fn wait_until(is_so: impl Fn() -> bool, otherwise: &str) {
    let started = Instant::now();
    while !is_so() {
        assert!(started.elapsed() < TIMEOUT, "{otherwise}");
        sleep(Duration::from_millis(5));
    }
}
