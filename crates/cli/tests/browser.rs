//! The pages of `--report` in a browser: headless Chromium shows them in light and dark mode, at the widths of a phone
//! and of a desktop screen.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use assert_cmd::cargo::cargo_bin;
use tempfile::TempDir;

/// Names of the program in common distributions.
const NAMES: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];
/// Widths of the window: of a desktop screen, and of a phone.
const WIDE: u32 = 1200;
const PHONE: u32 = 500;

fn chromium() -> Command {
    let found = NAMES.iter().find(|name| Command::new(name).arg("--version").output().is_ok());
    let mut command = Command::new(found.expect("install chromium: apt-get install chromium"));
    command.args([
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        "--v=0",
    ]);
    command
}

fn show(page: &Path, options: &[&str]) -> Output {
    let url = format!("file://{}", page.display());
    let output = chromium().args(options).arg(url).output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(!log.contains("CONSOLE"), "{log}");
    output
}

/// A page that the program has written, and the folder for its screenshots: `DSV4_SCREENSHOTS` if that is set.
struct Page {
    _folder: TempDir,
    file: PathBuf,
    screenshots: PathBuf,
}

impl Page {
    /// Runs the program with `--report`.
    fn of(arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("report.html");
        let kept = std::env::var_os("DSV4_SCREENSHOTS").map(PathBuf::from);
        let mut program = Command::new(cargo_bin!("dsv4-kv"));
        let ran = program.args(arguments).arg("--report").arg(&file).output().expect("it starts");
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        let screenshots = kept.unwrap_or_else(|| folder.path().to_owned());
        Self { _folder: folder, file, screenshots }
    }

    /// The page as the browser has parsed it. Errors on the browser's console fail the test.
    fn dom(&self) -> String {
        let dom = show(&self.file, &["--dump-dom"]).stdout;
        String::from_utf8(dom).expect("UTF-8")
    }

    /// Takes the screenshots, and stores them as `report-NAME-wide.png` and so on.
    fn screenshots(&self, name: &str) {
        let mut pictures = Vec::new();
        for (kind, width, dark) in
            [("wide", WIDE, false), ("phone", PHONE, false), ("dark", PHONE, true)]
        {
            let file = self.screenshots.join(format!("report-{name}-{kind}.png"));
            let size = format!("--window-size={width},3600");
            let shot = format!("--screenshot={}", file.display());
            let scheme = if dark { "--force-dark-mode" } else { "--disable-dark-mode" };
            show(&self.file, &[&size, &shot, scheme]);
            let png = std::fs::read(&file).expect("a screenshot");
            let length = png.len();
            assert!(png.starts_with(b"\x89PNG") && length > 10_000, "{kind}: {length} bytes");
            pictures.push(png);
        }
        assert_ne!(pictures[1], pictures[2], "the dark page looks like the light one");
    }
}

#[test]
#[ignore = "needs chromium: apt-get install chromium, then cargo test -p dsv4-kv-cli --test browser -- --ignored"]
fn the_report_of_a_replay_is_shown_light_and_dark_wide_and_narrow() {
    let page = Page::of(&["replay", "--execute", "bookkeeping", "--requests", "200"]);
    let dom = page.dom();
    assert_eq!(dom.matches("<svg").count(), 9);
    for part in ["limited by", "Occupancy (%)", "Time to first token (requests)", "p99 "] {
        assert!(dom.contains(part), "{part}");
    }
    page.screenshots("replay");
}

/// Uses a made-up result: a measurement would need a GPU, but its page does not.
#[test]
#[ignore = "needs chromium: apt-get install chromium, then cargo test -p dsv4-kv-cli --test browser -- --ignored"]
fn the_report_of_a_bench_is_shown_light_and_dark_wide_and_narrow() {
    let result = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/bench/result.json");
    let page = Page::of(&["bench", "--from", result.to_str().expect("UTF-8")]);
    let dom = page.dom();
    // Rows of every suite; a step has rows for both phases, by kind.
    let rows = 5 + 2 + 2 + 1 + 2 + 2 * 9;
    assert_eq!(dom.matches(r#"<div class="scale">"#).count(), rows);
    assert_eq!(dom.matches(r#"<div class="roof""#).count(), rows);
    for part in ["made-up device", "The roof of a kernel is a copy", "above the roof, 2 of 5"] {
        assert!(dom.contains(part), "{part}");
    }
    page.screenshots("bench");
}
