//! B51: whatever Services, Nodes and EndpointSlices contain, nothing crashes, and no tenant has anything of another's.

use serde_json::{Value, json};

use super::*;
use crate::config::{Claim, Guest, Mode};
use crate::ipam::Assignments;
use crate::source::kubernetes::convert;

/// Numbers that are the same in every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed >> 32) as usize) % sides
    }

    fn of<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.roll(all.len())]
    }

    fn often(&mut self) -> bool {
        self.roll(4) > 0
    }
}

/// What people and programs have been seen to write where an address, a number or a name belongs.
const TEXTS: [&str; 24] = [
    "",
    " ",
    "\u{0}",
    "300.1.1.1",
    "192.168.203.110,",
    "::g",
    "-1s",
    "{\"a\":1}",
    "192.168.203.110",
    "192.168.203.115",
    "192.168.203.121",
    "10.32.96.105",
    "2001:db8:203::115",
    "0.0.0.0/0",
    "203.0.113.0/24",
    "2001:db8::/32",
    "203.0.113.9",
    "::/0",
    "true",
    "cp",
    "\u{1f4a9}é\u{202e}",
    "192.168.203.1",
    "255.255.255.255",
    "fe80::1%eth0",
];
const NUMBERS: [i64; 10] = [0, 1, 80, 443, 6443, 30918, 65535, 65536, 70000, -1];
const ADDRESSES: [&str; 16] = [
    "192.168.203.101",
    "192.168.203.102",
    "192.168.203.1",
    "192.168.203.2",
    "192.168.203.110",
    "192.168.203.121",
    "192.168.203.255",
    "10.32.96.105",
    "10.32.96.50",
    "127.0.0.1",
    "224.0.0.1",
    "0.0.0.0",
    "nonsense",
    "2001:db8:203::7",
    "::1",
    "172.16.5.9",
];
const NAMESPACES: [&str; 5] =
    ["clusters-tenant-a", "clusters-tenant-b", "clusters-tenant-c", "openshift-ingress", "kube-system"];

fn any_text(dice: &mut Dice) -> Value {
    match dice.roll(40) {
        0 => json!("x".repeat(1_000_000)),
        1 => json!("é,".repeat(40_000)),
        _ => json!(dice.of(&TEXTS)),
    }
}

fn any_port(dice: &mut Dice) -> Value {
    let own = 31000 + dice.roll(1500);
    json!({
        "name": dice.of(&["", "https", "https", "metrics", "\u{0}"]),
        "protocol": dice.of(&[json!("TCP"), json!("TCP"), json!("UDP"), json!("SCTP"), json!(""), json!("ODD"), Value::Null]),
        "port": dice.of(&NUMBERS), "targetPort": dice.of(&[json!(8443), json!("https"), json!(-5)]),
        "nodePort": dice.of(&[json!(30918), json!(own), json!(0), json!(-1), json!(70000), Value::Null]),
        "appProtocol": any_text(dice),
    })
}

fn any_service_object(dice: &mut Dice, number: usize) -> Value {
    let mut labels = json!({ "app": "x" });
    if dice.roll(3) == 0 {
        labels["cluster.x-k8s.io/tenant-service-name"] = json!("web");
    }
    let mut annotations = json!({});
    for key in [
        "lbd.tenantedge.io/vip",
        "lbd.tenantedge.io/shared-key",
        "service.beta.kubernetes.io/load-balancer-source-ranges",
        "metallb.io/loadBalancerIPs",
        "lbd.tenantedge.io/unknown",
    ] {
        if dice.roll(4) == 0 {
            annotations[key] = any_text(dice);
        }
    }
    let ports: Vec<_> = (0..dice.roll(4)).map(|_| any_port(dice)).collect();
    let class = match dice.roll(6) {
        0 => json!("lbd.tenantedge.io/edge"),
        1 => json!("loxilb.io/loxilb"),
        _ => Value::Null,
    };
    let ranges = match dice.roll(8) {
        0 => json!([any_text(dice)]),
        1 => json!(["0.0.0.0/0", "::/0"]),
        _ => Value::Null,
    };
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {
            "name": format!("s{number}"), "namespace": NAMESPACES[number % 5], "labels": labels, "annotations": annotations,
            "uid": if dice.roll(50) == 0 { Value::Null } else { json!(format!("uid-{number:05}")) },
            "creationTimestamp": dice.of(&[json!("2026-01-02T03:04:05Z"), json!("1970-01-01T00:00:00Z"), Value::Null]),
            "deletionTimestamp": if dice.roll(12) == 0 { json!("2026-01-02T03:04:05Z") } else { Value::Null },
        },
        "spec": {
            "type": dice.of(&["LoadBalancer", "LoadBalancer", "LoadBalancer", "NodePort", "ClusterIP", "ExternalName", "Odd", ""]),
            "loadBalancerClass": class, "ports": ports, "selector": if dice.often() { json!({ "app": "x" }) } else { Value::Null },
            "ipFamilies": dice.of(&[json!(["IPv4"]), json!(["IPv4", "IPv6"]), json!(["IPv6"]), json!(["IPv5"]), json!(["IPv4", "IPv4"]), Value::Null]),
            "ipFamilyPolicy": dice.of(&["SingleStack", "PreferDualStack", "RequireDualStack", "?"]),
            "externalTrafficPolicy": dice.of(&["Cluster", "Local", "?"]),
            "healthCheckNodePort": dice.of(&[Value::Null, json!(32000), json!(0), json!(99999), json!(-1)]),
            "sessionAffinity": dice.of(&["None", "ClientIP", "?"]),
            "sessionAffinityConfig": { "clientIP": { "timeoutSeconds": dice.of(&NUMBERS) } },
            "loadBalancerIP": if dice.roll(4) == 0 { any_text(dice) } else { Value::Null },
            "loadBalancerSourceRanges": ranges, "allocateLoadBalancerNodePorts": dice.often(),
            "externalName": "evil.example",
        },
        "status": { "loadBalancer": { "ingress": if dice.roll(6) == 0 { json!([{ "ip": dice.of(&TEXTS) }, { "hostname": "x" }]) } else { Value::Null } } },
    })
}

