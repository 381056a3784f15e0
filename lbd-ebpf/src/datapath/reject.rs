//! Refusals that the sender learns of.

use core::ptr::{read_volatile, write_volatile};

use aya_ebpf::{
    bindings::xdp_action,
    helpers::generated::{bpf_xdp_adjust_head, bpf_xdp_adjust_tail},
    programs::XdpContext,
};
use lbd_common::abi::{Address4, Address6, Segment};
use lbd_common::icmp::{IcmpError, Trouble, may_answer};
use lbd_common::packet::{self, ETHERNET, Family, IpHeader as _, TcpPacket, UdpPacket, ethertype};
use lbd_common::reason::Reason;
use lbd_common::reserve;

use super::context::{
    Arrival, BACK, Ethernet, Outcome, at, available, budgets, mac_pointer, now, raw, refuse, settings, tcp_packet,
    udp_packet,
};
use super::maps::TENANT_USE;

/// Turns the packet into the RST or ICMP error that refuses it and sends it back. Counted already, except for what the rate limit
/// drops.
#[inline(always)]
pub(crate) fn reject(context: &XdpContext) -> Outcome {
    let arrival = Arrival::in_stage(context).ok_or(refuse(Reason::Internal, 0))?;
    let settings = settings()?;
    let now = now();
    let scratch = budgets(now).ok_or(refuse(Reason::Internal, 0))?;
    let tenant = scratch.tenant as u16 & 1023;
    let (reason, mtu) = (scratch.reason, scratch.mtu as u16);
    let trouble = if reason == Reason::TtlExceeded as u32 {
        Some(Trouble::Hops)
    } else if reason == Reason::TooBig as u32 {
        Some(Trouble::Size)
    } else {
        None
    };
    if scratch.refusals < settings.rejects_per_tick {
        scratch.refusals += 1;
    } else if !takes_from_reserve(tenant, now, settings.rejects_per_tick / RESERVE) {
        return Err(refuse(Reason::RejectLimit, tenant));
    }
    // SAFETY: `Arrival` has bounds-checked the Ethernet header.
    let kind = unsafe { (*arrival.ethernet).ethertype };
    let sent = match kind {
        ethertype::IPV4 => answer::<Address4>(context, &arrival, trouble, mtu),
        ethertype::IPV6 => answer::<Address6>(context, &arrival, trouble, mtu),
        _ => None,
    };
    // What may not be answered is dropped in silence.
    Ok(if sent.is_some() { BACK } else { xdp_action::XDP_DROP })
}

/// The part of a CPU's refusals in a tick that each tenant has besides, so that another's flood does not leave it without.
const RESERVE: u32 = 8;

/// Whether a refusal may be sent from the tenant's reserve. CPUs that take at once may count one for two.
#[inline(always)]
fn takes_from_reserve(tenant: u16, now: u32, limit: u32) -> bool {
    let Some(used) = TENANT_USE.get_ptr_mut(u32::from(tenant)) else { return false };
    // SAFETY: a map value, which the verifier checks; an aligned word is read and written at once.
    unsafe {
        let word = &raw mut (*used).refusals;
        let Some(taken) = reserve::take(read_volatile(word), now, limit) else { return false };
        write_volatile(word, taken);
    }
    true
}

/// `None`: the packet is one that nothing may be answered to.
#[inline(always)]
fn answer<A: Family>(context: &XdpContext, arrival: &Arrival, trouble: Option<Trouble>, mtu: u16) -> Option<()> {
    let header = at::<A::Header>(context, ETHERNET)?;
    // SAFETY: `at` has bounds-checked the header.
    let header = unsafe { &*header };
    if !may_answer::<A>(header) || is_broadcast(arrival.segment, header.source()) {
        return None;
    }
    // Both verify that the packet is neither a fragment nor longer than the frame.
    match (header.protocol(), trouble) {
        (packet::TCP, None) => reset::<A>(context, arrival),
        (packet::TCP, Some(trouble)) => {
            tcp_packet::<A>(context).ok()?;
            error::<A>(context, arrival, trouble, mtu)
        }
        (packet::UDP, trouble) => {
            udp_packet::<A>(context).ok()?;
            error::<A>(context, arrival, trouble.unwrap_or(Trouble::Port), mtu)
        }
        _ => None,
    }
}

