//! What a plan says of given Services, nodes and health.

mod anything;
mod families;
mod samples;
mod services;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::model::*;
use super::testing::{
    config, frontend, host, inventory, ip, name, node, range, segment, service, shared, tenant, workers,
};
use super::*;
use crate::config::{Affinity, AllDown, Config, Frontend, HostAccess, OnDown, Protocol, StaticBackend, Unserved, Via};
use crate::ipam::Ipam;
use crate::source::{Inventory, Service, ServiceKind};

const API: &str = "clusters-tenant-a/kube-apiserver";
const ROUTER: &str = "openshift-ingress/router-nodeport-tenant-a";

struct World {
    config: Config,
    inventory: Inventory,
    health: Health,
    host: HostFacts,
    ipam: Ipam,
    planner: Planner,
    /// What the last plan was given: the same again is the same object, as in the agent.
    given: (Arc<Config>, Arc<Assignments>),
    /// The last plan had the wishes of the one before.
    same_wishes: bool,
}

impl World {
    fn new() -> Self {
        Self {
            config: config(),
            inventory: inventory(),
            health: Health::new(),
            host: host(),
            ipam: Ipam::default(),
            planner: Planner::default(),
            given: (Arc::new(config()), Arc::default()),
            same_wishes: false,
        }
    }

    /// The three roles at once.
    fn roles() -> Self {
        let mut world = Self::new();
        world.config.tenants[0].frontends = vec![shared(), workers()];
        world.add(API, service("uid-api", &[(6443, 30918)]));
        let mut router = service("uid-router", &[(443, 32488), (80, 32460), (1936, 32100)]);
        router.kind = ServiceKind::NodePort;
        world.add(ROUTER, router);
        world
    }

    fn add(&mut self, named: &str, service: Service) {
        self.inventory.services.insert(name(named), service);
    }

    fn service(&mut self, named: &str) -> &mut Service {
        self.inventory.services.get_mut(&name(named)).unwrap()
    }

    fn plan(&mut self) -> Plan {
        let assignments = self.ipam.assign(&self.config, &self.inventory, &self.host, &BTreeSet::new(), 0);
        self.plan_with(&assignments)
    }

    fn plan_with(&mut self, assignments: &Assignments) -> Plan {
        let (config, known) = &mut self.given;
        if **config != self.config {
            *config = Arc::new(self.config.clone());
        }
        if **known != *assignments {
            *known = Arc::new(assignments.clone());
        }
        let origin = Origin::of(config, &self.inventory, known, &self.host);
        self.same_wishes = self.planner.known.as_ref().is_some_and(|wishes| wishes.holds(&origin));
        self.planner.plan(config, &self.inventory, known, &self.health, &self.host)
    }

    /// A plan that has reached the maps.
    fn apply(&mut self) -> Plan {
        let plan = self.plan();
        self.planner.applied();
        plan
    }

    /// The agent dies and comes back with what is on disk.
    fn restart(&mut self) {
        let ids = serde_json::to_string(self.planner.ids()).unwrap();
        self.planner = Planner::new(serde_json::from_str(&ids).unwrap());
        let record = serde_json::to_string(self.ipam.record()).unwrap();
        self.ipam = Ipam::new(serde_json::from_str(&record).unwrap());
    }

    /// Every target of an address gets this result.
    fn probe(&mut self, plan: &Plan, address: &str, up: bool) {
        for target in plan.probes.iter().filter(|target| target.address == ip(address)) {
            let result = TargetHealth { up: Some(up), cause: String::new(), since: 0 };
            self.health.insert(target.clone(), result);
        }
    }

    fn probe_all(&mut self, plan: &Plan, up: bool) {
        let addresses: BTreeSet<_> = plan.probes.iter().map(|target| target.address.to_string()).collect();
        for address in addresses {
            self.probe(plan, &address, up);
        }
    }
}

fn at<'a>(plan: &'a Plan, vip: &str, port: u16) -> &'a FrontendPlan {
    let found = plan.frontends.iter().find(|(address, _)| address.vip == ip(vip) && address.port == port);
    found.unwrap_or_else(|| panic!("no frontend {vip}:{port} in {:#?}", plan.frontends)).1
}

/// Addresses in the lookup table of a frontend.
fn serving(plan: &Plan, vip: &str, port: u16) -> Vec<String> {
    let Some(table) = at(plan, vip, port).table else { return Vec::new() };
    let ids: BTreeSet<_> = plan.tables[table].iter().collect();
    let mut addresses: Vec<_> = ids.into_iter().map(|id| plan.backends[id].address).collect();
    addresses.sort();
    addresses.iter().map(ToString::to_string).collect()
}

fn slots<'a>(plan: &'a Plan, vip: &str, port: u16) -> &'a Arc<[BackendId]> {
    &plan.tables[at(plan, vip, port).table.unwrap()]
}

fn reasons(plan: &Plan) -> Vec<&'static str> {
    plan.notices.iter().map(|notice| notice.reason).collect()
}

const ALL_NODES: [&str; 4] = ["10.32.96.105", "10.32.96.106", "10.32.96.107", "10.32.96.108"];