fn any_slice_object(dice: &mut Dice, number: usize, service: usize) -> Value {
    let endpoints: Vec<_> = (0..dice.roll(4))
        .map(|_| {
            let addresses: Vec<_> = (0..dice.roll(4)).map(|_| if dice.roll(2) == 0 { dice.of(&ADDRESSES) } else { dice.of(&ADDRESSES[..2]) }).collect();
            json!({
                "addresses": addresses, "nodeName": dice.of(&[Value::Null, json!("node-105"), json!("nowhere"), json!("")]),
                "conditions": dice.of(&[json!({ "ready": true }), json!({ "ready": false, "serving": true }), json!({}), Value::Null]),
            })
        })
        .collect();
    json!({
        "metadata": { "name": format!("x{number}"), "namespace": NAMESPACES[service % 5], "labels": { "kubernetes.io/service-name": format!("s{service}") } },
        "addressType": dice.of(&["IPv4", "IPv4", "IPv6", "FQDN", "?"]), "endpoints": endpoints,
        "ports": [{ "name": dice.of(&["https", "", "metrics"]), "port": if dice.often() { json!(30190) } else { dice.of(&[json!(70000), json!(0), Value::Null]).clone() },
            "protocol": dice.of(&[json!("TCP"), json!("UDP"), Value::Null]) }],
    })
}

fn any_node_object(dice: &mut Dice, number: usize) -> Value {
    let addresses: Vec<_> = (0..dice.roll(4))
        .map(|_| {
            let inside = format!("10.32.{}.{}", 96 + number / 250, number % 250);
            let address = if dice.often() { inside } else { (*dice.of(&ADDRESSES)).to_owned() };
            json!({ "type": dice.of(&["InternalIP", "InternalIP", "Hostname", "?"]), "address": address })
        })
        .collect();
    let label = if dice.roll(5) == 0 {
        json!({ "node.kubernetes.io/exclude-from-external-load-balancers": dice.of(&TEXTS) })
    } else {
        Value::Null
    };
    json!({
        "metadata": { "name": format!("node-{number}"), "uid": dice.of(&["a", "b", ""]), "labels": label },
        "spec": { "unschedulable": dice.often() }, "status": if dice.often() { json!({ "addresses": addresses }) } else { Value::Null },
    })
}

fn read<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

