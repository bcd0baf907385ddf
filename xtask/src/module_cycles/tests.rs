//! Tests of the check: cycles that it must find, and trees without a cycle.

use std::fs;
use std::path::Path;

use super::*;

/// Writes `files` (path and text) to a folder, and checks the module tree whose root is the first file.
fn check(files: &[(&str, &str)]) -> Vec<Vec<String>> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (path, text) in files {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("created");
        fs::write(path, text).expect("written");
    }
    let graph = imports(&folder.path().join(files[0].0)).expect("a readable tree");
    let shown = |file: &PathBuf| {
        file.strip_prefix(folder.path()).expect("in the folder").display().to_string()
    };
    let cycles = graph.cycles();
    for cycle in &cycles {
        assert!(cycle.way_around.len() >= 2);
        assert_eq!(cycle.way_around[0].from, cycle.way_around.last().expect("a way").to);
    }
    cycles.iter().map(|cycle| cycle.files.iter().map(shown).collect()).collect()
}

#[test]
fn a_cycle_of_three_files_is_found() {
    let cycles = check(&[
        ("lib.rs", "mod a; mod b; mod c; mod d;"),
        ("a.rs", "use crate::b::B; pub struct A(B);"),
        ("b.rs", "use super::c; pub struct B; fn f() { c::made() }"),
        ("c.rs", "pub fn made() { let _: Option<crate::a::A> = None; }"),
        ("d.rs", "use crate::a::A; pub struct D(A);"),
    ]);
    assert_eq!(cycles, [["a.rs", "b.rs", "c.rs"]]);
}

#[test]
fn a_cycle_is_described_with_its_imports() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (path, text) in [
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "\nuse crate::b::B;\npub struct A(B);"),
        ("b.rs", "pub struct B(Box<crate::a::A>);"),
    ] {
        fs::write(folder.path().join(path), text).expect("written");
    }
    let cycles = imports(&folder.path().join("lib.rs")).expect("a readable tree").cycles();
    let text = describe("made (lib)", &cycles[0]);
    assert!(text.contains("made (lib): 2 files import each other"), "{text}");
    assert!(text.contains("a.rs:2 imports crate::b::B from"), "{text}");
    assert!(text.contains("b.rs:1 imports crate::a::A from"), "{text}");
}

#[test]
fn re_exports_are_followed_to_the_file_that_defines() {
    let cycles = check(&[
        ("lib.rs", "mod a; mod b; pub use a::A; pub use b::*;"),
        ("a.rs", "use crate::B; pub struct A; fn f(_: B) {}"),
        ("b.rs", "pub struct B; fn f(_: crate::A) {}"),
    ]);
    assert_eq!(cycles, [["a.rs", "b.rs"]]);
}

#[test]
fn a_parent_that_only_re_exports_is_in_no_cycle() {
    let cycles = check(&[
        ("lib.rs", "mod inner; pub use inner::{A, B};"),
        ("inner/mod.rs", "mod a; mod b; pub use a::A; pub(crate) use b::B;"),
        ("inner/a.rs", "use super::B; pub struct A(B);"),
        ("inner/b.rs", "pub struct B;"),
    ]);
    assert_eq!(cycles, Vec::<Vec<String>>::new());
}

#[test]
fn a_parent_whose_own_items_its_children_use_is_in_a_cycle() {
    let cycles = check(&[
        ("lib.rs", "mod inner;"),
        ("inner/mod.rs", "mod a; pub struct Shared; fn f() { a::helper() }"),
        ("inner/a.rs", "pub fn helper() { let _ = super::Shared; }"),
    ]);
    assert_eq!(cycles, [["inner/a.rs", "inner/mod.rs"]]);
}

#[test]
fn a_function_with_the_name_of_a_module_hides_nothing() {
    let cycles = check(&[
        ("lib.rs", "mod a; mod launch; mod run; pub use run::launch;"),
        ("launch.rs", "pub struct Launch;"),
        ("a.rs", "use super::launch::Launch; pub struct A(Launch);"),
        ("run.rs", "use crate::a::A; pub fn launch(_: A) {}"),
    ]);
    assert_eq!(cycles, Vec::<Vec<String>>::new());
}

#[test]
fn tests_methods_macro_bodies_and_local_names_are_no_imports() {
    let cycles = check(&[
        ("lib.rs", "mod a; mod b; mod shared;"),
        (
            "a.rs",
            "pub struct A; impl A { pub fn go(&self) {} }
             #[cfg(test)] mod tests { use crate::b::B; fn f(_: B) {} }
             #[test] fn g() { crate::b::made(); }
             macro_rules! by_name { () => { $crate::b::made() }; }
             fn local() { let made = 1; let b = made; }",
        ),
        ("b.rs", "use crate::a::A; pub struct B; pub fn made() {} fn f(a: A) { a.go() }"),
        ("shared.rs", "use std::fmt; use half::bf16; fn f(_: bf16) -> fmt::Result { Ok(()) }"),
    ]);
    assert_eq!(cycles, Vec::<Vec<String>>::new());
}

#[test]
fn macros_and_what_is_handed_to_them_are_imports() {
    let handed = check(&[
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "pub struct A; fn f() { println!(\"{}\", crate::b::VALUE) }"),
        ("b.rs", "pub const VALUE: u32 = 0; fn f(_: crate::a::A) {}"),
    ]);
    assert_eq!(handed, [["a.rs", "b.rs"]]);
    let by_name = check(&[
        ("lib.rs", "#[macro_use] mod a; mod b;"),
        ("a.rs", "macro_rules! twice { ($x:expr) => { $x + $x }; } fn f() { crate::b::four(); }"),
        ("b.rs", "pub fn four() -> u32 { twice!(2) }"),
    ]);
    assert_eq!(by_name, [["a.rs", "b.rs"]]);
    let generated = check(&[
        ("lib.rs", "mod a; mod b;"),
        ("a.rs", "structs! { One Two } fn f() { crate::b::four(); }"),
        ("b.rs", "use crate::a::One; pub fn four() {} fn f(_: One) {}"),
    ]);
    assert_eq!(generated, [["a.rs", "b.rs"]]);
}

#[test]
fn a_module_in_a_file_is_part_of_the_file() {
    let cycles = check(&[
        ("lib.rs", "mod a { pub mod deep { pub fn f() { super::super::b::g() } } } mod b;"),
        ("b.rs", "pub fn g() { crate::a::deep::f() }"),
    ]);
    assert_eq!(cycles, [["b.rs", "lib.rs"]]);
}

#[test]
fn long_files_and_expectations_are_seen() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let write = |name: &str, text: String| {
        fs::write(folder.path().join(name), text).expect("written");
    };
    write("good.rs", "// line\n".repeat(500));
    assert_eq!(sizes::faults(folder.path()).expect("readable"), Vec::<String>::new());
    write("long.rs", "// line\n".repeat(501));
    let lint = ["clippy", "too_many_arguments"].join("::");
    write("many.rs", format!("#[expect({lint})]\n").repeat(5));
    let faults = sizes::faults(folder.path()).expect("readable").join("\n");
    assert!(faults.contains("long.rs has 501 lines"), "{faults}");
    assert!(faults.contains("expected 5 times, more than 4: many.rs (5)"), "{faults}");
}

#[test]
fn this_workspace_is_readable() {
    for target in targets().expect("cargo lists the targets") {
        assert!(imports(&target.src_path).expect("readable").len() > 0, "{}", target.title());
    }
    assert!(Path::new(env!("CARGO_MANIFEST_DIR")).is_dir());
}