#[test]
fn the_three_roles() {
    let mut world = World::roles();
    let plan = world.apply();
    assert!(plan.notices.is_empty(), "{:?}", plan.notices);
    assert!(plan.resets.is_empty());

    assert_eq!(plan.segments.len(), 2);
    let hub = plan.segments.iter().find(|(_, it)| it.hub_side).map(|(&id, _)| id).unwrap();
    let (&edge, tenant_side) = plan.segments.iter().find(|(_, it)| it.tenant_side).unwrap();
    assert_eq!(tenant_side.name, segment("eth1"));
    assert_eq!(tenant_side.networks, ["192.168.203.0/24".parse().unwrap()]);
    assert_eq!(tenant_side.gateways, [ip("192.168.203.1")]);
    assert_eq!(plan.tenants[&tenant_side.tenant].name, "tenant-a");
    assert_eq!(plan.tenants[&tenant_side.tenant].families[0].flows, 131_072);
    assert!(!plan.segments[&hub].tenant_side);

    let address = |segment, address: &str| plan.addresses[&(segment, ip(address))].clone();
    for vip in ["192.168.203.110", "192.168.203.111", "192.168.203.112"] {
        assert_eq!(address(edge, vip), AddressPlan { vip: true, tenant: 1, ..AddressPlan::default() });
    }
    let own = AddressPlan { host: true, snat: Some((1024, 32767)), ..AddressPlan::default() };
    assert_eq!(address(hub, "10.32.96.50"), own);
    assert_eq!(address(edge, "192.168.203.2"), AddressPlan { tenant: 1, ..own });
    assert_eq!(plan.addresses.len(), 5);

    let api = at(&plan, "192.168.203.110", 6443);
    assert_eq!((api.target_port, api.snat, api.snat_ports), (30918, Some(ip("10.32.96.50")), (1024, 32767)));
    assert_eq!((api.name.as_str(), api.service_uid.as_str()), (API, "uid-api"));
    assert_eq!(serving(&plan, "192.168.203.110", 6443), ALL_NODES);
    assert_eq!(at(&plan, "192.168.203.111", 443).target_port, 32488);
    assert_eq!(at(&plan, "192.168.203.111", 80).target_port, 32460);
    let worker = at(&plan, "192.168.203.112", 443);
    assert_eq!((worker.target_port, worker.snat), (30190, Some(ip("192.168.203.2"))));
    assert_eq!(serving(&plan, "192.168.203.112", 80), ["192.168.203.101", "192.168.203.102"]);
    // The reservation names two of the three ports.
    assert_eq!(plan.frontends.len(), 5);
    // One table for the nodes, one for the workers, whatever the ports.
    assert_eq!(plan.tables.len(), 2);
    assert_eq!(plan.tables.iter().map(|table| table.len()).collect::<BTreeSet<_>>(), [4093].into());
    assert_eq!(plan.backends.len(), 6);
    assert!(plan.backends.values().all(|backend| backend.port == 0 && backend.eligible));
    assert_eq!(plan.backends.values().filter(|it| it.node.is_some()).count(), 4);
    // Each target once, bound to the interface where the backend lives.
    assert_eq!(plan.probes.len(), 4 * 3 + 2 * 2);
    let bound = plan.probes.iter().all(|target| {
        &*target.interface == if target.address.to_string().starts_with("10.") { "eth0" } else { "eth1" }
    });
    assert!(bound);
}

#[test]
fn one_interface_for_both_sides_is_one_segment() {
    let mut world = World::roles();
    world.config.tenants[0].segment = segment("eth0");
    world.config.tenants[0].pools = vec![range("10.32.96.200-10.32.96.209")];
    world.config.tenants[0].frontends.clear();
    let plan = world.plan();
    assert_eq!(plan.segments.len(), 1);
    let segment = plan.segments.values().next().unwrap();
    assert!(segment.hub_side && segment.tenant_side);
    assert_eq!(serving(&plan, "10.32.96.200", 6443), ALL_NODES);
}

#[test]
fn the_same_inputs_give_the_same_plan_in_any_order() {
    let mut world = World::roles();
    let mut other = tenant("tenant-b", "eth2");
    other.frontends = vec![frontend("web", Some("192.168.203.111"), &[(80, None), (443, None)])];
    other.frontends[0].backends = workers().backends;
    other.frontends[0].via = Via::Hub;
    world.config.tenants.push(other);
    let first = world.plan();
    // Not applied: asked for again, with the resets.
    assert!(world.plan() == first);
    world.restart();
    assert!(world.plan() == first);

    let mut shuffled = World::roles();
    shuffled.config.tenants = world.config.tenants.iter().rev().cloned().collect();
    for tenant in &mut shuffled.config.tenants {
        tenant.frontends.reverse();
        for frontend in &mut tenant.frontends {
            frontend.ports.reverse();
            frontend.backends.reverse();
        }
    }
    assert!(shuffled.plan() == first);
}

#[test]
fn the_time_of_a_probe_result_does_not_change_the_plan() {
    let mut world = World::roles();
    let plan = world.apply();
    world.probe_all(&plan, true);
    let before = world.plan();
    for known in world.health.values_mut() {
        known.since += 100;
        known.cause.push('x');
    }
    assert!(world.plan() == before);
}

#[test]
fn a50_the_order_of_nodes_does_not_matter_and_ids_have_no_part_in_the_table() {
    let mut world = World::roles();
    let first = world.plan();
    // Other ids: the nodes come one by one, in another order, before the Service does.
    let mut other = World::roles();
    let nodes = std::mem::take(&mut other.inventory.nodes);
    for (name, node) in nodes.iter().rev() {
        other.inventory.nodes.insert(name.clone(), node.clone());
        other.apply();
    }
    let last = other.plan();
    let addresses = |plan: &Plan| -> Vec<IpAddr> {
        slots(plan, "192.168.203.110", 6443).iter().map(|id| plan.backends[id].address).collect()
    };
    assert_ne!(slots(&first, "192.168.203.110", 6443), slots(&last, "192.168.203.110", 6443));
    assert_eq!(addresses(&first), addresses(&last));
}

#[test]
fn a50_only_slots_that_must_move_do() {
    let mut world = World::new();
    world.inventory.nodes = (1..=10).map(node).collect();
    world.add(API, service("uid-api", &[(6443, 30918)]));
    let plan = world.apply();
    let before = Arc::clone(slots(&plan, "192.168.203.110", 6443));
    world.inventory.nodes.remove("node-3");
    let gone = plan.backends.iter().find(|(_, it)| it.node.as_deref() == Some("node-3")).map(|(&id, _)| id).unwrap();
    let plan = world.apply();
    let after = slots(&plan, "192.168.203.110", 6443);
    let must = before.iter().filter(|&&id| id == gone).count();
    let moved = before.iter().zip(after.iter()).filter(|(old, new)| old != new).count();
    assert!((1630..=1645).contains(&must), "{must}");
    // At most 1 % of the survivors' 14,743 slots.
    assert!(moved - must <= 147, "{moved} {must}");
    assert!(!after.contains(&gone));
}

