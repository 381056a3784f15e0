//! Where a new flow may go: its frontend, the client's address, the tenant's limits, the backend.

use lbd_common::abi::{
    ADDRESS_BACKEND, ADDRESS_LEFT_PORT, ADDRESS_SNAT, ADDRESS_TARGET_PORT, Address, AddressKey, BACKEND_PRESENT,
    Backend, CHUNK_SLOTS, FRONTEND_PRESERVE_CLIENT, FRONTEND_SOURCE_AFFINITY, FRONTEND_UNSERVED_DROP, Frontend,
    FrontendKey, HalfOpen, LocalAddress, Mac, Making, NextHop, Segment, Settings, Tuple,
};
use lbd_common::breaker::{self, Choice as Breaker};
use lbd_common::half_open as tag;
use lbd_common::hash;
use lbd_common::packet::IpHeader as _;
use lbd_common::reason::Reason;
use lbd_common::tcp;

use super::age::family_use;
use super::context::{
    Ethernet, Refusal, budgets, compare_and_swap, copy_words, fetch_add, opaque, refuse, resolve, scratch,
};
use super::half_open::forget_expired;
use super::maps::{
    ADDRESSES, BACKEND_USE, BACKENDS, FRONTEND_EVENTS, FRONTENDS, MAGLEV, SEGMENTS, SETTINGS, TENANT_USE, TENANTS,
    TIMEOUTS, Tables, lbd_choose,
};

/// The client's side of a new flow; its key is in `making`.
pub(crate) struct Client<A: Address> {
    pub(crate) segment: &'static Segment,
    pub(crate) making: *mut Making<A>,
    pub(crate) now: u32,
    pub(crate) settings: &'static Settings,
}

impl<A: Tables> Client<A> {
    /// Writes what a record says of both sides. `to` is in [`Making::to`].
    #[inline(always)]
    pub(crate) fn fill(
        &self,
        record: &mut HalfOpen<A>,
        ethernet: *const Ethernet,
        frontend: &Frontend,
        choice: &Choice,
    ) {
        // SAFETY: this CPU's value; `ethernet` was bounds-checked, and its source is a MAC.
        let making = unsafe {
            let making = &*self.making;
            copy_words(&raw const making.key.tuple, &raw mut record.client);
            copy_words(&raw const making.to, &raw mut record.to);
            record.client_mac = *(&raw const (*ethernet).source).cast::<Mac>();
            making
        };
        record.client_segment = making.key.segment;
        record.client_next_hop = next_hop_to_client(self.segment, making.key.tuple.source_be);
        record.backend_segment = choice.backend.segment;
        record.backend_next_hop = choice.backend.next_hop;
        record.backend = choice.id;
        record.frontend = frontend.id;
        record.tenant = frontend.tenant;
        record.first_syn = self.now;
        record.last_seen = self.now;
    }
}

/// Writes a packet's key into [`Making::key`]. The addresses end an IP header and the ports begin what follows, so that they lie in a packet as in a
/// tuple.
///
/// # Safety
///
/// `headers` points to an IP header with at least four bytes behind it.
#[inline(always)]
pub(crate) unsafe fn write_key<A: Tables, H>(making: *mut Making<A>, headers: *const H, segment: u16, protocol: u8) {
    // SAFETY: the caller's; `making` is this CPU's value.
    unsafe {
        let tuple = headers.cast::<u8>().add(A::Header::LENGTH - 2 * size_of::<A>()).cast::<Tuple<A>>();
        copy_words(tuple, &raw mut (*making).key.tuple);
        (*making).key.segment = segment;
        (*making).key.protocol = protocol;
        (*making).key.pad = 0;
    }
}

/// Index of the next hop to a client.
#[inline(always)]
fn next_hop_to_client<A: Tables>(segment: &Segment, client: A) -> u16 {
    if on_link(segment, client) {
        segment.on_link_next_hop
    } else if A::IS_V6 {
        segment.gateway6_next_hop
    } else {
        segment.gateway_next_hop
    }
}

