//! Copies the BPF object that `cargo xtask build` has made to where `lbd::dataplane::OBJECT` includes it from.

use std::path::PathBuf;
use std::{env, fs, io};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-env-changed=LBD_BPF_OBJECT");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?).join("lbd-bpf");
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or("cargo sets CARGO_MANIFEST_DIR")?);
    let source = match env::var_os("LBD_BPF_OBJECT") {
        Some(path) => PathBuf::from(path),
        None => manifest.join("../target/bpf/lbd-bpf"),
    };
    // Also watches a path that does not exist yet: cargo runs this again once it does.
    println!("cargo:rerun-if-changed={}", source.display());
    match fs::read(&source) {
        Ok(bytes) => fs::write(&out, bytes)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            println!(
                "cargo:warning=no BPF object at {}: this lbd has no datapath; run `cargo xtask build`",
                source.display()
            );
            fs::write(&out, [])?;
        }
        Err(error) => return Err(format!("{}: {error}", source.display()).into()),
    }
    Ok(())
}