#[test]
fn a51_a_backend_that_flaps_leaves_the_table_and_comes_back_and_no_flow_is_reset() {
    let mut world = World::roles();
    let plan = world.apply();
    world.probe_all(&plan, true);
    let before = world.apply();
    for _ in 0..10 {
        world.probe(&before, "10.32.96.106", false);
        let down = world.apply();
        assert_eq!(serving(&down, "192.168.203.110", 6443), ["10.32.96.105", "10.32.96.107", "10.32.96.108"]);
        assert!(down.resets.is_empty());
        // It stays known, for its flows.
        assert_eq!(down.backends.len(), before.backends.len());
        assert!(down.backends.values().any(|it| it.node.as_deref() == Some("node-106") && !it.eligible));
        world.probe(&before, "10.32.96.106", true);
        assert!(world.apply() == before);
    }
}

#[test]
fn a52_the_flows_of_a_deleted_node_are_reset_once() {
    let mut world = World::roles();
    let hub = world.apply().segments.iter().find(|(_, it)| it.hub_side).map(|(&id, _)| id).unwrap();
    world.inventory.nodes.remove("node-106");
    let expected = BTreeSet::from([Reset::Address(hub, ip("10.32.96.106"))]);
    assert_eq!(world.plan().resets, expected);
    // Applying failed: again. Also after a restart.
    assert_eq!(world.plan().resets, expected);
    world.restart();
    assert_eq!(world.apply().resets, expected);
    assert!(world.apply().resets.is_empty());
}

#[test]
fn a52_a_node_that_is_deleted_while_the_agent_is_down_is_found() {
    let mut world = World::roles();
    world.apply();
    world.restart();
    world.inventory.nodes.remove("node-106");
    assert_eq!(world.apply().resets.len(), 1);
}

#[test]
fn a52_a_node_that_is_only_off_or_excluded_keeps_its_flows() {
    let mut world = World::roles();
    let plan = world.apply();
    world.probe_all(&plan, true);
    world.probe(&plan, "10.32.96.106", false);
    world.inventory.nodes.get_mut("node-107").unwrap().excluded = true;
    let plan = world.apply();
    assert!(plan.resets.is_empty());
    assert_eq!(serving(&plan, "192.168.203.110", 6443), ["10.32.96.105", "10.32.96.108"]);
    // An excluded node is not probed, but it is still there.
    assert!(!plan.probes.iter().any(|target| target.address == ip("10.32.96.107")));
    assert_eq!(plan.backends.len(), 6);
}

#[test]
fn a52_with_on_down_reset_the_flows_of_a_backend_that_goes_down_are_reset() {
    let mut world = World::roles();
    world.config.tenants[0].settings.on_down = OnDown::Reset;
    let plan = world.apply();
    assert!(plan.resets.is_empty());
    world.probe_all(&plan, true);
    world.apply();
    world.probe(&plan, "10.32.96.106", false);
    let plan = world.plan();
    let api = at(&plan, "192.168.203.110", 6443);
    assert!(api.reset_on_down);
    let backend = api.backends.iter().find(|it| it.address == ip("10.32.96.106")).unwrap().id;
    assert_eq!(plan.resets, [Reset::Backend { frontend: api.id, backend }].into());
    world.planner.applied();
    assert!(world.apply().resets.is_empty());
    // A restart that has forgotten the health does not repeat it, nor does it miss what happened meanwhile.
    world.restart();
    let health = std::mem::take(&mut world.health);
    assert!(world.apply().resets.is_empty());
    world.health = health;
    world.probe(&plan, "10.32.96.107", false);
    let resets = world.apply().resets;
    assert_eq!(resets.len(), 1);
    assert!(!resets.contains(&Reset::Backend { frontend: at(&plan, "192.168.203.110", 6443).id, backend }));
}

#[test]
fn b01_a_node_port_that_changes_is_followed_and_flows_are_kept() {
    let mut world = World::roles();
    let before = world.apply();
    world.service(API).ports[0].node_port = 31222;
    let after = world.plan();
    let (old, new) = (at(&before, "192.168.203.110", 6443), at(&after, "192.168.203.110", 6443));
    assert_eq!((old.target_port, new.target_port), (30918, 31222));
    assert_eq!((old.id, old.table), (new.id, new.table));
    assert!(Arc::ptr_eq(slots(&before, "192.168.203.110", 6443), slots(&after, "192.168.203.110", 6443)));
    assert!(after.resets.is_empty());
    // The new port has to prove itself, but serves meanwhile.
    assert_eq!(serving(&after, "192.168.203.110", 6443), ALL_NODES);
    assert!(after.probes.iter().any(|target| target.port == 31222));
    assert!(!after.probes.iter().any(|target| target.port == 30918));
}

#[test]
fn b01_a_node_port_that_another_service_gets_takes_the_old_flows_with_it() {
    let mut world = World::roles();
    world.apply();
    world.service(API).ports[0].node_port = 31222;
    world.apply();
    world.restart();
    let mut other = service("uid-other", &[(8443, 30918)]);
    other.created = 2000;
    world.add("clusters-tenant-a/other", other);
    let plan = world.apply();
    let keep = at(&plan, "192.168.203.113", 8443).id;
    let hub = plan.segments.iter().find(|(_, it)| it.hub_side).map(|(&id, _)| id).unwrap();
    let reset = Reset::Target { segment: hub, protocol: 6, address: None, port: 30918, keep: [keep].into() };
    assert_eq!(plan.resets, [reset].into());
    assert!(world.apply().resets.is_empty());
}

#[test]
fn b01_a_node_port_that_a_service_of_nobody_gets_takes_the_old_flows_with_it() {
    let mut world = World::roles();
    world.apply();
    world.service(API).ports[0].node_port = 31222;
    world.apply();
    world.restart();
    // No tenant claims it, and no frontend leads to it.
    let mut other = service("uid-other", &[(8443, 30918)]);
    other.kind = ServiceKind::NodePort;
    world.add("default/other", other);
    let plan = world.apply();
    let hub = plan.segments.iter().find(|(_, it)| it.hub_side).map(|(&id, _)| id).unwrap();
    let keep = BTreeSet::new();
    assert_eq!(plan.resets, [Reset::Target { segment: hub, protocol: 6, address: None, port: 30918, keep }].into());
    assert!(world.apply().resets.is_empty());
    // And when it comes back.
    world.inventory.services.remove(&name("default/other"));
    world.service(API).ports[0].node_port = 30918;
    assert_eq!(world.apply().resets.len(), 1);
    assert!(world.apply().resets.is_empty());
}

