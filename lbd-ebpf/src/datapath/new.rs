//! TCP packets of no live flow: opening, answering, proving, refusing.

use aya_ebpf::programs::XdpContext;
use lbd_common::abi::{
    ADDRESS_BACKEND, ADDRESS_SNAT, ADDRESS_TARGET_PORT, AddressKey, BACKEND_PRESENT, CHUNK_SLOTS,
    FRONTEND_SOURCE_AFFINITY, FRONTEND_UNSERVED_DROP, FlowKey4, Frontend, FrontendKey, HALF_OPEN_ANSWERED, HalfOpen4,
    LocalAddress, Mac, NextHop, SETTING_MIGRATING, STAGE_ANSWER, STAGE_LOCAL, Segment, Settings, Tuple4, mapped,
    unmapped,
};
use lbd_common::hash;
use lbd_common::packet::{
    ETHERNET, IPV4_TCP, Ipv4Tcp, OPTION_END, OPTION_MSS, OPTION_NONE, TCP, mss_checksum, mss4, plausible_source4,
};
use lbd_common::reason::Reason;
use lbd_common::tcp::{self, ACK, RST, SYN};

use super::context::{
    Ethernet, Outcome, Refusal, at, compare_and_swap, count, fetch_add, ipv4_tcp, mac_pointer, now, opaque, refuse,
    resolve, segment, send, settings, stage,
};
use super::edge::count_traffic;
use super::half_open::{Found, Wanted, allocate, find_backend, find_client, promote};
use super::maps::{ADDRESSES, BACKENDS, FRONTEND_EVENTS, FRONTENDS, MAGLEV, TENANT_USE, TENANTS};
use lbd_common::half_open as tag;

/// What all of this stage works with.
struct Packet<'a> {
    segment: &'static Segment,
    ethernet: *mut Ethernet,
    headers: &'a mut Ipv4Tcp,
    key: FlowKey4,
    now: u32,
    settings: &'static Settings,
}

impl<'a> Packet<'a> {
    #[inline(always)]
    fn parse(context: &'a XdpContext) -> Result<Self, Refusal> {
        let (segment, ethernet) = segment(context).ok_or(refuse(Reason::Internal, 0))?;
        let headers = ipv4_tcp(context).map_err(|reason| refuse(reason, segment.tenant))?;
        // SAFETY: `ipv4_tcp` has bounds-checked the headers.
        let headers = unsafe { &mut *headers };
        let key = headers.key(segment.id);
        Ok(Self { segment, ethernet, headers, key, now: now(), settings: settings()? })
    }

    /// The frontend that the packet is addressed to.
    #[inline(always)]
    fn frontend(&self) -> Option<&'static Frontend> {
        let tuple = &self.key.tuple;
        let key = FrontendKey {
            vip: mapped(tuple.destination_be.to_ne_bytes()),
            port_be: tuple.destination_port_be,
            segment: self.key.segment,
            protocol: TCP,
            pad: [0; 3],
        };
        // SAFETY: the value repeats its key, which is compared (an IPv4 VIP by its last four bytes).
        let frontend = unsafe { FRONTENDS.get(key) }?;
        let same = frontend.port_be == tuple.destination_port_be
            && frontend.segment == self.key.segment
            && u32::from_ne_bytes(unmapped(&frontend.vip)) == tuple.destination_be;
        same.then_some(frontend)
    }
}

