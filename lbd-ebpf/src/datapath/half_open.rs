//! Half-open connections: claiming a SNAT port, finding a record, promoting it to a flow.

use core::ptr::{read_volatile, write_volatile};
use core::sync::atomic::{Ordering, compiler_fence};

use aya_ebpf::bindings::BPF_NOEXIST;
use lbd_common::abi::{
    Address, AgeEntry, FLOW_BUSY, FLOW_DEAD, FLOW_REVERSE, FLOW_UDP, FamilyUse, Flow, FlowKey, HALF_OPEN_BUCKETS,
    HALF_OPEN_SETS, HALF_OPEN_WAYS, HINT_LINES, HINT_WAYS, HalfOpen, HalfOpenSet, Making,
};
use lbd_common::half_open as tag;
use lbd_common::hash;
use lbd_common::packet::{TCP, UDP};
use lbd_common::reason::Reason;
use lbd_common::tcp;

use super::age::{PUT_BACK, charge, enqueue, family_use, take_dead, write_reply};
use super::context::{budgets, compare_and_swap, copy_words, exchange, fetch_add, opaque};
use super::flags::unmark;
use super::maps::{SETTINGS, TENANT_USE, TENANTS, Tables};
use super::words::Key;

/// A record that was found or claimed.
pub(crate) struct Found<A: Address> {
    set: *mut HalfOpenSet<A>,
    way: usize,
    /// The tag as it was read.
    tag: u64,
}

/// How far a half-open connection is on its way to a flow.
pub(crate) enum Progress {
    /// The client has not proven itself.
    Waits,
    /// It has, and another CPU is making the flow. What follows from a packet that went on meanwhile ([`promote`]) may be here before the flow is.
    Becomes,
    /// The flow is made, or the record given up.
    Gone,
}

impl<A: Tables> Found<A> {
    /// The record.
    #[inline(always)]
    pub(crate) fn record(&self) -> *mut HalfOpen<A> {
        record_at(self.set, self.way)
    }

    #[inline(always)]
    fn word(&self) -> *mut u64 {
        tag_word(self.set, self.way)
    }

    /// Copies the record to where there is room for it; `None` if somebody has taken it since it was found.
    #[inline(always)]
    pub(crate) fn copy(&self, making: *mut Making<A>) -> Option<&'static HalfOpen<A>> {
        // SAFETY: map values, which the verifier checks; believed only if nobody took the record meanwhile.
        unsafe {
            copy_words(self.record(), &raw mut (*making).record);
            compiler_fence(Ordering::Acquire);
            let current = read_volatile(self.word());
            let unchanged =
                tag::with_state(current, 0) == tag::with_state(self.tag, 0) && current & tag::STATE != tag::FREE;
            unchanged.then_some(&(*making).record)
        }
    }

    /// What has become of the record since it was found. Asked about a packet that does not fit it.
    #[inline(always)]
    pub(crate) fn progress(&self) -> Progress {
        // SAFETY: a map value, which the verifier checks.
        let current = unsafe { read_volatile(self.word()) };
        if current == tag::with_state(self.tag, tag::LIVE) {
            Progress::Waits
        } else if current == tag::with_state(self.tag, tag::PROMOTING) {
            Progress::Becomes
        } else {
            Progress::Gone
        }
    }

    /// Makes a claimed record readable, and counts it for its tenant.
    #[inline(always)]
    pub(crate) fn publish(&self, tenant: u16, now: u32) {
        compiler_fence(Ordering::Release);
        // SAFETY: a map value, which the verifier checks; an aligned word is written at once.
        unsafe { write_volatile(self.word(), tag::with_state(self.tag, tag::LIVE)) };
        count::<A>(tenant, self.tag, now, 1);
    }

    /// Gives up a claim that was never published.
    #[inline(always)]
    pub(crate) fn abandon(&self) {
        // SAFETY: as above.
        unsafe { compare_and_swap(self.word(), tag::with_state(self.tag, tag::BUSY), 0) };
    }

    /// Gives the record up, if it is still the one found.
    #[inline(always)]
    pub(crate) fn release(&self, state: u64, tenant: u16, now: u32) {
        // SAFETY: as above.
        if unsafe { compare_and_swap(self.word(), tag::with_state(self.tag, state), 0) } {
            count::<A>(tenant, self.tag, now, u64::MAX);
        }
    }

    /// Changes the state, if it is still the record found.
    #[inline(always)]
    fn change(&self, from: u64, to: u64) -> bool {
        // SAFETY: as above.
        unsafe { compare_and_swap(self.word(), tag::with_state(self.tag, from), tag::with_state(self.tag, to)) }
    }
}

