//! Tests of the configuration: what it means, and what each mistake is told.

mod host;
mod mistakes;
mod reload;

use std::os::unix::fs::symlink;

use proptest::prelude::*;

use super::*;

/// The example of the design, with everything that a file can say.
const DESIGN: &str = include_str!("../testdata/design.yaml");
/// A file that this version accepts, with most of what it can say.
pub(super) const VALID: &str = include_str!("../testdata/valid.yaml");
/// The sample that is installed.
const SAMPLE: &str = include_str!("../../../../deploy/lbd.yaml");
/// The reference of all keys.
const REFERENCE: &str = include_str!("../../../../docs/configuration.md");

/// [`VALID`] with the first occurrence of a text replaced.
pub(super) fn changed(from: &str, to: &str) -> String {
    assert!(VALID.contains(from), "{from:?} is not in the valid file");
    VALID.replacen(from, to, 1)
}

fn message(text: &str) -> String {
    parse(text, "lbd.yaml").map_or_else(|error| error.to_string(), |_| "accepted".to_owned())
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn range(first: &str, last: &str) -> AddressRange {
    AddressRange { first: address(first), last: address(last) }
}

fn port(port: u16, target: Option<u16>) -> FrontendPort {
    FrontendPort { port, target, service_port: None, protocol: Protocol::Tcp }
}

#[test]
fn every_mistake_is_one_message_with_its_place() {
    parse(VALID, "lbd.yaml").unwrap();
    let mut wrong = Vec::new();
    for (from, to, expected) in mistakes::MISTAKES {
        let told = message(&changed(from, to));
        if told != format!("lbd.yaml:{expected}") {
            wrong.push(format!("after {from:?} → {to:?}\n   told {told}\n not {expected}"));
        }
        assert!(!expected.contains('\n'), "one line: {expected}");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_message_says_what_to_do() {
    const VERBS: [&str; 13] = [
        "write",
        "remove",
        "correct",
        "did you mean",
        "choose",
        "save",
        "make",
        "give",
        "refer",
        "put",
        "add",
        "leave",
        "raise",
    ];
    for (_, _, message) in mistakes::MISTAKES {
        assert!(VERBS.iter().any(|verb| message.contains(verb)), "{message}");
    }
}

#[test]
fn the_design_is_refused_at_what_does_not_work_yet_and_nowhere_else() {
    let mut text = DESIGN.to_owned();
    let refusals = [(
        "        source_ranges: [192.168.203.0/24]\n",
        "",
        "lbd.yaml:31:24: tenant tenant-a: frontend ingress-lb: source_ranges: is not supported yet by this version: remove it, \
             and filter before this host until it is",
    )];
    for (from, to, expected) in refusals {
        assert_eq!(message(&text), expected);
        assert!(text.contains(from));
        text = text.replacen(from, to, 1);
    }
    let config = parse(&text, "lbd.yaml").unwrap();
    assert_eq!(config, expected_design());
    assert_eq!(config.origin.file, "lbd.yaml");
}

/// What the design's example means, without what is not supported.
fn expected_design() -> Config {
    let settings = FrontendSettings {
        affinity: None,
        preserve_client: false,
        unserved: Unserved::Reject,
        all_down: AllDown::Try,
        on_down: OnDown::Keep,
        ip_mode: None,
        adopt: Adopt::Never,
        snat: Vec::new(),
        source_ranges: Vec::new(),
        health: Probe {
            kind: ProbeKind::Tcp,
            port: None,
            path: "/".to_owned(),
            host: None,
            expect: Vec::new(),
            interval: Duration::from_secs(1),
            timeout: Duration::from_secs(1),
            fall: 3,
            rise: 2,
            fast_interval: Duration::from_millis(250),
            ca: None,
        },
        timeouts: Timeouts {
            tcp_established: Duration::from_hours(24),
            tcp_half_open: Duration::from_secs(30),
            tcp_fin: Duration::from_mins(1),
            tcp_reset: Duration::from_secs(10),
            udp_unreplied: Duration::from_secs(30),
            udp_replied: Duration::from_mins(3),
        },
    };
    let mut metrics = settings.clone();
    metrics.health.kind = ProbeKind::Http;
    metrics.health.port = Some(ProbePort::Name("metrics".to_owned()));
    metrics.health.path = "/healthz/ready".to_owned();
    Config {
        timeouts: settings.timeouts,
        hub: Hub {
            name: "hub".to_owned(),
            segment: SegmentName { interface: "eth0".to_owned(), vlan: None },
            snat: vec![address("10.32.96.50")],
            snat_ports: (1024, 32_767),
            node_cidrs: vec!["10.32.96.0/20".parse().unwrap()],
            kubernetes: Some(Kubernetes {
                kubeconfig: "/etc/lbd/hub.kubeconfig".into(),
                allow_insecure: false,
                max_blind: None,
            }),
        },
        tenants: vec![Tenant {
            name: "tenant-a".to_owned(),
            segment: SegmentName { interface: "eth1".to_owned(), vlan: Some(2003) },
            addresses: vec!["192.168.203.2/24".parse().unwrap()],
            gateways: vec![address("192.168.203.1")],
            pools: vec![range("192.168.203.110", "192.168.203.119")],
            avoid: vec![range("192.168.203.115", "192.168.203.115")],
            claims: vec![Claim {
                namespaces: vec!["clusters-tenant-a".to_owned()],
                guest: Guest { max_vips: Some(8), pools: Vec::new() },
                ..Claim::default()
            }],
            limits: Limits { flows: Some(100_000), udp_flows: None, new_flows_per_second: Some(5000) },
            host_access: HostAccess::Own,
            frontends: vec![
                Frontend {
                    name: "ingress-shared-lb".to_owned(),
                    service: Some(("openshift-ingress".to_owned(), "router-nodeport-tenant-a".to_owned())),
                    vip: Some(address("192.168.203.111")),
                    ports: vec![port(443, None), port(80, None)],
                    backends: Vec::new(),
                    via: Via::Hub,
                    mode: None,
                    settings: metrics,
                },
                Frontend {
                    name: "ingress-lb".to_owned(),
                    service: None,
                    vip: Some(address("192.168.203.112")),
                    ports: vec![port(443, Some(30_190)), port(80, Some(30_282))],
                    backends: vec![
                        StaticBackend { address: address("192.168.203.101"), port: None, weight: 1 },
                        StaticBackend { address: address("192.168.203.102"), port: None, weight: 2 },
                    ],
                    via: Via::Tenant,
                    mode: None,
                    settings: FrontendSettings { affinity: Some(Affinity::Source), ..settings.clone() },
                },
            ],
            settings,
        }],
        datapath: Datapath {
            mode: XdpMode::Auto,
            max_flows: 262_144,
            max_flows_v6: 26_214,
            bpffs: "/sys/fs/bpf".into(),
            mss_clamp: MssClamp::Auto,
            announce_interval: Duration::from_mins(1),
        },
        address_annotations: Vec::new(),
        state_dir: "/var/lib/lbd".into(),
        socket: "/run/lbd/lbd.sock".into(),
        metrics: "127.0.0.1:9474".parse().unwrap(),
        origin: Origin::default(),
    }
}

#[test]
fn what_is_left_out_is_as_in_the_design() {
    // Everything that the design's example writes out as a default.
    let (_, rest) = DESIGN.split_once("defaults:").unwrap();
    let mut text = DESIGN.replace(rest, " {}\n").replace("    snat_ports: 1024-32767\n", "");
    for (from, to) in [("        source_ranges: [192.168.203.0/24]\n", ""), ("    host_access: own ", "    #")] {
        assert!(text.contains(from));
        text = text.replacen(from, to, 1);
    }
    assert_eq!(parse(&text, "lbd.yaml").unwrap(), expected_design());
}

#[test]
fn settings_are_merged_and_the_innermost_wins() {
    let config = parse(VALID, "lbd.yaml").unwrap();
    let tenant = config.tenant("tenant-a").unwrap();
    let of_frontend = |name: &str| &tenant.frontend(name).unwrap().settings;
    let shared = of_frontend("ingress-shared-lb");
    let own = of_frontend("ingress-lb");
    // The defaults say 1s, the tenant 2s.
    assert_eq!(tenant.settings.health.interval, Duration::from_secs(2));
    assert_eq!(config.tenant("tenant-b").unwrap().settings.health.interval, Duration::from_secs(1));
    assert_eq!(shared.health.interval, Duration::from_secs(2));
    assert_eq!((shared.health.timeout, own.health.timeout), (Duration::from_millis(500), Duration::from_secs(1)));
    assert_eq!(shared.health.port, Some(ProbePort::Name("metrics".to_owned())));
    // A frontend's settings stay its own.
    assert_eq!(own.health.port, None);
    assert_eq!((tenant.settings.unserved, shared.unserved), (Unserved::Drop, Unserved::Drop));
    assert_eq!(own.unserved, Unserved::Reject);
    assert_eq!((tenant.settings.affinity, own.affinity), (None, Some(Affinity::Source)));
}

#[test]
fn timeouts_and_sources_are_merged_and_the_innermost_wins() {
    let text = changed(
        "    health: { interval: 2s }\n",
        "    health: { interval: 2s }\n    timeouts: { udp_replied: 10s }\n    snat: [10.32.96.60]\n",
    )
    .replace("        affinity: source\n", "        affinity: source\n        timeouts: { tcp_established: 3h }\n")
    .replace(
        "        health: { port: metrics,",
        "        adopt: takeover\n        preserve_client: true\n        health: { port: metrics,",
    );
    let config = parse(&text, "lbd.yaml").unwrap();
    assert_eq!(config.timeouts.tcp_established, Duration::from_hours(24));
    assert_eq!(config.tenants[1].settings.timeouts, config.timeouts);
    let tenant = &config.tenants[0];
    assert_eq!(tenant.settings.timeouts, Timeouts { udp_replied: Duration::from_secs(10), ..config.timeouts });
    let [shared, own] = [0, 1].map(|index| &tenant.frontends[index].settings);
    let both = Timeouts { tcp_established: Duration::from_hours(3), ..tenant.settings.timeouts };
    assert_eq!((shared.timeouts, own.timeouts), (tenant.settings.timeouts, both));
    assert_eq!(shared.snat, [address("10.32.96.60")]);
    // What is said around it is of the hub's segment, where this one's backends are not.
    assert!(own.snat.is_empty());
    assert_eq!((shared.adopt, shared.preserve_client), (Adopt::Takeover, true));
    assert_eq!((own.adopt, own.preserve_client), (Adopt::Never, false));
}

#[test]
fn both_families_vlans_and_both_protocols() {
    let text = "version: 1
hubs: [{ name: hub, interface: eth0, vlan: 10, snat: [10.32.96.50, 10.32.96.51, '2001:db8:f::50'] }]
tenants:
  - name: a
    segment:
      interface: eth0
      vlan: 2003
      address: [192.168.203.2/24, '2001:db8:203::2/64']
      gateway: [192.168.203.1, 'fe80::1']
    pools: [192.168.203.0/24, '2001:db8:203::/64']
    host_access: [icmp, 22, 22, 9100]
    limits: { udp_flows: 1000 }
    frontends:
      - { name: dns4, vip: 192.168.203.53, ports: [53, { port: 53, protocol: UDP }], backends: [10.32.96.105] }
      - { name: dns6, vip: '2001:db8:203::53', ports: [53, { port: 53, protocol: UDP }], backends: ['2001:db8:f::105'] }
";
    let config = parse(text, "lbd.yaml").unwrap();
    assert_eq!((config.hub.segment.to_string(), config.hub.snat.len()), ("eth0.10".to_owned(), 3));
    let tenant = &config.tenants[0];
    assert_eq!(tenant.segment.to_string(), "eth0.2003");
    assert_eq!(tenant.address(true), Some("2001:db8:203::2/64".parse().unwrap()));
    assert_eq!(
        (tenant.gateway(false), tenant.gateway(true)),
        (Some(address("192.168.203.1")), Some(address("fe80::1")))
    );
    assert_eq!(tenant.host_access, HostAccess::Only { ports: vec![22, 9100], icmp: true });
    assert_eq!(tenant.limits.udp_flows, Some(1000));
    assert_eq!(
        tenant.frontends[0].ports[1],
        FrontendPort { port: 53, target: None, service_port: None, protocol: Protocol::Udp }
    );
    // Of IPv6 all but the anycast address and the host's own; a /64 has its last address, too.
    assert!(tenant.may_hand_out(address("2001:db8:203::1")));
    assert!(tenant.may_hand_out(address("2001:db8:203::ffff:ffff:ffff:ffff")));
    assert!(["2001:db8:203::", "2001:db8:203::2"].iter().all(|it| !tenant.may_hand_out(address(it))));
    assert_eq!(
        message(&format!("{text}datapath: {{ max_flows_v6: 0 }}\n")),
        "lbd.yaml:10:31: tenant a: pools[1]: datapath.max_flows_v6 is 0, so there is no room for IPv6 connections: raise it, or remove \
         the IPv6 addresses"
    );
    // The same addresses on another VLAN of the interface are another tenant's.
    let (head, tenant) = text.split_once("  - name: a\n").unwrap();
    let other = tenant.replace("vlan: 2003", "vlan: 2004");
    parse(&format!("{head}  - name: a\n{tenant}  - name: b\n{other}"), "lbd.yaml").unwrap();
    assert!(
        message(&format!("{head}  - name: a\n{tenant}  - name: b\n{tenant}")).contains("on the same segment eth0.2003")
    );
}

#[test]
fn candidates_are_taken_lazily_and_pass_over_what_is_avoided() {
    let text = changed("192.168.203.110-192.168.203.119", "192.168.203.110-192.168.203.119, 192.168.203.120/31")
        .replace("avoid: [192.168.203.115]", "avoid: [192.168.203.112-192.168.203.118, 192.168.203.120]");
    let text = text.replace("vip: 192.168.203.112", "vip: 192.168.203.9");
    let tenant = parse(&text, "lbd.yaml").unwrap().tenants.remove(0);
    let found: Vec<String> = tenant.candidates(&tenant.pools).map(|it| it.to_string()).collect();
    assert_eq!(found, ["192.168.203.110", "192.168.203.111", "192.168.203.119", "192.168.203.121"]);
    let large = [range("2001:db8::", "2001:db8::ffff:ffff:ffff:ffff"), range("255.255.255.255", "255.255.255.255")];
    let tenant = Tenant { avoid: vec![range("2001:db8::", "2001:db8::ffff:ffff:ffff:fffd")], ..tenant };
    assert_eq!(tenant.candidates(&large).count(), 3);
}

#[test]
fn times_of_a_probe_that_are_left_out_follow_a_short_interval() {
    let text = changed("interval: 1s, timeout: 1s,", "interval: 100ms,").replace("    health: { interval: 2s }\n", "");
    let text = text.replace(", timeout: 500ms", "");
    let health = parse(&text, "lbd.yaml").unwrap().tenants.remove(1).settings.health;
    assert_eq!((health.interval, health.timeout), (Duration::from_millis(100), Duration::from_millis(100)));
    assert_eq!(health.fast_interval, Duration::from_millis(100));
}

#[test]
fn what_no_vip_can_have_is_avoided() {
    let text = changed("192.168.203.110-192.168.203.119", "192.168.203.0/30, 192.168.203.110-192.168.203.119");
    let tenant = parse(&text, "lbd.yaml").unwrap().tenants.remove(0);
    let handed_out: Vec<u8> =
        (0..=255).filter(|last| tenant.may_hand_out(IpAddr::from([192, 168, 203, *last]))).collect();
    assert_eq!(handed_out, [3, 110, 111, 112, 113, 114, 116, 117, 118, 119]);
}

#[test]
fn a_vip_may_be_outside_the_pools_when_it_is_inside_the_segment() {
    let text = changed("vip: 192.168.203.112", "vip: 192.168.203.9");
    let config = parse(&text, "lbd.yaml").unwrap();
    assert_eq!(config.tenants[0].frontends[1].vip, Some(address("192.168.203.9")));
}

#[test]
fn frontends_of_one_tenant_share_a_vip_when_their_ports_differ() {
    let text = changed("vip: 192.168.203.112", "vip: 192.168.203.111").replace("port: 443, t", "port: 8443, t");
    let text = text.replace("port: 80, t", "port: 8080, t");
    parse(&text, "lbd.yaml").unwrap();
}

#[test]
fn tenants_in_different_segments_may_have_the_same_addresses() {
    let text = changed("pools: [192.168.203.0/28]", "pools: [192.168.203.110-192.168.203.119]");
    parse(&text, "lbd.yaml").unwrap();
}

#[test]
fn announcements_come_every_minute_or_as_the_file_says() {
    let interval = |text: &str| parse(text, "lbd.yaml").unwrap().datapath.announce_interval;
    assert_eq!(interval(VALID), Duration::from_mins(1));
    assert_eq!(interval(&changed("mss_clamp: auto", "mss_clamp: auto, announce_interval: 1s")), Duration::from_secs(1));
    assert_eq!(
        interval(&changed("mss_clamp: auto", "mss_clamp: auto, announce_interval: 1h")),
        Duration::from_hours(1)
    );
}

#[test]
fn words_are_what_the_key_says_and_not_what_yaml_guesses() {
    for (clamp, expected) in [
        ("off", MssClamp::Off),
        ("\"off\"", MssClamp::Off),
        ("1400", MssClamp::Value(1400)),
        ("'1400'", MssClamp::Value(1400)),
    ] {
        let config = parse(&changed("mss_clamp: auto", &format!("mss_clamp: {clamp}")), "lbd.yaml").unwrap();
        assert_eq!(config.datapath.mss_clamp, expected);
    }
    let config = parse(&changed("- name: tenant-b", "- name: 0x10"), "lbd.yaml").unwrap();
    assert_eq!(config.tenants[1].name, "0x10");
}

#[test]
fn host_access_is_own_none_or_a_list() {
    for (text, expected) in [
        ("own", HostAccess::Own),
        ("none", HostAccess::None),
        ("[icmp]", HostAccess::Only { ports: Vec::new(), icmp: true }),
        ("[22]", HostAccess::Only { ports: vec![22], icmp: false }),
    ] {
        let config = parse(&changed("host_access: own", &format!("host_access: {text}")), "lbd.yaml").unwrap();
        assert_eq!(config.tenants[0].host_access, expected);
    }
}

#[test]
fn aliases_and_merges_repeat_what_is_written_once() {
    let text = changed("    health: { interval: 2s }\n", "    health: &slow { interval: 2s }\n")
        .replace("health: { port: metrics, timeout: 500ms }", "health: { <<: *slow, port: metrics, timeout: 500ms }")
        .replace("        affinity: source\n", "        affinity: source\n        health: *slow\n");
    assert_eq!(parse(&text, "lbd.yaml").unwrap(), parse(VALID, "lbd.yaml").unwrap());
}

#[test]
fn json_is_yaml_too() {
    let text = r#"{"version":1,"hubs":[{"name":"hub","interface":"eth0"}],"tenants":[{"name":"a","segment":{"interface":"eth1"},
        "frontends":[{"name":"f","vip":"192.0.2.9","ports":[443],"backends":["10.0.0.1"]}]}]}"#;
    let config = parse(text, "lbd.json").unwrap();
    assert_eq!(config.tenants[0].frontends[0].ports, [port(443, None)]);
    assert_eq!(config.segment_names().len(), 2);
    assert_eq!(config.interfaces().into_iter().collect::<Vec<_>>(), ["eth0", "eth1"]);
}

