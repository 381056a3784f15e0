//! Whose Services are, and that addresses stay.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::*;
use crate::config::{Claim, Config, Guest};
use crate::plan::testing::{config, host, inventory, ip, name, range, service, shared, tenant};
use crate::source::{Inventory, Service, ServiceKind};

const NOW: i64 = 1_700_000_000;

struct World {
    config: Config,
    inventory: Inventory,
    taken: BTreeSet<(SegmentName, IpAddr)>,
    ipam: Ipam,
    now: i64,
}

impl World {
    fn new() -> Self {
        Self { config: config(), inventory: inventory(), taken: BTreeSet::new(), ipam: Ipam::default(), now: NOW }
    }

    fn add(&mut self, named: &str, uid: &str) -> &mut Service {
        if !self.inventory.services.contains_key(&name(named)) {
            self.inventory.services.insert(name(named), service(uid, &[(6443, 30918)]));
        }
        self.inventory.services.get_mut(&name(named)).unwrap()
    }

    fn assign(&mut self) -> Assignments {
        self.ipam.assign(&self.config, &self.inventory, &host(), &self.taken, self.now)
    }

    /// What a restart without the state directory leaves.
    fn forget(&mut self) {
        self.ipam = Ipam::new(Record::default());
    }

    /// What the status writer does.
    fn write_status(&mut self, assignments: &Assignments) {
        for (name, assignment) in &assignments.services {
            if let Some(service) = self.inventory.services.get_mut(name)
                && assignment.claimed
                && !assignment.addresses.is_empty()
            {
                service.ingress = assignment.addresses.iter().map(ToString::to_string).collect();
            }
        }
    }
}

fn address(assignments: &Assignments, named: &str) -> Option<IpAddr> {
    assignments.services.get(&name(named)).and_then(|assignment| assignment.addresses.first().copied())
}

fn reasons(assignments: &Assignments) -> Vec<(&'static str, String)> {
    let notices = assignments.notices.iter();
    notices.map(|it| (it.reason, it.service.as_ref().map(ToString::to_string).unwrap_or_default())).collect()
}

#[test]
fn b45_an_address_at_once_without_backend_or_node_port() {
    let mut world = World::new();
    world.inventory.nodes.clear();
    world.add("clusters-tenant-a/kube-apiserver", "1").ports[0].node_port = 0;
    let assignments = world.assign();
    let assignment = &assignments.services[&name("clusters-tenant-a/kube-apiserver")];
    assert_eq!(assignment.addresses, [ip("192.168.203.110")]);
    assert!(assignment.claimed);
    assert!(assignments.notices.is_empty(), "{:?}", assignments.notices);
}

#[test]
fn only_what_a_claim_matches_is_ours() {
    let mut world = World::new();
    world.add("clusters-tenant-a/plain", "1");
    world.add("clusters-tenant-a/ours", "2").class = Some(CLASS.to_owned());
    world.add("clusters-tenant-a/foreign", "3").class = Some("loxilb.io/loxilb".to_owned());
    world.add("clusters-tenant-a/node-port", "4").kind = ServiceKind::NodePort;
    world.add("openshift-ingress/router", "5");
    world.add("elsewhere/ours", "6").class = Some(CLASS.to_owned());
    let assignments = world.assign();
    let names: Vec<_> = assignments.services.keys().map(ToString::to_string).collect();
    assert_eq!(names, ["clusters-tenant-a/ours", "clusters-tenant-a/plain"]);
    assert_eq!(reasons(&assignments), [("NoTenant", "elsewhere/ours".to_owned())]);
}

#[test]
fn claims_by_labels() {
    let mut world = World::new();
    let labels = |key: &str| [(key.to_owned(), "yes".to_owned())].into_iter().collect();
    world.config.tenants[0].claims =
        vec![Claim { namespace_labels: labels("edge"), service_labels: labels("public"), ..Claim::default() }];
    world.inventory.namespaces.insert("one".to_owned(), labels("edge"));
    world.add("one/a", "1").labels = labels("public");
    world.add("one/b", "2");
    world.add("two/a", "3").labels = labels("public");
    let assignments = world.assign();
    assert_eq!(assignments.services.keys().collect::<Vec<_>>(), [&name("one/a")]);
    // A claim without any rule matches nothing.
    world.config.tenants[0].claims = vec![Claim::default()];
    assert!(world.assign().services.is_empty());
}

#[test]
fn a_service_of_two_tenants_gets_neither() {
    let mut world = World::new();
    let mut other = tenant("tenant-b", "eth2");
    other.claims = world.config.tenants[0].claims.clone();
    world.config.tenants.push(other);
    world.add("clusters-tenant-a/kube-apiserver", "1");
    let assignments = world.assign();
    assert!(assignments.services.is_empty());
    assert_eq!(reasons(&assignments), [("ClaimedTwice", "clusters-tenant-a/kube-apiserver".to_owned())]);
}

#[test]
fn a_reservation_is_there_before_its_service_and_writes_nothing_to_it() {
    let mut world = World::new();
    world.config.tenants[0].frontends.push(shared());
    let shared_name = "openshift-ingress/router-nodeport-tenant-a";
    assert_eq!(address(&world.assign(), shared_name), Some(ip("192.168.203.111")));
    world.add(shared_name, "1").kind = ServiceKind::NodePort;
    let assignment = &world.assign().services[&name(shared_name)];
    assert_eq!(assignment.addresses, [ip("192.168.203.111")]);
    assert_eq!(assignment.frontend.as_deref(), Some("ingress-shared-lb"));
    assert!(!assignment.claimed);
    // Without a vip it gets one from the pool, and keeps it.
    world.config.tenants[0].frontends[0].vip = None;
    world.inventory.services.clear();
    let before = address(&world.assign(), shared_name);
    assert_eq!(before, Some(ip("192.168.203.110")));
    world.add("clusters-tenant-a/kube-apiserver", "2");
    world.add(shared_name, "1").kind = ServiceKind::NodePort;
    let assignments = world.assign();
    assert_eq!(address(&assignments, shared_name), before);
    assert_eq!(address(&assignments, "clusters-tenant-a/kube-apiserver"), Some(ip("192.168.203.111")));
}

#[test]
fn a_reserved_address_is_not_given_to_others() {
    let mut world = World::new();
    let mut reservation = shared();
    reservation.vip = Some(ip("192.168.203.110"));
    world.config.tenants[0].frontends.push(reservation);
    world.add("clusters-tenant-a/kube-apiserver", "1");
    assert_eq!(address(&world.assign(), "clusters-tenant-a/kube-apiserver"), Some(ip("192.168.203.111")));
}