/// Adds to a tenant's half-open connections, in the bucket in which the tag expires.
#[inline(always)]
fn count<A: Tables>(tenant: u16, word: u64, now: u32, change: u64) {
    let (Some(used), Some(settings)) = (family_use::<A>(tenant), SETTINGS.get(0)) else { return };
    let epoch = tag::expiry_epoch(tag::expires(word, now), settings.half_open_epoch);
    // SAFETY: map values, which the verifier checks; `bucket` is below their number.
    unsafe {
        fetch_add(bucket(used, epoch), change);
        fetch_add(&raw mut (*used).half_open, change);
    }
}

#[inline(always)]
fn bucket(used: *mut FamilyUse, epoch: u64) -> *mut u64 {
    // SAFETY: below HALF_OPEN_BUCKETS.
    unsafe { (&raw mut (*used).buckets).cast::<u64>().add(tag::bucket(epoch)) }
}

/// Takes what has expired off a tenant's count; whoever is first in a new epoch.
#[inline(always)]
pub(crate) fn forget_expired(used: *mut FamilyUse, now: u32, ticks_per_epoch: u32) {
    let epoch = tag::epoch(now, ticks_per_epoch);
    // SAFETY: map values, which the verifier checks.
    unsafe {
        let last = read_volatile(&raw const (*used).epoch);
        if last == epoch || !compare_and_swap(&raw mut (*used).epoch, last, epoch) {
            return;
        }
        // Also after a jump (the clock has wrapped, or nothing came for long): then all of them.
        let (mut done, buckets) = (0, opaque::<{ HALF_OPEN_BUCKETS as u32 }>());
        while done < buckets {
            let old = epoch.wrapping_sub(u64::from(done));
            if old == last {
                break;
            }
            let expired = exchange(bucket(used, old), 0);
            fetch_add(&raw mut (*used).half_open, 0u64.wrapping_sub(expired));
            done += 1;
        }
    }
}

#[inline(always)]
fn tag_word<A: Address>(set: *mut HalfOpenSet<A>, way: usize) -> *mut u64 {
    // SAFETY: masked below HALF_OPEN_WAYS.
    unsafe { (&raw mut (*set).tags).cast::<u64>().add(way & (HALF_OPEN_WAYS - 1)) }
}

#[inline(always)]
fn record_at<A: Address>(set: *mut HalfOpenSet<A>, way: usize) -> *mut HalfOpen<A> {
    // SAFETY: masked below HALF_OPEN_WAYS.
    unsafe { (&raw mut (*set).records).cast::<HalfOpen<A>>().add(way & (HALF_OPEN_WAYS - 1)) }
}

/// [`take`]: the tuple is another's, or another CPU was faster: try another port.
const TAKEN: u64 = 1 << 32;
/// [`take`]: no room for a record.
const FULL: u64 = 2 << 32;
/// The searches: nothing found.
const NONE: u64 = 1 << 32;

/// Looks in a set for the record of the client whose key is in [`Making::key`]; gives the way or [`NONE`].
#[inline(always)]
pub(crate) fn find_client<A: Tables>(index: u32, hash: u64, now: u32) -> u64 {
    find::<A>(index, now, |tag| tag::may_be_client(tag, hash), |record| (&record.client, record.client_segment))
}

/// Looks in a set for the record of a backend's packet, whose tuple turned around and segment are in [`Making::key`]; gives the way or
/// [`NONE`].
#[inline(always)]
pub(crate) fn find_backend<A: Tables>(index: u32, reverse: u32, now: u32) -> u64 {
    find::<A>(index, now, |tag| tag::reverse(tag) == reverse, |record| (&record.to, record.backend_segment))
}

