//! What only the host can prove wrong.

use super::{VALID, changed};
use crate::config::{Severity, check_host, parse};
use crate::plan::model::{HostFacts, InterfaceFacts};

fn interface(addresses: &[&str]) -> InterfaceFacts {
    let addresses: Vec<_> = addresses.iter().map(|address| address.parse().unwrap()).collect();
    InterfaceFacts { mtu: 1500, up: true, all_addresses: addresses.clone(), addresses, ..InterfaceFacts::default() }
}

/// The host that the valid file is for.
fn host() -> HostFacts {
    let mut host = HostFacts::default();
    host.interfaces.insert("eth0".to_owned(), interface(&["10.32.96.40/20", "10.32.96.50/32"]));
    host.interfaces.insert("eth1".to_owned(), interface(&["192.168.203.2/24"]));
    host.interfaces.insert("eth2".to_owned(), interface(&["192.168.203.14/24"]));
    host
}

fn problems(text: &str, host: &HostFacts) -> Vec<String> {
    let config = parse(text, "lbd.yaml").unwrap();
    let word = |severity| if severity == Severity::Error { "error" } else { "warning" };
    check_host(&config, host).iter().map(|problem| format!("{} {problem}", word(problem.severity))).collect()
}

#[test]
fn the_right_host_has_no_problem() {
    assert_eq!(problems(VALID, &host()), Vec::<String>::new());
}

#[test]
fn each_thing_that_does_not_fit_the_host_is_one_message_with_its_place() {
    for (from, to, expected) in [
        (
            "interface: eth1,",
            "interface: eth7,",
            "error lbd.yaml:11:27: tenant tenant-a: segment.interface: the host has no interface eth7: write one that it has (eth0, eth1, \
             eth2), or create it",
        ),
        (
            "interface: eth0",
            "interface: eth7",
            "error lbd.yaml:4:16: hub hub: interface: the host has no interface eth7: write one that it has (eth0, eth1, eth2), or create \
             it",
        ),
        (
            "snat: [10.32.96.50]",
            "snat: [10.33.96.51]",
            "warning lbd.yaml:5:12: hub hub: snat[0]: 10.33.96.51 is neither an address of eth0 nor in its prefixes (10.32.96.0/20, \
             10.32.96.50/32): replies come back only if the nodes have a route to it through this host",
        ),
        (
            "    health: { interval: 2s }\n",
            "    health: { interval: 2s }\n    snat: [10.33.96.52]\n",
            "warning lbd.yaml:21:12: tenant tenant-a: snat[0]: 10.33.96.52 is neither an address of eth0 nor in its prefixes \
             (10.32.96.0/20, 10.32.96.50/32): replies come back only if the nodes have a route to it through this host",
        ),
        (
            "pools: [192.168.203.0/28]",
            "pools: [192.168.203.0/28, '2001:db8:203::10-2001:db8:203::19']",
            "warning lbd.yaml:4:16: hub hub: interface: eth0 has no global IPv6 address that backends could answer to: give it one, or \
             write `snat`",
        ),
        (
            "interface: eth1, address",
            "interface: eth1, vlan: 2003, address",
            "warning lbd.yaml:11:39: tenant tenant-a: segment.vlan: the host has no VLAN interface for eth1.2003: backends there cannot \
             be probed, and count as up: create it (`ip link add link eth1 name eth1.2003 type vlan id 2003`) with an address",
        ),
        (
            "{ interface: eth2 }",
            "{ interface: eth2, vlan: 2003 }",
            "error lbd.yaml:35:27: tenant tenant-b: segment.interface: eth2.2003 has no address, so the segment's prefix is not known: \
             give it one, or write segment.address",
        ),
        (
            "[10.32.96.0/20]",
            "[10.33.0.0/16]",
            "warning lbd.yaml:7:18: hub hub: node_cidrs[0]: 10.33.0.0/16 is not on eth0 (10.32.96.0/20, 10.32.96.50/32): nodes there need \
             a route through eth0",
        ),
        (
            "address: 192.168.203.2/24",
            "address: 192.168.203.2/23",
            "warning lbd.yaml:11:42: tenant tenant-a: segment.address: 192.168.203.2/23 is 192.168.203.2/24 on eth1: clients between the \
             two would be looked for in the wrong place: write the same length here and there",
        ),
        (
            "address: 192.168.203.2/24",
            "address: 192.168.203.3/24",
            "warning lbd.yaml:11:42: tenant tenant-a: segment.address: eth1 does not have 192.168.203.3/24, which neighbours and probes \
             need: add it (`ip address add 192.168.203.3/24 dev eth1`) or correct it",
        ),
        (
            "pools: [192.168.203.0/28]",
            "pools: [192.168.204.0/28]",
            "error lbd.yaml:36:13: tenant tenant-b: pools[0]: 192.168.204.0-192.168.204.15 is not inside 192.168.203.0/24 of eth2: write \
             a range of the segment, or its prefix at segment.address",
        ),
        (
            "segment: { interface: eth2 }",
            "segment: { interface: eth2, gateway: 192.168.204.1 }",
            "error lbd.yaml:35:42: tenant tenant-b: segment.gateway: 192.168.204.1 is not in 192.168.203.0/24 of eth2: write a router of \
             the segment",
        ),
        (
            "    pools: [192.168.203.0/28]\n",
            "    pools: [192.168.203.0/28]\n    frontends: [{ name: f, vip: 192.168.204.9, ports: [1], backends: [10.32.96.105] }]\n",
            "error lbd.yaml:37:33: tenant tenant-b: frontend f: vip: 192.168.204.9 is not in 192.168.203.0/24 of eth2: write an address of \
             the segment, or its prefix at segment.address",
        ),
        (
            "    pools: [192.168.203.0/28]\n",
            "    pools: [192.168.203.0/28]\n    frontends: [{ name: f, vip: 192.168.203.14, ports: [1], backends: [10.32.96.105] }]\n",
            "error lbd.yaml:37:33: tenant tenant-b: frontend f: vip: 192.168.203.14 is an address of eth2, but lbd answers for VIPs \
             itself: remove it there (`ip address del 192.168.203.14 dev eth2`) or write another one",
        ),
        (
            "    pools: [192.168.203.0/28]\n",
            "    pools: [192.168.203.0/28]\n    frontends: [{ name: f, vip: 192.168.203.255, ports: [1], backends: [10.32.96.105] }]\n",
            "error lbd.yaml:37:33: tenant tenant-b: frontend f: vip: 192.168.203.255 is the broadcast address of 192.168.203.0/24: write \
             another address",
        ),
        (
            "    pools: [192.168.203.0/28]\n",
            "    pools: [192.168.203.0/28]\n    frontends: [{ name: f, vip: 192.168.203.9, ports: [1], backends: [10.32.96.40] }]\n",
            "error lbd.yaml:37:71: tenant tenant-b: frontend f: backends[0]: 10.32.96.40 is this host's own address: write the address of \
             a server",
        ),
        (
            "        via: tenant\n",
            "",
            "warning lbd.yaml:30:20: tenant tenant-a: frontend ingress-lb: backends[0]: 192.168.203.101 is not in 10.32.96.0/20, \
             10.32.96.50/32 of eth0: it needs a route through eth0, or is `via` wrong?",
        ),
    ] {
        let found = problems(&changed(from, to), &host());
        assert_eq!(found.first().map(String::as_str), Some(expected), "{from:?} → {to:?}");
    }
}

