//! Services in all their forms: where they lead, and what they may not do.

use super::*;
use crate::config::{Mode, ProbeKind, ProbePort};
use crate::ipam::GUEST_LABEL;
use crate::plan::ids::FRONTENDS;
use crate::source::Endpoint;

const WEB: &str = "clusters-tenant-a/a0b1";
const VIP: &str = "192.168.203.110";

fn endpoint(address: &str, node: Option<&str>, ready: bool, ports: &[(&str, u16)]) -> Endpoint {
    Endpoint {
        address: ip(address),
        node: node.map(str::to_owned),
        ready,
        ports: ports.iter().map(|&(name, port)| (name.to_owned(), "TCP".to_owned(), port)).collect(),
    }
}

/// A Service that mirrors one of a guest cluster: no selector, and its NodePort leads nowhere.
fn mirror(uid: &str, ports: &[(u16, u16)]) -> Service {
    let mut it = service(uid, ports);
    it.selector = false;
    it.labels.insert(GUEST_LABEL.to_owned(), "web".to_owned());
    it
}

impl World {
    fn endpoints(&mut self, named: &str, endpoints: Vec<Endpoint>) {
        if endpoints.is_empty() {
            self.inventory.endpoints.remove(&name(named));
        } else {
            self.inventory.endpoints.insert(name(named), endpoints);
        }
    }

    /// A mirrored Service with two workers behind it.
    fn guest() -> Self {
        let mut world = Self::new();
        world.add(WEB, mirror("uid-web", &[(443, 31443), (80, 31080)]));
        let ports = [("port-443", 30190), ("port-80", 30282)];
        let workers = ["192.168.203.101", "192.168.203.102"].map(|address| endpoint(address, None, true, &ports));
        world.endpoints(WEB, workers.to_vec());
        world
    }
}

fn targets(plan: &Plan) -> BTreeSet<String> {
    plan.probes.iter().map(|it| format!("{} {}:{}", it.interface, it.address, it.port)).collect()
}

#[test]
fn b67_a_mirrored_service_leads_to_its_endpoints_in_the_tenants_segment() {
    let mut world = World::guest();
    let plan = world.apply();
    assert!(plan.notices.is_empty(), "{:?}", plan.notices);
    for (port, target) in [(443, 30190), (80, 30282)] {
        let frontend = at(&plan, VIP, port);
        assert_eq!((frontend.mode, frontend.guest_made), (Some(Mode::Endpoints), true));
        // Reached through the tenant's interface, from the host's address there, never by way of the hub.
        assert_eq!((frontend.target_port, frontend.snat), (target, Some(ip("192.168.203.2"))));
        assert_eq!(serving(&plan, VIP, port), ["192.168.203.101", "192.168.203.102"]);
    }
    let edge = plan.segments.iter().find(|(_, it)| it.tenant_side).map(|(&id, _)| id).unwrap();
    assert!(plan.backends.values().all(|backend| backend.segment == edge && backend.node.is_none()));
    // The ports share backends and table.
    assert_eq!((plan.backends.len(), plan.tables.len()), (2, 1));
    let expected = ["eth1 192.168.203.101:30190", "eth1 192.168.203.101:30282", "eth1 192.168.203.102:30190"];
    assert!(expected.iter().all(|target| targets(&plan).contains(*target)) && plan.probes.len() == 4);
}

#[test]
fn b67_probes_decide_and_not_the_ready_flag() {
    let mut world = World::guest();
    for endpoint in world.inventory.endpoints.get_mut(&name(WEB)).unwrap() {
        endpoint.ready = endpoint.address == ip("192.168.203.101");
    }
    let plan = world.apply();
    assert_eq!(serving(&plan, VIP, 443), ["192.168.203.101", "192.168.203.102"]);
    world.probe(&plan, "192.168.203.101", false);
    world.probe(&plan, "192.168.203.102", true);
    assert_eq!(serving(&world.apply(), VIP, 443), ["192.168.203.102"]);
}

