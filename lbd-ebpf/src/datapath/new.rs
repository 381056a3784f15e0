//! TCP packets of no live flow: opening, answering, proving, refusing.

use aya_ebpf::programs::XdpContext;
use lbd_common::abi::{
    FLOW_ADOPTED, FLOW_FIN, FLOW_PEER_FIN, FLOW_REPLIED, FRONTEND_ADOPT, FlowKey, Frontend, HALF_OPEN_ANSWERED,
    HALF_OPEN_ATTEMPT_SHIFT, HalfOpen, Making, NextHop, SETTING_MIGRATING, STAGE_LOCAL, Settings, Tuple,
};
use lbd_common::breaker;
use lbd_common::half_open as tag;
use lbd_common::hash;
use lbd_common::packet::{
    ETHERNET, IpHeader as _, OPTION_END, OPTION_MSS, OPTION_NONE, TCP, TcpPacket, mss, mss_checksum,
};
use lbd_common::reason::Reason;
use lbd_common::tcp::{self, ACK, FIN, RST, SYN};

use super::age::write_reply;
use super::choice::{
    Client, Kind, Target, admit, announce, choose, first_port, frontend_of, over_limit, prepare, promoted, refused,
    reply_to, write_key,
};
use super::context::{
    Arrival, Outcome, Refusal, at, count, mac_pointer, now, opaque, refuse, resolve, send, settings, tcp_packet,
};
use super::edge::count_traffic;
use super::half_open::{First, Found, Progress, allocate, of_backend, of_client, promote};
use super::maps::{BACKEND_USE, Tables};
use super::words::Key;

/// What all of this stage works with. The client's key, and where the packet shall go, are in `making`.
struct Packet<'a, A: Tables> {
    arrival: Arrival,
    headers: &'a mut TcpPacket<A>,
    making: *mut Making<A>,
    now: u32,
    settings: &'static Settings,
}

impl<'a, A: Tables> Packet<'a, A> {
    #[inline(always)]
    fn parse(context: &'a XdpContext) -> Result<Self, Refusal> {
        let arrival = Arrival::in_stage(context).ok_or(refuse(Reason::Internal, 0))?;
        let headers = tcp_packet::<A>(context).map_err(|reason| refuse(reason, arrival.segment.tenant))?;
        let making = A::making().ok_or(refuse(Reason::Internal, 0))?;
        // SAFETY: `tcp_packet` has bounds-checked the headers; `making` is this CPU's value.
        let headers = unsafe {
            write_key(making, headers, arrival.segment.id, TCP);
            &mut *headers
        };
        Ok(Self { arrival, headers, making, now: now(), settings: settings()? })
    }

    #[inline(always)]
    fn client(&self) -> Client<A> {
        Client { segment: self.arrival.segment, making: self.making, now: self.now, settings: self.settings }
    }

    /// What the packet says as the first of a flow.
    #[inline(always)]
    fn first(&self, state: u16) -> First {
        // The bare ACK may be lost, and the proof be a FIN.
        let fin = self.headers.tcp.flags & FIN != 0;
        First {
            length: self.headers.total_length(),
            sequence: self.headers.sequence_end(),
            acknowledged: self.headers.acknowledgement(),
            forward: state | if fin { FLOW_FIN } else { 0 },
            reverse: state | if fin { FLOW_PEER_FIN } else { 0 },
        }
    }
}

