//! The rules that PTX must keep. Each rule catches a mistake that rustc does not report; see [`faults`].

use std::collections::BTreeSet;
use std::fmt;

use anyhow::{Result, bail};
use comfy_table::Table;
use comfy_table::presets::ASCII_MARKDOWN;
use kernels_gpu::table::KERNELS;
use simt::kernel::KernelInfo;

use super::manifest::{Manifest, TargetRecord};
use super::module::{Counts, Entry, Module, Param};
use super::recipe::Target;

/// A rule that [`faults`] checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// No undefined function: a misspelt intrinsic compiles to one, and fails only when the PTX is loaded.
    ExternFunction,
    /// No function besides entries: all others are inlined.
    Function,
    /// No call, since all functions are inlined.
    Call,
    /// No variable in local memory. An array that is indexed at run time, or passed by address, would lie there.
    LocalMemory,
    /// No access by generic address. Such an access means that a pointer lost its address space, as pointers inside a
    /// parameter struct do.
    Generic,
    /// A kernel waits for the earlier launches, which it may overlap, before it accesses global memory and before it
    /// ends. Guesses, prefetches and loads of what no launch writes are exempt.
    Wait,
    /// The entries are the kernels of the table.
    Entries,
    /// The parameters are those of the table: one `.u64` per pointer, then the parameter struct.
    Params,
    /// The launch bounds are those of the table.
    LaunchBounds,
    /// The target is the one for which it was built, and the PTX version is the recorded one.
    Version,
    /// The instruction counts are the recorded ones.
    Counts,
}

/// A broken rule.
#[derive(Debug)]
pub struct Fault {
    /// The rule.
    pub rule: Rule,
    /// Where it is broken, and how.
    pub detail: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.rule, self.detail)
    }
}

/// Checks the committed PTX and prints a table of its entries.
///
/// # Errors
/// A rule is broken, or the manifest or a PTX file is missing.
pub fn run() -> Result<()> {
    let manifest = Manifest::read()?;
    let mut broken = Vec::new();
    for record in &manifest.targets {
        let module = Module::parse(&record.read_ptx()?);
        println!("{}, PTX {}\n{}\n", module.target, module.version, table(&module));
        let of_file = |fault: Fault| format!("{}: {fault}", record.file);
        broken.extend(committed_faults(&module, record).into_iter().map(of_file));
    }
    if broken.is_empty() {
        return Ok(());
    }
    bail!("{}\nrun `cargo xtask build-ptx` and read its difference", broken.join("\n"))
}

/// The faults of committed PTX: [`faults`], and differences from its record.
pub fn committed_faults(module: &Module, record: &TargetRecord) -> Vec<Fault> {
    let mut faults = match Target::named(&record.cpu) {
        Some(target) => faults(module, target.cpu, &target.kernels(KERNELS)),
        None => {
            vec![Fault { rule: Rule::Version, detail: format!("unknown target {}", record.cpu) }]
        }
    };
    faults.extend(recorded_faults(module, record));
    faults
}

/// The faults of a module that was built for `cpu`. It must contain exactly the kernels of `table`.
pub fn faults(module: &Module, cpu: &str, table: &[KernelInfo]) -> Vec<Fault> {
    let mut faults = Vec::new();
    let mut fault = |rule, detail| faults.push(Fault { rule, detail });
    for function in &module.extern_functions {
        fault(Rule::ExternFunction, function.clone());
    }
    for function in &module.functions {
        fault(Rule::Function, function.clone());
    }
    if module.target != cpu {
        fault(Rule::Version, format!("the target is {:?}, not {cpu:?}", module.target));
    }
    for kernel in table.iter().filter(|kernel| module.entry(kernel.name).is_none()) {
        fault(Rule::Entries, format!("{} is missing", kernel.name));
    }
    for entry in &module.entries {
        match table.iter().find(|kernel| kernel.name == entry.name) {
            Some(kernel) => check_entry(entry, kernel, &mut fault),
            None => fault(Rule::Entries, format!("{} is not in the table", entry.name)),
        }
    }
    faults
}