/// Whether an IPv4 address is that of all hosts in the segment's prefix.
#[inline(always)]
fn is_broadcast<A: Family>(segment: &Segment, address: A) -> bool {
    let ([address, ..], mask) = (address.quads(), segment.mask4_be);
    !A::IS_V6
        && mask != 0
        && mask != u32::MAX
        && (address ^ segment.network4_be) & mask == 0
        && address | mask == u32::MAX
}

/// An Ethernet header back to where the frame came from.
#[inline(always)]
fn back<A: Family>(arrival: &Arrival) -> Ethernet {
    let mac = mac_pointer(&arrival.segment.mac);
    // SAFETY: `Arrival` has bounds-checked the Ethernet header; a MAC has three `u16`s.
    unsafe {
        Ethernet {
            destination: (*arrival.ethernet).source,
            source: [*mac, *mac.add(1), *mac.add(2)],
            ethertype: if A::IS_V6 { ethertype::IPV6 } else { ethertype::IPV4 },
        }
    }
}

#[inline(always)]
fn reset<A: Family>(context: &XdpContext, arrival: &Arrival) -> Option<()> {
    let refused = tcp_packet::<A>(context).ok()?;
    // SAFETY: `tcp_packet` has bounds-checked the headers.
    let reset = unsafe { (*refused).refusal() }?;
    let head = back::<A>(arrival);
    let surplus = available(context, ETHERNET) as i32 - TcpPacket::<A>::LENGTH as i32;
    // SAFETY: the helper checks the new length; all packet pointers are derived anew below.
    if unsafe { bpf_xdp_adjust_tail(raw(context), -surplus) } != 0 {
        return None;
    }
    let (ethernet, packet) = (at::<Ethernet>(context, 0)?, at::<TcpPacket<A>>(context, ETHERNET)?);
    // SAFETY: bounds-checked again after the change of length.
    unsafe {
        *ethernet = head;
        *packet = reset;
    }
    Some(())
}

/// The packet stays where it is, cut to what is quoted; the error's headers come before it.
#[inline(always)]
fn error<A: Family>(context: &XdpContext, arrival: &Arrival, trouble: Trouble, mtu: u16) -> Option<()> {
    // The sender of an IPv4 packet without "do not fragment" expects no error of this kind.
    if matches!(trouble, Trouble::Size) && !A::IS_V6 {
        let flags = at::<u8>(context, ETHERNET + 6)?;
        // SAFETY: `at` has bounds-checked the flags.
        if unsafe { *flags } & 0x40 == 0 {
            return None;
        }
    }
    let original = at::<UdpPacket<A>>(context, ETHERNET)?;
    // SAFETY: `at` has bounds-checked what is quoted.
    let error = IcmpError::<A>::about(unsafe { &*original }, trouble, mtu);
    let head = back::<A>(arrival);
    let surplus = available(context, ETHERNET) as i32 - UdpPacket::<A>::LENGTH as i32;
    // SAFETY: the helpers check the new length and the room; all packet pointers are derived anew below.
    let changed = unsafe {
        bpf_xdp_adjust_tail(raw(context), -surplus) == 0
            && bpf_xdp_adjust_head(raw(context), -(IcmpError::<A>::LENGTH as i32)) == 0
    };
    if !changed {
        return None;
    }
    let (ethernet, packet) = (at::<Ethernet>(context, 0)?, at::<IcmpError<A>>(context, ETHERNET)?);
    // SAFETY: bounds-checked again after the change of length.
    unsafe {
        *ethernet = head;
        *packet = error;
    }
    Some(())
}
