//! The hot path: packets of live flows.

use aya_ebpf::{bindings::xdp_action, programs::XdpContext};
use lbd_common::abi::{
    Address, Address4, Address6, FLOW_REPLIED, FLOW_REVERSE, Flow, SETTING_MIGRATING, STAGE_ARP, STAGE_LOCAL,
    STAGE_NEIGHBOUR, STAGE_TAGGED, Segment, traffic_index,
};
use lbd_common::packet::{ETHERNET, ICMPV6, IpHeader as _, Ipv6, TCP, TcpPacket, UDP, UdpPacket, ethertype};
use lbd_common::reason::Reason;
use lbd_common::tcp::{self, ACK, FIN, RST, SYN};

use super::context::{Arrival, Outcome, at, available, is_for, is_group, mac_pointer, now, refuse, resolve, send};
use super::maps::{FRONTEND_OWNERS, SETTINGS, TRAFFIC, Tables};
use super::words::{Key, Way, read};

/// Neighbour solicitation (RFC 4861).
const NEIGHBOUR_SOLICITATION: u8 = 135;

/// Decides which way a frame goes that arrived in the segment with this slot; `tag` is the one that was taken off.
#[inline(always)]
pub(crate) fn edge(context: &XdpContext, slot: u32, tag: u32) -> Outcome {
    let Some(arrival) = Arrival::new(context, slot, tag) else { return Ok(xdp_action::XDP_PASS) };
    let (segment, ethernet) = (arrival.segment, arrival.ethernet);
    // SAFETY: `Arrival` has bounds-checked the Ethernet header.
    let kind = unsafe { (*ethernet).ethertype };
    if kind == ethertype::VLAN || kind == ethertype::SERVICE_VLAN {
        // That stage lets no second tag through.
        return if tag == 0 {
            arrival.go(context, STAGE_TAGGED)
        } else {
            Err(refuse(Reason::DoubleTag, segment.tenant))
        };
    }
    if segment.id == 0 {
        return Ok(xdp_action::XDP_PASS);
    }
    if kind == ethertype::ARP {
        return arrival.go(context, STAGE_ARP);
    }
    if !is_for(ethernet, segment) {
        if is_group(ethernet) {
            return elsewhere(context, &arrival, kind);
        }
        return Err(refuse(Reason::NotOurMac, segment.tenant));
    }
    if kind == ethertype::IPV4 {
        transport::<Address4>(context, &arrival)
    } else if kind == ethertype::IPV6 {
        transport::<Address6>(context, &arrival)
    } else {
        arrival.go(context, STAGE_LOCAL)
    }
}

/// What is neither TCP nor UDP to us.
#[inline(always)]
fn elsewhere(context: &XdpContext, arrival: &Arrival, kind: u16) -> Outcome {
    if kind == ethertype::IPV6
        && let Some(ip) = at::<Ipv6>(context, ETHERNET)
        && let Some(message) = at::<u8>(context, ETHERNET + size_of::<Ipv6>())
    {
        // SAFETY: `at` has bounds-checked both.
        let solicitation = unsafe { (*ip).next_header == ICMPV6 && *message == NEIGHBOUR_SOLICITATION };
        if solicitation {
            return arrival.go(context, STAGE_NEIGHBOUR);
        }
    }
    arrival.go(context, STAGE_LOCAL)
}

