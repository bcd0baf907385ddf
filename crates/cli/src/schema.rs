//! `dsv4-kv schema`: JSON schemas of the output of `--json`. They are committed in `docs/schema`.

use anyhow::Result;
use clap::{Args, ValueEnum};
use schemars::{Schema, schema_for};

use crate::outcome::{Outcome, PRINTS, after_help};
use crate::{bench, doctor, generated, inspect, output, plan, replay, reuse, soak};

/// Examples for `--help`: the purpose of each, and the command.
const EXAMPLES: [(&str, &str); 1] =
    [("the schema of what `replay --json` prints", "cargo kv schema replay")];

/// Prints the JSON schema (draft 2020-12) of what a command prints with --json.
///
/// Within a minor version fields are only added.
#[derive(Args, Debug)]
#[command(after_help = after_help(&EXAMPLES, &PRINTS))]
pub struct SchemaArgs {
    /// The command.
    #[arg(value_enum)]
    command: Described,
}

/// Commands whose JSON has a schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Described {
    /// `bench`, all suites but `bookkeeping`.
    Bench,
    /// `bench bookkeeping`.
    Bookkeeping,
    /// `doctor`.
    Doctor,
    /// `generate`.
    Generate,
    /// `inspect`.
    Inspect,
    /// `plan`.
    Plan,
    /// `replay`.
    Replay,
    /// `reuse`.
    Reuse,
    /// `soak`.
    Soak,
}

impl Described {
    fn schema(self) -> Schema {
        match self {
            Self::Bench => schema_for!(bench::Report),
            Self::Bookkeeping => schema_for!(bench::BookkeepingReport),
            Self::Doctor => schema_for!(doctor::Report),
            Self::Generate => schema_for!(generated::Report),
            Self::Inspect => schema_for!(inspect::Report),
            Self::Plan => schema_for!(plan::Report),
            Self::Replay => schema_for!(replay::Summary),
            Self::Reuse => schema_for!(reuse::Report),
            Self::Soak => schema_for!(soak::Report),
        }
    }
}

/// Runs the command.
pub fn run(args: &SchemaArgs) -> Result<Outcome> {
    output::print(serde_json::to_string_pretty(&args.command.schema())?)?;
    Ok(Outcome::Passed)
}
