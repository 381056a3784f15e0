//! Finding the programs that were built beside this one.
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};

/// The path of a program of this workspace, by name: `lbd`, `lbd-test-peer`, ….
///
/// `LBD_BIN_DIR` names another directory to look in first, e.g. of an older build.
pub fn binary(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot tell where this program is")?;
    let mut directories: Vec<PathBuf> = std::env::var_os("LBD_BIN_DIR").map(PathBuf::from).into_iter().collect();
    // target/debug/deps/suite-0123 and target/debug/lbd-demo.
    directories.extend(own.ancestors().skip(1).take(2).map(PathBuf::from));
    for directory in &directories {
        let path = directory.join(name);
        if path.is_file() {
            return Ok(path);
        }
    }
    bail!("`{name}` is not built: run `cargo xtask test` (or `cargo build --workspace --bins`), which build it first")
}
