//! What changes underneath: MAC addresses, routers, interfaces and addresses of the host, neighbours that fall silent; and what the
//! agent tells the neighbours.
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use lbd_tests::lab::{
    self, Agent, Arrived, Bench, Capture, Datagrams, Hold, Keep, Listener, Namespace, Nic, Peer, Ticker, Untouched,
    Watch, eventually, fast, now_ms, wait_until,
};

const LB_MAC: &str = "02:00:00:00:01:02";
const OTHER_MAC: &str = "02:00:00:00:77:01";

/// The MAC address that a station's kernel knows of a neighbour, in any state.
fn known(station: &Namespace, interface: &str, address: &str) -> Result<Option<String>> {
    let list = station.ip_json(&format!("neigh show {address} dev {interface}"))?;
    Ok(list.pointer("/0/lladdr").and_then(|mac| mac.as_str()).map(str::to_owned))
}

/// Waits until the kernel knows the MAC address; when that was.
fn learnt(station: &Namespace, interface: &str, address: &str, mac: &str, limit: Duration) -> Result<u64> {
    eventually(limit, &format!("{} knows that {address} is at {mac}", station.name()), || {
        Ok((known(station, interface, address)?.as_deref() == Some(mac)).then(now_ms))
    })
}

fn announce(station: &Namespace, interface: &str, address: &str, mac: &str) -> Result<()> {
    let frame = lab::announcement(address.parse::<IpAddr>()?, lab::mac_bytes(mac)?)?;
    lab::send_frame(station, interface, &frame)
}

/// Fails unless every connection has heard something within a second after this moment, and kept hearing.
fn assert_goes_on(lines: &[Arrived], connections: u64, after: u64) -> Result<()> {
    for connection in 0..connections {
        let mut times = lines.iter().filter(|line| line.connection == connection).map(|line| line.at_ms);
        let next = times.find(|&at| at >= after);
        ensure!(
            next.is_some_and(|at| at <= after + 1_000),
            "connection {connection} heard nothing within a second: {:?} ms",
            next.map(|at| at - after)
        );
        let last = times.next_back();
        ensure!(last.is_some_and(|at| at > after + 1_500), "connection {connection} fell silent again");
    }
    Ok(())
}

/// Another router takes the tenant's gateway over: same address, other MAC address. Servers that push go on within a second of the
/// kernel's knowing it.
#[test]
#[ignore = "needs root"]
fn a_new_gateway_of_the_tenant_takes_pushed_data_within_a_second() -> Result<()> {
    for (v6, gateway) in [(false, "192.0.2.1"), (true, "2001:db8:a::1")] {
        let (bench, _servers, agent) = Bench::dual_running("gateway", |text| text)?;
        let other = Untouched::since_now(&agent, "b")?;
        let watch = Watch::start(&bench.lab, &bench.far, &Bench::targets()[usize::from(v6)], 20, 20)?;
        std::thread::sleep(Duration::from_secs(1));
        // The host's own traffic keeps the gateway's entry in use.
        let _ = lab::ping(&bench.lb, gateway)?;
        // Three tenths of a second with nobody at the address, then the new one says so.
        bench.router.ip(&format!("link set eth0 address {OTHER_MAC}"))?;
        std::thread::sleep(Duration::from_millis(300));
        announce(&bench.router, "eth0", gateway, OTHER_MAC)?;
        let at = learnt(&bench.lb, "ten0", gateway, OTHER_MAC, Duration::from_secs(5))?;
        std::thread::sleep(Duration::from_secs(3));
        assert_goes_on(&watch.finish()?, 20, at).with_context(|| format!("IPv6: {v6}"))?;
        let report = lab::load(&bench.far, &Bench::targets()[usize::from(v6)], false, 50)?;
        ensure!(report.failed == 0, "{report:?}");
        other.check(&agent)?;
    }
    Ok(())
}

