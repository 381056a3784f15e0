//! lbd's XDP programs. Built for the BPF target by `cargo xtask build`; on the host this is an empty program.
#![cfg_attr(target_arch = "bpf", no_std, no_main)]

#[cfg(target_arch = "bpf")]
mod datapath {
    //! The programs.
    use aya_ebpf::{bindings::xdp_action, macros::xdp, programs::XdpContext};

    /// Leaves every packet to the kernel.
    #[xdp]
    pub(crate) fn lbd_pass(_context: XdpContext) -> u32 {
        xdp_action::XDP_PASS
    }

    // The licence that the verifier sees: the helpers that lbd calls are for GPL-compatible programs.
    #[unsafe(link_section = "license")]
    #[unsafe(no_mangle)]
    static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

    #[panic_handler]
    fn panic(_information: &core::panic::PanicInfo<'_>) -> ! {
        // Never reached: `cargo xtask build` refuses an object that still has panic code in it.
        loop {}
    }
}

#[cfg(not(target_arch = "bpf"))]
fn main() {
    eprintln!("lbd-bpf is a BPF object: build it with `cargo xtask build`");
    std::process::exit(2);
}
