//! `dynamo-worker --help` says what it takes.

use std::sync::Arc;

use clap::Parser;
use dynamo_worker::args::Cli;

fn main() -> anyhow::Result<()> {
    let (worker, config) = Cli::parse().into_worker();
    dynamo_backend_common::run(Arc::new(worker), config)
}
