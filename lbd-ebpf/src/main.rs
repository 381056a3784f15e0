//! lbd's XDP programs. Built for the BPF target by `cargo xtask build`; on the host this is an empty program.
#![cfg_attr(target_arch = "bpf", no_std, no_main, feature(asm_experimental_arch))]

#[cfg(target_arch = "bpf")]
mod datapath;

#[cfg(not(target_arch = "bpf"))]
fn main() {}
