//! IPv6 beside IPv4: real connections, neighbour discovery for VIPs, and the address that backends see.
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lbd_tests::lab::{self, Bench, Capture, Keep, Lab, Namespace, Packet, Untouched, fast};

const VIP: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xa, 0, 0, 0, 0, 0x34);
/// In the pool, but nobody's.
const FREE: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xa, 0, 0, 0, 0, 0x35);
const NEAR: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0xa, 0, 0, 0, 0, 0x60);
const LB_MAC: &str = "02:00:00:00:01:02";
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;

/// Both families of a tenant at once, from its segment and from behind its router.
#[test]
#[ignore = "needs root"]
fn connections_of_both_families_at_once_all_succeed() -> Result<()> {
    let connections = if fast() { 500 } else { 5_000 };
    let (bench, _servers, agent) = Bench::dual_running("six", |text| text)?;
    let other = Untouched::since_now(&agent, "b")?;
    let captures = bench.lab.capture()?;
    let reports = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for client in [&bench.near, &bench.far] {
            for target in Bench::targets() {
                threads.push(scope.spawn(move || lab::load(client, &target, false, connections)));
            }
        }
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Result<Vec<_>>>()
    })?;
    for report in reports {
        ensure!(report.failed == 0 && report.servers.len() == 3, "{report:?}");
    }
    let [_, target] = Bench::targets();
    for client in [&bench.near, &bench.far] {
        let answer = lab::get(client, &target, false)?;
        ensure!(answer.peer.starts_with("[2001:db8:f::2]:"), "the backend sees {}", answer.peer);
    }
    let listed = agent.flows(&["--tenant", "a", "--vip", &target])?;
    ensure!(
        listed.iter().any(|flow| flow["client"].as_str().is_some_and(|it| it.starts_with("[2001:db8:c::9]:"))),
        "{listed:?}"
    );
    ensure!(
        listed.iter().all(|flow| flow["snat"].as_str().is_some_and(|it| it.starts_with("[2001:db8:f::2]:"))),
        "{listed:?}"
    );
    for namespace in bench.lab.namespaces().iter().filter(|namespace| namespace.name() != "router") {
        Lab::assert_no_forwarding(namespace)?;
    }
    for capture in captures {
        let summary = capture.finish()?;
        if summary.namespace != "api" {
            summary.assert_good()?;
        }
        ensure!(summary.missed == 0, "{}: {} of {} missed", summary.namespace, summary.missed, summary.frames);
    }
    other.check(&agent)?;
    let report = lab::load(&bench.other, &lab::socket(Bench::OTHER_VIP6, 6443), false, 50)?;
    ensure!(report.failed == 0, "{report:?}");
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn large_transfers_over_ipv6_have_equal_digests() -> Result<()> {
    let bytes = if fast() { 16 << 20 } else { 100 << 20 };
    let (bench, _servers, agent) = Bench::dual_running("large6", |text| text)?;
    let captures = [&bench.near, &bench.far, &bench.nodes[0], &bench.nodes[1], &bench.nodes[2]]
        .map(|namespace| Capture::start(namespace, Keep::Bad));
    let before = agent.losses(Some("a"))?;
    let [_, target] = Bench::targets();
    for client in [&bench.near, &bench.far] {
        let report = lab::transfer(client, &target, false, bytes)?;
        println!("{report:?}");
        ensure!(report.down_equal && report.up_equal, "{report:?}");
    }
    for capture in captures {
        let summary = capture?.finish()?;
        ensure!(summary.bad == 0, "{:?}", summary.assert_good());
    }
    ensure!(agent.losses(Some("a"))? == before, "packets were dropped: {:?}", agent.losses(Some("a"))?);
    Ok(())
}

/// Segments fit the smaller of both networks, whoever asks for larger ones.
#[test]
#[ignore = "needs root"]
fn the_segment_size_is_clamped_in_both_families() -> Result<()> {
    let bench = Bench::dual("mss")?;
    bench.lb.ip("link set hub0 mtu 1400")?;
    let _servers = bench.serve_dual()?;
    let _agent = bench.dual_agent(&Bench::dual_configuration(""))?;
    let is_syn = |frame: &[u8]| lab::packet(frame).is_some_and(|packet| packet.mss().is_some());
    let switches =
        [&bench.switches[0], &bench.switches[2]].map(|switch| Capture::start(switch, Keep::Matching(Box::new(is_syn))));
    for target in Bench::targets() {
        for client in [&bench.near, &bench.far] {
            let report = lab::transfer(client, &target, false, 2 << 20)?;
            ensure!(report.down_equal && report.up_equal, "{report:?}");
        }
    }
    let [tenant, hub] = switches.map(|capture| capture.and_then(Capture::finish));
    for (name, summary, port) in [("SYN", hub?, Bench::NODE_PORT), ("SYN-ACK", tenant?, 6443)] {
        for (v6, largest) in [(false, 1360), (true, 1340)] {
            let sizes: Vec<_> = summary
                .kept
                .iter()
                .filter_map(|frame| lab::packet(&frame.bytes))
                .filter(|packet| packet.source.is_ipv6() == v6)
                // The SYN to a node, or the SYN-ACK from the VIP; not the probes, which start at the host.
                .filter(|packet| match name {
                    "SYN" => packet.to().port() == port && packet.from().port() < 32_768,
                    _ => packet.from().port() == port,
                })
                .filter_map(|packet| packet.mss())
                .collect();
            ensure!(sizes.len() >= 2 && sizes.iter().all(|&size| size <= largest), "{name}, IPv6 {v6}: {sizes:?}");
            ensure!(sizes.contains(&largest), "{name}, IPv6 {v6}: smaller than need be: {sizes:?}");
        }
    }
    Ok(())
}