#[test]
fn b67_slices_that_come_go_and_change_are_followed() {
    let mut world = World::guest();
    let workers = world.inventory.endpoints.remove(&name(WEB)).unwrap();
    // No slices: no backend, and clients are refused (B53).
    let plan = world.apply();
    assert_eq!((at(&plan, VIP, 443).table, at(&plan, VIP, 443).target_port), (None, 0));
    assert_eq!(reasons(&plan), ["NoBackend", "NoBackend"]);
    assert!(plan.probes.is_empty() && plan.backends.is_empty());
    let id = at(&plan, VIP, 443).id;
    world.endpoints(WEB, workers.to_vec());
    let plan = world.apply();
    assert_eq!((serving(&plan, VIP, 443).len(), at(&plan, VIP, 443).id), (2, id));
    assert!(plan.notices.is_empty() && plan.resets.is_empty());
    // A third with ports of its own, and a port that only some have.
    let odd = endpoint("192.168.203.103", None, true, &[("port-443", 30999), ("other", 1)]);
    world.inventory.endpoints.get_mut(&name(WEB)).unwrap().push(odd);
    let plan = world.apply();
    assert_eq!(serving(&plan, VIP, 443), ["192.168.203.101", "192.168.203.102", "192.168.203.103"]);
    assert_eq!(serving(&plan, VIP, 80), ["192.168.203.101", "192.168.203.102"]);
    assert_eq!(at(&plan, VIP, 443).target_port, 30190);
    assert!(targets(&plan).contains("eth1 192.168.203.103:30999"));
    let ports: BTreeSet<_> = at(&plan, VIP, 443).backends.iter().map(|it| at(&plan, VIP, 443).port_of(it)).collect();
    assert_eq!(ports, [30190, 30999].into());
}

#[test]
fn b67_endpoints_may_not_be_what_a_tenant_has_no_business_with() {
    let mut world = World::guest();
    let vip_of_file = frontend("other", Some("192.168.203.99"), &[(1, None)]);
    world.config.tenants[0].frontends = vec![Frontend { backends: workers().backends, ..vip_of_file }];
    world.config.tenants[0].frontends[0].via = Via::Tenant;
    world.config.tenants[0].frontends[0].settings.snat = vec![ip("192.168.203.77")];
    let mut neighbour = tenant("tenant-b", "eth1");
    neighbour.pools = vec![range("192.168.203.200-192.168.203.209")];
    world.config.tenants.push(neighbour);
    let odd = [
        "10.32.96.105",    // a node of the hub
        "127.0.0.1",       // this host
        "192.168.203.0",   // the network
        "192.168.203.1",   // the gateway
        "192.168.203.2",   // this host
        "192.168.203.77",  // a SNAT address
        "192.168.203.99",  // a VIP of the file
        "192.168.203.110", // its own VIP
        "192.168.203.115", // a VIP to be
        "192.168.203.205", // another tenant's VIP to be
        "192.168.203.255", // broadcast
        "203.0.113.9",     // elsewhere
        "224.0.0.1",
        "2001:db8::1",
    ];
    let ports = [("port-443", 30190), ("port-80", 30282)];
    let endpoints = world.inventory.endpoints.get_mut(&name(WEB)).unwrap();
    endpoints.extend(odd.map(|address| endpoint(address, Some("node-105"), true, &ports)));
    let plan = world.apply();
    assert_eq!(serving(&plan, VIP, 443), ["192.168.203.101", "192.168.203.102"]);
    assert!(plan.backends.values().all(|backend| {
        !odd.contains(&backend.address.to_string().as_str()) || backend.address.to_string().starts_with("10.")
    }));
    let found: Vec<_> = plan.notices.iter().filter(|notice| notice.reason == "EndpointRefused").collect();
    assert_eq!((found.len(), found[0].service.clone()), (1, Some(name(WEB))));
    assert!(found[0].message.contains("10.32.96.105 (outside the tenant's segment)"), "{}", found[0].message);
    assert!(found[0].message.ends_with("10 more"), "{}", found[0].message);
    // On the hub's own segment, nodes are nobody's endpoints either.
    let mut world = World::guest();
    world.config.tenants[0].segment = segment("eth0");
    world.config.tenants[0].pools = vec![range("10.32.96.200-10.32.96.209")];
    world.endpoints(WEB, ["10.32.96.105", "10.32.97.7"].map(|it| endpoint(it, None, true, &ports)).to_vec());
    let plan = world.apply();
    assert_eq!(serving(&plan, "10.32.96.200", 443), ["10.32.97.7"]);
    assert!(plan.notices[0].message.contains("10.32.96.105 (a node of the hub)"), "{:?}", plan.notices);
}

