//! The command `replay --peers`: prompts in one process, answers in others.

#[cfg(target_os = "linux")]
mod processes;

use std::io::Write;
#[cfg(target_os = "linux")]
use std::os::unix::process::CommandExt as _;
#[cfg(target_os = "linux")]
use std::path::PathBuf;
use std::process::{Command as Program, Stdio};
use std::time::{Duration, Instant};

use assert_cmd::Command;
use serde_json::Value;
use tempfile::NamedTempFile;

fn replay(options: &str) -> Command {
    let mut command = Command::cargo_bin("dsv4-kv").expect("the program is built with its tests");
    command.arg("replay").args(options.split_whitespace()).env_remove("DSV4_NIXL");
    command
}

fn json(command: &mut Command) -> Value {
    let output = command.arg("--json").assert().success().get_output().stdout.clone();
    serde_json::from_slice(&output).expect("standard output is one JSON value")
}

fn trace(lines: &[&str]) -> NamedTempFile {
    let mut file = NamedTempFile::new().expect("a temporary file");
    file.write_all(lines.join("\n").as_bytes()).expect("room for a few lines");
    file
}

/// Three requests: the last shares a prefix with the first, and the second has no answer, so that it does not move.
const LINES: [&str; 3] = [
    r#"{"timestamp": 0, "input_length": 300, "output_length": 6, "hash_ids": [1]}"#,
    r#"{"timestamp": 0, "input_length": 40, "output_length": 1}"#,
    r#"{"timestamp": 90000, "input_length": 290, "output_length": 3, "hash_ids": [1]}"#,
];
const SMALL: &str =
    "--device cpu --gpu-mem 300MiB --max-requests 4 --max-step-tokens 100 --verify 3";

#[test]
fn answers_elsewhere_have_the_bytes_of_the_reference() {
    let trace = trace(&LINES);
    let result = json(replay(SMALL).args(["--peers", "2", "--trace"]).arg(trace.path()));
    let alone = json(replay(SMALL).arg("--trace").arg(trace.path()));
    for number in ["finished", "tokens", "prefill_tokens", "reused_tokens", "entries"] {
        assert_eq!(result[number], alone[number], "{number}");
    }
    assert_eq!((&result["mismatches"], &result["verified_requests"]), (&0.into(), &3.into()));
    // The decode process also compares a request that has arrived before it continues.
    let compared = |result: &Value| result["verified_entries"].as_u64().expect("a number");
    assert!(compared(&result) > compared(&alone), "{result}");
    let moves = &result["moves"];
    assert_eq!((&moves["requests"], &moves["tokens"]), (&2.into(), &(5 + 2).into()));
    assert_eq!(
        moves["transport"],
        if std::path::Path::new("/dev/shm").is_dir() { "files in memory" } else { "files" }
    );
    let [bytes, early] = ["bytes", "early_bytes"].map(|of| moves[of].as_u64().expect("a number"));
    // At most two full blocks of each prompt; those of the reused prompt existed when it was admitted.
    assert!(early > 0 && early < bytes, "{moves}");
    for wait in
        [&moves["move_ms"], &moves["next_token_ms"], &result["service"]["time_to_first_token"]]
    {
        assert!(wait["p50"].as_f64().is_some_and(|ms| ms >= 0.0), "{wait}");
    }
    assert_eq!(alone["moves"], Value::Null);
}

#[test]
fn payloads_lie_on_the_device() {
    let options = "--device cpu --gpu-mem 300MiB --max-step-tokens 100 --requests 4 --peers 2";
    let moves = |payloads: &str| {
        let result = json(replay(options).args(["--payloads", payloads]));
        assert_eq!((&result["finished"], &result["mismatches"]), (&4.into(), &0.into()));
        result["moves"].clone()
    };
    let (on_device, on_host) = (moves("device"), moves("host"));
    assert!(on_device["bytes"].as_u64() > Some(0));
    assert_eq!(on_device["device_bytes"], on_device["bytes"]);
    assert_eq!((&on_host["device_bytes"], &on_host["bytes"]), (&0.into(), &on_device["bytes"]));
    let mut bookkeeping = replay("--execute bookkeeping --peers 2 --payloads device");
    let error = bookkeeping.assert().failure().get_output().stderr.clone();
    assert!(String::from_utf8_lossy(&error).contains("in bookkeeping no bytes move"));
}