/// The same at the hub, where the backends are behind a router.
#[test]
#[ignore = "needs root"]
fn a_new_router_at_the_hub_takes_connections_over_within_a_second() -> Result<()> {
    let bench = Bench::dual("hubrouter")?;
    let (router, behind) = (bench.lab.namespace("hubrouter")?, bench.lab.namespace("n9")?);
    let nic = Nic::new("10.0.0.1/24").address("2001:db8:f::1/64").mac("02:00:00:00:0a:01");
    bench.lab.plug(&bench.switches[2], &router, "eth0", &nic)?;
    let station = Nic::new("10.1.0.9/24").address("2001:db8:e::9/64").gateway("10.1.0.1").gateway("2001:db8:e::1");
    let side = Nic::new("10.1.0.1/24").address("2001:db8:e::1/64");
    bench.lab.cable((&behind, "eth0", &station), (&router, "eth1", &side))?;
    router.sysctl("net/ipv4/ip_forward", "1")?;
    router.sysctl("net/ipv6/conf/all/forwarding", "1")?;
    bench.lb.ip("route add 10.1.0.0/24 via 10.0.0.1")?;
    bench.lb.ip("route add 2001:db8:e::/64 via 2001:db8:f::1")?;
    // The router is the gateway of this interface; the tenant's is better for all else.
    bench.lb.ip("route add default via 10.0.0.1 dev hub0 metric 9000")?;
    bench.lb.ip("route add default via 2001:db8:f::1 dev hub0 metric 9000")?;
    let listeners: Vec<_> =
        ["10.1.0.9", "2001:db8:e::9"].iter().map(|address| Listener::plain(address, Bench::NODE_PORT)).collect();
    let _server = Peer::serve(&bench.lab, &behind, "n9", &listeners)?;
    let configuration = Bench::dual_configuration("")
        .replace("node_cidrs: [", "node_cidrs: [10.1.0.0/24, '2001:db8:e::/64', ")
        .replace("[10.0.0.11, 10.0.0.12, 10.0.0.13]", "[10.1.0.9]")
        .replace("['2001:db8:f::11', '2001:db8:f::12', '2001:db8:f::13']", "['2001:db8:e::9']");
    let agent = bench.dual_agent(&configuration)?;
    for (number, (v6, address)) in [(false, "10.0.0.1"), (true, "2001:db8:f::1")].into_iter().enumerate() {
        let target = &Bench::targets()[usize::from(v6)];
        let watch = Watch::start(&bench.lab, &bench.near, target, 20, 20)?;
        let hold = Hold::start(&bench.lab, &bench.far, target, false, 20, 10)?;
        std::thread::sleep(Duration::from_secs(1));
        let mac = format!("02:00:00:00:77:1{number}");
        router.ip(&format!("link set eth0 address {mac}"))?;
        std::thread::sleep(Duration::from_millis(300));
        for address in ["10.0.0.1", "2001:db8:f::1"] {
            announce(&router, "eth0", address, &mac)?;
        }
        let at = learnt(&bench.lb, "hub0", address, &mac, Duration::from_secs(5))?;
        std::thread::sleep(Duration::from_secs(3));
        assert_goes_on(&watch.finish()?, 20, at).with_context(|| format!("IPv6: {v6}"))?;
        let report = hold.finish()?;
        report.assert_whole()?;
        ensure!(report.slowest_ms < 3_000, "{report:?}");
        ensure!(lab::load(&bench.near, target, false, 50)?.failed == 0, "new connections fail");
    }
    let losses = agent.losses(Some("a"))?;
    ensure!(!losses.contains_key("no_flow"), "{losses:?}");
    Ok(())
}

/// A backend and a client get other network cards: connections live on.
#[test]
#[ignore = "needs root"]
fn backends_and_clients_with_new_mac_addresses_keep_their_connections() -> Result<()> {
    let (bench, _servers, agent) = Bench::dual_running("cards", |text| text)?;
    let holds = Bench::targets().map(|target| Hold::start(&bench.lab, &bench.near, &target, false, 30, 10));
    for (station, interface, addresses, mac) in [
        (&bench.nodes[0], "hub0", ["10.0.0.11", "2001:db8:f::11"], "02:00:00:00:77:21"),
        (&bench.near, "ten0", ["192.0.2.60", "2001:db8:a::60"], "02:00:00:00:77:22"),
    ] {
        station.ip(&format!("link set eth0 address {mac}"))?;
        for address in addresses {
            announce(station, "eth0", address, mac)?;
        }
        if interface == "hub0" {
            // The agent's probes keep these entries.
            for address in addresses {
                learnt(&bench.lb, interface, address, mac, Duration::from_secs(5))?;
            }
        }
        std::thread::sleep(Duration::from_secs(2));
    }
    for hold in holds {
        let report = hold?.finish()?;
        report.assert_whole()?;
        ensure!(report.servers.contains_key("n1") && report.slowest_ms < 3_000, "{report:?}");
    }
    for target in Bench::targets() {
        let report = lab::load(&bench.near, &target, false, 100)?;
        ensure!(report.failed == 0 && report.servers.len() == 3, "{report:?}");
    }
    ensure!(!agent.losses(Some("a"))?.contains_key("no_flow"));
    Ok(())
}

