//! The toolchain for BPF: a compiler that has the source of `core` beside it, and bpf-linker.
//!
//! Two routes lead there. (a) rustup: the active toolchain (or nightly) with the component `rust-src`.
//! (b) Debian: the packages `rustc-web` and `rust-web-src`, driven by the ordinary cargo.
//! The target is tier 3, so `core` is built from source, which a stable compiler does under `RUSTC_BOOTSTRAP=1`.
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail};

use crate::{
    Consent, packages,
    run::{cargo, find, output, run},
};

/// The bpf-linker that lbd is built with.
const LINKER_VERSION: &str = "0.13.0";
/// The compiler of route (b).
pub(crate) const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
/// The oldest compiler that builds the workspace (major, minor): `rust-version` in Cargo.toml.
const OLDEST_RUSTC: (u32, u32) = (1, 95);

/// What builds the BPF object.
pub(crate) struct Toolchain {
    /// The compiler.
    pub(crate) rustc: PathBuf,
    /// The linker.
    pub(crate) linker: PathBuf,
    /// The route in words, for messages.
    pub(crate) route: String,
}

/// Version of LLVM or rustc: major, minor, patch.
type Version = (u32, u32, u32);

struct Compiler {
    rustc: PathBuf,
    llvm: Version,
    route: String,
}

/// Finds the toolchain; installs what is missing.
pub(crate) fn ensure(consent: Consent) -> Result<Toolchain> {
    let compiler = ensure_compiler(consent)?;
    let linker = ensure_linker(consent, &compiler)?;
    Ok(Toolchain { rustc: compiler.rustc, linker, route: compiler.route })
}

fn ensure_compiler(consent: Consent) -> Result<Compiler> {
    if let Some(compiler) = present() {
        return Ok(compiler);
    }
    if find("rustup").is_some() {
        packages::agree(
            consent,
            "lbd's BPF programs need the source of `core`; to install: rustup component add rust-src",
        )?;
        let added = run(Command::new("rustup").args(["component", "add", "rust-src"]));
        match (added, present()) {
            (Ok(()), Some(compiler)) => return Ok(compiler),
            (Ok(()), None) => eprintln!("rustup added rust-src, but the source is not where the compiler looks for it"),
            (Err(error), _) => eprintln!("{error}"),
        }
    }
    if packages::has_apt() {
        packages::refresh_if_empty()?;
        let fits = |candidate: Option<String>| candidate.as_deref().and_then(version).is_some_and(new_enough);
        if !fits(packages::candidate("rustc-web")) {
            packages::refresh()?;
        }
        let offered = packages::candidate("rustc-web");
        if fits(offered.clone()) {
            packages::install(
                consent,
                &["rustc-web", "rust-web-src"],
                "a compiler with the source of `core` (beside the one you have, which stays the default under rustup)",
            )?;
            if let Some(compiler) = present() {
                return Ok(compiler);
            }
            bail!("rustc-web and rust-web-src are installed, but {DEBIAN_RUSTC} has no library/core beside it");
        }
        eprintln!(
            "the package rustc-web is not offered in version {}.{} or newer here (offered: {})",
            OLDEST_RUSTC.0,
            OLDEST_RUSTC.1,
            offered.as_deref().unwrap_or("none")
        );
    }
    bail!(
        "no compiler with the source of `core` (library/core under its sysroot). Do one of these and run this again:\n  \
         - with rustup: rustup component add rust-src\n  \
         - on Debian 12 or newer: apt-get install rustc-web rust-web-src (1.{} or newer)",
        OLDEST_RUSTC.1
    );
}

/// A compiler that can build the BPF target as it stands.
fn present() -> Option<Compiler> {
    let mut candidates =
        vec![(PathBuf::from(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into())), "the active toolchain")];
    if find("rustup").is_some()
        && let Ok(path) = output(Command::new("rustup").args(["which", "--toolchain", "nightly", "rustc"]))
    {
        candidates.push((PathBuf::from(path), "rustup's nightly"));
    }
    candidates.push((PathBuf::from(DEBIAN_RUSTC), "Debian's rustc-web"));
    candidates.into_iter().find_map(|(rustc, name)| inspect(&rustc, name))
}

fn inspect(rustc: &Path, name: &str) -> Option<Compiler> {
    let sysroot = output(Command::new(rustc).args(["--print", "sysroot"])).ok()?;
    let source = Path::new(&sysroot).join("lib/rustlib/src/rust/library/core/src/lib.rs");
    if !source.is_file() {
        return None;
    }
    let about = output(Command::new(rustc).arg("-vV")).ok()?;
    let field = |key: &str| about.lines().find_map(|line| line.strip_prefix(key)).and_then(version);
    let release = field("release: ")?;
    let llvm = field("LLVM version: ")?;
    if !new_enough(release) {
        return None;
    }
    Some(Compiler {
        rustc: rustc.to_owned(),
        llvm,
        route: format!(
            "{name} (rustc {}.{}.{}, LLVM {}.{}.{})",
            release.0, release.1, release.2, llvm.0, llvm.1, llvm.2
        ),
    })
}

