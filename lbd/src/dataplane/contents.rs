//! Pure: from the plan to the keys and values of the maps.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use lbd_common::abi::{
    self, ADDRESS_ANSWER, ADDRESS_BACKEND, ADDRESS_HOST, ADDRESS_HOST_PORT, ADDRESS_LEFT_PORT, ADDRESS_SNAT,
    ADDRESS_TARGET_PORT, ADDRESS_UNSERVED_DROP, ADDRESS_VIP, Address, Address4, Address6, AddressKey, BACKEND_ELIGIBLE,
    BACKEND_PRESENT, Backend, CHUNK_SLOTS, FRONTEND_ADOPT, FRONTEND_PRESERVE_CLIENT, FRONTEND_SOURCE_AFFINITY,
    FRONTEND_UNSERVED_DROP, FamilyLimits, Frontend, FrontendKey, LocalAddress, MaglevChunk, NEXT_HOP_ON_LINK,
    NEXT_HOP_RESOLVED, NextHop, Segment, TENANT_HOST_ACCESS_ICMP, TENANT_HOST_ACCESS_OWN, Tenant,
};

use super::netlink::Neighbour;
use crate::plan::model::{
    AddressPlan, BackendPlan, FrontendAddress, FrontendBackend, FrontendPlan, InterfaceFacts, Plan, SegmentId,
    SegmentPlan, TenantPlan,
};

/// What a next hop stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum HopKey {
    /// Clients of a segment that are on its link: each by its own MAC.
    OnLink(SegmentId),
    /// A segment's IPv4 gateway, whatever its address is now.
    Gateway(SegmentId),
    /// A segment's IPv6 gateway.
    Gateway6(SegmentId),
    /// A station of a segment, or what a route of its own leads to it by.
    Station(SegmentId, IpAddr),
}

const KIND_ON_LINK: u16 = 1;
const KIND_GATEWAY: u16 = 2;
const KIND_STATION: u16 = 3;
const KIND_GATEWAY6: u16 = 4;

impl HopKey {
    /// As it is kept beside the next hops, so that a restart finds the same indexes; `address` is the gateway's.
    pub(super) fn record(self, address: Option<IpAddr>) -> AddressKey {
        let (kind, segment, address) = match self {
            Self::OnLink(segment) => (KIND_ON_LINK, segment, None),
            Self::Gateway(segment) => (KIND_GATEWAY, segment, address),
            Self::Gateway6(segment) => (KIND_GATEWAY6, segment, address),
            Self::Station(segment, address) => (KIND_STATION, segment, Some(address)),
        };
        AddressKey { address: address.map_or([0; 16], mapped), segment, port_be: kind }
    }

    /// Reads a record back.
    pub(super) fn from_record(record: &AddressKey) -> Option<(Self, Option<IpAddr>)> {
        let found = (record.address != [0; 16]).then(|| address(&record.address));
        match (record.port_be, found) {
            (KIND_ON_LINK, _) => Some((Self::OnLink(record.segment), None)),
            (KIND_GATEWAY, address) => Some((Self::Gateway(record.segment), address)),
            (KIND_GATEWAY6, address) => Some((Self::Gateway6(record.segment), address)),
            (KIND_STATION, Some(address)) => Some((Self::Station(record.segment, address), Some(address))),
            _ => None,
        }
    }

    pub(super) const fn segment(self) -> SegmentId {
        match self {
            Self::OnLink(segment) | Self::Gateway(segment) | Self::Gateway6(segment) | Self::Station(segment, _) => {
                segment
            }
        }
    }
}

/// The next hop of packets to `address`, and whose MAC it has: itself on the link, else the gateway of the most specific route, else the
/// segment's. With a route of its own it is a hop of its own: where that leads may change, and flows keep the hop.
pub(super) fn hop_to(segment_id: SegmentId, segment: &SegmentPlan, address: IpAddr) -> (HopKey, Option<IpAddr>) {
    let link_local = matches!(address, IpAddr::V6(address) if address.is_unicast_link_local());
    let here = segment.networks.iter().filter(|network| network.contains(&address)).map(IpNet::prefix_len).max();
    let here = if link_local { Some(u8::MAX) } else { here };
    let route = segment.routes.iter().filter(|(network, _)| network.contains(&address));
    let route = route.max_by_key(|(network, _)| network.prefix_len());
    let station = HopKey::Station(segment_id, address);
    match (here, route) {
        (here, Some((network, via))) if here.is_none_or(|here| network.prefix_len() > here) => {
            (station, Some(via.unwrap_or(address)))
        }
        (Some(_), _) => (station, Some(address)),
        (None, _) => match gateway(segment, address.is_ipv6()) {
            None => (station, Some(address)),
            gateway if address.is_ipv6() => (HopKey::Gateway6(segment_id), gateway),
            gateway => (HopKey::Gateway(segment_id), gateway),
        },
    }
}