#[test]
fn endpoints_without_end_are_bounded() {
    let mut world = World::guest();
    world.config.tenants[0].addresses = vec!["192.168.203.2/16".parse().unwrap()];
    let many = (0..2000u16).map(|it| {
        let address = format!("192.168.{}.{}", it / 200, 10 + it % 200);
        endpoint(&address, None, true, &[("port-443", 30190), ("port-80", 30282)])
    });
    let mut many: Vec<_> = many.collect();
    many.sort();
    world.endpoints(WEB, many);
    let plan = world.apply();
    assert_eq!(at(&plan, VIP, 443).backends.len(), 512);
    assert_eq!(reasons(&plan), ["TooManyEndpoints"]);
}

#[test]
fn b67_the_mode_is_the_files_if_it_says_one() {
    // A Service that is no mirror, whose pods are in the tenant's segment.
    let mut world = World::guest();
    world.add(WEB, service("uid-web", &[(443, 31443)]));
    assert_eq!(at(&world.plan(), VIP, 443).mode, Some(Mode::Nodes));
    world.config.tenants[0].claims[0].mode = Some(Mode::Endpoints);
    let plan = world.plan();
    assert_eq!((at(&plan, VIP, 443).mode, serving(&plan, VIP, 443).len()), (Some(Mode::Endpoints), 2));
    // A mirror whose NodePorts do lead there.
    world.add(WEB, mirror("uid-web", &[(443, 31443)]));
    world.config.tenants[0].claims[0].mode = Some(Mode::Nodes);
    assert_eq!(serving(&world.plan(), VIP, 443), ALL_NODES);
    // The frontend's word counts before the claim's; its `snat` is of the tenant's segment then.
    let mut it = frontend("web", None, &[(443, None)]);
    it.service = Some(("clusters-tenant-a".to_owned(), "a0b1".to_owned()));
    (it.mode, it.via, it.settings.snat) = (Some(Mode::Endpoints), Via::Tenant, vec![ip("192.168.203.77")]);
    world.config.tenants[0].frontends.push(it);
    let plan = world.plan();
    let web = at(&plan, VIP, 443);
    assert_eq!((web.mode, web.snat), (Some(Mode::Endpoints), Some(ip("192.168.203.77"))));
    // A selector-less Service of the hub's own is no mirror.
    let mut plain = service("uid-plain", &[(443, 31444)]);
    plain.selector = false;
    world.add("clusters-tenant-a/plain", plain);
    let plan = world.plan();
    let plain = plan.frontends.values().find(|it| it.name == "clusters-tenant-a/plain").unwrap();
    assert_eq!(plain.mode, Some(Mode::Nodes));
    // The tenant's own `snat` is of the hub's segment, and not used for endpoints.
    let mut world = World::guest();
    world.config.tenants[0].settings.snat = vec![ip("10.32.96.60")];
    assert_eq!(at(&world.plan(), VIP, 443).snat, Some(ip("192.168.203.2")));
}

#[test]
fn b65_what_the_mirror_carries_is_followed_and_the_vip_stays() {
    let mut world = World::guest();
    let plan = world.apply();
    let id = at(&plan, VIP, 443).id;
    // The guest's controller changes ports only, long after.
    world.service(WEB).ports = mirror("", &[(443, 31443), (8443, 31999)]).ports;
    let ports = [("port-443", 30191), ("port-8443", 30283)];
    world.endpoints(WEB, vec![endpoint("192.168.203.101", None, true, &ports)]);
    let plan = world.apply();
    assert_eq!((at(&plan, VIP, 443).id, at(&plan, VIP, 443).target_port), (id, 30191));
    assert_eq!(at(&plan, VIP, 8443).target_port, 30283);
    assert!(!plan.frontends.keys().any(|address| address.port == 80));
    // What guests write into annotations moves nothing.
    let plan = world.apply();
    world.service(WEB).annotations.insert(crate::ipam::VIP_ANNOTATION.to_owned(), "192.168.203.119".to_owned());
    world.service(WEB).requested_address = Some("192.168.203.118".to_owned());
    assert!(world.apply() == plan);
}