#[inline(always)]
fn find<A: Tables>(
    index: u32,
    now: u32,
    may_be: impl Fn(u64) -> bool,
    side: impl Fn(&HalfOpen<A>) -> (&lbd_common::abi::Tuple<A>, u16),
) -> u64 {
    let (Some(set), Some(making)) = (A::half_open().get_ptr_mut(index), A::making()) else { return NONE };
    let (mut way, ways) = (0, opaque::<8>() as usize);
    while way < ways {
        // SAFETY: map values, which the verifier checks.
        unsafe {
            let current = read_volatile(tag_word(set, way));
            if may_be(current) && tag::readable(current, now) {
                let (tuple, segment) = side(&*record_at(set, way));
                if segment == (*making).key.segment && tuple.is(&(*making).key.tuple) {
                    return way as u64;
                }
            }
        }
        way += 1;
    }
    NONE
}

/// Looks in the hints for where a client's record is; gives the SNAT port or [`NONE`].
#[inline(always)]
pub(crate) fn find_hint<A: Tables>(hash: u64, now: u32) -> u64 {
    let Some(line) = A::hints().get_ptr_mut(tag::hint_line(hash, HINT_LINES)) else { return NONE };
    let (mut way, ways) = (0, opaque::<8>() as usize);
    while way < ways {
        // SAFETY: a map value, which the verifier checks.
        let current = unsafe { read_volatile(hint_word(line, way)) };
        if let Some(port) = tag::hinted_port(current, hash, now) {
            return u64::from(port);
        }
        way += 1;
    }
    NONE
}

/// Leaves a hint where a client's record is, instead of the one that suits least.
#[inline(always)]
pub(crate) fn leave_hint<A: Tables>(hash: u64, port: u32, now: u32, expires: u32) -> u64 {
    let Some(line) = A::hints().get_ptr_mut(tag::hint_line(hash, HINT_LINES)) else { return 0 };
    let (mut place, mut least) = (0, u32::MAX);
    let (mut way, ways) = (0, opaque::<8>() as usize);
    while way < ways {
        // SAFETY: a map value, which the verifier checks.
        let cost = tag::hint_cost(unsafe { read_volatile(hint_word(line, way)) }, hash, now);
        if cost < least {
            (place, least) = (way, cost);
        }
        way += 1;
    }
    // SAFETY: as above; an aligned word is written at once.
    unsafe { write_volatile(hint_word(line, place), tag::hint(hash, port as u16, expires)) };
    if let Some(nobody) = TENANT_USE.get_ptr_mut(0) {
        // SAFETY: as above. A flood's hints expire sooner than others', which must be looked for as long as they live.
        unsafe {
            let last = read_volatile(&raw const (*nobody).hinted) as u32;
            if last == 0 || tag::is_later(expires, last) {
                write_volatile(&raw mut (*nobody).hinted, u64::from(expires));
            }
        }
    }
    0
}

/// Ports that one [`scan`] looks at.
const SCAN_PORTS: u32 = 256;
/// Ports that one CPU looks at in a tick: the default range of a SNAT address, about 2 ms.
const SCAN_PER_TICK: u32 = 32_768;
/// [`search`]: the CPU's budget is used up.
const LATER: u64 = 3 << 32;
/// [`scan`], [`search`]: a port was claimed, and is in the lower 16 bits; its way above.
const CLAIMED: u64 = 4 << 32;

/// Looks for a port that nobody has, from number `from` on of all that the client may have, counted from its first choice. Gives
/// [`CLAIMED`], [`TAKEN`], or [`FULL`] if one was free but for a record's room.
#[inline(always)]
pub(crate) fn scan<A: Tables>(from: u32, now: u32, expires: u32) -> u64 {
    let Some(making) = A::making() else { return TAKEN };
    // SAFETY: this CPU's value.
    let (first, last, hash) = unsafe { (u32::from((*making).first), u32::from((*making).last), (*making).hash) };
    let range = last.wrapping_sub(first).wrapping_add(1) & 0x1_ffff;
    let start = u32::from(hash::snat_port(hash, 0, first as u16, last as u16)).wrapping_sub(first);
    let (mut done, most, mut result) = (0, opaque::<SCAN_PORTS>(), TAKEN);
    while done < most {
        let number = from + done;
        if number >= range {
            break;
        }
        let mut offset = start.wrapping_add(number);
        if offset >= range {
            offset = offset.wrapping_sub(range);
        }
        let port = first.wrapping_add(offset) as u16;
        let way = A::take(u32::from(port), 1, now, expires);
        if way < TAKEN {
            return CLAIMED | way << 16 | u64::from(port);
        }
        if way == FULL {
            result = FULL;
        }
        done += 1;
    }
    result
}