#[test]
fn the_sample_and_the_reference_are_right() {
    let sample = parse(SAMPLE, "deploy/lbd.yaml").unwrap();
    assert_eq!(sample.tenants[0].frontends.len(), 3);
    let complete = REFERENCE.split("```yaml\n").skip(1).filter_map(|block| Some(block.split_once("```")?.0));
    for block in complete.filter(|block| block.contains("version: 1\n")) {
        parse(block, "docs/configuration.md").unwrap_or_else(|error| panic!("{}", error.report()));
    }
    let keys = VALID.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
    for key in keys.filter_map(|word| word.strip_suffix(':')).filter(|key| !matches!(*key, "tenant" | "edge" | "")) {
        assert!(
            REFERENCE.contains(&format!("`{key}`")) || REFERENCE.contains(&format!(".{key}`")),
            "{key} has no reference"
        );
    }
}

#[test]
fn the_report_shows_the_line() {
    let error = parse(&changed("flows: 100000", "flows: 0"), "lbd.yaml").unwrap_err();
    assert_eq!(error.position, Some(Position { line: 17, column: 22 }));
    assert_eq!(
        error.report(),
        "lbd.yaml:17:22: tenant tenant-a: limits.flows: \"0\" is not a number from 1 to 33554432: write one\n   |\n17 |     limits: { \
         flows: 0, new_flows_per_second: 5000 }\n   |                      ^"
    );
}

