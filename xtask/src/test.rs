//! Running the tests.
use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};

use crate::{
    Consent, build, lint, packages,
    run::{cargo, shown},
};

/// Exit code when everything that ran passed, but something that was asked for was not run.
const INCOMPLETE: i32 = 3;

#[derive(Args)]
pub(crate) struct Arguments {
    /// Leave out or shorten what is slow.
    #[arg(long)]
    fast: bool,
    /// Run only this suite.
    #[arg(long, value_enum)]
    only: Option<Suite>,
    /// Run only tests whose name contains this.
    #[arg(long)]
    name: Option<String>,
    #[command(flatten)]
    consent: Consent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// Format, lints and documentation; no privileges.
    Lint,
    /// Unit and property tests; no privileges.
    Unit,
    /// Packets through the loaded BPF programs; root.
    Fixtures,
    /// Real traffic in network namespaces; root.
    Netns,
    /// The agent against the test API server.
    Kubernetes,
    /// Other kernels.
    Kernels,
    /// Fuzzing.
    Fuzz,
}

impl Suite {
    const ALL: [Self; 7] =
        [Self::Lint, Self::Unit, Self::Fixtures, Self::Netns, Self::Kubernetes, Self::Kernels, Self::Fuzz];

    fn name(self) -> &'static str {
        match self {
            Self::Lint => "lint",
            Self::Unit => "unit",
            Self::Fixtures => "fixtures",
            Self::Netns => "netns",
            Self::Kubernetes => "kubernetes",
            Self::Kernels => "kernels",
            Self::Fuzz => "fuzz",
        }
    }

    /// Packages and test binaries whose tests with `#[ignore = "needs root"]` are this suite's.
    fn binaries(self) -> Result<Vec<(&'static str, String)>> {
        let prefixes: &[(&'static str, &str)] = match self {
            Self::Fixtures => {
                &[("lbd-tests", "fixtures"), ("lbd-tests", "races"), ("lbd-tests", "programs"), ("lbd-tests", "floods")]
            }
            Self::Netns => &[("lbd-tests", "netns_"), ("lbd", "dataplane")],
            Self::Kubernetes => &[("lbd-tests", "kubernetes")],
            Self::Lint | Self::Unit | Self::Kernels | Self::Fuzz => &[],
        };
        let mut found = Vec::new();
        for &(package, prefix) in prefixes {
            let directory = crate::root().join(if package == "lbd" { "lbd/tests" } else { "tests/tests" });
            for name in rust_files(&directory)? {
                if name.starts_with(prefix) {
                    found.push((package, name));
                }
            }
        }
        Ok(found)
    }
}

