//! The lab itself: what the other suites stand on.
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use lbd_tests::lab::{
    self, Bench, Capture, Datagrams, Hold, Keep, Lab, Listener, Nic, Peer, Seed, Ticker, Trunk, Watch, XdpMode,
    XdpProgram, XdpVerdict,
};

/// Packets pass, are seen, and have right checksums; servers and clients report what happens.
#[test]
#[ignore = "needs root"]
fn the_seed_network_carries_traffic_with_right_checksums() -> Result<()> {
    let seed = Seed::new("self")?;
    let captures = seed.lab.capture()?;
    let workers = seed.serve_workers()?;
    let _nodes = seed.serve_nodes()?;

    let report = lab::load(&seed.client, "192.168.203.101:30282", false, 200)?;
    ensure!(report.failed == 0 && report.servers.get("w1") == Some(&200), "{report:?}");
    let far = lab::get(&seed.far, "192.168.203.102:30190", true)?;
    ensure!(far.name == "w2" && far.peer.starts_with("172.20.0.9:"), "{far:?}");
    let moved = lab::transfer(&seed.client, "192.168.203.101:30282", false, 8 << 20)?;
    ensure!(moved.down_equal && moved.up_equal, "{moved:?}");
    ensure!(lab::get(&seed.lb, "10.32.96.107:32460", false)?.name == "n7", "the hub is not reached");
    ensure!(lab::get(&seed.client, "10.32.96.107:32460", false).is_err(), "the tenant reaches the hub without lbd");

    let ticker = Ticker::start(&seed.lab, &seed.client, "192.168.203.101:30282", false, 10)?;
    let hold = Hold::start(&seed.lab, &seed.client, "192.168.203.101:30282", false, 20, 10)?;
    std::thread::sleep(Duration::from_millis(500));
    workers[0].refuse();
    std::thread::sleep(Duration::from_millis(300));
    let report = hold.finish()?;
    report.assert_whole()?;
    ensure!(report.requests > 20, "{report:?}");
    let ticks = ticker.finish()?;
    ensure!(ticks.iter().any(|tick| tick.server.as_deref() == Some("w1")), "{ticks:?}");
    ensure!(ticks.last().is_some_and(|tick| tick.error.as_deref() == Some("connection refused")), "{ticks:?}");

    for namespace in seed.lab.namespaces().iter().filter(|namespace| namespace.name() != "router") {
        Lab::assert_no_forwarding(namespace)?;
    }
    for capture in captures {
        let summary = capture.finish()?;
        summary.assert_good()?;
        ensure!(summary.missed == 0, "{summary:?}");
    }
    Ok(())
}

/// A sender that leaves checksums to a card that there is not is caught by the captures.
#[test]
#[ignore = "needs root"]
fn the_captures_catch_checksums_that_nobody_computed() -> Result<()> {
    let bench = Bench::new("bad")?;
    let _servers = bench.serve_nodes(&[Bench::NODE_PORT])?;
    let capture = Capture::start(&bench.nodes[1], Keep::Bad)?;
    bench.nodes[1].shell("ethtool -K eth0 tx on >/dev/null")?;
    let _ = lab::get(&bench.lb, "10.0.0.12:30918", false);
    let summary = capture.finish()?;
    ensure!(summary.bad > 0 && summary.assert_good().is_err(), "{summary:?}");
    Ok(())
}

/// Native XDP redirect works towards every station, and a foreign program can be put in lbd's way.
#[test]
#[ignore = "needs root"]
fn programs_attach_by_link_and_by_netlink() -> Result<()> {
    let lab = Lab::new("attach")?;
    let (a, b) = (lab.namespace("a")?, lab.namespace("b")?);
    lab.cable((&a, "eth0", &Nic::new("192.0.2.1/24")), (&b, "eth0", &Nic::new("192.0.2.2/24")))?;
    let _server = Peer::serve(&lab, &b, "b", &[Listener::plain("192.0.2.2", 80)])?;
    let program = XdpProgram::load("xdp_fw", XdpVerdict::Drop)?;
    let link = program.attach(&a, "eth0", XdpMode::Native)?;
    let binary = lab::binary("lbd-test-peer")?;
    let answered =
        || Ok(a.command(&binary).args(["get", "--target", "192.0.2.2:80", "--limit", "1"]).output()?.status.success());
    ensure!(!answered()?, "a dropping program does not drop");
    drop(link);
    lab::wait_until(Duration::from_secs(5), "the program is gone", answered)?;
    program.pin(&a, "/sys/fs/bpf/xdp_fw")?;
    a.ip("link set dev eth0 xdpgeneric pinned /sys/fs/bpf/xdp_fw")?;
    let links = a.ip_json("-d link show dev eth0")?;
    ensure!(links.to_string().contains("xdp_fw") || links.to_string().contains("\"xdp\""), "{links}");
    ensure!(!Path::new("/sys/fs/bpf/xdp_fw").exists(), "the pin is seen outside the lab");
    ensure!(a.outside("/sys/fs/bpf/xdp_fw").exists(), "the pin is not seen through the holder");
    Ok(())
}

