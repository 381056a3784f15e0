//! Half-open connections: claiming a SNAT port, finding a record, promoting it to a flow.

use core::ptr::{read_volatile, write_volatile};
use core::sync::atomic::{Ordering, compiler_fence};

use aya_ebpf::bindings::BPF_NOEXIST;
use lbd_common::abi::{
    AgeEntry4, FLOW_BUSY, FLOW_DEAD, FLOW_FIN, FLOW_PEER_FIN, FLOW_REPLIED, FLOW_REVERSE, Flow4, FlowKey4,
    HALF_OPEN_SETS, HALF_OPEN_WAYS, HINT_LINES, HINT_WAYS, HalfOpen4, HalfOpenSet4, Settings, Tuple4,
};
use lbd_common::half_open as tag;
use lbd_common::hash;
use lbd_common::packet::{Ipv4Tcp, TCP};
use lbd_common::reason::Reason;
use lbd_common::tcp;

use super::age::{charge, enqueue, lbd_age_step};
use super::context::{compare_and_swap, opaque, scratch};
use super::flags::mark;
use super::maps::{FLOWS4, HALF_OPEN4, HINTS4, SETTINGS, TENANT_USE};

/// A record that was found or claimed.
pub(crate) struct Found {
    set: *mut HalfOpenSet4,
    way: usize,
    /// The tag as it was read.
    tag: u64,
}

impl Found {
    /// The record.
    #[inline(always)]
    pub(crate) fn record(&self) -> *mut HalfOpen4 {
        record_at(self.set, self.way)
    }

    #[inline(always)]
    fn word(&self) -> *mut u64 {
        tag_word(self.set, self.way)
    }

    /// Whether nobody has taken the record since it was found: to be asked after copying it.
    #[inline(always)]
    pub(crate) fn unchanged(&self) -> bool {
        // SAFETY: a map value, which the verifier checks.
        let current = unsafe { read_volatile(self.word()) };
        tag::with_state(current, 0) == tag::with_state(self.tag, 0) && current & tag::STATE != tag::FREE
    }

    /// Makes a claimed record readable.
    #[inline(always)]
    pub(crate) fn publish(&self) {
        compiler_fence(Ordering::Release);
        // SAFETY: as above; an aligned word is written at once.
        unsafe { write_volatile(self.word(), tag::with_state(self.tag, tag::LIVE)) };
    }

    /// Gives the record up, if it is still the one found.
    #[inline(always)]
    pub(crate) fn release(&self, state: u64) {
        // SAFETY: as above.
        unsafe { compare_and_swap(self.word(), tag::with_state(self.tag, state), 0) };
    }

    /// Takes the right to promote; only one CPU gets it.
    #[inline(always)]
    fn begin_promotion(&self) -> bool {
        // SAFETY: as above.
        unsafe {
            compare_and_swap(
                self.word(),
                tag::with_state(self.tag, tag::LIVE),
                tag::with_state(self.tag, tag::PROMOTING),
            )
        }
    }
}

#[inline(always)]
fn tag_word(set: *mut HalfOpenSet4, way: usize) -> *mut u64 {
    // SAFETY: masked below HALF_OPEN_WAYS.
    unsafe { (&raw mut (*set).tags).cast::<u64>().add(way & (HALF_OPEN_WAYS - 1)) }
}

#[inline(always)]
fn record_at(set: *mut HalfOpenSet4, way: usize) -> *mut HalfOpen4 {
    // SAFETY: masked below HALF_OPEN_WAYS.
    unsafe { (&raw mut (*set).records).cast::<HalfOpen4>().add(way & (HALF_OPEN_WAYS - 1)) }
}

/// [`lbd_claim`]: the tuple is another's, or another CPU was faster: try another port.
const TAKEN: u64 = 1 << 32;
/// [`lbd_claim`]: no room for a record.
const FULL: u64 = 2 << 32;
/// The searches: nothing found.
const NONE: u64 = 1 << 32;