/// Names, without the ending, of the Rust files of a directory.
fn rust_files(directory: &Path) -> Result<Vec<String>> {
    let Ok(entries) = fs::read_dir(directory) else { return Ok(Vec::new()) };
    let mut names = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|ending| ending == "rs")
            && let Some(name) = path.file_stem()
        {
            names.push(name.to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// What came of a suite.
enum Outcome {
    Ran { passed: bool, results: Vec<String> },
    Left { why: String, counts: bool },
}

/// Runs the suites; returns the exit code.
pub(crate) fn all(arguments: &Arguments) -> Result<i32> {
    let asked: Vec<_> = arguments.only.map_or_else(|| Suite::ALL.to_vec(), |suite| vec![suite]);
    let root = packages::is_root();
    if root && !arguments.fast && asked.contains(&Suite::Netns) {
        build::other(arguments.consent)?;
    }
    build::bpf(arguments.consent)?;
    if root && asked.iter().any(|suite| matches!(suite, Suite::Fixtures | Suite::Netns | Suite::Kubernetes)) {
        packages::programs(arguments.consent, packages::SUITES)?;
    }
    build::host(&["--package", "lbd", "--package", "lbd-tests", "--bins"], false)?;

    let mut outcomes = Vec::new();
    for suite in asked {
        outcomes.push((suite, one(suite, arguments, root)?));
    }
    Ok(report(&outcomes, arguments.only.is_some()))
}

fn one(suite: Suite, arguments: &Arguments, root: bool) -> Result<Outcome> {
    match suite {
        Suite::Lint => return Ok(checks(arguments)),
        Suite::Kernels => {
            return Ok(left("not there yet: tests on other kernels come later", false));
        }
        Suite::Fuzz => {
            return Ok(left("not there yet: property tests run under `unit`", false));
        }
        Suite::Unit => {
            let mut command = base(arguments);
            // All that is not a suite of its own: libraries, binaries, documentation, and integration tests without privileges.
            command.arg("--workspace").args(["--exclude", "lbd-ebpf"]);
            return run(command, arguments, &[]);
        }
        Suite::Fixtures | Suite::Netns | Suite::Kubernetes => {}
    }
    let binaries = suite.binaries()?;
    if binaries.is_empty() {
        return Ok(left("not there yet: it has no test binary", false));
    }
    if !root {
        return Ok(left("needs root: run `cargo xtask test` as root", true));
    }
    let mut passed = true;
    let mut results = Vec::new();
    // Fixtures have maps of their own and mostly wait for the verifier. Tests of traffic must not share the CPUs.
    let side_by_side = |binary: &str| binary.starts_with("fixtures");
    for (package, together) in [("lbd", false), ("lbd-tests", true), ("lbd-tests", false)] {
        let mut command = base(arguments);
        command.args(["--package", package]);
        let mut any = false;
        for (_, binary) in
            binaries.iter().filter(|(owner, binary)| *owner == package && side_by_side(binary) == together)
        {
            command.args(["--test", binary]);
            any = true;
        }
        if !any {
            continue;
        }
        // Alone, a suite runs whole; after `unit`, what that left out.
        let mut options = vec![if arguments.only.is_some() { "--include-ignored" } else { "--ignored" }];
        if !together {
            options.push("--test-threads=1");
        }
        match run(command, arguments, &options)? {
            Outcome::Ran { passed: these, results: lines } => {
                passed &= these;
                results.extend(lines);
            }
            left @ Outcome::Left { .. } => return Ok(left),
        }
    }
    Ok(Outcome::Ran { passed, results })
}

fn left(why: &str, counts: bool) -> Outcome {
    Outcome::Left { why: why.to_owned(), counts }
}

/// The checks of `cargo xtask lint`, counted like tests. A machine that they cannot be made on is no worse for running lbd.
fn checks(arguments: &Arguments) -> Outcome {
    if arguments.name.is_some() {
        return left("its checks have no names to choose by", false);
    }
    eprintln!("\n$ cargo xtask lint");
    let outcome = lint::all(arguments.consent, false);
    let failed = outcome.failures.len();
    for failure in &outcome.failures {
        println!("lint: {failure}");
    }
    if failed == 0 && !outcome.left.is_empty() {
        let rest = if outcome.passed > 0 { "; the other checks found nothing" } else { "" };
        return left(&format!("{}{rest}", outcome.left.join("; ")), false);
    }
    let result = format!("test result: {} passed; {failed} failed", outcome.passed);
    Outcome::Ran { passed: failed == 0, results: vec![result] }
}

fn base(arguments: &Arguments) -> Command {
    let mut command = cargo();
    command.args(["test", "--no-fail-fast"]);
    if arguments.fast {
        command.env("LBD_TEST_FAST", "1");
    }
    command
}

/// Runs a cargo test, shows what it prints, and keeps its result lines.
fn run(mut command: Command, arguments: &Arguments, options: &[&str]) -> Result<Outcome> {
    command.arg("--").args(options).args(&arguments.name);
    eprintln!("\n$ {}", shown(&command));
    let mut child =
        command.stdout(Stdio::piped()).spawn().with_context(|| format!("cannot run `{}`", shown(&command)))?;
    let mut results = Vec::new();
    if let Some(output) = child.stdout.take() {
        let mut out = std::io::stdout().lock();
        for line in BufReader::new(output).lines() {
            let line = line?;
            writeln!(out, "{line}")?;
            if line.starts_with("test result:") {
                results.push(line);
            }
        }
    }
    Ok(Outcome::Ran { passed: child.wait()?.success(), results })
}

/// Prints one line a suite and cargo test's closing line for all of them; returns the exit code.
fn report(outcomes: &[(Suite, Outcome)], only: bool) -> i32 {
    let mut total = Counts::default();
    let (mut failed, mut incomplete) = (false, false);
    println!();
    for (suite, outcome) in outcomes {
        match outcome {
            Outcome::Ran { passed, results } => {
                let mut counts = Counts::default();
                for line in results {
                    counts.add(line);
                }
                total.passed += counts.passed;
                total.failed += counts.failed;
                failed |= !passed;
                let word = if *passed { "ok" } else { "FAILED" };
                // None of the Kubernetes tests needs root.
                let note =
                    if *passed && !only && counts.passed == 0 { " (`unit` has run what needs no root)" } else { "" };
                println!("{:<11} {word}: {} passed, {} failed{note}", suite.name(), counts.passed, counts.failed);
            }
            Outcome::Left { why, counts } => {
                incomplete |= *counts || only;
                println!("{:<11} NOT RUN: {why}", suite.name());
            }
        }
    }
    let word = if failed { "FAILED" } else { "ok" };
    println!("\ntest result: {word}. {} passed; {} failed", total.passed, total.failed);
    if failed {
        1
    } else if incomplete {
        println!("What ran has passed, but not all that was asked for has run (exit code {INCOMPLETE}).");
        INCOMPLETE
    } else {
        0
    }
}

/// The counts of cargo test's result lines.
#[derive(Default)]
struct Counts {
    passed: u64,
    failed: u64,
}

impl Counts {
    fn add(&mut self, line: &str) {
        let count = |word: &str| {
            line.split(';')
                .find_map(|part| part.trim().strip_suffix(word)?.trim().rsplit(' ').next()?.parse::<u64>().ok())
                .unwrap_or(0)
        };
        self.passed += count("passed");
        self.failed += count("failed");
    }
}

/// Where release or debug binaries are.
pub(crate) fn binaries(release: bool) -> PathBuf {
    crate::target().join(if release { "release" } else { "debug" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_lines_are_counted() {
        let mut counts = Counts::default();
        counts.add("test result: ok. 3 passed; 1 failed; 20 ignored; 0 measured; 2 filtered out; finished in 4.14s");
        counts
            .add("test result: FAILED. 30 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s");
        assert_eq!((counts.passed, counts.failed), (33, 1));
    }
}