#[test]
fn a_claimed_and_reserved_service_has_the_address_of_the_file_and_keeps_it() {
    let mut world = World::new();
    let mut reservation = shared();
    reservation.service = Some(("clusters-tenant-a".to_owned(), "kube-apiserver".to_owned()));
    world.config.tenants[0].frontends.push(reservation);
    world.add("clusters-tenant-a/kube-apiserver", "1");
    let assignments = world.assign();
    let assignment = &assignments.services[&name("clusters-tenant-a/kube-apiserver")];
    assert!(assignment.claimed);
    assert_eq!(assignment.addresses, [ip("192.168.203.111")]);
    world.write_status(&assignments);
    world.config.tenants[0].frontends.clear();
    assert_eq!(address(&world.assign(), "clusters-tenant-a/kube-apiserver"), Some(ip("192.168.203.111")));
}

#[test]
fn addresses_are_sticky_when_others_come_and_go() {
    let mut world = World::new();
    for number in 0..5 {
        world.add(&format!("clusters-tenant-a/s{number}"), &number.to_string());
    }
    let before = world.assign();
    let generation = world.ipam.record().generation;
    assert_eq!(world.assign(), before);
    assert_eq!(world.ipam.record().generation, generation);
    world.inventory.services.remove(&name("clusters-tenant-a/s0"));
    world.config.tenants[0].pools =
        vec![range("192.168.203.112-192.168.203.119"), range("192.168.203.90-192.168.203.111")];
    let after = world.assign();
    for number in 1..5 {
        let service = format!("clusters-tenant-a/s{number}");
        assert_eq!(address(&after, &service), address(&before, &service));
    }
    assert!(world.ipam.record().generation > generation);
    // The record survives a restart as JSON.
    let text = serde_json::to_string(world.ipam.record()).unwrap();
    world.ipam = Ipam::new(serde_json::from_str(&text).unwrap());
    assert_eq!(world.assign(), after);
}

#[test]
fn a_pool_that_no_longer_covers_an_address_does_not_take_it_away() {
    let mut world = World::new();
    world.add("clusters-tenant-a/s", "1");
    let before = address(&world.assign(), "clusters-tenant-a/s");
    world.config.tenants[0].pools = vec![range("192.168.203.90-192.168.203.91")];
    let after = world.assign();
    assert_eq!(address(&after, "clusters-tenant-a/s"), before);
    assert_eq!(reasons(&after)[0].0, "AddressOutsidePool");
    // Unless it is another tenant's now.
    let mut other = tenant("tenant-b", "eth1");
    other.pools = vec![range("192.168.203.110")];
    world.config.tenants.push(other);
    let after = world.assign();
    assert_eq!(address(&after, "clusters-tenant-a/s"), Some(ip("192.168.203.90")));
    assert_eq!(reasons(&after)[0].0, "AddressWithdrawn");
}

#[test]
fn a_freed_address_is_kept_a_day_for_the_same_name() {
    let mut world = World::new();
    world.add("clusters-tenant-a/a", "1");
    assert_eq!(address(&world.assign(), "clusters-tenant-a/a"), Some(ip("192.168.203.110")));
    world.inventory.services.clear();
    world.assign();
    world.now += RESERVED - 1;
    world.add("clusters-tenant-a/b", "2");
    assert_eq!(address(&world.assign(), "clusters-tenant-a/b"), Some(ip("192.168.203.111")));
    world.add("clusters-tenant-a/a", "3");
    assert_eq!(address(&world.assign(), "clusters-tenant-a/a"), Some(ip("192.168.203.110")));
    // After a day it is anybody's.
    world.inventory.services.remove(&name("clusters-tenant-a/a"));
    world.assign();
    world.now += RESERVED;
    world.add("clusters-tenant-a/c", "4");
    assert_eq!(address(&world.assign(), "clusters-tenant-a/c"), Some(ip("192.168.203.110")));
}

#[test]
fn b36_a_clock_that_is_set_back_ends_no_reservation_and_lengthens_none() {
    let mut world = World::new();
    world.add("clusters-tenant-a/a", "1");
    world.assign();
    world.inventory.services.clear();
    world.assign();
    world.now -= 3600;
    world.add("clusters-tenant-a/b", "2");
    assert_eq!(address(&world.assign(), "clusters-tenant-a/b"), Some(ip("192.168.203.111")));
    world.add("clusters-tenant-a/a", "3");
    assert_eq!(address(&world.assign(), "clusters-tenant-a/a"), Some(ip("192.168.203.110")));
    world.inventory.services.remove(&name("clusters-tenant-a/a"));
    world.assign();
    world.now -= 3600;
    world.assign();
    world.now += RESERVED;
    world.add("clusters-tenant-a/c", "4");
    assert_eq!(address(&world.assign(), "clusters-tenant-a/c"), Some(ip("192.168.203.110")));
}

#[test]
fn an_exhausted_pool_says_so_and_heals_when_a_service_goes() {
    let mut world = World::new();
    world.config.tenants[0].pools = vec![range("192.168.203.110-192.168.203.111")];
    for (number, created) in [("a", 3), ("b", 2), ("c", 1)] {
        world.add(&format!("clusters-tenant-a/{number}"), number).created = created;
    }
    let assignments = world.assign();
    // Oldest first.
    assert_eq!(address(&assignments, "clusters-tenant-a/c"), Some(ip("192.168.203.110")));
    assert_eq!(address(&assignments, "clusters-tenant-a/b"), Some(ip("192.168.203.111")));
    assert_eq!(address(&assignments, "clusters-tenant-a/a"), None);
    assert_eq!(reasons(&assignments), [("PoolExhausted", "clusters-tenant-a/a".to_owned())]);
    assert!(assignments.notices[0].message.contains("192.168.203.110-192.168.203.111"), "{:?}", assignments.notices);
    world.inventory.services.remove(&name("clusters-tenant-a/c"));
    let assignments = world.assign();
    assert_eq!(address(&assignments, "clusters-tenant-a/a"), Some(ip("192.168.203.110")));
    assert_eq!(address(&assignments, "clusters-tenant-a/b"), Some(ip("192.168.203.111")));
    assert!(assignments.notices.is_empty());
}