/// Claims a record in a set for a reverse tuple with hash `reverse`; gives the way, [`TAKEN`] or [`FULL`]. Two CPUs that claim one tuple
/// at once each see the other's tag after their compare-and-swap, a full barrier, and both yield.
///
/// This and the searches are functions of their own for the verifier, which then checks their loops once instead of once for every
/// way to call them. So they take numbers, and find the rest in the maps.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn lbd_claim(index: u32, reverse: u32, client: u64, now: u32) -> u64 {
    let (Some(set), Some(settings)) = (HALF_OPEN4.get_ptr_mut(index), SETTINGS.get(0)) else { return FULL };
    let mut free = HALF_OPEN_WAYS;
    let mut old = 0;
    let (mut way, ways) = (0, opaque::<8>() as usize);
    while way < ways {
        // SAFETY: a map value, which the verifier checks.
        let current = unsafe { read_volatile(tag_word(set, way)) };
        if tag::reverse(current) == reverse {
            if tag::occupied(current, now, settings) {
                return TAKEN;
            }
            (free, old) = (way, current);
        } else if free == HALF_OPEN_WAYS && !tag::occupied(current, now, settings) {
            (free, old) = (way, current);
        }
        way += 1;
    }
    if free == HALF_OPEN_WAYS {
        return FULL;
    }
    let claimed = tag::tag(tag::BUSY, reverse, client, now);
    // SAFETY: as above.
    if !unsafe { compare_and_swap(tag_word(set, free), old, claimed) } {
        return TAKEN;
    }
    way = 0;
    while way < ways {
        if way != free {
            // SAFETY: as above.
            let current = unsafe { read_volatile(tag_word(set, way)) };
            if tag::reverse(current) == reverse && tag::occupied(current, now, settings) {
                // SAFETY: as above.
                unsafe { compare_and_swap(tag_word(set, free), claimed, 0) };
                return TAKEN;
            }
        }
        way += 1;
    }
    free as u64
}

/// Looks in a set for the record of the client whose key is in the scratch; gives the way or [`NONE`].
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn lbd_find_client(index: u32, hash: u64, now: u32) -> u64 {
    let (Some(set), Some(settings)) = (HALF_OPEN4.get_ptr_mut(index), SETTINGS.get(0)) else { return NONE };
    let Some(scratch) = scratch() else { return NONE };
    let key = &scratch.key;
    let (mut way, ways) = (0, opaque::<8>() as usize);
    while way < ways {
        // SAFETY: a map value, which the verifier checks.
        let current = unsafe { read_volatile(tag_word(set, way)) };
        if tag::may_be_client(current, hash) && tag::readable(current, now, settings) {
            // SAFETY: as above.
            let record = unsafe { &*record_at(set, way) };
            if record.client == key.tuple && record.client_segment == key.segment {
                return way as u64;
            }
        }
        way += 1;
    }
    NONE
}

/// Looks in the hints for where a client's record is; gives the SNAT port or [`NONE`].
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn lbd_find_hint(hash: u64, now: u32) -> u64 {
    let (Some(line), Some(settings)) = (HINTS4.get_ptr_mut(tag::hint_line(hash, HINT_LINES)), SETTINGS.get(0)) else {
        return NONE;
    };
    let (mut way, ways) = (0, opaque::<8>() as usize);
    while way < ways {
        // SAFETY: a map value, which the verifier checks.
        let current = unsafe { read_volatile(hint_word(line, way)) };
        if let Some(port) = tag::hinted_port(current, hash, now, settings) {
            return u64::from(port);
        }
        way += 1;
    }
    NONE
}

/// Leaves a hint where a client's record is.
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn lbd_leave_hint(hash: u64, port: u32, now: u32) -> u64 {
    let (Some(line), Some(settings)) = (HINTS4.get_ptr_mut(tag::hint_line(hash, HINT_LINES)), SETTINGS.get(0)) else {
        return 0;
    };
    // If all are in use, one is lost: its connection has to be opened again.
    let mut place = port as usize & (HINT_WAYS - 1);
    let (mut way, ways) = (0, opaque::<8>() as usize);
    while way < ways {
        // SAFETY: a map value, which the verifier checks.
        let current = unsafe { read_volatile(hint_word(line, way)) };
        if tag::hint_expired(current, now, settings) {
            place = way;
        }
        way += 1;
    }
    // SAFETY: as above; an aligned word is written at once.
    unsafe { write_volatile(hint_word(line, place), tag::hint(hash, port as u16, now)) };
    if let Some(nobody) = TENANT_USE.get_ptr_mut(0) {
        // SAFETY: as above.
        unsafe { write_volatile(&raw mut (*nobody).window, u64::from(now)) };
    }
    0
}

/// Looks in a set for the record of a backend's packet, whose tuple turned around and segment are in the scratch; gives the way or
/// [`NONE`].
#[unsafe(no_mangle)]
#[inline(never)]
pub(crate) extern "C" fn lbd_find_backend(index: u32, reverse: u32, now: u32) -> u64 {
    let (Some(set), Some(settings)) = (HALF_OPEN4.get_ptr_mut(index), SETTINGS.get(0)) else { return NONE };
    let Some(scratch) = scratch() else { return NONE };
    let key = &scratch.key;
    let (mut way, ways) = (0, opaque::<8>() as usize);
    while way < ways {
        // SAFETY: a map value, which the verifier checks.
        let current = unsafe { read_volatile(tag_word(set, way)) };
        if tag::reverse(current) == reverse && tag::readable(current, now, settings) {
            // SAFETY: as above.
            let record = unsafe { &*record_at(set, way) };
            if record.to == key.tuple && record.backend_segment == key.segment {
                return way as u64;
            }
        }
        way += 1;
    }
    NONE
}

