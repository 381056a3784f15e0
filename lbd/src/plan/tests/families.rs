//! IPv6, UDP, VLANs, and settings of tenants and frontends.

use std::net::{Ipv4Addr, Ipv6Addr};

use lbd_common::abi::{FlowKey4, FlowKey6, Tuple4, Tuple6};
use lbd_common::hash::{self, Seed};

use super::*;
use crate::config::Adopt;

/// The documentation's topology with a second family: hub `2001:db8:f::/64`, tenant `2001:db8:203::/64`.
pub(super) fn dual_stack(world: &mut World) {
    for (name, address) in [("eth0", "2001:db8:f::50/64"), ("eth1", "2001:db8:203::2/64")] {
        let facts = world.host.interfaces.get_mut(name).unwrap();
        let address: IpNet = address.parse().unwrap();
        facts.addresses.push(address);
        facts.all_addresses.extend([address, "fe80::2/64".parse().unwrap()]);
    }
    world.config.tenants[0].pools.push(range("2001:db8:203::110-2001:db8:203::119"));
    for (number, node) in world.inventory.nodes.values_mut().enumerate() {
        node.addresses.push(ip(&format!("2001:db8:f::{}", 105 + number)));
    }
}

fn dual(world: &mut World) -> &mut Service {
    dual_stack(world);
    world.add(API, service("uid-api", &[(6443, 30918)]));
    let service = world.service(API);
    service.families_v6 = vec![false, true];
    service
}

const NODES6: [&str; 4] = ["2001:db8:f::105", "2001:db8:f::106", "2001:db8:f::107", "2001:db8:f::108"];

#[test]
fn a_dual_stack_service_has_a_frontend_in_each_family_over_the_nodes_of_that_family() {
    let mut world = World::new();
    dual(&mut world);
    let plan = world.apply();
    assert!(plan.notices.is_empty(), "{:?}", plan.notices);
    assert_eq!(serving(&plan, "192.168.203.110", 6443), ALL_NODES);
    assert_eq!(serving(&plan, "2001:db8:203::110", 6443), NODES6);
    let (four, six) = (at(&plan, "192.168.203.110", 6443), at(&plan, "2001:db8:203::110", 6443));
    assert_eq!((four.snat, six.snat), (Some(ip("10.32.96.50")), Some(ip("2001:db8:f::50"))));
    assert_ne!((four.id, four.table), (six.id, six.table));
    let tenant_side = plan.segments.values().find(|segment| segment.tenant_side).unwrap();
    assert_eq!(tenant_side.networks, ["192.168.203.0/24".parse().unwrap(), "2001:db8:203::/64".parse().unwrap()]);
    // Each node is asked in both families.
    assert_eq!(plan.probes.len(), 8);
    world.probe_all(&plan, true);
    world.probe(&plan, "2001:db8:f::106", false);
    let plan = world.apply();
    assert_eq!(serving(&plan, "192.168.203.110", 6443), ALL_NODES);
    assert_eq!(serving(&plan, "2001:db8:203::110", 6443).len(), 3);
    // A node without the family gets no connections of it, and nobody is alarmed.
    world.inventory.nodes.get_mut("node-105").unwrap().addresses.truncate(1);
    let plan = world.apply();
    assert_eq!(plan.resets.len(), 1, "its flows of IPv6 are reset");
    assert_eq!(serving(&plan, "192.168.203.110", 6443).len(), 4);
    assert!(plan.notices.is_empty(), "{:?}", plan.notices);
}