/// A node that does not answer for a while becomes a FAILED neighbour; its last MAC address is kept, and its connections live on when
/// it is back.
#[test]
#[ignore = "needs root"]
fn a_neighbour_that_failed_keeps_its_last_mac_address() -> Result<()> {
    let bench = Bench::dual("failed")?;
    let _servers = bench.serve_dual()?;
    // The kernel would believe a neighbour for up to three quarters of a minute.
    for family in ["ipv4", "ipv6"] {
        for (key, value) in
            [("base_reachable_time_ms", "2000"), ("delay_first_probe_time", "1"), ("retrans_time_ms", "300")]
        {
            bench.lb.sysctl(&format!("net/{family}/neigh/hub0/{key}"), value)?;
        }
    }
    let _agent = bench.dual_agent(&Bench::dual_configuration(""))?;
    let holds = Bench::targets().map(|target| Hold::start(&bench.lab, &bench.near, &target, false, 30, 10));
    bench.nodes[0].ip("link set eth0 down")?;
    let state = |address: &str| -> Result<String> { bench.lb.shell(&format!("ip neigh show {address} dev hub0")) };
    let gone = wait_until(Duration::from_secs(12), "the kernel gives up", || {
        Ok(["10.0.0.11", "2001:db8:f::11"].iter().all(|address| {
            state(address)
                .is_ok_and(|state| state.contains("FAILED") || state.contains("PROBE") || state.trim().is_empty())
        }))
    });
    // New ones meanwhile go elsewhere.
    for target in Bench::targets() {
        let report = lab::load(&bench.far, &target, false, 60)?;
        ensure!(report.failed == 0 && !report.servers.contains_key("n1"), "{report:?}");
    }
    bench.nodes[0].ip("link set eth0 up")?;
    // A link that goes down takes the addresses of IPv6 with it.
    bench.nodes[0].ip("address replace 2001:db8:f::11/64 dev eth0 nodad")?;
    gone?;
    std::thread::sleep(Duration::from_secs(6));
    for hold in holds {
        let report = hold?.finish()?;
        ensure!(report.servers.contains_key("n1"), "{report:?}");
        report.assert_whole()?;
    }
    Ok(())
}

/// An interface has another name for a while: nothing is lost.
#[test]
#[ignore = "needs root"]
fn an_interface_that_is_renamed_goes_on() -> Result<()> {
    let (bench, _servers, agent) = Bench::dual_running("rename", |text| text)?;
    let hold = Hold::start(&bench.lab, &bench.near, &Bench::targets()[0], false, 20, 10)?;
    let steady = Datagrams::start(&bench.lab, &bench.near, &lab::socket(Bench::VIP, Bench::UDP_PORTS.0), 5, 20)?;
    let other = Ticker::start(&bench.lab, &bench.other, &lab::socket(Bench::OTHER_VIP, 6443), false, 50)?;
    bench.lb.ip("link set ten0 name moved0")?;
    std::thread::sleep(Duration::from_secs(2));
    ensure!(
        lab::load(&bench.near, &Bench::targets()[0], false, 50)?.failed == 0,
        "connections fail while it is renamed"
    );
    bench.lb.ip("link set moved0 name ten0")?;
    wait_until(Duration::from_secs(10), "all is well", || {
        let status = agent.lbctl_raw(&["status", "--check"])?;
        ensure!(status.status.success(), "{}", String::from_utf8_lossy(&status.stdout));
        Ok(true)
    })?;
    for target in Bench::targets() {
        ensure!(lab::load(&bench.near, &target, false, 50)?.failed == 0, "connections fail");
    }
    hold.finish()?.assert_whole()?;
    steady.finish()?.assert_whole()?;
    let ticks = other.finish()?;
    ensure!(ticks.len() > 20 && ticks.iter().all(|tick| tick.error.is_none()), "the other tenant: {ticks:?}");
    Ok(())
}