/// The client's side of a connection that looks for a SNAT port.
pub(crate) struct Wanted<'a> {
    pub(crate) client: &'a FlowKey4,
    pub(crate) hash: u64,
    pub(crate) first: u16,
    pub(crate) last: u16,
    pub(crate) backend_segment: u16,
}

/// Finds a SNAT port that makes `to` unique and claims it: `to.source_port_be` is set.
#[inline(always)]
pub(crate) fn allocate(wanted: &Wanted<'_>, to: &mut Tuple4, now: u32) -> Result<Found, Reason> {
    let mut full = false;
    let mut attempt = 0;
    let tries = opaque::<{ hash::PORT_TRIES }>();
    while attempt < tries {
        let port = hash::snat_port(wanted.hash, attempt, wanted.first, wanted.last);
        to.source_port_be = port.to_be();
        let index = hash::half_open_set(port, HALF_OPEN_SETS);
        let reverse = hash::reverse4(to, wanted.backend_segment, TCP);
        let claimed = lbd_claim(index, reverse, wanted.hash, now);
        if claimed < TAKEN {
            let set = HALF_OPEN4.get_ptr_mut(index).ok_or(Reason::Internal)?;
            let found = Found { set, way: claimed as usize, tag: tag::tag(tag::BUSY, reverse, wanted.hash, now) };
            if reverse_is_free(wanted.client, to, wanted.backend_segment) {
                if attempt > 0 {
                    lbd_leave_hint(wanted.hash, u32::from(port), now);
                }
                return Ok(found);
            }
            found.release(tag::BUSY);
        } else if claimed == FULL {
            full = true;
        }
        attempt += 1;
    }
    Err(if full { Reason::HalfOpenFull } else { Reason::SnatExhausted })
}

/// Whether no flow owns the reverse tuple, or only a dead one of the same client. Asked after claiming: who promotes
/// inserts into the flows before he frees his claim.
#[inline(always)]
fn reverse_is_free(client: &FlowKey4, to: &Tuple4, segment: u16) -> bool {
    let key = FlowKey4::reply(to, segment, TCP);
    let Some(flow) = FLOWS4.get_ptr(key) else { return true };
    // SAFETY: a map value, which the verifier checks.
    unsafe {
        let same_client = (*flow).to.destination_be == client.tuple.source_be
            && (*flow).to.destination_port_be == client.tuple.source_port_be
            && (*flow).to.source_be == client.tuple.destination_be
            && (*flow).to.source_port_be == client.tuple.destination_port_be;
        same_client && (*flow).state & FLOW_DEAD != 0
    }
}

#[inline(always)]
fn hint_word(line: *mut lbd_common::abi::HintLine, way: usize) -> *mut u64 {
    // SAFETY: masked below HINT_WAYS.
    unsafe { (&raw mut (*line).hints).cast::<u64>().add(way & (HINT_WAYS - 1)) }
}

/// The half-open record of a client's connection.
#[inline(always)]
pub(crate) fn find_client(
    key: &FlowKey4,
    hash: u64,
    first: u16,
    last: u16,
    now: u32,
    settings: &Settings,
) -> Option<Found> {
    scratch()?.key = *key;
    let mut index = hash::half_open_set(hash::snat_port(hash, 0, first, last), HALF_OPEN_SETS);
    let mut way = lbd_find_client(index, hash, now);
    if way >= NONE {
        // As long as first choices are free, there are no hints, and no cache line to miss for them.
        if tcp::elapsed(now, TENANT_USE.get(0)?.window as u32) > settings.tcp_half_open {
            return None;
        }
        let port = lbd_find_hint(hash, now);
        if port >= NONE {
            return None;
        }
        index = hash::half_open_set(port as u16, HALF_OPEN_SETS);
        way = lbd_find_client(index, hash, now);
    }
    found(index, way)
}

/// The half-open record that a backend's packet belongs to; `to` is the packet's tuple turned around.
#[inline(always)]
pub(crate) fn find_backend(to: &Tuple4, segment: u16, now: u32) -> Option<Found> {
    scratch()?.key = FlowKey4 { tuple: *to, segment, protocol: TCP, pad: 0 };
    let index = hash::half_open_set(u16::from_be(to.source_port_be), HALF_OPEN_SETS);
    let reverse = hash::reverse4(to, segment, TCP);
    found(index, lbd_find_backend(index, reverse, now))
}