/// Three tenants, two of them on one segment, each with a frontend of the file; tenant-c has Services of its own that are in order.
fn site() -> World {
    let mut world = World::new();
    world.config.address_annotations = vec!["metallb.io/loadBalancerIPs".to_owned()];
    world.config.tenants[0].claims[0].guest =
        Guest { max_vips: Some(3), pools: vec![range("192.168.203.117-192.168.203.119")] };
    world.config.tenants[0].frontends = vec![shared(), workers()];
    let mut second = tenant("tenant-b", "eth1");
    second.pools = vec![range("192.168.203.120-192.168.203.199")];
    second.claims.push(Claim {
        namespaces: vec!["kube-system".to_owned()],
        mode: Some(Mode::Endpoints),
        ..Claim::default()
    });
    let mut third = tenant("tenant-c", "eth2");
    third.pools = vec![range("192.168.203.110-192.168.203.250")];
    third.frontends =
        vec![Frontend { backends: workers().backends, ..frontend("own", Some("192.168.203.60"), &[(1, None)]) }];
    third.claims = vec![Claim { namespaces: vec!["good".to_owned()], ..Claim::default() }];
    world.config.tenants.extend([second, third]);
    world.host.interfaces.insert("eth2".to_owned(), world.host.interfaces["eth1"].clone());
    for number in 0..20u16 {
        let mut it = service(&format!("good-{number}"), &[(6443, 29000 + number)]);
        it.created = i64::from(number);
        world.add(&format!("good/s{number}"), it);
    }
    world
}

/// What holds whatever the objects say.
fn check_tenants(world: &World, plan: &Plan, assignments: &Assignments) {
    let mut owners: BTreeMap<(SegmentName, IpAddr), &str> = BTreeMap::new();
    for (service, assignment) in &assignments.services {
        let tenant = world.config.tenant(&assignment.tenant).unwrap();
        let mine = tenant.claims.iter().any(|claim| claim.namespaces.contains(&service.namespace))
            || tenant.frontends.iter().any(|it| it.service == Some((service.namespace.clone(), service.name.clone())));
        assert!(mine, "{service} is not {}'s", tenant.name);
        for &address in &assignment.addresses {
            let reserved = tenant.frontends.iter().any(|it| it.vip == Some(address));
            assert!(tenant.may_hand_out(address) || reserved, "{service} has {address} of nobody");
            let owner = owners.entry((tenant.segment.clone(), address)).or_insert(&tenant.name);
            assert_eq!(*owner, tenant.name, "{address} has two owners");
        }
    }
    for (address, frontend) in &plan.frontends {
        let tenant = world.config.tenant(&plan.tenants[&frontend.tenant].name).unwrap();
        assert_eq!(plan.segments[&address.segment].name, tenant.segment);
        if let Some(service) = &frontend.service {
            assert_eq!(assignments.services[service].tenant, tenant.name);
        }
        for backend in frontend.backends.iter() {
            let known = &plan.backends[&backend.id];
            let place = &plan.segments[&known.segment];
            match frontend.mode {
                Some(Mode::Nodes) => assert!(place.hub_side && known.node.is_some()),
                Some(Mode::Endpoints) => {
                    assert_eq!(known.segment, address.segment);
                    assert!(place.networks.iter().any(|it| it.contains(&backend.address)), "{backend:?}");
                    assert!(!place.gateways.contains(&backend.address), "{backend:?}");
                }
                None => {}
            }
            let ours = plan.addresses.get(&(known.segment, backend.address));
            assert!(ours.is_none_or(|it| !it.vip && !it.host && it.snat.is_none()), "{backend:?} {ours:?}");
        }
    }
    // What is served is open to everybody by its own words.
    assert!(plan.clients.keys().all(|name| plan.frontends.values().all(|it| it.service.as_ref() != Some(name))));
}

/// What clients of a tenant get: everything but ids.
fn view(plan: &Plan, tenant: &str) -> Vec<String> {
    let mine = plan.frontends.iter().filter(|(_, it)| plan.tenants[&it.tenant].name == tenant);
    let shown = mine.map(|(at, it)| {
        let backends: Vec<_> = it.backends.iter().map(|it| (it.address, it.port, it.weight, it.serving)).collect();
        format!("{}:{}/{:?} {} {} {:?} {backends:?}", at.vip, at.port, at.protocol, it.name, it.target_port, it.snat)
    });
    shown.collect()
}

fn fill(world: &mut World, dice: &mut Dice, services: usize, slices: usize) {
    for number in 0..services {
        let object = any_service_object(dice, number);
        let annotations = world.config.address_annotations.iter().cloned().collect();
        if let Some((name, service)) = convert::service(read(object), &annotations) {
            world.inventory.services.insert(name, service);
        }
    }
    for number in 0..slices {
        // Enough for some of those that get an address.
        let service = dice.roll(if number % 2 == 0 { services } else { 500.min(services) });
        let (_, slice) = convert::slice(read(any_slice_object(dice, number, service))).unwrap();
        let mut all = world.inventory.endpoints.get(&slice.service).cloned().unwrap_or_default();
        all.extend(slice.endpoints);
        world.inventory.endpoints.insert(slice.service, all);
    }
}