/// A segment's gateway of a family.
pub(super) fn gateway(segment: &SegmentPlan, six: bool) -> Option<IpAddr> {
    segment.gateways.iter().copied().find(|gateway| gateway.is_ipv6() == six)
}

/// The next hops that a plan needs, with the address to resolve for each.
pub(super) fn hops(plan: &Plan) -> BTreeMap<HopKey, Option<IpAddr>> {
    let mut wanted = BTreeMap::new();
    for (&id, segment) in &plan.segments {
        if segment.tenant_side {
            wanted.insert(HopKey::OnLink(id), None);
            wanted.insert(HopKey::Gateway(id), gateway(segment, false));
            wanted.insert(HopKey::Gateway6(id), gateway(segment, true));
        }
    }
    for backend in plan.backends.values() {
        let Some(segment) = plan.segments.get(&backend.segment) else { continue };
        wanted.extend([hop_to(backend.segment, segment, backend.address)]);
    }
    wanted
}

/// The value of a next hop. `old` is what the map holds: a MAC stays until a better one is known, unless it was another address's.
pub(super) fn next_hop(
    key: HopKey,
    vlan: Option<u16>,
    interface: &InterfaceFacts,
    neighbour: Option<&Neighbour>,
    old: Option<&NextHop>,
    same_address: bool,
) -> NextHop {
    let mut value = NextHop {
        source: interface.mac,
        vlan: vlan.unwrap_or(0),
        ifindex: interface.index,
        mtu: interface.mtu.min(u32::from(u16::MAX)) as u16,
        segment: key.segment(),
        ..NextHop::ZERO
    };
    if let HopKey::OnLink(_) = key {
        value.flags = NEXT_HOP_ON_LINK;
        return value;
    }
    let learnt = neighbour.filter(|neighbour| neighbour.valid).and_then(|neighbour| neighbour.mac);
    let kept = old
        .filter(|old| same_address && old.flags & NEXT_HOP_RESOLVED != 0 && old.segment == value.segment)
        .map(|old| old.destination);
    if let Some(mac) = learnt.or(kept) {
        value.destination = mac;
        value.flags = NEXT_HOP_RESOLVED;
    }
    value
}

/// A segment's value.
pub(super) fn segment(
    id: SegmentId,
    plan: &SegmentPlan,
    interface: &InterfaceFacts,
    gateway_next_hop: u16,
    gateway6_next_hop: u16,
    on_link_next_hop: u16,
) -> Segment {
    let mut networks4 = plan.networks.iter().filter_map(|network| match network {
        IpNet::V4(network) => Some(*network),
        IpNet::V6(_) => None,
    });
    // Link-local addresses are on the link anyway.
    let mut networks6 = plan.networks.iter().filter_map(|network| match network {
        IpNet::V6(network) if !network.addr().is_unicast_link_local() => Some(*network),
        IpNet::V4(_) | IpNet::V6(_) => None,
    });
    let [network4, second4] = [networks4.next(), networks4.next()];
    let [network6, second6] = [networks6.next(), networks6.next()];
    let mut flags = 0;
    if plan.tenant_side {
        flags |= abi::SEGMENT_TENANT;
    }
    if plan.hub_side {
        flags |= abi::SEGMENT_HUB;
    }
    if plan.host_access_all {
        flags |= abi::SEGMENT_HOST_ACCESS_OWN;
    }
    if plan.host_access_icmp {
        flags |= abi::SEGMENT_HOST_ACCESS_ICMP;
    }
    Segment {
        id,
        flags,
        mac: interface.mac,
        tenant: plan.tenant,
        gateway_next_hop,
        on_link_next_hop,
        vlan: plan.name.vlan.unwrap_or(0),
        gateway6_next_hop,
        network4_be: network4.map_or(0, |network| Address4::from_ip(network.network())),
        mask4_be: network4.map_or(u32::MAX, |network| Address4::from_ip(network.netmask())),
        mtu: interface.mtu,
        network6_be: network6.map_or([0; 4], |network| Address6::from_ip(network.network())),
        mask6_be: network6.map_or([u32::MAX; 4], |network| Address6::from_ip(network.netmask())),
        second_network4_be: second4.map_or(0, |network| Address4::from_ip(network.network())),
        second_mask4_be: second4.map_or(u32::MAX, |network| Address4::from_ip(network.netmask())),
        second_network6_be: second6.map_or([0; 4], |network| Address6::from_ip(network.network())),
        second_mask6_be: second6.map_or([u32::MAX; 4], |network| Address6::from_ip(network.netmask())),
        reserved: [0; 6],
    }
}