/// A record that a search has found, with its tag as it is now: what the search compared may have changed since, so that
/// whoever believes the record compares again.
#[inline(always)]
fn found(index: u32, way: u64) -> Option<Found> {
    if way >= NONE {
        return None;
    }
    let set = HALF_OPEN4.get_ptr_mut(index)?;
    // SAFETY: a map value, which the verifier checks.
    let tag = unsafe { read_volatile(tag_word(set, way as usize)) };
    Some(Found { set, way: way as usize, tag })
}

/// Makes a flow of a half-open record: `packet` is the client's, and has proven that the client receives. A second CPU with
/// another packet of the same client gets `Ok(false)`: the packet may go, the flow is the other's work.
#[inline(always)]
pub(crate) fn promote(found: &Found, key: &FlowKey4, packet: &Ipv4Tcp, now: u32) -> Result<bool, Reason> {
    if !found.begin_promotion() {
        return Ok(false);
    }
    // SAFETY: a map value, which the verifier checks; this CPU alone may promote it.
    let record = unsafe { &*found.record() };
    let result = insert(record, key, packet, now);
    if result.is_ok() {
        found.release(tag::PROMOTING);
    } else {
        // SAFETY: as above. The client's retransmission may find room.
        unsafe {
            compare_and_swap(
                found.word(),
                tag::with_state(found.tag, tag::PROMOTING),
                tag::with_state(found.tag, tag::LIVE),
            );
        }
    }
    result.map(|()| true)
}

#[inline(always)]
fn insert(record: &HalfOpen4, key: &FlowKey4, packet: &Ipv4Tcp, now: u32) -> Result<(), Reason> {
    let reverse_key = FlowKey4::reply(&record.to, record.backend_segment, TCP);
    // The bare ACK may be lost, and the proof be a FIN.
    let fin = packet.tcp.flags & tcp::FIN != 0;
    // Room is made before it is needed: the hand looks at two entries for each one that is added.
    lbd_age_step(now);
    lbd_age_step(now);
    if !enqueue(&AgeEntry4 { key: *key, created: now }) {
        return Err(Reason::TableFull);
    }
    let Some(scratch) = scratch() else { return Err(Reason::Internal) };
    let half = &mut scratch.half;
    *half = Flow4 {
        tuple: reverse_key.tuple,
        segment: reverse_key.segment,
        next_hop: record.client_next_hop,
        to: Tuple4 {
            source_be: record.client.destination_be,
            destination_be: record.client.source_be,
            source_port_be: record.client.destination_port_be,
            destination_port_be: record.client.source_port_be,
        },
        last_seen: now,
        bytes: 0,
        packets: 0,
        sequence: record.backend_sequence.wrapping_add(1),
        acknowledged: record.client_sequence.wrapping_add(1),
        own: record.client_mac,
        frontend: record.frontend,
        packets_high: 0,
        state: FLOW_REVERSE | FLOW_REPLIED | if fin { FLOW_PEER_FIN } else { 0 },
    };
    put(&reverse_key, half)?;
    *half = Flow4 {
        tuple: key.tuple,
        segment: key.segment,
        next_hop: record.backend_next_hop,
        to: record.to,
        last_seen: now,
        bytes: u64::from(packet.total_length()),
        packets: 1,
        sequence: packet.sequence_end(),
        acknowledged: packet.acknowledgement(),
        own: Flow4::forward_own(now, record.backend),
        frontend: record.frontend,
        packets_high: 0,
        state: FLOW_REPLIED | if fin { FLOW_FIN } else { 0 },
    };
    if let Err(reason) = put(key, half) {
        // Nobody has read the reverse half yet: no packet of the backend can be under way on it.
        let _ = FLOWS4.remove(reverse_key);
        return Err(reason);
    }
    charge(record.tenant, 1);
    Ok(())
}

/// Inserts a half. What stands at its key is a dead half of the same client (its SYN killed the flow, see [`super::flags`], and
/// [`reverse_is_free`] lets nothing else be): it is written over in place, dead until the last word.
#[inline(always)]
fn put(key: &FlowKey4, half: &Flow4) -> Result<(), Reason> {
    if FLOWS4.insert(key, half, u64::from(BPF_NOEXIST)).is_ok() {
        return Ok(());
    }
    let Some(old) = FLOWS4.get_ptr_mut(key) else { return Err(Reason::TableFull) };
    // SAFETY: a map value, which the verifier checks; FLOW_BUSY makes this CPU its only writer.
    unsafe {
        if (*old).state & FLOW_DEAD == 0 || mark(old, FLOW_BUSY) & FLOW_BUSY != 0 {
            return Err(Reason::TupleInUse);
        }
        (*old).next_hop = half.next_hop;
        (*old).to = half.to;
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
    Ok(())
}