#[test]
fn b51_ten_thousand_objects_of_any_kind_neither_crash_nor_leak() {
    let mut world = site();
    let plan = world.apply();
    let undisturbed = view(&plan, "tenant-c");
    assert_eq!(undisturbed.len(), 21);
    let mut dice = Dice(51);
    fill(&mut world, &mut dice, 10_000, 10_000);
    for number in 105..605 {
        // The four that there were stay as they were: the good tenant's backends.
        if !(105..=108).contains(&number)
            && let Some((name, mut node)) = convert::node(read(any_node_object(&mut dice, number)))
        {
            node.excluded = true;
            node.addresses.retain(|address| !ALL_NODES.contains(&address.to_string().as_str()));
            world.inventory.nodes.insert(name, node);
        }
    }
    let assignments = world.ipam.assign(&world.config, &world.inventory, &world.host, &BTreeSet::new(), 0);
    let plan = world.plan_with(&assignments);
    check(&plan);
    check_tenants(&world, &plan, &assignments);
    // Not vacuous: all modes are there, and most things are refused with a word.
    for mode in [Some(Mode::Nodes), Some(Mode::Endpoints), None] {
        assert!(plan.frontends.values().any(|it| it.mode == mode), "{mode:?}");
    }
    assert!(plan.frontends.values().filter(|it| it.mode == Some(Mode::Endpoints)).any(|it| it.table.is_some()));
    let told: BTreeSet<_> = plan.notices.iter().chain(&assignments.notices).map(|notice| notice.reason).collect();
    for reason in [
        "AddressRequestRefused",
        "EndpointRefused",
        "ForeignAddress",
        "NodePortMissing",
        "PoolExhausted",
        "PortInvalid",
        "ProtocolUnsupported",
        "SourceRangesInvalid",
        "GuestLimit",
        "NoTenant",
    ] {
        assert!(told.contains(reason), "{reason} not in {told:?}");
    }
    // Excluded nodes are listed, and get nothing.
    let good = view(&plan, "tenant-c").into_iter().map(|line| line.split(" [").next().unwrap().to_owned());
    let before = undisturbed.iter().map(|line| line.split(" [").next().unwrap().to_owned());
    assert!(good.eq(before));
    let own = plan.frontends.iter().find(|(_, it)| it.name == "good/s7").unwrap().0.vip;
    assert_eq!(serving(&plan, &own.to_string(), 6443), ALL_NODES);
    // The messages are bounded, whatever the objects say: they go into Events.
    let longest = plan.notices.iter().chain(&assignments.notices).map(|notice| notice.message.len()).max().unwrap();
    assert!(longest < 1000, "{longest}");
}

#[test]
fn b51_a_service_keeps_its_last_good_state_whatever_is_written_into_it() {
    let mut world = site();
    world.add(API, service("uid-api", &[(6443, 30918)]));
    let good = world.apply();
    let vip = good.frontends.iter().find(|(_, it)| it.name == API).unwrap().0.vip;
    for text in TEXTS.iter().map(|text| (*text).to_owned()).chain(["x".repeat(1_000_000)]) {
        for key in ["lbd.tenantedge.io/vip", "lbd.tenantedge.io/shared-key", "metallb.io/loadBalancerIPs"] {
            let mut it = service("uid-api", &[(6443, 30918)]);
            it.annotations.insert(key.to_owned(), text.clone());
            world.add(API, it);
            let plan = world.apply();
            assert_eq!(view(&plan, "tenant-a"), view(&good, "tenant-a"), "{key}: {text:.20}");
            assert_eq!(at(&plan, &vip.to_string(), 6443).id, at(&good, &vip.to_string(), 6443).id);
        }
    }
}

/// One change of anything, as a cluster has them.
fn change(world: &mut World, dice: &mut Dice) {
    let services: Vec<_> = world.inventory.services.keys().cloned().collect();
    let service = dice.of(&services).clone();
    match dice.roll(9) {
        0 => fill(world, dice, 1 + dice.0 as usize % 12, 0),
        1 => fill(world, dice, 12, 2),
        2 => {
            world.inventory.services.remove(&service);
        }
        3 => {
            let number = 105 + dice.roll(6);
            if let Some((name, node)) = convert::node(read(any_node_object(dice, number))) {
                world.inventory.nodes.insert(name, node);
            }
        }
        4 => {
            let nodes: Vec<_> = world.inventory.nodes.keys().cloned().collect();
            world.inventory.nodes.remove(dice.of(&nodes));
            let (name, node) = node(105 + dice.roll(4) as u8);
            world.inventory.nodes.insert(name, node);
        }
        5 => {
            let port = 29_000 + dice.roll(25) as u16;
            let it = world.inventory.services.get_mut(&service).unwrap();
            it.ports.iter_mut().for_each(|it| it.node_port = port);
            it.client_ip_affinity = dice.often();
            it.policy_local = !dice.often();
        }
        6 | 7 => {
            let it = world.inventory.services.get_mut(&service).unwrap();
            it.ingress = vec![(*dice.of(&TEXTS)).to_owned()];
            it.published = dice.often();
        }
        _ => {
            let known: Vec<_> = world.health.keys().cloned().collect();
            if !known.is_empty() {
                let up = [Some(true), Some(false), None][dice.roll(3)];
                world.health.insert(dice.of(&known).clone(), TargetHealth { up, ..TargetHealth::default() });
            }
        }
    }
}

