//! The end of flows: marking, and the clock hand that needs no agent.
//!
//! A flow is never deleted while a packet may be using it: it is marked dead (and from then on treated as absent), and the hand
//! deletes it when it comes by again after [`Settings::grace`](lbd_common::abi::Settings::grace) ticks.

use lbd_common::abi::{AgeEntry4, FLOW_BUSY, FLOW_DEAD, Flow4, FlowKey4, Tuple4};
use lbd_common::tcp;

use super::context::{ANY, fetch_add};
use super::flags::mark;
use super::maps::{AGEING4, FLOWS4, FRONTEND_OWNERS, NEXT_HOPS, SETTINGS, TENANT_USE};

/// Marks both halves dead, given the forward half and what it says. True if the flow was alive.
#[inline(always)]
pub(crate) fn kill(forward: *mut Flow4, to: &Tuple4, next_hop: u16, now: u32) -> bool {
    let alive = mark(forward, FLOW_DEAD) & FLOW_DEAD == 0;
    // SAFETY: a map value, which the verifier checks.
    unsafe { (*forward).last_seen = now };
    if let Some(key) = reply_key(to, next_hop)
        && let Some(reverse) = FLOWS4.get_ptr_mut(key)
    {
        // SAFETY: as above.
        let reverse_is_ours = unsafe { (*reverse).to.destination_be == (*forward).tuple.source_be };
        if reverse_is_ours {
            mark(reverse, FLOW_DEAD);
            // SAFETY: as above.
            unsafe { (*reverse).last_seen = now };
        }
    }
    if alive {
        // SAFETY: as above.
        let frontend = unsafe { (*forward).frontend };
        if let Some(owner) = FRONTEND_OWNERS.get(u32::from(frontend)) {
            charge(owner.tenant, u64::MAX);
        }
    }
    alive
}

/// Adds to a tenant's live flows (`u64::MAX` takes one away).
#[inline(always)]
pub(crate) fn charge(tenant: u16, flows: u64) {
    if let Some(used) = TENANT_USE.get_ptr_mut(u32::from(tenant)) {
        // SAFETY: a map value, which the verifier checks.
        unsafe { fetch_add(&raw mut (*used).flows, flows) };
    }
}

/// Key of the reverse half, given what the forward half says.
#[inline(always)]
pub(crate) fn reply_key(to: &Tuple4, next_hop: u16) -> Option<FlowKey4> {
    let hop = NEXT_HOPS.get(u32::from(next_hop))?;
    Some(FlowKey4::reply(to, hop.segment, lbd_common::packet::TCP))
}

/// Puts a flow into the ageing queue. The queue's lock may be busy on another CPU: a few tries.
#[inline(always)]
pub(crate) fn enqueue(entry: &AgeEntry4) -> bool {
    AGEING4.push(entry, ANY).is_ok() || AGEING4.push(entry, ANY).is_ok()
}

/// One step of the clock hand: looks at the oldest entry and puts it back, marks its flow, or deletes it. 0 if the queue is empty, else
/// 1. A function of its own for the verifier, see [`super::half_open::lbd_claim`].
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn lbd_age_step(now: u32) -> u64 {
    let Some(settings) = SETTINGS.get(0) else { return 0 };
    let Ok(Some(entry)) = AGEING4.pop() else { return 0 };
    let Some(forward) = FLOWS4.get_ptr_mut(entry.key) else { return 1 };
    // SAFETY: map values, which the verifier checks.
    unsafe {
        if (*forward).created() != entry.created {
            // The tuple has been used again; the newer flow has an entry of its own.
            return 1;
        }
        let (to, next_hop, state) = ((*forward).to, (*forward).next_hop, (*forward).state);
        let idle = tcp::elapsed(now, (*forward).last_seen);
        if state & FLOW_DEAD != 0 {
            if idle >= settings.grace {
                if mark(forward, FLOW_BUSY) & FLOW_BUSY != 0 {
                    // Being written over by its client's next connection.
                    return 1;
                }
                if let Some(key) = reply_key(&to, next_hop)
                    && let Some(half) = FLOWS4.get_ptr_mut(key)
                    && (*half).state & FLOW_DEAD != 0
                    && (*half).to.destination_be == entry.key.tuple.source_be
                    && (*half).to.destination_port_be == entry.key.tuple.source_port_be
                    && mark(half, FLOW_BUSY) & FLOW_BUSY == 0
                {
                    let _ = FLOWS4.remove(key);
                }
                let _ = FLOWS4.remove(entry.key);
                return 1;
            }
        } else {
            let lifetime = tcp::lifetime(state, settings);
            if idle > lifetime {
                let other = match reply_key(&to, next_hop) {
                    Some(key) => FLOWS4.get_ptr_mut(key).map_or(u32::MAX, |half| tcp::elapsed(now, (*half).last_seen)),
                    None => u32::MAX,
                };
                if other > lifetime {
                    kill(forward, &to, next_hop, now);
                }
            }
        }
    }
    enqueue(&entry);
    1
}
