//! Things that help people and their programs: `doctor`, `completions`, `schema`, colours, and the exit codes in the
//! docs.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use serde_json::Value;

/// `dsv4-kv` with these options, separated by blanks, and without environment variables that set colours or name a
/// library.
fn kv(options: &str) -> Command {
    let mut command = Command::cargo_bin("dsv4-kv").expect("the program is built with its tests");
    command.args(options.split_whitespace());
    for variable in ["CLICOLOR_FORCE", "NO_COLOR", "CLICOLOR", "DSV4_NIXL"] {
        command.env_remove(variable);
    }
    command
}

/// The output of a command that must succeed.
fn printed(options: &str) -> String {
    let output = kv(options).assert().success().get_output().stdout.clone();
    String::from_utf8(output).expect("results are UTF-8")
}

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

/// The commands that `schema` describes.
const DESCRIBED: [&str; 9] =
    ["bench", "bookkeeping", "doctor", "generate", "inspect", "plan", "replay", "reuse", "soak"];

#[test]
fn the_committed_schemas_are_those_of_the_program() {
    let folder = docs().join("schema");
    for command in DESCRIBED {
        let (path, schema) =
            (folder.join(format!("{command}.json")), printed(&format!("schema {command}")));
        let committed = fs::read_to_string(&path).unwrap_or_default();
        assert!(
            committed == schema,
            "{} is of another version: cargo kv schema {command} > docs/schema/{command}.json",
            path.display()
        );
    }
    let mut files: Vec<_> = fs::read_dir(&folder)
        .expect("it is committed")
        .map(|file| file.expect("it can be listed").file_name())
        .collect();
    files.sort();
    assert_eq!(files, DESCRIBED.map(|command| OsString::from(format!("{command}.json"))));
}

#[test]
fn what_json_prints_is_as_its_schema_says() {
    let trace = tempfile::NamedTempFile::new().expect("a temporary file");
    let line = r#"{"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]}"#;
    fs::write(trace.path(), format!("{line}\n{line}\n")).expect("room for two lines");
    let reuse = format!("reuse --pool 1GiB --trace {}", trace.path().display());
    let mut commands = vec![
        "doctor",
        "inspect",
        "plan --model tiny --gpu-mem 1GiB",
        "plan --model pro --gpu-mem 180GiB --context 131072 --host-cache 8GiB",
        "replay --execute bookkeeping --requests 3",
        "replay --execute bookkeeping --requests 3 --no-reuse",
        "soak --requests 20 --rounds 1 --fill 50",
        &reuse,
    ];
    let checkpoint = docs().join("../tests/e2e/hash");
    let checkpoint = format!("--model {} --device cpu", checkpoint.display());
    let generate = format!("generate {checkpoint} --prompt Once --max-tokens 2");
    if cfg!(feature = "generate") {
        commands.push(&generate);
    }
    for options in commands {
        let command = options.split(' ').next().expect("a command");
        let schema: Value =
            serde_json::from_str(&printed(&format!("schema {command}"))).expect("JSON");
        let schema = jsonschema::validator_for(&schema).expect("a schema");
        let mut result: Value =
            serde_json::from_str(&printed(&format!("{options} --json"))).expect("one JSON value");
        let errors: Vec<_> = schema.iter_errors(&result).map(|error| error.to_string()).collect();
        assert!(errors.is_empty(), "{options}: {errors:?}");
        // A missing field, and a field of another type, are found.
        let fields = result.as_object_mut().expect("an object");
        let first = fields.keys().next().expect("a field").clone();
        let value = fields.insert(first.clone(), Value::Array(vec![Value::Null]));
        assert!(!schema.is_valid(&result), "{options}: {first} = {value:?}");
        result.as_object_mut().expect("an object").remove(&first);
        assert!(!schema.is_valid(&result), "{options}: without {first}");
    }
}

/// A result of every suite that measures on a GPU, read from a file, since there is no GPU here.
#[test]
fn the_result_of_a_bench_is_as_its_schema_says_and_is_printed_as_it_was_read() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/bench/result.json");
    let read: Value = serde_json::from_str(&fs::read_to_string(&file).expect("it is committed"))
        .expect("one JSON value");
    let schema: Value = serde_json::from_str(&printed("schema bench")).expect("JSON");
    let schema = jsonschema::validator_for(&schema).expect("a schema");
    let errors: Vec<_> = schema.iter_errors(&read).map(|error| error.to_string()).collect();
    assert!(errors.is_empty(), "{errors:?}");
    let options = format!("bench --from {}", file.display());
    let again: Value =
        serde_json::from_str(&printed(&format!("{options} --json"))).expect("one JSON value");
    assert_eq!(again, read);
    assert!(printed(&options).contains("made-up device"));
    for more in ["step", "--past 128", "--only CSA"] {
        let message = kv(&format!("{options} {more}")).assert().code(2).get_output().clone();
        let message = String::from_utf8(message.stderr).expect("UTF-8");
        assert!(message.contains("cannot be used with"), "{more}: {message}");
    }
}

