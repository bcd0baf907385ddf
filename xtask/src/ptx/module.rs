//! Reads PTX text as rustc's backend writes it: directives, entries, parameters, and the number of recorded
//! instructions of each entry. PTX ISA sections 4.3 and 5 to 10.

use std::collections::BTreeMap;

use super::paths::Paths;

/// Number of instructions of each recorded kind in an entry; see [`kind`].
pub type Counts = BTreeMap<String, u32>;

/// One `.param` of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Param {
    /// Its size in bytes.
    pub size: u32,
    /// Its alignment in bytes.
    pub align: u32,
}

/// One `.entry`.
#[derive(Debug, Default)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Its parameters, in order.
    pub params: Vec<Param>,
    /// `.maxntid`: the most threads of a block, in x, y, z.
    pub max_threads: Option<String>,
    /// `.minnctapersm`: the fewest blocks that must fit on a multiprocessor at once.
    pub min_blocks: Option<u32>,
    /// `.reqnctapercluster`: the size of a cluster in blocks, in x, y, z.
    pub cluster: Option<String>,
    /// Whether it has variables in local memory.
    pub local_memory: bool,
    /// Number of calls of functions.
    pub calls: u32,
    /// Number of its recorded instructions, by kind.
    pub counts: Counts,
    paths: Paths,
}

/// One PTX module.
#[derive(Debug, Default)]
pub struct Module {
    /// `.version`.
    pub version: String,
    /// `.target`.
    pub target: String,
    /// Its entries, in the order of the text.
    pub entries: Vec<Entry>,
    /// Declarations of functions that are not defined in the module.
    pub extern_functions: Vec<String>,
    /// Functions that are not entries.
    pub functions: Vec<String>,
}

impl Module {
    /// Parses `text`. Unknown statements are ignored: `ptxas` checks the syntax.
    pub fn parse(text: &str) -> Self {
        let mut module = Self::default();
        let mut depth = 0_i32;
        for statement in statements(text) {
            module.read(&statement, depth > 0);
            depth += braces(&statement);
        }
        module
    }

    /// The entry called `name`.
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name == name)
    }

    fn read(&mut self, statement: &str, in_body: bool) {
        let words: Vec<&str> = statement.split_whitespace().collect();
        if in_body {
            if let Some(entry) = self.entries.last_mut() {
                entry.read_instruction(&words);
            }
            return;
        }
        match words.as_slice() {
            [".version", version, ..] => self.version = (*version).to_owned(),
            [".target", target, ..] => self.target = (*target).to_owned(),
            words if words.contains(&".func") => {
                let list = if words.contains(&".extern") {
                    &mut self.extern_functions
                } else {
                    &mut self.functions
                };
                list.push(statement.trim_end_matches('{').trim().to_owned());
            }
            words if words.contains(&".entry") => self.entries.push(read_header(statement)),
            _ => {}
        }
    }
}

impl Entry {
    /// The accesses to global memory, ends and indirect branches that it may execute before it waits for the earlier
    /// launches (`griddepcontrol.wait`).
    pub fn early(&self) -> Vec<&str> {
        self.paths.early()
    }

    fn read_instruction(&mut self, words: &[&str]) {
        for label in words.iter().filter_map(|word| word.strip_suffix(':')) {
            self.paths.label(label);
        }
        let is_predicated = words.iter().any(|word| word.starts_with('@'));
        let mut words = words.iter().copied().skip_while(|word| {
            // A scope, a label or a predicate may precede the instruction.
            matches!(*word, "{" | "}") || word.ends_with(':') || word.starts_with('@')
        });
        let Some(opcode) = words.next().map(|word| word.trim_end_matches(';')) else { return };
        match opcode.split('.').next() {
            Some("bra") => {
                if let Some(label) = words.next() {
                    self.paths.branch(label, is_predicated);
                }
            }
            Some("ret" | "exit" | "brx") => self.paths.leave(opcode, is_predicated),
            Some("trap") if !is_predicated => self.paths.trap(),
            Some("call") => self.calls += 1,
            _ => {}
        }
        if opcode == ".local" {
            self.local_memory = true;
        }
        // Under a predicate, some threads may not wait.
        if opcode == "griddepcontrol.wait" && !is_predicated {
            self.paths.wait();
        }
        if is_global(opcode) {
            self.paths.access(opcode);
        }
        if let Some(kind) = kind(opcode) {
            *self.counts.entry(kind).or_default() += 1;
        }
    }
}

