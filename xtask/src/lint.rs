//! Format, lints and documentation.
use std::path::Path;

use anyhow::{Result, bail};

use crate::{
    Consent,
    build::bpf_cargo,
    packages,
    run::{cargo, find, run},
    toolchain::{self, Toolchain},
};

/// Debian's clippy, of the same version as the compiler of route (b).
const DEBIAN_CLIPPY: &str = "/usr/bin/clippy-driver";

/// All of it; what fails does not keep the rest from running.
pub(crate) fn all(consent: Consent) -> Result<()> {
    let results = [
        run(cargo().args(["fmt", "--all", "--check"])),
        run(cargo().args(["clippy", "--workspace", "--all-targets", "--keep-going", "--", "-Dwarnings"])),
        bpf(consent),
        run(cargo()
            .args(["doc", "--workspace", "--exclude", "lbd-ebpf", "--no-deps", "--document-private-items"])
            .env("RUSTDOCFLAGS", "-Dwarnings")),
    ];
    let failures: Vec<_> = results.into_iter().filter_map(Result::err).map(|error| error.to_string()).collect();
    if failures.is_empty() { Ok(()) } else { bail!("{}", failures.join("\n")) }
}

/// The programs on their own target: on the host they are an empty program.
fn bpf(consent: Consent) -> Result<()> {
    let toolchain = toolchain::ensure(consent)?;
    let scratch = crate::target().join("bpf-lint");
    let Toolchain { rustc, .. } = &toolchain;
    if rustc != Path::new(toolchain::DEBIAN_RUSTC) {
        return run(bpf_cargo(&toolchain, "clippy", &scratch).args(["--", "-Dwarnings"]));
    }
    // Clippy is a compiler: it must be of the version that compiled `core`. Debian's has no cargo of its own to drive it.
    if !Path::new(DEBIAN_CLIPPY).is_file() && find("apt-get").is_some() {
        packages::install(consent, &["rust-web-clippy"], "clippy of the version that builds the BPF programs")?;
    }
    if !Path::new(DEBIAN_CLIPPY).is_file() {
        bail!("{DEBIAN_CLIPPY} is missing: install the package rust-web-clippy");
    }
    run(bpf_cargo(&toolchain, "check", &scratch)
        .env("RUSTC_WORKSPACE_WRAPPER", DEBIAN_CLIPPY)
        .env("CLIPPY_ARGS", "-Dwarnings__CLIPPY_HACKERY__"))
}