#[test]
fn doctor_says_what_to_do_about_what_is_missing_and_fails_only_for_what_is_broken() {
    let report: Value = serde_json::from_str(&printed("doctor --json")).expect("one JSON value");
    let findings = report["findings"].as_array().expect("a list");
    let names: Vec<_> = findings.iter().filter_map(|finding| finding["what"].as_str()).collect();
    for name in ["emulated device", "CUDA driver", "kernels", "device compiler", "NIXL"] {
        assert!(names.contains(&name), "{names:?}");
    }
    for finding in findings {
        assert_eq!(finding["state"] == "ok", finding["advice"].is_null(), "{finding}");
        // If there is no driver, it names both places where it could be, each once.
        let found = finding["found"].as_str().expect("words");
        if found.starts_with("no CUDA driver") {
            assert_eq!(found.matches("libcuda.so.1: ").count(), 2, "{found}");
            assert_eq!(found.matches("libcuda.so.1").count(), 2, "{found}");
        }
    }
    let mut command = kv("doctor");
    let output = command.env("DSV4_NIXL", "/no/such/library.so").assert().code(1);
    let text = String::from_utf8(output.get_output().stdout.clone()).expect("UTF-8");
    assert!(text.contains("broken  NIXL") && text.contains("/no/such/library.so"), "{text}");
}

#[test]
fn colours_are_for_terminals() {
    let plain = printed("doctor");
    assert!(plain.contains("ok      emulated device"), "{plain}");
    assert!(!plain.contains('\u{1b}'));
    let output =
        kv("doctor").env("CLICOLOR_FORCE", "1").assert().success().get_output().stdout.clone();
    assert!(String::from_utf8_lossy(&output).contains("\u{1b}[1m\u{1b}[32mok"));
    for (force, starts) in [(false, "error: "), (true, "\u{1b}[1m\u{1b}[31merror:")] {
        let mut command = kv("plan --model huge --gpu-mem 1GiB");
        if force {
            command.env("CLICOLOR_FORCE", "1");
        }
        let message = command.assert().code(2).get_output().stderr.clone();
        assert!(String::from_utf8_lossy(&message).starts_with(starts), "{message:?}");
    }
}

/// A line that is padded to the longest one would wrap on a narrower terminal.
#[test]
fn no_line_of_a_result_ends_with_blanks() {
    for options in ["replay --execute bookkeeping --requests 3", "plan --model tiny --gpu-mem 1GiB"]
    {
        let printed = printed(options);
        assert!(printed.lines().count() > 10, "{options}: {printed}");
        let filled = printed.lines().find(|line| line.ends_with(' '));
        assert_eq!(filled, None, "{options}");
    }
}

#[test]
fn every_shell_completes_commands_and_options() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = printed(&format!("completions {shell}"));
        let words = ["replay", "doctor", "gpu-mem"].into_iter();
        let of_serve = ["listen", "max-tokens"].into_iter().filter(|_| cfg!(feature = "serve"));
        for word in words.chain(of_serve) {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    kv("completions tcsh").assert().code(2);
}

/// Bash with the script completes `dsv4-kv rep`.
#[test]
fn bash_completes_a_command() {
    let script = format!(
        "{}\nCOMP_WORDS=(dsv4-kv rep); COMP_CWORD=1; _dsv4__kv dsv4-kv rep dsv4-kv; echo \"${{COMPREPLY[@]}}\"",
        printed("completions bash")
    );
    let output =
        Command::new("bash").arg("-c").arg(script).assert().success().get_output().stdout.clone();
    assert_eq!(String::from_utf8_lossy(&output).trim(), "replay");
}

/// A trace of two requests with the same prompt of 140 tokens, of which the second reuses 128.
fn same_prompt_twice() -> tempfile::NamedTempFile {
    let trace = tempfile::NamedTempFile::new().expect("a temporary file");
    let line = |at: u32| {
        format!(
            r#"{{"timestamp": {at}, "input_length": 140, "output_length": 40, "hash_ids": [1]}}"#
        )
    };
    fs::write(trace.path(), format!("{}\n{}\n", line(0), line(200))).expect("room for two lines");
    trace
}