/// A tenant's value.
pub(super) fn tenant(plan: &TenantPlan) -> Tenant {
    let mut flags = 0;
    if plan.host_access_all {
        flags |= TENANT_HOST_ACCESS_OWN;
    }
    if plan.host_access_icmp {
        flags |= TENANT_HOST_ACCESS_ICMP;
    }
    Tenant {
        families: plan.families.map(|family| FamilyLimits {
            flows: family.flows,
            udp: family.udp,
            half_open: family.half_open,
            pad: 0,
        }),
        new_flows_per_second: plan.new_flows_per_second,
        flags,
    }
}

fn mapped(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => abi::mapped(address.octets()),
        IpAddr::V6(address) => address.octets(),
    }
}

/// The reverse of [`mapped`].
pub(super) fn address(mapped: &[u8; 16]) -> IpAddr {
    IpAddr::from(*mapped).to_canonical()
}

/// What the first 32 bits of our addresses of a family in a segment have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CommonPrefix {
    /// The first 32 bits of one of them.
    bits: u32,
    /// How many of those are the same in all.
    length: u32,
}

impl CommonPrefix {
    /// The mask.
    fn mask(self) -> u32 {
        u32::MAX.checked_shl(32 - self.length).unwrap_or(0)
    }
}

/// The common prefixes of our addresses, by segment and family (`true` = IPv6): those that [`addresses`] knows there.
pub(super) fn common_prefixes(plan: &Plan) -> BTreeMap<(SegmentId, bool), CommonPrefix> {
    let mut all: BTreeMap<(SegmentId, bool), CommonPrefix> = BTreeMap::new();
    let backends = plan.backends.values().map(|backend| (backend.segment, backend.address));
    for (segment, address) in plan.addresses.keys().copied().chain(backends) {
        let bits = match address {
            IpAddr::V4(address) => address.to_bits(),
            IpAddr::V6(address) => (address.to_bits() >> 96) as u32,
        };
        let common = all.entry((segment, address.is_ipv6())).or_insert(CommonPrefix { bits, length: 32 });
        common.length = common.length.min((common.bits ^ bits).leading_zeros());
    }
    all
}

/// A backend's value; `ours` is what our addresses in its segment have in common.
pub(super) fn backend(plan: &BackendPlan, next_hop: u16, ours: CommonPrefix) -> Backend {
    Backend {
        ours_be: (ours.bits & ours.mask()).to_be(),
        ours_mask_be: ours.mask().to_be(),
        address: mapped(plan.address),
        port_be: plan.port.to_be(),
        segment: plan.segment,
        next_hop,
        flags: BACKEND_PRESENT | if plan.eligible { BACKEND_ELIGIBLE } else { 0 },
    }
}

/// A frontend's key.
pub(super) fn frontend_key(address: &FrontendAddress) -> FrontendKey {
    FrontendKey {
        vip: mapped(address.vip),
        port_be: address.port.to_be(),
        segment: address.segment,
        protocol: address.protocol.number(),
        pad: [0; 3],
    }
}

/// A frontend's value; `table` is its first chunk and its slots.
pub(super) fn frontend(address: &FrontendAddress, plan: &FrontendPlan, table: (u32, u32)) -> Frontend {
    let mut flags = 0;
    for (on, flag) in [
        (plan.source_affinity, FRONTEND_SOURCE_AFFINITY),
        (plan.preserve_client, FRONTEND_PRESERVE_CLIENT),
        (plan.unserved_drop, FRONTEND_UNSERVED_DROP),
        (plan.adopt, FRONTEND_ADOPT),
    ] {
        if on {
            flags |= flag;
        }
    }
    Frontend {
        vip: mapped(address.vip),
        snat: plan.snat.map_or([0; 16], mapped),
        port_be: address.port.to_be(),
        segment: address.segment,
        protocol: address.protocol.number(),
        pad: 0,
        id: plan.id,
        tenant: plan.tenant,
        flags,
        target_port_be: plan.target_port.to_be(),
        snat_first: plan.snat_ports.0,
        snat_last: plan.snat_ports.1,
        timeouts: plan.timeouts,
        table: table.0,
        table_size: table.1,
        source_ranges: 0,
    }
}

/// An address's key.
pub(super) fn address_key(segment: SegmentId, address: IpAddr) -> AddressKey {
    AddressKey { address: mapped(address), segment, port_be: 0 }
}

/// Segment of the keys by which a VIP is known on hub segments.
const ANY_SEGMENT: SegmentId = 0;

/// The key of a port in a segment.
pub(super) fn port_key(segment: SegmentId, port: u16) -> AddressKey {
    AddressKey { address: [0; 16], segment, port_be: port.to_be() }
}

/// Whether ARP requests and neighbour solicitations for the address are ours to answer: not if the kernel does.
pub(super) const fn answered(plan: &AddressPlan) -> bool {
    !plan.host && (plan.vip || plan.snat.is_some())
}

