//! Prints committed PTX: a whole module, or one kernel with the items to which it refers.
//!
//! The PTX in `host/ptx/` is compressed, so that a pager cannot show it.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Write};

use anyhow::{Context, Result, bail};

use super::manifest::Manifest;

/// Prints the kernel called `kernel` as built for the target `cpu`, or the whole module.
///
/// # Errors
/// There is no such target or kernel; the error lists the existing ones.
pub fn run(kernel: Option<&str>, cpu: &str) -> Result<()> {
    let manifest = Manifest::read()?;
    let record = manifest.targets.iter().find(|record| record.cpu == cpu).with_context(|| {
        let targets: Vec<_> = manifest.targets.iter().map(|record| record.cpu.as_str()).collect();
        format!("no PTX for target {cpu:?}; there is: {}", targets.join(", "))
    })?;
    let ptx = record.read_ptx()?;
    match kernel {
        Some(kernel) => print(&extract(&ptx, &items(&ptx), kernel)?),
        None => print(&ptx),
    }
}

/// Prints `text`. A reader that closes the pipe early, as `head` does, is not an error.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write to standard output"),
    }
}

/// The directives of the module, the entry `kernel`, and the functions and variables to which it refers, directly or
/// indirectly. The result is a module that `ptxas` accepts.
fn extract(ptx: &str, items: &[Item<'_>], kernel: &str) -> Result<String> {
    let Some(entry) = items.iter().position(|item| item.is_entry() && item.name == kernel) else {
        let entries = items.iter().filter(|item| item.is_entry()).map(|item| item.name);
        bail!("no kernel {kernel:?}; there is: {}", entries.collect::<Vec<_>>().join(", "));
    };
    let mut kept = BTreeSet::from([entry]);
    let mut open = vec![entry];
    while let Some(at) = open.pop() {
        let names: BTreeSet<&str> = identifiers(items[at].text).collect();
        for (other, item) in items.iter().enumerate() {
            if !item.is_entry() && names.contains(item.name) && kept.insert(other) {
                open.push(other);
            }
        }
    }
    let directives = ptx.lines().filter(|line| {
        [".version", ".target", ".address_size"].iter().any(|word| line.starts_with(word))
    });
    let parts = directives.chain(kept.into_iter().map(|at| items[at].text.trim_end()));
    Ok(parts.collect::<Vec<_>>().join("\n") + "\n")
}

/// An entry, a function or a variable of a module.
#[derive(Debug)]
struct Item<'a> {
    name: &'a str,
    text: &'a str,
}

impl Item<'_> {
    fn is_entry(&self) -> bool {
        self.text.lines().next().is_some_and(|line| line.contains(".entry"))
    }
}

/// The items of a module, in order. An item starts with a directive at the start of a line, and ends with the `}` of
/// its body or, if it has none, with `;`.
fn items(ptx: &str) -> Vec<Item<'_>> {
    const STARTS: [&str; 9] = [
        ".visible", ".weak", ".common", ".extern", ".entry", ".func", ".global", ".const",
        ".shared",
    ];
    let mut items = Vec::new();
    let mut start = None;
    let (mut depth, mut at) = (0_usize, 0);
    for line in ptx.split_inclusive('\n') {
        let code = line.split("//").next().unwrap_or_default().trim_end();
        if start.is_none() && STARTS.iter().any(|word| code.starts_with(word)) {
            start = Some(at);
        }
        at += line.len();
        depth = (depth + code.matches('{').count()).saturating_sub(code.matches('}').count());
        let ends = depth == 0 && (code == "}" || code.ends_with(';'));
        if let Some(start) = start.take_if(|_| ends) {
            let text = &ptx[start..at];
            items.push(Item { name: name(text), text });
        }
    }
    items
}

/// The name that an item declares. It precedes the parameters, the array length, the value or the end of the item.
fn name(item: &str) -> &str {
    let head = match item.split_once(".func").or_else(|| item.split_once(".entry")) {
        // The results of a function precede its name, in parentheses.
        Some((_, after)) => match after.trim_start().strip_prefix('(') {
            Some(results) => results.split_once(')').map_or(results, |(_, after)| after),
            None => after,
        },
        None => item,
    };
    let head = head.split(['(', '[', '=', ';', '{']).next().unwrap_or_default();
    head.split_whitespace().next_back().unwrap_or_default()
}

/// The words of `text` that can be names (PTX ISA section 4.5).
fn identifiers(text: &str) -> impl Iterator<Item = &str> {
    text.split(|letter: char| !letter.is_ascii_alphanumeric() && !"_$%".contains(letter))
        .filter(|word| !word.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx::module::Module;

    const PTX: &str = "\
// Generated
.version 8.0
.target sm_90a
.address_size 64

.extern .shared .align 16 .b8 arena[];
.global .align 4 .b8 table_$_0[8] = {0, 0, 0, 0, 0, 0, 128, 63};
.global .align 4 .b8 other[8];
.func (.param .b32 out) helper(
	.param .b32 a
)
{
	call.uni (retval0), deeper, (param0);
	ret;
}
.func deeper()
{
	ld.global.b32 %r1, [table_$_0];
	ret;
}
.visible .entry one(
	.param .u64 one_param_0
)
{
	{
	call.uni (retval0), helper, (param0);
	}
	ret;
}
	// .globl two
.visible .entry two()
{
	mov.u32 %r1, arena;
	ret;
}
";

    #[test]
    fn a_kernel_comes_with_what_it_refers_to() {
        let items = items(PTX);
        let one = extract(PTX, &items, "one").expect("an entry");
        for part in [".version 8.0\n", ".func (.param", ".func deeper", "table_$_0[8]"] {
            assert!(one.contains(part), "{part} is missing:\n{one}");
        }
        assert!(!one.contains("arena") && !one.contains("other") && !one.contains("two"), "{one}");
        let two = extract(PTX, &items, "two").expect("an entry");
        assert!(two.contains("arena") && !two.contains("helper"), "{two}");
    }

    #[test]
    fn an_unknown_kernel_is_answered_with_the_list() {
        let items = items(PTX);
        let error = extract(PTX, &items, "three").expect_err("no entry").to_string();
        assert!(error.contains("one, two"), "{error}");
        let function = extract(PTX, &items, "helper").expect_err("no entry").to_string();
        assert!(function.contains("no kernel"), "{function}");
    }

    #[test]
    fn every_committed_kernel_is_found_alone() {
        for (number, record) in Manifest::read().expect("a manifest").targets.iter().enumerate() {
            let ptx = record.read_ptx().expect("committed PTX");
            let items = items(&ptx);
            // All kernels of one target, and every eighth of the others, which the same compiler wrote.
            for kernel in record.entries.keys().step_by(if number == 0 { 1 } else { 8 }) {
                let alone = Module::parse(&extract(&ptx, &items, kernel).expect("an entry"));
                assert_eq!(alone.target, record.cpu);
                let names: Vec<_> = alone.entries.iter().map(|entry| &entry.name).collect();
                assert_eq!(names, [kernel]);
                assert_eq!(alone.entries[0].counts, record.entries[kernel], "{kernel}");
            }
        }
    }
}