fn new_enough(release: Version) -> bool {
    (release.0, release.1) >= OLDEST_RUSTC
}

/// Whether a compiler is of the oldest version that builds the workspace, which its lints are kept clean on.
pub(crate) fn is_oldest(rustc: &Path) -> bool {
    let about = output(Command::new(rustc).arg("-vV")).unwrap_or_default();
    let release = about.lines().find_map(|line| line.strip_prefix("release: ")).and_then(version);
    release.is_some_and(|release| (release.0, release.1) == OLDEST_RUSTC)
}

/// The first three numbers of a version; an epoch and a suffix are left out.
fn version(text: &str) -> Option<Version> {
    let text = text.split_once(':').map_or(text, |(_, rest)| rest);
    let mut numbers = text.split(|letter: char| !letter.is_ascii_digit()).map(|number| number.parse::<u32>().ok());
    let major = numbers.next()??;
    let minor = numbers.next().flatten().unwrap_or(0);
    let patch = numbers.next().flatten().unwrap_or(0);
    Some((major, minor, patch))
}

fn ensure_linker(consent: Consent, compiler: &Compiler) -> Result<PathBuf> {
    let tools = crate::target().join("tools");
    let own = tools.join("bin/bpf-linker");
    for candidate in [Some(own.clone()), find("bpf-linker")].into_iter().flatten() {
        if fits(&candidate) {
            return Ok(candidate);
        }
    }
    let (major, _, _) = compiler.llvm;
    if llvm(compiler.llvm).is_none() && packages::has_apt() {
        packages::refresh_if_empty()?;
        let package = format!("llvm-{major}-dev");
        if packages::candidate(&package).is_none() {
            packages::refresh()?;
        }
        if packages::candidate(&package).is_some() {
            let mut wanted = vec![package.as_str()];
            // LLVM is C++: the link needs the compiler's own libstdc++.
            if find("g++").is_none() {
                wanted.push("g++");
            }
            packages::install(consent, &wanted, &format!("LLVM {major}, for bpf-linker"))?;
        }
    }
    let Some((prefix, found)) = llvm(compiler.llvm) else {
        bail!(
            "bpf-linker {LINKER_VERSION} is needed, and no LLVM {}.{}.{} or newer is here to build it with. Do one of these and run this again:\n  \
             - put a released bpf-linker {LINKER_VERSION} into the PATH (cargo binstall bpf-linker@{LINKER_VERSION}, or from its releases page)\n  \
             - install the development files of LLVM {major} (llvm-{major}-dev; under /usr/lib/llvm-{major} or named by LLVM_PREFIX)",
            compiler.llvm.0,
            compiler.llvm.1,
            compiler.llvm.2
        );
    };
    packages::agree(
        consent,
        &format!(
            "lbd needs bpf-linker {LINKER_VERSION}; to build (a minute or two): cargo install bpf-linker into {}",
            tools.display()
        ),
    )?;
    fs::create_dir_all(&tools)?;
    run(cargo()
        .args(["install", "--quiet", "--locked", "--force", "--version", LINKER_VERSION, "--no-default-features"])
        .args(["--features", &format!("llvm-{}", found.0), "--root"])
        .arg(&tools)
        .arg("--target-dir")
        .arg(crate::target().join("tools-build"))
        .arg("bpf-linker")
        .env("LLVM_PREFIX", &prefix)
        .env_remove("CARGO_TARGET_DIR")
        .env_remove("RUSTC"))
    .context("cannot build bpf-linker")?;
    if fits(&own) {
        Ok(own)
    } else {
        bail!("{} was built but does not say it is version {LINKER_VERSION}", own.display())
    }
}

fn fits(linker: &Path) -> bool {
    linker.is_file()
        && output(Command::new(linker).arg("--version"))
            .is_ok_and(|text| text.split_whitespace().any(|word| word == LINKER_VERSION))
}

/// An LLVM whose reader understands what the compiler writes: the same version or a newer one that bpf-linker supports.
fn llvm(wanted: Version) -> Option<(PathBuf, Version)> {
    let named = std::env::var_os("LLVM_PREFIX").map(PathBuf::from);
    let usual = (wanted.0..=23).map(|major| PathBuf::from(format!("/usr/lib/llvm-{major}")));
    named.into_iter().chain(usual).find_map(|prefix| {
        let found = version(&output(Command::new(prefix.join("bin/llvm-config")).arg("--version")).ok()?)?;
        let headers = prefix.join("include/llvm-c/Core.h").is_file();
        (headers && found >= wanted && (21..=23).contains(&found.0)).then_some((prefix, found))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_what_the_tools_print() {
        assert_eq!(version("1:22.1.8-1~deb12u1"), Some((22, 1, 8)));
        assert_eq!(version("1.96.0+dfsg1-1~deb12u2"), Some((1, 96, 0)));
        assert_eq!(version("1.97.0-nightly"), Some((1, 97, 0)));
        assert_eq!(version("22.1"), Some((22, 1, 0)));
        assert_eq!(version("(none)"), None);
    }
}
