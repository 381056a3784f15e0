//! lbd's own commands: `cargo xtask build | test | demo | bench | lint`.
use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};

mod build;
mod lint;
mod packages;
mod run;
mod toolchain;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "lbd's own commands")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build the BPF object, then `lbd` with that object in it.
    Build(BuildArguments),
    /// Check format, lints (the BPF programs on their own target too) and documentation.
    Lint(Consent),
}

#[derive(Args)]
struct BuildArguments {
    /// Build `lbd` optimised.
    #[arg(long)]
    release: bool,
    /// Build the BPF object only.
    #[arg(long)]
    bpf_only: bool,
    #[command(flatten)]
    consent: Consent,
}

/// Whether missing packages and tools may be installed without a question.
#[derive(Args, Clone, Copy)]
struct Consent {
    /// Install what is missing without asking. Without a terminal nothing is ever asked.
    #[arg(long)]
    yes: bool,
}

fn main() -> Result<()> {
    match Cli::parse().command {
        Command::Build(arguments) => {
            build::bpf(arguments.consent)?;
            if !arguments.bpf_only {
                build::host(&["--package", "lbd"], arguments.release)?;
            }
            Ok(())
        }
        Command::Lint(consent) => lint::all(consent),
    }
}

/// The root of the workspace.
fn root() -> PathBuf {
    let mut root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.pop();
    root
}

/// The target directory of the workspace.
fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |dir| root().join(dir))
}