#[test]
fn a62_the_source_of_ipv6_is_a_global_address_or_that_side_is_not_served() {
    let mut world = World::new();
    dual(&mut world);
    // The hub has a link-local address only.
    let hub = world.host.interfaces.get_mut("eth0").unwrap();
    let global = hub.addresses.pop().unwrap();
    let plan = world.apply();
    let six = at(&plan, "2001:db8:203::110", 6443);
    assert_eq!((six.snat, six.table), (None, None));
    assert_eq!(reasons(&plan), ["NoSnatAddress"]);
    assert_eq!(plan.notices[0].service, Some(name(API)));
    assert!(
        plan.notices[0]
            .message
            .starts_with("[2001:db8:203::110]:6443/TCP is not served: the interface eth0 has no global IPv6"),
        "{:?}",
        plan.notices
    );
    assert_eq!(serving(&plan, "192.168.203.110", 6443), ALL_NODES);
    assert!(!plan.addresses.iter().any(|((_, address), it)| address.is_ipv6() && it.snat.is_some()));
    // Even among the preferred ones a link-local address is none.
    world.host.interfaces.get_mut("eth0").unwrap().addresses.extend(["fe80::2/64".parse().unwrap(), global]);
    let plan = world.apply();
    assert_eq!(at(&plan, "2001:db8:203::110", 6443).snat, Some(ip("2001:db8:f::50")));
    assert!(plan.notices.is_empty());
    // What is configured is used as it is.
    world.config.hub.snat = vec![ip("2001:db8:f::99")];
    let plan = world.apply();
    assert_eq!(at(&plan, "2001:db8:203::110", 6443).snat, Some(ip("2001:db8:f::99")));
    assert_eq!(at(&plan, "192.168.203.110", 6443).snat, Some(ip("10.32.96.50")));
}

#[test]
fn a62_a_vip_is_never_the_source() {
    let mut world = World::new();
    dual(&mut world);
    // One-armed, and somebody has put the VIP on the interface.
    world.config.tenants[0].segment = segment("eth0");
    world.config.tenants[0].pools = vec![range("2001:db8:f::110-2001:db8:f::119")];
    world.service(API).families_v6 = vec![true];
    world.host.interfaces.get_mut("eth0").unwrap().addresses.insert(0, "2001:db8:f::110/64".parse().unwrap());
    let plan = world.apply();
    assert_eq!(at(&plan, "2001:db8:f::110", 6443).snat, Some(ip("2001:db8:f::50")));
}

#[test]
fn tcp_and_udp_share_a_port_number_and_a_vip() {
    let mut world = World::new();
    let mut dns = service("uid-dns", &[(53, 30053), (53, 30054)]);
    dns.ports[1].protocol = "UDP".to_owned();
    world.add(API, dns);
    let plan = world.apply();
    assert!(plan.notices.is_empty(), "{:?}", plan.notices);
    let by_protocol: Vec<_> = plan.frontends.iter().map(|(at, it)| (at.protocol, it.target_port)).collect();
    assert_eq!(by_protocol, [(Protocol::Tcp, 30053), (Protocol::Udp, 30054)]);
    // Datagrams cannot be asked for: the port of TCP is.
    assert!(plan.probes.iter().all(|target| target.port == 30053));
    world.probe_all(&plan, true);
    world.probe(&plan, "10.32.96.106", false);
    let plan = world.apply();
    let tables: BTreeSet<_> = plan.frontends.values().map(|frontend| frontend.table).collect();
    assert_eq!(tables.len(), 1, "one table for both");
    assert_eq!(serving(&plan, "192.168.203.110", 53), ["10.32.96.105", "10.32.96.107", "10.32.96.108"]);
    // A NodePort of UDP that another Service gets takes flows of UDP with it, not those of TCP.
    world.service(API).ports[1].node_port = 30055;
    world.apply();
    let mut other = service("uid-other", &[(5353, 30054)]);
    other.ports[0].protocol = "UDP".to_owned();
    other.kind = ServiceKind::NodePort;
    world.add("default/other", other);
    let resets = world.apply().resets;
    assert!(matches!(resets.first(), Some(Reset::Target { protocol: 17, port: 30054, .. })), "{resets:?}");
}

#[test]
fn backends_that_take_only_datagrams_count_as_up() {
    let mut world = World::new();
    let mut dns = service("uid-dns", &[(53, 30054)]);
    dns.ports[0].protocol = "UDP".to_owned();
    world.add(API, dns);
    let plan = world.apply();
    assert!(plan.probes.is_empty());
    assert_eq!(serving(&plan, "192.168.203.110", 53), ALL_NODES);
    assert!(plan.notices.is_empty(), "{:?}", plan.notices);
    // A port that the file names is asked by TCP.
    world.config.tenants[0].settings.health.port = Some(crate::config::ProbePort::Number(8080));
    let plan = world.apply();
    assert_eq!(plan.probes.len(), 4);
    world.probe_all(&plan, false);
    assert_eq!(reasons(&world.apply()), ["AllBackendsDown"]);
}