#[test]
fn b22_the_edges_of_a_pool_are_not_those_of_the_subnet() {
    // The host is .2/24, the gateway .1.
    for (pool, first, last, usable) in [
        ("192.168.203.0-192.168.203.255", 3, 254, 252),
        ("192.168.203.240-192.168.203.255", 240, 254, 15),
        ("192.168.203.200-192.168.203.201", 200, 201, 2),
        ("192.168.203.210", 210, 210, 1),
    ] {
        let mut world = World::new();
        world.config.tenants[0].frontends.clear();
        world.config.tenants[0].avoid.clear();
        world.config.tenants[0].pools = vec![range(pool)];
        for number in 0..256 {
            world.add(&format!("clusters-tenant-a/s{number:03}"), &format!("{number:03}"));
        }
        let assignments = world.assign();
        let given: BTreeSet<_> = assignments.services.values().flat_map(|it| it.addresses.clone()).collect();
        let edge = |last: u8| ip(&format!("192.168.203.{last}"));
        assert_eq!(
            (given.len(), given.first(), given.last()),
            (usable, Some(&edge(first)), Some(&edge(last))),
            "{pool}"
        );
        assert_eq!(reasons(&assignments).iter().filter(|(reason, _)| *reason == "PoolExhausted").count(), 256 - usable);
    }
}

#[test]
fn b22_addresses_that_nobody_can_have_are_never_given_out() {
    let mut world = World::new();
    world.config.tenants[0].pools =
        vec![range("192.168.203.0-192.168.203.5"), range("192.168.203.253-192.168.203.255")];
    world.config.tenants[0].avoid = vec![range("192.168.203.3")];
    world.taken.insert((world.config.tenants[0].segment.clone(), ip("192.168.203.4")));
    for number in 0..6 {
        world.add(&format!("clusters-tenant-a/s{number}"), &number.to_string());
    }
    let assignments = world.assign();
    let given: Vec<_> = assignments.services.values().flat_map(|it| it.addresses.clone()).collect();
    // Not .0 (network), .1 (gateway), .2 (host), .3 (avoid), .4 (taken), .255 (broadcast).
    assert_eq!(given, [ip("192.168.203.5"), ip("192.168.203.253"), ip("192.168.203.254")]);
    assert_eq!(reasons(&assignments).len(), 3);
}

#[test]
fn nodes_on_the_tenants_interface_keep_their_addresses() {
    let mut world = World::new();
    world.config.tenants[0].segment = world.config.hub.segment.clone();
    world.config.tenants[0].pools = vec![range("10.32.96.105-10.32.96.109")];
    world.add("clusters-tenant-a/s", "1");
    assert_eq!(address(&world.assign(), "clusters-tenant-a/s"), Some(ip("10.32.96.109")));
}

#[test]
fn a_lost_record_is_rebuilt_from_the_status_oldest_first() {
    let mut world = World::new();
    for (number, created) in [("a", 1), ("b", 2), ("c", 3)] {
        world.add(&format!("clusters-tenant-a/{number}"), number).created = created;
    }
    let before = world.assign();
    world.write_status(&before);
    world.forget();
    // A newcomer that is older than all does not take an address that is in use.
    world.add("clusters-tenant-a/0", "0").created = 0;
    let after = world.assign();
    for number in ["a", "b", "c"] {
        let service = format!("clusters-tenant-a/{number}");
        assert_eq!(address(&after, &service), address(&before, &service));
    }
    assert_eq!(address(&after, "clusters-tenant-a/0"), Some(ip("192.168.203.113")));
    assert!(after.notices.is_empty());
    // Two that show the same address: the older one has it.
    world.forget();
    world.inventory.services.get_mut(&name("clusters-tenant-a/c")).unwrap().ingress =
        vec!["192.168.203.110".to_owned()];
    let after = world.assign();
    assert_eq!(address(&after, "clusters-tenant-a/a"), Some(ip("192.168.203.110")));
    assert_eq!(address(&after, "clusters-tenant-a/c"), None);
    assert_eq!(reasons(&after), [("ForeignAddress", "clusters-tenant-a/c".to_owned())]);
}

#[test]
fn a_foreign_address_is_left_alone() {
    let mut world = World::new();
    for (number, shown) in [("a", "203.0.113.9"), ("b", "edge.example.org"), ("c", "192.168.203.2"), ("d", "fd00::1")] {
        world.add(&format!("clusters-tenant-a/{number}"), number).ingress = vec![shown.to_owned()];
    }
    let assignments = world.assign();
    assert_eq!(assignments.services.len(), 4);
    assert!(assignments.services.values().all(|it| it.addresses.is_empty() && !it.claimed));
    assert!(reasons(&assignments).iter().all(|(reason, _)| *reason == "ForeignAddress"));
    assert_eq!(assignments.notices.len(), 4);
}

#[test]
fn nothing_is_given_out_or_freed_before_the_list_is_complete() {
    let mut world = World::new();
    world.add("clusters-tenant-a/a", "1");
    let before = world.assign();
    world.inventory.complete = false;
    world.add("clusters-tenant-a/b", "2");
    assert_eq!(address(&world.assign(), "clusters-tenant-a/b"), None);
    world.inventory.services.clear();
    world.assign();
    world.now += 2 * RESERVED;
    world.inventory.complete = true;
    world.add("clusters-tenant-a/a", "1");
    world.add("clusters-tenant-a/0", "0");
    assert_eq!(address(&world.assign(), "clusters-tenant-a/a"), address(&before, "clusters-tenant-a/a"));
}

const TUNNEL: &str = "clusters-tenant-a/tunnel";
const OTHER: &str = "clusters-tenant-a/other";

/// A Service with one port, an age, a key and an address that it asks for.
fn sharer(world: &mut World, named: &str, port: u16, created: i64, key: &str, vip: &str) {
    let service = world.add(named, named);
    service.ports[0].port = port;
    service.created = created;
    for (annotation, value) in [(SHARED_KEY_ANNOTATION, key), (VIP_ANNOTATION, vip)] {
        if value.is_empty() {
            service.annotations.remove(annotation);
        } else {
            service.annotations.insert(annotation.to_owned(), value.to_owned());
        }
    }
}

#[test]
fn b20_services_with_one_key_share_the_address_that_they_ask_for() {
    let mut world = World::new();
    let shared = "192.168.203.114";
    sharer(&mut world, API, 6443, 1, "cp", shared);
    sharer(&mut world, TUNNEL, 8091, 2, "cp", shared);
    let assignments = world.assign();
    assert!(assignments.notices.is_empty(), "{:?}", assignments.notices);
    for named in [API, TUNNEL] {
        assert_eq!(address(&assignments, named), Some(ip(shared)));
    }
    // A third one asks for a port that is taken: it alone waits, and knows for whom.
    sharer(&mut world, OTHER, 6443, 3, "cp", shared);
    let assignments = world.assign();
    assert_eq!((address(&assignments, API), address(&assignments, OTHER)), (Some(ip(shared)), None));
    assert_eq!(reasons(&assignments), [("PortClash", OTHER.to_owned())]);
    assert!(assignments.notices[0].message.contains(API), "{:?}", assignments.notices);
    // Of two ports one is free: it has the address, and the plan says which port is not served.
    world.add(OTHER, "").ports.push(ServicePort { port: 9443, ..Default::default() });
    let assignments = world.assign();
    assert_eq!(address(&assignments, OTHER), Some(ip(shared)));
    assert!(assignments.notices.is_empty(), "{:?}", assignments.notices);
    // A restart, from the record or from the statuses, changes nothing.
    world.write_status(&assignments);
    let text = serde_json::to_string(world.ipam.record()).unwrap();
    world.ipam = Ipam::new(serde_json::from_str(&text).unwrap());
    assert_eq!(world.assign(), assignments);
    world.forget();
    assert_eq!(world.assign(), assignments);
}

