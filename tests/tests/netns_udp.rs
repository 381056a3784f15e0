//! Datagrams of both families through the VIP, and what is no Service of a VIP.
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Result, ensure};
use lbd_tests::lab::{self, Bench, Capture, Datagrams, Keep, Untouched, fast};

const LB_MAC: &str = "02:00:00:00:01:02";

fn udp_targets() -> [String; 2] {
    [lab::socket(Bench::VIP, Bench::UDP_PORTS.0), lab::socket(Bench::VIP6, Bench::UDP_PORTS.0)]
}

/// Every datagram comes back as it was sent; a socket talks to one server, all servers take part.
#[test]
#[ignore = "needs root"]
fn datagrams_of_both_families_come_back_whole() -> Result<()> {
    let datagrams = if fast() { 3_000 } else { 30_000 };
    let (bench, _servers, agent) = Bench::dual_running("udp", |text| text)?;
    let other = Untouched::since_now(&agent, "b")?;
    let before = agent.losses(Some("a"))?;
    let captures = bench.lab.capture()?;
    for (target, snat) in udp_targets().iter().zip(["10.0.0.2", "2001:db8:f::2"]) {
        for client in [&bench.near, &bench.far] {
            let report = lab::datagrams(client, target, datagrams, &["--sockets", "60", "--window", "4"])?;
            println!("{target} from {}: {report:?}", client.name());
            report.assert_whole()?;
            ensure!(report.servers.len() == 3 && report.servers_of_a_socket == 1, "{report:?}");
            ensure!(report.peers.len() == 1 && report.peers.contains_key(snat), "{report:?}");
        }
    }
    ensure!(agent.losses(Some("a"))? == before, "packets were dropped: {:?}", agent.losses(Some("a"))?);
    let listed = agent.flows(&["--tenant", "a", "--proto", "udp"])?;
    ensure!(listed.len() == 4 * 60, "{} flows, of 240 sockets", listed.len());
    let packets: u64 = listed.iter().filter_map(|flow| flow["in_packets"].as_u64()).sum();
    ensure!(packets == 4 * u64::from(datagrams), "{packets} packets counted");
    let packets: u64 = listed.iter().filter_map(|flow| flow["out_packets"].as_u64()).sum();
    ensure!(packets == 4 * u64::from(datagrams), "{packets} packets of replies counted");
    ensure!(agent.flows(&["--tenant", "b"])?.is_empty(), "tenant b has flows");
    for capture in captures {
        let summary = capture.finish()?;
        ensure!(summary.bad == 0, "{:?}", summary.assert_good());
    }
    other.check(&agent)
}

/// A checksum that the sender left out stays out, through both directions.
#[test]
#[ignore = "needs root"]
fn a12_datagrams_without_checksum_stay_without() -> Result<()> {
    let (bench, _servers, _agent) = Bench::dual_running("a12", |text| text)?;
    let to_node = |frame: &[u8]| {
        lab::packet(frame).is_some_and(|packet| packet.protocol == 17 && packet.to().port() == Bench::UDP_PORTS.1)
    };
    let captures = [0, 1, 2].map(|place| Capture::start(&bench.nodes[place], Keep::Matching(Box::new(to_node))));
    let [four, _] = udp_targets();
    lab::datagrams(&bench.near, &four, 600, &["--sockets", "20", "--zero-checksum"])?.assert_whole()?;
    lab::datagrams(&bench.far, &four, 300, &["--sockets", "10"])?.assert_whole()?;
    let (mut without, mut with) = (0, 0);
    for capture in captures {
        let summary = capture?.finish()?;
        ensure!(summary.bad == 0, "{:?}", summary.assert_good());
        for packet in summary.kept.iter().filter_map(|frame| lab::packet(&frame.bytes)) {
            if packet.payload[6..8] == [0, 0] { without += 1 } else { with += 1 }
        }
    }
    ensure!((without, with) == (600, 300), "{without} without a checksum, {with} with one");
    Ok(())
}