/// Segment sizes that a connection to this target asks the nodes for.
fn hub_sizes(bench: &Bench, target: &str) -> Result<Vec<u16>> {
    let is_syn = |frame: &[u8]| lab::packet(frame).is_some_and(|packet| packet.mss().is_some());
    let capture = Capture::start(&bench.switches[2], Keep::Matching(Box::new(is_syn)))?;
    lab::get(&bench.near, target, false)?;
    let kept = capture.finish()?.kept;
    let packets = kept.iter().filter_map(|frame| lab::packet(&frame.bytes));
    // Probes come from the host's own ports.
    Ok(packets
        .filter(|packet| packet.tcp_flags() == 2 && packet.from().port() < 32_768)
        .filter_map(|packet| packet.mss())
        .collect())
}

/// The hub's interface gets a smaller MTU under traffic: senders learn it, and transfers end well.
#[test]
#[ignore = "needs root"]
fn an_mtu_that_shrinks_under_traffic() -> Result<()> {
    let (bench, _servers, agent) = Bench::dual_running("mtu", |text| text)?;
    let bytes = if fast() { 24 << 20 } else { 200 << 20 };
    let shrink = |mtu: u32| -> Result<()> {
        // The nodes first: a veth takes nothing that is larger than its own MTU.
        for (station, interface) in bench.nodes.iter().map(|node| (node, "eth0")).chain([(&bench.lb, "hub0")]) {
            station.ip(&format!("link set {interface} mtu {mtu}"))?;
        }
        Ok(())
    };
    for target in Bench::targets() {
        shrink(1500)?;
        wait_until(Duration::from_secs(5), "segments are as large as before", || {
            Ok(hub_sizes(&bench, &target)?.iter().all(|&size| size > 1400))
        })?;
        let hold = Hold::start(&bench.lab, &bench.far, &target, false, 20, 10)?;
        std::thread::scope(|scope| -> Result<()> {
            let (near, target) = (&bench.near, &target);
            let moving = scope.spawn(move || lab::transfer(near, target, false, bytes));
            std::thread::sleep(Duration::from_millis(200));
            shrink(1400)?;
            let moved = moving.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            ensure!(moved.down_equal && moved.up_equal, "{moved:?}");
            Ok(())
        })?;
        hold.finish()?.assert_whole()?;
        // The next ones ask for segments that fit.
        wait_until(Duration::from_secs(5), "segments are clamped to the new MTU", || {
            let sizes = hub_sizes(&bench, &target)?;
            Ok(!sizes.is_empty() && sizes.iter().all(|&size| size <= 1360))
        })?;
    }
    ensure!(agent.reason("internal")? == 0);
    Ok(())
}

/// A network service is restarted: all addresses and routes go and come again. Connections live on.
#[test]
#[ignore = "needs root"]
fn addresses_that_go_and_come_again() -> Result<()> {
    let (bench, _servers, agent) = Bench::dual_running("flush", |text| text)?;
    let clients = [(&bench.near, 0), (&bench.near, 1), (&bench.far, 0), (&bench.far, 1)];
    let holds = clients.map(|(client, place)| Hold::start(&bench.lab, client, &Bench::targets()[place], false, 20, 10));
    bench.lb.ip_batch("address flush dev ten0 scope global\naddress flush dev hub0 scope global")?;
    std::thread::sleep(Duration::from_secs(2));
    bench.lb.ip_batch(
        "address add 192.0.2.2/24 dev ten0
        address add 2001:db8:a::2/64 dev ten0 nodad
        address add 10.0.0.2/24 dev hub0
        address add 2001:db8:f::2/64 dev hub0 nodad
        route replace default via 192.0.2.1 dev ten0
        route replace default via 2001:db8:a::1 dev ten0",
    )?;
    std::thread::sleep(Duration::from_secs(4));
    for hold in holds {
        hold?.finish()?.assert_whole()?;
    }
    for (client, place) in clients {
        let report = lab::load(client, &Bench::targets()[place], false, 50)?;
        ensure!(report.failed == 0 && report.servers.len() == 3, "{report:?}");
    }
    wait_until(Duration::from_secs(10), "all is well", || {
        let status = agent.lbctl_raw(&["status", "--check"])?;
        ensure!(status.status.success(), "{}", String::from_utf8_lossy(&status.stdout));
        Ok(true)
    })
}