/// Looks a packet's flow up.
#[inline(always)]
fn transport<A: Tables>(context: &XdpContext, arrival: &Arrival) -> Outcome {
    if let Some(packet) = at::<TcpPacket<A>>(context, ETHERNET) {
        // SAFETY: `at` has bounds-checked the headers.
        let packet = unsafe { &mut *packet };
        if packet.ip.protocol() == TCP {
            if packet.verify(available(context, ETHERNET)).is_err() {
                return arrival.go(context, STAGE_LOCAL);
            }
            // SAFETY: the tuple of a checked packet, which stays as it is until the half is read.
            let key = unsafe { Key::new(packet.tuple_mut(), arrival.segment.id, TCP) };
            let Some(flow) = key.flow() else {
                return unknown::<A>(context, arrival, packet.tcp.flags);
            };
            if packet.tcp.flags & (SYN | FIN | RST) != 0 {
                return arrival.go(context, A::STAGES.flags);
            }
            return match translate(context, arrival, packet, flow, &key, true) {
                Some(outcome) => outcome,
                None => unknown::<A>(context, arrival, packet.tcp.flags),
            };
        }
    }
    if let Some(packet) = at::<UdpPacket<A>>(context, ETHERNET) {
        // SAFETY: `at` has bounds-checked the headers.
        let packet = unsafe { &mut *packet };
        if packet.ip.protocol() == UDP {
            if packet.verify(available(context, ETHERNET)).is_err() {
                return arrival.go(context, STAGE_LOCAL);
            }
            // SAFETY: as above.
            let key = unsafe { Key::new(packet.tuple_mut(), arrival.segment.id, UDP) };
            if let Some(flow) = key.flow()
                && let Some(outcome) = translate(context, arrival, packet, flow, &key, true)
            {
                return outcome;
            }
            return arrival.go(context, A::STAGES.datagram);
        }
    }
    elsewhere(context, arrival, if A::IS_V6 { ethertype::IPV6 } else { ethertype::IPV4 })
}

/// Goes on with a TCP packet of no live flow.
#[inline(always)]
pub(crate) fn unknown<A: Tables>(context: &XdpContext, arrival: &Arrival, flags: u8) -> Outcome {
    match flags & (SYN | ACK) {
        SYN => arrival.go(context, A::STAGES.open),
        ACK | 0 => arrival.go(context, A::STAGES.prove),
        _ => arrival.go(context, A::STAGES.answer),
    }
}

/// Ticks without a packet after which a repeated one is looked at closer: 32 to 320 ms, less than hosts wait before they send again.
const PAUSE: u32 = 2;

/// A packet that a flow can translate.
pub(crate) trait Transport<A: Tables> {
    /// IP protocol number.
    const PROTOCOL: u8;

    /// Length of the IP packet.
    fn length(&self) -> u32;
    /// TTL or hop limit.
    fn hops(&self) -> u8;
    /// Addresses and ports become the way's, the TTL one less; all checksums follow.
    fn follow(&mut self, way: &Way<A>);
    /// Follows the packet in its half. True if somebody must look closer before the packet goes.
    fn track(&self, flow: &mut Flow<A>, state: u16) -> bool;
    /// The stage that looks closer.
    fn closer() -> u32;
}

impl<A: Tables> Transport<A> for TcpPacket<A> {
    const PROTOCOL: u8 = TCP;

    #[inline(always)]
    fn length(&self) -> u32 {
        self.total_length()
    }

    #[inline(always)]
    fn hops(&self) -> u8 {
        self.ip.hops()
    }

    #[inline(always)]
    fn follow(&mut self, way: &Way<A>) {
        way.to.write(self.tuple_mut());
        self.forward(way.change);
    }

    /// A packet far from the flow's sequence numbers is forwarded (its receiver judges it) but moves nothing here. What a client sends
    /// again after a pause is looked at closer: it may have another MAC now, where our answers do not reach it.
    #[inline(always)]
    fn track(&self, flow: &mut Flow<A>, state: u16) -> bool {
        let end = self.sequence_end();
        if !tcp::near(end, flow.sequence) {
            if tcp::after(end, flow.sequence) && migrating() {
                // What the programs of before have forwarded since the flow was copied.
                flow.last_seen = now();
                flow.acknowledged = self.acknowledgement();
                flow.sequence = end;
            }
            return false;
        }
        let (now, last) = (now(), flow.last_seen);
        flow.last_seen = now;
        flow.acknowledged = self.acknowledgement();
        if tcp::after(end, flow.sequence) {
            flow.sequence = end;
            return false;
        }
        state & FLOW_REVERSE == 0
            && tcp::elapsed(now, last) >= PAUSE
            && (end != flow.sequence || self.payload_length() != 0)
    }