/// Whether an address is in a prefix of the segment.
#[inline(always)]
fn on_link<A: Address>(segment: &Segment, address: A) -> bool {
    let [a, b, c, d] = address.quads();
    if A::IS_V6 {
        let outside = |network: &[u32; 4], mask: &[u32; 4]| {
            ((a ^ network[0]) & mask[0])
                | ((b ^ network[1]) & mask[1])
                | ((c ^ network[2]) & mask[2])
                | ((d ^ network[3]) & mask[3])
        };
        // Link-local (RFC 4291 §2.5.6).
        outside(&segment.network6_be, &segment.mask6_be) == 0
            || outside(&segment.second_network6_be, &segment.second_mask6_be) == 0
            || a & 0xffc0_0000u32.to_be() == 0xfe80_0000u32.to_be()
    } else {
        (a ^ segment.network4_be) & segment.mask4_be == 0
            || (a ^ segment.second_network4_be) & segment.second_mask4_be == 0
    }
}

/// The frontend that the packet is addressed to whose key is in `making`.
#[inline(always)]
pub(crate) fn frontend_of<A: Tables>(making: *mut Making<A>) -> Option<&'static Frontend> {
    // SAFETY: this CPU's value.
    let key = unsafe { &(*making).key };
    let wanted = FrontendKey {
        vip: key.tuple.destination_be.mapped(),
        port_be: key.tuple.destination_port_be,
        segment: key.segment,
        protocol: key.protocol,
        pad: [0; 3],
    };
    // SAFETY: the value repeats its key, which is compared (an IPv4 VIP by its last four bytes).
    let frontend = unsafe { FRONTENDS.get(wanted) }?;
    let same = frontend.port_be == key.tuple.destination_port_be
        && frontend.segment == key.segment
        && frontend.protocol == key.protocol
        && A::unmapped(&frontend.vip).is(key.tuple.destination_be);
    same.then_some(frontend)
}

/// The SNAT port that the client is tried with first.
#[inline(always)]
pub(crate) fn first_port<A: Tables>(making: *mut Making<A>, frontend: &Frontend, hash: u64) -> u16 {
    if frontend.flags & FRONTEND_PRESERVE_CLIENT != 0 {
        // SAFETY: this CPU's value.
        u16::from_be(unsafe { (*making).key.tuple.source_port_be })
    } else {
        hash::snat_port(hash, 0, frontend.snat_first, frontend.snat_last)
    }
}

/// What a half-open record says of its backend.
pub(crate) struct Target {
    frontend: u16,
    backend: u16,
    segment: u16,
}

impl Target {
    #[inline(always)]
    pub(crate) const fn of<A: Address>(record: &HalfOpen<A>) -> Self {
        Self { frontend: record.frontend, backend: record.backend, segment: record.backend_segment }
    }

    /// Whether a connection that began before may end where it began: a NodePort may have become another's while the handshake was
    /// under way. `None`: backend or port are not in the plan any more, and nobody else's.
    #[inline(always)]
    pub(crate) fn is_same<A: Tables>(&self, frontend: &Frontend, to: &Tuple<A>) -> Option<bool> {
        if self.frontend != frontend.id {
            return Some(false);
        }
        let backend = BACKENDS.get(u32::from(self.backend))?;
        let present = backend.flags & BACKEND_PRESENT != 0;
        if present && (!A::unmapped(&backend.address).is(to.destination_be) || backend.segment != self.segment) {
            return Some(false);
        }
        let port_be = if present && backend.port_be != 0 { backend.port_be } else { frontend.target_port_be };
        if port_be == to.destination_port_be {
            return present.then_some(true);
        }
        let taken = port_of(self.segment, to.destination_port_be)?.flags & ADDRESS_TARGET_PORT != 0;
        taken.then_some(false)
    }
}

/// What an address means in a segment.
#[inline(always)]
pub(crate) fn local_address<A: Address>(address: A, segment: u16) -> Option<LocalAddress> {
    // SAFETY: copied at once.
    unsafe { ADDRESSES.get(AddressKey { address: address.mapped(), segment, port_be: 0 }) }.copied()
}