#[test]
fn b20_without_a_common_key_nothing_is_shared() {
    for (first, second) in [("", ""), ("cp", ""), ("", "cp"), ("cp", "other")] {
        let mut world = World::new();
        sharer(&mut world, API, 6443, 1, first, "192.168.203.114");
        sharer(&mut world, TUNNEL, 8091, 2, second, "192.168.203.114");
        let assignments = world.assign();
        assert_eq!(address(&assignments, API), Some(ip("192.168.203.114")));
        assert_eq!(address(&assignments, TUNNEL), None, "{first:?} {second:?}");
        assert_eq!(reasons(&assignments), [("AddressRequestRefused", TUNNEL.to_owned())]);
        assert!(assignments.notices[0].message.contains(API), "{:?}", assignments.notices);
        // The keys are made to agree.
        for named in [API, TUNNEL] {
            world.add(named, "").annotations.insert(SHARED_KEY_ANNOTATION.to_owned(), "now".to_owned());
        }
        let assignments = world.assign();
        assert_eq!(address(&assignments, TUNNEL), Some(ip("192.168.203.114")));
        assert!(assignments.notices.is_empty(), "{:?}", assignments.notices);
    }
}

#[test]
fn b20_a_key_alone_is_enough_and_the_address_is_freed_with_the_last() {
    let mut world = World::new();
    world.add("clusters-tenant-a/0", "0").created = 0;
    sharer(&mut world, API, 6443, 1, "cp", "");
    sharer(&mut world, TUNNEL, 8091, 2, "cp", "");
    let assignments = world.assign();
    let shared = Some(ip("192.168.203.111"));
    assert_eq!((address(&assignments, API), address(&assignments, TUNNEL)), (shared, shared));
    // The first one goes: the other keeps it, and nobody else gets it.
    world.inventory.services.remove(&name(API));
    world.add("clusters-tenant-a/9", "9").created = 9;
    let assignments = world.assign();
    assert_eq!(
        (address(&assignments, TUNNEL), address(&assignments, "clusters-tenant-a/9")),
        (shared, Some(ip("192.168.203.112")))
    );
    // It comes back to where it was.
    sharer(&mut world, API, 6443, 10, "cp", "");
    assert_eq!(address(&world.assign(), API), shared);
    // Both go, and come back in turn: the reservation is each one's.
    world.inventory.services.remove(&name(API));
    world.inventory.services.remove(&name(TUNNEL));
    world.assign();
    assert!(
        world.ipam.record().entries.iter().filter(|entry| Some(entry.address) == shared).all(|it| it.freed.is_some())
    );
    sharer(&mut world, TUNNEL, 8091, 11, "cp", "");
    assert_eq!(address(&world.assign(), TUNNEL), shared);
    sharer(&mut world, API, 6443, 12, "cp", "");
    assert_eq!(address(&world.assign(), API), shared);
    // A day after the last, the address is anybody's.
    world.inventory.services.clear();
    world.assign();
    world.now += RESERVED;
    world.add("clusters-tenant-a/new", "n");
    world.add("clusters-tenant-a/newer", "o");
    let assignments = world.assign();
    assert_eq!(address(&assignments, "clusters-tenant-a/newer"), shared);
    assert!(world.ipam.record().entries.iter().all(|entry| entry.freed.is_none()));
}

#[test]
fn b20_a_port_that_is_free_again_is_had_by_the_one_who_waits() {
    let mut world = World::new();
    sharer(&mut world, API, 6443, 1, "cp", "192.168.203.114");
    sharer(&mut world, TUNNEL, 8091, 2, "cp", "192.168.203.114");
    sharer(&mut world, OTHER, 6443, 3, "cp", "192.168.203.114");
    assert_eq!(address(&world.assign(), OTHER), None);
    world.inventory.services.remove(&name(API));
    let assignments = world.assign();
    for named in [TUNNEL, OTHER] {
        assert_eq!(address(&assignments, named), Some(ip("192.168.203.114")));
    }
    assert!(assignments.notices.is_empty());
}

#[test]
fn b20_a_key_is_worth_nothing_across_tenants_and_from_guests() {
    let mut world = World::new();
    let mut other = tenant("tenant-b", "eth1");
    other.pools = vec![range("192.168.203.120-192.168.203.129")];
    world.config.tenants.push(other);
    sharer(&mut world, API, 6443, 1, "cp", "192.168.203.114");
    sharer(&mut world, "clusters-tenant-b/api", 8091, 2, "cp", "192.168.203.114");
    sharer(&mut world, "clusters-tenant-b/any", 8091, 3, "cp", "");
    sharer(&mut world, TUNNEL, 8091, 4, "cp", "");
    world.add(TUNNEL, "").labels.insert(GUEST_LABEL.to_owned(), "tunnel".to_owned());
    let assignments = world.assign();
    assert_eq!(address(&assignments, "clusters-tenant-b/api"), None);
    assert_eq!(address(&assignments, "clusters-tenant-b/any"), Some(ip("192.168.203.120")));
    assert_eq!(address(&assignments, TUNNEL), Some(ip("192.168.203.110")));
}

#[test]
fn b20_a_key_that_changes_moves_nobody_and_is_told() {
    let mut world = World::new();
    sharer(&mut world, API, 6443, 1, "cp", "");
    sharer(&mut world, TUNNEL, 8091, 2, "cp", "");
    sharer(&mut world, OTHER, 9443, 3, "", "");
    let before = world.assign();
    sharer(&mut world, TUNNEL, 8091, 2, "", "");
    sharer(&mut world, OTHER, 9443, 3, "cp", "");
    for _ in 0..2 {
        let after = world.assign();
        for named in [API, TUNNEL, OTHER] {
            assert_eq!(address(&after, named), address(&before, named));
        }
        let told = |named: &str| ("SharedKeyIgnored", named.to_owned());
        assert_eq!(reasons(&after), [told(OTHER), told(TUNNEL)]);
        let text = serde_json::to_string(world.ipam.record()).unwrap();
        world.ipam = Ipam::new(serde_json::from_str(&text).unwrap());
    }
}