/// A neighbour solicitation from a station.
fn solicit(station: &Namespace, source: Ipv6Addr, target: Ipv6Addr, unicast: Option<&str>) -> Result<()> {
    let mac = lab::mac_bytes(&station.mac("eth0")?)?;
    let (group, group_mac) = lab::solicited_group(target);
    let (to, to_mac) = match unicast {
        Some(mac) => (target, lab::mac_bytes(mac)?),
        None => (group, group_mac),
    };
    let mut payload = target.octets().to_vec();
    if !source.is_unspecified() {
        payload.extend([1, 1]);
        payload.extend(mac);
    }
    let frame = lab::icmp6_frame((mac, to_mac), source, to, (SOLICITATION, 0), [0; 4], &payload)?;
    lab::send_frame(station, "eth0", &frame)
}

/// Whom a neighbour message is about.
fn about(packet: &Packet) -> Option<Ipv6Addr> {
    let kind = packet.icmp()?.0;
    let target: [u8; 16] = packet.payload.get(8..24)?.try_into().ok()?;
    (kind == SOLICITATION || kind == ADVERTISEMENT).then(|| target.into())
}

fn watch(namespace: &Namespace) -> Result<Capture> {
    let wanted = |frame: &[u8]| {
        lab::packet(frame).is_some_and(|packet| {
            packet.icmp().is_some_and(|(kind, _)| kind == ADVERTISEMENT)
                && about(&packet).is_some_and(|target| target == VIP || target == FREE)
        })
    };
    Capture::start(namespace, Keep::Matching(Box::new(wanted)))
}

/// What has come in and was kept: advertisements only. Announcements, which the agent makes unasked, are left out: they are neither
/// solicited nor, like the answer to a duplicate check, sent within this time after a question.
fn answers(capture: &Capture) -> Vec<Packet> {
    let kept = capture.summary().kept;
    kept.iter().filter(|frame| !frame.outgoing).filter_map(|frame| lab::packet(&frame.bytes)).collect()
}

/// Questions about a VIP are answered in its own segment, each with the right flags, whether the agent runs or not.
#[test]
#[ignore = "needs root"]
fn a61_neighbour_discovery_for_a_vip() -> Result<()> {
    let (bench, _servers, agent) = Bench::dual_running("a61", |text| text)?;
    // The announcements of a fresh VIP, a second apart, are over.
    std::thread::sleep(Duration::from_secs(4));
    let (near_mac, lb_mac) = (lab::mac_bytes(&bench.near.mac("eth0")?)?, lab::mac_bytes(LB_MAC)?);
    let link_local: Ipv6Addr = {
        let text = bench.near.shell("ip -6 -oneline address show dev eth0 scope link")?;
        let words: Vec<_> = text.split_whitespace().collect();
        let address = words.iter().skip_while(|word| **word != "inet6").nth(1).context("no link-local address")?;
        address.split('/').next().unwrap_or(address).parse()?
    };
    let before = agent.reason("neighbour_answered")?;
    let (group, all) = (None, Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1));
    let questions = [
        ("from link-local", link_local, group, link_local, SOLICITED | OVERRIDE),
        ("from a global address", NEAR, group, NEAR, SOLICITED | OVERRIDE),
        ("unicast, from link-local", link_local, Some(LB_MAC), link_local, SOLICITED | OVERRIDE),
        ("unicast, from a global address", NEAR, Some(LB_MAC), NEAR, SOLICITED | OVERRIDE),
        ("duplicate check", Ipv6Addr::UNSPECIFIED, group, all, OVERRIDE),
    ];
    for round in 0..2 {
        for (name, source, unicast, to, flags) in questions {
            let capture = watch(&bench.near)?;
            solicit(&bench.near, source, VIP, unicast)?;
            let got = lab::eventually(Duration::from_secs(2), &format!("{name}: an answer"), || {
                Ok(answers(&capture).into_iter().find(|packet| about(packet) == Some(VIP)))
            })?;
            ensure!(got.destination == IpAddr::from(to), "{name}: sent to {}", got.destination);
            ensure!(got.source == IpAddr::from(VIP) && got.from_mac == lb_mac && got.ttl == 255, "{name}: {got:?}");
            ensure!(to == all || got.to_mac == near_mac, "{name}: {got:?}");
            ensure!(got.payload[4] & 0xe0 == flags, "{name}: flags {:#x}", got.payload[4]);
            ensure!(got.payload.get(24..32) == Some(&[[2, 1].as_slice(), &lb_mac].concat()), "{name}: {got:?}");
            let summary = capture.finish()?;
            ensure!(summary.bad == 0, "{name}: {:?}", summary.assert_good());
            ensure!(answered_once(&summary.kept), "{name}: {} answers", summary.kept.len());
        }
        if round == 0 {
            // Unicast revalidation comes much later; then nothing has changed.
            std::thread::sleep(Duration::from_secs(if fast() { 2 } else { 60 }));
        }
    }
    ensure!(agent.reason("neighbour_answered")? >= before + 10, "answers are not counted");

    // Nobody's address, and other segments.
    let quiet = [&bench.near, &bench.other, &bench.nodes[0]].map(watch);
    solicit(&bench.near, NEAR, FREE, None)?;
    solicit(&bench.near, Ipv6Addr::UNSPECIFIED, FREE, None)?;
    for station in [&bench.other, &bench.nodes[0]] {
        solicit(station, "fe80::77".parse()?, VIP, None)?;
        solicit(station, Ipv6Addr::UNSPECIFIED, VIP, None)?;
    }
    std::thread::sleep(Duration::from_millis(500));
    for capture in quiet {
        let capture = capture?;
        let heard = answers(&capture);
        ensure!(heard.is_empty(), "{}: {heard:?}", capture.summary().namespace);
    }

    // The group stays joined without the agent.
    agent.kill();
    let groups = bench.lb.shell("ip maddress show dev ten0")?;
    ensure!(groups.contains("33:33:ff:00:00:34") || groups.contains("ff02::1:ff00:34"), "not joined: {groups}");
    for client in [&bench.near, &bench.router] {
        client.ip("-6 neigh flush dev eth0")?;
        client.ip("-4 neigh flush dev eth0")?;
    }
    for (client, target) in
        [(&bench.near, &Bench::targets()[1]), (&bench.far, &Bench::targets()[1]), (&bench.near, &Bench::targets()[0])]
    {
        let report = lab::load(client, target, false, 20)?;
        ensure!(report.failed == 0, "agent dead, {} to {target}: {report:?}", client.name());
    }
    Ok(())
}