/// A SYN: a client opens a connection.
#[inline(always)]
pub(crate) fn open<A: Tables>(context: &XdpContext) -> Outcome {
    let packet = &mut Packet::<A>::parse(context)?;
    let Some(frontend) = frontend_of(packet.making) else { return packet.arrival.go(context, A::STAGES.answer) };
    let (settings, now, making) = (packet.settings, packet.now, packet.making);
    let no = |reason| refuse(reason, frontend.tenant);
    if !tcp::valid_flags(packet.headers.tcp.flags) {
        return Err(no(Reason::BadFlags));
    }
    if let Some(reason) = over_limit::<A>(frontend, now, settings) {
        return Err(no(reason));
    }
    // SAFETY: this CPU's value.
    let hash = unsafe { hash::flow(&settings.seed, &(*making).key) };
    let mut attempt = 0;
    let mut avoid = 0;
    let existing = of_client::<A>(hash, first_port(making, frontend, hash), now);
    if let Some(found) = existing {
        // SAFETY: this CPU's value.
        let Some(record) = found.copy(making).filter(|record| record.client.is(unsafe { &(*making).key.tuple })) else {
            return Err(no(Reason::HalfOpenFull));
        };
        let again = record.client_sequence == packet.headers.sequence()
            && Target::of(record).is_same(frontend, &record.to) == Some(true);
        if again && !should_move(record, now, settings) {
            // Retransmitted: the same way again.
            // SAFETY: a map value, which the verifier checks.
            unsafe { (*found.record()).last_seen = now };
            let hop = hop_to_backend(packet, record.backend_next_hop, frontend)?;
            return Ok(to_backend(context, packet, &record.to, hop, frontend));
        }
        if again {
            attempt = (record.state >> HALF_OPEN_ATTEMPT_SHIFT) + 1;
            avoid = record.backend;
        }
        // The client has started over, or the way leads elsewhere now, or nobody answers there.
        found.release(tag::LIVE, record.tenant, now);
    }

    let expires = admit(&packet.client(), frontend, Kind::Tcp)?;
    let choice = choose(&packet.client(), frontend, hash, attempt, avoid)?;
    let own = prepare(making, frontend, &choice, hash, TCP);
    // Asked before anything is claimed: a packet that can't go needs no state.
    let hop = hop_to_backend(packet, choice.backend.next_hop, frontend)?;
    let found = allocate(making, own, frontend.tenant, now, expires).map_err(|reason| {
        refused(frontend);
        no(reason)
    })?;
    // SAFETY: claimed by this CPU; nobody reads it before it is published.
    let record = unsafe { &mut *found.record() };
    packet.client().fill(record, packet.arrival.ethernet, frontend, &choice);
    record.client_sequence = packet.headers.sequence();
    record.backend_sequence = 0;
    record.state = attempt << HALF_OPEN_ATTEMPT_SHIFT;
    found.publish(frontend.tenant, now);
    announce(choice.id, now);
    // SAFETY: this CPU's value.
    Ok(to_backend(context, packet, unsafe { &(*making).to }, hop, frontend))
}

/// Whether a SYN that comes again should go to the next candidate.
#[inline(always)]
fn should_move<A: Tables>(record: &HalfOpen<A>, now: u32, settings: &Settings) -> bool {
    record.state & HALF_OPEN_ANSWERED == 0
        && BACKEND_USE.get(u32::from(record.backend)).is_some_and(|used| {
            breaker::should_move(used, record.first_syn, now, breaker::second(settings.ticks_per_second_256))
        })
}

