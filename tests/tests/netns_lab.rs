//! The lab itself: what the other suites stand on.
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, ensure};
use lbd_tests::lab::{
    self, Bench, Hold, Keep, Lab, Listener, Nic, Peer, Seed, Ticker, XdpMode, XdpProgram, XdpVerdict,
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
    let capture = lab::Capture::start(&bench.nodes[1], Keep::Bad)?;
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