#[test]
fn probes_of_endpoints_go_where_the_file_says() {
    let mut world = World::guest();
    let mut with = |port: ProbePort| {
        world.config.tenants[0].settings.health.port = Some(port);
        let plan = world.apply();
        targets(&plan)
    };
    let at_both = |port: u16| ["101", "102"].map(|host| format!("eth1 192.168.203.{host}:{port}")).into();
    assert_eq!(with(ProbePort::Number(10256)), at_both(10256));
    assert_eq!(with(ProbePort::Name("port-80".to_owned())), at_both(30282));
    // A name that there is not: each port for itself.
    assert_eq!(with(ProbePort::Name("metrics".to_owned())).len(), 4);
    // Datagrams are vouched for by the first TCP port.
    world.config.tenants[0].settings.health.port = None;
    world.service(WEB).ports[0].protocol = "UDP".to_owned();
    for endpoint in world.inventory.endpoints.get_mut(&name(WEB)).unwrap() {
        endpoint.ports =
            [("port-443".to_owned(), "UDP".to_owned(), 30190), ("port-80".to_owned(), String::new(), 30282)].into();
    }
    let plan = world.apply();
    assert_eq!(serving(&plan, VIP, 443).len(), 2);
    assert_eq!(targets(&plan), at_both(30282));
}

/// A Service with policy Local, of type LoadBalancer with its health port, or of type NodePort without one.
fn local(world: &mut World, health_port: Option<u16>) {
    let mut it = service("uid-web", &[(443, 31443)]);
    (it.policy_local, it.health_port) = (true, health_port);
    world.add(WEB, it);
}

#[test]
fn b24_the_health_port_decides() {
    let mut world = World::new();
    local(&mut world, Some(32000));
    let pod = |node: &str| vec![endpoint("10.128.0.7", Some(node), true, &[("port-443", 8443)])];
    world.endpoints(WEB, pod("node-105"));
    let plan = world.apply();
    assert_eq!(plan.probes.len(), 4);
    for target in &plan.probes {
        let probe = &target.probe;
        assert_eq!((target.port, probe.kind, probe.expect.as_slice()), (32000, ProbeKind::LocalEndpoints, &[200][..]));
        assert_eq!(
            (probe.path.as_str(), probe.interval),
            ("/healthz", world.config.tenants[0].settings.health.interval)
        );
    }
    // Before the first answer, only where the slices know an endpoint.
    assert_eq!(serving(&plan, VIP, 443), ["10.32.96.105"]);
    world.probe_all(&plan, false);
    world.probe(&plan, "10.32.96.105", true);
    let plan = world.apply();
    assert_eq!(serving(&plan, VIP, 443), ["10.32.96.105"]);
    assert!(plan.notices.is_empty(), "{:?}", plan.notices);
    // The pod moves: the port says so, and the sessions on the first node drain.
    world.endpoints(WEB, pod("node-106"));
    world.probe(&plan, "10.32.96.105", false);
    world.probe(&plan, "10.32.96.106", true);
    let plan = world.apply();
    assert_eq!(serving(&plan, VIP, 443), ["10.32.96.106"]);
    assert!(plan.resets.is_empty());
    assert!(plan.backends.values().any(|it| it.address == ip("10.32.96.105") && !it.eligible));
    // No pod anywhere: `try` means no node that has none.
    world.endpoints(WEB, Vec::new());
    world.probe_all(&plan, false);
    let plan = world.apply();
    assert_eq!(at(&plan, VIP, 443).table, None);
    let [notice] = plan.notices.as_slice() else { panic!("{:?}", plan.notices) };
    assert!(notice.message.ends_with("new connections are refused"), "{}", notice.message);
    // The port cannot be reached, but there is an endpoint: that one is tried.
    world.endpoints(WEB, pod("node-107"));
    assert_eq!(serving(&world.apply(), VIP, 443), ["10.32.96.107"]);
    // Without the right to see slices, the port alone decides.
    world.endpoints(WEB, Vec::new());
    world.probe(&plan, "10.32.96.108", true);
    assert_eq!(serving(&world.apply(), VIP, 443), ["10.32.96.108"]);
    // The policy changes to Cluster: all nodes, and the ordinary probe.
    (world.service(WEB).policy_local, world.service(WEB).health_port) = (false, None);
    let plan = world.apply();
    assert_eq!(serving(&plan, VIP, 443), ALL_NODES);
    assert!(plan.probes.iter().all(|it| (it.port, it.probe.kind) == (31443, ProbeKind::Tcp)));
    assert!(plan.resets.is_empty());
}