#[test]
fn a_message_is_one_line_whatever_is_in_the_file() {
    for (from, to) in [
        ("1024-32767", "\"443-\\n32767\""),
        ("192.168.203.110-192.168.203.119", "\"192.168.203.119\\n-192.168.203.110\""),
        ("{ tenant: b }", "{ \"a\\nb\": c }"),
        ("state_dir", "\"\\e[31mred\""),
    ] {
        let error = parse(&changed(from, to), "lbd.yaml").unwrap_err().to_string();
        assert!(!error.contains(char::is_control), "{error:?}");
    }
}

#[test]
fn b17_a_bad_file_is_one_clear_error_and_the_good_one_is_read_again() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("lbd.yaml");
    let file = path.display();
    std::fs::write(&path, VALID).unwrap();
    let good = load(&path).unwrap();

    let overlap = changed("192.168.203.110-192.168.203.119", "192.168.203.110-192.168.203.119, 192.168.203.112/30");
    let unknown = changed("state_dir:", "statedir:");
    let outside = changed("vip: 192.168.203.112", "vip: 192.168.204.112");
    let half = &VALID[..VALID.find("host_access").unwrap() + 5];
    for (text, expected) in [
        (
            overlap.as_str(),
            "12:46: tenant tenant-a: pools[1]: 192.168.203.112-192.168.203.115 overlaps 192.168.203.110-192.168.203.119 at 12:13: \
             write each address once",
        ),
        (&unknown, "43:1: unknown key \"statedir\": did you mean `state_dir`?"),
        (
            &outside,
            "28:14: tenant tenant-a: frontend ingress-lb: vip: 192.168.204.112 is outside the segment's prefix 192.168.203.0/24: \
             write another address of the segment",
        ),
        ("", "1:1: the file is empty: it needs at least `version: 1`, `hubs` and `tenants`"),
        ("# nothing\n\n", "1:1: the file is empty: it needs at least `version: 1`, `hubs` and `tenants`"),
        (
            half,
            "18:5: this is not YAML: simple key expected ':': correct the text here or just before (indentation, a quote or a \
             bracket that is not closed)",
        ),
    ] {
        std::fs::write(&path, text).unwrap();
        assert_eq!(load(&path).unwrap_err().to_string(), format!("{file}:{expected}"));
        std::fs::write(&path, VALID).unwrap();
        assert_eq!(load(&path).unwrap(), good);
    }

    // As a ConfigMap is mounted: the name is a link whose target is exchanged.
    let link = directory.path().join("link.yaml");
    let next = directory.path().join("next");
    let broken = directory.path().join("broken.yaml");
    std::fs::write(&broken, &unknown).unwrap();
    for (target, expected) in [(&path, true), (&broken, false), (&path, true)] {
        symlink(target, &next).unwrap();
        std::fs::rename(&next, &link).unwrap();
        assert_eq!(load(&link).is_ok(), expected);
    }
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("lbd.yaml");
    let file = path.display().to_string();
    assert_eq!(
        load(&path).unwrap_err().to_string(),
        format!(
            "{file}: the configuration cannot be read: No such file or directory (os error 2): correct the path or its permissions"
        )
    );
    std::fs::write(&path, b"version: 1\nhubs: \xe9").unwrap();
    assert_eq!(
        load(&path).unwrap_err().to_string(),
        format!("{file}:2:7: this is not UTF-8 text: save the file as UTF-8")
    );
    std::fs::write(&path, vec![b'#'; MAX_BYTES as usize + 1]).unwrap();
    assert_eq!(
        load(&path).unwrap_err().to_string(),
        format!("{file}: the configuration is larger than 8 MiB: is this the right file?")
    );
    std::fs::write(&path, format!("\u{feff}{VALID}")).unwrap();
    load(&path).unwrap();
    assert!(
        load(directory.path()).unwrap_err().to_string().contains("the configuration cannot be read: Is a directory")
    );
}

