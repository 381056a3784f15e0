//! What is no flow's: the host behind, groups, transit, and what VIPs do not serve.

use aya_ebpf::{bindings::xdp_action, programs::XdpContext};
use lbd_common::abi::{
    ADDRESS_BACKEND, ADDRESS_HOST, ADDRESS_HOST_PORT, ADDRESS_SNAT, ADDRESS_UNSERVED_DROP, ADDRESS_VIP, Address4,
    Address6, AddressKey, LocalAddress, SEGMENT_HOST_ACCESS_ICMP, SEGMENT_HOST_ACCESS_OWN, SEGMENT_HUB, SEGMENT_TENANT,
    Segment, TENANT_HOST_ACCESS_ICMP, TENANT_HOST_ACCESS_OWN,
};
use lbd_common::neighbour::{ADVERTISEMENT, SOLICITATION};
use lbd_common::packet::{self, ETHERNET, Family, IPV4, IPV6, IpHeader as _, Ipv4, Ipv6, ethertype};
use lbd_common::reason::Reason;
use lbd_common::tcp::{ACK, SYN};

use super::context::{Arrival, Outcome, at, available, is_group, refuse, tcp_packet, udp_packet};
use super::maps::{ADDRESSES, TENANTS};

/// Router advertisement (RFC 4861).
const ROUTER_ADVERTISEMENT: u8 = 134;
/// Redirect (RFC 4861).
const REDIRECT: u8 = 137;
/// Redirect (RFC 792).
const ICMP_REDIRECT: u8 = 5;
/// Router advertisement (RFC 1256).
const ICMP_ROUTER_ADVERTISEMENT: u8 = 9;
/// Extension headers (RFC 8200) that another header follows: hop-by-hop options, routing, fragment, destination options.
const EXTENSIONS: [u8; 4] = [0, 43, 44, 60];
/// Multicast listener messages (RFC 2710, RFC 3810), the only ones that need a hop-by-hop header.
const LISTENER: [u8; 4] = [130, 131, 132, 143];

/// Decides between the kernel and a counted drop. Nothing from here reaches another segment.
#[inline(always)]
pub(crate) fn local(context: &XdpContext) -> Outcome {
    let Arrival { segment, ethernet, .. } = Arrival::in_stage(context).ok_or(refuse(Reason::Internal, 0))?;
    // SAFETY: `Arrival` has bounds-checked the Ethernet header.
    let kind = unsafe { (*ethernet).ethertype };
    let group = is_group(ethernet);
    match kind {
        ethertype::IPV4 => ip::<Address4>(context, segment, group),
        ethertype::IPV6 => ip::<Address6>(context, segment, group),
        _ => Err(refuse(Reason::OtherProtocol, segment.tenant)),
    }
}

/// What the families do not have in common.
trait Local: Family {
    /// What a router tells its hosts, and neighbours each other: `Err` says what happens to it at once. Nothing of it comes from a
    /// tenant that could rule the host by it (`closed`: the segment is tenants' only).
    fn control(context: &XdpContext, header: &Self::Header, closed: bool) -> Result<(), Reason>;
    /// Whether an address is many hosts'.
    fn is_many(self, segment: &Segment) -> bool;
}

impl Local for Address4 {
    #[inline(always)]
    fn control(context: &XdpContext, header: &Ipv4, closed: bool) -> Result<(), Reason> {
        if !closed || header.protocol != packet::ICMP {
            return Ok(());
        }
        // The kernel finds the message behind options; here they are looked for nowhere.
        if header.version_length != 0x45 {
            return Err(Reason::IpOptions);
        }
        match message(context, IPV4)? {
            ICMP_REDIRECT | ICMP_ROUTER_ADVERTISEMENT => Err(Reason::RouterControl),
            _ => Ok(()),
        }
    }

    #[inline(always)]
    fn is_many(self, segment: &Segment) -> bool {
        let subnet = segment.mask4_be != u32::MAX && segment.mask4_be != 0;
        self.to_ne_bytes()[0] >= 224 || subnet && self | segment.mask4_be == u32::MAX
    }
}

impl Local for Address6 {
    #[inline(always)]
    fn control(context: &XdpContext, header: &Ipv6, closed: bool) -> Result<(), Reason> {
        if header.next_header == packet::ICMPV6 {
            return match message(context, IPV6)? {
                ROUTER_ADVERTISEMENT | REDIRECT if closed => Err(Reason::RouterControl),
                // What the host's own addresses on the segment need, whatever `host_access` says.
                SOLICITATION | ADVERTISEMENT => Err(Reason::NeighbourOther),
                _ => Ok(()),
            };
        }
        // Behind extension headers anything could hide (RFC 7113).
        if closed && EXTENSIONS.contains(&header.next_header) && !is_listener(context, header) {
            return Err(Reason::IpOptions);
        }
        Ok(())
    }

    #[inline(always)]
    fn is_many(self, _segment: &Segment) -> bool {
        lbd_common::neighbour::is_group(&self)
    }
}

/// Type of the ICMP message behind an IP header of `length` bytes.
#[inline(always)]
fn message(context: &XdpContext, length: usize) -> Result<u8, Reason> {
    // SAFETY: `at` has bounds-checked the type.
    at::<u8>(context, ETHERNET + length).map(|kind| unsafe { *kind }).ok_or(Reason::Malformed)
}