/// A SYN: a client opens a connection.
#[inline(always)]
pub(crate) fn open(context: &XdpContext) -> Outcome {
    let packet = &mut Packet::parse(context)?;
    let Some(frontend) = packet.frontend() else { return stage(context, STAGE_ANSWER) };
    let (settings, now, key) = (packet.settings, packet.now, packet.key);
    let no = |reason| refuse(reason, frontend.tenant);
    if !tcp::valid_flags(packet.headers.tcp.flags) {
        return Err(no(Reason::BadFlags));
    }
    let hash = hash::flow4(&settings.seed, &key);
    let existing = find_client(&key, hash, frontend.snat_first, frontend.snat_last, now, settings);
    if let Some(found) = existing {
        // SAFETY: a map value, which the verifier checks.
        let (client, to, next_hop, sequence, target) = unsafe {
            let record = &*found.record();
            (record.client, record.to, record.backend_next_hop, record.client_sequence, Target::of(record))
        };
        if !found.unchanged() || client != key.tuple {
            return Err(no(Reason::HalfOpenFull));
        }
        if sequence == packet.headers.sequence() && target.is_same(frontend, &to) == Some(true) {
            // Retransmitted: the same way again.
            // SAFETY: as above.
            unsafe { (*found.record()).last_seen = now };
            let hop = hop_to_backend(packet, next_hop, frontend)?;
            return Ok(to_backend(context, packet, &to, hop, frontend));
        }
        // The client has started over, or the way leads elsewhere now.
        found.release(tag::LIVE);
    }

    check_source(packet, frontend)?;
    admit(packet, frontend)?;
    let choice = if frontend.flags & FRONTEND_SOURCE_AFFINITY != 0 {
        hash::source4(&settings.seed, key.tuple.source_be)
    } else {
        hash
    };
    let backend_id = choose(frontend, choice)?;
    let backend = BACKENDS.get(u32::from(backend_id)).ok_or(no(Reason::Internal))?;
    if backend.flags & BACKEND_PRESENT == 0 {
        return Err(no(Reason::Internal));
    }
    let target_port_be = if backend.port_be == 0 { frontend.target_port_be } else { backend.port_be };
    if target_port_be == 0 {
        return Err(nobody(frontend));
    }
    let mut to = Tuple4 {
        source_be: u32::from_ne_bytes(unmapped(&frontend.snat)),
        destination_be: u32::from_ne_bytes(unmapped(&backend.address)),
        source_port_be: 0,
        destination_port_be: target_port_be,
    };
    let client_next_hop = if on_link(packet.segment, key.tuple.source_be) {
        packet.segment.on_link_next_hop
    } else {
        packet.segment.gateway_next_hop
    };
    // Asked before anything is claimed: a packet that can't go needs no state.
    let hop = hop_to_backend(packet, backend.next_hop, frontend)?;
    let wanted = Wanted {
        client: &key,
        hash,
        first: frontend.snat_first,
        last: frontend.snat_last,
        backend_segment: backend.segment,
    };
    let found = allocate(&wanted, &mut to, now).map_err(|reason| {
        refused(frontend);
        no(reason)
    })?;
    // SAFETY: `segment` has bounds-checked the Ethernet header, whose source is a MAC.
    let client_mac: Mac = unsafe { *(&raw const (*packet.ethernet).source).cast() };
    // SAFETY: claimed by this CPU; nobody reads it before it is published.
    let record = unsafe { &mut *found.record() };
    *record = HalfOpen4 {
        client: key.tuple,
        client_segment: key.segment,
        client_next_hop,
        to,
        backend_segment: backend.segment,
        backend_next_hop: backend.next_hop,
        client_sequence: packet.headers.sequence(),
        backend_sequence: 0,
        client_mac,
        backend: backend_id,
        frontend: frontend.id,
        tenant: frontend.tenant,
        first_syn: now,
        last_seen: now,
        state: 0,
    };
    found.publish();
    Ok(to_backend(context, packet, &to, hop, frontend))
}

/// What a half-open record says of its backend.
struct Target {
    frontend: u16,
    backend: u16,
    segment: u16,
}

impl Target {
    #[inline(always)]
    const fn of(record: &HalfOpen4) -> Self {
        Self { frontend: record.frontend, backend: record.backend, segment: record.backend_segment }
    }

    /// Whether a connection that began before may end where it began: a NodePort may have become another's while the handshake was
    /// under way. `None`: backend or port are not in the plan any more, and nobody else's.
    #[inline(always)]
    fn is_same(&self, frontend: &Frontend, to: &Tuple4) -> Option<bool> {
        if self.frontend != frontend.id {
            return Some(false);
        }
        let backend = BACKENDS.get(u32::from(self.backend))?;
        let present = backend.flags & BACKEND_PRESENT != 0;
        if present
            && (u32::from_ne_bytes(unmapped(&backend.address)) != to.destination_be || backend.segment != self.segment)
        {
            return Some(false);
        }
        let port_be = if present && backend.port_be != 0 { backend.port_be } else { frontend.target_port_be };
        if port_be == to.destination_port_be {
            return present.then_some(true);
        }
        let taken = local_address(0, self.segment, to.destination_port_be)?.flags & ADDRESS_TARGET_PORT != 0;
        taken.then_some(false)
    }
}

/// Whether an address is in the segment's prefix (which all are where none is known).
#[inline(always)]
fn on_link(segment: &Segment, address_be: u32) -> bool {
    (address_be ^ segment.network4_be) & segment.mask4_be == 0
}