/// A client's packet after its SYN: the acknowledgement of the backend's sequence number proves that the client receives.
#[inline(always)]
pub(crate) fn prove<A: Tables>(context: &XdpContext) -> Outcome {
    let packet = &mut Packet::<A>::parse(context)?;
    let Some(frontend) = frontend_of(packet.making) else { return packet.arrival.go(context, A::STAGES.answer) };
    let (settings, now, making) = (packet.settings, packet.now, packet.making);
    let no = |reason| refuse(reason, frontend.tenant);
    let flags = packet.headers.tcp.flags;
    if !tcp::valid_flags(flags) {
        return Err(no(Reason::BadFlags));
    }
    // SAFETY: this CPU's value.
    let hash = unsafe { hash::flow(&settings.seed, &(*making).key) };
    let quiet = settings.flags & SETTING_MIGRATING != 0;
    let unknown = if quiet { Reason::NoFlowQuiet } else { Reason::NoFlow };
    let Some(found) = of_client::<A>(hash, first_port(making, frontend, hash), now) else {
        // SAFETY: this CPU's value.
        if is_made::<A>(unsafe { &(*making).key }) {
            return packet.arrival.go(context, A::STAGES.flags);
        }
        let adopting = frontend.flags & FRONTEND_ADOPT != 0 && settings.adopts(now) && flags & (ACK | RST) == ACK;
        return if adopting { packet.arrival.go(context, A::STAGES.adopt) } else { Err(no(unknown)) };
    };
    // SAFETY: this CPU's value.
    let key = unsafe { &(*making).key };
    let Some(record) = found.copy(making).filter(|record| record.client.is(&key.tuple)) else {
        return if is_made::<A>(key) { packet.arrival.go(context, A::STAGES.flags) } else { Err(no(Reason::NoFlow)) };
    };
    if Target::of(record).is_same(frontend, &record.to) == Some(false) {
        found.release(tag::LIVE, record.tenant, now);
        return Err(no(Reason::NoFlow));
    }
    let expected = record.client_sequence.wrapping_add(1);
    if !tcp::near(packet.headers.sequence(), expected) {
        return Err(no(Reason::Unproven));
    }
    if flags & RST != 0 {
        // The client gives up. Only the exact number counts: nothing is proven yet.
        if packet.headers.sequence() == expected || packet.headers.sequence() == record.client_sequence {
            found.release(tag::LIVE, record.tenant, now);
        }
        let hop = hop_to_backend(packet, record.backend_next_hop, frontend)?;
        return Ok(to_backend(context, packet, &record.to, hop, frontend));
    }
    let proven = record.state & HALF_OPEN_ANSWERED != 0
        && flags & ACK != 0
        && packet.headers.acknowledgement() == record.backend_sequence.wrapping_add(1);
    // One that acknowledges more may already be the next, when the client's proof is at another CPU.
    if !proven {
        match found.progress() {
            Progress::Becomes => (),
            Progress::Gone if is_made::<A>(key) => return packet.arrival.go(context, A::STAGES.flags),
            Progress::Gone | Progress::Waits => return Err(no(Reason::Unproven)),
        }
    }
    let hop = hop_to_backend(packet, record.backend_next_hop, frontend)?;
    match promote(&found, making, &packet.first(FLOW_REPLIED), now) {
        Ok(true) => promoted(frontend),
        Ok(false) => count(Reason::PromoteRace, frontend.tenant),
        Err(reason) => return Err(no(reason)),
    }
    Ok(to_backend(context, packet, &record.to, hop, frontend))
}

/// A packet from the middle of a connection that another host, or an earlier life of this one, has forwarded: it goes on as a new flow would go,
/// with the port that the hash names.
#[inline(always)]
pub(crate) fn adopt<A: Tables>(context: &XdpContext) -> Outcome {
    let packet = &mut Packet::<A>::parse(context)?;
    let (now, making) = (packet.now, packet.making);
    let frontend = frontend_of(making).ok_or(refuse(Reason::Internal, 0))?;
    let no = |reason| refuse(reason, frontend.tenant);
    // SAFETY: this CPU's value.
    let hash = unsafe { hash::flow(&packet.settings.seed, &(*making).key) };
    let expires = admit(&packet.client(), frontend, Kind::Tcp)?;
    let choice = choose(&packet.client(), frontend, hash, 0, 0)?;
    let own = prepare(making, frontend, &choice, hash, TCP);
    let hop = hop_to_backend(packet, choice.backend.next_hop, frontend)?;
    let port = first_port(making, frontend, hash);
    // SAFETY: this CPU's value.
    unsafe { ((*making).first, (*making).last) = (port, port) };
    let found = allocate(making, own, frontend.tenant, now, expires).map_err(|_| no(Reason::NoFlow))?;
    // SAFETY: claimed by this CPU; nobody reads it before it is published.
    let record = unsafe { &mut *found.record() };
    packet.client().fill(record, packet.arrival.ethernet, frontend, &choice);
    record.client_sequence = packet.headers.sequence().wrapping_sub(1);
    record.backend_sequence = packet.headers.acknowledgement().wrapping_sub(1);
    record.state = HALF_OPEN_ANSWERED;
    found.publish(frontend.tenant, now);
    if found.copy(making).is_none() {
        return Err(no(Reason::NoFlow));
    }
    match promote(&found, making, &packet.first(FLOW_REPLIED | FLOW_ADOPTED), now) {
        Ok(true) => promoted(frontend),
        Ok(false) => count(Reason::PromoteRace, frontend.tenant),
        Err(reason) => return Err(no(reason)),
    }
    // SAFETY: this CPU's value.
    Ok(to_backend(context, packet, unsafe { &(*making).to }, hop, frontend))
}