#[test]
fn b24_without_a_health_port_the_slices_decide() {
    let mut world = World::new();
    local(&mut world, None);
    let router = |node: Option<&str>, ready| endpoint("10.128.0.7", node, ready, &[("port-443", 443)]);
    world.endpoints(WEB, vec![router(Some("node-105"), true), router(Some("node-106"), false)]);
    let plan = world.apply();
    assert_eq!(serving(&plan, VIP, 443), ["10.32.96.105"]);
    assert_eq!(targets(&plan), ["eth0 10.32.96.105:31443".to_owned()].into());
    world.probe(&plan, "10.32.96.105", true);
    // It moves.
    world.endpoints(WEB, vec![router(Some("node-106"), true)]);
    let plan = world.apply();
    assert_eq!(serving(&plan, VIP, 443), ["10.32.96.106"]);
    assert!(plan.resets.is_empty());
    // All fail their probes: still no node without an endpoint.
    world.probe_all(&plan, false);
    assert_eq!(serving(&world.apply(), VIP, 443), ["10.32.96.106"]);
    world.health.clear();
    // Scaled to zero.
    world.endpoints(WEB, Vec::new());
    let plan = world.apply();
    assert_eq!(at(&plan, VIP, 443).table, None);
    assert_eq!(reasons(&plan), ["NoBackend"]);
    assert!(plan.notices[0].message.starts_with("no node has an endpoint"), "{:?}", plan.notices);
    // A node that has no name in the slice, but the node's own address.
    world.endpoints(WEB, vec![endpoint("10.32.96.107", None, true, &[("port-443", 443)])]);
    assert_eq!(serving(&world.apply(), VIP, 443), ["10.32.96.107"]);
    // One that may be anywhere: only where the probe has found it.
    world.endpoints(WEB, vec![router(None, true)]);
    let plan = world.apply();
    assert_eq!((at(&plan, VIP, 443).table, plan.probes.len()), (None, 4));
    world.probe_all(&plan, false);
    assert_eq!(at(&world.apply(), VIP, 443).table, None);
    world.probe(&plan, "10.32.96.108", true);
    assert_eq!(serving(&world.apply(), VIP, 443), ["10.32.96.108"]);
}

#[test]
fn b24_a_mirrored_service_is_asked_at_its_nodes() {
    let mut world = World::guest();
    (world.service(WEB).policy_local, world.service(WEB).health_port) = (true, Some(32020));
    let plan = world.apply();
    let expected = ["101", "102"].map(|host| format!("eth1 192.168.203.{host}:32020"));
    assert_eq!(targets(&plan), expected.into());
    assert!(plan.probes.iter().all(|it| it.probe.kind == ProbeKind::LocalEndpoints));
    assert_eq!(at(&plan, VIP, 443).table, None);
    world.probe(&plan, "192.168.203.102", true);
    world.probe(&plan, "192.168.203.101", false);
    assert_eq!(serving(&world.apply(), VIP, 443), ["192.168.203.102"]);
    world.probe(&plan, "192.168.203.102", false);
    assert_eq!(at(&world.apply(), VIP, 443).table, None);
}

#[test]
fn b25_a_cordon_changes_no_plan() {
    // Nothing of a cordon is in the inventory: see the conversion. The plan of an equal inventory is equal.
    let mut world = World::roles();
    let plan = world.apply();
    world.probe_all(&plan, true);
    let before = world.apply();
    let revision = world.planner.ids_revision();
    world.inventory = world.inventory.clone();
    assert!(world.apply() == before);
    assert_eq!(world.planner.ids_revision(), revision);
}