#[test]
fn udp_of_a_frontend_of_the_file_follows_its_tcp_port() {
    let mut world = World::new();
    let mut it = workers();
    it.ports[1].protocol = Protocol::Udp;
    it.ports[1].port = 443;
    it.ports[1].target = Some(30191);
    world.config.tenants[0].frontends = vec![it];
    let plan = world.apply();
    let targets: Vec<_> = plan.frontends.iter().map(|(at, it)| (at.port, at.protocol, it.target_port)).collect();
    assert_eq!(targets, [(443, Protocol::Tcp, 30190), (443, Protocol::Udp, 30191)]);
    assert!(plan.probes.len() == 2 && plan.probes.iter().all(|target| target.port == 30190));
}

#[test]
fn a_client_that_is_preserved_needs_no_source() {
    let mut world = World::roles();
    world.config.tenants[0].settings.preserve_client = true;
    // Not even a hub without addresses stands in the way.
    world.config.hub.node_cidrs = vec!["10.32.96.0/20".parse().unwrap()];
    world.host.interfaces.get_mut("eth0").unwrap().addresses.clear();
    let plan = world.apply();
    let api = at(&plan, "192.168.203.110", 6443);
    assert!(api.preserve_client && api.snat.is_none());
    assert_eq!(serving(&plan, "192.168.203.110", 6443), ALL_NODES);
    // The others, which have settings of their own, say what they lack.
    assert_eq!(at(&plan, "192.168.203.111", 443).table, None);
    assert!(reasons(&plan).iter().all(|reason| *reason == "NoSnatAddress"));
}

#[test]
fn sources_of_tenants_and_frontends_are_known_and_spread() {
    let mut world = World::roles();
    dual_stack(&mut world);
    let tenant = &mut world.config.tenants[0];
    tenant.settings.snat = vec![ip("10.32.96.60"), ip("10.32.96.61")];
    tenant.frontends[0].settings.snat = vec![ip("10.32.96.62")];
    tenant.frontends[1].settings.snat = vec![ip("192.168.203.9")];
    let mut more = service("uid-more", &[(1, 30001), (2, 30002), (3, 30003)]);
    more.families_v6 = vec![false, true];
    world.add("clusters-tenant-a/more", more);
    let plan = world.apply();
    assert!(plan.notices.is_empty(), "{:?}", plan.notices);
    let of = |vip: &str| -> BTreeSet<String> {
        let mine = plan.frontends.iter().filter(|(at, _)| at.vip == ip(vip));
        mine.filter_map(|(_, it)| it.snat.map(|snat| snat.to_string())).collect()
    };
    assert_eq!(of("192.168.203.113"), ["10.32.96.60".to_owned(), "10.32.96.61".to_owned()].into());
    assert_eq!(of("192.168.203.111"), ["10.32.96.62".to_owned()].into());
    assert_eq!(of("192.168.203.112"), ["192.168.203.9".to_owned()].into());
    // There is none of IPv6: then it is the hub's.
    assert_eq!(of("2001:db8:203::110"), ["2001:db8:f::50".to_owned()].into());
    for address in ["10.32.96.60", "10.32.96.62", "192.168.203.9"] {
        let known = plan.addresses.iter().find(|((_, it), _)| *it == ip(address)).unwrap().1;
        let expected = AddressPlan { snat: Some((1024, 32767)), tenant: 1, ..AddressPlan::default() };
        assert_eq!(*known, expected, "not the host's own: answered for");
    }
    // Two tenants with one address: it is nobody's.
    let mut other = super::tenant("tenant-b", "eth2");
    other.settings.snat = vec![ip("10.32.96.60"), ip("10.32.96.61")];
    world.config.tenants.push(other);
    world.add("clusters-tenant-b/api", service("uid-b", &[(1, 30101), (2, 30102)]));
    let plan = world.apply();
    let known = plan.addresses.iter().find(|((_, it), _)| *it == ip("10.32.96.60")).unwrap().1;
    assert_eq!((known.tenant, known.snat), (0, Some((1024, 32767))));
}

