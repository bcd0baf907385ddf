//! The project's own tasks: `cargo xtask <task>`.
//!
//! | module | what it does |
//! |---|---|
//! | [`workspace`] | paths of the workspace, and how a nested cargo is called |
//! | [`process`] | runs a program with a progress line |
//! | [`steps`] | the steps of a long task, and an estimate of the time that is left |
//! | [`programs`] | the programs that cargo built |
//! | [`cpu_time`] | CPU time of this process and its children |
//! | [`counted`] | runs tests, and counts them |
//! | [`ptx`] | builds, checks and shows PTX |
//! | [`api`] | the public API of the libraries as text |
//! | [`module_cycles`] | finds files that import each other in a cycle |
//! | [`package`] | the libraries as packages for a registry |
//! | [`mod@test`] | the test command |
//! | [`stress`] | random operations against a model |
//! | [`fuzz`] | the fuzz targets under libFuzzer |
//! | [`sanitize`] | tests under AddressSanitizer |
//! | [`scale`] | tests between processes, with NIXL |
//! | [`bundle`] | programs for a GPU machine that has no Rust |

mod api;
mod bundle;
mod counted;
mod cpu_time;
mod fuzz;
mod module_cycles;
mod package;
mod process;
mod programs;
mod ptx;
mod sanitize;
mod scale;
mod steps;
mod stress;
mod test;
mod workspace;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Tasks of the dsv4-kv workspace.
#[derive(Parser)]
#[command(name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Compile the kernels to PTX and write host/ptx/.
    BuildPtx {
        /// Compile nothing: say whether host/ptx/ is what the sources describe, and if not, why.
        #[arg(long)]
        check: bool,
    },
    /// Check the committed PTX against the kernel table and the manifest.
    PtxLint,
    /// Print the committed PTX of one kernel, or of all.
    ShowPtx {
        /// A kernel's name, as in append_swa_f32; without it the whole module.
        kernel: Option<String>,
        /// The GPU it was compiled for: sm_90a, sm_100 or sm_100a.
        #[arg(long, default_value = "sm_90a")]
        target: String,
    },
    /// Find files that import each other in a cycle, files over 500 lines, and functions with too
    /// many arguments.
    ModuleCycles,
    /// Set up what is missing, then check and test everything.
    Test {
        /// Leave out what takes long: clippy, the PTX rebuild, examples, the tests of the programs,
        /// the stress test, and the largest cases of the other tests.
        #[arg(long)]
        quick: bool,
    },
    /// Do random operations to a cache and to a model of it, and compare them; `--help` has the rest.
    #[command(disable_help_flag = true)]
    Stress {
        /// What `stress` takes.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Run the fuzz targets.
    Fuzz {
        /// Seconds of each target.
        #[arg(long, default_value_t = 60)]
        seconds: u32,
        /// This target alone.
        #[arg(long)]
        target: Option<String>,
    },
    /// Write the public API of the libraries to docs/api/, by `cargo public-api`.
    PublicApi {
        /// Write nothing: say whether docs/api/ is what the sources describe, and if not, what differs first.
        #[arg(long)]
        check: bool,
    },
    /// Pack the libraries as for a registry, compile each from its package, and check what is in it.
    Package {
        #[command(flatten)]
        options: package::Options,
    },
    /// Run tests under AddressSanitizer.
    Sanitize,
    /// Install NIXL and Dynamo's indexer into target/, let requests move between processes, and events go to the indexer.
    ScaleTest {
        /// Test examples/dynamo-worker instead: Dynamo's conformance kit, and workers behind its frontend. It is built with
        /// Dynamo's runtime, which takes 25 minutes on two busy cores, and up to an hour beside other builds.
        #[arg(long)]
        dynamo_worker: bool,
        /// Fail where a wheel cannot be installed, instead of leaving its tests out
        #[arg(long)]
        require: bool,
    },
    /// Put the tests that run kernels and the CLI into target/gpu-bundle/.
    GpuBundle,
}

fn main() -> ExitCode {
    match run(&Cli::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            if error.is::<stress::Refused>() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

fn run(task: &Task) -> Result<()> {
    match task {
        Task::BuildPtx { check: false } => ptx::build::run(),
        Task::BuildPtx { check: true } => ptx::fresh::check(),
        Task::PtxLint => ptx::lint::run(),
        Task::ShowPtx { kernel, target } => ptx::show::run(kernel.as_deref(), target),
        Task::ModuleCycles => module_cycles::run(),
        Task::Test { quick } => test::run(*quick),
        Task::Stress { arguments } => stress::run(arguments),
        Task::Fuzz { seconds, target } => fuzz::run(*seconds, target.as_deref()),
        Task::PublicApi { check } => api::run(*check),
        &Task::Package { options } => package::run(options),
        Task::Sanitize => sanitize::run(),
        Task::ScaleTest { dynamo_worker, require } => scale::run(*dynamo_worker, *require),
        Task::GpuBundle => bundle::run(),
    }
}
