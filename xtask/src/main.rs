//! lbd's own commands: `cargo xtask build | test | demo | bench | lint`.
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, ensure};
use clap::{Args, Parser, Subcommand};

mod build;
mod lint;
mod packages;
mod run;
mod test;
mod toolchain;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "lbd's own commands")]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Build the BPF object, then `lbd` with that object in it.
    Build(BuildArguments),
    /// Run the tests: all that this user can run. Exit code 3: what ran has passed, but not all has run.
    Test(test::Arguments),
    /// Build everything, then show lbd at work on networks in namespaces. Needs root (or sudo).
    Demo(Consent),
    /// Build optimised, then measure. Needs root (or sudo).
    Bench(BenchArguments),
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

#[derive(Args)]
struct BenchArguments {
    /// What to measure, e.g. `datapath`.
    what: String,
    /// Only cases of the datapath whose names contain this.
    #[arg(long, default_value = "")]
    case: String,
    /// Write the figures to this file, as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
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

fn main() -> Result<ExitCode> {
    match Cli::parse().command {
        Task::Build(arguments) => {
            build::bpf(arguments.consent)?;
            if !arguments.bpf_only {
                build::host(&["--package", "lbd"], arguments.release)?;
            }
        }
        Task::Test(arguments) => return Ok(ExitCode::from(test::all(&arguments)? as u8)),
        Task::Demo(consent) => {
            build::bpf(consent)?;
            packages::programs(consent, packages::LAB)?;
            build::host(&["--package", "lbd", "--package", "lbd-tests", "--bins"], false)?;
            return become_root("lbd-demo", false, |_| ());
        }
        Task::Bench(arguments) => {
            build::bpf(arguments.consent)?;
            build::host(&["--package", "lbd-tests", "--package", "lbd", "--bins"], true)?;
            if arguments.what == "control" {
                packages::programs(arguments.consent, packages::CONTROL)?;
            }
            let json = arguments.json.map(std::path::absolute).transpose()?;
            return become_root("lbd-bench", true, |command| {
                command.arg(&arguments.what);
                if !arguments.case.is_empty() {
                    command.arg("--case").arg(&arguments.case);
                }
                if let Some(json) = &json {
                    command.arg("--json").arg(json);
                }
            });
        }
        Task::Lint(consent) => {
            let outcome = lint::all(consent, true);
            let complaints = [outcome.failures, outcome.left].concat();
            ensure!(complaints.is_empty(), "{}", complaints.join("\n"));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Becomes a program that was built, as root, so that Ctrl-C reaches it and its exit code is ours.
fn become_root(name: &str, release: bool, arguments: impl FnOnce(&mut Command)) -> Result<ExitCode> {
    let program = test::binaries(release).join(name);
    let mut command = packages::as_root(&program)?;
    arguments(&mut command);
    Err(command.exec()).with_context(|| format!("cannot run {}", program.display()))
}

/// The root of the workspace.
fn root() -> PathBuf {
    let mut root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.pop();
    root
}

/// The target directory of the workspace.
fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), |directory| root().join(directory))
}