#[test]
fn connections_from_a_source_that_is_given_up_are_reset_once() {
    let mut world = World::roles();
    world.config.hub.snat = vec![ip("10.32.96.50"), ip("10.32.96.60")];
    world.config.tenants[0].frontends[1].settings.snat = vec![ip("192.168.203.9")];
    let plan = world.apply();
    let hub = plan.segments.iter().find(|(_, it)| it.hub_side).map(|(&id, _)| id).unwrap();
    let edge = plan.segments.iter().find(|(_, it)| it.tenant_side).map(|(&id, _)| id).unwrap();
    assert!(plan.resets.is_empty());
    // An interface that loses its addresses for a moment, and a restart, give nothing up.
    let facts = std::mem::take(&mut world.host);
    assert!(world.apply().resets.is_empty());
    world.host = facts;
    assert!(world.apply().resets.is_empty());
    world.restart();
    // The host's own is still there, whoever uses it.
    world.config.hub.snat = vec![ip("10.32.96.61")];
    world.config.tenants[0].frontends[1].settings.snat.clear();
    let given_up = [Reset::Source(hub, ip("10.32.96.60")), Reset::Source(edge, ip("192.168.203.9"))];
    assert_eq!(world.apply().resets, given_up.into());
    assert!(world.apply().resets.is_empty());
}

#[test]
fn timeouts_are_kept_once_each_under_an_index_that_stays() {
    let mut world = World::roles();
    world.config.tenants[0].frontends[0].settings.timeouts.tcp_fin = Duration::from_secs(5);
    world.config.tenants[0].frontends[1].settings.timeouts.udp_replied = Duration::from_secs(6);
    let before = world.apply();
    let index = |plan: &Plan, vip: &str| at(plan, vip, 443).timeouts;
    let (shared, own) = (index(&before, "192.168.203.111"), index(&before, "192.168.203.112"));
    assert_eq!(at(&before, "192.168.203.110", 6443).timeouts, 0);
    assert_eq!(before.timeouts[&0], world.config.timeouts);
    assert!(shared != 0 && own != 0 && shared != own && before.timeouts.len() == 3);
    assert_eq!(at(&before, "192.168.203.111", 80).timeouts, shared);
    assert_eq!(before.timeouts[&own].udp_replied, Duration::from_secs(6));
    world.restart();
    assert!(world.apply() == before);
    // One goes, the other keeps its index, and the free one is used again at last.
    world.config.tenants[0].frontends[0].settings.timeouts = world.config.timeouts;
    let plan = world.apply();
    assert_eq!((index(&plan, "192.168.203.111"), index(&plan, "192.168.203.112")), (0, own));
    for second in 10..1100 {
        world.config.tenants[0].frontends[0].settings.timeouts.tcp_fin = Duration::from_secs(second);
        let plan = world.apply();
        assert_eq!(index(&plan, "192.168.203.112"), own);
        assert!(!reasons(&plan).contains(&"TooManyTimeouts"));
    }
}

#[test]
fn adoption_is_a_setting_of_the_frontend() {
    let mut world = World::roles();
    world.config.tenants[0].settings.adopt = Adopt::Takeover;
    let plan = world.apply();
    assert!(at(&plan, "192.168.203.110", 6443).adopt && !at(&plan, "192.168.203.111", 443).adopt);
}