#[test]
fn plans_made_one_after_another_are_those_made_from_scratch() {
    let (mut decided_before, mut wished_before, mut planned_before) = (0, 0, 0);
    for seed in 0..30 {
        let mut dice = Dice(seed);
        let mut world = site();
        fill(&mut world, &mut dice, 12, 16);
        let mut last: Option<(Inventory, Assignments, Health, Plan)> = None;
        for step in 0..30 {
            let assign = |ipam: &mut Ipam, world: &World| {
                ipam.assign(&world.config, &world.inventory, &world.host, &BTreeSet::new(), 0)
            };
            let mut ipam = Ipam::new(world.ipam.record().clone());
            let assignments = assign(&mut ipam, &world);
            if let Some((inventory, decided, ..)) = &last
                && world.ipam.decides_the_same(&world.config, decided, inventory, &world.inventory)
            {
                decided_before += usize::from(*inventory != world.inventory);
                assert_eq!(assignments, *decided, "seed {seed}, step {step}");
                assert_eq!(ipam.record(), world.ipam.record(), "seed {seed}, step {step}");
            }
            world.ipam = ipam;
            let mut scratch = Planner::new(world.planner.ids().clone());
            let expected = scratch.plan(
                &Arc::new(world.config.clone()),
                &world.inventory,
                &Arc::new(assignments.clone()),
                &world.health,
                &world.host,
            );
            let plan = world.plan_with(&assignments);
            wished_before +=
                usize::from(world.same_wishes && last.as_ref().is_some_and(|(.., before)| *before != plan));
            assert!(plan == expected, "seed {seed}, step {step}: another plan");
            assert!(world.planner.ids() == scratch.ids(), "seed {seed}, step {step}: other ids");
            if let Some((inventory, decided, health, before)) = &last
                && inventory.is_same_but_for_statuses(&world.inventory)
                && *decided == assignments
                && *health == world.health
                && before.resets.is_empty()
            {
                planned_before += usize::from(*inventory != world.inventory);
                assert!(plan == *before, "seed {seed}, step {step}: a status changes the plan");
            }
            let health = world.health.clone();
            for target in &plan.probes {
                if !world.health.contains_key(target) {
                    world.health.insert(target.clone(), TargetHealth { up: Some(true), ..TargetHealth::default() });
                }
            }
            // What fails to reach the maps is planned again.
            if dice.often() {
                world.planner.applied();
            }
            last = Some((world.inventory.clone(), assignments, health, plan));
            change(&mut world, &mut dice);
        }
    }
    let counts = [decided_before, wished_before, planned_before];
    assert!(decided_before > 50 && wished_before > 50 && planned_before > 25, "{counts:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn b51_objects_of_any_kind_one_after_another(seeds in prop::collection::vec(any::<u64>(), 1..4)) {
        let mut world = site();
        for seed in seeds {
            let mut dice = Dice(seed);
            world.inventory.services.retain(|name, _| name.namespace == "good");
            world.inventory.endpoints.clear();
            fill(&mut world, &mut dice, 12, 16);
            for _ in 0..3 {
                let number = 105 + dice.roll(6);
                if let Some((name, node)) = convert::node(read(any_node_object(&mut dice, number))) {
                    world.inventory.nodes.insert(name, node);
                }
            }
            let assignments = world.ipam.assign(&world.config, &world.inventory, &world.host, &BTreeSet::new(), 0);
            let plan = world.plan_with(&assignments);
            check(&plan);
            check_tenants(&world, &plan, &assignments);
            for target in &plan.probes {
                let up = [Some(true), Some(false), None][dice.roll(3)];
                world.health.insert(target.clone(), TargetHealth { up, ..TargetHealth::default() });
            }
            let plan = world.apply();
            check(&plan);
            let assignments = world.ipam.assign(&world.config, &world.inventory, &world.host, &BTreeSet::new(), 0);
            check_tenants(&world, &plan, &assignments);
            world.restart();
        }
    }
}
