//! The end of flows: marking, and the clock hand that needs no agent.
//!
//! A flow is never deleted while a packet may be using it: it is marked dead (and from then on treated as absent) and put into a queue
//! of its own, and deleted from there after [`Settings::grace`](lbd_common::abi::Settings::grace) ticks.

use core::ffi::c_void;
use core::mem::MaybeUninit;

use aya_ebpf::helpers::generated::{bpf_map_peek_elem, bpf_map_pop_elem};
use aya_ebpf::maps::Queue;
use lbd_common::abi::{
    AgeEntry, FLOW_BUSY, FLOW_DEAD, FLOW_ENDED, FLOW_UDP, FamilyUse, Flow, FlowKey, Making, Settings, Tuple,
};
use lbd_common::packet::{TCP, UDP};
use lbd_common::tcp;

use super::context::{ANY, copy_words, fetch_add};
use super::flags::{mark, unmark};
use super::maps::{FRONTEND_OWNERS, NEXT_HOPS, SETTINGS, TENANT_USE, TENANTS, TIMEOUTS, Tables};
use super::words::Key;

/// Marks both halves dead, given the forward half. True if the flow was alive.
#[inline(always)]
pub(crate) fn kill<A: Tables>(forward: *mut Flow<A>, now: u32) -> bool {
    kill_both(forward, reverse_of(forward), now)
}

/// The reverse half of a forward half, if both are of one flow. Its key is in [`Making::reply`].
#[inline(always)]
fn reverse_of<A: Tables>(forward: *const Flow<A>) -> Option<*mut Flow<A>> {
    // SAFETY: map values, which the verifier checks. Nobody changes where a flow leads.
    unsafe {
        let key = reply_key(&raw const (*forward).to, (*forward).next_hop, (*forward).state)?;
        let reverse = Key::of(key).flow()?;
        (*forward).tuple.is(&(*reverse).to.turned()).then_some(reverse)
    }
}

#[inline(always)]
fn kill_both<A: Tables>(forward: *mut Flow<A>, reverse: Option<*mut Flow<A>>, now: u32) -> bool {
    // SAFETY: map values, which the verifier checks. Written before the mark: whoever sees the mark sees the time.
    unsafe { (*forward).last_seen = now };
    let before = mark(forward, FLOW_DEAD);
    if before & FLOW_DEAD != 0 {
        return false;
    }
    if let Some(reverse) = reverse {
        // SAFETY: as above.
        unsafe { (*reverse).last_seen = now };
        mark(reverse, FLOW_DEAD);
    }
    // SAFETY: as above.
    let frontend = unsafe { (*forward).frontend };
    if let Some(owner) = FRONTEND_OWNERS.get(u32::from(frontend)) {
        charge::<A>(owner.tenant, before, u64::MAX);
    }
    true
}

/// What a tenant uses in a family.
#[inline(always)]
pub(crate) fn family_use<A: Tables>(tenant: u16) -> Option<*mut FamilyUse> {
    let used = TENANT_USE.get_ptr_mut(u32::from(tenant))?;
    // SAFETY: a map value, which the verifier checks; the index is below two.
    Some(unsafe { (&raw mut (*used).families).cast::<FamilyUse>().add(A::INDEX) })
}

/// Adds to a tenant's live flows (`u64::MAX` takes one away).
#[inline(always)]
pub(crate) fn charge<A: Tables>(tenant: u16, state: u16, flows: u64) {
    if let Some(used) = family_use::<A>(tenant) {
        // SAFETY: a map value, which the verifier checks.
        unsafe {
            fetch_add(&raw mut (*used).flows, flows);
            if state & FLOW_UDP != 0 {
                fetch_add(&raw mut (*used).udp, flows);
            }
        }
    }
}