/// What a port means in a segment.
#[inline(always)]
fn port_of(segment: u16, port_be: u16) -> Option<LocalAddress> {
    // SAFETY: copied at once.
    unsafe { ADDRESSES.get(AddressKey { address: [0; 16], segment, port_be }) }.copied()
}

/// What a new flow is to its tenant's limits.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Tcp = 0,
    Udp = 1,
}

/// Asks whether the client may be one, and the tenant's limits; gives the tick at which the claim of a half-open record shall expire.
#[inline(always)]
pub(crate) fn admit<A: Tables>(client: &Client<A>, frontend: &Frontend, kind: Kind) -> Result<u32, Refusal> {
    let no = |reason| Err(refuse(reason, frontend.tenant));
    let answer = A::may_open(
        u32::from(frontend.id),
        u32::from(frontend.tenant) << 16 | u32::from(frontend.timeouts),
        frontend.source_ranges,
        kind as u32,
        client.now,
    );
    match answer >> 32 {
        0 => Ok(answer as u32),
        LAND => no(Reason::Land),
        BAD_SOURCE => no(Reason::BadSource),
        SOURCE_RANGE => no(Reason::SourceRange),
        TENANT_RATE => no(Reason::TenantRate),
        TENANT_FLOWS => no(Reason::TenantFlows),
        TENANT_HALF_OPEN => no(Reason::TenantHalfOpen),
        TENANT_UDP => no(Reason::TenantUdp),
        _ => no(Reason::Internal),
    }
}

/// SYNs above a limit that one CPU still looks at in a tick (16 to 160 ms): one of them may be a known client's, sent again.
const OVER_LIMIT_PER_TICK: u32 = 64;

/// Why a SYN is refused before anything is looked up for it: its tenant has reached a limit, and this CPU has looked at enough such SYNs.
#[inline(always)]
pub(crate) fn over_limit<A: Tables>(frontend: &Frontend, now: u32, settings: &Settings) -> Option<Reason> {
    let limits = TENANTS.get(u32::from(frontend.tenant))?;
    let (used, family) = (TENANT_USE.get_ptr_mut(u32::from(frontend.tenant))?, family_use::<A>(frontend.tenant)?);
    let (rate, limits) = (limits.new_flows_per_second, &limits.families[A::INDEX]);
    // SAFETY: map values, which the verifier checks.
    let reason = unsafe {
        if rate != 0 && (*used).new_flows >= u64::from(rate) && (*used).window == second(now, settings) {
            Reason::TenantRate
        } else if tcp::reached((*family).flows, limits.flows) {
            Reason::TenantFlows
        } else {
            if !tcp::reached((*family).half_open, limits.half_open) {
                return None;
            }
            forget_expired(family, now, settings.half_open_epoch);
            if !tcp::reached((*family).half_open, limits.half_open) {
                return None;
            }
            Reason::TenantHalfOpen
        }
    };
    let scratch = budgets(now)?;
    scratch.over_limit += 1;
    if scratch.over_limit <= OVER_LIMIT_PER_TICK {
        return None;
    }
    if matches!(reason, Reason::TenantFlows) {
        refused(frontend);
    }
    Some(reason)
}

/// The second that a tick lies in.
#[inline(always)]
fn second(now: u32, settings: &Settings) -> u64 {
    u64::from(now) * 256 / (u64::from(settings.ticks_per_second_256) | 1)
}

const INTERNAL: u64 = Reason::Internal as u64;
const LAND: u64 = Reason::Land as u64;
const BAD_SOURCE: u64 = Reason::BadSource as u64;
const SOURCE_RANGE: u64 = Reason::SourceRange as u64;
const TENANT_RATE: u64 = Reason::TenantRate as u64;
const TENANT_FLOWS: u64 = Reason::TenantFlows as u64;
const TENANT_HALF_OPEN: u64 = Reason::TenantHalfOpen as u64;
const TENANT_UDP: u64 = Reason::TenantUdp as u64;