#[test]
fn b19_one_of_two_that_want_one_address_has_it_and_the_other_waits() {
    for (created, winner) in [((1, 2), "a"), ((2, 1), "b"), ((5, 5), "a")] {
        let mut world = World::new();
        for (named, created) in [("a", created.0), ("b", created.1)] {
            sharer(&mut world, &format!("clusters-tenant-a/{named}"), 6443, created, "", "192.168.203.114");
        }
        let loser = if winner == "a" { "b" } else { "a" };
        let (winner, loser) = (format!("clusters-tenant-a/{winner}"), format!("clusters-tenant-a/{loser}"));
        let assignments = world.assign();
        assert_eq!(
            (address(&assignments, &winner), address(&assignments, &loser)),
            (Some(ip("192.168.203.114")), None)
        );
        assert_eq!(reasons(&assignments), [("AddressRequestRefused", loser.clone())]);
        assert!(assignments.notices[0].message.contains(&winner), "{:?}", assignments.notices);
        assert_eq!(world.assign(), assignments);
        // Though it is reserved for the one that goes, the one that asks for it has it at once.
        world.inventory.services.remove(&name(&winner));
        assert_eq!(address(&world.assign(), &loser), Some(ip("192.168.203.114")));
    }
}

#[test]
fn b52_a_request_that_changes_moves_nothing_and_is_told() {
    let mut world = World::new();
    world.config.address_annotations = vec!["metallb.io/loadBalancerIPs".to_owned()];
    sharer(&mut world, API, 6443, 1, "", "192.168.203.114");
    sharer(&mut world, OTHER, 6443, 2, "", "192.168.203.115");
    world.assign();
    let refused = [("AddressRequestRefused", API.to_owned())];
    // A free one, one in use, one outside the pool, nonsense, and two that disagree: it keeps what it has.
    for text in ["192.168.203.116", "192.168.203.115", "203.0.113.9", "nonsense", "192.168.203.116,192.168.203.117"] {
        sharer(&mut world, API, 6443, 1, "", text);
        let assignments = world.assign();
        assert_eq!(address(&assignments, API), Some(ip("192.168.203.114")), "{text}");
        assert_eq!(reasons(&assignments), refused, "{text}");
        assert!(assignments.notices[0].message.ends_with("it keeps 192.168.203.114"), "{:?}", assignments.notices);
    }
    // Removed: nothing to say.
    sharer(&mut world, API, 6443, 1, "", "");
    let assignments = world.assign();
    assert_eq!(address(&assignments, API), Some(ip("192.168.203.114")));
    assert!(assignments.notices.is_empty());
    // Other ways to ask.
    world.add(API, "").requested_address = Some("192.168.203.117".to_owned());
    assert_eq!(reasons(&world.assign()), refused);
    world.add(API, "").requested_address = None;
    let foreign = ("metallb.io/loadBalancerIPs".to_owned(), "192.168.203.117".to_owned());
    world.add(API, "").annotations.extend([foreign]);
    assert_eq!(reasons(&world.assign()), refused);
}

#[test]
fn b47_prefer_dual_stack_with_pools_of_one_family() {
    let mut world = World::new();
    // As HyperShift writes it: PreferDualStack, but the cluster gave one family.
    world.add(API, "1").families_v6 = vec![false];
    let strict = world.add(OTHER, "2");
    (strict.families_v6, strict.require_dual_stack) = (vec![false, true], true);
    let both = world.add(TUNNEL, "3");
    both.families_v6 = vec![false, true];
    let before = world.assign();
    assert_eq!(
        (addresses(&before, API), addresses(&before, TUNNEL)),
        (vec!["192.168.203.110".to_owned()], vec!["192.168.203.111".to_owned()])
    );
    assert!(addresses(&before, OTHER).is_empty());
    assert_eq!(reasons(&before), [("FamilyUnavailable", OTHER.to_owned())]);
    // A pool of the other family comes: what is there stays, in its place; what lacked it gets it.
    dual(&mut world);
    let after = world.assign();
    assert_eq!(addresses(&after, API), ["192.168.203.110"]);
    assert_eq!(addresses(&after, TUNNEL)[0], "192.168.203.111");
    assert_eq!((addresses(&after, TUNNEL).len(), addresses(&after, OTHER).len()), (2, 2));
    assert!(after.notices.is_empty(), "{:?}", after.notices);
    // With a cluster of one family, a pool of both gives that one only.
    world.forget();
    world.inventory.services.clear();
    world.add(API, "1").families_v6 = vec![true];
    assert_eq!(addresses(&world.assign(), API), ["2001:db8:203::1"]);
}

#[test]
fn b46_the_first_address_is_of_the_first_family_whatever_changes() {
    let mut world = World::new();
    dual(&mut world);
    sharer(&mut world, API, 6443, 1, "cp", "");
    sharer(&mut world, TUNNEL, 8091, 2, "cp", "");
    world.add(API, "").families_v6 = vec![false, true];
    world.add(TUNNEL, "").families_v6 = vec![true, false];
    let before = world.assign();
    // Shared, each in its own order, none twice.
    assert_eq!(addresses(&before, API), ["192.168.203.110", "2001:db8:203::1"]);
    assert_eq!(addresses(&before, TUNNEL), ["2001:db8:203::1", "192.168.203.110"]);
    world.config.tenants[0].pools.reverse();
    let text = serde_json::to_string(world.ipam.record()).unwrap();
    world.ipam = Ipam::new(serde_json::from_str(&text).unwrap());
    assert_eq!(world.assign(), before);
    // From the statuses alone.
    world.write_status(&before);
    world.forget();
    assert_eq!(world.assign(), before);
}

#[test]
fn b10_five_services_of_which_two_are_ours() {
    let mut world = World::new();
    let classes = [
        ("clusters-tenant-a/plain", None),
        ("openshift-ingress/router-default", None),
        ("clusters-tenant-a/ours", Some(CLASS)),
        ("clusters-tenant-a/foreign", Some("loxilb.io/loxilb")),
        ("elsewhere/ours", Some(CLASS)),
    ];
    for (named, class) in classes {
        let service = world.add(named, named);
        service.class = class.map(str::to_owned);
        // Whatever they ask for.
        service.requested_address = Some("192.168.203.119".to_owned()).filter(|_| named.ends_with("foreign"));
    }
    let assignments = world.assign();
    let ours: Vec<_> = assignments.services.iter().map(|(name, it)| (name.to_string(), it.claimed)).collect();
    assert_eq!(ours, [("clusters-tenant-a/ours".to_owned(), true), ("clusters-tenant-a/plain".to_owned(), true)]);
    // Unknown tenant: told, and waiting. Foreign class, and foreign namespace without a class: not a word.
    assert_eq!(reasons(&assignments), [("NoTenant", "elsewhere/ours".to_owned())]);
    // A tenant that claims it serves it.
    let mut other = tenant("tenant-b", "eth2");
    other.claims = vec![Claim { namespaces: vec!["elsewhere".to_owned()], ..Claim::default() }];
    world.config.tenants.push(other);
    let assignments = world.assign();
    assert_eq!(address(&assignments, "elsewhere/ours"), Some(ip("192.168.203.110")));
    assert!(assignments.notices.is_empty());
}

