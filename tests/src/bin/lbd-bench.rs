//! lbd's benchmarks, as ratios within one run: `lbd-bench datapath [--json FILE]`.
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum};

#[derive(Parser)]
struct Arguments {
    /// What to measure.
    what: What,
    /// Write the figures to this file, as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum What {
    /// The programs, with `BPF_PROG_TEST_RUN`.
    Datapath,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let report = match arguments.what {
        What::Datapath => lbd_tests::bench::datapath()?,
    };
    print!("{report}");
    if let Some(path) = arguments.json {
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(&path, text + "\n").with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}