fn check_entry(entry: &Entry, kernel: &KernelInfo, fault: &mut impl FnMut(Rule, String)) {
    let name = kernel.name;
    if entry.local_memory {
        fault(Rule::LocalMemory, format!("{name} keeps a variable in local memory"));
    }
    if entry.calls > 0 {
        fault(Rule::Call, format!("{name} calls {} functions", entry.calls));
    }
    for (kind, count) in entry.counts.iter().filter(|(kind, _)| kind.ends_with(".generic")) {
        fault(Rule::Generic, format!("{name} has {count} {kind}"));
    }
    let early = BTreeSet::from_iter(entry.early());
    if !early.is_empty() {
        fault(Rule::Wait, format!("{name} executes before griddepcontrol.wait: {early:?}"));
    }
    let params = params_of(kernel);
    if entry.params != params {
        fault(Rule::Params, format!("{name} takes {:?}, the table says {params:?}", entry.params));
    }
    let max_threads = format!("{}, 1, 1", kernel.block);
    if entry.max_threads.as_ref() != Some(&max_threads) {
        let built = &entry.max_threads;
        fault(Rule::LaunchBounds, format!("{name}: .maxntid {built:?}, not {max_threads:?}"));
    }
    if entry.min_blocks != Some(kernel.min_blocks) {
        let built = entry.min_blocks;
        fault(
            Rule::LaunchBounds,
            format!("{name}: .minnctapersm {built:?}, not {}", kernel.min_blocks),
        );
    }
    let cluster = (kernel.cluster > 1).then(|| format!("{}, 1, 1", kernel.cluster));
    if entry.cluster != cluster {
        let built = &entry.cluster;
        fault(Rule::LaunchBounds, format!("{name}: .reqnctapercluster {built:?}, not {cluster:?}"));
    }
}

/// The parameters of `kernel` by the table.
fn params_of(kernel: &KernelInfo) -> Vec<Param> {
    let pointers = kernel.pointers.iter().map(|_| Param { size: 8, align: 8 });
    let last = Param { size: kernel.params_size, align: kernel.params_align };
    pointers.chain([last]).collect()
}

/// Differences from the manifest's record.
fn recorded_faults(module: &Module, record: &TargetRecord) -> Vec<Fault> {
    let mut faults = Vec::new();
    if module.version != record.ptx_version {
        let detail = format!("PTX version {}, recorded {}", module.version, record.ptx_version);
        faults.push(Fault { rule: Rule::Version, detail });
    }
    let none = Counts::new();
    for entry in &module.entries {
        let recorded = record.entries.get(&entry.name).unwrap_or(&none);
        for kind in union(&entry.counts, recorded) {
            let count = |counts: &Counts| counts.get(kind).copied().unwrap_or(0);
            let (built, wanted) = (count(&entry.counts), count(recorded));
            if built != wanted {
                let detail = format!("{} has {built} {kind}, recorded {wanted}", entry.name);
                faults.push(Fault { rule: Rule::Counts, detail });
            }
        }
    }
    faults
}

fn union<'a>(a: &'a Counts, b: &'a Counts) -> BTreeSet<&'a str> {
    a.keys().chain(b.keys()).map(String::as_str).collect()
}