/// Instructions that may precede the wait of a launch: `simt::grid::peek`, whose value is only a guess; the prefetch of
/// `simt::mem`, which changes nothing; and its early load, from memory that no launch writes.
const EARLY: [&str; 3] = [
    "ld.relaxed.gpu.global.b32",
    "cp.async.bulk.prefetch.L2.global",
    "ld.global.nc.L1::no_allocate.v4.u32",
];

/// Whether an instruction may access global memory and is not in `EARLY`.
fn is_global(opcode: &str) -> bool {
    let has = |spaces: &[&str]| {
        opcode
            .split('.')
            .filter_map(|part| part.split("::").next())
            .any(|part| spaces.contains(&part))
    };
    let is_global = match opcode.split('.').next() {
        // A copy names both of its spaces; commits of copies and waits for them name none.
        Some("cp") => has(&["global"]),
        Some("ld" | "st" | "atom" | "red" | "prefetch") => !has(&["param", "shared", "local"]),
        _ => false,
    };
    is_global && !EARLY.contains(&opcode)
}

/// The recorded kind of an instruction; `None` if it is not recorded.
///
/// Instructions are recorded if a compiler must not change their number silently: those that all lanes of a warp or all
/// threads of a block execute together (a copy in a branch would hang), atomics, tensor-core instructions, accesses of
/// at least 8 bytes per thread, and `generic` accesses, which mean that a pointer lost its address space.
pub fn kind(opcode: &str) -> Option<String> {
    let parts: Vec<&str> = opcode.split('.').collect();
    // The shared memory of another block of the cluster is `shared::cluster`.
    let space = || {
        let mut spaces = parts.iter().filter_map(|part| part.split("::").next());
        spaces.find(|part| ["global", "shared", "local"].contains(part))
    };
    let vector = || parts.iter().find(|part| ["v2", "v4", "v8"].contains(part));
    match parts.as_slice() {
        ["bar" | "barrier", "warp", ..] => Some("bar.warp".to_owned()),
        ["bar" | "barrier", ..] => Some("bar".to_owned()),
        [
            word @ ("shfl" | "vote" | "redux" | "match" | "elect" | "mma" | "wgmma" | "ldmatrix"
            | "cp" | "atom" | "red"),
            ..,
        ] => Some((*word).to_owned()),
        ["ld", "param", ..] => None,
        [access @ ("ld" | "st"), ..] => match (space(), vector()) {
            (Some(space), Some(vector)) => Some(format!("{access}.{space}.{vector}")),
            (Some(_), None) => None,
            (None, _) => Some(format!("{access}.generic")),
        },
        _ => None,
    }
}

/// Directives that end with their line, not with `;`.
const LINE_DIRECTIVES: [&str; 5] = [".version", ".target", ".address_size", ".file", ".loc"];

/// The statements of the text, without comments. A statement ends at `;`, at the `{` that opens a body or a scope, at a
/// `}` alone, and, for directives without `;`, at the end of the line.
fn statements(text: &str) -> Vec<String> {
    let mut statements = Vec::new();
    let mut open = String::new();
    for line in text.lines() {
        let line = line.split("//").next().unwrap_or_default().trim();
        let directive = LINE_DIRECTIVES.iter().any(|directive| line.starts_with(directive));
        for piece in line.split_inclusive(';') {
            open.push_str(piece);
            open.push(' ');
            let piece = piece.trim();
            if piece.ends_with(';') || piece == "{" || piece == "}" || directive {
                statements.push(std::mem::take(&mut open));
            }
        }
    }
    statements
}

fn braces(statement: &str) -> i32 {
    let count = |brace| i32::try_from(statement.matches(brace).count()).expect("a short statement");
    count('{') - count('}')
}

