//! Building the BPF object and the binaries.
use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};
use object::{Object as _, ObjectSymbol as _};

use crate::{
    Consent,
    run::{cargo, run},
    toolchain::{self, Toolchain},
};

/// The BPF target; the maps' ABI is little-endian.
pub(crate) const TARGET: &str = "bpfel-unknown-none";

/// Builds the BPF objects into `target/bpf` and returns the path of the datapath's, `lbd-bpf`. Beside it lies `lbd-driver`, which the
/// datapath benchmark drives it with.
pub(crate) fn bpf(consent: Consent) -> Result<PathBuf> {
    object(consent, "lbd-driver", "lbd-driver", &[])?;
    object(consent, "lbd-bpf", "lbd-bpf", &[])
}

/// Builds `target/debug/lbd-other-build`: the same `lbd` with differently optimised programs, as an upgrade would bring them. To be
/// built before the others, whose files it uses on the way.
pub(crate) fn other(consent: Consent) -> Result<()> {
    let object =
        object(consent, "lbd-bpf", "lbd-bpf-other", &["--config", "profile.release.package.lbd-ebpf.opt-level=2"])?;
    run(cargo().args(["build", "--package", "lbd"]).env("LBD_BPF_OBJECT", object))?;
    let built = crate::target().join("debug");
    fs::copy(built.join("lbd"), built.join("lbd-other-build")).context("cannot copy the other build of lbd")?;
    Ok(())
}

fn object(consent: Consent, binary: &str, name: &str, options: &[&str]) -> Result<PathBuf> {
    let toolchain = toolchain::ensure(consent)?;
    eprintln!("BPF object: {}", toolchain.route);
    let scratch = crate::target().join("bpf-build");
    run(bpf_cargo(&toolchain, "build", &scratch).arg("--release").args(["--bin", binary]).args(options))?;
    let built = scratch.join(TARGET).join("release").join(binary);
    let object = fs::read(&built).with_context(|| format!("cannot read {}", built.display()))?;
    refuse_panics(&object).with_context(|| format!("the BPF object {} would not load", built.display()))?;
    let place = crate::target().join("bpf").join(name);
    // An unchanged object keeps its time, so that nothing that embeds it is built again.
    if fs::read(&place).ok().as_ref() != Some(&object) {
        fs::create_dir_all(crate::target().join("bpf"))?;
        let fresh = place.with_extension("new");
        fs::write(&fresh, &object)?;
        fs::rename(&fresh, &place).with_context(|| format!("cannot write {}", place.display()))?;
    }
    Ok(place)
}

/// A cargo command on `lbd-ebpf` for the BPF target.
pub(crate) fn bpf_cargo(toolchain: &Toolchain, subcommand: &str, scratch: &Path) -> Command {
    let mut linker = OsString::from("-Clinker=");
    linker.push(&toolchain.linker);
    let mut flags = OsString::new();
    // v3 has the atomic instructions and 32-bit jumps that the programs are written for.
    for flag in [
        "-Cdebuginfo=2",
        "-Clink-arg=--btf",
        // Else bpf-linker has every copy of more than a few bytes made by a loop over bytes.
        "-Clink-arg=--disable-expand-memcpy-in-order",
        "-Ctarget-cpu=v3",
    ] {
        flags.push(flag);
        flags.push("\u{1f}");
    }
    flags.push(linker);
    let mut command = cargo();
    command
        .arg(subcommand)
        .args(["--package", "lbd-ebpf", "--target", TARGET, "-Zbuild-std=core", "--target-dir"])
        .arg(scratch)
        .env("RUSTC", &toolchain.rustc)
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", flags)
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_TARGET_DIR");
    command
}

/// Fails if code for panics, or a call to something that is not in the object, is left.
fn refuse_panics(object: &[u8]) -> Result<()> {
    let file = object::File::parse(object).context("not an ELF object")?;
    let mut bad = Vec::new();
    for symbol in file.symbols() {
        let name = symbol.name().unwrap_or("(unreadable name)");
        let panics =
            ["panic", "rust_begin_unwind", "unwrap_failed", "expect_failed"].iter().any(|word| name.contains(word));
        if panics || (symbol.is_undefined() && !name.is_empty()) {
            bad.push(name.to_owned());
        }
    }
    if bad.is_empty() {
        return Ok(());
    }
    bail!(
        "it contains or calls: {}. Unwrapping, indexing, checked arithmetic, 128-bit arithmetic and large copies pull these in",
        bad.join(", ")
    );
}

/// Builds host packages; `arguments` choose which.
pub(crate) fn host(arguments: &[&str], release: bool) -> Result<()> {
    let mut command = cargo();
    command.arg("build").args(arguments);
    if release {
        command.arg("--release");
    }
    run(&mut command)
}