/// An interface is deleted and comes again with its name: attached and forwarding within five seconds; the other tenant notices nothing.
#[test]
#[ignore = "needs root"]
fn a59_an_interface_that_is_deleted_and_made_again() -> Result<()> {
    let bench = Bench::dual("a59")?;
    let _servers = bench.serve_dual()?;
    let begun = now_ms();
    let agent = bench.dual_agent(&Bench::dual_configuration(""))?;
    // A machine that takes longer to start with three interfaces is too busy for five seconds to mean anything.
    let limit = (now_ms() - begun).max(5_000);
    let other = Ticker::start(&bench.lab, &bench.other, &lab::socket(Bench::OTHER_VIP, 6443), false, 50)?;
    let calm = Untouched::since_now(&agent, "b")?;
    bench.lb.ip("link del ten0")?;
    wait_until(Duration::from_secs(5), "status tells of it", || {
        Ok(agent.lbctl_raw(&["status", "--check"])?.status.code() == Some(1))
    })?;
    std::thread::sleep(Duration::from_secs(if fast() { 1 } else { 5 }));
    let nic =
        Nic::new("192.0.2.2/24").address("2001:db8:a::2/64").mac(LB_MAC).gateway("192.0.2.1").gateway("2001:db8:a::1");
    bench.lab.plug(&bench.switches[0], &bench.lb, "ten0", &nic)?;
    let up = now_ms();
    for target in Bench::targets() {
        for client in [&bench.near, &bench.far] {
            let reached = eventually(Duration::from_mins(1), &format!("{target} answers {}", client.name()), || {
                lab::get_with(client, &target, false, &["--limit", "1"])?;
                Ok(Some(now_ms()))
            })?;
            ensure!(reached <= up + limit, "{target}: forwarding {} ms after the interface came", reached - up);
        }
    }
    for target in Bench::targets() {
        ensure!(lab::load(&bench.near, &target, false, 100)?.failed == 0, "connections fail");
    }
    wait_until(Duration::from_secs(10), "all is well", || {
        let status = agent.lbctl_raw(&["status", "--check"])?;
        ensure!(status.status.success(), "{}", String::from_utf8_lossy(&status.stdout));
        Ok(true)
    })?;
    let ticks = other.finish()?;
    ensure!(ticks.len() > 20 && ticks.iter().all(|tick| tick.error.is_none()), "the other tenant: {ticks:?}");
    calm.check(&agent)
}