/// Whether a new flow may be opened by the client whose key is in [`Making::key`], and which came in the segment that the scratch names. Gives the tick
/// at which a claim shall expire or, in the upper half, the reason why not.
#[inline(always)]
pub(crate) fn may_open<A: Tables>(frontend: u32, tenant_timeouts: u32, ranges: u32, udp: u32, now: u32) -> u64 {
    const NO: u32 = 32;
    let (tenant, timeouts) = (tenant_timeouts >> 16, tenant_timeouts & 0xffff);
    let (Some(making), Some(scratch), Some(settings)) = (A::making(), scratch(), SETTINGS.get(0)) else {
        return INTERNAL << NO;
    };
    let (Some(segment), Some(tenant_limits), Some(timeouts)) =
        (SEGMENTS.get(scratch.slot), TENANTS.get(tenant), TIMEOUTS.get(timeouts))
    else {
        return INTERNAL << NO;
    };
    let (Some(used), Some(family)) = (TENANT_USE.get_ptr_mut(tenant), family_use::<A>(tenant as u16)) else {
        return INTERNAL << NO;
    };
    // SAFETY: this CPU's value.
    let key = unsafe { &(*making).key };
    let source = key.tuple.source_be;
    if source.is(key.tuple.destination_be) {
        return LAND << NO;
    }
    // Our addresses are on-link: others are not looked for. A backend may be a client too (one-armed); our own addresses may not.
    let ours = on_link(segment, source)
        && local_address(source, key.segment).is_some_and(|address| address.flags & !ADDRESS_BACKEND != 0);
    if ours || !source.is_plausible_source() {
        return BAD_SOURCE << NO;
    }
    if ranges != 0 {
        // Ranges are not served yet: closed, never open by omission.
        return SOURCE_RANGE << NO;
    }
    let limits = &tenant_limits.families[A::INDEX];
    forget_expired(family, now, settings.half_open_epoch);
    // SAFETY: map values, which the verifier checks; words are changed atomically.
    let timeout = unsafe {
        if tenant_limits.new_flows_per_second != 0 {
            let second = second(now, settings);
            let window = (*used).window;
            if window != second && compare_and_swap(&raw mut (*used).window, window, second) {
                (*used).new_flows = 0;
            }
            if fetch_add(&raw mut (*used).new_flows, 1) >= u64::from(tenant_limits.new_flows_per_second) {
                return TENANT_RATE << NO;
            }
        }
        if tcp::reached((*family).flows, limits.flows) {
            count_refused(frontend);
            return TENANT_FLOWS << NO;
        }
        if udp == 0 {
            if tcp::reached((*family).half_open, limits.half_open) {
                return TENANT_HALF_OPEN << NO;
            }
            tcp::shrunk(timeouts.tcp_half_open, (*family).half_open, limits.half_open)
        } else {
            if tcp::reached((*family).udp, limits.udp) {
                return TENANT_UDP << NO;
            }
            breaker::second(settings.ticks_per_second_256)
        }
    };
    u64::from(tag::expiry(now, timeout))
}

/// A backend that was chosen.
pub(crate) struct Choice {
    pub(crate) id: u16,
    pub(crate) backend: &'static Backend,
    pub(crate) target_port_be: u16,
}

/// How many slots are looked at before a backend is taken that has not answered for a while.
const CANDIDATES: u32 = 8;

