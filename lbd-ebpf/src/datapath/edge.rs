//! The hot path: packets of live flows.

use core::ptr::read_volatile;

use aya_ebpf::{bindings::xdp_action, programs::XdpContext};
use lbd_common::abi::{
    FLOW_DEAD, FLOW_REVERSE, Flow4, FlowKey4, STAGE_ANSWER, STAGE_ARP, STAGE_FLAGS, STAGE_LOCAL, STAGE_OPEN,
    STAGE_PROVE, Segment, Tuple4, traffic_index,
};
use lbd_common::packet::{ETHERNET, Ipv4Tcp, ethertype};
use lbd_common::reason::Reason;
use lbd_common::tcp::{self, ACK, FIN, RST, SYN};

use super::context::{
    Ethernet, Outcome, at, available, is_for, is_group, mac_pointer, now, refuse, resolve, segment, send, stage,
};
use super::maps::{FLOWS4, FRONTEND_OWNERS, TRAFFIC};

/// Decides which way a frame goes.
#[inline(always)]
pub(crate) fn edge(context: &XdpContext) -> Outcome {
    let Some((segment, ethernet)) = segment(context) else { return Ok(xdp_action::XDP_PASS) };
    // SAFETY: `segment` has bounds-checked the Ethernet header.
    let kind = unsafe { (*ethernet).ethertype };
    if kind == ethertype::VLAN || kind == ethertype::SERVICE_VLAN {
        return Err(refuse(Reason::UnknownVlan, 0));
    }
    if segment.id == 0 {
        return Ok(xdp_action::XDP_PASS);
    }
    if kind == ethertype::ARP {
        return stage(context, STAGE_ARP);
    }
    if !is_for(ethernet, segment) {
        if is_group(ethernet) {
            return stage(context, STAGE_LOCAL);
        }
        return Err(refuse(Reason::NotOurMac, segment.tenant));
    }
    if kind != ethertype::IPV4 {
        return stage(context, STAGE_LOCAL);
    }
    let Some(packet) = at::<Ipv4Tcp>(context, ETHERNET) else { return stage(context, STAGE_LOCAL) };
    // SAFETY: `at` has bounds-checked the headers.
    let packet = unsafe { &mut *packet };
    if packet.verify(available(context, ETHERNET)).is_err() {
        return stage(context, STAGE_LOCAL);
    }
    let key = packet.key(segment.id);
    let Some(flow) = FLOWS4.get_ptr_mut(key) else {
        return unknown(context, packet.tcp.flags);
    };
    if packet.tcp.flags & (SYN | FIN | RST) != 0 {
        return stage(context, STAGE_FLAGS);
    }
    match translate(segment, ethernet, packet, flow, &key) {
        Some(outcome) => outcome,
        None => unknown(context, packet.tcp.flags),
    }
}

/// Goes on with a TCP packet of no live flow.
#[inline(always)]
pub(crate) fn unknown(context: &XdpContext, flags: u8) -> Outcome {
    match flags & (SYN | ACK) {
        SYN => stage(context, STAGE_OPEN),
        ACK | 0 => stage(context, STAGE_PROVE),
        _ => stage(context, STAGE_ANSWER),
    }
}

/// Rewrites a packet by a half of a flow and sends it. `None`: the half is not (or no longer) this packet's flow.
#[inline(always)]
pub(crate) fn translate(
    segment: &Segment,
    ethernet: *mut Ethernet,
    packet: &mut Ipv4Tcp,
    flow: *mut Flow4,
    key: &FlowKey4,
) -> Option<Outcome> {
    let (to, next_hop, state) = read(flow, key)?;
    Some(forward(segment, ethernet, packet, flow, key, &to, next_hop, state))
}

