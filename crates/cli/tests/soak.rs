//! The command `soak`.

use assert_cmd::Command;
use serde_json::Value;

fn soak(options: &str) -> Command {
    let mut command = Command::cargo_bin("dsv4-kv").expect("the program is built with its tests");
    command.arg("soak").args(options.split_whitespace());
    command
}

/// Few requests with many events each, in a pool that is little larger than the longest request: nothing is lost, and
/// as much is reused as in the model. The long run is started by hand.
#[test]
fn nothing_is_lost_and_the_model_agrees() {
    let options =
        "--requests 200 --rounds 2 --gpu-mem 3GiB --aborts 10 --forks 10 --preemptions 10";
    let output = soak(options).arg("--json").assert().success().get_output().stdout.clone();
    let result: Value = serde_json::from_slice(&output).expect("one JSON value");
    let runs = result["runs"].as_array().expect("a run for each fill");
    assert_eq!(runs.len(), 3);
    for run in runs {
        assert_eq!(run["faults"], Value::Array(Vec::new()), "{run}");
        let count = |what: &str| run[what].as_u64().unwrap_or_else(|| panic!("{what}: {run}"));
        for what in ["aborted", "forked", "suspended", "preempted", "reused", "evicted_blocks"] {
            assert!(count(what) > 0, "{what}: {run}");
        }
        assert_eq!(count("finished") + count("aborted"), 2 * 200 + count("forked"), "{run}");
        assert!(run["off_percent"].as_f64() <= Some(0.1), "{run}");
    }
}

#[test]
fn a_cache_that_is_too_small_is_refused() {
    let output = soak("--gpu-mem 1GiB").assert().code(2).get_output().clone();
    let message = String::from_utf8(output.stderr).expect("messages are UTF-8");
    assert!(message.contains("model flash with 1.0 GiB of memory"), "{message}");
}