#[test]
fn b27_an_excluded_node_drains_and_a_new_one_proves_itself_first() {
    let mut world = World::roles();
    let plan = world.apply();
    world.probe_all(&plan, true);
    let before = world.apply();
    world.inventory.nodes.get_mut("node-106").unwrap().excluded = true;
    let plan = world.apply();
    assert_eq!(serving(&plan, VIP, 6443), ["10.32.96.105", "10.32.96.107", "10.32.96.108"]);
    assert!(plan.resets.is_empty());
    world.inventory.nodes.get_mut("node-106").unwrap().excluded = false;
    assert!(world.apply() == before);
    // Half born: no address, then one that does not answer, then one that does.
    world.inventory.nodes.insert("node-109".into(), crate::source::Node { addresses: vec![], ..node(109).1 });
    assert!(world.apply() == before);
    world.inventory.nodes.insert("node-109".into(), node(109).1);
    let plan = world.apply();
    assert_eq!(serving(&plan, VIP, 6443), ALL_NODES);
    assert!(targets(&plan).contains("eth0 10.32.96.109:30918"));
    world.probe(&plan, "10.32.96.109", false);
    assert_eq!(serving(&world.apply(), VIP, 6443), ALL_NODES);
    world.probe(&plan, "10.32.96.109", true);
    assert_eq!(serving(&world.apply(), VIP, 6443).len(), 5);
}

#[test]
fn b28_flows_of_an_address_are_reset_before_it_is_another_nodes() {
    let mut world = World::roles();
    let hub = world.apply().segments.iter().find(|(_, it)| it.hub_side).map(|(&id, _)| id).unwrap();
    world.inventory.nodes.get_mut("node-105").unwrap().addresses = vec![ip("10.32.96.121")];
    let reset = BTreeSet::from([Reset::Address(hub, ip("10.32.96.105"))]);
    assert_eq!(world.apply().resets, reset);
    // The address turns up at a node that is new: nothing of the old one is left to go there.
    let mut fourth = node(105).1;
    fourth.uid = "uid-new".into();
    world.inventory.nodes.insert("node-4".into(), fourth.clone());
    let plan = world.apply();
    assert!(plan.resets.is_empty());
    assert!(serving(&plan, VIP, 6443).contains(&"10.32.96.105".to_owned()));
    // Both at once, while the agent was down.
    let mut world = World::roles();
    world.apply();
    world.restart();
    world.inventory.nodes.get_mut("node-105").unwrap().addresses = vec![ip("10.32.96.121")];
    world.inventory.nodes.insert("node-4".into(), fourth);
    assert_eq!(world.apply().resets, reset);
    // And a node that is made anew under its name, with its address.
    world.inventory.nodes.get_mut("node-106").unwrap().uid = "uid-again".into();
    assert_eq!(world.apply().resets, [Reset::Address(hub, ip("10.32.96.106"))].into());
}