/// Down and up costs no connection; a restart of the agent does not touch the link at all.
#[test]
#[ignore = "needs root"]
fn a59_down_and_up_and_a_restart_lose_nothing() -> Result<()> {
    let (bench, _servers, agent) = Bench::dual_running("a59b", |text| text)?;
    let holds = Bench::targets().map(|target| Hold::start(&bench.lab, &bench.near, &target, false, 20, 10));
    bench.lb.ip("link set ten0 down")?;
    std::thread::sleep(Duration::from_millis(500));
    bench.lb.ip("link set ten0 up")?;
    // The kernel drops these with the link.
    bench.lb.ip_batch(
        "address replace 2001:db8:a::2/64 dev ten0 nodad
        route replace default via 192.0.2.1 dev ten0
        route replace default via 2001:db8:a::1 dev ten0",
    )?;
    std::thread::sleep(Duration::from_secs(3));
    for target in Bench::targets() {
        for client in [&bench.near, &bench.far] {
            ensure!(lab::load(client, &target, false, 50)?.failed == 0, "{} does not reach {target}", client.name());
        }
    }
    let carrier = "cat /sys/class/net/ten0/carrier_changes /sys/class/net/ten1/carrier_changes /sys/class/net/hub0/carrier_changes";
    let before = bench.lb.shell(carrier)?;
    let attached = bench.lb.shell("ip -details link show | grep -o 'prog/xdp id [0-9]*'")?;
    ensure!(attached.lines().count() == 3, "{attached}");
    let mut monitor = std::process::Command::new("ip");
    monitor.args(["monitor", "link"]);
    let monitor = bench.lab.start(&bench.lb, "monitor", monitor)?;
    let steady = Datagrams::start(&bench.lab, &bench.near, &lab::socket(Bench::VIP, Bench::UDP_PORTS.0), 5, 100)?;
    std::thread::sleep(Duration::from_millis(300));
    agent.stop()?;
    agent.start(&bench.lab)?;
    std::thread::sleep(Duration::from_secs(1));
    steady.finish()?.assert_whole()?;
    ensure!(bench.lb.shell(carrier)? == before, "the link flapped");
    let seen = monitor.output();
    ensure!(!seen.lines().any(|line| line.contains("NO-CARRIER") || line.contains("state DOWN")), "{seen}");
    // Never without a program: a detached interface is announced without one.
    let bare =
        seen.lines().filter(|line| line.contains("ten0") || line.contains("hub0")).filter(|line| !line.contains("xdp"));
    ensure!(bare.count() == 0, "detached meanwhile: {seen}");
    for hold in holds {
        hold?.finish()?.assert_whole()?;
    }
    Ok(())
}

/// A neighbour that remembers somebody else at the VIP is put right when the agent takes over, and again when it missed that; and when
/// the interface gets another MAC address.
#[test]
#[ignore = "needs root"]
fn b31_announcements_put_neighbours_right() -> Result<()> {
    let bench = Bench::dual("b31")?;
    let _servers = bench.serve_dual()?;
    let stale = |station: &Namespace| -> Result<()> {
        for vip in [Bench::VIP, Bench::VIP6] {
            station.ip(&format!("neigh replace {vip} lladdr 02:00:00:00:99:99 dev eth0 nud stale"))?;
        }
        Ok(())
    };
    let is_announcement = |frame: &[u8]| {
        lab::arp(frame).is_some_and(|arp| arp.sender == arp.target && arp.sender.to_string() == Bench::VIP)
            || lab::packet(frame).is_some_and(|packet| {
                packet.icmp().is_some_and(|(kind, _)| kind == 136) && packet.destination.to_string() == "ff02::1"
            })
    };
    stale(&bench.near)?;
    stale(&bench.router)?;
    let captures = [&bench.near, &bench.other, &bench.nodes[0]]
        .map(|station| Capture::start(station, Keep::Matching(Box::new(is_announcement))));
    let agent = Agent::new(&bench.lab, &bench.lb, &Bench::dual_configuration(""))?;
    agent.start(&bench.lab)?;
    for station in [&bench.near, &bench.router] {
        for vip in [Bench::VIP, Bench::VIP6] {
            learnt(station, "eth0", vip, LB_MAC, Duration::from_secs(4))?;
        }
    }
    // The first one is lost on somebody: the next one reaches him.
    stale(&bench.near)?;
    for vip in [Bench::VIP, Bench::VIP6] {
        learnt(&bench.near, "eth0", vip, LB_MAC, Duration::from_secs(3))?;
    }
    std::thread::sleep(Duration::from_secs(3));
    let [near, other, hub] = captures.map(|capture| capture.and_then(Capture::finish));
    let near = near?;
    let heard = |v6: bool| {
        near.kept.iter().filter(|frame| !frame.outgoing && lab::arp(&frame.bytes).is_none() == v6).collect::<Vec<_>>()
    };
    for v6 in [false, true] {
        let heard = heard(v6);
        ensure!(heard.len() >= 3, "IPv6 {v6}: announced {} times", heard.len());
        let spread = heard[heard.len() - 1].at.duration_since(heard[0].at)?;
        ensure!(spread >= Duration::from_secs(1), "IPv6 {v6}: all within {spread:?}");
    }
    for frame in heard(true) {
        let packet = lab::packet(&frame.bytes).context("no packet")?;
        if packet.payload[8..24] == Bench::VIP6.parse::<std::net::Ipv6Addr>()?.octets() {
            // Not solicited, override, no router.
            ensure!(packet.payload[4] & 0xe0 == 0x20 && packet.ttl == 255, "{packet:?}");
        }
    }
    ensure!(near.bad == 0, "{:?}", near.assert_good());
    let vips = |summary: lab::Summary| {
        summary
            .kept
            .iter()
            .filter(|frame| !frame.outgoing)
            .filter(|frame| {
                lab::arp(&frame.bytes).is_some_and(|arp| arp.sender.to_string() == Bench::VIP)
                    || lab::packet(&frame.bytes).is_some_and(|packet| packet.source.to_string() == Bench::VIP6)
            })
            .count()
    };
    ensure!(vips(other?) == 0 && vips(hub?) == 0, "announced in other segments");

    // Another MAC address for the host's interface.
    bench.lb.ip("link set ten0 address 02:00:00:00:77:31")?;
    for station in [&bench.near, &bench.router] {
        for vip in [Bench::VIP, Bench::VIP6] {
            learnt(station, "eth0", vip, "02:00:00:00:77:31", Duration::from_secs(3))?;
        }
    }
    for target in Bench::targets() {
        for client in [&bench.near, &bench.far] {
            let report = lab::load(client, &target, false, 50)?;
            ensure!(report.failed == 0 && report.slowest_ms < 4_000, "{}: {report:?}", client.name());
        }
    }
    // After a restart, too.
    agent.kill();
    stale(&bench.near)?;
    agent.start(&bench.lab)?;
    for vip in [Bench::VIP, Bench::VIP6] {
        learnt(&bench.near, "eth0", vip, "02:00:00:00:77:31", Duration::from_secs(4))?;
    }
    b31_announced_at_the_configured_interval(&bench, &agent)
}