/// An address's value; `answer`: no other station has it.
pub(super) fn local_address(plan: &AddressPlan, answer: bool) -> LocalAddress {
    let mut flags = 0;
    for (on, flag) in [
        (plan.vip, ADDRESS_VIP),
        (plan.snat.is_some(), ADDRESS_SNAT),
        (plan.host, ADDRESS_HOST),
        (answer && answered(plan), ADDRESS_ANSWER),
        (plan.unserved_drop, ADDRESS_UNSERVED_DROP),
    ] {
        if on {
            flags |= flag;
        }
    }
    let (snat_first, snat_last) = plan.snat.unwrap_or((0, 0));
    LocalAddress { flags, tenant: plan.tenant, snat_first, snat_last }
}

/// All of map `addresses`: the plan's addresses, its backends, and the ports that those serve. `answer` says whether no other station
/// has the address.
pub(super) fn addresses(plan: &Plan, answer: impl Fn(SegmentId, IpAddr) -> bool) -> BTreeMap<AddressKey, LocalAddress> {
    let known = plan.addresses.iter().map(|(&(segment, address), address_plan)| {
        (address_key(segment, address), local_address(address_plan, !plan.quiet && answer(segment, address)))
    });
    let mut all: Vec<(AddressKey, LocalAddress)> = known.collect();
    // What comes for a tenant's VIP on a hub segment is known by segment 0, unless the address means something there itself.
    let on_hub: BTreeSet<IpAddr> = plan
        .segments
        .iter()
        .filter(|(_, it)| it.hub_side)
        .flat_map(|(&hub, _)| of_segment(plan, hub).map(|(address, _)| address))
        .collect();
    let vips = plan.addresses.iter().filter(|(_, known)| known.vip).map(|(&(_, address), _)| address);
    let value = LocalAddress { flags: ADDRESS_VIP, ..LocalAddress::ZERO };
    all.extend(vips.filter(|vip| !on_hub.contains(vip)).map(|vip| (address_key(ANY_SEGMENT, vip), value)));
    // Made in one go, a map of many costs a fraction of as many inserts.
    let mut wanted: BTreeMap<AddressKey, LocalAddress> = all.into_iter().collect();
    for backend in plan.backends.values() {
        wanted.entry(address_key(backend.segment, backend.address)).or_insert(LocalAddress::ZERO).flags |=
            ADDRESS_BACKEND;
    }
    let mut ports: BTreeMap<AddressKey, LocalAddress> = target_ports(plan)
        .into_iter()
        .map(|(segment, port)| {
            (port_key(segment, port), LocalAddress { flags: ADDRESS_TARGET_PORT, ..LocalAddress::ZERO })
        })
        .collect();
    for (&id, segment) in &plan.segments {
        for &port in &segment.host_ports {
            ports.entry(port_key(id, port)).or_insert(LocalAddress::ZERO).flags |= ADDRESS_HOST_PORT;
        }
    }
    wanted.append(&mut ports);
    wanted
}

/// What is to be different about target ports in map `addresses` before frontends change: those that will be led to are there already, those that
/// won't are left ([`ADDRESS_LEFT_PORT`]). So a handshake of before ends where it began, whichever of the two its frontend says at that moment, and one
/// that would end at another frontend's port does not.
pub(super) fn ports_meanwhile(
    held: &BTreeMap<AddressKey, LocalAddress>,
    wanted: &BTreeMap<AddressKey, LocalAddress>,
) -> BTreeMap<AddressKey, LocalAddress> {
    let served = |addresses: &BTreeMap<AddressKey, LocalAddress>| -> BTreeSet<AddressKey> {
        // Ports come before all addresses.
        let ports = addresses.iter().take_while(|(key, _)| key.address == [0; 16]);
        ports.filter(|(_, port)| port.flags & ADDRESS_TARGET_PORT != 0).map(|(key, _)| *key).collect()
    };
    let (before, after) = (served(held), served(wanted));
    let value = |key: &AddressKey| {
        let flag = if after.contains(key) { ADDRESS_TARGET_PORT } else { ADDRESS_LEFT_PORT };
        let others = held.get(key).map_or(0, |port| port.flags) & !(ADDRESS_TARGET_PORT | ADDRESS_LEFT_PORT);
        (*key, LocalAddress { flags: others | flag, ..LocalAddress::ZERO })
    };
    before.symmetric_difference(&after).map(value).collect()
}

/// The plan's addresses in a segment.
fn of_segment(plan: &Plan, segment: SegmentId) -> impl Iterator<Item = (IpAddr, &AddressPlan)> {
    let first = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    let rest = plan.addresses.range((segment, first)..);
    rest.take_while(move |((at, _), _)| *at == segment).map(|(&(_, address), known)| (address, known))
}

