//! What a reload cannot change.

use super::{VALID, changed};
use crate::config::{changes_needing_restart, parse};

#[test]
fn what_a_reload_cannot_change_is_named() {
    let old = parse(VALID, "lbd.yaml").unwrap();
    assert!(changes_needing_restart(&old, &old).is_empty());
    for (from, to, expected) in [
        ("max_flows: 262144", "max_flows: 300000", vec!["datapath.max_flows"]),
        ("max_flows_v6: 26214", "max_flows_v6: 30000", vec!["datapath.max_flows_v6"]),
        ("bpffs: /sys/fs/bpf", "bpffs: /run/bpf", vec!["datapath.bpffs"]),
        ("mode: auto", "mode: generic", vec!["datapath.mode"]),
        ("mss_clamp: auto", "mss_clamp: off", vec!["datapath.mss_clamp"]),
        ("mss_clamp: auto", "mss_clamp: auto, announce_interval: 10s", vec![]),
        ("state_dir: /var/lib/lbd", "state_dir: /var/lib/other", vec!["state_dir"]),
        ("lbd.sock", "other.sock", vec!["socket"]),
        ("127.0.0.1:9474", "127.0.0.1:9475", vec!["metrics"]),
        ("hub.kubeconfig", "other.kubeconfig", vec!["hubs[0].kubernetes"]),
        ("interface: eth0", "interface: eth1", vec!["hubs[0].interface", "interface eth0 is gone"]),
        ("interface: eth2", "interface: eth3", vec!["interface eth3 is new", "interface eth2 is gone"]),
        ("interface: eth0", "interface: eth0\n    vlan: 7", vec!["hubs[0].vlan", "interface eth0 gets its first VLAN"]),
        ("interface: eth1,", "interface: eth1, vlan: 7,", vec!["interface eth1 gets its first VLAN"]),
        ("snat: [10.32.96.50]", "snat: [10.32.96.50, '2001:db8:f::50']", vec![]),
        ("unserved: drop", "preserve_client: true", vec![]),
        ("unserved: drop", "timeouts: { udp_replied: 10s }", vec![]),
        ("unserved: drop", "adopt: takeover", vec![]),
        ("host_access: own", "host_access: [22]", vec![]),
        ("{ interface: eth2 }", "{ interface: eth2, address: '2001:db8:203::2/64' }", vec![]),
        ("max_vips: 8", "max_vips: 9", vec![]),
        ("vip: 192.168.203.112", "vip: 192.168.203.113", vec![]),
        ("- name: hub", "- name: other", vec!["hubs[0].name"]),
    ] {
        let new = parse(&changed(from, to), "lbd.yaml").unwrap();
        assert_eq!(changes_needing_restart(&old, &new), expected, "{from:?} → {to:?}");
    }
    // Without a cluster nothing has the hub's name.
    let mut one = old.clone();
    one.hub.kubernetes = None;
    let mut two = one.clone();
    two.hub.name = "other".to_owned();
    assert!(changes_needing_restart(&one, &two).is_empty());
    // One more VLAN on an interface that has some is like any other segment.
    let tagged = changed("{ interface: eth2 }", "{ interface: eth1, vlan: 7 }");
    let [one, two] =
        [tagged.clone(), tagged.replace("vlan: 7", "vlan: 8")].map(|text| parse(&text, "lbd.yaml").unwrap());
    assert!(changes_needing_restart(&one, &two).is_empty());
}
