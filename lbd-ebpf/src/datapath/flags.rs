//! SYN, FIN and RST on a live flow, and what may come from another MAC.

use aya_ebpf::programs::XdpContext;
use lbd_common::abi::{Address, BACKEND_ELIGIBLE, FLOW_FIN, FLOW_PEER_FIN, FLOW_RESET, FLOW_REVERSE, Flow, Tuple};
use lbd_common::packet::{TCP, TcpPacket};
use lbd_common::reason::Reason;
use lbd_common::tcp::{self, ACK, FIN, RST, SYN};

use super::age::{kill, reply_key};
use super::context::{Arrival, Outcome, count, fetch_and, fetch_or, now, refuse, tcp_packet};
use super::edge::{tenant_of, translate, unknown};
use super::maps::{BACKENDS, Tables};
use super::words::{Key, read};

/// Follows the state of a flow, then translates.
#[inline(always)]
pub(crate) fn flags<A: Tables>(context: &XdpContext) -> Outcome {
    let arrival = Arrival::in_stage(context).ok_or(refuse(Reason::Internal, 0))?;
    let packet = tcp_packet::<A>(context).map_err(|reason| refuse(reason, arrival.segment.tenant))?;
    // SAFETY: `tcp_packet` has bounds-checked the headers.
    let packet = unsafe { &mut *packet };
    let bits = packet.tcp.flags;
    if !tcp::valid_flags(bits) {
        return Err(refuse(Reason::BadFlags, arrival.segment.tenant));
    }
    // SAFETY: the tuple of a checked packet, which stays as it is until the half is read.
    let key = unsafe { Key::new(packet.tuple_mut(), arrival.segment.id, TCP) };
    let Some(flow) = key.flow() else { return unknown::<A>(context, &arrival, bits) };
    let Some(way) = read(flow, &key, TCP) else { return unknown::<A>(context, &arrival, bits) };
    let (to, next_hop, state) = (&way.to.0, way.next_hop, way.state);
    // SAFETY: a map value, which the verifier checks.
    let (reference, backend) = unsafe { ((*flow).sequence, (*flow).backend()) };
    let forward = state & FLOW_REVERSE == 0;

    if bits & (SYN | ACK) == SYN {
        // The client starts anew. On a live connection its server decides (RFC 9293 §3.10.7.4: challenge ACK); on a closed
        // one, or one whose backend takes no new connections, the choice is made anew.
        let eligible = BACKENDS.get(u32::from(backend)).is_some_and(|backend| backend.flags & BACKEND_ELIGIBLE != 0);
        if forward && (tcp::closed(state) || !eligible) {
            kill(flow, now());
            return unknown::<A>(context, &arrival, bits);
        }
    } else if bits & RST != 0 {
        if tcp::near(packet.sequence(), reference) {
            mark(flow, FLOW_RESET);
            mark_other(to, next_hop, state, FLOW_RESET);
        } else {
            count(Reason::BlindReset, tenant_of(flow, arrival.segment));
        }
    } else if bits & FIN != 0 {
        if tcp::near(packet.sequence_end(), reference) {
            mark(flow, FLOW_FIN);
            mark_other(to, next_hop, state, FLOW_PEER_FIN);
        }
    } else if forward {
        follow_client(&arrival, packet, to, next_hop, state, reference);
    }
    match translate(context, &arrival, packet, flow, &key, false) {
        Some(outcome) => outcome,
        None => unknown::<A>(context, &arrival, bits),
    }
}

/// A client sends something again: it may have moved to another MAC, where our answers do not reach it. Only a packet that fits both
/// directions' numbers shows that it is the client.
#[inline(always)]
fn follow_client<A: Tables>(
    arrival: &Arrival,
    packet: &TcpPacket<A>,
    to: &Tuple<A>,
    next_hop: u16,
    state: u16,
    reference: u32,
) {
    let Some(reverse) = other(to, next_hop, state) else { return };
    // SAFETY: a map value, which the verifier checks, and `own` lies at an even offset in it; `ethernet` was bounds-checked.
    unsafe {
        let fits = packet.tcp.flags & ACK != 0
            && tcp::near(packet.sequence_end(), reference)
            && tcp::near(packet.acknowledgement(), (*reverse).sequence);
        if fits {
            let [a, b, c] = (*arrival.ethernet).source;
            let own: *mut u16 = (&raw mut (*reverse).own).cast();
            if (*own ^ a) | (*own.add(1) ^ b) | (*own.add(2) ^ c) != 0 {
                *own = a;
                *own.add(1) = b;
                *own.add(2) = c;
            }
        }
    }
}

/// Atomically sets bits of a half's state; gives the state before.
#[inline(always)]
pub(crate) fn mark<A: Address>(flow: *mut Flow<A>, bits: u16) -> u16 {
    // SAFETY: `frontend` and `state` are one aligned word, state in its upper half (little endian, as `bpfel` is).
    let before = unsafe { fetch_or((&raw mut (*flow).frontend).cast(), u32::from(bits) << 16) };
    (before >> 16) as u16
}

/// Atomically clears bits of a half's state.
#[inline(always)]
pub(crate) fn unmark<A: Address>(flow: *mut Flow<A>, bits: u16) {
    // SAFETY: as in `mark`.
    unsafe { fetch_and((&raw mut (*flow).frontend).cast(), !(u32::from(bits) << 16)) };
}

/// The other half of a flow, given what this half says.
#[inline(always)]
pub(crate) fn other<A: Tables>(to: &Tuple<A>, next_hop: u16, state: u16) -> Option<*mut Flow<A>> {
    // SAFETY: a tuple on the stack; what `reply_key` gives lies in a map.
    unsafe { Key::of(reply_key(to, next_hop, state)?).live() }
}

#[inline(always)]
pub(crate) fn mark_other<A: Tables>(to: &Tuple<A>, next_hop: u16, state: u16, bits: u16) {
    if let Some(flow) = other(to, next_hop, state) {
        mark(flow, bits);
    }
}