/// The backend that the lookup table names, or the next candidate: `attempt` counts those before, `avoid` is the last of them (0 = none).
/// Backends that do not answer are gone around.
#[inline(always)]
pub(crate) fn choose<A: Tables>(
    client: &Client<A>,
    frontend: &Frontend,
    hash: u64,
    attempt: u32,
    avoid: u16,
) -> Result<Choice, Refusal> {
    if frontend.table_size == 0 {
        return Err(nobody(frontend));
    }
    let hash = if frontend.flags & FRONTEND_SOURCE_AFFINITY != 0 {
        // SAFETY: this CPU's value.
        hash::source(&client.settings.seed, unsafe { (*client.making).key.tuple.source_be })
    } else {
        hash
    };
    let attempt_avoid = attempt << 16 | u32::from(avoid);
    let id = lbd_choose(frontend.table, frontend.table_size, hash as u32, attempt_avoid, client.now) as u16;
    if id == 0 {
        return Err(nobody(frontend));
    }
    let backend = BACKENDS.get(u32::from(id)).ok_or(refuse(Reason::Internal, frontend.tenant))?;
    if backend.flags & BACKEND_PRESENT == 0 {
        return Err(refuse(Reason::Internal, frontend.tenant));
    }
    let target_port_be = if backend.port_be == 0 { frontend.target_port_be } else { backend.port_be };
    if target_port_be == 0 {
        return Err(nobody(frontend));
    }
    // On the other side, the client's address may be ours or another backend's: no client can have it.
    // SAFETY: this CPU's value.
    let source = unsafe { (*client.making).key.tuple.source_be };
    let like_ours = (source.quads()[0] ^ backend.ours_be) & backend.ours_mask_be == 0;
    if like_ours && backend.segment != client.segment.id && local_address(source, backend.segment).is_some() {
        return Err(refuse(Reason::BadSource, frontend.tenant));
    }
    Ok(Choice { id, backend, target_port_be })
}

/// The id of the backend for this hash and attempt, or the next one that is not `avoid` and answers; 0 = none.
#[inline(always)]
pub(crate) fn choose_backend(table: u32, table_size: u32, hash: u32, attempt: u32, avoid: u16, now: u32) -> u64 {
    let Some(settings) = SETTINGS.get(0) else { return 0 };
    let second = breaker::second(settings.ticks_per_second_256);
    let mut first = 0;
    let (mut tries, most) = (0, opaque::<CANDIDATES>());
    while tries < most {
        // The golden ratio spreads the candidates over the table; the first is the flow's own.
        let hash = hash.wrapping_add(attempt.wrapping_add(tries).wrapping_mul(0x9e37_79b9));
        let slot = hash::slot(u64::from(hash), table_size);
        let Some(chunk) = MAGLEV.get_ptr(table.wrapping_add(slot / CHUNK_SLOTS)) else { return 0 };
        // SAFETY: the index is masked to the chunk's slots.
        let id = unsafe { *chunk.cast::<u16>().add((slot % CHUNK_SLOTS) as usize) };
        if tries == 0 {
            first = id;
        }
        if id != avoid {
            let Some(used) = BACKEND_USE.get_ptr_mut(u32::from(id)) else { return 0 };
            // SAFETY: a map value, which the verifier checks.
            match unsafe { breaker::choose(&*used, now, second) } {
                Breaker::Take => return u64::from(id),
                Breaker::Try => {
                    // SAFETY: as above.
                    unsafe { (*used).trial = now };
                    return u64::from(id);
                }
                Breaker::Skip => {}
            }
        }
        tries += 1;
    }
    u64::from(first)
}

/// Notes that a backend owes an answer.
#[inline(always)]
pub(crate) fn announce(id: u16, now: u32) {
    if let Some(used) = BACKEND_USE.get_ptr_mut(u32::from(id)) {
        // SAFETY: a map value, which the verifier checks; a lost count delays the breaker. Other CPUs write the ticks too, which hardly ever
        // need a change here.
        unsafe {
            let owing = breaker::owing(&*used, now);
            (*used).unanswered = owing.unanswered;
            (*used).since = owing.since;
            if owing.answered != (*used).answered {
                (*used).answered = owing.answered;
            }
            if owing.trial != (*used).trial {
                (*used).trial = owing.trial;
            }
        }
    }
}