/// The next hop to a backend, if the packet can go there now.
#[inline(always)]
fn hop_to_backend<A: Tables>(
    packet: &Packet<'_, A>,
    next_hop: u16,
    frontend: &Frontend,
) -> Result<&'static NextHop, Refusal> {
    super::choice::hop_to_backend(
        packet.arrival.segment,
        next_hop,
        packet.headers.total_length(),
        packet.headers.ip.hops(),
        frontend,
    )
}

/// Rewrites a client's packet as a half-open record says and sends it.
#[inline(always)]
fn to_backend<A: Tables>(
    context: &XdpContext,
    packet: &mut Packet<'_, A>,
    to: &Tuple<A>,
    hop: &NextHop,
    frontend: &Frontend,
) -> u32 {
    if packet.headers.tcp.flags & SYN != 0 {
        clamp_mss(context, packet, u32::from(hop.mtu));
    }
    count_traffic(frontend.id, false, packet.headers.total_length());
    // SAFETY: this CPU's value.
    unsafe { packet.headers.rewrite(&(*packet.making).key.tuple, to) };
    send(context, packet.arrival.ethernet, hop, mac_pointer(&hop.destination))
}

/// Options of a SYN that are looked at before the search for its MSS ends. Hosts send it first, or after padding.
const OPTIONS: u32 = 12;