#[test]
fn ids_that_are_lost_are_those_of_the_maps() {
    let mut world = World::roles();
    let before = world.apply();
    let (segments, tenant) = (&before.segments, *before.tenants.keys().next().unwrap());
    // As if they had come about in another order.
    let pinned = Pinned {
        segments: segments.iter().map(|(&id, plan)| (plan.name.clone(), 10 - id)).collect(),
        frontends: before
            .frontends
            .iter()
            .map(|(at, plan)| (FrontendAddress { segment: 10 - at.segment, ..*at }, (plan.id + 100, tenant + 5)))
            .chain([(FrontendAddress { segment: 9, vip: ip("192.0.2.9"), port: 1, protocol: Protocol::Tcp }, (99, 3))])
            .collect(),
        backends: before
            .backends
            .iter()
            .map(|(&id, plan)| (id + 200, (10 - plan.segment, plan.address, plan.port)))
            .collect(),
        last_segment: 12,
        last_tenant: 9,
        last_frontend: 300,
    };
    for saved in [None, Some(world.planner.ids().clone())] {
        world.planner = Planner::restored(saved, &pinned, &world.config);
        let after = world.apply();
        for (name, &id) in &pinned.segments {
            assert_eq!(&after.segments[&id].name, name);
        }
        for (at, &(id, tenant)) in pinned.frontends.iter().filter(|(at, _)| at.segment != 9 || at.port != 1) {
            assert_eq!((after.frontends[at].id, after.frontends[at].tenant), (id, tenant));
        }
        assert!(after.backends.keys().all(|id| pinned.backends.contains_key(id)));
        // What nobody wants any more is reset, as ever.
        assert_eq!(after.resets, [Reset::Frontend(99)].into());
        let mut more = service("uid-more", &[(1, 30001)]);
        more.created = 5000;
        world.add("clusters-tenant-a/more", more);
        assert!(world.apply().frontends.values().any(|frontend| frontend.id == 301));
        world.inventory.services.remove(&name("clusters-tenant-a/more"));
    }
    // Ids that agree with the maps are kept, with all that they remember.
    let ids = world.planner.ids().clone();
    assert_eq!(*Planner::restored(Some(ids.clone()), &pinned, &world.config).ids(), ids);
}

#[test]
fn a_deleted_service_is_gone_and_a_new_one_of_the_same_name_is_another() {
    let mut world = World::roles();
    let before = world.apply();
    let id = at(&before, "192.168.203.110", 6443).id;
    // While the agent is down, it is deleted and made anew, with the same name and NodePort.
    world.restart();
    world.service(API).uid = "uid-new".to_owned();
    let plan = world.apply();
    let new = at(&plan, "192.168.203.110", 6443).id;
    assert_ne!(id, new);
    assert!(plan.resets.contains(&Reset::Frontend(id)));
    world.inventory.services.remove(&name(API));
    let plan = world.apply();
    assert_eq!(plan.resets, [Reset::Frontend(new)].into());
    assert!(!plan.addresses.contains_key(&(plan.frontends.keys().next().unwrap().segment, ip("192.168.203.110"))));
    // Its id is not used again at once.
    world.add("clusters-tenant-a/other", service("uid-other", &[(80, 30001)]));
    let plan = world.apply();
    assert!(plan.frontends.values().all(|frontend| frontend.id != id && frontend.id != new));
}

#[test]
fn a_reserved_service_that_goes_leaves_a_frontend_without_backend() {
    let mut world = World::roles();
    let before = world.apply();
    let id = at(&before, "192.168.203.111", 443).id;
    let router = world.inventory.services.remove(&name(ROUTER)).unwrap();
    let plan = world.apply();
    assert!(plan.resets.contains(&Reset::Frontend(id)));
    let frontend = at(&plan, "192.168.203.111", 443);
    assert_eq!((frontend.table, frontend.target_port), (None, 0));
    let waiting = frontend.id;
    assert!(plan.notices.is_empty(), "{:?}", plan.notices);
    world.add(ROUTER, (*router).clone());
    let plan = world.apply();
    assert_eq!(at(&plan, "192.168.203.111", 443).id, waiting);
    assert_eq!(serving(&plan, "192.168.203.111", 443), ALL_NODES);
}

#[test]
fn an_incomplete_inventory_resets_nothing() {
    let mut world = World::roles();
    let before = world.apply();
    let complete = world.inventory.clone();
    world.inventory.complete = false;
    world.inventory.services.clear();
    world.inventory.nodes.clear();
    assert!(world.apply().resets.is_empty());
    world.inventory = complete;
    assert!(world.apply() == before);
}

#[test]
fn b28_a_node_that_changes_its_address() {
    let mut world = World::roles();
    let hub = world.apply().segments.iter().find(|(_, it)| it.hub_side).map(|(&id, _)| id).unwrap();
    world.inventory.nodes.get_mut("node-105").unwrap().addresses = vec![ip("10.32.96.121")];
    let plan = world.apply();
    assert_eq!(plan.resets, [Reset::Address(hub, ip("10.32.96.105"))].into());
    assert!(serving(&plan, "192.168.203.110", 6443).contains(&"10.32.96.121".to_owned()));
    // Two nodes swap addresses: no flow of one continues into the other.
    world.inventory.nodes.get_mut("node-107").unwrap().addresses = vec![ip("10.32.96.108")];
    world.inventory.nodes.get_mut("node-108").unwrap().addresses = vec![ip("10.32.96.107")];
    let expected = ["10.32.96.107", "10.32.96.108"].map(|address| Reset::Address(hub, ip(address)));
    assert_eq!(world.apply().resets, expected.into());
    assert!(world.apply().resets.is_empty());
}

