//! Tenants in VLANs of one interface: frames are tagged by the lab itself, since not every kernel has VLAN devices.
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use lbd_tests::lab::{
    self, Agent, Bench, Capture, Datagrams, Hold, Keep, Lab, Listener, Namespace, Peer, Trunk, Untouched, fast,
};

/// Nodes of tenant a, and of tenant b.
const NODES: [[&str; 2]; 2] = [["n1", "n2"], ["n3", "n4"]];
const TENANTS: [&str; 2] = ["a", "b"];

fn running(name: &str) -> Result<(Trunk, Vec<Peer>, Agent)> {
    let trunk = Trunk::new(name)?;
    let servers = trunk.serve()?;
    let agent = trunk.agent(&Trunk::configuration(""))?;
    Ok((trunk, servers, agent))
}

fn vips() -> [String; 2] {
    [lab::socket(Bench::VIP, 6443), lab::socket(Bench::VIP6, 6443)]
}

fn assert_own_nodes(tenant: usize, servers: &BTreeMap<String, u64>) -> Result<()> {
    let names: Vec<_> = servers.keys().map(String::as_str).collect();
    ensure!(names == NODES[tenant], "tenant {} was served by {names:?}", TENANTS[tenant]);
    Ok(())
}

/// Runs something for both tenants at once.
fn for_both<T: Send>(work: impl Fn(usize) -> Result<T> + Sync) -> Result<Vec<T>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = [0, 1]
            .map(|tenant| {
                let work = &work;
                scope.spawn(move || work(tenant))
            })
            .into();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// Same subnet, same VIPs, same client addresses and ports, at once: each tenant reaches its own nodes, and is counted for itself.
#[test]
#[ignore = "needs root"]
fn two_tenants_with_the_same_addresses_reach_their_own_backends() -> Result<()> {
    let (connections, datagrams) = if fast() { (300, 1_000) } else { (3_000, 20_000) };
    let (trunk, _servers, agent) = running("overlap")?;
    let untouched = TENANTS.map(|tenant| Untouched::since_now(&agent, tenant));
    let captures = trunk.lab.capture()?;
    let vips = vips();
    let udp = [lab::socket(Bench::VIP, Bench::UDP_PORTS.0), lab::socket(Bench::VIP6, Bench::UDP_PORTS.0)];
    let before = TENANTS.map(|tenant| agent.flows(&["--tenant", tenant]).map(|flows| flows.len()));
    let before = [before[0].as_ref().copied().unwrap_or_default(), before[1].as_ref().copied().unwrap_or_default()];
    for (family, target) in vips.iter().enumerate() {
        // The very same five-tuples in both VLANs.
        let holds = for_both(|tenant| {
            let source = ["192.0.2.60", "2001:db8:a::60"][family];
            (0..5)
                .map(|number| {
                    let port = (40_000 + number).to_string();
                    let options = ["--source", source, "--source-port", &port];
                    Hold::start_with(&trunk.lab, &trunk.clients[tenant], target, false, 1, 20, &options)
                })
                .collect::<Result<Vec<_>>>()
        })?;
        for far in [false, true] {
            let reports = for_both(|tenant| {
                let client = if far { &trunk.far[tenant] } else { &trunk.clients[tenant] };
                lab::load(client, target, false, connections)
            })?;
            for (tenant, report) in reports.iter().enumerate() {
                ensure!(report.failed == 0, "tenant {}, {target}: {report:?}", TENANTS[tenant]);
                assert_own_nodes(tenant, &report.servers)?;
            }
            let reports = for_both(|tenant| {
                let client = if far { &trunk.far[tenant] } else { &trunk.clients[tenant] };
                lab::datagrams(client, &udp[family], datagrams, &["--sockets", "20", "--window", "4"])
            })?;
            for (tenant, report) in reports.iter().enumerate() {
                report.assert_whole()?;
                assert_own_nodes(tenant, &report.servers)?;
            }
        }
        for (tenant, holds) in holds.into_iter().enumerate() {
            for hold in holds {
                let report = hold.finish()?;
                report.assert_whole()?;
                ensure!(report.servers.keys().all(|name| NODES[tenant].contains(&name.as_str())), "{report:?}");
            }
        }
    }
    // Each tenant has its own flows, and both have as many, with the same clients.
    let clients = |tenant: &str| -> Result<BTreeSet<String>> {
        let flows = agent.flows(&["--tenant", tenant, "--proto", "tcp"])?;
        Ok(flows.iter().filter_map(|flow| flow["client"].as_str().map(str::to_owned)).collect())
    };
    let (a, b) = (clients("a")?, clients("b")?);
    for number in 0..5 {
        for source in ["192.0.2.60:4000", "[2001:db8:a::60]:4000"] {
            let client = format!("{source}{number}");
            ensure!(a.contains(&client) && b.contains(&client), "{client} is missing");
        }
    }
    for (tenant, name) in TENANTS.into_iter().enumerate() {
        let flows = agent.flows(&["--tenant", name])?;
        let wanted = 4 * connections as usize + 4 * 20 + 10;
        let fresh = flows.len() - before[tenant];
        ensure!(fresh <= wanted && fresh > wanted / 2, "tenant {name} has {fresh} flows, {wanted} were opened");
        let strange: Vec<_> = flows
            .iter()
            .filter(|flow| !flow["node"].as_str().is_none_or(|node| NODES[tenant].contains(&node)))
            .collect();
        ensure!(strange.is_empty(), "tenant {name}: {strange:?}");
    }
    for before in untouched {
        before?.check(&agent)?;
    }
    for namespace in trunk.lab.namespaces().iter().filter(|namespace| !namespace.name().starts_with("router")) {
        Lab::assert_no_forwarding(namespace)?;
    }
    for capture in captures {
        let summary = capture.finish()?;
        ensure!(summary.bad == 0, "{:?}", summary.assert_good());
    }
    Ok(())
}