/// Addresses that no client can have.
#[inline(always)]
fn check_source(packet: &Packet<'_>, frontend: &Frontend) -> Result<(), Refusal> {
    let tuple = &packet.key.tuple;
    if tuple.source_be == tuple.destination_be {
        return Err(refuse(Reason::Land, frontend.tenant));
    }
    let key = AddressKey { address: mapped(tuple.source_be.to_ne_bytes()), segment: packet.key.segment, port_be: 0 };
    // Our addresses are on-link: others are not looked for.
    let on_link = on_link(packet.segment, tuple.source_be);
    // SAFETY: the flags are read at once. A backend may be a client too (one-armed); our own addresses may not.
    let flags = if on_link { unsafe { ADDRESSES.get(key) }.map_or(0, |address| address.flags) } else { 0 };
    if !plausible_source4(tuple.source_be) || flags & !ADDRESS_BACKEND != 0 {
        return Err(refuse(Reason::BadSource, frontend.tenant));
    }
    if frontend.source_ranges != 0 {
        // Ranges are not served yet: closed, never open by omission.
        return Err(refuse(Reason::SourceRange, frontend.tenant));
    }
    Ok(())
}

/// The tenant's limits.
#[inline(always)]
fn admit(packet: &Packet<'_>, frontend: &Frontend) -> Result<(), Refusal> {
    let Some(limits) = TENANTS.get(u32::from(frontend.tenant)) else { return Ok(()) };
    let Some(used) = TENANT_USE.get_ptr_mut(u32::from(frontend.tenant)) else { return Ok(()) };
    // SAFETY: map values, which the verifier checks; words are changed atomically.
    unsafe {
        // An end that is counted before its beginning makes the count wrap: as signed, it is below every limit.
        if limits.max_flows != 0 && (*used).flows as i64 >= i64::from(limits.max_flows) {
            refused(frontend);
            return Err(refuse(Reason::TenantFlows, frontend.tenant));
        }
        if limits.new_flows_per_second != 0 {
            let per_second = u64::from(packet.settings.ticks_per_second_256) | 1;
            let second = u64::from(packet.now) * 256 / per_second;
            let window = (*used).window;
            if window != second && compare_and_swap(&raw mut (*used).window, window, second) {
                (*used).new_flows = 0;
            }
            if fetch_add(&raw mut (*used).new_flows, 1) >= u64::from(limits.new_flows_per_second) {
                return Err(refuse(Reason::TenantRate, frontend.tenant));
            }
        }
    }
    Ok(())
}

/// The backend that the lookup table names.
#[inline(always)]
fn choose(frontend: &Frontend, hash: u64) -> Result<u16, Refusal> {
    if frontend.table_size == 0 {
        return Err(nobody(frontend));
    }
    let slot = hash::slot(hash, frontend.table_size);
    let Some(chunk) = MAGLEV.get_ptr(frontend.table.wrapping_add(slot / CHUNK_SLOTS)) else {
        return Err(refuse(Reason::Internal, frontend.tenant));
    };
    // SAFETY: the index is masked to the chunk's slots.
    let id = unsafe { *chunk.cast::<u16>().add((slot % CHUNK_SLOTS) as usize) };
    if id == 0 {
        return Err(nobody(frontend));
    }
    Ok(id)
}

#[inline(always)]
fn nobody(frontend: &Frontend) -> Refusal {
    refused(frontend);
    let quiet = frontend.flags & FRONTEND_UNSERVED_DROP != 0;
    refuse(if quiet { Reason::NoBackendQuiet } else { Reason::NoBackend }, frontend.tenant)
}

#[inline(always)]
fn refused(frontend: &Frontend) {
    if let Some(events) = FRONTEND_EVENTS.get_ptr_mut(u32::from(frontend.id)) {
        // SAFETY: this CPU's value.
        unsafe { (*events).refused += 1 };
    }
}