/// Looks at all ports, beginning with the client's first choice, as far as this CPU's budget goes. Gives what [`scan`] does, or [`LATER`].
#[inline(always)]
pub(crate) fn search<A: Tables>(now: u32, expires: u32) -> u64 {
    let (Some(making), Some(scratch)) = (A::making(), budgets(now)) else { return LATER };
    // SAFETY: this CPU's value.
    let range = unsafe { u32::from((*making).last).wrapping_sub(u32::from((*making).first)).wrapping_add(1) };
    let (mut from, most, mut result) = (0, opaque::<65_536>(), TAKEN);
    while from < most && from < range {
        if scratch.scanned >= SCAN_PER_TICK {
            return LATER;
        }
        scratch.scanned += SCAN_PORTS;
        let found = A::scan(from, now, expires);
        if found >= CLAIMED {
            return found;
        }
        if found == FULL {
            result = FULL;
        }
        from += SCAN_PORTS;
    }
    result
}

/// Tries that are left to a tenant whose searches have used this tick's budget up: the rest of its flood shall cost little.
const TRIES_WHEN_BUSY: u32 = 2;

/// Finds a SNAT port that makes [`Making::to`] unique and claims it, as [`Making::hash`] and what follows it say. `own`: the client's own port, and
/// no other (`preserve_client`).
#[inline(always)]
pub(crate) fn allocate<A: Tables>(
    making: *mut Making<A>,
    own: bool,
    tenant: u16,
    now: u32,
    expires: u32,
) -> Result<Found<A>, Reason> {
    // SAFETY: this CPU's value.
    let (first, last, hash) = unsafe { ((*making).first, (*making).last, (*making).hash) };
    let mut full = false;
    let mut attempt = 0;
    let tries = opaque::<{ hash::PORT_TRIES }>();
    while attempt < tries {
        if attempt == TRIES_WHEN_BUSY && budgets(now).is_some_and(|it| it.busy_tenant == u32::from(tenant)) {
            return Err(Reason::SnatBusy);
        }
        let port = hash::snat_port(hash, attempt, first, last);
        let way = A::take(u32::from(port), 0, now, expires);
        if way < TAKEN {
            if attempt > 0 {
                A::leave_hint(hash, u32::from(port), now, expires);
            }
            return claimed(making, port, way, expires);
        }
        full |= way == FULL;
        attempt += 1;
        if first == last {
            return Err(match (full, own) {
                (true, _) => Reason::HalfOpenFull,
                (false, true) => Reason::TupleInUse,
                (false, false) => Reason::SnatExhausted,
            });
        }
    }
    let found = A::search(now, expires);
    if found >= CLAIMED {
        let port = found as u16;
        A::leave_hint(hash, u32::from(port), now, expires);
        return claimed(making, port, (found >> 16) & 0xffff, expires);
    }
    Err(if found == LATER {
        if let Some(scratch) = budgets(now) {
            scratch.busy_tenant = u32::from(tenant);
        }
        Reason::SnatBusy
    } else if full || found == FULL {
        Reason::HalfOpenFull
    } else {
        Reason::SnatExhausted
    })
}

/// The record that [`take`] has claimed.
#[inline(always)]
fn claimed<A: Tables>(making: *mut Making<A>, port: u16, way: u64, expires: u32) -> Result<Found<A>, Reason> {
    let set = A::half_open().get_ptr_mut(hash::half_open_set(port, HALF_OPEN_SETS)).ok_or(Reason::Internal)?;
    // SAFETY: this CPU's value.
    let tag = unsafe { tag::tag(tag::BUSY, (*making).reverse, (*making).hash, expires) };
    Ok(Found { set, way: way as usize, tag })
}