/// Both families, routed and on the link; TCP, UDP and lines that a server sends unasked.
#[test]
#[ignore = "needs root"]
fn the_dual_bench_carries_tcp_and_udp_of_both_families() -> Result<()> {
    let bench = Bench::dual("dual")?;
    let captures = bench.lab.capture()?;
    let _servers = bench.serve_dual()?;
    // Beside the tenant, so that routed clients have somewhere to go.
    let own = ["192.0.2.60", "2001:db8:a::60"];
    let listeners: Vec<_> =
        own.iter().flat_map(|address| [Listener::plain(address, 80), Listener::udp(address, 53)]).collect();
    let _near = Peer::serve(&bench.lab, &bench.near, "near", &listeners)?;
    for (v6, client) in [(false, "203.0.113.9"), (true, "2001:db8:c::9")] {
        let near = own[usize::from(v6)];
        let answer = lab::get(&bench.far, &lab::socket(near, 80), false)?;
        ensure!(answer.name == "near" && answer.peer.contains(client), "{answer:?}");
        let target = lab::socket(near, 53);
        let report = lab::datagrams(&bench.far, &target, 500, &["--sockets", "4"])?;
        report.assert_whole()?;
        ensure!(report.servers.get("near") == Some(&500) && report.peers.get(client) == Some(&500), "{report:?}");
        let report = lab::datagrams(&bench.far, &lab::socket(near, 54), 10, &["--sockets", "2"])?;
        ensure!(report.refused == 2 && report.refused_ms < 1_000, "{report:?}");
        let node = lab::socket(&Bench::node_address(1, v6), Bench::NODE_PORT);
        ensure!(lab::get(&bench.lb, &node, false)?.name == "n2", "the hub is not reached");
        ensure!(
            lab::ping(&bench.far, near)? && !lab::ping(&bench.near, if v6 { "2001:db8:a::99" } else { "192.0.2.99" })?
        );
        ensure!(lab::get_with(&bench.near, &node, false, &["--limit", "1"]).is_err(), "the tenant reaches the hub");
        let watch = Watch::start(&bench.lab, &bench.far, &lab::socket(near, 80), 3, 20)?;
        let steady = Datagrams::start(&bench.lab, &bench.far, &target, 2, 20)?;
        std::thread::sleep(Duration::from_millis(500));
        let lines = watch.finish()?;
        ensure!(lines.len() > 30 && lines.iter().any(|line| line.connection == 2), "{} lines", lines.len());
        steady.finish()?.assert_whole()?;
    }
    for namespace in bench.lab.namespaces().iter().filter(|namespace| namespace.name() != "router") {
        Lab::assert_no_forwarding(namespace)?;
    }
    ensure!(Lab::assert_no_forwarding(&bench.router).is_err(), "a router that forwards is not seen");
    for capture in captures {
        let summary = capture.finish()?;
        if summary.namespace != "api" {
            ensure!(summary.bad == 0 && summary.missed == 0, "{:?}", summary.assert_good());
        }
    }
    Ok(())
}

/// A round is run again if the lab itself lost what is missing, and fails at once if somebody else did, who loses without counting.
#[test]
#[ignore = "needs root"]
fn only_what_the_lab_lost_itself_is_excused() -> Result<()> {
    let bench = Bench::new("excuse")?;
    let _near = Peer::serve(&bench.lab, &bench.near, "near", &[Listener::udp("192.0.2.60", 53)])?;
    let round = || lab::datagrams(&bench.far, "192.0.2.60:53", 32, &["--limit", "1"]);
    // A queue that holds no frame of the larger ones.
    bench.far.shell("tc qdisc replace dev eth0 root bfifo limit 600")?;
    let before = bench.lab.losses()?;
    let mut missing = Vec::new();
    bench.lab.all_come_back(|| {
        let report = round()?;
        missing.push(report.sent - report.received);
        bench.far.shell("tc qdisc change dev eth0 root bfifo limit 1000000")?;
        Ok(report)
    })?;
    ensure!(missing.len() == 2 && missing[0] > 5 && missing[1] == 0, "missing in each round: {missing:?}");
    let after = bench.lab.losses()?;
    ensure!(after.len() > before.len(), "before {before:?}, after {after:?}");
    // The server's interface eats what comes.
    let mut rounds = 0;
    let failed = bench.lab.all_come_back(|| {
        rounds += 1;
        let _link = XdpProgram::load("lab_drop", XdpVerdict::Drop)?.attach(&bench.near, "eth0", XdpMode::Native)?;
        round()
    });
    ensure!(failed.is_err() && rounds == 1, "{rounds} rounds: {failed:?}");
    bench.lab.all_come_back(round)
}