/// Reads `.visible .entry name( params ) directives {`.
fn read_header(statement: &str) -> Entry {
    let after = statement.split(".entry").nth(1).unwrap_or_default();
    let (name, rest) = after.split_once('(').unwrap_or((after, ""));
    let (params, directives) = rest.split_once(')').unwrap_or((rest, ""));
    let value = |directive: &str| {
        let text = directives.split(directive).nth(1)?;
        Some(text.split(['.', '{']).next()?.trim().to_owned())
    };
    Entry {
        name: name.trim().to_owned(),
        params: params.split(',').filter_map(read_param).collect(),
        max_threads: value(".maxntid"),
        min_blocks: value(".minnctapersm").and_then(|text| text.parse().ok()),
        cluster: value(".reqnctapercluster"),
        ..Entry::default()
    }
}

/// Reads `.param .u64 .ptr .align 1 x` or `.param .align 4 .b8 x[12]`.
fn read_param(text: &str) -> Option<Param> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let scalar = words
        .iter()
        .find_map(|word| word.strip_prefix(".u").or_else(|| word.strip_prefix(".b")))?
        .parse::<u32>()
        .ok()?
        / 8;
    let array = words.last()?.split_once('[').and_then(|(_, length)| length.strip_suffix(']'));
    let Some(length) = array else { return Some(Param { size: scalar, align: scalar }) };
    let align = words.iter().skip_while(|word| **word != ".align").nth(1)?.parse().ok()?;
    Some(Param { size: scalar * length.parse::<u32>().ok()?, align })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
