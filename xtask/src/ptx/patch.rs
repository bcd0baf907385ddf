//! Writes the kernel table's launch bounds into PTX, since rustc has no attribute for them:
//! `.maxntid` and `.minnctapersm` after the parameters of each entry (PTX ISA section 11.4), and
//! `.reqnctapercluster` where blocks form clusters (section 11.7).

use anyhow::{Context, Result};
use simt::kernel::KernelInfo;

/// `ptx` with the launch bounds of `table` added.
///
/// # Errors
/// An entry is not in the table, so that its bounds are unknown.
pub fn launch_bounds(ptx: &str, table: &[KernelInfo]) -> Result<String> {
    let mut patched = String::with_capacity(ptx.len());
    let mut current: Option<&KernelInfo> = None;
    for line in ptx.lines() {
        if let Some(name) = entry_name(line) {
            let kernel = table.iter().find(|kernel| kernel.name == name);
            current = Some(kernel.with_context(|| format!("entry {name} is not in the table"))?);
        }
        patched.push_str(line);
        patched.push('\n');
        if let Some(kernel) = current.take_if(|_| line.ends_with(')')) {
            patched.push_str(&format!(".maxntid {}, 1, 1\n", kernel.block));
            patched.push_str(&format!(".minnctapersm {}\n", kernel.min_blocks));
            if kernel.cluster > 1 {
                patched.push_str(&format!(".reqnctapercluster {}, 1, 1\n", kernel.cluster));
            }
        }
    }
    Ok(patched)
}

fn entry_name(line: &str) -> Option<&str> {
    let (_, after) = line.split_once(".entry ")?;
    Some(after.split('(').next()?.trim())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx::module::Module;

    const KERNEL: KernelInfo = KernelInfo {
        params_size: 4,
        params_align: 4,
        block: 256,
        min_blocks: 3,
        ..KernelInfo::new("k")
    };
    const PTX: &str = "\
.visible .entry k(
	.param .align 4 .b8 k_param_0[4]
)
{
	mov.u32 	%r1, (%r2)
	ret;
}
";

    #[test]
    fn bounds_stand_after_the_parameters_once() {
        let patched = launch_bounds(PTX, &[KERNEL]).expect("k is in the table");
        let module = Module::parse(&patched);
        assert_eq!(module.entries[0].max_threads.as_deref(), Some("256, 1, 1"));
        assert_eq!(module.entries[0].min_blocks, Some(3));
        assert_eq!(patched.matches(".maxntid").count(), 1);
    }

    #[test]
    fn an_entry_without_parameters_is_patched_too() {
        let patched = launch_bounds(".visible .entry k()\n{\n\tret;\n}\n", &[KERNEL]);
        assert!(patched.expect("k is in the table").contains("k()\n.maxntid 256, 1, 1\n"));
    }

    #[test]
    fn clusters_are_required_where_there_are_any() {
        let cluster = |cluster| {
            let kernel = KernelInfo { cluster, ..KERNEL };
            let patched = launch_bounds(PTX, &[kernel]).expect("k is in the table");
            Module::parse(&patched).entries.remove(0).cluster
        };
        assert_eq!(cluster(1), None);
        assert_eq!(cluster(8).as_deref(), Some("8, 1, 1"));
    }

    #[test]
    fn an_unknown_entry_is_refused() {
        let refused = launch_bounds(&PTX.replace("entry k(", "entry other("), &[KERNEL]);
        assert!(refused.expect_err("not in the table").to_string().contains("other"));
    }
}
