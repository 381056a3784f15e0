//! Refusals that the sender learns of.

use aya_ebpf::{bindings::xdp_action, helpers::generated::bpf_xdp_adjust_tail, programs::XdpContext};
use lbd_common::packet::{ETHERNET, IPV4_TCP, Ipv4Tcp};
use lbd_common::reason::Reason;

use super::context::{Arrival, Outcome, at, available, now, raw, refuse, scratch, settings, tcp_packet};

/// Turns the packet into the RST that refuses it and sends it back. Counted already, except for what the rate limit drops.
#[inline(always)]
pub(crate) fn reject(context: &XdpContext) -> Outcome {
    let arrival = Arrival::in_stage(context).ok_or(refuse(Reason::Internal, 0))?;
    let (segment, ethernet) = (arrival.segment, arrival.ethernet);
    let settings = settings()?;
    let scratch = scratch().ok_or(refuse(Reason::Internal, 0))?;
    let tenant = scratch.tenant as u16 & 1023;
    let now = now();
    if scratch.tick != now {
        scratch.tick = now;
        scratch.refusals = 0;
    }
    if scratch.refusals >= settings.rejects_per_tick {
        return Err(refuse(Reason::RejectLimit, tenant));
    }
    scratch.refusals += 1;
    let Ok(packet) = tcp_packet::<lbd_common::abi::Address4>(context) else { return Ok(xdp_action::XDP_DROP) };
    // SAFETY: `tcp_packet` has bounds-checked the headers.
    let Some(reset) = (unsafe { (*packet).refusal() }) else { return Ok(xdp_action::XDP_DROP) };
    // SAFETY: `segment` has bounds-checked the Ethernet header.
    let client = unsafe { (*ethernet).source };
    let surplus = available(context, ETHERNET) as i32 - IPV4_TCP as i32;
    // SAFETY: the helper checks the new length; all packet pointers are derived anew below.
    if unsafe { bpf_xdp_adjust_tail(raw(context), -surplus) } != 0 {
        return Err(refuse(Reason::Internal, segment.tenant));
    }
    let (Some(Arrival { segment, ethernet, .. }), Some(packet)) =
        (Arrival::in_stage(context), at::<Ipv4Tcp>(context, ETHERNET))
    else {
        return Err(refuse(Reason::Internal, 0));
    };
    // SAFETY: bounds-checked again after the change of length; a MAC has three `u16`s.
    unsafe {
        *packet = reset;
        let mac = super::context::mac_pointer(&segment.mac);
        (*ethernet).destination = client;
        (*ethernet).source = [*mac, *mac.add(1), *mac.add(2)];
    }
    Ok(xdp_action::XDP_TX)
}