#[test]
fn a_requested_address_is_honoured_inside_the_pool_only() {
    let mut world = World::new();
    world.config.address_annotations = vec!["metallb.io/loadBalancerIPs".to_owned()];
    world.add("clusters-tenant-a/a", "1").annotations.insert(VIP_ANNOTATION.to_owned(), "192.168.203.115".to_owned());
    world.add("clusters-tenant-a/b", "2").requested_address = Some("192.168.203.116".to_owned());
    let both = world.add("clusters-tenant-a/c", "3");
    both.annotations.insert("metallb.io/loadBalancerIPs".to_owned(), "192.168.203.117".to_owned());
    both.requested_address = Some("192.168.203.117".to_owned());
    world.add("clusters-tenant-a/d", "4").requested_address = Some("203.0.113.1".to_owned());
    world.add("clusters-tenant-a/e", "5").requested_address = Some("192.168.203.115".to_owned());
    let differ = world.add("clusters-tenant-a/f", "6");
    differ.annotations.insert(VIP_ANNOTATION.to_owned(), "192.168.203.118".to_owned());
    differ.requested_address = Some("192.168.203.119".to_owned());
    world.add("clusters-tenant-a/g", "7").annotations.insert(VIP_ANNOTATION.to_owned(), "300.1.1.1\0".to_owned());
    let assignments = world.assign();
    for (service, given) in [("a", "192.168.203.115"), ("b", "192.168.203.116"), ("c", "192.168.203.117")] {
        assert_eq!(address(&assignments, &format!("clusters-tenant-a/{service}")), Some(ip(given)));
    }
    for service in ["d", "e", "f", "g"] {
        assert_eq!(address(&assignments, &format!("clusters-tenant-a/{service}")), None);
    }
    assert_eq!(assignments.notices.len(), 4);
    assert!(assignments.notices.iter().all(|notice| notice.reason == "AddressRequestRefused"));
    // A later edit keeps the old address.
    world.write_status(&assignments);
    world.add("clusters-tenant-a/b", "2").requested_address = Some("192.168.203.119".to_owned());
    let assignments = world.assign();
    assert_eq!(address(&assignments, "clusters-tenant-a/b"), Some(ip("192.168.203.116")));
    assert!(reasons(&assignments).contains(&("AddressRequestRefused", "clusters-tenant-a/b".to_owned())));
    // The holder goes: the one that waits takes over, though the address is reserved.
    world.inventory.services.remove(&name("clusters-tenant-a/a"));
    assert_eq!(address(&world.assign(), "clusters-tenant-a/e"), Some(ip("192.168.203.115")));
}

#[test]
fn requests_of_guests_are_ignored_and_their_number_is_limited() {
    let mut world = World::new();
    world.config.tenants[0].claims[0].guest =
        Guest { max_vips: Some(1), pools: vec![range("192.168.203.118-192.168.203.119")] };
    for (number, created) in [("a", 1), ("b", 2)] {
        let guest = world.add(&format!("clusters-tenant-a/{number}"), number);
        guest.created = created;
        guest.labels.insert(GUEST_LABEL.to_owned(), "web".to_owned());
        guest.requested_address = Some("192.168.203.110".to_owned());
    }
    let assignments = world.assign();
    assert_eq!(address(&assignments, "clusters-tenant-a/a"), Some(ip("192.168.203.118")));
    assert_eq!(reasons(&assignments), [("GuestLimit", "clusters-tenant-a/b".to_owned())]);
}

#[test]
fn b65_the_bound_on_guests_is_that_of_their_claim() {
    let mut world = World::new();
    let first = &mut world.config.tenants[0].claims[0];
    first.guest.max_vips = Some(1);
    let second = Claim { namespaces: vec!["clusters-other".to_owned()], ..first.clone() };
    world.config.tenants[0].claims.push(second);
    let named = ["clusters-tenant-a/a", "clusters-other/a", "clusters-tenant-a/b", "clusters-other/b"];
    for (created, named) in named.into_iter().enumerate() {
        let guest = world.add(named, named);
        guest.created = created as i64;
        guest.labels.insert(GUEST_LABEL.to_owned(), "web".to_owned());
    }
    for _ in 0..2 {
        let assignments = world.assign();
        assert_eq!(named.map(|named| address(&assignments, named).is_some()), [true, true, false, false]);
        assert_eq!(reasons(&assignments).len(), 2, "{:?}", reasons(&assignments));
    }
}

#[test]
fn a_terminating_service_keeps_its_address_and_gets_no_new_one() {
    let mut world = World::new();
    world.add("clusters-tenant-a/a", "1");
    let before = world.assign();
    world.add("clusters-tenant-a/a", "1").terminating = true;
    world.add("clusters-tenant-a/b", "2").terminating = true;
    let after = world.assign();
    assert_eq!(address(&after, "clusters-tenant-a/a"), address(&before, "clusters-tenant-a/a"));
    assert_eq!(address(&after, "clusters-tenant-a/b"), None);
}