#[test]
fn b45_the_vip_is_there_before_any_backend() {
    let mut world = World::new();
    world.add(API, service("uid-api", &[(6443, 0)]));
    let plan = world.apply();
    let frontend = at(&plan, "192.168.203.110", 6443);
    assert_eq!((frontend.table, frontend.target_port), (None, 0));
    assert!(plan.probes.is_empty());
    // With a NodePort but no endpoint, every node refuses: the address stays, and clients hear it from the nodes.
    world.service(API).ports[0].node_port = 30918;
    let plan = world.apply();
    assert_eq!(plan.probes.len(), 4);
    world.probe_all(&plan, false);
    let plan = world.apply();
    assert_eq!(serving(&plan, "192.168.203.110", 6443), ALL_NODES);
    assert_eq!(reasons(&plan), ["AllBackendsDown"]);
    // The first good node takes all.
    world.probe(&plan, "10.32.96.107", true);
    let plan = world.apply();
    assert_eq!(serving(&plan, "192.168.203.110", 6443), ["10.32.96.107"]);
    assert!(plan.notices.is_empty());
}

#[test]
fn b50_a_service_without_node_ports_is_never_programmed_with_port_zero() {
    let mut world = World::new();
    world.add(API, service("uid-api", &[(6443, 30918), (8091, 0)]));
    let plan = world.apply();
    assert_eq!(serving(&plan, "192.168.203.110", 6443), ALL_NODES);
    assert_eq!(at(&plan, "192.168.203.110", 8091).table, None);
    assert_eq!(reasons(&plan), ["NodePortMissing"]);
    world.service(API).ports[0].node_port = 0;
    assert_eq!(at(&world.apply(), "192.168.203.110", 6443).table, None);
    world.service(API).ports[1].node_port = 30919;
    assert_eq!(serving(&world.apply(), "192.168.203.110", 8091), ALL_NODES);
}

#[test]
fn unknown_backends_serve_only_while_nothing_is_up() {
    let mut world = World::new();
    world.add(API, service("uid-api", &[(6443, 30918)]));
    let plan = world.apply();
    assert_eq!(serving(&plan, "192.168.203.110", 6443), ALL_NODES);
    world.probe(&plan, "10.32.96.105", false);
    assert_eq!(serving(&world.apply(), "192.168.203.110", 6443), ALL_NODES[1..]);
    world.probe(&plan, "10.32.96.106", true);
    assert_eq!(serving(&world.apply(), "192.168.203.110", 6443), ALL_NODES[1..2]);
}

#[test]
fn all_down_reject_refuses() {
    let mut world = World::new();
    world.config.tenants[0].settings.all_down = AllDown::Reject;
    world.add(API, service("uid-api", &[(6443, 30918)]));
    let plan = world.apply();
    world.probe_all(&plan, false);
    let plan = world.apply();
    assert_eq!(at(&plan, "192.168.203.110", 6443).table, None);
    assert!(plan.notices[0].message.ends_with("new connections are refused"), "{:?}", plan.notices);
    assert!(plan.backends.values().all(|backend| !backend.eligible));
}

#[test]
fn a_weight_of_zero_drains_and_others_share_by_weight() {
    let mut world = World::new();
    let mut workers = workers();
    workers.backends.push(StaticBackend { address: ip("192.168.203.103"), port: Some(30190), weight: 2 });
    workers.backends[0].weight = 0;
    world.config.tenants[0].frontends = vec![workers];
    let plan = world.apply();
    assert_eq!(serving(&plan, "192.168.203.112", 443), ["192.168.203.102", "192.168.203.103"]);
    let table = slots(&plan, "192.168.203.112", 443);
    let heavy = plan.backends.iter().find(|(_, it)| it.address == ip("192.168.203.103") && it.port == 0).unwrap().0;
    let share = table.iter().filter(|id| *id == heavy).count() as f64 / table.len() as f64;
    assert!((0.66..0.67).contains(&share), "{share}");
    // On the other port, whose target differs, the backend with a port of its own is another backend.
    assert!(plan.backends.values().any(|it| it.address == ip("192.168.203.103") && it.port == 30190));
    assert!(plan.resets.is_empty());
}

#[test]
fn affinity_and_limits_come_from_service_and_file() {
    let mut world = World::roles();
    world.service(API).client_ip_affinity = true;
    world.config.tenants[0].frontends[1].settings.affinity = Some(Affinity::Source);
    world.config.tenants[0].limits.flows = Some(1000);
    world.config.tenants[0].limits.new_flows_per_second = Some(50);
    world.config.tenants[0].host_access = HostAccess::Only { ports: vec![22], icmp: true };
    let plan = world.apply();
    assert!(at(&plan, "192.168.203.110", 6443).source_affinity);
    assert!(!at(&plan, "192.168.203.111", 443).source_affinity);
    assert!(at(&plan, "192.168.203.112", 443).source_affinity);
    let limits = &plan.tenants[&1];
    let family = FamilyLimitsPlan { flows: 1000, udp: 250, half_open: 500 };
    assert_eq!((limits.families, limits.new_flows_per_second), ([family; 2], 50));
    assert!(!limits.host_access_all && limits.host_access_icmp);
    let segment = plan.segments.values().find(|segment| segment.tenant_side).unwrap();
    assert_eq!(segment.host_ports, [22].into());
}

#[test]
fn a_port_clash_leaves_the_first_alone() {
    let mut world = World::roles();
    let reservation = Frontend {
        service: Some(("clusters-tenant-a".to_owned(), "kube-apiserver".to_owned())),
        ..frontend("api", Some("192.168.203.111"), &[(443, Some(30918)), (6443, None)])
    };
    world.config.tenants[0].frontends.push(reservation);
    let plan = world.apply();
    assert_eq!(reasons(&plan), ["PortClash"]);
    // By name, "api" comes first; its other port is served too.
    assert_eq!(at(&plan, "192.168.203.111", 443).name, "api");
    assert_eq!(at(&plan, "192.168.203.111", 6443).name, "api");
    assert_eq!(at(&plan, "192.168.203.111", 80).name, "ingress-shared-lb");
}

