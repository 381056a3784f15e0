//! What a reload can change, and what it would cut.

use super::{VALID, changed};
use crate::config::{Config, changes_needing_restart, loss, parse};

fn config(from: &str, to: &str) -> Config {
    parse(&changed(from, to), "lbd.yaml").unwrap()
}

#[test]
fn what_a_reload_cannot_change_is_named() {
    let old = parse(VALID, "lbd.yaml").unwrap();
    assert!(changes_needing_restart(&old, &old).is_empty());
    for (from, to, expected) in [
        ("max_flows: 262144", "max_flows: 300000", vec!["datapath.max_flows"]),
        ("max_flows_v6: 26214", "max_flows_v6: 30000", vec!["datapath.max_flows_v6"]),
        ("mode: auto", "mode: generic", vec!["datapath.mode"]),
        ("bpffs: /sys/fs/bpf", "bpffs: /run/bpf", vec!["datapath.bpffs"]),
        ("mss_clamp: auto", "mss_clamp: off", vec![]),
        ("state_dir: /var/lib/lbd", "state_dir: /var/lib/other", vec!["state_dir"]),
        ("lbd.sock", "other.sock", vec!["socket"]),
        ("127.0.0.1:9474", "127.0.0.1:9475", vec!["metrics"]),
        ("hub.kubeconfig", "other.kubeconfig", vec!["hubs[0].kubernetes"]),
        ("- name: hub", "- name: other", vec!["hubs[0].name"]),
        (
            "interface: eth0",
            "interface: eth9",
            vec!["hubs[0].interface", "interface eth9 is new", "interface eth0 is gone"],
        ),
        ("interface: eth2", "interface: eth3", vec!["interface eth3 is new", "interface eth2 is gone"]),
        (
            "interface: eth2 }\n    pools: [192.168.203.0/28]",
            "interface: eth1 }\n    pools: [192.168.203.0/28]",
            vec!["interface eth2 is gone"],
        ),
        ("max_vips: 8", "max_vips: 9", vec![]),
        ("vip: 192.168.203.112", "vip: 192.168.203.113", vec![]),
    ] {
        assert_eq!(changes_needing_restart(&old, &config(from, to)), expected, "{from:?} → {to:?}");
    }
}

#[test]
fn what_a_reload_would_cut_is_named() {
    let old = parse(VALID, "lbd.yaml").unwrap();
    assert!(loss(&old, &old).is_empty());
    for (from, to, expected) in [
        // Nothing is lost.
        ("- name: ingress-lb", "- name: renamed", vec![]),
        ("backends: [192.168.203.101, ", "backends: [", vec![]),
        ("affinity: source", "affinity: flow", vec![]),
        ("max_flows: 262144", "max_flows: 300000", vec![]),
        ("192.168.203.110-192.168.203.119", "192.168.203.108-192.168.203.120", vec![]),
        ("192.168.203.110-192.168.203.119", "192.168.203.110-192.168.203.114, 192.168.203.115-192.168.203.119", vec![]),
        ("namespaces: [clusters-tenant-a]", "namespaces: [clusters-tenant-a, more]", vec![]),
        ("        ports: [443, 80]\n", "", vec![]),
        // Something is.
        (
            "vip: 192.168.203.112",
            "vip: 192.168.203.113",
            vec![
                "tenant tenant-a: frontend ingress-lb: 192.168.203.112:443/TCP, 192.168.203.112:80/TCP no longer served by it",
            ],
        ),
        (
            "ports: [443, 80]",
            "ports: [443]",
            vec!["tenant tenant-a: frontend ingress-shared-lb: 192.168.203.111:80/TCP no longer served by it"],
        ),
        (
            "service: openshift-ingress/router-nodeport-tenant-a",
            "service: openshift-ingress/other",
            vec![
                "tenant tenant-a: frontend ingress-shared-lb: 192.168.203.111:443/TCP, 192.168.203.111:80/TCP no longer served by it",
            ],
        ),
        (
            "192.168.203.110-192.168.203.119",
            "192.168.203.110-192.168.203.118",
            vec!["tenant tenant-a: VIPs of pool 192.168.203.110-192.168.203.119 are no longer all in its pools"],
        ),
        (
            "namespaces: [clusters-tenant-a]",
            "namespaces: [other]",
            vec!["tenant tenant-a: Services in namespaces clusters-tenant-a are no longer claimed"],
        ),
        (
            "- name: tenant-b",
            "- name: tenant-c",
            vec!["tenant tenant-b: Services in namespaces with tenant=b with edge=true are no longer claimed"],
        ),
        (
            "interface: eth1,",
            "interface: eth4,",
            vec![
                "tenant tenant-a: frontend ingress-shared-lb: 192.168.203.111:443/TCP, 192.168.203.111:80/TCP no longer served by it",
                "tenant tenant-a: frontend ingress-lb: 192.168.203.112:443/TCP, 192.168.203.112:80/TCP no longer served by it",
                "tenant tenant-a: Services in namespaces clusters-tenant-a are no longer claimed",
            ],
        ),
    ] {
        assert_eq!(loss(&old, &config(from, to)), expected, "{from:?} → {to:?}");
    }
}

#[test]
fn a_reservation_without_a_vip_is_lost_with_its_service() {
    let old = config("        vip: 192.168.203.111\n        ports: [443, 80]\n", "");
    assert!(loss(&old, &old).is_empty());
    let new =
        parse(&changed("        vip: 192.168.203.111\n", "").replace("/router-", "/rooter-"), "lbd.yaml").unwrap();
    assert_eq!(
        loss(&old, &new),
        [
            "tenant tenant-a: frontend ingress-shared-lb: Service openshift-ingress/router-nodeport-tenant-a is no longer reserved"
        ]
    );
}