#[test]
fn ranges_are_in_the_plan_and_the_service_is_not_served() {
    let mut world = World::roles();
    world.add("clusters-tenant-a/b", service("uid-b", &[(443, 31443)]));
    world.add("clusters-tenant-a/c", service("uid-c", &[(443, 31444)]));
    world.add("clusters-tenant-a/d", service("uid-d", &[(443, 31445)]));
    assert!(world.apply().clients.is_empty());
    let ranges = |texts: &[&str]| texts.iter().map(ToString::to_string).collect::<Vec<_>>();
    world.service(API).source_ranges = ranges(&["203.0.113.0/25", "203.0.113.128/25", "198.51.100.7/32"]);
    world.service("clusters-tenant-a/b").source_ranges = ranges(&["198.51.100.7/32", "203.0.113.0/24"]);
    world.service("clusters-tenant-a/c").source_ranges = ranges(&["0.0.0.0/0"]);
    world.service("clusters-tenant-a/d").source_ranges = ranges(&["0.0.0.0/0", "203.0.113.9"]);
    let plan = world.apply();
    // Equal sets are one; what cannot be read is nobody.
    let [ClientsPlan([Some(first), _]), ClientsPlan([Some(second), _])] =
        [API, "clusters-tenant-a/b"].map(|it| plan.clients[&name(it)])
    else {
        panic!("{:?}", plan.clients)
    };
    assert_eq!(first, second);
    let shown: Vec<_> = plan.intervals[first].iter().map(ToString::to_string).collect();
    assert_eq!(shown, ["198.51.100.7", "203.0.113.0-203.0.113.255"]);
    let ClientsPlan([Some(four), Some(six)]) = plan.clients[&name("clusters-tenant-a/d")] else { panic!() };
    assert!(plan.intervals[four].is_empty() && plan.intervals[six].is_empty());
    assert!(!plan.clients.contains_key(&name("clusters-tenant-a/c")));
    assert_eq!(plan.intervals.len(), 2);
    let served = |of: &str| plan.frontends.values().any(|it| it.service == Some(name(of)));
    assert!(!served(API) && !served("clusters-tenant-a/b") && !served("clusters-tenant-a/d"));
    assert!(served("clusters-tenant-a/c"));
}

const TUNNEL: &str = "clusters-tenant-a/konnectivity-server";

/// A Service that shares its VIP.
fn sharer(created: i64, uid: &str, ports: &[(u16, u16)]) -> Service {
    let mut it = service(uid, ports);
    it.created = created;
    it.annotations.insert("lbd.tenantedge.io/shared-key".to_owned(), "cp".to_owned());
    it
}

#[test]
fn b20_services_on_one_vip_come_and_go_by_themselves() {
    let mut world = World::new();
    world.add(API, sharer(1, "uid-api", &[(6443, 30918)]));
    world.add(TUNNEL, sharer(2, "uid-tunnel", &[(8091, 31091), (6443, 31943)]));
    let plan = world.apply();
    assert_eq!((at(&plan, VIP, 6443).target_port, at(&plan, VIP, 8091).target_port), (30918, 31091));
    let [notice] = plan.notices.as_slice() else { panic!("{:?}", plan.notices) };
    // Only the later one's port, and it names the holder.
    assert_eq!((notice.reason, notice.service.clone()), ("PortClash", Some(name(TUNNEL))));
    assert!(notice.message.contains(API), "{}", notice.message);
    assert_eq!(plan.addresses.values().filter(|it| it.vip).count(), 1);
    let (first, second) = (at(&plan, VIP, 6443).id, at(&plan, VIP, 8091).id);
    // The first goes: its sessions end, the other's do not, and the port is the other's now.
    world.inventory.services.remove(&name(API));
    let plan = world.apply();
    assert_eq!(plan.resets, [Reset::Frontend(first)].into());
    assert_eq!((at(&plan, VIP, 8091).id, at(&plan, VIP, 6443).target_port), (second, 31943));
    assert!(plan.notices.is_empty());
    // An older one that wants the port now does not take it away.
    world.add("clusters-tenant-a/late", sharer(0, "uid-late", &[(6443, 30111), (9443, 30112)]));
    let plan = world.apply();
    assert_eq!((at(&plan, VIP, 6443).target_port, at(&plan, VIP, 9443).target_port), (31943, 30112));
    assert!(plan.resets.is_empty());
    assert_eq!(plan.notices[0].service, Some(name("clusters-tenant-a/late")));
    world.restart();
    assert!(world.apply() == plan);
    // The last one takes the address with it.
    world.inventory.services.clear();
    assert!(world.apply().addresses.values().all(|it| !it.vip));
}