/// Claims a record in a set for a reverse tuple with hash `reverse`; gives the way, [`TAKEN`] or [`FULL`]. Two CPUs that claim one tuple
/// at once each see the other's tag after their compare-and-swap, a full barrier, and both yield.
#[inline(always)]
fn claim<A: Tables>(set: *mut HalfOpenSet<A>, reverse: u32, client: u64, now: u32, expires: u32) -> u64 {
    let mut free = HALF_OPEN_WAYS;
    let mut old = 0;
    let (mut way, ways) = (0, opaque::<8>() as usize);
    while way < ways {
        // SAFETY: a map value, which the verifier checks.
        let current = unsafe { read_volatile(tag_word(set, way)) };
        if tag::reverse(current) == reverse {
            if tag::occupied(current, now) {
                return TAKEN;
            }
            (free, old) = (way, current);
        } else if free == HALF_OPEN_WAYS && !tag::occupied(current, now) {
            (free, old) = (way, current);
        } else if tag::expired(current, now) {
            // SAFETY: as above. Whoever has taken it meanwhile keeps it.
            unsafe { compare_and_swap(tag_word(set, way), current, 0) };
        }
        way += 1;
    }
    if free == HALF_OPEN_WAYS {
        return FULL;
    }
    let claimed = tag::tag(tag::BUSY, reverse, client, expires);
    // SAFETY: as above.
    if !unsafe { compare_and_swap(tag_word(set, free), old, claimed) } {
        return TAKEN;
    }
    way = 0;
    while way < ways {
        if way != free {
            // SAFETY: as above.
            let current = unsafe { read_volatile(tag_word(set, way)) };
            if tag::reverse(current) == reverse && tag::occupied(current, now) {
                // SAFETY: as above.
                unsafe { compare_and_swap(tag_word(set, free), claimed, 0) };
                return TAKEN;
            }
        }
        way += 1;
    }
    free as u64
}

/// Claims one port for [`Making::to`]: gives the way in its set, [`TAKEN`] or [`FULL`]. `look`: whether to look first if a flow has it, which most have.
#[inline(always)]
pub(crate) fn take<A: Tables>(port: u32, look: u32, now: u32, expires: u32) -> u64 {
    let Some(making) = A::making() else { return FULL };
    // SAFETY: this CPU's value.
    let hash = unsafe {
        (*making).to.source_port_be = (port as u16).to_be();
        (*making).hash
    };
    if look != 0 && !reverse_is_free(making) {
        return TAKEN;
    }
    let Some(set) = A::half_open().get_ptr_mut(hash::half_open_set(port as u16, HALF_OPEN_SETS)) else { return FULL };
    // SAFETY: this CPU's value.
    let reverse = unsafe {
        let reverse = hash::reverse(&(*making).to, (*making).backend_segment, (*making).protocol as u8);
        (*making).reverse = reverse;
        reverse
    };
    let way = claim(set, reverse, hash, now, expires);
    if way < TAKEN && !reverse_is_free(making) {
        let tag = tag::tag(tag::BUSY, reverse, hash, expires);
        Found { set, way: way as usize, tag }.abandon();
        return TAKEN;
    }
    way
}

/// Whether no flow owns the reverse tuple, or only a dead one of the same client. Asked after claiming: who promotes
/// inserts into the flows before he frees his claim.
#[inline(always)]
fn reverse_is_free<A: Tables>(making: *mut Making<A>) -> bool {
    // SAFETY: map values, which the verifier checks.
    unsafe {
        let to = &raw const (*making).to;
        let reply = write_reply(making, to, (*making).backend_segment, (*making).protocol as u8);
        let Some(flow) = Key::of(reply).flow() else { return true };
        let client = &(*making).key.tuple;
        let same_client = (*flow).to.destination_port_be == client.source_port_be
            && (*flow).to.source_port_be == client.destination_port_be
            && (*flow).to.destination_be.is(client.source_be)
            && (*flow).to.source_be.is(client.destination_be);
        same_client && (*flow).tuple.is(&reply.tuple) && (*flow).state & FLOW_DEAD != 0
    }
}