/// What leaves for a tenant has that tenant's tag, and what leaves for the hub has none.
#[test]
#[ignore = "needs root"]
fn a22_replies_leave_with_the_tag_of_their_tenant() -> Result<()> {
    let (trunk, _servers, agent) = running("a22b")?;
    let from_lb = lab::mac_bytes(Trunk::MAC)?;
    let captures = [&trunk.trunk, &trunk.hub].map(|namespace| {
        // The probes are the host's own.
        let wanted = |frame: &[u8]| lab::packet(frame).is_some_and(|packet| matches!(packet.protocol, 6 | 17));
        Capture::start(namespace, Keep::Matching(Box::new(wanted)))
    });
    for target in vips() {
        for client in trunk.clients.iter().chain(&trunk.far) {
            ensure!(lab::load(client, &target, false, 50)?.failed == 0, "{} does not reach {target}", client.name());
        }
    }
    let moved = for_both(|tenant| lab::transfer(&trunk.clients[tenant], &vips()[0], false, 8 << 20))?;
    ensure!(moved.iter().all(|moved| moved.down_equal && moved.up_equal), "{moved:?}");
    let [tenants, hub] = captures.map(|capture| capture.and_then(Capture::finish));
    let macs: Vec<BTreeSet<[u8; 6]>> = for_both(|tenant| {
        [&trunk.clients[tenant], &trunk.routers[tenant]]
            .map(|station| lab::mac_bytes(&station.mac("eth0")?))
            .into_iter()
            .collect()
    })?;
    let mut seen = BTreeSet::new();
    let tenants = tenants?;
    for packet in tenants.kept.iter().filter_map(|frame| lab::packet(&frame.bytes)).filter(|it| it.from_mac == from_lb)
    {
        let tenant = Trunk::VLANS.iter().position(|&vlan| packet.vlan == Some(vlan));
        let Some(tenant) = tenant else { anyhow::bail!("sent with tag {:?}: {packet:?}", packet.vlan) };
        ensure!(macs[tenant].contains(&packet.to_mac), "VLAN {:?}: {packet:?}", packet.vlan);
        seen.insert((tenant, packet.source.is_ipv6(), packet.to_mac));
    }
    // Two stations by two families by two tenants.
    ensure!(seen.len() == 8, "only {seen:?} were seen");
    let hub = hub?;
    let tagged = hub.kept.iter().filter_map(|frame| lab::packet(&frame.bytes)).filter(|it| it.vlan.is_some()).count();
    ensure!(tagged == 0 && hub.kept.len() > 400, "{tagged} of {} frames on the hub are tagged", hub.kept.len());
    ensure!(tenants.bad == 0 && hub.bad == 0, "{:?}", tenants.assert_good());
    ensure!(agent.reason("internal")? == 0);
    Ok(())
}