#[test]
fn a_file_cannot_make_the_reader_grow() {
    let bomb: String = std::iter::once("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned())
        .chain((1..12).map(|n| format!("a{n}: &a{n} [{}]\n", vec![format!("*a{}", n - 1); 10].join(", "))))
        .collect();
    assert_eq!(
        message(&bomb),
        "lbd.yaml:6:45: with its aliases (`*…`) the file has more than 1000000 values: write fewer of them"
    );
    let merges: String = std::iter::once("a0: &a0 { x0: 1, x1: 1, x2: 1 }\n".to_owned())
        .chain(
            (1..20)
                .map(|n| format!("a{n}: &a{n} {{ <<: [{}], y{n}: 1 }}\n", vec![format!("*a{}", n - 1); 10].join(", "))),
        )
        .collect();
    assert!(!message(&merges).contains("accepted"));
    for deep in
        ["[".repeat(100_000), "{a: ".repeat(100_000), "- ".repeat(100_000), "a:\n".to_owned() + &"  - ".repeat(50_000)]
    {
        assert!(message(&deep).starts_with("lbd.yaml:"), "{}", message(&deep));
    }
}

#[test]
fn a_host_has_limits() {
    let head = "version: 1\nhubs: [{ name: hub, interface: eth0 }]\ntenants:\n";
    let tenants = |count: usize, interfaces: usize| {
        let tenant = |n: usize| format!("  - {{ name: t{n}, segment: {{ interface: eth{} }} }}\n", 1 + n % interfaces);
        head.to_owned() + &(0..count).map(tenant).collect::<String>()
    };
    parse(&tenants(1023, 15), "lbd.yaml").unwrap();
    assert_eq!(
        message(&tenants(1024, 15)),
        "lbd.yaml:1027:5: tenants: more than 1023, which is what one host can have: remove some"
    );
    assert_eq!(
        message(&tenants(20, 16)),
        "lbd.yaml:19:40: tenant t15: segment.interface: eth16 is one interface more than the 16 that one host can serve: put its \
         tenants on another host"
    );
}

#[test]
fn ten_thousand_frontends_are_read_in_a_moment() {
    let frontend = |n: usize| {
        format!(
            "      - {{ name: f{n}, vip: 10.1.{}.{}, ports: [443], backends: [10.32.96.105, 10.32.96.106] }}\n",
            n / 250,
            1 + n % 250
        )
    };
    let text = "version: 1\nhubs: [{ name: hub, interface: eth0 }]\ntenants:\n  - name: a\n    segment: { interface: eth1, address: \
                10.1.255.1/16 }\n    frontends:\n"
        .to_owned()
        + &(0..10_000).map(frontend).collect::<String>();
    let started = std::time::Instant::now();
    assert_eq!(parse(&text, "lbd.yaml").unwrap().tenants[0].frontends.len(), 10_000);
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}

#[test]
fn a_file_cut_anywhere_is_read_or_refused_with_a_place() {
    for end in 0..VALID.len() {
        if let Err(error) = parse(&VALID[..end], "lbd.yaml") {
            assert!(error.position.is_some(), "{error}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
        let _ = parse_bytes(&bytes, "lbd.yaml");
    }

    #[test]
    fn text_never_panics(text in "[ \\n\\t\\[\\]{}:,&*!|>'\"#%@`?<~a-c0-9./-]{0,200}") {
        let _ = parse(&text, "lbd.yaml");
    }

    #[test]
    fn mutations_of_a_valid_file_never_panic(
        edits in proptest::collection::vec((any::<prop::sample::Index>(), 0_usize..6, "[ -~\\n\u{e9}]{0,4}"), 1..4)
    ) {
        let mut text: Vec<char> = VALID.chars().collect();
        for (at, length, insert) in edits {
            let at = at.index(text.len());
            let end = (at + length).min(text.len());
            text.splice(at..end, insert.chars());
        }
        let text: String = text.into_iter().collect();
        if let Err(error) = parse(&text, "lbd.yaml") {
            prop_assert!(error.position.is_some());
            prop_assert!(!error.message.contains('\n'));
            let _ = error.report();
        }
    }

    #[test]
    fn values_moved_elsewhere_never_panic(from in any::<prop::sample::Index>(), to in any::<prop::sample::Index>()) {
        let words: Vec<&str> = VALID.split_inclusive(' ').collect();
        let mut mixed = words.clone();
        mixed[to.index(words.len())] = words[from.index(words.len())];
        let _ = parse(&mixed.concat(), "lbd.yaml");
    }
}