/// A client's packet after its SYN: the acknowledgement of the backend's sequence number proves that the client receives.
#[inline(always)]
pub(crate) fn prove(context: &XdpContext) -> Outcome {
    let packet = &mut Packet::parse(context)?;
    let Some(frontend) = packet.frontend() else { return stage(context, STAGE_ANSWER) };
    let (settings, now, key) = (packet.settings, packet.now, packet.key);
    let flags = packet.headers.tcp.flags;
    if !tcp::valid_flags(flags) {
        return Err(refuse(Reason::BadFlags, frontend.tenant));
    }
    let hash = hash::flow4(&settings.seed, &key);
    let Some(found) = find_client(&key, hash, frontend.snat_first, frontend.snat_last, now, settings) else {
        return Err(refuse(Reason::NoFlow, frontend.tenant));
    };
    // SAFETY: a map value, which the verifier checks; believed only if nobody took the record meanwhile.
    let (client, to, next_hop, client_sequence, backend_sequence, state, target) = unsafe {
        let record = &*found.record();
        (
            record.client,
            record.to,
            record.backend_next_hop,
            record.client_sequence,
            record.backend_sequence,
            record.state,
            Target::of(record),
        )
    };
    if !found.unchanged() || client != key.tuple {
        return Err(refuse(Reason::NoFlow, frontend.tenant));
    }
    if target.is_same(frontend, &to) == Some(false) {
        found.release(tag::LIVE);
        return Err(refuse(Reason::NoFlow, frontend.tenant));
    }
    let expected = client_sequence.wrapping_add(1);
    if !tcp::near(packet.headers.sequence(), expected) {
        return Err(refuse(Reason::Unproven, frontend.tenant));
    }
    if flags & RST != 0 {
        // The client gives up. Only the exact number counts: nothing is proven yet.
        if packet.headers.sequence() == expected || packet.headers.sequence() == client_sequence {
            found.release(tag::LIVE);
        }
        let hop = hop_to_backend(packet, next_hop, frontend)?;
        return Ok(to_backend(context, packet, &to, hop, frontend));
    }
    let proven = state & HALF_OPEN_ANSWERED != 0
        && flags & ACK != 0
        && packet.headers.acknowledgement() == backend_sequence.wrapping_add(1);
    if !proven {
        return Err(refuse(Reason::Unproven, frontend.tenant));
    }
    let hop = hop_to_backend(packet, next_hop, frontend)?;
    match promote(&found, &key, packet.headers, now) {
        Ok(true) => {
            if let Some(events) = FRONTEND_EVENTS.get_ptr_mut(u32::from(frontend.id)) {
                // SAFETY: this CPU's value.
                unsafe { (*events).flows += 1 };
            }
        }
        Ok(false) => count(Reason::PromoteRace, frontend.tenant),
        Err(reason) => return Err(refuse(reason, frontend.tenant)),
    }
    Ok(to_backend(context, packet, &to, hop, frontend))
}

