//! Format, lints and documentation.
use anyhow::Result;

use crate::{
    Consent,
    build::bpf_cargo,
    run::{cargo, run},
    toolchain,
};

/// All of it; the first failure ends it.
pub(crate) fn all(_consent: Consent) -> Result<()> {
    run(cargo().args(["fmt", "--all", "--check"]))?;
    run(cargo().args(["clippy", "--workspace", "--all-targets", "--", "-Dwarnings"]))?;
    run(cargo().args(["doc", "--no-deps", "--document-private-items"]).env("RUSTDOCFLAGS", "-Dwarnings"))
}