/// A request that shares a block with another: the map shows both, and the rows have the error of E4M3.
#[test]
fn inspect_shows_shared_blocks_and_the_error_of_quantisation() {
    let trace = same_prompt_twice();
    let options = format!("inspect --shrink 1 --layer 1 --json --trace {}", trace.path().display());
    let report: Value = serde_json::from_str(&printed(&options)).expect("one JSON value");
    assert_eq!((&report["request"], &report["tokens"]), (&1.into(), &140.into()));
    let blocks = report["blocks"].as_array().expect("a list");
    let own: Vec<_> =
        blocks.iter().map(|block| block["is_own"].as_bool().expect("a flag")).collect();
    assert_eq!(own, [false, true]);
    assert_eq!(blocks[0]["shared_with"], Value::from(vec![0]));
    assert_eq!(blocks[1]["shared_with"], Value::from(Vec::<u32>::new()));
    let rows = report["rows"].as_array().expect("a list");
    assert_eq!((rows.len(), &rows[1]["what"]), (2, &"entry 34 of 4 tokens each in layer 1".into()));
    for row in rows {
        let groups = row["groups"].as_array().expect("a list");
        let errors: Vec<_> =
            groups.iter().map(|group| group["relative_rms"].as_f64().expect("a number")).collect();
        assert_eq!(errors.len(), 8);
        assert!(errors[..7].iter().all(|error| (1e-3..1.0 / 16.0).contains(error)), "{errors:?}");
        assert!(errors[7] < 1.0 / 256.0, "{errors:?}");
    }
    let text = printed(options.replace(" --json", "").as_str());
    assert!(text.contains("prefix tree, also of request 0"), "{text}");
    for (more, expected) in [
        ("--request 2", "the load has 2 requests"),
        ("--layer 99", "the model has 5 layers"),
        ("--position 11", "the rows of tokens 12 to 139"),
    ] {
        let message = kv(&format!("{options} {more}").replace(" --layer 1 ", " ")).assert().code(2);
        let message = String::from_utf8(message.get_output().stderr.clone()).expect("UTF-8");
        assert!(message.contains(expected), "{message}");
    }
}

/// A request that the cache cannot show is refused with the reason, before the load runs.
#[test]
fn inspect_refuses_requests_that_it_cannot_show() {
    let refused = |requests: &[(u32, u32)], more: &str| {
        let trace = tempfile::NamedTempFile::new().expect("a temporary file");
        let line = |&(input, output): &(u32, u32)| {
            format!(
                "{{\"timestamp\": 0, \"input_length\": {input}, \"output_length\": {output}}}\n"
            )
        };
        let lines: String = requests.iter().map(line).collect();
        fs::write(trace.path(), lines).expect("room for two lines");
        let options = format!("inspect --shrink 1 {more} --trace {}", trace.path().display());
        let message = kv(&options).assert().code(2).get_output().stderr.clone();
        String::from_utf8(message).expect("UTF-8")
    };
    // Longer than any context of the model.
    let message = refused(&[(10, 3), (2_000_000, 3)], "--request 1");
    assert!(message.contains("--request 1: it needs 2000002 tokens"), "{message}");
    let message = refused(&[(10, 1), (2_000_000, 3)], "");
    assert!(message.contains("the load has no request to show"), "{message}");
    assert!(!message.contains("--request "), "{message}");
    let message = refused(&[(10, 1)], "--request 0");
    assert!(message.contains("--request 0: it is gone"), "{message}");
}

/// The checkpoint inside a prompt has no rows of draft layers, so that these have none of the tokens that are reused. In
/// other layers, of other tokens and of a request that reuses nothing there is a row.
#[test]
fn inspect_says_which_rows_of_a_draft_layer_do_not_exist() {
    let trace = same_prompt_twice();
    let options = format!("inspect --shrink 1 --trace {}", trace.path().display());
    for (more, exists) in [
        ("--layer 4 --position 127", false),
        ("--layer 4 --position 128", true),
        ("--layer 0 --position 127", true),
        ("--layer 4 --position 127 --request 0", true),
    ] {
        let report = printed(&format!("{options} {more} --json"));
        let report: Value = serde_json::from_str(&report).expect("one JSON value");
        let row = &report["rows"][0];
        assert_eq!(row["exists"], exists, "{more}: {row}");
        let groups = row["groups"].as_array().expect("a list");
        assert_eq!(groups.len(), if exists { 8 } else { 0 }, "{more}");
        let mut errors =
            groups.iter().map(|group| group["relative_rms"].as_f64().expect("a number"));
        assert!(errors.all(|error| error < 1.0 / 16.0), "{more}: {row}");
    }
    let text = printed(&format!("{options} --layer 4 --position 100"));
    assert!(text.contains("there is no such row") && !text.contains("relative rms"), "{text}");
}