    #[inline(always)]
    fn closer() -> u32 {
        A::STAGES.flags
    }
}

impl<A: Tables> Transport<A> for UdpPacket<A> {
    const PROTOCOL: u8 = UDP;

    #[inline(always)]
    fn length(&self) -> u32 {
        self.ip.total_length()
    }

    #[inline(always)]
    fn hops(&self) -> u8 {
        self.ip.hops()
    }

    #[inline(always)]
    fn follow(&mut self, way: &Way<A>) {
        way.to.write(self.tuple_mut());
        self.forward(way.change);
    }

    /// The first reply lengthens the flow's life.
    #[inline(always)]
    fn track(&self, flow: &mut Flow<A>, state: u16) -> bool {
        flow.last_seen = now();
        state & (FLOW_REVERSE | FLOW_REPLIED) == FLOW_REVERSE
    }

    #[inline(always)]
    fn closer() -> u32 {
        A::STAGES.replied
    }
}

/// Rewrites a packet by a half of a flow and sends it. `None`: the half is not (or no longer) this packet's flow. On the hot path
/// (`hot`), what needs a closer look goes to its stage.
#[inline(always)]
pub(crate) fn translate<A: Tables, P: Transport<A>>(
    context: &XdpContext,
    arrival: &Arrival,
    packet: &mut P,
    flow: *mut Flow<A>,
    key: &Key<A>,
    hot: bool,
) -> Option<Outcome> {
    let way = read(flow, key, P::PROTOCOL)?;
    let (next_hop, state) = (way.next_hop, way.state);
    let segment = arrival.segment;
    if packet.hops() <= 1 {
        return Some(Err(refuse(Reason::TtlExceeded, tenant_of(flow, segment))));
    }
    let length = packet.length();
    let (hop, own_mac) = match resolve(next_hop, length, segment) {
        Ok(found) => found,
        Err(reason) => return Some(Err(refuse(reason, tenant_of(flow, segment)))),
    };
    // SAFETY: a map value, which the verifier checks. Only counters and tracking are written, so that a lost race costs a
    // count, never a translation.
    unsafe {
        let destination = if own_mac {
            mac_pointer(&hop.destination)
        } else if state & FLOW_REVERSE != 0 {
            mac_pointer(&(*flow).own)
        } else {
            return Some(Err(refuse(Reason::NoNeighbour, tenant_of(flow, segment))));
        };
        let flow = &mut *flow;
        if packet.track(flow, state) && hot {
            return Some(arrival.go(context, P::closer()));
        }
        flow.bytes += u64::from(length);
        flow.packets = flow.packets.wrapping_add(1);
        if flow.packets == 0 {
            flow.packets_high = flow.packets_high.wrapping_add(1);
        }
        count_traffic(flow.frontend, state & FLOW_REVERSE != 0, length);
        packet.follow(&way);
        Some(Ok(send(context, arrival.ethernet, hop, destination)))
    }
}

/// Whether flows are being handed over to these programs.
#[inline(always)]
fn migrating() -> bool {
    SETTINGS.get(0).is_some_and(|settings| settings.flags & SETTING_MIGRATING != 0)
}

/// Counts a packet of `length` bytes for a frontend on this CPU.
#[inline(always)]
pub(crate) fn count_traffic(frontend: u16, reverse: bool, length: u32) {
    if let Some(traffic) = TRAFFIC.get_ptr_mut(traffic_index(frontend, reverse)) {
        // SAFETY: this CPU's value.
        unsafe {
            (*traffic).packets += 1;
            (*traffic).bytes += u64::from(length);
        }
    }
}

/// Whose flow it is: on the hub's segment only the flow knows.
#[inline(always)]
pub(crate) fn tenant_of<A: Address>(flow: *const Flow<A>, segment: &Segment) -> u16 {
    // SAFETY: a map value, which the verifier checks.
    let frontend = unsafe { (*flow).frontend };
    FRONTEND_OWNERS.get(u32::from(frontend)).map_or(segment.tenant, |owner| owner.tenant)
}