#[test]
fn a31_a_vip_is_silent_only_if_all_its_frontends_are() {
    let mut world = World::roles();
    let silent = |plan: &Plan| -> BTreeMap<IpAddr, bool> {
        plan.addresses.iter().filter(|(_, known)| known.vip).map(|(key, known)| (key.1, known.unserved_drop)).collect()
    };
    assert!(silent(&world.plan()).into_values().all(|quiet| !quiet));
    // Frontends 80 and 443 of the third VIP come from one entry of the file; a second entry answers at a port of its own.
    let vip = ip("192.168.203.112");
    let frontends = &mut world.config.tenants[0].frontends;
    let place = frontends.iter().position(|frontend| frontend.vip == Some(vip)).unwrap();
    frontends[place].settings.unserved = Unserved::Drop;
    let quiet = silent(&world.plan());
    assert!(quiet[&vip] && quiet.iter().all(|(address, quiet)| *quiet == (*address == vip)), "{quiet:?}");
    let mut other = world.config.tenants[0].frontends[place].clone();
    other.name = "answering".to_owned();
    other.settings.unserved = Unserved::Reject;
    for port in &mut other.ports {
        port.port += 1000;
    }
    world.config.tenants[0].frontends.push(other);
    assert!(!silent(&world.plan())[&vip]);
}

#[test]
fn duplicate_odd_and_unserved_ports() {
    let mut world = World::new();
    let mut odd =
        service("uid-api", &[(80, 30080), (80, 30081), (443, 30443), (443, 30444), (5000, 30500), (0, 30900)]);
    odd.ports[3].protocol = "UDP".to_owned();
    odd.ports[4].protocol = "SCTP".to_owned();
    world.add(API, odd);
    let plan = world.apply();
    assert_eq!(at(&plan, "192.168.203.110", 80).target_port, 30080);
    assert_eq!(at(&plan, "192.168.203.110", 443).target_port, 30443);
    let udp = plan.frontends.iter().find(|(address, _)| address.protocol == Protocol::Udp).unwrap();
    assert_eq!((udp.0.port, udp.1.target_port), (443, 30444));
    assert_eq!(plan.frontends.len(), 3);
    assert_eq!(reasons(&plan), ["PortClash", "PortInvalid", "ProtocolUnsupported"]);
}

#[test]
fn source_ranges_close_a_service_that_was_open() {
    let mut world = World::roles();
    let before = world.apply();
    world.service(API).source_ranges = vec!["203.0.113.0/24".to_owned()];
    let plan = world.apply();
    assert!(!plan.frontends.keys().any(|address| address.port == 6443));
    assert_eq!(plan.resets, [Reset::Frontend(at(&before, "192.168.203.110", 6443).id)].into());
    // The address stays ours: its ports answer with a refusal.
    assert!(plan.addresses.iter().any(|((_, address), it)| *address == ip("192.168.203.110") && it.vip));
}

#[test]
fn overlapping_tenants_do_not_meet() {
    let mut world = World::roles();
    world.host.interfaces.insert("eth2".to_owned(), world.host.interfaces["eth1"].clone());
    world.config.tenants.push(tenant("tenant-b", "eth2"));
    world.add("clusters-tenant-b/kube-apiserver", service("uid-b", &[(6443, 30920)]));
    let plan = world.apply();
    let both: Vec<_> = plan.frontends.iter().filter(|(address, _)| address.port == 6443).collect();
    assert_eq!(both.len(), 2);
    assert_eq!(both[0].0.vip, both[1].0.vip);
    assert_ne!((both[0].0.segment, both[0].1.tenant), (both[1].0.segment, both[1].1.tenant));
    assert_eq!(both[0].1.table, both[1].1.table);
}

#[test]
fn nodes_outside_the_hub_and_this_host_itself_get_nothing() {
    let mut world = World::roles();
    world
        .inventory
        .nodes
        .insert("far".to_owned(), crate::source::Node { addresses: vec![ip("172.16.0.9")], ..Default::default() });
    world
        .inventory
        .nodes
        .insert("self".to_owned(), crate::source::Node { addresses: vec![ip("10.32.96.50")], ..Default::default() });
    world.inventory.nodes.insert("unborn".to_owned(), crate::source::Node::default());
    let plan = world.apply();
    assert_eq!(serving(&plan, "192.168.203.110", 6443), ALL_NODES);
    assert_eq!(reasons(&plan), ["NodeAddressIsOurs", "NodeOutsideHub"]);
}

#[test]
fn without_a_source_address_nothing_is_served_and_it_says_so() {
    let mut world = World::roles();
    world.host.interfaces.clear();
    let plan = world.apply();
    assert!(plan.frontends.values().all(|frontend| frontend.table.is_none()));
    assert!(reasons(&plan).contains(&"NoSnatAddress"));
    assert!(plan.resets.is_empty());
}

#[test]
fn an_interface_that_loses_its_address_for_a_moment_costs_no_flow_and_no_id() {
    let mut world = World::roles();
    let before = world.apply();
    let facts = std::mem::take(&mut world.host);
    assert!(world.apply().resets.is_empty());
    world.host = facts;
    assert!(world.apply() == before);
    // A node that goes meanwhile is noticed.
    let facts = std::mem::take(&mut world.host);
    world.inventory.nodes.remove("node-106");
    assert_eq!(world.apply().resets.len(), 1);
    world.host = facts;
    assert!(world.apply().resets.is_empty());
}

#[test]
fn frontends_share_several_source_addresses() {
    let mut world = World::roles();
    world.config.hub.snat = vec![ip("10.32.96.50"), ip("10.32.96.51")];
    let plan = world.apply();
    let used: BTreeSet<_> =
        plan.frontends.values().filter_map(|it| it.snat).filter(|it| it.to_string().starts_with("10.")).collect();
    assert_eq!(used.len(), 2);
    let second = plan.addresses.iter().find(|((_, address), _)| *address == ip("10.32.96.51")).unwrap().1;
    assert_eq!((second.host, second.snat), (false, Some((1024, 32767))));
}

#[test]
fn health_of_a_backend_is_found_again() {
    let mut world = World::roles();
    let plan = world.apply();
    world.probe(&plan, "10.32.96.106", true);
    let api = at(&plan, "192.168.203.110", 6443);
    for backend in api.backends.iter() {
        let expected = (backend.address == ip("10.32.96.106")).then_some(true);
        assert_eq!(api.health_of(backend, &world.health).up, expected);
        assert_eq!(api.port_of(backend), 30918);
        assert!(api.targets_of(backend).all(|target| plan.probes.contains(&target)));
    }
    assert_eq!(any_up([Some(false), Some(true)].into_iter()), Some(true));
    assert_eq!(any_up([Some(false), Some(false)].into_iter()), Some(false));
    assert_eq!(any_up([Some(false), None].into_iter()), None);
    assert_eq!(any_up(std::iter::empty()), None);
}