/// Datagrams without a checksum are sent as such.
#[test]
#[ignore = "needs root"]
fn datagrams_can_go_without_checksum() -> Result<()> {
    let bench = Bench::dual("zero")?;
    let _near = Peer::serve(&bench.lab, &bench.near, "near", &[Listener::udp("192.0.2.60", 53)])?;
    let zero = |frame: &[u8]| {
        lab::packet(frame).is_some_and(|packet| packet.to().port() == 53 && packet.payload[6..8] == [0, 0])
    };
    let capture = Capture::start(&bench.near, Keep::Matching(Box::new(zero)))?;
    lab::datagrams(&bench.far, "192.0.2.60:53", 50, &["--zero-checksum"])?.assert_whole()?;
    lab::datagrams(&bench.far, "192.0.2.60:53", 50, &[])?.assert_whole()?;
    let summary = capture.finish()?;
    ensure!(summary.kept.len() == 50 && summary.bad == 0, "{} without a checksum", summary.kept.len());
    Ok(())
}

/// Stations in VLANs of a trunk talk to nobody but their own, and the tags are on the wire.
#[test]
#[ignore = "needs root"]
fn taggers_keep_vlans_apart() -> Result<()> {
    let trunk = Trunk::new("trunk")?;
    let capture = Capture::start(
        &trunk.lb,
        Keep::Matching(Box::new(|frame| lab::arp(frame).is_some_and(|arp| arp.target.octets() == [192, 0, 2, 34]))),
    )?;
    for client in &trunk.clients {
        // Nobody answers, but everybody hears the question.
        let _ = lab::get_with(client, "192.0.2.34:80", false, &["--limit", "1"]);
    }
    let tags: std::collections::BTreeSet<_> =
        capture.finish()?.kept.iter().filter_map(|frame| lab::arp(&frame.bytes)?.vlan).collect();
    ensure!(tags == Trunk::VLANS.into(), "questions with tags {tags:?}");
    // From VLAN to VLAN by a second pair of taggers: two tenants with each other's addresses.
    let servers = [("a", 0), ("b", 1)]
        .map(|(name, place)| Peer::serve(&trunk.lab, &trunk.routers[place], name, &[Listener::plain("192.0.2.1", 80)]));
    for (place, server) in servers.into_iter().enumerate() {
        let _server = server?;
        let report = lab::load(&trunk.clients[place], "192.0.2.1:80", false, 20)?;
        ensure!(report.failed == 0 && report.servers.len() == 1, "{report:?}");
        ensure!(report.servers.contains_key(["a", "b"][place]), "{report:?}");
    }
    // Through both taggers: what b's tagger takes off has b's tag.
    let extra = trunk.lab.switch("access-c")?;
    let station = trunk.lab.namespace("client-c")?;
    trunk.lab.plug(&extra, &station, "eth0", &Nic::new("192.0.2.70/24"))?;
    let second = trunk.lab.namespace("second")?;
    trunk.lab.plug(&extra, &second, "access", &Nic::default())?;
    trunk.lab.plug(&trunk.trunk, &second, "trunk", &Nic::default())?;
    let mut command = std::process::Command::new(lab::binary("lbd-test-peer")?);
    command.args(["tagger", "--access", "access", "--trunk", "trunk", "--vlan", "2004"]);
    let tagger = trunk.lab.start(&second, "tagger-c", command)?;
    tagger.wait_for("joined", Duration::from_secs(5))?;
    let bytes = 4 << 20;
    let _server = Peer::serve(&trunk.lab, &trunk.clients[1], "b", &[Listener::plain("192.0.2.60", 80)])?;
    let moved = lab::transfer(&station, "192.0.2.60:80", false, bytes)?;
    ensure!(moved.down_equal && moved.up_equal, "{moved:?}");
    Ok(())
}

/// What a lab leaves when it goes: nothing.
#[test]
#[ignore = "needs root"]
fn a_lab_leaves_nothing_behind() -> Result<()> {
    let (directory, holder) = {
        let lab = Lab::new("gone")?;
        let namespace = lab.namespace("a")?;
        (lab.directory().to_owned(), namespace.pid())
    };
    ensure!(!directory.exists(), "{} is still there", directory.display());
    ensure!(!Path::new(&format!("/proc/{holder}")).exists(), "the holder {holder} still runs");
    Ok(())
}