#[test]
fn two_tenants_on_vlans_of_one_interface_may_have_the_same_addresses() {
    let mut world = World::new();
    let mut other = tenant("tenant-b", "eth1");
    for (number, it) in [&mut world.config.tenants[0], &mut other].into_iter().enumerate() {
        it.segment.vlan = Some(2003 + number as u16);
        it.addresses = vec!["192.168.203.2/24".parse().unwrap()];
        it.gateways = vec![ip("192.168.203.1")];
        let mut own = workers();
        own.vip = Some(ip("192.168.203.120"));
        it.frontends = vec![own];
    }
    world.config.tenants.push(other);
    // Of one of them the host has a VLAN interface, under a name of its own.
    let carrier = world.host.interfaces["eth1"].index;
    let facts = InterfaceFacts { index: 9, vlan: Some((carrier, 2003)), ..world.host.interfaces["eth1"].clone() };
    world.host.interfaces.insert("tenant-a".to_owned(), facts);
    for namespace in ["clusters-tenant-a", "clusters-tenant-b"] {
        world.add(
            &format!("{namespace}/api"),
            service(namespace, &[(6443, if namespace.ends_with('a') { 30918 } else { 30919 })]),
        );
    }
    let plan = world.apply();
    let api: Vec<_> = plan.frontends.iter().filter(|(at, _)| at.port == 6443).collect();
    assert_eq!(api.len(), 2);
    assert_eq!((api[0].0.vip, api[1].0.vip), (ip("192.168.203.110"), ip("192.168.203.110")));
    assert!(api[0].0.segment != api[1].0.segment && api[0].1.tenant != api[1].1.tenant);
    assert_ne!(api[0].1.target_port, api[1].1.target_port);
    let vlans: Vec<_> = plan.segments.values().filter(|it| it.tenant_side).map(|it| it.name.vlan).collect();
    assert_eq!(vlans, [Some(2003), Some(2004)]);
    // The workers of one can be probed, through the VLAN interface; those of the other count as up, and it says so.
    let interfaces: BTreeSet<_> = plan.probes.iter().map(|target| target.interface.to_string()).collect();
    assert_eq!(interfaces, ["eth0".to_owned(), "tenant-a".to_owned()].into());
    assert_eq!(reasons(&plan), ["ProbeImpossible"]);
    assert!(plan.notices[0].message.contains("eth1.2004"), "{:?}", plan.notices);
    let workers: Vec<_> =
        plan.frontends.iter().filter(|(at, _)| at.vip == ip("192.168.203.120") && at.port == 443).collect();
    assert!(workers.len() == 2 && workers.iter().all(|(_, it)| it.table.is_some()));
    // Where the host itself has no interface, its configured address is answered for, as it is the source.
    let without = api[1].0.segment;
    let own = &plan.addresses[&(without, ip("192.168.203.2"))];
    assert!(!own.host && own.snat.is_some() && own.tenant == api[1].1.tenant);
    assert!(plan.addresses[&(api[0].0.segment, ip("192.168.203.2"))].host);
    // Untagged frames of the same interface are another segment.
    world.config.tenants[0].segment.vlan = None;
    let plan = world.apply();
    assert!(plan.segments.values().any(|it| it.name == segment("eth1") && it.tenant_side));
}

#[test]
fn limits_leave_the_others_room_in_each_family() {
    let mut world = World::new();
    let families = |world: &mut World| {
        let plan = world.plan();
        plan.tenants.values().next().unwrap().families
    };
    let limits = |flows, udp, half_open| FamilyLimitsPlan { flows, udp, half_open };
    assert_eq!(families(&mut world), [limits(131_072, 32_768, 32_768), limits(13_107, 3276, 6553)]);
    world.config.tenants[0].limits.flows = Some(20_000);
    assert_eq!(families(&mut world), [limits(20_000, 5000, 10_000), limits(13_107, 3276, 6553)]);
    world.config.tenants[0].limits.udp_flows = Some(16_000);
    assert_eq!(families(&mut world), [limits(20_000, 16_000, 10_000), limits(13_107, 13_107, 6553)]);
    world.config.tenants[0].limits = crate::config::Limits { flows: Some(1), ..Default::default() };
    assert_eq!(families(&mut world), [limits(1, 1, 64), limits(1, 1, 64)]);
    // 0 would be no limit.
    world.config.datapath.max_flows_v6 = 0;
    assert_eq!(families(&mut world)[1].flows, 1);
}

#[test]
fn ports_of_host_access_belong_to_the_segment() {
    let mut world = World::new();
    world.config.tenants[0].host_access = HostAccess::Only { ports: vec![22, 9100], icmp: false };
    let plan = world.plan();
    let segment = plan.segments.values().find(|segment| segment.tenant_side).unwrap();
    assert_eq!(segment.host_ports, [22, 9100].into());
    assert!(plan.segments.values().filter(|segment| segment.hub_side).all(|segment| segment.host_ports.is_empty()));
}