//
.version 7.8
.target sm_90
.address_size 64
.shared .align 16 .b8 arena[4096];
.visible .entry amax(
	.param .u64 .ptr .align 1 amax_param_0,
	.param .align 4 .b8 amax_param_1[12]
)
.maxntid 128, 1, 1
.minnctapersm 8
{
	.reg .pred 	%p<3>;
	ld.param.b64 	%rd2, [amax_param_0];
	ld.global.v4.b32 	{%r1, %r2, %r3, %r4}, [%rd6];
	shfl.sync.bfly.b32 	%r8, %r7, 16, 31, -1;
	@%p1 bra 	$L__BB0_2;
	// begin inline asm
	{ .reg .pred q; setp.ne.u32 q, %r1, 0; @q st.shared.v2.b32 [%r2], {%r1, %r2}; }
	// end inline asm
$L__BB0_2:
	bar.sync 	0;
	bar.warp.sync 	-1;
	st.b32 	[%rd1], %r1;
	ret;
}
.visible .entry next(
	.param .u32 next_param_0
)
{
	vote.sync.ballot.b32 %r1, %p1, -1;
	ret;
}
";

    #[test]
    fn a_module_is_read() {
        let module = Module::parse(TEXT);
        assert_eq!((module.version.as_str(), module.target.as_str()), ("7.8", "sm_90"));
        assert!(module.extern_functions.is_empty() && module.functions.is_empty());
        let amax = module.entry("amax").expect("amax");
        assert_eq!(amax.params, [Param { size: 8, align: 8 }, Param { size: 12, align: 4 }]);
        assert_eq!(amax.max_threads.as_deref(), Some("128, 1, 1"));
        assert_eq!(amax.min_blocks, Some(8));
        assert!(!amax.local_memory && amax.calls == 0);
        let expected = ["bar", "bar.warp", "ld.global.v4", "shfl", "st.generic", "st.shared.v2"]
            .map(|kind| (kind.to_owned(), 1));
        assert_eq!(amax.counts, Counts::from(expected));
    }

    /// The instructions that an entry with this body may execute before the wait.
    fn early(body: &str) -> String {
        let module = Module::parse(&format!(".visible .entry one()\n{{\n{body}\n}}\n"));
        module.entry("one").expect("an entry").early().join(" ")
    }

    /// The wait must be on every path to an access, and to an end; a wait somewhere earlier in the text is not enough.
    #[test]
    fn early_accesses_are_found_on_each_way() {
        let early = |body: &str| early(&format!("{body}\tret;\n"));
        let (wait, load) = ("\tgriddepcontrol.wait;\n", "\tld.global.b32 %r1, [%rd1];\n");
        let (skip, jump) = ("\t@%p1 bra $L__BB0_2;\n", "\tbra.uni $L__BB0_3;\n");
        let [two, three] = ["$L__BB0_2:\n", "$L__BB0_3:\n"];
        assert_eq!(early(&[wait, load].concat()), "");
        assert_eq!(early(&[load, wait].concat()), "ld.global.b32");
        let past = [skip, wait, load, two, load].concat();
        assert_eq!(early(&past), "ld.global.b32 ret", "past the wait");
        assert_eq!(early(&[wait, skip, load, two, load].concat()), "");
        let apart = [skip, wait, load, jump, two, wait, load, three, load].concat();
        assert_eq!(early(&apart), "", "each way has a wait of its own");
        let one = [skip, wait, load, jump, two, load, wait, three, load].concat();
        assert_eq!(early(&one), "ld.global.b32", "one of them waits too late");
        let loops = [wait, three, load, "\t@%p1 bra $L__BB0_3;\n", load].concat();
        assert_eq!(early(&loops), "");
        // Reached by a later branch alone, and by a branch back that has not waited.
        let (back, end) = ("\tbra.uni $L__BB0_3;\n", "\tret;\n");
        let later = [skip, wait, end, three, load, end, two, back].concat();
        assert_eq!(early(&later), "ld.global.b32 ret", "by a later branch");
        let waited = [skip, wait, end, three, load, end, two, wait, back].concat();
        assert_eq!(early(&waited), "", "by a later branch that has waited");
        let again = [skip, wait, three, load, end, two, back].concat();
        let both = "by the code before it, which has waited, and by a later branch";
        assert_eq!(early(&again), "ld.global.b32 ret", "{both}");
    }

    #[test]
    fn copies_predicates_indirect_branches_and_ends_are_early_too() {
        let copy = "{ @wanted cp.async.cg.shared.global [%r1], [%rd1], 16; }\ncp.async.commit_group;\n\
            cp.async.wait_group 0;\nld.shared::cluster.b32 %r1, [%r2];\n";
        let wait = "griddepcontrol.wait;\n";
        assert_eq!(early(&[copy, wait, "ret;"].concat()), "cp.async.cg.shared.global");
        assert_eq!(early(&[wait, copy, "ret;"].concat()), "");
        let predicated = "@%p1 griddepcontrol.wait;\nst.global.b32 [%rd1], %r1;\nret;";
        assert_eq!(early(predicated), "st.global.b32 ret");
        // One label has a wait of its own, the other none.
        let targets = "$L_targets: .branchtargets $L_one, $L_two;\n";
        let indirect = "brx.idx %r1, $L_targets;\n";
        let ways = "$L_two:\ngriddepcontrol.wait;\n$L_one:\nst.global.b32 [%rd1], %r1;\nret;";
        assert_eq!(early(&[targets, indirect, ways].concat()), "brx.idx");
        assert_eq!(early(&[targets, wait, indirect, ways].concat()), "");
        for end in ["ret", "exit"] {
            assert_eq!(early(&format!("@%p1 {end};\n{wait}ret;")), end);
            assert_eq!(early(&format!("@%p1 bra $L;\n{wait}ret;\n$L:\n{end};")), end);
        }
        assert_eq!(early("@%p1 bra $L;\ngriddepcontrol.wait;\n$L:\n"), "the end of the text");
        assert_eq!(early("@%p1 bra $L;\ngriddepcontrol.wait;\nret;\n$L:\ntrap;"), "");
    }

    #[test]
    fn the_next_entry_starts_where_the_first_ends() {
        let module = Module::parse(TEXT);
        assert_eq!(module.entries.len(), 2);
        let next = module.entry("next").expect("next");
        assert_eq!(next.params, [Param { size: 4, align: 4 }]);
        assert_eq!(next.max_threads, None);
        assert_eq!(next.counts, Counts::from([("vote".to_owned(), 1)]));
    }

    #[test]
    fn local_memory_calls_and_functions_are_seen() {
        let text = "\
.extern .func  (.param .b32 out) missing
(
	.param .b32 a
)
;
.func helper(
	.param .b32 a
)
{
	ret;
}
.visible .entry e()
{
	.local .align 16 .b8 	__local_depot0[80];
	call.uni (retval0), missing, (param0);
}
";
        let module = Module::parse(text);
        assert_eq!(module.extern_functions.len(), 1);
        assert_eq!(module.functions.len(), 1);
        let entry = module.entry("e").expect("e");
        assert!(entry.local_memory);
        assert_eq!(entry.calls, 1);
    }
}