#[inline(always)]
fn hint_word(line: *mut lbd_common::abi::HintLine, way: usize) -> *mut u64 {
    // SAFETY: masked below HINT_WAYS.
    unsafe { (&raw mut (*line).hints).cast::<u64>().add(way & (HINT_WAYS - 1)) }
}

/// The half-open record of the client whose key is in [`Making::key`]; `port` is its first choice.
#[inline(always)]
pub(crate) fn of_client<A: Tables>(hash: u64, port: u16, now: u32) -> Option<Found<A>> {
    let mut index = hash::half_open_set(port, HALF_OPEN_SETS);
    let mut way = A::find_client(index, hash, now);
    if way >= NONE {
        // As long as first choices are free, there are no hints, and no cache line to miss for them.
        let hinted = TENANT_USE.get(0)?.hinted as u32;
        if hinted == 0 || !tag::is_later(hinted.wrapping_add(32), now) {
            return None;
        }
        let port = A::find_hint(hash, now);
        if port >= NONE {
            return None;
        }
        index = hash::half_open_set(port as u16, HALF_OPEN_SETS);
        way = A::find_client(index, hash, now);
    }
    found(index, way)
}

/// The half-open record that a backend's packet belongs to; its tuple turned around is in [`Making::key`].
#[inline(always)]
pub(crate) fn of_backend<A: Tables>(making: *mut Making<A>, now: u32) -> Option<Found<A>> {
    // SAFETY: a map value, which the verifier checks.
    let (index, reverse) = unsafe {
        let key = &(*making).key;
        (
            hash::half_open_set(u16::from_be(key.tuple.source_port_be), HALF_OPEN_SETS),
            hash::reverse(&key.tuple, key.segment, TCP),
        )
    };
    found(index, A::find_backend(index, reverse, now))
}

/// A record that a search has found, with its tag as it is now: what the search compared may have changed since, so that
/// whoever believes the record compares again.
#[inline(always)]
fn found<A: Tables>(index: u32, way: u64) -> Option<Found<A>> {
    if way >= NONE {
        return None;
    }
    let set = A::half_open().get_ptr_mut(index)?;
    // SAFETY: a map value, which the verifier checks.
    let tag = unsafe { read_volatile(tag_word(set, way as usize)) };
    Some(Found { set, way: way as usize, tag })
}

/// Takes over a half-open TCP connection from the programs of before: its record is in [`Making::record`], `word` is its tag. One that is
/// known already may have been answered meanwhile. Whether it is known now.
#[inline(always)]
pub(crate) fn take_over<A: Tables>(making: *mut Making<A>, word: u64, now: u32) -> bool {
    let Some(settings) = SETTINGS.get(0) else { return false };
    // SAFETY: this CPU's value; what is written and read in it does not overlap.
    let record = unsafe {
        let record = &(*making).record;
        (*making).key = FlowKey { tuple: record.to, segment: record.backend_segment, protocol: TCP, pad: 0 };
        record
    };
    if let Some(found) = of_backend(making, now) {
        let known = found.record();
        // SAFETY: a map value, which the verifier checks.
        unsafe {
            if !(*known).client.is(&record.client) {
                return false;
            }
            (*known).backend_sequence = record.backend_sequence;
            (*known).last_seen = record.last_seen;
            compiler_fence(Ordering::Release);
            let state = read_volatile(&raw const (*known).state);
            write_volatile(&raw mut (*known).state, state | record.state);
        }
        return true;
    }
    let (port, expires) = (u16::from_be(record.to.source_port_be), tag::expires(word, now));
    // SAFETY: as above.
    let hash = unsafe {
        (*making).key = FlowKey { tuple: record.client, segment: record.client_segment, protocol: TCP, pad: 0 };
        (*making).to = record.to;
        (*making).backend_segment = record.backend_segment;
        (*making).protocol = u16::from(TCP);
        let hash = hash::flow(&settings.seed, &(*making).key);
        (*making).hash = hash;
        hash
    };
    let way = A::take(u32::from(port), 0, now, expires);
    if way >= TAKEN {
        return false;
    }
    let Ok(found) = claimed(making, port, way, expires) else { return false };
    // SAFETY: a map value, which the verifier checks; claimed, and read by nobody yet.
    unsafe { *found.record() = *record };
    found.publish(record.tenant, now);
    A::leave_hint(hash, u32::from(port), now, expires);
    true
}

