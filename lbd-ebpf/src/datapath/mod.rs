//! The programs: entries and verdicts only.
//!
//! [`lbd_edge`] is attached to the NIC and translates packets of live flows. Everything else goes on in a stage: a program
//! of its own, reached by a tail call, so that each stays small for the verifier and the hot path small for the cache.

#![expect(clippy::needless_pass_by_value, reason = "entries made by `#[xdp]` take their context by value")]

mod age;
mod arp;
mod choice;
mod context;
mod control;
mod datagram;
mod edge;
mod flags;
mod half_open;
mod local;
mod maps;
mod migrate;
mod neighbour;
mod new;
mod reject;
mod tagged;
mod trace;
mod words;

use aya_ebpf::{
    Global,
    macros::{tracepoint, xdp},
    programs::{TracePointContext, XdpContext},
};

use lbd_common::abi::{Address4, Address6};
use lbd_common::hash::LookupSecret;

use context::{conclude, conclude_untagged};

/// First index into `segments` of this NIC; set at load.
#[unsafe(no_mangle)]
pub(crate) static SEGMENT_BASE: Global<u32> = Global::new(0);

/// This NIC's index: next hops here leave by `XDP_TX`. Set at load.
#[unsafe(no_mangle)]
pub(crate) static IFINDEX: Global<u32> = Global::new(0);

/// What keys of the IPv6 flow table are mixed with, at hand for each packet. Set at load.
#[unsafe(no_mangle)]
pub(crate) static LOOKUP_SECRET: Global<LookupSecret> = Global::new([0; 4]);

/// The program at the NIC.
#[xdp]
pub(crate) fn lbd_edge(context: XdpContext) -> u32 {
    conclude_untagged(&context, edge::edge(&context, SEGMENT_BASE.load(), 0))
}

/// `STAGE_OPEN4`.
#[xdp]
pub(crate) fn lbd_open4(context: XdpContext) -> u32 {
    conclude(&context, new::open::<Address4>(&context))
}

/// `STAGE_PROVE4`.
#[xdp]
pub(crate) fn lbd_prove4(context: XdpContext) -> u32 {
    conclude(&context, new::prove::<Address4>(&context))
}

/// `STAGE_ANSWER4`.
#[xdp]
pub(crate) fn lbd_answer4(context: XdpContext) -> u32 {
    conclude(&context, new::answer::<Address4>(&context))
}

/// `STAGE_FLAGS4`.
#[xdp]
pub(crate) fn lbd_flags4(context: XdpContext) -> u32 {
    conclude(&context, flags::flags::<Address4>(&context))
}

/// `STAGE_DATAGRAM4`.
#[xdp]
pub(crate) fn lbd_datagram4(context: XdpContext) -> u32 {
    conclude(&context, datagram::datagram::<Address4>(&context))
}

/// `STAGE_ADOPT4`.
#[xdp]
pub(crate) fn lbd_adopt4(context: XdpContext) -> u32 {
    conclude(&context, new::adopt::<Address4>(&context))
}

/// `STAGE_ADOPT6`.
#[xdp]
pub(crate) fn lbd_adopt6(context: XdpContext) -> u32 {
    conclude(&context, new::adopt::<Address6>(&context))
}

/// `STAGE_REPLIED4`.
#[xdp]
pub(crate) fn lbd_replied4(context: XdpContext) -> u32 {
    conclude(&context, datagram::replied::<Address4>(&context))
}

/// `STAGE_REPLIED6`.
#[xdp]
pub(crate) fn lbd_replied6(context: XdpContext) -> u32 {
    conclude(&context, datagram::replied::<Address6>(&context))
}

/// `STAGE_OPEN6`.
#[xdp]
pub(crate) fn lbd_open6(context: XdpContext) -> u32 {
    conclude(&context, new::open::<Address6>(&context))
}

/// `STAGE_PROVE6`.
#[xdp]
pub(crate) fn lbd_prove6(context: XdpContext) -> u32 {
    conclude(&context, new::prove::<Address6>(&context))
}

/// `STAGE_ANSWER6`.
#[xdp]
pub(crate) fn lbd_answer6(context: XdpContext) -> u32 {
    conclude(&context, new::answer::<Address6>(&context))
}

/// `STAGE_FLAGS6`.
#[xdp]
pub(crate) fn lbd_flags6(context: XdpContext) -> u32 {
    conclude(&context, flags::flags::<Address6>(&context))
}

/// `STAGE_DATAGRAM6`.
#[xdp]
pub(crate) fn lbd_datagram6(context: XdpContext) -> u32 {
    conclude(&context, datagram::datagram::<Address6>(&context))
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

/// `STAGE_TAGGED`.
#[xdp]
pub(crate) fn lbd_tagged(context: XdpContext) -> u32 {
    conclude(&context, tagged::tagged(&context))
}

/// `STAGE_NEIGHBOUR`.
#[xdp]
pub(crate) fn lbd_neighbour(context: XdpContext) -> u32 {
    conclude(&context, neighbour::neighbour(&context))
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
