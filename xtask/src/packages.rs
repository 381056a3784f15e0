//! Installing what a step needs and the machine does not have.
use std::{
    ffi::OsStr,
    fs,
    io::{IsTerminal as _, Write as _},
    os::unix::fs::MetadataExt as _,
    path::Path,
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use crate::{
    Consent,
    run::{find, output, run, shown},
};

/// Programs that the lab and the demo run, and the Debian package of each.
pub(crate) const LAB: &[(&str, &str)] = &[("ip", "iproute2"), ("tc", "iproute2"), ("ethtool", "ethtool")];
/// Programs of the suites in the lab; of `faketime` its library.
pub(crate) const SUITES: &[(&str, &str)] =
    &[("ip", "iproute2"), ("tc", "iproute2"), ("ethtool", "ethtool"), ("faketime", "faketime")];
/// Programs of the benchmark of the control plane, and the Debian packages that have them.
pub(crate) const CONTROL: &[(&str, &str)] =
    &[("ip", "iproute2"), ("tc", "iproute2"), ("ethtool", "ethtool"), ("nft", "nftables")];

/// Says what is needed and why; asks on a terminal unless `--yes` was given.
pub(crate) fn agree(consent: Consent, need: &str) -> Result<()> {
    eprintln!("{need}");
    if consent.yes || !std::io::stdin().is_terminal() {
        return Ok(());
    }
    eprint!("Go on? [Y/n] ");
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    match answer.trim().to_ascii_lowercase().as_str() {
        "" | "y" | "yes" => Ok(()),
        _ => bail!("stopped: without it this step cannot go on"),
    }
}

/// Installs the packages of those programs that are missing.
pub(crate) fn programs(consent: Consent, needed: &[(&str, &str)]) -> Result<()> {
    let missing: Vec<_> = needed.iter().filter(|(program, _)| find(program).is_none()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let names: Vec<_> = missing.iter().map(|(program, _)| *program).collect();
    let packages: Vec<_> = missing.iter().map(|(_, package)| *package).collect();
    if !has_apt() {
        bail!(
            "missing programs: {}: install them (Debian's packages are called {}) and run this again",
            names.join(", "),
            packages.join(", ")
        );
    }
    install(consent, &packages, &format!("the programs {}", names.join(", ")))?;
    for name in names {
        if find(name).is_none() {
            bail!("`{name}` is still missing after its package was installed");
        }
    }
    Ok(())
}

/// Has rustup add a component, to the active toolchain or to one of this name.
pub(crate) fn component(consent: Consent, toolchain: Option<&str>, component: &str) -> Result<()> {
    let mut command = Command::new("rustup");
    command.args(["component", "add", component]);
    if let Some(toolchain) = toolchain {
        command.args(["--toolchain", toolchain]);
    }
    agree(consent, &format!("lbd's checks need {component}; to install: {}", shown(&command)))?;
    run(&mut command)
}

/// Whether this machine installs Debian packages.
pub(crate) fn has_apt() -> bool {
    find("apt-get").is_some() && find("dpkg-query").is_some()
}

/// Whether a package is installed.
pub(crate) fn installed(package: &str) -> bool {
    output(Command::new("dpkg-query").args(["-W", "-f", "${db:Status-Status}", package]))
        .is_ok_and(|status| status == "installed")
}

/// The version that apt would install, if it knows one.
pub(crate) fn candidate(package: &str) -> Option<String> {
    let policy = output(Command::new("apt-cache").env("LC_ALL", "C").args(["policy", package])).ok()?;
    let version = policy.lines().find_map(|line| line.trim().strip_prefix("Candidate: "))?;
    (version != "(none)").then(|| version.to_owned())
}

/// Fetches the package lists if there are none yet.
pub(crate) fn refresh_if_empty() -> Result<()> {
    let known = fs::read_dir("/var/lib/apt/lists")
        .is_ok_and(|entries| entries.flatten().any(|entry| entry.file_name().to_string_lossy().contains("_Packages")));
    if known { Ok(()) } else { refresh() }
}

/// Fetches the package lists.
pub(crate) fn refresh() -> Result<()> {
    run(as_root("apt-get")?.args(["-q", "update"])).context("cannot fetch the lists of packages")
}

/// Installs those of the packages that are missing.
pub(crate) fn install(consent: Consent, packages: &[&str], purpose: &str) -> Result<()> {
    let missing: Vec<_> = packages.iter().copied().filter(|package| !installed(package)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    agree(consent, &format!("lbd needs {purpose}; to install: apt-get install {}", missing.join(" ")))?;
    refresh_if_empty()?;
    let attempt = || -> Result<()> {
        run(as_root("apt-get")?
            .args(["-q", "-y", "-o", "DPkg::Lock::Timeout=600", "install", "--no-install-recommends"])
            .args(&missing))
    };
    // Old lists name package versions that the mirrors have dropped.
    if attempt().is_err() {
        refresh()?;
        attempt()?;
    }
    Ok(())
}

/// Whether we are root.
pub(crate) fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

/// A command that runs as root: through sudo when we are not.
pub(crate) fn as_root(program: impl AsRef<OsStr>) -> Result<Command> {
    let program = program.as_ref();
    let mut command = if is_root() {
        Command::new(program)
    } else if Path::new("/usr/bin/sudo").exists() {
        let mut sudo = Command::new("sudo");
        if !std::io::stdin().is_terminal() {
            sudo.arg("-n");
        }
        sudo.arg("DEBIAN_FRONTEND=noninteractive").arg(program);
        sudo
    } else {
        bail!("`{}` needs root: run it as root and try again", shown(&Command::new(program)));
    };
    command.env("DEBIAN_FRONTEND", "noninteractive");
    Ok(command)
}