#[test]
fn b21_tcp_and_udp_on_one_number_are_two_and_doubles_are_one() {
    let mut world = World::new();
    let mut it = service("uid", &[(443, 31443), (443, 31444), (80, 31080), (80, 31081), (5000, 31500)]);
    (it.ports[1].protocol, it.ports[4].protocol) = ("UDP".to_owned(), "SCTP".to_owned());
    world.add(WEB, it);
    let plan = world.apply();
    let by = |plan: &Plan, port: u16, protocol: Protocol| {
        plan.frontends
            .iter()
            .find(|(at, _)| (at.port, at.protocol) == (port, protocol))
            .map(|(_, it)| (it.id, it.target_port))
    };
    let (tcp, udp) = (by(&plan, 443, Protocol::Tcp).unwrap(), by(&plan, 443, Protocol::Udp).unwrap());
    assert_eq!((tcp.1, udp.1), (31443, 31444));
    // The first of two equal ones; SCTP alone is left out.
    assert_eq!(by(&plan, 80, Protocol::Tcp).unwrap().1, 31080);
    assert_eq!((plan.frontends.len(), reasons(&plan)), (3, vec!["PortClash", "ProtocolUnsupported"]));
    // The API drops one of the two.
    world.service(WEB).ports.remove(0);
    let plan = world.apply();
    assert_eq!(by(&plan, 443, Protocol::Udp), Some(udp));
    assert_eq!((by(&plan, 443, Protocol::Tcp), plan.resets), (None, [Reset::Frontend(tcp.0)].into()));
}

#[test]
fn b40_a_service_beyond_the_capacity_gets_nothing_and_disturbs_nobody() {
    let mut world = World::new();
    world.config.tenants[0].pools = vec![range("192.168.203.64-192.168.203.199")];
    // As if the map had room for 64.
    world.planner.ids.frontends.highest = FRONTENDS.last - 64;
    let of = |number: u16| format!("clusters-tenant-a/s{number:03}");
    for number in 0..65u16 {
        let mut it = service(&format!("uid-{number}"), &[(6443, 29000 + number)]);
        it.created = i64::from(number);
        world.add(&of(number), it);
    }
    let plan = world.apply();
    assert_eq!(plan.frontends.len(), 64);
    let [notice] = plan.notices.as_slice() else { panic!("{:?}", plan.notices) };
    assert_eq!((notice.reason, notice.service.clone()), ("TooManyFrontends", Some(name(&of(64)))));
    assert!(notice.message.contains("65535"), "{}", notice.message);
    // No hot retry, and no id is used up by trying.
    let revision = world.planner.ids_revision();
    assert!(world.apply() == plan);
    assert_eq!(world.planner.ids_revision(), revision);
    // One goes: what is over takes its place, once the flows of the one that has gone are reset.
    world.inventory.services.remove(&name(&of(7)));
    let gone = plan.frontends.values().find(|it| it.name == of(7)).unwrap().id;
    assert_eq!(world.apply().resets, [Reset::Frontend(gone)].into());
    let plan = world.apply();
    assert_eq!((plan.frontends.len(), plan.notices.len()), (64, 0));
    assert_eq!(plan.frontends.values().find(|it| it.name == of(64)).unwrap().id, gone);
    // Three ports where there is room for one: none of them.
    world.inventory.services.remove(&name(&of(9)));
    world.apply();
    let mut three = service("uid-three", &[(1, 28001), (2, 28002), (3, 28003)]);
    three.created = 100;
    world.add("clusters-tenant-a/three", three);
    let plan = world.apply();
    assert_eq!((plan.frontends.len(), reasons(&plan)), (63, vec!["TooManyFrontends"; 3]));
    // Nor does it stand in the way of one that fits, or lose what it has when it wants more.
    let mut late = service("uid-late", &[(1, 28011)]);
    late.created = 200;
    world.add("clusters-tenant-a/late", late);
    let plan = world.apply();
    assert!(plan.frontends.values().any(|it| it.name == "clusters-tenant-a/late"));
    let before = at(&plan, "192.168.203.64", 6443).id;
    world.service(&of(0)).ports.extend(service("", &[(7000, 28020)]).ports);
    let plan = world.apply();
    assert_eq!(at(&plan, "192.168.203.64", 6443).id, before);
    assert!(plan.resets.is_empty());
    // With room for all, all are there.
    for number in 10..20 {
        world.inventory.services.remove(&name(&of(number)));
    }
    world.apply();
    let plan = world.apply();
    assert!(plan.notices.is_empty(), "{:?}", plan.notices);
    assert_eq!(plan.frontends.values().filter(|it| it.name == "clusters-tenant-a/three").count(), 3);
}