/// Requests wait for memory for their bytes. A request that can never have it is an error that names both numbers.
#[test]
fn a_request_larger_than_the_memory_for_those_that_come_is_refused() {
    let options = "--device cpu --gpu-mem 300MiB --max-step-tokens 100 --requests 4 --peers 2";
    let moves = json(&mut replay(options))["moves"].clone();
    let bytes = moves["bytes"].as_u64().expect("a number");
    // Less than all of them need together, and at least as much as the longest needs.
    let most = format!("--arrival-memory {}B", bytes * 3 / 4);
    let result = json(replay(options).args(most.split(' ')));
    assert_eq!((&result["moves"]["bytes"], &result["mismatches"]), (&bytes.into(), &0.into()));
    let refused = replay(options).args(["--arrival-memory", "4KiB"]).assert().failure().code(1);
    let error = String::from_utf8_lossy(&refused.get_output().stderr).into_owned();
    assert!(error.contains("--arrival-memory") && error.contains("4096"), "{error}");
}

/// That a named library is not used is told once, not by each process.
#[test]
#[cfg(not(feature = "nixl"))]
fn nixl_that_is_not_built_in_is_told() {
    let options = "--device cpu --gpu-mem 300MiB --max-step-tokens 100 --requests 4 --peers 2";
    let said = |command: &mut Command| {
        let output = command.assert().success().get_output().clone();
        let [table, said] = [output.stdout, output.stderr].map(String::from_utf8);
        assert!(table.expect("results are UTF-8").contains("files"));
        said.expect("messages are UTF-8").matches("without the feature `nixl`").count()
    };
    assert_eq!(said(&mut replay(options)), 0);
    assert_eq!(said(replay(options).env("DSV4_NIXL", "/no/such/libnixl_capi.so")), 1);
}

#[test]
#[cfg(feature = "nixl")]
#[ignore = "needs NIXL: cargo xtask scale-test"]
fn answers_elsewhere_by_nixl_have_the_bytes_of_the_reference() {
    let library = std::env::var_os("DSV4_NIXL").expect("DSV4_NIXL names libnixl_capi.so");
    let mut command = replay(
        "--device cpu --gpu-mem 300MiB --peers 3 --max-step-tokens 64 --requests 12 --shrink 64",
    );
    let result = json(command.env("DSV4_NIXL", library));
    assert_eq!((&result["finished"], &result["mismatches"]), (&12.into(), &0.into()));
    assert_eq!(
        (&result["moves"]["transport"], &result["moves"]["requests"]),
        (&"NIXL".into(), &12.into())
    );
}

#[test]
fn bookkeeping_moves_positions() {
    let options = "--execute bookkeeping --requests 60 --seed 3";
    let alone = json(&mut replay(options));
    for peers in ["2", "4"] {
        let result = json(replay(options).args(["--peers", peers]));
        for number in ["finished", "tokens", "prefill_tokens", "rejected"] {
            assert_eq!(result[number], alone[number], "{number}");
        }
        let generated = alone["tokens"].as_u64().zip(alone["prefill_tokens"].as_u64());
        let generated = generated.map(|(all, prompts)| all - prompts);
        assert_eq!(result["moves"]["tokens"].as_u64(), generated);
        assert_eq!(result["moves"]["early_bytes"], 0);
        assert!(result["moves"]["bytes"].as_u64() > Some(1 << 30), "a prompt has megabytes");
    }
}

#[test]
fn the_report_has_what_moved() {
    let page = NamedTempFile::new().expect("a temporary file");
    let options = "--execute bookkeeping --requests 20 --peers 2 --report";
    replay(options).arg(page.path()).assert().success();
    let page = std::fs::read_to_string(page.path()).expect("it was written");
    assert!(page.contains("bytes moved") && page.contains("second token"));
}

#[test]
fn who_is_nobodys_peer_says_so() {
    let output = replay("--peer 1 --execute bookkeeping").write_stdin("").assert().code(1);
    let said = String::from_utf8_lossy(&output.get_output().stderr).into_owned();
    assert!(said.contains("--peers"), "{said}");
    replay("--peers 1").assert().code(2);
}

/// The directory of the files through which the requests of process `replay` move, and the token in their names.
#[cfg(target_os = "linux")]
fn exchange_of(replay: u32) -> Option<(PathBuf, String)> {
    let open = std::fs::read_dir(format!("/proc/{replay}/fd")).ok()?;
    let mut files = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    let lock = |path: PathBuf| {
        let folder = path.parent()?.to_owned();
        let is_lock =
            path.extension()? == "lock" && folder.file_name()?.to_str()?.starts_with("dsv4-kv-");
        is_lock.then_some((folder, path.file_stem()?.to_str()?.to_owned()))
    };
    files.find_map(lock)
}

