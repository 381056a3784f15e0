//! lbd's benchmarks, as ratios within one run: `lbd-bench datapath|flows|control [--case NAME] [--json FILE]`.
use std::fmt::Display;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum};
use serde::Serialize;

#[derive(Parser)]
struct Arguments {
    /// What to measure.
    what: What,
    /// Only cases of the datapath whose names contain this.
    #[arg(long, default_value = "")]
    case: String,
    /// Write the figures to this file, as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// The `lbd` to measure [default: the one beside this program].
    #[arg(long)]
    lbd: Option<PathBuf>,
}

#[derive(Clone, Copy, ValueEnum)]
enum What {
    /// The programs, with `BPF_PROG_TEST_RUN`.
    Datapath,
    /// `lbctl flows` over a million flows.
    Flows,
    /// From a change in the cluster to the maps.
    Control,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let report: Box<dyn Report> = match arguments.what {
        What::Datapath => Box::new(lbd_tests::bench::datapath(&arguments.case)?),
        What::Control => Box::new(lbd_tests::bench_control::control()?),
        What::Flows => {
            let lbd = match arguments.lbd {
                Some(lbd) => lbd,
                None => std::env::current_exe().context("find this program")?.with_file_name("lbd"),
            };
            Box::new(lbd_tests::bench_flows::flows(&lbd)?)
        }
    };
    print!("{report}");
    if let Some(path) = arguments.json {
        std::fs::write(&path, report.json()? + "\n").with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

/// What a benchmark has found.
trait Report: Display {
    fn json(&self) -> serde_json::Result<String>;
}

impl<T: Display + Serialize> Report for T {
    fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }
}
