//! Format, lints and documentation.
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};

use crate::{
    Consent,
    build::bpf_cargo,
    packages,
    run::{cargo, find, output, run},
    toolchain::{self, Toolchain},
};

/// What checks the host's code, by the subcommand of cargo, and rustup's component of that name.
const COMPONENTS: [(&str, &str); 2] = [("fmt", "rustfmt"), ("clippy", "clippy")];

/// What came of the checks.
pub(crate) struct Outcome {
    /// How many found nothing.
    pub(crate) passed: u64,
    /// What the others said.
    pub(crate) failures: Vec<String>,
    /// Why some could not be made.
    pub(crate) left: Vec<String>,
}

/// All of it; what fails does not keep the rest from running. Every compiler brings lints that those before it did not have: unless
/// `strict`, warnings are errors only where the compiler is the one that the code is written for.
pub(crate) fn all(consent: Consent, strict: bool) -> Outcome {
    let mut outcome = Outcome { passed: 0, failures: Vec::new(), left: Vec::new() };
    let deny = strict || toolchain::is_oldest(Path::new("rustc"));
    let [fmt, clippy] = COMPONENTS.map(|(subcommand, component)| host(consent, subcommand, component));
    outcome.add(fmt, || run(cargo().args(["fmt", "--all", "--check"])));
    outcome.add(clippy, || {
        let mut command = cargo();
        command.args(["clippy", "--workspace", "--all-targets", "--keep-going", "--"]).args(warnings(deny));
        run(&mut command)
    });
    outcome.add(bpf_clippy(consent), || bpf(consent, strict));
    outcome.add(Ok(()), || {
        run(cargo()
            .args(["doc", "--workspace", "--exclude", "lbd-ebpf", "--no-deps", "--document-private-items"])
            .env("RUSTDOCFLAGS", warnings(deny).unwrap_or_default()))
    });
    outcome
}

impl Outcome {
    /// Makes a check, if what it needs is there.
    fn add(&mut self, there: Result<()>, check: impl FnOnce() -> Result<()>) {
        match there.map(|()| check()) {
            Ok(Ok(())) => self.passed += 1,
            Ok(Err(failure)) => self.failures.push(failure.to_string()),
            Err(missing) => self.left.push(format!("{missing:#}")),
        }
    }
}

fn warnings(deny: bool) -> Option<&'static str> {
    deny.then_some("-Dwarnings")
}

/// Installs a component of the toolchain that builds for the host.
fn host(consent: Consent, subcommand: &str, component: &str) -> Result<()> {
    let there = || output(cargo().args([subcommand, "--version"])).is_ok();
    if there() {
        return Ok(());
    }
    if find("rustup").is_some() {
        packages::component(consent, None, component)?;
    } else if find("rustc").is_some_and(|rustc| rustc == Path::new(toolchain::DEBIAN_RUSTC)) && packages::has_apt() {
        let package = match (component, packages::installed("rustc-web")) {
            ("clippy", true) => "rust-web-clippy",
            ("clippy", false) => "rust-clippy",
            (_, true) => "rustfmt-web",
            (_, false) => "rustfmt",
        };
        packages::install(consent, &[package], component)?;
    }
    if there() { Ok(()) } else { Err(anyhow!("`cargo {subcommand}` is missing: install {component}")) }
}

/// Installs clippy for the compiler of the programs: it is a compiler, and must be of the version that compiles `core`.
fn bpf_clippy(consent: Consent) -> Result<()> {
    let Toolchain { rustc, .. } = toolchain::ensure(consent)?;
    let Some(driver) = driver(&rustc) else { return host(consent, "clippy", "clippy") };
    if !driver.is_file() {
        if rustc == Path::new(toolchain::DEBIAN_RUSTC) {
            packages::install(consent, &["rust-web-clippy"], "clippy of the version that builds the BPF programs")?;
        } else {
            packages::component(consent, Some("nightly"), "clippy")?;
        }
    }
    if driver.is_file() { Ok(()) } else { Err(anyhow!("{} is missing: install clippy", driver.display())) }
}

/// The clippy beside a compiler that is not the active toolchain's, which cargo would take.
fn driver(rustc: &Path) -> Option<PathBuf> {
    rustc.is_absolute().then(|| rustc.with_file_name("clippy-driver"))
}

/// The programs on their own target: on the host they are an empty program.
fn bpf(consent: Consent, strict: bool) -> Result<()> {
    let toolchain = toolchain::ensure(consent)?;
    let scratch = crate::target().join("bpf-lint");
    let deny = warnings(strict || toolchain::is_oldest(&toolchain.rustc));
    let Some(driver) = driver(&toolchain.rustc) else {
        return run(bpf_cargo(&toolchain, "clippy", &scratch).arg("--").args(deny));
    };
    let mut command = bpf_cargo(&toolchain, "check", &scratch);
    command.env("RUSTC_WORKSPACE_WRAPPER", driver);
    if let Some(deny) = deny {
        command.env("CLIPPY_ARGS", format!("{deny}__CLIPPY_HACKERY__"));
    }
    run(&mut command)
}
