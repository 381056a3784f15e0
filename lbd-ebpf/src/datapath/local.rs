//! What is no flow's: the host behind, groups, transit, and what VIPs do not serve.

use aya_ebpf::{bindings::xdp_action, programs::XdpContext};
use lbd_common::abi::{
    ADDRESS_HOST, ADDRESS_SNAT, ADDRESS_VIP, AddressKey, SEGMENT_HUB, SEGMENT_TENANT, Segment, TENANT_HOST_ACCESS_ICMP,
    TENANT_HOST_ACCESS_OWN, mapped,
};
use lbd_common::packet::{self, ETHERNET, IPV4, IpHeader as _, Ipv4, ethertype};
use lbd_common::reason::Reason;

use super::context::{Arrival, Outcome, at, available, is_group, refuse};
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
/// First octet of an IPv6 group address.
const IPV6_GROUP: u8 = 0xff;

/// Decides between the kernel and a counted drop. Nothing from here reaches another segment.
#[inline(always)]
pub(crate) fn local(context: &XdpContext) -> Outcome {
    let arrival = Arrival::in_stage(context).ok_or(refuse(Reason::Internal, 0))?;
    let (segment, ethernet) = (arrival.segment, arrival.ethernet);
    let tenant = segment.tenant;
    // SAFETY: `segment` has bounds-checked the Ethernet header.
    let kind = unsafe { (*ethernet).ethertype };
    let group = is_group(ethernet);
    match kind {
        ethertype::IPV4 => ipv4(context, segment, group),
        ethertype::IPV6 => ipv6(context, segment),
        _ => Err(refuse(Reason::OtherProtocol, tenant)),
    }
}

#[inline(always)]
fn ipv4(context: &XdpContext, segment: &Segment, group: bool) -> Outcome {
    let tenant_side = segment.flags & SEGMENT_TENANT != 0;
    let Some(ip) = at::<Ipv4>(context, ETHERNET) else { return Err(refuse(Reason::Malformed, segment.tenant)) };
    // SAFETY: `at` has bounds-checked the header.
    let ip = unsafe { &*ip };
    let destination = ip.destination_be.to_ne_bytes();
    let key = AddressKey { address: mapped(destination), segment: segment.id, port_be: 0 };
    // SAFETY: the value is copied at once.
    let address = unsafe { ADDRESSES.get(key) }.copied();
    let flags = address.map_or(0, |address| address.flags);
    let tenant = match address {
        Some(address) if address.tenant != 0 => address.tenant,
        Some(_) | None => segment.tenant,
    };
    if flags & ADDRESS_VIP != 0 {
        if group {
            return Err(refuse(Reason::BadDestination, tenant));
        }
        ip.verify(available(context, ETHERNET)).map_err(|reason| refuse(reason, tenant))?;
        return Err(refuse(
            match ip.protocol {
                // Too short for its header, or with a header length that lies: else it would not be here.
                packet::TCP if flags & (ADDRESS_HOST | ADDRESS_SNAT) == 0 => unserved_tcp(context),
                packet::ICMP => Reason::Icmp,
                _ => Reason::UnservedProtocol,
            },
            tenant,
        ));
    }
    if tenant_side && segment.flags & SEGMENT_HUB == 0 && ip.protocol == packet::ICMP {
        // The kernel finds the message behind options; here they are looked for nowhere.
        if ip.version_length != 0x45 {
            return Err(refuse(Reason::IpOptions, tenant));
        }
        let kind = at::<u8>(context, ETHERNET + IPV4).ok_or(refuse(Reason::Malformed, tenant))?;
        // SAFETY: `at` has bounds-checked the type.
        if matches!(unsafe { *kind }, ICMP_REDIRECT | ICMP_ROUTER_ADVERTISEMENT) {
            return Err(refuse(Reason::RouterControl, tenant));
        }
    }
    // The subnet's broadcast address, or a group's.
    let subnet = segment.mask4_be != u32::MAX && segment.mask4_be != 0;
    if destination[0] >= 224 || subnet && ip.destination_be | segment.mask4_be == u32::MAX {
        return Err(refuse(Reason::Multicast, tenant));
    }
    if !tenant_side {
        return if group { Err(refuse(Reason::Multicast, tenant)) } else { Ok(xdp_action::XDP_PASS) };
    }
    if group {
        // The kernel takes it for any of its addresses.
        return Err(refuse(Reason::BadDestination, tenant));
    }
    if flags & ADDRESS_HOST != 0 {
        return host(segment, ip.protocol == packet::ICMP);
    }
    Err(refuse(Reason::NotLocal, tenant))
}