/// A SYN from a station to the VIP, in IPv4.
fn syn(station: &Namespace, source: &str, port: u16) -> Result<Vec<u8>> {
    let way = (lab::mac_bytes(&station.mac("eth0")?)?, lab::mac_bytes(Trunk::MAC)?);
    let to = SocketAddr::new(Bench::VIP.parse()?, 6443);
    lab::tcp_frame(way, SocketAddr::new(source.parse()?, port), to, 2, (1, 0))
}

/// SYNs that reached a node, by the client's sequence number; probes have others.
fn crossed(capture: Capture) -> Result<usize> {
    let kept = capture.finish()?.kept;
    Ok(kept
        .iter()
        .filter(|frame| !frame.outgoing)
        .filter_map(|frame| lab::ports(&frame.bytes))
        .filter(|ports| ports.destination.port() == Bench::NODE_PORT && ports.flags == 2 && ports.sequence == 1)
        .count())
}

fn watch_hub(hub: &Namespace) -> Result<Capture> {
    Capture::start(hub, Keep::Matching(Box::new(|frame| lab::ports(frame).is_some_and(|ports| ports.flags == 2))))
}

/// An interface without VLANs gets a tagged frame for its VIP: nobody translates it, whether the interface takes tags off or not.
#[test]
#[ignore = "needs root"]
fn a22_a_tagged_frame_on_an_untagged_interface_is_not_translated() -> Result<()> {
    for offload in ["off", "on"] {
        let bench = Bench::new("a22a")?;
        bench.lb.shell(&format!("ethtool -K ten0 rxvlan {offload} >/dev/null"))?;
        let _servers = bench.serve_nodes(&[Bench::NODE_PORT])?;
        let agent = bench.agent(&Bench::configuration(""))?;
        let other = Untouched::since_now(&agent, "b")?;
        let before = agent.reason("unknown_vlan")?;
        let hub = watch_hub(&bench.switches[2])?;
        let untagged = syn(&bench.near, "192.0.2.60", 41_001)?;
        for port in 0..10 {
            let frame = lab::tagged(&syn(&bench.near, "192.0.2.60", 42_000 + port)?, 2003);
            lab::send_frame(&bench.near, "eth0", &frame)?;
        }
        std::thread::sleep(Duration::from_millis(300));
        ensure!(crossed(hub)? == 0, "offload {offload}: a tagged frame was translated");
        let counted = agent.reason("unknown_vlan")? - before;
        ensure!(counted == 10, "offload {offload}: {counted} of 10 counted");
        ensure!(agent.flows(&["--client", "192.0.2.60:42000"])?.is_empty(), "a flow was made");
        // The same without a tag is.
        let hub = watch_hub(&bench.switches[2])?;
        lab::send_frame(&bench.near, "eth0", &untagged)?;
        std::thread::sleep(Duration::from_millis(300));
        ensure!(crossed(hub)? == 1, "offload {offload}: the untagged frame was not translated");
        other.check(&agent)?;
    }
    Ok(())
}

/// Tags of no tenant, no tag at all, and more than one: nothing of it reaches a tenant's nodes.
#[test]
#[ignore = "needs root"]
fn a22_other_tags_double_tags_and_no_tag_reach_nobody() -> Result<()> {
    let (trunk, _servers, agent) = running("a22c")?;
    // Two tags, the outer one tenant a's, are tenant a's loss.
    let untouched = [TENANTS[1]].map(|tenant| Untouched::since_now(&agent, tenant));
    let plain = |port| syn(&trunk.untagged, "192.0.2.60", port);
    let cases: [(&str, &str, Vec<u8>); 4] = [
        ("another VLAN", "unknown_vlan", lab::tagged(&plain(42_001)?, 2005)),
        ("two tags", "double_tag", lab::tagged(&lab::tagged(&plain(42_002)?, 2004), 2003)),
        ("two tags, the outer of nobody", "unknown_vlan", lab::tagged(&lab::tagged(&plain(42_003)?, 2003), 2005)),
        ("no tag", "", plain(42_005)?),
    ];
    for (name, reason, frame) in cases {
        let hub = watch_hub(&trunk.hub)?;
        let before = if reason.is_empty() { 0 } else { agent.reason(reason)? };
        for _ in 0..5 {
            lab::send_frame(&trunk.untagged, "eth0", &frame)?;
        }
        std::thread::sleep(Duration::from_millis(300));
        ensure!(crossed(hub)? == 0, "{name}: translated");
        if !reason.is_empty() {
            let counted = agent.reason(reason)? - before;
            ensure!(counted == 5, "{name}: {counted} of 5 counted as {reason}");
        }
    }
    // The same with a tenant's tag is translated: the frames above were right in all else.
    let hub = watch_hub(&trunk.hub)?;
    lab::send_frame(&trunk.untagged, "eth0", &lab::tagged(&plain(42_006)?, 2003))?;
    std::thread::sleep(Duration::from_millis(300));
    ensure!(crossed(hub)? == 1, "a frame with tenant a's tag was not translated");
    for before in untouched {
        before?.check(&agent)?;
    }
    Ok(())
}