/// Whoever sends to a port that nobody serves is told at once, in its own protocol.
#[test]
#[ignore = "needs root"]
fn an_unserved_port_is_told_to_the_client() -> Result<()> {
    let (bench, _servers, agent) = Bench::dual_running("unserved", |text| text)?;
    let other = Untouched::since_now(&agent, "b")?;
    let vips = [Bench::VIP, Bench::VIP6];
    for vip in vips {
        for client in [&bench.near, &bench.far] {
            let before = agent.reasons(Some("a"))?.get("unserved").copied().unwrap_or_default();
            // 6443 is served, but by TCP; 5353 by UDP.
            for port in [5354, 6443] {
                let report = lab::datagrams(client, &lab::socket(vip, port), 40, &["--sockets", "2"])?;
                ensure!(report.refused == 2 && report.refused_ms < 500, "{vip}, {port}/udp: {report:?}");
            }
            for port in [81, 5353] {
                let report = lab::load(client, &lab::socket(vip, port), false, 5)?;
                ensure!(report.errors.get("connection refused") == Some(&5), "{vip}, {port}: {report:?}");
                ensure!(report.slowest_ms < 500, "{vip}, {port}: {report:?}");
            }
            let after = agent.reasons(Some("a"))?.get("unserved").copied().unwrap_or_default();
            ensure!(after >= before + 14, "{vip}: {after} counted, before {before}");
        }
    }
    // The error quotes the VIP, and comes from it.
    let capture = Capture::start(
        &bench.near,
        Keep::Matching(Box::new(|frame| lab::packet(frame).is_some_and(|packet| packet.icmp().is_some()))),
    )?;
    lab::datagrams(&bench.near, &lab::socket(Bench::VIP, 5354), 1, &[])?;
    lab::datagrams(&bench.near, &lab::socket(Bench::VIP6, 5354), 1, &[])?;
    let summary = capture.finish()?;
    for (vip, kind) in [(Bench::VIP, (3, 3)), (Bench::VIP6, (1, 4))] {
        let found = summary
            .kept
            .iter()
            .filter_map(|frame| lab::packet(&frame.bytes))
            .any(|packet| packet.source.to_string() == vip && packet.icmp() == Some(kind));
        ensure!(found, "no error from {vip}");
    }
    ensure!(summary.bad == 0, "{:?}", summary.assert_good());
    other.check(&agent)
}

/// One number, two protocols, two services.
#[test]
#[ignore = "needs root"]
fn tcp_and_udp_share_a_number() -> Result<()> {
    let bench = Bench::dual("number")?;
    let _servers = bench.serve_dual()?;
    let configuration = Bench::dual_configuration("").replace("port: 5353, target: 31053", "port: 6443, target: 31053");
    let agent = bench.dual_agent(&configuration)?;
    for vip in [Bench::VIP, Bench::VIP6] {
        let target = lab::socket(vip, 6443);
        let steady = Datagrams::start(&bench.lab, &bench.far, &target, 5, 50)?;
        // The very same tuple in both protocols.
        let options =
            ["--source-port", "40000", "--source", if vip == Bench::VIP { "192.0.2.60" } else { "2001:db8:a::60" }];
        let report = lab::datagrams(&bench.near, &target, 100, &options)?;
        report.assert_whole()?;
        lab::get_with(&bench.near, &target, false, &options)?;
        let report = lab::load(&bench.near, &target, false, 200)?;
        ensure!(report.failed == 0 && report.servers.len() == 3, "{report:?}");
        steady.finish()?.assert_whole()?;
        ensure!(!agent.flows(&["--vip", &target, "--proto", "udp"])?.is_empty(), "no UDP flow is listed");
        ensure!(!agent.flows(&["--vip", &target, "--proto", "tcp"])?.is_empty(), "no TCP flow is listed");
    }
    Ok(())
}