/// Writes where the packet shall go into [`Making::to`], but for the source port, and what that may be. True: only the client's own port.
#[inline(always)]
pub(crate) fn prepare<A: Tables>(
    making: *mut Making<A>,
    frontend: &Frontend,
    choice: &Choice,
    hash: u64,
    protocol: u8,
) -> bool {
    let own = frontend.flags & FRONTEND_PRESERVE_CLIENT != 0;
    // SAFETY: this CPU's value.
    let making = unsafe { &mut *making };
    making.to.source_be = if own { making.key.tuple.source_be } else { A::unmapped(&frontend.snat) };
    making.to.destination_be = A::unmapped(&choice.backend.address);
    making.to.destination_port_be = choice.target_port_be;
    making.hash = hash;
    making.backend_segment = choice.backend.segment;
    making.protocol = u16::from(protocol);
    let port = u16::from_be(making.key.tuple.source_port_be);
    (making.first, making.last) = if own { (port, port) } else { (frontend.snat_first, frontend.snat_last) };
    own
}

/// The next hop to a backend, if a packet of this length and with this TTL can go there now.
#[inline(always)]
pub(crate) fn hop_to_backend(
    segment: &Segment,
    next_hop: u16,
    length: u32,
    hops: u8,
    frontend: &Frontend,
) -> Result<&'static NextHop, Refusal> {
    let no = |reason| refuse(reason, frontend.tenant);
    let (hop, resolved) = resolve(next_hop, length, segment).map_err(no)?;
    if !resolved {
        return Err(no(Reason::NoNeighbour));
    }
    if hops <= 1 {
        return Err(no(Reason::TtlExceeded));
    }
    Ok(hop)
}

/// There is no backend.
#[inline(always)]
fn nobody(frontend: &Frontend) -> Refusal {
    refused(frontend);
    let quiet = frontend.flags & FRONTEND_UNSERVED_DROP != 0;
    refuse(if quiet { Reason::NoBackendQuiet } else { Reason::NoBackend }, frontend.tenant)
}

/// Counts a flow that was refused.
#[inline(always)]
pub(crate) fn refused(frontend: &Frontend) {
    count_refused(u32::from(frontend.id));
}

#[inline(always)]
fn count_refused(frontend: u32) {
    if let Some(events) = FRONTEND_EVENTS.get_ptr_mut(frontend) {
        // SAFETY: this CPU's value.
        unsafe { (*events).refused += 1 };
    }
}

/// Counts a flow that was made.
#[inline(always)]
pub(crate) fn promoted(frontend: &Frontend) {
    if let Some(events) = FRONTEND_EVENTS.get_ptr_mut(u32::from(frontend.id)) {
        // SAFETY: this CPU's value.
        unsafe { (*events).flows += 1 };
    }
}

/// What a packet may be an answer to.
pub(crate) struct Reply {
    /// Whether it comes from where backends live, and from a port that they serve.
    pub(crate) from_backend: bool,
    /// The tenant whose SNAT address it is to, or 0.
    pub(crate) tenant: u16,
}

/// Whether the packet whose key is in `making` may be an answer: to a SNAT port, or from a backend to a client whose address was kept.
/// Its tuple is turned around there.
#[inline(always)]
pub(crate) fn reply_to<A: Tables>(making: *mut Making<A>) -> Option<Reply> {
    // SAFETY: this CPU's value.
    let key = unsafe { &mut (*making).key };
    let from_backend = || {
        local_address(key.tuple.source_be, key.segment).is_some_and(|address| address.flags & ADDRESS_BACKEND != 0)
            && port_of(key.segment, key.tuple.source_port_be)
                .is_some_and(|port| port.flags & (ADDRESS_TARGET_PORT | ADDRESS_LEFT_PORT) != 0)
    };
    let reply = match local_address(key.tuple.destination_be, key.segment) {
        Some(address) => {
            let port = u16::from_be(key.tuple.destination_port_be);
            let to_snat = address.flags & ADDRESS_SNAT != 0 && port >= address.snat_first && port <= address.snat_last;
            if !to_snat {
                return None;
            }
            Reply { from_backend: from_backend(), tenant: address.tenant }
        }
        // Not an address of ours: a client's, if it comes from a backend, and only if there is a record.
        None if from_backend() => Reply { from_backend: false, tenant: 0 },
        None => return None,
    };
    key.tuple = key.tuple.turned();
    Some(reply)
}
