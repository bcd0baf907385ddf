//! The report in a browser: headless Chromium shows it, light and dark, as wide as a phone and as a desk.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use assert_cmd::cargo::cargo_bin;

/// Where Debian and Ubuntu put it.
const NAMES: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

fn chromium() -> Command {
    let found = NAMES.iter().find(|name| Command::new(name).arg("--version").output().is_ok());
    let mut command = Command::new(found.expect("install chromium: apt-get install chromium"));
    command.args([
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
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

/// Screenshots stay in `DSV4_SCREENSHOTS`, if that is set.
#[test]
#[ignore = "needs chromium: apt-get install chromium, then cargo test -p dsv4-kv-cli --test browser -- --ignored"]
fn the_report_is_shown_light_and_dark_wide_and_narrow() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let kept = std::env::var_os("DSV4_SCREENSHOTS").map(PathBuf::from);
    let screenshots = kept.as_deref().unwrap_or(folder.path());
    let page = folder.path().join("report.html");
    let replay = ["replay", "--execute", "bookkeeping", "--requests", "200", "--report"];
    let ran =
        Command::new(cargo_bin!("dsv4-kv")).args(replay).arg(&page).output().expect("it starts");
    assert!(ran.status.success());
    let dom = show(&page, &["--dump-dom"]).stdout;
    let dom = String::from_utf8(dom).expect("UTF-8");
    assert_eq!(dom.matches("<svg").count(), 6);
    assert!(dom.contains("limited by") && dom.contains("Occupancy (%)"));
    let mut sizes = Vec::new();
    for (name, size, dark) in
        [("wide", "1200,2600", false), ("phone", "400,3000", false), ("dark", "400,3000", true)]
    {
        let file = screenshots.join(format!("report-{name}.png"));
        let (size, shot) =
            (format!("--window-size={size}"), format!("--screenshot={}", file.display()));
        let scheme = if dark { "--force-dark-mode" } else { "--disable-dark-mode" };
        show(&page, &[&size, &shot, scheme]);
        let png = std::fs::read(&file).expect("a screenshot");
        assert!(png.starts_with(b"\x89PNG") && png.len() > 10_000, "{name}: {} bytes", png.len());
        sizes.push(png);
    }
    assert_ne!(sizes[1], sizes[2], "the dark page looks like the light one");
}