/// A reload makes the interval short; then each family is announced again and again, and what a neighbour remembers wrongly is put right.
fn b31_announced_at_the_configured_interval(bench: &Bench, agent: &Agent) -> Result<()> {
    // The three announcements of the start are over.
    std::thread::sleep(Duration::from_secs(4));
    let of_vip = |frame: &[u8]| {
        lab::arp(frame).is_some_and(|arp| arp.sender == arp.target && arp.sender.to_string() == Bench::VIP)
            || lab::packet(frame).is_some_and(|packet| {
                packet.icmp().is_some_and(|(kind, _)| kind == 136) && packet.source.to_string() == Bench::VIP6
            })
    };
    let keep = || Capture::start(&bench.near, Keep::Matching(Box::new(of_vip)));
    let capture = keep()?;
    std::thread::sleep(Duration::from_secs(5));
    let quiet = capture.finish()?.kept.len();
    ensure!(quiet == 0, "announced {quiet} times in 5 s of a minute's interval");

    let capture = keep()?;
    agent.configure(&Bench::dual_configuration("datapath: { announce_interval: 2s }\n"))?;
    agent.lbctl(&["reload"])?;
    for _ in 0..2 {
        for vip in [Bench::VIP, Bench::VIP6] {
            bench.near.ip(&format!("neigh replace {vip} lladdr 02:00:00:00:99:99 dev eth0 nud stale"))?;
            learnt(&bench.near, "eth0", vip, "02:00:00:00:77:31", Duration::from_secs(3))?;
        }
    }
    std::thread::sleep(Duration::from_secs(9));
    let kept = capture.finish()?.kept;
    for v6 in [false, true] {
        let mut times: Vec<_> = kept
            .iter()
            .filter(|frame| !frame.outgoing && lab::arp(&frame.bytes).is_none() == v6)
            .map(|frame| frame.at)
            .collect();
        // ARP says it in two forms at once.
        times.dedup_by(|later, before| later.duration_since(*before).is_ok_and(|gap| gap < Duration::from_millis(500)));
        ensure!(times.len() >= 4, "IPv6 {v6}: announced {} times", times.len());
        for pair in times.windows(2) {
            let gap = pair[1].duration_since(pair[0])?;
            ensure!(gap >= Duration::from_millis(1500), "IPv6 {v6}: announced after {gap:?}");
        }
    }
    Ok(())
}