fn crowd(services: u16, nodes: u16) -> World {
    let mut world = World::new();
    world.config.tenants[0].pools = vec![range("192.168.128.0-192.168.202.255")];
    world.inventory.nodes = (0..nodes)
        .map(|number| {
            let mut it = node(0).1;
            it.uid = format!("uid-{number}");
            it.addresses = vec![IpAddr::from([10, 32, 100 + (number / 250) as u8, (number % 250) as u8])];
            (format!("node-{number}"), it)
        })
        .collect();
    for number in 0..services {
        let mut it = service(&format!("uid-{number}"), &[(6443, 20000 + number)]);
        it.created = i64::from(number);
        world.add(&format!("clusters-tenant-a/service-{number}"), it);
    }
    world
}

/// What this thread has used of a processor: on a busy machine the clock on the wall measures the others.
fn processor_time() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}

#[test]
fn ten_thousand_services_on_five_hundred_nodes_share_one_table() {
    let mut world = crowd(10_000, 500);
    world.ipam.assign(&world.config, &world.inventory, &world.host, &BTreeSet::new(), 0);
    let start = processor_time();
    let assignments = world.ipam.assign(&world.config, &world.inventory, &world.host, &BTreeSet::new(), 0);
    println!("addresses again: {:?}", processor_time().saturating_sub(start));
    let plan_of = |world: &mut World, what: &str| {
        let start = processor_time();
        let plan = world.plan_with(&assignments);
        let took = processor_time().saturating_sub(start);
        println!("{what}: {took:?}");
        world.planner.applied();
        (plan, took)
    };
    let (plan, _) = plan_of(&mut world, "first plan");
    assert_eq!((plan.frontends.len(), plan.backends.len(), plan.tables.len()), (10_000, 500, 1));
    assert_eq!(reasons(&plan), ["ProbeBudget"]);
    // A few frontends stand for each node.
    assert_eq!(plan.probes.len(), 1500);
    world.probe_all(&plan, true);
    let (plan, _) = plan_of(&mut world, "all up");
    assert_eq!(plan.tables[0].len(), 65521);
    // One node dies; only its three probes change.
    world.probe(&plan, "10.32.100.7", false);
    let (after, took) = plan_of(&mut world, "one node dead");
    assert_eq!(after.tables.len(), 1);
    assert!(after.frontends.values().all(|frontend| frontend.table == Some(0)));
    let gone = after.backends.iter().find(|(_, it)| it.address == ip("10.32.100.7")).unwrap().0;
    assert!(!after.tables[0].contains(gone) && plan.tables[0].contains(gone));
    // Unoptimised builds get more time.
    let bound = if cfg!(debug_assertions) { Duration::from_secs(3) } else { Duration::from_millis(60) };
    assert!(took < bound, "{took:?}");
    let start = processor_time();
    let ids = serde_json::to_vec(world.planner.ids()).unwrap();
    println!("{} bytes of ids: {:?}", ids.len(), processor_time().saturating_sub(start));
    let revision = world.planner.ids_revision();
    let (again, _) = plan_of(&mut world, "nothing changed");
    assert_eq!(world.planner.ids_revision(), revision);
    assert!(again == after);
}

#[test]
fn many_different_sets_of_backends_fit_into_the_map_with_smaller_tables() {
    let mut world = World::new();
    // 100 frontends whose backends all differ, 17 each: full size would be 100 × 65,521 slots.
    for number in 0..100u8 {
        let it = frontend(&format!("f{number}"), Some("192.168.203.120"), &[(1000 + u16::from(number), None)]);
        world.config.tenants[0].frontends.push(it);
    }
    for (index, it) in world.config.tenants[0].frontends.iter_mut().enumerate() {
        it.backends = (0..17)
            .map(|host| StaticBackend {
                address: IpAddr::from([10, 32, 96 + host / 2, (index * 2) as u8 + host % 2]),
                port: None,
                weight: 1,
            })
            .filter(|backend| backend.address != ip("10.32.96.50"))
            .collect();
    }
    let plan = world.apply();
    assert_eq!(plan.tables.len(), 100);
    assert!(plan.tables.iter().all(|table| table.len() == 4093));
    assert!(reasons(&plan).contains(&"TableSpace"));
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        Just(String::new()),
        Just("TCP".to_owned()),
        Just("UDP".to_owned()),
        Just("0.0.0.0/0".to_owned()),
        Just("192.168.203.115".to_owned()),
        Just("2001:db8:203::115".to_owned()),
        "\\PC{0,12}"
    ]
}

fn any_service() -> impl Strategy<Value = Service> {
    (
        (0u8..4, any::<bool>(), any::<bool>(), prop::option::of(text()), 0i64..3, "[a-c]?"),
        prop::collection::vec((text(), 0u16..4, 0u16..4), 0..4),
        (
            prop::collection::vec(any::<bool>(), 0..3),
            any::<bool>(),
            any::<bool>(),
            prop::option::of(0u16..3),
            any::<bool>(),
        ),
        (prop::option::of(text()), prop::collection::vec(text(), 0..2), prop::collection::vec(text(), 0..2)),
    )
        .prop_map(|(first, ports, policy, texts)| {
            let (kind, selector, terminating, class, created, uid) = first;
            let mut it = service(&uid, &[]);
            it.kind =
                [ServiceKind::ClusterIp, ServiceKind::NodePort, ServiceKind::LoadBalancer, ServiceKind::ExternalName]
                    [usize::from(kind)];
            (it.selector, it.terminating, it.class, it.created) = (selector, terminating, class, created);
            it.ports = ports
                .into_iter()
                .map(|(protocol, port, node_port)| crate::source::ServicePort {
                    name: protocol.clone(),
                    protocol,
                    port,
                    node_port,
                })
                .collect();
            (it.families_v6, it.require_dual_stack, it.policy_local, it.health_port, it.client_ip_affinity) = policy;
            (it.requested_address, it.source_ranges, it.ingress) = texts;
            it
        })
}

