//! The documents: every link has a target, the book includes all documents, and the example in the README is the one
//! that is run.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace")
}

/// All Markdown files of a folder and its subfolders.
fn markdown(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("it can be listed").path();
        if path.is_dir() {
            markdown(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
}

/// The documents to check.
fn documents() -> Vec<PathBuf> {
    let root = root();
    let mut found = Vec::new();
    markdown(&root.join("docs"), &mut found);
    let others = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "host/README.md"];
    found.extend(others.map(|name| root.join(name)));
    found
}

/// Links and pictures of a document, and the anchors of its headings as GitHub makes them.
fn links_and_anchors(text: &str) -> (Vec<String>, BTreeSet<String>) {
    let (mut links, mut anchors, mut heading) = (Vec::new(), BTreeSet::new(), None::<String>);
    let mut seen: HashMap<String, u32> = HashMap::new();
    for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                links.push(dest_url.into_string());
            }
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::Text(part) | Event::Code(part) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&part);
                }
            }
            Event::End(TagEnd::Heading(_)) => {
                let slug = slug(&heading.take().unwrap_or_default());
                let count = seen.entry(slug.clone()).or_default();
                anchors.insert(if *count == 0 { slug } else { format!("{slug}-{count}") });
                *count += 1;
            }
            _ => {}
        }
    }
    (links, anchors)
}

fn slug(heading: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || [' ', '-', '_'].contains(c);
    heading.to_lowercase().chars().filter(kept).map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Why a link of `document` is broken, if it is.
fn broken(document: &Path, link: &str) -> Option<String> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
    let folder = document.parent().expect("a file is in a folder");
    let target = if path.is_empty() { document.to_owned() } else { folder.join(path) };
    if !target.exists() {
        return Some(format!("{}: {link}: no such file", document.display()));
    }
    let docs = root().join("docs");
    let is_outside = target.canonicalize().is_ok_and(|target| !target.starts_with(&docs));
    if document.starts_with(&docs) && is_outside {
        return Some(format!("{}: {link}: not in the book", document.display()));
    }
    if anchor.is_empty() || target.extension().is_none_or(|extension| extension != "md") {
        return None;
    }
    let text = fs::read_to_string(&target).expect("a document");
    let (_, anchors) = links_and_anchors(&text);
    (!anchors.contains(anchor)).then(|| format!("{}: {link}: no such heading", document.display()))
}

#[test]
fn links_lead_to_files_and_headings() {
    let mut found = Vec::new();
    let mut count = 0;
    for document in documents() {
        let text = fs::read_to_string(&document).expect("a document");
        let (links, _) = links_and_anchors(&text);
        count += links.len();
        found.extend(links.iter().filter_map(|link| broken(&document, link)));
    }
    assert!(count > 100, "{count} links");
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn a_link_to_nowhere_is_found() {
    let here = root().join("docs/architecture.md");
    for (link, expected) in [
        ("no-such-file.md", Some("no such file")),
        ("specification.md#no-such-heading", Some("no such heading")),
        ("../README.md", Some("not in the book")),
        ("#d1-one-block-for-all-layers", None),
        ("https://example.org/nothing", None),
    ] {
        let found = broken(&here, link);
        assert_eq!(found.is_some(), expected.is_some(), "{link}: {found:?}");
        assert!(found.is_none_or(|found| found.contains(expected.unwrap_or_default())));
    }
    assert_eq!(slug("D8 One kernel table"), "d8-one-kernel-table");
}

#[test]
fn the_book_has_every_document_once() {
    let docs = root().join("docs");
    let text = fs::read_to_string(docs.join("SUMMARY.md")).expect("the summary");
    let mut listed: Vec<_> =
        links_and_anchors(&text).0.iter().map(|link| docs.join(link)).collect();
    listed.push(docs.join("SUMMARY.md"));
    let mut there = Vec::new();
    markdown(&docs, &mut there);
    listed.sort();
    there.sort();
    assert_eq!(listed, there, "docs/SUMMARY.md lists every file of docs/");
}

/// The first code block of a text that begins with the line `first`.
fn block<'t>(text: &'t str, first: &str) -> &'t str {
    let start = text.find(first).expect("the block is there");
    let end = text[start..].find("```").expect("it ends");
    &text[start..start + end]
}

