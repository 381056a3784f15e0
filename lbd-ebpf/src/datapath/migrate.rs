//! What the control program does for a migration: the programs of before have handed over to these ones, and the agent brings
//! what they did last. The flows here are live, so that nobody but a program may change them.

use aya_ebpf::{bindings::xdp_action, programs::XdpContext};
use lbd_common::abi::{
    AgeEntry, ControlFlow, ControlHalfOpen, ControlRequest4, FLOW_DEAD, FLOW_FIN, FLOW_PEER_FIN, FLOW_REPLIED,
    FLOW_RESET, FLOW_REVERSE, control,
};
use lbd_common::tcp;

use super::age::{charge, enqueue};
use super::context::{at, fetch_add, now};
use super::flags::mark;
use super::half_open::{INSERTED, put, take_over};
use super::maps::{FRONTEND_EVENTS, FRONTEND_OWNERS, REASONS, TRAFFIC, Tables};
use super::words::Key;

/// Inserts a half that the programs of before have made.
#[inline(always)]
pub(crate) fn restore<A: Tables>(context: &XdpContext) -> u32 {
    let (Some(request), Some(making)) = (at::<ControlFlow<A>>(context, 0), A::making()) else {
        return xdp_action::XDP_ABORTED;
    };
    // SAFETY: `at` has bounds-checked the request; this CPU's value.
    let (request, key, half) = unsafe { (&mut *request, &mut (*making).key, &mut (*making).half) };
    (*key, *half) = (request.request.key, request.flow);
    request.request.result = 0;
    // SAFETY: a key in a map.
    let key = unsafe { Key::of(key) };
    if put(&key, half) == INSERTED {
        request.request.result = 1;
        if half.state & FLOW_REVERSE == 0 {
            enqueue(&AgeEntry::<A> { lookup: *key.lookup(), created: half.created() });
            if half.state & FLOW_DEAD == 0
                && let Some(owner) = FRONTEND_OWNERS.get(u32::from(half.frontend))
            {
                charge::<A>(owner.tenant, half.state, 1);
            }
        }
    }
    xdp_action::XDP_PASS
}

/// Adds what the programs of before have seen of a half's packets.
#[inline(always)]
pub(crate) fn grow<A: Tables>(context: &XdpContext) -> u32 {
    let Some(request) = at::<ControlFlow<A>>(context, 0) else { return xdp_action::XDP_ABORTED };
    // SAFETY: `at` has bounds-checked the request.
    let request = unsafe { &mut *request };
    request.request.result = 0;
    let old = &request.flow;
    // SAFETY: a key in a packet, checked.
    if let Some(flow) = unsafe { Key::of(&raw const request.request.key) }.live() {
        request.request.result = 1;
        // SAFETY: a map value, which the verifier checks. As on the hot path, a lost race costs a count.
        unsafe {
            fetch_add(&raw mut (*flow).bytes, old.bytes);
            let packets = (*flow).packets.wrapping_add(old.packets);
            if packets < (*flow).packets {
                (*flow).packets_high = (*flow).packets_high.wrapping_add(1);
            }
            (*flow).packets = packets;
            if tcp::after(old.last_seen, (*flow).last_seen) {
                (*flow).last_seen = old.last_seen;
            }
            if tcp::after(old.sequence, (*flow).sequence) {
                (*flow).sequence = old.sequence;
                (*flow).acknowledged = old.acknowledged;
            }
        }
        mark(flow, old.state & (FLOW_FIN | FLOW_PEER_FIN | FLOW_RESET | FLOW_REPLIED));
    }
    xdp_action::XDP_PASS
}

/// Takes over a half-open connection.
#[inline(always)]
pub(crate) fn restore_half_open<A: Tables>(context: &XdpContext) -> u32 {
    let (Some(request), Some(making)) = (at::<ControlHalfOpen<A>>(context, 0), A::making()) else {
        return xdp_action::XDP_ABORTED;
    };
    // SAFETY: `at` has bounds-checked the request; this CPU's value.
    let request = unsafe {
        (*making).record = (*request).record;
        &mut *request
    };
    request.request.result = u64::from(take_over(making, request.request.nanoseconds, now()));
    xdp_action::XDP_PASS
}

/// Adds to counters, on this CPU.
#[inline(always)]
pub(crate) fn credit(request: &ControlRequest4) {
    let (index, first, second) = (request.count, request.jiffies, request.nanoseconds);
    // SAFETY: this CPU's values, which the verifier checks.
    unsafe {
        match request.result as u32 {
            control::CREDIT_TRAFFIC => {
                if let Some(traffic) = TRAFFIC.get_ptr_mut(index) {
                    (*traffic).packets += first;
                    (*traffic).bytes += second;
                }
            }
            control::CREDIT_EVENTS => {
                if let Some(events) = FRONTEND_EVENTS.get_ptr_mut(index) {
                    (*events).flows += first;
                    (*events).refused += second;
                }
            }
            _ => {
                if let Some(count) = REASONS.get_ptr_mut(index) {
                    *count += first;
                }
            }
        }
    }
}