/// The packet that makes a flow.
pub(crate) struct First {
    /// Length of the IP packet.
    pub(crate) length: u32,
    /// Sequence number after it.
    pub(crate) sequence: u32,
    /// Its acknowledgement number.
    pub(crate) acknowledged: u32,
    /// State of the forward half.
    pub(crate) forward: u16,
    /// State of the reverse half.
    pub(crate) reverse: u16,
}

/// Makes a flow of a half-open record, whose copy is in [`Making::record`]; the client's key is in [`Making::key`]. A second CPU with
/// another packet of the same client gets `Ok(false)`: the packet may go, the flow is the other's work.
#[inline(always)]
pub(crate) fn promote<A: Tables>(
    found: &Found<A>,
    making: *mut Making<A>,
    first: &First,
    now: u32,
) -> Result<bool, Reason> {
    if !found.change(tag::LIVE, tag::PROMOTING) {
        return Ok(false);
    }
    let result = make::<A>(first, now);
    if result.is_ok() {
        // SAFETY: a map value, which the verifier checks.
        found.release(tag::PROMOTING, unsafe { (*making).record.tenant }, now);
    } else {
        // The client's retransmission may find room.
        found.change(tag::PROMOTING, tag::LIVE);
    }
    result.map(|()| true)
}

/// Makes room, then a flow.
#[inline(always)]
pub(crate) fn make<A: Tables>(first: &First, now: u32) -> Result<(), Reason> {
    // Room is made before it is needed: for each entry that is added, one leaves, or the hand looks at two.
    if A::age_step(now) == PUT_BACK || is_filling::<A>() {
        A::age_step(now);
    }
    A::bury(now);
    let states = u32::from(first.forward) | u32::from(first.reverse) << 16;
    match A::insert(first.length, first.sequence, first.acknowledged, states, now) {
        INSERTED => Ok(()),
        TENANT_FLOWS => Err(Reason::TenantFlows),
        TABLE_FULL => Err(Reason::TableFull),
        TUPLE_IN_USE => Err(Reason::TupleInUse),
        _ => Err(Reason::Internal),
    }
}

/// Whether the tenant of the flow in [`Making::record`] uses so much of its limit that the hand should gain on its flows.
#[inline(always)]
fn is_filling<A: Tables>() -> bool {
    let Some(making) = A::making() else { return true };
    // SAFETY: this CPU's value.
    let tenant = unsafe { (*making).record.tenant };
    let (Some(used), Some(limits)) = (family_use::<A>(tenant), TENANTS.get(u32::from(tenant))) else { return true };
    // SAFETY: a map value, which the verifier checks.
    unsafe { (*used).flows as i64 >= i64::from(limits.families[A::INDEX].flows / 4) }
}

pub(crate) const INSERTED: u64 = 0;
const TENANT_FLOWS: u64 = 1;
const TABLE_FULL: u64 = 2;
const TUPLE_IN_USE: u64 = 3;
const NO_TABLES: u64 = 4;

