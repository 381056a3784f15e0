//! The programs: entries and verdicts only.
//!
//! [`lbd_edge`] is attached to the NIC and translates packets of live flows. Everything else goes on in a stage: a program
//! of its own, reached by a tail call, so that each stays small for the verifier and the hot path small for the cache.

#![expect(clippy::needless_pass_by_value, reason = "entries made by `#[xdp]` take their context by value")]

mod age;
mod arp;
mod context;
mod control;
mod edge;
mod flags;
mod half_open;
mod local;
mod maps;
mod new;
mod reject;
mod trace;

use aya_ebpf::{
    Global,
    macros::{tracepoint, xdp},
    programs::{TracePointContext, XdpContext},
};

use context::conclude;

/// First index into `segments` of this NIC; set at load.
#[unsafe(no_mangle)]
pub(crate) static SEGMENT_BASE: Global<u32> = Global::new(0);

/// This NIC's index: next hops here leave by `XDP_TX`. Set at load.
#[unsafe(no_mangle)]
pub(crate) static IFINDEX: Global<u32> = Global::new(0);

/// The program at the NIC.
#[xdp]
pub(crate) fn lbd_edge(context: XdpContext) -> u32 {
    conclude(&context, edge::edge(&context))
}

/// `STAGE_OPEN`.
#[xdp]
pub(crate) fn lbd_open(context: XdpContext) -> u32 {
    conclude(&context, new::open(&context))
}

/// `STAGE_PROVE`.
#[xdp]
pub(crate) fn lbd_prove(context: XdpContext) -> u32 {
    conclude(&context, new::prove(&context))
}

/// `STAGE_ANSWER`.
#[xdp]
pub(crate) fn lbd_answer(context: XdpContext) -> u32 {
    conclude(&context, new::answer(&context))
}

/// `STAGE_FLAGS`.
#[xdp]
pub(crate) fn lbd_flags(context: XdpContext) -> u32 {
    conclude(&context, flags::flags(&context))
}

/// `STAGE_ARP`.
#[xdp]
pub(crate) fn lbd_arp(context: XdpContext) -> u32 {
    conclude(&context, arp::arp(&context))
}

/// `STAGE_LOCAL`.
#[xdp]
pub(crate) fn lbd_local(context: XdpContext) -> u32 {
    conclude(&context, local::local(&context))
}

/// `STAGE_REJECT`.
#[xdp]
pub(crate) fn lbd_reject(context: XdpContext) -> u32 {
    conclude(&context, reject::reject(&context))
}

/// Run by the agent with `BPF_PROG_TEST_RUN`.
#[xdp]
pub(crate) fn lbd_control(context: XdpContext) -> u32 {
    control::control(&context)
}

/// Tracepoints `xdp_redirect_err` and `xdp_exception`.
#[tracepoint]
pub(crate) fn lbd_failed(context: TracePointContext) -> u32 {
    trace::failed(&context);
    0
}

/// Tracepoint `xdp_devmap_xmit`.
#[tracepoint]
pub(crate) fn lbd_sent(context: TracePointContext) -> u32 {
    trace::transmitted(&context);
    0
}

/// Leaves every packet to the kernel.
#[xdp]
pub(crate) fn lbd_pass(_context: XdpContext) -> u32 {
    aya_ebpf::bindings::xdp_action::XDP_PASS
}

// The licence that the verifier sees: the helpers that lbd calls are for GPL-compatible programs.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

#[panic_handler]
fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
    // Never reached: a reachable panic is a call to a function that the verifier refuses, and the build looks for it.
    loop {}
}