/// One row per entry: its launch bounds and its recorded instructions.
fn table(module: &Module) -> Table {
    let mut table = Table::new();
    table.load_preset(ASCII_MARKDOWN).set_header([
        "entry",
        "params",
        "threads",
        "blocks",
        "instructions",
    ]);
    for entry in &module.entries {
        let counts = entry.counts.iter().map(|(kind, count)| format!("{kind} {count}"));
        table.add_row([
            entry.name.clone(),
            entry.params.len().to_string(),
            entry.max_threads.clone().unwrap_or_default(),
            entry.min_blocks.map(|blocks| blocks.to_string()).unwrap_or_default(),
            counts.collect::<Vec<_>>().join(", "),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use simt::kernel::PointerInfo;

    use super::*;

    const X: PointerInfo =
        PointerInfo { name: "x", element: "f32", align: 4, mutable: true, extent: "1" };
    const TABLE: &[KernelInfo] = &[KernelInfo {
        pointers: &[X],
        params_size: 12,
        params_align: 4,
        block: 128,
        min_blocks: 8,
        ..KernelInfo::new("k")
    }];
    const PTX: &str = "\
.version 7.8
.target sm_90
.address_size 64
.visible .entry k(
	.param .u64 .ptr .align 1 k_param_0,
	.param .align 4 .b8 k_param_1[12]
)
.maxntid 128, 1, 1
.minnctapersm 8
{
	griddepcontrol.wait;
	ld.global.v4.b32 	{%r1, %r2, %r3, %r4}, [%rd6];
	bar.sync 	0;
	ret;
}
";

    fn rules(ptx: &str) -> Vec<Rule> {
        let record = TargetRecord::new("sm_90", "sm_90.ptx", PTX);
        let module = Module::parse(ptx);
        let mut found = faults(&module, "sm_90", TABLE);
        found.extend(recorded_faults(&module, &record));
        found.into_iter().map(|fault| fault.rule).collect()
    }

    #[test]
    fn good_ptx_has_no_fault() {
        assert_eq!(rules(PTX), []);
    }

    #[test]
    fn each_rule_sees_its_fault() {
        let bar = "bar.sync \t0;";
        let with = |from: &str, to: &str| {
            assert!(PTX.contains(from), "{from}");
            rules(&PTX.replacen(from, to, 1))
        };
        let before = ".visible .entry";
        let function = |linkage| format!("{linkage}.func f(\n.param .b32 a\n)\n;\n{before}");
        assert_eq!(with(before, &function(".extern ")), [Rule::ExternFunction]);
        assert_eq!(with(before, &function("")), [Rule::Function]);
        assert_eq!(with(bar, "bar.sync 0; call.uni f, (p);"), [Rule::Call]);
        let depot = ".local .align 16 .b8 __local_depot0[80]; bar.sync 0;";
        assert_eq!(with(bar, depot), [Rule::LocalMemory]);
        assert_eq!(with("sm_90", "sm_100"), [Rule::Version]);
        assert_eq!(with("7.8", "8.6"), [Rule::Version]);
        assert_eq!(with("[12]", "[16]"), [Rule::Params]);
        assert_eq!(with(".align 4", ".align 8"), [Rule::Params]);
        assert_eq!(with(".param .u64 .ptr .align 1 k_param_0,", ""), [Rule::Params]);
        assert_eq!(with(".maxntid 128", ".maxntid 256"), [Rule::LaunchBounds]);
        assert_eq!(with(".minnctapersm 8\n", ""), [Rule::LaunchBounds]);
        let clustered = ".minnctapersm 8\n.reqnctapercluster 8, 1, 1\n";
        assert_eq!(with(".minnctapersm 8\n", clustered), [Rule::LaunchBounds]);
        assert_eq!(with(bar, "bar.sync 0; bar.sync 0;"), [Rule::Counts]);
        assert_eq!(with("ld.global.v4", "ld.global"), [Rule::Counts]);
        assert!(with("ld.global.v4", "ld.v4").contains(&Rule::Generic));
        assert_eq!(with("griddepcontrol.wait;", ""), [Rule::Wait]);
        let early =
            "ld.param.b32 %r9, [k_param_1]; ld.global.b32 %r9, [%rd6]; griddepcontrol.wait;";
        assert_eq!(with("griddepcontrol.wait;", early), [Rule::Wait]);
        let peek = "ld.relaxed.gpu.global.b32 %r9, [%rd6]; griddepcontrol.wait;";
        assert_eq!(with("griddepcontrol.wait;", peek), []);
        let fixed = "ld.global.nc.L1::no_allocate.v4.u32 {%r1, %r2, %r3, %r4}, [%rd6]; griddepcontrol.wait;";
        let constant = fixed.replace(".L1::no_allocate", "");
        let early = |text: &str| with("griddepcontrol.wait;", text).contains(&Rule::Wait);
        assert!(!early(fixed) && early(&constant));
    }

    #[test]
    fn a_missing_and_an_unknown_entry_are_seen() {
        let renamed = PTX.replacen("entry k(", "entry other(", 1);
        assert_eq!(faults(&Module::parse(&renamed), "sm_90", TABLE).len(), 2);
        assert!(rules(&renamed).contains(&Rule::Entries));
    }
}