/// Whether a packet is a multicast listener message behind one hop-by-hop header of eight bytes.
#[inline(always)]
fn is_listener(context: &XdpContext, header: &Ipv6) -> bool {
    header.next_header == 0
        && at::<[u8; 9]>(context, ETHERNET + IPV6).is_some_and(|bytes| {
            // SAFETY: `at` has bounds-checked them.
            let bytes = unsafe { &*bytes };
            bytes[0] == packet::ICMPV6 && bytes[1] == 0 && LISTENER.contains(&bytes[8])
        })
}

/// What an address means in a segment, nothing if it is not there. Its tenant, or else the segment's, is whom to count for.
#[inline(always)]
pub(crate) fn address_in(segment: &Segment, address: [u8; 16]) -> LocalAddress {
    let key = AddressKey { address, segment: segment.id, port_be: 0 };
    // SAFETY: copied at once.
    let mut found = unsafe { ADDRESSES.get(key) }.copied().unwrap_or(LocalAddress::ZERO);
    if found.tenant == 0 {
        found.tenant = segment.tenant;
    }
    found
}

#[inline(always)]
fn ip<A: Local>(context: &XdpContext, segment: &Segment, group: bool) -> Outcome {
    let tenants = segment.flags & SEGMENT_TENANT != 0;
    let hub = segment.flags & SEGMENT_HUB != 0;
    let Some(header) = at::<A::Header>(context, ETHERNET) else {
        return Err(refuse(Reason::Malformed, segment.tenant));
    };
    // SAFETY: `at` has bounds-checked the header.
    let header = unsafe { &*header };
    let destination = header.destination();
    let address = address_in(segment, destination.mapped());
    let no = |reason| Err(refuse(reason, address.tenant));
    if address.flags & ADDRESS_VIP != 0 {
        return no(if group { Reason::BadDestination } else { vip::<A>(context, segment, header, address.flags) });
    }
    if hub && address.flags == 0 {
        let key = AddressKey { address: destination.mapped(), segment: 0, port_be: 0 };
        // SAFETY: copied at once.
        if let Some(vip) = unsafe { ADDRESSES.get(key) }.copied()
            && vip.flags & ADDRESS_VIP != 0
        {
            return Err(refuse(Reason::WrongSegment, vip.tenant));
        }
    }
    if tenants && let Err(reason) = A::control(context, header, !hub) {
        return no(reason);
    }
    // The kernel takes a packet in a group's frame for any of its addresses.
    if destination.is_many(segment) || group && !tenants {
        return no(Reason::Multicast);
    }
    if !tenants {
        return Ok(xdp_action::XDP_PASS);
    }
    if group {
        return no(Reason::BadDestination);
    }
    if address.flags & ADDRESS_HOST == 0 {
        return no(Reason::NotLocal);
    }
    if hub {
        return Ok(xdp_action::XDP_PASS);
    }
    no(if is_open::<A>(context, segment, header) { Reason::Host } else { Reason::HostClosed })
}

/// Why a packet to a VIP goes no further: nobody serves it, or its headers lie.
#[inline(always)]
fn vip<A: Local>(context: &XdpContext, segment: &Segment, header: &A::Header, flags: u16) -> Reason {
    if let Err(reason) = header.verify(available(context, ETHERNET)) {
        return reason;
    }
    let source = header.source();
    // A backend may be a client too (one-armed); our own addresses may not.
    if !source.is_plausible_source() || address_in(segment, source.mapped()).flags & !ADDRESS_BACKEND != 0 {
        return Reason::BadSource;
    }
    let own = flags & (ADDRESS_HOST | ADDRESS_SNAT) != 0;
    let protocol = header.protocol();
    if protocol == A::ICMP {
        return Reason::Icmp;
    }
    let verified = match protocol {
        packet::TCP if !own => tcp_packet::<A>(context).map(|_| ()),
        packet::UDP if !own => udp_packet::<A>(context).map(|_| ()),
        _ => Err(Reason::UnservedProtocol),
    };
    let quiet = flags & ADDRESS_UNSERVED_DROP != 0;
    verified.err().unwrap_or(if quiet { Reason::UnservedQuiet } else { Reason::Unserved })
}

/// Whether `host_access` lets a packet through to the host's own address on a segment that is tenants' only.
#[inline(always)]
fn is_open<A: Local>(context: &XdpContext, segment: &Segment, header: &A::Header) -> bool {
    let access = TENANTS.get(u32::from(segment.tenant)).map_or(0, |tenant| tenant.flags);
    if access & TENANT_HOST_ACCESS_OWN != 0 || segment.flags & SEGMENT_HOST_ACCESS_OWN != 0 {
        return true;
    }
    let protocol = header.protocol();
    if protocol == A::ICMP {
        return access & TENANT_HOST_ACCESS_ICMP != 0 || segment.flags & SEGMENT_HOST_ACCESS_ICMP != 0;
    }
    if protocol != packet::TCP {
        return false;
    }
    let Ok(packet) = tcp_packet::<A>(context) else { return false };
    // SAFETY: `tcp_packet` has bounds-checked the headers.
    let (port_be, bits) = unsafe { ((*packet).tcp.destination_port_be, (*packet).tcp.flags) };
    // What backends answer to the host's own connections, which are probes.
    if bits & (SYN | ACK) != SYN && address_in(segment, header.source().mapped()).flags & ADDRESS_BACKEND != 0 {
        return true;
    }
    let key = AddressKey { address: [0; 16], segment: segment.id, port_be };
    // SAFETY: the flags are read at once.
    unsafe { ADDRESSES.get(key) }.is_some_and(|port| port.flags & ADDRESS_HOST_PORT != 0)
}