/// The ports that backends serve, with their segments, each once.
fn target_ports(plan: &Plan) -> Vec<(SegmentId, u16)> {
    // Many frontends share a list of backends: what it says is looked up once.
    let mut lists: HashMap<*const FrontendBackend, BTreeSet<(SegmentId, u16)>> = HashMap::new();
    let mut ports: Vec<(SegmentId, u16)> = Vec::with_capacity(plan.frontends.len());
    for frontend in plan.frontends.values() {
        let list = lists.entry(frontend.backends.as_ptr()).or_insert_with(|| {
            let place = |backend: &FrontendBackend| Some((plan.backends.get(&backend.id)?.segment, backend.port));
            frontend.backends.iter().filter_map(place).collect()
        });
        ports
            .extend(list.iter().map(|&(segment, port)| (segment, if port == 0 { frontend.target_port } else { port })));
    }
    ports.retain(|&(_, port)| port != 0);
    ports.sort_unstable();
    ports.dedup();
    ports
}

/// Chunks of a table with this many slots.
pub(super) const fn chunks(slots: u32) -> u32 {
    slots.div_ceil(CHUNK_SLOTS)
}

/// A lookup table cut into chunks.
pub(super) fn cut(table: &[u16]) -> Vec<MaglevChunk> {
    table
        .chunks(CHUNK_SLOTS as usize)
        .map(|slots| {
            let mut chunk = MaglevChunk::ZERO;
            chunk.slots[..slots.len()].copy_from_slice(slots);
            chunk
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Protocol, SegmentName};
    use crate::plan::testing::{frontend_backend, frontend_plan};

    fn segment_plan(networks: &[&str], gateways: &[&str]) -> SegmentPlan {
        SegmentPlan {
            name: SegmentName { interface: "ten0".into(), vlan: None },
            tenant_side: true,
            hub_side: false,
            tenant: 1,
            networks: networks.iter().map(|text| text.parse().unwrap()).collect(),
            gateways: gateways.iter().map(|text| text.parse().unwrap()).collect(),
            routes: BTreeMap::new(),
            host_ports: BTreeSet::new(),
            host_access_all: false,
            host_access_icmp: false,
        }
    }

    fn interface() -> InterfaceFacts {
        InterfaceFacts { index: 7, mac: [2, 0, 0, 0, 1, 2], mtu: 9000, up: true, ..InterfaceFacts::default() }
    }

    #[test]
    fn off_link_backends_go_through_the_gateway() {
        let plan = segment_plan(&["192.0.2.0/24"], &["2001:db8::1", "192.0.2.1"]);
        let to = |plan: &SegmentPlan, text: &str| hop_to(3, plan, text.parse().unwrap()).0;
        let station = |text: &str| HopKey::Station(3, text.parse().unwrap());
        assert_eq!(to(&plan, "192.0.2.9"), station("192.0.2.9"));
        assert_eq!(to(&plan, "10.0.0.9"), HopKey::Gateway(3));
        assert_eq!(to(&plan, "2001:db8:9::9"), HopKey::Gateway6(3));
        assert_eq!(to(&plan, "fe80::9"), station("fe80::9"));
        let lonely = segment_plan(&["192.0.2.0/24", "2001:db8::/64"], &["fe80::1"]);
        assert_eq!(to(&lonely, "10.0.0.9"), station("10.0.0.9"));
        assert_eq!(to(&lonely, "2001:db8::9"), station("2001:db8::9"));
        assert_eq!(to(&lonely, "2001:db8:9::9"), HopKey::Gateway6(3));
    }

    #[test]
    fn off_link_backends_go_by_the_most_specific_route() {
        let mut plan = segment_plan(&["192.0.2.0/24", "2001:db8::/64"], &["192.0.2.1", "fe80::1"]);
        plan.routes = [
            ("10.0.0.0/8", Some("192.0.2.2")),
            ("10.1.0.0/16", Some("192.0.2.3")),
            ("10.1.1.0/24", None),
            ("192.0.2.128/25", Some("192.0.2.4")),
            ("192.0.0.0/16", Some("192.0.2.5")),
            ("2001:db8:9::/48", Some("fe80::9")),
        ]
        .map(|(network, via)| (network.parse().unwrap(), via.map(|via| via.parse().unwrap())))
        .into();
        for (address, via) in [
            ("10.0.0.9", "192.0.2.2"),
            ("10.1.0.9", "192.0.2.3"),
            ("10.1.1.9", "10.1.1.9"),
            ("192.0.2.9", "192.0.2.9"),
            ("192.0.2.200", "192.0.2.4"),
            ("2001:db8:9::9", "fe80::9"),
            ("fe80::7", "fe80::7"),
        ] {
            let address = address.parse().unwrap();
            let expected = (HopKey::Station(3, address), Some(via.parse().unwrap()));
            assert_eq!(hop_to(3, &plan, address), expected, "{address}");
        }
        let default = (HopKey::Gateway(3), Some("192.0.2.1".parse().unwrap()));
        assert_eq!(hop_to(3, &plan, "172.16.0.9".parse().unwrap()), default);
        let default = (HopKey::Gateway6(3), Some("fe80::1".parse().unwrap()));
        assert_eq!(hop_to(3, &plan, "2001:db8:8::9".parse().unwrap()), default);
    }

    #[test]
    fn both_families_have_a_gateway_which_may_be_link_local() {
        let mut plan = Plan::default();
        plan.segments.insert(3, segment_plan(&["192.0.2.0/24", "2001:db8::/64"], &["fe80::1", "192.0.2.1"]));
        for (id, address) in [(1, "2001:db8:9::9"), (2, "2001:db8::9")] {
            let address = address.parse().unwrap();
            plan.backends.insert(id, BackendPlan { address, port: 80, segment: 3, node: None, eligible: true });
        }
        let wanted = BTreeMap::from([
            (HopKey::OnLink(3), None),
            (HopKey::Gateway(3), Some("192.0.2.1".parse().unwrap())),
            (HopKey::Gateway6(3), Some("fe80::1".parse().unwrap())),
            (HopKey::Station(3, "2001:db8::9".parse().unwrap()), Some("2001:db8::9".parse().unwrap())),
        ]);
        assert_eq!(hops(&plan), wanted);
    }

    #[test]
    fn records_of_next_hops_survive() {
        let (four, six): (IpAddr, IpAddr) = ("10.0.0.11".parse().unwrap(), "2001:db8::11".parse().unwrap());
        for (key, address) in [
            (HopKey::OnLink(2), None),
            (HopKey::Gateway(2), Some(four)),
            (HopKey::Gateway(2), None),
            (HopKey::Gateway6(2), Some(six)),
            (HopKey::Gateway6(2), None),
            (HopKey::Station(4, four), Some(four)),
            (HopKey::Station(4, six), Some(six)),
        ] {
            assert_eq!(HopKey::from_record(&key.record(address)), Some((key, address)));
        }
        assert_eq!(HopKey::from_record(&AddressKey::ZERO), None);
    }

    #[test]
    fn a_failed_neighbour_keeps_its_last_mac_but_not_another_addresss() {
        let key = HopKey::Gateway(3);
        let mac = [2, 0, 0, 0, 1, 1];
        let good = Neighbour { mac: Some(mac), valid: true, ..Neighbour::default() };
        let first = next_hop(key, None, &interface(), Some(&good), None, true);
        assert_eq!((first.destination, first.flags, first.segment, first.mtu), (mac, NEXT_HOP_RESOLVED, 3, 9000));
        let failed = Neighbour { ours: true, ..Neighbour::default() };
        assert_eq!(next_hop(key, None, &interface(), Some(&failed), Some(&first), true), first);
        assert_eq!(next_hop(key, None, &interface(), None, Some(&first), true), first);
        assert_eq!(next_hop(key, None, &interface(), None, Some(&first), false).flags, 0);
        let on_link = next_hop(HopKey::OnLink(3), Some(5), &interface(), None, None, true);
        assert_eq!((on_link.flags, on_link.vlan, on_link.ifindex), (NEXT_HOP_ON_LINK, 5, 7));
    }

    #[test]
    fn addresses_say_who_answers() {
        let vip = AddressPlan { vip: true, tenant: 4, ..AddressPlan::default() };
        assert_eq!(local_address(&vip, true).flags, ADDRESS_VIP | ADDRESS_ANSWER);
        assert_eq!(local_address(&vip, false).flags, ADDRESS_VIP);
        let shared = AddressPlan { snat: Some((1024, 32767)), host: true, ..AddressPlan::default() };
        let value = local_address(&shared, true);
        assert_eq!(value.flags, ADDRESS_SNAT | ADDRESS_HOST);
        assert_eq!((value.snat_first, value.snat_last), (1024, 32767));
    }

    #[test]
    fn our_addresses_have_a_prefix_in_common() {
        let mut plan = Plan::default();
        let mut know = |segment, address: &str| {
            plan.addresses.insert((segment, address.parse().unwrap()), AddressPlan::default());
            common_prefixes(&plan)
        };
        let prefix = |all: &BTreeMap<(SegmentId, bool), CommonPrefix>, segment, v6| {
            let common = all[&(segment, v6)];
            (common.bits & common.mask(), common.mask())
        };
        assert_eq!(prefix(&know(2, "10.0.0.2"), 2, false), (0x0a00_0002, u32::MAX));
        assert_eq!(prefix(&know(2, "10.0.0.11"), 2, false), (0x0a00_0000, 0xffff_fff0));
        know(2, "2001:db8:f::2");
        let all = know(3, "192.0.2.34");
        assert_eq!(prefix(&all, 2, false), (0x0a00_0000, 0xffff_fff0));
        assert_eq!(prefix(&all, 2, true), (0x2001_0db8, u32::MAX));
        assert_eq!(prefix(&know(2, "192.0.2.1"), 2, false), (0, 0));
    }

    #[test]
    fn tables_are_cut_into_chunks() {
        let table: Vec<u16> = (1..=1021).collect();
        let cut = cut(&table);
        assert_eq!((cut.len() as u32, chunks(1021)), (32, 32));
        assert_eq!((cut[0].slots[0], cut[31].slots[28], cut[31].slots[29]), (1, 1021, 0));
    }

    #[test]
    fn a_segment_has_its_first_ipv4_network() {
        let value = segment(3, &segment_plan(&["2001:db8::/64", "192.0.2.0/24"], &[]), &interface(), 5, 7, 6);
        assert_eq!(
            (value.network4_be.to_ne_bytes(), value.mask4_be.to_ne_bytes()),
            ([192, 0, 2, 0], [255, 255, 255, 0])
        );
        assert_eq!((value.id, value.gateway_next_hop, value.on_link_next_hop, value.mtu), (3, 5, 6, 9000));
        assert_eq!(value.flags, abi::SEGMENT_TENANT);
        for (all, icmp, flags) in [
            (true, true, abi::SEGMENT_HOST_ACCESS_OWN | abi::SEGMENT_HOST_ACCESS_ICMP),
            (false, true, abi::SEGMENT_HOST_ACCESS_ICMP),
        ] {
            let shared = SegmentPlan { host_access_all: all, host_access_icmp: icmp, ..segment_plan(&[], &[]) };
            assert_eq!(segment(3, &shared, &interface(), 5, 7, 6).flags, abi::SEGMENT_TENANT | flags);
        }
    }

    #[test]
    fn a_segment_has_its_first_global_ipv6_network() {
        let value = segment(3, &segment_plan(&["fe80::/64", "2001:db8:203::/64"], &[]), &interface(), 5, 7, 6);
        let words = |address: &str| Address6::from_ip(address.parse().unwrap());
        assert_eq!((value.network6_be, value.mask6_be), (words("2001:db8:203::"), words("ffff:ffff:ffff:ffff::")));
        // No prefix: nobody is on the link.
        assert_eq!((value.network4_be, value.mask4_be), (0, u32::MAX));
        assert_eq!((value.gateway_next_hop, value.gateway6_next_hop), (5, 7));
        let without = segment(3, &segment_plan(&["192.0.2.0/24"], &[]), &interface(), 5, 7, 6);
        assert_eq!((without.network6_be, without.mask6_be), ([0; 4], [u32::MAX; 4]));
    }

    #[test]
    fn a_segment_has_a_second_network_of_each_family() {
        let networks = ["2001:db8:203::/64", "192.0.2.0/24", "fd00:203::/48", "198.51.100.0/25", "203.0.113.0/24"];
        let value = segment(3, &segment_plan(&networks, &[]), &interface(), 5, 7, 6);
        let words = |address: &str| Address6::from_ip(address.parse().unwrap());
        assert_eq!((value.network6_be, value.second_network6_be), (words("2001:db8:203::"), words("fd00:203::")));
        assert_eq!(value.second_mask6_be, words("ffff:ffff:ffff::"));
        assert_eq!(value.second_network4_be.to_ne_bytes(), [198, 51, 100, 0]);
        assert_eq!(value.second_mask4_be.to_ne_bytes(), [255, 255, 255, 128]);
        let one = segment(3, &segment_plan(&networks[..2], &[]), &interface(), 5, 7, 6);
        assert_eq!((one.second_mask4_be, one.second_mask6_be), (u32::MAX, [u32::MAX; 4]));
    }

    #[test]
    fn vips_are_known_on_hub_segments_by_segment_0_unless_the_address_means_something_there() {
        let mut plan = Plan::default();
        let hub = SegmentPlan { tenant_side: false, hub_side: true, ..segment_plan(&["10.0.0.0/24"], &[]) };
        plan.segments.extend([(1, segment_plan(&["192.0.2.0/24"], &[])), (2, hub)]);
        let vip = AddressPlan { vip: true, tenant: 1, ..AddressPlan::default() };
        let host = AddressPlan { host: true, ..AddressPlan::default() };
        for (segment, address, known) in [
            (1, "192.0.2.34", &vip),
            (1, "2001:db8:203::34", &vip),
            // Another tenant may have the hub's addresses as VIPs.
            (1, "10.0.0.2", &vip),
            (2, "10.0.0.2", &host),
            (1, "192.0.2.2", &host),
        ] {
            plan.addresses.insert((segment, address.parse().unwrap()), known.clone());
        }
        let wanted = addresses(&plan, |_, _| true);
        let on_hub = |address: &str| wanted.get(&address_key(0, address.parse().unwrap())).copied();
        let vip = LocalAddress { flags: ADDRESS_VIP, ..LocalAddress::ZERO };
        assert_eq!((on_hub("192.0.2.34"), on_hub("2001:db8:203::34")), (Some(vip), Some(vip)));
        assert_eq!((on_hub("10.0.0.2"), on_hub("192.0.2.2")), (None, None));
        assert_eq!(wanted.len(), 7);
    }

    #[test]
    fn a_port_can_be_a_backends_and_the_hosts() {
        let mut plan = Plan::default();
        plan.segments.insert(1, SegmentPlan { host_ports: [22, 9100].into(), ..segment_plan(&[], &[]) });
        let wanted = addresses(&plan, |_, _| false);
        assert_eq!(wanted[&port_key(1, 22)].flags, ADDRESS_HOST_PORT);
        plan.segments.insert(2, segment_plan(&[], &[]));
        let list = [FrontendBackend { port: 22, ..frontend_backend(4, "192.0.2.9".parse().unwrap()) }];
        let backend = BackendPlan { address: list[0].address, port: 22, segment: 1, node: None, eligible: true };
        plan.backends.insert(4, backend);
        let at = FrontendAddress { segment: 2, vip: list[0].address, port: 22, protocol: Protocol::Udp };
        plan.frontends.insert(at, keeping(&list).into());
        let wanted = addresses(&plan, |_, _| false);
        assert_eq!(wanted[&port_key(1, 22)].flags, ADDRESS_HOST_PORT | ADDRESS_TARGET_PORT);
        assert_eq!(wanted[&port_key(1, 9100)].flags, ADDRESS_HOST_PORT);
        assert!(!wanted.contains_key(&port_key(2, 22)));
    }

    #[test]
    fn ports_that_frontends_lead_to_no_more_are_left_before_the_frontends_change() {
        let ports = |all: &[(u16, u16)]| -> BTreeMap<AddressKey, LocalAddress> {
            let value = |flags| LocalAddress { flags, ..LocalAddress::ZERO };
            all.iter().map(|&(port, flags)| (port_key(2, port), value(flags))).collect()
        };
        let mut held = ports(&[
            (22, ADDRESS_HOST_PORT),
            (80, ADDRESS_HOST_PORT | ADDRESS_TARGET_PORT),
            (443, ADDRESS_HOST_PORT),
            (30918, ADDRESS_TARGET_PORT),
            (31000, ADDRESS_TARGET_PORT),
            (31001, ADDRESS_LEFT_PORT),
            (31002, ADDRESS_LEFT_PORT),
        ]);
        held.insert(address_key(2, "10.0.0.11".parse().unwrap()), LocalAddress::ZERO);
        let wanted = ports(&[
            (23, ADDRESS_HOST_PORT),
            (443, ADDRESS_HOST_PORT | ADDRESS_TARGET_PORT),
            (31000, ADDRESS_TARGET_PORT),
            (31002, ADDRESS_TARGET_PORT),
            (31222, ADDRESS_TARGET_PORT),
        ]);
        let meanwhile = ports(&[
            (80, ADDRESS_HOST_PORT | ADDRESS_LEFT_PORT),
            (443, ADDRESS_HOST_PORT | ADDRESS_TARGET_PORT),
            (30918, ADDRESS_LEFT_PORT),
            (31002, ADDRESS_TARGET_PORT),
            (31222, ADDRESS_TARGET_PORT),
        ]);
        assert_eq!(ports_meanwhile(&held, &wanted), meanwhile);
    }

    /// One that keeps the client, adopts, and has timeouts of its own.
    fn keeping(backends: &[FrontendBackend]) -> FrontendPlan {
        let plain = frontend_plan("dns", 30053, backends);
        FrontendPlan { timeouts: 3, preserve_client: true, adopt: true, snat: None, ..plain }
    }

    #[test]
    fn a_frontend_of_ipv6_and_udp_that_keeps_the_client() {
        let vip = "2001:db8:203::34";
        let at = FrontendAddress { segment: 2, vip: vip.parse().unwrap(), port: 53, protocol: Protocol::Udp };
        let value = frontend(&at, &keeping(&[]), (0, 0));
        assert_eq!(value.vip, vip.parse::<std::net::Ipv6Addr>().unwrap().octets());
        assert_eq!((value.protocol, value.timeouts, value.snat), (17, 3, [0; 16]));
        assert_eq!(value.flags, FRONTEND_PRESERVE_CLIENT | FRONTEND_ADOPT);
        let source = FrontendPlan { snat: Some("2001:db8:f::50".parse().unwrap()), ..keeping(&[]) };
        assert_eq!(address(&frontend(&at, &source, (0, 0)).snat).to_string(), "2001:db8:f::50");
    }

    #[test]
    fn keys_hold_ports_as_on_the_wire() {
        let address =
            FrontendAddress { segment: 3, vip: "192.0.2.34".parse().unwrap(), port: 6443, protocol: Protocol::Tcp };
        let key = frontend_key(&address);
        assert_eq!((key.port_be.to_ne_bytes(), key.protocol), (6443_u16.to_be_bytes(), 6));
        assert_eq!(abi::unmapped(&key.vip), [192, 0, 2, 34]);
    }
}