/// What has no tag on the trunk is the host's own life; and VIPs are not there.
#[test]
#[ignore = "needs root"]
fn the_trunk_without_a_tag_is_the_hosts() -> Result<()> {
    let (trunk, _servers, _agent) = running("native")?;
    let _host = Peer::serve(&trunk.lab, &trunk.lb, "host", &[Listener::plain("192.168.77.2", 8080)])?;
    ensure!(lab::get(&trunk.untagged, "192.168.77.2:8080", false)?.name == "host", "the host is cut off");
    trunk.untagged.ip("address add 192.0.2.70/24 dev eth0")?;
    let options = ["--limit", "1", "--source", "192.0.2.70"];
    ensure!(lab::get_with(&trunk.untagged, &vips()[0], false, &options).is_err(), "a VIP answers without a tag");
    let neighbours = trunk.untagged.shell("ip neigh show 192.0.2.34")?;
    ensure!(!neighbours.contains(Trunk::MAC), "ARP for the VIP is answered without a tag: {neighbours}");
    // In their VLANs they do, also when everybody forgot.
    for client in &trunk.clients {
        client.ip("neigh flush dev eth0")?;
        for target in vips() {
            lab::get(client, &target, false)?;
        }
    }
    Ok(())
}

/// One tenant's flood of connections costs the other one nothing, though they share the interface.
#[test]
#[ignore = "needs root"]
fn a_tenant_in_another_vlan_does_not_notice_a_flood() -> Result<()> {
    let (trunk, _servers, agent) = running("flood")?;
    let calm = Untouched::since_now(&agent, "b")?;
    let hold = Hold::start(&trunk.lab, &trunk.clients[1], &vips()[0], false, 20, 10)?;
    let way = (lab::mac_bytes(&trunk.untagged.mac("eth0")?)?, lab::mac_bytes(Trunk::MAC)?);
    let to = SocketAddr::new(Bench::VIP.parse()?, 6443);
    let target = lab::socket(Bench::VIP, Bench::UDP_PORTS.0);
    let frames = if fast() { 40_000 } else { 400_000 };
    trunk.lab.all_come_back(|| {
        let steady = Datagrams::start(&trunk.lab, &trunk.clients[1], &target, 5, 50)?;
        std::thread::scope(|scope| -> Result<()> {
            let flood = scope.spawn(|| {
                lab::send_frames(
                    &trunk.untagged,
                    "eth0",
                    10_000,
                    (0..frames).filter_map(move |number: u32| {
                        let from = SocketAddr::from((
                            [192, 0, 2, 200 + (number % 50) as u8],
                            1024 + (number / 50 % 60_000) as u16,
                        ));
                        let frame = lab::tcp_frame(way, from, to, 2, (number, 0)).ok()?;
                        Some(lab::tagged(&frame, Trunk::VLANS[0]))
                    }),
                )
            });
            let mut opened = 0;
            while !flood.is_finished() {
                for target in vips() {
                    let report = lab::load(&trunk.clients[1], &target, false, 50)?;
                    ensure!(report.failed == 0, "tenant b's connections fail: {report:?}");
                    assert_own_nodes(1, &report.servers)?;
                    opened += 50;
                }
            }
            let sent = flood.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            println!("{opened} connections of tenant b meanwhile, {sent} frames of the flood");
            ensure!(opened >= 100 && sent > u64::from(frames) / 2, "{opened} connections, {sent} frames");
            Ok(())
        })?;
        steady.finish()
    })?;
    hold.finish()?.assert_whole()?;
    calm.check(&agent)
}