/// What holds for any plan.
fn check(plan: &Plan) {
    let mut owners: BTreeMap<(SegmentId, IpAddr), TenantId> = BTreeMap::new();
    let mut ids = BTreeSet::new();
    for (address, frontend) in &plan.frontends {
        assert!(ids.insert(frontend.id) && frontend.id != 0);
        assert!(address.port != 0);
        assert!(plan.timeouts.contains_key(&frontend.timeouts));
        assert!(frontend.backends.iter().all(|backend| backend.address.is_ipv6() == address.vip.is_ipv6()));
        if let Some(snat) = frontend.snat {
            let source = |known: &AddressPlan| known.snat == Some(frontend.snat_ports) && !known.vip;
            assert!(plan.addresses.iter().any(|((_, at), known)| *at == snat && source(known)), "{snat}");
        }
        assert_eq!(*owners.entry((address.segment, address.vip)).or_insert(frontend.tenant), frontend.tenant);
        let vip = &plan.addresses[&(address.segment, address.vip)];
        assert!(vip.vip && vip.tenant == frontend.tenant && vip.tenant != 0);
        assert!(plan.tenants.contains_key(&frontend.tenant) && plan.segments.contains_key(&address.segment));
        assert_eq!(frontend.table.is_some(), frontend.backends.iter().any(|backend| backend.serving));
        if let Some(table) = frontend.table {
            let slots: BTreeSet<_> = plan.tables[table].iter().copied().collect();
            let serving: BTreeSet<_> = frontend.backends.iter().filter(|it| it.serving).map(|it| it.id).collect();
            assert_eq!(slots, serving);
            assert_eq!(frontend.snat.is_some(), !frontend.preserve_client);
            assert!(frontend.snat.is_none_or(|snat| snat.is_ipv6() == address.vip.is_ipv6()));
            assert!(frontend.backends.iter().all(|backend| frontend.port_of(backend) != 0));
        }
        for backend in frontend.backends.iter() {
            assert_eq!(plan.backends[&backend.id].address, backend.address);
            assert!(frontend.targets_of(backend).all(|target| plan.probes.contains(&target)));
        }
    }
    for table in &plan.tables {
        assert!(lbd_common::maglev::SIZES.contains(&(table.len() as u32)));
        assert!(table.iter().all(|slot| plan.backends[slot].eligible));
    }
    assert!(plan.probes.iter().all(|target| target.port != 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn no_inventory_breaks_the_planner(
        steps in prop::collection::vec(
            (
                prop::collection::btree_map((0u8..3, 0u8..3), any_service(), 0..6),
                prop::collection::btree_map(0u8..4, (prop::collection::vec(0u8..4, 0..2), any::<bool>(), "[a-b]?"), 0..4),
                any::<bool>(),
                prop::collection::vec(any::<(prop::sample::Index, bool)>(), 0..4),
            ),
            1..5,
        ),
        same_segment: bool,
        reset: bool,
        (preserve, own_source, vlan, dual) in any::<(bool, bool, bool, bool)>(),
    ) {
        let mut world = World::new();
        world.config.tenants[0].frontends = vec![shared(), workers()];
        world.config.tenants[0].frontends[0].ports.clear();
        let mut other = tenant("tenant-b", if same_segment { "eth1" } else { "eth0" });
        other.pools = vec![range("192.168.203.118-192.168.203.121")];
        other.frontends = vec![frontend("clash", Some("192.168.203.111"), &[(1, None), (2, None)])];
        world.config.tenants.push(other);
        if reset {
            world.config.tenants[0].settings.on_down = OnDown::Reset;
        }
        world.config.tenants[0].settings.preserve_client = preserve;
        if own_source {
            world.config.tenants[0].settings.snat = vec![ip("10.32.96.49"), ip("2001:db8:f::49")];
            world.config.tenants[0].settings.timeouts.udp_replied = Duration::from_secs(7);
        }
        if vlan {
            // The same subnet and addresses behind one interface.
            world.config.tenants[1].segment = SegmentName { interface: "eth1".to_owned(), vlan: Some(7) };
        }
        if dual {
            families::dual_stack(&mut world);
            world.config.tenants[1].pools.push(range("2001:db8:203::-2001:db8:203::ffff:ffff:ffff:ffff"));
        }
        for (services, nodes, complete, probes) in steps {
            world.inventory.complete = complete;
            world.inventory.services = services
                .into_iter()
                .map(|((namespace, number), service)| {
                    let namespace = ["clusters-tenant-a", "clusters-tenant-b", "openshift-ingress"][usize::from(namespace)];
                    let named = ["a", "kube-apiserver", "router-nodeport-tenant-a"][usize::from(number)];
                    (name(&format!("{namespace}/{named}")), service)
                })
                .collect();
            world.inventory.nodes = nodes
                .into_iter()
                .map(|(number, (addresses, excluded, uid))| {
                    let four = addresses.iter().map(|host| IpAddr::from([10, 32, 96, 48 + host]));
                    let six = addresses.iter().filter(|_| dual).map(|host| ip(&format!("2001:db8:f::{host}")));
                    let addresses = four.chain(six).collect();
                    (format!("node-{number}"), crate::source::Node { uid, addresses, excluded })
                })
                .collect();
            let plan = world.plan();
            check(&plan);
            let targets: Vec<_> = plan.probes.iter().cloned().collect();
            for (index, up) in probes {
                if !targets.is_empty() {
                    let target = targets[index.index(targets.len())].clone();
                    world.health.insert(target, TargetHealth { up: Some(up), cause: String::new(), since: 0 });
                }
            }
            let ids = world.planner.ids().clone();
            let saved = (world.planner.ids_revision(), serde_json::to_string(&ids).unwrap());
            let plan = world.plan();
            check(&plan);
            // The revision tells whether there is something to write.
            let now = serde_json::to_string(world.planner.ids()).unwrap();
            prop_assert!(now == saved.1 || world.planner.ids_revision() > saved.0);
            let assignments = world.ipam.assign(&world.config, &world.inventory, &world.host, &BTreeSet::new(), 0);
            let last = std::mem::replace(&mut world.planner, Planner::new(ids));
            let again = world.plan_with(&assignments);
            world.planner = last;
            prop_assert!(again == plan);
            world.planner.applied();
            let quiet = world.apply();
            prop_assert!(quiet.resets.is_empty());
            world.restart();
        }
    }
}