/// What a half says of a packet's way, copied out. `None` if the half is dead or another flow's: a hash element can be recycled under
/// its reader, so the tuple is compared after the copy, in program order.
#[inline(always)]
pub(crate) fn read(flow: *const Flow4, key: &FlowKey4) -> Option<(Tuple4, u16, u16)> {
    // SAFETY: a map value, which the verifier checks; all fields are plain integers.
    unsafe {
        let to = Tuple4 {
            source_be: read_volatile(&raw const (*flow).to.source_be),
            destination_be: read_volatile(&raw const (*flow).to.destination_be),
            source_port_be: read_volatile(&raw const (*flow).to.source_port_be),
            destination_port_be: read_volatile(&raw const (*flow).to.destination_port_be),
        };
        let next_hop = read_volatile(&raw const (*flow).next_hop);
        let state = read_volatile(&raw const (*flow).state);
        let tuple = Tuple4 {
            source_be: read_volatile(&raw const (*flow).tuple.source_be),
            destination_be: read_volatile(&raw const (*flow).tuple.destination_be),
            source_port_be: read_volatile(&raw const (*flow).tuple.source_port_be),
            destination_port_be: read_volatile(&raw const (*flow).tuple.destination_port_be),
        };
        let own = tuple == key.tuple && read_volatile(&raw const (*flow).segment) == key.segment;
        (own && state & FLOW_DEAD == 0).then_some((to, next_hop, state))
    }
}

/// Counts a packet of `length` bytes for a frontend on this CPU.
#[inline(always)]
pub(crate) fn count_traffic(frontend: u16, reverse: bool, length: u32) {
    if let Some(traffic) = TRAFFIC.get_ptr_mut(traffic_index(frontend, reverse)) {
        // SAFETY: this CPU's value.
        unsafe {
            (*traffic).packets += 1;
            (*traffic).bytes += u64::from(length);
        }
    }
}

/// Whose flow it is: on the hub's segment only the flow knows.
#[inline(always)]
pub(crate) fn tenant_of(flow: *const Flow4, segment: &Segment) -> u16 {
    // SAFETY: a map value, which the verifier checks.
    let frontend = unsafe { (*flow).frontend };
    FRONTEND_OWNERS.get(u32::from(frontend)).map_or(segment.tenant, |owner| owner.tenant)
}

#[expect(clippy::too_many_arguments, reason = "inlined: the parts of one copy")]
#[inline(always)]
fn forward(
    segment: &Segment,
    ethernet: *mut Ethernet,
    packet: &mut Ipv4Tcp,
    flow: *mut Flow4,
    key: &FlowKey4,
    to: &Tuple4,
    next_hop: u16,
    state: u16,
) -> Outcome {
    if packet.ip.ttl <= 1 {
        return Err(refuse(Reason::TtlExceeded, tenant_of(flow, segment)));
    }
    let length = packet.total_length();
    let (hop, own_mac) = match resolve(next_hop, length, segment) {
        Ok(found) => found,
        Err(reason) => return Err(refuse(reason, tenant_of(flow, segment))),
    };
    // SAFETY: a map value, which the verifier checks. Only counters and tracking are written, so that a lost race costs a
    // count, never a translation.
    unsafe {
        let destination = if own_mac {
            mac_pointer(&hop.destination)
        } else if state & FLOW_REVERSE != 0 {
            mac_pointer(&(*flow).own)
        } else {
            return Err(refuse(Reason::NoNeighbour, tenant_of(flow, segment)));
        };
        let flow = &mut *flow;
        // A packet far from the flow's sequence numbers is forwarded (its receiver judges it) but moves nothing here.
        let end = packet.sequence_end();
        if tcp::near(end, flow.sequence) {
            flow.last_seen = now();
            if tcp::after(end, flow.sequence) {
                flow.sequence = end;
            }
            flow.acknowledged = packet.acknowledgement();
        }
        flow.bytes += u64::from(length);
        flow.packets = flow.packets.wrapping_add(1);
        if flow.packets == 0 {
            flow.packets_high = flow.packets_high.wrapping_add(1);
        }
        count_traffic(flow.frontend, state & FLOW_REVERSE != 0, length);
        packet.rewrite(&key.tuple, to);
        Ok(send(ethernet, hop, destination))
    }
}
