//! The command-line options.

use anyhow::{Context, Result, bail};

pub struct Options {
    /// Tokens of the request.
    pub tokens: u32,
    pub rounds: u32,
    /// Whether to measure GPU memory too.
    pub cuda: bool,
    pub json: bool,
}

impl Options {
    pub fn parse() -> Result<Self> {
        let mut options = Self { tokens: 8192, rounds: 15, cuda: false, json: false };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut number = || {
                let next = arguments.next();
                let number = next.and_then(|number| number.parse().ok()).filter(|&n| n > 0);
                number.with_context(|| format!("{argument} takes a number from 1 on"))
            };
            match &*argument {
                "--tokens" => options.tokens = number()?,
                "--rounds" => options.rounds = number()?,
                "--cuda" => options.cuda = true,
                "--json" => options.json = true,
                _ => bail!("{argument}: --tokens N, --rounds N, --cuda and --json are known"),
            }
        }
        Ok(options)
    }
}