/// The next hop to a backend, if the packet can go there now.
#[inline(always)]
fn hop_to_backend(packet: &Packet<'_>, next_hop: u16, frontend: &Frontend) -> Result<&'static NextHop, Refusal> {
    let no = |reason| refuse(reason, frontend.tenant);
    let (hop, resolved) = resolve(next_hop, packet.headers.total_length(), packet.segment).map_err(no)?;
    if !resolved {
        return Err(no(Reason::NoNeighbour));
    }
    if packet.headers.ip.ttl <= 1 {
        return Err(no(Reason::TtlExceeded));
    }
    Ok(hop)
}

/// Rewrites a client's packet as a half-open record says and sends it.
#[inline(always)]
fn to_backend(context: &XdpContext, packet: &mut Packet<'_>, to: &Tuple4, hop: &NextHop, frontend: &Frontend) -> u32 {
    if packet.headers.tcp.flags & SYN != 0 {
        clamp_mss(context, packet, u32::from(hop.mtu));
    }
    count_traffic(frontend.id, false, packet.headers.total_length());
    packet.headers.rewrite(&packet.key.tuple, to);
    send(packet.ethernet, hop, mac_pointer(&hop.destination))
}

/// Options of a SYN that are looked at before the search for its MSS ends. Hosts send it first, or after padding.
const OPTIONS: u32 = 12;

/// Lowers the MSS of a SYN or SYN-ACK to what fits both ways; never raises it, never adds one (RFC 9293 §3.7.1).
#[inline(always)]
fn clamp_mss(context: &XdpContext, packet: &mut Packet<'_>, egress_mtu: u32) {
    let limit = packet.settings.max_mss;
    if limit == 0 {
        return;
    }
    let mtu = if egress_mtu < packet.segment.mtu { egress_mtu } else { packet.segment.mtu };
    let limit = if mss4(mtu) < limit { mss4(mtu) } else { limit };
    let options = packet.headers.tcp_header_length() as usize - 20;
    let (mut offset, mut seen, most) = (0usize, 0, opaque::<OPTIONS>());
    while seen < most && offset + 4 <= options {
        let Some(option) = at::<[u8; 4]>(context, ETHERNET + IPV4_TCP + (offset & 63)) else { return };
        // SAFETY: `at` has bounds-checked the four bytes.
        let option = unsafe { &mut *option };
        match option[0] {
            OPTION_END => return,
            OPTION_NONE => offset += 1,
            OPTION_MSS => {
                let old = [option[2], option[3]];
                if option[1] == 4 && u32::from(u16::from_be_bytes(old)) > limit {
                    let new = (limit as u16).to_be_bytes();
                    [option[2], option[3]] = new;
                    packet.headers.tcp.checksum = mss_checksum(packet.headers.tcp.checksum, old, new, offset & 1 != 0);
                }
                return;
            }
            _ if option[1] < 2 => return,
            _ => offset += option[1] as usize,
        }
        seen += 1;
    }
}

/// What is not to a frontend: a backend's answer, a stray reply, or the host's own.
#[inline(always)]
pub(crate) fn answer(context: &XdpContext) -> Outcome {
    let packet = &mut Packet::parse(context)?;
    let tuple = packet.key.tuple;
    let Some(address) = local_address(tuple.destination_be, packet.key.segment, 0) else {
        return stage(context, STAGE_LOCAL);
    };
    let port = u16::from_be(tuple.destination_port_be);
    if address.flags & ADDRESS_SNAT == 0 || port < address.snat_first || port > address.snat_last {
        return stage(context, STAGE_LOCAL);
    }
    let to = Tuple4 {
        source_be: tuple.destination_be,
        destination_be: tuple.source_be,
        source_port_be: tuple.destination_port_be,
        destination_port_be: tuple.source_port_be,
    };
    if let Some(found) = find_backend(&to, packet.key.segment, packet.now) {
        return from_backend(context, packet, &to, &found);
    }
    // Not the host's TCP: it would reset what it does not know. A SYN is nobody's reply.
    if packet.headers.tcp.flags & (SYN | ACK) != SYN
        && local_address(tuple.source_be, packet.key.segment, 0)
            .is_some_and(|address| address.flags & ADDRESS_BACKEND != 0)
        && local_address(0, packet.key.segment, tuple.source_port_be)
            .is_some_and(|port| port.flags & ADDRESS_TARGET_PORT != 0)
    {
        let quiet = packet.settings.flags & SETTING_MIGRATING != 0;
        return Err(refuse(if quiet { Reason::StrayReplyQuiet } else { Reason::StrayReply }, address.tenant));
    }
    stage(context, STAGE_LOCAL)
}

#[inline(always)]
fn local_address(address_be: u32, segment: u16, port_be: u16) -> Option<LocalAddress> {
    let address = if port_be == 0 { mapped(address_be.to_ne_bytes()) } else { [0; 16] };
    // SAFETY: copied at once.
    unsafe { ADDRESSES.get(AddressKey { address, segment, port_be }) }.copied()
}

/// A backend's packet on a half-open connection.
#[inline(always)]
fn from_backend(context: &XdpContext, packet: &mut Packet<'_>, to: &Tuple4, found: &Found) -> Outcome {
    // SAFETY: a map value, which the verifier checks; believed only if nobody took the record meanwhile.
    let record = unsafe { &mut *found.record() };
    let (client, client_next_hop, sequence, tenant, frontend, mac) = (
        record.client,
        record.client_next_hop,
        record.client_sequence,
        record.tenant,
        record.frontend,
        record.client_mac,
    );
    if record.to != *to || !found.unchanged() {
        return Err(refuse(Reason::StrayReplyQuiet, 0));
    }
    let no = |reason| refuse(reason, tenant);
    let flags = packet.headers.tcp.flags;
    // Both a SYN-ACK and a refusal acknowledge the client's SYN (RFC 9293 §3.10.7.3).
    if flags & ACK == 0 || packet.headers.acknowledgement() != sequence.wrapping_add(1) {
        return Err(no(Reason::StaleAnswer));
    }
    let length = packet.headers.total_length();
    let (hop, own_mac) = resolve(client_next_hop, length, packet.segment).map_err(no)?;
    if packet.headers.ip.ttl <= 1 {
        return Err(no(Reason::TtlExceeded));
    }
    if flags & RST != 0 {
        count(Reason::BackendRefused, tenant);
        found.release(tag::LIVE);
    } else if flags & SYN != 0 {
        record.backend_sequence = packet.headers.sequence();
        record.last_seen = packet.now;
        record.state |= HALF_OPEN_ANSWERED;
        clamp_mss(context, packet, u32::from(hop.mtu));
    }
    count_traffic(frontend, true, length);
    let back = Tuple4 {
        source_be: client.destination_be,
        destination_be: client.source_be,
        source_port_be: client.destination_port_be,
        destination_port_be: client.source_port_be,
    };
    packet.headers.rewrite(&packet.key.tuple, &back);
    let destination = if own_mac { mac_pointer(&hop.destination) } else { mac_pointer(&mac) };
    Ok(send(packet.ethernet, hop, destination))
}