/// Inserts both halves of a flow, as [`Making::key`], [`Making::record`] and the first packet say; `states` are the forward half's and, in the
/// upper half, the reverse one's. Gives [`INSERTED`], [`TENANT_FLOWS`], [`TABLE_FULL`] or [`TUPLE_IN_USE`].
#[inline(always)]
pub(crate) fn insert<A: Tables>(length: u32, sequence: u32, acknowledged: u32, states: u32, now: u32) -> u64 {
    let Some(making) = A::making() else { return NO_TABLES };
    // SAFETY: this CPU's value; the halves, the key and the record in it do not overlap.
    let (key, record, half) = unsafe { (&(*making).key, &(*making).record, &mut (*making).half) };
    let (Some(used), Some(limits)) = (family_use::<A>(record.tenant), TENANTS.get(u32::from(record.tenant))) else {
        return NO_TABLES;
    };
    let limit = limits.families[A::INDEX].flows;
    // SAFETY: a map value, which the verifier checks.
    if tcp::reached(unsafe { (*used).flows }, limit) {
        return TENANT_FLOWS;
    }
    let (forward, reverse) = (states as u16, (states >> 16) as u16);
    // SAFETY: a key in a map; what the table has is a map value, which the verifier checks.
    let forward_key = unsafe {
        let forward_key = Key::of(key);
        // Before anything is made: the client may prove itself again and again as long as that flow lives.
        if A::IS_V6 && forward_key.flow().is_some_and(|other| !(*other).tuple.is(&key.tuple)) {
            return TUPLE_IN_USE;
        }
        forward_key
    };
    if !enqueue(&AgeEntry::<A> { lookup: *forward_key.lookup(), created: now }) {
        return TABLE_FULL;
    }
    let protocol = if forward & FLOW_UDP != 0 { UDP } else { TCP };
    // SAFETY: this CPU's value.
    let reverse_key = unsafe {
        let reply = write_reply(making, &raw const record.to, record.backend_segment, protocol);
        copy_words(&raw const reply.tuple, &raw mut half.tuple);
        Key::of(reply)
    };
    half.segment = record.backend_segment;
    half.next_hop = record.client_next_hop;
    half.to = record.client.turned();
    half.last_seen = now;
    half.bytes = 0;
    half.packets = 0;
    half.sequence = record.backend_sequence.wrapping_add(1);
    half.acknowledged = record.client_sequence.wrapping_add(1);
    half.own = record.client_mac;
    half.frontend = record.frontend;
    half.packets_high = 0;
    half.state = FLOW_REVERSE | reverse;
    let put_reverse = put(&reverse_key, half);
    if put_reverse != INSERTED {
        return put_reverse;
    }
    // SAFETY: this CPU's value.
    unsafe {
        copy_words(&raw const record.to, &raw mut half.to);
        copy_words(&raw const key.tuple, &raw mut half.tuple);
    }
    half.segment = key.segment;
    half.next_hop = record.backend_next_hop;
    half.bytes = u64::from(length);
    half.packets = 1;
    half.sequence = sequence;
    half.acknowledged = acknowledged;
    half.own = Flow::<A>::forward_own(now, record.backend);
    half.state = forward;
    let put_forward = put(&forward_key, half);
    if put_forward != INSERTED {
        // Nobody has read the reverse half yet: no packet of the backend can be under way on it.
        reverse_key.remove();
        return put_forward;
    }
    charge::<A>(record.tenant, forward, 1);
    INSERTED
}

/// Inserts a half. What stands at its key may be a dead half of the same client (its SYN killed the flow, see [`super::flags`], and
/// [`reverse_is_free`] lets nothing else be): it is written over in place, dead until the last word. Of IPv6 it may be another tuple's that
/// looks like this one: that one stays.
#[inline(always)]
pub(crate) fn put<A: Tables>(key: &Key<A>, half: &Flow<A>) -> u64 {
    if A::flows().insert(key.lookup(), half, u64::from(BPF_NOEXIST)).is_ok() {
        return INSERTED;
    }
    let Some(old) = key.flow() else { return TABLE_FULL };
    // SAFETY: a map value, which the verifier checks. FLOW_BUSY makes this CPU its only writer; until then it may have been recycled.
    unsafe {
        if (*old).state & FLOW_DEAD == 0 || !(*old).tuple.is(&half.tuple) || !take_dead(old) {
            return TUPLE_IN_USE;
        }
        if !(*old).tuple.is(&half.tuple) {
            unmark(old, FLOW_BUSY);
            return TUPLE_IN_USE;
        }
        (*old).next_hop = half.next_hop;
        copy_words(&raw const half.to, &raw mut (*old).to);
        (*old).last_seen = half.last_seen;
        (*old).bytes = half.bytes;
        (*old).packets = half.packets;
        (*old).sequence = half.sequence;
        (*old).acknowledged = half.acknowledged;
        (*old).own = half.own;
        (*old).frontend = half.frontend;
        (*old).packets_high = 0;
        compiler_fence(Ordering::Release);
        write_volatile(&raw mut (*old).state, half.state);
    }
    INSERTED
}