/// Writes the key of the half that replies to `to` into [`Making::reply`]: too large for the stack beside everything else.
///
/// # Safety
///
/// `making` is this CPU's value, `to` a tuple in a map or on the stack.
#[inline(always)]
pub(crate) unsafe fn write_reply<A: Tables>(
    making: *mut Making<A>,
    to: *const Tuple<A>,
    segment: u16,
    protocol: u8,
) -> &'static FlowKey<A> {
    // SAFETY: the caller's.
    unsafe {
        let reply = &raw mut (*making).reply;
        copy_words(&raw const (*to).source_be, &raw mut (*reply).tuple.destination_be);
        copy_words(&raw const (*to).destination_be, &raw mut (*reply).tuple.source_be);
        (*reply).tuple.source_port_be = (*to).destination_port_be;
        (*reply).tuple.destination_port_be = (*to).source_port_be;
        (*reply).segment = segment;
        (*reply).protocol = protocol;
        (*reply).pad = 0;
        &*reply
    }
}

/// Key of a half's other one, given what the half says, in [`Making::reply`].
///
/// # Safety
///
/// `to` is a tuple in a map or on the stack.
#[inline(always)]
pub(crate) unsafe fn reply_key<A: Tables>(
    to: *const Tuple<A>,
    next_hop: u16,
    state: u16,
) -> Option<&'static FlowKey<A>> {
    let (making, hop) = (A::making()?, NEXT_HOPS.get(u32::from(next_hop))?);
    let protocol = if state & FLOW_UDP != 0 { UDP } else { TCP };
    // SAFETY: the caller's; `making` is this CPU's value.
    unsafe { Some(write_reply(making, to, hop.segment, protocol)) }
}

/// Puts a flow into the ageing queue. The queue's lock may be busy on another CPU: a few tries.
#[inline(always)]
pub(crate) fn enqueue<A: Tables>(entry: &AgeEntry<A>) -> bool {
    A::ageing().push(entry, ANY).is_ok() || A::ageing().push(entry, ANY).is_ok()
}

/// Takes an entry out of a queue, or only looks at it.
#[inline(always)]
fn next<A: Tables>(queue: &'static Queue<AgeEntry<A>>, entry: &mut MaybeUninit<AgeEntry<A>>, take: bool) -> bool {
    // A queue is its definition: `repr(transparent)`.
    let map: *mut c_void = core::ptr::from_ref(queue).cast_mut().cast();
    let value = entry.as_mut_ptr().cast();
    // SAFETY: a map of entries, and room for one.
    unsafe { (if take { bpf_map_pop_elem(map, value) } else { bpf_map_peek_elem(map, value) }) == 0 }
}

/// Deletes the flow that has been over for longest, if it is time. 0 if there is nothing to do, else 1.
#[inline(always)]
pub(crate) fn bury<A: Tables>(now: u32) -> u64 {
    let Some(settings) = SETTINGS.get(0) else { return 0 };
    let mut entry = MaybeUninit::uninit();
    if !next(A::ended(), &mut entry, false) {
        return 0;
    }
    let mut taken = false;
    loop {
        // SAFETY: filled by `next`.
        let entry_ref = unsafe { entry.assume_init_ref() };
        if let Some(forward) = A::flows().get_ptr_mut(entry_ref.lookup) {
            // SAFETY: a map value, which the verifier checks.
            unsafe {
                if (*forward).created() == entry_ref.created && (*forward).state & FLOW_DEAD != 0 {
                    if tcp::elapsed(now, (*forward).last_seen) < settings.grace {
                        if taken {
                            let _ = A::ended().push(entry_ref, ANY);
                        }
                        return 0;
                    }
                    if taken {
                        delete(forward, &entry_ref.lookup);
                    }
                }
            }
        }
        if taken {
            return 1;
        }
        // Another CPU may take this entry first: what comes is then the next, and looked at anew.
        if !next(A::ended(), &mut entry, true) {
            return 0;
        }
        taken = true;
    }
}

/// Makes this CPU the one that deletes a dead half. False if its client's next connection is being written over it, or has been since
/// it was looked at.
#[inline(always)]
pub(crate) fn take_dead<A: Tables>(half: *mut Flow<A>) -> bool {
    let before = mark(half, FLOW_BUSY);
    if before & (FLOW_BUSY | FLOW_DEAD) == 0 {
        unmark(half, FLOW_BUSY);
    }
    before & (FLOW_BUSY | FLOW_DEAD) == FLOW_DEAD
}