/// TCP to a VIP that came here: no frontend, or headers that lie.
#[inline(always)]
fn unserved_tcp(context: &XdpContext) -> Reason {
    match super::context::tcp_packet::<lbd_common::abi::Address4>(context) {
        Ok(_) => Reason::Unserved,
        Err(reason) => reason,
    }
}

#[inline(always)]
fn ipv6(context: &XdpContext, segment: &Segment) -> Outcome {
    if segment.flags & SEGMENT_TENANT == 0 {
        return Ok(xdp_action::XDP_PASS);
    }
    let tenant = segment.tenant;
    let Some(header) = at::<[u8; 40]>(context, ETHERNET) else { return Err(refuse(Reason::Malformed, tenant)) };
    // SAFETY: `at` has bounds-checked the header.
    let header = unsafe { &*header };
    // Behind extension headers anything could hide (RFC 7113). On a segment that is the hub's too, the hub's router may speak.
    if segment.flags & SEGMENT_HUB == 0 && EXTENSIONS.contains(&header[6]) {
        let listener = at::<[u8; 9]>(context, ETHERNET + 40).is_some_and(|bytes| {
            // SAFETY: `at` has bounds-checked them.
            let bytes = unsafe { &*bytes };
            header[6] == 0 && bytes[0] == packet::ICMPV6 && bytes[1] == 0 && LISTENER.contains(&bytes[8])
        });
        if !listener {
            return Err(refuse(Reason::IpOptions, tenant));
        }
    }
    if header[6] == packet::ICMPV6
        && let Some(kind) = at::<u8>(context, ETHERNET + 40)
    {
        // SAFETY: `at` has bounds-checked the type.
        let kind = unsafe { *kind };
        // On a segment that is the hub's too, the hub's router may speak.
        if (kind == ROUTER_ADVERTISEMENT || kind == REDIRECT) && segment.flags & SEGMENT_HUB == 0 {
            return Err(refuse(Reason::RouterControl, tenant));
        }
    }
    if header[24] == IPV6_GROUP {
        return Err(refuse(Reason::Multicast, tenant));
    }
    let mut key = AddressKey { address: [0; 16], segment: segment.id, port_be: 0 };
    key.address.copy_from_slice(&header[24..40]);
    // SAFETY: the flags are read at once.
    let flags = unsafe { ADDRESSES.get(key) }.map_or(0, |address| address.flags);
    if flags & ADDRESS_HOST != 0 {
        return host(segment, header[6] == packet::ICMPV6);
    }
    Err(refuse(Reason::Ipv6, tenant))
}

/// The host's own address on a tenant segment: `host_access`.
#[inline(always)]
fn host(segment: &Segment, icmp: bool) -> Outcome {
    if segment.flags & SEGMENT_HUB != 0 {
        return Ok(xdp_action::XDP_PASS);
    }
    let access = TENANTS.get(u32::from(segment.tenant)).map_or(0, |tenant| tenant.flags);
    if access & TENANT_HOST_ACCESS_OWN != 0 || (icmp && access & TENANT_HOST_ACCESS_ICMP != 0) {
        return Err(refuse(Reason::Host, segment.tenant));
    }
    Err(refuse(Reason::HostClosed, segment.tenant))
}

const _: () = assert!(IPV4 == 20);