/// What is no Service of the VIP is dropped and counted: neither sent on, nor back, nor around.
#[test]
#[ignore = "needs root"]
fn a31_other_protocols_to_a_vip_are_dropped_and_counted() -> Result<()> {
    const PROTOCOLS: [u8; 3] = [47, 50, 132];
    let (bench, _servers, agent) = Bench::dual_running("a31", |text| text)?;
    let other = Untouched::since_now(&agent, "b")?;
    let wanted = |frame: &[u8]| lab::packet(frame).is_some_and(|packet| PROTOCOLS.contains(&packet.protocol));
    let captures = [&bench.switches[0], &bench.switches[1], &bench.switches[2], &bench.far]
        .map(|namespace| Capture::start(namespace, Keep::Matching(Box::new(wanted))));
    let before = agent.reasons(Some("a"))?.get("unserved_protocol").copied().unwrap_or_default();
    let lb_mac = lab::mac_bytes(LB_MAC)?;
    let near: [IpAddr; 2] = ["192.0.2.60".parse()?, "2001:db8:a::60".parse()?];
    let far: [IpAddr; 2] = ["203.0.113.9".parse()?, "2001:db8:c::9".parse()?];
    let vips: [IpAddr; 2] = [Bench::VIP.parse()?, Bench::VIP6.parse()?];
    let (near_mac, far_mac) = (lab::mac_bytes(&bench.near.mac("eth0")?)?, lab::mac_bytes(&bench.far.mac("eth0")?)?);
    let router_mac = lab::mac_bytes(&bench.router.mac("eth1")?)?;
    let mut sent = 0;
    for protocol in PROTOCOLS {
        for v6 in [0, 1] {
            for _ in 0..10 {
                // Sixteen bytes: enough for any of these headers.
                let frame = lab::protocol_frame((near_mac, lb_mac), near[v6], vips[v6], protocol, &[0x45; 16])?;
                lab::send_frame(&bench.near, "eth0", &frame)?;
                let frame = lab::protocol_frame((far_mac, router_mac), far[v6], vips[v6], protocol, &[0x45; 16])?;
                lab::send_frame(&bench.far, "eth0", &frame)?;
                sent += 2;
            }
        }
    }
    lab::wait_until(Duration::from_secs(3), "all are counted", || {
        let now = agent.reasons(Some("a"))?.get("unserved_protocol").copied().unwrap_or_default();
        ensure!(now == before + sent, "{now} counted, before {before}, {sent} sent");
        Ok(true)
    })?;
    let [tenant, others, hub, far_side] = captures.map(|capture| capture.and_then(Capture::finish));
    let tenant = tenant?;
    let frames: Vec<_> = tenant.kept.iter().filter_map(|frame| lab::packet(&frame.bytes)).collect();
    ensure!(frames.len() as u64 >= sent, "only {} frames were seen at the tenant", frames.len());
    ensure!(frames.iter().all(|packet| packet.from_mac != lb_mac), "the host has sent something back");
    // Over the router once, and never again.
    ensure!(frames.iter().all(|packet| packet.ttl >= 63), "a packet went around");
    for summary in [others?, hub?] {
        ensure!(summary.kept.is_empty(), "{}: {} leaked", summary.namespace, summary.kept.len());
    }
    let far_side = far_side?;
    ensure!(far_side.kept.iter().all(|frame| frame.outgoing), "something came back to the sender");
    // And a served port still is.
    ensure!(lab::load(&bench.near, &lab::socket(Bench::VIP, 6443), false, 20)?.failed == 0, "the VIP is not served");
    other.check(&agent)
}

/// A SYN to an unserved port gets one RST and goes nowhere else.
#[test]
#[ignore = "needs root"]
fn a31_a_syn_to_an_unserved_port_is_refused_and_goes_nowhere() -> Result<()> {
    let (bench, _servers, _agent) = Bench::dual_running("a31b", |text| text)?;
    let wanted =
        |frame: &[u8]| lab::packet(frame).is_some_and(|packet| packet.to().port() == 81 || packet.from().port() == 81);
    let captures = [&bench.switches[0], &bench.switches[1], &bench.switches[2]]
        .map(|namespace| Capture::start(namespace, Keep::Matching(Box::new(wanted))));
    let lb_mac = lab::mac_bytes(LB_MAC)?;
    let near_mac = lab::mac_bytes(&bench.near.mac("eth0")?)?;
    for (port, from, vip) in [(41_001, "192.0.2.60", Bench::VIP), (41_002, "2001:db8:a::60", Bench::VIP6)] {
        let (from, to) = (SocketAddr::new(from.parse()?, port), SocketAddr::new(vip.parse()?, 81));
        lab::send_frame(&bench.near, "eth0", &lab::tcp_frame((near_mac, lb_mac), from, to, 2, (7000, 0))?)?;
    }
    std::thread::sleep(Duration::from_millis(500));
    let [tenant, other, hub] = captures.map(|capture| capture.and_then(Capture::finish));
    let tenant = tenant?;
    for port in [41_001, 41_002] {
        let answers: Vec<_> = tenant
            .kept
            .iter()
            // A switch sends once what came in once.
            .filter(|frame| frame.outgoing)
            .filter_map(|frame| lab::packet(&frame.bytes))
            .filter(|packet| packet.to().port() == port && packet.to_mac == near_mac)
            .collect();
        let [answer] = answers.as_slice() else { anyhow::bail!("{} answers to port {port}", answers.len()) };
        // RFC 9293 §3.10.7.1: acknowledges the SYN.
        let acknowledged = u32::from_be_bytes(answer.payload[8..12].try_into()?);
        ensure!(answer.tcp_flags() == 0x14 && acknowledged == 7001, "{answer:?}");
    }
    for summary in [other?, hub?] {
        ensure!(summary.kept.is_empty(), "{}: {} leaked", summary.namespace, summary.kept.len());
    }
    Ok(())
}