/// With one tenant its access is the tenant's; several on one segment have the same one, and then it is the segment's.
#[test]
fn host_access_of_several_tenants_is_their_segments() {
    let mut world = World::new();
    let of_segment = |plan: &Plan| {
        let tenants = plan.segments.values().find(|segment| segment.tenant_side).unwrap();
        let hub = plan.segments.values().find(|segment| segment.hub_side).unwrap();
        assert_eq!((hub.host_access_all, hub.host_access_icmp), (false, false));
        (tenants.tenant != 0, tenants.host_access_all, tenants.host_access_icmp)
    };
    assert_eq!(of_segment(&world.plan()), (true, false, false));
    let mut second = world.config.tenants[0].clone();
    second.name = "second".to_owned();
    second.frontends.clear();
    world.config.tenants.push(second);
    for (access, expected) in [
        (HostAccess::Own, (false, true, true)),
        (HostAccess::None, (false, false, false)),
        (HostAccess::Only { ports: vec![22], icmp: true }, (false, false, true)),
        (HostAccess::Only { ports: vec![22], icmp: false }, (false, false, false)),
    ] {
        for tenant in &mut world.config.tenants {
            tenant.host_access = access.clone();
        }
        assert_eq!(of_segment(&world.plan()), expected, "{access:?}");
    }
}

/// Backends of 1,000 connections from one client address, as the datapath chooses them.
fn of_one_client(plan: &Plan, vip: &str) -> BTreeMap<IpAddr, u32> {
    const SEED: Seed = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];
    let (at, frontend) = plan.frontends.iter().find(|(at, _)| at.vip == ip(vip)).unwrap();
    let table = &plan.tables[frontend.table.unwrap()];
    let mut counts = BTreeMap::new();
    for port in 40_000..41_000 {
        let (segment, protocol, pad) = (at.segment, at.protocol.number(), 0);
        let hash = match at.vip {
            IpAddr::V4(vip) => {
                let client = Ipv4Addr::new(203, 0, 113, 9);
                let tuple = Tuple4::new((client, port), (vip, at.port));
                if frontend.source_affinity {
                    hash::source(&SEED, tuple.source_be)
                } else {
                    hash::flow(&SEED, &FlowKey4 { tuple, segment, protocol, pad })
                }
            }
            IpAddr::V6(vip) => {
                let client = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 9);
                let tuple = Tuple6::new((client, port), (vip, at.port));
                if frontend.source_affinity {
                    hash::source(&SEED, tuple.source_be)
                } else {
                    hash::flow(&SEED, &FlowKey6 { tuple, segment, protocol, pad })
                }
            }
        };
        let id = table[hash::slot(hash, table.len() as u32) as usize];
        *counts.entry(plan.backends[&id].address).or_default() += 1;
    }
    counts
}

#[test]
fn a65_connections_of_one_client_spread_over_all_nodes_unless_the_service_says_client_ip() {
    let mut world = World::new();
    dual(&mut world);
    let plan = world.apply();
    for vip in ["192.168.203.110", "2001:db8:203::110"] {
        let counts = of_one_client(&plan, vip);
        assert_eq!(counts.len(), 4, "{counts:?}");
        // 250 each, give or take 15 %.
        assert!(counts.values().all(|count| (213..=287).contains(count)), "{counts:?}");
    }
    world.service(API).client_ip_affinity = true;
    let plan = world.apply();
    world.probe_all(&plan, true);
    let plan = world.apply();
    let mut chosen = BTreeMap::new();
    for vip in ["192.168.203.110", "2001:db8:203::110"] {
        let counts = of_one_client(&plan, vip);
        assert_eq!(counts.values().collect::<Vec<_>>(), [&1000], "{counts:?}");
        chosen.insert(vip, *counts.keys().next().unwrap());
    }
    // Until that node goes away; another one's leaving moves nothing that it need not.
    world.probe(&plan, &chosen["192.168.203.110"].to_string(), false);
    let after = of_one_client(&world.apply(), "192.168.203.110");
    assert_eq!(after.len(), 1);
    assert!(!after.contains_key(&chosen["192.168.203.110"]));
    // The file's word counts for more.
    world.config.tenants[0].settings.affinity = Some(Affinity::Flow);
    assert_eq!(of_one_client(&world.apply(), "2001:db8:203::110").len(), 4);
}