/// Lowers the MSS of a SYN or SYN-ACK to what fits both ways; never raises it, never adds one (RFC 9293 §3.7.1).
#[inline(always)]
fn clamp_mss<A: Tables>(context: &XdpContext, packet: &mut Packet<'_, A>, egress_mtu: u32) {
    let limit = packet.settings.max_mss;
    if limit == 0 {
        return;
    }
    // The setting is for IPv4, whose header is 20 bytes shorter.
    let limit = if A::IS_V6 { limit.saturating_sub(20) } else { limit };
    let mtu = if egress_mtu < packet.arrival.segment.mtu { egress_mtu } else { packet.arrival.segment.mtu };
    let limit = if mss::<A>(mtu) < limit { mss::<A>(mtu) } else { limit };
    let options = packet.headers.tcp_header_length() as usize - 20;
    let (mut offset, mut seen, most) = (0usize, 0, opaque::<OPTIONS>());
    while seen < most && offset + 4 <= options {
        let Some(option) = at::<[u8; 4]>(context, ETHERNET + TcpPacket::<A>::LENGTH + (offset & 63)) else { return };
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
pub(crate) fn answer<A: Tables>(context: &XdpContext) -> Outcome {
    let packet = &mut Packet::<A>::parse(context)?;
    let Some(reply) = reply_to(packet.making) else {
        // A SYN-ACK to a VIP answers nothing that this host has sent.
        return match frontend_of(packet.making) {
            Some(frontend) => Err(refuse(Reason::NoFlow, frontend.tenant)),
            None => packet.arrival.go(context, STAGE_LOCAL),
        };
    };
    if let Some(found) = of_backend(packet.making, packet.now) {
        return from_backend(context, packet, &found);
    }
    if reply_is_made(packet.making) {
        return packet.arrival.go(context, A::STAGES.flags);
    }
    // Not the host's TCP: it would reset what it does not know. A SYN is nobody's reply.
    if reply.from_backend && packet.headers.tcp.flags & (SYN | ACK) != SYN {
        let quiet = packet.settings.flags & SETTING_MIGRATING != 0;
        return Err(refuse(if quiet { Reason::StrayReplyQuiet } else { Reason::StrayReply }, reply.tenant));
    }
    packet.arrival.go(context, STAGE_LOCAL)
}

/// Whether there is a flow now, which there was not when the packet came: another CPU has promoted it since, with a packet that came at the
/// same time (a client's bare ACK and its first data), and its half-open record is gone.
#[inline(always)]
fn is_made<A: Tables>(key: &FlowKey<A>) -> bool {
    // SAFETY: a key in [`Making`].
    unsafe { Key::of(key) }.live().is_some()
}

/// The same for a backend's packet, whose tuple turned around is in [`Making::key`].
#[inline(always)]
fn reply_is_made<A: Tables>(making: *mut Making<A>) -> bool {
    // SAFETY: this CPU's value.
    is_made::<A>(unsafe { write_reply(making, &raw const (*making).key.tuple, (*making).key.segment, TCP) })
}

/// A backend's packet on a half-open connection.
#[inline(always)]
fn from_backend<A: Tables>(context: &XdpContext, packet: &mut Packet<'_, A>, found: &Found<A>) -> Outcome {
    let making = packet.making;
    // SAFETY: this CPU's value.
    let Some(record) = found.copy(making).filter(|record| record.to.is(unsafe { &(*making).key.tuple })) else {
        return if reply_is_made(making) {
            packet.arrival.go(context, A::STAGES.flags)
        } else {
            Err(refuse(Reason::StrayReplyQuiet, 0))
        };
    };
    let no = |reason| refuse(reason, record.tenant);
    let flags = packet.headers.tcp.flags;
    // Both a SYN-ACK and a refusal acknowledge the client's SYN (RFC 9293 §3.10.7.3).
    let fits = flags & ACK != 0 && packet.headers.acknowledgement() == record.client_sequence.wrapping_add(1);
    // One that acknowledges more may answer what the client has sent since, when its proof is at another CPU.
    if !fits {
        match found.progress() {
            Progress::Becomes => (),
            Progress::Gone if reply_is_made(making) => return packet.arrival.go(context, A::STAGES.flags),
            Progress::Gone | Progress::Waits => return Err(no(Reason::StaleAnswer)),
        }
    }
    let length = packet.headers.total_length();
    let (hop, own_mac) = resolve(record.client_next_hop, length, packet.arrival.segment).map_err(no)?;
    if packet.headers.ip.hops() <= 1 {
        return Err(no(Reason::TtlExceeded));
    }
    if flags & RST != 0 {
        count(Reason::BackendRefused, record.tenant);
        found.release(tag::LIVE, record.tenant, packet.now);
    } else if flags & SYN != 0 {
        // SAFETY: a map value, which the verifier checks.
        unsafe {
            let live = found.record();
            (*live).backend_sequence = packet.headers.sequence();
            (*live).last_seen = packet.now;
            (*live).state |= HALF_OPEN_ANSWERED;
            if let Some(used) = BACKEND_USE.get_ptr_mut(u32::from(record.backend)) {
                (*used).answered = packet.now;
                (*used).unanswered = 0;
            }
        }
        clamp_mss(context, packet, u32::from(hop.mtu));
    }
    count_traffic(record.frontend, true, length);
    // SAFETY: this CPU's value, which holds the packet's tuple turned around.
    let from = unsafe { (*making).key.tuple.turned() };
    packet.headers.rewrite(&from, &record.client.turned());
    let destination = if own_mac { mac_pointer(&hop.destination) } else { mac_pointer(&record.client_mac) };
    Ok(send(context, packet.arrival.ethernet, hop, destination))
}