/// A backend off the hub's link is reached by the most specific route that the hub's interface has for it; when that leads elsewhere,
/// connections go there.
#[test]
#[ignore = "needs root"]
fn off_link_backends_follow_the_routes_of_the_hub() -> Result<()> {
    let bench = Bench::new("routes")?;
    // Both stations have the address; who gets a connection says by whom it went.
    let mut servers = Vec::new();
    for node in &bench.nodes[..2] {
        node.ip("address add 10.20.0.1/32 dev eth0")?;
        servers.push(Peer::serve(&bench.lab, node, node.name(), &[Listener::plain("10.20.0.1", Bench::NODE_PORT)])?);
    }
    // There is no default gateway on the hub; the wider route leads to nobody.
    bench.lb.ip("route add 10.16.0.0/12 via 10.0.0.99 dev hub0")?;
    bench.lb.ip("route add 10.20.0.0/24 via 10.0.0.11 dev hub0")?;
    let configuration = Bench::configuration("").replacen("[10.0.0.11, 10.0.0.12, 10.0.0.13]", "[10.20.0.1]", 1);
    let agent = bench.agent(&configuration)?;
    let target = lab::socket(Bench::VIP, 6443);
    let served_by = |client: &Namespace| -> Result<Vec<String>> {
        let report = lab::load(client, &target, false, 20)?;
        ensure!(report.failed == 0, "{report:?}");
        Ok(report.servers.into_keys().collect())
    };
    let [first, second] = [bench.nodes[0].name(), bench.nodes[1].name()];
    for client in [&bench.near, &bench.far] {
        ensure!(served_by(client)? == [first], "not by the route: {:?}", served_by(client)?);
    }
    bench.lb.ip("route replace 10.20.0.0/24 via 10.0.0.12 dev hub0")?;
    wait_until(Duration::from_secs(5), "connections go by the new route", || {
        Ok(lab::load(&bench.near, &target, false, 5)?.servers.into_keys().eq([second]))
    })?;
    agent.kill();
    ensure!(served_by(&bench.far)? == [second], "the datapath has forgotten the route");
    Ok(())
}

/// VIPs of a VLAN are announced with its tag.
#[test]
#[ignore = "needs root"]
fn b31_announcements_in_a_vlan_have_its_tag() -> Result<()> {
    let trunk = lab::Trunk::new("b31vlan")?;
    let _servers = trunk.serve()?;
    for client in &trunk.clients {
        for vip in [Bench::VIP, Bench::VIP6] {
            client.ip(&format!("neigh replace {vip} lladdr 02:00:00:00:99:99 dev eth0 nud stale"))?;
        }
    }
    let capture = Capture::start(
        &trunk.trunk,
        Keep::Matching(Box::new(|frame| {
            lab::arp(frame).is_some_and(|arp| arp.sender.to_string() == Bench::VIP)
                || lab::packet(frame).is_some_and(|packet| packet.source.to_string() == Bench::VIP6)
        })),
    )?;
    let agent = Agent::new(&trunk.lab, &trunk.lb, &lab::Trunk::configuration(""))?;
    agent.start(&trunk.lab)?;
    for client in &trunk.clients {
        for vip in [Bench::VIP, Bench::VIP6] {
            learnt(client, "eth0", vip, lab::Trunk::MAC, Duration::from_secs(4))?;
        }
    }
    let kept = capture.finish()?.kept;
    let mut tags = std::collections::BTreeSet::new();
    for frame in &kept {
        let v6 = lab::arp(&frame.bytes).is_none();
        tags.insert((
            v6,
            lab::arp(&frame.bytes).map_or_else(|| lab::packet(&frame.bytes).and_then(|it| it.vlan), |arp| arp.vlan),
        ));
    }
    let wanted = [(false, Some(2003)), (false, Some(2004)), (true, Some(2003)), (true, Some(2004))];
    ensure!(tags == wanted.into(), "announced with {tags:?}");
    Ok(())
}