#[test]
fn an_interface_without_addresses_or_link_is_named() {
    let mut host = host();
    host.interfaces.insert("eth2".to_owned(), InterfaceFacts { up: false, ..interface(&[]) });
    assert_eq!(
        problems(VALID, &host),
        [
            "warning lbd.yaml:35:27: tenant tenant-b: segment.interface: interface eth2 is down: bring it up (`ip link set eth2 up`) or \
             plug it in",
            "error lbd.yaml:35:27: tenant tenant-b: segment.interface: eth2 has no address, so the segment's prefix is not known: \
             give it one, or write segment.address",
        ]
    );
    host.interfaces.insert("eth2".to_owned(), interface(&["192.168.203.14/24"]));
    host.interfaces.insert("eth0".to_owned(), interface(&["fe80::1/64"]));
    assert_eq!(
        problems(&changed("    snat: [10.32.96.50]\n", ""), &host),
        [
            "error lbd.yaml:4:16: hub hub: interface: eth0 has no IPv4 address that backends could answer to: give it one, or write `snat`"
        ]
    );
}

#[test]
fn mtus_that_differ_are_refused_unless_segments_are_clamped() {
    let mut host = host();
    for name in ["eth1", "eth2"] {
        if let Some(facts) = host.interfaces.get_mut(name) {
            facts.mtu = 9000;
        }
    }
    assert_eq!(
        problems(&changed("mss_clamp: auto", "mss_clamp: off"), &host)[0],
        "error lbd.yaml:41:96: datapath.mss_clamp: off, but the MTU of eth1 is 9000 and that of eth0 is 1500: connections of tenant \
         tenant-a would stall on large packets: write auto, or make the MTUs equal"
    );
    assert_eq!(
        problems(&changed("mss_clamp: auto", "mss_clamp: 1461"), &host)[0],
        "error lbd.yaml:41:96: datapath.mss_clamp: 1461 is too large, as the MTU of eth1 is 9000 and that of eth0 is 1500: write at most \
         1460, or auto"
    );
    assert!(problems(&changed("mss_clamp: auto", "mss_clamp: 1460"), &host).is_empty());
    assert_eq!(
        problems(VALID, &host)[0],
        "warning lbd.yaml:11:27: tenant tenant-a: segment.interface: the MTU of eth1 is 9000 and that of eth0 is 1500: TCP segments are \
         kept to 1460 bytes (mss_clamp: auto); make the MTUs equal to be rid of this"
    );
}

#[test]
fn a_dual_stack_tenant_in_a_vlan_fits_its_vlan_interface() {
    let mut host = host();
    host.interfaces.insert("eth2".to_owned(), InterfaceFacts { index: 7, ..interface(&[]) });
    let vlan = InterfaceFacts {
        vlan: Some((7, 2003)),
        ..interface(&["192.168.203.14/24", "2001:db8:203::2/64", "fe80::2/64"])
    };
    host.interfaces.insert("tenant-b".to_owned(), vlan);
    if let Some(hub) = host.interfaces.get_mut("eth0") {
        hub.addresses.push("2001:db8:f::2/64".parse().unwrap());
    }
    let text = changed("{ interface: eth2 }", "{ interface: eth2, vlan: 2003, gateway: 'fe80::1' }")
        .replace("pools: [192.168.203.0/28]", "pools: [192.168.203.0/28, '2001:db8:203::/112']");
    assert_eq!(problems(&text, &host), Vec::<String>::new());
    let outside = text.replace("2001:db8:203::/112", "2001:db8:204::/112");
    assert_eq!(
        problems(&outside, &host),
        [
            "error lbd.yaml:36:31: tenant tenant-b: pools[1]: 2001:db8:204::-2001:db8:204::ffff is not inside 192.168.203.0/24, \
             2001:db8:203::/64, fe80::/64 of tenant-b: write a range of the segment, or its prefix at segment.address"
        ]
    );
}