/// Deletes both halves of a dead flow.
///
/// # Safety
///
/// `forward` is a map value.
#[inline(always)]
unsafe fn delete<A: Tables>(forward: *mut Flow<A>, lookup: &A::Lookup) {
    // SAFETY: map values, which the verifier checks.
    unsafe {
        if !take_dead(forward) {
            return;
        }
        if let Some(reverse) = reverse_of(forward)
            && take_dead(reverse)
            && let Some(making) = A::making()
        {
            Key::of(&raw const (*making).reply).remove();
        }
        let _ = A::flows().remove(lookup);
    }
}

/// [`step`]: the queue is empty.
const EMPTY: u64 = 0;
/// [`step`]: the entry has left the queue.
const TAKEN: u64 = 1;
/// [`step`]: the entry is back in the queue.
pub(crate) const PUT_BACK: u64 = 2;

/// One step of the clock hand: looks at the oldest entry and puts it back or marks its flow. Gives [`EMPTY`], [`TAKEN`] or [`PUT_BACK`].
#[inline(always)]
pub(crate) fn step<A: Tables>(now: u32) -> u64 {
    let Some(settings) = SETTINGS.get(0) else { return EMPTY };
    let mut entry = MaybeUninit::uninit();
    if !next(A::ageing(), &mut entry, true) {
        return EMPTY;
    }
    // SAFETY: filled by `next`.
    let entry = unsafe { entry.assume_init_ref() };
    let Some(forward) = A::flows().get_ptr_mut(entry.lookup) else { return TAKEN };
    // SAFETY: map values, which the verifier checks.
    unsafe {
        let state = (*forward).state;
        if (*forward).created() != entry.created || state & FLOW_ENDED != 0 {
            // The place has been used again, and the newer flow has an entry of its own; or the flow waits for its end elsewhere.
            return TAKEN;
        }
        let idle = tcp::elapsed(now, (*forward).last_seen);
        if state & FLOW_DEAD != 0 {
            // Marked by a SYN or from outside.
            if end(forward, entry) {
                return TAKEN;
            }
            if idle >= settings.grace {
                delete(forward, &entry.lookup);
                return TAKEN;
            }
        } else {
            let lifetime = lifetime::<A>((*forward).frontend, state, settings);
            if idle > lifetime {
                let reverse = reverse_of(forward);
                let other = reverse.map_or(u32::MAX, |half| tcp::elapsed(now, (*half).last_seen));
                if other > lifetime {
                    kill_both(forward, reverse, now);
                    if end(forward, entry) {
                        return TAKEN;
                    }
                }
            }
        }
    }
    enqueue(entry);
    PUT_BACK
}

/// Moves a dead flow to the queue of those that are over. False if it is full or busy: then the hand deletes it when it comes by again.
#[inline(always)]
fn end<A: Tables>(forward: *mut Flow<A>, entry: &AgeEntry<A>) -> bool {
    if A::ended().push(entry, ANY).is_err() {
        return false;
    }
    mark(forward, FLOW_ENDED);
    true
}

/// How long a flow lives without a packet, in ticks.
#[inline(always)]
fn lifetime<A: Tables>(frontend: u16, state: u16, settings: &Settings) -> u32 {
    let Some(owner) = FRONTEND_OWNERS.get(u32::from(frontend)) else { return u32::MAX };
    let Some(timeouts) = TIMEOUTS.get(u32::from(owner.timeouts)) else { return u32::MAX };
    let (Some(used), Some(limits)) = (family_use::<A>(owner.tenant), TENANTS.get(u32::from(owner.tenant))) else {
        return u32::MAX;
    };
    let limits = &limits.families[A::INDEX];
    // SAFETY: a map value, which the verifier checks.
    let (used, limit) =
        unsafe { if state & FLOW_UDP != 0 { ((*used).udp, limits.udp) } else { ((*used).flows, limits.flows) } };
    tcp::lifetime(state, timeouts, settings, used, limit)
}