/// An edit of a Service, and the notice that follows.
type Case = (&'static str, fn(&mut Service));

#[test]
fn what_is_not_served_yet_gets_no_address_but_keeps_one_it_has() {
    let change: [Case; 5] = [
        ("SourceRangesUnsupported", |it| it.source_ranges = vec!["203.0.113.0/24".to_owned()]),
        ("SourceRangesInvalid", |it| it.source_ranges = vec!["0.0.0.0/0".to_owned(), "bad".to_owned()]),
        ("SourceRangesUnsupported", |it| {
            let key = "service.beta.kubernetes.io/load-balancer-source-ranges".to_owned();
            it.annotations.insert(key, "203.0.113.9/32".to_owned());
        }),
        ("FamilyUnavailable", |it| it.require_dual_stack = true),
        ("ProtocolUnsupported", |it| it.ports[0].protocol = "SCTP".to_owned()),
    ];
    for (reason, change) in change {
        let mut world = World::new();
        change(world.add("clusters-tenant-a/a", "1"));
        let assignments = world.assign();
        assert_eq!(address(&assignments, "clusters-tenant-a/a"), None, "{reason}");
        assert_eq!(reasons(&assignments), [(reason, "clusters-tenant-a/a".to_owned())]);

        let mut world = World::new();
        world.add("clusters-tenant-a/a", "1");
        world.assign();
        change(world.add("clusters-tenant-a/a", "1"));
        let assignments = world.assign();
        assert_eq!(address(&assignments, "clusters-tenant-a/a"), Some(ip("192.168.203.110")), "{reason}");
        assert_eq!(reasons(&assignments), [(reason, "clusters-tenant-a/a".to_owned())]);
    }
}

#[test]
fn what_looks_odd_but_can_be_served_is() {
    let change: [fn(&mut Service); 7] = [
        |it| (it.policy_local, it.health_port) = (true, Some(32000)),
        |it| {
            it.selector = false;
            it.labels.insert(GUEST_LABEL.to_owned(), "web".to_owned());
        },
        |it| it.families_v6 = vec![false, true],
        |it| it.source_ranges = vec![" 0.0.0.0/0 ".to_owned()],
        |it| it.ports.clear(),
        |it| it.policy_local = true,
        |it| it.selector = false,
    ];
    for change in change {
        let mut world = World::new();
        change(world.add("clusters-tenant-a/a", "1"));
        let assignments = world.assign();
        assert_eq!(address(&assignments, "clusters-tenant-a/a"), Some(ip("192.168.203.110")));
        assert!(assignments.notices.is_empty(), "{:?}", assignments.notices);
    }
}

#[test]
fn a_type_that_changes_frees_the_address_and_gets_it_back() {
    let mut world = World::new();
    world.add("clusters-tenant-a/a", "1");
    world.assign();
    world.add("clusters-tenant-a/a", "1").kind = ServiceKind::ClusterIp;
    assert!(world.assign().services.is_empty());
    world.add("clusters-tenant-a/a", "1").kind = ServiceKind::LoadBalancer;
    assert_eq!(address(&world.assign(), "clusters-tenant-a/a"), Some(ip("192.168.203.110")));
}

#[test]
fn overlapping_addresses_in_different_segments_are_independent() {
    let mut world = World::new();
    world.config.tenants.push(tenant("tenant-b", "eth2"));
    world.add("clusters-tenant-a/a", "1");
    world.add("clusters-tenant-b/a", "2");
    let assignments = world.assign();
    assert_eq!(address(&assignments, "clusters-tenant-a/a"), Some(ip("192.168.203.110")));
    assert_eq!(address(&assignments, "clusters-tenant-b/a"), Some(ip("192.168.203.110")));
}

/// A second pool, of IPv6, in `2001:db8:203::/64`.
fn dual(world: &mut World) {
    world.config.tenants[0].addresses = vec!["2001:db8:203::2/64".parse().unwrap()];
    world.config.tenants[0].pools.push(range("2001:db8:203::-2001:db8:203::ffff:ffff:ffff:ffff"));
}

fn addresses(assignments: &Assignments, named: &str) -> Vec<String> {
    assignments.services[&name(named)].addresses.iter().map(ToString::to_string).collect()
}

const API: &str = "clusters-tenant-a/kube-apiserver";

#[test]
fn a_dual_stack_service_gets_an_address_of_each_family_in_its_order() {
    let mut world = World::new();
    dual(&mut world);
    world.add(API, "1").families_v6 = vec![true, false];
    world.add("clusters-tenant-a/four", "2").families_v6 = vec![false];
    world.add("clusters-tenant-a/six", "3").families_v6 = vec![true];
    let before = world.assign();
    // Neither the subnet-router anycast address nor the host's own.
    assert_eq!(addresses(&before, API), ["2001:db8:203::1", "192.168.203.110"]);
    assert_eq!(addresses(&before, "clusters-tenant-a/four"), ["192.168.203.111"]);
    assert_eq!(addresses(&before, "clusters-tenant-a/six"), ["2001:db8:203::3"]);
    assert!(before.notices.is_empty(), "{:?}", before.notices);
    assert_eq!(world.assign(), before);
    // The record survives, and so does what the statuses say if it is lost.
    let text = serde_json::to_string(world.ipam.record()).unwrap();
    world.ipam = Ipam::new(serde_json::from_str(&text).unwrap());
    assert_eq!(world.assign(), before);
    world.write_status(&before);
    world.forget();
    world.add("clusters-tenant-a/new", "0").families_v6 = vec![false, true];
    let after = world.assign();
    for named in [API, "clusters-tenant-a/four", "clusters-tenant-a/six"] {
        assert_eq!(addresses(&after, named), addresses(&before, named));
    }
    // A family that the Service gives up is freed, and one that it takes up is given.
    world.add(API, "1").families_v6 = vec![true];
    world.add("clusters-tenant-a/four", "2").families_v6 = vec![false, true];
    let after = world.assign();
    assert_eq!(addresses(&after, API), ["2001:db8:203::1"]);
    assert_eq!(addresses(&after, "clusters-tenant-a/four"), ["192.168.203.111", "2001:db8:203::5"]);
    let freed = world.ipam.record().entries.iter().find(|entry| entry.address == ip("192.168.203.110")).unwrap();
    assert_eq!((freed.service.clone(), freed.freed), (name(API), Some(NOW)));
}

#[test]
fn with_pools_of_one_family_prefer_dual_stack_is_content_and_require_dual_stack_is_not() {
    let mut world = World::new();
    world.add(API, "1").families_v6 = vec![false, true];
    let assignments = world.assign();
    assert_eq!(addresses(&assignments, API), ["192.168.203.110"]);
    assert!(assignments.notices.is_empty(), "{:?}", assignments.notices);
    let strict = world.add("clusters-tenant-a/strict", "2");
    (strict.families_v6, strict.require_dual_stack) = (vec![false, true], true);
    world.add("clusters-tenant-a/six", "3").families_v6 = vec![true];
    let assignments = world.assign();
    for named in ["clusters-tenant-a/strict", "clusters-tenant-a/six"] {
        assert!(addresses(&assignments, named).is_empty());
        assert!(reasons(&assignments).contains(&("FamilyUnavailable", named.to_owned())));
    }
    assert!(assignments.notices[1].message.starts_with("RequireDualStack cannot be met"), "{:?}", assignments.notices);
    // With a pool of the other family everybody has what it wants.
    dual(&mut world);
    let assignments = world.assign();
    assert!(assignments.notices.is_empty(), "{:?}", assignments.notices);
    assert_eq!(addresses(&assignments, API), ["192.168.203.110", "2001:db8:203::1"]);
    assert_eq!(addresses(&assignments, "clusters-tenant-a/strict").len(), 2);
}

#[test]
fn a_large_pool_is_not_counted_through() {
    let mut world = World::new();
    dual(&mut world);
    // All but the last two addresses of the /64 are avoided.
    world.config.tenants[0].avoid = vec![range("2001:db8:203::-2001:db8:203::ffff:ffff:ffff:fffd")];
    for number in 0..3 {
        let service = world.add(&format!("clusters-tenant-a/s{number}"), &number.to_string());
        (service.created, service.families_v6) = (number, vec![true]);
    }
    let assignments = world.assign();
    assert_eq!(addresses(&assignments, "clusters-tenant-a/s0"), ["2001:db8:203:0:ffff:ffff:ffff:fffe"]);
    assert_eq!(addresses(&assignments, "clusters-tenant-a/s1"), ["2001:db8:203:0:ffff:ffff:ffff:ffff"]);
    assert_eq!(reasons(&assignments), [("PoolExhausted", "clusters-tenant-a/s2".to_owned())]);
    assert!(assignments.notices[0].message.contains("2001:db8:203::-2001:db8:203:0:ffff:ffff:ffff:ffff"));
}

#[test]
fn what_somebody_has_in_ipv6_is_not_given_out() {
    let mut world = World::new();
    dual(&mut world);
    let tenant = &mut world.config.tenants[0];
    tenant.segment = crate::plan::testing::segment("eth0");
    tenant.gateways = vec![ip("2001:db8:203::1")];
    tenant.settings.snat = vec![ip("2001:db8:203::3")];
    world.config.hub.snat = vec![ip("2001:db8:203::4")];
    world.inventory.nodes.get_mut("node-105").unwrap().addresses.push(ip("2001:db8:203::5"));
    world.taken.insert((crate::plan::testing::segment("eth0"), ip("2001:db8:203::6")));
    world.add(API, "1").families_v6 = vec![true];
    assert_eq!(addresses(&world.assign(), API), ["2001:db8:203::7"]);
    for (wanted, why) in [
        ("2001:db8:203::", "the subnet-router anycast address of 2001:db8:203::/64"),
        ("2001:db8:203::1", "is the gateway's"),
        ("2001:db8:203::2", "is the load balancer's own"),
        ("2001:db8:203::4", "is a SNAT address"),
        ("2001:db8:203::5", "is a node's"),
        ("2001:db8:203::6", "another station answers for it"),
        ("2001:db8:204::9", "it is in no pool"),
        ("192.168.203.110", "the Service has no IPv4"),
    ] {
        let service = world.add("clusters-tenant-a/asks", "2");
        service.families_v6 = vec![true];
        service.annotations.insert(VIP_ANNOTATION.to_owned(), wanted.to_owned());
        let assignments = world.assign();
        assert!(addresses(&assignments, "clusters-tenant-a/asks").is_empty());
        assert!(assignments.notices[0].message.contains(why), "{wanted}: {:?}", assignments.notices);
    }
}

#[test]
fn a_service_may_ask_for_an_address_of_each_family() {
    let mut world = World::new();
    dual(&mut world);
    let service = world.add(API, "1");
    service.families_v6 = vec![false, true];
    service.annotations.insert(VIP_ANNOTATION.to_owned(), "2001:db8:203::77, 192.168.203.117".to_owned());
    assert_eq!(addresses(&world.assign(), API), ["192.168.203.117", "2001:db8:203::77"]);
    // One of them only: the other is any.
    let service = world.add("clusters-tenant-a/one", "2");
    service.families_v6 = vec![false, true];
    service.requested_address = Some("2001:db8:203::78".to_owned());
    assert_eq!(addresses(&world.assign(), "clusters-tenant-a/one"), ["192.168.203.110", "2001:db8:203::78"]);
    // Two of one family: nothing, until that is mended.
    let service = world.add("clusters-tenant-a/two", "3");
    service.families_v6 = vec![false, true];
    service.annotations.insert(VIP_ANNOTATION.to_owned(), "192.168.203.118,192.168.203.119".to_owned());
    let assignments = world.assign();
    assert!(addresses(&assignments, "clusters-tenant-a/two").is_empty());
    assert_eq!(reasons(&assignments), [("AddressRequestRefused", "clusters-tenant-a/two".to_owned())]);
}

#[test]
fn a_claimed_service_with_a_vip_of_the_file_gets_the_other_family_from_the_pool() {
    let mut world = World::new();
    dual(&mut world);
    let mut reservation = shared();
    reservation.service = Some(("clusters-tenant-a".to_owned(), "kube-apiserver".to_owned()));
    world.config.tenants[0].frontends.push(reservation);
    world.add(API, "1").families_v6 = vec![false, true];
    assert_eq!(addresses(&world.assign(), API), ["192.168.203.111", "2001:db8:203::1"]);
}

#[test]
fn each_address_of_a_guest_counts() {
    let mut world = World::new();
    dual(&mut world);
    world.config.tenants[0].claims[0].guest = Guest { max_vips: Some(3), ..Guest::default() };
    for (created, named) in ["clusters-tenant-a/a", "clusters-tenant-a/b"].into_iter().enumerate() {
        let service = world.add(named, named);
        (service.created, service.families_v6) = (created as i64, vec![false, true]);
        service.labels.insert(GUEST_LABEL.to_owned(), "web".to_owned());
    }
    let assignments = world.assign();
    assert_eq!(addresses(&assignments, "clusters-tenant-a/a").len(), 2);
    assert_eq!(addresses(&assignments, "clusters-tenant-a/b"), ["192.168.203.111"]);
    assert_eq!(reasons(&assignments), [("GuestLimit", "clusters-tenant-a/b".to_owned())]);
}

#[test]
fn udp_alone_is_served_and_ranges_of_one_family_say_nothing_of_the_other() {
    let mut world = World::new();
    dual(&mut world);
    let served = |world: &mut World, change: fn(&mut Service)| {
        change(world.add(API, "1"));
        let found = !addresses(&world.assign(), API).is_empty();
        world.inventory.services.clear();
        world.forget();
        found
    };
    assert!(served(&mut world, |it| it.ports[0].protocol = "UDP".to_owned()));
    assert!(served(&mut world, |it| {
        it.families_v6 = vec![false, true];
        it.source_ranges = vec!["0.0.0.0/0".to_owned()];
    }));
    assert!(!served(&mut world, |it| {
        it.families_v6 = vec![false, true];
        it.source_ranges = vec!["0.0.0.0/0".to_owned(), "2001:db8::/32".to_owned()];
    }));
    assert!(!served(&mut world, |it| {
        it.families_v6 = vec![false];
        it.source_ranges = vec!["::/0".to_owned()];
    }));
}
