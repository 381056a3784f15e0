//! SYN, FIN and RST on a live flow.

use aya_ebpf::programs::XdpContext;
use lbd_common::abi::{BACKEND_ELIGIBLE, FLOW_FIN, FLOW_PEER_FIN, FLOW_RESET, FLOW_REVERSE, Flow4, FlowKey4, Tuple4};
use lbd_common::reason::Reason;
use lbd_common::tcp::{self, ACK, FIN, RST, SYN};

use super::age::kill;
use super::context::{Outcome, count, fetch_or, ipv4_tcp, now, refuse, segment};
use super::edge::{read, tenant_of, translate, unknown};
use super::maps::{BACKENDS, FLOWS4, NEXT_HOPS};

/// Follows the state of a flow, then translates.
#[inline(always)]
pub(crate) fn flags(context: &XdpContext) -> Outcome {
    let (segment, ethernet) = segment(context).ok_or(refuse(Reason::Internal, 0))?;
    let packet = ipv4_tcp(context).map_err(|reason| refuse(reason, segment.tenant))?;
    // SAFETY: `ipv4_tcp` has bounds-checked the headers.
    let packet = unsafe { &mut *packet };
    let bits = packet.tcp.flags;
    if !tcp::valid_flags(bits) {
        return Err(refuse(Reason::BadFlags, segment.tenant));
    }
    let key = packet.key(segment.id);
    let Some(flow) = FLOWS4.get_ptr_mut(key) else { return unknown(context, bits) };
    let Some((to, next_hop, state)) = read(flow, &key) else { return unknown(context, bits) };
    // SAFETY: a map value, which the verifier checks.
    let (reference, backend) = unsafe { ((*flow).sequence, (*flow).backend()) };

    if bits & (SYN | ACK) == SYN {
        // The client starts anew. On a live connection its server decides (RFC 9293 §3.10.7.4: challenge ACK); on a closed
        // one, or one whose backend takes no new connections, the choice is made anew.
        let forward = state & FLOW_REVERSE == 0;
        let eligible = BACKENDS.get(u32::from(backend)).is_some_and(|backend| backend.flags & BACKEND_ELIGIBLE != 0);
        if forward && (tcp::closed(state) || !eligible) {
            kill(flow, &to, next_hop, now());
            return unknown(context, bits);
        }
    } else if bits & RST != 0 {
        if tcp::near(packet.sequence(), reference) {
            mark(flow, FLOW_RESET);
            mark_other(&to, next_hop, FLOW_RESET);
        } else {
            count(Reason::BlindReset, tenant_of(flow, segment));
        }
    } else if bits & FIN != 0 && tcp::near(packet.sequence_end(), reference) {
        mark(flow, FLOW_FIN);
        mark_other(&to, next_hop, FLOW_PEER_FIN);
    }
    match translate(segment, ethernet, packet, flow, &key) {
        Some(outcome) => outcome,
        None => unknown(context, bits),
    }
}

/// Atomically sets bits of a half's state; gives the state before.
#[inline(always)]
pub(crate) fn mark(flow: *mut Flow4, bits: u16) -> u16 {
    // SAFETY: `packets_high` and `state` are one aligned word, state in its upper half (little endian, as `bpfel` is).
    let before = unsafe { fetch_or((&raw mut (*flow).packets_high).cast(), u32::from(bits) << 16) };
    (before >> 16) as u16
}

/// The other half of a flow, given what this half says.
#[inline(always)]
pub(crate) fn other(to: &Tuple4, next_hop: u16) -> Option<*mut Flow4> {
    let hop = NEXT_HOPS.get(u32::from(next_hop))?;
    let key = FlowKey4::reply(to, hop.segment, lbd_common::packet::TCP);
    let flow = FLOWS4.get_ptr_mut(key)?;
    read(flow, &key).map(|_| flow)
}

#[inline(always)]
fn mark_other(to: &Tuple4, next_hop: u16, bits: u16) {
    if let Some(flow) = other(to, next_hop) {
        mark(flow, bits);
    }
}