fn answered_once(kept: &[lab::Captured]) -> bool {
    kept.iter().filter(|frame| !frame.outgoing).count() == 1
}

/// Connections go to backends from a global address, as soon as there is one: never from a link-local one, never from a deprecated one.
#[test]
#[ignore = "needs root"]
fn a62_the_source_towards_backends_is_global() -> Result<()> {
    let bench = Bench::dual("a62")?;
    bench.lb.ip("-6 address flush dev hub0 scope global")?;
    let _servers = bench.serve_dual()?;
    let configuration = Bench::dual_configuration("").replace("    snat: [10.0.0.2, '2001:db8:f::2']\n", "");
    let agent = bench.agent(&configuration)?;
    let [four, six] = Bench::targets();
    // Not ready, and it says so; the other family is.
    let report = lab::load_with(&bench.near, &six, false, 5, &["--limit", "2"])?;
    ensure!(report.failed == 5, "served without an address to come from: {report:?}");
    let status = agent.lbctl_raw(&["status", "--check"])?;
    let services = agent.lbctl_json(&["services"])?.to_string();
    let said = String::from_utf8_lossy(&status.stdout).into_owned() + &agent.lbctl(&["events"])? + &services;
    ensure!(said.contains("SNAT") || said.contains("snat"), "no reason is given: {said}");
    ensure!(lab::load(&bench.near, &four, false, 20)?.failed == 0, "IPv4 suffers");
    let seen = |wanted: &str| -> Result<()> {
        lab::wait_until(Duration::from_secs(10), &format!("backends see {wanted}"), || {
            let answer = lab::get_with(&bench.near, &six, false, &["--limit", "1"])?;
            ensure!(answer.peer.starts_with(wanted), "{answer:?}");
            Ok(true)
        })
    };
    bench.lb.ip("address add 2001:db8:f::dead/64 dev hub0 nodad preferred_lft 0")?;
    bench.lb.ip("address add 2001:db8:f::2/64 dev hub0 nodad")?;
    seen("[2001:db8:f::2]:")?;
    // As soon as all nodes have been probed.
    lab::wait_until(Duration::from_secs(10), "all nodes serve", || {
        let report = lab::load(&bench.far, &six, false, 50)?;
        ensure!(report.failed == 0, "{report:?}");
        Ok(report.servers.len() == 3)
    })?;
    ensure!(lab::load(&bench.near, &four, false, 20)?.failed == 0, "IPv4 suffers");
    let listed = agent.flows(&["--vip", &six])?;
    ensure!(
        !listed.is_empty()
            && listed.iter().all(|flow| flow["snat"].as_str().is_some_and(|it| it.starts_with("[2001:db8:f::2]:"))),
        "{listed:?}"
    );
    Ok(())
}