/// The example of the library's README is compiled and run as a doctest.
#[test]
fn the_example_of_the_readme_is_the_one_that_is_run() {
    let first = "use dsv4_kv::device::{EmuDevice, EmuOptions};";
    let read = |name: &str| fs::read_to_string(root().join(name)).expect("a document");
    let (here, there) = (read("README.md"), read("host/README.md"));
    assert_eq!(block(&here, first), block(&there, first));
    assert!(block(&there, first).lines().count() <= 40);
}

/// The lines of a file between `ANCHOR: name` and `ANCHOR_END: name`, without a code block's fences and common indentation.
fn anchored(file: &str, name: &str) -> String {
    let text = fs::read_to_string(root().join(file)).expect("the file of an anchor");
    let (begin, end) = (format!("ANCHOR: {name}"), format!("ANCHOR_END: {name}"));
    let lines = text.lines().skip_while(|line| !line.contains(&begin)).skip(1);
    let lines = lines.take_while(|line| !line.contains(&end));
    let lines: Vec<_> = lines.filter(|line| !line.starts_with("```")).collect();
    let indented = |line: &&str| line.len() - line.trim_start().len();
    let filled = lines.iter().filter(|line| !line.trim().is_empty());
    let margin = filled.map(indented).min().expect("the anchor has lines");
    lines.iter().map(|line| format!("{}\n", line.get(margin..).unwrap_or_default())).collect()
}

/// A code block after `<!-- file:name -->` is the code between the anchors `name` of that file, which is compiled and run.
#[test]
fn quoted_code_is_the_code_that_is_run() {
    let mut count = 0;
    for document in documents() {
        let text = fs::read_to_string(&document).expect("a document");
        for quoted in text.split("<!-- ").skip(1) {
            let Some((place, rest)) = quoted.split_once(" -->\n```") else { continue };
            if place.starts_with("ANCHOR: ") {
                continue;
            }
            let (file, name) = place.split_once(':').expect("a file and an anchor");
            let code = rest.split_once('\n').and_then(|(_, code)| code.split_once("```"));
            let (code, _) = code.expect("a code block");
            assert_eq!(code, anchored(file, name), "{}: {place}", document.display());
            count += 1;
        }
    }
    assert!(count > 5, "{count} blocks");
}

/// The places named in the paragraphs "Where" of a text that do not exist in the tree, and the number of all places. A
/// path is relative to the workspace, to `crates`, or to the previous place. Names after the word "test" are names of
/// tests.
fn missing_places(text: &str) -> (Vec<String>, usize) {
    let (mut missing, mut count) = (Vec::new(), 0);
    for place in text.split("- **Where.**").skip(1) {
        let place = place.split("\n\n").next().unwrap_or_default();
        let place = place.split(" test").next().and_then(|place| place.split(" Test").next());
        let mut near = vec![root().join("crates"), root()];
        for name in place.unwrap_or_default().split('`').skip(1).step_by(2) {
            let (before, list) = name.split_once('{').unwrap_or(("", name));
            for part in list.trim_end_matches('}').split(',') {
                let name = format!("{before}{part}").replace("::", "/src/");
                let names =
                    ["{}", "{}.rs", "src/{}", "src/{}.rs"].map(|path| path.replace("{}", &name));
                let mut paths =
                    near.iter().flat_map(|folder| names.iter().map(|name| folder.join(name)));
                count += 1;
                let Some(path) = paths.find(|path| path.exists()) else {
                    missing.push(name);
                    continue;
                };
                near.splice(0..0, [path.clone(), path.parent().expect("a folder").to_owned()]);
            }
        }
    }
    (missing, count)
}

#[test]
fn the_places_of_decisions_are_in_the_tree() {
    let text = fs::read_to_string(root().join("docs/architecture.md")).expect("a document");
    let (missing, count) = missing_places(&text);
    assert!(count > 80, "{count} places");
    assert!(missing.is_empty(), "docs/architecture.md names {missing:?}");
    let text =
        "- **Where.** `host` `ledger/{fork,room}`, `simt::no`, `kernels-gpu` `linear` (`tiled`).";
    assert_eq!(missing_places(text), (vec!["ledger/room".into(), "simt/src/no".into()], 7));
}