/// Payloads are in memory. A replay that is killed leaves them, and the next one removes them.
#[test]
#[cfg(target_os = "linux")]
fn payloads_of_a_killed_replay_are_removed_by_the_next() {
    let options = format!("replay {SMALL} --peers 2 --requests 30");
    let mut command = Program::new(assert_cmd::cargo::cargo_bin("dsv4-kv"));
    command.args(options.split(' ')).env_remove("DSV4_NIXL");
    let mut parent =
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
    let id = parent.id();
    let signal = |name: &str| {
        let sent = Program::new("kill").args([name, &id.to_string()]).status();
        assert!(sent.expect("there is kill").success());
        std::thread::sleep(Duration::from_millis(20));
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    let payloads = loop {
        assert!(Instant::now() < deadline, "no payload is written");
        // Stopped, it removes none between this look and its end.
        signal("-STOP");
        let payloads = exchange_of(id).map_or(Vec::new(), |(folder, token)| {
            let files = std::fs::read_dir(folder).expect("it is there");
            let files = files.filter_map(|entry| Some(entry.ok()?.path()));
            let is_payload = |path: &PathBuf| {
                let name = path.file_name().and_then(|name| name.to_str());
                name.is_some_and(|name| name.starts_with(&token) && name.ends_with(".payload"))
            };
            files.filter(is_payload).collect::<Vec<_>>()
        });
        if !payloads.is_empty() {
            break payloads;
        }
        signal("-CONT");
    };
    signal("-KILL");
    parent.wait().expect("it ends");
    json(&mut replay("--device cpu --gpu-mem 300MiB --requests 1 --peers 2"));
    let left: Vec<_> = payloads.iter().filter(|path| path.exists()).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// The child process of a process.
fn child_of(process: u32) -> Option<u32> {
    let of = |entry: std::io::Result<std::fs::DirEntry>| {
        let name: u32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
        let stat = std::fs::read_to_string(format!("/proc/{name}/stat")).ok()?;
        let parent = stat.rsplit_once(") ")?.1.split(' ').nth(1)?;
        (parent == process.to_string()).then_some(name)
    };
    std::fs::read_dir("/proc").ok()?.find_map(of)
}

/// The decode process of a replay, after it has run for a while.
fn decode_process(replay: u32) -> u32 {
    let deadline = Instant::now() + Duration::from_secs(60);
    let child = loop {
        assert!(Instant::now() < deadline, "a decode process starts");
        if let Some(child) = child_of(replay) {
            break child;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    // An interrupt before its handler is installed would end the process by the signal.
    processes::wait_for_handler(child);
    processes::wait_for_work(replay);
    child
}

/// An interrupt from a terminal, which all processes of a group get, leaves a table of the steps so far.
#[test]
#[cfg(target_os = "linux")]
fn an_interrupt_of_the_group_leaves_the_result() {
    let program = assert_cmd::cargo::cargo_bin("dsv4-kv");
    let options = "replay --execute bookkeeping --peers 2 --requests 400000";
    let mut command = Program::new(program);
    let command = command.args(options.split(' ')).stdout(Stdio::piped()).stderr(Stdio::piped());
    let parent = command.process_group(0).spawn().expect("it starts");
    decode_process(parent.id());
    let kill = Program::new("kill").args(["-INT", "--", &format!("-{}", parent.id())]).status();
    assert!(kill.expect("there is kill").success());
    let output = parent.wait_with_output().expect("it ends");
    let (table, said) = (&output.stdout, String::from_utf8_lossy(&output.stderr));
    let table = String::from_utf8_lossy(table);
    assert_eq!(output.status.code(), Some(130), "{table}{said}");
    assert!(table.contains(" interrupted "), "{table}{said}");
}

/// If a decode process is killed, the replay ends with an error that names it.
#[test]
#[cfg(target_os = "linux")]
fn a_decode_process_that_is_killed_is_named() {
    let program = assert_cmd::cargo::cargo_bin("dsv4-kv");
    let options = format!("replay {SMALL} --peers 2 --requests 30");
    let mut command = Program::new(program);
    let command = command.args(options.split(' ')).stdout(Stdio::null()).stderr(Stdio::piped());
    let parent = command.spawn().expect("it starts");
    let child = decode_process(parent.id());
    let killed = Program::new("kill").args(["-KILL", &child.to_string()]).status();
    assert!(killed.expect("there is kill").success());
    let output = parent.wait_with_output().expect("it ends");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("decode process 1"), "{said}");
}
